"""Figure 2: logistic regression with constant steps, on mushrooms and on two digits."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods import datasets, plots
from examples.compare_methods.datasets import mnist_images
from examples.compare_methods.stepping import steps, unguarded
from examples.papers.wu2024.runs import CLAMP, NAMES, band, due
from torchngvi import fit
from torchngvi.diagnostics import predictor_moments
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import BonnetPrice, Independent, Quadrature, Reparametrized
from torchngvi.interfaces import Estimator
from torchngvi.methods import NGVI
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import ProjectedRootGradient
from torchngvi.stepsizes import Constant

_LOST = 30.0  # times the starting objective: a run beyond it has diverged


def mushrooms() -> tuple[Tensor, Tensor]:
    """The mushrooms of LIBSVM, X (8124, 112) and y (8124,), float64."""
    X, y = datasets.load("mushrooms")
    return torch.as_tensor(X), torch.as_tensor(y)


def digits(one: int = 1, other: int = 7) -> tuple[Tensor, Tensor]:
    """Two digits of MNIST's training part, pixels in [0, 1], float32."""
    X, labels = mnist_images("MNIST of Figure 2")
    kept = (labels == one) | (labels == other)
    return X[kept], (labels[kept] == other).to(X)


def standardized_digits() -> tuple[Tensor, Tensor]:
    """The same with every pixel that varies standardised; the others are 0."""
    X, y = digits()
    spread = X.std(0, unbiased=False)
    return (X - X.mean(0)) / spread.where(spread > 0, 1.0), y


_DATA = {"mushrooms": mushrooms, "mnist": digits, "mnist, standardised": standardized_digits}


def run_logistic(
    data: Sequence[str] = ("mushrooms", "mnist"),
    seeds: Sequence[int] = (3, 2),  # one a data set
    draws: int = 10,
    iterations: Sequence[int] = (200, 50),
    full_iterations: Sequence[int] = (2000, 400),
    ngd: Sequence[Sequence[float]] = ((5e-1, 1e-1, 1e-2, 1e-3), (1e-1, 1e-2, 1e-3)),
    sgd: Sequence[Sequence[float]] = ((1e-3, 1e-4, 1e-5, 1e-6), (1e-5, 1e-6, 1e-7)),
    points: int = 25,
    full: bool = False,
) -> pd.DataFrame:
    """Run logistic regression under NGD with Price's gradient, SGD (r) and SGD (p): the negative ELBO."""
    rows = []
    grid = zip(data, seeds, iterations, full_iterations, ngd, sgd, strict=True)
    for name, members, short, long, natural, euclidean in grid:
        X, y = _DATA[name]()
        model = GeneralizedLinear(X, y)
        best = CholeskyGaussian(model.dim, (1,), dtype=X.dtype)
        fit(best, model, tolerance=0.01, progress=False)
        known = _scored(best, model, 0).iloc[0]
        for method, rates in (("NGD (p)", natural), ("SGD (p)", euclidean), ("SGD (r)", euclidean)):
            for lr in rates:
                log = _logistic(model, method, lr, members, draws, long if full else short, points)
                at = {"optimum": known["objective"], "nlpd_optimum": known["nlpd"]}
                rows.append(log.assign(data=name, method=method, lr=lr, **at))
                end = log[log["iteration"] == log["iteration"].max()]
                print(f"{name}, {method}, {lr:g}: {end['objective'].mean():.6g} after {end['iteration'].iloc[0]}"
                      + (", diverged" if end["diverged"].any() else ""))  # fmt: skip
    return pd.concat(rows, ignore_index=True)


def _logistic(
    model: GeneralizedLinear, method: str, lr: float, seeds: int, draws: int, iterations: int, points: int
) -> pd.DataFrame:
    """One method with one step size; a run that diverges ends there."""
    noise = Independent(draws, torch.Generator().manual_seed(0))
    estimator: Estimator = Reparametrized(noise) if method == "SGD (r)" else BonnetPrice(noise)
    if method == "NGD (p)":
        q: Gaussian = NaturalGaussian(model.dim, (seeds,), dtype=model.X.dtype)
        opt: NaturalGradientVI = unguarded(NGVI(q, lr, estimator=estimator))
    else:
        q = CholeskyGaussian(model.dim, (seeds,), dtype=model.X.dtype)
        rule = ProjectedRootGradient(CLAMP)
        opt = unguarded(NaturalGradientVI(q, rule, lr, step_size=Constant(), estimator=estimator))
    records: list[pd.DataFrame] = []
    start = math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)
        for t, *_ in steps(lambda _: opt.step(model), iterations, due(iterations, points)):
            records.append(_scored(q, model, t))
            start = float(records[0]["objective"].mean())
            if t > 0 and (not float(records[-1]["objective"].max()) < _LOST * start or opt.rejections):
                break
    log = pd.concat(records)
    lost = not log["objective"].max() < _LOST * start or opt.rejections > 0
    return log.assign(diverged=lost, rejections=opt.rejections)


@torch.no_grad()
def _scored(q: Gaussian, model: GeneralizedLinear, t: int) -> pd.DataFrame:
    value = Quadrature()(q, model).value - q.entropy()
    mean, variance = predictor_moments(model, q, model.X)
    nodes, weights = (torch.as_tensor(part).to(mean) for part in np.polynomial.hermite_e.hermegauss(32))
    eta = mean + variance.sqrt() * nodes[:, None, None]
    chance = (torch.sigmoid(model.y * eta) * (weights / weights.sum())[:, None, None]).sum(0)
    return pd.DataFrame(
        {
            "iteration": t,
            "seed": range(len(value)),
            "objective": value.numpy(),
            "nlpd": -chance.clamp_min(1e-30).log().mean(-1).numpy(),
        }
    )


def draw_logistic(log: pd.DataFrame, path: Path) -> None:
    """Draw a panel for each data set and method, and two with the best steps: a colour a step, a dash a method."""
    log = _judged(log).assign(gap=lambda judged: plots.gap(judged["objective"], judged["optimum"]))
    data, methods = (list(dict.fromkeys(log[column])) for column in ("data", "method"))
    rates = sorted(log["lr"].unique(), reverse=True)
    figure = plots.blank_figure(
        16.2, 2.9 * len(data) + 0.6, "Figure 2: logistic regression, negative ELBO with constant steps",
        "means over the seeds, bands from the smallest to the largest; runs that diverged are not drawn",
    )  # fmt: skip
    grid = figure.subplots(len(data), len(methods) + 2, squeeze=False)
    for row, name in enumerate(data):
        part = log[(log["data"] == name) & ~log["diverged"]]
        for column, method in enumerate(methods):
            axes = grid[row, column]
            plots.style(axes, f"{name}: {method}", "iterations", "negative ELBO in nats" if column == 0 else "")
            for lr, run in part[part["method"] == method].groupby("lr"):
                band(axes, run, "objective", "_", rates.index(lr), column)
            level = float(part["optimum"].iloc[0])
            axes.axhline(level, color=plots.INK, linewidth=0.8, linestyle=":", label="at the optimum")
            axes.set_ylim(0.9 * level, 1.6 * part[part["iteration"] == 0]["objective"].max())
        for axes, metric, unit in zip(grid[row, -2:], ("gap", "nlpd"), _BEST_UNITS, strict=True):
            plots.style(axes, f"{name}: best steps", "iterations", unit)
            for index, method in enumerate(methods):
                if method in set(part["method"]):
                    best, run = _best(part[part["method"] == method])
                    band(axes, run, metric, "_", rates.index(best), index)
        grid[row, -1].axhline(part["nlpd_optimum"].iloc[0], color=plots.INK, linewidth=0.8, linestyle=":")
        for axes in grid[row]:
            axes.set(xscale="log", yscale="log")
    for index, method in enumerate(methods):
        grid[0, 0].plot([], [], color=plots.INK, linestyle=plots.dashes(index), label=NAMES[method])
    for index, lr in enumerate(rates):
        grid[0, 0].plot([], [], color=plots.color(index), linewidth=3, label=f"step {lr:g}")
    plots.legend(figure)
    plots.save(figure, path)
    _print_logistic(log)


_BEST_UNITS = ("nats above the optimum", "training NLPD in nats a row")


def _judged(log: pd.DataFrame) -> pd.DataFrame:
    """Runs that end above their start are marked as diverged, too."""
    keys = ["data", "method", "lr"]
    ordered = log.groupby([*keys, "iteration"])["objective"].mean().groupby(keys)
    above = (ordered.last() > ordered.first()).rename("above").reset_index()
    judged = log.merge(above, on=keys, how="left")
    return judged.assign(diverged=judged["diverged"] | judged["above"]).drop(columns="above")


def _best(log: pd.DataFrame) -> tuple[float, pd.DataFrame]:
    """The step with the smallest last value."""
    last = log[log["iteration"] == log["iteration"].max()].groupby("lr")["objective"].mean()
    return float(last.idxmin()), log[log["lr"] == last.idxmin()]


def _print_logistic(log: pd.DataFrame) -> None:
    for (name, method, lr), part in log.groupby(["data", "method", "lr"], sort=False):
        means = part.groupby("iteration")["objective"].mean()
        late = means[means.index >= means.index.max() // 2]
        rises = int((late.diff() > 1e-4 * late.abs()).sum())
        tail = (f", last half {late.min():.6g} to {late.max():.6g}, standard deviation {late.std():.2g}, "
                f"rises in {rises} of {len(late) - 1} records")  # fmt: skip
        print(f"{name}, {method}, {lr:g}: {means.iloc[-1]:.6g} after {means.index[-1]}"
              + (" (diverged)" if part["diverged"].any() else tail))  # fmt: skip
