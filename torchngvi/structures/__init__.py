"""Algebras of matrix patterns: only these files know which entries a matrix has."""

from torchngvi.structures.block_diagonal import UnequalBlocks, block_diagonal
from torchngvi.structures.blocks import Dense, EqualBlocks
from torchngvi.structures.diagonal import Diagonal
from torchngvi.structures.forest import Forest
from torchngvi.structures.full_algebra import FullAlgebra
from torchngvi.structures.groups import arrow, forest, nested
from torchngvi.structures.pattern import Pattern

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
