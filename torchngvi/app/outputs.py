"""Folders of results: no earlier file is replaced unasked, no link is followed, no file is left half written."""

import csv
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from torchngvi.app.config import file_name
from torchngvi.errors import InputError

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")  # how a cell begins that a spreadsheet would evaluate
_QUOTE = "'"


class OutputFolder:
    """A folder for the results of a run, checked before the run begins.

    Args:
        path: the folder, which need not exist.  Neither it nor a folder above it may be a link where the path is
            relative or below the current folder; of any other path only the folder itself.
        overwrite: whether files that are there already may be replaced.

    Raises:
        InputError: a file, a link, a folder without permission, or one that holds files without ``overwrite``.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with OutputFolder(f"{folder}/results").writing() as place:
    ...         write_rows(place / "table.csv", ["name"], [["age"]])
    ...     read_frame(Path(folder) / "results" / "table.csv")["name"].tolist()
    ['age']
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(file_name("out", str(path)))
        self._ours = overwrite
        _check(self.path)
        if not overwrite and _is_taken(self.path):
            raise InputError(
                f"out must be a new or an empty folder, so that no earlier results are lost; {str(self.path)!r} holds "
                "files. Say --overwrite to replace them, or choose another folder (--out)."
            )

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """A block with a place to write files; they move into the folder together, when all of them are complete.

        Where another run has filled the folder since it was checked, they go to the next free name instead.

        Returns:
            A context manager that gives the place.

        Raises:
            InputError: the files cannot be written.
        """
        try:
            if not self._ours and _is_taken(self.path):
                names = (self.path.with_name(f"{self.path.name}-{number}") for number in range(2, 1000))
                self.path = next(path for path in names if not os.path.lexists(path))
            self._ours = True
            _check(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.path) as part:
                yield Path(part)
                for file in Path(part).iterdir():
                    os.replace(file, self.path / file.name)  # of a link this replaces the link, not what it names
        except OSError as error:
            raise InputError(
                f"the results cannot be written into {str(self.path)!r} ({error}). Choose another folder (--out)."
            ) from error


def _named(folder: Path) -> list[Path]:
    """The folder and those above it which the caller has named: all below the current one, no other above it.

    What leads to the current folder, or begins an absolute path elsewhere, is of the system, whose links are followed.
    """
    if not folder.is_absolute():
        return [folder, *folder.parents]
    here = Path.cwd()
    return [folder, *(path for path in folder.parents if here in path.parents)]


def _check(folder: Path) -> None:
    link = next((path for path in _named(folder) if path.is_symlink()), None)
    if link is not None:
        raise InputError(
            f"out must be a folder itself, as links are not followed; {str(link)!r} is a link to "
            f"{os.readlink(link)!r}. Name that folder (--out)."
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"out must be a folder; {str(existing)!r} is a file. Choose another name (--out).")
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise InputError(
            f"out must be a folder where files can be written; in {str(existing)!r} none can ({error}). "
            "Choose another folder (--out)."
        ) from error


def _is_taken(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


# ------------------------------------------------------------------------------------ csv


def cell(value: Any) -> Any:
    """A value for a csv file; a text that a spreadsheet would take for a formula gets a quote in front.

    A text that begins with a quote gets one too, so that the original can be told.

    Args:
        value: a text or a number.

    Returns:
        The value to write.

    >>> cell("=1+1"), cell("age"), cell(-1.5)
    ("'=1+1", 'age', -1.5)
    """
    return _QUOTE + value if isinstance(value, str) and value.startswith((*_FORMULAS, _QUOTE)) else value


def _text(value: Any) -> Any:
    """The text that `cell` was given, from what it wrote."""
    return value.removeprefix(_QUOTE) if isinstance(value, str) else value


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write rows as a csv file; texts are written as `cell` gives them.

    Args:
        path: the file.
        header: the names of the columns.
        rows: the rows.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([cell(value) for value in row] for row in rows)


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame as a csv file; texts are written as `cell` gives them.

    Args:
        path: the file.
        frame: the frame, without its index.
    """
    texts = frame.select_dtypes(exclude="number")
    frame.assign(**{name: texts[name].map(cell) for name in texts}).to_csv(
        path,
        index=False,
        lineterminator="\r\n",  # with which texts that hold either are quoted
    )


def read_frame(path: Path) -> pd.DataFrame:
    """Read a csv file that `write_frame` has written.

    Args:
        path: the file.

    Returns:
        The frame, with its texts as they were.
    """
    frame = pd.read_csv(path)
    texts = frame.select_dtypes(exclude="number")
    return frame.assign(**{name: texts[name].map(_text) for name in texts})
