"""A Gaussian q beside the optimum, in coordinates of unit Fisher metric, and what stochastic steps end in there.

    u = (x, Y/√2)        m = m* + C* x        V = C* exp(Y) C*ᵀ        L(u) - L* ≈ ½ uᵀJu

The natural gradient in these coordinates is, at u = 0 and up to first order about it, the plain one, Ju.  J is the
identity for a conjugate target, from any q; what it is else is the local relative smoothness and strong convexity of L
with respect to the convex function A* of the expectation parameters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Estimator, Target
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_STEP = 1e-4  # of central differences, in standard deviations


def flattened(a: Tensor, P: Tensor) -> Tensor:
    """The pair (a, P) as vectors whose squared length is the natural norm |a|² + ½‖P‖².

    >>> flattened(torch.tensor([1.0]), torch.tensor([[2.0]]))
    tensor([1.0000, 1.4142])
    """
    rows, columns = torch.tril_indices(P.shape[-1], P.shape[-1])
    scale = _weights(P.shape[-1], P)
    return torch.cat([a, P[..., rows, columns] * scale], -1)


def _weights(dim: int, like: Tensor) -> Tensor:
    """√½ for the entries of the diagonal, 1 for those below it, which count twice."""
    rows, columns = torch.tril_indices(dim, dim)
    return torch.ones(len(rows), dtype=like.dtype).where(rows != columns, torch.tensor(0.5, dtype=like.dtype).sqrt())


def unflattened(u: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `flattened`."""
    rows, columns = torch.tril_indices(dim, dim)
    scale = _weights(dim, u)
    Y = u.new_zeros(*u.shape[:-1], dim, dim)
    Y[..., rows, columns] = u[..., dim:] / scale
    return u[..., :dim], Y + Y.tril(-1).mT


def moved(star: CholeskyGaussian, u: Tensor) -> CholeskyGaussian:
    """The Gaussians with the coordinates u about ``star``, as a batch."""
    x, Y = unflattened(u, star.dim)
    root = star.scale_tril @ torch.linalg.cholesky(torch.matrix_exp(Y))
    return CholeskyGaussian(star.dim, u.shape[:1], mean=star.mean + x @ star.scale_tril.mT, scale=root, dtype=u.dtype)


@torch.no_grad()
def hessian(star: CholeskyGaussian, target: Target) -> Tensor:
    """The matrix J, by central differences of the exact gradient."""
    count = star.dim + star.dim * (star.dim + 1) // 2
    axes = _STEP * torch.eye(count, dtype=star.dtype)
    q = moved(star, torch.cat([axes, -axes]))
    a, P = q.local(Quadrature()(q, target))
    turn = torch.linalg.solve_triangular(q.scale_tril, star.scale_tril.expand_as(q.scale_tril), upper=False)
    gradient = flattened((a[:, None] @ turn)[:, 0], turn.mT @ P @ turn)  # in the fixed frame of the optimum
    J = (gradient[:count] - gradient[count:]) / (2 * _STEP)
    return 0.5 * (J + J.mT)


@torch.no_grad()
def noise(star: Gaussian, target: Target, estimator: Estimator, calls: int) -> Tensor:
    """The covariance of one stochastic natural gradient at the optimum."""
    vectors = torch.cat([flattened(*star.local(estimator(star, target))) for _ in range(calls)])
    return torch.cov(vectors.mT)


class Ends(NamedTuple):
    """Eigenvalues λ of J, and the variance n of the noise along each: what stochastic steps end in.

    >>> ends = Ends(torch.ones(2), torch.ones(2))  # conjugate, V∞ = 2
    >>> round(float(ends.decreasing(2.0)), 4), round(float(ends.constant(0.1)), 4)
    (1.3333, 0.0526)
    """

    eigenvalues: Tensor
    noises: Tensor

    @classmethod
    def of(cls, J: Tensor, covariance: Tensor) -> "Ends":
        """The eigenvalues of J, and the noise in its eigenbasis."""
        eigenvalues, axes = torch.linalg.eigh(J)
        return cls(eigenvalues, (axes.mT @ covariance @ axes).diagonal())

    def decreasing(self, factor: float) -> Tensor:
        """The limit of T E[gap] under γ_t = c/(t + t₀): ½ Σ λ c² n/(2cλ - 1), infinite unless all 2cλ > 1."""
        rate = 2 * factor * self.eigenvalues - 1
        limit = 0.5 * (self.eigenvalues * factor**2 * self.noises / rate).sum()
        return torch.where((rate > 0).all(), limit, torch.inf)

    def constant(self, gamma: float) -> Tensor:
        """The mean gap at which constant steps stay, to first order in the noise: ½ Σ γn/(2 - γλ)."""
        return 0.5 * (gamma * self.noises / (2 - gamma * self.eigenvalues)).sum()
