"""Families of posteriors over the parameters of a network, one file each."""

from torchngvi.networks.families.base import Family, Scales
from torchngvi.networks.families.diagonal import Diagonal

__all__ = ["Diagonal", "Family", "Scales"]
