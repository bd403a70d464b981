"""Studies of Kumar et al. (2025) besides the curves: Table 3, Figure 1 on a quadratic, Figure 5 on run time."""

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from examples.compare_methods import comparison, drawing, experiments, plots
from examples.compare_methods.drawing import drawable
from examples.compare_methods.settings import Case, Contender, Experiment, replaced
from examples.compare_methods.stepping import printed, steps
from examples.papers import Study
from examples.papers.digits import run_digits, show_digits
from torchngvi.app.saved import OutputFolder, write_frame
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import Quadrature
from torchngvi.methods import VN
from torchngvi.models import GeneralizedLinear
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import Constant

_GAP = 1e-6  # nats above the minimum at which a run on the quadratic counts as done
_LOST = 1e6  # nats above it at which a step was too long


# ------------------------------------------------------------------------------------ Table 3


def show_comparison(experiment: Experiment, log: pd.DataFrame, folder: OutputFolder) -> None:
    """Print each method's values beside the published ones, and write them as table.csv."""
    last = comparison.last_values(log).set_index(["case", "method"])
    keys = ("train", "test_nll", "test_accuracy")
    rows = []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(("data set", "method", "steps", "train", "test NLL", "accuracy")):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for case in experiment.cases:
        for contender in case.methods:
            if (case.name, contender.label) not in last.index:
                continue
            row = last.loc[(case.name, contender.label)]
            steps = int(row["iteration"])
            printed = dict(zip(keys, contender.printed, strict=False))
            rows.append(
                {"case": case.name, "method": contender.label, "steps": steps}
                | {key: float(row[key]) for key in keys}
                | {f"{key}_printed": value for key, value in printed.items()}
            )
            digits = (".2f", ".2f", ".3f")
            cells = (
                format(row[key], form) + (f" ({printed[key]:{form}})" if key in printed else "")
                for key, form in zip(keys, digits, strict=True)
            )
            table.add_row(Text(case.name), contender.label, str(steps), *cells)
    drawing.show(Text(f"{experiment.title} (in brackets: as printed)", style="bold"), table)
    with folder.writing() as place:
        write_frame(place / "table.csv", pd.DataFrame(rows))


# ------------------------------------------------------------------------------------ Figure 1


def run_quadratic(experiment: Experiment) -> pd.DataFrame:
    """Run every method of each case on the quadratic; panel b repeats its case at each of the steps."""
    logs = []
    for case in experiment.cases:
        X, y = experiments.quadratic(case.eigenvalues, case.precision)
        model = GeneralizedLinear(X, y, "gaussian", prior_precision=case.precision)
        best = _minimum(model)
        for contender in case.methods:
            if contender.lr is not None:
                logs.append(_path(experiment, case, contender, model, best, contender.lr))
                continue
            grid = experiment.steps
            tried = [_path(experiment, case, contender, model, best, lr) for lr in grid]
            logs.append(min(tried, key=lambda log: (log["gap"].iloc[-1] > _GAP, len(log))))
    return pd.concat(logs, ignore_index=True)


def _minimum(model: GeneralizedLinear) -> float:
    """The minimum of the loss, by VN, whose one step of 1 is exact."""
    q = CholeskyGaussian(2, dtype=torch.float64)
    VN(q, 1.0, step_size=Constant()).step(model)
    return _loss(q, model)


@torch.no_grad()
def _loss(q: CholeskyGaussian, model: GeneralizedLinear) -> float:
    return float(Quadrature()(q, model).value - q.entropy())


def _path(
    experiment: Experiment, case: Case, contender: Contender, model: GeneralizedLinear, best: float, lr: float
) -> pd.DataFrame:
    """Mean, covariance and gap after each step, until the gap is below 1e-6 nats or the budget is spent."""
    mean = torch.tensor([experiment.start_sd, experiment.start_sd], dtype=torch.float64)
    q = CholeskyGaussian(2, mean=mean, scale=experiment.start_scale, dtype=torch.float64)
    optimizer = printed(contender.method, q, lr)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)  # a step too long, of those tried
        for at, *_ in steps(lambda _: optimizer.step(model), case.iterations, range(case.iterations + 1)):
            V = q.covariance
            loss = _loss(q, model)
            rows.append((at, *q.mean.tolist(), float(V[0, 0]), float(V[0, 1]), float(V[1, 1]), loss - best))
            if loss - best < _GAP or not math.isfinite(loss) or loss - best > _LOST or optimizer.rejections:
                break
    log = pd.DataFrame(rows, columns=["iteration", "m1", "m2", "v11", "v12", "v22", "gap"])
    log.insert(0, "case", case.name)
    log.insert(1, "method", contender.label)
    log.insert(2, "lr", lr)
    return log


def draw_quadratic(log: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw one panel a case: contours of the target, paths of the mean, ellipses of V at the start and the end."""
    figure = plots.blank_figure(3.0 * len(experiment.cases) + 1.8, 3.8, experiment.title, experiment.note)
    panels = figure.subplots(1, len(experiment.cases), squeeze=False)[0]
    for axes, case in zip(panels, experiment.cases, strict=True):
        part = log[log["case"] == case.name]
        methods, order = (list(dict.fromkeys(runs["method"])) for runs in (part, log))
        plots.style(axes, case.name, "θ₁", "θ₂" if axes is panels[0] else "")
        S, mean = _target_of(case)
        path = part[["m1", "m2"]].to_numpy()
        ends = np.vstack([path, mean])
        low, high = ends.min(0) - 1.4, ends.max(0) + 0.7
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        x, y = np.meshgrid(np.linspace(low[0], high[0], 160), np.linspace(low[1], high[1], 160))
        away = np.stack([x - mean[0], y - mean[1]], -1)
        energy = 0.5 * np.einsum("...i,ij,...j->...", away, S, away)
        axes.contour(x, y, np.sqrt(energy), levels=14, colors="#d5d9de", linewidths=0.7)
        axes.grid(False)
        for method in methods:
            run = part[part["method"] == method]
            index = order.index(method)
            marker = "o" if len(run) <= 61 else None
            axes.plot(run["m1"], run["m2"], color=plots.color(index), linewidth=1.5, marker=marker, markersize=3,
                      linestyle=plots.dashes(index), label=drawable(plots.spoken(method)))  # fmt: skip
            for row in (run.iloc[0], run.iloc[-1]):
                axes.plot(*_ellipse(row), color=plots.color(index), linewidth=0.8, alpha=0.7)
        axes.plot(*mean, "+", color=plots.INK, markersize=9)
        axes.text(0.03, 0.98, _counts(part), transform=axes.transAxes, fontsize=7, va="top", linespacing=1.3)
    plots.legend(figure)
    return figure


_SHORT = {"vn": "VN", "srvn": "SR-VN", "covariance_gd": "GD", "bwgd": "BW-GD"}


def _counts(log: pd.DataFrame) -> str:
    """A line a method: its step, and its iterations to the minimum."""
    told = []
    for method, run in log.groupby("method", sort=False):
        done = "" if run["gap"].iloc[-1] < _GAP else ", not there"
        name = str(method).partition(",")[0]
        told.append(f"{_SHORT.get(name, name)}, step {run['lr'].iloc[0]:.2g}: {len(run) - 1}{done}")
    return "\n".join(told)


def _target_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Precision and mean of the exact posterior."""
    X, y = experiments.quadratic(case.eigenvalues, case.precision)
    S = X.mT @ X + case.precision * torch.eye(2, dtype=torch.float64)
    return S.numpy(), torch.linalg.solve(S, X.mT @ y).numpy()


def _ellipse(row: Any) -> np.ndarray:
    """The ellipse of one standard deviation, (2, points)."""
    root = np.linalg.cholesky(np.array([[row.v11, row.v12], [row.v12, row.v22]]))
    turn = np.linspace(0, 2 * np.pi, 80)
    return np.array([[row.m1], [row.m2]]) + root @ np.array([np.cos(turn), np.sin(turn)])


def differences(log: pd.DataFrame) -> dict[str, float]:
    """The largest difference of m and V between VN and SR-VN of the same step, at equal iterations, by case."""
    out = {}
    keys = ["m1", "m2", "v11", "v12", "v22"]
    runs = {(case, method): part for (case, method), part in log.groupby(["case", "method"])}
    for (case, method), run in runs.items():
        other = runs.get((case, method.replace("srvn", "vn")))
        if method.startswith("srvn") and other is not None:
            count = min(len(run), len(other))
            away = run[keys].to_numpy()[:count] - other[keys].to_numpy()[:count]
            out[f"{case}, {method}"] = float(np.abs(away).max())
    return out


# ------------------------------------------------------------------------------------ Figure 5

_FLOPS: dict[str, Callable[[float], float]] = {  # appendix F.1, without the pass over the data
    "vn": lambda d: d**3 + 4 * d**2,
    "srvn": lambda d: 3 * d**3 + 4.5 * d**2 + 0.5 * d,
    "bwgd": lambda d: 3 * d**3 + 5 * d**2,
}


def run_time(experiment: Experiment) -> pd.DataFrame:
    """Time each method for each D, methods in turn: quantiles of a step, and the median pass over the data in it."""
    case, rows = experiment.cases[0], []
    for dim in experiment.dims:
        problem = experiments.build(replaced(case, features=dim))
        posteriors = [CholeskyGaussian(dim, scale=experiment.start_scale, dtype=torch.float64) for _ in case.methods]
        optimizers = [
            printed(contender.method, q, contender.lr, estimator=problem.estimator)
            for contender, q in zip(case.methods, posteriors, strict=True)
        ]
        count = max(10, min(case.iterations, int(5e9 / (4 * dim**3 + 4 * case.rows * dim**2 + 1e6))))
        times = np.empty((count, len(case.methods), 2))
        for turn in times:
            for spent, q, optimizer in zip(turn, posteriors, optimizers, strict=True):
                begin = time.process_time()
                optimizer.step(problem.target)
                middle = time.process_time()
                problem.estimator(q, problem.target).derivative.framed(q.frame())
                spent[:] = middle - begin, time.process_time() - middle
        low, half, high = np.quantile(times, (0.1, 0.5, 0.9), axis=0)
        for index, contender in enumerate(case.methods):
            spent = {"seconds": half[index, 0], "low": low[index, 0], "high": high[index, 0]}
            rows.append({"case": case.name, "method": contender.label, "dim": dim, "steps": count}
                        | spent | {"data_seconds": half[index, 1]})  # fmt: skip
    return pd.DataFrame(rows)


def draw_time(log: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw the measured steps, and their ratio to VN beside that of the flop models."""
    figure = plots.blank_figure(10.2, 3.6, experiment.title, experiment.note)
    left, right = figure.subplots(1, 2)
    plots.style(left, "a step", "dimension D", "CPU seconds")
    plots.style(right, "ratio to VN", "dimension D")
    vn = log[log["method"] == "vn"].set_index("dim")["seconds"]
    ones = vn / vn
    top = float(vn.index.max())
    unit = vn[top] / _FLOPS["vn"](top)
    for index, method in enumerate(dict.fromkeys(log["method"])):
        run = log[log["method"] == method].set_index("dim")
        d = run.index.to_numpy(dtype=float)
        model = np.array([_FLOPS[method](value) for value in d])
        base = np.array([_FLOPS["vn"](value) for value in d])
        for axes, scale, flops in ((left, ones, unit * model), (right, 1 / vn, model / base)):
            drawn = run.rename(columns={"seconds": "middle"})[["middle", "low", "high"]].mul(scale, axis=0)
            plots.filled(axes, run.index.to_series(), drawn, plots.spoken(method), index, 0, marker="o", markersize=3.5)
            name = f"flop model of {_SHORT[method]}"
            axes.plot(d, flops, color=plots.color(index), linestyle=plots.dashes(1), alpha=0.7, label=name)
    left.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(list(experiment.dims), [str(dim) for dim in experiment.dims])
        axes.set_xticks([], minor=True)
    right.set_ylim(bottom=0)
    plots.legend(figure)
    return figure


STUDIES: dict[str, Study] = {"digits": Study(run_digits, show_digits)}
