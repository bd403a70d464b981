"""The radius of a step by short trials: for a training whose default radius may be too long."""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import NamedTuple

from torch import Tensor

from torchngvi.arguments import is_number, read_callable, read_list, read_number, shown
from torchngvi.errors import InputError
from torchngvi.networks.attached import radius_of


class ChosenRadius(NamedTuple):
    """What :func:`choose_radius` found.

    Attributes:
        radius: for the whole training, in nats a datum.
        factor: of the default radius.
        tried: the negative log likelihood of validation data by factor, of the short trainings.
        steps: the number of optimizer steps that all of them took.
    """

    radius: float
    factor: float
    tried: dict[float, float]
    steps: int

    def __repr__(self) -> str:
        """Say what was chosen, from what, and at what cost."""
        tried = ", ".join(f"{factor:g}: {nll:.4f}" for factor, nll in self.tried.items())
        return f"ChosenRadius(radius={self.radius:.4g}, factor={self.factor:g} of {{{tried}}}, steps={self.steps:,})"


def choose_radius(
    train: Callable[[int, float], float],
    steps: int,
    factors: Sequence[float] = (1.0, 0.3, 0.1),
    share: float = 0.25,
) -> ChosenRadius:
    """Choose the radius of a training by short trainings with some radii, judged on validation data.

    One wants it where a better fit is worth three quarters of a training more: the default radius of :func:`attach` is
    too long for some data, and nothing in a single run tells for which.  A radius is c/√S for S steps; c is chosen with
    share·S steps and kept for the whole training.

    Args:
        train: of a number of steps and a radius, makes the network and its posterior anew, trains it with
            ``attach(optimizer, q, steps=steps, radius=radius)`` under a whole schedule of that many steps, and returns
            the negative log likelihood of validation data in nats a label, as ``calibrate(q, loader).nll``.
        steps: S, of the training that is planned.
        factors: of the default radius, each tried once; of equal ones the first is chosen.
        share: of the steps that a trial takes.

    Returns:
        The radius for the whole training, with what was tried.

    Raises:
        InputError: for arguments that cannot be used, or if no trial ended with a finite number.

    >>> choose_radius(lambda steps, radius: (math.log(radius) + 7) ** 2, steps=10_000)
    ChosenRadius(radius=0.0004, factor=1 of {1: 0.0171, 0.3: 1.7819, 0.1: 5.9218}, steps=7,500)
    """
    if not callable(train) or isinstance(train, type):
        raise InputError(
            "choose_radius takes a function train(steps, radius) that returns the negative log likelihood of "
            f"validation data; got a {type(train).__name__}."
        )
    read_callable("train", train, "is a function train(steps, radius)", arguments="steps, radius")
    default = radius_of(steps, None)
    what = "are of the default radius, one at least, larger than 0"
    factors = read_list("factors", factors, what)
    if not factors or not all(is_number(factor, above=0) for factor in factors):
        raise InputError(f"factors {what}; got {shown(factors)}.")
    share = read_number("share", share, "is the share of the steps that a trial takes", above=0, at_most=1)
    short = max(1, round(share * steps))
    tried = {float(factor): _nll(train(short, factor * radius_of(short, None))) for factor in factors}
    finite = {factor: nll for factor, nll in tried.items() if math.isfinite(nll)}
    if not finite:
        raise InputError(
            f"None of the {len(tried)} trainings of choose_radius returned a finite negative log likelihood; look at "
            "the loss, the data and what train returns."
        )
    factor = min(finite, key=lambda each: finite[each])
    return ChosenRadius(factor * default, factor, tried, short * len(tried))


def _nll(given: object) -> float:
    """What a training returned, as a number."""
    if not isinstance(given, Real) and not (isinstance(given, Tensor) and given.numel() == 1):
        raise InputError(
            "train(steps, radius) of choose_radius returns the negative log likelihood of validation data, one number; "
            f"got a {type(given).__name__}."
        )
    return float(given)
