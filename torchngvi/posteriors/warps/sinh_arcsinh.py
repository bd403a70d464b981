"""The sinh-arcsinh curves of Jones and Pewsey (2009): both tails, light or heavy, and skewness."""

from typing import final

import torch
from torch import Tensor

from torchngvi.posteriors.warps.warp import Warp


@final
class SinhArcsinh(Warp):
    """u = sinh(δ asinh ξ + ε), φ = (ε, log δ): ε > 0 skews to the right, δ > 1 makes both tails heavier than normal.

    (Jones and Pewsey 2009, Biometrika 96, with ε and δ of the inverse curve.)  The first choice, for a
    `torchngvi.posteriors.Warped` has it by default.

    >>> warp = SinhArcsinh()
    >>> warp.forward(torch.ones(1), torch.zeros(1, 2)).item()  # the identity
    1.0
    """

    parameters, names = 2, ("epsilon", "log_delta")

    def curve(self, xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u and log u' = log cosh(δ asinh ξ + ε) + log δ - ½ log(1 + ξ²)."""
        log_delta = phi[..., 1]
        inner = log_delta.exp() * torch.asinh(xi) + phi[..., 0]
        return torch.sinh(inner), _log_cosh(inner) + log_delta - 0.5 * torch.log1p(xi.square())

    def curve_inverse(self, u: Tensor, phi: Tensor) -> Tensor:
        """Compute ξ = sinh((asinh u - ε)/δ)."""
        return torch.sinh((torch.asinh(u) - phi[..., 0]) * (-phi[..., 1]).exp())

    def bend(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute δ tanh(δ asinh ξ + ε)/√(1 + ξ²) - ξ/(1 + ξ²)."""
        delta, square = phi[..., 1].exp(), 1 + xi.square()
        return delta * torch.tanh(delta * torch.asinh(xi) + phi[..., 0]) * square.rsqrt() - xi / square


def _log_cosh(x: Tensor) -> Tensor:
    """log cosh x, for any x, smooth at 0: log((1 + e^-2x)/2) + x on the right, and its mirror image."""
    size = torch.where(x < 0, -x, x)
    return size + torch.log1p(torch.expm1(-2 * size) / 2)
