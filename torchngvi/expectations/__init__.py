"""The estimators of E_q[ℓ] and of its derivative, with the draws that some of them take."""

from torchngvi.expectations.black_box import (
    ClosedEntropyStein,
    LeastSquaresStein,
    PathDerivative,
    Reparametrized,
    ScoreFunction,
    Stein,
)
from torchngvi.expectations.draws import Antithetic, Draws, Fixed, Independent, Quasi
from torchngvi.expectations.flat import StatisticRegression
from torchngvi.expectations.hessian import Autograd, BonnetPrice, GaussNewton, Hessian, HessianVector, MonteCarlo
from torchngvi.expectations.piecewise import PiecewiseBound
from torchngvi.expectations.quadrature import PerFactor, Quadrature
from torchngvi.expectations.sample_average import SampleAverage

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
