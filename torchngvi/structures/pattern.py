"""The algebra of one pattern: which entries the root of a covariance or of a precision has, and what follows.

A pattern is a set of lower-triangular matrices that is closed under products and inverses: dense, diagonal,
block-diagonal, or arrows and forests of groups.  A matrix is one tensor (*batch, *shape) that holds

    a root L            the entries on and below the diagonal, zeros above it where squares are stored whole
    a symmetric A       the same places: diagonal squares whole, an entry outside of them once, as A_ij with i > j

so that sums, multiples, masks and ``torch.where`` need no verb.  What a pattern must say for itself is abstract in
`Pattern`; everything else is derived here, once, and overridden only where a pattern knows a faster way.  What the
covariance side needs beyond it, products and functions of matrices that are not triangular, is `FullAlgebra`.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from torchngvi.structures.index import Index, index_of

Structured = Tensor  # a matrix of a pattern, (*batch, *pattern.shape)


class Pattern(ABC):
    """Lower-triangular matrices of one pattern.  Vectors are (*sample, *batch, D), samples left of the batch.

    A third party's pattern implements the abstract methods, and has the checks of `torchngvi.testing.check_structure`.
    It is compared and hashed by its sizes: make it a frozen dataclass.
    """

    dim: int  # D
    shape: tuple[int, ...]  # trailing shape of a stored matrix
    widest: int  # the number of coordinates in the largest square of a symmetric matrix whose entries are all kept

    # ---------------------------------------------------------------------------- what a pattern must say

    @abstractmethod
    def positions(self) -> tuple[Tensor, Tensor]:
        """Row and column of every stored entry, two integer tensors of ``shape``."""

    @abstractmethod
    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """L x."""

    @abstractmethod
    def tmv(self, root: Structured, x: Tensor) -> Tensor:
        """Lᵀ x."""

    @abstractmethod
    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """L⁻¹ x."""

    @abstractmethod
    def tsolve(self, root: Structured, x: Tensor) -> Tensor:
        """L⁻ᵀ x."""

    @abstractmethod
    def matmul(self, left: Structured, right: Structured) -> Structured:
        """L M of two roots."""

    @abstractmethod
    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """The entries of Lᵀ A on and below the diagonal, zeros above."""

    @abstractmethod
    def inverse(self, root: Structured) -> Structured:
        """L⁻¹."""

    @abstractmethod
    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """L with A = L Lᵀ, and for which members (*batch,) it exists."""

    @abstractmethod
    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """L A Lᵀ."""

    @abstractmethod
    def lower(
        self,
        left: Tensor,  # (*batch, N, D)
        right: Tensor,  # (*batch, N, D)
    ) -> Structured:
        """The stored entries of Σ_n left_n right_nᵀ."""

    # ---------------------------------------------------------------------------- sums over all coordinates

    def total(self, scalar: Tensor) -> Tensor:
        """A sum over coordinates, completed; a pattern that is spread over processes sums it over them.

        Every such sum and verdict passes through here; a pattern that is spread overrides it beside `total_dim`.
        """
        return scalar

    @property
    def total_dim(self) -> int:
        """The coordinates of all processes together."""
        return self.dim

    def dot(
        self,
        x: Tensor,  # (*sample, *batch, D)
        y: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Σ_i x_i y_i, (*sample, *batch)."""
        return self.total((x * y).sum(-1))

    def everywhere(self, ok: Tensor) -> Tensor:
        """Whether something holds for the coordinates of every process, (*batch,)."""
        return self.total((~ok).to(torch.int32)) == 0

    # ---------------------------------------------------------------------------- entries

    @property
    def rank(self) -> int:
        """The trailing dimensions of a stored matrix."""
        return len(self.shape)

    @property
    def parameters(self) -> int:
        """The free entries of a root."""
        return len(index_of(self, torch.device("cpu")).lower)

    def _at(self, x: Tensor) -> Index:
        return index_of(self, x.device)

    def _flat(self, matrix: Structured) -> Tensor:
        return matrix.flatten(-self.rank)

    def eye(
        self,
        like: Tensor,  # (*batch, D)
    ) -> Structured:
        """The identity for such vectors."""
        eye = (self._at(like).rows == self._at(like).columns).to(like.dtype).reshape(self.shape)
        return eye.expand(*like.shape[:-1], *self.shape)

    def diagonal(self, matrix: Structured) -> Tensor:
        """The diagonal, (*batch, D)."""
        return self._flat(matrix)[..., self._at(matrix).diagonal]

    def with_diagonal(
        self,
        matrix: Structured,
        new: Tensor,  # (*batch, D)
    ) -> Structured:
        """The matrix with another diagonal; the other entries are the same to the last bit."""
        flat = self._flat(matrix)
        return flat.index_copy(-1, self._at(matrix).diagonal, new.expand(*flat.shape[:-1], -1)).reshape(matrix.shape)

    def scaled(
        self,
        factor: Tensor,  # (*batch,)
        matrix: Structured,
    ) -> Structured:
        """One factor a member times its matrix."""
        return factor[(..., *(None,) * self.rank)] * matrix

    def from_dense(
        self,
        matrix: Tensor,  # (*batch, D, D)
    ) -> Structured:
        """The stored entries of a matrix."""
        index = self._at(matrix)
        return matrix.flatten(-2)[..., index.rows * self.dim + index.columns].unflatten(-1, self.shape)

    def to_dense(self, root: Structured) -> Tensor:
        """The stored entries in their places, (*batch, D, D)."""
        index, flat = self._at(root), self._flat(root)
        dense = flat.new_zeros(*flat.shape[:-1], self.dim**2)
        dense = dense.index_copy(-1, index.rows * self.dim + index.columns, flat)
        return dense.unflatten(-1, (self.dim, self.dim))

    def full(self, symmetric: Structured) -> Tensor:
        """A symmetric matrix written out, (*batch, D, D)."""
        half = self.to_dense(self.tril_half(symmetric))
        return half + half.mT

    def tril(self, matrix: Structured) -> Structured:
        """The entries on and below the diagonal."""
        index = self._at(matrix)
        return torch.where((index.rows >= index.columns).reshape(self.shape), matrix, 0.0)

    def tril_half(self, symmetric: Structured) -> Structured:
        """K = tril½[A], the root with A = K + Kᵀ (Kumar et al. 2025, Eq 13; the double bar of Tan 2025)."""
        return self.tril(symmetric) * self._at(symmetric).halves.to(symmetric.dtype).reshape(self.shape)

    def one_sided(self, matrix: Structured) -> Structured:
        """The symmetric matrix with these entries on and below the diagonal."""
        return self._flat(matrix)[..., self._at(matrix).mirror].reshape(matrix.shape)

    def is_finite(self, matrix: Structured) -> Tensor:
        """Whether every entry is, (*batch,)."""
        return matrix.isfinite().flatten(-self.rank).all(-1)

    # ---------------------------------------------------------------------------- metric

    def flat(self, symmetric: Structured) -> Tensor:
        """The vector of A, (*batch, `parameters`), whose dot product with that of A' is ½⟨A, A'⟩_F."""
        index = self._at(symmetric)
        return self._flat(symmetric)[..., index.lower] * index.weights.to(symmetric.dtype)

    def unflat(
        self,
        vector: Tensor,  # (*batch, parameters)
    ) -> Structured:
        """The symmetric matrix of such a vector."""
        index = self._at(vector)
        return (vector[..., index.spread] * index.unweights.to(vector.dtype)).unflatten(-1, self.shape)

    def norm2(self, symmetric: Structured) -> Tensor:
        """‖A‖²_F, (*batch,)."""
        return self.total(2 * self.flat(symmetric).square().sum(-1))

    def entries_norm2(self, matrix: Structured) -> Tensor:
        """The squares of all stored entries, (*batch,): ‖L‖²_F of a root, and ‖A‖²_F of any matrix of squares."""
        return self.total(self._flat(matrix).square().sum(-1))

    def log_det(self, root: Structured) -> Tensor:
        """Σ log L_ii, (*batch,)."""
        return self.total(self.diagonal(root).log().sum(-1))

    # ---------------------------------------------------------------------------- vectors

    def smv(self, symmetric: Structured, x: Tensor) -> Tensor:
        """A x."""
        half = self.tril_half(symmetric)
        return self.mv(half, x) + self.tmv(half, x)

    def neighbours(self, x: Tensor) -> Tensor:
        """Σ_j x_j over the entries (i, j) that a symmetric matrix has, for each i; (*sample, *batch, D)."""
        return self.smv(torch.ones(self.shape, dtype=x.dtype, device=x.device), x)

    def sym_lower(
        self,
        left: Tensor,  # (*batch, N, D)
        right: Tensor,  # (*batch, N, D)
    ) -> Structured:
        """Σ_n ½(left_n right_nᵀ + right_n left_nᵀ)."""
        return 0.5 * (self.lower(left, right) + self.lower(right, left))

    def rows(
        self,
        rows: Tensor,  # X, (N, D) or (*batch, N, D)
        root: Structured,
        transposed: bool = False,
    ) -> Tensor:
        """X L, or X Lᵀ, (*batch, N, D)."""
        batch = root.shape[: root.ndim - self.rank]
        samples = rows.expand(*batch, *rows.shape[-2:]).movedim(-2, 0)
        return (self.mv if transposed else self.tmv)(root, samples).movedim(0, -2)

    def row_norms(self, root: Structured, transposed: bool = False) -> Tensor:
        """diag(L Lᵀ), or diag(Lᵀ L), (*batch, D)."""
        index, squares = self._at(root), self._flat(root).square()
        into = index.columns if transposed else index.rows
        return squares.new_zeros(*squares.shape[:-1], self.dim).index_add(-1, into, squares)

    def scale_columns(
        self,
        root: Structured,
        factors: Tensor,  # (*batch, D)
    ) -> Structured:
        """L diag(s)."""
        return root * factors[..., self._at(root).columns].unflatten(-1, self.shape)

    def positive_root(self, root: Structured) -> tuple[Structured, Tensor]:
        """The root with a positive diagonal, columns turned, and where it is finite and regular (*batch,).

        L Lᵀ does not change, and the natural gradient of a root commutes with column signs.
        """
        diagonal = self.diagonal(root)
        ok = (diagonal != 0).all(-1) & self.is_finite(root)
        return self.scale_columns(root, diagonal.sign()), ok

    # ---------------------------------------------------------------------------- what the data bring, in the frame

    def gram(
        self,
        root: Structured,
        weights: Tensor,  # broadcasts to (*batch, D)
        transposed: bool = False,
    ) -> Structured:
        """Cᵀ diag(w) C of C = L, or of C = Lᵀ."""
        weights = weights.expand(*root.shape[: root.ndim - self.rank], self.dim)
        if transposed:
            return self.congruence(root, self.with_diagonal(torch.zeros_like(root), weights))
        return self.conjugate(root, torch.diag_embed(weights))

    def marginals(self, root: Structured, transposed: bool = False) -> Structured:
        """The stored entries of C Cᵀ, C = L, or C = Lᵀ."""
        return self.gram(root, torch.ones((), dtype=root.dtype, device=root.device), not transposed)

    def conjugate(
        self,
        root: Structured,
        dense: Tensor,  # H, (*batch, D, D), symmetric
        transposed: bool = False,
    ) -> Structured:
        """The stored entries of Cᵀ H C, C = L, or C = Lᵀ."""
        rows = self.to_dense(root)
        return self.lower(rows.mT if transposed else rows, self.rows(dense, root, transposed))

    def sparse_gram(
        self,
        root: Structured,
        rows: Tensor,  # X, (N, D) sparse CSR
        weights: Tensor,  # b, (N,)
        transposed: bool = False,
    ) -> Structured:
        """The stored entries of Cᵀ Xᵀ diag(b) X C."""
        dense = self.to_dense(root)
        projected = rows @ (dense.mT if transposed else dense)
        return self.lower(projected * weights[:, None], projected)

    def sparse_row_norms(
        self,
        root: Structured,
        rows: Tensor,  # X, (N, D) sparse CSR
        transposed: bool = False,
    ) -> Tensor:
        """‖Cᵀx_n‖², (N,)."""
        dense = self.to_dense(root)
        return (rows @ (dense.mT if transposed else dense)).square().sum(-1)
