"""A non-convex regulariser beside any model: r(θ) = λ Σ_i θ_i²/(1 + θ_i²), read in two ways.

Kumar et al. (2025), appendix H, add r of the *mean* to the objective, L + r(m): the gradient in m
gains r'(m), the curvature nothing.  As part of the model, ℓ + r, it is E_q[r(θ)] that L gains, with
gradient and curvature in m and in the variances (Bonnet, Price).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import AdditiveTractable, Curved, Frame, Raw, Sites
from torchngvi.numerics.gaussian_integrals import Moments, saturating_square
from torchngvi.numerics.versions import settings_of, tensors_of


class Penalty(ABC):
    """The abstract base of the regulariser r(θ) = λ Σ_i θ_i²/(1 + θ_i²): see `MeanPenalty` and `ExpectedPenalty`.

    Args:
        strength: λ, positive and finite.

    Raises:
        InputError: if the strength is not positive and finite.
    """

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = read_number("strength", strength, "multiplies the regulariser", above=0)

    @abstractmethod
    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Return r(θ), (*sample, *batch)."""

    @abstractmethod
    def expected(
        self,
        mean: Tensor,  # (*batch, D)
        variance: Tensor,  # (*batch, D)
    ) -> Moments:
        """Return what each coordinate adds to L, its derivative in m and twice that in the variance, (*batch, D)."""


@final
class MeanPenalty(Penalty):
    """The regulariser of the mean, r(m), as printed in the paper: r' = 2 m/(1 + m²)², and no curvature.

    Use it to reproduce the paper; `ExpectedPenalty` is the one that is part of a model.

    Args:
        strength: λ, positive and finite.

    Raises:
        InputError: if the strength is not positive and finite.

    >>> [round(float(x), 12) for x in MeanPenalty().expected(torch.ones(1), torch.ones(1))]
    [0.5, 0.5, 0.0]
    """

    def energy(self, theta: Tensor) -> Tensor:
        """Refuse to evaluate, since r is no function of θ.

        Raises:
            PairError: always.
        """
        raise PairError(
            "MeanPenalty is a function of q's mean and no part of a log joint. "
            "Use Quadrature() or Autograd(), or ExpectedPenalty for a regulariser of theta."
        )

    def expected(self, mean: Tensor, variance: Tensor) -> Moments:
        """Return r(m), r'(m) and 0."""
        square = mean.square()
        value = self.strength * square / (1 + square)
        return Moments(value, 2 * self.strength * mean / (1 + square).square(), torch.zeros_like(mean))


@final
class ExpectedPenalty(Penalty):
    """The regulariser as part of the model, E_q[r(θ)], in closed form (`gaussian_integrals.saturating_square`).

    Its curvature is negative where |θ| > 1/√3, so that the objective is not convex.

    Args:
        strength: λ, positive and finite.

    Raises:
        InputError: if the strength is not positive and finite.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> [round(float(x), 12) for x in ExpectedPenalty().expected(zero + 1, zero)]
    [0.5, 0.5, -0.5]
    """

    def energy(self, theta: Tensor) -> Tensor:
        """Return λ Σ θ²/(1 + θ²), (*sample, *batch)."""
        square = theta.square()
        return self.strength * (square / (1 + square)).sum(-1)

    def expected(self, mean: Tensor, variance: Tensor) -> Moments:
        """Return E_q[r] and its derivatives in closed form, accurate for every variance."""
        return Moments(*(self.strength * part for part in saturating_square(mean, variance)))


@final
class Regularized(AdditiveTractable):
    """A model whose expectations are known, with a non-convex penalty beside its prior.

    L gains the penalty, and the packet its derivative; as the prior, the penalty is counted once, however many parts
    the data come in.  The objective has several minima in general: the start decides which is found.

    Args:
        model: a dense model such as `GeneralizedLinear` or `SoftmaxRegression`.
        penalty: a `MeanPenalty` or an `ExpectedPenalty`.

    Raises:
        InputError: if the model does not know its expectations, or the penalty is none.

    >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
    >>> model = Regularized(GeneralizedLinear(torch.eye(2), [0.0, 1.0]), ExpectedPenalty(0.1))
    >>> loss = VN(CholeskyGaussian(2)).step(model)
    """

    prior_alone = False

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
        """Return the tensors of the model and of the penalty."""
        return (*self.model.tensors(), *tensors_of(self.penalty))

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the model and of the penalty."""
        return (*self.model.settings(), *settings_of(self.penalty))

    def data_log_likelihood(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Return the log likelihood of the model, (*sample, *batch)."""
        return self.model.data_log_likelihood(theta)

    def log_prior(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Return the log prior of the model minus r(θ), (*sample, *batch).

        Raises:
            PairError: with a `MeanPenalty`, which is no function of θ.
        """
        return self.model.log_prior(theta) - self.penalty.energy(theta)

    def data_energy(self, frame: Frame) -> tuple[Tensor, Raw | Curved | Sites]:
        """Return the expected energy of the model's data, with its derivative."""
        return self.model.data_energy(frame)

    def with_prior(self, frame: Frame, value: Tensor, derivative: Raw | Curved | Sites) -> tuple[Tensor, Raw]:
        """Return value and derivative with the model's prior and the penalty added."""
        value, whole = self.model.with_prior(frame, value, derivative)
        g, H = whole.raw()
        gain, slope, curvature = self.penalty.expected(frame.mean, frame.variance)
        return value + gain.sum(-1), Raw(g + slope, H + torch.diag_embed(curvature))

    def pieces(self) -> Iterator["Regularized"]:
        """Yield the pieces of the model, each with the whole penalty."""
        for piece in self.model.pieces():
            assert isinstance(piece, AdditiveTractable)
            yield Regularized(piece, self.penalty)
