"""The Gaussian with a few factors, Σ = BBᵀ + diag(c²), over λ = (μ, vec B, c).

With u = Σ⁻¹(θ - μ) the score is (u, u(uᵀB) - Σ⁻¹B, c (u² - diag Σ⁻¹)), O(d K²) by Woodbury.  B and BQ are
one q for orthogonal Q: I_F is singular for K > 1, as it is for every factor model.
"""

import math
from collections.abc import Sequence
from typing import Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.errors import InputError
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.flat.drawing import normal
from torchngvi.posteriors.flat.flat_gaussian import mean_and_scale
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior, check_start
from torchngvi.posteriors.shapes import Shape

_SHARE = 0.1  # of the standard deviations at a standard start, that the factors have


@final
class LowRankGaussian(FlatPosterior):
    """q = N(μ, BBᵀ + diag(c²)), a Gaussian whose covariance has K factors, D = d(K + 2).

    Take it for a large d in which a few directions are correlated; everything is in O(d K²).  Its Fisher matrix is
    singular for K > 1, so that a metric has to estimate it; for K = 1 take a `RankOneGaussian`.

    Args:
        mean: μ at the start, (*batch, d).
        factors: B at the start, (*batch, d, K).
        scale: c at the start, (*batch, d), no entry zero.

    Raises:
        InputError: shapes that do not fit, a zero in c.

    >>> LowRankGaussian(torch.zeros(4), torch.ones(4, 2), torch.ones(4)).size
    16
    """

    domain = "no entry of c is zero"
    reparametrised = True

    def __init__(
        self,
        mean: Tensor,  # (*batch, d)
        factors: Tensor,  # (*batch, d, K)
        scale: Tensor,  # (*batch, d)
    ) -> None:
        check_start(type(self).__name__, mean=mean, factors=factors, scale=scale)
        if not mean.shape == scale.shape == factors.shape[:-1]:
            shapes = ", ".join(str(tuple(part.shape)) for part in (mean, factors, scale))
            raise InputError(f"mean (..., d), factors (..., d, K) and scale (..., d) must fit; got {shapes}.")
        self.rank = factors.shape[-1]
        super().__init__(torch.cat([mean, factors.flatten(-2), scale], -1), mean.shape[-1])

    @classmethod
    def standard(
        cls,
        dim: int,
        batch_shape: Sequence[int] = (),
        *,
        mean: Tensor | float = 0.0,  # broadcasts to (*batch, d)
        scale: Tensor | float = 1.0,  # scalar, or standard deviations (*batch, d)
        rank: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make a Gaussian of this mean and these standard deviations, whose factors have a tenth of each of them.

        Args:
            dim: d, the number of latent variables.
            batch_shape: the number of independent posteriors, as a shape.
            mean: μ, which broadcasts to (*batch, d).
            scale: a scalar, or standard deviations (*batch, d).
            rank: K, the number of factors, whose loadings differ in sign.
            dtype, device: those of λ; by default those of the start, or torch's defaults.

        Returns:
            A posterior of this class.

        Raises:
            InputError: a dimension below 1.

        >>> LowRankGaussian.standard(3, scale=2.0, rank=2).stddev.round(decimals=5).tolist()
        [2.0, 2.0, 2.0]
        """
        location, spread = mean_and_scale(dim, batch_shape, mean, scale, dtype, device)
        place = torch.arange(dim, dtype=location.dtype, device=location.device)[:, None] + 0.5
        rank = read_size("rank", rank, "is the number of factors")
        waves = torch.cos(math.pi / dim * place * torch.arange(rank, dtype=place.dtype, device=place.device))
        factors = _SHARE / math.sqrt(rank) * spread[..., None] * torch.where(waves < 0, -1.0, 1.0).to(place.dtype)
        return cls(location, factors, math.sqrt(1 - _SHARE**2) * spread)

    @property
    def mean(self) -> Tensor:
        """The mean μ of q, (*batch, d)."""
        return self.vector[..., : self.dim]

    @property
    def variance(self) -> Tensor:
        """The marginal variances diag Σ, (*batch, d)."""
        _, B, c = self.parts(self.vector)
        return B.square().sum(-1) + c.square()

    @property
    def covariance(self) -> Tensor:
        """The covariance Σ of q, (*batch, d, d)."""
        _, B, c = self.parts(self.vector)
        return B @ B.mT + c.square().diag_embed()

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Take λ apart into μ, B and c."""
        lam, d = self.point(at), self.dim
        return lam[..., :d], lam[..., d:-d].unflatten(-1, (d, self.rank)), lam[..., -d:]

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + B e₁ + c e₂ without a gradient."""
        return self.rsample(shape, generator, self.point(at).detach())

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + B e₁ + c e₂, differentiable in λ."""
        mean, B, c = self.parts(at)
        e = normal(shape, mean, self.rank + self.dim, generator)
        return mean + (B @ e[..., : self.rank, None])[..., 0] + c * e[..., self.rank :]

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute log N(θ; μ, Σ), with |Σ| = |I + BᵀC⁻²B| Π c²."""
        mean, B, c = self.parts(at)
        x = (theta - mean) / c
        A = B / c[..., None]
        root = self._capacitance(A)
        inner = torch.linalg.solve_triangular(root, A.mT @ x[..., None], upper=False)
        square = x.square().sum(-1) - inner.square().sum((-2, -1))
        log_det = c.square().log().sum(-1) + 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * (square + log_det + self.dim * math.log(2 * math.pi))

    def _capacitance(self, A: Tensor) -> Tensor:
        """The Cholesky factor of I + AᵀA."""
        eye = torch.eye(self.rank, dtype=A.dtype, device=A.device)
        return cholesky(eye + A.mT @ A)[0]

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (u, u(uᵀB) - Σ⁻¹B, c (u² - diag Σ⁻¹)) with u = Σ⁻¹(θ - μ)."""
        mean, B, c = self.parts(at)
        A = B / c[..., None]
        # Σ⁻¹ = C⁻¹(I - WWᵀ)C⁻¹, W = A L⁻ᵀ
        W = torch.linalg.solve_triangular(self._capacitance(A), A.mT, upper=False).mT
        x = ((theta - mean) / c)[..., None]
        u = ((x - W @ (W.mT @ x))[..., 0]) / c
        for_B = u[..., None] * (u[..., None, :] @ B) - (A - W @ (W.mT @ A)) / c[..., None]
        diagonal = (1 - W.square().sum(-1)) / c.square()
        return torch.cat([u, for_B.flatten(-2), c * (u.square() - diagonal)], -1)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where λ is finite and no entry of c is zero."""
        lam = self.point(at)
        return lam.isfinite().all(-1) & (lam[..., -self.dim :] != 0).all(-1)
