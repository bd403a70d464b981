"""The arrow: every coordinate beside one common root coordinate, the last."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.structures.pattern import Pattern, Structured


@dataclass(frozen=True)
class ScalarArrow(Pattern):
    """L has a diagonal and a full last row: (*batch, 2D - 1), the D diagonal entries before the D - 1 others."""

    dim: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape (2D - 1,) of a stored matrix."""
        return (2 * self.dim - 1,)

    @property
    def widest(self) -> int:  # type: ignore[override]
        """The largest set of coordinates that depend on one another directly: a leaf and the root, two."""
        return min(self.dim, 2)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of the stored entries: those of the diagonal, then those of the last row."""
        place = torch.arange(self.dim)
        return torch.cat([place, torch.full((self.dim - 1,), self.dim - 1)]), torch.cat([place, place[:-1]])

    def _parts(self, matrix: Structured) -> tuple[Tensor, Tensor, Tensor]:
        """The diagonal of the leaves, that of the root, and the border."""
        diagonal, border = matrix.split([self.dim, self.dim - 1], -1)
        return diagonal[..., :-1], diagonal[..., -1:], border

    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """The product L x."""
        leaf, top, border = self._parts(root)
        return torch.cat([leaf * x[..., :-1], top * x[..., -1:] + (border * x[..., :-1]).sum(-1, keepdim=True)], -1)

    def tmv(self, root: Structured, x: Tensor) -> Tensor:
        """The product Lᵀ x."""
        leaf, top, border = self._parts(root)
        return torch.cat([leaf * x[..., :-1] + border * x[..., -1:], top * x[..., -1:]], -1)

    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """The solution of L y = x."""
        leaf, top, border = self._parts(root)
        y = x[..., :-1] / leaf
        return torch.cat([y, (x[..., -1:] - (border * y).sum(-1, keepdim=True)) / top], -1)

    def tsolve(self, root: Structured, x: Tensor) -> Tensor:
        """The solution of Lᵀ y = x."""
        leaf, top, border = self._parts(root)
        y = x[..., -1:] / top
        return torch.cat([(x[..., :-1] - border * y) / leaf, y], -1)

    def matmul(self, left: Structured, right: Structured) -> Structured:
        """The product L M of two lower-triangular matrices."""
        (a, s, b), (c, t, d) = self._parts(left), self._parts(right)
        return torch.cat([a * c, s * t, b * c + s * d], -1)

    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """The stored entries of Lᵀ A, A symmetric."""
        (a, s, b), (p, t, k) = self._parts(root), self._parts(symmetric)
        return torch.cat([a * p + b * k, s * t, s * k], -1)

    def inverse(self, root: Structured) -> Structured:
        """The inverse L⁻¹, which has the same pattern."""
        leaf, top, border = self._parts(root)
        return torch.cat([1 / leaf, 1 / top, -border / (leaf * top)], -1)

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """The factor L with A = L Lᵀ, and the mask of the members where it exists."""
        leaf, top, border = self._parts(symmetric)
        k = border / leaf.sqrt()
        root = torch.cat([leaf.sqrt(), (top - k.square().sum(-1, keepdim=True)).sqrt(), k], -1)
        ok = root.isfinite().all(-1) & (self._parts(root)[1][..., 0] > 0)
        return torch.where(ok[..., None], root, 1.0), ok

    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """The symmetric matrix L A Lᵀ."""
        (a, s, b), (p, t, k) = self._parts(root), self._parts(symmetric)
        top = s.square() * t + (2 * s * b * k + b.square() * p).sum(-1, keepdim=True)
        return torch.cat([a.square() * p, top, a * (b * p + s * k)], -1)

    def lower(self, left: Tensor, right: Tensor) -> Structured:
        """The stored entries of the sum of outer products Σ l rᵀ."""
        return torch.cat([(left * right).sum(-2), (left[..., -1:] * right[..., :-1]).sum(-2)], -1)
