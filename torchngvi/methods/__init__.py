"""The published methods by name: each is a choice of parts, and each module holds those of one kind."""

from torchngvi.methods.bbvi import BBVI, ProximalBBVI
from torchngvi.methods.gaussian import (
    BWGD,
    IBLR,
    NGVI,
    SRVN,
    VN,
    CovarianceGD,
    Method,
    NewtonCG,
    RootGD,
    Snngm,
    SVGDDensity,
    SymmetricSRVN,
)
from torchngvi.methods.ifvb import AIFVB, IFVB, PreconditionedVI

__all__ = [
    "AIFVB",
    "BBVI",
    "BWGD",
    "IBLR",
    "IFVB",
    "NGVI",
    "SRVN",
    "VN",
    "CovarianceGD",
    "Method",
    "NewtonCG",
    "PreconditionedVI",
    "ProximalBBVI",
    "RootGD",
    "SVGDDensity",
    "Snngm",
    "SymmetricSRVN",
]
