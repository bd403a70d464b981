"""What the gamma law and the law of its reciprocal share, over η = (a, b): A, ω = ∇A and F = ∇²A.

A = lnΓ(a) - a log b      ω = (ψ(a) - log b, -a/b)
F = [[ψ'(a), -1/b], [-1/b, a/b²]], whose determinant is (a ψ'(a) - 1)/b²
"""

from abc import abstractmethod

import torch
from torch import Tensor

from torchngvi.numerics.gamma_functions import increasing_root, log_minus_digamma, trigamma, trigamma_excess
from torchngvi.posteriors.flat.drawing import gammas
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily, retracted_positive
from torchngvi.posteriors.shapes import Shape

_WIDE = 45.0  # log a lies between minus this and this


class ShapeRate(ExponentialFamily):
    """The laws of which a positive number u ~ Gamma(a, b) is a part, over the shape a and the rate b: abstract.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite, or of another length.

    >>> from torchngvi.posteriors.flat import InverseGamma
    >>> isinstance(InverseGamma(torch.ones(2)), ShapeRate)
    True
    """

    domain = "a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 2)
    ) -> None:
        super().__init__(vector, 1, size=2)

    @abstractmethod
    def as_gamma(
        self,
        theta: Tensor,  # (*sample, *batch, 1)
    ) -> Tensor:
        """Compute the variable u whose law is Gamma(a, b) from θ, or θ from it: a map that is its own inverse."""

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw u from Gamma(a, 1), scale it by 1/b, and keep it off 0 by the smallest normal number."""
        a, b = self.point(at).detach().unbind(-1)
        draws = gammas(shape, a, generator) / b
        return self.as_gamma(draws.clamp_min(torch.finfo(draws.dtype).tiny)[..., None])

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute (log u, -u)."""
        u = self.as_gamma(theta)
        return torch.cat([u.log(), -u], -1)

    def reference_vector(self) -> Tensor:
        """Return a = b = 2."""
        return torch.full_like(self.vector.detach().reshape(-1, 2)[0], 2.0)

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute lnΓ(a) - a log b."""
        a, b = self.point(at).unbind(-1)
        return torch.lgamma(a) - a * b.log()

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute (ψ(a) - log b, -a/b)."""
        a, b = self.point(at).unbind(-1)
        return torch.stack([torch.digamma(a) - b.log(), -a / b], -1)

    def natural(self, omega: Tensor) -> Tensor:
        """Find a with log a - ψ(a) = log(-ω₂) - ω₁, and b = -a/ω₂."""
        gap = (-omega[..., 1]).log() - omega[..., 0]
        wide = torch.full_like(gap, _WIDE)
        a = increasing_root(lambda log_a: gap - log_minus_digamma(log_a.exp()), -wide, wide).exp()
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
        """Add the change; where that leaves the domain, what shrinks by more than half does so by a factor."""
        return retracted_positive(at, change)
