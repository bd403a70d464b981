"""Intervals of new observations: the linear predictor is N(e, v) under q, and the observation varies about it."""

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import special
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.models.likelihoods import GaussianNoise, Likelihood, NegativeBinomial, PoissonLog, StudentT

_NODES = 64  # of the quadrature over the predictor
_REACH = 6.0  # standard deviations to either side
_ROWS = 20_000  # at once
_WIDEST = 1e12  # of scales that an interval of real numbers may have

Below = Callable[[Tensor, Tensor], Tensor]  # of values (n, 1) and predictors (n, nodes) the P(y ≤ value) of each


def outcome_interval(
    likelihood: Likelihood,
    mean: Tensor,  # (N,)
    variance: Tensor,  # (N,)
    level: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Central interval of a new observation, the uncertainty of the coefficients included.

    >>> low, high = outcome_interval(GaussianNoise(3.0), torch.zeros(1).double(), torch.tensor([16.0]).double())
    >>> round(high.item(), 2)  # 1.96 √(16 + 9)
    9.8
    """
    tail = 0.5 * (1 - level)
    if isinstance(likelihood, GaussianNoise):
        half = -torch.special.ndtri(mean.new_tensor(tail)) * torch.sqrt(variance + likelihood.noise**2)
        return mean - half, mean + half
    below, sd = _below(likelihood), variance.sqrt()
    unit = likelihood.scale if isinstance(likelihood, StudentT) else None
    ends = []
    for probability in (tail, 1 - tail):
        parts = zip(mean.split(_ROWS), sd.split(_ROWS), strict=True)
        search = (_count(below, e, s, probability) if unit is None else _real(below, e, s, probability, unit)
                  for e, s in parts)  # fmt: skip
        ends.append(torch.cat(list(search)))
    return ends[0], ends[1]


def _below(likelihood: Likelihood) -> Below:
    """P(y ≤ value) given the predictor."""
    match likelihood:
        case PoissonLog():
            return lambda k, eta: torch.special.gammaincc(k + 1, eta.clamp_max(300.0).exp())
        case NegativeBinomial():
            r = likelihood.dispersion
            return lambda k, eta: _of_scipy(special.betainc, r, k + 1, torch.sigmoid(math.log(r) - eta))
        case StudentT():
            scale, dof = likelihood.scale, likelihood.dof
            return lambda y, eta: _of_scipy(special.stdtr, dof, (y - eta) / scale)
    raise InputError(
        f"intervals of new observations are for the families of the command line; got {type(likelihood).__name__}."
    )


def _of_scipy(function: Callable[..., np.ndarray], *arguments: Tensor | float) -> Tensor:
    return torch.as_tensor(function(*(x.numpy() if isinstance(x, Tensor) else x for x in arguments)))


def _short(below: Below, mean: Tensor, sd: Tensor, probability: float) -> Callable[[Tensor], Tensor]:
    """Whether P(y ≤ value) < p; P is averaged over the predictor by the trapezoid rule."""
    z = torch.linspace(-_REACH, _REACH, _NODES, dtype=mean.dtype, device=mean.device)
    weights, eta = torch.softmax(-0.5 * z.square(), 0), mean[:, None] + sd[:, None] * z
    return lambda value: (below(value[:, None], eta) * weights).sum(-1) < probability


def _count(below: Below, mean: Tensor, sd: Tensor, probability: float) -> Tensor:
    """The smallest count k with P(y ≤ k) ≥ p, by bisection."""
    short = _short(below, mean, sd, probability)
    low, high = torch.full_like(mean, -1.0), torch.ones_like(mean)
    while bool((grow := short(high) & (high < 1e300)).any()):
        low, high = torch.where(grow, high, low), torch.where(grow, 2 * high, high)
    steps = math.ceil(math.log2(max(float((high - low).max()), 1.0)))
    for _ in range(min(steps, 60)):  # beyond 2^53 counts are not told apart
        middle = ((low + high) / 2).floor()
        inside = short(middle)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return high


def _real(below: Below, mean: Tensor, sd: Tensor, probability: float, unit: float) -> Tensor:
    """Where P(y ≤ value) = p, by bisection about the mean."""
    short = _short(below, mean, sd, probability)
    side = math.copysign(1.0, probability - 0.5)
    reach = unit + _REACH * sd
    while bool((grow := (short(mean + side * reach) == (side > 0)) & (reach < _WIDEST * (unit + sd))).any()):
        reach = torch.where(grow, 2 * reach, reach)
    low, high = torch.minimum(mean, mean + side * reach), torch.maximum(mean, mean + side * reach)
    for _ in range(60):
        middle = 0.5 * (low + high)
        inside = short(middle)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return high
