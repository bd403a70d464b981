"""Gaussians over a flat vector: by the Cholesky factor, by the covariance, mean-field, and by a few factors."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_size, read_sizes, read_tensor, shown
from torchngvi.errors import InputError, PairError
from torchngvi.numerics.linalg import (
    cholesky,
    dual_entries,
    lower_entries,
    lower_triangle,
    symmetric,
    symmetric_matrix,
    tril_half,
)
from torchngvi.posteriors.flat.flat_posterior import (
    FlatPosterior,
    check_shapes,
    check_start,
)
from torchngvi.posteriors.shapes import Shape, check_points, fits, normal, zeros_for


def mean_and_scale(
    dim: int,
    batch_shape: Sequence[int],
    mean: Tensor | float,
    scale: Tensor | float,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    """Write out the mean and the standard deviations of a standard start, each (*batch, d)."""
    dim = read_size("dim", dim, "is the number of coordinates of theta")
    batch_shape = read_sizes(
        "batch_shape", batch_shape, "must be a tuple of integers of at least 1, () for one posterior"
    )
    zero = zeros_for((*batch_shape, dim), mean, scale, dtype, device)
    start = read_tensor("mean", mean, like=zero), read_tensor("scale", scale, like=zero)
    for name, value in zip(("mean", "scale"), start, strict=True):
        if not fits(value, zero.shape):
            raise InputError(f"{name} must be a scalar or {tuple(zero.shape)}; got shape {tuple(value.shape)}.")
    if not bool((start[1] > 0).all()):
        raise InputError(f"scale holds standard deviations and must be positive; got {shown(scale)}.")
    return zero + start[0], zero + start[1]


class Sized(FlatPosterior):
    """A Gaussian that can be made from sizes, as the posteriors that no vector holds are: abstract."""

    @classmethod
    @abstractmethod
    def _of_standard(
        cls,
        mean: Tensor,  # (*batch, d)
        stddev: Tensor,  # (*batch, d)
    ) -> Self:
        """Make N(mean, stddev²)."""

    @classmethod
    def standard(
        cls,
        dim: int,
        batch_shape: Sequence[int] = (),
        *,
        mean: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make N(mean, scale²) from sizes, as the other Gaussian posteriors are made.

        Args:
            dim: d, the number of latent variables.
            batch_shape: the number of independent posteriors, as a shape.
            mean: μ, which broadcasts to (*batch, d).
            scale: a scalar, or standard deviations (*batch, d).
            dtype, device: those of λ; by default those of the start, or torch's defaults.

        Returns:
            A posterior of this class.

        Raises:
            InputError: a dimension below 1.

        >>> from torchngvi.ifvb import FlatCholesky, RankOneGaussian
        >>> FlatCholesky.standard(2, scale=2.0).moments()[1].tolist()
        [[2.0, 0.0], [0.0, 2.0]]
        >>> RankOneGaussian.standard(3, scale=2.0).stddev.round(decimals=5).tolist()
        [2.0, 2.0, 2.0]
        """
        location, spread = mean_and_scale(dim, batch_shape, mean, scale, dtype, device)
        return cls._of_standard(location, spread)


class FlatGaussian(Sized):
    """N(μ, Σ) over some vector of its parameters: abstract, see `FlatCholesky` and `MeanFieldGaussian`."""

    reparametrised = True

    @classmethod
    @abstractmethod
    def _vector_of(
        cls,
        mean: Tensor,  # (*batch, d)
        root: Tensor,  # (*batch, d, d), lower triangular
    ) -> Tensor:
        """Return λ of N(μ, root rootᵀ), or of what the posterior keeps of it."""

    @abstractmethod
    def moments(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return μ (*batch, d) and the lower factor of Σ (*batch, d, d), differentiable in λ."""

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + Tz with Σ = TTᵀ, differentiable in λ."""
        mean, root = self.moments(at)
        return mean + (root @ normal(shape, mean, self.dim, generator)[..., None])[..., 0]

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute -½|u|² - Σ log T_ii - (d/2) log 2π with u = T⁻¹(θ - μ)."""
        check_points(theta, self.dim, self.point(at))
        mean, root = self.moments(at)
        u = torch.linalg.solve_triangular(root, (theta - mean)[..., None], upper=False)[..., 0]
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * u.square().sum(-1) - log_det - 0.5 * self.dim * math.log(2 * math.pi)

    @classmethod
    def _of_standard(cls, mean: Tensor, stddev: Tensor) -> Self:
        new = cls.__new__(cls)
        FlatPosterior.__init__(new, cls._vector_of(mean, stddev.diag_embed()), mean.shape[-1])
        return new

    @property
    def mean(self) -> Tensor:
        """The mean μ of q, (*batch, d)."""
        return self.moments(self.vector)[0]

    @property
    def scale_tril(self) -> Tensor:
        """The lower factor of the covariance Σ, (*batch, d, d)."""
        return self.moments(self.vector)[1]

    @property
    def covariance(self) -> Tensor:
        """The covariance Σ of q, (*batch, d, d)."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def variance(self) -> Tensor:
        """The marginal variances diag Σ, (*batch, d)."""
        return self.scale_tril.square().sum(-1)

    @torch.no_grad()
    def initialize_(
        self,
        mean: Tensor,  # (*batch, d)
        root: Tensor,  # (*batch, d, d), lower triangular
    ) -> Self:
        """Restart in place from N(mean, root rootᵀ), or what the posterior keeps of it, and return it."""
        self.vector.copy_(self._vector_of(mean, root))
        return self

    def kept_covariance(
        self,
        root: Tensor,  # (*batch, d, d)
    ) -> Tensor:
        """Return the factor itself, of which the posterior keeps what it can."""
        return root


@final
class FlatCholesky(FlatGaussian):
    """q = N(μ, TTᵀ) over μ and the lower factor T with a logarithmic diagonal, D = d + d(d+1)/2.

    Every λ is a distribution, so that no step leaves the domain, and the Fisher matrix is known: it is the first choice
    of the Gaussians over a flat vector.

    Args:
        mean: μ at the start, (*batch, d).
        covariance: Σ at the start, (*batch, d, d), symmetric positive definite.

    Raises:
        InputError: a covariance that is not.

    >>> q = FlatCholesky(torch.zeros(1), 4 * torch.eye(1))
    >>> q.vector[1].exp().item()
    2.0
    """

    def __init__(
        self,
        mean: Tensor,  # (*batch, d)
        covariance: Tensor,  # (*batch, d, d)
    ) -> None:
        check_start(type(self).__name__, mean=mean, covariance=covariance)
        check_shapes(type(self).__name__, mean, covariance=(covariance, (*mean.shape, mean.shape[-1])))
        root, ok = cholesky(covariance)
        if not bool(ok.all()):
            raise InputError(f"covariance must be symmetric and positive definite; got {covariance.tolist()}.")
        super().__init__(self._vector_of(mean, root), mean.shape[-1])

    @classmethod
    def _vector_of(cls, mean: Tensor, root: Tensor) -> Tensor:
        root = root.tril(-1) + root.diagonal(dim1=-2, dim2=-1).log().diag_embed()
        return torch.cat([mean, lower_entries(root)], -1)

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take λ apart into μ and T, the diagonal no longer logarithmic."""
        lam = self.point(at)
        root = lower_triangle(lam[..., self.dim :], self.dim)
        return lam[..., : self.dim], root.tril(-1) + root.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    moments = parts

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute T⁻ᵀu for μ and tril(T⁻ᵀu uᵀ) - diag(1/T_ii) for T, times T_ii on the diagonal; u = T⁻¹(θ - μ)."""
        mean, root = self.parts(at)
        u = torch.linalg.solve_triangular(root, (theta - mean)[..., None], upper=False)
        v = torch.linalg.solve_triangular(root.mT, u, upper=True)
        matrix = v @ u.mT
        diagonal = root.diagonal(dim1=-2, dim2=-1)
        on_diagonal = matrix.diagonal(dim1=-2, dim2=-1) * diagonal - 1
        return torch.cat([v[..., 0], lower_entries(matrix.tril(-1) + on_diagonal.diag_embed())], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the natural gradient (Σ g_μ, TΩ), the diagonal of TΩ divided by T_ii (Tan 2021).

        G is the lower triangle of the gradient in T, and Ω = tril½(TᵀG).
        """
        _, root = self.parts(at)
        diagonal = root.diagonal(dim1=-2, dim2=-1)
        G = lower_triangle(gradient[..., self.dim :], self.dim)
        G = G.tril(-1) + (G.diagonal(dim1=-2, dim2=-1) / diagonal).diag_embed()
        natural = root @ tril_half(root.mT @ G)
        natural = natural.tril(-1) + (natural.diagonal(dim1=-2, dim2=-1) / diagonal).diag_embed()
        mean = (root @ (root.mT @ gradient[..., : self.dim, None]))[..., 0]
        return torch.cat([mean, lower_entries(natural)], -1)


def _scores(mean: Tensor, covariance: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """u and ½(uuᵀ - Σ⁻¹)."""
    factor, _ = cholesky(covariance)
    precision = torch.cholesky_inverse(factor)
    u = (precision @ (theta - mean)[..., None])[..., 0]
    return u, 0.5 * (u[..., :, None] * u[..., None, :] - precision)


class CovarianceGaussian(FlatGaussian):
    """The base of q = N(μ, Σ) whose λ holds the entries of Σ (Godichon-Baggioni, Nguyen and Tran 2023, Example 3)."""

    domain = "Sigma is positive definite"

    @abstractmethod
    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take λ apart into μ and Σ."""

    def moments(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return μ and the Cholesky factor of Σ, differentiable in λ."""
        mean, covariance = self.parts(at)
        return mean, cholesky(covariance)[0]

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where Σ is positive definite."""
        return self.point(at).isfinite().all(-1) & cholesky(self.parts(at)[1])[1]


@final
class VecGaussian(CovarianceGaussian):
    """q = N(μ, Σ) over (μ, vec Σ), D = d + d², with a singular Fisher matrix, as in the paper.

    Take it to reproduce the paper; `VechGaussian` or `FlatCholesky` otherwise.  A step is symmetrised, and one that
    leaves the positive definite cone is not taken.

    Args:
        mean: μ at the start, (*batch, d).
        covariance: Σ at the start, (*batch, d, d), symmetric positive definite.

    Raises:
        InputError: a covariance that is not.

    >>> VecGaussian(torch.zeros(3), torch.eye(3)).size
    12
    """

    def __init__(
        self,
        mean: Tensor,  # (*batch, d)
        covariance: Tensor,  # (*batch, d, d)
    ) -> None:
        check_start(type(self).__name__, mean=mean, covariance=covariance)
        check_shapes(type(self).__name__, mean, covariance=(covariance, (*mean.shape, mean.shape[-1])))
        super().__init__(torch.cat([mean, covariance.flatten(-2)], -1), mean.shape[-1])

    @classmethod
    def _vector_of(cls, mean: Tensor, root: Tensor) -> Tensor:
        return torch.cat([mean, (root @ root.mT).flatten(-2)], -1)

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take λ apart into μ and Σ."""
        lam = self.point(at)
        return lam[..., : self.dim], symmetric(lam[..., self.dim :].unflatten(-1, (self.dim, self.dim)))

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (u, vec ½(uuᵀ - Σ⁻¹)) with u = Σ⁻¹(θ - μ)."""
        u, matrix = _scores(*self.parts(at), theta)
        return torch.cat([u, matrix.flatten(-2)], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Refuse, since I_F is singular.

        Raises:
            PairError: always.
        """
        raise PairError(
            "the Fisher matrix of VecGaussian is singular: off-diagonal entries of Sigma count twice. "
            "Use VechGaussian or FlatCholesky."
        )

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Add the change to λ, and symmetrise Σ."""
        mean, covariance = self.parts(at + change)
        return torch.cat([mean, covariance.flatten(-2)], -1)


@final
class VechGaussian(CovarianceGaussian):
    """q = N(μ, Σ) over (μ, vech Σ), D = d + d(d+1)/2, with each entry of Σ once.

    Its Fisher matrix is regular and known.  A step that leaves the positive definite cone is not taken; in
    `FlatCholesky` no step leaves it.

    Args:
        mean: μ at the start, (*batch, d).
        covariance: Σ at the start, (*batch, d, d), symmetric positive definite.

    Raises:
        InputError: a covariance that is not.

    >>> q = VechGaussian(torch.zeros(1), 2 * torch.eye(1))
    >>> q.exact_fisher_solve(torch.tensor([1.0, 1.0])).tolist()  # Fisher: 1/V and 1/(2 V^2)
    [2.0, 8.0]
    """

    def __init__(
        self,
        mean: Tensor,  # (*batch, d)
        covariance: Tensor,  # (*batch, d, d)
    ) -> None:
        check_start(type(self).__name__, mean=mean, covariance=covariance)
        d = mean.shape[-1]
        if covariance.shape != (*mean.shape, d) or not torch.allclose(covariance, covariance.mT):
            raise InputError(f"covariance must be symmetric, of shape (..., {d}, {d}); got {tuple(covariance.shape)}.")
        super().__init__(torch.cat([mean, lower_entries(covariance)], -1), d)

    @classmethod
    def _vector_of(cls, mean: Tensor, root: Tensor) -> Tensor:
        return torch.cat([mean, lower_entries(root @ root.mT)], -1)

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take λ apart into μ and Σ."""
        lam = self.point(at)
        return lam[..., : self.dim], symmetric_matrix(lam[..., self.dim :], self.dim)

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute u = Σ⁻¹(θ - μ), and vech of uuᵀ - Σ⁻¹ with its diagonal halved."""
        u, matrix = _scores(*self.parts(at), theta)
        return torch.cat([u, dual_entries(matrix)], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the natural gradient (Σ g_μ, vech(2 Σ G Σ))."""
        _, covariance = self.parts(at)
        G = symmetric(lower_triangle(gradient[..., self.dim :], self.dim))
        mean = (covariance @ gradient[..., : self.dim, None])[..., 0]
        return torch.cat([mean, lower_entries(2 * covariance @ G @ covariance)], -1)


@final
class MeanFieldGaussian(FlatGaussian):
    """q = N(μ, diag σ²) over λ = (μ, log σ): independent latent variables, with no constraint on λ.

    Args:
        vector: (μ, log σ) at the start, (*batch, 2 d).

    Raises:
        InputError: a start that is not finite, or of odd length.

    >>> q = MeanFieldGaussian(torch.zeros(2))
    >>> q.exact_fisher_solve(torch.tensor([3.0, 4.0])).tolist()
    [3.0, 2.0]
    """

    def __init__(
        self,
        vector: Tensor,  # (*batch, 2 d)
    ) -> None:
        check_start(type(self).__name__, vector=vector)
        if vector.shape[-1] % 2:
            raise InputError(f"MeanFieldGaussian takes (mu, log sigma), an even length; got {vector.shape[-1]}.")
        super().__init__(vector, vector.shape[-1] // 2)

    @classmethod
    def _vector_of(cls, mean: Tensor, root: Tensor) -> Tensor:
        return torch.cat([mean, 0.5 * root.square().sum(-1).log()], -1)  # with the marginal variances

    def moments(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return μ and diag σ, differentiable in λ."""
        mean, log_sd = self.point(at).chunk(2, -1)
        return mean, log_sd.exp().diag_embed()

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + σz, differentiable in λ."""
        mean, log_sd = self.point(at).chunk(2, -1)
        return mean + log_sd.exp() * normal(shape, mean, self.dim, generator)

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute -½|e|² - Σ log σ - (d/2) log 2π with e = (θ - μ)/σ."""
        check_points(theta, self.dim, self.point(at))
        mean, log_sd = self.point(at).chunk(2, -1)
        e = (theta - mean) / log_sd.exp()
        return (-0.5 * e.square() - log_sd - 0.5 * math.log(2 * math.pi)).sum(-1)

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (e/σ, e² - 1) with e = (θ - μ)/σ."""
        mean, log_sd = self.point(at).chunk(2, -1)
        e = (theta - mean) / log_sd.exp()
        return torch.cat([e / log_sd.exp(), e.square() - 1], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the natural gradient (σ² g_μ, ½ g_logσ)."""
        log_sd = self.point(at).chunk(2, -1)[1]
        g_mean, g_log_sd = gradient.chunk(2, -1)
        return torch.cat([(2 * log_sd).exp() * g_mean, 0.5 * g_log_sd], -1)


class FactorGaussian(FlatPosterior):
    """q = N(μ, BBᵀ + diag(c²)) over λ = (μ, vec B, c): abstract, see `LowRankGaussian` and `RankOneGaussian`."""

    domain = "no entry of c is zero"
    reparametrised = True
    _share = 0.1  # of the standard deviations at a standard start, that the factors have

    def _parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """μ, B and c."""
        lam, d = self.point(at), self.dim
        return lam[..., :d], lam[..., d:-d].unflatten(-1, (d, -1)), lam[..., -d:]

    @property
    def mean(self) -> Tensor:
        """The mean μ of q, (*batch, d)."""
        return self.vector[..., : self.dim]

    @property
    def variance(self) -> Tensor:
        """The marginal variances diag Σ, (*batch, d)."""
        _, B, c = self._parts(self.vector)
        return B.square().sum(-1) + c.square()

    @property
    def covariance(self) -> Tensor:
        """The covariance Σ of q, (*batch, d, d)."""
        _, B, c = self._parts(self.vector)
        return B @ B.mT + c.square().diag_embed()

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + B e₁ + c e₂, differentiable in λ."""
        mean, B, c = self._parts(at)
        e, z = normal(shape, mean, B.shape[-1] + self.dim, generator).split([B.shape[-1], self.dim], -1)
        return mean + (B @ e[..., None])[..., 0] + c * z

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where λ is finite and no entry of c is zero."""
        lam = self.point(at)
        return lam.isfinite().all(-1) & (lam[..., -self.dim :] != 0).all(-1)


@final
class LowRankGaussian(FactorGaussian):
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
        mean: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
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
        factors = cls._share / math.sqrt(rank) * spread[..., None] * torch.where(waves < 0, -1.0, 1.0).to(place.dtype)
        return cls(location, factors, math.sqrt(1 - cls._share**2) * spread)

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Take λ apart into μ, B and c."""
        return self._parts(at)

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute log N(θ; μ, Σ), with |Σ| = |I + BᵀC⁻²B| Π c²."""
        check_points(theta, self.dim, self.point(at))
        mean, B, c = self.parts(at)
        x = ((theta - mean) / c).to(c.dtype)
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
        """Compute (u, u(uᵀB) - Σ⁻¹B, c (u² - diag Σ⁻¹)) with u = Σ⁻¹(θ - μ), by Woodbury in O(d K²)."""
        mean, B, c = self.parts(at)
        A = B / c[..., None]
        # Σ⁻¹ = C⁻¹(I - WWᵀ)C⁻¹, W = A L⁻ᵀ
        W = torch.linalg.solve_triangular(self._capacitance(A), A.mT, upper=False).mT
        x = ((theta - mean) / c)[..., None]
        u = ((x - W @ (W.mT @ x))[..., 0]) / c
        for_B = u[..., None] * (u[..., None, :] @ B) - (A - W @ (W.mT @ A)) / c[..., None]
        diagonal = (1 - W.square().sum(-1)) / c.square()
        return torch.cat([u, for_B.flatten(-2), c * (u.square() - diagonal)], -1)


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
class RankOneGaussian(FactorGaussian, Sized):
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
        return cls(mean, cls._share * stddev, math.sqrt(1 - cls._share**2) * stddev)

    def _constants(self, at: Tensor | None) -> tuple[Tensor, _Constants]:
        mean, b, c = self.point(at).chunk(3, -1)
        delta, r = b / c.square(), (b / c).square()
        k = r.sum(-1, keepdim=True)
        return mean, _Constants(b, c, delta, r, k, 1 / (1 + k), k / (1 + k))

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute -½ xᵀΣ⁻¹x - ½ log|Σ| - (d/2) log 2π with x = θ - μ and log|Σ| = Σ log c² + log(1 + k)."""
        check_points(theta, self.dim, self.point(at))
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
        return super().in_domain(at) & (self._parts(at)[1] != 0).any((-2, -1))


def _diagonal_plus_outer(
    g: Tensor,  # (*batch, d), one entry at most is not positive
    e: Tensor,  # (*batch, 1)
    x: Tensor,  # (*batch, d)
    q: Tensor,  # (*batch, d)
    r: Tensor,  # (*batch, d), largest where g may not be positive
    least: float = 1e-10,  # of the terms of a determinant that cancel
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
    det = torch.where(det.abs() > least * size, det, torch.nan)
    s = (x_i * q_i + g_i * B) / det
    y_i = (q_i * (1 + e * A) - e * x_i * B) / det
    return torch.where(last, y_i, (q - e * x * s) / others)
