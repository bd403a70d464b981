"""Families of posteriors over the parameters of a network, one file each."""

from torchngvi.networks.families.base import Delta, Family
from torchngvi.networks.families.dense import Dense, Rows
from torchngvi.networks.families.diagonal import Diagonal
from torchngvi.networks.families.kronecker import Kronecker

__all__ = ["Delta", "Dense", "Diagonal", "Family", "Kronecker", "Rows"]
