"""What stands in the place of the inverse Fisher matrix, one file each."""

from torchngvi.ifvb.preconditioners.adam import Adam
from torchngvi.ifvb.preconditioners.base import Preconditioner
from torchngvi.ifvb.preconditioners.batch_fisher import BatchFisher
from torchngvi.ifvb.preconditioners.blocks import Blocks
from torchngvi.ifvb.preconditioners.exact import Exact
from torchngvi.ifvb.preconditioners.identity import Identity
from torchngvi.ifvb.preconditioners.matrix_free import MatrixFree
from torchngvi.ifvb.preconditioners.nagvac import NAGVAC, PublishedNAGVAC
from torchngvi.ifvb.preconditioners.recursive import Recursive
from torchngvi.ifvb.preconditioners.window import Window

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
    "Recursive",
    "Window",
]
