"""The algebra of one pattern: which entries the root of a covariance or of a precision has, and what follows.

A pattern is a set of lower-triangular matrices that is closed under products and inverses: dense, diagonal,
block-diagonal, or arrows and forests of groups.  A matrix is one tensor (*batch, *shape) that holds

    a root L            the entries on and below the diagonal, zeros above it where squares are stored whole
    a symmetric A       the same places: diagonal squares whole, an entry outside of them once, as A_ij with i > j

so that sums, multiples, masks and ``torch.where`` need no verb.  What a pattern must say for itself is abstract in
`Pattern`; everything else is derived here, once, and overridden only where a pattern knows a faster way.  What the
covariance side needs beyond it, products and functions of matrices that are not triangular, is `FullAlgebra`.

In what follows L and M are roots, A is symmetric and x a vector, or several; Π keeps the entries of the pattern.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchngvi.numerics.arrays import remembered

# Where the stored entries of a pattern stand, as flat indices, which are made once for each pattern and device


class Index(NamedTuple):
    """Where the stored entries of a pattern stand, as flat tensors with one number an entry, (E,), unless noted."""

    rows: Tensor
    columns: Tensor
    diagonal: Tensor  # positions of the D diagonal entries, in the order of θ
    halves: Tensor  # 1 below the diagonal, ½ on it, 0 above: of tril½
    mirror: Tensor  # position of the entry of the transpose where both are stored, else its own
    lower: Tensor  # positions on and below the diagonal
    weights: Tensor  # √½ on the diagonal, 1 below, of those
    spread: Tensor  # for each entry the position in ``lower`` of itself or of its mirror image
    unweights: Tensor  # √2 on the diagonal, 1 elsewhere


@remembered
def index_of(pattern: "Pattern", device: torch.device) -> Index:
    """Make the indices of a pattern on a device, or return those that were made for it before."""
    rows, columns = (x.flatten() for x in pattern.positions())
    place = rows * pattern.dim + columns
    order = torch.argsort(place)
    found = torch.searchsorted(place[order], columns * pattern.dim + rows).clamp_max(len(place) - 1)
    mirrored = order[found]
    own = torch.arange(len(place), device="cpu")
    mirror = torch.where(rows < columns, mirrored, own)
    lower = own[rows >= columns]
    number = torch.empty_like(own)
    number[lower] = torch.arange(len(lower), device="cpu")
    on = rows == columns
    diagonal = own[on][torch.argsort(rows[on])]
    one = torch.ones(len(place), dtype=torch.float64, device="cpu")
    halves = torch.where(on, 0.5 * one, one * (rows > columns))
    unweights = torch.where(on, math.sqrt(2) * one, one)
    weights = torch.where(on, math.sqrt(0.5) * one, one)[lower]
    parts = (rows, columns, diagonal, halves, mirror, lower, weights, number[mirror], unweights)
    return Index(*(part.to(device) for part in parts))


Structured = Tensor  # a matrix of a pattern, (*batch, *pattern.shape)


class Pattern(ABC):
    """The lower-triangular matrices of one pattern, and the symmetric ones beside them: abstract.

    Vectors are (*sample, *batch, D), with samples on the left of the batch.  A third party's pattern implements the
    abstract methods, and has the check `torchngvi.testing.check_structure`.  It is compared and hashed by its sizes:
    make it a frozen dataclass.

    >>> from torchngvi.structures import Dense
    >>> Dense(2).mv(torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.ones(2)).tolist()
    [1.0, 5.0]
    """

    dim: int  # D
    shape: tuple[int, ...]  # trailing shape of a stored matrix
    widest: int  # the number of coordinates in the largest square of a symmetric matrix whose entries are all kept
    closed, leaves = False, 1  # under all products, see `FullAlgebra`; blocks that are independent given the others

    # ---------------------------------------------------------------------------- what a pattern must say

    @abstractmethod
    def positions(self) -> tuple[Tensor, Tensor]:
        """Return row and column of every stored entry, as two integer tensors of ``shape``."""

    @abstractmethod
    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by a root: L x, (*sample, *batch, D)."""

    @abstractmethod
    def tmv(self, root: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by a transposed root: Lᵀ x, (*sample, *batch, D)."""

    @abstractmethod
    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """Solve L y = x by forward substitution: L⁻¹ x, (*sample, *batch, D)."""

    @abstractmethod
    def tsolve(self, root: Structured, x: Tensor) -> Tensor:
        """Solve Lᵀ y = x by backward substitution: L⁻ᵀ x, (*sample, *batch, D)."""

    @abstractmethod
    def matmul(self, left: Structured, right: Structured) -> Structured:
        """Multiply two roots: L M, which is a root of the pattern again."""

    @abstractmethod
    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """Compute the entries of Lᵀ A on and below the diagonal, with zeros above it."""

    @abstractmethod
    def inverse(self, root: Structured) -> Structured:
        """Invert a root: L⁻¹, which is a root of the pattern again."""

    @abstractmethod
    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Factor A = L Lᵀ, and say for which members (*batch,) the factor exists."""

    @abstractmethod
    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """Compute the symmetric matrix L A Lᵀ, which stays in the pattern."""

    @abstractmethod
    def lower(
        self,
        left: Tensor,  # (*batch, N, D)
        right: Tensor,  # (*batch, N, D)
    ) -> Structured:
        """Sum outer products over n, and keep the stored entries of Σ_n left_n right_nᵀ."""

    # ---------------------------------------------------------------------------- sums over all coordinates

    def total(self, scalar: Tensor) -> Tensor:
        """Complete a sum over coordinates; a pattern spread over processes sums over them, as `total_dim` does."""
        return scalar

    @property
    def total_dim(self) -> int:
        """The number of coordinates of all processes together."""
        return self.dim

    def dot(
        self,
        x: Tensor,  # (*sample, *batch, D)
        y: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute the inner product Σ_i x_i y_i of vectors, (*sample, *batch)."""
        return self.total(torch.linalg.vecdot(x, y))

    def everywhere(self, ok: Tensor) -> Tensor:
        """Say whether something holds for the coordinates of every process, (*batch,)."""
        return ok if is_whole(self) else self.total((~ok).to(torch.int32)) == 0

    # ---------------------------------------------------------------------------- entries

    @property
    def rank(self) -> int:
        """The number of trailing dimensions of a stored matrix."""
        return len(self.shape)

    @property
    def parameters(self) -> int:
        """The number of free entries of a root, which is the length of the vectors of `flat`."""
        return len(index_of(self, torch.device("cpu")).lower)

    def _at(self, x: Tensor) -> Index:
        return index_of(self, x.device)

    def _flat(self, matrix: Structured) -> Tensor:
        return matrix.flatten(-self.rank)

    def eye(
        self,
        like: Tensor,  # (*batch, D)
    ) -> Structured:
        """Make the identity, with the batch, the dtype and the device of such vectors."""
        eye = (self._at(like).rows == self._at(like).columns).to(like.dtype).reshape(self.shape)
        return eye.expand(*like.shape[:-1], *self.shape)

    def diagonal(self, matrix: Structured) -> Tensor:
        """Take the diagonal out of a matrix, (*batch, D)."""
        return self._flat(matrix)[..., self._at(matrix).diagonal]

    def with_diagonal(
        self,
        matrix: Structured,
        new: Tensor,  # (*batch, D)
    ) -> Structured:
        """Replace the diagonal of a matrix; its other entries are the same to the last bit."""
        flat = self._flat(matrix)
        return flat.index_copy(-1, self._at(matrix).diagonal, new.expand(*flat.shape[:-1], -1)).reshape(matrix.shape)

    def scaled(self, factor: Tensor, matrix: Structured) -> Structured:
        """Multiply each member's matrix by a factor of its own, (*batch,)."""
        return factor[(..., *(None,) * self.rank)] * matrix

    def from_dense(self, matrix: Tensor) -> Structured:
        """Keep the stored entries of a matrix that is written out, (*batch, D, D)."""
        index = self._at(matrix)
        return matrix.flatten(-2)[..., index.rows * self.dim + index.columns].unflatten(-1, self.shape)

    def to_dense(self, root: Structured) -> Tensor:
        """Write the stored entries out in their places, (*batch, D, D), zeros elsewhere."""
        index, flat = self._at(root), self._flat(root)
        dense = flat.new_zeros(*flat.shape[:-1], self.dim**2)
        dense = dense.index_copy(-1, index.rows * self.dim + index.columns, flat)
        return dense.unflatten(-1, (self.dim, self.dim))

    def full(self, symmetric: Structured) -> Tensor:
        """Write a symmetric matrix out with both of its triangles, (*batch, D, D)."""
        half = self.to_dense(self.tril_half(symmetric))
        return half + half.mT

    def tril(self, matrix: Structured) -> Structured:
        """Keep the entries on and below the diagonal, with zeros above it."""
        index = self._at(matrix)
        return torch.where((index.rows >= index.columns).reshape(self.shape), matrix, 0.0)

    def tril_half(self, symmetric: Structured) -> Structured:
        """Halve a symmetric matrix: K = tril½[A], A = K + Kᵀ (Kumar et al. 2025, Eq 13; double bar of Tan 2025)."""
        return self.tril(symmetric) * self._at(symmetric).halves.to(symmetric.dtype).reshape(self.shape)

    def one_sided(self, matrix: Structured) -> Structured:
        """Make the symmetric matrix that has these entries on and below the diagonal."""
        return self._flat(matrix)[..., self._at(matrix).mirror].reshape(matrix.shape)

    def is_finite(self, matrix: Structured) -> Tensor:
        """Say for which members every stored entry is finite, (*batch,)."""
        return matrix.isfinite().flatten(-self.rank).all(-1)

    # ---------------------------------------------------------------------------- metric

    def flat(self, symmetric: Structured) -> Tensor:
        """Make a vector (*batch, `parameters`) of A, isometrically: its dot product with that of A' is ½⟨A, A'⟩_F."""
        index = self._at(symmetric)
        return self._flat(symmetric)[..., index.lower] * index.weights.to(symmetric.dtype)

    def unflat(
        self,
        vector: Tensor,  # (*batch, parameters)
    ) -> Structured:
        """Make the symmetric matrix of such a vector: the inverse of `flat`."""
        index = self._at(vector)
        return (vector[..., index.spread] * index.unweights.to(vector.dtype)).unflatten(-1, self.shape)

    def norm2(self, symmetric: Structured) -> Tensor:
        """Compute the squared Frobenius norm ‖A‖²_F of a symmetric matrix, (*batch,)."""
        return self.total(2 * self.flat(symmetric).square().sum(-1))

    def entries_norm2(self, matrix: Structured) -> Tensor:
        """Sum the squares of all stored entries, (*batch,): ‖L‖²_F of a root, or of any matrix of squares."""
        flat = self._flat(matrix)
        return self.dot(flat, flat)

    def log_det(self, root: Structured) -> Tensor:
        """Compute log det L = Σ_i log L_ii of a root with a positive diagonal, (*batch,)."""
        return self.total(self.diagonal(root).log().sum(-1))

    # ---------------------------------------------------------------------------- vectors

    def smv(self, symmetric: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by a symmetric matrix: A x, (*sample, *batch, D)."""
        half = self.tril_half(symmetric)
        return self.mv(half, x) + self.tmv(half, x)

    def neighbours(self, x: Tensor) -> Tensor:
        """Sum x_j over the entries (i, j) that a symmetric matrix has, for each i: (*sample, *batch, D)."""
        return self.smv(torch.ones(self.shape, dtype=x.dtype, device=x.device), x)

    def sym_lower(
        self,
        left: Tensor,  # (*batch, N, D)
        right: Tensor,  # (*batch, N, D)
    ) -> Structured:
        """Sum symmetrised outer products over n: Π(Σ_n ½(left_n right_nᵀ + right_n left_nᵀ))."""
        return 0.5 * (self.lower(left, right) + self.lower(right, left))

    def rows(
        self,
        rows: Tensor,  # X, (N, D) or (*batch, N, D)
        root: Structured,
        transposed: bool = False,
    ) -> Tensor:
        """Multiply a design by a root from the right: X L, or X Lᵀ where ``transposed``, (*batch, N, D)."""
        batch = root.shape[: root.ndim - self.rank]
        samples = rows.expand(*batch, *rows.shape[-2:]).movedim(-2, 0)
        return (self.mv if transposed else self.tmv)(root, samples).movedim(0, -2)

    def row_norms(self, root: Structured, transposed: bool = False) -> Tensor:
        """Compute the squared row norms diag(L Lᵀ), or diag(Lᵀ L) where ``transposed``, (*batch, D)."""
        index, squares = self._at(root), self._flat(root).square()
        into = index.columns if transposed else index.rows
        return squares.new_zeros(*squares.shape[:-1], self.dim).index_add(-1, into, squares)

    def scale_columns(
        self,
        root: Structured,
        factors: Tensor,  # (*batch, D)
    ) -> Structured:
        """Multiply each column of a root by a factor of its own: L diag(s)."""
        return root * factors[..., self._at(root).columns].unflatten(-1, self.shape)

    def positive_root(self, root: Structured) -> tuple[Structured, Tensor]:
        """Turn columns until the diagonal is positive, L Lᵀ unchanged; say where the root is finite and regular."""
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
        """Bring diagonal weights into the frame: Π(Cᵀ diag(w) C) for C = L, or for C = Lᵀ where ``transposed``."""
        weights = weights.expand(*root.shape[: root.ndim - self.rank], self.dim)
        if transposed:
            return self.congruence(root, self.with_diagonal(torch.zeros_like(root), weights))
        return self.conjugate(root, torch.diag_embed(weights))

    def marginals(self, root: Structured, transposed: bool = False) -> Structured:
        """Compute the stored entries of C Cᵀ for C = L, or for C = Lᵀ where ``transposed``."""
        return self.gram(root, torch.ones((), dtype=root.dtype, device=root.device), not transposed)

    def conjugate(
        self,
        root: Structured,
        dense: Tensor,  # H, (*batch, D, D), symmetric
        transposed: bool = False,
    ) -> Structured:
        """Bring a dense matrix into the frame: Π(Cᵀ H C) for C = L, or for C = Lᵀ where ``transposed``."""
        rows = self.to_dense(root)
        return self.lower(rows.mT if transposed else rows, self.rows(dense, root, transposed))

    def sparse_gram(
        self,
        root: Structured,
        rows: Tensor,  # X, (N, D) sparse CSR
        weights: Tensor,  # b, (N,)
        transposed: bool = False,
    ) -> Structured:
        """Bring weighted sparse rows into the frame: Π(Cᵀ Xᵀ diag(b) X C) for C = L, or Lᵀ where ``transposed``."""
        dense = self.to_dense(root)
        projected = rows @ (dense.mT if transposed else dense)
        return self.lower(projected * weights[:, None], projected)

    def sparse_row_norms(
        self,
        root: Structured,
        rows: Tensor,  # X, (N, D) sparse CSR
        transposed: bool = False,
    ) -> Tensor:
        """Compute ‖Cᵀx_n‖² for sparse rows, (N,): the variances of X θ for C = L, or Lᵀ where ``transposed``."""
        dense = self.to_dense(root)
        return (rows @ (dense.mT if transposed else dense)).square().sum(-1)


def plus(structure: "Pattern", matrix: Structured, factor: Tensor, other: Structured) -> Structured:
    """Add another matrix, each member's times a factor of its own, (*batch,)."""
    return torch.addcmul(matrix, factor[(..., *(None,) * structure.rank)], other)


def is_whole(pattern: Pattern) -> bool:
    """Say whether one process has all coordinates of a pattern, so that `Pattern.total` has nothing to add."""
    return type(pattern).total is Pattern.total


# The pattern without an entry, for a posterior whose coordinates are one vector, with no matrix beside it


def _refused(*_: Any) -> Any:
    raise NotImplementedError("a pattern without entries has no root")


_has_no_root: Any = _refused


@final
@dataclass(frozen=True)
class NoMatrix(Pattern):
    """The pattern without entries: tensors (*batch, 0), so that what moves, scales or saves a matrix finds one."""

    dim: int  # D, of the vector

    shape = (0,)
    widest = 0

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return two empty tensors, since no entry is stored."""
        return torch.empty(0, dtype=torch.long, device="cpu"), torch.empty(0, dtype=torch.long, device="cpu")

    mv = tmv = solve = tsolve = matmul = tmatmul = inverse = cholesky = congruence = lower = _has_no_root
