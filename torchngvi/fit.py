"""The front door under its short name; see `torchngvi.fitting`."""

from torchngvi.fitting.fit import fit

__all__ = ["fit"]
