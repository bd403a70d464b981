"""Columns of a design of which data say too little: those that depend on others, and those that separate classes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.messages import listed

# Columns that depend on one another, such as copies in other units: no data tell their effects apart


class Dependence(NamedTuple):
    """A column that is a sum of multiples of others."""

    column: int  # its place
    of: tuple[int, ...]  # the places of the others, at least one


def dependences(X: Tensor) -> list[Dependence]:
    """Find the columns of X (N, D) that are sums of multiples of columns in front of them, to half of the digits.

    >>> X = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 3.0], [1.0, 2.0, 5.0], [1.0, 5.0, 11.0]], dtype=torch.float64)
    >>> dependences(X)  # the last is twice the second, and one
    [Dependence(column=2, of=(0, 1))]
    """
    rows, columns = X.shape
    ones = ((X[:1] == X).all(0) & (X[0] != 0)).nonzero()[:1, 0].tolist() if rows else []
    same = ((X[:1] == X).all(0) & (X[0] != 0)).nonzero()[1:, 0].tolist() if ones else []
    found = [Dependence(place, (ones[0],)) for place in same]
    shift = X.mean(0) if ones else torch.zeros_like(X[0])
    centred = X - shift
    lengths = torch.linalg.vector_norm(centred, dim=0)
    sizes = torch.linalg.vector_norm(X, dim=0)
    rounding = torch.finfo(X.dtype).eps
    there = (lengths.isfinite() & (lengths > 10 * rounding * sizes)).nonzero()[:, 0]
    if rows < columns or len(there) < 2:
        return found
    root = torch.linalg.qr(centred[:, there] / lengths[there], mode="r")[1]
    share = 10 * rounding**0.5  # of a column's size, below which nothing is distinguished
    alone = root.diagonal().abs() > share
    first = alone.nonzero()[:, 0]
    for place in (~alone).nonzero()[:, 0].tolist():
        before = first[first < place]
        parts = torch.linalg.lstsq(root[:, before], root[:, place, None]).solution[:, 0]
        of = [int(there[k]) for k in before[parts.abs() > share]]
        part = parts * lengths[there[place]] / lengths[there[before]]
        left = float(shift[there[place]] - part @ shift[there[before]])
        constant = ones if abs(left) > rounding**0.5 * float(sizes[there[place]]) / rows**0.5 else []
        found.append(Dependence(int(there[place]), tuple(sorted({*constant, *of}))))
    return sorted(found)


def describe_dependences(names: Sequence[str], found: Sequence[Dependence], intercept: int | None) -> tuple[str, ...]:
    """Sentences about columns that depend on others."""
    end = "the data cannot tell their effects apart, and the prior alone parts them. Leave one of them out."
    told = []
    for column, of in found:
        others = [names[place] for place in of if place != intercept]
        plus = " plus a constant" if intercept in of else ""
        if not others:
            what = f"the same in all rows, as {names[of[0]]} is"
        elif len(others) == 1:
            what = f"{others[0]} in other units, a multiple of it{plus}"
        else:
            what = f"a sum of multiples of {listed(others)}{plus and ' and a constant'}"
        told.append(f"column {names[column]} is {what}: {end}")
    return tuple(told)


# Columns that separate two classes, so that no finite coefficient is the likeliest (Albert and Anderson 1984): the
# likelihood rises for ever along such a coefficient, and the prior alone bounds it


class Separation(NamedTuple):
    """The places of the columns that separate two classes, each by itself."""

    complete: tuple[int, ...]  # all entries of one class are above all of the other
    quasi: tuple[int, ...]  # where some are equal, as of a level that only rows of one class have


def separating(X: Tensor, success: Tensor) -> Separation:
    """Find the columns of X (N, D) that separate two classes, by a mask of the rows of one.

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


def describe_separation(names: Sequence[str], found: Separation) -> tuple[str, ...]:
    """Sentences about the columns that separate the classes."""
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
