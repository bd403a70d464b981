"""Beyond the paper: a coupling flow on a differential equation, where IFVB should win.

No Fisher matrix of the flow is known, and each log joint solves an equation while the scores for the matrix cost none.
A drug is eliminated with Michaelis-Menten kinetics, C' = -V C/(K + C); observations at concentrations about K leave V
and K on a curved ridge.  There are two parameters, so that the evidence is an integral over a grid, and the gap exact.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods.plots import INK, blank_figure, legend, save, style
from examples.papers.godichon2023.drawing import RANGE, X_LABELS, median_and_range, summary
from examples.papers.godichon2023.runs import Build, logged, recipe
from torchngvi import fit
from torchngvi.ifvb import (
    Adam,
    AffineCoupling,
    Averaging,
    BatchFisher,
    MatrixFree,
    ModuleFlow,
    Pathwise,
    Recursive,
    Window,
    lower_bound,
)
from torchngvi.interfaces import Metric
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import PowerSchedule

_DOSE, _TIMES, _SOLVER_STEPS, _NOISE = 1.0, (0.5, 1.0, 1.5, 2.0), 4, 0.1
_SEEN = (-0.30, -0.52, -0.99, -1.30)  # log concentrations: those of V = K = 1 with errors of standard deviation 0.1


def log_concentrations(theta: Tensor) -> Tensor:
    """The log concentrations at the times of the data, by classical Runge-Kutta steps on x = log C."""
    rate, half = theta[..., 0].exp(), theta[..., 1].exp()
    x, now, states = torch.full_like(rate, math.log(_DOSE)), 0.0, []

    def field(x: Tensor) -> Tensor:
        return -rate / (half + x.exp())

    for time in _TIMES:
        h = (time - now) / _SOLVER_STEPS
        for _ in range(_SOLVER_STEPS):
            k1 = field(x)
            k2 = field(x + 0.5 * h * k1)
            k3 = field(x + 0.5 * h * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + field(x + h * k3))
        now = time
        states.append(x)
    return torch.stack(states, -1)


def log_joint(theta: Tensor) -> Tensor:
    """The log joint of (log V, log K) under N(0, I) and of the data, up to a constant, (*sample,)."""
    errors = (theta.new_tensor(_SEEN) - log_concentrations(theta)) / _NOISE
    return -0.5 * errors.square().sum(-1) - 0.5 * theta.square().sum(-1)


@functools.cache
def evidence(points: int = 400, reach: float = 6.0) -> float:
    """The logarithm of the integral of the joint, over a grid."""
    axis = torch.linspace(-reach, reach, points, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
    return float(torch.logsumexp(log_joint(grid).flatten(), 0) + 2 * (axis[1] - axis[0]).log())


def _methods(draws: int) -> dict[str, Build]:
    def plain(metric: Callable[[], Metric], lr: float = 1.0, **settings: Any) -> Build:
        return recipe(metric, lr, estimator=lambda: Pathwise(draws), **settings)

    return {
        "IFVB": plain(lambda: Recursive(50, beta=0.125), clip=5.0),
        "AIFVB": plain(lambda: Recursive(50, beta=0.125), clip=5.0, averaging=Averaging()),
        "last 400 vectors": plain(lambda: MatrixFree(50, beta=0.125, keep=400), clip=5.0),
        "window of 800": plain(lambda: Window(800, 50), clip=5.0),
        "window": plain(lambda: Window(200, 50), clip=5.0),
        "damped batch Fisher": plain(lambda: BatchFisher(50), clip=5.0),
        **{f"Adam, {lr:g}": plain(Adam, lr, schedule=PowerSchedule(0.0)) for lr in (0.01, 0.03, 0.1)},
    }


_COMPARED = ("IFVB", "window", "damped batch Fisher", "Adam, 0.01", "Adam, 0.03", "Adam, 0.1")


def run_ode(
    iterations: int = 400, seeds: int = 4, draws: int = 10, methods: Sequence[str] = _COMPARED, full: bool = False
) -> pd.DataFrame:
    """Run a coupling flow on the equation: nats below the evidence, over evaluations of the log joint."""
    lines: list[dict[str, Any]] = []
    for seed in range(seeds):
        for name, build in _methods(draws).items():
            if name not in methods:
                continue
            torch.manual_seed(seed)
            q = ModuleFlow(AffineCoupling(2, layers=4, hidden=8).double(), 2)

            def measure(lam: Tensor, q: ModuleFlow = q) -> dict[str, Tensor]:
                value = lower_bound(q, log_joint, 2000, torch.Generator().manual_seed(999), lam)[0]
                return {"gap": evidence() - value}

            runs = logged(name, q, build, log_joint, 1500 if full else iterations, measure, seed=seed)
            lines += [line | {"seed": seed} for line in runs]
    gaussian = CholeskyGaussian(2, dtype=torch.float64)
    torch.manual_seed(0)
    result = fit(gaussian, log_joint, progress=False)
    return pd.DataFrame(lines).assign(gaussian=evidence() + float(result.loss))


def draw_ode(log: pd.DataFrame, path: Path) -> None:
    """Draw the gap to the evidence over evaluations of the log joint, and over time."""
    figure = blank_figure(
        10.5,
        3.7,
        "A coupling flow on a differential equation",
        RANGE,
    )
    for axes, x, label in zip(
        figure.subplots(1, 2),
        ("log_joint_draws", "seconds"),
        ("evaluations of the log joint", X_LABELS["seconds"]),
        strict=True,
    ):
        style(axes, "", label, "nats below the evidence" if x != "seconds" else "")
        median_and_range(axes, log, "gap", x, 1e-9)
        level = float(log["gaussian"].iloc[0])
        axes.axhline(level, color=INK, linewidth=0.9, linestyle=":", label="best Gaussian")
        axes.set(xscale="log", yscale="log")
    legend(figure)
    save(figure, path)
    summary(log, "gap", path, "A differential equation: nats below the evidence")
    print(reached(log).to_string())


def reached(log: pd.DataFrame, goals: Sequence[float] = (1.0, 0.3, 0.1)) -> pd.DataFrame:
    """The evaluations of the log joint after which the median gap is below each goal, "beyond" if never."""
    medians = log.groupby(["method", "log_joint_draws"], sort=False)["gap"].median().reset_index()
    rows = {}
    for name, part in medians.groupby("method", sort=False):
        ends = [part.loc[part["gap"] <= goal, "log_joint_draws"] for goal in goals]
        rows[name] = {
            f"to {goal:g}": int(end.min()) if len(end) else "beyond" for goal, end in zip(goals, ends, strict=True)
        }
    return pd.DataFrame(rows).T
