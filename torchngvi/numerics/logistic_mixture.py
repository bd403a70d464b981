"""The logistic distribution as a mixture of 27 normals, whose expectations are closed sums.

It serves graphs, for which its terms are operators that torch knows, and how the curvature of a softplus changes.
"""

import functools
import math

import torch
from torch import Tensor


def _mixture() -> tuple[list[float], list[float]]:
    """τ² and p/√(2π) of σ(x) = Σ p Φ(x/τ), to 2e-15, by a trapezoid rule in log K.

    If K follows the Kolmogorov distribution and Z ~ N(0, 1), then 2 K Z is logistic (Andrews and Mallows 1974;
    Stefanski 1991).
    """
    step, scales, weights = 0.125, [], []
    for index in range(-15, 12):
        k = math.exp(index * step)
        if k > 0.9:  # the Kolmogorov density, and its form for small arguments
            density = 8 * k * sum((-1) ** (j + 1) * j * j * math.exp(-2 * (j * k) ** 2) for j in range(1, 20))
        else:
            odd = [((2 * j - 1) * math.pi / k) ** 2 for j in range(1, 20)]
            density = math.sqrt(2 * math.pi) / k**2 * sum((o / 4 - 1) * math.exp(-o / 8) for o in odd)
        scales.append(2 * k)
        weights.append(k * density)
    total = math.fsum(weights) * math.sqrt(2 * math.pi)
    return [s * s for s in scales], [w / total for w in weights]


_MIXTURE = _mixture()


@functools.cache
def _mixture_tensors(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(_MIXTURE, dtype=torch.float64, device="cpu").to(device, dtype)


def _of_the_graph(like: Tensor) -> tuple[Tensor, Tensor]:
    """τ² and p/√(2π) of the mixture; what is made while a graph is traced belongs to it."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        scale2, weight = (torch.tensor(part, dtype=like.dtype, device=like.device) for part in _MIXTURE)
    else:
        scale2, weight = _mixture_tensors(like.dtype, like.device)
    return scale2, weight


def mixture(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the three moments by the normal mixture of the logistic distribution, in operators that torch knows.

    F = Σ p_k [e Φ(u_k) + r_k φ(u_k)], α = Σ p_k Φ(u_k), β = Σ p_k φ(u_k)/r_k, with u_k = e/r_k and r_k² = v + τ_k²;
    the error is below 1e-13 max(1, F) in float64, absolutely.  It is for graphs that are traced or compiled, and for
    forward mode, where what a kernel computes would not be seen.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> [round(float(part), 12) for part in mixture(zero, zero)]  # log 2, 1/2, 1/4
    [0.69314718056, 0.5, 0.25]
    """
    dtype, (mean, variance) = mean.dtype, _at_least_single(mean, variance)
    scale2, weight = _of_the_graph(mean)
    inverse = (variance[..., None] + scale2).rsqrt()  # 1/r_k
    x = (math.sqrt(0.5) * mean)[..., None] * inverse  # u_k/√2
    slope = 0.5 + torch.erf(x) @ (weight * math.sqrt(0.5 * math.pi))
    normal = torch.exp(-x * x) * inverse
    curvature, rest = normal @ weight, normal @ (weight * scale2)
    value = torch.where(variance == torch.inf, torch.inf, mean * slope + variance * curvature + rest)
    return value.to(dtype), slope.to(dtype), curvature.to(dtype)


def bends(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Compute how β of a softplus changes with e and v, by the normal mixture of the logistic distribution.

    β_e = -Σ p_k u_k φ(u_k)/r_k² and β_v = ½ Σ p_k (u_k² - 1) φ(u_k)/r_k³, with u_k = e/r_k and r_k² = v + τ_k²; the
    error is below 1e-13 in float64, absolutely.  torch can differentiate both.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> [round(float(part), 12) + 0.0 for part in bends(zero, zero)]  # σ''(0) and ½ σ'''(0)
    [0.0, -0.0625]
    """
    dtype, (mean, variance) = mean.dtype, _at_least_single(mean, variance)
    scale2, weight = _of_the_graph(mean)
    # beyond 64 standard deviations of the widest term all is 0, and the square does not overflow
    limit = (64 * (variance + scale2[-1]).sqrt()).clamp_max(0.5 * math.sqrt(torch.finfo(mean.dtype).max))
    mean = mean.clamp(-limit, limit)
    square = mean.square()
    inverse2 = (variance[..., None] + scale2).reciprocal()  # 1/r²
    cubes = torch.exp((-0.5 * square)[..., None] * inverse2) * inverse2 * inverse2.sqrt()
    third = cubes @ weight
    bend = 0.5 * (square * ((cubes * inverse2) @ weight) - third)
    return (-mean * third).to(dtype), bend.to(dtype)  # u φ/r² = e φ/r³


def _at_least_single(*numbers: Tensor) -> tuple[Tensor, ...]:
    """Half precision knows neither e² beyond |e| = 256 nor a sum of 27 terms."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in numbers)
