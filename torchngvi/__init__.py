"""Natural-gradient variational inference for PyTorch.

What it exports is imported when it is asked for first, so that ``torchngvi --help`` does not wait for PyTorch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchngvi.extras import needing
from torchngvi.renamed import NAMES, find_moved_name, install_finder

if TYPE_CHECKING:
    from torchngvi import errors, expectations, fitting, ifvb, models, networks, posteriors, rules, stepsizes
    from torchngvi.averaging import ExpectationAverage
    from torchngvi.diagnostics import certificate, examine, simulation_based_calibration
    from torchngvi.distributed import Processes, sum_gradients, synchronize
    from torchngvi.evidence import prior_by_evidence
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
        NewtonCG,
        ProximalBBVI,
        RootGD,
        Snngm,
        SVGDDensity,
        SymmetricSRVN,
    )
    from torchngvi.mixed_models import MixedModel
    from torchngvi.models import DataLogJoint, GeneralizedLinear, LogJoint, Sharded, ShardedDraws, Streamed
    from torchngvi.networks import (
        IVON,
        VOGN,
        VON,
        GradientNoise,
        Reparametrized,
        SampledLabels,
        attach,
        calibrate,
        network,
    )
    from torchngvi.numerics.kernels import show_config
    from torchngvi.optim import CapturedStep, NaturalGradientVI
    from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
    from torchngvi.refinement import refine
    from torchngvi.rules import QuasiNewton, SiteNewton
    from torchngvi.solved import add, compare_models, forget, leave_one_out, merge, sensitivity, site_sum, solve
    from torchngvi.stepsizes import Constant, KLRadius, SufficientDecrease

__version__ = "0.2.0"

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
    "CapturedStep",
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
    "NewtonCG",
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
    "add",
    "certificate",
    "compare_models",
    "examine",
    "expectations",
    "fit",
    "fitting",
    "forget",
    "ifvb",
    "laplace",
    "leave_one_out",
    "marginal",
    "merge",
    "models",
    "posteriors",
    "prior_by_evidence",
    "refine",
    "sensitivity",
    "site_sum",
    "solve",
    "rules",
    "show_config",
    "simulation_based_calibration",
    "stepsizes",
    "sum_gradients",
    "synchronize",
]


# the module of each name that is exported; a name that is not here is a folder or a file of the package itself
_HOMES = {
    "torchngvi.adapters.arviz": ("to_arviz",),
    "torchngvi.adapters.formula": ("mixed",),
    "torchngvi.app.saved": ("load",),
    "torchngvi.averaging": ("ExpectationAverage",),
    "torchngvi.diagnostics": ("certificate", "examine", "simulation_based_calibration"),
    "torchngvi.expectations": ("Antithetic", "Autograd", "Fixed", "Independent", "Quadrature", "Quasi", "Stein"),
    "torchngvi.fitting.fit": ("fit",),
    "torchngvi.fitting.laplace": ("LaplaceResult", "laplace"),
    "torchngvi.fitting.records": ("FitResult",),
    "torchngvi.fitting.row_space": ("RowSpace",),
    "torchngvi.distributed": ("Processes", "sum_gradients", "synchronize"),
    "torchngvi.evidence": ("prior_by_evidence",),
    "torchngvi.ifvb": ("AIFVB", "IFVB"),
    "torchngvi.latents": ("marginal",),
    "torchngvi.methods": (
        "BBVI",
        "BWGD",
        "IBLR",
        "NGVI",
        "SRVN",
        "VN",
        "CovarianceGD",
        "NewtonCG",
        "ProximalBBVI",
        "RootGD",
        "Snngm",
        "SVGDDensity",
        "SymmetricSRVN",
    ),
    "torchngvi.mixed_models": ("MixedModel",),
    "torchngvi.models": ("DataLogJoint", "GeneralizedLinear", "LogJoint", "Sharded", "ShardedDraws", "Streamed"),
    "torchngvi.networks": (
        "IVON",
        "VOGN",
        "VON",
        "GradientNoise",
        "Reparametrized",
        "SampledLabels",
        "attach",
        "calibrate",
        "network",
    ),
    "torchngvi.numerics.kernels": ("show_config",),
    "torchngvi.optim": ("CapturedStep", "NaturalGradientVI"),
    "torchngvi.posteriors": ("CholeskyGaussian", "DiagonalGaussian", "NaturalGaussian", "PrecisionCholeskyGaussian"),
    "torchngvi.refinement": ("refine",),
    "torchngvi.solved": (
        "add",
        "compare_models",
        "forget",
        "leave_one_out",
        "merge",
        "sensitivity",
        "site_sum",
        "solve",
    ),
    "torchngvi.rules": ("QuasiNewton", "SiteNewton"),
    "torchngvi.stepsizes": ("Constant", "KLRadius", "SufficientDecrease"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MOVED = {name for names in NAMES.values() for name in names}
install_finder()


def __getattr__(name: str) -> Any:
    """Find a name when it is asked for; `mixed` needs the extra "formula", `load` the extra "cli", `to_arviz` ArviZ."""
    if name in _HOME:
        with needing(f"torchngvi.{name}", "cli"):  # of `load`; the modules of adapters name their own
            found = getattr(import_module(_HOME[name]), name)
    elif name in _MOVED:
        return find_moved_name(name)
    elif name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        found = import_module(f"{__name__}.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
