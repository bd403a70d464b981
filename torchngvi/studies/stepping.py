"""The one loop of the studies: step, and look where it is due."""

import time
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple


class Look(NamedTuple):
    """Where a run is looked at."""

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
