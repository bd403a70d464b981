"""Decreasing steps for stochastic natural gradients, as functions of the step count for torch's ``LambdaLR``.

    theorem_schedule    γ_t = 2/(2 + t)     E KL(average, q*) ≤ 4V/(T + 2)      (Wu and Gardner 2024, Theorem 1)
    harmonic_schedule   γ_t = 1/(1 + t)     η_T is the plain mean of the targets of all steps

Both begin with γ_0 = 1, which erases q_0: right for conjugate models, whose stochastic gradient does not depend
on q; for others begin lower, ``LambdaLR(opt, theorem_schedule)`` with ``lr=0.5``.  Theorem 1 is printed with V in the
place of 4V, which fails at T = 0 already.
"""

from torchngvi.errors import InputError


def theorem_schedule(
    t: int,  # steps taken
) -> float:
    """2/(2 + t).

    Raises:
        InputError: a negative count.

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
    """1/(1 + t).

    Raises:
        InputError: a negative count.

    >>> harmonic_schedule(3)
    0.25
    """
    return 1 / (1 + _count(t))


def _count(t: int) -> int:
    if t < 0:
        raise InputError(f"t counts the steps taken, from 0; got {t}.")
    return t
