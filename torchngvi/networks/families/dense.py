"""All weights of some parameters together: (C Cᵀ)⁻¹ = N (H + δ) with a dense H, for a last layer."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchngvi.errors import InputError
from torchngvi.networks.families.base import Family

_LARGEST = 2000  # weights, whose root costs 3e9 operations


class Dense(Family):
    """One normal over all weights of the family's parameters, with a full covariance: C Cᵀ = (N (H + δ))⁻¹.

    One wants it for the last layer of a network.  The running mean H is of whole outer products, of every label's own
    gradient, so that an observation of B labels has the rank B; for a linear layer under a softmax E[H] is the Hessian
    itself.  Memory is two squares of the number of weights, at most 2,000.

    Args:
        parameters, prior, start, num_data: as in :class:`Family`.

    Raises:
        InputError: for more weights than that.
    """

    single = True
    curvature: Tensor
    root: Tensor

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        prior: Mapping[str, float],
        start: Mapping[str, float],
        num_data: int,
    ) -> None:
        super().__init__(parameters, prior, start, num_data)
        self.sizes = [m.numel() for m in self.mean]
        if sum(self.sizes) > _LARGEST:
            raise InputError(
                f'structure="dense" is for {_LARGEST:,} weights at most; {", ".join(self.names[:4])} have '
                f'{sum(self.sizes):,}. Use "kronecker" or "diagonal", or name fewer parameters.'
            )
        square = self.mean[0].new_zeros(sum(self.sizes), sum(self.sizes))
        self.register_buffer("curvature", square)
        self.register_buffer("root", square.clone())  # lower, of the precision: C is its inverse, transposed

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    def _parts(self, vector: Tensor) -> list[Tensor]:
        return [part.view_as(m) for part, m in zip(vector.split(self.sizes), self.mean, strict=True)]

    def _each_weight(self, values: list[float]) -> Tensor:
        pairs = zip(self.mean, values, strict=True)
        return torch.cat([m.new_full((m.numel(),), value, dtype=torch.float64) for m, value in pairs])

    def follow_(self) -> None:
        """Move to the device of the parameters, which is one."""
        if self.curvature.device != self.parameters_of_network[0].device:
            self.to(self.parameters_of_network[0].device)

    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Return L⁻ᵀ ε, L the root of the precision."""
        e = self._flat(noise)[:, None]
        return self._parts(torch.linalg.solve_triangular(self.root.mT, e, upper=True)[:, 0])

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return Lᵀ dm."""
        return self._parts(self.root.mT @ self._flat(moves))

    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return N (L Lᵀ)⁻¹ g."""
        return self._parts(self.num_data * torch.cholesky_solve(self._flat(gradients)[:, None], self.root)[:, 0])

    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return scale/B Σᵢ gᵢgᵢᵀ of gradients that have the labels first; nothing if a part of them is frozen."""
        known = [g.flatten(1) for g in gradients if g is not None]
        if len(known) < len(gradients):
            return [None]
        each = torch.cat(known, 1)
        return [scale / len(each) * (each.mT @ each)]

    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move the running mean."""
        if statistics[0] is not None:
            self.curvature.lerp_(statistics[0], rate if isinstance(rate, float) else rate.to(self.curvature))

    def refresh_(self, weight: float) -> None:
        """Make L from H + δ, scaled to the diagonal (H + δ)^(1-w) (h₀ + δ)^w that single weights would have."""
        delta, start = self._each_weight(self.prior), self._each_weight(self.start)
        precision = self.curvature.to(torch.float64, copy=True)
        precision.diagonal().add_(delta)
        scale = ((start + delta) / precision.diagonal()).pow(0.5 * weight)
        precision *= self.num_data * scale * scale[:, None]
        self.root.copy_(torch.linalg.cholesky_ex(precision)[0])

    def variances(self) -> list[Tensor]:
        """Return the diagonal of (L Lᵀ)⁻¹, one tensor a parameter."""
        return self._parts(torch.cholesky_inverse(self.root).diagonal())

    def log_det(self) -> Tensor:
        """Return -2 Σ log L_jj."""
        return -2 * self.root.diagonal().log().sum()
