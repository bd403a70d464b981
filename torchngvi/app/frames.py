"""Files of rows as frames of pandas, a batch after another, each file read as one that is taken into memory."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from torchngvi.adapters.files.reader import found
from torchngvi.adapters.table_checks import check_names, check_rows, without_unnamed
from torchngvi.app.readers import (
    DELIMITED,
    ending,
    parsed,
    readable,
    readable_parquet,
    text_dialect,
    text_notes,
    without_nullable,
)
from torchngvi.errors import InputError
from torchngvi.messages import listed


class Frames:
    """The rows of csv, tsv or Parquet files, as frames of pandas, for one pass after another.

    >>> Frames("nowhere_*.csv", 10)
    Traceback (most recent call last):
    torchngvi.errors.InputError: there are no files 'nowhere_*.csv'.
    """

    def __init__(self, data: str, rows: int) -> None:
        self.paths, self.rows = [Path(path) for path in found(data)], rows
        for path in self.paths:
            if ending(path) not in (*DELIMITED, ".parquet"):
                raise InputError(
                    f"rows are read in batches from csv, tsv and Parquet files; got {str(path)!r}. For a model of npy "
                    "files see torchngvi.adapters.files.Npy in Python."
                )

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about the first file."""
        path = self.paths[0]
        return () if ending(path) == ".parquet" else text_notes(path, text_dialect(path))

    def __iter__(self) -> Iterator[pd.DataFrame]:
        columns = None
        for path in self.paths:
            for frame in _of_parquet(path, self.rows) if ending(path) == ".parquet" else _of_text(path, self.rows):
                columns = columns if columns is not None else list(frame.columns)
                if list(frame.columns) != columns:
                    raise InputError(
                        f"{str(path)!r} has other columns than {str(self.paths[0])!r}: {listed(frame.columns)}. Fit "
                        "files of the same columns."
                    )
                yield frame


def _of_text(path: Path, rows: int) -> Iterator[pd.DataFrame]:
    how = text_dialect(path)
    with readable(path), parsed(path, how, chunksize=rows) as frames:
        for frame in frames:
            check_rows(frame, how, repr(str(path)))
            frame, _ = without_unnamed(frame)
            frame.columns = check_names(frame.columns)
            yield frame


def _of_parquet(path: Path, rows: int) -> Iterator[pd.DataFrame]:
    from pyarrow import parquet

    with readable_parquet(path), parquet.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
        for batch in file.iter_batches(rows, use_threads=False):
            yield without_nullable(batch.to_pandas())
