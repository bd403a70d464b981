"""Natural gradients for any family over a flat vector, the inverse Fisher matrix by recursion: IFVB and AIFVB."""

from torchngvi.averaging import Averaging
from torchngvi.expectations.flat import (
    ClosedForm,
    ControlVariate,
    GradientEstimator,
    LowerBound,
    Pathwise,
    ScoreFunction,
)
from torchngvi.fitting.smoothed import lower_bound, run
from torchngvi.methods import AIFVB, IFVB, PreconditionedVI
from torchngvi.metrics import (
    NAGVAC,
    Adam,
    BatchFisher,
    Blocks,
    Exact,
    Identity,
    MatrixFree,
    Preconditioner,
    PublishedNAGVAC,
    Recursive,
    Window,
)
from torchngvi.models.regularized import GroupLassoNetwork
from torchngvi.optim import Report
from torchngvi.posteriors.flat import (
    AffineCoupling,
    Beta,
    FlatCholesky,
    LowRankGaussian,
    MeanFieldGaussian,
    ModuleFlow,
    NormalInverseGamma,
    OrthogonalFlow,
    RankOneGaussian,
    VecGaussian,
    VechGaussian,
)
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.theory.godichon2023 import asymptotic_covariance, marginal_sample

__all__ = [
    "AIFVB",
    "IFVB",
    "NAGVAC",
    "Adam",
    "AffineCoupling",
    "Averaging",
    "BatchFisher",
    "Beta",
    "Blocks",
    "ClosedForm",
    "ControlVariate",
    "Exact",
    "FlatPosterior",
    "FlatCholesky",
    "GradientEstimator",
    "GroupLassoNetwork",
    "Identity",
    "LowRankGaussian",
    "LowerBound",
    "MatrixFree",
    "MeanFieldGaussian",
    "ModuleFlow",
    "NormalInverseGamma",
    "OrthogonalFlow",
    "Pathwise",
    "Preconditioner",
    "PreconditionedVI",
    "PublishedNAGVAC",
    "RankOneGaussian",
    "Recursive",
    "Report",
    "ScoreFunction",
    "VecGaussian",
    "VechGaussian",
    "Window",
    "asymptotic_covariance",
    "lower_bound",
    "marginal_sample",
    "run",
]
