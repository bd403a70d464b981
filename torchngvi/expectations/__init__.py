"""The estimators of E_q[ℓ] and of its derivative, with the draws that some of them take."""

from torchngvi.expectations.draws import Antithetic, Draws, Fixed, Independent, Quasi
from torchngvi.expectations.flat import StatisticRegression
from torchngvi.expectations.quadrature import PerFactor, PiecewiseBound, Quadrature
from torchngvi.expectations.sampled import (
    Autograd,
    BonnetPrice,
    ClosedEntropyStein,
    GaussNewton,
    Hessian,
    HessianVector,
    LeastSquaresStein,
    MonteCarlo,
    PathDerivative,
    Reparametrized,
    SampleAverage,
    ScoreFunction,
    Stein,
)

__all__ = [
    "Antithetic",
    "Autograd",
    "BonnetPrice",
    "ClosedEntropyStein",
    "Draws",
    "Fixed",
    "GaussNewton",
    "Hessian",
    "HessianVector",
    "Independent",
    "LeastSquaresStein",
    "MonteCarlo",
    "PathDerivative",
    "PerFactor",
    "PiecewiseBound",
    "Quadrature",
    "Quasi",
    "Reparametrized",
    "SampleAverage",
    "ScoreFunction",
    "StatisticRegression",
    "Stein",
]
