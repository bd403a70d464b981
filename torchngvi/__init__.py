"""Natural-gradient variational inference for PyTorch.

What it exports is imported when it is asked for first, so that ``torchngvi --help`` does not wait for PyTorch.  Its
modules, such as `torchngvi.errors`, are found in the same way.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchngvi.messages import needing
from torchngvi.renamed import GONE, NAMES, find_moved_name, install_finder

__version__ = "0.3.0"

# the names of the front door, by the module of each: those that are exported
_HOMES = {
    # fit, and judge
    "torchngvi.diagnostics": ("certificate", "examine"),
    "torchngvi.evidence": ("prior_by_evidence",),
    "torchngvi.fitting.fit": ("fit",),
    "torchngvi.fitting.laplace": ("laplace",),
    "torchngvi.fitting.records": ("FitResult",),
    "torchngvi.latents": ("marginal",),
    "torchngvi.refinement": ("refine",),
    "torchngvi.solved": ("add", "compare_models", "forget", "leave_one_out"),
    # posteriors, and what they approximate
    "torchngvi.distributed": ("Processes",),
    "torchngvi.models": ("DataLogJoint", "GeneralizedLinear", "LogJoint", "Sharded", "Streamed"),
    "torchngvi.posteriors": ("CholeskyGaussian", "DiagonalGaussian", "NaturalGaussian", "PrecisionCholeskyGaussian"),
    # optimizers, and their parts
    "torchngvi.expectations": ("Fixed", "Quadrature", "Stein"),
    "torchngvi.methods": ("AIFVB", "BBVI", "BWGD", "IBLR", "IFVB", "NGVI", "SRVN", "VN", "NewtonCG", "Snngm"),
    "torchngvi.networks": ("VON", "attach", "calibrate", "network"),
    "torchngvi.optim": ("NaturalGradientVI",),
    "torchngvi.stepsizes": ("Constant", "KLRadius"),
    # regressions and mixed models of tables
    "torchngvi.tables": ("MixedModel",),
}
# and those that are not, since each needs the packages of an extra
_OF_EXTRAS = {
    "torchngvi.adapters.arviz": ("to_arviz",),
    "torchngvi.app.saved": ("load",),
    "torchngvi.tables": ("mixed", "regression"),
}
_HOME = {name: module for some in (_HOMES, _OF_EXTRAS) for module, names in some.items() for name in names}
_MOVED = {name for names in NAMES.values() for name in names}
install_finder()

if TYPE_CHECKING:  # what a checker of types reads in the place of `_HOMES`; a test compares them
    from torchngvi.diagnostics import certificate as certificate
    from torchngvi.diagnostics import examine as examine
    from torchngvi.distributed import Processes as Processes
    from torchngvi.evidence import prior_by_evidence as prior_by_evidence
    from torchngvi.expectations import Fixed as Fixed
    from torchngvi.expectations import Quadrature as Quadrature
    from torchngvi.expectations import Stein as Stein
    from torchngvi.fitting.fit import fit as fit
    from torchngvi.fitting.laplace import laplace as laplace
    from torchngvi.fitting.records import FitResult as FitResult
    from torchngvi.latents import marginal as marginal
    from torchngvi.methods import AIFVB as AIFVB
    from torchngvi.methods import BBVI as BBVI
    from torchngvi.methods import BWGD as BWGD
    from torchngvi.methods import IBLR as IBLR
    from torchngvi.methods import IFVB as IFVB
    from torchngvi.methods import NGVI as NGVI
    from torchngvi.methods import SRVN as SRVN
    from torchngvi.methods import VN as VN
    from torchngvi.methods import NewtonCG as NewtonCG
    from torchngvi.methods import Snngm as Snngm
    from torchngvi.models import DataLogJoint as DataLogJoint
    from torchngvi.models import GeneralizedLinear as GeneralizedLinear
    from torchngvi.models import LogJoint as LogJoint
    from torchngvi.models import Sharded as Sharded
    from torchngvi.models import Streamed as Streamed
    from torchngvi.networks import VON as VON
    from torchngvi.networks import attach as attach
    from torchngvi.networks import calibrate as calibrate
    from torchngvi.networks import network as network
    from torchngvi.optim import NaturalGradientVI as NaturalGradientVI
    from torchngvi.posteriors import CholeskyGaussian as CholeskyGaussian
    from torchngvi.posteriors import DiagonalGaussian as DiagonalGaussian
    from torchngvi.posteriors import NaturalGaussian as NaturalGaussian
    from torchngvi.posteriors import PrecisionCholeskyGaussian as PrecisionCholeskyGaussian
    from torchngvi.refinement import refine as refine
    from torchngvi.solved import add as add
    from torchngvi.solved import compare_models as compare_models
    from torchngvi.solved import forget as forget
    from torchngvi.solved import leave_one_out as leave_one_out
    from torchngvi.stepsizes import Constant as Constant
    from torchngvi.stepsizes import KLRadius as KLRadius
    from torchngvi.tables import MixedModel as MixedModel

__all__ = sorted({"__version__", *(name for names in _HOMES.values() for name in names)})


def __getattr__(name: str) -> Any:
    """Find a name when it is asked for; `mixed` needs the extra "formula", `load` the extra "cli", `to_arviz` ArviZ."""
    if name in _HOME:
        with needing(f"torchngvi.{name}", "cli"):  # of `load`; the modules of adapters name their own
            found = getattr(import_module(_HOME[name]), name)
    elif name in _MOVED:
        return find_moved_name(name)
    elif f"{__name__}.{name}" in GONE:
        raise AttributeError(f"{__name__}.{name} is gone: {GONE[f'{__name__}.{name}']}.")
    elif name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        found = import_module(f"{__name__}.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
