"""What a k̂ of `torchngvi.diagnostics.psis` says, in a sentence."""

import math

from torchngvi.diagnostics.psis import k_hat

__all__ = ["k_hat", "verdict"]


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
