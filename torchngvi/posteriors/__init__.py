"""Variational posteriors, each in its own system of coordinates.

`CholeskyGaussian` stores mean and root of the covariance and is the first choice; `DiagonalGaussian` is its mean
field; `NaturalGaussian` stores natural parameters, `PrecisionCholeskyGaussian` mean and root of the precision, both
for structures in which only a precision is sparse.  A `Mixture` has several of them, of one kind, with weights.  Each
becomes a `Warped` one, with skewed margins, by its method ``warped``; the curves are in `torchngvi.posteriors.warps`.
A `Product` has a posterior for each of several named sites.
Posteriors that are not Gaussians in such coordinates, Beta distributions and normalising flows among them, are in
`torchngvi.posteriors.flat`.
"""

from torchngvi.posteriors.gaussian import CholeskyGaussian, DiagonalGaussian
from torchngvi.posteriors.mixture import Mixture
from torchngvi.posteriors.precision import NaturalGaussian, PrecisionCholeskyGaussian, clique_marginals
from torchngvi.posteriors.product import Product
from torchngvi.posteriors.warps import Warped

__all__ = [
    "CholeskyGaussian",
    "DiagonalGaussian",
    "Mixture",
    "NaturalGaussian",
    "PrecisionCholeskyGaussian",
    "Product",
    "Warped",
    "clique_marginals",
]
