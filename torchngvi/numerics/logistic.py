"""The expectation of log(1 + eˣ) under N(e, v) with its derivatives, one formula for every mean and variance.

On either side of zero the softplus and its derivatives are polynomials in u = e^-|x| of J = 20 terms, up to relative
errors below 1e-13: for x < 0 they are log(1 + u) = Σ f_j uʲ, u/(1 + u) = Σ a_j uʲ and u/(1 + u)² = Σ b_j uʲ.  Their
expectations under N(-a, v), a = |e|, follow from those of the powers of u: with s = √v and D = ½ e^(-a²/2v),

    R_j = E[e^-jx; x > 0] = D erfcx((jv + a)/(s√2))
    L_j = E[e^jx; x < 0] = D erfcx((jv - a)/(s√2)), and e^(j(jv/2 - a)) - D erfcx((a - jv)/(s√2)) where jv < a

    F = Σ f_j (L_j + R_j) - a R_0 + s D √(2/π)        α = R_0 + Σ a_j (L_j - R_j)        β = Σ b_j (L_j + R_j)

and for e > 0 they are F + a, 1 - α and β.  Integrands and powers are positive, so that a relative error of a polynomial
is one of its expectation, however far in the tail a row is.  Sums over further coefficients are the expectations of
higher derivatives, of alternating symmetry, and E[f⁽ᵏ⁾] changes by E[f⁽ᵏ⁺¹⁾] with e and by ½ E[f⁽ᵏ⁺²⁾] with v.
The compiled body on the CPU is in `torchngvi.numerics.kernels`.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from torchngvi.numerics import kernels
from torchngvi.numerics.gaussian_integrals import Moments

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
_BLOCK_ROWS = {True: 1024, False: 65_536}  # of plain operators, on the CPU, where they stay in the cache, and elsewhere
_KNOWN = 4  # a + 2b of the derivatives ∂ᵃ⁺ᵇ/∂eᵃ∂vᵇ of a moment that all modes of torch see


def softplus(
    mean: Tensor,  # (*batch, N)
    variance: Tensor,  # (*batch, N), not negative
) -> Moments:
    """Compute E[log(1 + eˣ)] under N(e, v), with the expectations of the logistic function and of its derivative.

    The relative error of each is below 1e-12 for every standard deviation, wherever the moment is not below the
    smallest number: also at e = -700, where all three are e^(e + v/2).  Every dtype is computed in double precision.
    Autograd takes the moments for what they are: ∂F/∂e = α, ∂F/∂v = ½β, ∂α/∂e = β, and so on.  Forward mode,
    ``torch.func`` and graphs that are traced or compiled know the derivatives ∂ᵃ⁺ᵇ/∂eᵃ∂vᵇ of each moment with a + 2b up
    to four.

    >>> moments = softplus(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    >>> [round(float(m), 12) for m in moments]  # log 2, 1/2, 1/4
    [0.69314718056, 0.5, 0.25]
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
    make = _constants if torch.compiler.is_compiling() or _needs_operators() else _kept_constants
    sign, step, decay, growth, near_weights, far_weights, log_half = make(order, count, e.dtype, e.device)
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
    with torch.inference_mode(False):
        made = [torch.tensor(x, dtype=torch.float64, device="cpu")[:, None] for x in columns]
        made += [torch.tensor(x, dtype=torch.float64, device="cpu") for x in (near, far, math.log(0.5))]
        return tuple(x.to(device, dtype) for x in made)


_kept_constants = functools.cache(_constants)  # what is made in a graph or a transform belongs to it


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
