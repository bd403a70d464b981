"""Pyro's guides against ours, on five posteriors of posteriordb written as Pyro models.

    TORCHNGVI_DATA=... python -m benchmarks.pyro_guides [--only arK ... logistic overhead] [--patience 30]

Ours is `fit_guide(model, AutoGaussian(model))` as it comes, its set-up included; its ELBO is the one to reach.  Pyro's
guides are trained by SVI with Adam at each of four learning rates on 10 vectorised particles, validation off, until
their ELBO is within 0.1 nats of it, or for `--patience` times as long as ours took (at least 3 s);
AutoLaplaceApproximation by MAP, then its Hessian.  Shown are the best learning rate, the largest error of a posterior
mean against the reference draws in their sd, and the seconds to within 0.1 nats: for ours too, and after it those
of the whole run to its verdict.  Times leave out the looks at the ELBO, which is measured for all alike, on scrambled
Sobol points.  Float64, seconds of CPU on one core.

`logistic` is a regression with 50 coefficients on scales from 0.01 to 10, against its optimum by quadrature: steps to
within 0.1 nats.  `overhead` is what Pyro's machinery costs: milliseconds for a gradient of the log joint of the same
model as a Pyro model and in plain torch, and for a whole step.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Tensor

from torchngvi import IBLR, CholeskyGaussian, GeneralizedLinear, KLRadius, LogJoint, fit
from torchngvi.adapters.pyro import AutoGaussian, ModelLogJoint, NaturalSVI, fit_guide, log_joint
from torchngvi.derivatives import energy_and_gradient
from torchngvi.fitting.records import Record

from .posteriordb.load import Posterior, load
from .posteriordb.model import Values
from .posteriordb.regressions import levels

RATES, PARTICLES = (0.003, 0.01, 0.03, 0.1), 10
NEAR, SHORTEST = 0.1, 3.0  # nats, seconds
POINTS = 4096


# ------------------------------------------------------------------------------------ the models


def flat(*shape: int) -> dist.TorchDistribution:
    return dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)).mask(False)


def linear(X: Tensor, y: Tensor, sigma: Callable[[], dist.TorchDistribution]) -> Callable[[], None]:
    """y ~ normal(X β, σ), β flat."""

    def model() -> None:
        beta = pyro.sample("beta", flat(X.shape[-1]))
        scale = pyro.sample("sigma", sigma())
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal((X * beta).sum(-1), scale), obs=y)

    return model


def flat_scale() -> dist.TorchDistribution:
    return dist.HalfNormal(1.0).mask(False)


def eight_schools(data: Values) -> Callable[[], None]:
    def model() -> None:
        with pyro.plate("schools", len(data["y"])):
            z = pyro.sample("theta_trans", dist.Normal(0.0, 1.0))
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("observed", len(data["y"])):
            pyro.sample("y", dist.Normal(mu + tau * z, data["sigma"]), obs=data["y"])

    return model


def kidiq(data: Values) -> Callable[[], None]:
    school, iq = data["mom_hs"], data["mom_iq"]
    X = torch.stack([torch.ones_like(iq), school, iq, school * iq], -1)
    return linear(X, data["kid_score"], lambda: dist.HalfCauchy(2.5))


def mesquite(data: Values) -> Callable[[], None]:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
    X = torch.stack([torch.ones_like(data["weight"]), *(data[name] for name in names)], -1)
    return linear(X, data["weight"], flat_scale)


def nes(data: Values) -> Callable[[], None]:
    before, ages = (data["real_ideo"], data["race_adj"]), levels(data["age_discrete"], 2, 3, 4)
    columns = [torch.ones_like(data["partyid7"]), *before, *ages, data["educ1"], data["gender"], data["income"]]
    return linear(torch.stack(columns, -1), data["partyid7"], flat_scale)


def ark(data: Values) -> Callable[[], None]:
    y, order = data["y"], int(data["K"])
    lags = torch.stack([y[order - k : len(y) - k] for k in range(1, order + 1)], -1)

    def model() -> None:
        alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(order), 10.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
        with pyro.plate("times", len(lags)):
            pyro.sample("y", dist.Normal(alpha + (lags * beta).sum(-1), sigma), obs=y[order:])

    return model


MODELS = {
    "schools": ("eight_schools-eight_schools_noncentered", eight_schools),
    "kidiq": ("kidiq-kidscore_interaction", kidiq),
    "mesquite": ("mesquite-mesquite", mesquite),
    "nes": ("nes1980-nes", nes),
    "arK": ("arK-arK", ark),
}


# ------------------------------------------------------------------------------------ the measure


class Problem:
    """A model, its density, and the points at which every q is measured."""

    def __init__(self, name: str) -> None:
        key, write = MODELS[name]
        self.posterior: Posterior = load(key)
        self.model = write(self.posterior.data)
        self.density: ModelLogJoint = log_joint(self.model)
        self._check()
        sobol = torch.quasirandom.SobolEngine(self.density.dim, scramble=True, seed=0).draw(POINTS)
        self.z = torch.special.ndtri(sobol.double().clamp(1e-9, 1 - 1e-9))

    def _check(self) -> None:
        """The same θ and, up to a constant, the same density as the posteriordb model in plain torch."""
        theta = self.posterior.unconstrained_draws[:20]
        difference = self.density(theta) - self.posterior.log_joint(theta)
        assert float(difference.max() - difference.min()) < 1e-8 * float(self.density(theta).abs().max())

    @torch.no_grad()
    def elbo(self, mean: Tensor, root: Tensor) -> float:
        q = CholeskyGaussian(len(mean)).initialize_(mean, root)
        theta = q.push_noise(self.z)
        return float((self.posterior.log_joint(theta) - q.log_prob(theta)).mean())

    @torch.no_grad()
    def error(self, mean: Tensor, root: Tensor) -> float:
        """The largest of the posterior means, in sd."""
        values = self.posterior.constrain(mean + self.z @ root.mT)
        errors = [(values[key].mean(0) - x) / self.posterior.sd[key] for key, x in self.posterior.mean.items()]
        return max(float(error.abs().max()) for error in errors)


class Run(NamedTuple):
    """The best of a guide, and when it was as good as ours."""

    elbo: float
    error: float
    seconds: float  # to within NEAR of ours; inf if never
    spent: float
    steps: int
    rate: float


# ------------------------------------------------------------------------------------ the methods


def ours(problem: Problem) -> Run:
    """As it comes, and once more with looks on the way, for the time to within NEAR of where it ends."""
    pyro.set_rng_seed(0)
    start = time.process_time()
    guide = AutoGaussian(problem.model)
    result = fit_guide(problem.model, guide, options={"progress": False})
    spent = time.process_time() - start
    assert result.converged, result.reason
    where = guide.posterior.mean, guide.posterior.scale_tril
    end, seconds = problem.elbo(*where), math.inf

    pyro.set_rng_seed(0)
    looking, start = 0.0, time.process_time()
    again = AutoGaussian(problem.model)

    def look(record: Record) -> None:
        nonlocal looking, seconds
        now = time.process_time()
        if seconds == math.inf and problem.elbo(again.posterior.mean, again.posterior.scale_tril) >= end - NEAR:
            seconds = now - start - looking
        looking += time.process_time() - now

    fit_guide(problem.model, again, options={"progress": False, "callbacks": [look]})
    return Run(end, problem.error(*where), min(seconds, spent), spent, result.trace[-1].gradients, math.nan)


Moments = tuple[Tensor, Tensor]  # mean, lower root


def of_continuous(guide: AutoContinuous) -> Moments:
    q = guide.get_posterior()
    return q.mean.detach(), torch.linalg.cholesky(q.covariance_matrix.detach())


def of_normal(guide: AutoNormal) -> Moments:
    sites = [guide._get_loc_and_scale(name) for name, _ in guide.prototype_trace.iter_stochastic_nodes()]
    mean, scale = (torch.cat([part.detach().reshape(-1) for part in parts]) for parts in zip(*sites, strict=True))
    return mean, torch.diag(scale)


def of_laplace(guide: AutoLaplaceApproximation) -> Moments:
    q = guide.laplace_approximation()
    return q.loc, q.scale[:, None] * q.scale_tril


GUIDES: dict[str, tuple[Callable, Callable[..., Moments], int]] = {
    "AutoMultivariateNormal": (AutoMultivariateNormal, of_continuous, PARTICLES),
    "AutoLowRankMultivariateNormal": (AutoLowRankMultivariateNormal, of_continuous, PARTICLES),
    "AutoNormal": (AutoNormal, of_normal, PARTICLES),
    "AutoLaplaceApproximation": (AutoLaplaceApproximation, of_laplace, 1),
}


def theirs(problem: Problem, name: str, goal: float, seconds: float) -> Run:
    """The best learning rate: the first at the goal, else the best ELBO."""
    runs = [trained(problem, name, rate, goal, seconds) for rate in RATES]
    return min(runs, key=lambda run: (run.seconds, -run.elbo))


def trained(problem: Problem, name: str, rate: float, goal: float, seconds: float) -> Run:
    make, moments, particles = GUIDES[name]
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    loss = Trace_ELBO(num_particles=particles, vectorize_particles=particles > 1, max_plate_nesting=1)
    spent, steps, look, best = 0.0, 0, 0.02, Run(-math.inf, math.nan, math.inf, seconds, 0, rate)
    start = time.process_time()
    guide = make(problem.model)
    svi = SVI(problem.model, guide, pyro.optim.Adam({"lr": rate}), loss)
    while spent < seconds:
        svi.step()
        steps += 1
        if spent + time.process_time() - start < min(look, seconds):
            continue
        try:
            where = moments(guide)
            spent += time.process_time() - start  # of Laplace's method with the Hessian
            elbo = problem.elbo(*where)
        except (ValueError, RuntimeError):  # not positive definite, not finite
            spent, elbo = max(spent, look), -math.inf
        if elbo > best.elbo:
            best = Run(elbo, problem.error(*where), math.inf, spent, steps, rate)
        if elbo >= goal:
            return best._replace(seconds=spent)
        look, start = 1.1 * spent, time.process_time()
    return best._replace(spent=seconds)


# ------------------------------------------------------------------------------------ an ill-conditioned regression


@torch.no_grad()
def logistic(dim: int = 50, rows: int = 1000, steps: int = 60) -> None:
    """Steps of NaturalSVI, and evaluations of fit_guide, to within NEAR of the optimum."""
    for seed in range(3):
        pyro.set_rng_seed(seed)
        X = torch.randn(rows, dim) * torch.logspace(-2, 1, dim) @ torch.linalg.qr(torch.randn(dim, dim))[0]
        y = (torch.rand(rows) < torch.sigmoid(X @ torch.randn(dim) / 3)).double()

        def model(X: Tensor = X, y: Tensor = y) -> None:
            w = pyro.sample("w", dist.Normal(torch.zeros(dim), 1.0).to_event(1))
            with pyro.plate("rows", rows):
                pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

        exact = GeneralizedLinear(X, y, family="bernoulli_logit", prior_precision=1.0)
        best = fit(CholeskyGaussian(dim), exact, progress=False).loss
        guide = AutoGaussian(model)
        svi = NaturalSVI(model, guide, natural=lambda q: IBLR(q, lr=0.3, step_size=KLRadius(2.0)), num_particles=128)
        svi.step()
        gaps = []
        for _ in range(steps - 1):
            gaps.append(float(exact.negative_elbo(guide.posterior)) - best)
            svi.step()
        first = next((step for step, gap in enumerate(gaps, 1) if gap <= NEAR), None)
        start = time.process_time()
        result = fit_guide(model, again := AutoGaussian(model), options={"progress": False})
        spent, gap = time.process_time() - start, float(exact.negative_elbo(again.posterior)) - best
        print(
            f"logistic, D = {dim}, seed {seed}: NaturalSVI within {NEAR} nats after {first} steps, {gaps[-1]:.3f} "
            f"after {steps}; fit_guide {gap:.4f} nats after {result.evaluations} evaluations, {spent:.2f} s"
        )


# ------------------------------------------------------------------------------------ what the machinery costs


def milliseconds(do: Callable[[], object], times: int = 200) -> float:
    """Of CPU, a call."""
    for _ in range(20):
        do()
    start = time.process_time()
    for _ in range(times):
        do()
    return 1e3 * (time.process_time() - start) / times


def overhead() -> None:
    """Of each model."""
    for name in MODELS:
        costs = [f"{what} {milliseconds(do):.2f}" for what, do in calls(Problem(name)).items()]
        print(f"overhead, {name}, ms: {', '.join(costs)}", flush=True)


def calls(problem: Problem, draws: int = 16) -> dict[str, Callable[[], object]]:
    """A gradient at so many draws, and a step."""
    model, density, plain = problem.model, problem.density, LogJoint(problem.posterior.log_joint)
    theta = density.initial + 0.1 * torch.randn(draws, density.dim)
    pyro.clear_param_store()
    loss = Trace_ELBO(num_particles=draws, vectorize_particles=True, max_plate_nesting=1)
    theirs = SVI(model, AutoMultivariateNormal(model), pyro.optim.Adam({"lr": 1e-6}), loss)
    ours = NaturalSVI(model, AutoGaussian(model), natural=lambda q: IBLR(q, lr=1e-6))
    return {
        "the model alone": model,
        "gradient, plain torch": lambda: energy_and_gradient(plain, theta),
        "gradient, log_joint": lambda: energy_and_gradient(density, theta),
        "step, NaturalSVI": ours.step,
        "step, SVI": theirs.step,
        "set-up": lambda: AutoGaussian(model).setup().density(model),
    }


# ------------------------------------------------------------------------------------ the table


OTHERS = {"logistic": logistic, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(*MODELS, *OTHERS), choices=(*MODELS, *OTHERS))
    parser.add_argument("--patience", type=float, default=30.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.enable_validation(False)
    ours(Problem("schools"))  # warms up
    for name in arguments.only:
        if name in OTHERS:
            OTHERS[name]()
            continue
        problem = Problem(name)
        print(f"{'':34}{'mean err':>9}{'ELBO':>14}{'seconds':>9}{'ratio':>8}  rate, steps")
        print(f"{name}, D = {problem.density.dim}, batched by {problem.density.batched_by}", flush=True)
        mine = ours(problem)
        head = f"  {'AutoGaussian, fit_guide':32}"
        whole = f"{mine.spent:.2f} s, {mine.steps} gradients to the verdict"
        print(f"{head}{mine.error:9.3f}{mine.elbo:14.3f}{mine.seconds:9.2f}{1:8}  {whole}", flush=True)
        for guide in GUIDES:
            run = theirs(problem, guide, mine.elbo - NEAR, max(SHORTEST, arguments.patience * mine.spent))
            if math.isfinite(run.seconds):
                shown = f"{run.seconds:9.2f}{run.seconds / mine.seconds:8.0f}"
            else:
                shown = f"{f'>{run.spent:.1f}':>9}{f'>{run.spent / mine.seconds:.0f}':>8}"
            line = f"  {guide:32}{run.error:9.3f}{run.elbo:14.3f}{shown}  {run.rate:g}, {run.steps}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
