"""The columns of a table: which has which role, and what cannot be used."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from torchngvi.adapters.table_checks import (
    COMMAND,
    Door,
    cleaned,
    is_number,
    of_codes,
    of_copies,
    of_identifiers,
    of_unusable,
    refuse,
)
from torchngvi.app.encoding import Encoding, learned
from torchngvi.app.memory import Budget
from torchngvi.errors import InputError
from torchngvi.messages import hint

Array = np.ndarray[Any, Any]


class Read(NamedTuple):
    """A table as it was read from a file.

    Attributes:
        frame: the table.
        notes: what is unusual about it.
        zeros: columns of whole numbers some of whose entries a zero leads.
        comma: whether decimals are behind commas.
    """

    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    comma: bool = False


_AS_IT_IS = Read(pd.DataFrame())


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

    >>> kept(("age", "id", "weight"), ["id"])
    [0, 2]
    """
    drop = set(drop)
    for name in drop:
        refuse([fault] if (fault := _of_lacking(name, "drop", names)) else [])
    return [index for index, name in enumerate(names) if name not in drop]


def _of_lacking(column: str, role: str, columns: Iterable[str]) -> str | None:
    """What is wrong with a column that is named and not there."""
    columns = list(columns)
    if column in columns:
        return None
    shown = ", ".join(columns[:30]) + (f", .. ({len(columns)} in all)" if len(columns) > 30 else "")
    parts = column.split(",")
    several = role in ("drop", "categorical") and len(parts) > 1 and set(parts) <= set(columns)
    told = f" Separate them by spaces, --{role} {shlex.join(parts)}." if several else hint(column, columns)
    return f"{role} column {column!r} is not in the data.{told} The columns are: {shown}."


def from_frame(
    frame: pd.DataFrame,
    columns: dict[str, str | None],
    drop: Iterable[str],
    budget: Budget,
    *,
    categorical: Iterable[str] = (),
    impute: bool = False,
    read: Read = _AS_IT_IS,
) -> Table:
    """The data set in a frame: target, weights and offset apart, categories as indicators.

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
    asked = [*named.items(), *(("drop", name) for name in drop), *(("categorical", name) for name in categorical)]
    refuse([fault for role, name in asked if (fault := _of_lacking(name, role, frame.columns))])
    if len(frame) == 0:
        raise InputError("the table has column names and no rows: a data set needs at least two. Check the file.")
    names, chosen = [name for name in frame.columns if name not in {*named.values(), *drop}], set(categorical)
    if not names:
        raise InputError(f"no column is left to predict {columns['target']!r} from. Check target and drop.")
    found = cleaned(frame, names, COMMAND, chosen=chosen, comma=read.comma)
    frame, notes, faults = found.frame, found.notes, [*found.faults]
    for role, name in named.items():
        of_role = cleaned(frame, [name], Door(f"name another column (--{role})", ""), comma=read.comma)
        frame, notes, faults = of_role.frame, (*notes, *of_role.notes), [*faults, *of_role.faults]
        if role != "target" and not of_role.faults and not is_number(frame[name]):
            faults.append(_of_texts(frame[name], role))
    used = {name: frame[name].to_numpy() for name in (*names, *named.values())}
    faults += of_unusable(used, named, impute=impute)
    features, encoding = frame[names], None
    try:
        encoding = learned(features, chosen, budget)
    except InputError as error:
        refuse([*faults, str(error)])
    refuse(faults)
    assert encoding is not None
    extra = {role: frame[name].to_numpy(dtype=np.float64) for role, name in named.items() if role != "target"}
    measured = [column.name for column in encoding.columns if not column.levels]
    gaps = {c: int(features[c.name].isna().sum()) for c in encoding.categories}
    notes = (
        *notes,
        *of_identifiers(features, measured, COMMAND, read.zeros),
        *of_codes(features, measured, COMMAND),
        *of_copies(frame[[*names, named["target"]]]),
        *(f"{n} missing entries of {c.name} became {c.usual!r}, its commonest level" for c, n in gaps.items() if n),
    )
    return Table(
        encoding.design(features),
        _plain(frame[named["target"]]),
        encoding.names,
        named["target"],
        (),
        extra.get("weights"),
        extra.get("offset"),
        encoding,
        notes,
    )


def _plain(column: pd.Series) -> Array:
    """Numbers as they are, everything else as texts."""
    return column.to_numpy() if is_number(column) else column.astype(str).to_numpy(dtype=str)


def numbers(column: pd.Series, role: str) -> Array:
    """The entries of a column that must hold numbers."""
    if not is_number(column):
        raise InputError(_of_texts(column, role))
    return column.to_numpy(dtype=np.float64)


def _of_texts(column: pd.Series, role: str) -> str:
    return f"{role} column {column.name!r} must hold numbers; got texts such as {column.iloc[0]!r}."
