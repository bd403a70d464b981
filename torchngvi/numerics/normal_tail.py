"""The tail of the normal distribution, -log Φ, with two derivatives, each of which torch can differentiate again."""

import math

import torch
from torch import Tensor


def negative_log_ndtr(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute -log Φ(x) and two derivatives, without cancellation far to the left.

    >>> [round(float(part), 4) for part in negative_log_ndtr(torch.zeros(()))]  # log 2, -√(2/π), 2/π
    [0.6931, -0.7979, 0.6366]
    """
    limit = math.sqrt(2 * math.log(torch.finfo(x.dtype).max)) - 1  # 1/Φ(-x) is finite up to there, Φ(x) is 1 beyond
    scaled = torch.special.erfcx(x.clamp_max(limit) * -math.sqrt(0.5))
    ratio = torch.where(x > limit, torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi), math.sqrt(2 / math.pi) / scaled)
    inverse2 = x.clamp_max(-1.0).pow(-2)
    # r (r + x) = 1 - x⁻² + 6 x⁻⁴ - 50 x⁻⁶ + ..
    tail = 1 - inverse2 * (1 - inverse2 * (6 - inverse2 * (50 - 518 * inverse2)))
    return -torch.special.log_ndtr(x), -ratio, torch.where(x < -50, tail, ratio * (ratio + x))


def energy(x: Tensor) -> Tensor:
    """Compute -log Φ(x), whose second derivative by torch is right far to the left too.

    >>> x = torch.tensor(-1e4, dtype=torch.float64)
    >>> round(float(torch.func.grad(torch.func.grad(energy))(x)), 6)
    1.0
    """
    far = x < -50
    left = torch.where(far, x, -50.0)
    inverse2 = left.pow(-2)
    series = -inverse2 * (1 - inverse2 * (3 - inverse2 * (15 - 105 * inverse2)))
    tail = 0.5 * left * left + torch.log(-left) + 0.5 * math.log(2 * math.pi) - torch.log1p(series)
    return torch.where(far, tail, -torch.special.log_ndtr(torch.where(far, 0.0, x)))
