"""Stacking: weights of models in one predictive distribution, by how well they predict rows that were left out."""

from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.models import checks

_TOLERANCE = 1e-10  # nats a row from the best weights
_NOTHING = 1e-9  # a weight below it is 0
_ITERATIONS = 100
_INSIDE = 0.99  # of the way to where a weight would be 0


@torch.no_grad()
def stacking_weights(
    log_density: Any,  # (N, K)
) -> tuple[Tensor, float]:
    """Compute the weights of K models whose mixture predicts left-out rows best.

    One wants them to predict with several models at once: unlike weights by the evidence they do not end at one model
    when none is true (Yao, Vehtari, Simpson and Gelman 2018).  They are the maximum of the concave function

        F(w) = 1/N Σ_i log Σ_k w_k p_ik        over w_k ≥ 0, Σ_k w_k = 1,

    by a primal-dual interior-point method.  Since Σ_k w_k ∂_kF = 1, no weights are better than w by more than
    max_k ∂_kF - 1, which proves how far it came.

    Args:
        log_density: log p_ik of row i under model k without that row, (N, K), in nats, as `leave_one_out` has it; a
            tensor, an array or lists.

    Returns:
        The weights, (K,), and the proved bound of F* - F(w), in nats a row.

    Raises:
        InputError: if it is not a matrix of finite numbers.

    >>> likely = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.2, 0.3], [0.1, 0.9, 0.2]])
    >>> weights, gap = stacking_weights(likely.double().log())
    >>> [round(w, 4) for w in weights.tolist()], gap < 1e-9  # the third is never needed
    ([0.6776, 0.3224, 0.0], True)
    """
    log_density = checks.numbers("log_density", log_density, None)
    if log_density.ndim != 2 or not log_density.numel():
        raise InputError(
            "stacking_weights takes log densities of rows (N) under models (K), (N, K); got "
            f"{tuple(log_density.shape)}."
        )
    p = log_density.double()
    p = (p - p.amax(-1, keepdim=True)).exp()  # F but for a constant
    count = p.shape[1]
    w = torch.full((count,), 1 / count, dtype=p.dtype, device=p.device)
    z = w.clone()  # the multipliers of w ≥ 0: 1 - ∂_kF at the end
    for _ in range(_ITERATIONS):
        ratio = p / (p @ w)[:, None]
        slope = ratio.mean(0)
        if float(slope.max() * w.sum()) - 1 <= _TOLERANCE:
            break
        barrier = 0.1 * float(w @ z) / count
        curvature = ratio.mT @ ratio / len(p) + (z / w).diag()
        dw = torch.linalg.solve(curvature, slope - 1 + barrier / w)
        dz = (barrier - z * dw) / w - z
        w, z = w + _step(w, dw) * dw, z + _step(z, dz) * dz
    w = torch.where(w < _NOTHING * w.sum(), 0.0, w)
    w = w / w.sum()
    gap = float((p / (p @ w)[:, None]).mean(0).max()) - 1
    return w.to(log_density.dtype), max(gap, 0.0)


def _step(x: Tensor, direction: Tensor) -> Tensor:
    """The longest step up to 1 that leaves x positive."""
    towards = torch.where(direction < 0, -x / direction, torch.inf)
    return (_INSIDE * towards.min()).clamp_max(1.0)
