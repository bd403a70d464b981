"""Adam (Kingma and Ba 2015), the rival that needs no Fisher matrix, with the same estimator and schedule.

m ← β₁m + (1 - β₁)g    v ← β₂v + (1 - β₂)g²    direction = m̂/(√v̂ + ε)
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.ifvb.preconditioners.base import Preconditioner, State


@final
class Adam(Preconditioner):
    """Moments of the gradient, coordinate by coordinate; equal to `torch.optim.Adam` at a constant step.

    Args:
        betas: decay of the two moments, in [0, 1).
        eps: added to √v̂, positive.

    Raises:
        InputError: values out of range.
    """

    samples, remembers, natural = 0, False, False

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1 and eps > 0):
            raise InputError(f"betas lie in [0, 1) and eps is positive; got betas={betas}, eps={eps}.")
        self.betas, self.eps = betas, eps

    def init(self, family: FlatPosterior) -> State:
        """m = v = 0."""
        zero = torch.zeros_like(family.vector, requires_grad=False)
        return {"first": zero, "second": zero.clone(), "updates": 0}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator) -> None:
        """Never asked."""

    def direction(self, state: State, gradient: Tensor, family: FlatPosterior) -> Tensor:
        """Updates the moments where the gradient is finite."""
        fine = gradient.isfinite().all(-1, keepdim=True)
        state["updates"] += 1
        for name, beta, value in zip(("first", "second"), self.betas, (gradient, gradient.square()), strict=True):
            state[name] = torch.where(fine, beta * state[name] + (1 - beta) * value, state[name])
        first, second = (
            state[name] / (1 - beta ** state["updates"])
            for name, beta in zip(("first", "second"), self.betas, strict=True)
        )
        return torch.where(fine, first / (second.sqrt() + self.eps), torch.nan)
