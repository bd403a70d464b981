"""Tables of more rows than memory holds: a first pass for the design, and batches of the design from then on.

What is done to a table in memory is done to each batch: texts become indicators, columns are standardised by the
training rows, and an intercept comes first.  The first pass gathers what that needs.  Rows are held out by a hash of
their number, so that every pass holds out the same ones.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from torchngvi.adapters.files import texts
from torchngvi.adapters.files.reader import found
from torchngvi.app.columns import Array, Table, refuse_unusable
from torchngvi.app.config import Settings, hint
from torchngvi.app.design import coded_target
from torchngvi.app.encoding import MOST_LEVELS
from torchngvi.errors import InputError

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_TARGETS = 1000  # distinct targets that are remembered
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of the hash of a row (Steele et al. 2014)


class Frames:
    """The rows of csv, tsv or Parquet files, as frames of pandas, for one pass after another.

    Args:
        data: a file, or a pattern such as "day_*.parquet".
        rows: of a frame, at most.

    Raises:
        InputError: no files, or files of another kind.

    >>> Frames("nowhere_*.csv", 10)
    Traceback (most recent call last):
    torchngvi.errors.InputError: there are no files 'nowhere_*.csv'.
    """

    def __init__(self, data: str, rows: int) -> None:
        self.paths, self.rows = found(data), rows
        for path in self.paths:
            if self._kind(path) not in (*_SEPARATORS, ".parquet"):
                raise InputError(
                    f"rows are read in batches from csv, tsv and Parquet files; got {path!r}. For a model of npy files "
                    "see torchngvi.adapters.files.Npy in Python."
                )

    @staticmethod
    def _kind(path: str) -> str:
        return Path(path.removesuffix(".gz")).suffix.lower()

    def __iter__(self) -> Iterator[pd.DataFrame]:
        columns = None
        for path in self.paths:
            for frame in self._of_file(path):
                frame.columns = frame.columns.astype(str).str.strip()
                columns = columns if columns is not None else list(frame.columns)
                if list(frame.columns) != columns:
                    raise InputError(
                        f"{path!r} has other columns than {self.paths[0]!r}: {', '.join(frame.columns)}. Fit files of "
                        "the same columns."
                    )
                yield frame

    def _of_file(self, path: str) -> Iterator[pd.DataFrame]:
        if self._kind(path) != ".parquet":
            yield from texts.frames(path, _SEPARATORS[self._kind(path)], self.rows)
            return
        from pyarrow import parquet

        with parquet.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
            for batch in file.iter_batches(self.rows, use_threads=False):
                yield batch.to_pandas()


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
    levels: dict[str, int] = field(default_factory=dict)  # of all rows, with their counts in the training rows

    def add(self, everything: pd.Series, train: pd.Series) -> None:
        """Take in a batch, by the pairwise update of Chan, Golub and LeVeque (1983)."""
        if not self.numeric:
            for level in everything.astype(str).unique():
                self.levels.setdefault(level, 0)
            for level, number in train.astype(str).value_counts().items():
                self.levels[str(level)] += int(number)
        elif len(train):
            values = train.to_numpy(dtype=np.float64)
            mean, more = float(values.mean()), len(values)
            change, total = mean - self.mean, self.count + more
            self.square += float(np.square(values - mean).sum()) + change**2 * self.count * more / total
            self.mean += change * more / total
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        self.count += len(train)


@dataclass(frozen=True)
class Layout:
    """How a batch becomes a design, and what is known of the rows: the outcome of the first pass."""

    columns: Mapping[str, Column]
    names: tuple[str, ...]  # of the design, the intercept first
    center: Array  # (D,)
    scale: Array  # (D,)
    coding: Mapping[Any, float]  # of classes; empty for numbers
    classes: tuple[str, str] | None
    rows: tuple[int, int]  # training and held out
    mean_square: float  # of the targets in the training rows


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
    start, squares, train = 0, 0.0, 0
    for frame in frames:
        if not start:
            columns = _roles(frame, settings)
        named = _named(settings)
        refuse_unusable({name: frame[name].to_numpy() for name in (*columns, *named.values())}, named)
        if settings.weights is not None and float(frame[settings.weights].min()) < 0:
            raise InputError(f"weights must not be negative; column {settings.weights!r} has some that are.")
        held = held_out(start, len(frame), settings)
        for name, column in columns.items():
            if column.numeric != _is_number(frame[name]):
                raise InputError(f"column {name!r} is numbers in some batches and texts in others. Leave it out.")
            column.add(frame[name], frame[name][~held])
            if len(column.levels) > MOST_LEVELS:
                raise InputError(
                    f"text column {name!r} has more than {MOST_LEVELS} different values: it looks like names or dates, "
                    f"not categories. Leave it out (--drop {name})."
                )
        y = frame[settings.target]
        if settings.has_classes:
            y = y if _is_number(y) else y.astype(str)
            for value in y.unique() if len(targets) < _TARGETS else ():
                targets.setdefault(value, 0)
            for value, number in y[~held].value_counts().items():
                targets[value] = targets.get(value, 0) + int(number)
        elif not _is_number(y):
            raise InputError(f"this family needs a target of numbers; {settings.target!r} holds texts.")
        else:
            squares += float(np.square(y[~held].to_numpy(dtype=np.float64)).sum())
        start, train = start + len(frame), train + int((~held).sum())
    if train == 0:
        raise InputError(f"there are {start} rows, none of them for training. Check the files.")
    coding, classes = _coding(targets, settings)
    return Layout(
        columns, *_standardised(columns, settings), coding, classes, (train, start - train), squares / max(train, 1)
    )


def _named(settings: Settings) -> dict[str, str]:
    roles = {"target": settings.target, "weights": settings.weights, "offset": settings.offset}
    return {role: name for role, name in roles.items() if name is not None}


def _roles(frame: pd.DataFrame, settings: Settings) -> dict[str, Column]:
    """The columns of the design, by the first batch."""
    if settings.target is None:
        raise InputError(
            f"target is missing: name the column to predict (--target). The columns are: {', '.join(frame.columns)}."
        )
    for role, name in [*_named(settings).items(), *(("drop", name) for name in settings.drop)]:
        if name not in frame.columns:
            raise InputError(f"{role} column {name!r} is not in the data.{hint(name, frame.columns)}")
    taken = {*_named(settings).values(), *settings.drop}
    columns = {name: Column(_is_number(frame[name])) for name in frame.columns if name not in taken}
    if not columns:
        raise InputError(f"no column is left to predict {settings.target!r} from. Check target and drop.")
    return columns


def _is_number(column: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column))


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


def _standardised(columns: Mapping[str, Column], settings: Settings) -> tuple[tuple[str, ...], Array, Array]:
    """The names of the design's columns, with what is subtracted from them and what they are divided by."""
    names, center, scale = [], [], []
    for name, column in columns.items():
        if column.numeric:
            constant = column.low == column.high
            names.append(name)
            center.append(column.low if constant else column.mean)
            scale.append(1.0 if constant else float(np.sqrt(column.square / column.count)))
    for name, column in columns.items():
        for level in sorted(column.levels)[1:]:
            share = column.levels[level] / column.count
            names.append(f"{name}={level}")
            center.append(share)
            scale.append(float(np.sqrt(share * (1 - share))) or 1.0)
    if not settings.standardize:
        center, scale = [0.0] * len(names), [1.0] * len(names)
    if settings.intercept:
        names, center, scale = ["intercept", *names], [0.0, *center], [1.0, *scale]
    return tuple(names), np.array(center), np.array(scale)


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
        layout = self.layout
        numbers = [frame[name].to_numpy(dtype=np.float64) for name, column in layout.columns.items() if column.numeric]
        for name, column in layout.columns.items():
            values = np.empty(0) if column.numeric else frame[name].astype(str).to_numpy()
            numbers += [np.equal(values, level).astype(np.float64) for level in sorted(column.levels)[1:]]
        ones = [np.ones(len(frame))] if self.settings.intercept else []
        return (np.stack([*ones, *numbers], 1) - layout.center) / layout.scale

    def _targets(self, frame: pd.DataFrame) -> torch.Tensor:
        y = frame[self.settings.target]
        if not self.layout.coding:
            return _column(y)
        y = y if _is_number(y) else y.astype(str)
        return _column(y.map(self.layout.coding))


def _column(column: pd.Series) -> torch.Tensor:
    return torch.tensor(column.to_numpy(dtype=np.float64))
