"""Gaussians over the mean and the entries of the covariance.

With u = Σ⁻¹(θ - μ) the score is (u, ½(uuᵀ - Σ⁻¹)).  The paper (Godichon-Baggioni, Nguyen and Tran 2023,
Example 3) takes all d² entries of Σ: off-diagonals count twice, and I_F is *singular*, of rank
d + d(d+1)/2, so that only H₀ and the Z terms keep the recursion invertible.  vech Σ has each entry once and

    I_F⁻¹ g = (Σ g_μ, vech(2 Σ G Σ)),        G the symmetric matrix with ⟨G, dΣ⟩ = ⟨g, d vech Σ⟩
"""

import math
from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.flat.drawing import normal
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.flat.flat_posterior import check_shapes, check_start, lower_entries, lower_triangle, symmetric
from torchngvi.posteriors.shapes import Shape


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
