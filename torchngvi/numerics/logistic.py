"""The expectation of log(1 + eˣ) under N(e, v) with its derivatives, exact in both tails.

Rows of the right tail are those of the left one turned round: with m = -|e|, F(e) = F(m) + e and α(e) = 1 - α(m) for
e > 0, and β is even.  The rules for m are in `torchngvi.numerics.logistic_rules`.  On the CPU each row takes the rule
it needs, by the compiled kernel of `torchngvi.numerics.kernels` where there is one; on a device every rule is computed
for all rows and one of them is chosen, so that nothing waits for the device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchngvi.numerics import kernels, logistic_mixture, logistic_rules
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.logistic_rules import (
    BAND,
    BODY,
    COARSE,
    COARSE_STEP,
    FINE,
    FINE_STEP,
    HERMITE,
    NARROW,
    STEP,
    TAIL,
    WIDE,
    WIDE_BODY,
)

_FEW = 512  # rows up to which one rule for the body is cheaper than a choice by s
_MANY = 8192  # rows from which a choice by s is cheaper where s is above that of Gauss and Hermite
_DEVICE_ROWS = 65_536  # of a block on a device: 200 nodes a row
_ROUNDING = -1e-12  # variances above are those of a difference that should be zero
_Rule = Callable[[Tensor, Tensor], Tensor]


def softplus(
    mean: Tensor,  # (*batch, N)
    variance: Tensor,  # (*batch, N), not negative
) -> Moments:
    """Compute E[log(1 + eˣ)] under N(e, v), with the expectations of the logistic function and of its derivative.

    In float64 the relative error of each is below 1e-12 for every standard deviation, wherever the moment is not
    below the smallest number: also at e = -700, where all three are e^(e + v/2).  Autograd and ``torch.func`` take the
    moments for what they are: ∂F/∂e = α, ∂F/∂v = ½β, ∂α/∂e = β, and so on.  In traces of ``torch.jit``, in forward
    mode, and where ``torch.func`` transforms within a compiled graph, they are a mixture of normals in plain operators,
    whose error is 1e-13 max(1, F), absolutely.

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
    transformed = torch._C._are_functorch_transforms_active()
    if _is_of_operators_alone(mean, transformed):
        return Moments(*logistic_mixture.mixture(mean, variance))
    if torch.compiler.is_compiling() or type(mean) not in (Tensor, torch.nn.Parameter):  # which only know operators
        return Moments(*_moments(mean, variance))
    if transformed or (torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)):
        return Moments(*_Differentiable.apply(mean, variance))
    return Moments(*_evaluated(mean, variance))


def _is_of_operators_alone(mean: Tensor, transformed: bool) -> bool:
    """Whether what is not an operator of torch would not be seen: by a trace, a transform in a graph, forward mode."""
    if torch.compiler.is_compiling():  # where an operator of our own has derivatives, but no forward mode
        return transformed
    if torch.jit.is_tracing():
        return True
    return torch.autograd.forward_ad._current_level >= 0 and not transformed


def _evaluated(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """The three moments of the shape of the mean, without their derivatives."""
    dtype = torch.float64 if mean.is_cpu else torch.promote_types(mean.dtype, torch.float32)
    if mean.dtype is dtype and mean.ndim == 1:  # each call of torch counts where the rows are few
        e, v = mean.detach(), variance.detach()
    else:
        e, v = mean.detach().reshape(-1).to(dtype), variance.detach().reshape(-1).to(dtype)
    parts = _on_cpu(e, v) if mean.is_cpu else _on_device(e, v)
    if mean.dtype is dtype and mean.ndim == 1:
        return parts
    return tuple(part.to(mean.dtype).reshape(mean.shape) for part in parts)


# ------------------------------------------------------------------------------------- on the CPU


def _on_cpu(e: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Rows (n,), those that are not finite by their limits."""
    if e.numel() == 0:
        return torch.empty_like(e), torch.empty_like(e), torch.empty_like(e)
    kernel = kernels.logistic(e.numel(), _eager) if v.is_cpu else None  # an address elsewhere would end the process
    if kernel is not None:
        parts = kernel(e, v)
        if parts is not None:
            return parts
    elif float(v.amin()) >= 0 and bool(torch.isfinite(e.sum() + v.sum())):
        return _eager(e, v)
    usual = torch.isfinite(e) & torch.isfinite(v) & (v >= _ROUNDING)
    known = torch.where(usual, e, 0.0), torch.where(usual, v, 0.0).clamp_min(0.0)
    parts = (None if kernel is None else kernel(*known)) or _eager(*known)
    return tuple(torch.where(usual, part, other) for part, other in zip(parts, _unusual(e, v), strict=True))


def _unusual(e: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of rows with an infinite mean or variance; NaN of all others."""
    infinite = e.isinf() & (v >= _ROUNDING) & ~v.isinf()
    spread = (v == torch.inf) & e.isfinite()
    nan = torch.full_like(e, torch.nan)
    value = torch.where((infinite & (e > 0)) | spread, torch.inf, nan)
    slope = torch.where(infinite, (e > 0).to(e.dtype), torch.where(spread, 0.5, nan))
    return value, slope, torch.where(infinite | spread, 0.0, nan)


def _eager(e: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Rows (n,), finite, each by the rule it needs."""
    mean, out = -e.abs(), e.new_empty(3, len(e))
    for index, rule, rows in _chosen(mean, v):
        if index is None:  # all of them
            for k in range(0, len(e), rows):
                out[:, k : k + rows] = rule(mean[k : k + rows], v[k : k + rows])
        else:
            for part in index.split(rows):
                out.index_copy_(1, part, rule(mean[part], v[part]))
    return _unfolded(e, out)


def _unfolded(e: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    """From the moments of -|e| to those of e."""
    value, slope, curvature = out
    return value + e.clamp_min(0), torch.where(e > 0, 1 - slope, slope), curvature.clone()


def _chosen(mean: Tensor, v: Tensor) -> Iterator[tuple[Tensor | None, _Rule, int]]:
    """Which rows (None for all of them) take which rule, and how many of them at a time stay in the cache."""
    s = v.sqrt()
    low, high = (float(x) for x in s.aminmax())
    if len(mean) <= _FEW:
        if high < NARROW:
            yield None, _hermite(HERMITE[-1][1]), _FEW
        else:
            yield from _beyond(None, mean, s)
        return
    below = 0.0
    for bound, nodes in HERMITE:
        if low < bound and high >= below:
            alone = low >= below and high < bound
            index = None if alone else _where((s >= below) & (s < bound))
            if index is None or len(index):
                yield index, _hermite(nodes), 16_384 // nodes
        below = bound
    if high >= below:
        rest = None if low >= below else _where(s >= below)
        yield from _beyond(rest, *((mean, s) if rest is None else (mean[rest], s[rest])))


def _beyond(index: Tensor | None, mean: Tensor, s: Tensor) -> Iterator[tuple[Tensor | None, _Rule, int]]:
    """Rows of which some are too wide for the rule of Gauss and Hermite."""
    few, v = len(mean) <= _MANY, s * s
    body = mean + BODY[0] * (v + BODY[1]).sqrt() > 0 if few else torch.zeros_like(s, dtype=torch.bool)
    if bool(body.all()):
        yield index, *_rule(3, mean, s)
        return
    centre, (from_there, reach) = mean + v, WIDE_BODY
    tail = centre + TAIL * s < 0
    if few:
        tail |= s < NARROW
    tail &= ~body
    wide = ((s > WIDE) | ((s > from_there) & (mean > -reach * s))) & ~(tail | body)
    left = ~(tail | wide | body)
    kinds = [left, tail, wide, body]
    if not few:
        broad, fine = left & (s > COARSE[0]), (s < FINE) | (centre + BAND * s < 0)
        coarse, left = broad & (mean > -COARSE[1] * s), left & ~broad
        kinds = [broad & ~coarse, tail, wide, body, left & ~fine, left & fine, coarse]
    for number, kind in enumerate(kinds):
        here = _where(kind)
        if len(here) == len(mean):
            yield index, *_rule(number, mean, s)
        elif len(here):
            yield here if index is None else index[here], *_rule(number, mean[here], s[here])


def _rule(number: int, mean: Tensor, s: Tensor) -> tuple[_Rule, int]:
    """The rule of some rows, and how many of them at a time stay in the cache."""
    if number == 1:
        return logistic_rules.tail, 512
    if number == 2:
        return logistic_rules.wide, 8192
    if number == 3:
        return _mixture, 1024
    step = {4: STEP, 6: COARSE_STEP}.get(number, FINE_STEP)
    table = logistic_rules.table(step, mean.dtype, mean.device)
    low, high = logistic_rules.window(mean.float(), s.float().square())  # a node more at either end
    ends = torch.stack([low.amin(), high.amax()]).div_(logistic_rules.REACH).asinh_().div_(step)
    first, last = (int(x) - table.low for x in ends.tolist())  # of the nodes that some row needs
    nodes, weights = (part[max(first - 1, 0) : last + 2] for part in (table.nodes, table.weights))
    if number == 0:
        return lambda mean, v: logistic_rules.between(mean, v, nodes, weights), 256
    return lambda mean, v: logistic_rules.near(mean, v, nodes, weights), 2048


def _mixture(mean: Tensor, v: Tensor) -> Tensor:
    return torch.stack(logistic_mixture.mixture(mean, v))


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def _hermite(nodes: int) -> _Rule:
    return lambda mean, v: logistic_rules.hermite(mean, v, nodes)


# ------------------------------------------------------------------------------------ on a device


def _on_device(e: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Rows (n,), by all rules."""
    if len(e) > _DEVICE_ROWS:
        blocks = [_on_device(*block) for block in zip(e.split(_DEVICE_ROWS), v.split(_DEVICE_ROWS), strict=True)]
        return tuple(torch.cat(part) for part in zip(*blocks, strict=True))
    usual = torch.isfinite(e) & torch.isfinite(v) & (v >= _ROUNDING)
    mean, variance = -torch.where(usual, e, 0.0).abs(), torch.where(usual, v, 0.0).clamp_min(0.0)
    s = variance.sqrt()
    far = mean + variance + TAIL * s < 0
    out = logistic_rules.hermite(mean, variance.clamp_max(NARROW**2), HERMITE[-1][1])
    middle = variance.clamp(NARROW**2, WIDE**2)
    # the finer steps do for the coarser ones
    table = logistic_rules.table(FINE_STEP, e.dtype, e.device)
    body = logistic_rules.between(mean, middle, table.nodes, table.weights)
    for where, other in (
        (s >= NARROW, body),
        (s > WIDE, logistic_rules.wide(mean, variance.clamp_min(WIDE**2))),
        (far & (s >= NARROW), logistic_rules.tail(torch.where(far, mean, -1e3), torch.where(far, variance, 1.0))),
    ):
        out = torch.where(where, other, out)
    parts = _unfolded(torch.where(usual, e, 0.0), out)
    return tuple(torch.where(usual, part, other) for part, other in zip(parts, _unusual(e, v), strict=True))


# ----------------------------------------------------------------------------------- derivatives


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[1:])


def _derivatives(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of a sum of the moments, by e and v; each can be differentiated again."""
    mean, variance, slope, curvature = ctx.saved_tensors
    by_value, by_slope, by_curvature = grads
    by_mean = by_variance = torch.zeros_like(mean)
    if by_value is not None:
        by_mean, by_variance = by_mean + by_value * slope, by_variance + 0.5 * by_value * curvature
    if by_slope is None and by_curvature is None:
        return by_mean, by_variance
    bend, spread = logistic_mixture.bends(mean, variance)
    if by_slope is not None:
        by_mean, by_variance = by_mean + by_slope * curvature, by_variance + 0.5 * by_slope * bend
    if by_curvature is not None:
        by_mean, by_variance = by_mean + by_curvature * bend, by_variance + by_curvature * spread
    return by_mean, by_variance


class _Differentiable(torch.autograd.Function):
    """The moments as functions of e and v, for autograd and for the transforms of torch.func."""

    @staticmethod
    def forward(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in _evaluated(mean, variance))  # no views, which autograd would follow

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        _remember(ctx, inputs, output)
        ctx.save_for_forward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor]:
        return _derivatives(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, by_mean: Tensor | None, by_variance: Tensor | None) -> tuple[Tensor, ...]:
        mean, variance, slope, curvature = ctx.saved_tensors
        de = torch.zeros_like(mean) if by_mean is None else by_mean
        half = torch.zeros_like(mean) if by_variance is None else 0.5 * by_variance
        bend, spread = logistic_mixture.bends(mean, variance)
        return (
            slope * de + curvature * half,
            curvature * de + bend * half,
            bend * de + 2 * spread * half,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], mean: Tensor, variance: Tensor) -> Any:
        parts = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((mean, variance), in_dims, strict=True)
        ]
        return tuple(softplus(*parts)), (0, 0, 0)


@torch.library.custom_op("torchngvi::logistic_moments", mutates_args=())
def _moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, slope, curvature = (part.clone() for part in _evaluated(mean, variance))
    return value, slope, curvature


@_moments.register_fake
def _(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty(mean.shape, dtype=mean.dtype, device=mean.device) for _ in range(3))  # type: ignore[return-value]


_moments.register_autograd(_derivatives, setup_context=_remember)
