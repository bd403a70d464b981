"""The nodes of a forest by kinds, what passes between them, and how the matrices of a forest are stored."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_sizes, shown
from torchngvi.errors import InputError
from torchngvi.structures.blocks import EqualBlocks
from torchngvi.structures.pattern import Pattern, Structured

# The nodes of a forest by kinds: nodes of one size whose parents are of one kind, worked on as one batch
#
# What passes between a node and its ancestors goes kind by kind: up from the leaves as sums over siblings, down from
# the roots as the values of the parent.


class Kind(NamedTuple):
    """The nodes of one kind: n of them with r entries each, whose ancestors have p entries together."""

    nodes: int  # n
    size: int  # r
    above: int  # p
    up: int | None  # the kind of the parents, later in the order; of roots none
    mothers: int  # m, the nodes of that kind
    parents: Tensor  # (n,), where in its kind each parent stands
    place: Tensor  # (n, r), the coordinates of θ
    start: int | None  # of the first coordinate, where the others follow it in the order of θ
    inner: bool  # some of the nodes have children

    def at(self, places: Tensor) -> "Kind":
        """Return the same kind with its coordinates elsewhere in θ, (D,)."""
        place = places[self.place]
        return self._replace(place=place, start=_first_of_a_run(place))

    def on(self, device: torch.device) -> "Kind":
        """Return the same kind with its tables on a device."""
        return self._replace(parents=self.parents.to(device), place=self.place.to(device))


def _first_of_a_run(place: Tensor) -> int | None:
    """The first of some coordinates, (n, r), where the others follow it one by one; else None."""
    first = int(place[0, 0])
    return first if torch.equal(place.flatten(), torch.arange(first, first + place.numel(), device="cpu")) else None


def kinds_of(
    parents: Sequence[int],  # of each node, a later node; -1 of a root
    sizes: Sequence[int],
) -> list[Kind]:
    """Sort the nodes of a forest into kinds: nodes of one size whose parents are of one kind."""
    if (root := len(sizes) - 1) and parents[-1] == -1 and set(parents[:-1]) == {root} and len(set(sizes[:-1])) == 1:
        return _arrow(root, sizes[0], sizes[-1])
    keys: dict[tuple[int, int], int] = {}  # size and kind of the parent, roots first
    members: list[list[int]] = []
    kind, rank = [0] * len(sizes), [0] * len(sizes)
    for node in reversed(range(len(sizes))):
        key = (sizes[node], kind[parents[node]] if parents[node] >= 0 else -1)
        kind[node] = keys.setdefault(key, len(keys))
        if kind[node] == len(members):
            members.append([])
        rank[node] = len(members[kind[node]])
        members[kind[node]].append(node)
    starts = torch.cumsum(torch.tensor([0, *sizes[:-1]], device="cpu"), 0)
    made: list[Kind] = []
    for size, up in keys:
        nodes = members[len(made)][::-1]  # they were met from the last to the first
        place = starts[nodes][:, None] + torch.arange(size, device="cpu")
        above = mothers = 0
        places = torch.zeros(len(nodes), dtype=torch.long, device="cpu")
        if up >= 0:
            above, mothers = made[up].above + made[up].size, made[up].nodes
            places = mothers - 1 - torch.tensor([rank[parents[node]] for node in nodes], device="cpu")
        later, inner = (None if up < 0 else len(keys) - 1 - up), any(key[1] == len(made) for key in keys)
        made.append(Kind(len(nodes), size, above, later, mothers, places, place, _first_of_a_run(place), inner))
    return made[::-1]


def _arrow(groups: int, size: int, root: int) -> list[Kind]:
    """The kinds of equal groups below one root, at once: there may be millions of them."""
    end = groups * size
    place = torch.arange(end + root, device="cpu")
    zeros = torch.zeros(groups, dtype=torch.long, device="cpu")
    return [
        Kind(groups, size, root, 1, 1, zeros, place[:end].unflatten(0, (groups, size)), 0, False),
        Kind(1, root, 0, None, 0, zeros[:1], place[None, end:], end, True),
    ]


def inherited(
    kind: Kind,
    values: Tensor,  # (*batch, m, a, b), of the parents
) -> Tensor:
    """Give each node the values of its parent."""
    return values if kind.mothers == 1 else values.index_select(-3, kind.parents)


def below(
    kind: Kind,
    values: Tensor,  # A, (*batch, m, a, b), of the parents
    own: Tensor,  # B, (*batch, n, b, c)
) -> Tensor:
    """Multiply the parent's matrix by each node's own."""
    if kind.mothers == 1:
        return torch.einsum("...ab,...nbc->...nac", values[..., 0, :, :], own)
    return inherited(kind, values) @ own


def summed(
    kind: Kind,
    values: Tensor,  # (*batch, n, a, b)
) -> Tensor:
    """Sum the values of siblings."""
    if kind.mothers == 1:
        return values.sum(-3, keepdim=True)
    zeros = values.new_zeros(*values.shape[:-3], kind.mothers, *values.shape[-2:])
    return zeros.index_add(-3, kind.parents, values)


def summed_product(
    kind: Kind,
    left: Tensor,  # A, (*batch, n, a, b)
    right: Tensor,  # B, (*batch, n, b, c)
    entries: int = 1_000_000,  # of a factor in one sum over siblings
) -> Tensor:
    """Sum the products A B of siblings."""
    if kind.mothers > 1:
        return summed(kind, left @ right)
    at_once = max(1, entries * left.shape[-3] // max(left.numel(), right.numel(), 1))  # the sum makes copies of both
    parts = zip(left.split(at_once, -3), right.split(at_once, -3), strict=True)
    return sum(torch.einsum("...nab,...nbc->...ac", a, b) for a, b in parts)[..., None, :, :]  # type: ignore[index]


def stacked(
    kind: Kind,
    rows: Tensor,  # (*batch, n, a, b), of the nodes
    of_parents: Tensor | None,  # (*batch, m, c, b)
) -> Tensor:
    """Stack the rows of each node on those of its ancestors."""
    if of_parents is None:
        return rows
    upper = inherited(kind, of_parents)
    return torch.cat([rows, upper.expand(*upper.shape[:-3], kind.nodes, *upper.shape[-2:])], -2)


class Handed:
    """A matrix that each node with children keeps for them, from the roots downwards: see `Rows` and `Chains`."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds
        self._kept: dict[int, Tensor] = {}

    def of_parents(self, k: int) -> Tensor | None:
        """Return what the parents of kind k keep, (*batch, m, p, c); None for roots."""
        up = self._kinds[k].up
        return None if up is None else self._kept[up]


class Rows(Handed):
    """What ancestors hand downwards: for each node a matrix whose rows are its own, then those of its ancestors."""

    def keep(self, k: int, own: Tensor) -> None:
        """Hand down the rows of the nodes of a kind, (*batch, n, r, c)."""
        if self._kinds[k].inner:
            self._kept[k] = stacked(self._kinds[k], own, self.of_parents(k))

    def seen(self, k: int, border: Tensor) -> Tensor | None:
        """Borderᵀ times the rows of the ancestors, (*batch, n, r, c)."""
        above = self.of_parents(k)
        return None if above is None else below(self._kinds[k], above.mT, border).mT


class Chains(Handed):
    """A root restricted to each node with children and its ancestors, (*batch, n, r + p, r + p), to be handed down."""

    def restricted(self, k: int, square: Tensor, border: Tensor) -> Tensor:
        """That of the nodes of a kind, lower triangular, (*batch, n, r + p, r + p)."""
        above = self.of_parents(k)
        if above is None:
            return square
        left = torch.cat([square, border], -2)
        return torch.cat([left, stacked(self._kinds[k], torch.zeros_like(border.mT), above)], -1)

    def keep(self, k: int, square: Tensor, border: Tensor) -> None:
        """Hand it down to the children."""
        if self._kinds[k].inner:
            self._kept[k] = self.restricted(k, square, border)


class Inbox:
    """What descendants send upwards: for each node a matrix whose rows are its own, then those of its ancestors."""

    def __init__(self, kinds: Sequence[Kind], symmetric: bool = False) -> None:
        self._kinds, self._symmetric = kinds, symmetric
        self._letters: list[Tensor | None] = [None] * len(kinds)

    def own(self, k: int, x: Tensor, sign: int = 1) -> Tensor:
        """The rows of the nodes, (*batch, n, r, c), and what they received added, or taken away."""
        letter, kind = self._letters[k], self._kinds[k]
        return x if letter is None else x + sign * letter[..., : kind.size, : x.shape[-1]]

    def border(self, k: int, x: Tensor, sign: int = 1) -> Tensor:
        """Add what has come for the rows of the ancestors to x, (*batch, n, p, r)."""
        letter, kind = self._letters[k], self._kinds[k]
        return x if letter is None else x + sign * letter[..., kind.size :, : kind.size]

    def post(
        self,
        k: int,
        *factors: Tensor,  # A, (*batch, n, p, b), and B, (*batch, n, b, c), once or twice
    ) -> None:
        """Send A B, or the sum of such products, to the ancestors, with what was received for them."""
        if self._kinds[k].up is not None:
            pairs = zip(factors[::2], factors[1::2], strict=True)
            products = [summed_product(self._kinds[k], left, right) for left, right in pairs]
            self._forward(k, products[0] if len(products) == 1 else products[0] + products[1])

    def deliver(
        self,
        k: int,
        letter: Tensor,  # (*batch, n, r + p, c)
    ) -> None:
        """Add to what the nodes have received, and what they forward."""
        old = self._letters[k]
        self._letters[k] = letter if old is None else old + letter

    def forward(self, k: int) -> None:
        """Send what was received for the ancestors, and nothing more."""
        if self._kinds[k].up is not None and self._letters[k] is not None:
            self._forward(k, None)

    def _forward(self, k: int, sent: Tensor | None) -> None:
        kind, letter = self._kinds[k], self._letters[k]
        assert kind.up is not None
        if letter is not None:
            rest = summed(kind, letter[..., kind.size :, kind.size if self._symmetric else 0 :])
            sent = rest if sent is None else sent + rest
        if sent is not None:
            self.deliver(kind.up, sent)


# How the matrices are stored: squares and borders of equal nodes together, in one tensor


class Part(NamedTuple):
    """The entries of the nodes of one kind."""

    square: Tensor  # (*batch, n, r, r)
    border: Tensor  # (*batch, n, p, r), the rows of the nearest ancestor first


class Stored(Pattern):
    """The entries of a forest, for each kind squares (n, r, r) before borders (n, p, r), flat in one tensor."""

    order: tuple[int, ...] | None = None  # in pickles of 0.2.0 too

    def __init__(self, parents: tuple[int, ...], sizes: tuple[int, ...], order: tuple[int, ...] | None = None) -> None:
        what = "are positive integers, one a node, and parents the numbers of later nodes, or -1"
        sizes = read_sizes("sizes", sizes, what, none=False)
        parents = read_sizes("parents", parents, what, at_least=-1)
        later = all(up == -1 or node < up < len(sizes) for node, up in enumerate(parents))
        if len(parents) != len(sizes) or not later:
            raise InputError(f"sizes {what}; got sizes={shown(sizes)} and parents={shown(parents)}.")
        self.parents, self.sizes = parents, sizes
        self.kinds = tuple(kinds_of(parents, sizes))
        if order is not None:
            what = f"has each of the {sum(sizes)} coordinates once"
            order = read_sizes("order", order, what, at_least=0)
            straight = tuple(range(sum(sizes)))
            if tuple(sorted(order)) != straight:
                raise InputError(f"order {what}; got {shown(order)}.")
            if order != straight:
                self.order, places = order, torch.tensor(order, device="cpu")
                self.kinds = tuple(kind.at(places) for kind in self.kinds)
        self._hash = hash((parents, sizes, self.order))
        self._blocks = [EqualBlocks(kind.nodes, kind.size) for kind in self.kinds]
        self._entries = [kind.nodes * kind.size * rows for kind in self.kinds for rows in (kind.size, kind.above)]
        places = torch.cat([kind.place.flatten() for kind in self.kinds])
        as_they_are = torch.equal(places, torch.arange(len(places), device="cpu"))
        self._back = None if as_they_are else torch.argsort(places)
        self.dim, self.shape = len(places), (sum(self._entries),)
        self.widest = max(kind.size + kind.above for kind in self.kinds)
        self.leaves = len(parents) - len(set(parents) - {-1})  # nodes without children

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Stored):
            return False
        return (self.parents, self.sizes, self.order) == (other.parents, other.sizes, other.order)

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
