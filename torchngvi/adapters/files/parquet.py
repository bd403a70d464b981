"""Columns of Parquet files, a batch of rows after another."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchngvi.adapters.files.reader import ROWS, Array, Batch, Chunk, Reader, checked_rows, found, numbers
from torchngvi.errors import InputError


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
