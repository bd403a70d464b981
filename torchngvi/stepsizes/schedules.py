"""Decreasing steps for stochastic natural gradients, as functions of the step count for torch's ``LambdaLR``.

    theorem_schedule    γ_t = 2/(2 + t)     E KL(average, q*) ≤ 4V/(T + 2)      (Wu and Gardner 2024, Theorem 1)
    harmonic_schedule   γ_t = 1/(1 + t)     η_T is the plain mean of the targets of all steps
    PowerSchedule       γ_t = (c' + t + 1)^-α       of IFVB and AIFVB

Both begin with γ_0 = 1, which erases q_0: right for conjugate models, whose stochastic gradient does not depend
on q; for others begin lower, ``LambdaLR(opt, theorem_schedule)`` with ``lr=0.5``.  Theorem 1 is printed with V in the
place of 4V, which fails at T = 0 already.
"""

from dataclasses import dataclass

from torchngvi.arguments import read_count, read_number


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

    With lr = c the steps are α_k = c/(c' + k)^α, of Robbins and Monro's kind.  One wants it for IFVB and AIFVB: the
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
