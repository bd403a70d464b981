"""Gaussians over a flat vector: by the Cholesky factor, by the covariance, and mean-field."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_device, read_dtype, read_size, read_sizes, read_tensor, shown
from torchngvi.errors import InputError, PairError
from torchngvi.numerics.linalg import cholesky, tril_half
from torchngvi.posteriors.flat.flat_posterior import (
    FlatPosterior,
    check_shapes,
    check_start,
    lower_entries,
    lower_triangle,
    normal,
    symmetric,
)
from torchngvi.posteriors.shapes import Shape

# Gaussians over a flat vector: what a host needs to take one for a Gaussian, and a standard start
#
# A host such as a Gaussian process of GPyTorch or a guide of Pyro reads the mean and a lower factor of Σ,
# differentiable in λ, and starts q at a mean and a scale.


def mean_and_scale(
    dim: int,
    batch_shape: Sequence[int],
    mean: Tensor | float,
    scale: Tensor | float,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    """Write out the mean and the standard deviations of a standard start, each (*batch, d).

    >>> [x.tolist() for x in mean_and_scale(2, (), 0.0, 3.0, None, None)]
    [[0.0, 0.0], [3.0, 3.0]]
    """
    dim = read_size("dim", dim, "is the number of coordinates of theta")
    batch_shape = read_sizes(
        "batch_shape", batch_shape, "must be a tuple of integers of at least 1, () for one posterior"
    )
    given = [x for x in (mean, scale) if isinstance(x, Tensor)]
    like = given[0] if given else torch.empty(0)
    dtype = read_dtype("dtype", like.dtype if dtype is None else dtype)
    zero = torch.zeros(*batch_shape, dim, dtype=dtype, device=read_device("device", device) or like.device)
    start = read_tensor("mean", mean, like=zero), read_tensor("scale", scale, like=zero)
    for name, value in zip(("mean", "scale"), start, strict=True):
        sizes = zip(value.shape[::-1], zero.shape[::-1], strict=False)
        if value.ndim > zero.ndim or any(n not in (1, m) for n, m in sizes):
            raise InputError(f"{name} must be a scalar or {tuple(zero.shape)}; got shape {tuple(value.shape)}.")
    if not bool((start[1] > 0).all()):
        raise InputError(f"scale holds standard deviations and must be positive; got {shown(scale)}.")
    return zero + start[0], zero + start[1]


class Sized(FlatPosterior):
    """A Gaussian that can be made from sizes, as the posteriors that no vector holds are: abstract.

    >>> issubclass(FlatGaussian, Sized)
    True
    """

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
        mean: Tensor | float = 0.0,  # broadcasts to (*batch, d)
        scale: Tensor | float = 1.0,  # scalar, or standard deviations (*batch, d)
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
    """N(μ, Σ) over some vector of its parameters: abstract, see `FlatCholesky` and `MeanFieldGaussian`.

    >>> from torchngvi.posteriors.flat import MeanFieldGaussian
    >>> MeanFieldGaussian.standard(2, scale=3.0).covariance.round().tolist()
    [[9.0, 0.0], [0.0, 9.0]]
    """

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


# A Gaussian over μ and the Cholesky factor of Σ with the logarithm of its diagonal: no constraint
#
# Σ = TTᵀ, λ = (μ, vech T with log T_ii), u = T⁻¹(θ - μ):
#
#     score:  T⁻ᵀu for μ;  tril(T⁻ᵀu uᵀ) - diag(1/T_ii) for T, times T_ii on the diagonal
#
# The exact natural gradient costs two triangular products (Tan 2021): with G the lower triangle of the
# gradient in T and Ω = tril(TᵀG), its diagonal halved, it is TΩ for T and Σg_μ for μ.


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

    reparametrised = True

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

    def moments(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return μ and T, differentiable in λ."""
        return self.parts(at)

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take λ apart into μ and T, the diagonal no longer logarithmic."""
        lam = self.point(at)
        root = lower_triangle(lam[..., self.dim :], self.dim)
        return lam[..., : self.dim], root.tril(-1) + root.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + Tz without a gradient."""
        return self.rsample(shape, generator, self.point(at).detach())

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + Tz, differentiable in λ."""
        mean, root = self.parts(at)
        return mean + (root @ normal(shape, mean, self.dim, generator)[..., None])[..., 0]

    def _whitened(self, theta: Tensor, mean: Tensor, root: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(root, (theta - mean)[..., None], upper=False)

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute -½|u|² - Σ log T_ii - (d/2) log 2π with u = T⁻¹(θ - μ)."""
        mean, root = self.parts(at)
        u = self._whitened(theta, mean, root)
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * u.square().sum((-2, -1)) - log_det - 0.5 * self.dim * math.log(2 * math.pi)

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute T⁻ᵀu for μ and tril(T⁻ᵀu uᵀ) - diag(1/T_ii) for T, times T_ii on the diagonal; u = T⁻¹(θ - μ)."""
        mean, root = self.parts(at)
        u = self._whitened(theta, mean, root)
        v = torch.linalg.solve_triangular(root.mT, u, upper=True)
        matrix = v @ u.mT
        diagonal = root.diagonal(dim1=-2, dim2=-1)
        on_diagonal = matrix.diagonal(dim1=-2, dim2=-1) * diagonal - 1
        return torch.cat([v[..., 0], lower_entries(matrix.tril(-1) + on_diagonal.diag_embed())], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the natural gradient (Σ g_μ, TΩ), the diagonal of TΩ divided by T_ii."""
        _, root = self.parts(at)
        diagonal = root.diagonal(dim1=-2, dim2=-1)
        G = lower_triangle(gradient[..., self.dim :], self.dim)
        G = G.tril(-1) + (G.diagonal(dim1=-2, dim2=-1) / diagonal).diag_embed()
        natural = root @ tril_half(root.mT @ G)
        natural = natural.tril(-1) + (natural.diagonal(dim1=-2, dim2=-1) / diagonal).diag_embed()
        mean = (root @ (root.mT @ gradient[..., : self.dim, None]))[..., 0]
        return torch.cat([mean, lower_entries(natural)], -1)


# Gaussians over the mean and the entries of the covariance
#
# With u = Σ⁻¹(θ - μ) the score is (u, ½(uuᵀ - Σ⁻¹)).  The paper (Godichon-Baggioni, Nguyen and Tran 2023,
# Example 3) takes all d² entries of Σ: off-diagonals count twice, and I_F is *singular*, of rank
# d + d(d+1)/2, so that only H₀ and the Z terms keep the recursion invertible.  vech Σ has each entry once and
#
#     I_F⁻¹ g = (Σ g_μ, vech(2 Σ G Σ)),        G the symmetric matrix with ⟨G, dΣ⟩ = ⟨g, d vech Σ⟩


def _scores(mean: Tensor, covariance: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """u and ½(uuᵀ - Σ⁻¹)."""
    factor, _ = cholesky(covariance)
    precision = torch.cholesky_inverse(factor)
    u = (precision @ (theta - mean)[..., None])[..., 0]
    return u, 0.5 * (u[..., :, None] * u[..., None, :] - precision)


class CovarianceGaussian(FlatGaussian):
    """The abstract base of q = N(μ, Σ) whose λ holds the entries of Σ: only how Σ lies in λ is left to say."""

    domain = "Sigma is positive definite"
    reparametrised = True

    @abstractmethod
    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take λ apart into μ and Σ."""

    def moments(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return μ and the Cholesky factor of Σ, differentiable in λ."""
        mean, covariance = self.parts(at)
        return mean, cholesky(covariance)[0]

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + chol(Σ) z without a gradient."""
        return self.rsample(shape, generator, self.point(at).detach())

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + chol(Σ) z, differentiable in λ."""
        mean, factor = self.moments(at)
        return mean + (factor @ normal(shape, mean, mean.shape[-1], generator)[..., None])[..., 0]

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the Gaussian log density log N(θ; μ, Σ)."""
        mean, factor = self.moments(at)
        z = torch.linalg.solve_triangular(factor, (theta - mean)[..., None], upper=False)[..., 0]
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * z.square().sum(-1) - log_det - 0.5 * mean.shape[-1] * math.log(2 * math.pi)

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
        lower = lower_triangle(lam[..., self.dim :], self.dim)
        return lam[..., : self.dim], lower + lower.tril(-1).mT

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute u = Σ⁻¹(θ - μ), and vech of uuᵀ - Σ⁻¹ with its diagonal halved."""
        u, matrix = _scores(*self.parts(at), theta)
        both = 2 * matrix - matrix.diagonal(dim1=-2, dim2=-1).diag_embed()
        return torch.cat([u, lower_entries(both)], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the natural gradient (Σ g_μ, vech(2 Σ G Σ))."""
        _, covariance = self.parts(at)
        G = symmetric(lower_triangle(gradient[..., self.dim :], self.dim))
        mean = (covariance @ gradient[..., : self.dim, None])[..., 0]
        return torch.cat([mean, lower_entries(2 * covariance @ G @ covariance)], -1)


# A mean-field Gaussian over λ = (μ, log σ)
#
# With e = (θ - μ)/σ the score is (e/σ, e² - 1) and I_F = blockdiag(σ⁻², 2I): known, nothing to estimate.


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

    reparametrised = True

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

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + σz without a gradient."""
        return self.rsample(shape, generator, self.point(at).detach())

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + σz, differentiable in λ."""
        mean, log_sd = self.point(at).chunk(2, -1)
        return mean + log_sd.exp() * normal(shape, mean, self.dim, generator)

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute -½|e|² - Σ log σ - (d/2) log 2π with e = (θ - μ)/σ."""
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
