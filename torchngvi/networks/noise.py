"""Normal noise as a function of a seed, the number of the draw and the name of a parameter.

Nothing but two integers needs to be kept to make a draw again: after an evaluation at the mean, in another process,
or when a run is resumed.  Each parameter has noise of its own, so that freezing one leaves the others' as they were.
"""

import functools
import hashlib

import torch
from torch import Tensor

_TABLE = 2**22  # numbers in the table


def seed_of(seed: int, draw: int, name: str) -> int:
    """Mix a seed, the number of a draw and a name into the seed of a generator.

    Args:
        seed: of the whole run.
        draw: the number of the draw, from 0.
        name: of the parameter, or of what else is random.

    Returns:
        An integer of 63 bits, a different one for almost every triple.

    >>> seed_of(0, 1, "weight") == seed_of(0, 1, "weight"), seed_of(0, 1, "weight") == seed_of(0, 2, "weight")
    (True, False)
    """
    digest = hashlib.blake2b(f"{seed}/{draw}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: torch.device, seed: int, draw: int, name: str) -> torch.Generator:
    """Make the generator of one parameter's noise in one draw.

    Args:
        device: where the noise is made.
        seed, draw, name: as in :func:`seed_of`.

    Returns:
        The generator, seeded.

    >>> torch.rand(1, generator=generator(torch.device("cpu"), 0, 0, "weight")).shape
    torch.Size([1])
    """
    return torch.Generator(device).manual_seed(seed_of(seed, draw, name))


@functools.lru_cache(maxsize=4)
def _table(seed: int, dtype: torch.dtype) -> Tensor:
    """Normal noise to take windows of, on the CPU."""
    return torch.randn(_TABLE, dtype=dtype, generator=generator(torch.device("cpu"), seed, 0, "table"))


def normals(like: Tensor, name: str, seed: int, draw: int) -> Tensor:
    """Return standard normal noise of a tensor's shape, which is only to be read.

    On the CPU, where making normal numbers costs more than a step of Adam, it is a window at a random place of a table
    of four million: each number is normal, and two draws are independent but where their windows lie on one another
    number by number, once in four million pairs.  A tensor larger than half of the table has noise of its own, as
    every tensor has on other devices.

    Args:
        like: a tensor of the shape, dtype and device wanted.
        name: of the parameter.
        seed, draw: as in :func:`seed_of`.

    Returns:
        A tensor of that shape.

    >>> weight = torch.zeros(3)
    >>> bool((normals(weight, "weight", 0, 7) == normals(weight, "weight", 0, 7)).all())
    True
    """
    if like.device.type == "cpu" and like.numel() <= _TABLE // 2:
        first = seed_of(seed, draw, name) % (_TABLE - like.numel())
        return _table(seed, like.dtype)[first : first + like.numel()].view(like.shape)
    return torch.empty_like(like).normal_(generator=generator(like.device, seed, draw, name))
