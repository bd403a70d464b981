"""A step no longer than a KL divergence: KL(q'‖q) = ½ρ²|∇L|²_F⁻¹ + O(ρ³) ≤ radius."""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Path, StepSize


@final
class KLRadius(StepSize):
    """ρ = min(lr, √(2 radius)/|∇L|): no single step moves q further than ``radius`` nats.

    The second-order form overstates KL(q'‖q) on steps that widen q and understates it on steps
    that narrow it; it needs no factorisation.

    Args:
        radius: in nats, positive.

    Raises:
        InputError: a radius that is not positive.
    """

    needs_trial = False

    def __init__(self, radius: float = 1.0) -> None:
        if not radius > 0:
            raise InputError(f"radius is a KL divergence in nats, larger than 0; got {radius}.")
        self.radius = float(radius)

    def init(self, like: Tensor) -> dict[str, Tensor]:
        """No state."""
        return {}

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict) -> Tensor:
        """min(lr, √(2 radius)/|∇L|)."""
        longest = (2 * self.radius / path.norm2()).sqrt()
        return torch.minimum(longest, torch.ones_like(longest) * lr)

    def judge(self, before: Tensor, after: Tensor, slope: Tensor, rho: Tensor, state: dict) -> tuple[Tensor, dict]:
        """Never asked."""
        return torch.ones_like(before, dtype=torch.bool), state
