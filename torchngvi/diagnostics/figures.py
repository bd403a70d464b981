"""A verdict and a calibration as pictures; they need matplotlib, which nothing else of the diagnostics does."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchngvi.diagnostics.confirmation import LARGEST
from torchngvi.diagnostics.importance import Sampled
from torchngvi.diagnostics.psis import USELESS
from torchngvi.diagnostics.rule import LIMITS, Marginals, Shape, log_ratio, trusted
from torchngvi.diagnostics.uniformity import ALPHA, Uniformity
from torchngvi.errors import InputError
from torchngvi.extras import install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _RED, _INK, _FAINT = "#1f5a94", "#d1672b", "#c23b22", "#222222", "#9aa0a6"
_MOST = 25  # coordinates that are drawn
_WIDE = 2.0  # standard errors
_POINTS = 400  # of a curve
_NAMED = 5  # lines of a calibration with their names


def new_figure(what: str, width: float, height: float) -> "Figure":
    """Make an empty figure of a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"the picture of {what} needs matplotlib, which is not installed: {install('cli')}."
        ) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def verdict_figure(
    marginals: Marginals, shape: Shape | None, sampled: Sampled | None, order: Sequence[int], title: str
) -> "Figure":
    """Draw standard deviations that q ought to have in those of q, and the tails of the importance weights."""
    shown = list(order)[:_MOST]
    figure = new_figure("a verdict", 11.0, max(4.2, 1.8 + 0.28 * len(shown)))
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold", color=_INK, parse_math=False)
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1.0))
    _deviations(left, marginals, shape, sampled, shown)
    _tails(right, sampled)
    return figure


def calibration_figure(
    figure: "Figure",
    test: Uniformity,
    ranks: Tensor,  # (N, Q)
    names: Sequence[str],
    flagged: Sequence[str],
) -> None:
    """Draw the ECDF differences of quantities, the worst first, with the band of all, and the histogram of
    the worst.
    """
    left, right = figure.subplots(1, 2)
    at, differences = test.levels, test.differences(ranks)
    low, high = test.band(ALPHA / len(names))
    ends = [0.0, *at.tolist(), 1.0]
    left.fill_between(ends, [0, *low.tolist(), 0], [0, *high.tolist(), 0], color=_FAINT, alpha=0.3, linewidth=0)
    for i in reversed(range(len(names))):
        red = names[i] in flagged
        line = [0, *differences[:, i].tolist(), 0]
        left.plot(ends, line, color=_RED if red else _BLUE, alpha=1.0 if red else 0.5, linewidth=1.2)
        if red and i < _NAMED:
            peak = int(differences[:, i].abs().argmax())
            left.annotate(names[i], (float(at[peak]), float(differences[peak, i])), fontsize=8, color=_RED)
    quantities = "1 quantity" if len(names) == 1 else f"{len(names)} quantities"
    left.set(xlabel="rank / (L + 1)", ylabel="ECDF - uniform", title=f"{quantities}, band of 95 %")
    counts, edges = test.histogram(ranks[:, 0])
    right.bar(edges[:-1].tolist(), counts.tolist(), edges.diff().tolist(), align="edge", color=_BLUE, edgecolor="white")
    right.axhline(len(ranks) / len(counts), color=_FAINT)
    worst = ", the worst" if len(names) > 1 else ""
    right.set(xlabel="rank / (L + 1)", ylabel="simulations", title=f"ranks of {names[0]}{worst}")


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, color=_INK)
    axes.tick_params(labelsize=8, color=_FAINT, labelcolor=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _deviations(
    axes: Any, marginals: Marginals, shape: Shape | None, sampled: Sampled | None, shown: Sequence[int]
) -> None:
    """A row for each coordinate: q is at 1, before the bands of the two limits."""
    of = f", the {len(shown)} most doubtful of {len(marginals.sd)}" if len(shown) < len(marginals.sd) else ""
    _style(axes, f"each sd by other means, 1 is that of q; shaded: fits, about right{of}")
    for limit, shade in ((LIMITS[1], "#f4f4f2"), (LIMITS[0], "#e6ecf2")):
        axes.axvspan(math.exp(-limit), math.exp(limit), color=shade, zorder=0)
    axes.axvline(1.0, color=_INK, linewidth=0.8)
    rows = list(range(len(shown)))
    if shape is not None:
        _response(axes, shape, shown)
    if sampled is not None:
        size, error = log_ratio(marginals, sampled.corrected)[shown], sampled.corrected.log_sd_error[shown]
        label = "by importance sampling" + ("" if trusted(sampled) else " (not believed)")
        spread = [
            (size.exp() - (size - _WIDE * error).exp()).tolist(),
            ((size + _WIDE * error).exp() - size.exp()).tolist(),
        ]
        face = _ORANGE if trusted(sampled) else "white"
        axes.errorbar(
            size.exp().tolist(), [row + 0.14 for row in rows], xerr=spread, fmt="s", color=_ORANGE, markersize=4.5,
            markerfacecolor=face, elinewidth=1.1, label=label,
        )  # fmt: skip
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.6), max(high, 1.7))
    ticks = [x for x in (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0, 20.0) if low <= x <= max(high, 1.7)]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(rows, [marginals.name(k) for k in shown], parse_math=False)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.06), ncols=2, fontsize=8, frameon=False, borderpad=0)


def _response(axes: Any, shape: Shape, shown: Sequence[int]) -> None:
    """Circles: full where confirmed, open to third order only, arrows where only a bound is known."""
    at = shape.log_sd[shown].clamp_max(LARGEST)
    beyond = (shape.singular[shown] | (shape.log_sd[shown] >= LARGEST)).tolist()
    confirmed = shape.confirmed[shown].tolist()
    bound = math.exp(LARGEST)
    for label, marker, face, chosen in (
        ("by linear response, confirmed", "o", _BLUE, lambda k: confirmed[k] and not beyond[k]),
        ("by linear response, to third order", "o", "white", lambda k: not confirmed[k] and not beyond[k]),
        ("by linear response, 3 or more", ">", _BLUE, lambda k: beyond[k]),
    ):
        rows = [k for k in range(len(shown)) if chosen(k)]
        if rows:
            x = [bound if beyond[k] else math.exp(float(at[k])) for k in rows]
            axes.plot(
                x, [row - 0.14 for row in rows], marker, color=_BLUE, markerfacecolor=face, markersize=5.5, label=label
            )


def _tails(axes: Any, sampled: Sampled | None) -> None:
    """The share of draws whose weight is larger, on two logarithmic scales: -1/k-hat is the slope of its end."""
    _style(axes, "importance weights")
    if sampled is None or sampled.weights is None:
        axes.text(0.5, 0.5, "no importance weights", ha="center", va="center", transform=axes.transAxes, color=_FAINT)
        axes.set_axis_off()
        return
    parts = (
        ("draws of q", sampled.weights.from_q, sampled.from_q, _INK),
        ("a wider proposal", sampled.weights.corrected, sampled.corrected, _ORANGE),
    )
    for label, log_weights, found, colour in parts:
        weight, share = _curve(log_weights)
        text = f"{label}: k-hat {found.k_hat:.2f}, worth {found.effective:.0f} of {len(log_weights)}"
        axes.plot(weight, share, color=colour, linewidth=1.4, label=text)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, 1e-2), max(high, 10.0))
    bottom = axes.get_ylim()[0]
    guide = [1.0, 10.0 ** (USELESS * 3)]
    axes.plot(guide, [0.3, 0.3e-3], color=_FAINT, linestyle="--", linewidth=1.0, label=f"slope at k-hat {USELESS}")
    axes.set_ylim(bottom, 1.2)
    axes.set_xlabel("weight, 1 if all were equal", fontsize=8.5, color=_INK)
    axes.set_ylabel("share of draws with a larger one", fontsize=8.5, color=_INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.06), fontsize=8, frameon=False, borderpad=0)


def _curve(log_weights: Tensor) -> tuple[list[float], list[float]]:
    """Weights, falling, and the share of draws as large; not all in the bulk, all in the tail."""
    ordered = log_weights.double().sort(descending=True).values
    ranks = (
        torch.logspace(0, math.log10(len(ordered)), _POINTS, dtype=torch.float64, device="cpu").round().long().unique()
    )
    kept = ordered[ranks - 1]
    seen = kept > -30.0
    return kept[seen].exp().tolist(), (ranks[seen] / len(ordered)).tolist()
