"""Several methods side by side: settings from TOML, runs as batches over starts, logs as csv, curves and tables.

``torchngvi reproduce`` (`reproduce.py`) and ``torchngvi compare`` both end here.  All starts of a
method run as one batched posterior; figures are drawn from the logs alone.
"""

import math
import reprlib
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from torchngvi.app import datasets, report, tables
from torchngvi.app.config import file_name, hint, read_toml, whole
from torchngvi.app.fonts import drawable, families
from torchngvi.app.memory import Budget
from torchngvi.diagnostics import accuracy
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.expectations import Antithetic, MonteCarlo, PiecewiseBound, Quadrature
from torchngvi.interfaces import Estimator
from torchngvi.methods import BWGD, IBLR, SRVN, VN, CovarianceGD, Method, RootGD, SVGDDensity, SymmetricSRVN
from torchngvi.models import ExpectedPenalty, GeneralizedLinear, MeanPenalty, Regularized
from torchngvi.models.likelihoods import FAMILIES
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian

METHODS: dict[str, type[Method]] = {
    "vn": VN,
    "srvn": SRVN,
    "symmetric_srvn": SymmetricSRVN,
    "iblr": IBLR,
    "bwgd": BWGD,
    "svgd": SVGDDensity,
    "covariance_gd": CovarianceGD,
    "root_gd": RootGD,
}
POSTERIORS: dict[str, type[CholeskyGaussian] | type[NaturalGaussian] | type[DiagonalGaussian]] = {
    "cholesky": CholeskyGaussian,
    "natural": NaturalGaussian,
    "diagonal": DiagonalGaussian,
}
_NEED_LR = ("bwgd", "svgd", "covariance_gd", "root_gd")
_LOST = 1e12  # nats above which a difference of energies is rounding
KINDS = ("curves", "table", "quadratic", "run_time")
PENALTIES = {"mean": MeanPenalty, "expected": ExpectedPenalty}
METRICS = {
    "train": "training objective of Table 3",
    "objective": "negative ELBO",
    "test_nll": "test NLL (sum)",
    "test_accuracy": "test accuracy",
}
AXES = {"iteration": "iterations", "evaluations": "evaluations", "seconds": "CPU seconds a start"}
_SHOWN = {  # of the table: head and format
    "case": ("case", ""),
    "method": ("method", ""),
    "evaluations": ("evals", ".0f"),
    "seconds": ("s", ".3g"),
    "rejections": ("rejected", ".0f"),
    "objective": ("-ELBO", ".3f"),
    "test_nll": ("test NLL", ".2f"),
    "test_accuracy": ("accuracy", ".3f"),
}
_COLORS = ("#1f5a94", "#d1672b", "#3b8f5a", "#8a4fa3", "#b03a48", "#7a7f87", "#c2a030")
_INK, _FAINT = "#222222", "#9aa0a6"


@dataclass(frozen=True)
class Contender:
    """One method with its settings."""

    method: str
    lr: float | None = None  # without: steps found by trial
    posterior: str = "cholesky"
    label: str = ""  # in figures and logs; without: the method
    batch: int = 0  # rows of a mini-batch, 0 for all
    draws: int = 0  # Monte Carlo draws of each row, 0 for the estimator of the case
    printed: tuple[float, ...] = ()  # published train, test NLL and accuracy

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("posterior", self.posterior, POSTERIORS)
        _check_positive(self, "lr")
        if self.lr is None and (self.batch or self.draws):
            raise InputError("steps found by trial need exact values; mini-batches and draws give noisy ones: set lr.")
        object.__setattr__(self, "label", self.label or self.method)


@dataclass(frozen=True)
class Case:
    """One data set with everything that is run on it."""

    name: str
    data: str = ""  # of `datasets`, "synthetic", or a file or bundled set as for fit
    methods: tuple[Contender, ...] = ()
    prior_precision: float = 1.0
    iterations: int = 100
    full_iterations: int = 0  # of --full; 0: the same
    family: str = "bernoulli_logit"
    target: str | None = None
    success: str | None = None
    standardize: bool = False
    intercept: bool = False
    seed: int = 42  # of the split
    test_fraction: float = 0.2
    estimator: str = "quadrature"  # or "piecewise"
    pieces: int = 20
    bound: str = ""  # csv file of a piecewise bound, rows low, high, a, b, c; in $TORCHNGVI_DATA
    penalty: str = ""  # "mean" or "expected": the regulariser of appendix H
    penalty_strength: float = 1.0
    rows: int = 0  # of synthetic data
    features: int = 0
    eigenvalues: tuple[float, ...] = ()  # of the posterior precision, for data = "quadratic"
    points: int = 120  # records of a run
    skip: str = ""  # why this case is not run

    def __post_init__(self) -> None:
        _check_choice("estimator", self.estimator, ("quadrature", "piecewise"))
        _check_choice("family", self.family, FAMILIES)
        _check_choice("penalty", self.penalty, ("", *PENALTIES))
        file_name("data", self.data)
        file_name("bound", self.bound)
        for key in ("prior_precision", "iterations", "penalty_strength", "points"):
            _check_positive(self, key)
        if not self.skip and not self.methods:
            raise InputError(f"case {self.name!r} names no methods.")
        labels = [contender.label for contender in self.methods]
        for label in labels:
            if labels.count(label) > 1:
                raise InputError(f"two methods of case {self.name!r} are called {label!r}: give one a label.")


@dataclass(frozen=True)
class Experiment:
    """A published figure or table, or a comparison."""

    title: str
    cases: tuple[Case, ...]
    kind: str = "curves"
    columns: tuple[str, ...] = ("objective over iteration", "objective over seconds")
    starts: int = 1
    start_sd: float = 0.0  # m0 ~ N(0, start_sd²)
    start_scale: float = 1.0  # C0 = start_scale I
    note: str = ""  # printed below the figure's title
    # kind = "quadratic"
    steps: tuple[float, ...] = ()
    # kind = "run_time"
    dims: tuple[int, ...] = ()
    full_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, KINDS)
        _check_positive(self, "starts")
        _check_positive(self, "start_scale")
        for column in self.columns:
            metric, _, axis = column.partition(" over ")
            _check_choice("the metric of a column", metric, METRICS)
            _check_choice("the axis of a column", axis, AXES)
        for contender in (contender for case in self.cases for contender in case.methods):
            if contender.lr is None and not self.steps and contender.method in _NEED_LR:
                raise InputError(f"method {contender.method} needs a step in the scale of the problem: set lr.")


def _check_choice(what: str, value: str, known: Any) -> None:
    if value not in known:
        choices = ", ".join(name or "(nothing)" for name in known)
        raise InputError(f"{what} must be one of {choices}; got {value!r}.{hint(value, known)}")


def _check_positive(record: Any, key: str) -> None:
    value = getattr(record, key)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise InputError(f"{key} must be positive and finite; got {value:g}.")


# ------------------------------------------------------------------------------------ settings


def read(path: str | Path, full: bool = False) -> Experiment:
    """An experiment from a TOML file.

    Raises:
        InputError: no file, unknown keys, values of the wrong type or out of range.
    """
    experiment = parsed(read_toml(path))
    if not full:
        return experiment
    cases = tuple(replaced(case, iterations=case.full_iterations or case.iterations) for case in experiment.cases)
    return replaced(experiment, cases=cases, dims=experiment.full_dims or experiment.dims)


def replaced(record: Any, **changes: Any) -> Any:
    """A copy with other values, checked as the first."""
    return type(record)(**{field.name: getattr(record, field.name) for field in fields(record)} | changes)


def parsed(keys: Mapping[str, Any]) -> Experiment:
    """An experiment from plain tables.

    >>> parsed({"title": "x", "cases": [{"name": "c", "methods": [{"method": "vn"}]}]}).cases[0].methods[0].label
    'vn'
    """
    return _record(Experiment, keys, "the experiment")


_WORDS: dict[Any, str] = {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}


def _record(kind: Any, keys: Any, where: str) -> Any:
    """A dataclass from a table, nested ones included."""
    if not isinstance(keys, Mapping):
        raise InputError(f"{where} must be a table; got {reprlib.repr(keys)}.")
    hinted = get_type_hints(kind)
    for key in keys:
        if key not in hinted:
            raise InputError(f"unknown key {key!r} in {where}.{hint(key, hinted)} The keys are: {', '.join(hinted)}.")
    for field in fields(kind):
        if field.default is MISSING and field.name not in keys:
            raise InputError(f"{where} has no {field.name}.")
    return kind(**{key: _value(key, value, hinted[key], where) for key, value in keys.items()})


def _value(key: str, value: Any, hinted: Any, where: str) -> Any:
    if isinstance(hinted, types.UnionType):
        hinted = next(option for option in get_args(hinted) if option is not type(None))
    if get_origin(hinted) is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{key} of {where} must be a list; got {reprlib.repr(value)}.")
        inner = get_args(hinted)[0]
        return tuple(_value(f"{key}[{index}]", item, inner, where) for index, item in enumerate(value))
    if hinted in (Case, Contender):
        return _record(hinted, value, f"{key} of {where}")
    if hinted is float and type(value) is int:
        return float(whole(key, value))
    if type(value) is not hinted:
        raise InputError(f"{key} of {where} must be {_WORDS[hinted]}; got {reprlib.repr(value)}.")
    return whole(key, value) if hinted is int else value


# ------------------------------------------------------------------------------------ one case


@dataclass(frozen=True)
class Problem:
    """A case, ready to be run."""

    target: GeneralizedLinear | Regularized
    model: GeneralizedLinear
    held_out: GeneralizedLinear | None
    estimator: Estimator


def build(case: Case, starts: int = 1) -> Problem:
    """Read the data, split, and make the models, for so many starts side by side.

    Raises:
        InputError: data or settings that cannot be used, too little memory.
        MissingDataError: a data set that is not to be had.
    """
    (X, y), (X_test, y_test) = _data(case, _budget(case, starts))
    model = GeneralizedLinear(X, y, case.family, prior_precision=case.prior_precision)
    held_out = None
    if len(y_test):
        held_out = GeneralizedLinear(X_test, y_test, case.family, prior_precision=case.prior_precision)
    target: GeneralizedLinear | Regularized = model
    if case.penalty:
        target = Regularized(model, PENALTIES[case.penalty](case.penalty_strength))
    return Problem(target, model, held_out, _estimator(case))


def _budget(case: Case, starts: int) -> Budget:
    """Of the largest of its methods, which run one after the other."""
    dense = [contender for contender in case.methods if contender.posterior != "diagonal"]
    trial = any(contender.lr is None for contender in dense)
    return Budget(dense[0].posterior if dense else "diagonal", trial, starts)


def _data(case: Case, budget: Budget) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test rows, float64."""
    if case.data in ("synthetic", "quadratic"):
        budget.require(f"case {case.name!r}", case.rows, case.features)
        X, y = _synthetic(case) if case.data == "synthetic" else quadratic(case.eigenvalues, case.prior_precision)
        count = round(case.test_fraction * len(y))
        return (X[count:], y[count:]), (X[:count], y[:count])
    if case.data in datasets.SOURCES:
        X_all, coded = datasets.load(case.data)
        names = tuple(f"x{index + 1}" for index in range(X_all.shape[1]))
        table, classes = tables.Table(X_all, coded, names, "y"), ("0", "1")
        prepared = tables.prepare(
            table, coded, classes, standardize=case.standardize, intercept=case.intercept,
            test_fraction=case.test_fraction, seed=case.seed,
        )  # fmt: skip
    else:
        table = tables.read_table(case.data, target=case.target, budget=budget)
        classes_wanted = FAMILIES[case.family].discrete
        coded, named = tables.coded_target(table, classes=classes_wanted, success=case.success)
        prepared = tables.prepare(
            table, coded, named, standardize=case.standardize, intercept=case.intercept,
            test_fraction=case.test_fraction, seed=case.seed,
        )  # fmt: skip
    train, test = prepared.train, prepared.test
    parts = [torch.as_tensor(part, dtype=torch.float64) for part in (train.X, train.y, test.X, test.y)]
    return (parts[0], parts[1]), (parts[2], parts[3])


def _synthetic(case: Case) -> tuple[Tensor, Tensor]:
    """Logistic data: standard normal features, coefficients ~ N(0, 4/D)."""
    generator = torch.Generator().manual_seed(case.seed)
    X = torch.randn((case.rows, case.features), dtype=torch.float64, generator=generator)
    theta = 2 * torch.randn(case.features, dtype=torch.float64, generator=generator) / math.sqrt(case.features)
    chance = torch.rand(case.rows, dtype=torch.float64, generator=generator)
    return X, (chance < torch.sigmoid(X @ theta)).double()


def quadratic(eigenvalues: Sequence[float], prior_precision: float) -> tuple[Tensor, Tensor]:
    """Two rows of a linear regression with noise 1 whose posterior precision has these eigenvalues.

    The axes are turned by 30 degrees; the posterior mean is (1, -1), up to the prior.
    """
    if len(eigenvalues) != 2 or min(eigenvalues) <= prior_precision:
        raise InputError(f"eigenvalues must be two, larger than prior_precision; got {tuple(eigenvalues)}.")
    turn = math.pi / 6
    axes = torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]], dtype=torch.float64)
    X = (torch.tensor(eigenvalues, dtype=torch.float64) - prior_precision).sqrt()[:, None] * axes
    return X, X @ torch.tensor([1.0, -1.0], dtype=torch.float64)


def _estimator(case: Case) -> Estimator:
    if case.estimator == "quadrature":
        return Quadrature()
    if not case.bound:
        return PiecewiseBound(case.pieces)
    path = datasets.beside(case.bound)
    try:
        return PiecewiseBound(table=pd.read_csv(path)[["low", "high", "a", "b", "c"]].to_numpy().tolist())
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"bound must be a csv file with columns low, high, a, b, c; {str(path)!r}: {error}."
        ) from error


def start(case: Case, contender: Contender, problem: Problem, experiment: Experiment) -> Gaussian:
    """One batched posterior with all starts; the same means for every method."""
    shape = (experiment.starts, problem.model.dim)
    noise = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(case.seed))
    kind = POSTERIORS[contender.posterior]
    mean, scale = experiment.start_sd * noise, experiment.start_scale
    return kind(problem.model.dim, (experiment.starts,), mean=mean, scale=scale, dtype=torch.float64)


def run(case: Case, contender: Contender, experiment: Experiment, problem: Problem) -> pd.DataFrame:
    """One method from all starts: a row for each start and record.

    Seconds are CPU time of the steps alone, not of what is recorded: that of the batch over the number of starts.
    """
    q = start(case, contender, problem, experiment)
    noise = torch.Generator().manual_seed(case.seed)
    estimator = MonteCarlo(Antithetic(contender.draws, noise)) if contender.draws else problem.estimator
    optimizer = METHODS[contender.method](q, contender.lr, estimator=estimator)
    due = np.unique(np.r_[0, np.geomspace(1, case.iterations, case.points // 2).round(),
                          np.linspace(0, case.iterations, case.points // 2).round()].astype(int))  # fmt: skip
    records, seconds = [_measured(q, problem, 0, 0, 0.0, 0)], 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)  # counted in the log
        for iteration in range(1, case.iterations + 1):
            begin = time.process_time()
            target: Any = problem.target
            if contender.batch:
                target = problem.model.minibatch(
                    torch.randperm(problem.model.num_data, generator=noise)[: contender.batch]
                )
            optimizer.step(target)
            seconds += time.process_time() - begin
            if iteration in due:
                share = seconds / experiment.starts
                records.append(_measured(q, problem, iteration, optimizer.evaluations, share, optimizer.rejections))
    frame = pd.concat(records, ignore_index=True)
    frame.insert(0, "case", case.name)
    frame.insert(1, "method", contender.label)
    return frame


@torch.no_grad()
def _measured(
    q: Gaussian, problem: Problem, iteration: int, evaluations: int, seconds: float, rejections: int
) -> pd.DataFrame:
    """The metrics at q, one row a start."""
    model, frame = problem.model, q.frame()
    loss = problem.estimator(q, problem.target).value - q.entropy()
    precision = torch.as_tensor(model.prior.precision).expand(model.dim)
    constants = -0.5 * (precision.log() + 1).sum()
    columns: dict[str, Any] = {
        "start": range(q.batch_shape[0]),
        "iteration": iteration,
        "evaluations": evaluations,
        "seconds": seconds,
        "rejections": rejections,
        "objective": loss.numpy(),
        "train": (loss - constants - 0.5 * (precision * frame.variance).sum(-1)).numpy(),
    }
    if problem.held_out is not None:
        held_out = problem.held_out
        value = problem.estimator(q, held_out).value - held_out.prior.expected_energy(frame)
        lost = ~(loss < _LOST)  # a run that diverged has no scores
        columns["test_nll"] = value.masked_fill(lost, math.nan).numpy()
        if held_out.likelihood.discrete:
            right = accuracy(model, q, held_out.X, held_out.y)
            columns["test_accuracy"] = right.masked_fill(lost, math.nan).numpy()
    return pd.DataFrame(columns)


def run_all(experiment: Experiment, say: Any = print) -> pd.DataFrame:
    """Every method of every case; what cannot be had is skipped with a sentence."""
    logs = []
    for case in experiment.cases:
        if case.skip:
            say(f"{case.name} is skipped: {case.skip}")
            continue
        try:
            problem = build(case, experiment.starts)
        except datasets.MissingDataError as error:
            say(f"{case.name} is skipped: {error}")
            continue
        for contender in case.methods:
            logs.append(run(case, contender, experiment, problem))
            say(
                f"{case.name}, {contender.label}: {case.iterations} steps, {logs[-1]['seconds'].iloc[-1]:.1f} s a start"
            )
    if not logs:
        raise InputError("nothing was run: every case was skipped, for the reasons above.")
    return pd.concat(logs, ignore_index=True)


# ------------------------------------------------------------------------------------ tell


def last_values(log: pd.DataFrame) -> pd.DataFrame:
    """Mean over starts of the last record of each method."""
    last = log[log["iteration"] == log.groupby(["case", "method"])["iteration"].transform("max")]
    return last.drop(columns="start").groupby(["case", "method"], sort=False).mean().reset_index()


def show_table(log: pd.DataFrame, title: str) -> None:
    """Print the last values."""
    frame = last_values(log)
    table = report.Table(box=report.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (name for name in _SHOWN if name in frame):
        side: Any = "left" if name in ("case", "method") else "right"
        table.add_column(_SHOWN[name][0], justify=side, no_wrap=True)
    for _, row in frame.iterrows():
        table.add_row(*(report.Text(format(row[name], form)) for name, (_, form) in _SHOWN.items() if name in frame))
    report.show(report.Text(f"{title} (last values, means over the starts)", style="bold"), table)


def blank_figure(width: float, height: float, title: str, note: str = "") -> Figure:
    """A figure with a title and an Agg canvas."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {"x": 0.01, "ha": "left", "fontfamily": families()}
    figure.suptitle(drawable(title), fontsize=11, fontweight="bold", color=_INK, **look)
    if note:
        figure.supxlabel(drawable(note), fontsize=8, color="#5f6368", **look)
    return figure


def style(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """The look of all panels."""
    axes.set_title(drawable(title), loc="left", fontsize=9, color=_INK, fontfamily=families())
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(which="both", labelsize=7.5, color=_FAINT, labelcolor=_INK)
    axes.tick_params(which="minor", length=0)
    axes.grid(True, color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)


def color(index: int) -> str:
    """Of the method with this number."""
    return _COLORS[index % len(_COLORS)]


def curves(log: pd.DataFrame, experiment: Experiment) -> Figure:
    """One row of panels a case: mean and min-max band over the starts.

    As in the paper the smallest value over all iterations, starts and methods of a case is subtracted from losses.
    """
    cases = list(dict.fromkeys(log["case"]))
    columns = experiment.columns
    height = 2.5 * len(cases) + 0.6
    figure = blank_figure(3.4 * len(columns), height, experiment.title, experiment.note)
    grid = figure.subplots(len(cases), len(columns), squeeze=False)
    for row, case in enumerate(cases):
        part = log[log["case"] == case]
        for place, column in enumerate(columns):
            metric, _, axis = column.partition(" over ")
            _panel(grid[row, place], part, case, metric, axis)
    grid[0, 0].legend(prop={"size": 7.5, "family": families()}, frameon=False)
    return figure


def _panel(axes: Axes, log: pd.DataFrame, case: str, metric: str, axis: str) -> None:
    gap = metric != "test_accuracy"
    style(axes, f"{case}: {METRICS[metric]}", AXES[axis], "above the minimum" if gap else "")
    values = log[metric].replace([np.inf, -np.inf], np.nan)
    floor = values.min() if gap else 0.0
    for index, method in enumerate(dict.fromkeys(log["method"])):
        of_method = log[log["method"] == method]
        grouped = of_method.assign(value=values[of_method.index] - floor).groupby("iteration")
        x = grouped[axis].mean()
        mean, low, high = (grouped["value"].agg(name) for name in ("mean", "min", "max"))
        keep = mean > 0 if gap else mean > -1
        axes.plot(x[keep], mean[keep], color=color(index), linewidth=1.4, label=drawable(method),
                  linestyle=("-", (0, (5, 2)), "-", (0, (2, 1.5)))[index % 4])  # fmt: skip
        axes.fill_between(x[keep], low[keep].clip(lower=1e-9) if gap else low[keep], high[keep],
                          color=color(index), alpha=0.15, linewidth=0)  # fmt: skip
    if gap:
        axes.set_yscale("log")
        bottom = max(float((values - floor)[values > floor].quantile(0.01)), 1e-6)
        top = float((values - floor)[log["iteration"] == 0].max())
        axes.set_ylim(bottom * 0.5, 5 * top)  # what diverged leaves the panel


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """The settings as plain values."""
    return asdict(experiment)
