"""Columns that depend on one another, such as copies in other units: no data tell their effects apart."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.messages import listed


class Dependence(NamedTuple):
    """A column that is a sum of multiples of others.

    Attributes:
        column: its place.
        of: the places of the others, at least one.
    """

    column: int
    of: tuple[int, ...]


def dependences(
    X: Tensor,  # (N, D)
) -> list[Dependence]:
    """Find the columns that are sums of multiples of columns in front of them, to half of the digits.

    By a QR factorisation of the columns scaled to unit length, about their means where one is the same in all rows, for
    a cost of 2ND² multiplications.

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


def told_dependences(names: Sequence[str], found: Sequence[Dependence], intercept: int | None) -> tuple[str, ...]:
    """Sentences about columns that depend on others.

    >>> told_dependences(["1", "cm", "inches"], [Dependence(2, (0, 1))], 0)[0].partition(":")[0]
    'column inches is cm in other units, a multiple of it plus a constant'
    """
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
