"""Equal squares along the diagonal, dense matrices among them: closed under all products."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.numerics import sparse
from torchngvi.numerics.linalg import cholesky, gram, positive_columns, reverse_cholesky, triangular_inverse, tril_half
from torchngvi.structures.full_algebra import FullAlgebra
from torchngvi.structures.pattern import Structured


class Squares(FullAlgebra):
    """Equal squares, as torch's batched matrices: abstract, see `Dense` and `EqualBlocks`."""

    def split(self, x: Tensor) -> Tensor:
        """A vector (..., D) as those of the squares."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """The vector of the squares' vectors."""
        return x

    def _split_rows(self, rows: Tensor) -> Tensor:
        """Rows (*batch, N, D) as those of the squares, (*batch, [count,] N, size)."""
        return rows

    def _join_rows(self, rows: Tensor) -> Tensor:
        return rows

    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """A x, of any matrix."""
        return self.join(_mv(root, self.split(x)))

    def tmv(self, root: Structured, x: Tensor) -> Tensor:
        """Aᵀ x, of any matrix."""
        return self.join(_mv(root.mT, self.split(x)))

    def smv(self, symmetric: Structured, x: Tensor) -> Tensor:
        """A x."""
        return self.mv(symmetric, x)

    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """L⁻¹ x."""
        return self.join(_solve(root, self.split(x), upper=False))

    def tsolve(self, root: Structured, x: Tensor) -> Tensor:
        """L⁻ᵀ x."""
        return self.join(_solve(root.mT, self.split(x), upper=True))

    def matmul(self, left: Structured, right: Structured) -> Structured:
        """A B, of any two matrices."""
        return left @ right

    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """The entries of Lᵀ A on and below the diagonal."""
        return (root.mT @ symmetric).tril()

    def inverse(self, root: Structured) -> Structured:
        """L⁻¹."""
        return triangular_inverse(root)

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """L with A = L Lᵀ, and for which members it exists."""
        return self._members(cholesky(symmetric))

    def reverse_cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """L with A = Lᵀ L, and for which members it exists."""
        upper, ok = self._members(reverse_cholesky(symmetric))
        return upper.mT, ok

    def _members(self, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A factor, and whether that of every square of a member exists."""
        return result

    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """A W Aᵀ, of any matrix."""
        return root @ symmetric @ root.mT

    def lower(self, left: Tensor, right: Tensor) -> Structured:
        """The squares of Σ_n left_n right_nᵀ."""
        return self._split_rows(left).mT @ self._split_rows(right)

    def sym_lower(self, left: Tensor, right: Tensor) -> Structured:
        """Σ_n ½(left_n right_nᵀ + right_n left_nᵀ)."""
        product = self.lower(left, right)
        return 0.5 * (product + product.mT)

    def transpose(self, matrix: Structured) -> Structured:
        """Aᵀ."""
        return matrix.mT

    def exp(self, symmetric: Structured) -> Structured:
        """The matrix exponential."""
        return torch.linalg.matrix_exp(symmetric.contiguous())  # it views its argument

    def right_solve(self, matrix: Structured, root: Structured) -> Structured:
        """A L⁻¹."""
        return torch.linalg.solve_triangular(root, matrix, upper=False, left=False)

    def lower_root(self, matrix: Structured) -> Structured:
        """A lower-triangular L with L Lᵀ = A Aᵀ."""
        return torch.linalg.qr(matrix.mT, mode="r").R.mT

    def unconjugate(self, root: Structured, vector: Tensor, matrix: Structured) -> tuple[Tensor, Structured]:
        """L⁻ᵀ a and L⁻ᵀ W L⁻¹."""
        joint = torch.cat([self.split(vector)[..., None], matrix], -1)
        half = torch.linalg.solve_triangular(root.mT, joint, upper=True)
        return self.join(half[..., 0]), self.right_solve(half[..., 1:], root)

    # what the pattern derives, without an index

    def eye(self, like: Tensor) -> Structured:
        """The identity for vectors such as ``like``."""
        eye = torch.eye(self.shape[-1], dtype=like.dtype, device=like.device)
        return eye.expand(*like.shape[:-1], *self.shape)

    def diagonal(self, matrix: Structured) -> Tensor:
        """The diagonal, (*batch, D)."""
        return self.join(matrix.diagonal(dim1=-2, dim2=-1))

    def tril(self, matrix: Structured) -> Structured:
        """The entries on and below the diagonal."""
        return matrix.tril()

    def tril_half(self, symmetric: Structured) -> Structured:
        """tril½[A]."""
        return tril_half(symmetric)

    def one_sided(self, matrix: Structured) -> Structured:
        """The symmetric matrix with these entries on and below the diagonal."""
        half = tril_half(matrix)
        return half + half.mT

    def with_diagonal(self, matrix: Structured, new: Tensor) -> Structured:
        """The matrix with another diagonal."""
        replaced = matrix.clone()
        replaced.diagonal(dim1=-2, dim2=-1).copy_(self.split(new))
        return replaced

    @property
    def parameters(self) -> int:
        """The free entries of a root."""
        size = self.shape[-1]
        return self.dim * (size + 1) // 2

    def flat(self, symmetric: Structured) -> Tensor:
        """The vector of A, (*batch, `parameters`), whose dot product with that of A' is ½⟨A, A'⟩_F."""
        lower, diagonal = _triangle(self.shape[-1], symmetric.device)
        entries = _with_shares(symmetric.flatten(-2)[..., lower], diagonal)
        return entries.flatten(1 - self.rank) if self.rank > 2 else entries

    def unflat(self, vector: Tensor) -> Structured:
        """The symmetric matrix of such a vector."""
        size = self.shape[-1]
        lower, diagonal = _triangle(size, vector.device)
        vector = vector.unflatten(-1, (*self.shape[:-2], -1))
        squares = vector.new_zeros(*vector.shape[:-1], size * size)
        half = squares.index_copy(-1, lower, _with_shares(vector, diagonal)).unflatten(-1, (size, size))
        return half + half.mT

    def norm2(self, symmetric: Structured) -> Tensor:
        """‖A‖²_F, of any matrix."""
        return self.total(symmetric.square().flatten(-self.rank).sum(-1))

    def rows(self, rows: Tensor, root: Structured, transposed: bool = False) -> Tensor:
        """X L, or X Lᵀ, (*batch, N, D)."""
        return self._join_rows(self._split_rows(rows) @ (root.mT if transposed else root))

    def row_norms(self, root: Structured, transposed: bool = False) -> Tensor:
        """diag(L Lᵀ), or diag(Lᵀ L), (*batch, D)."""
        return self.join(root.square().sum(-2 if transposed else -1))

    def neighbours(self, x: Tensor) -> Tensor:
        """The sum over the square of a coordinate."""
        squares = self.split(x)
        return self.join(squares.sum(-1, keepdim=True).expand_as(squares))

    def scale_columns(self, root: Structured, factors: Tensor) -> Structured:
        """L diag(s)."""
        return root * self.split(factors)[..., None, :]

    def positive_root(self, root: Structured) -> tuple[Structured, Tensor]:
        """The root with a positive diagonal, and where it is finite and regular."""
        return self._members(positive_columns(root))

    def gram(self, root: Structured, weights: Tensor, transposed: bool = False) -> Structured:
        """Cᵀ diag(w) C of C = L, or of C = Lᵀ."""
        return gram(root.mT if transposed else root, self.split(weights))

    def conjugate(self, root: Structured, dense: Tensor, transposed: bool = False) -> Structured:
        """The squares of Cᵀ H C, C = L, or C = Lᵀ."""
        H = self.from_dense(dense)
        return root @ H @ root.mT if transposed else root.mT @ H @ root


@dataclass(frozen=True)
class Dense(Squares):
    """Every entry, stored as (*batch, D, D).

    >>> Dense(2).eye(torch.zeros(2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    dim: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """(D, D)."""
        return (self.dim, self.dim)

    @property
    def widest(self) -> int:  # type: ignore[override]
        """D."""
        return self.dim

    def positions(self) -> tuple[Tensor, Tensor]:
        """Row and column of every entry."""
        place = torch.arange(self.dim)
        return place[:, None].expand(self.shape), place.expand(self.shape)

    def from_dense(self, matrix: Tensor) -> Structured:
        """The matrix itself."""
        return matrix

    def to_dense(self, root: Structured) -> Tensor:
        """The matrix itself."""
        return root

    def full(self, symmetric: Structured) -> Tensor:
        """The matrix itself."""
        return symmetric

    def sparse_gram(self, root: Structured, rows: Tensor, weights: Tensor, transposed: bool = False) -> Structured:
        """Cᵀ Xᵀ diag(b) X C, from a product of sparse matrices."""
        return self.conjugate(root, sparse.gram(rows, weights), transposed)


@dataclass(frozen=True)
class EqualBlocks(Squares):
    """Squares of one size along the diagonal, stored as (*batch, count, size, size).

    >>> EqualBlocks(2, 3).mv(torch.ones(2, 3, 3), torch.ones(6)).tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    """

    count: int
    size: int

    @property
    def dim(self) -> int:  # type: ignore[override]
        """The number of coordinates."""
        return self.count * self.size

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """(count, size, size)."""
        return (self.count, self.size, self.size)

    @property
    def widest(self) -> int:  # type: ignore[override]
        """The size of a square."""
        return self.size

    def positions(self) -> tuple[Tensor, Tensor]:
        """Row and column of every entry."""
        place = torch.arange(self.dim).reshape(self.count, self.size)
        return place[:, :, None].expand(self.shape), place[:, None, :].expand(self.shape)

    def split(self, x: Tensor) -> Tensor:
        """(..., D) as (..., count, size)."""
        return x.unflatten(-1, (self.count, self.size))

    def join(self, x: Tensor) -> Tensor:
        """(..., count, size) as (..., D)."""
        return x.flatten(-2)

    def _split_rows(self, rows: Tensor) -> Tensor:
        return self.split(rows).movedim(-2, -3)

    def _join_rows(self, rows: Tensor) -> Tensor:
        return self.join(rows.movedim(-3, -2))

    def _members(self, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return result[0], result[1].all(-1)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for later calls, which may be differentiated
def _triangle(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the lower triangle in a flat square, and of the diagonal among them."""
    rows, columns = torch.tril_indices(size, size, device=device)
    place = torch.arange(size, device=device)
    return rows * size + columns, place * (place + 3) // 2


def _with_shares(
    entries: Tensor,  # (..., size (size + 1)/2)
    diagonal: Tensor,
) -> Tensor:
    """The entries of a triangle, those on the diagonal times √½."""
    return entries.index_copy(-1, diagonal, math.sqrt(0.5) * entries[..., diagonal])


def _mv(
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


def _solve(
    triangular: Tensor,  # (*batch, D, D)
    vector: Tensor,  # (*sample, *batch, D)
    upper: bool,
) -> Tensor:
    """A⁻¹ x, for samples on the left of the batch."""
    extra = vector.ndim - triangular.ndim + 1
    if extra <= 0:
        return torch.linalg.solve_triangular(triangular, vector[..., None], upper=upper)[..., 0]
    columns = vector.flatten(0, extra - 1).movedim(0, -1)  # (*batch, D, S)
    solved = torch.linalg.solve_triangular(triangular, columns, upper=upper)
    return solved.movedim(-1, 0).unflatten(0, vector.shape[:extra])
