"""How the expected curvature β = E[f''] of a scalar function changes with the mean and the variance of a normal.

For Newton's method on a bound, F = E[f(x)] under N(e, v) is differentiated twice in (e, v): F_ee = β, F_ev = ½β_e and
F_vv = ½β_v.  For a softplus both are sums over the terms of `torchngvi.numerics.logistic_mixture.bends`,

    β_e = -Σ p_k u_k φ(u_k)/r_k²        β_v = ½ Σ p_k (u_k² - 1) φ(u_k)/r_k³        u_k = e/r_k,  r_k² = v + τ_k²

and for other functions they come from what computes β.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchngvi.numerics import logistic_mixture
from torchngvi.numerics.gaussian_integrals import Moments, in_blocks

_ROWS = 2048  # of a block on the CPU: what is computed of it stays in the cache


def bends(
    expected: Callable[..., Moments],
    of_softplus: bool,
    mean: Tensor,  # (*batch, N)
    variance: Tensor,  # (*batch, N)
    y: Tensor,  # (*batch, N)
) -> tuple[Tensor, Tensor]:
    """Compute ∂β/∂e and ∂β/∂v of the expectation of an energy under N(e, v).

    >>> def poisson(mean, variance, y):
    ...     rate = torch.exp(mean + variance / 2)
    ...     return Moments(rate - y * mean, rate - y, rate)
    >>> [float(x) for x in bends(poisson, False, torch.zeros(1), torch.zeros(1), torch.ones(1))]
    [1.0, 0.5]
    """
    with torch.enable_grad():
        mean, variance = mean.detach().requires_grad_(), variance.detach().requires_grad_()
        options = {"softplus": _curved_softplus} if of_softplus else {}
        curvature = expected(mean, variance, y, **options).curvature
        if not curvature.requires_grad:  # of a quadratic
            return torch.zeros_like(mean), torch.zeros_like(mean)
        slope, bend = torch.autograd.grad(curvature.sum(), (mean, variance), materialize_grads=True)
        return slope.detach(), bend.detach()


class _Curvature(torch.autograd.Function):
    """β of a softplus, which is not computed here, with its derivatives, which are."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        _, slope, bend = in_blocks(_softplus_bends, _ROWS, mean.detach(), variance.detach())
        ctx.save_for_backward(slope, bend)
        return torch.zeros_like(mean)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        slope, bend = ctx.saved_tensors
        return grads[0] * slope, grads[0] * bend


def _curved_softplus(mean: Tensor, variance: Tensor) -> Moments:
    """Moments of a softplus of which only the derivatives of β are right."""
    nothing = torch.zeros_like(mean)
    return Moments(nothing, nothing, _Curvature.apply(mean, variance))


def _softplus_bends(mean: Tensor, variance: Tensor) -> Moments:
    """A block of rows (N,): β_e in the place of α, and β_v in that of β."""
    slope, bend = logistic_mixture.bends(mean, variance)
    return Moments(slope, slope, bend)
