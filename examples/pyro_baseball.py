"""Batting averages in Pyro: three ways to pool, compared on the rest of the season.

    python examples/pyro_baseball.py [--draws 2000] [--out pyro_baseball.png]

Pyro's baseball example on the data of Efron and Morris (1975): the hits of 18 players in their first 45 times at bat
in 1970, from which those of the rest of the season are predicted.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer import Predictive

from torchngvi.adapters.pyro import AutoGaussian, fit_guide

FIRST = torch.full((18,), 45.0)
HITS = torch.tensor([18.0, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
REST = torch.tensor([367.0, 426, 521, 275, 418, 466, 586, 138, 510, 200, 277, 270, 435, 538, 186, 558, 408, 70])
AVERAGE = torch.tensor(
    [0.346, 0.298, 0.276, 0.222, 0.273, 0.270, 0.263, 0.210, 0.269]
    + [0.230, 0.264, 0.256, 0.303, 0.264, 0.226, 0.285, 0.316, 0.200]
)  # in the rest


def fully_pooled(at_bats, hits=None):
    rate = pyro.sample("rate", dist.Uniform(0.0, 1.0))
    with pyro.plate("players", len(at_bats)):
        return pyro.sample("hits", dist.Binomial(at_bats, rate), obs=hits)


def not_pooled(at_bats, hits=None):
    with pyro.plate("players", len(at_bats)):
        rate = pyro.sample("rate", dist.Uniform(0.0, 1.0))
        return pyro.sample("hits", dist.Binomial(at_bats, rate), obs=hits)


def partially_pooled(at_bats, hits=None):
    centre = pyro.sample("centre", dist.Normal(-1.0, 1.0))
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    with pyro.plate("players", len(at_bats)):
        logit = pyro.sample("logit", dist.Normal(0.0, 1.0))
        return pyro.sample("hits", dist.Binomial(at_bats, logits=centre + spread * logit), obs=hits)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", default="pyro_baseball.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    figure, errors = Figure(figsize=(9, 4), layout="constrained"), {}
    panels = figure.subplots(1, 3, sharey=True)
    for axes, model in zip(panels, (fully_pooled, not_pooled, partially_pooled), strict=True):
        guide = AutoGaussian(model)
        result = fit_guide(model, guide, FIRST, HITS, options={"progress": False})
        hits = Predictive(model, guide=guide, num_samples=options.draws, parallel=True, return_sites=("hits",))(REST)
        average = hits["hits"] / REST
        middle, reach = average.mean(0), 1.645 * average.std(0)
        error = errors[model.__name__] = (middle - AVERAGE).square().mean().sqrt().item()
        inside = ((middle - AVERAGE).abs() < reach).double().mean().item()
        print(f"{model.__name__}: {result}")
        print(f"  root mean square error {error:.3f}, {inside:.0%} of the players in their 90 % interval")
        axes.errorbar(range(18), middle, yerr=reach, fmt="o", capsize=2, label="predicted")
        axes.plot(range(18), AVERAGE, "kx", label="rest of the season")
        axes.set_title(f"{model.__name__.replace('_', ' ')}, error {error:.3f}")
        axes.set_xlabel("player")
    panels[0].set_ylabel("batting average")
    panels[0].legend()
    figure.savefig(options.out, dpi=120)
    return errors


if __name__ == "__main__":
    main()
