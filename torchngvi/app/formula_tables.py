"""Tables for a formula: missing entries filled in or refused by name, and its columns kept with a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from torchngvi.adapters.table_checks import is_number
from torchngvi.adapters.terms import FormulaColumns
from torchngvi.app.contents import Content
from torchngvi.errors import InputError
from torchngvi.messages import listed

Filling = dict[str, float | str | bool]  # of columns, what stands for a missing entry


def dated(frame: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """The table, with dates that name groups as texts, so that those of a csv and of a Parquet file are the same."""
    dates = [name for name in groups if name in frame and getattr(frame[name].dtype, "kind", "O") in "mM"]
    return frame.assign(**{name: frame[name].astype(str) for name in dates})


def filling(frame: pd.DataFrame, columns: FormulaColumns) -> Filling:
    """What stands for missing entries of the predictors: medians of numbers, the commonest of all else.

    >>> people = pd.DataFrame({"age": [20.0, None, 40.0], "sex": ["f", "f", None]})
    >>> filling(people, FormulaColumns((), ("age", "sex"), ()))
    {'age': 30.0, 'sex': 'f'}
    """
    found: Filling = {}
    for name in columns.predictors:
        if name not in frame or name in columns.groups or frame[name].isna().all():
            continue
        there = frame[name].dropna()
        number = is_number(there) and not pd.api.types.is_bool_dtype(there)
        value = there.median() if number else there.mode().iloc[0]
        found[name] = value.item() if isinstance(value, np.generic) else value
    return found


def filled(frame: pd.DataFrame, fill: Filling) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The table without missing entries in these columns, and a note of each that had some."""
    gaps = {name: int(frame[name].isna().sum()) for name in fill if name in frame}
    gaps = {name: count for name, count in gaps.items() if count}
    notes = (
        f"{count} missing entries of {name} became {_shown(fill[name])}, its "
        f"{'commonest entry' if isinstance(fill[name], str | bool) else 'median'} (--impute)"
        for name, count in gaps.items()
    )
    return frame.assign(**{name: frame[name].fillna(fill[name]) for name in gaps}), tuple(notes)


def _shown(value: float | str | bool) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def refuse_missing(frame: pd.DataFrame, columns: FormulaColumns, *, impute: bool, weights: str | None = None) -> None:
    """Check that the table of a fit misses no entries that the formula needs, after what could be filled in."""
    fixed = (*columns.response, *columns.groups, *((weights,) if weights else ()))
    counts = {name: int(frame[name].isna().sum()) for name in (*columns.predictors, *fixed) if name in frame}
    bad = [name for name, count in counts.items() if count]
    if not bad:
        return
    told = listed([f"{counts[name]} of {name}" for name in bad])
    empty = [name for name in bad if counts[name] == len(frame)]
    never = [name for name in bad if name in fixed]
    if never:
        what = "the response, the groups and the weights are not filled in"
        advice = f"{what}: leave out the rows that miss {listed(never)}"
    elif impute or empty:
        advice = f"there is no entry of {listed(empty or bad)} to fill in from: leave it out of the formula"
    else:
        advice = "fill them in (--impute median), or leave those rows out"
    raise InputError(f"the table misses entries in its {len(frame)} rows: {told}. {advice[0].upper()}{advice[1:]}.")


# ------------------------------------------------------------------------------------ kept with a run


def packed(frame: pd.DataFrame) -> list[list[Any]]:
    """The columns as tensors and plain values, for ``torch.load(weights_only=True)``.

    >>> from pathlib import Path
    >>> table = pd.DataFrame({"ward": ["A", "B"], "age": [30.0, 40.0]})
    >>> bool((unpacked(Content(Path("posterior.pt"), {"table": packed(table)})) == table).all(axis=None))
    True
    """
    return [[str(name), *_packed(column)] for name, column in frame.items()]


def _packed(column: pd.Series) -> list[Any]:
    if isinstance(column.dtype, pd.CategoricalDtype):
        kind = "ordered" if column.cat.ordered else "categories"
        return [kind, torch.tensor(column.cat.codes.to_numpy(dtype=np.int64)), _plain(column.cat.categories)]
    kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
    kind = getattr(column.dtype, "kind", "O") if is_number(column) else "O"
    if kind in kinds:
        return ["numbers", torch.tensor(column.to_numpy(dtype=kinds[kind])), []]
    return ["texts", _plain(column), []]


def _plain(values: Any) -> list[Any]:
    return [value if isinstance(value, str | bool | int | float) else str(value) for value in values.tolist()]


def unpacked(values: Content) -> pd.DataFrame:
    """The table of which `packed` was made."""
    columns, found = values.take("table", list), {}
    for k, column in enumerate(columns):
        name = f"table[{k}]"
        right = isinstance(column, list) and len(column) == 4 and type(column[0]) is str and column[0] not in found
        values.require(right and isinstance(column[3], list), name, "a new name, a kind, entries and levels")
        found[column[0]] = _unpacked(values, name, *column[1:])
    values.require(len({len(entries) for entries in found.values()}) == 1, "table", "columns of one length")
    return pd.DataFrame(found)


def _unpacked(values: Content, name: str, kind: Any, entries: Any, levels: list[Any]) -> Any:
    plain = all(type(value) in (str, bool, int, float) for value in (*levels, *(entries if kind == "texts" else ())))
    values.require(plain, name, "of texts and numbers")
    if kind in ("ordered", "categories"):
        codes = values.tensor(name, (None,), torch.int64, of={name: entries})
        values.require(bool(((codes >= 0) & (codes < len(levels))).all()), name, "of its levels")
        return pd.Categorical.from_codes(codes.numpy(), levels, ordered=kind == "ordered")
    values.require(not levels, name, "without levels")
    if kind == "texts":
        values.require(isinstance(entries, list) and len(entries) > 0, name, "of entries")
        return entries
    dtype: Any = getattr(entries, "dtype", None)
    values.require(kind == "numbers" and dtype in (torch.bool, torch.int64, torch.float64), name, "of numbers or texts")
    return values.tensor(name, (None,), dtype, of={name: entries}).numpy()


def classes_of(formula: str, y: np.ndarray, table: Mapping[str, Any]) -> tuple[str, str]:
    """The names of failure and success: of ``died[yes]`` the level, of two numbers these.

    >>> classes_of("died[yes] ~ x + (1 | ward)", np.array([0.0, 1.0]), {"died": pd.Series(["no", "yes"])})
    ('no', 'yes')
    >>> classes_of("died ~ x + (1 | ward)", np.array([0.0, 1.0]), {"died": pd.Series([0, 1])})
    ('0', '1')
    """
    name, bracket, rest = formula.partition("~")[0].strip().partition("[")
    if not bracket:
        low, high = np.unique(y)[[0, -1]]
        return f"{low:g}", f"{high:g}"
    success = rest.rstrip("] ").strip("'\"")
    others = [str(level) for level in pd.unique(table[name.strip()]) if str(level) != success]
    return others[0] if len(others) == 1 else f"not {success}", success
