"""The columns of a table: which has which role, what cannot be used, and texts as indicators."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from torchngvi.app.config import hint
from torchngvi.app.memory import Budget
from torchngvi.errors import InputError

Array = np.ndarray[Any, Any]

MOST_LEVELS = 50  # of a text column
_LARGEST = 1e140  # entry of a column


@dataclass(frozen=True)
class Table:
    """A data set as it was read: the design, the targets, the names of columns, and the row weights and offsets."""

    X: Array  # (N, D), float64
    y: Array  # (N,), numbers or texts
    names: tuple[str, ...]  # of the columns of X
    target: str  # name of y
    labels: tuple[str, ...] = ()  # what y = 0, 1, .. stand for, where the source says it
    weights: Array | None = None  # (N,)
    offset: Array | None = None  # (N,)


def kept(names: tuple[str, ...], drop: Iterable[str]) -> list[int]:
    """The places of the columns that are not left out.

    Args:
        names: the names of all columns.
        drop: the names of those to leave out.

    Returns:
        Indices into the names.

    Raises:
        InputError: a name that is not there.

    >>> kept(("age", "id", "weight"), ["id"])
    [0, 2]
    """
    drop = set(drop)
    for name in drop:
        _require(name, "drop", names)
    return [index for index, name in enumerate(names) if name not in drop]


def _require(column: str, role: str, columns: Iterable[str]) -> None:
    columns = list(columns)
    if column not in columns:
        shown = ", ".join(columns[:30]) + (f", .. ({len(columns)} in all)" if len(columns) > 30 else "")
        raise InputError(
            f"{role} column {column!r} is not in the data.{hint(column, columns)} The columns are: {shown}."
        )


def from_frame(frame: pd.DataFrame, columns: dict[str, str | None], drop: Iterable[str], budget: Budget) -> Table:
    """The data set in a frame: target, weights and offset apart, texts as indicators.

    Args:
        frame: the columns, one row an observation.
        columns: the name of the column of each role, "target", "weights" and "offset"; None for no such column.
        drop: the names of columns to leave out.
        budget: the memory that the run may take.

    Returns:
        The table.

    Raises:
        InputError: columns that are missing or cannot be used, no rows, too little memory.

    >>> frame = pd.DataFrame({"age": [20.0, 30.0], "sex": ["f", "m"], "y": [0, 1]})
    >>> from_frame(frame, {"target": "y", "weights": None, "offset": None}, (), Budget()).names
    ('age', 'sex=m')
    """
    if columns["target"] is None:
        raise InputError(
            f"target is missing: name the column to predict (--target). "
            f"The columns are: {', '.join(frame.columns[:30])}."
        )
    named = {role: name for role, name in columns.items() if name is not None}
    for role, name in [*named.items(), *(("drop", name) for name in drop)]:
        _require(name, role, frame.columns)
    if len(frame) == 0:
        raise InputError("the table has column names and no rows: a data set needs at least two. Check the file.")
    features = frame.drop(columns=[*set(named.values()), *drop], errors="ignore")
    if features.shape[1] == 0:
        raise InputError(f"no column is left to predict {columns['target']!r} from. Check target and drop.")
    features = features.assign(**{name: _beyond_64_bits(features[name]) for name in _texts(features)})
    given = {role: _beyond_64_bits(frame[name]) for role, name in named.items()}
    used = {name: features[name] for name in features.columns} | {named[role]: given[role] for role in given}
    refuse_unusable({name: column.to_numpy() for name, column in used.items()}, named)
    extra = {role: _numbers(column, role) for role, column in given.items() if role != "target"}
    design = _with_indicators(features, budget)
    return Table(
        design.to_numpy(dtype=np.float64),
        _plain(given["target"]),
        tuple(str(name) for name in design.columns),
        named["target"],
        (),
        **extra,
    )


def _beyond_64_bits(column: pd.Series) -> pd.Series:
    """Integers that need more than 64 bits come as objects or texts: as float64 where that tells all of them apart."""
    if _is_number(column):
        return column
    numbers = pd.to_numeric(column.astype(str), errors="coerce").astype(np.float64)
    exact = numbers.notna().all() and numbers.nunique() == column.nunique()
    return numbers if exact else column


def _is_number(column: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column))


def _texts(features: pd.DataFrame) -> list[str]:
    """The names of the columns that hold no numbers."""
    return [name for name in features.columns if not _is_number(features[name])]


def _plain(column: pd.Series) -> Array:
    """Numbers as they are, everything else as texts."""
    return column.to_numpy() if _is_number(column) else column.astype(str).to_numpy(dtype=str)


def _numbers(column: pd.Series, role: str) -> Array:
    if not _is_number(column):
        raise InputError(f"{role} column {column.name!r} must hold numbers; got texts such as {column.iloc[0]!r}.")
    return column.to_numpy(dtype=np.float64)


def _with_indicators(features: pd.DataFrame, budget: Budget) -> pd.DataFrame:
    """Texts as indicator columns name=level, without the first level."""
    texts = _texts(features)
    width = features.shape[1] - len(texts)
    for name in texts:
        column = features[name].astype(str)
        numeric = pd.to_numeric(column, errors="coerce").notna()
        if 0.5 < numeric.mean() < 1:
            bad = column[~numeric]
            raise InputError(
                f"column {name!r} is numbers except for {len(bad)} of {len(column)} rows, the first {bad.iloc[0]!r}. "
                f"Mend them, or leave the column out (--drop {name})."
            )
        if (levels := column.nunique()) > MOST_LEVELS:
            raise InputError(
                f"text column {name!r} has {levels} different values, more than {MOST_LEVELS}: it looks like names or "
                f"dates, not categories. Leave it out (--drop {name})."
            )
        width += levels - 1
    budget.require("the table", len(features), width)
    return pd.get_dummies(features, columns=texts, drop_first=True, prefix_sep="=", dtype=float)


def _instead(name: str, named: dict[str, str] | None) -> str:
    """What to do without a column; nothing where columns cannot be named."""
    if named is None:
        return ""
    role = next((role for role, column in named.items() if column == name), None)
    return f", or leave the column out (--drop {name})" if role is None else f", or name another column (--{role})"


def refuse_unusable(
    columns: dict[str, Array],
    named: dict[str, str] | None,  # the columns that have a role; None where columns have no names
) -> None:
    """Check that no column has missing or infinite entries, or one whose square overflows.

    Args:
        columns: the entries by the name of the column.
        named: the column of each role, for the message; None where columns have no names.

    Raises:
        InputError: a column that cannot be used.
    """
    bad = {}
    for name, column in columns.items():
        missing = ~np.isfinite(column) if column.dtype.kind == "f" else pd.isna(column)
        if missing.any():
            bad[name] = int(missing.sum())
        elif column.dtype.kind == "f" and len(column) and (size := float(np.abs(column).max())) > _LARGEST:
            raise InputError(
                f"column {name!r} has entries of size {size:.3g}; sums of squares overflow from {_LARGEST:g} on. "
                f"Divide it by a constant{_instead(name, named)}."
            )
    if not bad:
        return
    first = max(bad, key=lambda name: bad[name])
    others = f" (and {len(bad) - 1} more columns have some)" if len(bad) > 1 else ""
    rows = len(next(iter(columns.values())))
    raise InputError(
        f"column {first!r} has missing or infinite entries in {bad[first]} of {rows} rows{others}. "
        f"Drop or impute those rows{_instead(first, named)}."
    )
