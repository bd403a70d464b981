"""What an examination may ask of a log joint, and what it has asked."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchngvi.models.guarded import VALUE, Guarded

_QUICK = 0.05  # seconds of the processor below which what was asked first was quick
_WAITED = 0.5  # and of the clock


class Allowance:
    """A budget from now on.

    Args:
        target: counts what is asked of it.
        gradients: at most.
        cost: of gradients, and of values at 0.4 of one, at most.
        over: whether there is no time left; asked before each call.
        quick: the cost where the log joint is found to be quick.

    >>> from torchngvi.models import LogJoint
    >>> allowed = Allowance(Guarded(LogJoint(lambda theta: -theta.square().sum(-1))), 1000, 600.0)
    >>> allowed.left, allowed.affords(1500), allowed.affords(1501)
    (600, True, False)
    """

    def __init__(
        self,
        target: Guarded,
        gradients: int,
        cost: float = math.inf,
        over: Callable[[], bool] = lambda: False,
        quick: float = 0.0,
    ) -> None:
        self.target, self.gradients, self.cost, self.over, self.quick = target, gradients, cost, over, quick
        self._before = target.gradients, target.values

    @contextmanager
    def widened_if_quick(self) -> Iterator[None]:
        """Let more be spent if what is done inside takes no time to speak of.

        The processor's is that of this thread: a machine that is busy with other things makes no difference. Of several
        processes the leader's counts, since all have to ask for the same.
        """
        clock, busy = time.perf_counter(), time.thread_time()
        yield
        quick = time.thread_time() - busy < _QUICK and time.perf_counter() - clock < _WAITED
        if self.target.processes is not None:
            quick = self.target.processes.one(quick)
        if quick:
            self.cost = max(self.cost, self.quick)

    @property
    def spent(self) -> tuple[int, int]:
        """Gradients and values since the beginning."""
        return self.target.gradients - self._before[0], self.target.values - self._before[1]

    @property
    def left(self) -> int:
        """Gradients that may still be asked for; none where the time is over."""
        gradients, values = self.spent
        left = min(self.gradients - gradients, self.cost - gradients - VALUE * values)
        return 0 if self.over() else max(int(left), 0)

    @property
    def values_left(self) -> float:
        """Values without a gradient that may still be asked for; none where the time is over."""
        gradients, values = self.spent
        return 0.0 if self.over() else (self.cost - gradients) / VALUE - values

    def affords(self, values: int) -> bool:
        """Whether so many more values may be asked for."""
        return values <= self.values_left

    def __str__(self) -> str:
        """The budget, as a clause."""
        return "no time left" if self.over() else f"a budget of {int(min(self.gradients, self.cost))} gradients"
