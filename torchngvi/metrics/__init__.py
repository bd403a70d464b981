"""The metrics, which bend a gradient before the rule follows it.

`QuasiNewton` and `SiteNewton` improve on the natural gradient of a Gaussian; the others stand in the place of the
inverse Fisher matrix of a flat posterior.
"""

from torchngvi.metrics.adam import Adam
from torchngvi.metrics.fisher import BatchFisher, Window
from torchngvi.metrics.nagvac import NAGVAC, PublishedNAGVAC
from torchngvi.metrics.preconditioner import Blocks, Exact, Identity, Preconditioner
from torchngvi.metrics.quasi_newton import QuasiNewton, SiteNewton
from torchngvi.metrics.recursive import MatrixFree, Recursive

__all__ = [
    "NAGVAC",
    "Adam",
    "BatchFisher",
    "Blocks",
    "Exact",
    "Identity",
    "MatrixFree",
    "Preconditioner",
    "PublishedNAGVAC",
    "QuasiNewton",
    "Recursive",
    "SiteNewton",
    "Window",
]
