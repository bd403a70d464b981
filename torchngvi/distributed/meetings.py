"""One meeting of processes: an all-reduce of a header and of numbers, and what is raised where something is wrong.

The header has a row for each rank, see `torchngvi.distributed.headers`.  Buffers have the length of the last one of the
group: where more numbers are to be summed all meet once more, and small ones are not made shorter.
"""

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchngvi.distributed.headers import Ended, Row, different, elsewhere, words
from torchngvi.errors import InputError, RankError

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
    _end: Ended | None  # noted here, to be told

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
        if (apart := elsewhere(rows)) is not None:
            raise InputError(apart)
        if any(row.stop for row in rows):
            self._end_everywhere()
        if (apart := different(rows)) is not None:
            raise InputError(apart)

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
