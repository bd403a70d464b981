"""The learning rate as it stands in the param group: constant, or moved by a torch scheduler."""

import math
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Path, StepSize


@final
class Constant(StepSize):
    """The step size is the learning rate, ρ = lr, with no bound on how far q moves: the update as papers print it.

    Use it to reproduce a paper, or for the one full step that is exact on a conjugate model, ``VN(q, lr=1.0,
    step_size=Constant())``.  The default of a given rate is `KLRadius`, whose steps are the same where they are
    short; without its bound a rate that is too long for the problem makes a run diverge within a few steps.

    Args:
        rate: the learning rate, positive, where the optimizer is given no ``lr``: ``SRVN(q, step_size=Constant(0.1))``
            is ``SRVN(q, lr=0.1, step_size=Constant())``.

    Raises:
        InputError: if the rate is not positive and finite; at construction of an optimizer, if it has an ``lr`` too.

    >>> Constant().propose(None, 0.5, torch.zeros(2), {}).tolist()
    [0.5, 0.5]
    """

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and not (isinstance(rate, (int, float)) and 0 < rate < math.inf):
            raise InputError(f"rate is a learning rate, positive and finite; got {rate!r}.")
        self.rate = rate

    def __repr__(self) -> str:
        """The call that makes it."""
        return "Constant()" if self.rate is None else f"Constant({self.rate:g})"

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the learning rate as ρ for every member, (*batch,)."""
        return torch.ones_like(like) * lr if isinstance(lr, Tensor) else torch.full_like(like, lr)
