"""Step sizes that the step count sets: constant, convex combinations, and decreasing schedules."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import is_number, read_count, read_number
from torchngvi.errors import InputError
from torchngvi.interfaces import Path, StepSize

# The learning rate as it stands in the param group: constant, or moved by a torch scheduler


@final
class Constant(StepSize):
    """The step size is the learning rate, ρ = lr, with no bound on how far q moves: the update as papers print it.

    Use it to reproduce a paper, or for the one full step that is exact on a conjugate model, ``VN(q, lr=1.0,
    step_size=Constant())``.  The default of a given rate is `KLRadius`, whose steps are the same where they are
    short; without its bound a rate that is too long for the problem makes a run diverge within a few steps.

    Args:
        rate: the learning rate, positive, where the optimizer is given no ``lr``: ``SRVN(q, step_size=Constant(0.1))``
            is ``SRVN(q, lr=0.1, step_size=Constant())``.

    Raises:
        InputError: if the rate is not positive and finite; at construction of an optimizer, if it has an ``lr`` too.

    >>> Constant().propose(None, 0.5, torch.zeros(2), {}).tolist()
    [0.5, 0.5]
    """

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and not (isinstance(rate, int | float) and is_number(rate, above=0)):
            raise InputError(f"rate is a learning rate, positive and finite; got {rate!r}.")
        self.rate = rate

    def __repr__(self) -> str:
        """The call that makes it."""
        return "Constant()" if self.rate is None else f"Constant({self.rate:g})"

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the learning rate as ρ for every member, (*batch,)."""
        return torch.ones_like(like) * lr if isinstance(lr, Tensor) else torch.full_like(like, lr)


# A step that is a convex combination: ρ = lr, held to [0, 1]


@final
class Convex(StepSize):
    """The step size of a convex combination, ρ = lr with 0 ≤ lr ≤ 1.

    The new natural parameters η' = (1 - ρ)η + ρη̂ lie between those of q and the target η̂ of the step.  With a target
    in the cone, and so with every curvature estimate that is positive semi-definite, no step leaves it (Wu and Gardner
    2024, section 3.1).  For a model at temperature γ ≠ 1 the combination needs lr ≤ 1/γ.  Use it for stochastic
    natural-gradient VI as it is analysed; `Constant` takes longer steps too.

    Raises:
        InputError: on use, if lr is a number outside [0, 1]; a tensor outside it makes a step that is not taken.

    >>> Convex().propose(None, 0.5, torch.zeros(2), {}).tolist()
    [0.5, 0.5]
    """

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the learning rate as ρ for every member, (*batch,).

        Raises:
            InputError: if lr is a number outside [0, 1].
        """
        if isinstance(lr, Tensor):
            return torch.ones_like(like) * torch.where((lr >= 0) & (lr <= 1), lr, torch.nan)
        if not 0 <= lr <= 1:
            raise InputError(
                f"a step of natural-gradient VI is a convex combination, with lr in [0, 1]; got {lr:g}. "
                "Lower lr or the schedule's factor; VN takes longer steps."
            )
        return torch.ones_like(like) * lr


# Decreasing steps for stochastic natural gradients, as functions of the step count for torch's ``LambdaLR``
#
#     theorem_schedule    γ_t = 2/(2 + t)     E KL(average, q*) ≤ 4V/(T + 2)      (Wu and Gardner 2024, Theorem 1)
#     harmonic_schedule   γ_t = 1/(1 + t)     η_T is the plain mean of the targets of all steps
#     PowerSchedule       γ_t = (c' + t + 1)^-α       of IFVB and AIFVB
#
# Both begin with γ_0 = 1, which erases q_0: right for conjugate models, whose stochastic gradient does not depend
# on q; for others begin lower, ``LambdaLR(opt, theorem_schedule)`` with ``lr=0.5``.  Theorem 1 is printed with V in the
# place of 4V, which fails at T = 0 already.


def theorem_schedule(
    t: int,  # steps taken
) -> float:
    """The step size 2/(2 + t) of stochastic natural-gradient VI with a weighted average of the iterates.

    Args:
        t: the number of steps taken, from 0.

    Returns:
        The factor of the learning rate at step t (Wu and Gardner 2024, Theorem 1).

    Raises:
        InputError: if the count is negative.

    >>> from torch.optim.lr_scheduler import LambdaLR
    >>> from torchngvi import VN, NaturalGaussian
    >>> opt = VN(NaturalGaussian(2), lr=1.0)
    >>> scheduler = LambdaLR(opt, theorem_schedule)
    >>> opt.param_groups[0]["lr"], theorem_schedule(2)
    (1.0, 0.5)
    """
    return 2 / (2 + _count(t))


def harmonic_schedule(
    t: int,  # steps taken
) -> float:
    """The step size 1/(1 + t), with which the last iterate is the plain mean of the targets of all steps.

    Args:
        t: the number of steps taken, from 0.

    Returns:
        The factor of the learning rate at step t.

    Raises:
        InputError: if the count is negative.

    >>> harmonic_schedule(3)
    0.25
    """
    return 1 / (1 + _count(t))


def _count(t: int) -> int:
    return read_count("t", t, "counts the steps taken", at_least=0)


@dataclass(frozen=True)
class PowerSchedule:
    """The factor (c' + t + 1)^{-α} of the learning rate after t steps.

    With lr = c the steps are α_k = c/(c' + k)^α, of Robbins and Monro's kind.  Use it for IFVB and AIFVB: the
    averages of AIFVB have their rates for α in (½, 1) (Godichon-Baggioni, Nguyen and Tran 2023).

    Args:
        alpha: the power α of the decay, in [0, 1].
        offset: the shift c' of the step count, not negative.

    Raises:
        InputError: if alpha or offset is out of range; on use, if the count of steps is negative.

    >>> from torch.optim.lr_scheduler import LambdaLR
    >>> from torchngvi import VN, NaturalGaussian
    >>> opt = VN(NaturalGaussian(2), lr=8.0)
    >>> scheduler = LambdaLR(opt, PowerSchedule(0.5, 15.0))
    >>> opt.param_groups[0]["lr"]  # 8/√16
    2.0
    """

    alpha: float = 0.75
    offset: float = 100.0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "alpha", read_number("alpha", self.alpha, "is the power of the decay", at_least=0, at_most=1)
        )
        object.__setattr__(self, "offset", read_number("offset", self.offset, "is c' of c/(c' + k)^alpha", at_least=0))

    def __call__(
        self,
        t: int,  # steps taken
    ) -> float:
        """Return the factor of lr after t steps."""
        return (self.offset + _count(t) + 1) ** -self.alpha
