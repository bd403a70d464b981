"""Factors of a table of counts (Gamma-Poisson factorisation), fitted by coordinate ascent and by accelerated steps.

    python examples/count_factors.py [--rows 500] [--columns 100] [--sweeps 300] [--out count_factors.png]

y_ij ~ Poisson(Σ_k θ_ik β_jk).  The counts that come from each k are summed out.  Data: synthetic, of five factors.
"""

import argparse

import torch
from matplotlib.figure import Figure

from torchngvi import fit
from torchngvi.models import ExpectedFactor, FactorGraph
from torchngvi.posteriors import Product
from torchngvi.posteriors.flat import Gamma

FACTORS = 5
PRIOR = Gamma(torch.tensor([0.5, 1.0]).double())


def gammas(a, shape, generator):
    return torch._standard_gamma(torch.full(shape, a).double(), generator=generator)


def table(rows, columns, seed=0):
    """Counts (rows, columns)."""
    generator = torch.Generator().manual_seed(seed)
    rates = gammas(0.5, (rows, FACTORS), generator) @ gammas(0.5, (FACTORS, columns), generator)
    return torch.poisson(rates, generator=generator)


def counts_of(y):
    """The bound Σ y log Σ_k exp(E log θ_k + E log β_k) - Σ_k E θ_k E β_k - log y!, with ω = (E log x, -E x)."""

    def bound(theta, beta):
        rates = theta[..., 0].exp() @ beta[..., 0].exp().mT
        means = theta[..., 1].sum(0) @ beta[..., 1].sum(0)
        return torch.xlogy(y, rates + 1e-100).sum() - means - torch.lgamma(y + 1).sum()

    return ExpectedFactor(bound, "theta", "beta")


def start(rows, columns, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def near_one(number):
        return Gamma(torch.stack([0.5 + gammas(2.0, (number, FACTORS), generator), torch.ones(number, FACTORS)], -1))

    return Product(theta=near_one(rows), beta=near_one(columns))


def fitted(y, sweeps, memory=0):
    """The product and its result, by coordinate ascent or, with a memory, accelerated."""
    q = start(*y.shape)
    factors = [counts_of(y), ExpectedFactor.prior(PRIOR, "theta"), ExpectedFactor.prior(PRIOR, "beta")]
    graph = FactorGraph(factors, memory=memory)
    return q, fit(q, graph, max_evaluations=sweeps, tolerance=1e-3, progress=False)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 500), ("columns", 100), ("sweeps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", default="count_factors.png")
    options = parser.parse_args(arguments)

    y = table(options.rows, options.columns)
    results = {name: fitted(y, options.sweeps, memory)[1] for name, memory in (("CAVI", 0), ("accelerated", 2))}
    best = min(result.loss for result in results.values())
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.add_subplot(xlabel="sweeps", ylabel="nats above the best bound", yscale="log")
    for name, result in results.items():
        print(f"{name}: {result}")
        axes.plot([record.loss - best + 1e-6 for record in result.trace], label=name)
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return results


if __name__ == "__main__":
    main()
