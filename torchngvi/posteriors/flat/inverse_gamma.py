"""Inverse gamma(a, b) over η = (a, b), for a positive number x: T = (-log x, -1/x), h = 1/x."""

from typing import final

import torch
from torch import Tensor

from torchngvi.posteriors.flat.shape_rate import ShapeRate


@final
class InverseGamma(ShapeRate):
    """Inverse gamma(a, b), the law of 1/u for u ~ Gamma(a, b), for a positive number x.

    One wants it for the variance of normal data, to which it is conjugate.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite, or of another length.

    >>> InverseGamma(torch.tensor([3.0, 2.0])).mean.item()
    1.0
    """

    def as_gamma(self, theta: Tensor) -> Tensor:
        """Return 1/θ."""
        return 1 / theta

    def base_coefficients(self) -> Tensor:
        """Return (1, 0)."""
        return self.vector.new_tensor([1.0, 0.0])

    @property
    def mean(self) -> Tensor:
        """The mean b/(a - 1) of x, (*batch, 1); infinite for a ≤ 1."""
        a, b = self.vector[..., :1], self.vector[..., 1:]
        return torch.where(a > 1, b / (a - 1), torch.inf)

    @property
    def variance(self) -> Tensor:
        """The variance b²/((a - 1)²(a - 2)) of x, (*batch, 1); infinite for a ≤ 2."""
        a, b = self.vector[..., :1], self.vector[..., 1:]
        return torch.where(a > 2, (b / (a - 1)).square() / (a - 2), torch.inf)
