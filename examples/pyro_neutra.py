"""NUTS in the coordinates of the guide: neural transport without the network.

    python examples/pyro_neutra.py [--draws 300] [--out pyro_neutra.png]

Pyro's NeuTra example: a banana-shaped density, which a Gaussian cannot follow.  The guide finds its place and scale in
a few steps; NeuTraReparam samples N(0, I) through the guide, and the draws are exact again.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.distributions import constraints
from pyro.infer import MCMC, NUTS
from pyro.infer.reparam import NeuTraReparam

from torchngvi.adapters.pyro import AutoGaussian, fit_guide


class Banana(dist.TorchDistribution):
    """u ~ N(0, [[1, ρ], [ρ, 1]]), bent: x = a u₀, y = u₁/a + b (u₀² + a²)."""

    arg_constraints: dict = {}
    support = constraints.real_vector

    def __init__(self, a, b, rho=0.9):
        self.a, self.b = a, b
        self.straight = dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, rho], [rho, 1.0]]))
        super().__init__(event_shape=(2,), validate_args=False)

    def sample(self, sample_shape=()):
        u = self.straight.sample(sample_shape)
        return torch.stack([self.a * u[..., 0], u[..., 1] / self.a + self.b * (u[..., 0] ** 2 + self.a**2)], -1)

    def log_prob(self, value):
        u = value[..., 0] / self.a
        return self.straight.log_prob(torch.stack([u, (value[..., 1] - self.b * (u**2 + self.a**2)) * self.a], -1))


def model(a, b):
    pyro.sample("x", Banana(a, b))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--out", default="pyro_neutra.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    guide = AutoGaussian(model)
    print(fit_guide(model, guide, 1.15, 1.0, options={"progress": False}))
    of_guide = guide.posterior.sample((options.draws,))

    neutra = NeuTraReparam(guide)
    mcmc = MCMC(NUTS(neutra.reparam(model)), options.draws, 200, disable_progbar=True)
    mcmc.run(1.15, 1.0)
    with torch.no_grad():
        corrected = neutra.transform_sample(mcmc.get_samples()["x_shared_latent"])["x"]
    exact = Banana(1.15, 1.0).sample((4000,))
    for name, draws in (("guide", of_guide), ("NUTS through it", corrected), ("exact", exact)):
        mean, sd = (tuple(round(x, 2) for x in part.tolist()) for part in (draws.mean(0), draws.std(0)))
        print(f"{name:16} mean {mean}, sd {sd}")

    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, title, draws in zip(
        figure.subplots(1, 2, sharex=True, sharey=True),
        ("guide", "NUTS through the guide"),
        (of_guide, corrected),
        strict=True,
    ):
        axes.plot(*exact.mT, ".", color="0.85", markersize=2)
        axes.plot(*draws.mT, ".", markersize=4)
        axes.set_title(f"{title}; grey: exact")
    figure.savefig(options.out, dpi=120)
    return of_guide, corrected, exact


if __name__ == "__main__":
    main()
