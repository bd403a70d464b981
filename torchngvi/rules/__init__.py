"""Curves from q: one rule a file."""

from torchngvi.rules.bures_wasserstein import BuresWasserstein
from torchngvi.rules.natural_gradient import NaturalGradient
from torchngvi.rules.quasi_newton import QuasiNewton
from torchngvi.rules.variational_newton import VariationalNewton

__all__ = ["BuresWasserstein", "NaturalGradient", "QuasiNewton", "VariationalNewton"]
