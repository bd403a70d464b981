"""Columns of a table that tell nothing of their own: the same in all rows, or copies of others, by their names."""

from collections.abc import Sequence

import numpy as np
import torch

from torchngvi.app.columns import Array
from torchngvi.app.config import Settings
from torchngvi.app.design import Prepared
from torchngvi.app.encoding import Encoding
from torchngvi.diagnostics.dependence import Dependence, dependences, told_dependences
from torchngvi.messages import listed


def in_training(data: Prepared, settings: Settings, encoding: Encoding | None) -> tuple[str, ...]:
    """Notes of columns that are the same in all training rows, and of categories with one entry.

    Args:
        data: the rows, whose columns are in place.
        settings: of the run.
        encoding: of the table, where its columns have names.

    Returns:
        The notes, or nothing.
    """
    first = int(settings.intercept)
    same = zip(data.names[first:], constant(data.train.X)[first:], strict=True)
    alone = [f"{c.name} = {c.levels[0]}" for c in (encoding.categories if encoding else ()) if len(c.levels) == 1]
    notes = (f"the same in all rows, so that there is no column of it: {listed(alone)}",) if alone else ()
    return notes + told([name for name, alike in same if alike])


def copies(data: Prepared, settings: Settings) -> tuple[str, ...]:
    """Warnings of columns that are others in other units, or sums of multiples of them, in the training rows.

    Args:
        data: the rows, whose columns are in place.
        settings: of the run.

    Returns:
        The warnings, or nothing.
    """
    place = 0 if settings.intercept else None
    varies = ~constant(data.train.X)
    varies[: int(settings.intercept)] = True
    X = torch.from_numpy(np.where(varies, data.train.X, 0.0))
    found = dependences(X)
    if place is not None and settings.standardize:  # about its mean each is a multiple without a constant
        found = [Dependence(column, tuple({place, *of})) for column, of in found]
    return told_dependences(data.names, found, place)


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
