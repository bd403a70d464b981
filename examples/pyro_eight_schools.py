"""Eight schools in Pyro with a full-covariance guide: no learning rate, a verdict, everything of Pyro still at work.

    python examples/pyro_eight_schools.py [--draws 2000] [--out pyro_eight_schools.png]

The effect of coaching in eight schools (Rubin 1981), non-centred.  Importance weights of the draws correct what a
Gaussian over (μ, log τ, η) cannot hold, and say how much that is.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer import Predictive

from torchngvi.adapters.pyro import AutoGaussian, fit_guide, log_joint

EFFECT = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
SIGMA = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def model(sigma, effect=None):
    zero = sigma.new_zeros(())
    mu = pyro.sample("mu", dist.Normal(zero, 5))
    tau = pyro.sample("tau", dist.HalfCauchy(zero + 5))
    with pyro.plate("schools", len(sigma)):
        eta = pyro.sample("eta", dist.Normal(zero, 1))
        theta = pyro.deterministic("theta", mu + tau * eta)
        pyro.sample("effect", dist.Normal(theta, sigma), obs=effect)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", default="pyro_eight_schools.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    guide = AutoGaussian(model)
    result = fit_guide(model, guide, SIGMA, EFFECT, options={"progress": False})
    print(result)

    sites = ("mu", "tau", "eta", "theta")
    draws = Predictive(model, guide=guide, num_samples=options.draws, parallel=True, return_sites=sites)(SIGMA)
    theta = draws["theta"].reshape(options.draws, -1)

    density = log_joint(model, SIGMA, EFFECT)
    latent = density.pack({site: draws[site].reshape(options.draws, *guide.median()[site].shape) for site in sites[:3]})
    weight = torch.softmax(density(latent) - guide.posterior.log_prob(latent), 0).detach()
    corrected = weight @ theta
    print(f"importance sampling keeps {1 / weight.square().sum() / options.draws:.0%} of the draws")
    print("school   effect   shrunk   corrected      sd")
    for school in range(len(EFFECT)):
        row = (EFFECT[school], theta[:, school].mean(), corrected[school], theta[:, school].std())
        print(f"{'ABCDEFGH'[school]:6}" + "".join(f"{value:10.1f}" for value in row))

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(EFFECT, range(8), xerr=SIGMA, fmt="o", color="0.7", label="observed ± σ")
    axes.errorbar(theta.mean(0), [x + 0.2 for x in range(8)], xerr=theta.std(0), fmt="o", label="posterior ± sd")
    axes.set_yticks(range(8), list("ABCDEFGH"))
    axes.set_xlabel("effect of coaching, points")
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return result, corrected


if __name__ == "__main__":
    main()
