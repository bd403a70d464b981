"""The columns of a table: which has which role, and what cannot be used."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from torchngvi.app.encoding import Encoding, is_number, learned
from torchngvi.app.memory import Budget
from torchngvi.errors import InputError
from torchngvi.messages import hint

Array = np.ndarray[Any, Any]

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
    encoding: Encoding | None = None  # how X came from a table with texts
    notes: tuple[str, ...] = ()  # what was found in reading, for the report


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
        parts = column.split(",")
        several = role in ("drop", "categorical") and len(parts) > 1 and set(parts) <= set(columns)
        told = f" Separate them by spaces, --{role} {shlex.join(parts)}." if several else hint(column, columns)
        raise InputError(f"{role} column {column!r} is not in the data.{told} The columns are: {shown}.")


def from_frame(
    frame: pd.DataFrame,
    columns: dict[str, str | None],
    drop: Iterable[str],
    budget: Budget,
    *,
    categorical: Iterable[str] = (),
    impute: bool = False,
) -> Table:
    """The data set in a frame: target, weights and offset apart, categories as indicators.

    Args:
        frame: the columns, one row an observation.
        columns: the name of the column of each role, "target", "weights" and "offset"; None for no such column.
        drop: the names of columns to leave out.
        budget: the memory that the run may take.
        categorical: columns of numbers that are categories; those of texts always are.
        impute: whether entries may be missing; of numbers they stay so, of categories they become the commonest.

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
    chosen = [("drop", name) for name in drop] + [("categorical", name) for name in categorical]
    for role, name in [*named.items(), *chosen]:
        _require(name, role, frame.columns)
    if len(frame) == 0:
        raise InputError("the table has column names and no rows: a data set needs at least two. Check the file.")
    features = frame.drop(columns=[*set(named.values()), *drop], errors="ignore")
    if features.shape[1] == 0:
        raise InputError(f"no column is left to predict {columns['target']!r} from. Check target and drop.")
    features = features.assign(**{name: _beyond_64_bits(features[name]) for name in _texts(features)})
    given = {role: _beyond_64_bits(frame[name]) for role, name in named.items()}
    used = {name: features[name] for name in features.columns} | {named[role]: given[role] for role in given}
    refuse_unusable({name: column.to_numpy() for name, column in used.items()}, named, impute=impute)
    extra = {role: numbers(column, role) for role, column in given.items() if role != "target"}
    encoding = learned(features, categorical, budget)
    gaps = {c: int(features[c.name].isna().sum()) for c in encoding.categories}
    notes = (f"{n} missing entries of {c.name} became {c.usual!r}, its commonest level" for c, n in gaps.items() if n)
    return Table(
        encoding.design(features),
        _plain(given["target"]),
        encoding.names,
        named["target"],
        (),
        extra.get("weights"),
        extra.get("offset"),
        encoding,
        tuple(notes),
    )


def _beyond_64_bits(column: pd.Series) -> pd.Series:
    """Integers that need more than 64 bits come as objects or texts: as float64 where that tells all of them apart."""
    if is_number(column):
        return column
    numbers = pd.to_numeric(column.astype(str), errors="coerce").astype(np.float64)
    exact = numbers.notna().all() and numbers.nunique() == column.nunique()
    return numbers if exact else column


def _texts(features: pd.DataFrame) -> list[str]:
    """The names of the columns that hold no numbers."""
    return [name for name in features.columns if not is_number(features[name])]


def _plain(column: pd.Series) -> Array:
    """Numbers as they are, everything else as texts."""
    return column.to_numpy() if is_number(column) else column.astype(str).to_numpy(dtype=str)


def numbers(column: pd.Series, role: str) -> Array:
    """The entries of a column that must hold numbers.

    Args:
        column: the column.
        role: what it is, for the message.

    Returns:
        The entries, float64.

    Raises:
        InputError: texts.
    """
    if not is_number(column):
        raise InputError(f"{role} column {column.name!r} must hold numbers; got texts such as {column.iloc[0]!r}.")
    return column.to_numpy(dtype=np.float64)


def _instead(name: str, named: dict[str, str] | None) -> str:
    """What to do without a column; nothing where columns cannot be named."""
    if named is None:
        return ""
    role = next((role for role, column in named.items() if column == name), None)
    return f"leave the column out (--drop {shlex.quote(name)})" if role is None else f"name another column (--{role})"


def refuse_unusable(
    columns: dict[str, Array],
    named: dict[str, str] | None,  # the columns that have a role; None where columns have no names
    *,
    impute: bool = False,
    fillable: bool = True,
) -> None:
    """Check that no column has missing or infinite entries, or one whose square overflows.

    Args:
        columns: the entries by the name of the column.
        named: the column of each role, for the message; None where columns have no names.
        impute: whether entries of the columns without a role may be missing, as long as some are there.
        fillable: whether missing entries could be filled in, for the message.

    Raises:
        InputError: a column that cannot be used.
    """
    bad, roles = {}, set((named or {}).values())
    for name, column in columns.items():
        missing, sizes = _missing_and_sizes(column)
        if impute and name not in roles:
            missing = missing if missing.all() else sizes == np.inf
        if missing.any():
            bad[name] = int(missing.sum())
        elif len(sizes) and (size := float(np.nanmax(sizes))) > _LARGEST:
            raise InputError(
                f"column {name!r} has entries of size {size:.3g}; sums of squares overflow from {_LARGEST:g} on. "
                f"{', or '.join(filter(None, ['Divide it by a constant', _instead(name, named)]))}."
            )
    if not bad:
        return
    first = max(bad, key=lambda name: bad[name])
    more = "1 more column has" if len(bad) == 2 else f"{len(bad) - 1} more columns have"
    others = f" (and {more} some)" if len(bad) > 1 else ""
    rows = len(next(iter(columns.values())))
    fill = fillable and named is not None and first not in roles and not impute
    advice = "fill them in (--impute median), drop those rows" if fill else "drop or impute those rows"
    instead = _instead(first, named)
    if instead:
        empty = bad[first] == rows  # with nothing to fill in from, and no row to keep
        advice = instead if empty else f"{advice}, or {instead}"
    raise InputError(
        f"column {first!r} has missing or infinite entries in {bad[first]} of {rows} rows{others}. "
        f"{advice[0].upper()}{advice[1:]}."
    )


def _missing_and_sizes(column: Array) -> tuple[Array, Array]:
    """Which entries are missing or infinite, and the absolute values of numbers with a fraction."""
    if column.dtype.kind != "f":
        return pd.isna(column), np.zeros(0)
    return ~np.isfinite(column), np.abs(column)
