"""Steps until E|λ - λ*|² = ε, measured and proved, against dimension, conditioning and ε."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from examples.compare_methods.plots import blank_figure, color, legend, save, spoken, style
from examples.papers.kim2024.runs import CLOSED, LANDING, Runs, noisy, optimum, reference_target, start
from torchngvi.theory.kim2024 import (
    closed_entropy_variance,
    landing_variance,
)

_GROUPS = 4  # of the runs, whose number it divides


def run_complexity(
    dims: Sequence[int] = (2, 4, 8, 16, 32),
    kappas: Sequence[float] = (1, 2, 4, 8),
    inverse_eps: Sequence[float] = (1e2, 1e4, 1e6, 1e8, 1e10),
    inverse_eps_closed: Sequence[float] = (4, 8, 16, 32, 64),
    eps: float = 1e-4,  # where it is not varied
    runs: int = 20,
    full: bool = False,
) -> pd.DataFrame:
    """Steps until the mean of |λ - λ*|² is ε, at the fixed step of the theorem, with the count it proves."""
    rows = []
    for dim in dims:
        rows.append({"varied": "d", "x": dim} | _reached(LANDING, dim, 2.0, eps, runs))
    for kappa in (*kappas, 16.0) if full else kappas:
        rows.append({"varied": "κ", "x": kappa} | _reached(LANDING, 4, kappa, eps, runs))
    for inverse in inverse_eps:
        rows.append({"varied": "1/ε", "x": inverse} | _reached(LANDING, 4, 2.0, 1 / inverse, runs))
    for inverse in inverse_eps_closed:
        rows.append({"varied": "1/ε", "x": inverse} | _reached(CLOSED, 2, 2.0, 1 / inverse, 5 * runs))
    return pd.DataFrame(rows)


def _reached(method: str, dim: int, kappa: float, eps: float, runs: int) -> dict[str, float | str]:
    target = reference_target(dim, kappa)
    C = optimum(target)
    if method == LANDING:
        variance = landing_variance(kappa, dim, 0.0)
    else:
        variance = closed_entropy_variance(kappa, dim, float(C.square().sum()))
    gamma = variance.fixed_step(1.0, eps)
    batch = Runs(target, start(target, runs), noisy(method), gamma, kappa)
    delta2 = float(batch.distances2()[0])
    proved, stride = variance.fixed_iterations(1.0, eps, delta2), max(1, int(0.02 / gamma))
    reached = _first(batch, eps, stride, proved)
    row: dict[str, float | str] = {"method": method, "dim": dim, "kappa": kappa, "eps": eps, "proved": proved}
    return row | reached


def _first(batch: Runs, eps: float, stride: int, proved: int) -> dict[str, float]:
    """When the mean of all runs is at most ε, and the first and the last of the means of four groups of them."""
    reached: dict[str, float] = {}
    step = 0
    while True:
        squares = batch.distances2()
        mean, groups = float(squares.mean()), squares.unflatten(0, (_GROUPS, -1)).mean(1)
        ended = step >= proved
        if "steps" not in reached and (mean <= eps or ended):
            reached |= {"steps": step, "end": mean}
        if "first" not in reached and (float(groups.min()) <= eps or ended):
            reached["first"] = step
        if "last" not in reached and (float(groups.max()) <= eps or ended):
            reached["last"] = step
        if len(reached) == 4:
            return reached
        batch.advance(stride)
        step += stride


def draw_complexity(log: pd.DataFrame, path: Path) -> None:
    """Draw the steps against each of d, κ and 1/ε that was varied."""
    found = set(log[["varied", "method"]].itertuples(index=False, name=None))
    panels = [panel for panel in (("d", LANDING), ("κ", LANDING), ("1/ε", LANDING), ("1/ε", CLOSED)) if panel in found]
    figure = blank_figure(
        max(6.0, 2.7 * len(panels)) + 1.6, 3.7,
        "Steps to E|λ - λ*|² = ε at the fixed step of the theorem, the family holds the target",
        "measured to 2% of 1/(γμ) by the mean of the runs, bars: by the means of four groups of them; where not varied "
        "κ = 2, d = 4 (CFE: 2), ε = 1e-4",
    )  # fmt: skip
    for axes, (varied, method) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        part = log[(log["varied"] == varied) & (log["method"] == method)]
        style(axes, spoken(method), varied, "steps" if axes.get_subplotspec().colspan.start == 0 else "")
        bars = [part["steps"] - part["first"], part["last"] - part["steps"]]
        axes.errorbar(part["x"], part["steps"], bars, fmt="o", color=color(0), markersize=4, label="measured")
        axes.plot(part["x"], part["proved"], color=color(1), linewidth=1.2, label="proved")
        axes.set_xscale("log")
        if len(part) and part["x"].max() < 1000:
            axes.set_xticks(part["x"], [f"{x:g}" for x in part["x"]])
            axes.minorticks_off()
        if (varied, method) != ("1/ε", LANDING):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        if (varied, method) == ("1/ε", LANDING):
            slopes = [np.polyfit(np.log(part["x"]), part[key], 1)[0] for key in ("steps", "proved")]
            print(f"{method} against log 1/ε: {slopes[0]:.0f} steps a unit measured, {slopes[1]:.0f} proved")
        else:
            slopes = [np.polyfit(np.log(part["x"]), np.log(part[key]), 1)[0] for key in ("steps", "proved")]
            print(f"{method} against {varied}: log-log slope {slopes[0]:.2f} measured, {slopes[1]:.2f} proved")
            if method == CLOSED:
                logs = np.log(part[["x", "steps", "proved"]].to_numpy(float))
                rises = np.diff(logs[:, 1:], axis=0) / np.diff(logs[:, :1], axis=0)
                print("from one 1/ε to the next: measured, proved", *(f"{a:.2f}, {b:.2f};" for a, b in rises))
    legend(figure)
    save(figure, path)
