"""Quadrature rules for the softplus and its derivatives under N(e, v), each with a relative error below 1e-12.

They are written for m = -|e|, where every term of every sum is positive, so that nothing cancels however far in the
tail the row is; which rule a row takes depends on s = √v and on where the mass of the integrand is:

* s < 0.54: Gauss-Hermite at m.  The nodes ±z share a weight, and with E± = exp(m ± s z), S = E₊ + E₋ and Q = E₊ E₋ the
  two terms of each moment are one: log1p(S + Q), (S + 2Q)/(1 + S + Q) and (S + Q (4 + S))/(1 + S + Q)²;
* the tail, m + v + 7.5 s < 0: E f(x) = e^(m + v/2) E_{N(m+v, v)}[e^-x f(x)], whose integrand is nearly constant;
* between: the trapezoid rule in t, x = a sinh t, on nodes that are the same for all rows, so that f is a table and a
  node costs one exponential.  The Gaussian is resolved because |x| <= 7.5 s where it peaks, the pole of the logistic
  function at iπ because a sin(π/4) = π;
* s > 300, and s > 20 with |m| < 2.5 s: the normal density is nearly constant where the logistic one is not, and
  derivatives of it suffice.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.numerics.special import normal_rule

HERMITE = ((0.24, 8), (0.54, 16))  # below s: the number of nodes
NARROW = HERMITE[-1][0]  # s below which the rule of Gauss and Hermite is taken
WIDE = 300.0  # s above which the expansion is taken
WIDE_BODY = 20.0, 2.5  # s above which it is taken where |m| is less than so many s
TAIL = 7.5  # m + v below -7.5 s is the tail
BODY = 2.5, 3.0  # m + 2.5 √(v + 3) above 0 is the body
BAND = 3.0  # m + v below -3 s takes the fine steps
FINE = 0.9  # s below which the fine steps are taken too
TAIL_NODES = 24
STEP, FINE_STEP, COARSE_STEP = 0.085, 0.06, 0.125  # in t, x = REACH sinh t
COARSE = 2.0, 3.0  # s above which the coarse steps are taken where |m| is less than so many s
REACH = math.pi * math.sqrt(2)
LOW, HIGH = -5.95, 7.15  # of t: x from -850, where e^x is nothing, to 8.7 standard deviations of the widest row
_PADDING = 7  # nodes without weight, for a kernel that takes eight at a time
DEEP = 34.0  # e^-34 of the largest term is left away
# ∫ σ'(x) x^2k dx/(2k)! = 2 η(2k), η of Dirichlet, for k = 1, 2, ..
SERIES = (1.6449340668482264, 1.8940656589944918, 1.9711021825948702, 1.9924660037052957, 1.9980790151965431,
          1.9995153702877164, 1.9998783406919594)  # fmt: skip


class Table(NamedTuple):
    """The nodes x = a sinh t of one step, and what each adds to value, slope and curvature.

    Attributes:
        low: the index of the first node, t = low step.
        step: the step in t.
        nodes: x, (J,).
        weights: a cosh t step/√(2π) times the softplus and its two derivatives, (J, 3).
    """

    low: int
    step: float
    nodes: Tensor
    weights: Tensor


@functools.cache
def pairs(nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute the positive nodes of the rule of Gauss and Hermite, and their weights.

    >>> z, w = pairs(2, torch.float64, torch.device("cpu"))
    >>> round(z.item(), 9), round(w.item(), 9)
    (1.0, 0.5)
    """
    z, w = line(nodes, dtype, device)
    return z[nodes // 2 :], w[nodes // 2 :]


@functools.cache
def line(nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute all nodes of the rule of Gauss and Hermite under N(0, 1), and their weights.

    >>> z, w = line(2, torch.float64, torch.device("cpu"))
    >>> round(float(w @ z.square()), 9)
    1.0
    """
    with torch.inference_mode(False):
        z, log_w = normal_rule(nodes, 1, torch.zeros((), dtype=torch.float64, device="cpu"))
        return z[:, 0].to(device, dtype), log_w.exp().to(device, dtype)


@functools.cache
def table(step: float, dtype: torch.dtype, device: torch.device) -> Table:
    """Compute the nodes of the trapezoid rule in t.

    >>> nodes = table(0.085, torch.float64, torch.device("cpu"))
    >>> value, slope, curvature = nodes.weights.T @ torch.exp(-0.5 * nodes.nodes.square())
    >>> round(float(slope), 12)  # E σ(x) under N(0, 1)
    0.5
    """
    with torch.inference_mode(False):
        low, high = math.floor(LOW / step), math.ceil(HIGH / step)
        t = torch.arange(low, high + 1, dtype=torch.float64, device="cpu") * step
        x, weight = REACH * torch.sinh(t), REACH * torch.cosh(t) * (step / math.sqrt(2 * math.pi))
        e = torch.exp(-x.abs())
        up, r = x > 0, 1 / (1 + e)
        parts = x.clamp_min(0) + torch.log1p(e), torch.where(up, r, e * r), e * r * r
        weights = torch.stack([weight * part for part in parts], -1)
        return Table(low, step, x.to(device, dtype), weights.to(device, dtype))


def hermite(mean: Tensor, variance: Tensor, nodes: int) -> Tensor:
    """Compute the moments by the rule of Gauss and Hermite, for s below the bound of its number of nodes.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> [round(float(part), 12) for part in hermite(zero, zero, 8)[:, 0]]  # log 2, 1/2, 1/4
    [0.69314718056, 0.5, 0.25]
    """
    z, w = pairs(nodes, mean.dtype, mean.device)
    near = mean.exp()
    product = near.square()  # Q
    up = torch.exp(z[:, None] * variance.sqrt())
    both = torch.addcdiv(up, torch.ones_like(near), up).mul_(near)  # S
    total = both + product
    inverse = (total + 1).reciprocal_()
    slope = w @ torch.add(total, product).mul_(inverse)
    curvature = w @ torch.addcmul(both, both + 4, product).mul_(inverse.square_())
    return torch.stack([w @ total.log1p_(), slope, curvature])


def tail(mean: Tensor, variance: Tensor) -> Tensor:
    """Compute the moments by the tilted normal, for m + v + 7.5 s < 0.

    >>> m, v = torch.tensor([-50.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    >>> [round(float(part), 12) for part in (tail(m, v) * torch.exp(-m - v / 2))[:, 0]]
    [1.0, 1.0, 1.0]
    """
    z, w = line(TAIL_NODES, mean.dtype, mean.device)
    e = torch.exp(z[:, None] * variance.sqrt() + (mean + variance))
    inverse = (e + 1).reciprocal()
    ratio = torch.where(e > torch.finfo(e.dtype).tiny, torch.log1p(e) / e, 1.0)  # log(1 + e)/e
    return torch.stack([w @ ratio, w @ inverse, w @ inverse.square()]) * torch.exp(mean + 0.5 * variance)


def between(mean: Tensor, variance: Tensor, nodes: Tensor, weights: Tensor) -> Tensor:
    """Compute the moments by the trapezoid rule in t, for s in [0.54, 300] and m + v + 7.5 s > 0.

    >>> zero, nodes = torch.zeros(1, dtype=torch.float64), table(0.085, torch.float64, torch.device("cpu"))
    >>> round(float(between(zero, zero + 4, nodes.nodes, nodes.weights)[1, 0]), 12)  # the slope is 1/2 at 0
    0.5
    """
    inverse = variance.rsqrt()
    z = (nodes[:, None] - mean).mul_(inverse)
    least = 0.98 * math.log(torch.finfo(z.dtype).tiny)  # what is below is nothing, and slow
    return weights.T @ z.square_().mul_(-0.5).clamp_min_(least).exp_() * inverse


def near(mean: Tensor, variance: Tensor, nodes: Tensor, weights: Tensor) -> Tensor:
    """Compute as `between`, for |m| < 10 s, all exponents by one product of matrices.

    They are -x²/2v + x m/v - m²/2v, whose terms are below 200 where the integrand is not nothing.

    >>> zero, nodes = torch.zeros(1, dtype=torch.float64), table(0.085, torch.float64, torch.device("cpu"))
    >>> round(float(near(zero, zero + 4, nodes.nodes, nodes.weights)[1, 0]), 12)  # the slope is 1/2 at 0
    0.5
    """
    powers = torch.stack([nodes.square() * -0.5, nodes, torch.ones_like(nodes)], -1)  # (J, 3)
    inverse = variance.reciprocal()
    slope = mean * inverse
    exponent = powers @ torch.stack([inverse, slope, -0.5 * mean * slope])
    least = 0.98 * math.log(torch.finfo(exponent.dtype).tiny)  # what is below is nothing, and slow
    return weights.T @ exponent.clamp_min_(least).exp_() * inverse.sqrt_()


def window(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Compute between which x the integrand of the trapezoid rule is above e^-34 of its largest value.

    With c = m + v, the integrand is at most φ(x; m, v) max(1, x), and e^(m + v/2) φ(x; c, v) where that is less.

    >>> [round(float(x), 3) for x in window(torch.zeros(1), torch.full((1,), 4.0))]  # 4 - √(16 + 272), √272
    [-12.971, 16.492]
    """
    centre = mean + variance
    peak = torch.where(centre > 0, 0.5 * mean.square() / variance, -mean - 0.5 * variance)  # -log of the largest
    high = mean + (2 * variance * (DEEP + peak)).sqrt()
    return centre - (2 * variance * (DEEP + peak + mean + 0.5 * variance)).sqrt(), high


def wide(mean: Tensor, variance: Tensor) -> Tensor:
    """Compute the moments by derivatives of the normal density, for s above 300, or above 20 with |m| < 2.5 s.

    With u = m/s and c_k = ∫ σ'(x) x^2k dx/(2k)!: β = φ(u)/s (1 + Σ c_k He_2k(u)/vᵏ),
    α = Φ(u) - φ(u) Σ c_k He_(2k-1)(u)/vᵏ and F = m Φ(u) + s φ(u) (1 + Σ c_k He_(2k-2)(u)/vᵏ).

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> round(float(wide(zero, zero + 1e6)[0, 0]), 6)  # s/√(2π) + c₁/(s √(2π))
    398.942937
    """
    s = variance.sqrt()
    u, inverse = mean / s, variance.reciprocal()
    density = torch.exp(-0.5 * u * u) * (1 / math.sqrt(2 * math.pi))
    below = 0.5 * torch.special.erfc(u * -math.sqrt(0.5))
    even, odd, power = torch.ones_like(u), u, torch.ones_like(u)  # He_(2k-2), He_(2k-1), v^-k
    value, slope, curvature = torch.ones_like(u), torch.zeros_like(u), torch.ones_like(u)
    for k, c in enumerate(SERIES, 1):
        power = power * inverse * c if k == 1 else power * inverse * (c / SERIES[k - 2])
        value, slope = value + power * even, slope + power * odd
        even = u * odd - (2 * k - 1) * even
        odd = u * even - 2 * k * odd
        curvature = curvature + power * even
    return torch.stack([mean * below + s * density * value, below - density * slope, density / s * curvature])


@functools.cache
def packed() -> Tensor:
    """Pack the nodes and weights of all rules into one vector of float64, in the order in which the kernel reads them.

    >>> packed().dtype
    torch.float64
    """
    cpu, double = torch.device("cpu"), torch.float64
    parts = [part for _, nodes in HERMITE for part in pairs(nodes, double, cpu)]
    parts += [*line(TAIL_NODES, double, cpu), torch.tensor(SERIES, dtype=double, device=cpu)]
    for step in (STEP, FINE_STEP, COARSE_STEP):
        nodes = table(step, double, cpu)
        columns = torch.nn.functional.pad(torch.column_stack([nodes.nodes, nodes.weights]).T, (0, _PADDING))
        parts += [torch.tensor([columns.shape[1], nodes.low], dtype=double, device=cpu), *columns]
    return torch.cat([part.contiguous() for part in parts])
