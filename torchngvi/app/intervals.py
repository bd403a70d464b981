"""Intervals of new observations: the linear predictor is N(e, v) under q, and the observation varies about it."""

import math

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.models.likelihoods import GaussianNoise, Likelihood, PoissonLog

_NODES = 64  # of the quadrature over the predictor
_REACH = 6.0  # standard deviations to either side
_ROWS = 20_000  # at once


def outcome_interval(
    likelihood: Likelihood,
    mean: Tensor,  # (N,)
    variance: Tensor,  # (N,)
    level: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Central interval of a new observation, the uncertainty of the coefficients included.

    Args:
        likelihood: `GaussianNoise` or `PoissonLog`.
        mean: e of the linear predictor of each row, (N,), float64.
        variance: v of the same.
        level: the probability that it holds.

    Returns:
        The ends of the interval, each (N,); of counts the smallest with at least that probability to their left.

    Raises:
        InputError: another likelihood.

    >>> low, high = outcome_interval(GaussianNoise(3.0), torch.zeros(1).double(), torch.tensor([16.0]).double())
    >>> round(high.item(), 2)  # 1.96 √(16 + 9)
    9.8
    """
    tail = 0.5 * (1 - level)
    if isinstance(likelihood, GaussianNoise):
        half = -torch.special.ndtri(mean.new_tensor(tail)) * torch.sqrt(variance + likelihood.noise**2)
        return mean - half, mean + half
    if not isinstance(likelihood, PoissonLog):
        raise InputError(
            f"intervals of new observations are for Gaussian noise and Poisson counts; got {type(likelihood).__name__}."
        )
    parts = zip(mean.split(_ROWS), variance.sqrt().split(_ROWS), strict=True)
    low, high = zip(*((_count(e, s, tail), _count(e, s, 1 - tail)) for e, s in parts), strict=True)
    return torch.cat(low), torch.cat(high)


def _count(mean: Tensor, sd: Tensor, probability: float) -> Tensor:
    """The smallest count k with P(y ≤ k) ≥ p, by bisection; P is averaged over the predictor by the trapezoid rule."""
    z = torch.linspace(-_REACH, _REACH, _NODES, dtype=mean.dtype, device=mean.device)
    weights = torch.softmax(-0.5 * z.square(), 0)
    rate = torch.exp((mean[:, None] + sd[:, None] * z).clamp_max(300.0))

    def short(count: Tensor) -> Tensor:
        return (torch.special.gammaincc(count[:, None] + 1, rate) * weights).sum(-1) < probability

    low, high = torch.full_like(mean, -1.0), torch.ones_like(mean)
    while bool((grow := short(high) & (high < 1e300)).any()):
        low, high = torch.where(grow, high, low), torch.where(grow, 2 * high, high)
    steps = math.ceil(math.log2(max(float((high - low).max()), 1.0)))
    for _ in range(min(steps, 60)):  # beyond 2^53 counts are not told apart
        middle = ((low + high) / 2).floor()
        below = short(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
