"""Symmetric one-dimensional densities φ with mean 0 and variance 1: the noise of a location-scale family.

    z = m + C u,  u_i ~ φ independent:    log q(z) = Σ log φ(u_i) - log|det C|,    ∇_z log q(z) = C⁻ᵀ (log φ)'(u)

k = E u⁴ is 3 for the Gaussian, 4.2 for the logistic, 6 for Laplace, and 3 + 6/(ν - 4) for Student's t.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_number


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
