"""ArviZ before and after 1.0 behind one function: importance weights go in as logarithms, larger is heavier."""

import warnings

import numpy as np

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=FutureWarning)
    import arviz

NEW = int(arviz.__version__.partition(".")[0]) >= 1


def psislw(log_weights):
    """Smoothed logarithms of weights and k-hat, over the last axis.

    From 1.0 on it takes log likelihoods that are left out, whose weights are their reciprocals: the sign is turned.
    """
    with np.errstate(all="ignore"):
        if not NEW:
            return arviz.psislw(log_weights)
        from arviz_stats.base import array_stats

        return array_stats.psislw(-np.asarray(log_weights))
