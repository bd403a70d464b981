"""The loop of a comparison: step, and look where it is due; and the optimizers as papers print them, without bounds."""

import inspect
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from torchngvi import registry
from torchngvi.interfaces import Expectation, LogTangent, Move, Path, Posterior, Root, Rule, Tangent
from torchngvi.optim import NaturalGradientVI
from torchngvi.optim.evaluating import UNWATCHED
from torchngvi.stepsizes import Constant

Optimizer = TypeVar("Optimizer", bound=NaturalGradientVI)


class Look(NamedTuple):
    """A place of a run at which it is looked at."""

    iteration: int
    seconds: float  # CPU time of the steps alone, without what is done between two of them
    value: Any  # what the step returned; None before the first


def steps(
    step: Callable[[int], Any],  # of the number of the step, from 1
    count: int,
    due: Container[int] | None = None,  # numbers of steps, 0 for the start; without: every step
) -> Iterator[Look]:
    """Step ``count`` times, and hand out a `Look` after each step that is due; who breaks the loop ends the run.

    >>> [(look.iteration, look.value) for look in steps(lambda number: number**2, 4, {0, 2, 4})]
    [(0, None), (2, 4), (4, 16)]
    """
    seconds = 0.0
    if due is not None and 0 in due:
        yield Look(0, seconds, None)
    for iteration in range(1, count + 1):
        begin = time.process_time()
        value = step(iteration)
        seconds += time.process_time() - begin
        if due is None or iteration in due:
            yield Look(iteration, seconds, value)


def unguarded(optimizer: Optimizer) -> Optimizer:
    """An optimizer that takes every step as papers print it, and says nothing of a run that diverges.

    >>> from torchngvi import VN, CholeskyGaussian
    >>> unguarded(VN(CholeskyGaussian(1), lr=3.0)).watch.rejections
    inf
    """
    optimizer.watch = UNWATCHED
    if optimizer.momentum is None and not optimizer.step_size.needs_trial:
        optimizer.rule = Turned(optimizer.rule)
    return optimizer


class Turned(Rule):
    """A rule along a straight line of mean and root C, with the columns of C' turned so that its diagonal is positive.

    Papers leave the sign of the diagonal free: V' = C'C'ᵀ is the same for either.  The library does not take a step
    that turns one; a reproduction of a paper does.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> from torchngvi.rules import NaturalGradient
    >>> q = CholeskyGaussian(1)
    >>> opt = NaturalGradientVI(q, Turned(NaturalGradient()), lr=1.0, step_size=Constant(), estimator=Hessian(2))
    >>> _ = opt.step(lambda theta: -2 * theta.square().sum(-1))  # C' = 1 - ½ · 3
    >>> q.scale_tril.item(), opt.rejections
    (0.5, 0)
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.emits, self.natural, self.full_algebra = rule.emits, rule.natural, rule.full_algebra

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path of the rule, whose moves name the new root itself where q holds one of the covariance."""
        path = self.rule(q, e)

        def at(rho: Tensor) -> Move:
            move = path.at(rho)
            if not isinstance(move, Tangent) or isinstance(move, LogTangent) or Root not in q.takes:
                return move
            here, change = q.coordinates, move.change
            return Root(here.vector + change.vector, here.matrix + change.matrix)

        return replace(path, at=at)


def printed(name: str, q: Any, lr: float | None, **settings: Any) -> NaturalGradientVI:
    """The method of that name with its update as the paper prints it.

    >>> from torchngvi import CholeskyGaussian
    >>> printed("srvn", CholeskyGaussian(1), 0.1).step_size
    Constant()
    """
    make = registry.METHODS.get(name)
    if lr is not None and make is not None and "step_size" in inspect.signature(make).parameters:
        settings["step_size"] = Constant()
    return unguarded(registry.method(name, q, lr, **settings))
