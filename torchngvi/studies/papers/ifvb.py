"""Studies of Godichon-Baggioni, Nguyen and Tran (2023): Figures 1 to 6 with the rivals the paper leaves out; a flow.

Every method of a figure takes the same draws of the log joint an iteration; scores for Fisher matrices, which cost
no likelihood, are counted beside, and so is the time of the steps.  Runs of one method differ in their seeds and
step side by side, as a batch of λ, in Figures 1 to 4.
"""

import gzip
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from torchngvi.app import report
from torchngvi.app.datasets import provided
from torchngvi.app.outputs import write_frame
from torchngvi.fitting.fit import fit
from torchngvi.ifvb import (
    AIFVB,
    Adam,
    AffineCoupling,
    Averaging,
    BatchFisher,
    Beta,
    ClosedForm,
    ControlVariate,
    Exact,
    FlatCholesky,
    FlatPosterior,
    GradientEstimator,
    GroupLassoNetwork,
    Identity,
    MatrixFree,
    ModuleFlow,
    NormalInverseGamma,
    OrthogonalFlow,
    Pathwise,
    PreconditionedVI,
    PublishedNAGVAC,
    RankOneGaussian,
    Recursive,
    Window,
    lower_bound,
)
from torchngvi.interfaces import Metric
from torchngvi.models import LogJoint
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.rules import ExponentialAverage
from torchngvi.stepsizes import Clip, Constant, PowerSchedule
from torchngvi.studies.experiments import blank_figure, color, style
from torchngvi.studies.papers import Study
from torchngvi.studies.papers.ifvb_problems import (
    COIN,
    FLOAT,
    NORMAL_START,
    coin_bound,
    normal_bound,
    normal_gibbs,
    normal_log_joint,
    normal_optimum,
    poisson_data,
)

Build = Callable[[Any, torch.Generator], PreconditionedVI]  # a family, the source of its draws
_REPORTS = 60  # lines of a log a run


def _method(
    metric: Callable[[], Metric],
    lr: float = 1.0,
    *,
    estimator: Callable[[], GradientEstimator],
    schedule: PowerSchedule = PowerSchedule(0.75, 100.0),  # noqa: B008  frozen
    clip: float | None = None,
    momentum: float | None = None,
    averaging: Averaging | None = None,
) -> Build:
    """Steps without a radius, as in the paper; the schedule moves on with each of them."""

    def build(q: FlatPosterior, generator: torch.Generator) -> PreconditionedVI:
        parts: list[Any] = [metric(), estimator()]
        for part in parts:
            part.generator = generator
        learnt, gradient = parts
        settings: dict[str, Any] = {
            "estimator": gradient,
            "step_size": Constant() if clip is None else Clip(clip),
            "momentum": None if momentum is None else ExponentialAverage(momentum),
        }
        if averaging is None:
            optimizer = PreconditionedVI(q, learnt, lr, **settings)
        else:
            optimizer = AIFVB(q, lr, metric=learnt, averaging=averaging, **settings)
        scheduler = LambdaLR(optimizer, schedule)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return build


def _moments(iterations: int) -> set[int]:
    """When to write a line: 1, 2, 5, 10 .. and evenly."""
    early = {base * 10**power for base in (1, 2, 5) for power in range(5)}
    even = {round(iterations * part / _REPORTS) for part in range(1, _REPORTS + 1)}
    return {step for step in early | even if 1 <= step <= iterations}


def _log(
    name: str,
    family: FlatPosterior,
    build: Build,
    target: Any,
    iterations: int,
    measure: Callable[[Tensor], Mapping[str, Tensor]],  # λ (seeds, D) -> columns, (seeds,) each
    *,
    seed: int = 0,
    both: bool = False,
) -> list[dict[str, Any]]:
    """Lines of the runs of one method; with an average its values, and with ``both`` the iterate's as well."""
    optimizer = build(family, torch.Generator().manual_seed(seed))
    lines: list[dict[str, Any]] = []
    spent, moments = 0.0, _moments(iterations)

    def write(step: int) -> None:
        estimates = {name: family.vector.detach()}
        if isinstance(optimizer, AIFVB):
            estimates = {name: optimizer.average} | ({f"{name}, iterate": family.vector.detach()} if both else {})
        memory, seeds = optimizer.memory, family.batch_shape.numel()
        for label, lam in estimates.items():
            columns = {key: np.atleast_1d(value.numpy()) for key, value in measure(lam).items()}
            for index in range(seeds):
                lines.append(
                    {"method": label, "seed": index, "iteration": step}
                    | {key: float(value[index]) for key, value in columns.items()}
                    | {
                        "log_joint_draws": optimizer.gradients + optimizer.values,
                        "fisher_draws": memory["metric"]["fisher_draws"],
                        "seconds": spent / seeds,
                        "rejected": float(memory["rejections"].reshape(-1)[index]),
                    }
                )

    write(0)
    for step in range(1, iterations + 1):
        begin = time.process_time()
        optimizer.step(target)
        spent += time.process_time() - begin
        if step in moments:
            write(step)
    return lines


def _columns(*names: str) -> Callable[[Tensor], dict[str, Tensor]]:
    """The entries of λ by name."""
    return lambda lam: dict(zip(names, lam.unbind(-1), strict=True))


def _median_and_range(axes: Axes, log: pd.DataFrame, y: str, x: str = "iteration", *, band: bool = True) -> None:
    """One line a method: the median over seeds, and their range as a band."""
    for index, method in enumerate(dict.fromkeys(log["method"])):
        grouped = log[log["method"] == method].groupby("iteration")
        middle, low, high = (grouped[y].agg(how) for how in ("median", "min", "max"))
        at = grouped[x].mean() if x != "iteration" else middle.index.to_series()
        dashes = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))[index % 4]
        axes.plot(at, middle, color=color(index), linestyle=dashes, linewidth=1.4, label=method)
        if band:
            axes.fill_between(at, low, high, color=color(index), alpha=0.13, linewidth=0)


def _shown(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 0.01 else f"{value:.1e}"


def _summary(log: pd.DataFrame, value: str, path: Path, title: str) -> None:
    """Print, and write beside the figure, the last values of each method: median and range over the seeds."""
    case = ["case"] if "case" in log else []
    last = log[log["iteration"] == log.groupby([*case, "method"])["iteration"].transform("max")]
    rows = []
    table = report.Table(box=report.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (*case, "method", "steps", value, "lowest", "highest", "log p", "scores", "s"):
        side: Any = "left" if name in ("case", "method") else "right"
        table.add_column(name, justify=side, no_wrap=side == "right")
    for key, part in last.groupby([*case, "method"], sort=False):
        values = part[value]
        row = [*key, int(part["iteration"].iloc[0]), values.median(), values.min(), values.max()]
        row += [int(part["log_joint_draws"].mean()), int(part["fisher_draws"].mean()), part["seconds"].mean()]
        rows.append(row)
        cells = [_shown(cell) if isinstance(cell, float) else str(cell) for cell in row]
        table.add_row(*(report.Text(cell) for cell in cells))
    report.show(report.Text(title, style="bold"), table)
    names = [*case, "method", "iterations", value, "lowest", "highest", "log_joint_draws", "fisher_draws", "seconds"]
    write_frame(path.with_name(path.name + "-table.csv"), pd.DataFrame(rows, columns=names))


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".png"))


# ------------------------------------------------------------------------------------ Figures 1 and 2


def _coin_methods(draws: int) -> dict[str, Build]:
    """With exact gradients (draws = 0) as in the paper, or sampled ones with a control variate."""

    def estimator() -> GradientEstimator:
        return ControlVariate(draws) if draws else ClosedForm()

    def recursion() -> Recursive:
        return Recursive(10, eps=100.0, c_beta=0.0, warmup=0)

    def plain(metric: Callable[[], Metric], alpha: float, offset: float = 1.0, lr: float = 1.0) -> Build:
        return _method(metric, lr, estimator=estimator, schedule=PowerSchedule(alpha, offset))

    return {
        "ordinary gradient": plain(Identity, 1.0),
        "exact natural gradient": plain(Exact, 1.0),
        "IFVB": plain(recursion, 0.8, lr=10.0),
        "AIFVB": _method(
            recursion, 10.0, estimator=estimator, schedule=PowerSchedule(0.55, 1.0), averaging=Averaging()
        ),
        "damped batch Fisher": plain(lambda: BatchFisher(50), 0.55),
        "Adam": plain(Adam, 0.0),
    }


def run_coin(
    iterations: int = 2000,
    seeds: int = 5,
    draws: int = 0,
    starts: Sequence[Sequence[float]] = ((5.0, 45.0), (25.0, 25.0)),
    full: bool = False,
) -> pd.DataFrame:
    """Example 1: a, b and the distance to (58, 144)."""
    lines = []

    def measure(lam: Tensor) -> dict[str, Tensor]:
        gap = coin_bound(COIN) - coin_bound(lam)
        return {"a": lam[:, 0], "b": lam[:, 1], "error": (lam - COIN).norm(dim=-1), "gap": gap}

    for start in starts:
        for name, build in _coin_methods(draws).items():
            q = Beta(torch.tensor(list(start), dtype=FLOAT).expand(seeds, 2))
            target = (lambda theta: (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0]) if draws else coin_bound
            steps = 10_000 if full else iterations
            runs = _log(name, q, build, target, steps, measure, both=True)
            lines += [{"case": f"({start[0]:g}, {start[1]:g})"} | line for line in runs]
    return pd.DataFrame(lines)


def draw_coin_densities(log: pd.DataFrame, path: Path) -> None:
    """Figure 1: the fitted densities over the exact posterior."""
    cases = list(dict.fromkeys(log["case"]))
    figure = blank_figure(5.2 * len(cases), 4.4, "Figure 1: a probability, fitted densities and the posterior")
    x = np.linspace(0.12, 0.5, 400)
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        part = log[log["case"] == case]
        style(axes, f"start {case}, {part['iteration'].max()} iterations", "θ", "density")
        axes.plot(x, stats.beta.pdf(x, *COIN), color="#bdc1c6", linewidth=6, label="posterior Beta(58, 144)")
        for index, method in enumerate(dict.fromkeys(part["method"])):
            runs = part[(part["method"] == method) & (part["iteration"] == part["iteration"].max())]
            for number, row in enumerate(runs.itertuples()):
                label = f"{method}: {row.a:.1f}, {row.b:.1f}" if number == 0 else None
                axes.plot(x, stats.beta.pdf(x, row.a, row.b), color=color(index), linewidth=1.1, label=label)
        axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    _save(figure, path)
    _summary(log, "error", path, "Example 1: distance to (58, 144)")


def draw_coin_errors(log: pd.DataFrame, path: Path) -> None:
    """Figure 2: the distance to the optimum."""
    figure = blank_figure(9.5, 3.8, "Figure 2: a probability, distance to (58, 144)")
    for axes, x in zip(figure.subplots(1, 2), ("iteration", "seconds"), strict=True):
        style(axes, f"start {log['case'].iloc[0]}", "iteration" if x == "iteration" else "seconds a run", "|λ - λ*|")
        _median_and_range(axes, log[log["iteration"] > 0], "error", x)
        axes.set(xscale="log", yscale="log")
        axes.set_ylim(bottom=max(float(log["error"].min()), 1e-3))
    axes.legend(fontsize=7, frameon=False, loc="lower left")
    _save(figure, path)
    _summary(log, "error", path, "Example 1: distance to (58, 144)")


# ------------------------------------------------------------------------------------ Figure 3


def _normal_methods(draws: int) -> dict[str, Build]:
    def recursion(samples: int, c_beta: float, eps: float = 1e4, beta: float = 0.099) -> Callable[[], Recursive]:
        return lambda: Recursive(samples, eps=eps, c_beta=c_beta, beta=beta, warmup=0)

    def plain(metric: Callable[[], Metric], lr: float = 1.0, **settings: Any) -> Build:
        return _method(metric, lr, estimator=lambda: ControlVariate(draws), **settings)

    as_run = PowerSchedule(0.6, 1.0)
    return {
        "exact natural gradient": plain(Exact),
        "IFVB, ε = 10⁴": plain(recursion(10, 0.01), 10.0, schedule=as_run),
        "AIFVB, ε = 10⁴": plain(recursion(20, 0.001), 10.0, schedule=as_run, averaging=Averaging()),
        "IFVB, ε = 1": plain(recursion(10, 0.01, 1.0, 0.125)),
        "damped batch Fisher": plain(lambda: BatchFisher(50)),
        "Adam": plain(Adam, 0.03, schedule=PowerSchedule(0.0)),
    }


def run_normal(
    iterations: int = 1500, seeds: int = 5, draws: int = 1000, gibbs: int = 20_000, full: bool = False
) -> pd.DataFrame:
    """Example 2: λ and the bound; lines of method "Gibbs" hold quantiles of the posterior."""
    best = normal_bound(normal_optimum())

    def measure(lam: Tensor) -> dict[str, Tensor]:
        return _columns("m", "v", "a", "b")(lam) | {"bound": normal_bound(lam), "gap": best - normal_bound(lam)}

    lines = []
    for name, build in _normal_methods(draws).items():
        q = NormalInverseGamma(NORMAL_START.expand(seeds, 4))
        lines += _log(name, q, build, normal_log_joint, 5000 if full else iterations, measure)
    log = pd.DataFrame(lines)
    grid = np.linspace(0.0, 1.0, 401)[1:-1]
    values = np.quantile(normal_gibbs(10 * gibbs if full else gibbs), grid, axis=0)
    exact = pd.DataFrame({"method": "Gibbs", "level": grid, "mean": values[:, 0], "variance": values[:, 1]})
    return pd.concat([log, exact], ignore_index=True)


def draw_normal(log: pd.DataFrame, path: Path) -> None:
    """Figure 3: densities of the mean and the variance, and the gap of the bound."""
    exact, runs = log[log["method"] == "Gibbs"], log[log["method"] != "Gibbs"]
    figure = blank_figure(12.5, 3.7, "Figure 3: mean and variance of a normal sample")
    left, middle, right = figure.subplots(1, 3)
    for axes, name, grid in (
        (left, "mean", np.linspace(7, 12.5, 300)),
        (middle, "variance", np.linspace(0.3, 11, 300)),
    ):
        style(axes, f"density of the {name}", name)
        edges = exact[name].to_numpy()[::8]
        density = np.diff(exact["level"].to_numpy()[::8]) / np.diff(edges)
        axes.stairs(density, edges, fill=True, color="#dadce0", label="Gibbs")
        for index, method in enumerate(dict.fromkeys(runs["method"])):
            row = runs[(runs["method"] == method) & (runs["seed"] == 0)].iloc[-1]
            law = stats.norm(row.m, row.v**0.5) if name == "mean" else stats.invgamma(row.a, scale=row.b)
            axes.plot(grid, law.pdf(grid), color=color(index), linewidth=1.2, label=method)
    style(right, "bound of the optimum minus bound, exact", "iteration", "nats")
    _median_and_range(right, runs[runs["iteration"] > 0], "gap")
    right.set(xscale="log", yscale="log")
    right.legend(fontsize=6.5, frameon=False, loc="lower left")
    _save(figure, path)
    _summary(runs, "gap", path, "Example 2: nats below the best bound, -24.799583")


# ------------------------------------------------------------------------------------ Figure 4


def _poisson_methods() -> dict[str, Build]:
    def recursion() -> Recursive:
        return Recursive(1, eps=1.0, c_beta=1.0, beta=0.1, warmup=1000)

    def plain(metric: Callable[[], Metric], lr: float = 1.0, **settings: Any) -> Build:
        return _method(metric, lr, estimator=ClosedForm, **({"schedule": PowerSchedule(0.75, 1000.0)} | settings))

    return {
        "exact natural gradient": plain(Exact),
        "IFVB": plain(recursion),
        "AIFVB": plain(recursion, averaging=Averaging()),
        "damped batch Fisher": plain(lambda: BatchFisher(50)),
        "Adam": plain(Adam, 0.01, schedule=PowerSchedule(0.0)),
    }


def run_poisson(
    iterations: int = 2000, seeds: int = 10, data: Sequence[int] = (0, 1), full: bool = False
) -> pd.DataFrame:
    """Example 3: the bound, from exact gradients."""
    lines = []
    for case in data:
        model = poisson_data(case)
        eye = torch.eye(3, dtype=FLOAT)
        q = CholeskyGaussian(3, scale=0.1, dtype=FLOAT)
        target = LogJoint(model.log_joint)
        shape = FlatCholesky(torch.zeros(3, dtype=FLOAT), 0.01 * eye)

        def bound(lam: Tensor, model: Any = model, shape: FlatCholesky = shape) -> Tensor:
            mean, root = shape.parts(lam)
            return model.bound(mean, root @ root.mT)

        def measure(lam: Tensor, bound: Callable[[Tensor], Tensor] = bound) -> dict[str, Tensor]:
            return {"bound": bound(lam)}

        for name, build in _poisson_methods().items():
            family = FlatCholesky(torch.zeros(seeds, 3, dtype=FLOAT), (0.01 * eye).expand(seeds, 3, 3))
            runs = _log(name, family, build, bound, 5000 if full else iterations, measure)
            lines += [{"case": f"seed {case}"} | line for line in runs]
        begin = time.process_time()
        result = fit(q, target, progress=False)
        spent = time.process_time() - begin
        value = float(model.bound(q.mean, q.covariance))
        lines.append(
            {"case": f"seed {case}", "method": "torchngvi.fit", "seed": 0, "bound": value}
            | {"iteration": result.evaluations, "seconds": spent, "rejected": 0.0}
            | {"log_joint_draws": result.trace[-1].gradients, "fisher_draws": 0}
        )
    return pd.DataFrame(lines)


def draw_poisson(log: pd.DataFrame, path: Path) -> None:
    """Figure 4: the bound, and its distance to the best."""
    cases = list(dict.fromkeys(log["case"]))
    figure = blank_figure(4.2 * len(cases) + 2, 3.8, "Figure 4: Gaussian approximation of a Poisson regression")
    log = log.copy()
    log["gap"] = log.groupby("case")["bound"].transform("max") - log["bound"]
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        part = log[log["case"] == case]
        best = part["bound"].max()
        style(axes, f"data of {case}: best bound {best:.5f}", "iteration", "nats below it")
        curves = part[(part["iteration"] > 0) & (part["method"] != "torchngvi.fit")]
        _median_and_range(axes, curves, "gap")
        done = part[part["method"] == "torchngvi.fit"].iloc[-1]
        label = "fit, no settings: gradients"
        axes.plot(done["log_joint_draws"], max(done["gap"], 1e-7), "k*", markersize=9, label=label)
        axes.set(xscale="log", yscale="log", ylim=(1e-7, 2e3))
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)
    _summary(log, "gap", path, "Example 3: nats below the best bound")


# ------------------------------------------------------------------------------------ Figure 5


def _wine(seed: int) -> tuple[Tensor, ...]:
    """800, 100 and 100 of the red wines, standardised by the first; 11 covariates as in the paper's data."""
    path = provided("uci_regression/wine_red.npz", "the table of Example 4 (red wine for Direct Marketing)")
    with np.load(path) as arrays:
        X, y = arrays["X"].astype(float), arrays["y"].astype(float).reshape(-1)
    rows = np.random.default_rng(seed).permutation(len(y))[:1000]
    X, y = X[rows], y[rows]
    X, y = (X - X[:800].mean(0)) / X[:800].std(0), (y - y[:800].mean()) / y[:800].std()
    return torch.as_tensor(X), torch.as_tensor(y)


def _network_methods(draws: int) -> dict[str, Build]:
    constant = PowerSchedule(0.0)

    def plain(metric: Callable[[], Metric], lr: float, **settings: Any) -> Build:
        limited: dict[str, Any] = {"schedule": constant, "momentum": 0.6, "clip": 100.0} | settings
        return _method(metric, lr, estimator=lambda: Pathwise(draws), **limited)

    def recursion() -> Recursive:
        return Recursive(20, eps=1.0, c_beta=0.001, beta=0.09, warmup=0)

    return {
        "NAGVAC": plain(PublishedNAGVAC, 0.05),
        "exact natural gradient": plain(Exact, 0.05),
        "IFVB": plain(recursion, 0.01),
        "AIFVB": plain(recursion, 0.01, averaging=Averaging(2.0)),
        "damped batch Fisher": plain(lambda: BatchFisher(50), 0.01),
        "Adam": plain(Adam, 0.005, momentum=None, clip=None),
    }


def run_network(
    iterations: int = 400, seeds: int = 3, draws: int = 10, hidden: Sequence[int] = (10, 10), full: bool = False
) -> pd.DataFrame:
    """Example 4: errors on validation and test data; "best" is the test error where validation was lowest so far."""
    lines = []
    for seed in range(10 if full else seeds):
        X, y = _wine(seed)
        for name, build in _network_methods(draws).items():
            generator = torch.Generator().manual_seed(seed)
            network = GroupLassoNetwork(X[:800], y[:800], hidden)
            start, d = network.start(generator), network.dim
            factor = 0.01 * torch.randn(d, dtype=FLOAT, generator=generator)
            q = RankOneGaussian(start, factor, torch.full((d,), 0.01, dtype=FLOAT))
            optimizer = build(q, generator)
            best, at_best, spent = math.inf, math.nan, 0.0
            for step in range(1, (1000 if full else iterations) + 1):
                begin = time.process_time()
                optimizer.step(network)
                mean, b, c = q.vector.detach().chunk(3)
                network.update_groups(mean, b.square() + c.square())
                if step > 10:
                    network.update_noise(mean)
                spent += time.process_time() - begin
                at = optimizer.average[:d] if isinstance(optimizer, AIFVB) else mean
                error = (network.predict(at, X[800:]) - y[800:]).square()
                validation, test = float(error[:100].mean()), float(error[100:].mean())
                if validation < best:
                    best, at_best = validation, test
                lines.append(
                    {"method": name, "seed": seed, "iteration": step, "validation": validation, "test": test}
                    | {"best_validation": best, "best": at_best, "seconds": spent, "rejected": optimizer.rejections}
                    | {"log_joint_draws": optimizer.gradients + optimizer.values}
                    | {"fisher_draws": optimizer.memory["metric"]["fisher_draws"]}
                )
    return pd.DataFrame(lines)


def draw_network(log: pd.DataFrame, path: Path) -> None:
    """Figure 5: the error on validation data over iterations and over time."""
    title = "Figure 5: a network with the group lasso on red wine"
    figure = blank_figure(
        9.5, 3.9, title, "median over splits of the lowest validation error so far; their ranges are in the table"
    )
    for axes, x in zip(figure.subplots(1, 2), ("iteration", "seconds"), strict=True):
        style(axes, "", "iteration" if x == "iteration" else "seconds", "validation error")
        _median_and_range(axes, log, "best_validation", x, band=False)
        axes.set(xscale="log", ylim=(0.62, 1.08))
    axes.legend(fontsize=7, frameon=False, loc="upper right")
    _save(figure, path)
    _summary(log, "best_validation", path, "Example 4: lowest validation error")
    _summary(
        log, "best", path.with_name(path.name + "-test"), "Example 4: test error of the iterate chosen by validation"
    )


# ------------------------------------------------------------------------------------ Figure 6


def _german() -> tuple[Tensor, Tensor]:
    """800 customers: intercept and 9 standardised columns, good = 1."""
    path = provided("uci/vblab_germancredit.csv.gz", "the German credit table of Example 5")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        table = pd.read_csv(file)
    X = table.iloc[:800, :9].to_numpy(float)
    X = np.column_stack([np.ones(800), (X - X.mean(0)) / X.std(0)])
    return torch.as_tensor(X), torch.as_tensor(table["credit_risk"].to_numpy(float)[:800])


class _Classifier:
    """One hidden layer of tanh units, logistic output, θ ~ N(0, 10 I)."""

    def __init__(self, X: Tensor, y: Tensor, hidden: int) -> None:
        self.X, self.y, self.hidden = X, y, hidden
        self.dim = X.shape[1] * hidden + hidden + 1

    def __call__(self, theta: Tensor) -> Tensor:
        first, second = theta.split([self.dim - self.hidden - 1, self.hidden + 1], -1)
        units = torch.tanh(self.X @ first.unflatten(-1, (self.X.shape[1], self.hidden)))
        logit = (units @ second[..., 1:, None])[..., 0] + second[..., :1]
        likelihood = (self.y * logit - torch.nn.functional.softplus(logit)).sum(-1)
        return likelihood - 0.5 * (theta.square() / 10 + math.log(20 * math.pi)).sum(-1)


def _flow_methods(draws: int, samples: int) -> dict[str, Build]:
    """Step, clip, ε and damping of each are the best of a small grid."""

    def plain(metric: Callable[[], Metric], lr: float, clip: float = 100.0, momentum: float | None = 0.6) -> Build:
        return _method(
            metric,
            lr,
            estimator=lambda: Pathwise(draws),
            schedule=PowerSchedule(0.0),
            clip=clip,
            momentum=momentum,
        )

    return {
        "ordinary gradient": plain(Identity, 0.05, 10.0),
        "IFVB": plain(lambda: MatrixFree(samples, eps=100.0, c_beta=0.0, warmup=0), 0.01),
        "window": plain(lambda: Window(100, samples, 1.0, warmup=100), 0.01),
        "damped batch Fisher": plain(lambda: BatchFisher(50, 1.0), 0.01),
        "Adam": plain(Adam, 0.01, momentum=None),
    }


def run_flow(
    iterations: int = 150, seeds: int = 3, draws: int = 20, samples: int = 20, hidden: int = 5, full: bool = False
) -> pd.DataFrame:
    """Example 5: the bound by 200 draws that are the same for all."""
    target = _Classifier(*_german(), hidden)
    lines: list[dict[str, Any]] = []
    eye = torch.eye(target.dim, dtype=FLOAT)
    for seed in range(seeds):
        for name, build in _flow_methods(draws, samples).items():
            zero = torch.zeros(target.dim, dtype=FLOAT)
            q = OrthogonalFlow(zero, eye, zero - 0.5)

            def measure(lam: Tensor, q: OrthogonalFlow = q) -> dict[str, Tensor]:
                value = lower_bound(q, target, 200, torch.Generator().manual_seed(999), lam)[0]
                return {"bound": value}

            steps = 1000 if full else iterations
            runs = _log(name, q, build, target, steps, measure, seed=seed)
            lines += [line | {"seed": seed} for line in runs]
        gaussian = CholeskyGaussian(target.dim, scale=0.3, dtype=FLOAT)
        torch.manual_seed(seed)
        begin = time.process_time()
        result = fit(gaussian, target, progress=False, max_evaluations=200)
        lines.append(
            {"method": "Gaussian by fit", "seed": seed, "iteration": result.evaluations, "bound": -result.loss}
            | {"seconds": time.process_time() - begin, "rejected": 0.0, "fisher_draws": 0}
            | {"log_joint_draws": result.trace[-1].gradients}
        )
    return pd.DataFrame(lines)


def draw_flow(log: pd.DataFrame, path: Path) -> None:
    """Figure 6: the bound over iterations and over time."""
    figure = blank_figure(9.5, 3.9, "Figure 6: the orthogonal flow on German credit")
    gaussian = log[log["method"] == "Gaussian by fit"]
    runs = log[log["method"] != "Gaussian by fit"]
    for axes, x in zip(figure.subplots(1, 2), ("iteration", "seconds"), strict=True):
        style(axes, "", x, "lower bound")
        _median_and_range(axes, runs, "bound", x)
        axes.axhline(gaussian["bound"].median(), color="#5f6368", linewidth=0.9, linestyle=":", label="Gaussian, fit")
        low = runs[runs["iteration"] == 0]["bound"].median()
        axes.set_ylim(low - 50, float(log["bound"].max()) + 30)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    _save(figure, path)
    _summary(log, "bound", path, "Example 5: lower bound")


# ------------------------------------------------------------------------------------ beyond the paper


def _crescent(theta: Tensor) -> Tensor:
    """The logarithm of a curved density that sums to π."""
    return -0.5 * theta[..., 0].square() - 2 * (theta[..., 1] - theta[..., 0].square()).square()


def _coupling_methods(draws: int) -> dict[str, Build]:
    def plain(metric: Callable[[], Metric], lr: float = 1.0, **settings: Any) -> Build:
        return _method(metric, lr, estimator=lambda: Pathwise(draws), **settings)

    return {
        "IFVB": plain(lambda: Recursive(50, beta=0.125), clip=5.0),
        "window": plain(lambda: Window(200, 50), clip=5.0),
        "damped batch Fisher": plain(lambda: BatchFisher(50), clip=5.0),
        "Adam": plain(Adam, 0.01, schedule=PowerSchedule(0.0)),
    }


def run_crescent(iterations: int = 400, seeds: int = 5, draws: int = 20, full: bool = False) -> pd.DataFrame:
    """A coupling flow, whose Fisher matrix nobody knows, on a curved density: nats below the evidence log π."""
    lines: list[dict[str, Any]] = []
    for seed in range(seeds):
        for name, build in _coupling_methods(draws).items():
            torch.manual_seed(seed)
            q = ModuleFlow(AffineCoupling(2, layers=4, hidden=8).double(), 2)

            def measure(lam: Tensor, q: ModuleFlow = q) -> dict[str, Tensor]:
                value = lower_bound(q, _crescent, 4000, torch.Generator().manual_seed(999), lam)[0]
                return {"gap": math.log(math.pi) - value}

            runs = _log(name, q, build, _crescent, 3000 if full else iterations, measure, seed=seed)
            lines += [line | {"seed": seed} for line in runs]
    return pd.DataFrame(lines)


def draw_crescent(log: pd.DataFrame, path: Path) -> None:
    """The gap over iterations and over time."""
    figure = blank_figure(9.5, 3.8, "A coupling flow on a crescent")
    for axes, x in zip(figure.subplots(1, 2), ("iteration", "seconds"), strict=True):
        style(axes, "", x, "nats below the evidence")
        _median_and_range(axes, log, "gap", x)
        axes.set(yscale="log", ylim=(0.02, 5))
    axes.legend(fontsize=7, frameon=False, loc="upper right")
    _save(figure, path)
    _summary(log, "gap", path, "Example beyond the paper: nats below the evidence")


STUDIES: dict[str, Study] = {
    "fig1": Study(run_coin, draw_coin_densities),
    "fig2": Study(run_coin, draw_coin_errors),
    "fig3": Study(run_normal, draw_normal),
    "fig4": Study(run_poisson, draw_poisson),
    "fig5": Study(run_network, draw_network),
    "fig6": Study(run_flow, draw_flow),
    "coupling": Study(run_crescent, draw_crescent),
}
