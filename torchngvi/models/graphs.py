"""Whether a model keeps the graph of what it is made of, which no fit follows and `torchngvi.solved.solve` needs."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_attached: ContextVar[bool] = ContextVar("attached", default=False)


def given(**arguments: Any) -> dict[str, Any] | None:
    """The arguments of a model, where gradients may be asked in one of them.

    >>> import torch
    >>> given(X=torch.ones(1, 1)) is None
    True
    """
    return arguments if any(isinstance(x, Tensor) and x.requires_grad for x in arguments.values()) else None


def apart(arguments: dict[str, Any]) -> dict[str, Any]:
    """Views of the arguments, none of which another was computed from: a partial derivative ends at each.

    >>> import torch
    >>> X = torch.ones(1, requires_grad=True)
    >>> views = apart({"X": X, "weights": 2 * X})
    >>> torch.autograd.grad(views["weights"], views["X"], allow_unused=True)
    (None,)
    """
    return {name: x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for name, x in arguments.items()}


@contextlib.contextmanager
def attached() -> Iterator[None]:
    """Models made within it keep the graph of what they are given."""
    token = _attached.set(True)
    try:
        yield
    finally:
        _attached.reset(token)


def kept(tensor: Tensor) -> Tensor:
    """A tensor without its graph, or with it within `attached`.

    >>> import torch
    >>> kept(torch.ones(1, requires_grad=True)).requires_grad
    False
    """
    return tensor if _attached.get() else tensor.detach()
