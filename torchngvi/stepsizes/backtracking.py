"""Backtracking: the whole step first, and shorter ones until L has fallen enough (Armijo 1966)."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.interfaces import Path, Trial, TrialStepSize

_SHORTEST, _LONGEST = 0.1, 0.5  # limits of one cut


@final
class Backtracking(TrialStepSize):
    """Steps found by trial that begin with the whole one: ρ = lr, and shorter after each that is refused.

    A trial at ρ is kept where L(q') ≤ L(q) - c ρ s, with s = -dL/dρ at 0.  After one that is not, the next ρ is the
    minimiser of the parabola through L(q), the slope and L(q'), between a tenth and half of ρ; after one that is kept,
    the next is whole again.  One wants it for steps of Newton, whose length is right near the optimum; for natural
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
        promised, decrease = trial.rho * trial.slope, trial.before - trial.after
        rounding = 64 * torch.finfo(decrease.dtype).eps * trial.before.abs().clamp_min(1.0)
        accept = decrease >= self.decrease * promised - rounding - trial.slack
        bend = promised - decrease
        cut = torch.where(bend.isfinite() & (bend > 0), 0.5 * promised / bend, _SHORTEST).clamp(_SHORTEST, _LONGEST)
        return accept, {"share": torch.where(accept, 1.0, cut * state["share"])}
