"""Beyond the paper: a coupling flow, whose Fisher matrix is not known, on a curved density."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods.plots import blank_figure, legend, save, style
from examples.papers.godichon2023.drawing import RANGE, X_LABELS, median_and_range, summary
from examples.papers.godichon2023.runs import Build, logged, recipe
from torchngvi.ifvb import (
    Adam,
    AffineCoupling,
    BatchFisher,
    ModuleFlow,
    Pathwise,
    Recursive,
    Window,
    lower_bound,
)
from torchngvi.interfaces import Metric
from torchngvi.stepsizes import PowerSchedule


def _crescent(theta: Tensor) -> Tensor:
    """The logarithm of a curved density that sums to π."""
    return -0.5 * theta[..., 0].square() - 2 * (theta[..., 1] - theta[..., 0].square()).square()


def _coupling_methods(draws: int) -> dict[str, Build]:
    def plain(metric: Callable[[], Metric], lr: float = 1.0, **settings: Any) -> Build:
        return recipe(metric, lr, estimator=lambda: Pathwise(draws), **settings)

    return {
        "IFVB": plain(lambda: Recursive(50, beta=0.125), clip=5.0),
        "window": plain(lambda: Window(200, 50), clip=5.0),
        "damped batch Fisher": plain(lambda: BatchFisher(50), clip=5.0),
        "Adam": plain(Adam, 0.01, schedule=PowerSchedule(0.0)),
    }


def run_crescent(iterations: int = 400, seeds: int = 5, draws: int = 20, full: bool = False) -> pd.DataFrame:
    """Run a coupling flow, whose Fisher matrix is not known, on a curved density: nats below the evidence log π."""
    lines: list[dict[str, Any]] = []
    for seed in range(seeds):
        for name, build in _coupling_methods(draws).items():
            torch.manual_seed(seed)
            q = ModuleFlow(AffineCoupling(2, layers=4, hidden=8).double(), 2)

            def measure(lam: Tensor, q: ModuleFlow = q) -> dict[str, Tensor]:
                value = lower_bound(q, _crescent, 4000, torch.Generator().manual_seed(999), lam)[0]
                return {"gap": math.log(math.pi) - value}

            runs = logged(name, q, build, _crescent, 3000 if full else iterations, measure, seed=seed)
            lines += [line | {"seed": seed} for line in runs]
    return pd.DataFrame(lines)


def draw_crescent(log: pd.DataFrame, path: Path) -> None:
    """Draw the gap to the evidence over iterations and over time."""
    figure = blank_figure(10.5, 3.7, "A coupling flow on a crescent", RANGE)
    for axes, x in zip(figure.subplots(1, 2), ("iteration", "seconds"), strict=True):
        style(axes, "", X_LABELS[x], "nats below the evidence" if x == "iteration" else "")
        median_and_range(axes, log, "gap", x, 1e-9)
        axes.set(yscale="log", ylim=(0.02, 5))
    legend(figure)
    save(figure, path)
    summary(log, "gap", path, "Example beyond the paper: nats below the evidence")
