"""Posteriors over one flat vector λ: any distribution with a density, draws and scores."""

from torchngvi.posteriors.flat.beta import Beta
from torchngvi.posteriors.flat.categorical import Categorical
from torchngvi.posteriors.flat.cholesky import FlatCholesky
from torchngvi.posteriors.flat.covariance_gaussian import VecGaussian, VechGaussian
from torchngvi.posteriors.flat.dirichlet import Dirichlet
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.flat.gamma import Gamma
from torchngvi.posteriors.flat.inverse_gamma import InverseGamma
from torchngvi.posteriors.flat.low_rank import LowRankGaussian
from torchngvi.posteriors.flat.mean_field import MeanFieldGaussian
from torchngvi.posteriors.flat.module_flow import AffineCoupling, ModuleFlow
from torchngvi.posteriors.flat.normal_inverse_gamma import NormalInverseGamma
from torchngvi.posteriors.flat.orthogonal_flow import OrthogonalFlow
from torchngvi.posteriors.flat.poisson import Poisson
from torchngvi.posteriors.flat.rank_one import RankOneGaussian
from torchngvi.posteriors.flat.wishart import Wishart

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
