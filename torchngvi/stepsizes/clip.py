"""A step along a direction whose Euclidean norm in q's own coordinates is clipped."""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Path, StepSize, Tangent


@final
class Clip(StepSize):
    """ρ = lr min(1, norm/|d|), d the direction in q's own coordinates: gradient clipping.

    The norm depends on the units of the coordinates; `KLRadius` does not, and both go together by `Shortest`.

    Args:
        norm: the largest |d|, positive.

    Raises:
        InputError: a norm that is not positive.
        PairError: at construction of an optimizer, a rule that does not move q along a straight line.

    >>> from torchngvi import CholeskyGaussian, RootGD
    >>> opt = RootGD(CholeskyGaussian(2), lr=0.1, step_size=Clip(5.0))
    """

    needs_tangent = True

    def __init__(self, norm: float) -> None:
        if not norm > 0:
            raise InputError(f"norm is the largest norm of a direction, positive; got {norm}.")
        self.norm = float(norm)

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict) -> Tensor:
        """The length of the step of ρ = 1 decides."""
        move = path.at(torch.ones_like(like))
        assert isinstance(move, Tangent)
        vector, matrix = move.change
        length = (vector.square().sum(-1) + matrix.flatten(like.ndim).square().sum(-1)).sqrt()
        return torch.ones_like(like) * lr * torch.where(length > self.norm, self.norm / length, 1.0)
