"""Gaussians with a few factors, or with one, as flat posteriors."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.errors import InputError, PairError
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.flat.flat_gaussian import Sized, mean_and_scale
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior, check_start, normal
from torchngvi.posteriors.shapes import Shape

# The Gaussian with a few factors, Σ = BBᵀ + diag(c²), over λ = (μ, vec B, c)
#
# With u = Σ⁻¹(θ - μ) the score is (u, u(uᵀB) - Σ⁻¹B, c (u² - diag Σ⁻¹)), O(d K²) by Woodbury.  B and BQ are
# one q for orthogonal Q: I_F is singular for K > 1, as it is for every factor model.

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


# The Gaussian with one factor, Σ = bbᵀ + diag(c²), over λ = (μ, b, c): everything in O(d)
#
# With u = Σ⁻¹(θ - μ) (Godichon-Baggioni, Nguyen and Tran 2023, Example 4):
#
#     score = (u, (uᵀb) u - Σ⁻¹b, c (u² - diag Σ⁻¹))
#
# The exact natural gradient.  With r = b²/c², k = Σr, κ = 1/(1+k), δ = b/c² and a = k/(1+k) the blocks are
#
#     Σ⁻¹ x = x/c² - κ δ (δᵀx)                     F_bb⁻¹ w = (Σw - b (bᵀw)/(2a))/a
#     F_bc y = 2κ Σ⁻¹(c δ y)                       F_cb w = 2κ c δ (Σ⁻¹w)
#     F_cc - F_cb F_bb⁻¹ F_bc = diag(g) + (2/a²) xxᵀ,      g = (2/c²)(1 - 2r/k),  x = κ b²/c³
#
# F_μμ = Σ⁻¹, and μ does not mix with (b, c).  I_F is singular unless three entries of b differ from 0.
# NAGVAC (Tran, Nguyen, Nott and Kohn 2020) drops F_bc.

_SINGULAR = 1e-10  # of the terms of a determinant that cancel


class _Constants(NamedTuple):
    """What the formulas above share, at one λ."""

    b: Tensor  # (*batch, d)
    c: Tensor
    delta: Tensor
    r: Tensor
    k: Tensor  # (*batch, 1)
    kappa: Tensor
    a: Tensor

    def times_precision(self, x: Tensor) -> Tensor:
        """Multiply by the precision: Σ⁻¹x, in O(d)."""
        return x / self.c.square() - self.kappa * self.delta * (self.delta * x).sum(-1, keepdim=True)

    def times_covariance(self, x: Tensor) -> Tensor:
        """Multiply by the covariance: Σx, in O(d)."""
        return self.c.square() * x + self.b * (self.b * x).sum(-1, keepdim=True)

    def solve_bb(self, w: Tensor) -> Tensor:
        """Solve with the block of b alone: F_bb⁻¹w, in O(d)."""
        return (self.times_covariance(w) - self.b * (self.b * w).sum(-1, keepdim=True) / (2 * self.a)) / self.a


@final
class RankOneGaussian(Sized):
    """q = N(μ, bbᵀ + diag(c²)), a Gaussian whose covariance has one factor, D = 3d.

    Everything, the exact natural gradient included, is in O(d), which suits the weights of a network.

    Args:
        mean: μ at the start, (*batch, d).
        factor: b at the start, (*batch, d); not zero, or its gradient vanishes.
        scale: c at the start, (*batch, d), no entry zero; q depends on c² alone.

    Raises:
        InputError: shapes that differ, a zero in c, b = 0.

    >>> one = torch.ones(3, dtype=torch.float64)
    >>> q = RankOneGaussian(0 * one, one, one)
    >>> q.exact_fisher_solve(torch.cat([one, 0 * one, 0 * one]))[:3].tolist()  # Sigma times the gradient
    [4.0, 4.0, 4.0]
    """

    domain = "no entry of c is zero, b is not zero"
    reparametrised = True

    def __init__(
        self,
        mean: Tensor,  # (*batch, d)
        factor: Tensor,  # (*batch, d)
        scale: Tensor,  # (*batch, d)
    ) -> None:
        check_start(type(self).__name__, mean=mean, factor=factor, scale=scale)
        if not mean.shape == factor.shape == scale.shape:
            shapes = ", ".join(str(tuple(part.shape)) for part in (mean, factor, scale))
            raise InputError(f"mean, factor and scale have one shape; got {shapes}.")
        super().__init__(torch.cat([mean, factor, scale], -1), mean.shape[-1])

    @classmethod
    def _of_standard(cls, mean: Tensor, stddev: Tensor) -> Self:
        """Its factor has a tenth of each standard deviation."""
        return cls(mean, _SHARE * stddev, math.sqrt(1 - _SHARE**2) * stddev)

    @property
    def mean(self) -> Tensor:
        """The mean μ of q, (*batch, d)."""
        return self.vector[..., : self.dim]

    @property
    def variance(self) -> Tensor:
        """The marginal variances diag Σ, (*batch, d)."""
        _, b, c = self.vector.chunk(3, -1)
        return b.square() + c.square()

    @property
    def covariance(self) -> Tensor:
        """The covariance Σ of q, (*batch, d, d)."""
        _, b, c = self.vector.chunk(3, -1)
        return b[..., :, None] * b[..., None, :] + c.square().diag_embed()

    def _constants(self, at: Tensor | None) -> tuple[Tensor, _Constants]:
        mean, b, c = self.point(at).chunk(3, -1)
        delta, r = b / c.square(), (b / c).square()
        k = r.sum(-1, keepdim=True)
        return mean, _Constants(b, c, delta, r, k, 1 / (1 + k), k / (1 + k))

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + b e₁ + c e₂ without a gradient."""
        return self.rsample(shape, generator, self.point(at).detach())

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + b e₁ + c e₂ with a number e₁ and a vector e₂, differentiable in λ."""
        mean, b, c = self.point(at).chunk(3, -1)
        e = normal(shape, mean, self.dim + 1, generator)
        return mean + b * e[..., :1] + c * e[..., 1:]

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute -½ xᵀΣ⁻¹x - ½ log|Σ| - (d/2) log 2π with x = θ - μ and log|Σ| = Σ log c² + log(1 + k)."""
        mean, at_lam = self._constants(at)
        x = theta - mean
        log_det = at_lam.c.square().log().sum(-1) + torch.log1p(at_lam.k[..., 0])
        return -0.5 * ((x * at_lam.times_precision(x)).sum(-1) + log_det + self.dim * math.log(2 * math.pi))

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (u, (uᵀb) u - Σ⁻¹b, c (u² - diag Σ⁻¹)) with u = Σ⁻¹(θ - μ)."""
        mean, at_lam = self._constants(at)
        u = at_lam.times_precision(theta - mean)
        diagonal = 1 / at_lam.c.square() - at_lam.kappa * at_lam.delta.square()
        for_b = (u * at_lam.b).sum(-1, keepdim=True) * u - at_lam.kappa * at_lam.delta
        return torch.cat([u, for_b, at_lam.c * (u.square() - diagonal)], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the natural gradient by the formulas of the module: one elimination, in O(d).

        Raises:
            PairError: d < 3, where I_F is singular.
        """
        if self.dim < 3:
            raise PairError(
                f"the Fisher matrix of RankOneGaussian is singular for d < 3; got d = {self.dim}. "
                "Use FlatCholesky, or the preconditioner NAGVAC."
            )
        _, q = self._constants(at)
        g_mean, g_b, g_c = gradient.chunk(3, -1)
        cross = 2 * q.kappa * q.c * q.delta
        right = g_c - cross * q.times_precision(q.solve_bb(g_b))
        g = 2 / q.c.square() * (1 - 2 * q.r / q.k)
        y_c = _diagonal_plus_outer(g, 2 / q.a.square(), q.kappa * q.b.square() / q.c**3, right, q.r)
        y_b = q.solve_bb(g_b - 2 * q.kappa * q.times_precision(q.c * q.delta * y_c))
        return torch.cat([q.times_covariance(g_mean), y_b, y_c], -1)

    def block_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute I_F⁻¹g with F_bc = 0, each block exact: (Σg_μ, F_bb⁻¹g_b, F_cc⁻¹g_c), for the metric NAGVAC.

        F_cc = 2(diag(y) + xxᵀ), y = 1/c² - 2κδ².
        """
        _, q = self._constants(at)
        g_mean, g_b, g_c = gradient.chunk(3, -1)
        return torch.cat([q.times_covariance(g_mean), q.solve_bb(g_b), self._solve_cc(q, g_c)], -1)

    def published_block_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute `block_fisher_solve` with Σg_b/(2a) in the place of F_bb⁻¹g_b, as NAGVAC is usually run."""
        _, q = self._constants(at)
        g_mean, g_b, g_c = gradient.chunk(3, -1)
        return torch.cat([q.times_covariance(g_mean), q.times_covariance(g_b) / (2 * q.a), self._solve_cc(q, g_c)], -1)

    def _solve_cc(self, q: _Constants, g_c: Tensor) -> Tensor:
        y = 1 / q.c.square() - 2 * q.kappa * q.delta.square()
        x = q.kappa * q.b.square() / q.c**3
        return _diagonal_plus_outer(2 * y, torch.full_like(q.k, 2.0), x, g_c, q.r)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where λ is finite, no entry of c is zero and b is not zero."""
        lam = self.point(at)
        _, b, c = lam.chunk(3, -1)
        return lam.isfinite().all(-1) & (c != 0).all(-1) & (b != 0).any(-1)


def _diagonal_plus_outer(
    g: Tensor,  # (*batch, d), one entry at most is not positive
    e: Tensor,  # (*batch, 1)
    x: Tensor,  # (*batch, d)
    q: Tensor,  # (*batch, d)
    r: Tensor,  # (*batch, d), largest where g may not be positive
) -> Tensor:
    """(diag(g) + e xxᵀ)⁻¹ q, also where the entry of g with the largest r is 0 or negative; NaN if singular.

    That entry i is eliminated last: with A = Σ_{j≠i} x_j²/g_j and B = Σ_{j≠i} x_j q_j/g_j

        det = g_i (1 + eA) + e x_i²     y_i = (q_i (1 + eA) - e x_i B)/det
        s = (x_i q_i + g_i B)/det       y_j = (q_j - e x_j s)/g_j
    """
    i = r.argmax(-1, keepdim=True)
    g_i, x_i, q_i = (part.gather(-1, i) for part in (g, x, q))
    last = torch.zeros_like(g).scatter(-1, i, 1.0).bool()
    others = torch.where(last, torch.ones_like(g), g)
    A = torch.where(last, 0.0, x.square() / others).sum(-1, keepdim=True)
    B = torch.where(last, 0.0, x * q / others).sum(-1, keepdim=True)
    det = g_i * (1 + e * A) + e * x_i.square()
    size = (g_i * (1 + e * A)).abs() + e * x_i.square()
    det = torch.where(det.abs() > _SINGULAR * size, det, torch.nan)
    s = (x_i * q_i + g_i * B) / det
    y_i = (q_i * (1 + e * A) - e * x_i * B) / det
    return torch.where(last, y_i, (q - e * x * s) / others)
