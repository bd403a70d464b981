"""One argument of a working call after another is replaced by a hostile value: what ends in a raw error, and where.

    python -m benchmarks.hostile_arguments [--only fit] [--sample 3000] [--lines]

Every callable that the package exports stands here with a call that works on a tiny problem (a *door*), and with what
is done with the answer: an optimizer takes a step, a part is used by one, a posterior is drawn from.  Then each
argument is replaced by each of the hostile values.  A case is fine where the call works, or refuses with one of
`torchngvi.errors`; it is *raw* with any other exception, and where it has no end within five seconds or asks for more
memory than the machine should give.  The count is printed with the lines of the package where the raw cases end.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchngvi as ngvi
from torchngvi import (
    bbvi,
    diagnostics,
    expectations,
    fitting,
    ifvb,
    methods,
    metrics,
    models,
    networks,
    posteriors,
    rules,
    stepsizes,
    structures,
)
from torchngvi import ngvi as wu2024
from torchngvi.errors import TorchngviError
from torchngvi.methods import PreconditionedVI
from torchngvi.posteriors import flat

PACKAGE = os.path.dirname(ngvi.__file__) + os.sep
SECONDS = 5.0  # of the processor, after which a call is said to have no end
MEMORY = 4 << 30  # bytes beyond those that the process has mapped

Then = Callable[[Any], Any]


@dataclass(frozen=True)
class Door:
    """A call that works: the callable, its arguments by name, and what is done with the answer."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    then: Then = lambda answer: None

    def all_arguments(self) -> dict[str, Any]:
        """Those that are given, and the others with their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        defaults = {
            p.name: p.default
            for p in parameters
            if p.kind in kinds and p.default is not inspect.Parameter.empty and not p.name.startswith("_")
        }
        return {**defaults, **self.arguments}

    def call(self, name: str | None = None, value: Any = None) -> Any:
        """Make the call, with one argument replaced, and use the answer."""
        arguments = dict(self.arguments) if name is None else {**self.arguments, name: value}
        positional = []
        for parameter in inspect.signature(self.function).parameters.values():
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(arguments.pop(parameter.name))
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL and parameter.name in arguments:
                positional.append(arguments.pop(parameter.name))
        return self.then(self.function(*positional, **arguments))


# ------------------------------------------------------------------------------------ tiny problems

F64 = torch.float64


def q(dim: int = 2, kind: Any = ngvi.CholeskyGaussian, **options: Any) -> Any:
    return kind(dim, dtype=F64, **options)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(8, 2, generator=generator, dtype=F64)
    return X, torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 1], dtype=F64)


def model(family: Any = "bernoulli_logit", **options: Any) -> ngvi.GeneralizedLinear:
    return ngvi.GeneralizedLinear(*rows(), family, **options)


def log_joint(theta: torch.Tensor) -> torch.Tensor:
    return -0.5 * (theta - 1).square().sum(-1) - 0.1 * theta[..., 0].pow(4)


def log_prior(theta: torch.Tensor) -> torch.Tensor:
    return -0.5 * theta.square().sum(-1)


def log_likelihood(theta: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return -0.5 * (batch[:, 0] - theta[..., :1]).square().sum(-1)


def log_likelihood_of_rows(theta: torch.Tensor) -> torch.Tensor:
    return -0.5 * (rows()[0][:, 0] - theta[..., :1]).square()


@functools.cache
def _fitted() -> bytes:
    mine, target = q(), model("gaussian")
    ngvi.fit(mine, target, progress=False)
    return mine


def fitted() -> tuple[Any, Any, Any]:
    """A posterior at the optimum of a regression, the regression, and the result of the fit."""
    mine, target = q(), model("gaussian")
    mine.load_state_dict(_fitted().state_dict())
    return mine, target, ngvi.fit(mine, target, progress=False)


def steps(optimizer: Any) -> Any:
    """Use of an optimizer: a step on a regression."""
    optimizer.step(model())
    return optimizer


def steps_on_log_joint(optimizer: Any) -> Any:
    optimizer.step(ngvi.LogJoint(log_joint))
    return optimizer


def used_as(axis: str, rule: Any = rules.VariationalNewton, target: Any = None, **parts: Any) -> Then:
    """Use of a part: a step of an optimizer that has it."""

    def use(part: Any) -> Any:
        given = {"rule": rule(), "lr": 0.1, **parts, axis: part}
        optimizer = ngvi.NaturalGradientVI(q(), **given)
        for _ in range(2):
            optimizer.step(model() if target is None else ngvi.LogJoint(target))
        return optimizer

    return use


def used_posterior(posterior: Any) -> Any:
    posterior.log_prob(posterior.sample((3,)))
    return posterior


def mixed_rows() -> dict[str, Any]:
    X = torch.ones(12, 1, dtype=F64)
    return {"X": X, "y": torch.arange(12, dtype=F64) % 5, "random": (X, torch.arange(12) // 3)}


def mixed_model(family: str = "poisson_log") -> Any:
    return ngvi.MixedModel(**mixed_rows(), family=family)


@functools.cache
def mixed_result() -> Any:
    return mixed_model().fit(progress=False, draws=100)


def net() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Linear(2, 3)


def batches() -> list[Any]:
    return [(torch.randn(4, 2, generator=torch.Generator().manual_seed(k)), torch.tensor([0, 1, 2, 1])) for k in (0, 1)]


def network() -> Any:
    return ngvi.network(net(), num_data=8)


def attached(**options: Any) -> Any:
    posterior = network()
    sgd = torch.optim.SGD(posterior.model.parameters(), lr=0.1)
    given = {"optimizer": sgd, "q": posterior, "steps": 4, **options}
    ngvi.attach(**given)
    for x, y in batches():
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(posterior.model(x), y).backward()
        sgd.step()
    return posterior


def latent_joint(theta: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return -0.5 * (u - theta[..., :1]).square().sum(-1) - 0.5 * theta.square().sum(-1) - u.exp().sum(-1)


def forest() -> Any:
    return structures.arrow(groups=2, local=1, globals=1)


def factors(theta: torch.Tensor) -> torch.Tensor:
    return -0.5 * theta.square().sum(-1)


def flat_gaussian() -> Any:
    return flat.VechGaussian(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))


def antithetic() -> torch.Tensor:
    half = torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    return torch.cat([half, -half])


# ------------------------------------------------------------------------------------ the doors

DOORS: dict[str, Callable[[], Door]] = {}


def door(name: str, function: Any, then: Then = lambda answer: None, /, **arguments: Any) -> None:
    """Add a door; arguments that are functions without a name of their own (`_`) are made for each call."""
    DOORS[name] = lambda: Door(function, {k: v() if isinstance(v, Made) else v for k, v in arguments.items()}, then)


class Made:
    """An argument that is made for each call, since calls change it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        return self.make()


LAST: list[Any] = []


def remembered(make: Callable[[], Any]) -> Callable[[], Any]:
    """What the next argument of the same call is built over."""

    def run() -> Any:
        LAST[:] = [make()]
        return LAST[0]

    return run


Q, MODEL, LOG = Made(q), Made(model), Made(lambda: log_joint)
QUIET = {"progress": False}


def front_doors() -> None:
    door("fit", ngvi.fit, q=Q, target=MODEL, max_evaluations=30, **QUIET)
    door("fit log joint", ngvi.fit, q=Q, target=LOG, max_gradients=400, **QUIET)
    door("fit flat", ngvi.fit, q=Made(flat_gaussian), target=LOG, max_evaluations=5, **QUIET)
    door(
        "fit mixture",
        ngvi.fit,
        q=Made(lambda: posteriors.Mixture(q(batch_shape=(2,), mean=torch.eye(2)))),
        target=LOG,
        max_evaluations=3,
        **QUIET,
    )
    door("fit warped", ngvi.fit, q=Made(lambda: q().warped()), target=LOG, max_evaluations=3, **QUIET)
    door("laplace", ngvi.laplace, q=Q, target=MODEL)
    door(
        "marginal",
        ngvi.marginal,
        lambda t: t.log_joint(torch.zeros(2, 1, dtype=F64)),
        log_joint=latent_joint,
        latents=3,
        at=Made(lambda: torch.zeros(1, dtype=F64)),
    )
    door("refine", ngvi.refine, result_or_q=Made(lambda: fitted()[0]), log_joint=LOG)
    door("examine", ngvi.examine, q=Made(lambda: fitted()[0]), target=LOG, max_gradients=100)
    door("certificate", ngvi.certificate, q=Made(lambda: fitted()[0]), target=MODEL)
    door("compare_models", ngvi.compare_models, models=Made(lambda: {"a": fitted()[2], "b": fitted()[:2]}))
    door("leave_one_out", ngvi.leave_one_out, q=Made(lambda: fitted()[0]), model=Made(lambda: fitted()[1]))
    door("forget", ngvi.forget, result=Made(lambda: fitted()[2]), rows=[0, 1])
    door("add", ngvi.add, result=Made(lambda: fitted()[2]), X=Made(lambda: rows()[0]), y=Made(lambda: rows()[1]))
    door("merge", ngvi.solved.merge, sums=Made(lambda: [ngvi.solved.site_sum(*fitted()[:2])] * 2))
    door("site_sum", ngvi.solved.site_sum, q=Made(lambda: fitted()[0]), model=Made(lambda: fitted()[1]))
    door("solve", ngvi.solved.solve, q=Q, target=MODEL)
    door("sensitivity", ngvi.solved.sensitivity, result=Made(lambda: fitted()[2]))
    door(
        "prior_by_evidence",
        ngvi.prior_by_evidence,
        q=Q,
        model=Made(lambda: model("gaussian")),
        max_rounds=3,
        max_evaluations=30,
    )
    door(
        "simulation_based_calibration",
        diagnostics.simulation_based_calibration,
        prior=lambda g: torch.randn(1, generator=g, dtype=F64),
        simulate=lambda theta, g: theta + torch.randn(3, generator=g, dtype=F64),
        fit=lambda y: q(1, mean=y.mean(), scale=0.5),
        runs=3,
        draws=9,
    )
    door("show_config", ngvi.numerics.show_config)
    door(
        "stacking_weights",
        importlib.import_module("torchngvi.solved").stacking_weights,
        log_density=torch.zeros(4, 2, dtype=F64),
    )
    door("mixture_at_modes", fitting.mixture_at_modes, q=Q, target=LOG)
    # what is done with the answers
    door("q.rsample", lambda sample_shape: q().rsample(sample_shape), sample_shape=(3,))
    door(
        "q.sample",
        lambda sample_shape, generator: q().sample(sample_shape, generator),
        sample_shape=(3,),
        generator=None,
    )
    door("q.log_prob", lambda theta: q().log_prob(theta), theta=torch.zeros(2, dtype=F64))
    door("q.kl", lambda other: q().kl(other), other=Q)
    door("q.initialize_", lambda mean, scale: q().initialize_(mean, scale), mean=0.0, scale=1.0)
    door("q.warped", lambda warp, inside: q().warped(warp, inside=inside), used_posterior, warp=None, inside=False)
    door("result.sample", lambda n, generator: fitted()[2].sample(n, generator), n=3, generator=None)
    door("result.named", lambda names: str(fitted()[2].named(names)), names=["a", "b"])
    door("marginal.latents", lambda theta: _marginal().latents(theta), theta=torch.zeros(2, 1, dtype=F64))
    door("marginal.laplace_error", lambda theta: _marginal().laplace_error(theta), theta=torch.zeros(2, 1, dtype=F64))
    door("model.minibatch", lambda index: model().minibatch(index), index=[0, 1])


def _marginal() -> Any:
    return ngvi.marginal(latent_joint, 3, torch.zeros(1, dtype=F64))


def posterior_doors() -> None:
    for name in ("CholeskyGaussian", "DiagonalGaussian", "NaturalGaussian", "PrecisionCholeskyGaussian"):
        door(name, getattr(ngvi, name), used_posterior, dim=2)
    door("Mixture", posteriors.Mixture, used_posterior, components=Made(lambda: q(batch_shape=(2,))))
    door(
        "Product",
        lambda sites: posteriors.Product(sites),
        lambda p: p.sample((2,)),
        sites=Made(lambda: {"a": q(), "b": q()}),
    )
    door("Warped", posteriors.Warped, used_posterior, base=Q)
    door(
        "clique_marginals",
        posteriors.clique_marginals,
        q=Made(lambda: q(3, ngvi.PrecisionCholeskyGaussian, structure=forest())),
    )
    vector = {
        "Beta": [2.5, 4.0],
        "Categorical": [0.3, -0.5],
        "Dirichlet": [0.7, 3, 5],
        "Gamma": [3.0, 2.0],
        "InverseGamma": [7.0, 2.0],
        "MeanFieldGaussian": [0.3, -0.2, -0.5, 0.4],
        "NormalInverseGamma": [0.3, 0.8, 9.0, 4.0],
        "Poisson": [1.3],
        "Wishart": [3.5, 0.8, -0.3, 1.2],
    }
    for name, values in vector.items():
        door(f"flat.{name}", getattr(flat, name), used_posterior, vector=torch.tensor(values, dtype=F64))
    for name in ("VechGaussian", "VecGaussian", "FlatCholesky"):
        door(
            f"flat.{name}",
            getattr(flat, name),
            used_posterior,
            mean=torch.zeros(2, dtype=F64),
            covariance=torch.eye(2, dtype=F64),
        )
    door(
        "flat.RankOneGaussian",
        flat.RankOneGaussian,
        used_posterior,
        mean=torch.zeros(2, dtype=F64),
        factor=torch.ones(2, dtype=F64),
        scale=torch.ones(2, dtype=F64),
    )
    door(
        "flat.LowRankGaussian",
        flat.LowRankGaussian,
        used_posterior,
        mean=torch.zeros(3, dtype=F64),
        factors=torch.ones(3, 2, dtype=F64).tril(),
        scale=torch.ones(3, dtype=F64),
    )
    door("flat.AffineCoupling", flat.AffineCoupling, lambda f: f(torch.zeros(2, 2)), dim=2, layers=2, hidden=3)
    door("flat.ModuleFlow", flat.ModuleFlow, used_posterior, flow=Made(lambda: flat.AffineCoupling(2, 2, 3)), dim=2)
    door(
        "flat.OrthogonalFlow",
        flat.OrthogonalFlow,
        used_posterior,
        b1=torch.zeros(2, dtype=F64),
        W2=torch.eye(2, dtype=F64),
        b2=torch.zeros(2, dtype=F64),
    )
    for name in (
        "RankOneGaussian",
        "LowRankGaussian",
        "VechGaussian",
        "VecGaussian",
        "FlatCholesky",
        "MeanFieldGaussian",
    ):
        door(f"flat.{name}.standard", getattr(flat, name).standard, used_posterior, dim=2)
    door("structures.Dense", structures.Dense, dim=2)
    door("structures.Diagonal", structures.Diagonal, dim=2)
    door("structures.EqualBlocks", structures.EqualBlocks, lambda s: q(4, structure=s), count=2, size=2)
    door("structures.UnequalBlocks", structures.UnequalBlocks, lambda s: q(3, structure=s), sizes=(1, 2))
    door("structures.block_diagonal", structures.block_diagonal, lambda s: q(3, structure=s), sizes=[1, 2])
    tree = functools.partial(q, 3, ngvi.PrecisionCholeskyGaussian)
    door("structures.Forest", structures.Forest, lambda s: tree(structure=s), parents=(2, 2, -1), sizes=(1, 1, 1))
    door("structures.forest", structures.forest, lambda s: tree(structure=s), parents=[2, 2, None], sizes=[1, 1, 1])
    door("structures.arrow", structures.arrow, lambda s: tree(structure=s), groups=2, local=1, globals=1)
    door("structures.nested", structures.nested, within=[0, 0, 1], local=[1, 1], globals=1)


OPTIMIZERS = (
    "VN",
    "SRVN",
    "IBLR",
    "BWGD",
    "CovarianceGD",
    "RootGD",
    "SymmetricSRVN",
    "SVGDDensity",
    "Snngm",
    "NewtonCG",
)


def optimizer_doors() -> None:
    for name in OPTIMIZERS:
        door(name, getattr(methods, name), steps, posterior=Q, lr=0.1)
    door("NaturalGradientVI", ngvi.NaturalGradientVI, steps, posterior=Q, rule=Made(rules.VariationalNewton), lr=0.1)
    door("NaturalGradientVI by trial", ngvi.NaturalGradientVI, steps, posterior=Q, rule=Made(rules.VariationalNewton))
    door(
        "groups",
        lambda posterior, lr, loss_scale: ngvi.VN([{"posterior": posterior, "lr": lr, "loss_scale": loss_scale}]),
        steps,
        posterior=Q,
        lr=0.1,
        loss_scale=1.0,
    )
    door("add_param_group", _with_group, posterior=Q, lr=0.1)
    door("step", lambda target, resting: ngvi.VN(q(), 0.1).step(target, resting=resting), target=MODEL, resting=None)
    door("step_untried", lambda target: ngvi.VN(q(), 0.1).step_untried(target), target=MODEL)
    door("BBVI", ngvi.BBVI, steps_on_log_joint, posterior=Q, lr=0.1, smoothness=1.0)
    door("ProximalBBVI", ngvi.methods.ProximalBBVI, steps_on_log_joint, posterior=Q, lr=0.1)
    door("NGVI", ngvi.NGVI, steps, posterior=Made(lambda: q(kind=ngvi.NaturalGaussian)))
    door("IFVB", ngvi.IFVB, steps_on_log_joint, posterior=Made(flat_gaussian), lr=0.1)
    door("AIFVB", ngvi.AIFVB, steps_on_log_joint, posterior=Made(flat_gaussian), lr=0.1)
    door("CapturedStep", ngvi.optim.CapturedStep, optimizer=Made(lambda: ngvi.VN(q(), 0.1)), target=MODEL)
    door("ExpectationAverage", ngvi.averaging.ExpectationAverage, q=Made(lambda: q(kind=ngvi.NaturalGaussian)))
    for name, then in {"Constant": used_as("step_size"), "Convex": used_as("step_size")}.items():
        door(f"stepsizes.{name}", getattr(stepsizes, name), then)
    door("KLRadius", stepsizes.KLRadius, used_as("step_size"), radius=1.0)
    door("SufficientDecrease", stepsizes.SufficientDecrease, used_as("step_size"))
    door("Backtracking", stepsizes.Backtracking, used_as("step_size"))
    straight = functools.partial(used_as, rule=rules.NaturalGradient)
    door("Clip", stepsizes.Clip, straight("step_size"), norm=1.0)
    door(
        "Shortest",
        lambda part: stepsizes.Shortest(part, stepsizes.KLRadius(0.1)),
        straight("step_size"),
        part=Made(lambda: stepsizes.Clip(1.0)),
    )
    door("PowerSchedule", stepsizes.PowerSchedule, lambda s: s(1))
    door("harmonic_schedule", stepsizes.harmonic_schedule, t=1)
    door("theorem_schedule", stepsizes.theorem_schedule, t=1)
    door("rules.ExponentialAverage", rules.ExponentialAverage, straight("momentum"))
    door("rules.NormalizedMomentum", rules.NormalizedMomentum, used_as("momentum", rules.NaturalGradient))
    door("rules.Adam", rules.Adam, straight("momentum"))
    door("rules.RootNewton", rules.RootNewton, used_as("rule"))
    door("rules.QuasiNewton", rules.QuasiNewton, used_as("metric", lr=None))
    door("rules.SiteNewton", rules.SiteNewton, model=MODEL)
    door("rules.ProjectedRootGradient", rules.ProjectedRootGradient, used_as("rule", target=log_joint), floor=0.01)
    door("rules.ProjectedSquareRoot", rules.ProjectedSquareRoot, floor=0.01)
    on_log_joint = used_as("estimator", target=log_joint)
    for name in (
        "Stein",
        "BonnetPrice",
        "ClosedEntropyStein",
        "GaussNewton",
        "Hessian",
        "HessianVector",
        "LeastSquaresStein",
        "MonteCarlo",
        "PathDerivative",
        "Reparametrized",
        "ScoreFunction",
    ):
        kind = getattr(expectations, name)
        then = {"GaussNewton": lambda e: None, "MonteCarlo": used_as("estimator"), "BonnetPrice": used_as("estimator")}
        size = {"LeastSquaresStein": 16}.get(name, 4)
        door(f"expectations.{name}", kind, then.get(name, on_log_joint), draws=size)
    for name in ("Antithetic", "Independent", "Fixed", "Quasi"):
        door(
            f"expectations.{name}",
            getattr(expectations, name),
            lambda d: on_log_joint(expectations.Stein(d)),
            num_samples=8,
        )
    door("expectations.PerFactor", expectations.PerFactor, estimator=Made(expectations.Stein))
    door("expectations.PiecewiseBound", expectations.PiecewiseBound, used_as("estimator"))
    door("expectations.SampleAverage", expectations.SampleAverage, draws=Made(lambda: ngvi.Fixed(8)))
    door("expectations.StatisticRegression", expectations.StatisticRegression)
    door("metrics.Adam", metrics.Adam)
    ifvb_step = lambda m: steps_on_log_joint(  # noqa: E731
        PreconditionedVI(flat_gaussian(), m, 0.1, estimator=ifvb.Pathwise(3))
    )
    door("metrics.BatchFisher", metrics.BatchFisher, ifvb_step, samples=10)
    door("metrics.MatrixFree", metrics.MatrixFree, ifvb_step, samples=3, warmup=2)
    door("metrics.Recursive", metrics.Recursive, ifvb_step, samples=3, warmup=2)
    door("metrics.Window", metrics.Window, ifvb_step, keep=10, samples=3, warmup=2)
    door("metrics.Blocks", metrics.Blocks, rule=Made(lambda: metrics.Recursive(3, warmup=2)), sizes=[2, 3])
    door("ifvb.Averaging", ifvb.Averaging, lambda a: steps_on_log_joint(ngvi.AIFVB(flat_gaussian(), 0.1, averaging=a)))
    door(
        "ifvb.ControlVariate",
        ifvb.ControlVariate,
        lambda e: steps_on_log_joint(ngvi.IFVB(flat_gaussian(), 0.1, estimator=e)),
        draws=5,
    )
    door("ifvb.Pathwise", ifvb.Pathwise, lambda e: steps_on_log_joint(ngvi.IFVB(flat_gaussian(), 0.1, estimator=e)))
    door(
        "ifvb.ScoreFunction",
        ifvb.ScoreFunction,
        lambda e: steps_on_log_joint(ngvi.IFVB(flat_gaussian(), 0.1, estimator=e)),
        draws=5,
    )
    door("ifvb.LowerBound", ifvb.LowerBound, function=LOG)
    door("ifvb.lower_bound", ifvb.lower_bound, q=Made(flat_gaussian), log_joint=LOG, draws=10)
    door("ifvb.marginal_sample", ifvb.marginal_sample, q=Made(flat_gaussian), covariance=torch.eye(5, dtype=F64), n=3)
    door("ifvb.run", ifvb.run, optimizer=Made(lambda: ngvi.IFVB(flat_gaussian(), 0.01)), target=LOG, max_steps=3)
    door(
        "ifvb.GroupLassoNetwork",
        ifvb.GroupLassoNetwork,
        X=Made(lambda: rows()[0]),
        y=Made(lambda: rows()[1]),
        hidden=(2,),
    )
    door(
        "ifvb.asymptotic_covariance",
        ifvb.asymptotic_covariance,
        optimizer=Made(lambda: steps_on_log_joint(ngvi.AIFVB(flat_gaussian(), 0.1))),
        target=LOG,
        repeats=3,
    )
    for name, options in {
        "Evaluations": {"most": 3},
        "Gradients": {"most": 3},
        "NormBelow": {"tolerance": 0.1},
        "Seconds": {"most": 3.0},
        "SlopeBelow": {},
        "SlopeStop": {},
        "Stalled": {"steps": 3},
        "Unimproved": {"steps": 3},
    }.items():
        then = (lambda s: None) if name == "SlopeStop" else lambda s: ngvi.fit(q(), model(), stop=s, progress=False)
        door(f"fitting.{name}", getattr(fitting, name), then, **options)


def model_doors() -> None:
    fits = lambda m: ngvi.VN(q(m.dim if hasattr(m, "dim") else 2), 0.1).step(m)  # noqa: E731
    X, y = Made(lambda: rows()[0]), Made(lambda: rows()[1])
    door("GeneralizedLinear", ngvi.GeneralizedLinear, fits, X=X, y=y)
    door("LogJoint", ngvi.LogJoint, fits, function=LOG)
    door(
        "DataLogJoint",
        ngvi.DataLogJoint,
        fits,
        log_likelihood=log_likelihood,
        log_prior=log_prior,
        batches=Made(lambda: [rows()[0]]),
        num_data=8,
    )
    door("PerDatum", models.PerDatum, fits, log_likelihoods=log_likelihood_of_rows, log_prior=log_prior)
    door("Streamed", ngvi.Streamed, fits, batches=Made(lambda: [rows()]), num_data=8, model=ngvi.GeneralizedLinear)
    door("Sharded", ngvi.Sharded, local=MODEL, num_data=8)
    door("ShardedDraws", models.ShardedDraws, target=LOG)
    door(
        "RowSpace",
        fitting.RowSpace,
        model=Made(lambda: ngvi.GeneralizedLinear(rows()[0].T.contiguous(), [0.0, 1.0])),
    )
    door(
        "MixedModel",
        _mixed,
        **{k: Made(lambda k=k: mixed_rows()[k]) for k in ("X", "y", "random")},
        family="poisson",
    )
    door(
        "MixedModel.fit",
        lambda draws, seed, nodes: mixed_model().fit(draws=draws, seed=seed, nodes=nodes, progress=False),
        draws=100,
        seed=0,
        nodes=3,
    )
    door("TableResult.summary", lambda interval: str(mixed_result().summary(interval)), interval=0.95)
    door("TableResult.effects", lambda interval: mixed_result().effects(interval), interval=0.95)
    door("TableResult.draws", lambda count, seed: mixed_result().draws(count, seed), count=8, seed=0)
    door("TableResult.sample", lambda n: mixed_result().sample(n), n=8)
    door("TableResult.leave_one_group_out", lambda worst: mixed_result().leave_one_group_out(worst), worst=0.7)
    door(
        "TableResult.leave_one_out",
        lambda worst, count, seed: mixed_result().leave_one_out(worst, count, seed),
        worst=0.7,
        count=100,
        seed=0,
    )
    door(
        "TableResult.predict",
        mixed_result().predict,
        X=torch.ones(2, 1, dtype=F64),
        Z=torch.ones(2, 1, dtype=F64),
        groups=torch.tensor([0, 1]),
    )
    door("tables.FitSettings.asked", ngvi.tables.FitSettings().asked, draws=100, nodes=3)
    door("tables.family_of", ngvi.tables.family_of, family="poisson")
    door("tables.parse_prior", ngvi.tables.parse_prior, text="normal(0, 1)")
    for name, arguments in (("Normal", {"mean": 0.0, "sd": 1.0}), ("HalfT", {"dof": 3.0, "scale": 1.0})):
        door(f"tables.{name}", getattr(ngvi.tables, name), **arguments)
    mixed = {"X": Made(lambda: mixed_rows()["X"]), "y": Made(lambda: mixed_rows()["y"]), "family": "poisson_log"}
    door("models.MixedLogJoint", models.MixedLogJoint, random=Made(lambda: mixed_rows()["random"]), **mixed)
    door("models.RandomEffects", models.RandomEffects, Z=Made(lambda: mixed_rows()["X"]), groups=torch.arange(12) // 3)
    door(
        "models.MixedPrior",
        models.MixedPrior,
        lambda p: models.MixedLogJoint(**mixed_rows(), family="poisson_log", prior=p),
    )
    for name in ("HalfNormal", "HalfT", "Exponential"):
        door(
            f"models.{name}",
            getattr(models, name),
            lambda p: models.MixedLogJoint(**mixed_rows(), family="poisson_log", prior=models.MixedPrior(sd=p)),
        )
    door(
        "models.Wishart",
        models.Wishart,
        lambda p: models.MixedLogJoint(**mixed_rows(), family="poisson_log", prior=models.MixedPrior(precision=p)),
        dof=3.0,
        scale=1.0,
    )
    door("models.SoftmaxRegression", models.SoftmaxRegression, lambda m: m.dim, X=X, y=y, num_nodes=16)
    door("models.GaussianNoise", models.GaussianNoise, lambda f: model(f))
    door("models.NegativeBinomial", models.NegativeBinomial, lambda f: model(f), dispersion=2.0)
    door("models.StudentT", models.StudentT, lambda f: model(f), scale=1.0, dof=4.0)
    door("models.ExpectedPenalty", models.ExpectedPenalty, lambda p: models.Regularized(model(), p))
    door("models.MeanPenalty", models.MeanPenalty, lambda p: models.Regularized(model(), p))
    door("models.Regularized", models.Regularized, fits, model=MODEL, penalty=Made(models.MeanPenalty))
    door(
        "models.GroupedLogJoint",
        models.GroupedLogJoint,
        group=lambda u, shared, data: -(u - data).square().sum(-1),
        shared=log_prior,
        data=Made(lambda: [torch.tensor([0.0, 1.0])]),
        local=1,
        globals=1,
    )
    door(
        "models.FactorTarget",
        models.FactorTarget,
        structure=Made(forest),
        factors=Made(lambda: [(0, factors), (1, factors)]),
    )
    door(
        "models.TractableFactors",
        models.TractableFactors,
        structure=Made(forest),
        factors=Made(lambda: [(0, model()), (1, model())]),
    )
    door(
        "models.FactorGraph",
        models.FactorGraph,
        factors=Made(lambda: [models.ExpectedFactor(lambda a: -a.square().sum(-1), "a")]),
    )
    door(
        "models.ExpectedFactor",
        lambda function, site, scale: models.ExpectedFactor(function, site, scale=scale),
        function=lambda a: -a.square().sum(-1),
        site="a",
        scale=1.0,
    )
    door(
        "models.SiteFactor",
        lambda function, site, plates, scale: models.SiteFactor(function, site, plates=plates, scale=scale),
        function=lambda a: -a.square().sum(-1),
        site="a",
        plates=(),
        scale=1.0,
    )
    door(
        "models.MixtureIntegrand",
        models.MixtureIntegrand,
        q=Made(lambda: posteriors.Mixture(q(batch_shape=(2,)))),
        target=Made(lambda: ngvi.LogJoint(log_joint)),
    )
    door(
        "models.WarpedTarget",
        models.WarpedTarget,
        target=Made(lambda: ngvi.LogJoint(log_joint)),
        q=Made(lambda: q().warped()),
    )
    door("models.ShardedLogJoint", models.ShardedLogJoint, local=MODEL, processes=Made(ngvi.Processes), num_data=8)
    door("Processes", ngvi.Processes)
    door("synchronize", ngvi.distributed.synchronize, q=Q)
    door(
        "sum_gradients",
        ngvi.distributed.sum_gradients,
        optimizer=Made(lambda: torch.optim.SGD(net().parameters(), lr=0.1)),
    )


def _mixed(
    X: Any, y: Any, random: Any, family: Any, priors: Any = None, weights: Any = None, offset: Any = None
) -> Any:
    return ngvi.MixedModel(X, y, random, family, priors=priors, weights=weights, offset=offset)


def _with_group(posterior: Any, lr: Any) -> Any:
    optimizer = ngvi.VN(q(), 0.1)
    optimizer.add_param_group({"posterior": posterior, "lr": lr})
    return optimizer


def diagnostic_doors() -> None:
    X, y = Made(lambda: rows()[0]), Made(lambda: rows()[1])
    seen = {"q": Made(lambda: fitted()[0]), "model": MODEL}
    door("diagnostics.accuracy", diagnostics.accuracy, X=X, y=y, **seen)
    door("diagnostics.log_predictive_density", diagnostics.log_predictive_density, X=X, y=y, **seen)
    door("diagnostics.predictive_mean", diagnostics.predictive_mean, X=X, **seen)
    door("diagnostics.predictor_moments", diagnostics.predictor_moments, X=X, **seen)
    door("diagnostics.elbo", diagnostics.elbo, q=Q, target=LOG, num_samples=8)
    door("diagnostics.log_weights", diagnostics.log_weights, q=Q, target=LOG, num_samples=8)
    door("diagnostics.k_hat", diagnostics.k_hat, log_weights=Made(lambda: torch.linspace(-1, 1, 128, dtype=F64)))
    door("diagnostics.smoothed", diagnostics.smoothed, log_weights=Made(lambda: torch.linspace(-1, 1, 128, dtype=F64)))
    door("diagnostics.compare_estimators", diagnostics.compare_estimators, q=Q, target=LOG, draws=4, repeats=3)
    door(
        "diagnostics.confirm",
        diagnostics.confirm,
        q=Q,
        target=Made(lambda: ngvi.LogJoint(log_joint)),
        coordinates=torch.tensor([0]),
        num_samples=16,
    )
    door("diagnostics.holm", diagnostics.holm, p_values=torch.tensor([0.1, 0.2]))
    door("diagnostics.coded", diagnostics.coded, likelihood=Made(models.BernoulliLogit), y=y)
    one = torch.ones(3, dtype=F64)
    door(
        "diagnostics.log_expected_likelihood",
        diagnostics.log_expected_likelihood,
        likelihood=Made(models.BernoulliLogit),
        mean=one,
        sd=one,
        y=one,
    )
    z = Made(lambda: antithetic())
    door("diagnostics.tails", diagnostics.tails, z=z, residuals=z)
    door("diagnostics.third_order", diagnostics.third_order, z=z, residuals=z)
    door(
        "diagnostics.third_order_of_values",
        diagnostics.third_order_of_values,
        z=z,
        log_weights=Made(lambda: torch.linspace(-1, 1, 128, dtype=F64)),
    )
    door(
        "diagnostics.response_covariance",
        diagnostics.response_covariance,
        frame=Made(lambda: q().frame()),
        M=torch.zeros(2, 2, dtype=F64),
    )
    door(
        "diagnostics.response_log_sd",
        diagnostics.response_log_sd,
        frame=Made(lambda: q().frame()),
        M=torch.zeros(2, 2, dtype=F64),
    )
    door("diagnostics.Extremes", diagnostics.Extremes, q=Q)
    door("diagnostics.Uniformity", diagnostics.Uniformity, count=10, draws=9)
    theory = {"L": 1.0, "S": 2.0, "dim": 2, "distance2": 1.0, "delta": 1.0}
    door("bbvi.closed_entropy_bound", bbvi.closed_entropy_bound, **theory)
    door("bbvi.closed_entropy_variance", bbvi.closed_entropy_variance, L=1.0, dim=2, distance2=1.0)
    door("bbvi.landing_bound", bbvi.landing_bound, L=1.0, S=2.0, dim=2, fisher4=1.0, delta=1.0)
    door("bbvi.landing_variance", bbvi.landing_variance, L=1.0, dim=2, fisher4=1.0)
    door("bbvi.StudentT", bbvi.StudentT, dof=5.0)
    door("bbvi.fisher_hyvarinen", bbvi.fisher_hyvarinen, q=Q, target=Made(lambda: ngvi.LogJoint(log_joint)))
    door(
        "bbvi.empirical_variance",
        bbvi.empirical_variance,
        moments=torch.ones(3),
        distances2=torch.arange(1.0, 4.0),
        at_optimum=1.0,
    )
    door("bbvi.wasserstein_to_point", bbvi.wasserstein_to_point, mean=one, C=torch.eye(3, dtype=F64), point=one)
    door("ngvi.covariance_factor", wu2024.covariance_factor, T=5)
    door("ngvi.rate_bound", wu2024.rate_bound, V=1.0, T=5)
    door("ngvi.sharp_rate_bound", wu2024.sharp_rate_bound, V=1.0, T=5)
    nat = Made(lambda: q(kind=ngvi.NaturalGaussian))
    door("ngvi.symmetric_kl", wu2024.symmetric_kl, q=nat, other=nat)
    door(
        "ngvi.gradient_variance",
        wu2024.gradient_variance,
        steps=Made(lambda: q(kind=ngvi.NaturalGaussian, batch_shape=(3,))),
        exact=nat,
        gamma=0.5,
    )
    door("ngvi.limiting_variance", wu2024.limiting_variance, model=Made(lambda: model("gaussian")), q=Q, batch=2)


def network_doors() -> None:
    door("network", ngvi.network, lambda p: p.predict(batches()[0][0], samples=2), model=Made(net), num_data=8)
    door("NetworkGaussian", networks.NetworkGaussian, model=Made(net), num_data=8)
    door("attach", _attach, steps=4, radius=None, curvature=None, length=None)
    door(
        "attach over",
        lambda optimizer, q: ngvi.attach(optimizer, q, steps=4),
        q=Made(remembered(network)),
        optimizer=Made(lambda: torch.optim.SGD(LAST[0].model.parameters(), lr=0.1)),
    )
    door("VON", ngvi.VON, model=Made(net), num_data=8, lr=0.1, steps=4)
    door("IVON", networks.IVON, model=Made(net), num_data=8, lr=0.1)
    door("VOGN", networks.VOGN, model=Made(net), num_data=8, lr=0.1)
    door("calibrate", ngvi.calibrate, q=Made(network), loader=Made(batches), samples=2)
    door("StepLength", networks.StepLength, lambda length: attached(length=length), nats=0.1)
    curvature = lambda c: attached(curvature=c)  # noqa: E731
    door("SampledLabels", networks.SampledLabels, curvature)
    door("GradientNoise", networks.GradientNoise, curvature, batch_size=4)
    door("networks.Reparametrized", networks.Reparametrized, curvature)
    door("networks.ExampleGradients", networks.ExampleGradients)
    door("networks.Categorical", networks.Categorical, lambda family: ngvi.network(net(), 8, likelihood=family))
    door("networks.Gaussian", networks.Gaussian, lambda family: ngvi.network(net(), 8, likelihood=family), scale=1.0)
    x, y = batches()[0]
    door(
        "network.predict",
        lambda inputs, samples, read: network().predict(inputs, samples, read),
        inputs=x,
        samples=2,
        read=None,
    )
    door(
        "network.log_prob", lambda inputs, y, samples: network().log_prob(inputs, y, samples), inputs=x, y=y, samples=2
    )
    door(
        "network.laplace",
        lambda loader, labels, read: network().laplace(loader, labels, read),
        loader=Made(batches),
        labels=None,
        read=None,
    )
    door(
        "network.update_bn",
        lambda loader, device: network().update_bn(loader, device),
        loader=Made(batches),
        device=None,
    )


def _attach(steps: Any, radius: Any, curvature: Any, length: Any) -> Any:
    return attached(steps=steps, radius=radius, curvature=curvature, length=length)


def adapter_doors() -> None:
    if importlib.util.find_spec("sklearn"):
        from torchngvi.adapters import sklearn

        data = [t.numpy() for t in rows()]
        counts = data[0], np.arange(8) % 4
        for name, (X, y) in {
            "BayesianLinearRegression": data,
            "BayesianLogisticRegression": data,
            "BayesianPoissonRegression": counts,
        }.items():
            kind = getattr(sklearn, name)
            door(f"sklearn.{name}", kind, lambda e, _X=X, _y=y: e.fit(_X, _y))
            door(
                f"sklearn.{name}.fit",
                lambda X, y, sample_weight, _kind=kind: _kind().fit(X, y, sample_weight),
                X=X,
                y=y,
                sample_weight=None,
            )
            door(f"sklearn.{name}.predict", lambda X, _kind=kind, _y=y: _kind().fit(data[0], _y).predict(X), X=X)
        groups = np.arange(8) % 3
        for name in ("BayesianMixedRegressor", "BayesianMixedClassifier"):
            kind = getattr(sklearn, name)
            door(f"sklearn.{name}", kind, lambda e: e.fit(*data, groups=groups), draws=100)
            door(
                f"sklearn.{name}.fit",
                lambda X, y, groups, sample_weight, _kind=kind: _kind(draws=100).fit(
                    X, y, groups=groups, sample_weight=sample_weight
                ),
                X=data[0],
                y=data[1],
                groups=groups,
                sample_weight=None,
            )
    if importlib.util.find_spec("gpytorch"):
        gpytorch_doors()
    if importlib.util.find_spec("pyro"):
        pyro_doors()
    if importlib.util.find_spec("formulae"):
        import pandas as pd

        frame = pd.DataFrame({"y": np.arange(12) % 5, "x": np.linspace(-1, 1, 12), "g": list("abc") * 4})
        door("mixed", ngvi.mixed, formula="y ~ x + (1 | g)", frame=frame, family="poisson")
    from torchngvi.adapters import files

    folder = Path(tempfile.mkdtemp(prefix="hostile_"))
    (folder / "a.csv").write_text("x,z,y\n1,2,0\n2,1,1\n0,1,1\n")
    np.save(folder / "X.npy", rows()[0].numpy())
    np.save(folder / "y.npy", rows()[1].numpy())
    door("files.Csv", files.Csv, list, files=str(folder / "a.csv"), target="y")
    door("files.Npy", files.Npy, list, X=str(folder / "X.npy"), y=str(folder / "y.npy"))


def gpytorch_doors() -> None:
    import gpytorch

    from torchngvi.adapters import gpytorch as adapter

    class GP(gpytorch.models.ApproximateGP):
        def __init__(self, **options: Any) -> None:
            distribution = adapter.NaturalGradientVariationalDistribution(3, **options)
            points = torch.linspace(-1, 1, 3, dtype=F64)[:, None]
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution, True))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def made(**options: Any) -> Any:
        return GP(**options).double()

    likelihood = Made(lambda: gpytorch.likelihoods.GaussianLikelihood().double())
    data = torch.linspace(-1, 1, 8, dtype=F64)[:, None], torch.linspace(-1, 1, 8, dtype=F64).sin()

    def mll(model: Any = None, likelihood: Any = None) -> Any:
        return gpytorch.mlls.VariationalELBO(gpytorch.likelihoods.GaussianLikelihood().double(), made(), num_data=8)

    seen = {"model": Made(made), "likelihood": likelihood}
    door(
        "gpytorch.NaturalGradientVariationalDistribution",
        adapter.NaturalGradientVariationalDistribution,
        lambda d: d(),
        num_inducing_points=3,
    )
    door("gpytorch.natural_optimizer", adapter.natural_optimizer, mll=Made(mll))
    door("gpytorch.refine_svgp", adapter.refine_svgp, batches=Made(lambda: [data]), **seen, **QUIET)
    door("gpytorch.train_svgp", adapter.train_svgp, data=data, rounds=1, **seen, **QUIET)
    door(
        "gpytorch.train_svgp_in_batches",
        adapter.train_svgp_in_batches,
        batches=Made(lambda: [data]),
        num_data=8,
        epochs=1,
        model=Made(remembered(made)),
        likelihood=likelihood,
        hyper_optimizer=Made(lambda: torch.optim.Adam(LAST[0].covar_module.parameters(), lr=0.1)),
        **QUIET,
    )
    door("gpytorch.variational_posteriors", adapter.variational_posteriors, model=Made(made))
    door("gpytorch.SparseGP", adapter.SparseGP, batches=Made(lambda: [data]), num_data=8, **seen)


def pyro_doors() -> None:
    import pyro

    from torchngvi.adapters import pyro as adapter

    normal = pyro.distributions.Normal
    y = torch.tensor([0.0, 1.0, 2.0])

    def simple(y: Any = y) -> Any:
        theta = pyro.sample("theta", normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", normal(theta, 1.0), obs=y)

    def local(y: Any = y) -> Any:
        theta = pyro.sample("theta", normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            z = pyro.sample("z", normal(theta, 1.0))
            pyro.sample("y", normal(z, 1.0), obs=y)

    def clear(function: Any) -> Any:
        def run(**given: Any) -> Any:
            pyro.clear_param_store()
            return function(**given)

        run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return run

    door("pyro.AutoGaussian", clear(adapter.AutoGaussian), lambda g: g(), model=simple)
    door("pyro.AutoLocalGaussian", clear(adapter.AutoLocalGaussian), model=local, plate="rows")
    door("pyro.AutoProduct", clear(adapter.AutoProduct), lambda g: g(), model=simple)
    door("pyro.LatentGaussian", adapter.LatentGaussian, lambda d: d.sample(), q=Q)
    door(
        "pyro.log_joint", lambda model: adapter.log_joint(model), lambda t: t.log_joint(torch.zeros(2, 1)), model=simple
    )
    door("pyro.ModelLogJoint", adapter.ModelLogJoint, lambda t: t.log_joint(torch.zeros(2, 1)), model=simple)
    door("pyro.centred", lambda model, options: adapter.centred(model, options=options), model=local, options=None)
    door(
        "pyro.NaturalSVI",
        clear(adapter.NaturalSVI),
        lambda s: s.step(),
        model=simple,
        guide=Made(lambda: adapter.AutoGaussian(simple)),
    )
    door(
        "pyro.fit_guide",
        clear(lambda model, guide, options, batches: adapter.fit_guide(model, guide, options=options, batches=batches)),
        model=simple,
        guide=Made(lambda: adapter.AutoGaussian(simple)),
        options={"progress": False},
        batches=None,
    )


def build() -> None:
    """Fill the table of doors once."""
    if not DOORS:
        for more in (
            front_doors,
            posterior_doors,
            optimizer_doors,
            model_doors,
            diagnostic_doors,
            network_doors,
            adapter_doors,
        ):
            more()


# ------------------------------------------------------------------------------------ hostile values


class Strange:
    """An object of no use."""

    def __repr__(self) -> str:
        return "Strange()"


HOSTILE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "'x'": lambda: "x",
    "''": lambda: "",
    "'gpu'": lambda: "gpu",
    "b'x'": lambda: b"x",
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "1e-320": lambda: 1e-320,
    "2**63": lambda: 2**63,
    "-2**63": lambda: -(2**63),
    "10**400": lambda: 10**400,
    "1j": lambda: 1j,
    "True": lambda: True,
    "[]": lambda: [],
    "{}": lambda: {},
    "[None]": lambda: [None],
    "['a', 1]": lambda: ["a", 1],
    "object": Strange,
    "lambda": lambda: lambda: None,
    "lambda x": lambda: lambda x: x,
    "a type": lambda: int,
    "a posterior's class": lambda: ngvi.CholeskyGaussian,
    "a posterior": lambda: q(),
    "a model": lambda: model(),
    "a result": lambda: fitted()[2],
    "a network": net,
    "empty": lambda: torch.empty(0, dtype=F64),
    "wrong shape": lambda: torch.ones(3, 5, 7, dtype=F64),
    "complex": lambda: torch.ones(2, dtype=torch.complex128),
    "whole": lambda: torch.ones(2, dtype=torch.int64),
    "of nan": lambda: torch.full((2,), torch.nan, dtype=F64),
    "meta": lambda: torch.ones(2, device="meta"),
    "grad": lambda: torch.ones((), dtype=F64, requires_grad=True),
    "array of texts": lambda: np.array(["a", "b"]),
    "a generator": torch.Generator,
    "a dtype": lambda: torch.int32,
    "a path": lambda: Path("/nowhere/at/all"),
    "a module": lambda: types,
}


@dataclass(frozen=True)
class Outcome:
    """How a case ended: "works", "refused", "own" (`is_own`) or "raw", with the line of the package and the error."""

    word: str
    line: str = ""
    error: str = ""


class NoEnd(BaseException):
    """The time is over; no library catches it."""


def _alarm(*_: Any) -> None:
    raise NoEnd


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bounds of memory, nothing on the screen, and an empty folder for the files that are written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, hard))
    before = signal.signal(signal.SIGPROF, _alarm)
    quiet = io.StringIO()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(name: str, argument: str | None = None, value: str | None = None) -> Outcome:
    """Make one call, with one argument replaced by a hostile value, or as it is."""
    made = DOORS[name]()
    hostile = None if value is None else HOSTILE[value]()
    torch.manual_seed(0)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        made.call(argument, hostile)
    except TorchngviError as error:
        return Outcome("refused", place(error), str(error))
    except NoEnd as error:
        return Outcome("raw", place(error), "no end")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what ends the interpreter is raw too
        if is_own(error):
            return Outcome("own")
        return Outcome(
            "raw", place(error), f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        torch.set_default_dtype(torch.float32)
    return Outcome("works")


_SIGNATURE = re.compile(r"missing \d+ required|takes .* positional argument|unexpected keyword argument")


def is_own(error: BaseException) -> bool:
    """Whether an error is raised by code that is the user's, or a convention of scikit-learn's.

    A function of a door that is called with hostile data, a hostile function or network that is called with good ones:
    each raises its own error, which must reach its author as it is, and so must what Python says of a function that
    takes other arguments.  Estimators refuse data by the ``ValueError`` and
    ``TypeError`` of scikit-learn's validation, as every estimator does.
    """
    if isinstance(error, TypeError) and _SIGNATURE.search(str(error)):
        return True
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    inside = [k for k, file in enumerate(files) if file.startswith(PACKAGE)]
    if not inside:
        return False
    after = files[inside[-1] + 1 :]
    if isinstance(error, ValueError | TypeError) and any(f"{os.sep}sklearn{os.sep}" in file for file in after):
        return True
    return bool(after) and (after[0] == __file__ or after[0].endswith(os.path.join("nn", "modules", "module.py")))


def place(error: BaseException) -> str:
    """The innermost line of the package that an error passed."""
    inside = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
    if not inside:
        return "outside"
    return f"{inside[-1].filename.removeprefix(PACKAGE)}:{inside[-1].lineno}"


def cases(only: str | None = None) -> list[tuple[str, str, str]]:
    """Every door, argument and hostile value."""
    build()
    return [
        (name, argument, value)
        for name, make in DOORS.items()
        if only is None or any(part in name for part in only.split(","))
        for argument in make().all_arguments()
        for value in HOSTILE
    ]


def sampled(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """So many cases, the same for the same seed."""
    every = cases()
    return random.Random(seed).sample(every, min(count, len(every)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="doors whose names contain one of these, with commas between them")
    parser.add_argument("--sample", type=int, help="so many cases, drawn with a fixed seed")
    parser.add_argument("--each", action="store_true", help="print every raw case")
    parser.add_argument("--check", action="store_true", help="only whether the calls work as they are")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    build()
    words, lines, slow = collections.Counter(), collections.defaultdict(list), []
    with bounded():
        broken = {}
        for name in DOORS:
            if chosen.only is None or any(part in name for part in chosen.only.split(",")):
                begun = time.perf_counter()
                outcome = run(name)
                if outcome.word != "works" or time.perf_counter() - begun > 0.2:
                    broken[name] = outcome, round(time.perf_counter() - begun, 2)
        for name, outcome in broken.items():
            print(f"as it is: {name}: {outcome}", file=sys.__stdout__)
        for case in () if chosen.check else sampled(chosen.sample) if chosen.sample else cases(chosen.only):
            begun = time.perf_counter()
            outcome = run(*case)
            words[outcome.word] += 1
            if outcome.word == "raw":
                lines[outcome.line].append((case, outcome.error))
                if chosen.each:
                    print(f"{outcome.line} {case}: {outcome.error[:200]}", file=sys.__stdout__, flush=True)
            slow.append((time.perf_counter() - begun, case))
    for line, found in sorted(lines.items(), key=lambda item: -len(item[1])):
        arguments = sorted({f"{name}({argument}=)" for (name, argument, _), _ in found})
        print(f"{len(found):5} {line}: {', '.join(arguments[:6])}{' ..' if len(arguments) > 6 else ''}")
        for (name, argument, value), error in found[:1]:
            print(f"        {name}({argument}={value}): {error[:200]}")
    print(f"slowest: {sorted(slow)[-5:]}; {sum(s for s, _ in slow):.0f} s in all")
    print(f"{sum(words.values())} cases: {dict(words)}, on {len(lines)} lines")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
