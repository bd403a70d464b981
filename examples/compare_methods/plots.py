"""The look of the figures of a comparison, and what they draw of a log: gaps to an optimum that is known, times by the
median step, bands over the seeds.
"""

import io
import re
import textwrap
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.compare_methods.drawing import drawable, families

INK, FAINT = "#222222", "#9aa0a6"
_COLORS = ("#1f5a94", "#d1672b", "#3b8f5a", "#8a4fa3", "#b03a48", "#7a7f87", "#c2a030", "#2a9d9d")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))
_WORDS = {  # of the methods of the registry that the papers compare
    "vn": "variational Newton (VN)",
    "srvn": "square-root VN (SR-VN)",
    "bwgd": "Bures-Wasserstein (BW-GD)",
    "svgd": "Stein (SVGD-density)",
    "covariance_gd": "gradient descent in (m, V)",
    "root_gd": "gradient descent in (m, C)",
    "ngvi": "natural parameters (NGVI)",
    "IFVB": "inversion-free (IFVB)",
    "AIFVB": "averaged (AIFVB)",
    "window": "window of scores",
    "STL": "sticking the landing (STL)",
    "CFE": "closed-form entropy (CFE)",
}
_STEP = re.compile(r"^(\w+)=(\S+)$")  # METHOD=LR, as on the command line


def save(figure: Figure, path: Path) -> None:
    """Write a figure twice, as .png and as .svg, the latter without a date, so that equal figures are equal files."""
    figure.savefig(path.with_suffix(".png"))
    text = io.StringIO()
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(text, format="svg", dpi=200, metadata={"Date": None})  # the dots of what is rasterized
    path.with_suffix(".svg").write_text(_PATH.sub(_shortened, text.getvalue()), encoding="utf-8")


_PATH, _DIGITS = re.compile(r' d="[^"]*"'), re.compile(r"(\.\d\d)\d+")


def _shortened(path: re.Match[str]) -> str:
    """A path of an .svg with its places to a hundredth of a point, which is half of the file."""
    return _DIGITS.sub(r"\1", path[0])


def blank_figure(width: float, height: float, title: str, note: str = "") -> Figure:
    """A figure without panels, with a title and an Agg canvas."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {"x": 0.01, "ha": "left", "fontfamily": families()}
    figure.suptitle(drawable(title), fontsize=11, fontweight="bold", color=INK, **look)
    if note:
        figure.supxlabel(textwrap.fill(drawable(note), int(16 * width)), fontsize=8, color="#5f6368", **look)
    return figure


def style(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Give a panel the look of all panels."""
    axes.set_title(drawable(title), loc="left", fontsize=9, color=INK, fontfamily=families())
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(which="both", labelsize=7.5, color=FAINT, labelcolor=INK)
    axes.tick_params(which="minor", length=0)
    axes.grid(True, color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)


def color(index: int) -> str:
    """The colour of the method with this number."""
    return _COLORS[index % len(_COLORS)]


def dashes(index: int) -> Any:
    """The dashes of the line with this number."""
    return _DASHES[index % len(_DASHES)]


def spoken(label: str) -> str:
    """The name of a method in words, with what its label says beside it.

    >>> spoken("srvn"), spoken("bwgd=1e-3"), spoken("Adam")
    ('square-root VN (SR-VN)', 'Bures-Wasserstein (BW-GD), step 1e-3', 'Adam')
    """
    name, comma, rest = _STEP.sub(r"\1, step \2", label.strip()).partition(",")
    return _WORDS.get(name, name) + comma + rest


def legend(figure: Figure) -> None:
    """Name the lines of all panels once, at the right of them."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if named:
        figure.legend(
            named.values(), named.keys(), loc="outside right upper", frameon=False, handlelength=3.0,
            prop={"size": 7.5, "family": families()},
        )  # fmt: skip


SEEDS = ("seed", "start")  # the columns that tell the runs of a method apart, of which a log has one or none


def gap(values: pd.Series, optimum: pd.Series | float | None) -> pd.Series | None:
    """The distances of values from their optimum, or None where it is not known: then the values are drawn.

    >>> gap(pd.Series([3.0, 2.5]), 2.0).tolist()
    [1.0, 0.5]
    >>> gap(pd.Series([3.0, 2.5]), float("nan")) is None
    True
    """
    if optimum is None or not bool(np.isfinite(optimum).all()):
        return None
    return (values - optimum).abs()


def step_seconds(log: pd.DataFrame) -> float:
    """The median over the records of all seeds of the seconds that a step took since the record before.

    >>> step_seconds(pd.DataFrame({"iteration": [0, 2, 4, 5], "seconds": [0.0, 1.0, 2.0, 90.0]}))
    0.5
    """
    keys = [key for key in SEEDS if key in log]
    runs = [run for _, run in log.groupby(keys, sort=False)] if keys else [log]
    rates = [run["seconds"].diff() / run["iteration"].diff() for run in (run.sort_values("iteration") for run in runs)]
    return float(pd.concat(rates).median())


def axis(log: pd.DataFrame, x: str = "iteration") -> pd.Series:
    """Where the records of a method stand on the horizontal axis, by iteration."""
    iterations = pd.Series(sorted(log["iteration"].unique()), dtype=float)
    iterations.index = pd.Index(iterations)
    if x == "iteration":
        return iterations
    return iterations * step_seconds(log) if x == "seconds" else log.groupby("iteration")[x].mean()


def over_seeds(
    log: pd.DataFrame,
    value: str,
    by: Hashable = "iteration",
    *,
    middle: str = "mean",
    levels: tuple[float, float] = (0.0, 1.0),
) -> pd.DataFrame:
    """The middle of a column over the seeds, and the quantiles that bound it.

    >>> log = pd.DataFrame({"iteration": [0, 0, 0], "gap": [1.0, 2.0, 6.0]})
    >>> over_seeds(log, "gap").loc[0].tolist()
    [3.0, 1.0, 6.0]
    """
    values = log[value].where(np.isfinite(log[value]))
    grouped = values.groupby(log[by])
    found = pd.DataFrame({"middle": grouped.agg(middle), "low": grouped.quantile(levels[0])})
    found["high"] = grouped.quantile(levels[1])
    found["middle"] = found["middle"].where(grouped.count() == grouped.size())
    return found


def band(
    axes: Axes,
    log: pd.DataFrame,
    value: str,
    label: str,
    index: int,
    *,
    x: str = "iteration",
    middle: str = "mean",
    levels: tuple[float, float] = (0.0, 1.0),
    dash: int | None = None,
    floor: float = -np.inf,
) -> None:
    """Draw one method: the middle over the seeds as a line, and the range of the seeds as a band of its colour."""
    drawn = over_seeds(log, value, middle=middle, levels=levels).join(axis(log, x).rename("x"))
    drawn = drawn[drawn["middle"] > floor]  # which is false of what is not a number
    filled(axes, drawn["x"], drawn.assign(low=drawn["low"].clip(lower=floor)), label, index, dash)


def filled(
    axes: Axes,
    x: np.ndarray | pd.Series,
    drawn: pd.DataFrame,
    label: str,
    index: int,
    dash: int | None = None,
    **look: Any,
) -> None:
    """Draw a line with a band between two edges."""
    style: dict[str, Any] = {"linestyle": dashes(index if dash is None else dash), "linewidth": 1.4, **look}
    axes.plot(x, drawn["middle"], color=color(index), label=drawable(label), **style)
    axes.fill_between(x, drawn["low"], drawn["high"], color=color(index), alpha=0.15, linewidth=0)
