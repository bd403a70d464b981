"""Natural gradients for any family over a flat vector, the inverse Fisher matrix by recursion: IFVB and AIFVB."""

from torchngvi.ifvb.asymptotics import asymptotic_covariance, marginal_sample
from torchngvi.ifvb.averaging import Averaging
from torchngvi.ifvb.estimators import ClosedForm, ControlVariate, Estimate, GradientEstimator, Pathwise, ScoreFunction
from torchngvi.ifvb.families import (
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
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.ifvb.group_lasso_network import GroupLassoNetwork
from torchngvi.ifvb.optimizer import AIFVB, IFVB, PreconditionedVI, Report
from torchngvi.ifvb.preconditioners import (
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
from torchngvi.ifvb.run import Outcome, lower_bound, run

Family = FlatPosterior

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
    "Estimate",
    "Exact",
    "Family",
    "FlatCholesky",
    "GradientEstimator",
    "GroupLassoNetwork",
    "Identity",
    "LowRankGaussian",
    "MatrixFree",
    "MeanFieldGaussian",
    "ModuleFlow",
    "NormalInverseGamma",
    "OrthogonalFlow",
    "Outcome",
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
