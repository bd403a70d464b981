"""The rules: along which curve a step moves q, those that are read together in one file.

QuasiNewton and SiteNewton may bend the gradient before a rule follows it; NormalizedMomentum, Adam and
ExponentialAverage may average the changes afterwards.
"""

from torchngvi.metrics.quasi_newton import QuasiNewton, SiteNewton
from torchngvi.momentum import Adam, ExponentialAverage, NormalizedMomentum
from torchngvi.rules.natural_gradient import Geodesic, LocalExponential, LogNaturalGradient, NaturalGradient, Retraction
from torchngvi.rules.newton import RootNewton, SymmetricRoot, VariationalNewton
from torchngvi.rules.root_gradient import (
    LogRootGradient,
    ProjectedRootGradient,
    ProjectedSquareRoot,
    ProximalRootGradient,
    RootGradient,
)
from torchngvi.rules.wasserstein import SVGD, BuresWasserstein, CenteredSVGD, CovarianceGradient

__all__ = [
    "SVGD",
    "Adam",
    "BuresWasserstein",
    "CenteredSVGD",
    "CovarianceGradient",
    "ExponentialAverage",
    "Geodesic",
    "LocalExponential",
    "LogNaturalGradient",
    "LogRootGradient",
    "NaturalGradient",
    "NormalizedMomentum",
    "ProjectedRootGradient",
    "ProjectedSquareRoot",
    "ProximalRootGradient",
    "QuasiNewton",
    "Retraction",
    "RootGradient",
    "RootNewton",
    "SiteNewton",
    "SymmetricRoot",
    "VariationalNewton",
]
