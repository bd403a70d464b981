"""From a table to a design: coded targets, a split, columns standardised by the training rows, an intercept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.model_selection import train_test_split

from torchngvi.app.columns import Array, Table
from torchngvi.errors import InputError
from torchngvi.messages import hint
from torchngvi.models.standardize import Standardization

_MOST_CLASSES = 10  # of a numeric target, before it is taken for counts or measurements


class Rows(NamedTuple):
    """Some rows of a design, ready for a model."""

    X: Array  # (n, D)
    y: Array  # (n,)
    weights: Array | None  # (n,)
    offset: Array | None  # (n,)


@dataclass(frozen=True)
class Columns:
    """The columns of a design and how they were standardised, so that new rows are treated alike."""

    names: tuple[str, ...]  # of the columns, the intercept first
    units: Standardization  # what is subtracted, what is divided by, and the place of the intercept
    classes: tuple[str, str] | None  # failure and success
    fill: Array  # (D,), for missing entries: the medians of the training rows where they are imputed, else NaN

    @property
    def center(self) -> Array:
        """What is subtracted, (D,)."""
        return self.units.centers.numpy()

    @property
    def scale(self) -> Array:
        """What is divided by, (D,)."""
        return self.units.scales.numpy()


@dataclass(frozen=True)
class Prepared(Columns):
    """The training and the held-out rows of one design."""

    train: Rows
    test: Rows
    filled: int = 0  # entries that were missing


def coded_target(table: Table, *, classes: bool, success: str | None = None) -> tuple[Array, tuple[str, str] | None]:
    """The targets as numbers: for classes 0 and 1 with the names of both, else as they are.

    >>> table = Table(np.ones((3, 1)), np.array(["a", "b", "c"]), ("x",), "y")
    >>> coded_target(table, classes=True, success="b")
    (array([0., 1., 0.]), ('not b', 'b'))
    """
    if not classes:
        if table.y.dtype.kind == "U" or (table.labels and len(table.labels) == len(np.unique(table.y))):
            shown = table.labels[0] if table.labels else table.y[0]
            raise InputError(
                f"this family needs a target of numbers; {table.target!r} holds classes such as {str(shown)!r}. "
                "Use family bernoulli_logit."
            )
        return table.y.astype(np.float64), None
    values = np.unique(table.y)
    names = table.labels if len(table.labels) == len(values) else tuple(_name(value) for value in values)
    if len(values) == 1:
        raise InputError(
            f"target {table.target!r} has one class, {names[0]!r} in all {len(table.y)} rows; a Bernoulli family needs "
            "two. Check the column, or that the file has all rows."
        )
    if success is not None:
        if success not in names:
            raise InputError(
                f"success {success!r} is no class of {table.target!r}.{hint(success, names)} "
                f"The classes are: {', '.join(names[:20])}."
            )
        rest = [name for name in names if name != success]
        coded = (table.y == values[names.index(success)]).astype(np.float64)
        return coded, (rest[0] if len(rest) == 1 else f"not {success}", success)
    if len(values) > 2:
        some = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
        remedy = _remedy(table, values, names)
        raise InputError(
            f"target {table.target!r} has {len(values)} classes ({some}); a Bernoulli family needs two. {remedy}"
        )
    return (table.y == values[1]).astype(np.float64), (names[0], names[1])


def _remedy(table: Table, values: Array, names: Sequence[str]) -> str:
    """What to do with a target of more than two values under a likelihood of two classes."""
    remedy = f"Name the one to predict against the others (--success {names[-1]!r})"
    if table.y.dtype.kind == "U" or table.labels:
        return f"{remedy}."
    counts = values.min() >= 0 and bool((values == np.rint(values)).all())
    if len(values) > _MOST_CLASSES:
        if counts:
            return f"They are whole numbers: say {_of_counts(table.y)}, or gaussian for measurements."
        return "They are measurements: say --likelihood gaussian."
    return f"{remedy}, or, if they are counts, say {_of_counts(table.y)}." if counts else f"{remedy}."


def _of_counts(y: Array) -> str:
    """The likelihood for counts that vary as much as these do."""
    mean, variance = float(np.mean(y)), float(np.var(y))
    if variance <= 2 * mean:
        return "--likelihood poisson for counts"
    return (
        f"--likelihood poisson for counts (negative_binomial where the columns do not explain their variance, "
        f"{variance / mean:.2g} times their mean)"
    )


def _name(value: Any) -> str:
    return f"{value:g}" if isinstance(value, np.floating) else str(value)


def prepare(
    table: Table,
    y: Array,  # (N,), coded
    classes: tuple[str, str] | None,
    *,
    standardize: bool = True,
    intercept: bool = True,
    test_fraction: float = 0.2,
    seed: int = 42,
    impute: bool = False,
    in_units: bool = False,
) -> Prepared:
    """Split with scikit-learn's train_test_split, standardise by the training rows, add the intercept first."""
    train, test = split(len(y), test_fraction, seed)
    if classes is not None and len(np.unique(y[train])) < 2:
        raise InputError(
            f"the {len(train)} training rows are all {classes[int(y[train][0])]!r}, and a Bernoulli family needs both "
            "classes. Choose another seed or a smaller test_fraction."
        )
    X, names, fill = table.X, table.names, np.full(table.X.shape[1], np.nan)
    if impute:
        fill = _medians(X[train], names)
        X = np.where(np.isnan(X), fill, X)
    filled = int(np.isnan(table.X).sum())
    if intercept:
        X, names, fill = np.column_stack([np.ones(len(X)), X]), ("intercept", *names), np.r_[1.0, fill]
    weights = table.weights[train] if in_units and table.weights is not None else None
    units = unscaled(len(names), intercept)
    if standardize:
        units = standardization(X[train], names, weights, in_units=in_units)
    X = units.standardize(torch.from_numpy(X)).numpy()

    def take(rows: Array) -> Rows:
        extras = (None if column is None else column[rows] for column in (table.weights, table.offset))
        return Rows(X[rows], y[rows], *extras)

    return Prepared(names, units, classes, fill, take(train), take(test), filled)


def _medians(X: Array, names: Sequence[str]) -> Array:
    """Of each column, the entries that are there."""
    empty = np.isnan(X).all(0)
    if empty.any():
        name = names[int(np.argmax(empty))]
        raise InputError(
            f"column {name!r} has no entry in the {len(X)} training rows. Leave it out (--drop {quote(name)})."
        )
    return np.nanmedian(X, 0)


def standardization(X: Array, names: Sequence[str], weights: Array | None, *, in_units: bool) -> Standardization:
    """The centre and the scale of each column, and the intercept."""
    units = Standardization.of(X, weights)
    require_spread(units.scales.numpy(), names)
    if in_units:
        return units
    constant = torch.from_numpy(X.max(0) == X.min(0))
    return replace(units, scales=torch.where(constant, 1.0, units.scales))


def unscaled(dim: int, intercept: bool) -> Standardization:
    """Columns as they are, of which the first may be the intercept."""
    zeros = torch.zeros(dim, dtype=torch.float64)
    return Standardization(zeros, zeros + 1, 0 if intercept else None)


def require_spread(
    scale: Array,  # (D,)
    names: Sequence[str],
) -> None:
    """Check that every column can be divided by its standard deviation."""
    square = np.square(scale)
    if not square.all():
        name = names[int(np.argmin(square))]
        raise InputError(
            f"column {name!r} differs by so little that its standard deviation rounds to 0. "
            f"Multiply it by a constant, or leave it out (--drop {quote(name)})."
        )


def split(count: int, test_fraction: float, seed: int) -> tuple[Array, Array]:
    """The numbers of the training rows and of those that are held out, by scikit-learn's train_test_split.

    >>> [len(rows) for rows in split(10, 0.2, 0)]
    [8, 2]
    """
    rows = np.arange(count)
    if test_fraction == 0:
        return rows, rows[:0]
    try:
        train, test = train_test_split(rows, test_size=test_fraction, random_state=seed)
    except ValueError as error:
        raise InputError(
            f"{count} rows cannot be split with test_fraction {test_fraction:g}: both parts need at least one. "
            "Set test_fraction to 0."
        ) from error
    return train, test
