"""A result for others: the content of a file, in tensors, numbers and texts, draws for ArviZ, and pictures.

Pictures are on matplotlib's axes; nothing here is drawn on a screen, or remembered by pyplot.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchngvi.messages import needing
from torchngvi.tables.families import Held
from torchngvi.tables.parts import Design
from torchngvi.tables.table import Marginals

FORMAT = 1  # of the content of a file


def inference_data(
    values: Mapping[str, Tensor],  # draws of each variable, (S, ...)
    coords: Mapping[str, Sequence[str]],
    dims: Mapping[str, list[str]],
    log_likelihood: Tensor,  # (S, N)
    replicated: Tensor,  # (S, N)
    y: Tensor,  # (N,)
    here: Tensor,  # (N,), whether a row has a positive weight
) -> Any:
    """Make what ArviZ takes, an ``InferenceData``, from 1.0 on a ``DataTree``; rows without a weight are left out."""
    with needing("to_arviz", "test"):
        import arviz
    draws = {"log_likelihood": log_likelihood, "posterior_predictive": replicated}
    groups: dict[str, Any] = {
        "posterior": {name: x[None].cpu().numpy() for name, x in values.items()},
        **{name: {"y": x[:, here][None].double().cpu().numpy()} for name, x in draws.items()},
        "observed_data": {"y": y[here].double().cpu().numpy()},
    }
    named: dict[str, Any] = {
        "coords": {**{name: list(labels) for name, labels in coords.items()}, "row": here.nonzero()[:, 0].tolist()},
        "dims": {**dims, "y": ["row"]},
    }
    if int(arviz.__version__.partition(".")[0]) < 1:
        return arviz.from_dict(**groups, **named)
    return arviz.from_dict(groups, **named)


SAID = {"converged": bool, "reason": str, "method": str, "k_hat": float, "effective": float, "gradients": int}


def state_of(result: Any) -> dict[str, Any]:
    """Return all that `result_of` makes the same result of, in tensors, numbers and texts."""
    fitted, design, family = result.fitted, result.design, result.family
    generator, weighted = torch.Generator().manual_seed(0), fitted.weighted
    theta = weighted.resampled(len(result.draws().theta), generator)  # those of result.draws()
    drawn = fitted.effects(theta, generator) if design.factors else ()
    made = result.formula.state() if result.formula is not None else _arrays(design)
    held = family.values if isinstance(family, Held) else {}
    return {
        "format": FORMAT,
        "made": made,
        "family": family.name,
        "held": dict(held),
        "outcomes": None if family.outcomes is None else list(family.outcomes),
        "priors": {name: repr(prior) for name, prior in result.settled.rows() if name in result.settled.named},
        "weighted": [weighted.theta, weighted.weights],
        "theta": theta,
        "effects": list(drawn),
        "log_evidence": None if fitted.log_evidence is None else float(fitted.log_evidence),
        **{name: kind(getattr(result, name, getattr(fitted, name, None))) for name, kind in SAID.items()},
    }


def _arrays(design: Design) -> dict[str, Any]:
    factors = [
        {"name": of.name, "effects": list(of.effects), "levels": list(of.levels), "Z": of.Z, "groups": of.groups}
        for of in design.factors
    ]
    parts = {"X": design.X, "offset": design.offset, "weights": design.weights, "y": list(design.y)}
    return {**parts, "names": list(design.names), "factors": factors}


# ------------------------------------------------------------------------------------ pictures

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
