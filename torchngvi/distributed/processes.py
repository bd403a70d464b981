"""The processes that evaluate a target together: one sum an evaluation, which also tells what has gone wrong where.

Every meeting of the processes is one all-reduce of one buffer of float64: a header with a row for each rank, see
`torchngvi.distributed.headers`, and numbers to be summed.  So an error on one rank is an error on all of them, at the
same evaluation and in the same words, where other programs would wait for one another.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from torchngvi.distributed.headers import Ended
from torchngvi.distributed.meetings import OBJECTS, SUM, Meetings
from torchngvi.distributed.prints import fingerprint, shown
from torchngvi.errors import InputError

_T = TypeVar("_T")


def _no_clock() -> float:
    return 0.0


class Processes(Meetings):
    """A group of processes of torch.distributed that fit one posterior together, each with its part of the work.

    `torchngvi.Sharded` and `torchngvi.models.ShardedDraws` make one; every method that sums or compares is a
    collective, so that all ranks have to call it.  The leader, rank 0 of the group, shows the bar, calls the callbacks
    and writes the files of a run.  Without an initialised process group there is one process, and everything stays as
    it is.

    Args:
        group: a group of torch.distributed; by default that of all processes.

    Attributes:
        rank: the number of this process in the group.
        world: how many there are.
        sums: how many meetings there were.
        numbers: how many numbers were summed last.
        seconds: the clock of the leader at the last meeting.
        met: whether any group of this process has summed something.

    >>> alone = Processes()
    >>> alone.world, alone.leads, alone.total([torch.ones(2)])
    (1, True, [tensor([1., 1.])])
    """

    def __init__(self, group: Any = None) -> None:
        rank, world = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        if rank < 0:
            raise InputError("this process is not in the group; build the target on the ranks of the group alone.")
        self._begin(group, rank, world)

    @classmethod
    def alone(cls) -> Self:
        """Make the group of this process only, whether or not there are others."""
        processes = cls.__new__(cls)
        processes._begin(None, 0, 1)
        return processes

    def _begin(self, group: Any, rank: int, world: int) -> None:
        self.group, self.rank, self.world = group, rank, world
        self.device = torch.device("cpu")
        if world > 1 and torch.distributed.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.sums, self.numbers, self.seconds = 0, 0, 0.0
        self.clock: Callable[[], float] = _no_clock
        self._end: Ended | None = None  # noted here, to be told

    def __getstate__(self) -> dict[str, Any]:
        """All but the clock of a run; a group is of the processes that hold it."""
        if self.group is not None and self.world > 1:
            raise InputError(
                "a group of torch.distributed cannot be pickled or copied: it is of the processes that hold it. Build "
                "the target again on each of them; without group= the group is that of all processes, and can be."
            )
        return {**self.__dict__, "group": None, "clock": _no_clock, "_end": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The same in this process; of several processes, one of as many."""
        if state["world"] > 1:
            self.__init__()  # type: ignore[misc]
            if self.world != state["world"]:
                raise InputError(
                    f"this was made by {state['world']} processes, each with its part, and is read by {self.world}. "
                    "Read it on as many, after torch.distributed.init_process_group."
                )
            state = {name: state[name] for name in ("sums", "numbers", "seconds")}
        self.__dict__.update(state)

    @property
    def leads(self) -> bool:
        """Whether this process is the first of the group."""
        return self.rank == 0

    def total(
        self,
        parts: Sequence[Tensor],
        key: Sequence[Tensor] = (),
        error: Exception | None = None,
    ) -> list[Tensor]:
        """Sum tensors over the ranks, in float64 and in one all-reduce.

        Args:
            parts: tensors of the same shapes on every rank; of a rank with an error none.
            key: what has to be the same on every rank, bit for bit: q, or the draws from it.
            error: what was raised here in the place of the parts.

        Returns:
            The sums, in the shapes and dtypes of the parts.

        Raises:
            InputError: on every rank, where one of them has raised it, where the keys differ, where the sizes differ.
            RankError: on every rank, where one of them has raised anything else.
            Ended: on every rank, where one of them was told to end the run.
        """
        if self.world == 1:
            if error is not None:
                raise error
            return list(parts)
        flat = torch.cat([part.detach().flatten().double() for part in parts]) if parts else torch.zeros(0)
        self.numbers = len(flat)
        summed = self._meet(SUM, flat.to(self.device), fingerprint(key), error)
        pieces = summed.split([part.numel() for part in parts])
        return [piece.reshape(part.shape).to(part) for piece, part in zip(pieces, parts, strict=True)]

    def summed(
        self,
        parts: Callable[[], list[Tensor]],
        key: Sequence[Tensor] = (),
        error: Exception | None = None,
    ) -> list[Tensor]:
        """Sum over the ranks what a call gives on each; an error of it is raised on all of them.

        Args:
            parts: gives the tensors of this rank; it is not called where there is an error already.
            key: what has to be the same on every rank.
            error: what was raised here before.

        Returns:
            The sums, as `total` gives them, and with its errors.

        >>> Processes().summed(lambda: [torch.ones(2)])
        [tensor([1., 1.])]
        """
        local: list[Tensor] = []
        if error is None:
            try:
                local = parts()
            except Exception as raised:
                error = raised
        return self.total(local, key, error)

    def gather(self, thing: _T) -> list[_T]:
        """Collect an object of every rank, in their order: what they say of themselves, once at a start.

        Args:
            thing: anything that can be pickled; the ranks of a job trust one another.

        Returns:
            The objects of all ranks.
        """
        if self.world == 1:
            return [thing]
        self._meet(OBJECTS, torch.zeros(0, device=self.device), torch.zeros(()), None)
        return self._gathered(thing)

    def one(self, thing: _T) -> _T:
        """Hand the leader's object to everyone: a seed, a checkpoint, the text of a reason.

        Args:
            thing: the object; that of the other ranks is not looked at.

        Returns:
            The leader's.

        >>> Processes().one(3)
        3
        """
        return self.gather(thing if self.leads else None)[0]  # type: ignore[return-value]

    def agree(self, **what: Any) -> None:
        """Check that all ranks have the same settings.

        Args:
            what: numbers, texts, tuples or tensors by name.

        Raises:
            InputError: on every rank, where two of them differ.
        """
        if self.world == 1:
            return
        mine = {
            name: (shown(value), fingerprint([value]).item() if isinstance(value, Tensor) else 0.0)
            for name, value in what.items()
        }
        everyone = self.gather(mine)
        for name, first in everyone[0].items():
            for rank, theirs in enumerate(everyone):
                other = theirs.get(name, ("nothing", 0.0))
                if other != first:
                    end = " in a later entry" if other[0] == first[0] else ""
                    got = f"{first[0]} on rank 0, {other[0]} on rank {rank}{end}"
                    raise InputError(f"all ranks must have the same {name}; got {got}.")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block, such as the reading of data, at whose end all ranks meet: an error on one is raised on all.

        Returns:
            A context manager.

        Raises:
            InputError: on every rank, where the block has raised it on one of them.
            RankError: on every rank, where the block has raised anything else.

        >>> with Processes().together():
        ...     X = torch.ones(4, 2)
        """
        error = None
        try:
            yield
        except Exception as raised:
            if self.world == 1:
                raise
            error = raised
        if self.world > 1:
            self._meet(OBJECTS, torch.zeros(0, device=self.device), torch.zeros(()), error)

    def same_draws(self) -> None:
        """Give torch's default generators of all ranks the state of the leader's, so that all draw the same."""
        if self.world > 1:
            torch.set_rng_state(self.one(torch.get_rng_state()))
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self.one(torch.cuda.get_rng_state()))

    # ------------------------------------------------------------------------------------ the end of a run

    def end(self, reason: str, error: Exception | None = None) -> None:
        """Note that the run is to end; the next meeting tells everyone.

        Args:
            reason: a sentence from "because" on.
            error: what is to be raised on all ranks, from a callback that has failed.
        """
        self._end = self._end or Ended(reason, error)

    def finish(self) -> None:
        """Meet once more at the end of a run, where only an error of a callback still counts.

        Raises:
            Ended: on every rank, with the error.
        """
        if self._end is not None and self._end.error is None:
            self._end = None
        if self.world > 1:
            self.gather(None)

    @contextlib.contextmanager
    def timed(self, clock: Callable[[], float]) -> Iterator[None]:
        """A block in which every meeting tells the leader's time on a clock.

        Args:
            clock: gives seconds.

        Returns:
            A context manager.
        """
        before, self.clock, self.seconds = self.clock, clock, 0.0
        try:
            yield
        finally:
            self.clock = before

    @contextlib.contextmanager
    def noting(self, reason: str) -> Iterator[None]:
        """A block in which a first interrupt from the keyboard, on any of several ranks, is noted; a second is raised.

        Args:
            reason: a sentence from "because" on.

        Returns:
            A context manager.
        """
        if self.world == 1 or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self._end is not None:
                raise KeyboardInterrupt
            self.end(reason)

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            self._end = None
            signal.signal(signal.SIGINT, before)
