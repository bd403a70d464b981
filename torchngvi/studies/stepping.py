"""The one loop of the studies: step, and look where it is due; and the optimizers of the papers, without bounds."""

import inspect
import time
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple, TypeVar

from torchngvi import registry
from torchngvi.optim import NaturalGradientVI
from torchngvi.optim.watching import UNWATCHED
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

    Args:
        step: takes the step with this number, from 1.
        count: the number of steps.
        due: numbers of steps after which to look, 0 for the start; without it, every step.

    Returns:
        An iterator over the places that are due.

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


def unwatched(optimizer: Optimizer) -> Optimizer:
    """An optimizer that says nothing of a run that diverges, where a study asks which ones do.

    Args:
        optimizer: of a run with a learning rate.

    Returns:
        The same one.

    >>> from torchngvi import VN, CholeskyGaussian
    >>> unwatched(VN(CholeskyGaussian(1), lr=3.0)).watch.rejections
    inf
    """
    optimizer.watch = UNWATCHED
    return optimizer


def printed(name: str, q: Any, lr: float | None, **settings: Any) -> NaturalGradientVI:
    """The method of that name with its update as the paper prints it: its rate is not bounded, nor is its run watched.

    Args:
        name: a key of `torchngvi.registry.METHODS`.
        q: the posterior that it moves.
        lr: its learning rate; without one it finds its steps by trial.
        settings: further arguments of its class.

    Returns:
        The optimizer.

    >>> from torchngvi import CholeskyGaussian
    >>> printed("srvn", CholeskyGaussian(1), 0.1).step_size
    Constant()
    """
    make = registry.METHODS.get(name)
    if lr is not None and make is not None and "step_size" in inspect.signature(make).parameters:
        settings["step_size"] = Constant()
    return unwatched(registry.method(name, q, lr, **settings))
