"""From the columns of a table to those of a design, learned once and kept with the run: numbers, and categories.

A column of categories becomes one indicator column ``name=level`` for each level but the first, its baseline.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from torchngvi.adapters.table_checks import COMMAND, as_levels, as_numbers, is_number, of_levels, refuse
from torchngvi.app.memory import Budget
from torchngvi.errors import InputError
from torchngvi.messages import SHOWN, hint, listed

Array = np.ndarray[Any, Any]


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
        """The design of a table that has these columns."""
        numbers = [column.name for column in self.columns if not column.levels]
        frame = as_numbers(frame, numbers)
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
    """The encoding of a table: texts are categories, and so are columns that are named as such."""
    categorical = set(categorical)
    columns, faults = [], []
    for name in features.columns:
        if is_number(features[name]) and name not in categorical:
            columns.append(Column(name))
            continue
        counts = as_levels(features[name]).value_counts(sort=False)  # without missing entries
        faults += of_levels(name, len(counts), COMMAND, chosen=name in categorical)
        columns.append(category(name, counts.to_dict()))
    refuse(faults)
    width = sum(max(1, len(column.levels) - 1) for column in columns)
    budget.require("the table", len(features), width)
    return Encoding(tuple(columns))


def category(name: str, counts: Mapping[str, int]) -> Column:
    """The levels of a column of categories.

    >>> category("ward", {"B": 2, "A": 1})
    Column(name='ward', levels=('A', 'B'), usual='B')
    """
    levels = sorted(counts, key=_in_order)
    return Column(name, tuple(levels), max(levels, key=lambda level: counts[level]))


def _in_order(level: str) -> tuple[float, str]:
    """Numbers by their size, before texts."""
    number = pd.to_numeric(level, errors="coerce")
    return (np.inf if pd.isna(number) else float(number), level)


def check_baselines(encoding: Encoding | None, intercept: bool) -> None:
    """Check that there is an intercept where levels are relative to a baseline, whose predictor is 0 otherwise."""
    categories = () if encoding is None else encoding.categories
    if intercept or not categories:
        return
    first = categories[0]
    raise InputError(
        f"{listed([column.name for column in categories])} has levels that are relative to a baseline, and without an "
        f"intercept there is nothing that says where the baseline lies: rows of {first.name} = {first.baseline} would "
        "have the predictor 0. Leave --no-intercept out (of a formula the 0), or put a column of 0 and 1 for each "
        "level into the table."
    )


def check_columns(
    frame: pd.DataFrame,
    needed: Sequence[str],
    known: Iterable[str],
    what: str,
    *,
    flag: bool = False,
) -> None:
    """Check that a table of new rows has the columns of the fit, and no other."""
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
