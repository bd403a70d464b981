"""The start of an exact fit: the mode of a convex ℓ by iteratively reweighted least squares, and the curvature there.

It is Newton's method with halved steps, whose every pass over the data makes one Hessian Xᵀ diag(f'') X + γΛ and takes
no expectation (McCullagh and Nelder 1989, section 2.5).  It ends where ℓ/γ is about a twentieth of a nat above its
minimum: Laplace's approximation itself is mostly off the optimum by more.
"""

import math

import torch
from torch import Tensor

from torchngvi.fitting.laplace import backtracked
from torchngvi.interfaces import Congruence, TractableTarget, where_members
from torchngvi.numerics.linalg import cholesky, finite
from torchngvi.posteriors.gaussian import Gaussian

_DECREMENT2 = 0.1  # gᵀH⁻¹g, in units of γ, at which the mode is near enough
_PASSES = 50


def _lower(target: TractableTarget, mean: Tensor) -> Tensor:
    """The mean, or for members whose ℓ is lower there the origin: where ℓ grows as e^η a pass leads back by 1 in η."""
    at_mean, at_origin = (target.log_joint(theta[None])[0] for theta in (mean, torch.zeros_like(mean)))
    return where_members(at_origin > at_mean.nan_to_num(nan=-math.inf), torch.zeros_like(mean), mean)


@torch.no_grad()
def start_at_mode(q: Gaussian, target: TractableTarget) -> int:
    """Set q to about N(mode, γ (ΠH)⁻¹), for the members whose ℓ is finite there.

    Args:
        q: the posterior, updated in place; the search begins at its mean, or at the origin where ℓ is lower there.
        target: a model that is ``convex``, at a positive temperature.

    Returns:
        The number of passes over the data.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> X = torch.ones(4, 1, dtype=torch.float64)
    >>> model, q = GeneralizedLinear(X, [0.0, 1.0, 2.0, 1.0], "gaussian"), CholeskyGaussian(1, dtype=torch.float64)
    >>> start_at_mode(q, model), round(q.mean.item(), 6), round(q.variance.item(), 6)  # 4/5 and 1/5
    (2, 0.8, 0.2)
    """
    theta = _lower(target, q.frame().mean)
    for passes in range(1, _PASSES + 1):  # noqa: B007
        energy, (g, H) = target.second_order(theta)
        factor, ok = cholesky(H)
        direction = -torch.cholesky_solve(g[..., None], factor)[..., 0]
        square = -torch.linalg.vecdot(g, direction)
        active = ok & finite(energy) & (square > _DECREMENT2 * target.temperature)
        if not bool(active.any()):
            break
        theta, moved = backtracked(target, theta, energy, direction, square, active)
        if not bool(moved.any()):
            break
    here = q.snapshot()
    known = finite(energy) & ok & finite(theta).all(-1)
    q.initialize_(torch.where(known[..., None], theta, 0.0))
    N = q.structure.from_dense(H / target.temperature)
    new, inside = q.moved(Congruence(N, torch.zeros_like(theta)))
    q.restore(here)
    q.assign(new, inside & known)
    return passes
