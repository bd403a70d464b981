"""Topics and count factors by messages, beside scikit-learn: python benchmarks/topics.py [seeds].

On the corpus of examples/topics.py (2,000 documents of 50 words out of 400, eight topics; 200 more are held out): the
log score a word of one half of each held-out document, given the other half, with the processor seconds of each fit,
from the same priors; scikit-learn at several numbers of passes, so that it can be read off at equal time.  The bound is
that of the training documents with the topics of the words summed out and the shares solved afresh.

For the counts of examples/count_factors.py the sweeps to within 10, 1, .1 and .001 nats of the limit.  One thread.
"""

import runpy
import sys
import time
from pathlib import Path

import torch
from sklearn.decomposition import LatentDirichletAllocation

from torchngvi import fit
from torchngvi.models import FactorGraph
from torchngvi.posteriors import Product
from torchngvi.posteriors.flat import Dirichlet

EXAMPLES = Path(__file__).parents[1] / "examples"
TOPICS = runpy.run_path(str(EXAMPLES / "topics.py"))
COUNTS = runpy.run_path(str(EXAMPLES / "count_factors.py"))
K, V = TOPICS["TOPICS"], TOPICS["WORDS"]


def priors():
    return [TOPICS["prior"]("shares", TOPICS["SHARES"], K), TOPICS["prior"]("topics", TOPICS["VOCABULARY"], V)]


def bound(topics: torch.Tensor, counts: torch.Tensor) -> float:
    """The bound of all documents at these topics, their shares solved."""
    q = Product(shares=Dirichlet(torch.ones(len(counts), K).double()), topics=Dirichlet(topics))
    graph = FactorGraph([TOPICS["words_of"](counts), *priors()], local=["shares"])
    return -fit(q, graph, max_evaluations=1, progress=False).trace[0].loss


def by_sweeps(counts: torch.Tensor, seed: int, afresh: bool, sweeps: int) -> torch.Tensor:
    """Coordinate ascent on all documents, whose shares are solved afresh at each sweep or move on by one step."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch._standard_gamma(torch.full((K, V), 100.0).double(), generator=generator) / 100
    q = Product(shares=Dirichlet(torch.ones(len(counts), K).double()), topics=Dirichlet(topics))
    graph = FactorGraph([TOPICS["words_of"](counts), *priors()], local=["shares"] if afresh else [])
    fit(q, graph, max_evaluations=sweeps, progress=False)
    return q["topics"].vector


def by_sklearn(counts: torch.Tensor, seed: int, method: str, passes: int) -> torch.Tensor:
    """The topics of scikit-learn, from the same priors."""
    lda = LatentDirichletAllocation(
        K,
        doc_topic_prior=TOPICS["SHARES"],
        topic_word_prior=TOPICS["VOCABULARY"],
        learning_method=method,
        max_iter=passes,
        batch_size=200,
        total_samples=len(counts),
        random_state=seed,
    )
    return torch.tensor(lda.fit(counts.numpy()).components_)


def methods(train: torch.Tensor, seed: int) -> dict:
    """Functions that give topics, by name."""
    passes = (5, 20)
    return {
        **{f"batches, {n} passes": lambda n=n: TOPICS["fitted"](train, n, seed)[0]["topics"].vector for n in passes},
        "CAVI 20, shares afresh": lambda: by_sweeps(train, seed, True, 20),
        "CAVI 40, shares kept": lambda: by_sweeps(train, seed, False, 40),
        **{f"scikit-learn batch {n}": lambda n=n: by_sklearn(train, seed, "batch", n) for n in (5, 20, 50)},
        **{f"scikit-learn online {n}": lambda n=n: by_sklearn(train, seed, "online", n) for n in passes},
    }


def report(name: str, make, train: torch.Tensor, test: torch.Tensor, truth: torch.Tensor) -> None:
    begun = time.process_time()
    topics = make()
    seconds = time.process_time() - begun
    q = Dirichlet(topics)
    score = TOPICS["held_out"](q.expectation(), q.mean, test)
    overlap = torch.minimum(truth[:, None], q.mean).sum(-1).amax(1)
    found = int((overlap > 0.75).sum())
    print(f"{name:>28} {score:9.3f} {bound(topics, train):11.0f} {found:6d} of {K} {seconds:8.1f}", flush=True)


def topics_of_documents(seeds: int) -> None:
    counts, truth = TOPICS["corpus"](2200)
    train, test = counts[:-200], counts[-200:]
    print(f"held-out log score of the true topics {TOPICS['held_out'](truth.log(), truth, test):.3f}")
    print(f"{'':>28} {'held out':>9} {'bound':>11} {'topics':>11} {'seconds':>8}")
    for seed in range(seeds):
        for name, make in methods(train, seed).items():
            report(f"{seed}: {name}", make, train, test, truth)


def count_factors() -> None:
    y = COUNTS["table"](500, 100)
    results = {memory: COUNTS["fitted"](y, sweeps, memory)[1] for memory, sweeps in ((0, 1000), (2, 400), (8, 400))}
    limit = min(result.loss for result in results.values())
    print(f"sweeps to 10, 1, .1, .001 nats of {limit:.4f}")
    for memory, result in results.items():
        losses = [record.loss - limit for record in result.trace]
        sweeps = [next((k for k, gap in enumerate(losses) if gap <= nats), None) for nats in (10, 1, 0.1, 0.001)]
        print(f"{'CAVI' if memory == 0 else f'memory {memory}':>12}", *sweeps)


def main() -> None:
    torch.set_num_threads(1)
    topics_of_documents(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    count_factors()


if __name__ == "__main__":
    main()
