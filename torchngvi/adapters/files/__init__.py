"""Files of rows that are read in batches: NumPy's npy, Parquet and csv, for models of more rows than memory holds.

A reader is iterated over for one pass after another, and knows how many rows there are::

    batches = Parquet("day_*.parquet", target="click", rows=100_000)
    model = Streamed.linear(batches, batches.num_data, classes=(0, 1))

npy and Parquet files are also read at any place: the start of a fit takes rows from all over them, and ``share`` gives
each of several processes its part.  To read ahead, hand a reader to a ``DataLoader`` with ``batch_size=None`` and one
worker.  Parquet needs the extra "parquet".
"""

import glob
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from torchngvi.arguments import read_count, read_instance, read_list, read_names, read_path
from torchngvi.errors import InputError
from torchngvi.messages import needing

with needing("torchngvi.adapters.files", "parquet"):
    import numpy as np

__all__ = ["Csv", "Npy", "Parquet", "Reader"]

Array = np.ndarray[Any, Any]
Batch = tuple[torch.Tensor | None, ...]  # X (n, D), y (n,), and perhaps weights and offset (n,)

ROWS = 100_000  # of a batch


class Chunk(NamedTuple):
    """A batch of a file: the rows of one of its groups from a place on."""

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
    """The files of a name, a pattern or a list, those of a pattern in the order of their names."""
    if isinstance(files, str | Path):
        paths = [str(files)] if Path(files).is_file() else sorted(glob.glob(str(files)))
    else:
        what = "are the paths of files, or one pattern of names"
        paths = [str(read_path("files", path, what)) for path in read_list("files", files, what)]
        if missing := [path for path in paths if not Path(path).is_file()]:
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


# Arrays in npy files, a batch of rows after another


class Stored(NamedTuple):
    """An array in an npy file, by its header: nothing of it is read, and little is sent to a worker that reads it."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # of the first entry, in bytes


class Npy(Reader):
    """Rows of arrays in npy files; a batch is read when it is asked for, and nothing stays mapped into memory.

    Args:
        X: the file of the design, (N, D).
        y: the file of the targets, (N,).
        rows: of a batch.
        weights, offset: the files of row weights and offsets, (N,), where there are some.

    Raises:
        InputError: a file that is none, an array of another shape or of no numbers, or stored by columns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/X.npy", np.eye(3)), np.save(f"{folder}/y.npy", np.array([0, 1, 1]))
    ...     batches = Npy(f"{folder}/X.npy", f"{folder}/y.npy", rows=2)
    ...     len(batches), batches.num_data, batches[1]
    (None, None)
    (2, 3, (tensor([[0., 0., 1.]], dtype=torch.float64), tensor([1])))
    """

    def __init__(
        self,
        X: str | Path,
        y: str | Path,
        rows: int = ROWS,
        weights: str | Path | None = None,
        offset: str | Path | None = None,
    ) -> None:
        given: dict[str, Any] = {"X": X, "y": y, "weights": weights, "offset": offset}
        for name, path in given.items():
            if path is not None or name in ("X", "y"):
                read_path(name, path, "is the path of a .npy file")
        rows = checked_rows(rows)
        self.arrays = {name: None if path is None else _stored(name, Path(path)) for name, path in given.items()}
        design = self.arrays["X"]
        assert design is not None
        for name, array in self.arrays.items():
            want = design.shape[:1] if name != "X" else design.shape
            if array is not None and (array.shape != want or (name == "X" and len(array.shape) != 2)):
                shape = "a matrix, one row an observation" if name == "X" else f"one number for each of {want[0]} rows"
                raise InputError(f"{str(given[name])!r} must hold {shape}; got shape {array.shape}.")
        count = design.shape[0]
        self.chunks = [Chunk(str(X), 0, start, min(rows, count - start)) for start in range(0, count, rows)]

    def read(self, chunk: Chunk) -> Batch:
        """Read one batch."""
        parts = [None if array is None else _some(array, chunk) for array in self.arrays.values()]
        while parts[-1] is None:
            parts.pop()
        return tuple(parts)


def _stored(name: str, path: Path) -> Stored:
    """The header of an npy file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read as an npy file ({error}). Write it by numpy.save.") from error
    if not isinstance(array, np.memmap) or array.dtype.kind not in "buif" or not array.flags.c_contiguous:
        raise InputError(
            f"{str(path)!r} must hold numbers, stored by rows; got {array.dtype} for {name}. Write it by "
            "numpy.save(path, numpy.ascontiguousarray(X))."
        )
    return Stored(str(path), array.dtype, array.shape, array.offset)


def _some(array: Stored, chunk: Chunk) -> torch.Tensor:
    """Some rows, read from the file: pages of a memory map would stay in memory."""
    width = math.prod(array.shape[1:])
    place = array.offset + chunk.start * width * array.dtype.itemsize
    numbers = np.fromfile(array.path, array.dtype, chunk.rows * width, offset=place)
    return torch.from_numpy(numbers.reshape(-1, *array.shape[1:]))


# Tables of text, a batch of rows after another


class Csv:
    """Rows of a table of text, read in batches by pandas; they come in their order only, and are counted once.

    Args:
        files: a file, a pattern such as "day_*.csv", whose files come in the order of their names, or a list.
        target: the column of the targets.
        columns: those of the design; by default all others.
        rows: of a batch.
        separator: the character between two cells.

    Raises:
        InputError: no files; on use, columns that are not there or hold no numbers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "day.csv").write_text("a,b,y\\n1,2,0\\n3,4,1\\n5,6,1\\n")
    ...     batches = Csv(f"{folder}/day.csv", "y", rows=2)
    ...     batches.num_data, [tuple(X.shape) for X, y in batches]
    (3, [(2, 2), (1, 2)])
    """

    def __init__(
        self,
        files: str | Path | Iterable[str | Path],
        target: str,
        columns: Sequence[str] | None = None,
        rows: int = ROWS,
        separator: str = ",",
    ) -> None:
        self.paths, self.rows = found(files), checked_rows(rows)
        self.target = read_instance("target", target, str, "is the name of a column")
        self.columns = None if columns is None else read_names("columns", columns, "are names of columns, or None")
        self.separator = read_instance("separator", separator, str, "is the character between two cells")
        if not separator:
            raise InputError("separator is the character between two cells; got an empty text.")
        self._count: int | None = None

    @property
    def num_data(self) -> int:
        """The number of rows of a pass, counted by a first one."""
        if self._count is None:
            self._count = sum(len(y) for _, y in self)
        return self._count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for path in self.paths:
            for frame in frames(path, self.separator, self.rows):
                names = self.columns or [name for name in frame.columns if name != self.target]
                missing = next((name for name in (self.target, *names) if name not in frame.columns), None)
                if missing is not None:
                    raise InputError(f"{path!r} has no column {missing!r}; it has {', '.join(frame.columns)}.")
                X = np.stack([numbers(name, frame[name].to_numpy()) for name in names], 1)
                yield torch.from_numpy(X), torch.from_numpy(numbers(self.target, frame[self.target].to_numpy()))


def frames(path: str, separator: str, rows: int) -> Iterator[Any]:
    """Read a table of text in batches of rows."""
    import pandas as pd

    try:
        with pd.read_csv(path, sep=separator, skipinitialspace=True, chunksize=rows) as frames:
            yield from frames
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise InputError(f"{path!r} is no table of text with the separator {separator!r}: {error}.") from error


# Columns of Parquet files, a batch of rows after another


class Parquet(Reader):
    """Rows of columns in Parquet files, of which batches are read one after another.

    A row group is decoded as a stream; files written in groups of about 100,000 rows take the least memory.

    Args:
        files: a file, a pattern such as "day_*.parquet", whose files come in the order of their names, or a list.
        target: the column of the targets.
        columns: those of the design; by default all others.
        rows: of a batch, at most.
        weights, offset: the columns of row weights and offsets, where there are some.

    Raises:
        InputError: no files, files of other columns, columns that are not there or hold no numbers.

    >>> Parquet("nowhere_*.parquet", "y")
    Traceback (most recent call last):
    torchngvi.errors.InputError: there are no files 'nowhere_*.parquet'.
    """

    def __init__(
        self,
        files: str | Path | Iterable[str | Path],
        target: str,
        columns: Sequence[str] | None = None,
        rows: int = ROWS,
        weights: str | None = None,
        offset: str | None = None,
    ) -> None:
        paths = found(files)
        from pyarrow import parquet

        self.roles = [target, *([weights] if weights or offset else []), *([offset] if offset else [])]
        self.chunks, first = [], None
        for path in paths:
            file = parquet.ParquetFile(path)
            names = file.schema_arrow.names
            first = first or (path, names)
            if names != first[1]:
                raise InputError(f"{path!r} has other columns than {first[0]!r}: {', '.join(names)}. Read them apart.")
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                starts = range(0, count, checked_rows(rows))
                self.chunks += [Chunk(path, group, start, min(rows, count - start)) for start in starts]
        assert first is not None
        given = [name for name in self.roles if name is not None]
        self.columns = list(columns) if columns is not None else [name for name in first[1] if name not in given]
        missing = next((name for name in (*given, *self.columns) if name not in first[1]), None)
        if missing is not None:
            raise InputError(f"{first[0]!r} has no column {missing!r}; it has {', '.join(first[1])}.")
        self.rows = rows

    def read(self, chunk: Chunk) -> Batch:
        """Read one batch, through the part of its row group that is before it."""
        return next(self._of_group([chunk]))

    def __iter__(self) -> Iterator[Batch]:
        for _, chunks in itertools.groupby(self.chunks, key=lambda chunk: chunk[:2]):
            yield from self._of_group(list(chunks))

    def _of_group(self, chunks: Sequence[Chunk]) -> Iterator[Batch]:
        """Batches of one row group, which is decoded as far as the last of them."""
        starts, place = {chunk.start for chunk in chunks}, 0
        for batch in self._group(*chunks[0][:2]):
            if place in starts:
                yield self._tensors(batch)
            place += batch.num_rows
            if place > max(starts):
                return
        raise InputError(f"{chunks[0].path!r} has changed since it was opened. Make another reader.")

    def _group(self, path: str, group: int) -> Iterator[Any]:
        """The batches of one row group, as pyarrow has them."""
        from pyarrow import parquet

        columns = [*self.columns, *(name for name in self.roles if name is not None)]
        with parquet.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
            yield from file.iter_batches(self.rows, row_groups=[group], columns=columns, use_threads=False)

    def _tensors(self, batch: Any) -> Batch:
        def column(name: str) -> Array:
            return numbers(name, batch.column(name).to_numpy(zero_copy_only=False))

        X = np.stack([column(name) for name in self.columns], 1)
        others = (None if name is None else torch.from_numpy(column(name)) for name in self.roles)
        return torch.from_numpy(X), *others
