"""Curves from q, one rule a file; and what may bend the gradient before: QuasiNewton, SiteNewton."""

from torchngvi.rules.bures_wasserstein import BuresWasserstein
from torchngvi.rules.centered_svgd import CenteredSVGD
from torchngvi.rules.covariance_gradient import CovarianceGradient
from torchngvi.rules.geodesic import Geodesic
from torchngvi.rules.natural_gradient import NaturalGradient
from torchngvi.rules.quasi_newton import QuasiNewton
from torchngvi.rules.retraction import Retraction
from torchngvi.rules.root_gradient import RootGradient
from torchngvi.rules.site_newton import SiteNewton
from torchngvi.rules.svgd import SVGD
from torchngvi.rules.symmetric_root import SymmetricRoot
from torchngvi.rules.variational_newton import VariationalNewton

__all__ = [
    "SVGD",
    "BuresWasserstein",
    "CenteredSVGD",
    "CovarianceGradient",
    "Geodesic",
    "NaturalGradient",
    "QuasiNewton",
    "Retraction",
    "RootGradient",
    "SiteNewton",
    "SymmetricRoot",
    "VariationalNewton",
]
