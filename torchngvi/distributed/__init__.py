"""Several processes that evaluate a target together: one sum an evaluation, which also tells what has gone wrong where.

Every meeting of the processes is one all-reduce of one buffer of float64: a header with a row for each rank, and
numbers to be summed.  So an error on one rank is an error on all of them, at the
same evaluation and in the same words, where other programs would wait for one another.
"""

import contextlib
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError, RankError

__all__ = [
    "Ended",
    "Processes",
    "average_over_ranks_",
    "processes_of",
    "rank",
    "ranks",
    "same_on_ranks_",
    "sum_gradients",
    "synchronize",
]

# Several processes: who sums what the ranks contribute


def ranks() -> int:
    """Processes in the default group of torch.distributed; 1 where there is none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank() -> int:
    """Return the number of this process in the default group; 0 where there is none."""
    return torch.distributed.get_rank() if ranks() > 1 else 0


def average_over_ranks_(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by their means over all processes, in place and in one sum; one process leaves them as they are.

    Args:
        tensors: the same shapes in every process.

    >>> average_over_ranks_([torch.ones(2)])
    """
    if ranks() > 1:
        for dtype in {tensor.dtype: None for tensor in tensors}:  # in the order that all processes have
            some = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in some])
            torch.distributed.all_reduce(flat)
            flat /= ranks()
            for tensor, mean in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(mean.view_as(tensor))


def same_on_ranks_(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by those of the first process, in place; one process leaves them as they are.

    Args:
        tensors: the same shapes in every process.

    >>> same_on_ranks_([torch.ones(2)])
    """
    if ranks() > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)


# The header of a meeting of processes: what each of them says of itself, and what is wrong where they differ


class Row(NamedTuple):
    """What a rank says in the header of a meeting, in numbers that are exact in float64."""

    failed: float  # whether an error was raised there
    print: float  # the fingerprint of q, or of the draws, which has to be that of all ranks
    stop: float  # whether the run is to end, by a callback or the keyboard
    seconds: float  # the clock of that process; the leader's is everyone's
    kind: float  # a sum of numbers, or an exchange of objects
    size: float  # how many numbers are to be summed


class Ended(KeyboardInterrupt):
    """A run was ended from outside on some rank, and is now ended on all: raised where the processes meet.

    It is a `KeyboardInterrupt`, which no ``except Exception`` of a user's log joint takes for an error of its own.

    Attributes:
        reason: a sentence from "because" on.
        error: what a callback has raised, which is to be raised again; None where none did.

    >>> str(Ended("because a callback stopped it."))
    'because a callback stopped it.'
    """

    def __init__(self, reason: str, error: Exception | None = None) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


def _first_other(rows: Sequence[Row], name: str) -> str | None:
    """Say which rank is the first whose entry differs from that of rank 0; None where all are alike."""
    others = (rank for rank, row in enumerate(rows) if getattr(row, name) != getattr(rows[0], name))
    return None if (rank := next(others, None)) is None else f"rank {rank} differs from rank 0"


def words(error: Exception) -> str:
    """The kind and message of an error, for the other ranks."""
    text = " ".join(str(error).split())
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"


# One meeting of processes: an all-reduce of a header and of numbers, and what is raised where something is wrong
#
# The header has a row for each rank, as above.  Buffers have the length of the last one of the group: where more
# numbers are to be summed all meet once more, and small ones are not made shorter.

SUM, OBJECTS = 1, 2  # kinds of meetings
_SMALL, _LESS = 2**14, 4  # numbers that a buffer may keep, and times fewer for which a larger one is given up


class Meetings:
    """The meetings of the ranks of a group: the base of `torchngvi.Processes`, which says what they are for.

    Attributes:
        met: whether any group of this process has summed something.
    """

    met = False  # of the class: any group
    _sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # room in the buffer, by group

    group: Any
    rank: int
    world: int
    device: torch.device
    sums: int
    seconds: float
    clock: Callable[[], float]
    _end: Ended | None  # noted here, for the others

    def _meet(self, kind: int, numbers: Tensor, key: Tensor, error: Exception | None) -> Tensor:
        """Meet all ranks, once more where sizes change; the sum of the numbers."""
        whole = self.group or torch.distributed.group.WORLD
        while True:
            agreed = Meetings._sizes.get(whole, 0)  # room in the buffer on every rank of the group, whoever sums
            size = len(numbers) if kind == SUM else agreed
            row = Row(error is not None, float(key), self._end is not None, self.clock(), kind, size)
            buffer = torch.zeros(self.world * len(row) + agreed, dtype=torch.float64, device=self.device)
            header, sums = buffer[: self.world * len(row)].view(self.world, -1), buffer[self.world * len(row) :]
            header[self.rank] = torch.tensor(row, dtype=torch.float64)
            if kind == SUM and size <= agreed and error is None:
                sums[:size] = numbers
            torch.distributed.all_reduce(buffer, group=self.group)
            self.sums, Meetings.met = self.sums + 1, True
            rows = [Row(*values) for values in header.tolist()]
            self.seconds = rows[0].seconds
            self._judge(rows, error)
            asked = int(rows[0].size)
            if asked > agreed or (agreed > _SMALL and _LESS * asked < agreed):
                Meetings._sizes[whole] = asked
            if asked <= agreed:
                return sums[:asked]

    def _judge(self, rows: list[Row], error: Exception | None) -> None:
        """Raise on every rank what went wrong on one."""
        if any(row.failed for row in rows):
            self._raise_everywhere(error)
        if (other := _first_other(rows, "kind")) is not None:
            raise InputError(
                f"the ranks are at different places of the program: {other}. Let every rank call the same functions in "
                "the same order, with the same settings."
            )
        if any(row.stop for row in rows):
            self._end_everywhere()
        if (other := _first_other(rows, "print")) is not None:
            raise InputError(
                f"q, or a draw from it, is not the same on all ranks: {other}. Start every rank from the same q, call "
                "synchronize(q) after a change on one rank, and give the generators of estimators the same seed."
            )
        if (other := _first_other(rows, "size")) is not None:
            raise InputError(
                f"the ranks sum different numbers of entries, {rows[0].size:.0f} on rank 0: {other}. Give every rank "
                "a q of the same shape and as many draws."
            )

    def _raise_everywhere(self, error: Exception | None) -> NoReturn:
        mine = None if error is None else (isinstance(error, InputError), words(error))
        rank, (refused, text) = next((rank, said) for rank, said in enumerate(self._gathered(mine)) if said is not None)
        raise (InputError if refused else RankError)(f"rank {rank}: {text}") from error

    def _end_everywhere(self) -> NoReturn:
        ended, self._end = self._end, None
        error = None if ended is None or ended.error is None else ended.error
        mine = None if ended is None else (ended.reason, None if error is None else words(error))
        rank, (reason, text) = next((rank, said) for rank, said in enumerate(self._gathered(mine)) if said is not None)
        if text is None:
            raise Ended(reason)
        raise Ended(reason, error if rank == self.rank else RankError(f"rank {rank}: {text}"))

    def _gathered(self, thing: Any) -> list[Any]:
        """An object of each rank, where all are known to ask for it."""
        things: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(things, thing, group=self.group)
        return things


# Fingerprints: whether two processes hold the same numbers, without sending them

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an entry


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Sum the bits of all entries, as integers times odd weights, modulo 2⁵⁰."""
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        entries = tensor.detach().contiguous().flatten()
        entries = entries.byte() if entries.dtype == torch.bool else entries
        bits = entries.view(_INTEGERS[entries.element_size()]).long()
        weights = 2 * torch.arange(bits.numel(), device=bits.device) + 2_654_435_761 * (2 * number + 1)
        # the high bits go in too: products wrap around modulo 2⁶⁴
        part = (bits * weights).sum() + 31 * ((bits >> 20) * weights).sum() + bits.numel()
        total = part if total is None else 1_000_003 * total + part
    return torch.zeros((), dtype=torch.float64) if total is None else (total % 2**50).double()  # exact in float64


def shown(value: object, short: int = 8) -> str:
    """Write a value in a few words; of a large tensor its shape and its first entries."""
    if not isinstance(value, Tensor):
        return str(value)
    if value.numel() <= short:
        return str(value.tolist())
    return f"{tuple(value.shape)} entries, the first {float(value.flatten()[0])}"


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
        self._end: Ended | None = None  # noted here, for the others

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
        self, parts: Sequence[Tensor], key: Sequence[Tensor] = (), error: Exception | None = None
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
            Ended: on every rank, where one of them was asked to end the run.
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
        self, parts: Callable[[], list[Tensor]], key: Sequence[Tensor] = (), error: Exception | None = None
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


# Bring the ranks to the same q, and sum what `loss.backward()` has left in its probes


def processes_of(group: Any) -> Processes:
    """The processes that a caller names, for functions that work in one process by default.

    Args:
        group: a `Processes`, a group of torch.distributed, or None for this process alone.

    Returns:
        The processes.

    >>> processes_of(None).world
    1
    """
    if group is None:
        return Processes.alone()
    return group if isinstance(group, Processes) else Processes(group)


@torch.no_grad()
def synchronize(q: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, group: Any = None) -> None:
    """Give q, and an optimizer over it, the state that they have on the leader.

    Use it after a change of q on one rank, such as a start from a file, and before a fit of several processes.

    Args:
        q: the posterior, of the same class and shape on every rank.
        optimizer: the optimizer over it; None for q alone.
        group: a group of torch.distributed, or a `Processes`; by default that of all processes.

    Raises:
        InputError: on every rank, where one of them is elsewhere in the program.

    >>> from torchngvi import CholeskyGaussian
    >>> synchronize(CholeskyGaussian(2))
    """
    processes = group if isinstance(group, Processes) else Processes(group)
    if processes.world == 1:
        return
    q.load_state_dict(processes.one(q.state_dict()))
    if optimizer is not None:
        optimizer.load_state_dict(processes.one(optimizer.state_dict()))


def sum_gradients(optimizer: torch.optim.Optimizer, group: Any = None) -> Any:
    """Sum the gradients of all parameters over the ranks before each step, in one all-reduce.

    It is for ``loss.backward(); opt.step()`` where the losses of the ranks add up to the loss: each its rows, and the
    prior and the entropy on one of them, or in R equal parts.

    Args:
        optimizer: an optimizer whose gradients were filled when it steps.
        group: a group of torch.distributed, or a `Processes`; by default that of all processes.

    Returns:
        The handle of the hook, whose ``remove()`` takes it back.

    >>> from torchngvi import VN, CholeskyGaussian
    >>> handle = sum_gradients(VN(CholeskyGaussian(1), lr=0.1))
    >>> handle.remove()
    """
    read_instance("optimizer", optimizer, torch.optim.Optimizer, "is an optimizer, such as VN(q, lr=0.1)")
    processes = group if isinstance(group, Processes) else Processes(group)
    held = list(itertools.chain.from_iterable(entry["params"] for entry in optimizer.param_groups))

    @torch.no_grad()
    def hook(*_: object) -> None:
        filled: list[Tensor] = [p.grad if p.grad is not None else torch.zeros_like(p) for p in held]
        for parameter, total in zip(held, processes.total(filled), strict=True):
            parameter.grad = total

    return optimizer.register_step_pre_hook(hook)
