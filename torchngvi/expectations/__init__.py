"""Ways to E_q[ℓ] and its derivatives: one estimator a file, and the draws some of them take."""

from torchngvi.expectations.autograd import Autograd
from torchngvi.expectations.closed_entropy_stein import ClosedEntropyStein
from torchngvi.expectations.draws import Antithetic, Draws, Fixed, Independent, Quasi
from torchngvi.expectations.gauss_newton import GaussNewton
from torchngvi.expectations.hessian import Hessian
from torchngvi.expectations.hessian_vector import HessianVector
from torchngvi.expectations.least_squares_stein import LeastSquaresStein
from torchngvi.expectations.monte_carlo import MonteCarlo
from torchngvi.expectations.piecewise import PiecewiseBound
from torchngvi.expectations.quadrature import Quadrature
from torchngvi.expectations.score_function import ScoreFunction
from torchngvi.expectations.stein import Stein

__all__ = [
    "Antithetic",
    "Autograd",
    "ClosedEntropyStein",
    "Draws",
    "Fixed",
    "GaussNewton",
    "Hessian",
    "HessianVector",
    "Independent",
    "LeastSquaresStein",
    "MonteCarlo",
    "PiecewiseBound",
    "Quadrature",
    "Quasi",
    "ScoreFunction",
    "Stein",
]
