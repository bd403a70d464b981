"""Large whole numbers from torch's generators, the same ones on every version of PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 31  # of a seed


def drawn_seed() -> int:
    """Draw a seed below 2³¹ from torch's default generator.

    A run that fixes its draws takes their seed here, so that `torch.manual_seed` decides the whole run.

    >>> _ = torch.manual_seed(0)
    >>> drawn_seed()
    398764591
    """
    return int(whole_numbers(_BITS, ()))


def whole_numbers(
    bits: int,
    shape: Sequence[int],
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw whole numbers of so many bits, uniformly, on the CPU.

    ``torch.randint(2**bits)`` takes 32 bits of the generator's up to PyTorch 2.6 and 64 later, from 2²⁸ on.  Below 2³²
    numbers are 64 bits modulo 2³² on all of them, and the remainder is what later versions return.

    Args:
        bits: from 28 to 32.
        shape: of the tensor that is returned.
        generator: torch's default one without it.
    """
    return torch.randint(2**32, tuple(shape), generator=generator, device="cpu") % 2**bits
