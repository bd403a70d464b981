"""All stochastic methods and the default beside each other: gap to the best q after the same numbers of gradients.

    [TORCHNGVI_DATA=...] python benchmarks/stochastic.py [--full] [--only NAMES] [--out runs/stochastic] [--from-logs]

All start at N(0, 0.1² I), but for the mini-batches and eight schools, which start at N(0, I).  Each method runs at each
of a few constant rates (the last factor of those in `CONTENDERS`; Euclidean ones in units of 1/L), all rates and seeds
as one batched posterior, and is shown at the rate that is best *in hindsight*, for each budget another, by the median
over seeds; `fit` has none.  A gradient is one of the log joint at one draw; ten draws of which the Hessian is known
(Bonnet, Price) count as ten, Hessians by products as D + 1 a draw, an evaluation of all expectations of a model by
quadrature as one, each a pass over the data.  With mini-batches passes are counted, whatever the number of draws.

The gap is that of the exact negative ELBO, by quadrature (eight schools: 8,192 fixed draws), to its minimum.
Seconds are of the processor, on one thread: the steps to the first look at which the median is within the gap, times
those of a step of one run alone.  German credit and eight schools need TORCHNGVI_DATA and are left out without.
10,000 gradients, 3,000 where D is about 50, 16 passes, three seeds: twelve minutes, nine without the data; `--full`:
30,000, 32 passes and five seeds.
"""

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from evaluations import breast_cancer
from matplotlib.ticker import NullLocator
from torch import Tensor

from examples.compare_methods.plots import blank_figure, color, style
from torchngvi import (
    BBVI,
    NGVI,
    SRVN,
    VN,
    CholeskyGaussian,
    DataLogJoint,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    NaturalGaussian,
    NaturalGradientVI,
    PrecisionCholeskyGaussian,
    Snngm,
    Stein,
    fit,
)
from torchngvi.averaging import ExpectationAverage
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import BonnetPrice, Fixed, Hessian, Independent, PathDerivative, Reparametrized
from torchngvi.methods import ProximalBBVI, RootGD
from torchngvi.models.likelihoods import StudentT
from torchngvi.rules import Adam, ProjectedRootGradient
from torchngvi.stepsizes import theorem_schedule
from torchngvi.theory.kim2024 import landing_variance

sys.path.append(str(Path(__file__).parents[1]))  # of the clone, which has the studies
from examples.papers.tan2025.logistic import regression  # noqa: E402

LOOKS = (100, 200, 300, 600, 1_000, 2_000, 3_000, 6_000, 10_000, 20_000, 30_000)  # gradients
BUDGETS = (300, 1_000, 3_000, 10_000, 30_000)
PASSES = (1, 2, 4, 8, 16, 32)  # of the mini-batches
REACHED = (0.1, 0.01)  # nats
DRAWS, BATCH = 10, 512
FLOAT = {"dtype": torch.float64}


# ------------------------------------------------------------------------------------ problems


@dataclass
class Problem:
    """A log joint, how a q is judged on it, and its constants."""

    title: str
    dim: int
    log_joint: Callable[[Tensor], Tensor]
    model: GeneralizedLinear | None
    smoothness: float  # L
    convexity: float  # μ, 0 where there is none
    mean_field: bool = False
    in_batches: bool = False
    scale: float = 0.1  # of the start
    lowest: float = 0.0
    most: int = 10_000  # gradients of the stochastic methods

    def family(self, letter: str) -> Any:
        """C, T or S: a root of the covariance, of the precision, or natural coordinates."""
        dense = {"C": CholeskyGaussian, "T": PrecisionCholeskyGaussian, "S": NaturalGaussian}
        return DiagonalGaussian if self.mean_field else dense[letter]

    def start(self, letter: str = "C", shape: tuple[int, ...] = ()) -> Any:
        return self.family(letter)(self.dim, shape, scale=self.scale, **FLOAT)

    @torch.no_grad()
    def objective(self, q: Any) -> Tensor:
        """The negative ELBO, one a member."""
        if self.model is not None:
            return self.model.negative_elbo(q)
        z = Fixed(8192, seed=7)(torch.zeros(self.dim, **FLOAT))
        z = z.reshape(-1, *(1,) * len(q.batch_shape), self.dim).expand(-1, *q.batch_shape, self.dim)
        values = [self.log_joint(q.push_noise(part)).sum(0) for part in z.split(1024)]
        return -sum(values) / len(z) - q.entropy()

    def gap(self, q: Any) -> Tensor:
        return torch.nan_to_num(self.objective(q) - self.lowest, nan=torch.inf).clamp_min(0)


def of_model(title: str, model: GeneralizedLinear, curvature: float, convex: bool = True, **options: Any) -> Problem:
    """A generalised linear model whose likelihood has at most that curvature."""
    prior = float(model.prior.precision.min())
    largest = curvature * float(torch.linalg.matrix_norm(model.X, 2)) ** 2 + prior
    problem = Problem(title, model.dim, model.log_joint, model, largest, prior if convex else 0.0, **options)
    q = problem.start("C")
    result = fit(q, model, tolerance=1e-8, max_evaluations=3000, progress=False)
    problem.lowest = result.loss
    return problem


def gaussian(title: str, eigenvalues: Tensor, **options: Any) -> Problem:
    """N(z̄, Λ⁻¹) with Λ of these eigenvalues, as the posterior of a linear regression with Λ = XᵀX + β I."""
    dim, generator, beta = len(eigenvalues), torch.Generator().manual_seed(1), 0.5 * float(eigenvalues.min())
    Q = torch.linalg.qr(torch.randn(dim, dim, generator=generator, **FLOAT)).Q
    X = (eigenvalues - beta).sqrt()[:, None] * Q.mT
    y = X @ torch.randn(dim, generator=generator, **FLOAT)
    problem = of_model(title, GeneralizedLinear(X, y, "gaussian", prior_precision=beta), 1.0, **options)
    problem.convexity = float(eigenvalues.min())
    return problem


def student() -> Problem:
    """60 rows of 10 columns, a third of them outliers, t noise with 2 degrees of freedom."""
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(60, 10, generator=generator, **FLOAT)
    y = X @ torch.randn(10, generator=generator, **FLOAT) + 0.5 * torch.randn(60, generator=generator, **FLOAT)
    y[::3] += 8 * torch.randn(20, generator=generator, **FLOAT)
    scale, dof = 0.5, 2.0
    model = GeneralizedLinear(X, y, StudentT(scale, dof), prior_precision=0.1)
    return of_model("Student-t regression, D = 10", model, (dof + 1) / (dof * scale**2), convex=False)


def many_rows() -> Problem:
    """20,480 rows, 100 columns whose scales fall from 1 to 0.1, logistic."""
    generator = torch.Generator().manual_seed(3)
    Q = torch.linalg.qr(torch.randn(100, 100, generator=generator, **FLOAT)).Q
    X = torch.randn(20_480, 100, generator=generator, **FLOAT) * torch.logspace(0, -1, 100, **FLOAT) @ Q
    eta = X @ torch.randn(100, generator=generator, **FLOAT)
    y = (torch.rand(len(X), generator=generator, **FLOAT) < eta.sigmoid()).double()
    model = GeneralizedLinear(X, y, prior_precision=0.01)
    return of_model("mini-batches, n = 20,480, D = 100", model, 0.25, in_batches=True, scale=1.0, most=16)


def schools() -> Problem:
    from posteriordb.load import load

    posterior = load("eight_schools-eight_schools_noncentered")
    problem = Problem("eight schools, D = 10", posterior.dim, posterior.log_joint, None, 1.0, 0.0, scale=1.0)
    q, z = problem.start(), Fixed(8192, seed=7)
    fit(q, LogJoint(posterior.log_joint), tolerance=0.03, progress=False)
    judge = VN(q, estimator=Stein(z))  # the draws of the judge, minimised over
    fit(q, LogJoint(posterior.log_joint), judge, tolerance=1e-3, max_evaluations=60, progress=False)
    problem.lowest = float(problem.objective(q))
    problem.smoothness = float(torch.linalg.eigvalsh(q.precision).max())
    return problem


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "cancer": lambda: of_model("breast cancer, logistic, D = 31", breast_cancer(), 0.25),
    "gaussian": lambda: gaussian("Gaussian, condition 10⁴, D = 50", torch.logspace(0, 4, 50, **FLOAT), most=3_000),
    "mean-field": lambda: gaussian(
        "mean field on a Gaussian, condition 100, D = 30", torch.logspace(0, 2, 30, **FLOAT), mean_field=True
    ),
    "student": student,
    "batches": many_rows,
    "german": lambda: of_model("German credit, logistic, D = 49", regression("German"), 0.25, most=3_000),
    "schools": schools,
}
NEED_DATA = ("german", "schools")


# ------------------------------------------------------------------------------------ methods


@dataclass(frozen=True)
class Contender:
    """A method, where q lives, and its rates."""

    paper: str
    family: str  # coordinates: C, T, S
    build: Callable[[Any, Problem, torch.Generator], NaturalGradientVI]
    rates: Callable[[Any, Problem], list[float]]
    own: Callable[[Any, Problem], float | None] = lambda q, p: None  # the setting of the paper
    draws: int = 1
    hessians: bool = False
    by_model: bool = False  # steps on the model, not on its log joint
    falling: bool = False  # 2/(2 + t) times the rate
    averaged: bool = False


def one(generator: torch.Generator) -> PathDerivative:
    return PathDerivative(Independent(1, generator))


def times(*factors: float) -> Callable[[Any, Problem], list[float]]:
    return lambda q, p: list(factors)


def over_smoothness(*factors: float) -> Callable[[Any, Problem], list[float]]:
    return lambda q, p: [factor / p.smoothness for factor in factors]


def over_small(*factors: float) -> Callable[[Any, Problem], list[float]]:
    """Of the α of Tan, 0.001 √ℓ."""
    return lambda q, p: [factor * Snngm(q).param_groups[0]["lr"] for factor in factors]


def provable(q: Any, p: Problem) -> float | None:
    """The step of the theorem without misspecification."""
    if not p.convexity or p.mean_field:
        return None
    return landing_variance(p.smoothness, p.dim, 0.0).at(0.0).fixed_step(p.convexity, 1e-2)


def with_hessians(p: Problem, generator: torch.Generator) -> Any:
    draws = Independent(DRAWS, generator)
    return Hessian(draws) if p.model is None else BonnetPrice(draws)


ADAM, NATURAL = times(1e-3, 3e-3, 1e-2, 3e-2), times(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SMALL = times(1e-3, 1e-2, 3e-2, 1e-1)  # on T
CONTENDERS = {
    "Euclid Adam, C": Contender(
        "Tan 1a", "C", lambda q, p, g: RootGD(q, 1.0, momentum=Adam(), estimator=one(g)), ADAM, lambda q, p: 1e-3
    ),
    "natural, C": Contender("Tan 1b", "C", lambda q, p, g: SRVN(q, 1.0, estimator=one(g)), NATURAL),
    "natural Adam, C": Contender(
        "Tan 1b", "C", lambda q, p, g: SRVN(q, 1.0, momentum=Adam(), estimator=one(g)), ADAM, lambda q, p: 1e-3
    ),
    "Snngm, C": Contender(
        "Tan", "C", lambda q, p, g: Snngm(q, estimator=one(g)), over_small(0.3, 1, 3, 10),
        lambda q, p: Snngm(q).param_groups[0]["lr"],
    ),
    "Euclid Adam, T": Contender(
        "Tan 2a", "T", lambda q, p, g: RootGD(q, 1.0, momentum=Adam(), estimator=one(g)), SMALL, lambda q, p: 1e-3
    ),
    "natural, T": Contender("Tan 2b", "T", lambda q, p, g: SRVN(q, 1.0, estimator=one(g)), NATURAL),
    "natural Adam, T": Contender(
        "Tan 2b", "T", lambda q, p, g: SRVN(q, 1.0, momentum=Adam(), estimator=one(g)), SMALL, lambda q, p: 1e-3
    ),
    "Snngm, T": Contender(
        "Tan", "T", lambda q, p, g: Snngm(q, estimator=one(g)), over_small(1, 3, 10, 30),
        lambda q, p: Snngm(q).param_groups[0]["lr"],
    ),
    "SGD, STL": Contender(
        "BBVI", "C", lambda q, p, g: BBVI(q, 1.0, p.smoothness, estimator=one(g)),
        over_smoothness(0.003, 0.01, 0.03, 0.1, 0.3, 1), provable,
    ),
    "SGD, CFE": Contender(
        "BBVI", "C", lambda q, p, g: BBVI(q, 1.0, p.smoothness, estimator=Reparametrized(Independent(1, g))),
        over_smoothness(0.003, 0.01, 0.03, 0.1, 0.3, 1),
    ),
    "proximal SGD": Contender(
        "BBVI", "C", lambda q, p, g: ProximalBBVI(q, 1.0, estimator=Reparametrized(Independent(1, g))),
        over_smoothness(0.003, 0.01, 0.03, 0.1, 0.3, 1),
    ),
    "NGVI": Contender(
        "NGVI", "S", lambda q, p, g: NGVI(q, 1.0, estimator=with_hessians(p, g)), times(0.5, 0.1, 0.03, 0.01),
        lambda q, p: 0.1, DRAWS, hessians=True, by_model=True,
    ),
    "NGVI, 2/(2 + t)": Contender(
        "NGVI", "S", lambda q, p, g: NGVI(q, 1.0, estimator=with_hessians(p, g)), times(1.0, 0.5),
        lambda q, p: 1.0, DRAWS, hessians=True, by_model=True, falling=True,
    ),
    "NGVI, 2/(2 + t), average": Contender(
        "NGVI", "S", lambda q, p, g: NGVI(q, 1.0, estimator=with_hessians(p, g)), times(1.0, 0.5),
        lambda q, p: 1.0, DRAWS, hessians=True, by_model=True, falling=True, averaged=True,
    ),
    "NGVI, autodiff": Contender(
        "NGVI", "S", lambda q, p, g: NGVI(q, 1.0, estimator=Reparametrized(Independent(DRAWS, g))),
        times(0.1, 0.03, 0.01, 0.003, 0.001), draws=DRAWS,
    ),
    "SGD, Price": Contender(
        "NGVI", "C",
        lambda q, p, g: NaturalGradientVI(q, ProjectedRootGradient(1e-10), 1.0, estimator=with_hessians(p, g)),
        over_smoothness(0.1, 0.3, 1, 2), draws=DRAWS, hessians=True, by_model=True,
    ),
}  # fmt: skip
BY_MODEL, BY_BATCHES, BY_DRAWS = "fit(q, model)", "fit(q, model, batch_size=)", "fit(q, log_joint)"
DEFAULTS = (BY_MODEL, BY_BATCHES, BY_DRAWS)


def targets(
    problem: Problem, contender: Contender, shape: tuple[int, ...], generator: torch.Generator
) -> Iterator[Any]:
    """What each step is taken on."""
    model = problem.model
    if not problem.in_batches:
        whole = model if contender.by_model and model is not None else LogJoint(problem.log_joint)
        while True:
            yield whole
    assert model is not None
    runs = shape[-1:]  # seeds differ in their rows, rates do not
    weights = torch.full((*shape, BATCH), len(model.y) / BATCH, **FLOAT)
    while True:
        order = torch.stack([torch.randperm(len(model.y), generator=generator) for _ in range(*runs or (1,))])
        for index in order.reshape(*runs, -1).split(BATCH, -1):
            X = model.X[index].expand(*shape, BATCH, model.dim)
            part = GeneralizedLinear(X, model.y[index].expand(*shape, BATCH), weights=weights, prior_precision=0.01)
            yield part if contender.by_model else LogJoint(part.log_joint)


def a_step(problem: Problem, contender: Contender) -> float:
    """Gradients of one step, or passes."""
    if problem.in_batches:
        assert problem.model is not None
        return BATCH / len(problem.model.y)
    extra = problem.dim if contender.hessians and problem.model is None else 0
    return contender.draws * (1 + extra)


def seconds_alone(problem: Problem, contender: Contender, rate: float, steps: int = 30) -> float:
    """Of one step of one run."""
    q = problem.start(contender.family)
    opt = contender.build(q, problem, torch.Generator().manual_seed(0))
    opt.param_groups[0]["lr"] = rate
    stream = targets(problem, contender, (), torch.Generator().manual_seed(0))
    average = ExpectationAverage(q) if contender.averaged else None
    for step in range(steps + 5):
        if step == 5:
            begin = time.process_time()
        opt.step(next(stream))
        if average is not None:
            average.update(q)
    return (time.process_time() - begin) / steps


def run(name: str, problem: Problem, method: str, seeds: int, most: int) -> list[dict[str, Any]]:
    """All rates and seeds of a method as one batch."""
    contender = CONTENDERS[method]
    single = problem.start(contender.family)
    own, rates = contender.own(single, problem), contender.rates(single, problem)
    rates = rates if own is None or any(abs(rate / own - 1) < 1e-9 for rate in rates) else [*rates, own]
    shape = (len(rates), seeds)
    q = problem.start(contender.family, shape)
    opt = contender.build(q, problem, torch.Generator().manual_seed(0))
    rate = torch.tensor(rates, **FLOAT)[:, None].expand(shape)
    stream = targets(problem, contender, shape, torch.Generator().manual_seed(1))
    unit, alone = a_step(problem, contender), seconds_alone(problem, contender, min(rates))
    average = ExpectationAverage(q) if contender.averaged else None
    looks = [round(look / unit) for look in (PASSES if problem.in_batches else LOOKS) if look <= most and look >= unit]
    rows, taken = [], 0
    for look in looks:
        for _ in range(look - taken):
            opt.param_groups[0]["lr"] = rate * (theorem_schedule(taken) if contender.falling else 1.0)
            opt.step(next(stream))
            taken += 1
            if average is not None:
                average.update(q)
        gaps = problem.gap(q if average is None else average.posterior())
        for i, j in np.ndindex(shape):
            rows.append({"problem": name, "method": method, "rate": rates[i], "own": rates[i] == own, "seed": j,
                         "gradients": look * unit, "gap": float(gaps[i, j]), "seconds": look * alone})  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------ defaults


class Budget:
    """A log joint that interrupts the fit instead of giving more than so many gradients."""

    def __init__(self, problem: Problem, most: float) -> None:
        self.log_joint, self.most, self.taken = problem.log_joint, most, 0

    def __call__(self, theta: Tensor) -> Tensor:
        if theta.requires_grad:
            if self.taken + theta[..., 0].numel() > self.most:
                raise KeyboardInterrupt
            self.taken += theta[..., 0].numel()
        return self.log_joint(theta)


def by_draws(name: str, problem: Problem, seed: int, most: int) -> Iterator[dict[str, Any]]:
    """`fit` of the log joint, interrupted when a budget is used up."""
    for look in LOOKS:
        if look <= most:
            torch.manual_seed(seed)
            q, begin = problem.start(), time.process_time()
            with contextlib.suppress(KeyboardInterrupt):
                fit(q, Budget(problem, look), progress=False)
            yield entry(name, BY_DRAWS, seed, look, problem.gap(q), time.process_time() - begin)


class Counted(GeneralizedLinear):
    """Counts the rows it is evaluated on."""

    seen = 0

    def marginals(self, frame: Any) -> Any:
        Counted.seen += self.X.shape[0]
        return super().marginals(frame)


def watched(name: str, method: str, problem: Problem, seed: int) -> Iterator[dict[str, Any]]:
    """A fit that is looked at before each step, its passes over the data counted."""
    assert problem.model is not None
    model, rows, rows_seen, paused = problem.model, [], [0], [0.0]
    torch.manual_seed(seed)
    q, order = problem.start("S" if problem.in_batches else "C"), torch.randperm(len(model.y))
    counted = Counted(model.X, model.y, model.likelihood, prior_precision=model.prior.precision)
    target: Any = counted
    if method == BY_DRAWS:

        def log_likelihood(theta: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            rows_seen[0] += len(batch[1])
            eta = theta @ batch[0].mT
            return (batch[1] * eta - torch.nn.functional.softplus(eta)).sum(-1)

        y = (model.y[order] > 0).double()
        parts = list(zip(model.X[order].split(BATCH), y.split(BATCH), strict=True))
        target = DataLogJoint(log_likelihood, lambda theta: -model.prior.energy(theta), parts, len(model.y))
    Counted.seen = 0

    def look(record: Any) -> bool:
        begin = time.process_time()
        done = (rows_seen[0] if method == BY_DRAWS else Counted.seen) / len(model.y)
        rows.append(entry(name, method, seed, done, problem.gap(q), begin - start - paused[0]))
        paused[0] += time.process_time() - begin
        return problem.in_batches and done > PASSES[-1]

    options = {"batch_size": BATCH} if method == BY_BATCHES else {}
    start = time.process_time()
    fit(q, target, callbacks=[look], progress=False, **options)
    yield from rows


def entry(name: str, method: str, seed: int, gradients: float, gap: Tensor, seconds: float) -> dict[str, Any]:
    return {"problem": name, "method": method, "rate": np.nan, "own": False, "seed": seed,
            "gradients": gradients, "gap": float(gap), "seconds": seconds}  # fmt: skip


def everything(names: list[str], seeds: int, full: bool, folder: Path) -> None:
    """All methods on these problems, a log each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        begin, problem, rows = time.process_time(), PROBLEMS[name](), []
        print(f"{name}: {problem.title}, minimum {problem.lowest:.4f}, L = {problem.smoothness:.4g}", flush=True)
        if problem.in_batches:
            for method in DEFAULTS:
                for seed in range(seeds if method != BY_MODEL else 1):
                    rows += watched(name, method, problem, seed)
        else:
            if problem.model is not None:
                rows += watched(name, BY_MODEL, problem, 0)
            for seed in range(seeds):
                rows += by_draws(name, problem, seed, LOOKS[-1] if full else 10_000)
        for method, contender in CONTENDERS.items():
            if problem.mean_field and contender.family == "T":
                continue
            most = problem.most if not full else PASSES[-1] if problem.in_batches else LOOKS[-1]
            rows += run(name, problem, method, seeds, most)
            print(f"  {method}: {time.process_time() - begin:.0f} s", flush=True)
        pd.DataFrame(rows).assign(title=problem.title).to_csv(folder / f"{name}.csv", index=False)


# ------------------------------------------------------------------------------------ tables


def at_budgets(part: pd.DataFrame, budgets: list[float]) -> pd.DataFrame:
    """Median and worst over seeds, one row a rate and budget."""
    rows = []
    for (rate, own), runs in part.groupby(["rate", "own"], dropna=False):
        for budget in budgets:
            before = runs[runs["gradients"] <= budget * (1 + 1e-9)]
            if before["seed"].nunique() == runs["seed"].nunique():
                last = before.sort_values("gradients").groupby("seed")["gap"].last()
                rows.append((rate, own, budget, last.median(), last.max()))
    return pd.DataFrame(rows, columns=["rate", "own", "budget", "median", "worst"])


def reached(part: pd.DataFrame, gap: float) -> tuple[float, float]:
    """Gradients and seconds to the first look at which the median is within the gap, at the best rate."""
    best = (np.inf, np.inf)
    for _, runs in part.groupby("rate", dropna=False):
        if runs["method"].iloc[0] in DEFAULTS:  # looks differ between seeds
            firsts = runs[runs["gap"] <= gap].groupby("seed")[["gradients", "seconds"]].first()
            if 2 * len(firsts) > runs["seed"].nunique():
                firsts = firsts.reindex(range(runs["seed"].nunique()), fill_value=np.inf)
                best = min(best, tuple(firsts.median()))
        else:
            looks = runs.groupby("gradients")[["gap", "seconds"]].median()
            within = looks[looks["gap"] <= gap]
            if len(within):
                best = min(best, (float(within.index[0]), float(within["seconds"].iloc[0])))
    return best


def number(x: float) -> str:
    if not x < 1e6:
        return "lost"
    if x < 1e-6:
        return "0"
    return f"{x:.1e}" if x < 1e-3 else f"{x:.2g}" if x < 100 else f"{x:,.0f}"


def table(log: pd.DataFrame) -> str:
    """Markdown, a table a problem."""
    lines = []
    for name, part in log.groupby("problem", sort=False):
        batches, most = name == "batches", part[~part["method"].isin(DEFAULTS)]["gradients"].max()
        budgets = [b for b in (PASSES if batches else BUDGETS) if b <= most * 1.001]
        heads = [f"{b:,} " + ("pass" if b == 1 else "passes") if batches else f"{b:,}" for b in budgets]
        lines += ["", f"**{part['title'].iloc[0]}**", "",
                  "| method | " + " | ".join(heads) + " | rate | at the paper's | to 0.1 nats | to 0.01 |",
                  "|---|" + "---|" * (len(budgets) + 4)]  # fmt: skip
        for method, runs in part.groupby("method", sort=False):
            values = at_budgets(runs, budgets)
            cells = []
            for budget in budgets:
                here = values[values["budget"] == budget]
                best = None if here.empty else here.loc[here["median"].idxmin()]
                cells.append("-" if best is None else f"{number(best['median'])} ({number(best['worst'])})")
            here = values[values["budget"] == budgets[-1]]
            best = here.loc[here["median"].idxmin()]
            own = here[here["own"]]["median"]
            cells += [
                "none" if np.isnan(best["rate"]) else f"{best['rate']:.2g}",
                number(own.iloc[0]) if len(own) else "",
            ]
            for gap in REACHED:
                gradients, seconds = reached(runs, gap)
                cells.append(f"{gradients:,.{int(batches)}f}, {number(seconds)} s" if np.isfinite(gradients) else "-")
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:]) + "\n"


MIDDLE, MIDDLE_PASSES = 3_000, 8  # budgets of the summary


def summary(log: pd.DataFrame) -> str:
    """Three tables over all problems: gaps at one budget, what 0.1 nats take, and the best rival at each budget."""
    problems = list(dict.fromkeys(log["problem"]))
    methods = [*DEFAULTS, *CONTENDERS]
    gaps, costs, best = ["method", *problems], ["method", *problems], ["", *(f"{b:,}" for b in BUDGETS[:-1])]
    tables = [[gaps], [costs], [best]]
    for method in methods:
        lines: list[list[str]] = [[method], [method]]
        for name in problems:
            runs = log[(log["problem"] == name) & (log["method"] == method)]
            value = best_at(runs, MIDDLE_PASSES if name == "batches" else MIDDLE)
            lines[0].append("" if value is None else f"{number(value[0])} ({number(value[1])})")
            gradients, seconds = reached(runs, REACHED[0])
            cost = f"{gradients:,.{int(name == 'batches')}f}, {number(seconds)} s"
            lines[1].append("" if runs.empty else cost if np.isfinite(gradients) else "-")
        for rows, line in zip(tables, lines, strict=False):
            rows.append(line)
    for name in problems:
        part = log[log["problem"] == name]
        ours, theirs = [f"{name}, {BY_DRAWS}"], [f"{name}, the best of the others"]
        for budget in (1, 2, 4, 16) if name == "batches" else BUDGETS[:-1]:
            here = best_at(part[part["method"] == BY_DRAWS], budget)
            ours.append("-" if here is None else number(here[0]))
            found = {m: best_at(part[part["method"] == m], budget) for m in CONTENDERS}
            known = {m: value[0] for m, value in found.items() if value is not None}
            first = min(known, key=known.__getitem__) if known else ""
            most = part[part["method"] == first]["gradients"].max() if known else 0.0
            theirs.append(f"{number(known[first])}, {first}" if most >= 0.999 * budget else "")
        tables[2] += [ours, theirs]
    marks = ["|".join(["", *["---"] * len(rows[0]), ""]) for rows in tables]
    texts = [["| " + " | ".join(row) + " |" for row in rows] for rows in tables]
    joined = [[text[0], mark, *text[1:], ""] for text, mark in zip(texts, marks, strict=True)]
    return "\n".join(line for lines in joined for line in lines)


def best_at(runs: pd.DataFrame, budget: float) -> tuple[float, float] | None:
    """Median and worst at the rate with the best median."""
    if runs.empty:
        return None
    values = at_budgets(runs, [budget])
    if values.empty:
        return None
    row = values.loc[values["median"].idxmin()]
    return float(row["median"]), float(row["worst"])


# ------------------------------------------------------------------------------------ figure

SHOWN = ("cancer", "student", "batches")
CURVES = {  # method: number of its colour, marker
    BY_MODEL: (0, "."), BY_BATCHES: (0, "s"), BY_DRAWS: (1, "o"), "Snngm, C": (2, ""), "natural Adam, C": (3, ""),
    "Euclid Adam, C": (4, ""), "SGD, STL": (5, ""), "NGVI": (6, ""), "NGVI, 2/(2 + t)": (6, "^"),
}  # fmt: skip
SMALLEST = 1e-4  # nats drawn


def draw(log: pd.DataFrame, path: Path) -> None:
    """Median gaps at the best rate of each look, one panel a problem."""
    names = [name for name in SHOWN if name in set(log["problem"])]
    note = (
        f"medians over seeds, {SMALLEST:g} and less drawn there; fit has no setting, the others are at the rate that is"
    )
    figure = blank_figure(11.5, 4.2, "Gap to the best q", note + " best at each point, in hindsight")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        part = log[log["problem"] == name]
        what = "passes over the data" if name == "batches" else "gradients of the log joint"
        style(axes, part["title"].iloc[0], what, "nats" if name == names[0] else "")
        highest = 0.0
        for method, (index, marker) in CURVES.items():
            runs = part[part["method"] == method]
            if runs.empty:
                continue
            values = at_budgets(runs, sorted(runs["gradients"].unique())).groupby("budget")["median"].min()
            below = int((values > SMALLEST).sum()) + 1  # up to the first that is drawn at the lower edge
            values, ours = values.clip(lower=SMALLEST).iloc[:below], method in DEFAULTS
            highest = max(highest, float(values.iloc[0]))
            axes.loglog(values.index, values, color=color(index), linewidth=1.8 if ours else 1.2, marker=marker,
                        markersize=4.5, linestyle="-" if ours else (0, (4, 1.5)), label=method)  # fmt: skip
        axes.set_ylim(0.7 * SMALLEST, min(3 * highest, 1e5))
        axes.xaxis.set_minor_locator(NullLocator())
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [method for method in CURVES if method in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="30,000 gradients and five seeds")
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, help="these problems")
    parser.add_argument("--out", type=Path, default=Path("runs/stochastic"))
    parser.add_argument("--from-logs", action="store_true", help="print and draw again from the logs of earlier runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RejectedStepWarning)
    names = options.only or [name for name in PROBLEMS if "TORCHNGVI_DATA" in os.environ or name not in NEED_DATA]
    if not options.from_logs:
        everything(names, 5 if options.full else 3, options.full, options.out)
    logs = [pd.read_csv(options.out / f"{name}.csv") for name in PROBLEMS if (options.out / f"{name}.csv").exists()]
    log = pd.concat(logs, ignore_index=True)
    print(table(log))
    print(summary(log))
    draw(log, options.out / "choosing.png")


if __name__ == "__main__":
    main()
