"""Columns that separate two classes, so that no finite coefficient is the likeliest (Albert and Anderson 1984).

The likelihood rises for ever along such a coefficient, and the prior alone bounds it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchngvi.messages import listed


class Separation(NamedTuple):
    """The columns that separate two classes, each by itself.

    Attributes:
        complete: places of the columns of which all entries of one class are above all of the other.
        quasi: of those where some are equal, as of a level that only rows of one class have.
    """

    complete: tuple[int, ...]
    quasi: tuple[int, ...]


def separating(
    X: Tensor,  # (N, D)
    success: Tensor,  # bool, (N,)
) -> Separation:
    """Find the columns that separate two classes.

    >>> import torch
    >>> X = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 1.0], [3.0, 0.0, 0.0], [4.0, 1.0, 1.0]])
    >>> separating(X, torch.tensor([False, False, True, True]))
    Separation(complete=(0,), quasi=(1,))
    """
    above, below = X[success], X[~success]
    if not len(above) or not len(below):
        return Separation((), ())
    gap = (above.amin(0) - below.amax(0)).maximum(below.amin(0) - above.amax(0))
    varies = X.amin(0) < X.amax(0)
    complete, quasi = ((part & varies).nonzero()[:, 0].tolist() for part in (gap > 0, gap == 0))
    return Separation(tuple(complete), tuple(quasi))


def told(names: Sequence[str], found: Separation) -> tuple[str, ...]:
    """Sentences about the columns that separate the classes.

    >>> told(["age", "ward=B"], Separation((), (1,)))[0].partition(":")[0]
    'ward=B separates the classes in part (quasi-complete separation)'
    """
    complete, quasi = (listed([names[place] for place in places]) for places in found)
    end = "no finite coefficient is the likeliest, and the prior alone bounds it."
    told = []
    if complete:
        does = "each separates" if len(found.complete) > 1 else "separates"
        told.append(
            f"{complete} {does} the classes (complete separation): all entries of one class are above all of the "
            f"other; {end} Look whether the column says what is to be predicted."
        )
    if quasi:
        does = "each separates" if len(found.quasi) > 1 else "separates"
        told.append(
            f"{quasi} {does} the classes in part (quasi-complete separation): all rows beyond one of its values are of "
            f"one class; {end}"
        )
    return tuple(told)
