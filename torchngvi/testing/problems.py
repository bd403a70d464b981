"""The posteriors that parts are tried on, and exact quadratic problems for them."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import Cost, Expectation, Move, Posterior, Raw
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.structures import Pattern, block_diagonal
from torchngvi.testing.claims import DTYPE, matvec, normal
from torchngvi.testing.matrices import WrittenOut, definite, mask, root_in

DIM = 3
# of (dim, batch_shape), with the keywords mean and scale
PosteriorFactory = Callable[..., Posterior]


def _over(kind: PosteriorFactory, structure: Callable[[int], Pattern]) -> PosteriorFactory:
    """The family over a structure of as many coordinates as are asked for."""
    return lambda dim, batch_shape=(), **given: kind(dim, batch_shape, structure=structure(dim), **given)


def _blocks(dim: int) -> Pattern:
    return block_diagonal([1, dim - 1])


POSTERIORS: dict[str, PosteriorFactory] = {
    "CholeskyGaussian": CholeskyGaussian,
    "DiagonalGaussian": DiagonalGaussian,
    "NaturalGaussian": NaturalGaussian,
    "PrecisionCholeskyGaussian": PrecisionCholeskyGaussian,
    "CholeskyGaussian over two blocks": _over(CholeskyGaussian, _blocks),
    "NaturalGaussian over two blocks": _over(NaturalGaussian, _blocks),
    "PrecisionCholeskyGaussian over two blocks": _over(PrecisionCholeskyGaussian, _blocks),
    "NaturalGaussian over an arrow": _over(NaturalGaussian, WrittenOut),
    "PrecisionCholeskyGaussian over an arrow": _over(PrecisionCholeskyGaussian, WrittenOut),
}


class Normal(NamedTuple):
    """Mean and covariance, written out."""

    mean: Tensor  # (*batch, D)
    covariance: Tensor  # (*batch, D, D)

    def float(self) -> "Normal":
        """In single precision."""
        return Normal(self.mean.float(), self.covariance.float())

    def member(self, index: tuple[int, ...]) -> "Normal":
        """One of the batch."""
        return Normal(self.mean[index], self.covariance[index])


class Quadratic(NamedTuple):
    """ℓ(θ) = ½(θ - μ)ᵀA(θ - μ), one a member."""

    mu: Tensor  # (*batch, D)
    A: Tensor  # (*batch, D, D)
    temperature: float

    def packet(self, q: Posterior) -> Expectation:
        """E_q[ℓ] and its derivative, exact."""
        mean, V = moments(q)
        g = matvec(self.A, mean - self.mu)
        value = 0.5 * (g * (mean - self.mu)).sum(-1) + 0.5 * (self.A * V).sum((-2, -1))
        return Expectation(value, Raw(g, self.A.clone()), self.temperature, True, Cost(1, 1))

    def loss(self, at: Normal) -> Tensor:
        """L = E_q[ℓ] - γ entropy without its constant, (*batch,)."""
        shift = at.mean - self.mu
        energy = 0.5 * (shift * matvec(self.A, shift)).sum(-1) + 0.5 * (self.A * at.covariance).sum((-2, -1))
        return energy - 0.5 * self.temperature * torch.logdet(at.covariance)

    def local(self, q: Posterior) -> tuple[Tensor, Tensor]:
        """a and P of ∇L, written out from their definition."""
        C = q.frame().dense()
        eye = torch.eye(q.dim, dtype=C.dtype)
        a = matvec(C.mT, matvec(self.A, q.frame().mean - self.mu))
        return a, (C.mT @ self.A @ C) * mask(q.structure).to(C.dtype) - self.temperature * eye

    def float(self) -> "Quadratic":
        """In single precision."""
        return Quadratic(self.mu.float(), self.A.float(), self.temperature)

    def member(self, index: tuple[int, ...]) -> "Quadratic":
        """One of the batch."""
        return Quadratic(self.mu[index], self.A[index], self.temperature)


def quadratic(batch: tuple[int, ...], temperature: float, seed: int, dim: int = DIM) -> Quadratic:
    """A convex problem whose optimum is elsewhere."""
    return Quadratic(normal(*batch, dim, seed=seed), definite(dim, batch, seed + 1), temperature)


def start(factory: PosteriorFactory, batch: tuple[int, ...], seed: int, dim: int = DIM) -> Normal:
    """Moments away from zero and the identity that the family of the factory has."""
    T = root_in(factory(dim, batch).structure, batch, seed)  # a root of the precision, which every structure has
    return Normal(normal(*batch, dim, seed=seed + 1), torch.linalg.inv(T @ T.mT))


def made(factory: PosteriorFactory, at: Normal) -> Posterior:
    """The posterior with these moments."""
    scale = torch.linalg.cholesky(at.covariance.to(DTYPE)).to(at.mean.dtype)
    return factory(at.mean.shape[-1], at.mean.shape[:-1], mean=at.mean, scale=scale)


def moments(q: Posterior) -> Normal:
    """Mean and covariance from the frame."""
    frame = q.frame()
    C = frame.dense()
    return Normal(frame.mean.detach().clone(), C @ C.mT)


def after(q: Posterior, move: Move) -> tuple[Normal, Tensor]:
    """The moments after a move, and where it stays in the cone; q is left as it is."""
    new, ok = q.moved(move)
    twin = copy.deepcopy(q)
    twin.assign(new, torch.ones(q.batch_shape, dtype=torch.bool))
    return moments(twin), ok
