"""A fit as one picture: convergence, natural-gradient norm with step size, and the coefficients."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from torchngvi.app.fonts import drawable, families
from torchngvi.app.report import Coefficient, most_certain
from torchngvi.fitting.records import Record

_BLUE, _ORANGE, _INK, _FAINT = "#1f5a94", "#d1672b", "#222222", "#9aa0a6"
_MOST_COEFFICIENTS = 30


def fit_figure(
    trace: Sequence[Record],
    rows: Sequence[Coefficient],
    *,
    title: str,
    tolerance: float,
) -> Figure:
    """A fit as three panels: the loss, the norm with the step size, and the coefficients.

    >>> records = [Record(1, 2.0, 1.0, 0.0, 0, 1, 0.0), Record(2, 1.0, 1e-6, 1.0, 0, 2, 0.1)]
    >>> len(fit_figure(records, [Coefficient("x", 0.0, 1.0, -1.96, 1.96)], title="", tolerance=1e-5).axes)
    3
    """
    shown = most_certain(rows, _MOST_COEFFICIENTS)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, hspace=0.05, wspace=0.04)
    figure = Figure(
        figsize=(11.5, max(5.6, 2.0 + 0.19 * len(shown))),
        dpi=150,
        layout=layout,
    )
    FigureCanvasAgg(figure)
    figure.suptitle(
        drawable(title), x=0.012, ha="left", fontsize=12, fontweight="bold", color=_INK, fontfamily=families()
    )
    grid = figure.add_gridspec(2, 2, width_ratios=(1.0, 1.05))
    _gap(figure.add_subplot(grid[0, 0]), trace)
    _norm_and_step(figure.add_subplot(grid[1, 0]), trace, tolerance)
    _intervals(figure.add_subplot(grid[:, 1]), shown, len(rows))
    return figure


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.tick_params(labelsize=8.5, color=_FAINT, labelcolor=_INK)
    axes.tick_params(which="minor", length=0)
    axes.grid(True, color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)


def _gap(axes: Axes, trace: Sequence[Record]) -> None:
    """Negative ELBO minus its last finite value; points at or below it cannot be drawn on a log axis."""
    _style(axes, "Negative ELBO above its last value (nats)")
    x = np.array([record.evaluations for record in trace])
    loss = np.array([record.loss for record in trace])
    finite = np.isfinite(loss)
    gap = np.where(finite, loss, np.nan) - (loss[finite][-1] if finite.any() else np.nan)
    keep = gap > 0
    if keep.any():
        axes.semilogy(x[keep], gap[keep], color=_BLUE, linewidth=1.6, marker="o", markersize=_marker(len(x)))
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no decrease to show", transform=axes.transAxes, ha="center", color=_FAINT)
    _evaluation_axis(axes, x)


def _norm_and_step(axes: Axes, trace: Sequence[Record], tolerance: float) -> None:
    """Both are free of units and share one log axis; rejected steps are crossed out."""
    _style(axes, "Natural-gradient norm and step size")
    x = np.array([record.evaluations for record in trace])
    norm = np.array([record.norm for record in trace])
    step = np.array([record.step for record in trace])
    rejected = np.diff([record.rejections for record in trace], prepend=trace[0].rejections) > 0
    size = _marker(len(x))
    axes.semilogy(x, norm, color=_BLUE, linewidth=1.6, marker="o", markersize=size, label="norm")
    kept = step > 0
    axes.semilogy(
        x[kept], step[kept], color=_ORANGE, linewidth=1.2, marker="s", markersize=size * 0.8, label="step size"
    )
    if rejected.any():
        axes.semilogy(
            x[rejected], step[rejected], "x", color=_INK, markersize=6, markeredgewidth=1.3, label="step not taken"
        )
    axes.axhline(tolerance, color=_FAINT, linewidth=1, linestyle=(0, (5, 3)), label="tolerance")
    axes.legend(fontsize=8, frameon=False, labelcolor=_INK, loc="best")
    _evaluation_axis(axes, x)


def _marker(points: int) -> float:
    return 3.5 if points <= 60 else 0.0


def _evaluation_axis(axes: Axes, x: np.ndarray) -> None:
    axes.set_xlabel("evaluations", fontsize=9, color=_INK)
    axes.set_xlim(min(x[0], 0), x[-1] + max(1.0, 0.03 * x[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _intervals(axes: Axes, shown: Sequence[Coefficient], total: int) -> None:
    """Means with their 95% intervals, largest on top; grey where the interval holds zero."""
    which = f"{total} coefficients" if len(shown) == total else f"The {len(shown)} clearest of {total} coefficients"
    _style(axes, f"{which}, 95% intervals")
    ordered = sorted(shown, key=lambda row: row.mean)
    axes.axvline(0, color=_INK, linewidth=0.8)
    for place, row in enumerate(ordered):
        color = _BLUE if row.low > 0 or row.high < 0 else _FAINT
        axes.plot([row.low, row.high], [place, place], color=color, linewidth=2.0, solid_capstyle="round")
        axes.plot([row.mean], [place], "o", color=color, markersize=4.5)
    axes.set_yticks(range(len(ordered)), [drawable(_short(row.name)) for row in ordered], fontfamily=families())
    axes.set_ylim(-0.7, len(ordered) - 0.3)
    axes.set_xlabel("coefficient (grey: the interval contains 0)", fontsize=9, color=_INK)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _short(name: str, length: int = 26) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
