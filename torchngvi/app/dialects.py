"""How a table of text is written: its encoding, its separator and its decimal mark, found from its first lines."""

import csv
import re
from collections.abc import Sequence
from typing import NamedTuple

from torchngvi.errors import InputError

_LINES = 50  # that are looked at
SEPARATORS = (",", ";", "\t", "|")
_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_COMMA = re.compile(r"[-+]?\d+,\d+([eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?")


class Dialect(NamedTuple):
    """How the cells of a table of text are told apart and read.

    >>> dialect(b"age;dose\\n50;1,5\\n60;2,25\\n", ",", "a.csv")
    Dialect(encoding='utf-8-sig', separator=';', decimal=',')
    """

    encoding: str
    separator: str
    decimal: str

    def notes(self, usual: str) -> tuple[str, ...]:
        """What is unlike a file in UTF-8 with the usual separator and decimal points."""
        found = []
        if self.separator != usual:
            found.append(f"separated by {_NAMES[self.separator]}")
        if self.decimal == ",":
            found.append("with decimal commas")
        if self.encoding != "utf-8-sig":
            found.append("in Latin-1 (Windows-1252)")
        return (f"the table was read as {', '.join(found)}",) if found else ()


def dialect(
    start: bytes,  # the first lines of the file, whole
    usual: str,  # the separator that the ending of its name stands for
    name: str,
) -> Dialect:
    """Find how a table of text is written.

    Args:
        start: its first bytes, some dozens of lines.
        usual: the separator that is kept where it fits.
        name: the file, for messages.

    Returns:
        Its encoding, separator and decimal mark.

    Raises:
        InputError: no line of column names.
    """
    encoding = _encoding(start)
    lines = start.decode(encoding, errors="replace").splitlines()
    lines = [line for line in lines[:_LINES] if line.strip()]
    separator = _separator(lines, usual)
    rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True))
    if len(rows) > 1 and all(_NUMBER.fullmatch(cell.strip()) for cell in rows[0]):
        names = separator.join(f"x{k + 1}" for k in range(min(3, len(rows[0]))))
        raise InputError(
            f"{name!r} has no line of column names: its first line is {lines[0][:60]!r}. Put a line in front with one "
            f"name for each of the {len(rows[0])} columns, such as {names}."
        )
    cells = [cell.strip() for row in rows[1:] for cell in row]
    commas = separator != "," and any(_COMMA.fullmatch(cell) for cell in cells)
    points = any(_NUMBER.fullmatch(cell) and "." in cell for cell in cells)
    return Dialect(encoding, separator, "," if commas and not points else ".")


def _encoding(start: bytes) -> str:
    """UTF-8 where the bytes are; a character that the end of the piece cuts does not count."""
    try:
        start.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 4:
            return "cp1252"
    return "utf-8-sig"


def _separator(lines: Sequence[str], usual: str) -> str:
    """Of those that cut every line into as many cells as the first, that which leaves the most numbers."""
    shares = {}
    for mark in SEPARATORS:
        rows = list(csv.reader(lines, delimiter=mark, skipinitialspace=True))
        if rows and len(rows[0]) > 1 and all(len(row) == len(rows[0]) for row in rows):
            cells = [cell.strip() for row in rows for cell in row]
            shares[mark] = sum(bool(_NUMBER.fullmatch(cell)) for cell in cells) / len(cells)
    return max(shares, key=lambda mark: (shares[mark], mark == usual), default=usual)
