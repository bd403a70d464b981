"""The metrics, which bend a gradient before the rule follows it: one file each.

`QuasiNewton` and `SiteNewton` improve on the natural gradient of a Gaussian; the others stand in the place of the
inverse Fisher matrix of a flat posterior.
"""

from torchngvi.metrics.adam import Adam
from torchngvi.metrics.batch_fisher import BatchFisher
from torchngvi.metrics.blocks import Blocks
from torchngvi.metrics.exact import Exact
from torchngvi.metrics.identity import Identity
from torchngvi.metrics.matrix_free import MatrixFree
from torchngvi.metrics.nagvac import NAGVAC, PublishedNAGVAC
from torchngvi.metrics.preconditioner import Preconditioner
from torchngvi.metrics.quasi_newton import QuasiNewton
from torchngvi.metrics.recursive import Recursive
from torchngvi.metrics.site_newton import SiteNewton
from torchngvi.metrics.window import Window

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
