"""Squares along the diagonal, dense and diagonal matrices among them, which are closed under all products."""

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_size, read_sizes
from torchngvi.numerics import linalg, sparse
from torchngvi.numerics.arrays import remembered
from torchngvi.structures.pattern import Pattern, Structured

# Patterns whose squares are closed under all products, not only under those of triangular matrices


class FullAlgebra(Pattern):
    """A pattern whose squares are closed under all products, as those of block-diagonal matrices are: abstract.

    Here `matmul` and `mv` take any matrix of squares, not only a triangular one.  Rules that follow a root of the
    covariance, or that need P², exp(P) or an orthogonal factor, ask for it; arrows and forests do not have it.

    >>> from torchngvi.structures import Dense, arrow
    >>> Dense(2).closed, arrow(groups=3, local=2, globals=1).closed
    (True, False)
    """

    closed = True

    @abstractmethod
    def transpose(self, matrix: Structured) -> Structured:
        """Transpose any matrix of squares: Aᵀ."""

    def marginals(self, root: Structured, transposed: bool = False) -> Structured:
        """Compute C Cᵀ for C = L, or for C = Lᵀ where ``transposed``."""
        turned = self.transpose(root)
        return self.matmul(turned, root) if transposed else self.matmul(root, turned)

    @abstractmethod
    def exp(self, symmetric: Structured) -> Structured:
        """Compute the matrix exponential of a symmetric matrix."""

    @abstractmethod
    def reverse_cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Factor A = Lᵀ L with L lower triangular, and say for which members (*batch,) the factor exists."""

    @abstractmethod
    def right_solve(self, matrix: Structured, root: Structured) -> Structured:
        """Divide any matrix of squares by a root from the right: A L⁻¹."""

    @abstractmethod
    def lower_root(self, matrix: Structured) -> Structured:
        """Find a lower-triangular L with L Lᵀ = A Aᵀ, by an orthogonal factor; its diagonal may have any signs."""

    @abstractmethod
    def unconjugate(
        self,
        root: Structured,
        vector: Tensor,  # (*batch, D)
        matrix: Structured,
    ) -> tuple[Tensor, Structured]:
        """Take a vector and a matrix out of the frame of C = L: L⁻ᵀ a and L⁻ᵀ W L⁻¹."""


def verb(name: str, function: Callable[..., Any]) -> Any:
    """Take a function for a verb of `FullAlgebra`, with the signature and the docstring of the contract."""
    return functools.update_wrapper(function, getattr(FullAlgebra, name), updated=())


class Squares(FullAlgebra):
    """Equal squares along the diagonal, as torch's batched matrices: abstract, see `Dense` and `EqualBlocks`."""

    def split(self, x: Tensor) -> Tensor:
        """Split a vector (..., D) into those of the squares, which for a single square is the vector itself."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """Join the vectors of the squares into one, (..., D)."""
        return x

    def _split_rows(self, rows: Tensor) -> Tensor:
        """Rows (*batch, N, D) as those of the squares, (*batch, [count,] N, size)."""
        return rows

    def _join_rows(self, rows: Tensor) -> Tensor:
        return rows

    def _members(self, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A factor, and whether that of every square of a member exists."""
        return result

    # vectors
    mv = verb("mv", lambda self, root, x: self.join(_mv(root, self.split(x))))
    tmv = verb("tmv", lambda self, root, x: self.join(_mv(root.mT, self.split(x))))
    smv = verb("smv", lambda self, symmetric, x: self.mv(symmetric, x))
    solve = verb("solve", lambda self, root, x: self.join(_solve(root, self.split(x), upper=False)))
    tsolve = verb("tsolve", lambda self, root, x: self.join(_solve(root.mT, self.split(x), upper=True)))

    def neighbours(self, x: Tensor) -> Tensor:
        """Sum over the square that each coordinate stands in."""
        squares = self.split(x)
        return self.join(squares.sum(-1, keepdim=True).expand_as(squares))

    # matrices
    matmul = verb("matmul", lambda self, left, right: left @ right)
    tmatmul = verb("tmatmul", lambda self, root, symmetric: (root.mT @ symmetric).tril())
    congruence = verb("congruence", lambda self, root, symmetric: root @ symmetric @ root.mT)
    transpose = verb("transpose", lambda self, matrix: matrix.mT)
    inverse = verb("inverse", lambda self, root: linalg.triangular_inverse(root))
    exp = verb("exp", lambda self, symmetric: torch.linalg.matrix_exp(symmetric.contiguous()))  # it views its argument
    cholesky = verb("cholesky", lambda self, symmetric: self._members(linalg.cholesky(symmetric)))
    positive_root = verb("positive_root", lambda self, root: self._members(linalg.positive_columns(root)))
    scale_columns = verb("scale_columns", lambda self, root, factors: root * self.split(factors)[..., None, :])

    def reverse_cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Factor A = Lᵀ L, and say for which members the factor of every square exists."""
        upper, ok = self._members(linalg.reverse_cholesky(symmetric))
        return upper.mT, ok

    def right_solve(self, matrix: Structured, root: Structured) -> Structured:
        """Divide any matrix of squares by a root from the right: A L⁻¹."""
        return torch.linalg.solve_triangular(root, matrix, upper=False, left=False)

    def lower_root(self, matrix: Structured) -> Structured:
        """Find a lower-triangular L with L Lᵀ = A Aᵀ, by a QR factorisation of Aᵀ."""
        return torch.linalg.qr(matrix.mT, mode="r").R.mT

    def unconjugate(self, root: Structured, vector: Tensor, matrix: Structured) -> tuple[Tensor, Structured]:
        """Compute L⁻ᵀ a and L⁻ᵀ W L⁻¹, with one substitution for the vector and the left side of the matrix."""
        joint = torch.cat([self.split(vector)[..., None], matrix], -1)
        half = torch.linalg.solve_triangular(root.mT, joint, upper=True)
        return self.join(half[..., 0]), self.right_solve(half[..., 1:], root)

    # entries and metric, without an index
    diagonal = verb("diagonal", lambda self, matrix: self.join(matrix.diagonal(dim1=-2, dim2=-1)))
    tril = verb("tril", lambda self, matrix: matrix.tril())
    tril_half = verb("tril_half", lambda self, symmetric: linalg.tril_half(symmetric))
    norm2 = verb("norm2", lambda self, symmetric: self.entries_norm2(symmetric))

    @property
    def parameters(self) -> int:
        """The number of free entries of a root, those of the triangles of all squares."""
        return self.dim * (self.shape[-1] + 1) // 2

    def eye(self, like: Tensor) -> Structured:
        """Return the identity, with the batch, the dtype and the device of ``like``, which is not to be written to."""
        eye = _square(self.shape[-1], like.dtype, like.device)[0]
        return eye.expand(*like.shape[:-1], *self.shape)

    def one_sided(self, matrix: Structured) -> Structured:
        """Make the symmetric matrix that has these entries on and below the diagonal."""
        below = _square(self.shape[-1], matrix.dtype, matrix.device)[1]
        return torch.where(below, matrix, matrix.mT)

    def with_diagonal(self, matrix: Structured, new: Tensor) -> Structured:
        """Replace the diagonal of a copy of the matrix."""
        replaced = matrix.clone()
        replaced.diagonal(dim1=-2, dim2=-1).copy_(self.split(new))
        return replaced

    def flat(self, symmetric: Structured) -> Tensor:
        """Make a vector (*batch, `parameters`) of A, isometrically: its dot product with that of A' is ½⟨A, A'⟩_F."""
        lower, shares, _, _ = _constants(self.shape[-1], symmetric.dtype, symmetric.device)
        entries = _taken(symmetric.flatten(-2), lower) * shares
        return entries.flatten(1 - self.rank) if self.rank > 2 else entries

    def unflat(self, vector: Tensor) -> Structured:
        """Make the symmetric matrix of such a vector: the inverse of `flat`."""
        size = self.shape[-1]
        _, _, spread, unshares = _constants(size, vector.dtype, vector.device)
        vector = vector.unflatten(-1, (*self.shape[:-2], -1)) if self.rank > 2 else vector
        return (_taken(vector, spread) * unshares).unflatten(-1, (size, size))

    # what the data bring
    lower = verb("lower", lambda self, left, right: self._split_rows(left).mT @ self._split_rows(right))

    def sym_lower(self, left: Tensor, right: Tensor) -> Structured:
        """Keep the squares of Σ_n ½(left_n right_nᵀ + right_n left_nᵀ), from one product."""
        product = self.lower(left, right)
        return 0.5 * (product + product.mT)

    def rows(self, rows: Tensor, root: Structured, transposed: bool = False) -> Tensor:
        """Multiply a design by a root, X L, or X Lᵀ where ``transposed``, (*batch, N, D)."""
        return self._join_rows(self._split_rows(rows) @ (root.mT if transposed else root))

    def row_norms(self, root: Structured, transposed: bool = False) -> Tensor:
        """Compute diag(L Lᵀ), or diag(Lᵀ L) where ``transposed``, (*batch, D)."""
        return self.join(root.square().sum(-2 if transposed else -1))

    def gram(self, root: Structured, weights: Tensor, transposed: bool = False) -> Structured:
        """Compute Cᵀ diag(w) C for C = L, or for C = Lᵀ where ``transposed``."""
        return linalg.gram(root.mT if transposed else root, self.split(weights))

    def conjugate(self, root: Structured, dense: Tensor, transposed: bool = False) -> Structured:
        """Keep the squares of Cᵀ H C for C = L, or for C = Lᵀ where ``transposed``."""
        H = self.from_dense(dense)
        return root @ H @ root.mT if transposed else root.mT @ H @ root


@dataclass(frozen=True)
class Dense(Squares):
    """All matrices with D rows and columns, stored whole, (*batch, D, D): the pattern of a full covariance.

    It is the default of a Gaussian posterior; a step costs O(D³), so that for a large D another pattern is in place.

    Args:
        dim: D.

    >>> Dense(2).eye(torch.zeros(2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    dim: int

    def __post_init__(self) -> None:
        read_size("dim", self.dim, "is the number of coordinates")

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The trailing shape of a stored matrix, (D, D)."""
        return (self.dim, self.dim)

    @property
    def widest(self) -> int:  # type: ignore[override]
        """The size of the only square, D."""
        return self.dim

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return row and column of every entry."""
        place = torch.arange(self.dim, device="cpu")
        return place[:, None].expand(self.shape), place.expand(self.shape)

    # the matrix itself, which is stored whole
    from_dense = verb("from_dense", lambda self, matrix: matrix)
    to_dense = verb("to_dense", lambda self, root: root)
    full = verb("full", lambda self, symmetric: symmetric)

    def sparse_gram(self, root: Structured, rows: Tensor, weights: Tensor, transposed: bool = False) -> Structured:
        """Compute Cᵀ Xᵀ diag(b) X C, with Xᵀ diag(b) X from a product of sparse matrices."""
        return self.conjugate(root, sparse.gram(rows, weights), transposed)


@dataclass(frozen=True)
class EqualBlocks(Squares):
    """Block-diagonal matrices with squares of one size, stored as (*batch, count, size, size).

    They are the pattern of q that factorises over groups of ``size`` coordinates; `block_diagonal` makes it.

    Args:
        count: how many squares there are.
        size: of each.

    >>> EqualBlocks(2, 3).mv(torch.ones(2, 3, 3), torch.ones(6)).tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    """

    count: int
    size: int

    def __post_init__(self) -> None:
        read_size("count", self.count, "counts squares")
        read_size("size", self.size, "is that of each square")

    @property
    def dim(self) -> int:  # type: ignore[override]
        """The number of coordinates, count times size."""
        return self.count * self.size

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The trailing shape of a stored matrix, (count, size, size)."""
        return (self.count, self.size, self.size)

    @property
    def widest(self) -> int:  # type: ignore[override]
        """The number of coordinates of each square."""
        return self.size

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return row and column of every entry, square by square."""
        place = torch.arange(self.dim, device="cpu").reshape(self.count, self.size)
        return place[:, :, None].expand(self.shape), place[:, None, :].expand(self.shape)

    def split(self, x: Tensor) -> Tensor:
        """Split vectors (..., D) into those of the squares, (..., count, size)."""
        return x.unflatten(-1, (self.count, self.size))

    def join(self, x: Tensor) -> Tensor:
        """Join the vectors of the squares (..., count, size) into one, (..., D)."""
        return x.flatten(-2)

    def _split_rows(self, rows: Tensor) -> Tensor:
        return self.split(rows).movedim(-2, -3)

    def _join_rows(self, rows: Tensor) -> Tensor:
        return self.join(rows.movedim(-3, -2))

    def _members(self, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return result[0], result[1].all(-1)


@remembered
def _square(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The identity, and where a square has its diagonal and what is below it."""
    eye = torch.eye(size, dtype=dtype, device=device)
    return eye, torch.ones_like(eye, dtype=torch.bool).tril()


@remembered
def _triangle(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions of the lower triangle in a flat square, with √½ on the diagonal; back, with mirror images and √2."""
    rows, columns = torch.tril_indices(size, size, device=device)
    lower, on = rows * size + columns, rows == columns
    shares = torch.ones(len(rows), dtype=dtype, device=device).masked_fill(on, math.sqrt(0.5))
    spread = torch.empty(size, size, dtype=lower.dtype, device=device)
    spread[rows, columns] = spread[columns, rows] = torch.arange(len(rows), device=device)
    unshares = torch.ones(size, size, dtype=dtype, device=device).fill_diagonal_(2 * math.sqrt(0.5)).flatten()
    return lower, shares, spread.flatten(), unshares


def _constants(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as `_triangle`, which a graph of torch.compile does not make again at each call."""
    return _triangle(size, dtype, device)


_constants.__dict__["_dynamo_marked_constant"] = True


def _taken(entries: Tensor, index: Tensor) -> Tensor:
    """Entries of the last dimension, by the way that costs least."""
    return entries.index_select(0, index) if entries.ndim == 1 else entries[..., index]


def _mv(
    matrix: Tensor,  # (*batch, D, D)
    vector: Tensor,  # (*sample, *batch, D)
) -> Tensor:
    """A x, for samples on the left of the batch."""
    extra = vector.ndim - matrix.ndim + 1
    if extra <= 0 or matrix.ndim == 2:
        return linalg.multiply(matrix, vector)
    columns = vector.flatten(0, extra - 1).movedim(0, -1)  # (*batch, D, S)
    return (matrix @ columns).movedim(-1, 0).unflatten(0, vector.shape[:extra])


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


# Diagonal matrices: the algebra of a mean field, without a square anywhere


@dataclass(frozen=True)
class Diagonal(FullAlgebra):
    """Diagonal matrices, stored as their diagonals (*batch, D): the pattern of a mean field.

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

    # vectors
    mv = tmv = verb("mv", lambda self, root, x: root * x)
    smv = verb("smv", lambda self, symmetric, x: symmetric * x)
    solve = tsolve = verb("solve", lambda self, root, x: x / root)
    neighbours = verb("neighbours", lambda self, x: x)

    # matrices
    matmul = verb("matmul", lambda self, left, right: left * right)
    tmatmul = verb("tmatmul", lambda self, root, symmetric: root * symmetric)
    congruence = verb("congruence", lambda self, root, symmetric: root.square() * symmetric)
    inverse = verb("inverse", lambda self, root: root.reciprocal())
    exp = verb("exp", lambda self, symmetric: symmetric.exp())
    right_solve = verb("right_solve", lambda self, matrix, root: matrix / root)
    unconjugate = verb("unconjugate", lambda self, root, vector, matrix: (vector / root, matrix / root.square()))
    transpose = tril = one_sided = diagonal = lower_root = verb("transpose", lambda self, matrix: matrix)
    scale_columns = verb("scale_columns", lambda self, root, factors: root * factors)
    lower = sym_lower = verb("lower", lambda self, left, right: (left * right).sum(-2))

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Take the square roots of the diagonal, and say for which members all entries are positive and finite."""
        ok = ((symmetric > 0) & torch.isfinite(symmetric)).all(-1)
        return torch.where(ok[..., None], symmetric, 1.0).sqrt(), ok

    reverse_cholesky = cholesky

    def positive_root(self, root: Structured) -> tuple[Structured, Tensor]:
        """Take absolute values, and say for which members the root is finite and regular."""
        positive = root.abs()
        return positive, ((positive > 0) & (positive < torch.inf)).all(-1)

    # entries and metric, without an index
    eye = verb("eye", lambda self, like: torch.ones_like(like))
    with_diagonal = verb("with_diagonal", lambda self, matrix, new: new)
    from_dense = verb("from_dense", lambda self, matrix: matrix.diagonal(dim1=-2, dim2=-1))
    to_dense = verb("to_dense", lambda self, root: torch.diag_embed(root))
    full = verb("full", lambda self, symmetric: torch.diag_embed(symmetric))
    tril_half = verb("tril_half", lambda self, symmetric: 0.5 * symmetric)
    flat = verb("flat", lambda self, symmetric: symmetric * 0.5**0.5)
    unflat = verb("unflat", lambda self, vector: vector * 2**0.5)
    norm2 = verb("norm2", lambda self, symmetric: self.dot(symmetric, symmetric))

    # what the data bring, without a D x D matrix on the way
    rows = verb("rows", lambda self, rows, root, transposed=False: rows * root[..., None, :])
    row_norms = verb("row_norms", lambda self, root, transposed=False: root.square())
    gram = verb("gram", lambda self, root, weights, transposed=False: root.square() * weights)

    def conjugate(self, root: Structured, dense: Tensor, transposed: bool = False) -> Structured:
        """Keep the diagonal of Cᵀ H C, which is C_ii² H_ii."""
        return root.square() * dense.diagonal(dim1=-2, dim2=-1)

    def sparse_gram(self, root: Structured, rows: Tensor, weights: Tensor, transposed: bool = False) -> Structured:
        """Keep the diagonal of Cᵀ Xᵀ diag(b) X C, without a D x D matrix on the way."""
        return root.square() * (sparse.square(rows).mT @ weights)

    def sparse_row_norms(self, root: Structured, rows: Tensor, transposed: bool = False) -> Tensor:
        """Compute ‖Cᵀx_n‖² for sparse rows, (N,), without a D x D matrix on the way."""
        return sparse.square(rows) @ root.square()


# ------------------------------------------------------------------------------------ blocks of any sizes


def block_diagonal(sizes: Sequence[int]) -> FullAlgebra:
    """Make the pattern of independent blocks of coordinates, over which q then factorises (structured mean field).

    Use it where groups of latent variables are known to be nearly independent a posteriori: a step costs O(Σ size³)
    in the place of O(D³).

    Args:
        sizes: the sizes of the blocks, in the order of θ.

    Returns:
        `Dense` of one block, `Diagonal` of blocks of size 1, `EqualBlocks` of one other size, else `UnequalBlocks`.

    Raises:
        InputError: there are no sizes, or one is not a positive integer.

    >>> block_diagonal([2, 2]), block_diagonal([1, 1, 1]), block_diagonal([3])
    (EqualBlocks(count=2, size=2), Diagonal(dim=3), Dense(dim=3))
    >>> block_diagonal([1, 2]).dim
    3
    """
    sizes = read_sizes("sizes", sizes, "of blocks are positive integers, at least one", none=False)
    if len(sizes) == 1:
        return Dense(sizes[0])
    if set(sizes) == {1}:
        return Diagonal(len(sizes))
    if len(set(sizes)) == 1:
        return EqualBlocks(len(sizes), sizes[0])
    return UnequalBlocks(sizes)


def _of_vectors(name: str) -> Any:
    """The verb of that name from a matrix and vectors to vectors, part by part."""
    return verb(name, lambda self, A, x: self._vector(self._each(name, self._matrices(A), self._vectors(x))))


def _of_matrices(name: str) -> Any:
    """The verb of that name from matrices to a matrix, part by part."""
    return verb(name, lambda self, *given: self._matrix(self._each(name, *map(self._matrices, given))))


def _factored(name: str) -> Any:
    """The factorisation of that name, part by part, and for which members that of every part exists."""

    def factored(self: "UnequalBlocks", symmetric: Structured) -> tuple[Structured, Tensor]:
        factors, ok = zip(*self._each(name, self._matrices(symmetric)), strict=True)
        return self._matrix(factors), torch.stack(ok).all(0)

    return verb(name, factored)


class UnequalBlocks(FullAlgebra):
    """Block-diagonal matrices with squares of several sizes, stored flat, (*batch, E).

    Squares of one size stand together and are worked on together, so that the number of torch calls is that of the
    different sizes.  `block_diagonal` makes it where it is needed.

    Args:
        sizes: the sizes of the blocks, in the order of θ.

    >>> blocks = UnequalBlocks((1, 2, 1))
    >>> blocks.to_dense(torch.arange(1.0, 7.0)).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 3.0, 4.0, 0.0], [0.0, 5.0, 6.0, 0.0], [0.0, 0.0, 0.0, 2.0]]
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes = read_sizes("sizes", sizes, "of blocks are positive integers, at least one", none=False)
        starts = [0, *itertools.accumulate(sizes)][:-1]
        self._parts, order = [], []
        for kind in sorted(set(sizes)):
            first = [start for start, size in zip(starts, sizes, strict=True) if size == kind]
            self._parts.append(block_diagonal([kind] * len(first)))
            order += [start + k for start in first for k in range(kind)]
        self._order = torch.tensor(order, device="cpu")
        self._back = torch.argsort(self._order)
        self._dims = [part.dim for part in self._parts]
        self._entries = [len(part.positions()[0].flatten()) for part in self._parts]
        self.dim, self.shape, self.widest = sum(sizes), (sum(self._entries),), max(sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnequalBlocks) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        return f"UnequalBlocks(sizes={self.sizes})"

    # ---------------------------------------------------------------------------- taken apart, put together

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return row and column of every entry, size by size."""
        placed = [part.positions() for part in self._parts]
        order = self._order.split(self._dims)
        rows, columns = (
            torch.cat([place[pair[axis].flatten()] for place, pair in zip(order, placed, strict=True)])
            for axis in (0, 1)
        )
        return rows, columns

    def _vectors(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[..., self._order.to(x.device)].split(self._dims, -1)

    def _vector(self, parts: Iterable[Tensor]) -> Tensor:
        joined = torch.cat(list(parts), -1)
        return joined[..., self._back.to(joined.device)]

    def _matrices(self, matrix: Structured) -> list[Structured]:
        flat = matrix.split(self._entries, -1)
        return [one.unflatten(-1, part.shape) for one, part in zip(flat, self._parts, strict=True)]

    def _matrix(self, parts: Iterable[Structured]) -> Structured:
        return torch.cat([one.flatten(-part.rank) for one, part in zip(parts, self._parts, strict=True)], -1)

    def _each(self, verb: str, *arguments: Iterable[Tensor]) -> list[Any]:
        """A verb of the parts, on the arguments of each."""
        return [getattr(part, verb)(*given) for part, *given in zip(self._parts, *arguments, strict=True)]

    # ---------------------------------------------------------------------------- the verbs, part by part

    mv, tmv, solve, tsolve = map(_of_vectors, ("mv", "tmv", "solve", "tsolve"))
    matmul, tmatmul, congruence, right_solve = map(_of_matrices, ("matmul", "tmatmul", "congruence", "right_solve"))
    inverse, transpose, exp, lower_root = map(_of_matrices, ("inverse", "transpose", "exp", "lower_root"))
    cholesky, reverse_cholesky = map(_factored, ("cholesky", "reverse_cholesky"))

    def lower(self, left: Tensor, right: Tensor) -> Structured:
        """Keep the blocks of Σ_n left_n right_nᵀ."""
        return self._matrix(self._each("lower", self._vectors(left), self._vectors(right)))

    def unconjugate(self, root: Structured, vector: Tensor, matrix: Structured) -> tuple[Tensor, Structured]:
        """Compute L⁻ᵀ a and L⁻ᵀ W L⁻¹ block by block."""
        pairs = self._each("unconjugate", self._matrices(root), self._vectors(vector), self._matrices(matrix))
        return self._vector([a for a, _ in pairs]), self._matrix([W for _, W in pairs])

    def conjugate(self, root: Structured, dense: Tensor, transposed: bool = False) -> Structured:
        """Keep the blocks of Cᵀ H C for C = L, or for C = Lᵀ where ``transposed``."""
        H, turned = self.from_dense(dense), self.transpose(root)
        return self.congruence(root if transposed else turned, H)
