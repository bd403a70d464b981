"""The inverse of the power curves of Yeo and Johnson (2000): skewness in one number."""

from typing import final

import torch
from torch import Tensor

from torchngvi.posteriors.warps.warp import Warp


@final
class YeoJohnson(Warp):
    """u = (1 + λξ)^(1/λ) - 1 on the right of 0, 1 - (1 - (2 - λ)ξ)^(1/(2-λ)) on its left, λ = 2/(1 + e^-φ).

    θ so warped is what the transform of Yeo and Johnson (2000, Biometrika 87) with that λ makes normal: φ < 0 skews to
    the right.  One number a coordinate, for skewness alone; its second derivative jumps at 0.

    >>> warp = YeoJohnson()
    >>> round(warp.forward(torch.ones(1), torch.zeros(1, 1)).item(), 6)  # the identity
    1.0
    """

    parameters, names = 1, ("phi",)

    def curve(self, xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u and log u' = (1/λ - 1) log(1 + λξ), or (1/(2-λ) - 1) log(1 - (2-λ)ξ)."""
        right, power, log_base, _ = _side(xi, phi)
        size = torch.expm1(log_base / power)
        return torch.where(right, size, -size), (1 / power - 1) * log_base

    def curve_inverse(self, u: Tensor, phi: Tensor) -> Tensor:
        """Compute ((1 + u)^λ - 1)/λ, or (1 - (1 - u)^(2-λ))/(2 - λ)."""
        right, power, *_ = _side(u, phi)
        size = torch.expm1(power * torch.log1p(torch.where(right, u, -u))) / power
        return torch.where(right, size, -size)

    def bend(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute (1 - λ)/(1 + λξ) on both sides, with 2 - λ and -ξ on the left, where its sign turns."""
        right, power, log_base, _ = _side(xi, phi)
        size = (1 - power) * (-log_base).exp()
        return torch.where(right, size, -size)


def _side(xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which side of 0, the power λ or 2 - λ there, log(1 + power |ξ|), and |ξ|."""
    right = xi >= 0
    power = torch.where(right, 2 * torch.sigmoid(phi[..., 0]), 2 * torch.sigmoid(-phi[..., 0]))
    size = torch.where(right, xi, -xi)
    return right, power, torch.log1p(power * size), size
