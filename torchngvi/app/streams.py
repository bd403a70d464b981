"""Tables of more rows than memory holds: a first pass for the design, and batches of the design from then on.

What is done to a table in memory is done to each batch: texts become indicators, columns are standardised by the
training rows, and an intercept comes first.  The first pass gathers what that needs.  Rows are held out by a hash of
their number, so that every pass holds out the same ones.
"""

import math
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
from torchngvi.app.encoding import Encoding, category, check_baselines
from torchngvi.errors import InputError
from torchngvi.messages import hint
from torchngvi.models.likelihoods import link_of
from torchngvi.models.standardize import Standardization, TargetSummary

_TARGETS = 1000  # distinct targets that are remembered
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of the hash of a row (Steele et al. 2014)


@dataclass
class Column:
    """What a pass has seen of a column, in the training rows: moments of numbers, counts of texts.

    >>> column = Column(numeric=True)
    >>> column.add(pd.Series([1.0, 2.0]), pd.Series([1.0, 2.0]), np.ones(2))
    >>> column.add(pd.Series([3.0]), pd.Series([3.0]), np.ones(1))
    >>> column.count, column.mean, column.square
    (3.0, 2.0, 2.0)
    """

    numeric: bool
    count: float = 0.0  # the sum of weights
    mean: float = 0.0
    square: float = 0.0  # sum of squared deviations
    low: float = np.inf
    high: float = -np.inf
    seen: dict[str, int] = field(default_factory=dict)  # of texts, how often each is there, in all rows
    levels: dict[str, float] = field(default_factory=dict)  # and in the training rows, by weight

    def add(self, everything: pd.Series, train: pd.Series, weights: Array) -> None:
        """Take in a batch, by the pairwise update of Chan, Golub and LeVeque (1983)."""
        more = float(weights.sum())
        if not self.numeric:
            for level, number in as_levels(everything).value_counts(sort=False).items():
                self.seen[str(level)] = self.seen.get(str(level), 0) + int(number)
            levels = as_levels(train).to_numpy()
            for level, number in pd.Series(weights).groupby(levels, sort=False).sum().items():
                self.levels[str(level)] = self.levels.get(str(level), 0.0) + float(number)
        elif more:
            values = train.to_numpy(dtype=np.float64)[weights > 0]
            share = weights[weights > 0]
            mean = float(values[0] + share @ (values - values[0]) / more)
            change, total = mean - self.mean, self.count + more
            self.square += float(share @ np.square(values - mean)) + change**2 * self.count * more / total
            self.mean += change * more / total
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        self.count += more


@dataclass(frozen=True)
class Layout(Columns):
    """How a batch becomes a design, and what is known of the rows: the outcome of the first pass."""

    encoding: Encoding
    coding: Mapping[Any, float]  # of classes; empty for numbers
    rows: tuple[int, int]  # training and held out
    positive: int | None  # training rows of positive weight; None where there are no weights
    mean_square: float  # of the targets in the training rows
    summary: TargetSummary  # of the same
    row_norm: float  # root of the mean square of a training row
    same: tuple[str, ...]  # columns with one entry in all training rows


def first_pass(frames: Iterable[pd.DataFrame], settings: Settings) -> Layout:
    """Go through all rows once, and find how they become a design."""
    columns: dict[str, Column] = {}
    targets: dict[Any, int] = {}
    start, squares, train, positive = 0, 0.0, 0, 0
    response = _Response(settings)
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
        counted = extra["weights"][~held] if "weights" in extra else np.ones(int((~held).sum()))
        for name, column in columns.items():
            own = counted if settings.prior_word is not None else np.ones_like(counted)
            _add(column, frame[name], held, own, chosen=name in settings.categorical)
        y = frame[settings.target]
        response.add(y[~held], extra["offset"][~held] if "offset" in extra else np.zeros_like(counted), counted)
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
    summary = response.summary(coding)
    check_baselines(encoding, settings.intercept)
    names, units, norm, same = _standardised(columns, encoding, settings)
    fill = np.full(len(names), np.nan)
    fill[: int(settings.intercept)] = 1.0
    weighted = None if settings.weights is None else positive
    rows = train, start - train
    return Layout(names, units, classes, fill, encoding, coding, rows, weighted, squares / train, summary, norm, same)


class _Response:
    """What the priors read of the targets of the training rows, gathered batch by batch."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.link = settings, link_of(settings.family)
        self.y, self.offset = Column(numeric=not settings.has_classes), Column(numeric=True)
        self.rows, self.exposure = 0, -np.inf

    def add(self, y: pd.Series, offset: Array, weights: Array) -> None:
        """Take in a batch."""
        if self.settings.has_classes:
            y = y if is_number(y) else y.astype(str)
            for value, number in pd.Series(weights).groupby(y.to_numpy()).sum().items():
                self.y.levels[value] = self.y.levels.get(value, 0.0) + float(number)
        elif is_number(y):
            values = y.to_numpy(dtype=np.float64)
            shown = pd.Series(values - offset if self.link == "identity" else values)
            self.y.add(shown, shown, weights)
        self.offset.add(pd.Series(offset), pd.Series(offset), weights)
        here = weights > 0
        self.rows += int(here.sum())
        if here.any():
            self.exposure = float(np.logaddexp.reduce([self.exposure, *(offset[here] + np.log(weights[here]))]))

    def summary(self, coding: Mapping[Any, float]) -> TargetSummary:
        """What was gathered."""
        if not self.offset.count:
            raise InputError("no training row has a positive weight. Check the column of weights.")
        exposure = self.exposure - float(np.log(self.offset.count))
        if self.settings.has_classes:
            mean = sum(weight * coding[value] for value, weight in self.y.levels.items()) / self.offset.count
            return TargetSummary(self.rows, mean, math.sqrt(mean * (1 - mean)), self.offset.mean, exposure)
        sd = 0.0 if self.y.low == self.y.high else math.sqrt(self.y.square / self.y.count)
        return TargetSummary(self.rows, self.y.mean, sd, self.offset.mean, exposure)


def _add(column: Column, entries: pd.Series, held: Array, weights: Array, *, chosen: bool) -> None:
    """Take in the entries of a batch, as long as the column can be used."""
    if not chosen and column.numeric != is_number(entries):
        name = str(entries.name)
        raise InputError(
            f"column {name!r} is numbers in some batches and texts in others. Mend it, leave it out "
            f"(--drop {quote(name)}), or take it as categories (--categorical {quote(name)})."
        )
    column.add(entries, entries[~held], weights)
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
    """The columns of the design, by the first batch."""
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
) -> tuple[tuple[str, ...], Standardization, float, tuple[str, ...]]:
    """The names of the design's columns, how they are centred and scaled, the row norm, and constant columns."""
    moments = [(c.mean, c.square / c.count, c.low, c.low == c.high) for c in columns.values() if c.numeric]
    for kind in encoding.categories:
        column = columns[kind.name]
        shares = [column.levels.get(level, 0) / column.count for level in kind.levels[1:]]
        moments += [(share, share * (1 - share), share, share in (0, 1)) for share in shares]
    names = encoding.names
    if settings.intercept:
        names, moments = ("intercept", *names), [(1.0, 0.0, 1.0, True), *moments]
    mean, variance, low, same = (np.array(part) for part in zip(*moments, strict=True))
    constant = same.astype(bool)
    mean = np.where(constant, low, mean)
    place = _intercept(mean, constant, settings)
    alike = tuple(name for k, name in enumerate(names) if constant[k] and k != place)
    center, scale = np.zeros(len(names)), np.ones(len(names))
    if settings.scales_columns:
        of_constant = np.where(mean == 0, 1.0, np.abs(mean)) if settings.prior_word is not None else 1.0
        scale = np.where(constant, of_constant, np.sqrt(np.where(constant, 0.0, variance)))
        require_spread(scale, names)
        if place is not None:
            center, scale[place] = np.where(np.arange(len(names)) == place, 0.0, mean), mean[place]
    square = float(((np.where(constant, 0.0, variance) + np.square(mean - center)) / scale**2).sum())
    units = Standardization(torch.from_numpy(center), torch.from_numpy(scale), place)
    return names, units, float(np.sqrt(square)), alike


def _intercept(mean: Array, constant: Array, settings: Settings) -> int | None:
    """The place of the intercept, as `Standardization.of` finds it; of columns that are not scaled that of ours."""
    if settings.intercept:
        return 0
    ones, others = (np.flatnonzero(constant & found) for found in (mean == 1, mean != 0))
    places = [*ones, *others] if settings.scales_columns else []
    return int(places[0]) if places else None


def held_out(start: int, count: int, settings: Settings) -> Array:
    """Say which rows are held out, by a hash of their number and the seed.

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
    """Batches of the design for one pass after another: of the training rows, or of those held out."""

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
        return layout.units.standardize(torch.from_numpy(X)).numpy()

    def _targets(self, frame: pd.DataFrame) -> torch.Tensor:
        y = frame[self.settings.target]
        if not self.layout.coding:
            return _column(y)
        y = y if is_number(y) else y.astype(str)
        return _column(y.map(self.layout.coding))


def _column(column: pd.Series) -> torch.Tensor:
    return torch.tensor(column.to_numpy(dtype=np.float64))
