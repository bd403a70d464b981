"""Gamma(a, b) over η = (a, b), for a positive number x: T = (log x, -x), h = 1/x."""

from typing import final

from torch import Tensor

from torchngvi.posteriors.flat.shape_rate import ShapeRate


@final
class Gamma(ShapeRate):
    """Gamma(a, b), with shape a and rate b, for a positive number x.

    One wants it for a precision, a rate of events or a scale; it is conjugate to Poisson counts and to the precision of
    normal data.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite, or of another length.

    >>> import torch
    >>> q = Gamma(torch.tensor([3.0, 2.0]))
    >>> q.mean.item(), q.variance.item()
    (1.5, 0.75)
    """

    def as_gamma(self, theta: Tensor) -> Tensor:
        """Return θ itself."""
        return theta

    def base_coefficients(self) -> Tensor:
        """Return (-1, 0)."""
        return self.vector.new_tensor([-1.0, 0.0])

    @property
    def mean(self) -> Tensor:
        """The mean a/b of x, (*batch, 1)."""
        return self.vector[..., :1] / self.vector[..., 1:]

    @property
    def variance(self) -> Tensor:
        """The variance a/b² of x, (*batch, 1)."""
        return self.mean / self.vector[..., 1:]
