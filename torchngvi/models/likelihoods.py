"""Likelihoods of one linear predictor: -log p(y | η), and its expectation under η ~ N(e, v).

Each expectation comes with its exact derivatives, α = ∂F/∂e and β = 2 ∂F/∂v, so that tests of
decrease see one consistent objective.
"""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.gaussian_integrals import Moments, expectation, softplus


class Likelihood(ABC):
    """-log p(y | η), elementwise."""

    discrete: bool  # the outcomes are classes, so that accuracy makes sense

    @abstractmethod
    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """-log p(y | η), of the broadcast shape of η and y."""

    @abstractmethod
    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """F = E[-log p(y | η)] under N(mean, variance), ∂F/∂e and 2 ∂F/∂v."""

    @abstractmethod
    def checked(self, y: Tensor) -> Tensor:
        """Targets in this likelihood's coding.

        Raises:
            InputError: values it cannot produce.
        """


def _signs(y: Tensor) -> Tensor:
    """Two classes coded {0, 1}, {-1, 1} or two other numbers, smaller first, as -1 and +1."""
    values = torch.unique(y)
    if len(values) == 1:
        raise InputError(
            f"a Bernoulli family needs two classes in y; every one of the {y.numel()} targets is {float(values[0]):g}. "
            "Check the target column, or that the split has both classes."
        )
    if len(values) > 2:
        raise InputError(
            f"a Bernoulli family needs two classes in y; got {len(values)} different values. "
            "Choose two of them, or another family."
        )
    return torch.where(y == values[1], 1.0, -1.0).to(y.dtype)


@final
class BernoulliLogit(Likelihood):
    """p(y = ±1 | η) = 1/(1 + exp(-yη)); F = E[softplus(η)] - (1 + y)/2 e."""

    discrete = True

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """softplus(-yη)."""
        return torch.nn.functional.softplus(-y * eta, threshold=40)

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Kumar et al. (2025), Eq 18 with the sign of y corrected."""
        # softplus(-yη), not softplus(η) - η: no cancellation for well classified rows
        value, slope, curvature = softplus(-y * mean, variance)
        return Moments(value, -y * slope, curvature)

    def checked(self, y: Tensor) -> Tensor:
        """±1."""
        return _signs(y)


@final
class BernoulliProbit(Likelihood):
    """p(y = ±1 | η) = Φ(yη), by quadrature of -log Φ."""

    discrete = True

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """-log Φ(yη)."""
        return -torch.special.log_ndtr(y * eta)

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """With r = φ/Φ: (-log Φ)' = -r, (-log Φ)'' = r (r + x)."""
        value, slope, curvature = expectation(_negative_log_ndtr, y * mean, variance)
        return Moments(value, y * slope, curvature)

    def checked(self, y: Tensor) -> Tensor:
        """±1."""
        return _signs(y)


def _negative_log_ndtr(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-log Φ(x) and two derivatives, without cancellation far to the left."""
    ratio = math.sqrt(2 / math.pi) / torch.special.erfcx(x * -math.sqrt(0.5))
    inverse2 = x.clamp_max(-1.0).pow(-2)
    # r (r + x) = 1 - x⁻² + 6 x⁻⁴ - 50 x⁻⁶ + ..
    tail = 1 - inverse2 * (1 - inverse2 * (6 - inverse2 * (50 - 518 * inverse2)))
    return -torch.special.log_ndtr(x), -ratio, torch.where(x < -50, tail, ratio * (ratio + x))


@final
class PoissonLog(Likelihood):
    """y ~ Poisson(exp η): F = exp(e + v/2) - y e + log y!."""

    discrete = False

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """exp η - yη + log y!."""
        return torch.exp(eta) - y * eta + torch.lgamma(y + 1)

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Log-normal mean."""
        rate = torch.exp(mean + 0.5 * variance)
        return Moments(rate - y * mean + torch.lgamma(y + 1), rate - y, rate)

    def checked(self, y: Tensor) -> Tensor:
        """Counts."""
        bad = (y < 0) | (y != y.round())
        if bool(bad.any()):
            raise InputError(
                f"the Poisson family needs counts 0, 1, 2, ..; got {int(bad.sum())} other values, "
                f"the first {float(y[bad][0]):g}. "
                "Use family='gaussian' for real-valued targets."
            )
        return y


@final
class GaussianNoise(Likelihood):
    """y ~ N(η, noise²): F = ((y - e)² + v)/(2 noise²) + log(noise √(2π)).

    Args:
        noise: standard deviation, in the units of y.

    Raises:
        InputError: a noise that is not positive and finite.
    """

    discrete = False

    def __init__(self, noise: float = 1.0) -> None:
        if not (noise > 0 and math.isfinite(noise)):
            raise InputError(f"noise is a standard deviation, positive and finite; got {noise}.")
        self.noise = float(noise)

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """(y - η)²/(2 noise²) + log(noise √(2π))."""
        return 0.5 * ((y - eta) / self.noise).square() + math.log(self.noise * math.sqrt(2 * math.pi))

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Quadratic."""
        precision = self.noise**-2
        value = self.energy(mean, y) + 0.5 * precision * variance
        return Moments(value, precision * (mean - y), torch.full_like(value, precision))

    def checked(self, y: Tensor) -> Tensor:
        """Any finite number."""
        return y


FAMILIES: dict[str, type[Likelihood]] = {
    "bernoulli_logit": BernoulliLogit,
    "bernoulli_probit": BernoulliProbit,
    "poisson_log": PoissonLog,
    "gaussian": GaussianNoise,
}
