"""Ways to E_q[ℓ] and its derivatives: one estimator a file."""

from torchngvi.expectations.autograd import Autograd
from torchngvi.expectations.monte_carlo import MonteCarlo
from torchngvi.expectations.piecewise import PiecewiseBound
from torchngvi.expectations.quadrature import Quadrature
from torchngvi.expectations.stein import Stein

__all__ = ["Autograd", "MonteCarlo", "PiecewiseBound", "Quadrature", "Stein"]
