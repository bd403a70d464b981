"""Dense matrices: the algebra of a posterior with a full covariance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi import sparse
from torchngvi.linalg import cholesky, gram, positive_columns, reverse_cholesky, tril_half


@dataclass(frozen=True)
class Dense:
    """The pattern with every entry, stored as (*batch, D, D).

    >>> Dense().eye(torch.zeros(2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    rank = 2  # trailing dimensions of a stored matrix

    def eye(self, like: Tensor) -> Tensor:
        """The identity for vectors such as ``like`` (*batch, D)."""
        eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
        return eye.expand(*like.shape, like.shape[-1])

    def from_dense(self, matrix: Tensor) -> Tensor:
        """Keep the entries of the pattern."""
        return matrix

    def to_dense(self, matrix: Tensor) -> Tensor:
        """Write the stored matrix out as (*batch, D, D)."""
        return matrix

    def diagonal(self, matrix: Tensor) -> Tensor:
        """The diagonal (*batch, D)."""
        return matrix.diagonal(dim1=-2, dim2=-1)

    def scaled(self, factor: Tensor, matrix: Tensor) -> Tensor:
        """One factor (*batch,) a member times its matrix."""
        return factor[..., None, None] * matrix

    def transpose(self, matrix: Tensor) -> Tensor:
        """Aᵀ."""
        return matrix.mT

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """A B."""
        return left @ right

    def mv(
        self,
        matrix: Tensor,  # (*batch, D, D)
        vector: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """A x, for samples on the left of the batch."""
        extra = vector.ndim - matrix.ndim + 1
        if extra <= 0:
            return (matrix @ vector[..., None])[..., 0]
        if matrix.ndim == 2:
            return vector @ matrix.mT
        samples = vector.shape[:extra]
        columns = vector.flatten(0, extra - 1).movedim(0, -1)  # (*batch, D, S)
        return (matrix @ columns).movedim(-1, 0).unflatten(0, samples)

    def rows(
        self,
        rows: Tensor,  # (N, D) or (*batch, N, D)
        matrix: Tensor,
    ) -> Tensor:
        """X A, (*batch, N, D)."""
        return rows @ matrix

    def row_norms(self, matrix: Tensor) -> Tensor:
        """diag(A Aᵀ), (*batch, D)."""
        return matrix.square().sum(-1)

    def outer(
        self,
        left: Tensor,  # (*batch, N, D)
        right: Tensor,  # (*batch, N, D)
    ) -> Tensor:
        """Π(Σ_n left_n right_nᵀ)."""
        return left.mT @ right

    def conjugate(
        self,
        root: Tensor,
        dense: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """Π(Cᵀ H C) of a dense H."""
        return root.mT @ dense @ root

    def gram(
        self,
        root: Tensor,
        weights: Tensor,  # broadcasts to (*batch, D)
    ) -> Tensor:
        """Π(Cᵀ diag(w) C)."""
        return gram(root, weights)

    def sparse_gram(
        self,
        root: Tensor,
        rows: Tensor,  # X, (N, D) sparse CSR
        weights: Tensor,  # b, (N,)
    ) -> Tensor:
        """Π(Cᵀ Xᵀ diag(b) X C)."""
        return self.conjugate(root, sparse.gram(rows, weights))

    def sparse_row_norms(
        self,
        root: Tensor,
        rows: Tensor,  # X, (N, D) sparse CSR
    ) -> Tensor:
        """‖Cᵀx_n‖², (N,)."""
        return (rows @ root).square().sum(-1)

    def symmetric_part(self, matrix: Tensor) -> Tensor:
        """(A + Aᵀ)/2."""
        return 0.5 * (matrix + matrix.mT)

    def one_sided(self, matrix: Tensor) -> Tensor:
        """tril½[A] + tril½[A]ᵀ: the symmetric matrix with A's lower part."""
        half = tril_half(matrix)
        return half + half.mT

    def tril_half(self, matrix: Tensor) -> Tensor:
        """tril½[A]."""
        return tril_half(matrix)

    def tril(self, matrix: Tensor) -> Tensor:
        """The lower part, diagonal included."""
        return matrix.tril()

    def exp(self, matrix: Tensor) -> Tensor:
        """The matrix exponential."""
        return torch.linalg.matrix_exp(matrix)

    def norm2(self, matrix: Tensor) -> Tensor:
        """‖A‖²_F (*batch,)."""
        return matrix.square().sum((-2, -1))

    def cholesky(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """A = L Lᵀ, L lower triangular, and where that worked."""
        return cholesky(matrix)

    def reverse_cholesky(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """A = U Uᵀ, U upper triangular, and where that worked."""
        return reverse_cholesky(matrix)

    def solve_upper(
        self,
        upper: Tensor,
        vector: Tensor,  # (*batch, D)
    ) -> Tensor:
        """U⁻¹ x."""
        return torch.linalg.solve_triangular(upper, vector[..., None], upper=True)[..., 0]

    def right_solve_transposed(self, matrix: Tensor, upper: Tensor) -> Tensor:
        """A U⁻ᵀ, for U upper triangular."""
        return torch.linalg.solve_triangular(upper.mT, matrix, upper=False, left=False)

    def solve_lower(
        self,
        lower: Tensor,
        vector: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """L⁻¹ x."""
        samples = vector.ndim - lower.ndim + 1
        if samples <= 0:
            return torch.linalg.solve_triangular(lower, vector[..., None], upper=False)[..., 0]
        columns = vector.flatten(0, samples - 1).movedim(0, -1)  # (*batch, D, S)
        solved = torch.linalg.solve_triangular(lower, columns, upper=False)
        return solved.movedim(-1, 0).unflatten(0, vector.shape[:samples])

    def unconjugate(
        self,
        lower: Tensor,
        vector: Tensor,  # (*batch, D)
        matrix: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """C⁻ᵀ a and C⁻ᵀ W C⁻¹, for C lower triangular."""
        joint = torch.cat([vector[..., None], matrix], -1)
        half = torch.linalg.solve_triangular(lower.mT, joint, upper=True)
        full = torch.linalg.solve_triangular(lower, half[..., 1:], upper=False, left=False)
        return half[..., 0], full

    def lower_root(self, matrix: Tensor) -> Tensor:
        """A lower triangular L with L Lᵀ = A Aᵀ."""
        return torch.linalg.qr(matrix.mT, mode="r").R.mT

    def positive_root(self, lower: Tensor) -> tuple[Tensor, Tensor]:
        """The root with a positive diagonal, and where it is finite and regular."""
        return positive_columns(lower)
