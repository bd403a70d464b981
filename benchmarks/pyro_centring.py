"""What `centred` gains on four hierarchical models of Pyro, and what the verdicts say before and after it.

    python -m benchmarks.pyro_centring [--only eight_schools ...] [--seed 0]

Every site is written as its prior has it, centred: eight schools (Rubin 1981); a binomial model with 40 groups, and a
crossed logistic model with 20 and 10 groups, both with simulated data; and a funnel of nine coordinates whose scale is
observed through one noisy value of each.  Shown are the ELBOs of the three fits that `centred` makes, the nats that it
gains, and the verdict of `fit_guide` on the model as it is written and in the coordinates that were chosen, with CPU.
"""

import argparse
import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch

from torchngvi.adapters.pyro import AutoGaussian, centred, fit_guide

Model = Callable[[], object]


def eight_schools() -> Model:
    sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])

    def model() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, sigma), obs=y)

    return model


def binomial() -> Model:
    trials = torch.randint(10, 40, (40,)).double()
    y = dist.Binomial(trials, torch.sigmoid(-1.5 + 0.7 * torch.randn(40))).sample()

    def model() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("groups", 40):
            b = pyro.sample("b", dist.Normal(mu, tau))
            pyro.sample("y", dist.Binomial(trials, logits=b), obs=y)

    return model


def funnel() -> Model:
    y = 2.0 * torch.randn(9)

    def model() -> None:
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        with pyro.plate("coordinates", 9):
            x = pyro.sample("x", dist.Normal(0.0, torch.exp(0.5 * v)))
            pyro.sample("y", dist.Normal(x, 2.0), obs=y)

    return model


def crossed() -> Model:
    first, second = torch.arange(20).repeat_interleave(10), torch.arange(10).repeat(20)
    y = torch.bernoulli(torch.sigmoid(0.3 + torch.randn(20)[first] + 0.7 * torch.randn(10)[second]))

    def model() -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        sa, sb = pyro.sample("sa", dist.HalfNormal(1.0)), pyro.sample("sb", dist.HalfNormal(1.0))
        with pyro.plate("first", 20):
            a = pyro.sample("a", dist.Normal(0.0, sa))
        with pyro.plate("second", 10):
            b = pyro.sample("b", dist.Normal(0.0, sb))
        with pyro.plate("rows", 200):
            pyro.sample("y", dist.Bernoulli(logits=mu + a[..., first] + b[..., second]), obs=y)

    return model


MODELS = {each.__name__: each for each in (eight_schools, binomial, funnel, crossed)}


def verdict(model: Model) -> tuple[float, str]:
    """The ELBO, and the words."""
    pyro.clear_param_store()
    result = fit_guide(model, AutoGaussian(model), options={"progress": False})
    word = result.verdict.word
    return -result.loss, f"{'converged' if result.converged else 'not converged'}, {word}"


def line(name: str, seed: int) -> None:
    """One model."""
    torch.manual_seed(0)
    model = MODELS[name]()
    torch.manual_seed(seed)
    start = time.process_time()
    before, words = verdict(model)
    between = time.process_time()
    better = centred(model)
    end = time.process_time()
    after, then = verdict(better)
    print(f"\n{name}: {before:.2f} ({words}, {between - start:.1f} s), centred() {end - between:.1f} s")
    print(f"  {str(better).replace(chr(10), '; ')}")
    print(f"  gain {after - before:.2f} nats: {after:.2f} ({then})", flush=True)


def main() -> None:
    """Read the arguments, and print a block for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seed", type=int, default=0, help="of the fits; the data are the same")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    args = parser.parse_args()
    for name in args.only:
        line(name, args.seed)


if __name__ == "__main__":
    main()
