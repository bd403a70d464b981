"""What the loop runs: the contract of an engine, and what the two tell each other.

The loop calls, in this order:

    check()                        refuse what can be refused before a file is written
    load_state_dict(state)         where there is a checkpoint
    begin()                        where no earlier run has begun
    advance(), advance(), ...      until a criterion or a callback ends the run, or the engine has come to its own end
    ending(stop, last)             once

An interrupt from the keyboard may come at any line: the loop then calls ``go_back`` with what the engine had marked
before the last evaluation that was completed.

A run can be gone on from where it was marked.  Mostly that is before an evaluation, which a resumed run makes again
and whose loss tells whether the problem is the same.  An engine whose ``advance`` is dear, such as an epoch, marks
where it has led instead: gone on with, its first ``advance`` gives the standing of that epoch from what was saved,
with ``told`` set, and for the comparison a loss that is cheap to have.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchngvi.fitting.examined import Examined
from torchngvi.fitting.records import Record, in_words
from torchngvi.interfaces import Posterior
from torchngvi.models.guarded import VALUE


class Standing(NamedTuple):
    """The state of a run after an evaluation, about which the criteria are asked."""

    record: Record  # its seconds are set by the loop
    members: Tensor  # whose norm is known to be within the tolerance, (*batch,)
    loss: Tensor  # as it was first evaluated here, which a resumed run must find again, (*batch,)
    spent: tuple[int, int]  # evaluations and gradients after that
    tolerance: float = 0.0  # on the norm
    stalled: int = 0  # steps in a row that were rejected
    rounded: bool = False  # some of the members are so near that rounding hides what a step could gain
    settled: bool = False  # the norm is within the tolerance, and the engine goes on to confirm it
    best: float = math.inf  # smallest smoothed value of a run that watches one
    idle: int = 0  # steps since then
    aside: bool = False  # a trial at another place, which an interrupt undoes
    told: bool = False  # the callbacks were told of it before the run was cut
    lost: str = ""  # why no step can help, as a sentence from "because" on
    climb: str = ""  # a warning that the loss rose far above its start, with a space before it
    remedy: str = ""  # what to do where a budget ends the run, unless it is to raise it
    where: str = ""  # in words, of an engine that holds no norm against a tolerance

    def place(self) -> str:
        """Where the run stands, in words for the reason of its end."""
        return self.where or f"natural-gradient norm {self.record.norm:.2g}"

    values: int = 0  # of the log joint without a gradient so far, where the engine counts them

    @property
    def cost(self) -> float:
        """What was asked of the log joint, in gradients."""
        return self.record.gradients + VALUE * self.values

    def at(self) -> str:
        """Where the run stands, with the tolerance that its norm is held against."""
        return self.where or f"{self.place()} against a tolerance of {self.tolerance:.2g}"


class Stop(NamedTuple):
    """The decision that a run is to end, with its reason: a sentence, from "because" on where it has not converged."""

    reason: str
    converged: bool = False


class Ending(NamedTuple):
    """How a run has ended, which the loop completes to a `FitResult`; whether a Gaussian fits is a `Verdict`."""

    converged: bool
    reason: str  # one sentence
    loss: float  # negative ELBO
    norm: float
    members: Tensor  # converged, (*batch,)


class Mark(NamedTuple):
    """A place from which a run can be gone on with: coordinates of q, and a copy of the state."""

    coordinates: Any  # as `Engine.here` gave them
    state: dict[str, Any] | None  # a copy; None where no checkpoint is wanted


class Engine(ABC):
    """The abstract base of a method of fitting that advances one evaluation at a time; a `Loop` runs it.

    Attributes:
        name: the name of the run on the bar.
        unit: the unit of what the bar counts.
        scaled: whether the bar counts in thousands and millions.
        examines: whether ``examined`` is to be asked at the end.
        batches: what a pass over the data iterates over; its generators are kept in a checkpoint.
        apart: what of the state is another one in each of several processes.
        begun: whether ``begin`` was done, by this run or by the one it goes on from.
        marked: the last mark; the loop takes it over once ``advance`` has returned.
        capture: makes a copy of the state for a checkpoint; None where none is wanted.  The loop sets it.
        show: shows a phase on the bar.  The loop sets it.
        tell: moves the bar to a count, with words, within an ``advance``; None where there is no bar.  The loop sets
            it.
        over: whether a budget is used up, from what was spent in gradients; to be asked where there is no record for
            long.  The loop sets it.
        most: the budget of gradients.  The loop sets it.
    """

    name: str
    unit = "eval"
    scaled = False
    examines = False
    apart: tuple[str, ...] = ()

    def __init__(self, q: Posterior) -> None:
        self.q = q
        self.batches: Iterable[Any] = ()
        self.begun = False
        self.marked: Mark | None = None
        self.capture: Callable[..., dict[str, Any]] | None = None
        self.show: Callable[[str], None] = lambda phase: None
        self.tell: Callable[[int, dict[str, str]], None] | None = None
        self.over: Callable[[float], bool] = lambda cost: False
        self.most = math.inf

    def settings(self) -> dict[str, str]:
        """The settings of the run in words: a checkpoint of a run with others is refused."""
        return {"method": type(self).__name__}

    def total(self, evaluations: float) -> float:
        """The count at which the bar is full."""
        return evaluations

    def shown(self, record: Record) -> tuple[int, dict[str, str]]:
        """The place of the bar at a record, and the words beside it."""
        return record.evaluations, in_words(record)

    def check(self) -> None:  # noqa: B027
        """Check that the problem can be fitted, before anything is written."""

    def begin(self) -> None:  # noqa: B027
        """Do what comes before the first evaluation: look for a start, or go through the data in batches."""

    @abstractmethod
    def advance(self) -> Standing | None:
        """Go on to the next evaluation and make it."""

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """The outcome of the run; leaves q at its best."""
        assert stop is not None
        return Ending(stop.converged, stop.reason, last.record.loss, last.record.norm, last.members)

    def interrupted(self, reason: str, last: Standing) -> Ending:
        """The outcome of a run that was interrupted, where q has been put back to the last record."""
        return Ending(False, reason, last.record.loss, last.record.norm, last.members)

    def cut_short(self, stop: Stop, last: Standing) -> Ending:
        """The outcome of a run whose budget had no room for its next call; q has been put back to the last record."""
        return self.interrupted(stop.reason, last)

    def verdict(self, stop: Stop | None, last: Standing) -> Ending:
        """The default of `ending` under its old name, which a class written for the release before may ask for."""
        return Engine.ending(self, stop, last)

    def examined(self) -> Examined:
        """Whether the family of q fits, at the end of a run that was not ended from outside; not told by default."""
        return Examined()

    def counted(self) -> tuple[int, int] | None:
        """Gradients and values of the log joint so far; None where the last record holds all."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything on which the rest of the run depends, but for torch's generators."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: from before an evaluation, whose ``spent`` is in the state where it was completed."""

    @final
    def mark(self) -> None:
        """Remember where the run stands, as a place to go on from."""
        state = None if self.capture is None else self.capture(**self.state_dict())
        self.marked = Mark(self.here(), state)

    def keep(self, coordinates: Any) -> None:
        """Remember a place for an interrupt before the first record."""
        self.marked = Mark(coordinates, None)

    def here(self) -> Any:
        """The place to which an interrupt goes back."""
        return self.q.snapshot()

    @torch.no_grad()
    def go_back(self, coordinates: Any) -> None:
        """Put q where `here` was called."""
        self.q.restore(coordinates)
