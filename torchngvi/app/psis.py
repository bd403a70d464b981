"""How good q is as a proposal for the exact posterior: its k̂ with the effective number of draws, and a sentence."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from torchngvi.diagnostics.psis import smoothed
from torchngvi.diagnostics.verdict import Verdict

_GOOD = 0.5  # k̂ below which q is close to the exact posterior
_ENOUGH = 1000  # draws from which k̂ is known to better than ± 0.2


class Proposal(NamedTuple):
    """What Pareto-smoothed importance weights say of draws from q.

    >>> print(Proposal(0.6, 511.6, 512))
    0.60, worth 512 of 512 draws
    """

    k_hat: float
    effective: float  # draws
    draws: int

    def __str__(self) -> str:
        if math.isnan(self.k_hat):
            return "not available (the log joint is not finite at some draws of q)"
        return f"{self.k_hat:.2f}, worth {self.effective:.0f} of {self.draws} draws"


def proposal(
    verdict: Verdict | None,
    log_weights: Tensor,  # (S,)
) -> Proposal:
    """The k̂ of q: that of the verdict where one was reached, so that there is one number, or else of these weights.

    >>> import torch
    >>> print(proposal(None, torch.zeros(200)))
    0.00, worth 200 of 200 draws
    """
    if verdict is not None and verdict.sampled is not None:
        own = verdict.sampled.from_q
        return Proposal(own.k_hat, own.effective, verdict.sampled.draws // 2)
    weights = smoothed(log_weights)
    return Proposal(float(weights.k_hat), float(weights.effective), len(log_weights))


def numbers(found: Proposal) -> dict[str, Any]:
    """Of ``summary.json``: k-hat, the draws behind it, what they are worth, and the sentence.

    >>> numbers(Proposal(0.1, 900.0, 1000))["k_hat_verdict"][:4]
    'good'
    """
    return {
        "k_hat": found.k_hat,
        "k_hat_draws": found.draws,
        "effective_draws": found.effective,
        "k_hat_verdict": verdict(found.k_hat, found.draws),
    }


def verdict(k: float, num_samples: int) -> str:
    """A sentence on a k̂, with the thresholds of Vehtari et al. (2024).

    >>> verdict(0.31, 4000)
    'good: k-hat 0.31 is below 0.5, so q is close to the exact posterior and importance weights can correct the rest.'
    >>> verdict(0.31, 256)
    'rough: k-hat 0.31, from 256 draws known to about ± 0.2, is not poor; whether it is good, below 0.5, more draws
    would tell.'
    """
    usable = min(1 - 1 / math.log10(num_samples), 0.7)
    if math.isnan(k):
        return "not available: the log joint is not finite at some draws of q."
    if num_samples < _ENOUGH and k < usable:
        return (
            f"rough: k-hat {k:.2f}, from {num_samples} draws known to about ± 0.2, is not poor; whether it is good, "
            "below 0.5, more draws would tell."
        )
    if k < _GOOD:
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
