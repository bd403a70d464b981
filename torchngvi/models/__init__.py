"""Targets: log joints with structure, and without."""

from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import BernoulliLogit, BernoulliProbit, GaussianNoise, Likelihood, PoissonLog
from torchngvi.models.log_joint import LogJoint

__all__ = [
    "BernoulliLogit",
    "BernoulliProbit",
    "GaussianNoise",
    "GeneralizedLinear",
    "Likelihood",
    "LogJoint",
    "PoissonLog",
]
