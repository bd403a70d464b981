"""What stands in the place of I_F⁻¹ in λ ← λ - α I_F⁻¹∇L: the interchangeable part of an update of λ."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.posteriors.flat import FlatPosterior

State = dict[str, Any]  # tensors and counts, saved with the optimizer


class Preconditioner(ABC):
    """Turns a gradient into the direction of a step."""

    samples: int  # S: Fisher draws it wants an iteration
    remembers: bool  # past scores count, so that a warm-up helps
    natural = True  # the direction estimates I_F⁻¹∇L, so that (direction)ᵀ∇L is a squared length in nats

    @abstractmethod
    def init(self, family: FlatPosterior) -> State:
        """The state before the first score.

        Raises:
            InputError: a family it cannot serve, memory it does not get.
        """

    @abstractmethod
    def absorb(
        self,
        state: State,
        scores: Tensor,  # (S, *batch, D)
        generator: torch.Generator,
    ) -> None:
        """Take in S scores, in place."""

    @abstractmethod
    def direction(
        self,
        state: State,
        gradient: Tensor,  # (*batch, D)
        family: FlatPosterior,
    ) -> Tensor:
        """What the step goes along, downhill after a change of sign; NaN for members without one."""


def finite_rows(
    scores: Tensor,  # (S, *batch, D)
) -> tuple[Tensor, Tensor]:
    """Scores with rows that are not finite set to zero, and which rows are finite (S, *batch)."""
    fine = scores.sum(-1).isfinite()  # of a sum: one pass, and no NaN or infinity cancels in it
    return torch.where(fine[..., None], scores, 0.0), fine


def check_count(name: str, value: int) -> int:
    """A number of draws or vectors, at least 1."""
    if not (isinstance(value, int) and value >= 1):
        raise InputError(f"{name} is a number of draws, at least 1; got {value}.")
    return value
