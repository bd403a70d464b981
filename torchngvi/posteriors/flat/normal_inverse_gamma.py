"""N(m, v) x inverse-gamma(a, b) for a mean and a variance (Godichon-Baggioni, Nguyen and Tran 2023, Example 2).

θ = (μ, σ²), λ = (m, v, a, b), the two independent, with e = μ - m:

    score = (e/v, -1/(2v) + e²/(2v²), log b - ψ(a) - log σ², a/b - 1/σ²)
    I_F = blockdiag(diag(1/v, 1/(2v²)), [[t(a), -1/b], [-1/b, a/b²]])

The normal density of the paper's log q lacks the 2 of e²/(2v); its gradient is printed right.
"""

import math
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import shown
from torchngvi.errors import InputError
from torchngvi.posteriors.flat.drawing import gammas, normal
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior, check_start, solve_symmetric
from torchngvi.posteriors.shapes import Shape


@final
class NormalInverseGamma(FlatPosterior):
    """q(μ, σ²) = N(μ; m, v) IG(σ²; a, b), for the mean and the variance of normal data, independent of one another.

    Args:
        vector: (m, v, a, b) at the start, (*batch, 4), the last three positive.

    Raises:
        InputError: a start that is not finite, or not positive where it has to be.

    >>> q = NormalInverseGamma(torch.tensor([0.0, 1.0, 3.0, 4.0]))
    >>> q.sample(5, torch.Generator().manual_seed(0)).shape
    torch.Size([5, 2])
    """

    domain = "v, a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 4)
    ) -> None:
        check_start(type(self).__name__, vector=vector)
        if vector.shape[-1] != 4:
            raise InputError(f"NormalInverseGamma starts at (m, v, a, b), (*batch, 4); got {shown(vector)}.")
        super().__init__(vector, 2)

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw μ = m + √v z and σ² = b/G with G ~ Gamma(a, 1)."""
        m, v, a, b = self.point(at).detach().unbind(-1)
        z = normal(shape, m[..., None], 1, generator)[..., 0]
        return torch.stack([m + v.sqrt() * z, b / gammas(shape, a, generator)], -1)

    @property
    def mean(self) -> Tensor:
        """The means m of μ and b/(a - 1) of σ², (*batch, 2); the latter is infinite for a ≤ 1."""
        m, _, a, b = self.vector.unbind(-1)
        return torch.stack([m, torch.where(a > 1, b / (a - 1), torch.inf)], -1)

    @property
    def variance(self) -> Tensor:
        """The variances v of μ and b²/((a - 1)²(a - 2)) of σ², (*batch, 2); the latter is infinite for a ≤ 2."""
        _, v, a, b = self.vector.unbind(-1)
        return torch.stack([v, torch.where(a > 2, (b / (a - 1)).square() / (a - 2), torch.inf)], -1)

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute log N(μ; m, v) + a log b - log Γ(a) - (a + 1) log σ² - b/σ²."""
        m, v, a, b = self.point(at).unbind(-1)
        mu, variance = theta.unbind(-1)
        gaussian = -0.5 * (2 * math.pi * v).log() - (mu - m).square() / (2 * v)
        return gaussian + a * b.log() - torch.lgamma(a) - (a + 1) * variance.log() - b / variance

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (e/v, -1/(2v) + e²/(2v²), log b - ψ(a) - log σ², a/b - 1/σ²) with e = μ - m."""
        m, v, a, b = self.point(at).unbind(-1)
        mu, variance = theta.unbind(-1)
        u = (mu - m) / v
        parts = (u, 0.5 * (u.square() - 1 / v), b.log() - torch.digamma(a) - variance.log(), a / b - 1 / variance)
        return torch.stack(parts, -1)

    def fisher(self, at: Tensor | None = None) -> Tensor:  # (*batch, 4, 4)
        """Compute I_F, (*batch, 4, 4), which is that of the normal beside that of the inverse gamma."""
        _, v, a, b = self.point(at).unbind(-1)
        matrix = torch.stack([1 / v, 0.5 / v.square(), torch.polygamma(1, a), a / b.square()], -1).diag_embed()
        matrix[..., 2, 3] = matrix[..., 3, 2] = -1 / b
        return matrix

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve with the 4 x 4 Fisher matrix by Cholesky."""
        return solve_symmetric(self.fisher(at), gradient)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where v, a and b are positive and λ is finite."""
        lam = self.point(at)
        return lam.isfinite().all(-1) & (lam[..., 1:] > 0).all(-1)
