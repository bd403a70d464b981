"""Warps, monotone curves of one coordinate: what a `torchngvi.posteriors.Warped` bends each coordinate with."""

from torchngvi.posteriors.warps.sinh_arcsinh import SinhArcsinh
from torchngvi.posteriors.warps.warp import Warp
from torchngvi.posteriors.warps.yeo_johnson import YeoJohnson

__all__ = ["SinhArcsinh", "Warp", "YeoJohnson"]
