"""Weights together: (C Cᵀ)⁻¹ = N (H + δ) with a dense H, of a whole last layer or of each of its rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.networks.families.base import Delta, Family

LARGEST = 2000  # weights, whose root costs 3e9 operations
_MOST = 50_000_000  # numbers in the blocks of rows: 200 MB in single precision, twice


class Dense(Family):
    """One normal over all weights of the family's parameters, with a full covariance: C Cᵀ = (N (H + δ))⁻¹.

    It is for the last layer of a network.  The running mean H is of whole outer products, of every label's own
    gradient, so that an observation of B labels has the rank B; for a linear layer under a softmax E[H] is the Hessian
    itself.  Memory is two squares of the number of weights, at most 2,000; an `InputError` refuses more.  For the
    arguments see :class:`Family`.
    """

    single = True
    curvature: Tensor
    root: Tensor

    def lay_out_(self) -> None:
        """Register the curvature 0, and L."""
        shape = self._laid_out()
        self.register_buffer("curvature", self.mean[0].new_zeros(shape))
        # lower, of the precision: C is its inverse, transposed
        self.register_buffer("root", self.mean[0].new_zeros(shape), persistent=False)

    def _laid_out(self) -> tuple[int, ...]:
        """Find the numbers of weights of the parameters in a block, after a check; the shape of all blocks."""
        self.sizes = [m.numel() for m in self.mean]
        width = sum(self.sizes)
        if width > LARGEST:
            raise InputError(
                f'structure="dense" is for {LARGEST:,} weights at most; {", ".join(self.names[:4])} have '
                f'{width:,}. Use "rows", "kronecker" or "diagonal", or name fewer parameters.'
            )
        return width, width

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        """The vectors of weights that depend on one another, (..., D)."""
        return super().vector(tensors)

    def _parts(self, vectors: Tensor) -> list[Tensor]:
        """Their parameters."""
        return [part.view_as(m) for part, m in zip(vectors.split(self.sizes, -1), self.mean, strict=True)]

    def _each_weight(self, values: Sequence[Delta]) -> Tensor:
        pairs = zip(self.mean, values, strict=True)
        return self._flat([torch.zeros_like(m, dtype=torch.float64) + value for m, value in pairs])

    def follow_(self) -> None:
        """Move to the device of the parameters, which is one."""
        if self.curvature.device != self.parameters_of_network[0].device:
            self.to(self.parameters_of_network[0].device)

    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Return L⁻ᵀ ε, L the root of the precision."""
        e = self._flat(noise)[..., None]
        return self._parts(torch.linalg.solve_triangular(self.root.mT, e, upper=True)[..., 0])

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return Lᵀ dm."""
        return self._parts((self.root.mT @ self._flat(moves)[..., None])[..., 0])

    def _squared_length(self, moves: list[Tensor]) -> Tensor:
        """N dmᵀ(H + δ)dm, without the bound that is in L."""
        flat = self._flat(moves)
        curved = (flat * (self.curvature @ flat[..., None])[..., 0]).sum()
        prior = torch.stack([(move * move * delta).sum() for move, delta in zip(moves, self.prior, strict=True)])
        return self.num_data * (curved + prior.sum())

    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return N (L Lᵀ)⁻¹ g."""
        found = torch.cholesky_solve(self._flat(gradients)[..., None], self.root)
        return self._parts(self.num_data * found[..., 0])

    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return scale/B Σᵢ gᵢgᵢᵀ of gradients that have the labels first; nothing if a part of them is frozen."""
        known = [g for g in gradients if g is not None]
        if len(known) < len(gradients):
            return [None]
        each = torch.vmap(lambda *g: self._flat(list(g)))(*known)  # (B, ..., D)
        rows = each.movedim(0, -2)
        return [scale / len(each) * (rows.mT @ rows)]

    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move the running mean."""
        if statistics[0] is not None:
            self.curvature.lerp_(statistics[0], rate if isinstance(rate, float) else rate.to(self.curvature))

    def refresh_(self) -> None:
        """Make L from H + δ, with max(H, h₀) on the diagonal of H in training."""
        precision = self.curvature.to(torch.float64, copy=True)
        diagonal = precision.diagonal(dim1=-2, dim2=-1)
        if self.bounded:
            diagonal.clamp_(min=self._each_weight(self.start))
        diagonal.add_(self._each_weight(self.prior))
        self.root.copy_(lower_root(precision.mul_(self.num_data), torch.finfo(self.curvature.dtype).eps))

    def variances(self) -> list[Tensor]:
        """Return the diagonal of (L Lᵀ)⁻¹, one tensor a parameter."""
        return self._parts(torch.cholesky_inverse(self.root).diagonal(dim1=-2, dim2=-1))

    def precisions(self) -> list[Tensor]:
        """Return N (H_jj + δ), without the start, one tensor a parameter."""
        each = zip(self._parts(self.curvature.diagonal(dim1=-2, dim2=-1)), self.prior, strict=True)
        return [self.num_data * (h + delta) for h, delta in each]

    def log_det(self) -> Tensor:
        """Return -2 Σ log L_jj."""
        return -2 * self.root.diagonal(dim1=-2, dim2=-1).log().sum()

    def vector(self, tensors: list[Tensor]) -> Tensor:
        """Return one vector of the numbers, block after block."""
        return self._flat(tensors).flatten()

    def blocks(self) -> list[Tensor]:
        """Return the lower roots of (L Lᵀ)⁻¹."""
        root = torch.linalg.cholesky(torch.cholesky_inverse(self.root.double())).to(self.root)
        return [root.view(-1, *root.shape[-2:])]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load the curvature; of release 0.2 that of the stored root, which is what its q had."""
        root = state_dict.pop(f"{prefix}root", None)
        if isinstance(root, Tensor):
            precision = root.cpu().double() @ root.mT.cpu().double() / self.num_data
            precision.diagonal(dim1=-2, dim2=-1).sub_(self._each_weight(self.prior).cpu())
            state_dict[f"{prefix}curvature"] = precision
        super()._load_from_state_dict(state_dict, prefix, *others)


class Rows(Dense):
    """One normal for each row of a layer, the weights into one unit with its bias, with a full covariance of each.

    It is for a last layer of many classes: the covariance of the classes with one another is left out, and the
    C blocks have d² numbers each instead of (C d)² in all.  Each block is the block of the dense H.  An `InputError`
    refuses parameters of different numbers of rows, and more weights than a block can have.
    """

    def _laid_out(self) -> tuple[int, ...]:
        counts = {name: len(m) if m.ndim else 1 for name, m in zip(self.names, self.mean, strict=True)}
        if len(set(counts.values())) > 1:
            rows = ", ".join(f"{name} has {count}" for name, count in list(counts.items())[:4])
            raise InputError(f'structure="rows" is for one layer, whose parameters have the same rows; {rows}.')
        self.rows = counts[self.names[0]]
        self.sizes = [m.numel() // self.rows for m in self.mean]
        width = sum(self.sizes)
        if width > LARGEST or self.rows * width**2 > _MOST:
            raise InputError(
                f'structure="rows" is for {LARGEST:,} weights a row and {_MOST:,} numbers in the blocks at '
                f'most; {", ".join(self.names[:4])} have {width:,} and {self.rows * width**2:,}. Use "kronecker" or '
                '"diagonal".'
            )
        return self.rows, width, width

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(self.rows, -1) for tensor in tensors], 1)


def lower_root(
    precision: Tensor,  # (..., D, D), overwritten
    rounding: float,
) -> Tensor:
    """Return the lower root; where rounding has left a matrix indefinite, of one with a diagonal D times it larger.

    A running mean in single precision is positive semidefinite only up to rounding, Σⱼₖ|vⱼvₖ|√(HⱼⱼHₖₖ) times it along
    v, which is more than δ where features are large and data many.
    """
    root, failed = torch.linalg.cholesky_ex(precision)
    if failed.device.type == "cpu" and not failed.any():
        return root
    precision.diagonal(dim1=-2, dim2=-1).mul_(1 + precision.shape[-1] * rounding)
    return torch.where((failed > 0)[..., None, None], torch.linalg.cholesky_ex(precision)[0], root)
