"""Adam (Kingma and Ba 2015), which needs no Fisher matrix, in the place of a metric.

Its arithmetic is that of the momentum `torchngvi.rules.Adam`; as a metric its direction is seen by step sizes that
limit a direction, and by a momentum that averages steps.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates
from torchngvi.metrics.preconditioner import Preconditioner, State
from torchngvi.momentum.averages import Adam as AdamMomentum
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class Adam(Preconditioner):
    """Adam's running moments of the gradient in the place of a metric, coordinate by coordinate.

    It equals `torch.optim.Adam` at a constant step.  Use it as the method to compare with that needs no Fisher
    matrix.

    Args:
        betas: the weights of the past in the averages of g and of g², each in [0, 1).
        eps: the positive number that is added to √v̂, in the units of the coordinates.

    Raises:
        InputError: if a beta lies outside [0, 1), or eps is not positive.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> metric, q, gradient = Adam(), MeanFieldGaussian(torch.zeros(2)), torch.tensor([3.0, -0.1])
    >>> state = metric.noticed(metric.fresh(q), gradient, q)
    >>> metric.direction(state, gradient, q).round(decimals=3).tolist()  # signs at first
    [1.0, -1.0]
    """

    natural = False

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.momentum = AdamMomentum(betas, eps)

    def fresh(self, q: FlatPosterior) -> State:
        """Return moments of zero, and a count of no steps."""
        return dict(self.momentum.init(q))

    def noticed(self, state: State, gradient: Tensor, q: FlatPosterior) -> State:
        """Return the moments with this gradient in them, for the members whose gradient is finite."""
        fine = gradient.isfinite().all(-1)
        new = self.momentum.moments(Coordinates(gradient, q.no_matrix), state)
        masks = {name: fine if value.ndim == fine.ndim else fine[..., None] for name, value in new.items()}
        return {name: torch.where(masks[name], value, state[name]) for name, value in new.items()}

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return m̂/(√v̂ + ε) of the moments, in which the gradient is already."""
        fine = gradient.isfinite().all(-1)
        return torch.where(fine[..., None], self.momentum.change(q, state).vector, torch.nan)
