"""Pictures of a fit on matplotlib's axes; nothing here is drawn on a screen, or remembered by pyplot."""

import math
from typing import Any

import torch
from torch import Tensor

from torchngvi.extras import needing
from torchngvi.tables.table import Marginals

EffectTable = Any  # of torchngvi.tables.effects, which imports this module

BLUE, GREY = "#1f5a94", "0.6"
NAMED = 40  # groups whose names are written at the axis
BINS = 30  # of a histogram at most


def axes(ax: Any) -> Any:
    """The axes that were given, or new ones."""
    if ax is not None:
        return ax
    with needing("a picture", "cli"):
        from matplotlib.figure import Figure
    return Figure(layout="constrained").add_subplot()


def coefficients(of: Marginals, label: str, ax: Any) -> Any:
    """Draw coefficients but the intercept with intervals, the first on top."""
    places = [k for k, name in enumerate(of.names) if name.split(": ")[-1] != "Intercept" or len(of.names) == 1]
    return _dots(of, places[::-1], label, ax)


def caterpillar(of: Marginals, label: str, ax: Any) -> Any:
    """Draw the effects of all groups in rising order with intervals."""
    ax = _dots(of, of.mean.argsort().tolist(), label, ax)
    ax.set_ylabel("group")
    return ax


def _dots(of: Marginals, order: list[int], label: str, ax: Any) -> Any:
    """Draw points with intervals, one above the other."""
    ax = axes(ax)
    mean, low, high = (x[order].cpu().numpy() for x in (of.mean, of.low, of.high))
    places = range(len(order))
    ax.hlines(places, low, high, color=GREY, linewidth=1)
    ax.plot(mean, places, "o", color=BLUE, markersize=3)
    ax.axvline(0.0, color="0.3", linewidth=0.8)
    named = len(order) <= NAMED
    ax.set_yticks(list(places) if named else [], [of.names[k] for k in order] if named else [])
    ax.set_xlabel(label)
    return ax


def marginal(of: EffectTable, x: str, response: str, ax: Any) -> Any:
    """Draw average predictions along a column: a line with a band, or points with intervals; of categories one each."""
    ax, table = axes(ax), of.table
    groups = table.groupby("outcome", sort=False) if "outcome" in table else [(None, table)]
    for name, part in groups:
        if part[x].dtype.kind in "fi":
            (line,) = ax.plot(part[x], part["mean"], label=name)
            ax.fill_between(part[x], part["low"], part["high"], color=line.get_color(), alpha=0.2, linewidth=0)
        else:
            ends = [part["mean"] - part["low"], part["high"] - part["mean"]]
            ax.errorbar(part[x].astype(str), part["mean"], ends, fmt="o", capsize=3, label=name)
    if "outcome" in table:
        ax.legend()
    ax.set_xlabel(x)
    ax.set_ylabel(response)
    return ax


def predictive(
    y: Tensor,  # (N,)
    drawn: Tensor,  # (S, N)
    discrete: bool,
    response: str,
    ax: Any,
) -> Any:
    """Draw how often outcomes were seen in each bin, and the frequencies of drawn outcomes."""
    ax = axes(ax)
    least, most = torch.cat([y, drawn.flatten()]).aminmax()
    reach = 0.5 * (y.max() - y.min()).clamp_min(1e-9)  # beyond what was seen
    low, high = float(least.maximum(y.min() - reach)), float(most.minimum(y.max() + reach))
    edges = torch.linspace(low, high, BINS + 1, dtype=y.dtype, device="cpu")
    if discrete:
        width = max(1, math.ceil((high - low + 1) / BINS))
        edges = (
            math.floor(low)
            - 0.5
            + width * torch.arange(math.ceil((high - low + 1) / width) + 1, dtype=y.dtype, device="cpu")
        )
    seen, *sets = (torch.histogram(part.cpu().to(edges), edges).hist / len(y) for part in (y, *drawn))
    below, above = torch.quantile(torch.stack(sets), torch.tensor([0.05, 0.95], dtype=edges.dtype, device="cpu"), dim=0)
    ax.stairs(above.numpy(), edges.numpy(), baseline=below.numpy(), fill=True, color=GREY, label="drawn, 90 %")
    ax.stairs(seen.numpy(), edges.numpy(), color=BLUE, linewidth=1.5, label="seen")
    ax.set_xlabel(response)
    ax.set_ylabel("share of rows")
    ax.legend()
    return ax
