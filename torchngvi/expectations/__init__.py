"""The estimators of E_q[ℓ] and of its derivative, one a file, with the draws that some of them take."""

from torchngvi.expectations.autograd import Autograd
from torchngvi.expectations.bonnet_price import BonnetPrice
from torchngvi.expectations.closed_entropy_stein import ClosedEntropyStein
from torchngvi.expectations.draws import Antithetic, Draws, Fixed, Independent, Quasi
from torchngvi.expectations.gauss_newton import GaussNewton
from torchngvi.expectations.hessian import Hessian
from torchngvi.expectations.hessian_vector import HessianVector
from torchngvi.expectations.least_squares_stein import LeastSquaresStein
from torchngvi.expectations.monte_carlo import MonteCarlo
from torchngvi.expectations.path_derivative import PathDerivative
from torchngvi.expectations.per_factor import PerFactor
from torchngvi.expectations.piecewise import PiecewiseBound
from torchngvi.expectations.quadrature import Quadrature
from torchngvi.expectations.reparametrized import Reparametrized
from torchngvi.expectations.sample_average import SampleAverage
from torchngvi.expectations.score_function import ScoreFunction
from torchngvi.expectations.statistic_regression import StatisticRegression
from torchngvi.expectations.stein import Stein

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
