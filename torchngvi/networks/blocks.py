"""Several operations on the same tensors, a part that fits into the cache at a time.

A step of a posterior is a few sums and products on tensors of the size of the network, and on a CPU it costs what the
memory costs.  Each part goes through all of them before the next one is read, and what is in between stays small.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SIZE = 2**18  # numbers in a part: four parts of single precision are four megabytes

Pieces = list[Tensor]  # of a tensor, flat, each but the last of SIZE numbers


def blocks(first: Sequence[Tensor], *others: Sequence[Tensor | Pieces]) -> Iterator[tuple[list[Tensor], ...]]:
    """Iterate over corresponding parts of lists of tensors: small ones together, a large one in pieces.

    >>> a, b = [torch.zeros(2), torch.zeros(600, 600)], [torch.ones(2), torch.ones(600, 600)]
    >>> parts = [torch._foreach_add_(x, y) for x, y in blocks(a, b)]
    >>> len(parts), float(a[0].sum() + a[1].sum())
    (3, 360002.0)
    """
    lists: tuple[Sequence[Tensor | Pieces], ...] = (first, *others)
    sizes = [tensor.numel() for tensor in first]
    if sum(sizes) <= SIZE:  # where nothing is in pieces
        yield lists  # type: ignore[misc]
        return
    if first[0].device.type != "cpu":
        yield tuple([joined(tensor, like) for tensor, like in zip(of, first, strict=True)] for of in lists)
        return
    begin, count = 0, 0
    for k, size in enumerate(sizes):
        large = size > SIZE and all(_contiguous(of[k]) for of in lists)
        if large or count >= SIZE:
            if begin < k:
                yield tuple([joined(of[i], first[i]) for i in range(begin, k)] for of in lists)
            begin, count = k, 0
        if large:
            yield from (tuple([part] for part in parts) for parts in zip(*(pieces(of[k]) for of in lists), strict=True))
            begin = k + 1
        else:
            count += size
    if begin < len(sizes):
        yield tuple([joined(of[i], first[i]) for i in range(begin, len(sizes))] for of in lists)


def _contiguous(tensor: Tensor | Pieces) -> bool:
    return isinstance(tensor, list) or tensor.is_contiguous()


def pieces(tensor: Tensor | Pieces) -> Pieces:
    """Return the pieces of a contiguous tensor, which are views of it.

    >>> [len(piece) for piece in pieces(torch.zeros(600, 600))]
    [262144, 97856]
    """
    return tensor if isinstance(tensor, list) else list(tensor.view(-1).split(SIZE))


def joined(tensor: Tensor | Pieces, like: Tensor | Pieces) -> Tensor:
    """Return the tensor whose pieces these are.

    >>> joined([torch.zeros(30), torch.ones(10)], torch.zeros(20, 2)).sum()
    tensor(10.)
    """
    if not isinstance(tensor, list):
        return tensor
    assert isinstance(like, Tensor)
    return torch.cat(tensor).view(like.shape)
