"""What all readers of files in batches have in common."""

import glob
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from torchngvi.arguments import read_count, read_list, read_path
from torchngvi.errors import InputError

Array = np.ndarray[Any, Any]
Batch = tuple[torch.Tensor | None, ...]  # X (n, D), y (n,), and perhaps weights and offset (n,)

ROWS = 100_000  # of a batch


class Chunk(NamedTuple):
    """A batch of a file: the rows of one of its groups from a place on.

    >>> Chunk("day_1.parquet", 0, 100_000, 50_000).rows
    50000
    """

    path: str
    group: int
    start: int  # in the group
    rows: int


class Reader(Sequence[Batch]):
    """The abstract base of files whose batches are read in any order.

    Attributes:
        chunks: the batches, in the order of a pass.
    """

    chunks: list[Chunk]

    @abstractmethod
    def read(self, chunk: Chunk) -> Batch:
        """Read one batch."""

    @property
    def num_data(self) -> int:
        """The number of rows of a pass."""
        return sum(chunk.rows for chunk in self.chunks)

    def share(self, rank: int, world: int) -> Self:
        """Take the part of one of several processes: consecutive batches, all of the parts of about the same size.

        Args:
            rank: the number of the process, from 0.
            world: how many there are.

        Returns:
            A reader of that part.

        Raises:
            InputError: fewer batches than processes.

        >>> import tempfile
        >>> from torchngvi.adapters.files import Npy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/X.npy", np.ones((10, 2))), np.save(f"{folder}/y.npy", np.ones(10))
        ...     [Npy(f"{folder}/X.npy", f"{folder}/y.npy", rows=3).share(rank, 2).num_data for rank in range(2)]
        (None, None)
        [6, 4]
        """
        if len(self) < world:
            raise InputError(
                f"there are {len(self)} batches for {world} processes; read fewer rows at once, or use fewer processes."
            )
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        low, high = (len(self.chunks) * (rank + k) // world for k in (0, 1))
        new.chunks = self.chunks[low:high]
        return new

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.read(chunk) for chunk in self.chunks[index]]
        return self.read(self.chunks[index])

    def __iter__(self) -> Iterator[Batch]:
        return map(self.read, self.chunks)


def found(files: str | Path | Iterable[str | Path]) -> list[str]:
    """The files of a name, a pattern or a list, those of a pattern in the order of their names.

    >>> found(__file__)[0].endswith("reader.py")
    True
    """
    if not isinstance(files, str | Path):
        what = "are the paths of files, or one pattern of names"
        paths = [str(read_path("files", path, what)) for path in read_list("files", files, what)]
    else:
        paths = [str(files)] if Path(files).is_file() else sorted(glob.glob(str(files)))
    missing = [path for path in paths if not Path(path).is_file()]
    if missing and not isinstance(files, str | Path):
        raise InputError(f"there is no file {missing[0]!r}.")
    if not paths:
        raise InputError(f"there are no files {str(files)!r}.")
    return paths


def checked_rows(rows: int) -> int:
    """Check the number of rows of a batch."""
    return read_count("rows", rows, "counts the rows of a batch")


def numbers(name: str, column: Array) -> Array:
    """Check that a column holds numbers."""
    if column.dtype.kind not in "buif":
        raise InputError(f"column {name!r} must hold numbers; got {column.dtype}, such as {column[0]!r}. Leave it out.")
    return np.ascontiguousarray(column if column.flags.writeable else column.copy())
