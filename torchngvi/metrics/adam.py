"""Adam (Kingma and Ba 2015), the rival that needs no Fisher matrix, in the place of a metric.

As the momentum `torchngvi.rules.Adam`, whose arithmetic it is; as a metric its direction is seen by step sizes that
limit a direction, and by a momentum that averages steps.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates
from torchngvi.metrics.preconditioner import Preconditioner, State
from torchngvi.momentum.adam import Adam as AdamMomentum
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


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
        self.momentum = AdamMomentum(betas, eps)

    def fresh(self, q: FlatPosterior) -> State:
        """No moments yet."""
        return dict(self.momentum.init(q))

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> None:
        """Nothing: Adam learns from gradients alone."""

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Updates the moments of the members whose gradient is finite."""
        fine = gradient.isfinite().all(-1)
        change, new = self.momentum(q, Coordinates(gradient, q.no_matrix), lambda: gradient.square().sum(-1), state)
        for name, value in new.items():
            mask = fine if value.ndim == fine.ndim else fine[..., None]
            state[name] = torch.where(mask, value, state[name])
        return torch.where(fine[..., None], change.vector, torch.nan)
