"""The posteriors that parts are tried on, and exact quadratic problems for them."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import Cost, Expectation, Move, Posterior, Raw
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.structures import Pattern, block_diagonal
from torchngvi.testing.claims import DTYPE, WrittenOut, definite, mask, matvec, normal, root_in

DIM = 3
# of (dim, batch_shape), with the keywords mean and scale
PosteriorFactory = Callable[..., Posterior]


def over(kind: PosteriorFactory, structure: Callable[[int], Pattern]) -> PosteriorFactory:
    """Make a factory of posteriors over a structure of as many coordinates as are asked for.

    >>> over(CholeskyGaussian, lambda dim: block_diagonal([1, dim - 1]))(3).structure.widest
    2
    """
    return lambda dim, batch_shape=(), **given: kind(dim, batch_shape, structure=structure(dim), **given)


def _blocks(dim: int) -> Pattern:
    return block_diagonal([1, dim - 1])


POSTERIORS: dict[str, PosteriorFactory] = {
    "CholeskyGaussian": CholeskyGaussian,
    "DiagonalGaussian": DiagonalGaussian,
    "NaturalGaussian": NaturalGaussian,
    "PrecisionCholeskyGaussian": PrecisionCholeskyGaussian,
    "CholeskyGaussian over two blocks": over(CholeskyGaussian, _blocks),
    "NaturalGaussian over two blocks": over(NaturalGaussian, _blocks),
    "PrecisionCholeskyGaussian over two blocks": over(PrecisionCholeskyGaussian, _blocks),
    "NaturalGaussian over an arrow": over(NaturalGaussian, WrittenOut),
    "PrecisionCholeskyGaussian over an arrow": over(PrecisionCholeskyGaussian, WrittenOut),
}


class Normal(NamedTuple):
    """A mean and a covariance that are written out.

    >>> Normal(torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3)).member((0,)).mean.shape
    torch.Size([3])
    """

    mean: Tensor  # (*batch, D)
    covariance: Tensor  # (*batch, D, D)

    def float(self) -> "Normal":
        """Return the moments in single precision."""
        return Normal(self.mean.float(), self.covariance.float())

    def member(self, index: tuple[int, ...]) -> "Normal":
        """Return the moments of one member of the batch."""
        return Normal(self.mean[index], self.covariance[index])


class Quadratic(NamedTuple):
    """A log joint that is quadratic, ℓ(θ) = ½(θ - μ)ᵀA(θ - μ), one a member, so that everything is known of it.

    Attributes:
        mu: μ, (*batch, D).
        A: (*batch, D, D), symmetric.
        temperature: γ.

    >>> problem = Quadratic(torch.zeros(1), torch.eye(1), 1.0)
    >>> problem.loss(Normal(torch.ones(1), torch.eye(1))).item()  # ½ 1² + ½ 1
    1.0
    """

    mu: Tensor  # (*batch, D)
    A: Tensor  # (*batch, D, D)
    temperature: float

    def packet(self, q: Posterior) -> Expectation:
        """Compute E_q[ℓ] and its derivative exactly, as an estimator would return them."""
        mean, V = moments(q)
        g = matvec(self.A, mean - self.mu)
        value = 0.5 * (g * (mean - self.mu)).sum(-1) + 0.5 * (self.A * V).sum((-2, -1))
        return Expectation(value, Raw(g, self.A.clone()), self.temperature, True, Cost(1, 1))

    def loss(self, at: Normal) -> Tensor:
        """Compute L = E_q[ℓ] - γ entropy without its constant, (*batch,)."""
        shift = at.mean - self.mu
        energy = 0.5 * (shift * matvec(self.A, shift)).sum(-1) + 0.5 * (self.A * at.covariance).sum((-2, -1))
        return energy - 0.5 * self.temperature * torch.logdet(at.covariance)

    def local(self, q: Posterior) -> tuple[Tensor, Tensor]:
        """Compute a and P of ∇L from their definition, with all matrices written out."""
        C = q.frame().dense()
        eye = torch.eye(q.dim, dtype=C.dtype)
        a = matvec(C.mT, matvec(self.A, q.frame().mean - self.mu))
        return a, (C.mT @ self.A @ C) * mask(q.structure).to(C.dtype) - self.temperature * eye

    def float(self) -> "Quadratic":
        """Return the problem in single precision."""
        return Quadratic(self.mu.float(), self.A.float(), self.temperature)

    def member(self, index: tuple[int, ...]) -> "Quadratic":
        """Return the problem of one member of the batch."""
        return Quadratic(self.mu[index], self.A[index], self.temperature)


def quadratic(batch: tuple[int, ...], temperature: float, seed: int, dim: int = DIM) -> Quadratic:
    """Make a convex problem whose optimum is not where the posteriors of `start` are.

    >>> quadratic((2,), 1.0, seed=0).mu.shape == (2, DIM)
    True
    """
    return Quadratic(normal(*batch, dim, seed=seed), definite(dim, batch, seed + 1), temperature)


def start(factory: PosteriorFactory, batch: tuple[int, ...], seed: int, dim: int = DIM) -> Normal:
    """Draw moments away from zero and the identity that the posteriors of a factory have.

    >>> from torchngvi import DiagonalGaussian
    >>> start(DiagonalGaussian, (2,), seed=0).covariance.shape == (2, DIM, DIM)
    True
    """
    T = root_in(factory(dim, batch).structure, batch, seed)  # a root of the precision, which every structure has
    return Normal(normal(*batch, dim, seed=seed + 1), torch.linalg.inv(T @ T.mT))


def made(factory: PosteriorFactory, at: Normal) -> Posterior:
    """Make the posterior with these moments.

    >>> from torchngvi import CholeskyGaussian
    >>> made(CholeskyGaussian, Normal(torch.zeros(1), 4 * torch.eye(1))).scale_tril.item()
    2.0
    """
    scale = torch.linalg.cholesky(at.covariance.to(DTYPE)).to(at.mean.dtype)
    return factory(at.mean.shape[-1], at.mean.shape[:-1], mean=at.mean, scale=scale)


def moments(q: Posterior) -> Normal:
    """Read mean and covariance from the frame of a posterior.

    >>> from torchngvi import CholeskyGaussian
    >>> moments(CholeskyGaussian(1, scale=2.0)).covariance.item()
    4.0
    """
    frame = q.frame()
    C = frame.dense()
    return Normal(frame.mean.detach().clone(), C @ C.mT)


def after(q: Posterior, move: Move) -> tuple[Normal, Tensor]:
    """Compute the moments after a move, in a copy of the posterior.

    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.interfaces import Congruence
    >>> at, ok = after(CholeskyGaussian(1), Congruence(torch.tensor([[4.0]]), torch.zeros(1)))
    >>> at.covariance.item(), ok.item()
    (0.25, True)
    """
    new, ok = q.moved(move)
    twin = copy.deepcopy(q)
    twin.assign(new, torch.ones(q.batch_shape, dtype=torch.bool))
    return moments(twin), ok
