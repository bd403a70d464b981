"""A step size for a direction whose Euclidean norm in q's own coordinates is clipped."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.interfaces import Path, StepSize


@final
class Clip(StepSize):
    """Gradient clipping: the step size is lr min(1, norm/|d|), with d the direction in q's own coordinates.

    One wants it against single gradients of enormous length.  The norm depends on the units of the coordinates; that of
    `KLRadius` does not, and both go together by `Shortest`.

    Args:
        norm: the largest length |d| of a direction, positive, in the units of q's coordinates.

    Raises:
        InputError: if the norm is not positive.
        PairError: at construction of an optimizer, if the rule does not move q along a straight line.

    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.methods import RootGD
    >>> opt = RootGD(CholeskyGaussian(2), lr=0.1, step_size=Clip(5.0))
    """

    needs_tangent = True

    def __init__(self, norm: float) -> None:
        self.norm = read_number("norm", norm, "is the largest norm of a direction", above=0, infinite=True)

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return ρ (*batch,) from the length of the direction, which is the step of ρ = 1."""
        assert path.change2 is not None
        length = path.change2().sqrt()
        return torch.ones_like(like) * lr * torch.where(length > self.norm, self.norm / length, 1.0)
