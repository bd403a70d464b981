"""Tables of more rows than memory holds: a first pass for the design, and batches of the design from then on.

What is done to a table in memory is done to each batch: texts become indicators, columns are standardised by the
training rows, and an intercept comes first.  The first pass gathers what that needs.  Rows are held out by a hash of
their number, so that every pass holds out the same ones.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd
import torch

from torchngvi.adapters.table_checks import (
    COMMAND,
    MOST_LEVELS,
    Look,
    as_levels,
    is_number,
    look_at,
    of_levels,
    of_look,
    of_unusable,
    refuse,
)
from torchngvi.app.columns import Array, Table, numbers
from torchngvi.app.config import Settings
from torchngvi.app.design import Columns, coded_target, require_spread
from torchngvi.app.encoding import Column as Encoded
from torchngvi.app.encoding import Encoding, category
from torchngvi.errors import InputError
from torchngvi.messages import hint

_TARGETS = 1000  # distinct targets that are remembered
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of the hash of a row (Steele et al. 2014)


@dataclass
class Column:
    """What a pass has seen of a column, in the training rows: moments of numbers, counts of texts.

    >>> column = Column(numeric=True)
    >>> column.add(pd.Series([1.0, 2.0]), pd.Series([1.0, 2.0]))
    >>> column.add(pd.Series([3.0]), pd.Series([3.0]))
    >>> column.count, column.mean, column.square
    (3, 2.0, 2.0)
    """

    numeric: bool
    count: int = 0
    mean: float = 0.0
    square: float = 0.0  # sum of squared deviations
    low: float = np.inf
    high: float = -np.inf
    seen: dict[str, int] = field(default_factory=dict)  # of texts, how often each is there, in all rows
    levels: dict[str, int] = field(default_factory=dict)  # and in the training rows

    def add(self, everything: pd.Series, train: pd.Series) -> None:
        """Take in a batch, by the pairwise update of Chan, Golub and LeVeque (1983)."""
        if not self.numeric:
            for counts, part in ((self.seen, everything), (self.levels, train)):
                for level, number in as_levels(part).value_counts(sort=False).items():
                    counts[str(level)] = counts.get(str(level), 0) + int(number)
        elif len(train):
            values = train.to_numpy(dtype=np.float64)
            mean, more = float(values.mean()), len(values)
            change, total = mean - self.mean, self.count + more
            self.square += float(np.square(values - mean).sum()) + change**2 * self.count * more / total
            self.mean += change * more / total
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        self.count += len(train)


@dataclass(frozen=True)
class Layout(Columns):
    """How a batch becomes a design, and what is known of the rows: the outcome of the first pass."""

    encoding: Encoding
    coding: Mapping[Any, float]  # of classes; empty for numbers
    rows: tuple[int, int]  # training and held out
    positive: int | None  # training rows of positive weight; None where there are no weights
    mean_square: float  # of the targets in the training rows
    row_norm: float  # root of the mean square of a training row
    same: tuple[str, ...]  # columns with one entry in all training rows


def first_pass(frames: Iterable[pd.DataFrame], settings: Settings) -> Layout:
    """Go through all rows once, and find how they become a design.

    Args:
        frames: the batches.
        settings: the settings of the run.

    Returns:
        The layout.

    Raises:
        InputError: columns that are missing or cannot be used, no rows, targets that the family cannot have.
    """
    columns: dict[str, Column] = {}
    targets: dict[Any, int] = {}
    start, squares, train, positive = 0, 0.0, 0, 0
    for frame in frames:
        columns = columns if start else roles(frame, settings)
        named = _named(settings)
        used = {name: frame[name].to_numpy() for name in (*columns, *named.values())}
        refuse(of_unusable(used, named, fillable=False))
        extra = {role: numbers(frame[name], role) for role, name in named.items() if role != "target"}
        held = held_out(start, len(frame), settings)
        if "weights" in extra:
            if extra["weights"].min() < 0:
                raise InputError(f"weights must not be negative; column {settings.weights!r} has some that are.")
            positive += int(np.count_nonzero(extra["weights"][~held]))
        for name, column in columns.items():
            _add(column, frame[name], held, chosen=name in settings.categorical)
        y = frame[settings.target]
        if settings.has_classes:
            y = y if is_number(y) else y.astype(str)
            for value in y.unique() if len(targets) < _TARGETS else ():
                targets.setdefault(value, 0)
            for value, number in y[~held].value_counts().items():
                targets[value] = targets.get(value, 0) + int(number)
        elif not is_number(y):
            raise InputError(f"this family needs a target of numbers; {settings.target!r} holds texts.")
        else:
            squares += float(np.square(y[~held].to_numpy(dtype=np.float64)).sum())
        start, train = start + len(frame), train + int((~held).sum())
    if train == 0:
        raise InputError(f"there are {start} rows, none of them for training. Check the files.")
    coding, classes = _coding(targets, settings)
    chosen = set(settings.categorical)
    refuse([fault for name, c in columns.items() for fault in _of_categories(name, c, chosen=name in chosen)])
    encoding = Encoding(tuple(_encoded(name, column) for name, column in columns.items()))
    names, center, scale, norm, same = _standardised(columns, encoding, settings)
    fill = np.full(len(names), np.nan)
    fill[: int(settings.intercept)] = 1.0
    weighted = None if settings.weights is None else positive
    rows = train, start - train
    return Layout(names, center, scale, classes, fill, encoding, coding, rows, weighted, squares / train, norm, same)


def _add(column: Column, entries: pd.Series, held: Array, *, chosen: bool) -> None:
    """Take in the entries of a batch, as long as the column can be used."""
    if not chosen and column.numeric != is_number(entries):
        name = str(entries.name)
        raise InputError(
            f"column {name!r} is numbers in some batches and texts in others. Mend it, leave it out "
            f"(--drop {quote(name)}), or take it as categories (--categorical {quote(name)})."
        )
    column.add(entries, entries[~held])
    if len(column.seen) > MOST_LEVELS:
        refuse(_of_categories(str(entries.name), column, chosen=chosen))


def _of_categories(name: str, column: Column, *, chosen: bool) -> list[str]:
    """What is wrong with a column of texts; numbers with separators are not read in batches, each by itself."""
    if column.numeric:
        return []
    look = Look("texts") if chosen else look_at(column.seen)
    if look.kind == "styled":
        first = "write them without separators of thousands and with decimal points"
        return [f"column {name!r} holds numbers such as {look.example!r}. {COMMAND.remedies(name, first)}"]
    fault = of_look(name, look, COMMAND)
    return [fault] if fault else of_levels(name, len(column.seen), COMMAND, chosen=chosen)


def _encoded(name: str, column: Column) -> Encoded:
    return Encoded(name) if column.numeric else category(name, column.seen)


def _named(settings: Settings) -> dict[str, str]:
    roles = {"target": settings.target, "weights": settings.weights, "offset": settings.offset}
    return {role: name for role, name in roles.items() if name is not None}


def _chosen(settings: Settings) -> list[tuple[str, str]]:
    return [("drop", name) for name in settings.drop] + [("categorical", name) for name in settings.categorical]


def roles(frame: pd.DataFrame, settings: Settings) -> dict[str, Column]:
    """The columns of the design, by the first batch.

    Args:
        frame: the batch.
        settings: the settings of the run.

    Returns:
        Them by name, with nothing in them yet.

    Raises:
        InputError: no target, columns that are named and not there, or none to predict from.
    """
    if settings.target is None:
        raise InputError(
            f"target is missing: name the column to predict (--target). The columns are: {', '.join(frame.columns)}."
        )
    for role, name in [*_named(settings).items(), *_chosen(settings)]:
        if name not in frame.columns:
            raise InputError(f"{role} column {name!r} is not in the data.{hint(name, frame.columns)}")
    taken = {*_named(settings).values(), *settings.drop}
    names = [name for name in frame.columns if name not in taken]
    columns = {name: Column(is_number(frame[name]) and name not in settings.categorical) for name in names}
    if not columns:
        raise InputError(f"no column is left to predict {settings.target!r} from. Check target and drop.")
    return columns


def _coding(targets: dict[Any, int], settings: Settings) -> tuple[dict[Any, float], tuple[str, str] | None]:
    """The classes as numbers, as for a table in memory."""
    if not settings.has_classes:
        return {}, None
    values = np.array(sorted(targets))
    assert settings.target is not None
    coded, classes = coded_target(
        Table(np.ones((len(values), 1)), values, ("x",), settings.target), classes=True, success=settings.success
    )
    coding = dict(zip(values.tolist(), coded.tolist(), strict=True))
    seen = {coding[value] for value, number in targets.items() if number}
    if len(seen) < 2:
        raise InputError(
            "the training rows are all of one class, and a Bernoulli family needs both. Take another seed."
        )
    return coding, classes


def _standardised(
    columns: Mapping[str, Column], encoding: Encoding, settings: Settings
) -> tuple[tuple[str, ...], Array, Array, float, tuple[str, ...]]:
    """The names of the design's columns, what is subtracted, what they are divided by, the row norm, and constants."""
    moments = [(c.mean, c.square / c.count, c.low, c.low == c.high) for c in columns.values() if c.numeric]
    for kind in encoding.categories:
        column = columns[kind.name]
        shares = [column.levels.get(level, 0) / column.count for level in kind.levels[1:]]
        moments += [(share, share * (1 - share), share, share in (0, 1)) for share in shares]
    names, count = encoding.names, len(moments)
    same = tuple(name for name, moment in zip(names, moments, strict=True) if moment[-1])
    center, scale = np.zeros(count), np.ones(count)
    if settings.standardize:
        center = np.array([low if constant else mean for mean, _, low, constant in moments])
        scale = np.array([1.0 if constant else np.sqrt(variance) for _, variance, _, constant in moments])
        require_spread(scale, names)
    mean, variance = np.array([moment[:2] for moment in moments]).T
    square = float(((variance + np.square(mean - center)) / scale**2).sum())
    if settings.intercept:
        names, center, scale = ("intercept", *names), np.r_[0.0, center], np.r_[1.0, scale]
    return names, center, scale, float(np.sqrt(square + settings.intercept)), same


def held_out(start: int, count: int, settings: Settings) -> Array:
    """Say which rows are held out, by a hash of their number and the seed.

    Args:
        start: the number of the first row.
        count: how many rows.
        settings: with the share of rows and the seed.

    Returns:
        A mask, (count,).

    >>> settings = Settings(data="rows.csv", test_fraction=0.25)
    >>> abs(held_out(0, 100_000, settings).mean() - 0.25) < 0.01
    np.True_
    """
    with np.errstate(over="ignore"):
        x = np.arange(start, start + count, dtype=np.uint64) + np.uint64(1) + np.uint64(settings.seed << 20)
        x *= np.uint64(_MIX[0])
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[1])
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[2])
        x ^= x >> np.uint64(31)
    uniform: Array = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.less(uniform, settings.test_fraction)


class Designs:
    """Batches of the design for one pass after another: of the training rows, or of those held out.

    Args:
        frames: the batches of the table.
        layout: how they become a design.
        settings: the settings of the run.
        train: whether the training rows are taken; otherwise those held out.
    """

    def __init__(self, frames: Iterable[pd.DataFrame], layout: Layout, settings: Settings, train: bool = True) -> None:
        self.frames, self.layout, self.settings, self.train = frames, layout, settings, train

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, ...]]:
        start, settings = 0, self.settings
        for frame in self.frames:
            rows = held_out(start, len(frame), settings) != self.train
            start += len(frame)
            part = frame[rows]
            if len(part):
                extra = (None if name is None else _column(part[name]) for name in (settings.weights, settings.offset))
                yield torch.from_numpy(self._design(part)), self._targets(part), *extra

    def _design(self, frame: pd.DataFrame) -> Array:
        layout, X = self.layout, self.layout.encoding.design(frame)
        if self.settings.intercept:
            X = np.column_stack([np.ones(len(X)), X])
        return np.asarray((X - layout.center) / layout.scale)

    def _targets(self, frame: pd.DataFrame) -> torch.Tensor:
        y = frame[self.settings.target]
        if not self.layout.coding:
            return _column(y)
        y = y if is_number(y) else y.astype(str)
        return _column(y.map(self.layout.coding))


def _column(column: pd.Series) -> torch.Tensor:
    return torch.tensor(column.to_numpy(dtype=np.float64))
