"""What a formula asks of a table: columns that are there, whole, and numbers where numbers are needed."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchngvi.errors import InputError
from torchngvi.messages import hint


def complete(frame: Any, names: Sequence[str], asking: str = "The formula") -> None:
    """Check that a table has columns, without missing values.

    Raises:
        InputError: something that is no table, columns that it lacks, or missing values.
    """
    if not (hasattr(frame, "columns") and hasattr(frame, "iloc")):
        raise InputError(f"A formula needs a pandas DataFrame with its columns; got {type(frame).__name__}.")
    lacking = [name for name in names if name not in frame]
    if lacking:
        told = hint(lacking[0], map(str, frame.columns))
        raise InputError(
            f"{asking} names {', '.join(lacking)}; the table has {', '.join(map(str, frame.columns))}.{told}"
        )
    missing = frame[list(names)].isna()
    if missing.any(axis=None):
        counts = ", ".join(f"{count} of {name}" for name, count in missing.sum().items() if count)
        raise InputError(f"The table misses values: {counts}. Leave those rows out, table.dropna(), or impute them.")


def check_dates(frame: Any, names: set[str]) -> None:
    """Check that no column holds dates or times, or complex numbers, of which the imaginary part would be lost.

    Raises:
        InputError: if one does.
    """
    for name in sorted(names):
        if getattr(frame[name].dtype, "kind", "") == "c":
            raise InputError(f"The column {name} of the table is complex. Take its real part, or its size.")
    dates = [name for name in sorted(names) if getattr(frame[name].dtype, "kind", "") in "mM"]
    if dates:
        name = dates[0]
        raise InputError(
            f"The column {name} of the table holds dates or times ({frame[name].dtype}), where a formula needs numbers "
            f"or categories. Count the days, for instance: (table.{name} - table.{name}.min()).dt.days."
        )


def check_finite(name: str, values: np.ndarray) -> None:
    """Check that a term of a formula is finite, which the logarithm of a negative number is not.

    Raises:
        InputError: if it is not.

    >>> check_finite("log(x)", np.ones((3, 1)))
    """
    bad = ~np.isfinite(values.reshape(len(values), math.prod(values.shape[1:]))).all(1)
    if bad.any():
        raise InputError(
            f"The term {name} of the formula is not finite in {bad.sum()} of {len(bad)} rows, the first of them row "
            f"{int(bad.argmax())}, counted from 0. Check what it is computed from."
        )


def used(frame: Any) -> Any:
    """The table without categories that no row has."""
    kept = {
        name: column.cat.remove_unused_categories() for name, column in frame.items() if str(column.dtype) == "category"
    }
    return frame.assign(**kept) if kept else frame
