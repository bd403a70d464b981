"""Published methods by name, each a choice of parts, one module a family of them."""

from torchngvi.methods.bbvi import BBVI, ProximalBBVI
from torchngvi.methods.gaussian import (
    BWGD,
    IBLR,
    NGVI,
    SRVN,
    VN,
    CovarianceGD,
    Method,
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
    "PreconditionedVI",
    "ProximalBBVI",
    "RootGD",
    "SVGDDensity",
    "Snngm",
    "SymmetricSRVN",
]
