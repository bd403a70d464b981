"""Figure 2 of Tan (2025): how likely each iterate is to be the one of Theorem 3."""

from pathlib import Path

import numpy as np
import pandas as pd

from examples.compare_methods.plots import blank_figure, color, save, style


def tau_weights(steps: int, beta: float) -> np.ndarray:
    """The probability P(τ = j) times its normaliser, 1 - β^(T - j + 1), j = 1..T: the iterate of Theorem 3."""
    return 1 - beta ** np.arange(steps, 0, -1.0)


def run_weights(steps: int = 10_000, beta: float = 0.9, *, full: bool = False) -> pd.DataFrame:
    """Compute the weights of all iterates in Theorem 3."""
    return pd.DataFrame({"j": np.arange(1, steps + 1), "weight": tau_weights(steps, beta)})


def draw_weights(log: pd.DataFrame, path: Path) -> None:
    """Draw Figure 2, the weights of all iterates, and of the last hundred."""
    figure = blank_figure(8.0, 3.2, "Figure 2: weight of iterate j in Theorem 3")
    all_of_them, last = figure.subplots(1, 2)
    below = int((log["weight"] <= 0.99).sum())
    for axes, part, title in (
        (all_of_them, log, f"all {len(log)}"),
        (last, log.tail(100), f"the last 100: the last {below} are at 0.99 or below"),
    ):
        style(axes, title, "j", "1 - β^(T - j + 1)")
        axes.plot(part["j"], part["weight"], color=color(0), linewidth=1.6)
        axes.set_ylim(0, 1.05)
    save(figure, path)
