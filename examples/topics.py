"""Topics of documents (latent Dirichlet allocation), with the documents in batches.

    python examples/topics.py [--documents 2000] [--passes 20] [--starts 2] [--out topics.png]

The topic of each word is summed out.  The shares of a batch of documents are solved afresh at each step, and the topics
follow with (10 + t)^-0.7.  Data: synthetic, of known topics.
"""

import argparse

import torch
from matplotlib.figure import Figure

from torchngvi import fit
from torchngvi.models import ExpectedFactor, FactorGraph
from torchngvi.posteriors import Product
from torchngvi.posteriors.flat import Dirichlet

TOPICS, WORDS, LENGTH = 8, 400, 50
SHARES, VOCABULARY = 0.2, 0.05  # concentrations of the priors


def corpus(documents, seed=0):
    """Counts (documents, words), and the topics that made them."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch._standard_gamma(torch.full((TOPICS, WORDS), VOCABULARY).double(), generator=generator)
    shares = torch._standard_gamma(torch.full((documents, TOPICS), SHARES).double(), generator=generator)
    topics = weights / weights.sum(-1, keepdim=True)
    words = torch.multinomial(shares @ topics, LENGTH, True, generator=generator)
    return torch.zeros(documents, WORDS).double().scatter_add_(1, words, torch.ones(words.shape).double()), topics


def words_of(counts, scale=1.0, topics=None):
    """The bound Σ x log Σ_k exp(E log share_k + E log word_k), also at topics that are known."""

    def bound(shares, topics=topics):
        return torch.xlogy(counts, shares.exp() @ topics.exp() + 1e-100).sum()

    sites = ("shares", "topics") if topics is None else ("shares",)
    return ExpectedFactor(bound, *sites, scale=scale)


def prior(site, concentration, classes, scale=1.0):
    return ExpectedFactor.prior(Dirichlet(torch.full((classes,), concentration).double()), site, scale)


def fitted(counts, passes, seed, size=200):
    """Stochastic variational inference from topics at random, all documents alike."""
    batches = counts.split(size)
    scale = len(counts) / size
    priors = [prior("shares", SHARES, TOPICS, scale), prior("topics", VOCABULARY, WORDS)]
    generator = torch.Generator().manual_seed(seed)
    topics = torch._standard_gamma(torch.full((TOPICS, WORDS), 100.0).double(), generator=generator) / 100
    q = Product(shares=Dirichlet(torch.ones(size, TOPICS).double()), topics=Dirichlet(topics))
    graph = FactorGraph(lambda batch: [words_of(batch, scale), *priors], local=["shares"], batches=batches)
    return q, fit(q, graph, max_evaluations=passes * len(batches), progress=False)


def held_out(topics, mean, counts, seed=0):
    """Log score a word of one half of each document, given the other half; topics are E log, and their mean."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.binomial(counts, torch.full_like(counts, 0.5), generator=generator)
    q = Product(shares=Dirichlet(torch.ones(len(counts), TOPICS).double()))
    graph = FactorGraph([words_of(half, topics=topics), prior("shares", SHARES, TOPICS)])
    fit(q, graph, tolerance=0.1, progress=False)
    return float(torch.xlogy(counts - half, q["shares"].mean @ mean).sum() / (counts - half).sum())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("documents", 2000), ("passes", 20), ("starts", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", default="topics.png")
    options = parser.parse_args(arguments)

    counts, truth = corpus(options.documents + 200)
    runs = [fitted(counts[:-200], options.passes, seed) for seed in range(options.starts)]
    q, result = min(runs, key=lambda run: run[1].loss)
    print(result)
    score = held_out(q["topics"].expectation(), q["topics"].mean, counts[-200:])
    print(f"held-out log score a word {score:.3f}")
    overlap = torch.minimum(truth[:, None], q["topics"].mean).sum(-1)  # true by found
    overlap = overlap[:, overlap.argmax(1)]
    print("overlap with the true topics", [round(x, 2) for x in overlap.diagonal().tolist()])

    figure = Figure(figsize=(4, 3.4), layout="constrained")
    axes = figure.add_subplot(xlabel="the topic found", ylabel="true topic")
    figure.colorbar(axes.imshow(overlap.numpy(), vmin=0, vmax=1), label="overlap")
    figure.savefig(options.out, dpi=120)
    return score, overlap.diagonal()


if __name__ == "__main__":
    main()
