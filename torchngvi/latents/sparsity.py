"""Which pairs of latents occur in one term of a log joint: as a user declares it, and how it is coloured.

The Hessian of a sum of terms has an entry (i, j) only where some term sees both latents.  Latents whose rows have no
entry in a common column may be differentiated along together: the products of the Hessian with the indicators of such
groups are its entries themselves (Curtis, Powell and Reid 1974; Gebremedhin, Manne and Pothen 2005).
"""

from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.structures import Pattern

_FORMS = (
    "a pattern is a table of integers (n, k), each row the latents that one term sees, pairs of neighbours for k = 2; "
    "or several such tables in a list, a sparse matrix with an entry for each pair, or a structure as arrow(...)"
)


def pairs_of(
    pattern: Any,
    dim: int,
) -> Tensor:
    """Read a pattern: the pairs of different latents that occur together in a term.

    >>> pairs_of([[0, 1], [1, 2]], 3).tolist()
    [[1, 0], [2, 1]]
    >>> pairs_of(torch.tensor([[0, 1, 2]]), 3).tolist()
    [[1, 0], [2, 0], [2, 1]]
    """
    found = torch.cat([_pairs(part, dim) for part in _parts(pattern)]).cpu()
    outside = found[(found < 0) | (found >= dim)]
    if len(outside):
        raise InputError(
            f"the pattern names latent {int(outside[0])}, and the {dim} latents are numbered from 0 to {dim - 1}."
        )
    found = found[found[:, 0] != found[:, 1]]
    keys = torch.unique(found.amax(-1) * dim + found.amin(-1))  # sorted
    return torch.stack([keys // dim, keys % dim], -1)


def _parts(pattern: Any) -> list[Any]:
    """The tables of a list of tables; pairs in a list are one table."""
    if not isinstance(pattern, list | tuple):
        return [pattern]
    tables = [part for part in pattern if isinstance(part, Tensor) and part.ndim == 2]
    if len(tables) == len(pattern):
        return tables or [torch.zeros(0, 2, dtype=torch.long, device="cpu")]
    return [pattern]


def _pairs(pattern: Any, dim: int) -> Tensor:
    """The pairs of one table, matrix or structure, (E, 2), with repetitions."""
    if isinstance(pattern, Pattern):
        rows, columns = pattern.positions()
        own = (rows < dim) & (columns < dim)  # what follows are global coordinates
        return torch.stack([rows[own], columns[own]], -1)
    if hasattr(pattern, "tocoo"):  # of SciPy
        matrix = pattern.tocoo()
        _check_square(tuple(matrix.shape), dim)
        return torch.stack([torch.as_tensor(matrix.row).long(), torch.as_tensor(matrix.col).long()], -1)
    if isinstance(pattern, Tensor) and pattern.layout != torch.strided:
        _check_square(tuple(pattern.shape), dim)
        return pattern.to_sparse_coo().coalesce().indices().mT
    try:
        table = torch.as_tensor(pattern)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{_FORMS}; got {type(pattern).__name__}.") from error
    if table.numel() == 0:
        return torch.zeros(0, 2, dtype=torch.long, device="cpu")
    if table.ndim != 2 or table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
        raise InputError(f"{_FORMS}; got {table.dtype} of shape {tuple(table.shape)}.")
    if len(table) == 2 and table.shape[1] > 2:
        raise InputError(
            f"a pattern of shape {tuple(table.shape)} may hold pairs in its columns, or two terms of {table.shape[1]} "
            "latents each. Of pairs, pass pattern.T, shape (n, 2); of two terms, a list of two tensors, one a term, "
            f"(1, {table.shape[1]}) each."
        )
    first, second = torch.combinations(torch.arange(table.shape[1], device=table.device), 2).unbind(-1)
    return torch.stack([table[:, first].flatten(), table[:, second].flatten()], -1).long()


def _check_square(shape: tuple[int, ...], dim: int) -> None:
    if shape != (dim, dim):
        raise InputError(f"a sparse matrix is a pattern if it is {dim} x {dim}, one row a latent; got shape {shape}.")


def neighbours(
    pairs: Tensor,  # (E, 2)
    dim: int,
) -> list[list[int]]:
    """List the neighbours of every latent, in rising order.

    >>> neighbours(torch.tensor([[1, 0], [2, 1]]), 3)
    [[1], [0, 2], [1]]
    """
    both = torch.cat([pairs, pairs.flip(-1)])
    keys = (both[:, 0] * dim + both[:, 1]).sort().values
    ends = torch.bincount(keys // dim, minlength=dim).cumsum(0).tolist()
    others = (keys % dim).tolist()
    return [others[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def colours(
    around: list[list[int]],
) -> list[int]:
    """Colour the latents so that no two within a distance of two have one colour, greedily.

    >>> colours([[1], [0, 2], [1, 3], [2]])
    [0, 1, 2, 0]
    """
    found = [-1] * len(around)
    for latent, near in enumerate(around):
        taken = {found[other] for one in near for other in around[one]}
        taken.update(found[one] for one in near)
        colour = 0
        while colour in taken:
            colour += 1
        found[latent] = colour
    return found


def in_a_narrow_order(
    around: list[list[int]],
) -> list[list[int]]:
    """Order each connected part so that neighbours stand close together (Cuthill and McKee 1969).

    >>> in_a_narrow_order([[2], [2], [0, 1], []])
    [[0, 2, 1], [3]]
    """
    degrees = [len(near) for near in around]
    seen = [False] * len(around)
    parts = []
    for latent in range(len(around)):
        if seen[latent]:
            continue
        part, rounds = _outwards(around, degrees, latent)
        while True:
            other, more = _outwards(around, degrees, part[-1])
            if more <= rounds:
                break
            part, rounds = other, more
        for one in part:
            seen[one] = True
        parts.append(other if _width(around, other) < _width(around, part) else part)
    return sorted(parts, key=len, reverse=True)


def _outwards(around: list[list[int]], degrees: list[int], start: int) -> tuple[list[int], int]:
    """All that can be reached, neighbours of few neighbours first, and the number of rounds."""
    order, ring, rounds = [start], [start], 0
    reached = {start}
    while ring:
        following = []
        for latent in ring:
            fresh = [one for one in around[latent] if one not in reached]
            reached.update(fresh)
            following += sorted(fresh, key=degrees.__getitem__)
        order += following
        ring, rounds = following, rounds + 1
    return order, rounds


def _width(around: list[list[int]], order: list[int]) -> int:
    """The largest distance of neighbours in an order."""
    place = {latent: k for k, latent in enumerate(order)}
    return max((abs(place[one] - k) for k, latent in enumerate(order) for one in around[latent]), default=0)
