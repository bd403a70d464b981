"""Normal noise as a function of a seed, the number of the draw and the name of a parameter.

Nothing but two integers needs to be kept to make a draw again: after an evaluation at the mean, in another process,
or when a run is resumed.  Each parameter has noise of its own, so that freezing one leaves the others' as they were.
"""

import functools
import hashlib

import torch
from torch import Tensor

_TABLE, WINDOW = 2**22, 2**18  # numbers in the table, and in a window of it


def seed_of(seed: int, draw: int, name: str) -> int:
    """Mix a seed, the number of a draw and a name into the seed of a generator."""
    digest = hashlib.blake2b(f"{seed}/{draw}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: torch.device, seed: int, draw: int, name: str) -> torch.Generator:
    """Make the generator of one parameter's noise in one draw."""
    return torch.Generator(device).manual_seed(seed_of(seed, draw, name))


@functools.lru_cache(maxsize=4)
def _table(seed: int, dtype: torch.dtype) -> Tensor:
    """Normal noise to take windows of, on the CPU."""
    return torch.randn(_TABLE, dtype=dtype, generator=generator(torch.device("cpu"), seed, 0, "table"), device="cpu")


def windows(like: Tensor, name: str, seed: int, draw: int) -> list[Tensor]:
    """Return standard normal noise for a tensor, only to be read: itself, or flat pieces of ``WINDOW`` numbers.

    On the CPU they are windows of a table, and no number is copied.
    """
    if like.device.type != "cpu":
        return [torch.empty_like(like).normal_(generator=generator(like.device, seed, draw, name))]
    table, numel = _table(seed, like.dtype), like.numel()
    state = _word(f"{seed}/{draw}") * _word(name) % 2**64
    if numel <= WINDOW:
        return [table.narrow(0, (state >> 20) % (_TABLE - WINDOW), numel).view(like.shape)]
    found = []
    for first in range(0, numel, WINDOW):
        found.append(table.narrow(0, (state >> 20) % (_TABLE - WINDOW), min(WINDOW, numel - first)))
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # the generator of Knuth's MMIX
    return found


def normals(like: Tensor, name: str, seed: int, draw: int) -> Tensor:
    """Return the noise of :func:`windows` in the shape of the tensor."""
    found = windows(like, name, seed, draw)
    return found[0] if len(found) == 1 else torch.cat(found).view(like.shape)


@functools.lru_cache(maxsize=10_000)
def _word(text: str) -> int:
    """A text as an odd number of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1
