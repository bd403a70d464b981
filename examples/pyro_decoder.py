"""A neural likelihood in Pyro: natural gradients for the latents, Adam for the network, one backward pass for both.

    python examples/pyro_decoder.py [--steps 1500] [--out pyro_decoder.png]

Each of 150 irises (Fisher 1936) gets two latent coordinates, from which a small network makes its four measurements;
its weights and the noise are found by empirical Bayes.  The three species, which the model never sees, come apart.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.distributions import constraints
from sklearn.datasets import load_iris

import torchngvi as ngvi
from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI


class Decoder(torch.nn.Module):
    def __init__(self, latent, data, hidden=16):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(latent, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, data)
        )

    def model(self, y):
        pyro.module("decoder", self)
        noise = pyro.param("noise", 0.5 * torch.ones(()), constraint=constraints.positive)
        with pyro.plate("flowers", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(self.layers(z), noise).to_event(1), obs=y)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", default="pyro_decoder.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    data = load_iris()
    y = torch.tensor(data.data, dtype=torch.float32)
    y = (y - y.mean(0)) / y.std(0)

    decoder = Decoder(2, 4)
    # the latents of different flowers are independent given the network, those of one flower nearly so
    guide = AutoGaussian(decoder.model, ngvi.DiagonalGaussian)
    svi = NaturalSVI(
        decoder.model,
        guide,
        pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.995}),
        natural=lambda q: ngvi.IBLR(q, lr=0.1, step_size=ngvi.KLRadius(5.0)),
    )
    result = svi.run(options.steps, y, progress=False)
    print(result)

    z = guide.median()["z"]
    left = (y - decoder.layers(z)).square().mean().sqrt().item()
    print(f"noise {pyro.param('noise').item():.3f} of a standard deviation, reconstruction error {left:.3f}")
    distance = torch.cdist(z, z) + 1e9 * torch.eye(len(z))
    species = torch.tensor(data.target)
    same = (species[distance.argmin(1)] == species).double().mean().item()
    print(f"the nearest flower in latent space is of the same species for {same:.0%}")

    figure = Figure(figsize=(9, 4), layout="constrained")
    first, second = figure.subplots(1, 2)
    first.plot([record.loss for record in result.trace], linewidth=0.7)
    first.set_xlabel("step")
    first.set_ylabel("negative ELBO")
    sd = guide.posterior.stddev.reshape(-1, 2)
    for k, name in enumerate(data.target_names):
        of = species == k
        second.errorbar(*z[of].mT, xerr=sd[of, 0], yerr=sd[of, 1], fmt="o", markersize=3, linewidth=0.5, label=name)
    second.set_xlabel("first latent")
    second.set_ylabel("second latent")
    second.legend()
    figure.savefig(options.out, dpi=120)
    return result, same


if __name__ == "__main__":
    main()
