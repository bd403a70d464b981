"""The look of the figures, and the curves and the table of an experiment, from its log alone."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchngvi.app import report
from torchngvi.app.fonts import drawable, families
from torchngvi.studies.settings import AXES, METRICS, Experiment

_SHOWN = {  # of the table: head and format
    "case": ("case", ""),
    "method": ("method", ""),
    "evaluations": ("evals", ".0f"),
    "seconds": ("s", ".3g"),
    "rejections": ("rejected", ".0f"),
    "objective": ("-ELBO", ".3f"),
    "test_nll": ("test NLL", ".2f"),
    "test_accuracy": ("accuracy", ".3f"),
}
_COLORS = ("#1f5a94", "#d1672b", "#3b8f5a", "#8a4fa3", "#b03a48", "#7a7f87", "#c2a030")
_INK, _FAINT = "#222222", "#9aa0a6"


def last_values(log: pd.DataFrame) -> pd.DataFrame:
    """Mean over starts of the last record of each method."""
    last = log[log["iteration"] == log.groupby(["case", "method"])["iteration"].transform("max")]
    return last.drop(columns="start").groupby(["case", "method"], sort=False).mean().reset_index()


def show_table(log: pd.DataFrame, title: str) -> None:
    """Print the last values."""
    frame = last_values(log)
    table = report.Table(box=report.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (name for name in _SHOWN if name in frame):
        side: Any = "left" if name in ("case", "method") else "right"
        table.add_column(_SHOWN[name][0], justify=side, no_wrap=True)
    for _, row in frame.iterrows():
        table.add_row(*(report.Text(format(row[name], form)) for name, (_, form) in _SHOWN.items() if name in frame))
    report.show(report.Text(f"{title} (last values, means over the starts)", style="bold"), table)


def blank_figure(width: float, height: float, title: str, note: str = "") -> Figure:
    """A figure with a title and an Agg canvas."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {"x": 0.01, "ha": "left", "fontfamily": families()}
    figure.suptitle(drawable(title), fontsize=11, fontweight="bold", color=_INK, **look)
    if note:
        figure.supxlabel(drawable(note), fontsize=8, color="#5f6368", **look)
    return figure


def style(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """The look of all panels."""
    axes.set_title(drawable(title), loc="left", fontsize=9, color=_INK, fontfamily=families())
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(which="both", labelsize=7.5, color=_FAINT, labelcolor=_INK)
    axes.tick_params(which="minor", length=0)
    axes.grid(True, color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)


def color(index: int) -> str:
    """Of the method with this number."""
    return _COLORS[index % len(_COLORS)]


def curves(log: pd.DataFrame, experiment: Experiment) -> Figure:
    """One row of panels a case: mean and min-max band over the starts.

    As in the paper the smallest value over all iterations, starts and methods of a case is subtracted from losses.
    """
    cases = list(dict.fromkeys(log["case"]))
    columns = experiment.columns
    height = 2.5 * len(cases) + 0.6
    figure = blank_figure(3.4 * len(columns), height, experiment.title, experiment.note)
    grid = figure.subplots(len(cases), len(columns), squeeze=False)
    for row, case in enumerate(cases):
        part = log[log["case"] == case]
        for place, column in enumerate(columns):
            metric, _, axis = column.partition(" over ")
            _panel(grid[row, place], part, case, metric, axis)
    grid[0, 0].legend(prop={"size": 7.5, "family": families()}, frameon=False)
    return figure


def _panel(axes: Axes, log: pd.DataFrame, case: str, metric: str, axis: str) -> None:
    gap = metric != "test_accuracy"
    style(axes, f"{case}: {METRICS[metric]}", AXES[axis], "above the minimum" if gap else "")
    values = log[metric].replace([np.inf, -np.inf], np.nan)
    floor = values.min() if gap else 0.0
    for index, method in enumerate(dict.fromkeys(log["method"])):
        of_method = log[log["method"] == method]
        grouped = of_method.assign(value=values[of_method.index] - floor).groupby("iteration")
        x = grouped[axis].mean()
        mean, low, high = (grouped["value"].agg(name) for name in ("mean", "min", "max"))
        keep = mean > 0 if gap else mean > -1
        axes.plot(x[keep], mean[keep], color=color(index), linewidth=1.4, label=drawable(method),
                  linestyle=("-", (0, (5, 2)), "-", (0, (2, 1.5)))[index % 4])  # fmt: skip
        axes.fill_between(x[keep], low[keep].clip(lower=1e-9) if gap else low[keep], high[keep],
                          color=color(index), alpha=0.15, linewidth=0)  # fmt: skip
    if gap:
        axes.set_yscale("log")
        bottom = max(float((values - floor)[values > floor].quantile(0.01)), 1e-6)
        top = float((values - floor)[log["iteration"] == 0].max())
        axes.set_ylim(bottom * 0.5, 5 * top)  # what diverged leaves the panel
