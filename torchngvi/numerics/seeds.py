"""Large whole numbers from torch's generators, the same ones on every version of PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 31  # of a seed


def drawn_seed() -> int:
    """Draw a seed below 2³¹ from torch's default generator.

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
    """Draw whole numbers of so many bits, uniformly, on the CPU."""
    return torch.randint(2**32, tuple(shape), generator=generator, device="cpu") % 2**bits
