"""The look of the figures, and the curves and the table of an experiment, from its log alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchngvi.app import report
from torchngvi.app.fonts import drawable, families
from torchngvi.studies.settings import AXES, METRICS, Experiment

_SHOWN = {  # of the table: head and format
    "case": ("case", ""),
    "method": ("method", ""),
    "evaluations": ("evaluations", ".0f"),
    "rejections": ("rejected", ".0f"),
    "seconds": ("CPU s", ".3g"),
    "elbo": ("ELBO", ".3f"),
    "below": ("below best", ".3f"),
    "loss": ("held-out loss", ".4f"),
    "test_accuracy": ("accuracy", ".3f"),
}
_EXPLAINED = (
    "ELBO, below best: nats of the training rows, larger ELBOs are better; the best of a case is the optimum where it "
    "is known, else the best run; 1 nat below it is a factor of e in the bound of p(y).",
    "held-out loss: nats a row, E_q[-log p(y | x)]; fit tells the smaller -log E_q[p(y | x)].",
    "evaluations: passes over the training rows, rejected trials among them. CPU s: seconds of the steps, a start.",
)
_COLORS = ("#1f5a94", "#d1672b", "#3b8f5a", "#8a4fa3", "#b03a48", "#7a7f87", "#c2a030")
_INK, _FAINT = "#222222", "#9aa0a6"
_DIVERGED = 1e9  # nats beyond which a run of the table is said to have diverged
_SEEN = 1e-6  # nats: a gap below it is not drawn


def last_values(log: pd.DataFrame) -> pd.DataFrame:
    """The last record of each method, as the mean over its starts.

    Args:
        log: the log of an experiment.

    Returns:
        A row for each case and method.
    """
    last = log[log["iteration"] == log.groupby(["case", "method"])["iteration"].transform("max")]
    grouped = last.drop(columns="start").groupby(["case", "method"], sort=False)
    return grouped.agg(lambda values: values.mean(skipna=False)).reset_index()


def compared(log: pd.DataFrame) -> pd.DataFrame:
    """The last values of each method in the units of `torchngvi fit`: ELBOs in nats, losses in nats a row.

    Args:
        log: the log of an experiment.

    Returns:
        A row for each case and method, with ``elbo``, how far ``below`` the best of the case it is, and ``loss``.  The
        best is the optimum where it is known, and else the largest of the runs.
    """
    frame = last_values(log)
    frame["elbo"] = -frame["objective"]
    known = -frame["optimum"] if "optimum" in frame else frame["elbo"] * np.nan
    best = np.fmax(frame["elbo"].where(np.isfinite(frame["elbo"])), known).groupby(frame["case"]).transform("max")
    frame["below"] = best - frame["elbo"]
    if "test_rows" in frame:
        frame["loss"] = frame["test_nll"] / frame["test_rows"]
    return frame


def show_table(log: pd.DataFrame, title: str) -> None:
    """Print the last values of each method as a table, and what its columns mean.

    Args:
        log: the log of an experiment.
        title: above the table.
    """
    frame = compared(log)
    table = report.Table(box=report.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown = {name: of for name, of in _SHOWN.items() if name in frame}
    for name, (head, _) in shown.items():
        side: Any = "left" if name in ("case", "method") else "right"
        table.add_column(head, justify=side, no_wrap=True)
    for _, row in frame.iterrows():
        table.add_row(*(report.Text(_cell(row[name], form)) for name, (_, form) in shown.items()))
    told = [line for line in _EXPLAINED if not line.startswith("held-out") or "loss" in frame]
    heading = report.Text(f"{title} (last values, means over the starts)", style="bold")
    report.show(heading, table, *(report.Text(line, style="dim") for line in told))


def _cell(value: Any, form: str) -> str:
    """A number of the table, or "diverged" in the place of one that is none or would be wider than its column."""
    return "diverged" if form and not abs(value) < _DIVERGED else format(value, form)


def save(figure: Figure, path: Path) -> None:
    """Write a figure twice, as .png and as .svg, the latter without a date, so that equal figures are equal files.

    Args:
        figure: from `blank_figure`.
        path: its suffix is replaced.
    """
    figure.savefig(path.with_suffix(".png"))
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def blank_figure(width: float, height: float, title: str, note: str = "") -> Figure:
    """A figure without panels, with a title and an Agg canvas.

    Args:
        width, height: in inches.
        title: at the top.
        note: at the bottom.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {"x": 0.01, "ha": "left", "fontfamily": families()}
    figure.suptitle(drawable(title), fontsize=11, fontweight="bold", color=_INK, **look)
    if note:
        figure.supxlabel(drawable(note), fontsize=8, color="#5f6368", **look)
    return figure


def style(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Give a panel the look of all panels.

    Args:
        axes: the panel.
        title: above it.
        x, y: the labels of its axes.
    """
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
    """The colour of the method with this number.

    Args:
        index: from 0.

    Returns:
        A colour of matplotlib.
    """
    return _COLORS[index % len(_COLORS)]


def curves(log: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw one row of panels for each case: mean and min-max band over the starts.

    Objectives are shown by their distance from the optimum of the method's family.  Where that is not known, and for
    the loss of test rows, whose minimum no method looks for, the smallest value over all iterations, starts and
    methods of a case is subtracted, as in the paper.  Seconds are iterations times the median seconds of a step.

    Args:
        log: the log of the experiment.
        experiment: its settings, which name the panels.

    Returns:
        The figure.
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
    values, known = _gaps(log, metric)
    style(axes, f"{case}: {METRICS[metric]}", AXES[axis], ("from the optimum" if known else "above the minimum") * gap)
    for index, method in enumerate(dict.fromkeys(log["method"])):
        of_method = log[log["method"] == method]
        grouped = of_method.assign(value=values[of_method.index]).groupby("iteration")
        x = _median_seconds(grouped["seconds"].mean()) if axis == "seconds" else grouped[axis].mean()
        mean, low, high = (grouped["value"].agg(name) for name in ("mean", "min", "max"))
        mean = mean.where(grouped["value"].count() == grouped.size())  # a start that diverged ends the curve
        keep = mean > 0 if gap else mean > -1
        axes.plot(x[keep], mean[keep], color=color(index), linewidth=1.4, label=drawable(method),
                  linestyle=("-", (0, (5, 2)), "-", (0, (2, 1.5)))[index % 4])  # fmt: skip
        axes.fill_between(x[keep], low[keep].clip(lower=1e-9) if gap else low[keep], high[keep],
                          color=color(index), alpha=0.15, linewidth=0)  # fmt: skip
    if gap:
        axes.set_yscale("log")
        bottom, top = values[values > 0].quantile(0.01), values[log["iteration"] == 0].max()
        if bottom < top:
            axes.set_ylim(max(float(bottom), _SEEN) * 0.5, 5 * float(top))  # what diverged leaves the panel


def _gaps(log: pd.DataFrame, metric: str) -> tuple[pd.Series, bool]:
    """The values of one case as they are drawn, and whether they are distances from an optimum that is known."""
    values = log[metric].replace([np.inf, -np.inf], np.nan)
    if metric == "test_accuracy":
        return values, False
    best = log.get({"objective": "optimum", "train": "train_optimum"}.get(metric, ""))
    if best is None or not np.isfinite(best).all():
        return values - values.min(), False
    return (values - best).abs(), True  # of Table 3 the optimum is not the smallest value


def _median_seconds(seconds: pd.Series) -> pd.Series:
    """Iterations times the median seconds of a step, by iteration: what else the machine did is not in it."""
    iterations = seconds.index.to_series()
    return iterations * (seconds.diff() / iterations.diff()).median()
