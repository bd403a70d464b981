"""The loop of every fit: records, bar, interrupts, checkpoints, callbacks and budgets, and what an engine has to bring.

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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from tqdm import tqdm

from torchngvi.arguments import read_flag, read_list, shown
from torchngvi.diagnostics.verdict import Verdict
from torchngvi.distributed import Ended, Processes
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import Checkpoint, Holds, State, are_numbers, describe
from torchngvi.fitting.records import FitResult, Record
from torchngvi.fitting.stopping import Criterion, Standing, Stop, gradients_used_up
from torchngvi.interfaces import Posterior
from torchngvi.models.factors import BudgetError

_INTERRUPTED = "because it was interrupted."
_AT_ONCE = "because it was interrupted before q was evaluated."
_TOO_LITTLE = "because the budget of {:.0f} gradients was used up before q was evaluated. Allow more gradients."
_ENDED = "the run was ended before it had come to its end"
_HOLDS: Holds = {  # a state of `Loop._complete` with the records, besides what the engine reads itself
    "begun": lambda value: isinstance(value, bool),
    "loss": lambda value: value is None or isinstance(value, Tensor),
    "spent": lambda value: value is None or are_numbers(value, 2),
    "seconds": lambda value: isinstance(value, int | float),
    "trace": lambda value: isinstance(value, list) and all(are_numbers(one, len(Record._fields)) for one in value),
    "stop": lambda value: isinstance(value, dict),
    "callbacks": lambda value: isinstance(value, list),
}


class Ending(NamedTuple):
    """How a run has ended, which the loop completes to a `FitResult`."""

    converged: bool
    reason: str  # one sentence
    loss: float  # negative ELBO
    norm: float
    members: Tensor  # converged, (*batch,)


class Examined(NamedTuple):
    """What an engine knows about the family of q when a run is over."""

    verdict: Verdict | None = None
    why_not: str = ""  # where there is no verdict, as a clause; nothing where the engine never examines


class Mark(NamedTuple):
    """A place from which a run can be gone on with."""

    coordinates: Any  # as `Engine.here` gave them
    state: State | None  # a copy; None where no checkpoint is wanted


class Engine(ABC):
    """The abstract base of a method of fitting that advances one evaluation at a time; a `Loop` runs it."""

    name: str  # on the bar
    unit = "eval"  # of what the bar counts
    scaled = False  # whether the bar counts in thousands and millions
    examines = False  # whether `examined` is to be asked at the end
    apart: tuple[str, ...] = ()  # what of the state is another one in each of several processes

    def __init__(self, q: Posterior) -> None:
        self.q = q
        self.batches: Iterable[Any] = ()  # what a pass over the data iterates over; checkpoints keep its generators
        self.begun = False  # whether `begin` was done, by this run or by the one it goes on from
        self.marked: Mark | None = None  # the last mark; the loop takes it over once `advance` has returned
        # The loop sets the rest: what copies the state for a checkpoint, None where none is wanted; what shows a phase
        # on the bar; what moves the bar within an `advance`, None where there is none; whether a budget is used up,
        # from what was spent in gradients, to be asked where there is no record for long; and the budget of gradients.
        self.capture: Callable[..., State] | None = None
        self.let_go()
        self.most = math.inf

    def let_go(self) -> None:
        """Forget the loop, which holds the engine: what both hold is then freed without the collector of cycles."""
        self.show: Callable[[str], None] = lambda phase: None
        self.tell: Callable[[int, dict[str, str]], None] | None = None
        self.over: Callable[[float], bool] = lambda cost: False

    def settings(self) -> dict[str, str]:
        """The settings of the run in words: a checkpoint of a run with others is refused."""
        return {"method": type(self).__name__}

    def total(self, evaluations: float) -> float:
        """The count at which the bar is full."""
        return evaluations

    def shown(self, record: Record) -> tuple[int, dict[str, str]]:
        """The place of the bar at a record, and the words beside it."""
        words = {"loss": f"{record.loss:.6g}", "norm": f"{record.norm:.1e}", "step": f"{record.step:.2g}"}
        return record.evaluations, {**words, "rejected": str(record.rejections)}

    def check(self) -> None:  # noqa: B027
        """Check that the problem can be fitted, before anything is written."""

    def begin(self) -> None:  # noqa: B027
        """Do what comes before the first evaluation: look for a start, or go through the data in batches."""

    @abstractmethod
    def advance(self) -> Standing | None:
        """Go on to the next evaluation and make it; None at an end of the engine's own.

        It calls `mark` before the evaluation whose standing it returns, where `state_dict` is what makes it again.
        """

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

    def examined(self) -> Examined:
        """Whether the family of q fits, at the end of a run that was not ended from outside; not told by default."""
        return Examined()

    def counted(self) -> tuple[int, int] | None:
        """Gradients and values of the log joint so far; None where the last record holds all."""
        return None

    @abstractmethod
    def state_dict(self) -> State:
        """Everything on which the rest of the run depends, but for torch's generators."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
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


def checked_callbacks(callbacks: Any) -> tuple[Callable[[Record], Any], ...]:
    """Check that callbacks are functions of a record."""
    what = "is a list of functions that take the Record of a step"
    one = " Of one function f pass [f]." if callable(callbacks) else ""
    functions = () if one else tuple(read_list("callbacks", callbacks, what))
    if one or not all(callable(function) for function in functions):
        raise InputError(f"callbacks {what}; got {shown(callbacks)}.{one}")
    return functions


class _Kept(NamedTuple):
    """The last place that was evaluated, complete: what an interrupt goes back to, and what a checkpoint holds."""

    coordinates: Any
    standing: Standing
    records: int
    state: State | None


class Loop:
    """The loop of every fit: it lets an engine advance until a criterion, a callback or the engine ends the run."""

    def __init__(
        self,
        engine: Engine,
        stop: Criterion,
        *,
        callbacks: Sequence[Callable[[Record], Any]] = (),
        progress: bool = True,
        checkpoint: str | Path | None = None,
        every: int = 10,
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes = processes or Processes.alone()
        self.engine, self.stop, self.every = engine, stop, every
        self.callbacks = tuple(callbacks) if processes.leads else ()
        if processes.world > 1:
            settings = {**engine.settings(), "checkpoint": checkpoint, "checkpoint_every": every}
            processes.agree(**settings, stop=" | ".join(map(describe, getattr(stop, "parts", [stop]))))
        self.file: Checkpoint | None = None
        if checkpoint is not None:
            device = engine.q.mean_probe.device
            self.file = Checkpoint(checkpoint, engine.settings(), device, engine.batches, processes)
            self.file.apart = engine.apart if processes.world > 1 else ()
        self.trace: list[Record] = []
        self.progress = read_flag("progress", progress) and processes.leads
        self._kept: _Kept | None = None
        self._stop: Stop | None = None
        self._ended = False  # by an interrupt
        engine.capture = None if self.file is None else self.file.captured
        engine.show, engine.tell = self._show_phase, self._tell if self.progress else None
        engine.most = stop.most_gradients
        engine.over = lambda cost: stop.over(cost, self._seconds())

    def run(self) -> FitResult:
        """Run to the end."""
        self._began, origin, recording = time.perf_counter(), self.engine.here(), torch.is_grad_enabled()
        engine, processes, total = self.engine, self.processes, self.engine.total(self.stop.evaluations)
        bar = tqdm(
            total=None if math.isinf(total) else int(total),
            disable=not self.progress,
            desc=engine.name,
            unit=engine.unit,
            unit_scale=engine.scaled,
        )
        with bar as self.bar, processes.timed(self._elapsed), processes.noting(_INTERRUPTED):
            try:
                self._begin()
                ending = self._advanced()
                self.bar.total = self.bar.n if ending.converged else self.bar.total  # done is done
                self.bar.refresh()
            except KeyboardInterrupt as interrupt:
                torch.set_grad_enabled(recording)  # an interrupt may come on the way out of a block without gradients
                ending = self._by_interrupt(interrupt, origin)
            except BudgetError:
                self._go_back(origin)
                if self._kept is None:
                    ending = self._before_records(_TOO_LITTLE.format(self.engine.most))
                else:
                    self._stop = gradients_used_up(self._kept.standing, self.engine.most)
                    ending = self.engine.cut_short(self._stop, self._kept.standing)
            except InputError:  # refused: nothing has happened, or nothing since the last record
                self._go_back(origin)
                raise
            self._save()
            examined = self._examined()
        self.engine.let_go()
        evaluations, spent = (self.trace[-1].evaluations, self.trace[-1].gradients) if self.trace else (0, 0)
        gradients, values = self.engine.counted() or (spent, 0)
        return FitResult(
            ending.converged,
            ending.reason,
            ending.loss,
            ending.norm,
            evaluations,
            ending.members,
            self.trace,
            gradients,
            values,
            posterior=self.engine.q,
            examination=examined.verdict,
            unexamined=examined.why_not,
        )

    def _by_interrupt(self, interrupt: KeyboardInterrupt, origin: Any) -> Ending:
        """The end by an interrupt, here or on another rank; q is where it was evaluated last."""
        ended = interrupt if isinstance(interrupt, Ended) else Ended(_INTERRUPTED)
        if ended.error is not None:  # of a callback, on some rank
            self._go_back(origin)
            raise ended.error from None
        if self.processes.world > 1 and ended is not interrupt:  # a second one, here: not to wait for others
            raise interrupt
        if self._kept is None:
            self.engine.go_back(origin if self.engine.marked is None else self.engine.marked.coordinates)
            return self._before_records(_AT_ONCE)
        self._go_back(origin)
        del self.trace[self._kept.records :]
        self._ended, last = True, self._kept.standing
        if self._stop is not None and self._stop.converged:  # a run that had converged has
            return self.engine.ending(self._stop, last)
        return self.engine.interrupted(ended.reason, last)

    def _before_records(self, why: str) -> Ending:
        """The end of a run before its first record."""
        self._ended = True
        self.trace.clear()
        members = torch.zeros(self.engine.q.batch_shape, dtype=torch.bool, device="cpu")
        return Ending(False, why, math.nan, math.nan, members)

    def _examined(self) -> Examined:
        """Whether the family of q fits, where the run has come to an end of its own; an interrupt loses only this."""
        if not self.engine.examines:
            return Examined()
        if self._ended or (self._stop is not None and not self._stop.converged):
            return Examined(None, _ENDED)
        recording = torch.is_grad_enabled()
        try:
            return self.engine.examined()
        except KeyboardInterrupt:
            torch.set_grad_enabled(recording)
            return Examined(None, "it was interrupted")

    def _go_back(self, origin: Any) -> None:
        """Put the engine back to the last record, or to where the run began."""
        self.engine.go_back(origin if self._kept is None else self._kept.coordinates)

    def _begin(self) -> None:
        """Go on from the checkpoint, or find a start."""
        self.engine.check()
        self._resume()
        if self.engine.begun:
            return
        if self.file is not None:
            start = self._complete(self.file.captured(**self.engine.state_dict()), None, self._asked())
            self.file.save({**start, "trace": []})
        self.engine.begin()
        self.engine.begun = True

    def _advanced(self) -> Ending:
        """Let the engine advance until the run ends."""
        while True:
            asked = {} if self.file is None else self._asked()
            standing = self.engine.advance()
            if standing is None:
                break
            mark = self.engine.marked
            standing = standing._replace(record=standing.record._replace(seconds=self._seconds()))
            self.trace.append(standing.record)
            if not standing.aside:
                if mark is None:
                    raise InputError(
                        f"{type(self.engine).__name__}.advance returned a standing without a mark: call self.mark() "
                        "in advance, before the evaluation."
                    )
                records = len(self.trace)
                state = None if mark.state is None else self._complete(mark.state, standing, asked)
                self._kept = _Kept(mark.coordinates, standing, records, state)
                if (records - 1) % self.every == 0:
                    self._save()
            if self.progress:
                self._tell(*self.engine.shown(standing.record))
            self._ask(standing)
            if self._stop is not None:
                break
        assert self._kept is not None
        self.processes.finish()
        return self.engine.ending(self._stop, self._kept.standing)

    def _elapsed(self) -> float:
        """Seconds since the run began, on the clock of this process."""
        return time.perf_counter() - self._began

    def _seconds(self) -> float:
        """Seconds on which all processes agree: those of the first, when they met last."""
        return self._elapsed() if self.processes.world == 1 else self.processes.seconds

    def _ask(self, standing: Standing) -> None:
        """Ask everyone whether the run ends; the first of those that would end it does."""
        self._stop = Stop(standing.lost) if standing.lost else None
        stop = self.stop.asked(standing)
        self._stop = self._stop or stop  # known before the callbacks, one of which may interrupt
        try:
            answers = [] if standing.told else [callback(standing.record) for callback in self.callbacks]
        except (Exception, KeyboardInterrupt) as error:
            if self.processes.world == 1:
                raise
            self.processes.end(_INTERRUPTED, error if isinstance(error, Exception) else None)
            return
        if any(answers) and self._stop is None:
            reason = f"because a callback stopped it at {standing.place()}."
            self.processes.end(reason)  # on all of several, at the next evaluation, which is undone
            self._stop = Stop(reason) if self.processes.world == 1 else None

    def _tell(self, count: int, words: dict[str, str]) -> None:
        """Show a count and words on the bar, drawn as often as it is worth while."""
        self.bar.set_postfix(words, refresh=False)
        self.bar.update((count if self.bar.total is None else min(count, self.bar.total)) - self.bar.n)

    def _show_phase(self, phase: str) -> None:
        self.bar.set_description(f"{self.engine.name}, {phase}" if phase else self.engine.name)

    # -------------------------------------------------------------------------------- checkpoints

    def _asked(self) -> State:
        """The memory of the criteria, with that of callbacks that are criteria."""
        return {
            "stop": self.stop.state_dict(),
            "callbacks": [part.state_dict() if isinstance(part, Criterion) else None for part in self.callbacks],
        }

    def _complete(self, marked: State, standing: Standing | None, asked: State) -> State:
        """A state that was marked, with what the evaluation after it has told."""
        return {
            **marked,
            **asked,
            "begun": self.engine.begun,
            "loss": None if standing is None else standing.loss.clone(),
            "spent": None if standing is None else standing.spent,
            "seconds": self._elapsed(),
        }

    def _save(self) -> None:
        """Write the last place, with the records before it: its own is made again."""
        if self.file is not None and self._kept is not None and self._kept.state is not None:
            state, trace = self._kept.state, self.trace[: self._kept.records - 1]
            self.file.save({**state, "trace": [tuple(record) for record in trace]})

    def _resume(self) -> None:
        """Put everything as it was; where that is refused nothing has happened."""
        saved = None if self.file is None else self.file.load(_HOLDS)
        if self.file is None or saved is None:
            return
        file, before = self.file, self.file.captured(**self.engine.state_dict(), begun=False)

        def again() -> Tensor:
            self._restore(file, saved)
            standing = self.engine.advance()
            assert standing is not None
            return standing.loss

        try:
            self._restore(file, saved)
            if saved["loss"] is not None:
                file.check_loss(saved["loss"], again(), again)
                self._restore(file, saved)
            with file.restoring(saved):
                self.trace[:] = [Record(*values) for values in saved["trace"]]
                self._began -= saved["seconds"]
                self.stop.load_state_dict(saved["stop"])
                for callback, state in zip(self.callbacks, saved["callbacks"], strict=False):
                    if isinstance(callback, Criterion) and state is not None:
                        callback.load_state_dict(state)
        except BaseException:  # an interrupt, a refusal: nothing has happened
            self._restore(file, before)
            self.engine.marked = None
            raise

    def _restore(self, file: Checkpoint, state: State) -> None:
        """Put the engine into a saved state; as often as wanted."""
        with file.restoring(state):
            self.engine.load_state_dict(state)
            self.engine.begun = state["begun"]
