"""Example 1, Figures 1 and 2: a probability, whose posterior is Beta(58, 144)."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from examples.compare_methods.plots import blank_figure, legend, save, style
from examples.papers.godichon2023.drawing import RANGE, X_LABELS, densities, median_and_range, summary
from examples.papers.godichon2023.problems import (
    COIN,
    FLOAT,
    coin_bound,
)
from examples.papers.godichon2023.runs import Build, logged, recipe
from torchngvi.ifvb import (
    Adam,
    Averaging,
    BatchFisher,
    Beta,
    ClosedForm,
    ControlVariate,
    Exact,
    GradientEstimator,
    Identity,
    Recursive,
)
from torchngvi.interfaces import Metric
from torchngvi.stepsizes import PowerSchedule


def _coin_methods(draws: int) -> dict[str, Build]:
    """With exact gradients (draws = 0) as in the paper, or sampled ones with a control variate."""

    def estimator() -> GradientEstimator:
        return ControlVariate(draws) if draws else ClosedForm()

    def recursion() -> Recursive:
        return Recursive(10, eps=100.0, c_beta=0.0, warmup=0)

    def plain(metric: Callable[[], Metric], alpha: float, offset: float = 1.0, lr: float = 1.0) -> Build:
        return recipe(metric, lr, estimator=estimator, schedule=PowerSchedule(alpha, offset))

    return {
        "ordinary gradient": plain(Identity, 1.0),
        "exact natural gradient": plain(Exact, 1.0),
        "IFVB": plain(recursion, 0.8, lr=10.0),
        "AIFVB": recipe(recursion, 10.0, estimator=estimator, schedule=PowerSchedule(0.55, 1.0), averaging=Averaging()),
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
    """Run Example 1: a, b and the distance to (58, 144) for each method, start and seed."""
    lines = []

    def measure(lam: Tensor) -> dict[str, Tensor]:
        gap = coin_bound(COIN) - coin_bound(lam)
        return {"a": lam[:, 0], "b": lam[:, 1], "error": (lam - COIN).norm(dim=-1), "gap": gap}

    for start in starts:
        for name, build in _coin_methods(draws).items():
            q = Beta(torch.tensor(list(start), dtype=FLOAT).expand(seeds, 2))
            target = (lambda theta: (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0]) if draws else coin_bound
            steps = 10_000 if full else iterations
            runs = logged(name, q, build, target, steps, measure, both=True)
            lines += [{"case": f"({start[0]:g}, {start[1]:g})"} | line for line in runs]
    return pd.DataFrame(lines)


def draw_coin_densities(log: pd.DataFrame, path: Path) -> None:
    """Draw Figure 1, the fitted densities over the exact posterior."""
    cases = list(dict.fromkeys(log["case"]))
    note = f"{RANGE}; final values are in the table"
    figure = blank_figure(
        4.2 * len(cases) + 2, 3.7, "Figure 1: a probability, fitted densities and the posterior", note
    )  # fmt: skip
    x = np.linspace(0.12, 0.5, 400)
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        part = log[log["case"] == case]
        style(axes, f"start {case}, {part['iteration'].max()} iterations", "θ", "density" if case == cases[0] else "")
        axes.plot(x, stats.beta.pdf(x, *COIN), color="#bdc1c6", linewidth=6, label="posterior Beta(58, 144)")
        densities(axes, x, part, lambda row: stats.beta.pdf(x, row.a, row.b))
    legend(figure)
    save(figure, path)
    summary(log, "error", path, "Example 1: distance to (58, 144)")


def draw_coin_errors(log: pd.DataFrame, path: Path) -> None:
    """Draw Figure 2, the distance to the optimum over iterations and time."""
    start = log["case"].iloc[0]
    figure = blank_figure(
        10.5, 3.7, f"Figure 2: a probability from {start}, distance to the optimum (58, 144)",
        RANGE,
    )  # fmt: skip
    for axes, x in zip(figure.subplots(1, 2), ("iteration", "seconds"), strict=True):
        style(axes, "", X_LABELS[x], "|λ - λ*|" if x == "iteration" else "")
        median_and_range(axes, log[log["iteration"] > 0], "error", x, 1e-9)
        axes.set(xscale="log", yscale="log")
        axes.set_ylim(bottom=max(float(log["error"].min()), 1e-3))
    legend(figure)
    save(figure, path)
    summary(log, "error", path, "Example 1: distance to (58, 144)")
