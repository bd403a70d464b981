"""Posteriors over one flat vector λ: any distribution with a density, draws and scores."""

from torchngvi.posteriors.flat.exponential_family import (
    Beta,
    Categorical,
    Dirichlet,
    ExponentialFamily,
    Gamma,
    InverseGamma,
    NormalInverseGamma,
    Poisson,
    Wishart,
)
from torchngvi.posteriors.flat.flat_gaussian import (
    FlatCholesky,
    LowRankGaussian,
    MeanFieldGaussian,
    RankOneGaussian,
    VecGaussian,
    VechGaussian,
)
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.flat.flows import AffineCoupling, ModuleFlow, OrthogonalFlow

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
