"""Step sizes that evaluate the loss along a step."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.interfaces import Path, Trial, TrialStepSize

# Lengths in nats that grow with the number of groups of a model
#
# A step of 1 nat is long where L is about one block of coordinates.  Where it is a sum over n groups, a step in which
# each of them moves by a little, 0.1 nats say, is of n/10 nats: limits that do not know n make the number of steps grow
# with n.  Far from the optimum the promise of a step does not hold for its sum any more than for a dense q, so that
# the lengths grow only where the squared natural norm of the gradient is at most n, 1 for each group.


def raised(least: float, norm2: Tensor, leaves: int, share: float = 0.1) -> Tensor:
    """A limit of the squared length of a step, raised in proportion to the number of groups near the optimum.

    >>> raised(4.0, torch.tensor([99.0, 101.0]), 100).tolist(), raised(4.0, torch.tensor(0.0), 1).item()
    ([10.0, 4.0], 4.0)
    """
    # share: nats of each group
    near = torch.full_like(norm2, max(least, share * leaves))
    return torch.where(norm2 <= leaves, near, least)


# Backtracking: the whole step first, and shorter ones until L has fallen enough (Armijo 1966)

_SHORTEST, _LONGEST = 0.1, 0.5  # limits of one cut


def _compared(trial: Trial) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The promised decrease, what is lacking of it, and the decrease with the rounding, and with the slack too."""
    promised, decrease = trial.rho * trial.slope, trial.before - trial.after
    size = trial.before.abs().clamp_min(1.0)
    fallen = torch.add(decrease, size, alpha=64 * torch.finfo(size.dtype).eps)
    lenient = fallen + trial.slack if isinstance(trial.slack, Tensor) else fallen
    return promised, promised - decrease, fallen, lenient


@final
class Backtracking(TrialStepSize):
    """Steps found by trial that begin with the whole one: ρ = lr, and shorter after each that is refused.

    A trial at ρ is kept where L(q') ≤ L(q) - c ρ s, with s = -dL/dρ at 0.  After one that is not, the next ρ is the
    minimiser of the parabola through L(q), the slope and L(q'), between a tenth and half of ρ; after one that is kept,
    the next is whole again.  Use it for steps of Newton, whose length is right near the optimum; for natural
    gradients `SufficientDecrease` remembers how far they may go.

    Args:
        decrease: the share c of the promised decrease that a kept step must reach, in (0, 0.5).

    Raises:
        InputError: if the share is out of range.

    >>> control = Backtracking()
    >>> one, state = torch.tensor(1.0), control.init(torch.tensor(0.0))
    >>> kept, state = control.judge(Trial(one, 2 * one, one, one, one), state)  # L rose where it was to fall
    >>> kept.item(), round(state["share"].item(), 3)
    (False, 0.25)
    """

    def __init__(self, decrease: float = 0.1) -> None:
        self.decrease = read_number("decrease", decrease, "is a share of the promised decrease", above=0, below=0.5)

    def init(self, like: Tensor) -> dict[str, Tensor]:
        """Return that the next step of every member is whole."""
        return {"share": torch.ones_like(like)}

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the share of the learning rate, (*batch,)."""
        return state["share"] * lr

    def judge(self, trial: Trial, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Keep the trial where L fell by c ρ s up to rounding, and cut the next where it did not; a NaN is refused."""
        promised, bend, _, fallen = _compared(trial)
        cut = (0.5 * promised / bend).masked_fill(bend <= 0, _SHORTEST).nan_to_num(_SHORTEST)
        share = cut.clamp(_SHORTEST, _LONGEST) * state["share"]
        accept = fallen >= self.decrease * promised
        return accept, {"share": share.masked_fill(accept, 1.0)}


# Trial steps within a KL radius: the control that needs no learning rate
#
# A trial at ρ is kept if L(q') ≤ L(q) - c ρ s with s = -dL/dρ at 0 (Armijo 1966).  Two numbers, one
# of each a batch member, bound the next ρ:
#
# * far from the optimum a *reach* in the natural norm, ρ|direction| ≤ reach, so that one step changes q
#   by about ½ reach² nats; it grows after good steps, as the radius of a trust region does (Conn, Gould
#   and Toint 2000, section 6.1);
#   under a q of many groups the first reach is in proportion to their number, see `lengths`;
# * after a first rejection a *cap* on ρ itself: the minimiser of the parabola through L(q), the slope
#   and L(q').  Near the optimum the best ρ is a property of the problem, not of the distance left.
#
# Every decision is one entry of a mask; nothing is read back from the device.

_GOOD = 0.3  # share of the promised decrease after which the reach may grow
_CAP_UP, _CAP_DOWN, _CAP_FLOOR = 2.0, 0.7, 0.1  # limits of one change of the cap


@final
class SufficientDecrease(TrialStepSize):
    """Steps found by trial: ρ = min(lr, reach/|direction|, cap), kept where the objective decreases enough.

    Use it wherever two values of the objective can be compared, as the default that needs no learning rate; for
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
        return torch.minimum(reach / norm2.sqrt(), cap).clamp_max(lr)

    def judge(self, trial: Trial, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Keep the trial where L fell by c ρ s up to rounding, and adapt reach and cap; a NaN is a rejection."""
        rho, length, cap = trial.rho, trial.length, state["cap"]
        promised, bend, fallen, lenient = _compared(trial)
        accept = lenient >= self.decrease * promised
        good = fallen >= _GOOD * promised

        grown = torch.where(good, torch.maximum(state["reach"], self.grow * length), state["reach"])
        reach = torch.where(accept, grown, self.shrink * length)

        # argmin of L - ρs + ½κρ², as a multiple of ρ: ½ s ρ / (sρ - (L - L')); straight lines have none
        best = (0.5 * promised / bend).masked_fill(bend <= 0, torch.inf)
        kept_cap = torch.where(cap == torch.inf, cap, rho * best.clamp(_CAP_DOWN, _CAP_UP))
        cut = best.nan_to_num(_CAP_FLOOR).clamp(_CAP_FLOOR, 0.5)  # a NaN, of a trial that is none, as an infinite bend
        return accept, {"reach": reach, "cap": torch.where(accept, kept_cap, rho * cut)}
