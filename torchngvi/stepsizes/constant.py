"""The learning rate as it stands in the param group: constant, or moved by a torch scheduler."""

from typing import final

import torch
from torch import Tensor

from torchngvi.interfaces import Path, StepSize


@final
class Constant(StepSize):
    """ρ = lr.

    >>> Constant().propose(None, 0.5, torch.zeros(2), {}).tolist()
    [0.5, 0.5]
    """

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict) -> Tensor:
        """lr for every member."""
        return torch.ones_like(like) * lr
