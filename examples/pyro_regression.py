"""A hierarchical regression in Pyro whose variances are parameters: natural gradients for q, Adam for the rest.

    python examples/pyro_regression.py [--steps 400] [--out pyro_regression.png]

Disease progression of 442 patients (scikit-learn's diabetes data), one slope and intercept an age group, drawn
around common ones.  The scales of groups and noise are `pyro.param`s, found by empirical Bayes in the same backward
pass as the step of q; the guide is then polished at those scales by `fit_guide`, which needs no learning rate.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.distributions import constraints
from sklearn.datasets import load_diabetes

from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI, fit_guide

GROUPS = 6


def model(group, x, y):
    one = x.new_ones(())
    spread = pyro.param("spread", 0.3 * x.new_ones(2), constraint=constraints.positive)
    noise = pyro.param("noise", one, constraint=constraints.positive)
    common = pyro.sample("common", dist.Normal(x.new_zeros(2), 2 * one).to_event(1))
    with pyro.plate("groups", GROUPS):
        own = pyro.sample("own", dist.Normal(common, spread).to_event(1))
    mean = (own[..., group, :] * torch.stack([torch.ones_like(x), x], -1)).sum(-1)
    with pyro.plate("patients", len(x)):
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="pyro_regression.png")
    options = parser.parse_args(arguments)

    data, target = load_diabetes(return_X_y=True)
    age, bmi, y = (torch.tensor(part) for part in (data[:, 0], data[:, 2], target))
    group = torch.bucketize(age, torch.quantile(age, torch.linspace(0, 1, GROUPS + 1, dtype=age.dtype)[1:-1]))
    x, y = ((part - part.mean()) / part.std() for part in (bmi, y))

    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    guide = AutoGaussian(model)
    svi = NaturalSVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.99}))
    print(svi.run(options.steps, group, x, y, progress=False))
    result = fit_guide(model, guide, group, x, y, options={"progress": False})
    print(result)

    spread, noise = pyro.param("spread").detach(), pyro.param("noise").item()
    print(f"noise {noise:.3f}, spread of intercepts {spread[0]:.3f}, of slopes {spread[1]:.3f}")
    low, high = guide.quantiles([0.05, 0.95])["own"]
    own = guide.median()["own"]

    figure = Figure(figsize=(7, 4), layout="constrained")
    for column, (axes, name) in enumerate(zip(figure.subplots(1, 2), ("intercept", "slope of bmi"), strict=True)):
        reach = torch.stack([own - low, high - own])[:, :, column]
        axes.errorbar(range(GROUPS), own[:, column], yerr=reach, fmt="o", capsize=3)
        axes.axhline(guide.median()["common"][column].item(), color="0.7")
        axes.set_xlabel("age group, youngest first")
        axes.set_title(f"{name}, 90 % interval")
    figure.savefig(options.out, dpi=120)
    return result, noise


if __name__ == "__main__":
    main()
