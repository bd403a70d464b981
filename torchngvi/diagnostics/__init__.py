"""How good is q?  Monte Carlo checks of any posterior, predictive densities, and a verdict on the fit.

`examine` says whether a Gaussian fits the density that it was fitted to; `monte_carlo` has the estimates under q,
`psis` the smoothed importance weights, `linear_response` the standard deviations that q ought to have, `predictive`
the densities of new rows.
"""

from torchngvi.diagnostics.monte_carlo import Estimate, Extremes, elbo, log_weights
from torchngvi.diagnostics.predictive import (
    accuracy,
    coded,
    log_predictive_density,
    predictive_mean,
    predictor_moments,
)
from torchngvi.diagnostics.psis import k_hat, smoothed

__all__ = [
    "Estimate",
    "Extremes",
    "accuracy",
    "coded",
    "elbo",
    "k_hat",
    "log_predictive_density",
    "log_weights",
    "predictive_mean",
    "predictor_moments",
    "smoothed",
]
