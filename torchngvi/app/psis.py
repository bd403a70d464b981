"""Pareto-smoothed importance sampling by ArviZ: is q close enough to the density it stands for?

k̂ is the shape of a generalised Pareto fitted to the largest importance weights (Vehtari, Simpson,
Gelman, Yao and Gabry 2024, Journal of Machine Learning Research 25).
"""

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from torchngvi.errors import InputError

with warnings.catch_warnings():
    # ArviZ announces its next version once a day, at import
    warnings.filterwarnings("ignore", message=r"\s*ArviZ is undergoing", category=FutureWarning)
    import arviz

_FEWEST = 100


def k_hat(
    log_weights: Tensor,  # (S, *batch)
) -> Tensor:
    """The Pareto k̂ of log importance weights, (*batch,); NaN where a weight is NaN or infinite.

    Weights that agree up to rounding, as when q is exact, have k̂ = 0.

    Raises:
        InputError: fewer than 100 draws, which say nothing about a tail.

    >>> k_hat(torch.zeros(100)).item()
    0.0
    """
    if len(log_weights) < _FEWEST:
        raise InputError(f"k-hat needs at least {_FEWEST} draws; got {len(log_weights)}. Raise num_samples.")
    flat = log_weights.detach().cpu().reshape(len(log_weights), -1)
    shapes = torch.tensor([_k_hat(column) for column in flat.unbind(1)], dtype=torch.float64)
    return shapes.reshape(log_weights.shape[1:])


def _k_hat(
    log_weights: Tensor,  # (S,)
) -> float:
    if bool(torch.isnan(log_weights).any()) or not bool(torch.isfinite(log_weights.max())):
        return math.nan
    spread = float(log_weights.max() - log_weights.min())
    rounding = math.sqrt(torch.finfo(log_weights.dtype).eps) * max(1.0, float(log_weights.abs().max()))
    if spread <= rounding:
        return 0.0
    with np.errstate(over="ignore"):  # its fit of a very heavy tail overflows to weights of zero
        return float(arviz.psislw(log_weights.double().numpy())[1])


def verdict(k: float, num_samples: int) -> str:
    """One sentence on a k̂ from that many draws, with the thresholds of Vehtari et al. (2024).

    >>> verdict(0.31, 4000)
    'good: k-hat 0.31 is below 0.5, so q is close to the exact posterior and importance weights can correct the rest.'
    """
    usable = min(1 - 1 / math.log10(num_samples), 0.7)
    if math.isnan(k):
        return "not available: the log joint is not finite at some draws of q."
    if k < 0.5:
        return (
            f"good: k-hat {k:.2f} is below 0.5, so q is close to the exact posterior and importance weights can "
            "correct the rest."
        )
    if k < usable:
        return f"usable: k-hat {k:.2f} is below {usable:.2g}, so importance weights can correct what q misses."
    return (
        f"poor: k-hat {k:.2f} is not below {usable:.2g}, so q misses part of the exact posterior; "
        "check intervals against another method, or use a richer posterior."
    )
