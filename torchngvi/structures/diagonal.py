"""Diagonal matrices: the algebra of a mean field, without a square anywhere."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.numerics import sparse
from torchngvi.structures.blocks import FullAlgebra
from torchngvi.structures.pattern import Structured


@dataclass(frozen=True)
class Diagonal(FullAlgebra):
    """Diagonal matrices, stored as their diagonals (*batch, D): the pattern of a mean field.

        σ = σ₀ ((h + δ)/(h₀ + δ))^(-(1 - w)/2),   σ₀² = 1/(N (h₀ + δ)),

    Every operation is elementwise, and no square is ever formed.

    Args:
        dim: D.

    >>> Diagonal(2).mv(torch.tensor([2.0, 3.0]), torch.ones(4, 2))[0].tolist()
    [2.0, 3.0]
    """

    dim: int

    def __post_init__(self) -> None:
        read_size("dim", self.dim, "is the number of coordinates")

    widest = 1

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The trailing shape of a stored matrix, (D,)."""
        return (self.dim,)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return row and column of every entry, which are the same."""
        return torch.arange(self.dim, device="cpu"), torch.arange(self.dim, device="cpu")

    @property
    def parameters(self) -> int:
        """The number of free entries of a root, D."""
        return self.dim

    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by a diagonal matrix, elementwise."""
        return root * x

    tmv = mv

    def smv(self, symmetric: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by a diagonal matrix, elementwise."""
        return symmetric * x

    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """Divide vectors by the diagonal, elementwise."""
        return x / root

    tsolve = solve

    def matmul(self, left: Structured, right: Structured) -> Structured:
        """Multiply the two diagonals, entry by entry."""
        return left * right

    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """Multiply the two diagonals, entry by entry."""
        return root * symmetric

    def inverse(self, root: Structured) -> Structured:
        """Take the reciprocals of the diagonal."""
        return root.reciprocal()

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Take the square roots of the diagonal, and say for which members all entries are positive and finite."""
        ok = ((symmetric > 0) & torch.isfinite(symmetric)).all(-1)
        return torch.where(ok[..., None], symmetric, 1.0).sqrt(), ok

    reverse_cholesky = cholesky

    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """Compute L A Lᵀ, whose diagonal is L_ii² A_ii."""
        return root.square() * symmetric

    def lower(self, left: Tensor, right: Tensor) -> Structured:
        """Keep the diagonal of Σ_n left_n right_nᵀ."""
        return (left * right).sum(-2)

    sym_lower = lower

    def transpose(self, matrix: Structured) -> Structured:
        """Return the matrix itself, which is its own transpose."""
        return matrix

    tril = one_sided = diagonal = transpose

    def exp(self, symmetric: Structured) -> Structured:
        """Compute the matrix exponential, which is that of each diagonal entry."""
        return symmetric.exp()

    def right_solve(self, matrix: Structured, root: Structured) -> Structured:
        """Divide the one diagonal by the other, elementwise."""
        return matrix / root

    def lower_root(self, matrix: Structured) -> Structured:
        """Return the matrix itself, which is lower triangular already."""
        return matrix

    def unconjugate(self, root: Structured, vector: Tensor, matrix: Structured) -> tuple[Tensor, Structured]:
        """Divide the vector by the root, and the matrix by its square, elementwise."""
        return vector / root, matrix / root.square()

    # what the pattern derives, without an index

    def eye(self, like: Tensor) -> Structured:
        """Make the identity, whose diagonal is one everywhere."""
        return torch.ones_like(like)

    def with_diagonal(self, matrix: Structured, new: Tensor) -> Structured:
        """Return the new diagonal, since there is nothing beside it."""
        return new

    def from_dense(self, matrix: Tensor) -> Structured:
        """Keep the diagonal of a matrix that is written out."""
        return matrix.diagonal(dim1=-2, dim2=-1)

    def to_dense(self, root: Structured) -> Tensor:
        """Write the matrix out with its zeros, (*batch, D, D)."""
        return torch.diag_embed(root)

    def full(self, symmetric: Structured) -> Tensor:
        """Write the matrix out with its zeros, (*batch, D, D)."""
        return torch.diag_embed(symmetric)

    def tril_half(self, symmetric: Structured) -> Structured:
        """Halve the diagonal, which is tril½ of it."""
        return 0.5 * symmetric

    def flat(self, symmetric: Structured) -> Tensor:
        """Multiply the diagonal by √½, so that the dot product of two such vectors is ½⟨A, A'⟩_F."""
        return symmetric * 0.5**0.5

    def unflat(self, vector: Tensor) -> Structured:
        """Multiply the vector by √2, which is the inverse of `flat`."""
        return vector * 2**0.5

    def norm2(self, symmetric: Structured) -> Tensor:
        """Compute the squared Frobenius norm ‖A‖²_F, (*batch,)."""
        return self.total(symmetric.square().sum(-1))

    def neighbours(self, x: Tensor) -> Tensor:
        """Return the vector itself, since no coordinate has a neighbour but itself."""
        return x

    def rows(self, rows: Tensor, root: Structured, transposed: bool = False) -> Tensor:
        """Multiply each column of a design by its entry of the root: X L, (*batch, N, D)."""
        return rows * root[..., None, :]

    def row_norms(self, root: Structured, transposed: bool = False) -> Tensor:
        """Square the diagonal, which gives diag(L Lᵀ), (*batch, D)."""
        return root.square()

    def scale_columns(self, root: Structured, factors: Tensor) -> Structured:
        """Multiply the root by the factors, elementwise."""
        return root * factors

    def positive_root(self, root: Structured) -> tuple[Structured, Tensor]:
        """Take absolute values, and say for which members the root is finite and regular."""
        positive = root.abs()
        return positive, ((positive > 0) & (positive < torch.inf)).all(-1)

    def gram(self, root: Structured, weights: Tensor, transposed: bool = False) -> Structured:
        """Compute Cᵀ diag(w) C, whose diagonal is C_ii² w_i."""
        return root.square() * weights

    def conjugate(self, root: Structured, dense: Tensor, transposed: bool = False) -> Structured:
        """Keep the diagonal of Cᵀ H C, which is C_ii² H_ii."""
        return root.square() * dense.diagonal(dim1=-2, dim2=-1)

    def sparse_gram(self, root: Structured, rows: Tensor, weights: Tensor, transposed: bool = False) -> Structured:
        """Keep the diagonal of Cᵀ Xᵀ diag(b) X C, without a D x D matrix on the way."""
        return root.square() * (sparse.square(rows).mT @ weights)

    def sparse_row_norms(self, root: Structured, rows: Tensor, transposed: bool = False) -> Tensor:
        """Compute ‖Cᵀx_n‖² for sparse rows, (N,), without a D x D matrix on the way."""
        return sparse.square(rows) @ root.square()
