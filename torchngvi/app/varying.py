"""Columns of a table that are the same in all rows: they tell nothing beside an intercept, and are left out by name."""

import dataclasses
from collections.abc import Sequence

from torchngvi.app.columns import Array, Table
from torchngvi.app.config import Settings
from torchngvi.app.design import Prepared
from torchngvi.app.encoding import Encoding, listed


def without_constants(table: Table, settings: Settings) -> tuple[Table, Settings]:
    """The table without columns that are the same in all rows, with a note that names them.

    Where columns have no names of their own they stay. So do they without an intercept, whose place a constant
    column may take, and where no other column would be left.

    Args:
        table: as it was read.
        settings: of the run; the columns are added to those that it drops, so that new rows may have them or not.

    Returns:
        Both.

    >>> import numpy as np
    >>> from torchngvi.app.encoding import Column
    >>> X, y = np.array([[3.0, 1.0], [3.0, 2.0]]), np.array([0, 1])
    >>> table = Table(X, y, ("site", "age"), "died", encoding=Encoding((Column("site"), Column("age"))))
    >>> table, settings = without_constants(table, Settings(data="rows.csv"))
    >>> table.names, settings.drop, table.notes
    (('age',), ('site',), ('left out, as it is the same in all 2 rows: site = 3',))
    """
    if table.encoding is None or not settings.intercept:
        return table, settings
    lone = {c.name: c.levels[0] for c in table.encoding.categories if len(c.levels) == 1}
    same = constant(table.X)
    numbers = [c.name for c in table.encoding.columns if not c.levels]  # which come first in the design
    lone |= {name: f"{table.X[0, k]:g}" for k, name in enumerate(numbers) if same[k]}
    if not lone or len(lone) == len(table.encoding.columns):
        return table, settings
    left = Encoding(tuple(c for c in table.encoding.columns if c.name not in lone))
    kept = [k for k in range(table.X.shape[1]) if k >= len(numbers) or not same[k]]
    told = listed([f"{name} = {entry}" for name, entry in lone.items()])
    note = f"left out, as {'they are' if len(lone) > 1 else 'it is'} the same in all {len(table.y)} rows: {told}"
    table = dataclasses.replace(table, X=table.X[:, kept], names=left.names, encoding=left, notes=(*table.notes, note))
    return table, dataclasses.replace(settings, drop=(*settings.drop, *lone))


def in_training(data: Prepared, settings: Settings) -> tuple[str, ...]:
    """A note of columns that are the same in all training rows, of which the coefficients are those of the prior.

    Args:
        data: the rows, whose columns are in place.
        settings: of the run.

    Returns:
        The note, or nothing.
    """
    first = int(settings.intercept)
    return told([name for name, same in zip(data.names[first:], constant(data.train.X)[first:], strict=True) if same])


def told(names: Sequence[str]) -> tuple[str, ...]:
    """A note of columns that are the same in all training rows.

    Args:
        names: of the columns.

    Returns:
        The note, or nothing.

    >>> told(["ward=Z"])
    ('the same in all training rows, so that its coefficient is that of the prior: ward=Z',)
    """
    if not names:
        return ()
    whose = "their coefficients are those" if len(names) > 1 else "its coefficient is that"
    return (f"the same in all training rows, so that {whose} of the prior: {listed(names)}",)


def constant(X: Array) -> Array:
    """Which columns have the same entry in all rows, none of them missing.

    >>> import numpy as np
    >>> constant(np.array([[1.0, 5.0, np.nan], [2.0, 5.0, 5.0]]))
    array([False,  True, False])
    """
    same: Array = X.min(0) == X.max(0)
    return same
