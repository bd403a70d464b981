"""Log densities, elementwise and normalised over their whole support; a prior on half of it is not renormalised."""

import math

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)


def normal(x: Tensor, mean: Tensor | float, sd: Tensor | float) -> Tensor:
    return -0.5 * ((x - mean) / sd).square() - _log(sd) - 0.5 * LOG_2PI


def lognormal(x: Tensor, mean: Tensor | float, sd: Tensor | float) -> Tensor:
    return normal(x.log(), mean, sd) - x.log()


def cauchy(x: Tensor, scale: float) -> Tensor:
    """Of median 0."""
    return -torch.log1p((x / scale).square()) - math.log(math.pi * scale)


def exponential(x: Tensor, rate: Tensor) -> Tensor:
    return rate.log() - rate * x


def beta(x: Tensor, a: float, b: float) -> Tensor:
    constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return (a - 1) * x.log() + (b - 1) * torch.log1p(-x) + constant


def dirichlet(x: Tensor, concentration: Tensor) -> Tensor:
    """Of the last dimension, which it takes away."""
    constant = concentration.sum(-1).lgamma() - concentration.lgamma().sum(-1)
    return ((concentration - 1) * x.log()).sum(-1) + constant


def _log(x: Tensor | float) -> Tensor | float:
    return x.log() if isinstance(x, Tensor) else math.log(x)
