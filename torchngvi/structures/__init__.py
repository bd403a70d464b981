"""Algebras of matrix patterns: only these files know which entries a matrix has."""

from torchngvi.structures.dense import Dense
from torchngvi.structures.diagonal import Diagonal

__all__ = ["Dense", "Diagonal"]
