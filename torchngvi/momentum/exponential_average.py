"""Exponential averages of steps: M ← ωM + (1 - ω) d, and the step along M.

What is averaged is the direction as long as the step size lets it be, so that one gradient of enormous length does not
stay in M.  On a manifold M is carried to the tangent space at each new λ (the vector transport).
"""

from collections.abc import Callable
from typing import final

from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.interfaces import Coordinates, Momentum, Posterior


@final
class ExponentialAverage(Momentum):
    """The exponential moving average of the directions, without a correction of its bias towards 0.

    The step goes along M ← ωM + (1 - ω)d, where d is the direction of the present step as far as the step size lets it
    go.  One wants it for stochastic gradients in the methods that are published with it, such as manifold VB; where the
    first steps should have full length, `NormalizedMomentum` corrects the bias.

    Args:
        weight: the weight ω of the past, in [0, 1).

    Raises:
        InputError: if the weight lies outside [0, 1).

    >>> from torchngvi import SRVN, CholeskyGaussian
    >>> opt = SRVN(CholeskyGaussian(2), lr=0.01, momentum=ExponentialAverage(0.6))
    """

    needs_natural = False
    of_steps = True
    carried = ("mean_vector",)

    def __init__(self, weight: float = 0.9) -> None:
        self.weight = read_number("weight", weight, "is that of the past", at_least=0, below=1)

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """Return an average of zero in the coordinates of q."""
        return {
            "mean_vector": q.mean_probe.detach().clone().zero_(),
            "mean_matrix": q.root_probe.detach().clone().zero_(),
        }

    def __call__(
        self,
        q: Posterior,
        change: Coordinates,
        norm2: Callable[[], Tensor],
        state: dict[str, Tensor],
    ) -> tuple[Coordinates, dict[str, Tensor]]:
        """Return the average with this direction in it, as the change to make and as the new state."""
        past, new = self.weight, 1 - self.weight
        vector = past * state["mean_vector"] + new * change.vector
        matrix = past * state["mean_matrix"] + new * change.matrix
        return Coordinates(vector, matrix), {"mean_vector": vector, "mean_matrix": matrix}
