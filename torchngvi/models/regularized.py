"""A non-convex regulariser beside any model: r(θ) = λ Σ_i θ_i²/(1 + θ_i²), read in two ways.

Kumar et al. (2025), appendix H, add r of the *mean* to the objective, L + r(m): the gradient in m
gains r'(m), the curvature nothing.  As part of the model, ℓ + r, it is E_q[r(θ)] that L gains, with
gradient and curvature in m and in the variances (Bonnet, Price).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import AdditiveTractable, Frame, Raw, Sites
from torchngvi.numerics.gaussian_integrals import Moments, saturating_square
from torchngvi.numerics.versions import settings_of, tensors_of


class Penalty(ABC):
    """λ Σ_i θ_i²/(1 + θ_i²): abstract, see `MeanPenalty` and `ExpectedPenalty`.

    Args:
        strength: λ.

    Raises:
        InputError: a strength that is not positive and finite.
    """

    def __init__(self, strength: float = 1.0) -> None:
        if not (strength > 0 and math.isfinite(strength)):
            raise InputError(f"strength multiplies the regulariser, positive and finite; got {strength}.")
        self.strength = float(strength)

    @abstractmethod
    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """r(θ), (*sample, *batch)."""

    @abstractmethod
    def expected(
        self,
        mean: Tensor,  # (*batch, D)
        variance: Tensor,  # (*batch, D)
    ) -> Moments:
        """What L gains a coordinate, its derivative in m and twice that in the variance."""


@final
class MeanPenalty(Penalty):
    """r(m), as printed: r' = 2 m/(1 + m²)², no curvature.

    >>> [round(float(x), 12) for x in MeanPenalty().expected(torch.ones(1), torch.ones(1))]
    [0.5, 0.5, 0.0]
    """

    def energy(self, theta: Tensor) -> Tensor:
        """There is none: r is no function of θ.

        Raises:
            PairError: always.
        """
        raise PairError(
            "MeanPenalty is a function of q's mean and no part of a log joint. "
            "Use Quadrature() or Autograd(), or ExpectedPenalty for a regulariser of theta."
        )

    def expected(self, mean: Tensor, variance: Tensor) -> Moments:
        """r(m), r'(m), 0."""
        square = mean.square()
        value = self.strength * square / (1 + square)
        return Moments(value, 2 * self.strength * mean / (1 + square).square(), torch.zeros_like(mean))


@final
class ExpectedPenalty(Penalty):
    """E_q[r(θ)], by `gaussian_integrals.saturating_square`; its curvature is negative where |θ| > 1/√3.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> [round(float(x), 12) for x in ExpectedPenalty().expected(zero + 1, zero)]
    [0.5, 0.5, -0.5]
    """

    def energy(self, theta: Tensor) -> Tensor:
        """λ Σ θ²/(1 + θ²)."""
        square = theta.square()
        return self.strength * (square / (1 + square)).sum(-1)

    def expected(self, mean: Tensor, variance: Tensor) -> Moments:
        """Closed form, accurate for every variance."""
        return Moments(*(self.strength * part for part in saturating_square(mean, variance)))


@final
class Regularized(AdditiveTractable):
    """A model whose expectations are known, with a penalty: L gains it, the packet its derivative.

    As the prior the penalty is counted once, however many parts the data come in.

    The objective has several minima in general: the start decides which is found.

    Args:
        model: such as `GeneralizedLinear` or `SoftmaxRegression`, dense.
        penalty: `MeanPenalty` or `ExpectedPenalty`.

    Raises:
        InputError: a model without known expectations, something that is no penalty.

    >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
    >>> model = Regularized(GeneralizedLinear(torch.eye(2), [0.0, 1.0]), ExpectedPenalty(0.1))
    >>> loss = VN(CholeskyGaussian(2)).step(model)
    """

    def __init__(self, model: AdditiveTractable, penalty: Penalty) -> None:
        if not isinstance(model, AdditiveTractable):
            raise InputError(
                "Regularized wraps a model that knows the expectations of its data; "
                f"got {type(model).__name__}. "
                "Add the regulariser to the log joint yourself."
            )
        if not isinstance(penalty, Penalty):
            raise InputError(
                f"penalty must be MeanPenalty(strength) or ExpectedPenalty(strength); got {type(penalty).__name__}."
            )
        self.model, self.penalty, self.prior = model, penalty, model.prior
        self.temperature, self.comparable, self.coding = model.temperature, model.comparable, model.coding

    def tensors(self) -> tuple[Tensor, ...]:
        """The model's and those of the penalty."""
        return (*self.model.tensors(), *tensors_of(self.penalty))

    def settings(self) -> tuple[object, ...]:
        """The model's and those of the penalty."""
        return (*self.model.settings(), *settings_of(self.penalty))

    def data_log_likelihood(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """The model's, (*sample, *batch)."""
        return self.model.data_log_likelihood(theta)

    def log_prior(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """The model's minus r(θ), (*sample, *batch).

        Raises:
            PairError: of `MeanPenalty`, which is no function of θ.
        """
        return self.model.log_prior(theta) - self.penalty.energy(theta)

    def data_energy(self, frame: Frame) -> tuple[Tensor, Raw | Sites]:
        """The model's."""
        return self.model.data_energy(frame)

    def with_prior(self, frame: Frame, value: Tensor, derivative: Raw | Sites) -> tuple[Tensor, Raw]:
        """The model's prior and the penalty."""
        value, whole = self.model.with_prior(frame, value, derivative)
        g, H = whole.raw()
        gain, slope, curvature = self.penalty.expected(frame.mean, frame.variance)
        return value + gain.sum(-1), Raw(g + slope, H + torch.diag_embed(curvature))

    def pieces(self) -> Iterator["Regularized"]:
        """The model's, each with the whole penalty."""
        for piece in self.model.pieces():
            assert isinstance(piece, AdditiveTractable)
            yield Regularized(piece, self.penalty)
