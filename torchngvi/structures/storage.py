"""How the matrices of a forest are stored: squares and borders of equal nodes together, in one tensor."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_sizes, shown
from torchngvi.errors import InputError
from torchngvi.structures.blocks import EqualBlocks
from torchngvi.structures.levels import Kind, Rows, kinds_of, stacked
from torchngvi.structures.pattern import Pattern, Structured


class Part(NamedTuple):
    """The entries of the nodes of one kind."""

    square: Tensor  # (*batch, n, r, r)
    border: Tensor  # (*batch, n, p, r), the rows of the nearest ancestor first


class Stored(Pattern):
    """The entries of a forest, taken apart and put together: abstract, see `Forest`.

    For each kind of equal nodes squares (n, r, r) stand before borders (n, p, r), flat in one tensor (*batch, E).

    Args:
        parents: of each node, the number of a later node; -1 for a root.
        sizes: of the nodes, in the order of θ.
    """

    def __init__(self, parents: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        what = "are positive integers, one a node, and parents the numbers of later nodes, or -1"
        sizes = read_sizes("sizes", sizes, what, none=False)
        parents = read_sizes("parents", parents, what, at_least=-1)
        later = all(up == -1 or node < up < len(sizes) for node, up in enumerate(parents))
        if len(parents) != len(sizes) or not later:
            raise InputError(f"sizes {what}; got sizes={shown(sizes)} and parents={shown(parents)}.")
        self.parents, self.sizes = parents, sizes
        self._hash = hash((parents, sizes))
        self.kinds = tuple(kinds_of(parents, sizes))
        self._blocks = [EqualBlocks(kind.nodes, kind.size) for kind in self.kinds]
        self._entries = [kind.nodes * kind.size * rows for kind in self.kinds for rows in (kind.size, kind.above)]
        order = torch.cat([kind.place.flatten() for kind in self.kinds])
        self._back = None if torch.equal(order, torch.arange(len(order), device="cpu")) else torch.argsort(order)
        self.dim, self.shape = len(order), (sum(self._entries),)
        self.widest = max(kind.size + kind.above for kind in self.kinds)
        self.leaves = len(parents) - len(set(parents) - {-1})  # nodes without children

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Stored) and (self.parents, self.sizes) == (other.parents, other.sizes)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        below = [f" below {kind.above}" if kind.above else "" for kind in self.kinds]
        nodes = (f"{kind.nodes} of {kind.size}{text}" for kind, text in zip(self.kinds, below, strict=True))
        return f"Forest({', '.join(nodes)})"

    # ---------------------------------------------------------------------------- taken apart, put together

    def on(self, x: Tensor) -> tuple[Kind, ...]:
        """The kinds of nodes with their tables on the device of a tensor."""
        return self.kinds if x.device.type == "cpu" else _kinds_on(self, x.device)

    def parts(self, matrix: Structured) -> list[Part]:
        """Squares and borders of each kind."""
        pieces = matrix.split(self._entries, -1)
        return [
            Part(
                square.unflatten(-1, (kind.nodes, kind.size, kind.size)),
                border.unflatten(-1, (kind.nodes, kind.above, kind.size)),
            )
            for kind, square, border in zip(self.kinds, pieces[::2], pieces[1::2], strict=True)
        ]

    def matrix(self, parts: list[Part]) -> Structured:
        """Put the parts of the kinds together to one stored matrix."""
        return torch.cat([entries.flatten(-3) for part in parts for entries in part], -1)

    def split(
        self,
        columns: Tensor,  # (*batch, D, S)
    ) -> list[Tensor]:
        """The rows of the nodes, for each kind (*batch, n, r, S)."""
        return [
            (
                columns.index_select(-2, kind.place.flatten())
                if kind.start is None
                else columns.narrow(-2, kind.start, kind.nodes * kind.size)
            ).unflatten(-2, (kind.nodes, kind.size))
            for kind in self.on(columns)
        ]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Put the rows of the nodes together in the order of θ, (*batch, D, S)."""
        joined = torch.cat([part.flatten(-3, -2) for part in parts], -2)
        back = self._back if joined.device.type == "cpu" else _back_on(self, joined.device)
        return joined if back is None else joined.index_select(-2, back)

    def _squares(self, verb: Callable[[EqualBlocks, Tensor], Tensor], matrix: Structured) -> Structured:
        """A verb of the squares; borders stay as they are."""
        parts = zip(self._blocks, self.parts(matrix), strict=True)
        return self.matrix([Part(verb(blocks, part.square), part.border) for blocks, part in parts])

    def gather(
        self,
        x: Tensor,  # (*sample, *batch, D)
    ) -> list[Tensor]:
        """The coordinates of each node and of its ancestors, (*sample, *batch, n, k) for each kind of nodes."""
        rows, own = Rows(self.on(x)), self.split(x[..., None])
        for k in reversed(range(len(own))):
            x = stacked(self.kinds[k], own[k], rows.of_parents(k))
            rows.keep(k, own[k])
            own[k] = x[..., 0]
        return own

    def positions(self) -> tuple[Tensor, Tensor]:
        """Row and column of every entry."""
        rows: list[Part] = []
        columns: list[Part] = []
        for kind, above in zip(self.kinds, self.gather(torch.arange(self.dim, device="cpu")), strict=True):
            shape, own = (kind.nodes, kind.size + kind.above, kind.size), kind.place[:, None, :]
            for parts, x in ((rows, above[:, :, None]), (columns, own)):
                parts.append(Part(*x.expand(shape).split([kind.size, kind.above], 1)))
        return self.matrix(rows), self.matrix(columns)

    # ---------------------------------------------------------------------------- entries

    @property
    def parameters(self) -> int:
        """The free entries of a root."""
        above = sum(kind.nodes * kind.size * kind.above for kind in self.kinds)
        return above + sum(blocks.parameters for blocks in self._blocks)

    def eye(self, like: Tensor) -> Structured:
        """The identity for vectors such as ``like``."""
        eye = self.with_diagonal(like.new_zeros(self.shape), like.new_ones(self.dim))
        return eye.expand(*like.shape[:-1], -1)

    def diagonal(self, matrix: Structured) -> Tensor:
        """Take the diagonal out of a matrix, (*batch, D)."""
        return self.join([part.square.diagonal(dim1=-2, dim2=-1)[..., None] for part in self.parts(matrix)])[..., 0]

    def with_diagonal(self, matrix: Structured, new: Tensor) -> Structured:
        """The matrix with another diagonal; the other entries are the same to the last bit."""
        parts = zip(self._blocks, self.parts(matrix), self.split(new[..., None]), strict=True)
        return self.matrix(
            [Part(blocks.with_diagonal(part.square, x.flatten(-3)), part.border) for blocks, part, x in parts]
        )

    def tril(self, matrix: Structured) -> Structured:
        """The entries on and below the diagonal."""
        return self._squares(EqualBlocks.tril, matrix)

    def tril_half(self, symmetric: Structured) -> Structured:
        """Halve a symmetric matrix: K = tril½[A], A = K + Kᵀ."""
        return self._squares(EqualBlocks.tril_half, symmetric)

    def one_sided(self, matrix: Structured) -> Structured:
        """The symmetric matrix with these entries on and below the diagonal."""
        return self._squares(EqualBlocks.one_sided, matrix)

    def flat(self, symmetric: Structured) -> Tensor:
        """The vector of A, (*batch, `parameters`), whose dot product with that of A' is ½⟨A, A'⟩_F."""
        parts = zip(self._blocks, self.parts(symmetric), strict=True)
        return torch.cat(
            [x for blocks, (square, border) in parts for x in (blocks.flat(square), border.flatten(-3))], -1
        )

    def unflat(self, vector: Tensor) -> Structured:
        """The symmetric matrix of such a vector."""
        sizes = [
            n
            for blocks, border in zip(self._blocks, self._entries[1::2], strict=True)
            for n in (blocks.parameters, border)
        ]
        pieces = vector.split(sizes, -1)
        squares = (blocks.unflat(x).flatten(-3) for blocks, x in zip(self._blocks, pieces[::2], strict=True))
        return torch.cat([x for pair in zip(squares, pieces[1::2], strict=True) for x in pair], -1)

    def scale_columns(self, root: Structured, factors: Tensor) -> Structured:
        """Multiply each column of a root by a factor of its own: L diag(s)."""
        parts = zip(self.parts(root), self.split(factors[..., None]), strict=True)
        return self.matrix([Part(square * s.mT, border * s.mT) for (square, border), s in parts])


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for later calls, which may be differentiated
def _kinds_on(pattern: Stored, device: torch.device) -> tuple[Kind, ...]:
    return tuple(kind.on(device) for kind in pattern.kinds)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _back_on(pattern: Stored, device: torch.device) -> Tensor | None:
    return None if pattern._back is None else pattern._back.to(device)
