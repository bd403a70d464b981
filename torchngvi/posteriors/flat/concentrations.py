"""What Dirichlet and beta laws share, over η = α: A, ω = ∇A and F = ∇²A.

A = Σ lnΓ(α_k) - lnΓ(α_0), α_0 = Σ α_k      ω_k = ψ(α_k) - ψ(α_0)      F = diag(ψ'(α)) - ψ'(α_0) 11ᵀ
"""

import torch
from torch import Tensor

from torchngvi.numerics.gamma_functions import increasing_root, inverse_digamma, trigamma, trigamma_excess
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily, retracted_positive

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
