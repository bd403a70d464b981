"""Criteria that end a stochastic run; see `torchngvi.fitting` for all of them."""

from torchngvi.fitting.slope import SlopeBelow, SlopeStop

__all__ = ["SlopeBelow", "SlopeStop"]
