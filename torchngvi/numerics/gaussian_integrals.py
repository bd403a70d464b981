"""Expectations of a scalar function under N(e, v), with their exact derivatives.

Accurate to about 1e-12 for every standard deviation from 0 or 1e-3 to 1e4, at a cost per row that does not depend on
it: functions of x² by mixtures of Gaussian bumps, and any other function by a trapezoid rule in t with x = sinh t, over
the e ± 8.2 s that carry the mass, whose nodes are dense where the function bends (|x| of order 1) and sparse where only
the normal density varies.  The softplus has a formula of its own, below.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.numerics import kernels
from torchngvi.numerics.arrays import remembered


class Moments(NamedTuple):
    """F = E[f(x)] under N(e, v), with α = ∂F/∂e and β = 2 ∂F/∂v, which is E[f''] (Price 1958)."""

    value: Tensor  # (*batch, N)
    slope: Tensor  # (*batch, N)
    curvature: Tensor  # (*batch, N)


def in_blocks(block: Callable[[Tensor, Tensor], Moments], rows: int, mean: Tensor, variance: Tensor) -> Moments:
    """Compute moments a few rows at a time on the CPU, and all at once on a device."""
    if mean.ndim == 1 and (len(mean) <= rows or not mean.is_cpu):
        return Moments(*(part.contiguous() for part in block(mean, variance)))  # nothing to take apart
    rows = rows if mean.is_cpu else max(mean.numel(), 1)
    flat = zip(mean.reshape(-1).split(rows), variance.reshape(-1).split(rows), strict=True)
    parts = [block(e, v) for e, v in flat]
    return Moments(*(torch.cat(part).reshape(mean.shape) for part in zip(*parts, strict=True)))


def expectation(
    function: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],  # x -> f, f', f''
    mean: Tensor,  # (*batch, N)
    variance: Tensor,  # (*batch, N), positive
) -> Moments:
    """Compute E[f(x)] under N(e, v) for an f that bends only near the origin, by a trapezoid rule in t, x = sinh t."""
    return in_blocks(functools.partial(_sinh_rule, function), 512, mean, variance)


def _sinh_rule(
    function: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    mean: Tensor,
    variance: Tensor,
    nodes: int = 160,  # error below 1e-12 for s in [1e-3, 1e4]
    reach: float = 8.2,  # standard deviations that carry the mass
) -> Moments:
    # below √eps the value is f(e) to rounding, and a wider normal has the same
    floor = torch.finfo(variance.dtype).eps ** 0.5 * mean.detach().abs().clamp_min(1.0)
    sd = torch.maximum(variance, floor.square()).sqrt()
    # t_k = low + k h: the same node count for every row, each over its own range
    low, high = torch.asinh(mean - reach * sd), torch.asinh(mean + reach * sd)
    step = (high - low) / (nodes - 1)
    t = low[..., None] + step[..., None] * torch.arange(nodes, dtype=mean.dtype, device=mean.device)
    x = torch.sinh(t)
    z = (x - mean[..., None]) / sd[..., None]
    # w_k = h cosh(t) φ(z)/s, normalised because Σ w = 1 up to the rule's error
    weight = torch.cosh(t) * torch.exp(-0.5 * z * z)
    weight = weight / weight.sum(-1, keepdim=True)
    return Moments(*((weight * part).sum(-1) for part in function(x)))


# ------------------------------------------------------------------------------- functions of x²


@remembered
def _square_tensors(
    power: int,
    dtype: torch.dtype,
    device: torch.device,
    step: float = 0.27,  # of the trapezoid rule in log t: its error is about e^(-π²/step)
    low: float = -41.5,  # of log t: second moments up to 1e10
    high: float = 3.7,  # e^(-t) down to 1e-18
) -> tuple[Tensor, Tensor, float]:
    """2t, the weights w of 1 - e^(-t x²), and Σ w t over the nodes below the first.

    log(1 + x²) = Σ h e^-t (1 - e^(-t x²)),  x²/(1 + x²) = Σ h t e^-t (1 - e^(-t x²)).
    """
    nodes = [math.exp(low + k * step) for k in range(math.ceil((high - low) / step))]
    weights = [step * math.exp(-t) * t**power for t in nodes]
    tail = step * nodes[0] ** (1 + power) / math.expm1(step * (1 + power))
    double = torch.tensor([[2 * t for t in nodes], weights], dtype=torch.float64, device="cpu")
    twice, weight = double.to(device, dtype)
    return twice, weight, tail


def log1p_square(
    mean: Tensor,  # (*batch, N)
    variance: Tensor,  # (*batch, N), not negative
) -> Moments:
    """Compute E[log(1 + x²)] under N(e, v), by a mixture of Gaussian bumps: the energy of a Student's t.

    log(1 + x²) = ∫₀^∞ e^-t (1 - e^(-t x²))/t dt (Frullani), a trapezoid rule in log t, and

        E[e^(-t x²)] = A^-½ e^(-t e²/A),   A = 1 + 2 t v

    so that slope and curvature are the exact derivatives of the value.  Absolute error below
    1e-12 max(1, F) in float64 for e² + v up to 1e10; the curvature is negative where |x| > 1.
    """
    return in_blocks(functools.partial(_square_block, 0), 512, mean, variance)


def saturating_square(
    mean: Tensor,  # (*batch, N)
    variance: Tensor,  # (*batch, N), not negative
) -> Moments:
    """Compute E[x²/(1 + x²)] under N(e, v), as :func:`log1p_square` with weights t e^-t: no small s cancels."""
    return in_blocks(functools.partial(_square_block, 1), 512, mean, variance)


def _square_block(power: int, mean: Tensor, variance: Tensor) -> Moments:
    """F = Σ w (1 - φ), φ = A^-½ e^-x, x = t e²/A; α = e Σ 2tw φ/A, β = Σ 2tw φ (1 - 2x)/A."""
    double, weight, tail = _square_tensors(power, mean.dtype, mean.device)
    growth = variance[:, None] * double  # 2 t v
    inverse = (1 + growth).reciprocal()  # 1/A
    x = 0.5 * mean.square()[:, None] * double * inverse
    lost = -torch.expm1(-x - 0.5 * torch.log1p(growth))  # 1 - φ
    bump = (1 - lost) * inverse  # φ/A
    weighted = weight * double
    slope, bend = bump @ weighted, (bump * x) @ weighted
    # the nodes below the first see t x² only
    value = lost @ weight + tail * (mean.square() + variance)
    return Moments(value, mean * (slope + 2 * tail), slope - 2 * bend + 2 * tail)


# ------------------------------------------------------------------------------------ the softplus
# The expectation of log(1 + eˣ) under N(e, v) with its derivatives, one formula for every mean and variance.
#
# On either side of zero the softplus and its derivatives are polynomials in u = e^-|x| of J = 20 terms, up to relative
# errors below 1e-13: for x < 0 they are log(1 + u) = Σ f_j uʲ, u/(1 + u) = Σ a_j uʲ and u/(1 + u)² = Σ b_j uʲ.  Their
# expectations under N(-a, v), a = |e|, follow from those of the powers of u: with s = √v and D = ½ e^(-a²/2v),
#
#     R_j = E[e^-jx; x > 0] = D erfcx((jv + a)/(s√2))
#     L_j = E[e^jx; x < 0] = D erfcx((jv - a)/(s√2)), and e^(j(jv/2 - a)) - D erfcx((a - jv)/(s√2)) where jv < a
#
#     F = Σ f_j (L_j + R_j) - a R_0 + s D √(2/π)        α = R_0 + Σ a_j (L_j - R_j)        β = Σ b_j (L_j + R_j)
#
# and for e > 0 they are F + a, 1 - α and β.  Integrands and powers are positive, so that a relative error of a
# polynomial is one of its expectation, however far in the tail a row is.  Sums over further coefficients are the
# expectations of higher derivatives, of alternating symmetry, and E[f⁽ᵏ⁾] changes by E[f⁽ᵏ⁺¹⁾] with e and by ½
# E[f⁽ᵏ⁺²⁾] with v. The compiled body on the CPU is in `torchngvi.numerics.kernels`.


# Coefficients of u, u², .., u²⁰ in the softplus and its first four derivatives for x < 0: minimax on (0, 1] by Remez'
# exchange at 60 digits, of the first three relative to the function and of the others relative to u.  The errors are
# 5.5e-17, 9.8e-16, 2.0e-14, 1.6e-13 and 2.3e-12; a term more divides them by 3 + √8, since the pole is at u = -1.
COEFFICIENTS = (
    (1.0, -0.4999999999999548, 0.33333333332719595, -0.24999999966798236, 0.19999999046356864, -0.16666649851674917,
     0.14285515754962114, -0.12498338082877497, 0.11100845336021926, -0.09951824205453973, 0.08915318948638098,
     -0.07827514654887553, 0.06523384027854473, -0.04944413896282332, 0.03246327061536586, -0.017527624324716634,
     0.007341538308951026, -0.0022107508216038085, 0.0004224667667738276, -3.827787065571578e-05),
    (0.999999999999999, -0.9999999999992172, 0.9999999998952386, -0.9999999944051654, 0.9999998410752647,
     -0.9999972242449597, 0.9999674875369491, -0.9997295938728633, 0.9983379159379616, -0.9922254481454524,
     0.9717004247158688, -0.9183886755481192, 0.8106062261437558, -0.640807413543651, 0.4332755314768562,
     -0.23862493864179354, 0.10127068966543885, -0.030757278426240712, 0.00590969541814232, -0.0005372450380129382),
    (0.9999999999999801, -1.999999999984641, 2.999999998011535, -3.999999896846094, 4.99999714363336,
     -5.999951214808215, 6.999439627888616, -7.99541727018315, 8.972229697520875, -9.871590342004549,
     10.536573111828021, -10.670392952514312, 9.917189859298315, -8.126784362209973, 5.62506160228907,
     -3.1425001593205475, 1.344282975663567, -0.4097857229715154, 0.0788049794686784, -0.007157074759027332),
    (0.9999999999998437, -3.9999999998691322, 8.99999998177009, -15.999998990330592, 24.999970342698656,
     -35.999465578526866, 48.99355261869174, -63.944830472933035, 80.65128475659567, -98.32226140038036,
     114.71156993592498, -125.28370314433272, 123.99758430781567, -107.02903458522701, 77.35023613233038,
     -44.817847420314806, 19.784221141511363, -6.199850255589069, 1.222069619555372, -0.11349698939033577),
    (0.9999999999977432, -7.999999998104964, 26.999999735298605, -63.99998529756363, 124.99956681953294,
     -215.99216784073877, 342.905151535807, -511.18481255660373, 723.8203383887818, -974.9200878860712,
     1236.2432016072012, -1443.0748910587897, 1502.6715576634215, -1346.6090350856389, 1000.109889015839,
     -591.0934868544444, 264.7694845690484, -83.88473448596291, 16.67369248254516, -1.55868075355737),
)  # fmt: skip
_TERMS = len(COEFFICIENTS[0])
_BLOCK_ROWS = {True: 1024, False: 262_144}  # of plain operators, on the CPU, where these stay in the cache, or not
_KNOWN = 4  # a + 2b of the derivatives ∂ᵃ⁺ᵇ/∂eᵃ∂vᵇ of a moment that all modes of torch see


def softplus(
    mean: Tensor,  # (*batch, N)
    variance: Tensor,  # (*batch, N), not negative
) -> Moments:
    """Compute E[log(1 + eˣ)] under N(e, v), with the expectations of the logistic function and of its derivative.

    The relative error of each is below 1e-12 wherever the moment is not below the smallest number; every dtype is
    computed in double precision.  Autograd takes the moments for what they are: ∂F/∂e = α, ∂F/∂v = ½β, ∂α/∂e = β.
    Forward mode, ``torch.func`` and graphs know the derivatives ∂ᵃ⁺ᵇ/∂eᵃ∂vᵇ of each moment with a + 2b up to four.
    """
    if mean.shape != variance.shape:
        mean, variance = torch.broadcast_tensors(mean, variance)
    if mean.dtype is not variance.dtype or not mean.dtype.is_floating_point:
        dtype = torch.promote_types(mean.dtype, variance.dtype)
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        mean, variance = mean.to(dtype), variance.to(dtype)
    differentiated = torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)
    if _needs_operators() or (differentiated and torch.compiler.is_compiling()):
        return _expanded(mean, variance)
    return Moments(*(_Differentiable.apply if differentiated else _expectations)(mean, variance, 0))


def softplus_bends(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the derivatives in e and v of E[f″], the last moment of `softplus`: E[f‴] and ½ E[f⁗], (*batch, N)."""
    mean, variance = torch.broadcast_tensors(mean, variance)
    *_, third, fourth = _expectations(mean, variance, 0, 5)
    return third, 0.5 * fourth


def _needs_operators() -> bool:
    """Whether a transform, a trace or forward mode would not see what is no operator of torch."""
    if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
        return True
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


# ------------------------------------------------------------------------------------------ values


def _expectations(mean: Tensor, variance: Tensor, order: int, count: int = 3) -> tuple[Tensor, ...]:
    """E[f⁽ᵏ⁾] for ``count`` derivatives of the softplus from an order on, without their own derivatives."""
    dtype = torch.float32 if mean.device.type == "mps" else torch.float64
    if mean.dtype is dtype and mean.ndim == 1:  # each call of torch counts where the rows are few
        return _rows(mean.detach(), variance.detach(), order, count)
    e, v = mean.detach().reshape(-1).to(dtype), variance.detach().reshape(-1).to(dtype)
    return tuple(part.to(mean.dtype).reshape(mean.shape) for part in _rows(e, v, order, count))


def _rows(e: Tensor, v: Tensor, order: int, count: int) -> tuple[Tensor, ...]:
    """Rows (n,), by the compiled body where there is one."""
    known = order == 0 and count <= len(COEFFICIENTS)  # to the compiled body
    if _needs_operators():
        return _formula(e, v, order, count)
    if torch.compiler.is_compiling():
        return _operator(e, v, count).unbind() if known and e.is_cpu else _formula(e, v, order, count)
    if known and e.is_cpu and v.is_cpu and type(e) is type(v) is Tensor:  # other addresses would end the process
        kernel = kernels.logistic(len(e), COEFFICIENTS, _formula)
        if kernel is not None:
            return kernel(e, v, count)
    rows = _BLOCK_ROWS[e.is_cpu]
    if len(e) <= rows:
        return _formula(e, v, order, count)
    blocks = [_formula(*block, order, count) for block in zip(e.split(rows), v.split(rows), strict=True)]
    return tuple(torch.cat(part) for part in zip(*blocks, strict=True))


@torch.library.custom_op("torchngvi::logistic_moments", mutates_args=())
def _operator(e: Tensor, v: Tensor, count: int) -> Tensor:
    """The rows of a graph on the CPU, (count, n)."""
    return torch.stack(_rows(e, v, 0, count))


@_operator.register_fake
def _(e: Tensor, v: Tensor, count: int) -> Tensor:
    return e.new_empty(count, len(e))


def _formula(e: Tensor, v: Tensor, order: int, count: int, rounding: float = -1e-12) -> tuple[Tensor, ...]:
    """Rows (n,) in plain operators; NaN and infinities follow from those of the arithmetic."""
    # rounding: variances above are those of a difference that should be zero
    sign, step, decay, growth, near_weights, far_weights, log_half = _constants(order, count, e.dtype, e.device)
    limits = torch.finfo(e.dtype)
    a = e.abs().clamp_max(limits.max)
    v = torch.threshold(v, rounding, math.nan).clamp_min(16 * limits.tiny)
    s = v.sqrt()
    bounded = s.clamp_max(math.sqrt(limits.max))
    center = a / bounded
    half_density = torch.exp(torch.addcmul(log_half, center, center, value=-0.5))  # D
    x = torch.addcmul(sign * center, step, bounded)  # (2J + 1, n): for L_j, j from 1, and R_j, j from 0
    scaled = half_density * torch.special.erfcx(x.abs())
    near, far = scaled[:_TERMS], scaled[_TERMS:]
    whole = torch.exp(torch.addcmul(decay * a, growth, v).clamp_max(0))  # used where the exponent is negative
    near = torch.where(x[:_TERMS] < 0, whole - near, near)
    parts = list(torch.addmm(near_weights @ near, far_weights, far).unbind())
    if order == 0:
        parts[0] = parts[0].addcmul(s, half_density, value=math.sqrt(2 / math.pi)).addcmul(a, far[0], value=-1)
    positive = e > 0
    for k, part in enumerate(parts):
        if k + order == 0:
            parts[k] = part + torch.where(positive, e, 0 * e)
        elif k + order == 1:
            parts[k] = torch.where(positive, 1 - part, part)
        else:
            parts[k] = torch.where(positive, -part, part) if (k + order) % 2 else part.clone()
    return tuple(parts)


@remembered
def _constants(order: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """What multiplies a/s and s in x, and a and v in the exponents, (.., 1); coefficients, (count, ..); log ½."""
    root, j = math.sqrt(0.5), range(1, _TERMS + 1)
    near, far = [], []
    for k in range(order, order + count):  # derivatives beyond the table are those of its last polynomial
        row = [c * i ** max(k - 4, 0) for i, c in zip(j, COEFFICIENTS[min(k, 4)], strict=True)]
        near.append(row)
        far.append([float(k == 1), *((-1) ** k * c for c in row)])
    columns = (
        [-root] * _TERMS + [root] * (_TERMS + 1),
        [i * root for i in (*j, 0, *j)],
        [-float(i) for i in j],
        [0.5 * i * i for i in j],
    )
    made = [torch.tensor(x, dtype=torch.float64, device="cpu")[:, None] for x in columns]
    made += [torch.tensor(x, dtype=torch.float64, device="cpu") for x in (near, far, math.log(0.5))]
    return tuple(x.to(device, dtype) for x in made)


# ------------------------------------------------------------------------------------- derivatives


class _Differentiable(torch.autograd.Function):
    """Three moments as functions of e and v, for autograd."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, ...]:
        parts = _expectations(mean, variance, order, 5)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mean, variance, *parts[1:])
        ctx.order = order
        return parts[:3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        mean, variance, *higher = ctx.saved_tensors
        curved = grads[1] is not None or grads[2] is not None
        if curved and torch.is_grad_enabled():  # saved ones are constants
            higher[2:] = _Differentiable.apply(mean, variance, ctx.order + 3)[:2]
        by_mean = by_variance = None
        for k, grad in enumerate(grads):
            if grad is not None:
                change, spread = grad * higher[k], 0.5 * grad * higher[k + 1]
                by_mean = change if by_mean is None else by_mean + change
                by_variance = spread if by_variance is None else by_variance + spread
        return by_mean, by_variance, None


def _expanded(mean: Tensor, variance: Tensor) -> Moments:
    """The moments as polynomials of changes that are zero: every mode of torch can differentiate them.

    Σ_k p_k(δe, δv) E[f⁽ᵏ⁾] with the heat polynomials p_k = (δe p_(k-1) + δv p_(k-2))/k is Taylor's, since
    ∂/∂v is ½ ∂²/∂e².
    """
    e, v = mean.detach(), variance.detach()
    parts = _expectations(e, v, 0, 3 + _KNOWN)
    by_mean, by_variance = (torch.where(x.isinf(), 0.0, y - x) for x, y in ((e, mean), (v, variance)))
    powers = [torch.ones_like(by_mean), by_mean]
    for k in range(2, _KNOWN + 1):
        powers.append((by_mean * powers[-1] + by_variance * powers[-2]) / k)
    moments = []
    for order in range(3):
        moment = parts[order]
        for k in range(1, _KNOWN + 1):
            moment = torch.addcmul(moment, parts[order + k], powers[k])
        moments.append(moment)
    return Moments(*moments)


# ------------------------------------------------------------------------------------ curvature along a line
# How much of the curvature of a row stays along a line, for energies with |f'''| ≤ f'' in the predictor.
#
# A row's predictor η = e + sz moves by a linear form h in v = (1, z, w), z and w independent N(0, 1).  With the moments
# μ_k = E f''(e + sz) z^k, k = 0..4, and ℓ = E h² / n² for the length n of the direction,
#
#     E f''h² ≥ κ E h²      E f''h⁴ ≤ q (E h²)²      E f''h⁴ ≤ q̄ (E f''h²)²
#
# where κ is the least eigenvalue of E f'' vvᵀ, q the largest of E f'' uuᵀ with u the six entries of vvᵀ (√2 for each
# mixed one), and q̄ the same after v is whitened by E f'' vvᵀ.  So √(E f''h⁴/E f''h²) ≤ n K with K² the smaller of qℓ/κ
# and q̄ min(1, κ̄ℓ), κ̄ the largest eigenvalue.


_BANDS = (2.0, 4.0, 8.0, 16.0, 30.0)  # of the standard deviation of a predictor; a row above has no constants
_PAIRS = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))


class RowConstants(NamedTuple):
    """The constants of the rows, each (N,)."""

    known: Tensor  # whether the row has any
    least: Tensor  # κ
    most: Tensor  # κ̄
    quartic: Tensor  # q
    white: Tensor  # q̄
    scale: Tensor  # of what a rule for E f' or E f'' may be wrong by, relative to its error

    def local(self, leverage: Tensor) -> Tensor:
        """K of each row from its leverage ℓ."""
        by_least = self.quartic * leverage / self.least
        by_white = self.white * (self.most * leverage).clamp_max(1.0)
        return torch.minimum(by_least, by_white).sqrt()


def row_constants(likelihood: Any, mean: Tensor, sd: Tensor, y: Tensor, weights: Tensor) -> RowConstants:
    """Compute the constants of rows with these predictors."""
    moments = torch.zeros(5, *mean.shape, dtype=mean.dtype, device=mean.device)
    slope = torch.zeros_like(mean)
    lower = -1.0
    for upper in _BANDS:
        z = _nodes(upper, mean)
        normal = torch.exp(-0.5 * z.square()) * ((z[1] - z[0]) / math.sqrt(2 * math.pi))
        band = ((sd > lower) & (sd <= upper) & (weights > 0)).nonzero()[:, 0]
        for here in band.split(max(1, 1_000_000 // len(z))):
            curvature, slope[here] = _derivatives(likelihood, mean[here] + sd[here] * z[:, None], y[here])
            for k in range(5):
                moments[k, here] = (normal * z**k) @ curvature
        lower = upper
    moments = weights * moments
    known = (weights > 0) & (sd <= _BANDS[-1]) & moments.isfinite().all(0) & (moments[0] > 0)
    known = known & (moments[2] * moments[0] > moments[1].square())
    safe = torch.where(known, moments, moments.new_tensor([1.0, 0.0, 1.0, 0.0, 3.0])[:, None])
    return _row_constants(safe, known, torch.maximum(slope.abs(), moments[0] * sd))


def _nodes(sd: float, like: Tensor, tail: float = 10.0) -> Tensor:
    """Nodes of the trapezoidal rule in z: half a unit of the predictor apart, and a quarter of z."""
    reach = tail + min(sd, tail)  # in standard deviations
    count = math.ceil(2 * reach / min(0.25, 0.5 / max(sd, 1e-9)))
    return torch.linspace(-reach, reach, count + 1, dtype=like.dtype, device=like.device)


def _derivatives(likelihood: Any, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """f'' at the nodes, (nodes, N), and the largest |f'| within a standard deviation, (N,)."""
    with torch.enable_grad():
        eta = eta.detach().requires_grad_()
        (first,) = torch.autograd.grad(likelihood.energy(eta, y).sum(), eta, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), eta, materialize_grads=True)
    middle = slice(len(eta) // 2 - 4, len(eta) // 2 + 5)
    return second.detach(), first.detach()[middle].abs().amax(0)


def _row_constants(moments: Tensor, known: Tensor, scale: Tensor) -> RowConstants:
    m = moments
    normal = (1.0, 0.0, 1.0, 0.0, 3.0)  # E w^l

    def expected(*powers: tuple[int, int]) -> Tensor:
        """E f'' z^k w^l for the sum of powers (k, l)."""
        k, el = (sum(part) for part in zip(*powers, strict=True))
        return m[k] * normal[el]

    def table(entry: Callable[[int, int], Tensor], size: int) -> Tensor:
        return torch.stack([torch.stack([entry(i, j) for j in range(size)], -1) for i in range(size)], -2)

    of = ((0, 0), (1, 0), (0, 1))  # powers of 1, z, w
    zero = torch.zeros_like(m[0])
    root2 = [1.0, 1.0, 1.0, *[math.sqrt(2.0)] * 3]
    B = table(lambda i, j: expected(of[i], of[j]) if (i < 2) == (j < 2) else zero, 3)
    Q = table(lambda a, b: root2[a] * root2[b] * expected(*(of[k] for k in (*_PAIRS[a], *_PAIRS[b]))), 6)
    eigenvalues = torch.linalg.eigvalsh(B)
    A = torch.linalg.inv(torch.linalg.cholesky(B))  # whitens v
    S = table(lambda a, b: root2[a] / root2[b] * _coefficient(A, _PAIRS[a], _PAIRS[b]), 6)
    white = torch.linalg.eigvalsh(S @ Q @ S.mT)[..., -1]
    return RowConstants(
        known, eigenvalues[..., 0], eigenvalues[..., -1], torch.linalg.eigvalsh(Q)[..., -1], white, scale
    )


def _coefficient(A: Tensor, p: tuple[int, int], r: tuple[int, int]) -> Tensor:
    """The coefficient of v_r0 v_r1 in (Av)_p0 (Av)_p1."""
    both = A[..., p[0], r[0]] * A[..., p[1], r[1]]
    return both if r[0] == r[1] else both + A[..., p[0], r[1]] * A[..., p[1], r[0]]
