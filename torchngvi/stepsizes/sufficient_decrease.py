"""Trial steps within a KL radius: the control that needs no learning rate.

A trial at ρ is kept if L(q') ≤ L(q) - c ρ s with s = -dL/dρ at 0 (Armijo 1966).  Two numbers, one
of each a batch member, bound the next ρ:

* far from the optimum a *reach* in the natural norm, ρ|direction| ≤ reach, so that one step changes q
  by about ½ reach² nats; it grows after good steps, as the radius of a trust region does (Conn, Gould
  and Toint 2000, section 6.1);
  under a q of many groups the first reach is in proportion to their number, see `lengths`;
* after a first rejection a *cap* on ρ itself: the minimiser of the parabola through L(q), the slope
  and L(q').  Near the optimum the best ρ is a property of the problem, not of the distance left.

Every decision is one entry of a mask; nothing is read back from the device.
"""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.interfaces import Path, Trial, TrialStepSize
from torchngvi.stepsizes.lengths import raised

_GOOD = 0.3  # share of the promised decrease after which the reach may grow
_CAP_UP, _CAP_DOWN, _CAP_FLOOR = 2.0, 0.7, 0.1  # limits of one change of the cap


@final
class SufficientDecrease(TrialStepSize):
    """Steps found by trial: ρ = min(lr, reach/|direction|, cap), kept where the objective decreases enough.

    One wants it wherever two values of the objective can be compared, as the default that needs no learning rate; for
    mini-batches and fresh draws, whose values cannot be compared, `Constant` or `KLRadius` take its place.

    Args:
        radius: ½ reach² of the first step, in nats, positive; n/10 where q is over a forest of n leaves, that is more
            than the radius, and the squared natural norm of the gradient is at most n.
        decrease: the share c of the promised decrease that a kept step must reach, in (0, 0.5).
        grow, shrink: the factors of the reach after a good step, above 1, and after a rejected one, in (0, 1).

    Raises:
        InputError: if a setting is out of range.

    >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
    >>> opt = VN(CholeskyGaussian(2), step_size=SufficientDecrease(radius=1.0))
    >>> loss = opt.step(GeneralizedLinear(torch.eye(2), [0.0, 1.0]))
    """

    def __init__(self, radius: float = 4.0, decrease: float = 0.1, *, grow: float = 4.0, shrink: float = 0.25) -> None:
        self.radius = read_number("radius", radius, "is a KL divergence in nats", above=0, infinite=True)
        self.decrease = read_number("decrease", decrease, "is a share of the promised decrease", above=0, below=0.5)
        self.grow = read_number("grow", grow, "is a factor", above=1)
        self.shrink = read_number("shrink", shrink, "is a factor", above=0, below=1)

    def init(self, like: Tensor) -> dict[str, Tensor]:
        """Return a reach of √(2 radius) and no cap for every member."""
        return {
            "reach": torch.full_like(like, (2 * self.radius) ** 0.5),
            "cap": torch.full_like(like, torch.inf),
        }

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return ρ = min(lr, reach/|∇L|, cap), (*batch,); the reach of many groups is raised until a trial fails."""
        norm2, reach, cap = path.norm2(), state["reach"], state["cap"]
        if path.leaves > 1:
            wide = (2 * raised(self.radius, norm2, path.leaves)).sqrt()
            reach = torch.where(cap.isinf(), torch.maximum(reach, wide), reach)
        rho = torch.minimum(reach / norm2.sqrt(), cap)
        return torch.minimum(rho, torch.ones_like(rho) * lr)

    def judge(self, trial: Trial, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Keep the trial where L fell by c ρ s up to rounding, and adapt reach and cap; a NaN is a rejection."""
        before, after, slope, length, rho, slack = trial
        promised, decrease = rho * slope, before - after
        rounding = 64 * torch.finfo(before.dtype).eps * before.abs().clamp_min(1.0)
        accept = decrease >= self.decrease * promised - rounding - slack
        good = decrease >= _GOOD * promised - rounding

        grown = torch.where(good, torch.maximum(state["reach"], self.grow * length), state["reach"])
        reach = torch.where(accept, grown, self.shrink * length)

        # argmin of L - ρs + ½κρ², as a multiple of ρ: ½ s ρ / (sρ - (L - L')); straight lines have none
        bend = promised - decrease
        best = torch.where(bend > 0, 0.5 * promised / bend, torch.inf)
        kept_cap = torch.where(state["cap"].isinf(), torch.inf, rho * best.clamp(_CAP_DOWN, _CAP_UP))
        cut = torch.where(bend.isfinite(), best, _CAP_FLOOR).clamp(_CAP_FLOOR, 0.5)
        return accept, {"reach": reach, "cap": torch.where(accept, kept_cap, rho * cut)}
