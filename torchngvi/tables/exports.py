"""Draws for ArviZ: one chain with named dimensions, and what its checks of a model need."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchngvi.extras import needing


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
