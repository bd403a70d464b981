"""Location-scale families: base densities, patterns of the scale matrix, and two gradient estimators in each."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import InputError
from torchngvi.numerics.linalg import eigh

# Symmetric one-dimensional densities φ with mean 0 and variance 1: the noise of a location-scale family
#
#     z = m + C u,  u_i ~ φ independent:    log q(z) = Σ log φ(u_i) - log|det C|,    ∇_z log q(z) = C⁻ᵀ (log φ)'(u)
#
# k = E u⁴ is 3 for the Gaussian, 4.2 for the logistic, 6 for Laplace, and 3 + 6/(ν - 4) for Student's t.


class Base(ABC):
    """The abstract base of the noise densities φ: see `Gaussian`, `Laplace`, `Logistic` and `StudentT`.

    >>> base: Base = Laplace()
    >>> base.kurtosis, base.sample(torch.zeros(3)).shape
    (6.0, torch.Size([3]))
    """

    @property
    @abstractmethod
    def kurtosis(self) -> float:
        """The fourth moment k = E u⁴."""

    @property
    @abstractmethod
    def entropy(self) -> float:
        """The entropy -E log φ(u), in nats."""

    @abstractmethod
    def sample(
        self,
        like: Tensor,  # the shape, dtype and device of the draws
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return draws u ~ φ of the shape of ``like``."""

    @abstractmethod
    def log_prob(self, u: Tensor) -> Tensor:
        """Return log φ(u), elementwise."""

    @abstractmethod
    def score(self, u: Tensor) -> Tensor:
        """Return the score (log φ)'(u), elementwise."""


@final
@dataclass(frozen=True)
class Gaussian(Base):
    """The standard normal density, for which z = m + C u is Gaussian.

    `loss` is that loss.  `mse_loss` is another one, of the scale √½: under it the prior counts
    1/(2 scale²) times as much as it says, and a scale that is to be learned stays where it began.

    >>> Gaussian().score(torch.tensor(2.0)).item()
    -2.0
    """

    kurtosis = 3.0
    entropy = 0.5 * math.log(2 * math.pi * math.e)

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return independent standard normal draws."""
        return torch.empty_like(like).normal_(generator=generator)

    def log_prob(self, u: Tensor) -> Tensor:
        """Return -½u² - ½ log 2π."""
        return -0.5 * u.square() - 0.5 * math.log(2 * math.pi)

    def score(self, u: Tensor) -> Tensor:
        """Return the score -u."""
        return -u


@final
@dataclass(frozen=True)
class Laplace(Base):
    """The Laplace density exp(-√2|u|)/√2, with a kink at 0 and heavier tails than the Gaussian.

    >>> round(Laplace().log_prob(torch.tensor(0.0)).item(), 4)
    -0.3466
    """

    kurtosis = 6.0
    entropy = 1 + 0.5 * math.log(2)

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return exponential draws with a random sign."""
        size = torch.empty_like(like).exponential_(generator=generator) / math.sqrt(2)
        sign = torch.empty_like(like).bernoulli_(0.5, generator=generator)
        return (2 * sign - 1) * size

    def log_prob(self, u: Tensor) -> Tensor:
        """Return -√2|u| - ½ log 2."""
        return -math.sqrt(2) * u.abs() - 0.5 * math.log(2)

    def score(self, u: Tensor) -> Tensor:
        """Return the score -√2 sign(u)."""
        return -math.sqrt(2) * u.sign()


_LOGISTIC = math.pi / math.sqrt(3)  # standard deviation of the logistic distribution


@final
@dataclass(frozen=True)
class Logistic(Base):
    """The logistic density, scaled to variance 1.

    >>> round(Logistic().score(torch.tensor(100.0)).item(), 4)  # -π/√3
    -1.8138
    """

    kurtosis = 4.2
    entropy = 2 - math.log(_LOGISTIC)

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the differences of two Gumbel variables, which are logits of uniform ones, scaled to variance 1."""
        first, second = (torch.empty_like(like).exponential_(generator=generator) for _ in range(2))
        return (first.log() - second.log()) / _LOGISTIC

    def log_prob(self, u: Tensor) -> Tensor:
        """Return log s - s|u| - 2 log(1 + exp(-s|u|)), s = π/√3."""
        size = _LOGISTIC * u.abs()
        return math.log(_LOGISTIC) - size - 2 * torch.log1p(torch.exp(-size))

    def score(self, u: Tensor) -> Tensor:
        """Return the score -s tanh(su/2)."""
        return -_LOGISTIC * torch.tanh(0.5 * _LOGISTIC * u)


@final
@dataclass(frozen=True)
class StudentT(Base):
    """Student's t density, scaled to variance 1: heavy tails with a finite fourth moment.

        -log p = ½(ν + 1) log(1 + x²) + log σ√ν B(½, ν/2),        x = (η - y)/(σ√ν)

    Its expectation and derivatives are uniformly accurate in the standard deviation of η
    (`gaussian_integrals.log1p_square`).  It is not log-concave: rows whose residual exceeds σ√ν have a
    negative curvature, H need not be positive definite, and the objective may have several minima.
    Steps found by trial cope; a constant lr may leave the cone.

    Args:
        dof: the degrees of freedom ν, above 4, so that k is finite.

    Raises:
        InputError: if there are 4 degrees of freedom or fewer.

    >>> StudentT(10.0).kurtosis
    4.0
    """

    dof: float

    def __post_init__(self) -> None:
        read_number("dof", self.dof, "is the degrees of freedom, of which a fourth moment needs more than 4,", above=4)

    @property
    def kurtosis(self) -> float:
        """The fourth moment k = 3 + 6/(ν - 4)."""
        return 3 + 6 / (self.dof - 4)

    @property
    def entropy(self) -> float:
        """The entropy (ν + 1)/2 (ψ((ν + 1)/2) - ψ(ν/2)) + ½ log(ν - 2) + log B(ν/2, ½), in nats."""
        half = 0.5 * self.dof
        upper, lower = torch.digamma(torch.tensor([half + 0.5, half], dtype=torch.float64)).tolist()
        return (half + 0.5) * (upper - lower) - self._constant()

    def _constant(self) -> float:
        """log of the density at 0."""
        half = 0.5 * self.dof
        return math.lgamma(half + 0.5) - math.lgamma(half) - 0.5 * math.log(math.pi * (self.dof - 2))

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return z/√(g/(ν - 2)), with z normal and g chi-squared."""
        z = torch.empty_like(like).normal_(generator=generator)
        concentration = torch.full_like(like, 0.5 * self.dof)
        chi2 = 2 * torch._standard_gamma(concentration, generator=generator)
        return z * ((self.dof - 2) / chi2).sqrt()

    def log_prob(self, u: Tensor) -> Tensor:
        """Return -(ν + 1)/2 log(1 + u²/(ν - 2)) with its constant."""
        return self._constant() - 0.5 * (self.dof + 1) * torch.log1p(u.square() / (self.dof - 2))

    def score(self, u: Tensor) -> Tensor:
        """Return the score -(ν + 1)u/(ν - 2 + u²)."""
        return -(self.dof + 1) * u / (self.dof - 2 + u.square())


# Patterns of the scale matrix C in z = m + C u, and the two gradient estimators in each
#
#     closed entropy          g_m = a    g_C = Π[a uᵀ] - ∇ log|det C|        a = ∇ℓ(m + C u)
#     sticking the landing    g_m = r    g_C = Π[r uᵀ]                       r = a + C⁻ᵀ(log φ)'(u)
#
# (Kim, Ma and Gardner 2024, Definitions 4 and 5, with the sign of descent: E g = ∇F for F = E ℓ - log|det C|.)  Π keeps
# the free entries of the pattern.  All parametrisations are linear in C: with c = exp(s), F'' vanishes as c does.


class Gradient(NamedTuple):
    """The gradient estimates in m and C, one for each draw."""

    mean: Tensor  # (*sample, D)
    scale: Tensor  # (*sample, D, D)

    def square(self) -> Tensor:
        """The squared length |g_m|² + ‖g_C‖²_F."""
        return self.mean.square().sum(-1) + self.scale.square().sum((-2, -1))


class Scale(ABC):
    """The abstract base of the patterns of C, which is written out as (D, D).

    See `Triangular`, `MeanField`, `SquareRoot` and `Unrestricted`.

    >>> scale: Scale = MeanField()
    >>> scale.kept(torch.ones(2, 2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    @abstractmethod
    def kept(self, matrix: Tensor) -> Tensor:
        """Return Π[A], the gradient with respect to the free entries, (*sample, D, D)."""

    @abstractmethod
    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return ∇ log|det C| with respect to the free entries, (D, D)."""

    @abstractmethod
    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return the nearest C of the domain, (D, D).

        Raises:
            InputError: if the floor is not positive, or the pattern has no convex domain.
        """

    @abstractmethod
    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v (D,) and W (D, D) in E[|r|² + ‖Π[r uᵀ]‖²] = Σ v_i h_i² + Σ W_ij G_ij² for r = Gu + h."""

    def closed_entropy(
        self,
        C: Tensor,  # (D, D)
        gradient: Tensor,  # a, (*sample, D)
        u: Tensor,  # (*sample, D)
    ) -> Gradient:
        """The estimator with the entropy in closed form (CFE).

        Args:
            C: the scale matrix, (D, D).
            gradient: a = ∇ℓ at the draws, (*sample, D).
            u: the noise of the draws, (*sample, D).

        Returns:
            One gradient for each draw.
        """
        return Gradient(gradient, self.kept(_outer(gradient, u)) - self.entropy_gradient(C))

    def landing(
        self,
        C: Tensor,  # (D, D)
        gradient: Tensor,  # a, (*sample, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Gradient:
        """The estimator that sticks the landing (STL): zero at each draw where q is the target.

        Args:
            C: the scale matrix, (D, D).
            gradient: a = ∇ℓ at the draws, (*sample, D).
            u: the noise of the draws, (*sample, D).
            base: the density φ of the noise.

        Returns:
            One gradient for each draw.
        """
        residual = gradient + self.pulled_score(C, u, base)
        return Gradient(residual, self.kept(_outer(residual, u)))

    def control_variate(
        self,
        C: Tensor,  # (D, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Gradient:
        """The closed entropy minus sticking the landing, of mean 0, which does not depend on the target.

        Args:
            C: the scale matrix, (D, D).
            u: the noise of the draws, (*sample, D).
            base: the density φ of the noise.

        Returns:
            One difference for each draw.
        """
        score = self.pulled_score(C, u, base)
        return Gradient(-score, -self.kept(_outer(score, u)) - self.entropy_gradient(C))

    def pulled_score(
        self,
        C: Tensor,  # (D, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Tensor:
        """The score of q at the draws, ∇_z log q = C⁻ᵀ(log φ)'(u).

        Args:
            C: the scale matrix, (D, D).
            u: the noise of the draws, (*sample, D).
            base: the density φ of the noise.

        Returns:
            One score for each draw, (*sample, D).
        """
        return torch.linalg.solve(C.mT, base.score(u)[..., None])[..., 0]


@final
class Triangular(Scale):
    """Lower triangular matrices with C_ii ≥ c: full rank, with a projection of D operations.

    >>> Triangular().projected(torch.tensor([[0.1, 0.0], [3.0, 2.0]]), 0.5).tolist()
    [[0.5, 0.0], [3.0, 2.0]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the lower triangle."""
        return matrix.tril()

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return the diagonal matrix of 1/C_ii."""
        return torch.diag_embed(1 / C.diagonal())

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return C with the diagonal max(C_ii, c).

        Raises:
            InputError: if the floor is not positive.
        """
        return C + torch.diag_embed(C.diagonal().clamp_min(_positive(floor)) - C.diagonal())

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = i + 1 and W_ij = i + 1 + (k - 1)[j ≤ i]."""
        v = torch.arange(2.0, dim + 2, dtype=torch.float64)
        return v, v[:, None] + (kurtosis - 1) * torch.ones(dim, dim, dtype=torch.float64).tril()

    def pulled_score(self, C: Tensor, u: Tensor, base: Base) -> Tensor:
        """Return the score by one back-substitution, of D² operations a draw."""
        columns = base.score(u).reshape(-1, len(C)).mT
        return torch.linalg.solve_triangular(C.mT, columns, upper=True).mT.reshape(u.shape)


@final
class MeanField(Scale):
    """Diagonal matrices with C_ii ≥ c: independent coordinates.

    >>> MeanField().projected(torch.tensor([[2.0, 0.0], [0.0, 0.1]]), 0.5).tolist()
    [[2.0, 0.0], [0.0, 0.5]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the diagonal, as a matrix."""
        return torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return the diagonal matrix of 1/C_ii."""
        return torch.diag_embed(1 / C.diagonal())

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return the diagonal matrix of max(C_ii, c).

        Raises:
            InputError: if the floor is not positive.
        """
        return torch.diag_embed(C.diagonal().clamp_min(_positive(floor)))

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = 2 and W_ij = 2 + (k - 1)[j = i]."""
        v = torch.full((dim,), 2.0, dtype=torch.float64)
        return v, 2 + (kurtosis - 1) * torch.eye(dim, dtype=torch.float64)


@final
class SquareRoot(Scale):
    """Symmetric positive definite matrices with eigenvalues of at least c: a projection of D³ operations (Domke 2020).

    >>> SquareRoot().kept(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the symmetric part (A + Aᵀ)/2."""
        return 0.5 * (matrix + matrix.mT)

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return the inverse C⁻¹."""
        return torch.linalg.solve(C, torch.eye(len(C), dtype=C.dtype, device=C.device))

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return C with its eigenvalues clipped at c.

        Raises:
            InputError: if the floor is not positive.
        """
        values, vectors, ok = eigh(C)
        projected = (vectors * values.clamp_min(_positive(floor))) @ vectors.mT
        return torch.where(ok[..., None, None], projected, torch.nan)

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Refuse, since the moment is not of this form: its cross terms mix G_ij and G_ji.

        Raises:
            InputError: always.
        """
        raise InputError(
            "the second moment of a symmetrised gradient is no weighted sum of squares. Use Unrestricted, above it."
        )


@final
class Unrestricted(Scale):
    """Matrices with every entry free, for which the bounds of full rank are derived; not an algorithm.

    >>> v, W = Unrestricted().second_moment_weights(2, 3.0)
    >>> v.tolist(), W.tolist()  # D + 1 and D + k
    ([3.0, 3.0], [[5.0, 5.0], [5.0, 5.0]])
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the matrix as it is."""
        return matrix

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return the inverse transpose C⁻ᵀ."""
        return torch.linalg.solve(C.mT, torch.eye(len(C), dtype=C.dtype, device=C.device))

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Refuse, since there is no convex domain to project on.

        Raises:
            InputError: always.
        """
        raise InputError("an unrestricted C has no convex domain to project on. Use Triangular or SquareRoot.")

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = D + 1 and W_ij = D + k."""
        v = torch.full((dim,), dim + 1.0, dtype=torch.float64)
        return v, torch.full((dim, dim), dim + kurtosis, dtype=torch.float64)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]


def _positive(floor: float) -> float:
    if not floor > 0:
        raise InputError(f"floor is the smallest scale of the domain, positive; got {floor:g}. Use 1/√L.")
    return floor
