"""Radon in Minnesota: a hierarchical regression with 85 counties, in Pyro, against a fit county by county.

    python examples/pyro_radon.py [--data data.json.gz] [--out pyro_radon.png]

The log radon of 919 houses (Gelman and Hill 2006): an effect of the floor, and an intercept for each county, drawn
around a line in the uranium of its soil.  --data is `data.json.gz` of posteriordb, or any JSON file with the lists
county_idx (from 1), floor_measure, log_radon and log_uppm under "radon_mn".  Without it the houses are simulated
from the same model with the same numbers of counties and houses, and the script says so.
"""

import argparse
import gzip
import json

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

from torchngvi.adapters.pyro import AutoGaussian, fit_guide, log_joint

COUNTIES, HOUSES = 85, 919


def model(county, floor, uranium, y=None):
    one = uranium.new_ones(())
    line = pyro.sample("line", dist.Normal(0 * uranium.new_ones(2), 2 * one).to_event(1))
    effect = pyro.sample("floor", dist.Normal(0 * one, 2 * one))
    between = pyro.sample("between", dist.HalfNormal(one))
    within = pyro.sample("within", dist.HalfNormal(2 * one))
    with pyro.plate("counties", len(uranium)):
        own = pyro.sample("own", dist.Normal(0 * one, one))  # in units of the scale between counties
    mean = line[..., :1] + line[..., 1:] * uranium + between * own
    with pyro.plate("houses", len(county)):
        return pyro.sample("y", dist.Normal(mean[..., county] + effect * floor, within), obs=y)


def read(path):
    """The houses of posteriordb, or simulated ones."""
    if path is None:
        print("no data given: the houses are simulated from the model")
        share = torch.distributions.Dirichlet(0.8 * torch.ones(COUNTIES)).sample()
        county = torch.cat([torch.arange(COUNTIES), torch.multinomial(share, HOUSES - COUNTIES, replacement=True)])
        floor, uranium = (torch.rand(HOUSES) < 0.17).double(), 0.4 * torch.randn(COUNTIES).double()
        values = {"line": [1.5, 0.7], "floor": -0.65, "between": 0.15, "within": 0.75}
        truth = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return county, floor, uranium, pyro.condition(model, truth)(county, floor, uranium)
    with gzip.open(path) if path.endswith(".gz") else open(path) as file:
        data = json.load(file)["radon_mn"]
    county = torch.tensor(data["county_idx"]) - 1
    floor, y, per_house = (torch.tensor(data[key]).double() for key in ("floor_measure", "log_radon", "log_uppm"))
    uranium = torch.zeros(COUNTIES, dtype=torch.float64).index_put((county,), per_house)
    return county, floor, uranium, y


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None)
    parser.add_argument("--out", default="pyro_radon.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    county, floor, uranium, y = read(options.data)
    guide = AutoGaussian(model)
    result = fit_guide(model, guide, county, floor, uranium, y, options={"progress": False})
    print(f"{guide.posterior.dim} latents: {result}")

    theta = guide.posterior.sample((2000,))
    draws = log_joint(model, county, floor, uranium, y).unpack(theta)
    for name in ("floor", "between", "within"):
        print(f"{name:8} {draws[name].mean():6.2f} ± {draws[name].std():.2f}")
    line = draws["line"]
    print(f"slope in uranium {line[:, 1].mean():.2f} ± {line[:, 1].std():.2f}")
    pooled = line[:, :1] + line[:, 1:] * uranium + draws["between"].reshape(-1, 1) * draws["own"].reshape(2000, -1)

    count = torch.bincount(county, minlength=COUNTIES)
    alone = torch.zeros(COUNTIES).double().index_add(0, county, y - draws["floor"].mean() * floor) / count
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.plot(uranium, alone, "o", color="0.7", markersize=3, label="county alone")
    left.errorbar(uranium, pooled.mean(0), yerr=pooled.std(0), fmt="o", markersize=3, label="hierarchical ± sd")
    left.set_xlabel("log uranium")
    left.set_ylabel("log radon on the ground floor")
    left.legend()
    right.plot(count, alone, "o", color="0.7", markersize=3)
    right.errorbar(count, pooled.mean(0), yerr=pooled.std(0), fmt="o", markersize=3)
    right.set_xscale("log")
    right.set_xlabel("houses in the county")
    figure.savefig(options.out, dpi=120)
    return result, draws


if __name__ == "__main__":
    main()
