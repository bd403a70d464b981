"""Twelve Pyro models outside the tests: `fit_guide` beside Pyro's guides and, where asked for, its NUTS.

    python -m benchmarks.pyro_models [--only lkj ...] [--seconds 20] [--nuts 60] [--truths FILE]

The data are simulated.  Ours is `fit_guide(model, AutoGaussian(model))` as it comes, for ``--longest`` seconds at most;
shown are the ELBO, the seconds of CPU to the verdict, and the verdict.  Pyro's guides AutoDiagonalNormal (the mean
field), AutoMultivariateNormal, AutoLowRankMultivariateNormal and AutoIAFNormal are trained by Adam on 16 draws a step
from the same vectorised log joint, which is faster than Pyro's SVI, at a rate that falls from 0.03 to 0 over
``--seconds`` of CPU each.  ELBOs are means over 4,000 draws, with their standard errors.

``--nuts`` runs one chain of 300 + ``--draws`` draws for each model from the mean of our fit, for so many seconds of CPU
at most (`benchmarks.pyro_truths`).  Printed are the largest errors of means and sds over θ, in its sds, and whether the
verdict of the fit is true.  ``--truths`` keeps the chains in a file, and takes those that are there from it.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from benchmarks.pyro_truths import against, chain, keep, kept
from torchngvi.adapters.pyro import AutoGaussian, ModelLogJoint, fit_guide, log_joint
from torchngvi.fitting.records import FitResult

Model = Callable[[], object]
RATE, PARTICLES, DRAWS = 0.03, 16, 4000


# ------------------------------------------------------------------------------------ the models


def hierarchical_binomial() -> Model:
    trials = torch.randint(10, 40, (40,)).double()
    y = dist.Binomial(trials, torch.sigmoid(-1.5 + 0.7 * torch.randn(40))).sample()

    def model() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("groups", 40):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Binomial(trials, logits=mu + tau * z), obs=y)

    return model


def lkj_slopes() -> Model:
    group, x = torch.arange(20).repeat_interleave(8), torch.randn(160)
    effects = torch.randn(20, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.6]])
    y = 1 + 0.5 * x + effects[group, 0] + effects[group, 1] * x + 0.5 * torch.randn(160)

    def model() -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(torch.ones(2)).to_event(1))
        root = pyro.sample("root", dist.LKJCholesky(2, torch.tensor(2.0)))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(20, 2), 1.0).to_event(2))
        b = beta[..., None, :] + z @ (tau[..., None] * root).mT
        with pyro.plate("rows", 160):
            pyro.sample("y", dist.Normal(b[..., group, 0] + b[..., group, 1] * x, sigma[..., None].squeeze(-1)), obs=y)

    return model


def crossed_effects() -> Model:
    a, b = torch.arange(20).repeat_interleave(10), torch.arange(10).repeat(20)
    y = torch.bernoulli(torch.sigmoid(0.3 + torch.randn(20)[a] + 0.7 * torch.randn(10)[b]))

    def model() -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        sa, sb = pyro.sample("sa", dist.HalfNormal(1.0)), pyro.sample("sb", dist.HalfNormal(1.0))
        za = pyro.sample("za", dist.Normal(torch.zeros(20), 1.0).to_event(1))
        zb = pyro.sample("zb", dist.Normal(torch.zeros(10), 1.0).to_event(1))
        with pyro.plate("rows", 200):
            pyro.sample("y", dist.Bernoulli(logits=mu + sa * za[..., a] + sb * zb[..., b]), obs=y)

    return model


def horseshoe() -> Model:
    X = torch.randn(80, 20)
    y = X[:, :3] @ torch.tensor([2.0, -1.5, 1.0]) + torch.randn(80)

    def model() -> None:
        tau, sigma = pyro.sample("tau", dist.HalfCauchy(0.2)), pyro.sample("sigma", dist.HalfNormal(2.0))
        scale = pyro.sample("scale", dist.HalfCauchy(torch.ones(20)).to_event(1))
        z = pyro.sample("z", dist.Normal(torch.zeros(20), 1.0).to_event(1))
        with pyro.plate("rows", 80):
            pyro.sample("y", dist.Normal(tau * (X * scale * z).sum(-1), sigma), obs=y)

    return model


def item_response(people: int = 500, items: int = 20) -> Model:
    logits = torch.exp(0.3 * torch.randn(items)) * (torch.randn(people, 1) - torch.randn(items))
    y = torch.bernoulli(torch.sigmoid(logits))

    def model() -> None:
        a = pyro.sample("a", dist.LogNormal(torch.zeros(items), 0.5).to_event(1))
        b = pyro.sample("b", dist.Normal(torch.zeros(items), 2.0).to_event(1))
        skill = pyro.sample("skill", dist.Normal(torch.zeros(people), 1.0).to_event(1))
        logits = a[..., None, :] * (skill[..., :, None] - b[..., None, :])
        pyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=y)

    return model


def stochastic_volatility(T: int = 200) -> Model:
    h = torch.zeros(T)
    for t in range(1, T):
        h[t] = 0.95 * h[t - 1] + 0.25 * torch.randn(())
    y, lag = torch.exp(0.5 * h - 0.5) * torch.randn(T), torch.arange(T)
    lags = (lag[:, None] - lag).clamp_min(0)

    def model() -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        phi, sigma = pyro.sample("phi", dist.Beta(20.0, 1.5)), pyro.sample("sigma", dist.HalfNormal(0.5))
        z = pyro.sample("z", dist.Normal(torch.zeros(T), 1.0).to_event(1))
        powers = (phi[..., None, None] ** lags).tril()
        h = mu[..., None] + sigma[..., None] * (powers @ z[..., None])[..., 0]
        pyro.sample("y", dist.Normal(0.0, torch.exp(0.5 * h)).to_event(1), obs=y)

    return model


def gaussian_process(n: int = 50) -> Model:
    x = torch.linspace(0, 5, n)
    y = torch.poisson(torch.exp(1 + torch.sin(2 * x)))
    square = (x[:, None] - x).square()

    def model() -> None:
        length, scale = pyro.sample("length", dist.LogNormal(0.0, 0.5)), pyro.sample("scale", dist.HalfNormal(1.0))
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(n), 1.0).to_event(1))
        kernel = torch.exp(-0.5 * square / length[..., None, None].square()) + 1e-6 * torch.eye(n)
        f = mean[..., None] + scale[..., None] * (torch.linalg.cholesky(kernel) @ z[..., None])[..., 0]
        pyro.sample("y", dist.Poisson(f.exp()).to_event(1), obs=y)

    return model


def ordinal() -> Model:
    X = torch.randn(150, 3)
    y = torch.bucketize(
        X @ torch.tensor([1.0, -0.5, 0.3]) + dist.Logistic(0.0, 1.0).sample((150,)), torch.tensor([-1.0, 0.0, 1.5])
    )

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        first = pyro.sample("first", dist.Normal(0.0, 2.0))
        gaps = pyro.sample("gaps", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        cuts = torch.cat([first[..., None], first[..., None] + gaps.cumsum(-1)], -1)
        with pyro.plate("rows", 150):
            pyro.sample("y", dist.OrderedLogistic((X * w).sum(-1), cuts), obs=y)

    return model


def autoregression() -> Model:
    y = [torch.zeros(()), torch.zeros(())]
    for _ in range(150):
        y.append(0.5 + 0.6 * y[-1] - 0.3 * y[-2] + torch.randn(()))
    series = torch.stack(y)

    def model() -> None:
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        phi = pyro.sample("phi", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        with pyro.plate("times", 150):
            mean = c + phi[..., :1] * series[1:-1] + phi[..., 1:] * series[:-2]
            pyro.sample("y", dist.Normal(mean, sigma), obs=series[2:])

    return model


def zero_inflated() -> Model:
    X = torch.randn(200, 2)
    y = torch.poisson(torch.exp(1 + X @ torch.tensor([0.5, -0.3]))) * torch.bernoulli(torch.full((200,), 0.7))

    @config_enumerate
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        open_ = pyro.sample("open", dist.Beta(1.0, 1.0))
        with pyro.plate("rows", 200):
            on = pyro.sample("on", dist.Bernoulli(open_))
            rate = torch.exp(w[..., :1] + w[..., 1:2] * X[:, 0] + w[..., 2:] * X[:, 1])
            pyro.sample("y", dist.Poisson(on * rate + (1 - on) * 1e-8), obs=y)

    return model


def epidemic(days: int = 60, people: float = 1000.0) -> Model:
    def curve(beta: Tensor, gamma: Tensor) -> Tensor:
        s, i, new = torch.full_like(beta, people - 5), torch.full_like(beta, 5.0), []
        for _ in range(days):
            infected = s * (1 - torch.exp(-beta * i / people))
            s, i = s - infected, i + infected - gamma * i
            new.append(infected)
        return torch.stack(new, -1)

    mean = curve(torch.tensor(0.4), torch.tensor(0.15))
    y = dist.GammaPoisson(10.0, 10.0 / (0.5 * mean + 1e-3)).sample()

    def model() -> None:
        beta, gamma = pyro.sample("beta", dist.LogNormal(-1.0, 0.5)), pyro.sample("gamma", dist.LogNormal(-2.0, 0.5))
        rho, size = pyro.sample("rho", dist.Beta(5.0, 5.0)), pyro.sample("size", dist.LogNormal(2.0, 1.0))
        mean = rho[..., None] * curve(beta, gamma) + 1e-3
        pyro.sample("y", dist.GammaPoisson(size[..., None], size[..., None] / mean).to_event(1), obs=y)

    return model


class Network(PyroModule):
    """A hidden layer of five units with normal priors on all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.linspace(-2, 2, 60)[:, None]
        self.y = torch.sin(2 * self.x[:, 0]) + 0.2 * torch.randn(60)
        self.hidden, self.out = PyroModule[torch.nn.Linear](1, 5), PyroModule[torch.nn.Linear](5, 1)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 2.0).expand([5, 1]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 2.0).expand([5]).to_event(1))
        self.out.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 5]).to_event(2))
        self.out.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self) -> None:
        """Observe the rows."""
        mean = self.out(torch.tanh(self.hidden(self.x)))[..., 0]
        with pyro.plate("rows", 60):
            pyro.sample("y", dist.Normal(mean, 0.2), obs=self.y)


MODELS: dict[str, Callable[[], Model]] = {
    "binomial": hierarchical_binomial,
    "lkj": lkj_slopes,
    "crossed": crossed_effects,
    "horseshoe": horseshoe,
    "irt": item_response,
    "volatility": stochastic_volatility,
    "gp": gaussian_process,
    "ordinal": ordinal,
    "ar2": autoregression,
    "zip": zero_inflated,
    "sir": epidemic,
    "bnn": Network,
}
GUIDES = (AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoIAFNormal)


# ------------------------------------------------------------------------------------ the measure


def measured(values: Tensor) -> str:
    """The mean with its standard error."""
    return f"{values.mean():.2f} ± {values.std() / len(values) ** 0.5:.2f}"


def by_adam(model: Model, density: ModelLogJoint, kind: type[AutoContinuous], seconds: float) -> Tensor:
    """log p - log q at draws from a guide of Pyro, trained."""
    pyro.clear_param_store()
    guide = kind(poutine.block(model, hide_fn=lambda site: bool(site["infer"].get("enumerate"))))
    guide()
    optimizer = torch.optim.Adam(guide.parameters(), lr=RATE)
    start = time.process_time()
    while (passed := time.process_time() - start) < seconds:
        optimizer.param_groups[0]["lr"] = RATE * (1 - passed / seconds)
        optimizer.zero_grad()
        loss = -log_weights(guide, density, PARTICLES).mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return log_weights(guide, density, DRAWS)


def log_weights(guide: AutoContinuous, density: ModelLogJoint, draws: int) -> Tensor:
    q = guide.get_posterior()
    theta = q.rsample((draws,))
    return density(theta) - q.log_prob(theta)


def line(name: str, args: argparse.Namespace) -> None:
    """One model by all."""
    torch.manual_seed(0)
    pyro.clear_param_store()
    model = MODELS[name]()
    start = time.process_time()
    guide = AutoGaussian(model)
    result = fit_guide(model, guide, options={"progress": False, "max_seconds": args.longest})
    taken = time.process_time() - start
    density, q = log_joint(model), guide.get_posterior()
    print(f"\n{name}, D = {density.dim}, draws by {density.batched_by}", flush=True)
    with torch.no_grad():
        theta = q.sample((DRAWS,))
        ours = density(theta) - q.log_prob(theta)
    print(f"  ours {measured(ours)}, {taken:.1f} s. {result}", flush=True)
    for kind in GUIDES if args.seconds else ():
        try:
            print(f"  {kind.__name__} {measured(by_adam(model, density, kind, args.seconds))}", flush=True)
        except (ValueError, RuntimeError) as error:
            print(f"  {kind.__name__} {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    if args.nuts or args.truths:
        print(f"  {against_chain(name, density, guide, result, args)}", flush=True)


def against_chain(
    name: str, density: ModelLogJoint, guide: AutoGaussian, result: FitResult, args: argparse.Namespace
) -> str:
    """What a chain says of the fit, in words; the chain is kept in the file, or comes from there."""
    truth = kept(args.truths, name, density)
    if truth is None and args.nuts:
        found = chain(density, guide.posterior.mean, args.nuts, args.draws)
        if isinstance(found, str):
            return f"NUTS: {found}"
        truth = found
        if args.truths is not None:
            keep(args.truths, name, truth)
    if truth is None:
        return "NUTS: no chain is kept"
    return f"against NUTS ({truth}): {against(truth, guide.gaussian('NUTS'), result.verdict)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of CPU, for each of Pyro's guides; 0 trains none")
    parser.add_argument("--longest", type=float, default=300.0, help="seconds by the clock, for ours")
    parser.add_argument("--nuts", type=float, default=0.0, help="seconds of CPU for a chain; 0 runs none")
    parser.add_argument("--draws", type=int, default=300, help="of a chain, after its warm-up")
    parser.add_argument("--truths", type=Path, help="a file that keeps what the chains say for the next run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name in args.only:
        line(name, args)


if __name__ == "__main__":
    main()
