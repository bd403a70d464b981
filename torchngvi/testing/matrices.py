"""Random dense matrices in a pattern, and a pattern whose verbs are those of dense matrices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured
from torchngvi.testing.claims import DTYPE, matvec, normal


def mask(pattern: Pattern) -> Tensor:
    """Mark the entries that a symmetric matrix of the pattern has.

    >>> from torchngvi.structures import block_diagonal
    >>> mask(block_diagonal([1, 2])).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    rows, columns = (x.flatten() for x in pattern.positions())
    kept = torch.zeros(pattern.dim, pattern.dim, dtype=DTYPE)
    kept[rows, columns] = kept[columns, rows] = 1.0
    return kept


def root_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a lower triangular matrix of the pattern, with a diagonal between about 0.4 and 1.2.

    >>> from torchngvi.structures import Dense
    >>> torch.equal(root_in(Dense(3)), root_in(Dense(3)).tril())
    True
    """
    x = 0.4 * normal(*batch, pattern.dim, pattern.dim, seed=seed)
    lower = x.tril(-1) + torch.diag_embed(0.7 * torch.exp(0.6 * x.diagonal(dim1=-2, dim2=-1)))
    return lower * mask(pattern)


def symmetric_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a symmetric, indefinite matrix of the pattern.

    >>> from torchngvi.structures import Dense
    >>> torch.equal(symmetric_in(Dense(3)), symmetric_in(Dense(3)).mT)
    True
    """
    x = normal(*batch, pattern.dim, pattern.dim, seed=seed)
    return 0.5 * (x + x.mT) * mask(pattern)


def definite_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a positive definite matrix of the pattern, the square L Lᵀ of a root of it.

    >>> from torchngvi.structures import Dense
    >>> bool(torch.linalg.eigvalsh(definite_in(Dense(3))).min() > 0)
    True
    """
    root = root_in(pattern, batch, seed)
    return root @ root.mT


def definite(dim: int, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a positive definite curvature with every entry.

    >>> definite(3, (2,)).shape
    torch.Size([2, 3, 3])
    """
    x = normal(*batch, dim, dim, seed=seed)
    return x @ x.mT / dim + 0.3 * torch.eye(dim, dtype=DTYPE)


@dataclass(frozen=True)
class WrittenOut(Pattern):
    """An arrow, every coordinate beside the last one, whose verbs write their matrices out: slow, and plain to see.

    >>> WrittenOut(3).to_dense(torch.arange(1.0, 6.0)).tolist()
    [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [4.0, 5.0, 3.0]]
    """

    dim: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The trailing shape of a stored matrix, (2D - 1,): the D diagonal entries before the D - 1 others."""
        return (2 * self.dim - 1,)

    @property
    def widest(self) -> int:  # type: ignore[override]
        """The largest square is that of a coordinate and the last one."""
        return min(self.dim, 2)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return row and column of the diagonal entries, then of the last row."""
        place, last = torch.arange(self.dim), torch.full((self.dim - 1,), self.dim - 1)
        return torch.cat([place, last]), torch.cat([place, place[:-1]])

    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by the root, written out."""
        return matvec(self.to_dense(root), x)

    def tmv(self, root: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by the transposed root, written out."""
        return matvec(self.to_dense(root).mT, x)

    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """Solve L y = x by forward substitution with the root written out."""
        return torch.linalg.solve_triangular(self.to_dense(root), x[..., None], upper=False)[..., 0]

    def tsolve(self, root: Structured, x: Tensor) -> Tensor:
        """Solve Lᵀ y = x by backward substitution with the root written out."""
        return torch.linalg.solve_triangular(self.to_dense(root).mT, x[..., None], upper=True)[..., 0]

    def matmul(self, left: Structured, right: Structured) -> Structured:
        """Multiply two roots that are written out."""
        return self.from_dense(self.to_dense(left) @ self.to_dense(right))

    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """Keep the stored entries of Lᵀ A, which are on and below the diagonal."""
        return self.from_dense(self.to_dense(root).mT @ self.full(symmetric))

    def inverse(self, root: Structured) -> Structured:
        """Invert the root by forward substitution with it written out."""
        dense = self.to_dense(root)
        eye = torch.eye(self.dim, dtype=dense.dtype, device=dense.device)
        return self.from_dense(torch.linalg.solve_triangular(dense, eye.expand_as(dense), upper=False))

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Factor A = L Lᵀ, with the identity for L and False beside it where there is none."""
        factor, info = torch.linalg.cholesky_ex(self.full(symmetric))
        factor = self.from_dense(factor)
        ok = (info == 0) & self.is_finite(factor)
        return torch.where(ok[..., None], factor, self.eye(self.diagonal(factor))), ok

    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """Keep the stored entries of L A Lᵀ, written out."""
        dense = self.to_dense(root)
        return self.from_dense(dense @ self.full(symmetric) @ dense.mT)

    def lower(self, left: Tensor, right: Tensor) -> Structured:
        """Keep the stored entries of Σ_n left_n right_nᵀ, written out."""
        return self.from_dense(left.mT @ right)
