"""Gradients of the log joint of a Pyro model: all draws in one call, or as many in a call as stay in the cache.

    python -m benchmarks.pyro_calls [--only irt ...] [--draws 512]

Milliseconds of CPU a draw, the least of three rounds that take turns.  The size of a call was chosen on the item
response, the volatility and the Gaussian process of `benchmarks.pyro_public_models`; the other two were looked at
afterwards.
"""

import argparse
import time

import pyro
import pyro.distributions as dist
import torch

from benchmarks.pyro_public_models import Model, gaussian_process, item_response, stochastic_volatility
from torchngvi.adapters.pyro import log_joint
from torchngvi.derivatives import energy_and_gradient


def regression() -> Model:
    X = torch.randn(4000, 30)
    y = torch.bernoulli(torch.sigmoid(X.sum(-1) / 5))

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(30), 1.0).to_event(1))
        with pyro.plate("rows", 4000):
            pyro.sample("y", dist.Bernoulli(logits=(X * w).sum(-1)), obs=y)

    return model


def field() -> Model:
    places = torch.rand(120, 2)
    square = (places[:, None] - places).square().sum(-1)
    y = torch.poisson(torch.full((120,), 3.0))

    def model() -> None:
        length = pyro.sample("length", dist.LogNormal(-1.0, 0.5))
        z = pyro.sample("z", dist.Normal(torch.zeros(120), 1.0).to_event(1))
        kernel = torch.exp(-0.5 * square / length[..., None, None].square()) + 1e-4 * torch.eye(120)
        rate = (torch.linalg.cholesky(kernel) @ z[..., None])[..., 0].exp()
        pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    return model


CHOSEN_ON = {"irt": lambda: item_response(500, 20, 2.0), "volatility": stochastic_volatility, "gp": gaussian_process}
EVERY = CHOSEN_ON | {each.__name__: each for each in (regression, field)}


def line(name: str, draws: int) -> None:
    """One model."""
    torch.manual_seed(0)
    density = log_joint(EVERY[name]())
    theta = density.initial + 0.05 * torch.randn(draws, density.dim)
    sizes = {"one call": draws, "in parts": density.draws_at_once}
    least = dict.fromkeys(sizes, float("inf"))
    for _ in range(3):
        for how, density.draws_at_once in sizes.items():
            start = time.process_time()
            energy_and_gradient(density, theta)
            least[how] = min(least[how], (time.process_time() - start) / draws)
    one, parts = least.values()
    print(
        f"{name:12} D = {density.dim:4}: {1e3 * one:.3f} ms in one call of {draws}, {1e3 * parts:.3f} ms in calls of "
        f"{sizes['in parts']}, {one / parts:.2f} times as fast",
        flush=True,
    )


def main() -> None:
    """Read the arguments, and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=EVERY, default=list(EVERY))
    parser.add_argument("--draws", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name in args.only:
        line(name, args.draws)


if __name__ == "__main__":
    main()
