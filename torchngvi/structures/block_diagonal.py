"""Block-diagonal matrices with blocks of any sizes."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_sizes
from torchngvi.structures.blocks import Dense, Diagonal, EqualBlocks, FullAlgebra, verb
from torchngvi.structures.pattern import Structured


def block_diagonal(
    sizes: Sequence[int],  # of the blocks, in the order of θ
) -> FullAlgebra:
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
