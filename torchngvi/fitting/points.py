"""Where a descent is: what was evaluated there, and what is needed to come back."""

from typing import NamedTuple

from torch import Tensor

from torchngvi.diagnostics.linear_response import Residuals
from torchngvi.interfaces import Coordinates
from torchngvi.methods import VN


class Point(NamedTuple):
    """The norm of the gradient, its noise and the loss of q on a set of draws."""

    norm2: Tensor  # (*batch,)
    noise2: Tensor  # (*batch,)
    loss: Tensor  # (*batch,)

    @property
    def total(self) -> float:
        """The root of norm² + noise²; about half its square, in nats, is lost."""
        return float((self.norm2 + self.noise2).max()) ** 0.5

    @property
    def finite(self) -> bool:
        """Whether loss and norm are finite for every batch member."""
        return bool((self.loss.isfinite() & self.norm2.isfinite()).all())


class Place(NamedTuple):
    """What a descent goes back to from another place."""

    coordinates: Coordinates
    optimizer: VN | None
    near: bool
    draws: int
    point: Point
    residuals: Residuals | None  # seen last there
