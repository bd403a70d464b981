"""Posteriors over one flat vector λ: any distribution with a density, draws and scores."""

from torchngvi.posteriors.flat.dirichlet import Beta, Dirichlet
from torchngvi.posteriors.flat.discrete import Categorical, Poisson
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily
from torchngvi.posteriors.flat.flat_gaussian import FlatCholesky, MeanFieldGaussian, VecGaussian, VechGaussian
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.flat.flows import AffineCoupling, ModuleFlow, OrthogonalFlow
from torchngvi.posteriors.flat.gamma import Gamma, InverseGamma, NormalInverseGamma, Wishart
from torchngvi.posteriors.flat.low_rank import LowRankGaussian, RankOneGaussian

__all__ = [
    "Wishart",
    "Poisson",
    "InverseGamma",
    "Gamma",
    "ExponentialFamily",
    "Dirichlet",
    "Categorical",
    "AffineCoupling",
    "Beta",
    "FlatCholesky",
    "FlatPosterior",
    "LowRankGaussian",
    "MeanFieldGaussian",
    "ModuleFlow",
    "NormalInverseGamma",
    "OrthogonalFlow",
    "RankOneGaussian",
    "VecGaussian",
    "VechGaussian",
]
