"""The learning rate as it stands in the param group: constant, or moved by a torch scheduler."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.interfaces import Path, StepSize


@final
class Constant(StepSize):
    """The step size is the learning rate, ρ = lr.

    One wants it with stochastic gradients and a learning rate of one's own, constant or moved by a scheduler of
    `torch.optim.lr_scheduler`.

    >>> Constant().propose(None, 0.5, torch.zeros(2), {}).tolist()
    [0.5, 0.5]
    """

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the learning rate as ρ for every member, (*batch,)."""
        return torch.ones_like(like) * lr if isinstance(lr, Tensor) else torch.full_like(like, lr)
