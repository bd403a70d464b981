"""A step that is a convex combination: ρ = lr, held to [0, 1]."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Path, StepSize


@final
class Convex(StepSize):
    """The step size of a convex combination, ρ = lr with 0 ≤ lr ≤ 1.

    The new natural parameters η' = (1 - ρ)η + ρη̂ lie between those of q and the target η̂ of the step.  With a target
    in the cone, and so with every curvature estimate that is positive semi-definite, no step leaves it (Wu and Gardner
    2024, section 3.1).  For a model at temperature γ ≠ 1 the combination needs lr ≤ 1/γ.  One wants it for stochastic
    natural-gradient VI as it is analysed; `Constant` takes longer steps too.

    Raises:
        InputError: on use, if lr is a number outside [0, 1]; a tensor outside it makes a step that is not taken.

    >>> Convex().propose(None, 0.5, torch.zeros(2), {}).tolist()
    [0.5, 0.5]
    """

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the learning rate as ρ for every member, (*batch,).

        Raises:
            InputError: if lr is a number outside [0, 1].
        """
        if isinstance(lr, Tensor):
            return torch.ones_like(like) * torch.where((lr >= 0) & (lr <= 1), lr, torch.nan)
        if not 0 <= lr <= 1:
            raise InputError(
                f"a step of natural-gradient VI is a convex combination, with lr in [0, 1]; got {lr:g}. "
                "Lower lr or the schedule's factor; VN takes longer steps."
            )
        return torch.ones_like(like) * lr
