"""Tables of text, a batch of rows after another."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchngvi.adapters.files.reader import ROWS, checked_rows, found, numbers
from torchngvi.arguments import read_instance, read_names
from torchngvi.errors import InputError


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
