"""Example 2, Figure 3: mean and variance of a normal sample, beside a Gibbs sampler."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from torch import Tensor

from examples.compare_methods.plots import blank_figure, legend, save, style
from examples.papers.godichon2023.drawing import RANGE, densities, median_and_range, summary
from examples.papers.godichon2023.problems import (
    NORMAL_START,
    normal_bound,
    normal_gibbs,
    normal_log_joint,
    normal_optimum,
)
from examples.papers.godichon2023.runs import Build, logged, recipe
from torchngvi.ifvb import (
    Adam,
    Averaging,
    BatchFisher,
    ControlVariate,
    Exact,
    NormalInverseGamma,
    Recursive,
)
from torchngvi.interfaces import Metric
from torchngvi.stepsizes import PowerSchedule


def _normal_methods(draws: int) -> dict[str, Build]:
    def recursion(samples: int, c_beta: float, eps: float = 1e4, beta: float = 0.099) -> Callable[[], Recursive]:
        return lambda: Recursive(samples, eps=eps, c_beta=c_beta, beta=beta, warmup=0)

    def plain(metric: Callable[[], Metric], lr: float = 1.0, **settings: Any) -> Build:
        return recipe(metric, lr, estimator=lambda: ControlVariate(draws), **settings)

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
    """Run Example 2: λ and the bound; lines of method "Gibbs" hold quantiles of the posterior."""
    best = normal_bound(normal_optimum())

    def measure(lam: Tensor) -> dict[str, Tensor]:
        bound = normal_bound(lam)
        return dict(zip("mvab", lam.unbind(-1), strict=True)) | {"bound": bound, "gap": best - bound}

    lines = []
    for name, build in _normal_methods(draws).items():
        q = NormalInverseGamma(NORMAL_START.expand(seeds, 4))
        lines += logged(name, q, build, normal_log_joint, 5000 if full else iterations, measure)
    log = pd.DataFrame(lines)
    grid = np.linspace(0.0, 1.0, 401)[1:-1]
    values = np.quantile(normal_gibbs(10 * gibbs if full else gibbs), grid, axis=0)
    exact = pd.DataFrame({"method": "Gibbs", "level": grid, "mean": values[:, 0], "variance": values[:, 1]})
    return pd.concat([log, exact], ignore_index=True)


def _density(name: str, grid: np.ndarray, row: pd.Series) -> np.ndarray:
    """The density that a run gives to the mean or to the variance."""
    law = stats.norm(row.m, row.v**0.5) if name == "mean" else stats.invgamma(row.a, scale=row.b)
    found: np.ndarray = law.pdf(grid)
    return found


def draw_normal(log: pd.DataFrame, path: Path) -> None:
    """Draw Figure 3, the densities of the mean and the variance, and the gap of the bound."""
    exact, runs = log[log["method"] == "Gibbs"], log[log["method"] != "Gibbs"]
    figure = blank_figure(
        14.0, 3.7, "Figure 3: mean and variance of a normal sample", RANGE
    )  # fmt: skip
    left, middle, right = figure.subplots(1, 3)
    for axes, name, grid in (
        (left, "mean", np.linspace(7, 12.5, 300)),
        (middle, "variance", np.linspace(0.3, 11, 300)),
    ):
        style(axes, f"posterior of the {name}", name, "density" if axes is left else "")
        edges = exact[name].to_numpy()[::8]
        density = np.diff(exact["level"].to_numpy()[::8]) / np.diff(edges)
        axes.stairs(density, edges, fill=True, color="#dadce0", label="Gibbs")
        densities(axes, grid, runs, functools.partial(_density, name, grid))
    style(right, "lower bound", "iterations", "nats below the optimum")
    median_and_range(right, runs[runs["iteration"] > 0], "gap", floor=1e-9)
    right.set(xscale="log", yscale="log")
    legend(figure)
    save(figure, path)
    summary(runs, "gap", path, "Example 2: nats below the best bound, -24.799583")
