"""Survival of birds in Pyro: whether a bird is alive is discrete and summed out, the rates get a Gaussian.

    python examples/pyro_dippers.py [--out pyro_dippers.png]

Pyro's capture-recapture example (the models of Cormack, Jolly and Seber) on the European dippers of Lebreton et al.
(1992): 294 birds, seven yearly visits.  A bird that was ringed survives a year with probability φ, and is seen with
probability ρ if it is alive; the published estimates are 0.56 and 0.90.  A second model has a φ for each year.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro import poutine

from torchngvi.adapters.pyro import AutoGaussian, fit_guide

SEEN = """1111110 1  1111100 1  1111000 2  1101110 1  1100000 6  1010000 2  1000000 9  0111111 2  0111110 1  0111100 3
0111000 2  0110110 1  0110000 11  0100000 29  0011111 2  0011110 2  0011100 6  0011000 12  0010110 1  0010000 29
0001111 8  0001110 7  0001100 11  0001011 1  0001001 2  0001000 16  0000111 16  0000110 9  0000100 16  0000011 23
0000010 23  0000001 39"""


def histories():
    """One row a bird."""
    words = SEEN.split()
    rows = [[list(map(float, row))] * int(count) for row, count in zip(words[::2], words[1::2], strict=True)]
    return torch.tensor(sum(rows, []))


def model(seen, yearly=False):
    recapture = pyro.sample("recapture", dist.Uniform(0.0, 1.0))
    survival = None if yearly else pyro.sample("survival", dist.Uniform(0.0, 1.0))
    birds = pyro.plate("birds", len(seen), dim=-1)
    alive, ringed = torch.ones(len(seen)), torch.zeros(len(seen), dtype=torch.bool)
    for year in pyro.markov(range(seen.shape[1])):
        if yearly and year > 0:
            survival = pyro.sample(f"survival_{year}", dist.Uniform(0.0, 1.0))
        with birds:
            chance = torch.where(ringed, alive * survival, 1.0) if year > 0 else alive
            alive = pyro.sample(f"alive_{year}", dist.Bernoulli(chance), infer={"enumerate": "parallel"})
            with poutine.mask(mask=ringed):
                pyro.sample(f"seen_{year}", dist.Bernoulli(recapture * alive), obs=seen[:, year])
        ringed = ringed | (seen[:, year] > 0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="pyro_dippers.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    seen, guides, results = histories(), {}, {}
    for yearly in (False, True):
        guides[yearly] = AutoGaussian(model)
        results[yearly] = fit_guide(model, guides[yearly], seen, yearly, options={"progress": False})
        print(f"{'a rate for each year' if yearly else 'one rate of survival'}: {results[yearly]}")

    one = guides[False].median()
    print(f"survival {one['survival']:.2f}, recapture {one['recapture']:.2f}")
    print(f"evidence for one rate: {results[True].loss - results[False].loss:.1f} nats")

    years = range(1, seen.shape[1])
    low, middle, high = (
        torch.stack(part)
        for part in zip(
            *(guides[True].quantiles([0.05, 0.5, 0.95])[f"survival_{year}"].unbind() for year in years), strict=True
        )
    )
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(years, middle, yerr=torch.stack([middle - low, high - middle]), fmt="o", capsize=3, label="each year")
    band = guides[False].quantiles([0.05, 0.95])["survival"]
    axes.axhspan(*band.tolist(), color="0.9")
    axes.axhline(one["survival"].item(), color="0.5", label="one rate")
    axes.set_xlabel("year")
    axes.set_ylabel("probability to survive it, 90 % interval")
    axes.set_ylim(0, 1)
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return results, one


if __name__ == "__main__":
    main()
