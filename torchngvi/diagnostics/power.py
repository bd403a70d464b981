"""What a calibration by so many simulations could find: the smallest errors that it flags four times in five.

A posterior that is normal with a mean δ and a standard deviation 1, where the right ones are 0 and f, has ranks that
are binomial with the probability Φ(f ε - δ) given ε ~ N(0, 1).  How often they leave the band of the exact test is
counted on ranks that are drawn so.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.uniformity import Uniformity

FOUND = 0.8  # share of the calibrations in which an error is flagged that "would be found"
_REPEATS = 500  # calibrations that are drawn; a share has a standard error of 0.02
_FACTORS = 1.05 ** torch.arange(1, 58, dtype=torch.float64, device="cpu")  # up to 16
_SHIFTS = 0.05 * torch.arange(1, 81, dtype=torch.float64, device="cpu")  # up to 4 posterior standard deviations


class Power(NamedTuple):
    """The smallest errors of one quantity that would be flagged four times in five.

    Attributes:
        sd: a factor by which its standard deviations are too small; infinite where 16 is not found.
        mean: of its means in posterior standard deviations; infinite where 4 are not found.
    """

    sd: float
    mean: float

    def __str__(self) -> str:
        """A clause."""
        found = []
        if self.sd < math.inf:
            found.append(f"an sd {self.sd:.2g} times too small")
        if self.mean < math.inf:
            found.append(f"a mean {self.mean:.2g} sd off")
        if not found:
            return "so few can hardly speak against anything: raise runs"
        return f"so many would find {' or '.join(found)} four times in five, smaller errors less often"


@functools.cache
def power(test: Uniformity, alpha: float) -> Power:
    """Find the smallest errors that a test of ranks flags four times in five.

    >>> found = power(Uniformity(200, 99), 0.05)
    >>> round(found.sd, 1), found.mean < 0.3
    (1.3, True)
    """
    low, high = (edge[:, None] for edge in test.band(alpha))
    generator = torch.Generator().manual_seed(0)
    size = (test.count, _REPEATS)
    noise = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    draws = torch.full(size, float(test.draws), dtype=torch.float64, device="cpu")

    def found(below: Tensor) -> bool:
        """Whether ranks are flagged often enough, given the probability of each draw to be below the truth."""
        ranks = torch.binomial(draws, below, generator=torch.Generator().manual_seed(1))
        differences = test.differences(ranks)
        outside = (differences < low - 1e-12) | (differences > high + 1e-12)
        return float(outside.any(0).double().mean()) >= FOUND

    return Power(
        _first(_FACTORS, lambda factor: found(torch.special.ndtr(factor * noise))),
        _first(_SHIFTS, lambda shift: found(torch.special.ndtr(noise - shift))),
    )


def _first(sizes: Tensor, found: Callable[[Tensor], bool]) -> float:
    """The smallest size that is found, by bisection; infinite where the largest is not."""
    if not found(sizes[-1]):
        return math.inf
    low, high = -1, len(sizes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(sizes[middle]) else (middle, high)
    return float(sizes[high])
