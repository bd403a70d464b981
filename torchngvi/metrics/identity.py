"""No preconditioner: the ordinary gradient (Godichon-Baggioni, Nguyen and Tran 2023, Eq 2.5)."""

from typing import final

from torch import Tensor

from torchngvi.metrics.preconditioner import Preconditioner, State
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class Identity(Preconditioner):
    """No metric: the direction is the ordinary gradient ∇L, so that steps depend on the units and coordinates of λ.

    One wants it as the baseline that shows what a metric gains.

    >>> import torch
    >>> from torchngvi.ifvb import Beta
    >>> Identity().direction({}, torch.ones(2), Beta(torch.ones(2))).tolist()
    [1.0, 1.0]
    """

    natural = False

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the gradient as it is."""
        return gradient
