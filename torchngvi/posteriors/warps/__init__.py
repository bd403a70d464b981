"""Warps, monotone curves of one coordinate: what a `torchngvi.posteriors.Warped` bends each coordinate with."""

from torchngvi.posteriors.warps.warp import SinhArcsinh, Warp, YeoJohnson

__all__ = ["SinhArcsinh", "Warp", "YeoJohnson"]
