"""Natural-gradient variational inference for PyTorch."""

from importlib import import_module
from typing import Any

from torchngvi import errors, expectations, fitting, ifvb, models, networks, posteriors, rules, stepsizes
from torchngvi.averaging import ExpectationAverage
from torchngvi.diagnostics import examine, simulation_based_calibration
from torchngvi.distributed import Processes, sum_gradients, synchronize
from torchngvi.expectations import Antithetic, Autograd, Fixed, Independent, Quadrature, Quasi, Stein
from torchngvi.fitting.fit import fit
from torchngvi.fitting.laplace import LaplaceResult, laplace
from torchngvi.fitting.records import FitResult
from torchngvi.fitting.row_space import RowSpace
from torchngvi.ifvb import AIFVB, IFVB
from torchngvi.latents import marginal
from torchngvi.methods import (
    BBVI,
    BWGD,
    IBLR,
    NGVI,
    SRVN,
    VN,
    CovarianceGD,
    ProximalBBVI,
    RootGD,
    Snngm,
    SVGDDensity,
    SymmetricSRVN,
)
from torchngvi.mixed_models import MixedModel
from torchngvi.models import DataLogJoint, GeneralizedLinear, LogJoint, Sharded, ShardedDraws, Streamed
from torchngvi.networks import IVON, VOGN, VON, GradientNoise, Reparametrized, SampledLabels, attach, calibrate, network
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.refinement import refine
from torchngvi.rules import QuasiNewton, SiteNewton
from torchngvi.stepsizes import Constant, KLRadius, SufficientDecrease

__version__ = "0.1.0"

__all__ = [
    "GradientNoise",
    "IVON",
    "Reparametrized",
    "SampledLabels",
    "VOGN",
    "VON",
    "attach",
    "calibrate",
    "network",
    "networks",
    "AIFVB",
    "BBVI",
    "BWGD",
    "IBLR",
    "IFVB",
    "NGVI",
    "SRVN",
    "VN",
    "Antithetic",
    "Autograd",
    "CholeskyGaussian",
    "Constant",
    "CovarianceGD",
    "DataLogJoint",
    "DiagonalGaussian",
    "ExpectationAverage",
    "FitResult",
    "Fixed",
    "GeneralizedLinear",
    "Independent",
    "KLRadius",
    "LaplaceResult",
    "LogJoint",
    "MixedModel",
    "NaturalGaussian",
    "NaturalGradientVI",
    "PrecisionCholeskyGaussian",
    "Processes",
    "ProximalBBVI",
    "Quadrature",
    "Quasi",
    "QuasiNewton",
    "RootGD",
    "RowSpace",
    "SVGDDensity",
    "Sharded",
    "ShardedDraws",
    "SiteNewton",
    "Snngm",
    "Stein",
    "Streamed",
    "SufficientDecrease",
    "SymmetricSRVN",
    "__version__",
    "errors",
    "examine",
    "expectations",
    "fit",
    "fitting",
    "ifvb",
    "laplace",
    "marginal",
    "models",
    "posteriors",
    "refine",
    "rules",
    "simulation_based_calibration",
    "stepsizes",
    "sum_gradients",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    """Find `mixed`, which needs the extra "formula", when it is asked for."""
    if name == "mixed":
        return import_module("torchngvi.adapters.formula").mixed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
