"""Columns of a table that tell nothing of their own: the same in all rows, or copies of others, by their names."""

from collections.abc import Sequence

import numpy as np
import torch

from torchngvi.app.columns import Array
from torchngvi.app.design import Prepared
from torchngvi.app.encoding import Encoding
from torchngvi.diagnostics.dependence import Dependence, dependences, told_dependences
from torchngvi.messages import listed


def in_training(data: Prepared, encoding: Encoding | None) -> tuple[str, ...]:
    """Notes of columns that are the same in all training rows, and of categories with one entry."""
    alike = constant(data.train.X).tolist()
    same = [name for k, name in enumerate(data.names) if alike[k] and k != data.units.intercept]
    alone = [f"{c.name} = {c.levels[0]}" for c in (encoding.categories if encoding else ()) if len(c.levels) == 1]
    notes = (f"the same in all rows, so that there is no column of it: {listed(alone)}",) if alone else ()
    return notes + told(same)


def copies(data: Prepared) -> tuple[str, ...]:
    """Warnings of columns that are others in other units, or sums of multiples of them, in the training rows."""
    place, there = data.units.intercept, ~constant(data.train.X)
    if place is not None:
        there[place] = True
    found = dependences(torch.from_numpy(np.where(there, data.train.X, 0.0)))
    if place is not None:  # columns may be about their means, where each is a multiple without a constant
        found = [Dependence(column, tuple({place, *of})) for column, of in found]
    return told_dependences(data.names, found, place)


def told(names: Sequence[str]) -> tuple[str, ...]:
    """A note of columns that are the same in all training rows.

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
