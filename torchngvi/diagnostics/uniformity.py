"""An exact test that ranks are uniform, by the simultaneous bands of their empirical distribution function.

With N ranks on 0..L, the count X_k of those below t_k is binomial with the probability z_k = t_k/(L + 1) at each level
alone, and along the levels a Markov chain: X_{k+1} - X_k ~ Bin(N - X_k, (z_{k+1} - z_k)/(1 - z_k)).  The chance that a
path stays within given bounds is therefore a product of N + 1 by N + 1 matrices (Säilynoja, Bürkner and Vehtari 2022,
Statistics and Computing 32, section 2.2), and nothing has to be simulated.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_tensor

ALPHA = 0.05  # chance that anything at all is flagged where everything is calibrated
_LEVELS = 20  # at which the distribution function is looked at, with its end
_CANDIDATES = 64  # of a band's level at once
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Uniformity:
    """The test for N ranks on 0..L.

    The statistic is the smallest two-sided binomial p-value over the levels, min_k 2 min(P(X_k ≤ x_k), P(X_k ≥ x_k)).

    Attributes:
        count: N.
        draws: L.

    >>> import torch
    >>> even = torch.arange(100)[:, None]
    >>> Uniformity(100, 99).p_values(even).item()  # nothing could be nearer
    1.0
    """

    count: int
    draws: int

    @property
    def thresholds(self) -> Tensor:
        """The t_k, integers from 1 to L, (K,)."""
        size = self.draws + 1
        return torch.tensor(
            sorted({round(k * size / _LEVELS) for k in range(1, _LEVELS)} & set(range(1, size))), device="cpu"
        )

    @property
    def levels(self) -> Tensor:
        """The z_k = t_k/(L + 1), (K,)."""
        return self.thresholds.double() / (self.draws + 1)

    def counts(
        self,
        ranks: Tensor,  # (N, Q)
    ) -> Tensor:
        """The ranks below each threshold, (K, Q)."""
        return (ranks < self.thresholds[:, None, None]).sum(1)

    def differences(
        self,
        ranks: Tensor,  # (N, Q)
    ) -> Tensor:
        """The empirical distribution function less the uniform one, (K, Q)."""
        return self.counts(ranks) / self.count - self.levels[:, None]

    def histogram(
        self,
        ranks: Tensor,  # (N,)
    ) -> tuple[Tensor, Tensor]:
        """Counts between neighbouring levels (K + 1,), and the edges in [0, 1], (K + 2,)."""
        below = torch.cat(
            [
                torch.tensor([0], device="cpu"),
                self.counts(ranks[:, None])[:, 0],
                torch.tensor([self.count], device="cpu"),
            ]
        )
        return below.diff(), torch.cat([torch.zeros(1, device="cpu"), self.levels, torch.ones(1, device="cpu")])

    def p_values(
        self,
        ranks: Tensor,  # (N, Q)
    ) -> Tensor:
        """The chance of a statistic as small or smaller where ranks are uniform, (Q,); 1 without ranks."""
        tails, counts = self._tails(), self.counts(ranks)
        smallest, member = tails.gather(1, counts).amin(0).unique(return_inverse=True)  # there are few different ones
        return (1 - self._inside(tails, smallest)).clamp(0.0, 1.0)[member]

    def band(self, alpha: float) -> tuple[Tensor, Tensor]:
        """The lowest and highest difference at each level, (K,) each, that no path leaves with more than a chance α.

        A path leaves it exactly where its p-value is at most α.
        """
        tails = self._tails()
        low, high = (
            torch.tensor(1e-300, dtype=torch.float64, device="cpu").log(),
            torch.tensor(0.0, dtype=torch.float64, device="cpu"),
        )
        for _ in range(4):
            grid = torch.linspace(float(low), float(high), _CANDIDATES, dtype=torch.float64, device="cpu")
            outside = 1 - self._inside(tails, grid.exp())
            last = int((outside <= alpha).sum()) - 1
            low, high = grid[max(last, 0)], grid[min(last + 1, _CANDIDATES - 1)]
        kept = tails > low.exp() * _ROUNDING
        every = torch.arange(self.count + 1, device="cpu").expand_as(kept)
        lowest = torch.where(kept, every, self.count).amin(1)
        highest = torch.where(kept, every, 0).amax(1)
        return lowest / self.count - self.levels, highest / self.count - self.levels

    def _log_binomial(self, trials: Tensor, probability: Tensor) -> Tensor:
        """log P(X = x), x = 0..N, for trials (...) and a probability that broadcasts with it, (..., N + 1)."""
        x = torch.arange(self.count + 1, dtype=torch.float64, device="cpu")
        n, p = trials[..., None].double(), probability[..., None]
        rest = n - x
        choose = torch.lgamma(n + 1) - torch.lgamma(x + 1) - torch.lgamma(rest.clamp_min(0) + 1)
        return torch.where(rest >= 0, choose + torch.xlogy(x, p) + torch.xlogy(rest.clamp_min(0), 1 - p), -torch.inf)

    def _tails(self) -> Tensor:
        """Two-sided p-values of each count at each level, (K, N + 1)."""
        mass = self._log_binomial(torch.full_like(self.levels, self.count), self.levels).exp()
        below, above = mass.cumsum(1), mass.flip(1).cumsum(1).flip(1)
        return (2 * torch.minimum(below, above)).clamp_max(1.0)

    def _inside(self, tails: Tensor, limit: Tensor) -> Tensor:
        """The chance that the p-values of a path stay above each limit (Q,) at all levels, (Q,)."""
        state = torch.zeros(len(limit), self.count + 1, dtype=torch.float64, device="cpu")
        state[:, 0] = 1
        before, start = torch.zeros((), dtype=torch.float64, device="cpu"), torch.arange(self.count + 1, device="cpu")
        for level, tail in zip(self.levels, tails, strict=True):
            step = self._log_binomial(self.count - start, (level - before) / (1 - before)).exp()  # of increments
            moved = torch.zeros_like(step)
            to = start[:, None] + start
            ok = to <= self.count
            moved[start[:, None].expand_as(to)[ok], to[ok]] = step[ok]
            state = torch.where(tail > limit[:, None] * _ROUNDING, state @ moved, 0.0)
            before = level
        return state.sum(1)


def holm(
    p_values: Tensor,  # (Q,)
) -> Tensor:
    """Holm's adjusted p-values, (Q,): below α with a chance of at most α for any of those that are true.

    >>> holm(torch.tensor([0.01, 0.04, 0.03])).tolist()
    [0.029999999329447746, 0.05999999865889549, 0.05999999865889549]
    """
    p_values = read_tensor("p_values", p_values, shape=(None,))
    ordered, order = p_values.sort()
    raised = ordered * torch.arange(len(ordered), 0, -1, dtype=ordered.dtype, device=ordered.device)
    return torch.empty_like(p_values).scatter(0, order, raised.cummax(0).values.clamp_max(1.0))


# What a calibration by so many simulations could find: the smallest errors that it flags four times in five
#
# A posterior that is normal with a mean δ and a standard deviation 1, where the right ones are 0 and f, has ranks that
# are binomial with the probability Φ(f ε - δ) given ε ~ N(0, 1).  How often they leave the band of the exact test is
# counted on ranks that are drawn so.

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
