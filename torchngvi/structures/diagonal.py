"""Diagonal matrices: the algebra of a mean-field posterior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi import sparse


@dataclass(frozen=True)
class Diagonal:
    """The pattern with the diagonal only, stored as (*batch, D); the verbs are Dense's.

    >>> Diagonal().mv(torch.tensor([2.0, 3.0]), torch.ones(4, 2))[0].tolist()
    [2.0, 3.0]
    """

    rank = 1  # trailing dimensions of a stored matrix

    def eye(self, like: Tensor) -> Tensor:
        """The identity for vectors such as ``like`` (*batch, D)."""
        return torch.ones_like(like)

    def from_dense(self, matrix: Tensor) -> Tensor:
        """Keep the entries of the pattern."""
        return matrix.diagonal(dim1=-2, dim2=-1)

    def to_dense(self, matrix: Tensor) -> Tensor:
        """Write the stored matrix out as (*batch, D, D)."""
        return torch.diag_embed(matrix)

    def diagonal(self, matrix: Tensor) -> Tensor:
        """The diagonal (*batch, D)."""
        return matrix

    def scaled(self, factor: Tensor, matrix: Tensor) -> Tensor:
        """One factor (*batch,) a member times its matrix."""
        return factor[..., None] * matrix

    def transpose(self, matrix: Tensor) -> Tensor:
        """Aᵀ."""
        return matrix

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """A B."""
        return left * right

    def mv(
        self,
        matrix: Tensor,  # (*batch, D)
        vector: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """A x, for samples on the left of the batch."""
        return matrix * vector

    def rows(
        self,
        rows: Tensor,  # (N, D) or (*batch, N, D)
        matrix: Tensor,
    ) -> Tensor:
        """X A, (*batch, N, D)."""
        return rows * matrix[..., None, :]

    def row_norms(self, matrix: Tensor) -> Tensor:
        """diag(A Aᵀ), (*batch, D)."""
        return matrix.square()

    def outer(
        self,
        left: Tensor,  # (*batch, N, D)
        right: Tensor,  # (*batch, N, D)
    ) -> Tensor:
        """Π(Σ_n left_n right_nᵀ)."""
        return (left * right).sum(-2)

    def conjugate(
        self,
        root: Tensor,
        dense: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """Π(Cᵀ H C) of a dense H."""
        return root.square() * dense.diagonal(dim1=-2, dim2=-1)

    def gram(
        self,
        root: Tensor,
        weights: Tensor,  # broadcasts to (*batch, D)
    ) -> Tensor:
        """Π(Cᵀ diag(w) C)."""
        return root.square() * weights

    def sparse_gram(
        self,
        root: Tensor,
        rows: Tensor,  # X, (N, D) sparse CSR
        weights: Tensor,  # b, (N,)
    ) -> Tensor:
        """Π(Cᵀ Xᵀ diag(b) X C), without a D x D matrix."""
        return root.square() * (sparse.square(rows).mT @ weights)

    def sparse_row_norms(
        self,
        root: Tensor,
        rows: Tensor,  # X, (N, D) sparse CSR
    ) -> Tensor:
        """‖Cᵀx_n‖², (N,)."""
        return sparse.square(rows) @ root.square()

    def symmetric_part(self, matrix: Tensor) -> Tensor:
        """(A + Aᵀ)/2."""
        return matrix

    def one_sided(self, matrix: Tensor) -> Tensor:
        """tril½[A] + tril½[A]ᵀ."""
        return matrix

    def tril_half(self, matrix: Tensor) -> Tensor:
        """tril½[A]."""
        return 0.5 * matrix

    def tril(self, matrix: Tensor) -> Tensor:
        """The lower part, diagonal included."""
        return matrix

    def exp(self, matrix: Tensor) -> Tensor:
        """The matrix exponential."""
        return matrix.exp()

    def norm2(self, matrix: Tensor) -> Tensor:
        """‖A‖²_F (*batch,)."""
        return matrix.square().sum(-1)

    def cholesky(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """A = L Lᵀ, and where that worked."""
        ok = ((matrix > 0) & torch.isfinite(matrix)).all(-1)
        return torch.where(ok[..., None], matrix, 1.0).sqrt(), ok

    def reverse_cholesky(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """A = U Uᵀ, and where that worked."""
        return self.cholesky(matrix)

    def solve_upper(
        self,
        upper: Tensor,
        vector: Tensor,  # (*batch, D)
    ) -> Tensor:
        """U⁻¹ x."""
        return vector / upper

    def right_solve_transposed(self, matrix: Tensor, upper: Tensor) -> Tensor:
        """A U⁻ᵀ."""
        return matrix / upper

    def solve_lower(
        self,
        lower: Tensor,
        vector: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """L⁻¹ x."""
        return vector / lower

    def unconjugate(
        self,
        lower: Tensor,
        vector: Tensor,  # (*batch, D)
        matrix: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """C⁻ᵀ a and C⁻ᵀ W C⁻¹."""
        return vector / lower, matrix / lower.square()

    def lower_root(self, matrix: Tensor) -> Tensor:
        """L with L Lᵀ = A Aᵀ."""
        return matrix

    def positive_root(self, lower: Tensor) -> tuple[Tensor, Tensor]:
        """The positive root, and where it is finite and regular."""
        return lower.abs(), ((lower != 0) & torch.isfinite(lower)).all(-1)
