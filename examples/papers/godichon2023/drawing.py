"""The common parts of the figures: medians over the seeds with their range, and the table of last values."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from rich import box
from rich.table import Table
from rich.text import Text

from examples.compare_methods import drawing, plots
from examples.compare_methods.plots import spoken
from torchngvi.app.saved import write_frame

RANGE = "median over the seeds, band from the smallest to the largest"
X_LABELS = {"iteration": "iterations", "seconds": "CPU seconds a run (steps × median step)"}


def median_and_range(
    axes: Axes,
    log: pd.DataFrame,
    y: str,
    x: str = "iteration",
    floor: float = -math.inf,
    levels: tuple[float, float] = (0.0, 1.0),
) -> None:
    """Draw one line for each method, the median over seeds, with their quantiles as a band."""
    for index, method in enumerate(dict.fromkeys(log["method"])):
        part = log[log["method"] == method]
        plots.band(axes, part, y, spoken(method), index, x=x, middle="median", floor=floor, levels=levels)


def densities(axes: Axes, x: np.ndarray, runs: pd.DataFrame, density: Callable[[pd.Series], np.ndarray]) -> None:
    """Draw the density of each method at the end of its runs, the median over seeds, with their range as a band."""
    for index, method in enumerate(dict.fromkeys(runs["method"])):
        of_method = runs[runs["method"] == method]
        last = of_method[of_method["iteration"] == of_method["iteration"].max()]
        values = pd.DataFrame([density(row) for _, row in last.iterrows()])
        drawn = pd.DataFrame({"middle": values.median(), "low": values.min(), "high": values.max()})
        plots.filled(axes, x, drawn, spoken(method), index)


def _shown(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 0.01 else f"{value:.1e}"


def summary(log: pd.DataFrame, value: str, path: Path, title: str) -> None:
    """Print, and write beside the figure, the last values of each method: median and range over the seeds."""
    case = ["case"] if "case" in log else []
    last = log[log["iteration"] == log.groupby([*case, "method"])["iteration"].transform("max")]
    rows = []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (*case, "method", "steps", value, "lowest", "highest", "log p", "scores", "s"):
        side: Any = "left" if name in ("case", "method") else "right"
        table.add_column(name, justify=side, no_wrap=side == "right")
    for key, part in last.groupby([*case, "method"], sort=False):
        values = part[value]
        row = [*key, int(part["iteration"].iloc[0]), values.median(), values.min(), values.max()]
        row += [int(part["log_joint_draws"].mean()), int(part["fisher_draws"].mean()), part["seconds"].mean()]
        rows.append(row)
        cells = [_shown(cell) if isinstance(cell, float) else str(cell) for cell in row]
        table.add_row(*(Text(cell) for cell in cells))
    drawing.show(Text(title, style="bold"), table)
    names = [*case, "method", "iterations", value, "lowest", "highest", "log_joint_draws", "fisher_draws", "seconds"]
    write_frame(path.with_name(path.name + "-table.csv"), pd.DataFrame(rows, columns=names))
