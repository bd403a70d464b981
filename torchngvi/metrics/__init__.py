"""The metrics, which bend a gradient before the rule follows it.

`QuasiNewton` and `SiteNewton` improve on the natural gradient of a Gaussian; the others stand in the place of the
inverse Fisher matrix of a flat posterior.
"""

from torchngvi.metrics.preconditioner import NAGVAC, Adam, Blocks, Exact, Identity, Preconditioner, PublishedNAGVAC
from torchngvi.metrics.quasi_newton import QuasiNewton, SiteNewton
from torchngvi.metrics.recursive import BatchFisher, MatrixFree, Recursive, Window

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
