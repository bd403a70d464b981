"""Gamma(a, b) and inverse gamma(a, b) over η = (a, b), for positive numbers.

gamma           T = (log x, -x)       h = 1/x      ω = (ψ(a) - log b, -a/b)
inverse gamma   T = (-log x, -1/x)    h = 1/x      the gamma law of 1/x
A = lnΓ(a) - a log b      F = [[ψ'(a), -1/b], [-1/b, a/b²]], whose determinant is (a ψ'(a) - 1)/b²
"""

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from torchngvi.numerics.gamma_functions import increasing_root, log_minus_digamma, trigamma, trigamma_excess
from torchngvi.posteriors.flat.drawing import gammas
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily, shrunk
from torchngvi.posteriors.shapes import Shape


class _ShapeRate(ExponentialFamily):
    """What the two laws share: A, ω and F of the shape a and the rate b."""

    domain = "a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 2)
    ) -> None:
        super().__init__(vector, 1)

    @abstractmethod
    def _of_gamma(self, x: Tensor) -> Tensor:
        """The variable whose law is Gamma(a, b), from x, or back."""

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw from Gamma(a, 1), scale by 1/b, and keep off 0 by the smallest normal number."""
        a, b = self.point(at).detach().unbind(-1)
        draws = gammas(shape, a, generator) / b
        return self._of_gamma(draws.clamp_min(torch.finfo(draws.dtype).tiny)[..., None])

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute (log u, -u), u the variable with the gamma law."""
        return torch.cat([self._of_gamma(theta).log(), -self._of_gamma(theta)], -1)

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute lnΓ(a) - a log b."""
        a, b = self.point(at).unbind(-1)
        return torch.lgamma(a) - a * b.log()

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute (ψ(a) - log b, -a/b)."""
        a, b = self.point(at).unbind(-1)
        return torch.stack([torch.digamma(a) - b.log(), -a / b], -1)

    def natural(self, omega: Tensor) -> Tensor:
        """Find a with log a - ψ(a) = log(-ω_2) - ω_1, and b = -a/ω_2."""
        log_mean = (-omega[..., 1]).log()

        def function(log_a: Tensor) -> Tensor:
            return log_mean - omega[..., 0] - log_minus_digamma(log_a.exp())

        wide = torch.full_like(log_mean, 45.0)
        a = increasing_root(function, -wide, wide).exp()
        return torch.stack([a, -a / omega[..., 1]], -1)

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (ψ'(a)u - w/b, -u/b + aw/b²) of a change (u, w)."""
        (a, b), (u, w) = self.point(at).unbind(-1), change.unbind(-1)
        return torch.stack([trigamma(a) * u - w / b, (a * w / b - u) / b], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve the 2 x 2 system, with ψ'(a) - 1/a as one number."""
        (a, b), (first, second) = self.point(at).unbind(-1), gradient.unbind(-1)
        u = (first + b * second / a) / trigamma_excess(a)
        return torch.stack([u, b * (b * second + u) / a], -1)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where a and b are positive and finite."""
        lam = self.point(at)
        return (lam.isfinite() & (lam > 0)).all(-1)

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Add the change; where that leaves the domain, a coordinate that shrinks by more than half does by a factor."""
        straight = at + change
        inside = (straight > 0).all(-1, keepdim=True)
        return torch.where(inside, straight, at * shrunk(change / at))


@final
class Gamma(_ShapeRate):
    """Gamma(a, b), with shape a and rate b, for a positive number x: a precision, a rate of events, a scale.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite.

    >>> q = Gamma(torch.tensor([3.0, 2.0]))
    >>> q.mean.item(), q.variance.item()
    (1.5, 0.75)
    """

    def _of_gamma(self, x: Tensor) -> Tensor:
        return x

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


@final
class InverseGamma(_ShapeRate):
    """Inverse gamma(a, b), the law of 1/u for u ~ Gamma(a, b), for a positive number x: a variance of normal data.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite.

    >>> InverseGamma(torch.tensor([3.0, 2.0])).mean.item()
    1.0
    """

    def _of_gamma(self, x: Tensor) -> Tensor:
        return 1 / x

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
