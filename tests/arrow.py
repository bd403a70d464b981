"""A pattern as a third party would write it: an arrow, every coordinate beside one common root coordinate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.structures import Pattern


@dataclass(frozen=True)
class ScalarArrow(Pattern):
    """L has a diagonal, and a full last row: (*batch, 2D - 1), the D diagonal entries before the D - 1 others."""

    dim: int

    @property
    def shape(self):
        return (2 * self.dim - 1,)

    @property
    def widest(self):
        return min(self.dim, 2)

    def positions(self):
        place = torch.arange(self.dim)
        return torch.cat([place, torch.full((self.dim - 1,), self.dim - 1)]), torch.cat([place, place[:-1]])

    def _parts(self, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Diagonal of the leaves, the root's, and the border."""
        diagonal, border = matrix.split([self.dim, self.dim - 1], -1)
        return diagonal[..., :-1], diagonal[..., -1:], border

    def mv(self, root, x):
        leaf, top, border = self._parts(root)
        return torch.cat([leaf * x[..., :-1], top * x[..., -1:] + (border * x[..., :-1]).sum(-1, keepdim=True)], -1)

    def tmv(self, root, x):
        leaf, top, border = self._parts(root)
        return torch.cat([leaf * x[..., :-1] + border * x[..., -1:], top * x[..., -1:]], -1)

    def solve(self, root, x):
        leaf, top, border = self._parts(root)
        y = x[..., :-1] / leaf
        return torch.cat([y, (x[..., -1:] - (border * y).sum(-1, keepdim=True)) / top], -1)

    def tsolve(self, root, x):
        leaf, top, border = self._parts(root)
        y = x[..., -1:] / top
        return torch.cat([(x[..., :-1] - border * y) / leaf, y], -1)

    def matmul(self, left, right):
        (a, s, b), (c, t, d) = self._parts(left), self._parts(right)
        return torch.cat([a * c, s * t, b * c + s * d], -1)

    def tmatmul(self, root, symmetric):
        (a, s, b), (p, t, k) = self._parts(root), self._parts(symmetric)
        return torch.cat([a * p + b * k, s * t, s * k], -1)

    def inverse(self, root):
        leaf, top, border = self._parts(root)
        return torch.cat([1 / leaf, 1 / top, -border / (leaf * top)], -1)

    def cholesky(self, symmetric):
        leaf, top, border = self._parts(symmetric)
        k = border / leaf.sqrt()
        root = torch.cat([leaf.sqrt(), (top - k.square().sum(-1, keepdim=True)).sqrt(), k], -1)
        ok = root.isfinite().all(-1) & (self._parts(root)[1][..., 0] > 0)
        return torch.where(ok[..., None], root, 1.0), ok

    def congruence(self, root, symmetric):
        (a, s, b), (p, t, k) = self._parts(root), self._parts(symmetric)
        top = s.square() * t + (2 * s * b * k + b.square() * p).sum(-1, keepdim=True)
        return torch.cat([a.square() * p, top, a * (b * p + s * k)], -1)

    def lower(self, left, right):
        both = (left * right).sum(-2)
        return torch.cat([both, (left[..., -1:] * right[..., :-1]).sum(-2)], -1)
