"""The targets that a posterior approximates: log joints with structure, and without."""

from typing import Any

from torchngvi.models.factor_graph import ExpectedFactor, FactorGraph, SiteFactor
from torchngvi.models.factors import FactorTarget, GroupedLogJoint, TractableFactors
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import (
    BernoulliLogit,
    BernoulliProbit,
    GaussianNoise,
    Likelihood,
    NegativeBinomial,
    PoissonLog,
    StudentT,
)
from torchngvi.models.log_joint import LogJoint, MixtureIntegrand, PerDatum, WarpedTarget
from torchngvi.models.mixed import MixedLogJoint, MixedSummary, RandomEffects
from torchngvi.models.mixed_prior import Exponential, HalfNormal, HalfT, MixedPrior, Wishart
from torchngvi.models.regularized import ExpectedPenalty, MeanPenalty, Regularized
from torchngvi.models.sharded import Sharded, ShardedDraws, ShardedLogJoint, ShardedTractable
from torchngvi.models.softmax import SoftmaxRegression
from torchngvi.models.streamed import DataLogJoint, Streamed
from torchngvi.renamed import find_gone

__all__ = [
    "BernoulliLogit",
    "BernoulliProbit",
    "DataLogJoint",
    "ExpectedFactor",
    "ExpectedPenalty",
    "Exponential",
    "FactorGraph",
    "FactorTarget",
    "GaussianNoise",
    "GeneralizedLinear",
    "GroupedLogJoint",
    "HalfNormal",
    "HalfT",
    "Likelihood",
    "LogJoint",
    "MeanPenalty",
    "MixedLogJoint",
    "MixedPrior",
    "MixedSummary",
    "MixtureIntegrand",
    "NegativeBinomial",
    "PerDatum",
    "PoissonLog",
    "RandomEffects",
    "Regularized",
    "Sharded",
    "ShardedDraws",
    "ShardedLogJoint",
    "ShardedTractable",
    "SiteFactor",
    "SoftmaxRegression",
    "Streamed",
    "StudentT",
    "TractableFactors",
    "WarpedTarget",
    "Wishart",
]


def __getattr__(name: str) -> Any:
    """Say of a name that is gone what takes its place."""
    return find_gone(__name__, name)
