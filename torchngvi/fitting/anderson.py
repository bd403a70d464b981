"""Anderson acceleration of a fixed-point iteration of positive numbers, in their logarithms.

With x = log η and f = G(x) - x the next point is G(x) less the combination of the last changes of G that fits f best,

    x' = G(x_n) - ΔG c,      c = argmin |f_n - ΔF c|

(Walker and Ni 2011).  No entry changes by more than a factor of e from G(x); where the bound has fallen the memory is
emptied and the iteration goes back to the best point.
"""

import math

import torch
from torch import Tensor

from torchngvi.numerics.least_squares import shortest_fit

_MOST = 1.0  # of the change of a logarithm beyond the plain step


class Anderson:
    """The memory of an accelerated iteration, and the image of its best point.

    Attributes:
        best: the smallest loss so far.
        image: G(x) of the point x that had it; None before the first.

    >>> import torch
    >>> steps, x = Anderson(1), torch.tensor([0.0])
    >>> for _ in range(3):
    ...     x = steps.next(x, 0.9 * x + 0.1, loss=0.0)  # a linear iteration to 1: the second step is there
    >>> round(x.item(), 4)
    1.0
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.points: list[Tensor] = []  # G(x), (n,)
        self.residuals: list[Tensor] = []  # G(x) - x
        self.best = math.inf
        self.image: Tensor | None = None

    def forget(self) -> None:
        """Empty the memory, but for the best."""
        self.points, self.residuals = [], []

    def next(
        self,
        x: Tensor,  # (n,)
        image: Tensor,  # G(x), (n,)
        loss: float,
    ) -> Tensor:
        """Take in an iterate with its image and its loss, and return the next iterate."""
        if loss <= self.best:
            self.best, self.image = loss, image
        self.points = [*self.points, image][-self.memory - 1 :]
        self.residuals = [*self.residuals, image - x][-self.memory - 1 :]
        if len(self.points) < 2:
            return image
        changes = torch.stack([b - a for a, b in zip(self.residuals, self.residuals[1:], strict=False)], -1)
        images = torch.stack([b - a for a, b in zip(self.points, self.points[1:], strict=False)], -1)
        c = shortest_fit(changes, self.residuals[-1][:, None])
        return image - (images @ c)[:, 0].clamp(-_MOST, _MOST)
