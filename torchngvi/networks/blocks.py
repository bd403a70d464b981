"""Several operations on the same tensors, a part that fits into the cache at a time.

A step of a posterior is a few sums and products on tensors of the size of the network, and on a CPU it costs what the
memory costs.  Each part goes through all of them before the next one is read, and what is in between stays small.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SIZE = 2**17  # numbers in a part: four parts of single precision are two megabytes

Pieces = list[Tensor]  # of a tensor, flat, each but the last of SIZE numbers


def blocks(*lists: Sequence[Tensor | Pieces]) -> Iterator[tuple[list[Tensor], ...]]:
    """Iterate over corresponding parts of lists of tensors: small ones together, a large one in pieces.

    On other devices than a CPU, whose operations on a list are one kernel, the whole lists are the only part.

    Args:
        lists: of tensors whose shapes agree from list to list; those of the first are on one device.  In the others a
            large tensor may be given as its pieces.

    Yields:
        A list of views for each list.

    >>> a, b = [torch.zeros(2), torch.zeros(400, 400)], [torch.ones(2), torch.ones(400, 400)]
    >>> parts = [torch._foreach_add_(x, y) for x, y in blocks(a, b)]
    >>> len(parts), float(a[0].sum() + a[1].sum())
    (3, 160002.0)
    """
    if any(tensor.device.type != "cpu" for tensor in lists[0]):
        yield tuple([joined(tensor, like) for tensor, like in zip(of, lists[0], strict=True)] for of in lists)
        return
    together: list[tuple[Tensor, ...]] = []
    count = 0
    for tensors in zip(*lists, strict=True):
        numel = tensors[0].numel()
        if numel > SIZE and all(isinstance(tensor, list) or tensor.is_contiguous() for tensor in tensors):
            yield from (tuple([part] for part in parts) for parts in zip(*map(pieces, tensors), strict=True))
            continue
        together.append(tuple(joined(tensor, tensors[0]) for tensor in tensors))
        count += numel
        if count >= SIZE:
            yield tuple(map(list, zip(*together, strict=True)))
            together, count = [], 0
    if together:
        yield tuple(map(list, zip(*together, strict=True)))


def pieces(tensor: Tensor | Pieces) -> Pieces:
    """Return the pieces of a contiguous tensor, which are views of it.

    Args:
        tensor: or its pieces.

    >>> [len(piece) for piece in pieces(torch.zeros(400, 400))]
    [131072, 28928]
    """
    return tensor if isinstance(tensor, list) else list(tensor.view(-1).split(SIZE))


def joined(tensor: Tensor | Pieces, like: Tensor | Pieces) -> Tensor:
    """Return the tensor whose pieces these are.

    Args:
        tensor: or its pieces.
        like: a tensor of its shape.

    >>> joined([torch.zeros(30), torch.ones(10)], torch.zeros(20, 2)).sum()
    tensor(10.)
    """
    if not isinstance(tensor, list):
        return tensor
    assert isinstance(like, Tensor) and like.numel() == math.fsum(map(len, tensor))
    return torch.cat(tensor).view(like.shape)
