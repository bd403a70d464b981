"""Families over a flat vector λ."""

from torchngvi.ifvb.families.beta import Beta
from torchngvi.ifvb.families.cholesky import FlatCholesky
from torchngvi.ifvb.families.covariance_gaussian import VecGaussian, VechGaussian
from torchngvi.ifvb.families.low_rank import LowRankGaussian
from torchngvi.ifvb.families.mean_field import MeanFieldGaussian
from torchngvi.ifvb.families.module_flow import AffineCoupling, ModuleFlow
from torchngvi.ifvb.families.normal_inverse_gamma import NormalInverseGamma
from torchngvi.ifvb.families.orthogonal_flow import OrthogonalFlow
from torchngvi.ifvb.families.rank_one import RankOneGaussian

__all__ = [
    "AffineCoupling",
    "Beta",
    "FlatCholesky",
    "LowRankGaussian",
    "MeanFieldGaussian",
    "ModuleFlow",
    "NormalInverseGamma",
    "OrthogonalFlow",
    "RankOneGaussian",
    "VecGaussian",
    "VechGaussian",
]
