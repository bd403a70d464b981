"""Normal noise as a function of a seed, the number of the draw and the name of a parameter.

Nothing but two integers needs to be kept to make a draw again: after an evaluation at the mean, in another process,
or when a run is resumed.  Each parameter has noise of its own, so that freezing one leaves the others' as they were.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


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


def normals_(tensors: Sequence[Tensor], names: Sequence[str], seed: int, draw: int, spread: float = 1.0) -> None:
    """Fill tensors with normal noise, each with the noise of its name.

    Args:
        tensors: what is filled, of any shapes.
        names: their names.
        seed, draw: as in :func:`seed_of`.
        spread: its standard deviation.

    >>> weight, again = torch.zeros(3), torch.zeros(3)
    >>> normals_([weight], ["weight"], seed=0, draw=7), normals_([again], ["weight"], seed=0, draw=7)
    (None, None)
    >>> bool((weight == again).all())
    True
    """
    for tensor, name in zip(tensors, names, strict=True):
        tensor.normal_(0.0, spread, generator=generator(tensor.device, seed, draw, name))
