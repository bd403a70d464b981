"""Example 5, Figure 6: the flow with two orthogonal matrices on German credit."""

import gzip
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods.datasets import provided
from examples.compare_methods.plots import blank_figure, legend, save, style
from examples.papers.godichon2023.drawing import RANGE, X_LABELS, median_and_range, summary
from examples.papers.godichon2023.problems import (
    FLOAT,
)
from examples.papers.godichon2023.runs import Build, logged, recipe
from examples.papers.godichon2023.two_rotations import TwoRotations
from torchngvi import fit
from torchngvi.ifvb import (
    Adam,
    BatchFisher,
    Identity,
    MatrixFree,
    Pathwise,
    Window,
    lower_bound,
)
from torchngvi.interfaces import Metric
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import PowerSchedule


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
        return recipe(
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
    """Run Example 5: the lower bound by 200 draws that are the same for all methods."""
    target = _Classifier(*_german(), hidden)
    lines: list[dict[str, Any]] = []
    eye = torch.eye(target.dim, dtype=FLOAT)
    for seed in range(seeds):
        for name, build in _flow_methods(draws, samples).items():
            zero = torch.zeros(target.dim, dtype=FLOAT)
            q = TwoRotations(eye, zero, eye, zero - 0.5)

            def measure(lam: Tensor, q: TwoRotations = q) -> dict[str, Tensor]:
                value = lower_bound(q, target, 200, torch.Generator().manual_seed(999), lam)[0]
                return {"bound": value}

            steps = 1000 if full else iterations
            runs = logged(name, q, build, target, steps, measure, seed=seed)
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
    """Draw Figure 6, the lower bound over iterations and over time."""
    figure = blank_figure(
        10.5,
        3.7,
        "Figure 6: the orthogonal flow on German credit",
        RANGE,
    )
    gaussian = log[log["method"] == "Gaussian by fit"]
    runs = log[log["method"] != "Gaussian by fit"]
    for axes, x in zip(figure.subplots(1, 2), ("iteration", "seconds"), strict=True):
        style(axes, "", X_LABELS[x], "lower bound, nats" if x == "iteration" else "")
        median_and_range(axes, runs, "bound", x)
        axes.axhline(
            gaussian["bound"].median(), color="#5f6368", linewidth=0.9, linestyle=":", label="full Gaussian by fit"
        )
        low = runs[runs["iteration"] == 0]["bound"].median()
        axes.set_xscale("linear" if x == "iteration" else "log")
        axes.set_ylim(low - 50, float(log["bound"].max()) + 30)
    legend(figure)
    save(figure, path)
    summary(log, "bound", path, "Example 5: lower bound")
