"""Beta(a, b) over λ = (a, b), for a probability θ (Godichon-Baggioni, Nguyen and Tran 2023, Example 1).

As an exponential family its natural parameters are (a, b), with T = (log θ, log(1 - θ)) and h = 1/(θ(1 - θ)):

score = (ψ(a+b) - ψ(a) + log θ, ψ(a+b) - ψ(b) + log(1 - θ))
I_F = [[t(a) - t(a+b), -t(a+b)], [-t(a+b), t(b) - t(a+b)]]        t the trigamma function
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.posteriors.flat.concentrations import Concentrations
from torchngvi.posteriors.flat.drawing import gammas
from torchngvi.posteriors.flat.flat_posterior import solve_symmetric
from torchngvi.posteriors.shapes import Shape

FLOOR = 0.01  # a step that takes a or b below it ends there


@final
class Beta(Concentrations):
    """Beta(a, b) over λ = (a, b), for one probability θ in (0, 1).

    Its Fisher matrix is known, so that `NaturalGradient` follows the exact natural gradient.  A step is clamped at
    a, b ≥ 0.01.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite.

    >>> q = Beta(torch.tensor([58.0, 144.0], dtype=torch.float64))
    >>> q.fisher()[0, 0].round(decimals=7).item()
    0.0124281
    """

    domain = "a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 2)
    ) -> None:
        super().__init__(vector, 1, size=2)

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw X/(X + Y) of two gamma variables, kept off 0 and 1 by a rounding error."""
        both = gammas(shape, self.point(at), generator)
        theta = both[..., :1] / both.sum(-1, keepdim=True)
        info = torch.finfo(theta.dtype)
        return theta.clamp(info.tiny, 1 - info.eps)

    @property
    def mean(self) -> Tensor:
        """The mean a/(a + b) of θ, (*batch, 1)."""
        return self.vector[..., :1] / self.vector.sum(-1, keepdim=True)

    @property
    def variance(self) -> Tensor:
        """The variance m(1 - m)/(a + b + 1) of θ, m its mean, (*batch, 1)."""
        return self.mean * (1 - self.mean) / (self.vector.sum(-1, keepdim=True) + 1)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute (log θ, log(1 - θ))."""
        return torch.cat([theta.log(), torch.log1p(-theta)], -1)

    def fisher(self, at: Tensor | None = None) -> Tensor:  # (*batch, 2, 2)
        """Compute I_F, which is the covariance of (log θ, log(1 - θ)), (*batch, 2, 2)."""
        lam = self.point(at)
        together = torch.polygamma(1, lam.sum(-1))  # as autograd has it: gradients of a bound have the same errors
        return torch.polygamma(1, lam).diag_embed() - together[..., None, None]

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Multiply by the 2 x 2 Fisher matrix."""
        return (self.fisher(at) @ change[..., None])[..., 0]

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve with the 2 x 2 Fisher matrix by Cholesky."""
        return solve_symmetric(self.fisher(at), gradient)

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Add the change to λ, and clamp the result at 0.01."""
        return (at + change).clamp_min(FLOOR)
