"""Diagonal matrices: the algebra of a mean field, without a square anywhere."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.numerics import sparse
from torchngvi.structures.full_algebra import FullAlgebra
from torchngvi.structures.pattern import Structured


@dataclass(frozen=True)
class Diagonal(FullAlgebra):
    """The diagonal only, stored as (*batch, D): a mean field.

    >>> Diagonal(2).mv(torch.tensor([2.0, 3.0]), torch.ones(4, 2))[0].tolist()
    [2.0, 3.0]
    """

    dim: int
    widest = 1

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """(D,)."""
        return (self.dim,)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Row and column of every entry."""
        return torch.arange(self.dim), torch.arange(self.dim)

    @property
    def parameters(self) -> int:
        """D."""
        return self.dim

    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """L x."""
        return root * x

    tmv = mv

    def smv(self, symmetric: Structured, x: Tensor) -> Tensor:
        """A x."""
        return symmetric * x

    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """L⁻¹ x."""
        return x / root

    tsolve = solve

    def matmul(self, left: Structured, right: Structured) -> Structured:
        """A B."""
        return left * right

    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """L A."""
        return root * symmetric

    def inverse(self, root: Structured) -> Structured:
        """L⁻¹."""
        return root.reciprocal()

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """The square root, and for which members it exists."""
        ok = ((symmetric > 0) & torch.isfinite(symmetric)).all(-1)
        return torch.where(ok[..., None], symmetric, 1.0).sqrt(), ok

    reverse_cholesky = cholesky

    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """L A Lᵀ."""
        return root.square() * symmetric

    def lower(self, left: Tensor, right: Tensor) -> Structured:
        """The diagonal of Σ_n left_n right_nᵀ."""
        return (left * right).sum(-2)

    sym_lower = lower

    def transpose(self, matrix: Structured) -> Structured:
        """Aᵀ."""
        return matrix

    tril = one_sided = diagonal = transpose

    def exp(self, symmetric: Structured) -> Structured:
        """The matrix exponential."""
        return symmetric.exp()

    def right_solve(self, matrix: Structured, root: Structured) -> Structured:
        """A L⁻¹."""
        return matrix / root

    def lower_root(self, matrix: Structured) -> Structured:
        """L with L Lᵀ = A Aᵀ."""
        return matrix

    def unconjugate(self, root: Structured, vector: Tensor, matrix: Structured) -> tuple[Tensor, Structured]:
        """L⁻ᵀ a and L⁻ᵀ W L⁻¹."""
        return vector / root, matrix / root.square()

    # what the pattern derives, without an index

    def eye(self, like: Tensor) -> Structured:
        """Ones."""
        return torch.ones_like(like)

    def with_diagonal(self, matrix: Structured, new: Tensor) -> Structured:
        """The new diagonal."""
        return new

    def from_dense(self, matrix: Tensor) -> Structured:
        """The diagonal of a matrix."""
        return matrix.diagonal(dim1=-2, dim2=-1)

    def to_dense(self, root: Structured) -> Tensor:
        """Written out, (*batch, D, D)."""
        return torch.diag_embed(root)

    def full(self, symmetric: Structured) -> Tensor:
        """Written out, (*batch, D, D)."""
        return torch.diag_embed(symmetric)

    def tril_half(self, symmetric: Structured) -> Structured:
        """½ A."""
        return 0.5 * symmetric

    def flat(self, symmetric: Structured) -> Tensor:
        """√½ A."""
        return symmetric * 0.5**0.5

    def unflat(self, vector: Tensor) -> Structured:
        """√2 times the vector."""
        return vector * 2**0.5

    def norm2(self, symmetric: Structured) -> Tensor:
        """‖A‖²_F, (*batch,)."""
        return self.total(symmetric.square().sum(-1))

    def neighbours(self, x: Tensor) -> Tensor:
        """Each coordinate has none but itself."""
        return x

    def rows(self, rows: Tensor, root: Structured, transposed: bool = False) -> Tensor:
        """X L, (*batch, N, D)."""
        return rows * root[..., None, :]

    def row_norms(self, root: Structured, transposed: bool = False) -> Tensor:
        """The squares."""
        return root.square()

    def scale_columns(self, root: Structured, factors: Tensor) -> Structured:
        """L diag(s)."""
        return root * factors

    def positive_root(self, root: Structured) -> tuple[Structured, Tensor]:
        """The positive root, and where it is finite and regular."""
        return root.abs(), ((root != 0) & torch.isfinite(root)).all(-1)

    def gram(self, root: Structured, weights: Tensor, transposed: bool = False) -> Structured:
        """Cᵀ diag(w) C."""
        return root.square() * weights

    def conjugate(self, root: Structured, dense: Tensor, transposed: bool = False) -> Structured:
        """The diagonal of Cᵀ H C."""
        return root.square() * dense.diagonal(dim1=-2, dim2=-1)

    def sparse_gram(self, root: Structured, rows: Tensor, weights: Tensor, transposed: bool = False) -> Structured:
        """The diagonal of Cᵀ Xᵀ diag(b) X C, without a D x D matrix."""
        return root.square() * (sparse.square(rows).mT @ weights)

    def sparse_row_norms(self, root: Structured, rows: Tensor, transposed: bool = False) -> Tensor:
        """‖Cᵀx_n‖², (N,)."""
        return sparse.square(rows) @ root.square()
