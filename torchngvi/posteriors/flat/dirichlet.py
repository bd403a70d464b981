"""Dirichlet(α) over η = α, for probabilities x of K classes.

T = (log x_k)      h = Π 1/x_k      A = Σ lnΓ(α_k) - lnΓ(α_0), α_0 = Σ α_k      ω_k = ψ(α_k) - ψ(α_0)
F = diag(ψ'(α)) - ψ'(α_0) 11ᵀ
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.numerics.gamma_functions import increasing_root, inverse_digamma, trigamma, trigamma_excess
from torchngvi.posteriors.flat.drawing import gammas
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily, shrunk
from torchngvi.posteriors.shapes import Shape


@final
class Dirichlet(ExponentialFamily):
    """Dirichlet(α), for the probabilities x of K classes, which are positive and sum to 1.

    One wants it for shares: of topics in a document, of components in a mixture, of answers in a group.

    Args:
        vector: α, positive, (*batch, K) with K ≥ 2.

    Raises:
        InputError: a start that is not positive and finite.

    >>> q = Dirichlet(torch.tensor([2.0, 3.0, 5.0]))
    >>> [round(share, 4) for share in q.mean.tolist()]
    [0.2, 0.3, 0.5]
    """

    domain = "the concentrations are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, K)
    ) -> None:
        super().__init__(vector, vector.shape[-1] if isinstance(vector, Tensor) and vector.ndim else 0)

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw X_k/ΣX of gamma variables, kept off 0 by the smallest normal number."""
        draws = gammas(shape, self.point(at), generator)
        return (draws / draws.sum(-1, keepdim=True)).clamp_min(torch.finfo(draws.dtype).tiny)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute log x."""
        return theta.log()

    def base_coefficients(self) -> Tensor:
        """Return -1 for each class."""
        return -torch.ones_like(self.vector[..., :1]).expand_as(self.vector)

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute Σ lnΓ(α_k) - lnΓ(α_0)."""
        alpha = self.point(at)
        return torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute ψ(α_k) - ψ(α_0)."""
        alpha = self.point(at)
        return torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))

    def natural(self, omega: Tensor) -> Tensor:
        """Find α_0, at which Σ ψ⁻¹(ω_k + ψ(s)) is s: the sum is above s below it, and below s above it."""

        def below(log_s: Tensor) -> Tensor:
            s = log_s.exp()
            return s - inverse_digamma(omega + torch.digamma(s)[..., None]).sum(-1)

        wide = torch.full_like(omega[..., 0], 45.0)
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
        """Add the change; where that leaves the domain, coordinates that shrink by more than half do so by a factor."""
        straight = at + change
        inside = (straight > 0).all(-1, keepdim=True)
        return torch.where(inside, straight, at * shrunk(change / at))

    @property
    def mean(self) -> Tensor:
        """The means α_k/α_0 of x, (*batch, K)."""
        return self.vector / self.vector.sum(-1, keepdim=True)

    @property
    def variance(self) -> Tensor:
        """The variances m_k(1 - m_k)/(α_0 + 1) of x, m its mean, (*batch, K)."""
        return self.mean * (1 - self.mean) / (self.vector.sum(-1, keepdim=True) + 1)


def _lack(alpha: Tensor) -> Tensor:
    """α - 1/ψ'(α), which tends to ½."""
    over = alpha * trigamma_excess(alpha)
    return alpha * over / (1 + over)
