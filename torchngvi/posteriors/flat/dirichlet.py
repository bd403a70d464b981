"""Dirichlet and beta laws as flat posteriors."""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.numerics.special import increasing_root, inverse_digamma, trigamma, trigamma_excess
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily, retracted_positive
from torchngvi.posteriors.flat.flat_posterior import gammas, solve_symmetric
from torchngvi.posteriors.shapes import Shape

# What Dirichlet and beta laws share, over η = α: A, ω = ∇A and F = ∇²A
#
# A = Σ lnΓ(α_k) - lnΓ(α_0), α_0 = Σ α_k      ω_k = ψ(α_k) - ψ(α_0)      F = diag(ψ'(α)) - ψ'(α_0) 11ᵀ

_WIDE = 45.0  # log α_0 lies between minus this and this


class Concentrations(ExponentialFamily):
    """The laws of shares that sum to 1, over their concentrations α: abstract.

    Args:
        vector: α, positive, (*batch, K) with K ≥ 2.
        dim: d, the number of entries of θ.
        size: K, where the law has one.

    Raises:
        InputError: a start that is not positive and finite, or of another length.

    >>> from torchngvi.posteriors.flat import Beta
    >>> isinstance(Beta(torch.ones(2)), Concentrations)
    True
    """

    domain = "the concentrations are positive"

    def base_coefficients(self) -> Tensor:
        """Return -1 for each class."""
        return -torch.ones(self.size, dtype=self.dtype, device=self.device)

    def reference_vector(self) -> Tensor:
        """Return 2 for each class."""
        return torch.full_like(self.vector.detach().reshape(-1, self.size)[0], 2.0)

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute Σ lnΓ(α_k) - lnΓ(α_0)."""
        alpha = self.point(at)
        return torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute ψ(α_k) - ψ(α_0)."""
        alpha = self.point(at)
        return torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))

    def natural(self, omega: Tensor) -> Tensor:
        """Find α_0: the sum of ψ⁻¹(ω_k + ψ(s)) is above s below it, and below s above it."""

        def below(log_s: Tensor) -> Tensor:
            s = log_s.exp()
            return s - inverse_digamma(omega + torch.digamma(s)[..., None]).sum(-1)

        wide = torch.full_like(omega[..., 0], _WIDE)
        s = increasing_root(below, -wide, wide).exp()
        return inverse_digamma(omega + torch.digamma(s)[..., None])

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute ψ'(α_k) x_k - ψ'(α_0) Σ x."""
        alpha = self.point(at)
        return trigamma(alpha) * change - (trigamma(alpha.sum(-1)) * change.sum(-1))[..., None]

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve by Sherman and Morrison, whose denominator is a sum of what 1/ψ'(α) lacks of α: nothing cancels."""
        alpha = self.point(at)
        scaled = gradient / trigamma(alpha)
        apart = _lack(alpha).sum(-1) - _lack(alpha.sum(-1))  # 1/ψ'(α_0) - Σ 1/ψ'(α_k)
        return scaled + (scaled.sum(-1) / apart)[..., None] / trigamma(alpha)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where all concentrations are positive and finite."""
        alpha = self.point(at)
        return (alpha.isfinite() & (alpha > 0)).all(-1)

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Add the change; where that leaves the domain, what shrinks by more than half does so by a factor."""
        return retracted_positive(at, change)


def _lack(alpha: Tensor) -> Tensor:
    """α - 1/ψ'(α), which tends to ½."""
    over = alpha * trigamma_excess(alpha)
    return alpha * over / (1 + over)


# Beta(a, b) over λ = (a, b), for a probability θ (Godichon-Baggioni, Nguyen and Tran 2023, Example 1)
#
# As an exponential family its natural parameters are (a, b), with T = (log θ, log(1 - θ)) and h = 1/(θ(1 - θ)):
#
# score = (ψ(a+b) - ψ(a) + log θ, ψ(a+b) - ψ(b) + log(1 - θ))
# I_F = [[t(a) - t(a+b), -t(a+b)], [-t(a+b), t(b) - t(a+b)]]        t the trigamma function

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


# Dirichlet(α) over η = α, for the shares x of K classes: T = (log x_k), h = Π 1/x_k


@final
class Dirichlet(Concentrations):
    """Dirichlet(α), for the shares x of K classes, which are positive and sum to 1.

    Use it for the shares of topics in a document, of components in a mixture or of answers in a group; it is
    conjugate to counts.

    Args:
        vector: α, positive, (*batch, K) with K ≥ 2.

    Raises:
        InputError: a start that is not positive and finite, or of one class.

    >>> q = Dirichlet(torch.tensor([2.0, 3.0, 5.0]))
    >>> [round(share, 4) for share in q.mean.tolist()]
    [0.2, 0.3, 0.5]
    """

    def __init__(
        self,
        vector: Tensor,  # (*batch, K)
    ) -> None:
        classes = vector.shape[-1] if isinstance(vector, Tensor) and vector.ndim else 0
        super().__init__(vector, classes)
        if classes < 2:
            raise InputError(f"Dirichlet has a concentration for each of two classes at least; got {classes}.")

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw X_k/ΣX of gamma variables, kept off 0 by the smallest normal number."""
        draws = gammas(shape, self.point(at), generator)
        return (draws / draws.sum(-1, keepdim=True)).clamp_min(torch.finfo(draws.dtype).tiny)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute log x."""
        return theta.log()

    @property
    def mean(self) -> Tensor:
        """The means α_k/α_0 of x, (*batch, K)."""
        return self.vector / self.vector.sum(-1, keepdim=True)

    @property
    def variance(self) -> Tensor:
        """The variances m_k(1 - m_k)/(α_0 + 1) of x, m its mean, (*batch, K)."""
        return self.mean * (1 - self.mean) / (self.vector.sum(-1, keepdim=True) + 1)
