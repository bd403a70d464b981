"""A result for others: the content of a file, in tensors, numbers and texts, and draws for ArviZ."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchngvi.extras import needing
from torchngvi.tables.families import Held
from torchngvi.tables.parts import Design

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
