"""How good is q?  Monte Carlo checks of any posterior, predictive densities, and a verdict on the fit.

`examine` says whether a Gaussian fits the density that it was fitted to; `importance` has the estimates under q and
the smoothed importance weights, `linear_response` the standard deviations that q ought to have, `predictive`
the densities of new rows, `compare_estimators` the noise of a gradient; `simulation_based_calibration` judges a way
of fitting on simulated data.
"""

from torchngvi.diagnostics.calibration import Calibration, Power, Uniformity, holm, simulation_based_calibration
from torchngvi.diagnostics.certificate import Certificate, certificate
from torchngvi.diagnostics.estimators import EstimatorComparison, EstimatorRow, Extremes, compare_estimators
from torchngvi.diagnostics.importance import Estimate, Smoothed, elbo, k_hat, log_weights, smoothed
from torchngvi.diagnostics.linear_response import (
    Confirmed,
    Margin,
    Residuals,
    ThirdOrder,
    confirm,
    laplace_margin,
    response_covariance,
    response_log_sd,
    tails,
    third_order,
    third_order_of_values,
)
from torchngvi.diagnostics.predictive import (
    accuracy,
    coded,
    log_expected_likelihood,
    log_predictive_density,
    predictive_mean,
    predictor_moments,
)
from torchngvi.diagnostics.verdict import ExaminationSettings, Verdict, examine

__all__ = [
    "Calibration",
    "Certificate",
    "Confirmed",
    "Estimate",
    "EstimatorComparison",
    "EstimatorRow",
    "ExaminationSettings",
    "Extremes",
    "Margin",
    "Power",
    "Residuals",
    "Smoothed",
    "ThirdOrder",
    "Uniformity",
    "Verdict",
    "accuracy",
    "certificate",
    "coded",
    "compare_estimators",
    "confirm",
    "elbo",
    "examine",
    "holm",
    "k_hat",
    "laplace_margin",
    "log_expected_likelihood",
    "log_predictive_density",
    "log_weights",
    "predictive_mean",
    "predictor_moments",
    "response_covariance",
    "response_log_sd",
    "simulation_based_calibration",
    "smoothed",
    "tails",
    "third_order",
    "third_order_of_values",
]
