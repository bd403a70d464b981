"""Variational families, one system of coordinates a file."""

from torchngvi.posteriors.cliques import clique_marginals
from torchngvi.posteriors.covariance_root import CholeskyGaussian, DiagonalGaussian
from torchngvi.posteriors.natural import NaturalGaussian
from torchngvi.posteriors.precision_root import PrecisionCholeskyGaussian

__all__ = ["CholeskyGaussian", "DiagonalGaussian", "NaturalGaussian", "PrecisionCholeskyGaussian", "clique_marginals"]
