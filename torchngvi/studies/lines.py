"""What figures draw of a log: gaps to an optimum that is known, times by the median step, bands over the seeds."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from torchngvi.app.fonts import drawable
from torchngvi.studies.figures import color, dashes

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


def two_errors(mean: pd.Series, error: pd.Series, scale: pd.Series | float = 1.0) -> pd.DataFrame:
    """A mean with two standard errors at either side of it.

    >>> two_errors(pd.Series([3.0]), pd.Series([0.5])).loc[0].tolist()
    [3.0, 2.0, 4.0]
    """
    return pd.DataFrame({"middle": scale * mean, "low": scale * (mean - 2 * error), "high": scale * (mean + 2 * error)})


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
