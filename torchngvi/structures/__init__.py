"""Algebras of matrix patterns: which entries the matrices of a posterior have, and how products with them are computed.

`Dense`, `Diagonal` and `block_diagonal(sizes)` are the patterns of a full covariance, of a mean field and of
independent blocks; `Pattern` is the contract for others.  No file outside of this folder knows which entries a matrix
has.
"""

import sys

from torchngvi.structures.blocks import Dense, Diagonal, EqualBlocks, FullAlgebra, UnequalBlocks, block_diagonal
from torchngvi.structures.forest import Forest, arrow, forest, nested
from torchngvi.structures.pattern import Pattern

# the path in pickles of 0.2; no row of torchngvi.renamed, since what is imported there would hide the function
sys.modules[f"{__name__}.block_diagonal"] = sys.modules[f"{__name__}.blocks"]

__all__ = [
    "Dense",
    "Diagonal",
    "EqualBlocks",
    "Forest",
    "FullAlgebra",
    "Pattern",
    "UnequalBlocks",
    "arrow",
    "block_diagonal",
    "forest",
    "nested",
]
