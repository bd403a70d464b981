"""No preconditioner: the ordinary gradient (Godichon-Baggioni, Nguyen and Tran 2023, Eq 2.5)."""

from typing import final

import torch
from torch import Tensor

from torchngvi.metrics.preconditioner import Preconditioner, State
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class Identity(Preconditioner):
    """direction = ∇L: the step depends on the units and coordinates of λ.

    >>> from torchngvi.ifvb import Beta
    >>> Identity().direction({}, torch.ones(2), Beta(torch.ones(2))).tolist()
    [1.0, 1.0]
    """

    samples, remembers, natural = 0, False, False

    def fresh(self, q: FlatPosterior) -> State:
        """Nothing."""
        return {}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> None:
        """Never asked."""

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """The gradient."""
        return gradient
