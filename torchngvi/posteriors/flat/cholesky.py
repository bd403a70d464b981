"""A Gaussian over μ and the Cholesky factor of Σ with the logarithm of its diagonal: no constraint.

Σ = TTᵀ, λ = (μ, vech T with log T_ii), u = T⁻¹(θ - μ):

    score:  T⁻ᵀu for μ;  tril(T⁻ᵀu uᵀ) - diag(1/T_ii) for T, times T_ii on the diagonal

The exact natural gradient costs two triangular products (Tan 2021): with G the lower triangle of the
gradient in T and Ω = tril(TᵀG), its diagonal halved, it is TΩ for T and Σg_μ for μ.
"""

import math
from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.numerics.linalg import cholesky, tril_half
from torchngvi.posteriors.flat.drawing import normal
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.flat.flat_posterior import check_shapes, check_start, lower_entries, lower_triangle
from torchngvi.posteriors.shapes import Shape


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
