"""Batches of data: pairs (x, y), each held against the model before it is used."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from torchngvi.adapters.gpytorch.latents import Latents
from torchngvi.errors import InputError

Batch = tuple[Tensor, Tensor]  # x (*batch, B, features), y (*batch, B), or (B, tasks)


def count(
    x: Tensor,  # (*batch, B, features), or (B,)
) -> int:
    """B."""
    return x.shape[-1 if x.ndim == 1 else -2]


def row_dimension(
    y: Tensor,
    latents: Latents,
) -> int:
    """Which dimension of the targets is that of the rows."""
    return -2 if latents.coupled and y.ndim > 1 else -1


def pairs(batches: Iterable[Any], latents: Latents) -> Iterator[Batch]:
    """The batches, each held against the model.

    Raises:
        InputError: what is no pair of tensors, inputs of another number of features, another number of targets.
    """
    features = latents.strategy.inducing_points.shape[-1]
    for batch in batches:
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            what = ", ".join(type(part).__name__ for part in parts)
            raise InputError(
                f"batches are pairs (x, y) of tensors; got {what}. Give a DataLoader over TensorDataset(x, y), or "
                "[(x, y)] for all data at once."
            )
        x, y = parts
        if x.ndim > 1 and x.shape[-1] != features or x.ndim == 1 and features != 1:
            raise InputError(
                f"the inducing points have {features} features; got inputs of shape {tuple(x.shape)}. "
                "Give x as (rows, features)."
            )
        if y.ndim == 0 or y.shape[row_dimension(y, latents)] != count(x):
            raise InputError(
                f"a batch has {count(x)} rows of inputs and targets of shape {tuple(y.shape)}: check the shape of the "
                "targets, (rows,) of one value a datum and (rows, tasks) of several."
            )
        yield x, y
