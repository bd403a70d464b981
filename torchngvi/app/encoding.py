"""From the columns of a table to those of a design, learned once and kept with the run: numbers, and categories.

A column of categories becomes one indicator column ``name=level`` for each level but the first, its baseline.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from torchngvi.app.memory import Budget
from torchngvi.errors import InputError
from torchngvi.messages import SHOWN, hint, listed

Array = np.ndarray[Any, Any]

MOST_LEVELS = 50  # of a column of texts


class Column(NamedTuple):
    """A column of a table, as a design takes it.

    >>> Column("ward", ("A", "B"), "B").baseline
    'A'
    """

    name: str
    levels: tuple[str, ...] = ()  # of a category, the baseline first; of numbers none
    usual: str = ""  # the commonest level, which stands for a missing entry

    @property
    def baseline(self) -> str:
        """The level that the effects of all others are relative to."""
        return self.levels[0]


@dataclass(frozen=True)
class Encoding:
    """The columns of a table in their order, and how each enters the design.

    >>> people = pd.DataFrame({"ward": ["B", "A", "B"], "age": [50.0, 60.0, 70.0]})
    >>> encoding = learned(people, (), Budget())
    >>> encoding.names, encoding.design(people).tolist()
    (('age', 'ward=B'), [[50.0, 1.0], [60.0, 0.0], [70.0, 1.0]])
    """

    columns: tuple[Column, ...]

    @property
    def categories(self) -> tuple[Column, ...]:
        """The columns of categories."""
        return tuple(column for column in self.columns if column.levels)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the design: the numbers first, then the levels of each category but its baseline."""
        levels = (f"{column.name}={level}" for column in self.categories for level in column.levels[1:])
        return (*(column.name for column in self.columns if not column.levels), *levels)

    def design(self, frame: pd.DataFrame) -> Array:
        """The design of a table that has these columns.

        Missing numbers stay so, a missing category becomes the commonest level.

        Args:
            frame: the table; it may have other columns too.

        Returns:
            The design, (N, number of names), float64.

        Raises:
            InputError: texts among numbers, or a level that was not there when the encoding was learned.
        """
        numbers = [column.name for column in self.columns if not column.levels]
        for name in numbers:
            _refuse_texts(frame[name])
        parts = [frame[numbers].to_numpy(dtype=np.float64)]
        for column in self.categories:
            entries = as_levels(frame[column.name]).fillna(column.usual)
            unseen = entries[~entries.isin(column.levels)]
            if len(unseen):
                raise InputError(
                    f"column {column.name!r} has the level {unseen.iloc[0]!r} in {len(unseen)} of {len(entries)} rows, "
                    f"which the fit has not seen; its levels are {listed(column.levels)}. "
                    "Correct those rows, leave them out, or fit again with rows of that level."
                )
            parts.append((entries.to_numpy()[:, None] == np.array(column.levels[1:])[None]).astype(np.float64))
        return np.concatenate(parts, 1)


def learned(features: pd.DataFrame, categorical: Iterable[str], budget: Budget) -> Encoding:
    """The encoding of a table: texts are categories, and so are columns that are named as such.

    Args:
        features: the columns that predict, without missing names.
        categorical: columns of numbers that are categories.
        budget: the memory that the run may take.

    Returns:
        The encoding.

    Raises:
        InputError: a column that is neither, or one that the table lacks; too little memory.
    """
    categorical = set(categorical)
    columns = []
    for name in features.columns:
        if is_number(features[name]) and name not in categorical:
            columns.append(Column(name))
        else:
            counts = as_levels(features[name]).value_counts(sort=False)  # without missing entries
            columns.append(category(name, counts.to_dict(), chosen=name in categorical))
    width = sum(max(1, len(column.levels) - 1) for column in columns)
    budget.require("the table", len(features), width)
    return Encoding(tuple(columns))


def category(name: str, counts: Mapping[str, int], *, chosen: bool) -> Column:
    """The levels of a column, after a check that it looks like one of categories.

    Args:
        name: of the column.
        counts: its entries as `as_levels` gives them, in the order in which they came, and how often each is there.
        chosen: whether it was named as one of categories.

    Returns:
        The column.

    Raises:
        InputError: numbers except for a few texts, or too many levels.

    >>> category("ward", {"B": 2, "A": 1}, chosen=False)
    Column(name='ward', levels=('A', 'B'), usual='B')
    """
    numeric = pd.to_numeric(pd.Series(list(counts), dtype=object), errors="coerce").notna()
    texts = [level for level, number in zip(counts, numeric, strict=True) if not number]
    rows, bad = sum(counts.values()), sum(counts[level] for level in texts)
    if not chosen and 0 < bad < 0.5 * rows:
        raise InputError(
            f"column {name!r} is numbers except for {bad} of {rows} rows, the first {texts[0]!r}. "
            f"Mend them, leave the column out (--drop {quote(name)}), or take it as categories "
            f"(--categorical {quote(name)})."
        )
    if len(counts) > MOST_LEVELS and chosen:
        raise InputError(
            f"column {name!r} has {len(counts)} different values, more than the {MOST_LEVELS} of a category at most. "
            f"Leave it out (--drop {quote(name)}), or model it as groups that are alike, "
            f'--formula "... + (1 | {name})".'
        )
    if len(counts) > MOST_LEVELS:
        raise InputError(
            f"text column {name!r} has {len(counts)} different values, more than {MOST_LEVELS}: it looks like names "
            f"or dates, not categories. Leave it out (--drop {quote(name)})."
        )
    levels = sorted(counts, key=_in_order)
    return Column(name, tuple(levels), max(levels, key=lambda level: counts[level]))


def _in_order(level: str) -> tuple[float, str]:
    """Numbers by their size, before texts."""
    number = pd.to_numeric(level, errors="coerce")
    return (np.inf if pd.isna(number) else float(number), level)


def as_levels(column: pd.Series) -> pd.Series:
    """The entries as texts, equal numbers alike however they were written; missing ones stay so.

    >>> as_levels(pd.Series([1.0, 2.5])).tolist()
    ['1', '2.5']
    """
    if is_number(column) and not pd.api.types.is_bool_dtype(column):
        texts = column.map(lambda value: f"{value:.15g}")
    else:
        texts = column.astype(str).str.strip()
    return texts.astype(object).where(column.notna(), None)


def is_number(column: pd.Series) -> bool:
    """Whether a column holds numbers, or truth values, which count as 0 and 1.

    >>> is_number(pd.Series([True])), is_number(pd.Series(["a"]))
    (True, False)
    """
    return bool(pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column))


def _refuse_texts(column: pd.Series) -> None:
    if is_number(column) or column.isna().all():
        return
    numbers = pd.to_numeric(column, errors="coerce")
    bad = column[numbers.isna() & column.notna()]
    if len(bad):
        raise InputError(
            f"column {column.name!r} held numbers when the model was fitted; got texts such as {bad.iloc[0]!r} in "
            f"{len(bad)} of {len(column)} rows. Correct those rows."
        )


def check_columns(
    frame: pd.DataFrame,
    needed: Sequence[str],
    known: Iterable[str],
    what: str,
    *,
    flag: bool = False,
) -> None:
    """Check that a table of new rows has the columns of the fit, and no other.

    Args:
        frame: the new rows.
        needed: the columns that the fit has taken.
        known: columns that it has seen and not taken, which may be there.
        what: the table, for the message.
        flag: whether a flag leaves columns out, as on a command line, or a method of the table, as in Python.

    Raises:
        InputError: columns that are missing, or that the fit has not seen.
    """
    there = [str(name) for name in frame.columns]
    lacking = [name for name in needed if name not in there]
    if lacking:
        raise InputError(
            f"{what} lacks {listed(lacking)}, which the model predicts from.{hint(lacking[0], there)} "
            f"It has {listed(there) or 'no columns'}. Add the column, or correct its name."
        )
    others = sorted(set(there) - set(needed) - set(known))
    if others:
        some = others[:SHOWN]
        how = " ".join(f"--drop {quote(name)}" for name in some) if flag else f"frame.drop(columns={some!r})"
        raise InputError(
            f"{what} has {listed(others)}, which the fit has not seen. Leave it out ({how}), or "
            "check that this is the right table."
        )
