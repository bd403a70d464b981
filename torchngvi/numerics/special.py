"""Special functions: Gauss-Hermite nodes, the tail of the normal distribution, and functions about gamma."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.numerics.arrays import remembered
from torchngvi.numerics.linalg import eigh

# Gauss-Hermite quadrature under the standard normal distribution, in one dimension and on a grid of several


def normal_rule(nodes: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes z_k and log weights of E[f(z)] ≈ Σ_k w_k f(z_k) for z ~ N(0, I) in r dimensions (Golub and Welsch 1969)."""
    with torch.inference_mode(False):
        z, log_w = _line(nodes)
        grid = torch.cartesian_prod(*[z] * dim).reshape(-1, dim)
        total = torch.cartesian_prod(*[log_w] * dim).reshape(-1, dim).sum(-1)
        return grid.to(like), total.to(like)


@remembered
def _line(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and log weights in one dimension, in float64."""
    beside = torch.arange(1, nodes, dtype=torch.float64, device="cpu").sqrt()
    z = eigh(torch.diag(beside, 1) + torch.diag(beside, -1))[0]
    z = 0.5 * (z - z.flip(0))  # symmetric to the last bit
    before, here = torch.zeros_like(z), torch.ones_like(z)
    total = here.square()
    for j in range(1, nodes):
        before, here = here, (z * here - math.sqrt(j - 1) * before) / math.sqrt(j)
        total = total + here.square()
    return z, -total.log()


# The tail of the normal distribution, -log Φ, with two derivatives, each of which torch can differentiate again


def negative_log_ndtr(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute -log Φ(x) and two derivatives, without cancellation far to the left."""
    limit = math.sqrt(2 * math.log(torch.finfo(x.dtype).max)) - 1  # 1/Φ(-x) is finite up to there, Φ(x) is 1 beyond
    scaled = torch.special.erfcx(x.clamp_max(limit) * -math.sqrt(0.5))
    ratio = torch.where(x > limit, torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi), math.sqrt(2 / math.pi) / scaled)
    inverse2 = x.clamp_max(-1.0).pow(-2)
    # r (r + x) = 1 - x⁻² + 6 x⁻⁴ - 50 x⁻⁶ + ..
    tail = 1 - inverse2 * (1 - inverse2 * (6 - inverse2 * (50 - 518 * inverse2)))
    return -torch.special.log_ndtr(x), -ratio, torch.where(x < -50, tail, ratio * (ratio + x))


def energy(x: Tensor) -> Tensor:
    """Compute -log Φ(x), whose second derivative by torch is right far to the left too.

    That of ``torch.special.log_ndtr`` cancels there: at x = -10⁴ it is 1.54 in place of 1.  Below -50 it is
    ½x² + log(-x √(2π)) - log(1 - x⁻² + 3x⁻⁴ - 15x⁻⁶ + 105x⁻⁸), the asymptotic series.

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


# Digamma and trigamma functions where their differences cancel, and the inverses that exponential families need
#
#     ψ'(x) = 1/x + e(x)        e(x) = e(x + 1) + 1/(x²(x + 1))        e(x) ~ 1/(2x²) + 1/(6x³) - 1/(30x⁵) + ...
#     log x - ψ(x) = δ(x)       δ(x) = δ(x + 1) + 1/x - log(1 + 1/x)   δ(x) ~ 1/(2x) + 1/(12x²) - 1/(120x⁴) + ...
#
# (DLMF 5.5.2, 5.11.2, 5.15.8.)  All terms of the recurrences are positive, so that e and δ have the relative accuracy
# of their sums, where ψ'(x) - 1/x and log x - ψ(x) lose one digit for each digit of x.  The trigamma function of
# PyTorch has a relative error of 5e-10 near 1; this one has rounding alone.

# of 1/x³, 1/x⁵, ... after 1/(2x²): the Bernoulli numbers B_2, B_4, ...
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)


def _shifted(x: Tensor, term: Callable[[Tensor], Tensor], start: int = 12) -> tuple[Tensor, Tensor]:
    """Sum a term over x, x + 1, .. below where the asymptotic series begin, and return the first number beyond."""
    total, far = torch.zeros_like(x), x
    for _ in range(start):
        near = far < start
        total = torch.where(near, total + term(far), total)
        far = torch.where(near, far + 1, far)
    return total, far


def trigamma_excess(x: Tensor) -> Tensor:
    """Compute ψ'(x) - 1/x for x > 0, without cancellation."""
    total, far = _shifted(x, lambda y: 1 / (y.square() * (y + 1)))
    inverse2 = far.reciprocal().square()
    series = torch.zeros_like(x)
    for number in reversed(_BERNOULLI):
        series = number + inverse2 * series
    return total + inverse2 * (0.5 + series / far)


def trigamma(x: Tensor) -> Tensor:
    """Compute the trigamma function ψ'(x) for x > 0, to rounding."""
    return 1 / x + trigamma_excess(x)


def log_minus_digamma(x: Tensor) -> Tensor:
    """Compute log x - ψ(x) for x > 0, without cancellation where x is large."""
    total, far = _shifted(x, lambda y: 1 / y - torch.log1p(1 / y))
    inverse2 = far.reciprocal().square()
    series = torch.zeros_like(x)
    for order, number in reversed(list(enumerate(_BERNOULLI, 1))):
        series = number / (2 * order) + inverse2 * series
    return total + 0.5 / far + inverse2 * series


def inverse_digamma(y: Tensor) -> Tensor:
    """Compute the positive x with ψ(x) = y, by Newton's method from the start of Minka (2000, appendix C)."""
    euler = 0.57721566490153286
    x = torch.where(y >= -2.22, y.exp() + 0.5, -1 / (y + euler).clamp_max(-0.1))
    for _ in range(6):  # convergence is quadratic, from a relative error of at most a fifth
        x = x - (torch.digamma(x) - y) / trigamma(x)
    return x


def increasing_root(
    function: Callable[[Tensor], Tensor],  # (*batch,) -> (*batch,), increasing in each entry
    like: Tensor,  # (*batch,)
    reach: float = 45.0,  # of logarithms: from e^-45 to e^45
) -> Tensor:
    """Find where an increasing function is zero, by halving [-reach, reach] until its ends are neighbours."""
    low, high = torch.full_like(like, -reach), torch.full_like(like, reach)
    for _ in range(200):  # neighbours come before
        middle = 0.5 * (low + high)
        if middle.device.type == "cpu" and bool(((middle == low) | (middle == high)).all()):
            break
        below = function(middle) < 0
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)
