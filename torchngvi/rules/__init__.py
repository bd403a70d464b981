"""The rules: along which curve a step moves q, one rule a file.

QuasiNewton and SiteNewton may bend the gradient before a rule follows it; NormalizedMomentum, Adam and
ExponentialAverage may average the changes afterwards.
"""

from torchngvi.metrics.quasi_newton import QuasiNewton
from torchngvi.metrics.site_newton import SiteNewton
from torchngvi.momentum.adam import Adam
from torchngvi.momentum.exponential_average import ExponentialAverage
from torchngvi.momentum.normalized import NormalizedMomentum
from torchngvi.rules.bures_wasserstein import BuresWasserstein
from torchngvi.rules.centered_svgd import CenteredSVGD
from torchngvi.rules.covariance_gradient import CovarianceGradient
from torchngvi.rules.geodesic import Geodesic
from torchngvi.rules.local_exponential import LocalExponential
from torchngvi.rules.log_natural_gradient import LogNaturalGradient
from torchngvi.rules.log_root_gradient import LogRootGradient
from torchngvi.rules.natural_gradient import NaturalGradient
from torchngvi.rules.projected_root_gradient import ProjectedRootGradient
from torchngvi.rules.projected_square_root import ProjectedSquareRoot
from torchngvi.rules.proximal_root_gradient import ProximalRootGradient
from torchngvi.rules.retraction import Retraction
from torchngvi.rules.root_gradient import RootGradient
from torchngvi.rules.root_newton import RootNewton
from torchngvi.rules.svgd import SVGD
from torchngvi.rules.symmetric_root import SymmetricRoot
from torchngvi.rules.variational_newton import VariationalNewton

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
