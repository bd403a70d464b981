"""Estimators with the conventions of scikit-learn: Bayesian logistic, Poisson, linear and mixed-effects regression.

They go into pipelines, cross-validation and searches as scikit-learn's own, and have what those do not: a posterior
over the coefficients, so that ``predict(X, return_std=True)`` and `sample_posterior` know how uncertain they are.
scikit-learn is in the extra "sklearn".
"""

from torchngvi.messages import needing

with needing("torchngvi.adapters.sklearn", "sklearn"):
    from torchngvi.adapters.sklearn.estimators import (
        BayesianLinearRegression,
        BayesianLogisticRegression,
        BayesianMixedClassifier,
        BayesianMixedRegressor,
        BayesianPoissonRegression,
        QuasiCounts,
    )

__all__ = [
    "BayesianLinearRegression",
    "BayesianLogisticRegression",
    "BayesianMixedClassifier",
    "BayesianMixedRegressor",
    "BayesianPoissonRegression",
    "QuasiCounts",
]
