"""A step no longer than a KL divergence, to second order: KL(q'‖q) = ½ρ²|∇L|²_F⁻¹ + O(ρ³)."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.interfaces import Path, StepSize


@final
class KLRadius(StepSize):
    """The step size min(lr, √(2 radius)/|∇L|), for a step of about ``radius`` nats where the radius is small.

    The length |∇L| is the natural norm, the second-order form of the divergence, which costs no factorisation.  A step
    that widens q much is longer than it says (VN with γρ near 1 multiplies a variance by up to 1/(1 - γρ)), one that
    narrows it is shorter; with a radius of 0.1 or less the two agree within about a third.  One wants it to keep
    stochastic natural gradients from overshooting at the start; the norm says nothing of rules that do not follow the
    natural gradient, and they are refused.

    Args:
        radius: the largest KL divergence of one step, in nats, positive.

    Raises:
        InputError: if the radius is not positive.

    >>> from torchngvi import VN, CholeskyGaussian
    >>> opt = VN(CholeskyGaussian(2), lr=0.5, step_size=KLRadius(0.1))
    """

    needs_natural = True

    def __init__(self, radius: float = 1.0) -> None:
        self.radius = read_number("radius", radius, "is a KL divergence in nats", above=0, infinite=True)

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return ρ = min(lr, √(2 radius)/|∇L|), (*batch,)."""
        longest = (2 * self.radius / path.norm2()).sqrt()
        return torch.minimum(longest, torch.ones_like(longest) * lr)
