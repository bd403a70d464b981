"""Pyro's SVI beside messages, at equal processor seconds and at ten times as many.

    python -m benchmarks.topics_pyro [seeds]

The corpus, the priors, the held-out documents and the score are those of benchmarks/topics.py, and so is the start of
the topics.  The models are those of a user of Pyro with the topics of the words summed out: Dirichlet guides of the
topics, and of the shares either with numbers of their own for each document or by a network of the words (two layers
of 100, as in Pyro's example lda.py); documents in batches of 200; TraceMeanField_ELBO, whose KL divergences of
Dirichlet and gamma laws are in closed form; Adam and ClippedAdam at several learning rates.  All rates are run from the
first start; from the others those that had the best held-out score there, at either number of seconds.

The counts are those of examples/count_factors.py, of which a tenth of the cells is held out: the log score a cell at
the mean rate, guides of independent gamma laws.  Seconds are of steps alone, on one thread; Pyro works in float32.
"""

import sys
import time

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.constraints import positive
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.optim import Adam, ClippedAdam
from torch import Tensor

from benchmarks.topics import COUNTS, TOPICS, K, V
from torchngvi import fit
from torchngvi.models import ExpectedFactor, FactorGraph
from torchngvi.posteriors.flat import Dirichlet

BATCH, HIDDEN, TIMES = 200, 100, (1, 10)
RATES, NETWORK_RATES = (0.01, 0.03, 0.1), (0.003, 0.01, 0.03)


def optimizers(rates) -> dict:
    """Adam at three rates, and at the largest with gradients clipped and a rate that falls by 0.1 % a step."""
    adam = {f"Adam {rate}": lambda rate=rate: Adam({"lr": rate}) for rate in rates}
    return {**adam, f"ClippedAdam {rates[-1]}": lambda: ClippedAdam({"lr": rates[-1], "lrd": 0.999})}


def topics_at_random(seed: int) -> Tensor:
    """The start of benchmarks/topics.py."""
    generator = torch.Generator().manual_seed(seed)
    return torch._standard_gamma(torch.full((K, V), 100.0).double(), generator=generator) / 100


def lda(counts: Tensor, seed: int, by_network: bool):
    """Model and guide of the documents, and a function that gives the Dirichlet numbers of the topics."""
    number, length = len(counts), int(counts[0].sum())

    def model():
        with pyro.plate("each topic", K):
            topics = pyro.sample("topics", dist.Dirichlet(torch.full((V,), TOPICS["VOCABULARY"])))
        with pyro.plate("documents", number, BATCH) as index:
            shares = pyro.sample("shares", dist.Dirichlet(torch.full((K,), TOPICS["SHARES"])))
            pyro.sample("words", dist.Multinomial(length, shares @ topics), obs=counts[index])

    network = torch.nn.Sequential(
        torch.nn.Linear(V, HIDDEN),
        torch.nn.Sigmoid(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.Sigmoid(),
        torch.nn.Linear(HIDDEN, K),
    )
    start = topics_at_random(seed).float()

    def guide():
        weights = pyro.param("topics of q", start, constraint=positive)
        with pyro.plate("each topic", K):
            pyro.sample("topics", dist.Dirichlet(weights))
        if by_network:
            pyro.module("network", network)
        else:
            own = pyro.param("shares of q", torch.ones(number, K), constraint=positive)
        with pyro.plate("documents", number, BATCH) as index:
            pyro.sample("shares", dist.Dirichlet(network(counts[index]).exp() if by_network else own[index]))

    return model, guide, lambda: pyro.param("topics of q").detach().double()


def factors(y: Tensor, seen: Tensor, start):
    """Model and guide of the counts, and a function that gives the mean rates."""
    a, b = COUNTS["PRIOR"].vector.float().tolist()
    shapes = {name: tuple(start[name].batch_shape) for name in ("theta", "beta")}

    def model():
        each = {name: pyro.sample(name, dist.Gamma(a, b).expand(shape).to_event(2)) for name, shape in shapes.items()}
        pyro.sample("y", dist.Poisson(each["theta"] @ each["beta"].mT).mask(seen).to_event(2), obs=y)

    def numbers(name):
        return pyro.param(name + " of q", start[name].vector.float(), constraint=positive)

    def guide():
        for name in shapes:
            both = numbers(name)
            pyro.sample(name, dist.Gamma(both[..., 0], both[..., 1]).to_event(2))

    def rates():
        theta, beta = ((both := numbers(name).detach().double())[..., 0] / both[..., 1] for name in shapes)
        return theta @ beta.mT

    return model, guide, rates


def scores(parts, optimizer, seconds: float, score, seed: int) -> list:
    """(score, steps) after as many seconds of steps, and after ten times as many."""
    model, guide, found = parts
    SVI(model, guide, Adam({"lr": 0.0}), TraceMeanField_ELBO()).step()  # what a first step sets up is not counted
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    spent, steps, rows = 0.0, 0, []
    for times in TIMES:
        while spent < times * seconds:
            begun = time.process_time()
            svi.step()
            spent, steps = spent + time.process_time() - begun, steps + 1
        rows.append((score(found()), steps))
    return rows


def line(name: str, rows: list) -> None:
    print(f"{name:>44}", *(f"{score:9.3f} ({steps:5d})" for score, steps in rows), flush=True)


def raced(name: str, make, seconds: list, score, rates=RATES) -> None:
    """All optimizers from the first start; from the others the best at either number of seconds."""
    all_of, first = optimizers(rates), {}
    for key, optimizer in all_of.items():
        first[key] = scores(make(0), optimizer(), seconds[0], score, 0)
        line(f"0: {name}, {key}", first[key])
    best = {max(first, key=lambda key, k=k: first[key][k][0]) for k in range(len(TIMES))}
    for seed in range(1, len(seconds)):
        for key in sorted(best):
            line(f"{seed}: {name}, {key}", scores(make(seed), all_of[key](), seconds[seed], score, seed))


def topics_of_documents(seeds: int, passes: int = 5) -> None:
    counts, truth = TOPICS["corpus"](2200)
    train, test = counts[:-200], counts[-200:]

    def score(weights):
        q = Dirichlet(weights)
        return TOPICS["held_out"](q.expectation(), q.mean, test)

    print(f"held-out log score a word; of the true topics {TOPICS['held_out'](truth.log(), truth, test):.3f}")
    seconds = []
    for seed in range(seeds):
        begun = time.process_time()
        q, _ = TOPICS["fitted"](train, passes, seed)
        seconds.append(time.process_time() - begun)
        print(f"{seed}: batches, {passes} passes {score(q['topics'].vector):9.3f}, {seconds[-1]:.1f} seconds")
    print(f"{'':>44} {'equal time (steps)':>18} {'ten times':>17}")
    for name, by_network, rates in (("numbers a document", False, RATES), ("network", True, NETWORK_RATES)):
        raced(name, lambda seed, by=by_network: lda(train.float(), seed, by), seconds, score, rates)


def seen_counts(y: Tensor, seen: Tensor) -> ExpectedFactor:
    """The bound of examples/count_factors.py on the cells that are seen."""

    def bound(theta, beta):
        rates = theta[..., 0].exp() @ beta[..., 0].exp().mT
        means = theta[..., 1] @ beta[..., 1].mT
        return (seen * (torch.xlogy(y, rates + 1e-100) - means - torch.lgamma(y + 1))).sum()

    return ExpectedFactor(bound, "theta", "beta")


def count_factors(seeds: int) -> None:
    y = COUNTS["table"](500, 100)
    seen = torch.rand(y.shape, generator=torch.Generator().manual_seed(3)) > 0.1
    held, seconds = ~seen, []

    def score(rates):
        return float(torch.distributions.Poisson(rates[held]).log_prob(y[held]).mean())

    print("held-out log score a cell")
    for seed in range(seeds):
        q = COUNTS["start"](*y.shape, seed=seed)
        priors = [ExpectedFactor.prior(COUNTS["PRIOR"], name) for name in ("theta", "beta")]
        begun = time.process_time()
        result = fit(q, FactorGraph([seen_counts(y, seen), *priors], memory=2), max_evaluations=60, progress=False)
        seconds.append(time.process_time() - begun)
        found = score(q["theta"].mean[..., 0] @ q["beta"].mean[..., 0].mT)
        print(f"{seed}: memory 2, {len(result.trace) - 1} sweeps {found:9.3f}, {seconds[-1]:.1f} seconds")
    raced(
        "gamma guides",
        lambda seed: factors(y.float(), seen, COUNTS["start"](*y.shape, seed=seed)),
        seconds,
        score,
    )


def main() -> None:
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    count_factors(seeds)
    topics_of_documents(seeds)


if __name__ == "__main__":
    main()
