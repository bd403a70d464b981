"""Matrices of a forest of nodes, arrows and nested groups, and how they are stored.

Every node holds a block of coordinates, children before their parents.  A lower-triangular matrix has entries in the
square of each node and in the border below it, whose rows are those of the node's ancestors.  Products, inverses and
congruences stay in the pattern, and a Cholesky factor fills nothing in (perfect elimination: Rose 1970).  As that of a
precision it says that nodes of different branches are independent, given their common ancestors: what a model with
local parameters of groups and global ones says of its posterior.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torchngvi.arguments import read_list, read_size, read_sizes, shown
from torchngvi.errors import InputError
from torchngvi.numerics import linalg
from torchngvi.numerics.arrays import remembered
from torchngvi.numerics.linalg import small_product as product
from torchngvi.structures.blocks import EqualBlocks, FullAlgebra, block_diagonal, verb
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
                moved = [(kind, places[kind.place]) for kind in self.kinds]
                self.kinds = tuple(k._replace(place=place, start=_first_of_a_run(place)) for k, place in moved)
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

    tril = verb("tril", lambda self, matrix: self._squares(EqualBlocks.tril, matrix))
    tril_half = verb("tril_half", lambda self, symmetric: self._squares(EqualBlocks.tril_half, symmetric))
    one_sided = verb("one_sided", lambda self, matrix: self._squares(EqualBlocks.one_sided, matrix))

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


@remembered
def _kinds_on(pattern: Stored, device: torch.device) -> tuple[Kind, ...]:
    return tuple(k._replace(parents=k.parents.to(device), place=k.place.to(device)) for k in pattern.kinds)


@remembered
def _back_on(pattern: Stored, device: torch.device) -> Tensor | None:
    return None if pattern._back is None else pattern._back.to(device)


# ------------------------------------------------------------------------------------ the pattern


# Rows of a sparse design on the cliques of a forest: each row's columns lie in one node and its ancestors
#
# Of such rows H = Xᵀ diag(b) X has the pattern, and the variance of a predictor is that under the marginal of one
# clique. Designs of group-wise and global columns are of that kind: nothing of D x D is needed for them.


class Placed(NamedTuple):
    """The rows whose deepest node is of one kind."""

    kind: int
    clique: Tensor  # (N_k,), the node of each row within its kind
    rows: Tensor  # (N_k,), which rows of X these are
    entries: Tensor  # which of the stored values of X are theirs
    at: Tensor  # the place of those in a flat (N_k, k)
    size: int  # k

    def dense(self, values: Tensor) -> Tensor:
        """The rows, each over the k coordinates of its clique, (N_k, k)."""
        flat = values.new_zeros(len(self.rows) * self.size)
        return flat.index_add(0, self.at, values[self.entries]).unflatten(0, (-1, self.size))


_KNOWN = WeakIdKeyDictionary()  # X -> where its rows stand; the columns of a design do not change


def placed(
    pattern: Stored,
    X: Tensor,  # (N, D) sparse CSR
) -> list[Placed] | None:
    """Find for each row of a sparse design the clique that its columns lie in: a node and its ancestors."""
    known: dict[Stored, list[Placed] | None] = _KNOWN.setdefault(X, {})
    if pattern not in known:
        with torch.inference_mode(False), torch.no_grad():
            known[pattern] = _placed(pattern, X)
    return known[pattern]


def _placed(pattern: Stored, X: Tensor) -> list[Placed] | None:
    columns = X.col_indices().long()
    row = torch.arange(len(X), device=X.device).repeat_interleave(X.crow_indices().diff().long())
    lowest = torch.full((len(X),), pattern.dim, device=X.device).scatter_reduce(0, row, columns, "amin")
    kinds = pattern.on(columns)
    kind_of, node_of = torch.full((2, pattern.dim + 1), -1, device=X.device)  # of no column, no node
    for k, kind in enumerate(kinds):
        kind_of[kind.place] = k
        node_of[kind.place] = torch.arange(kind.nodes, device=X.device)[:, None]
    found = []
    cliques = pattern.gather(torch.arange(pattern.dim, device=X.device))
    for k, clique in enumerate(cliques):
        mine = kind_of[lowest] == k
        rows, entries = mine.nonzero()[:, 0], mine[row].nonzero()[:, 0]
        number = (mine.cumsum(0) - 1)[row[entries]]
        same = clique[node_of[lowest[row[entries]]]] == columns[entries, None]
        if not bool(same.any(-1).all()):
            return None
        size = clique.shape[-1]
        at = number * size + same.to(torch.uint8).argmax(-1)
        found.append(Placed(k, node_of[lowest[rows]], rows, entries, at, size))
    return found


class Forest(Stored):
    """Lower-triangular matrices over a forest of nodes, stored flat, (*batch, E): see `arrow`, `nested`, `forest`.

    The entries of nodes of one size whose parents are of one kind stand together, squares (n, r, r) before borders
    (n, p, r), and every verb is a few batches of small products for each kind.  Time and memory of a verb grow with E.

    Args:
        parents: of each node, the number of a later node; -1 for a root.
        sizes: of the nodes.
        order: the coordinates of θ at which the nodes have their entries, one node after another; by default 0, 1, ....
            In another order a root is lower triangular once its rows and columns are taken in that order.

    >>> tree = Forest((2, 2, -1), (1, 1, 1))
    >>> tree.to_dense(torch.arange(1.0, 6.0)).tolist()
    [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    """

    # ---------------------------------------------------------------------------- vectors

    def _by_columns(self, verb: Callable[..., Tensor], root: Structured, x: Tensor, solving: bool) -> Tensor:
        """A verb for columns (*batch, D, S), of a vector with samples on the left of the batch."""
        extra, parts = x.ndim - root.ndim, self.parts(root)
        if extra <= 0:
            return verb(parts, x[..., None], solving)[..., 0]
        columns = x.flatten(0, extra - 1).movedim(0, -1)
        return verb(parts, columns, solving).movedim(-1, 0).unflatten(0, x.shape[:extra])

    def _upwards(self, parts: list[Part], columns: Tensor, solving: bool) -> Tensor:
        """L x, or L⁻¹ x, from the leaves upwards."""
        inbox, out = Inbox(self.on(columns)), []
        for k, ((square, border), x) in enumerate(zip(parts, self.split(columns), strict=True)):
            own = linalg.small_solve(square, inbox.own(k, x, -1)) if solving else inbox.own(k, product(square, x))
            out.append(own)
            inbox.post(k, border, own if solving else x)
        return self.join(out)

    def _downwards(self, parts: list[Part], columns: Tensor, solving: bool) -> Tensor:
        """Lᵀ x, or L⁻ᵀ x, from the roots downwards."""
        rows, out = Rows(self.on(columns)), self.split(columns)
        for k, (square, border) in reversed(list(enumerate(parts))):
            x, above = out[k], rows.seen(k, border)
            if solving:
                out[k] = linalg.small_tsolve(square, x if above is None else x - above)
            else:
                own = product(square.mT, x)
                out[k] = own if above is None else own + above
            rows.keep(k, out[k] if solving else x)
        return self.join(out)

    mv = verb("mv", lambda self, root, x: self._by_columns(self._upwards, root, x, False))
    solve = verb("solve", lambda self, root, x: self._by_columns(self._upwards, root, x, True))
    tmv = verb("tmv", lambda self, root, x: self._by_columns(self._downwards, root, x, False))
    tsolve = verb("tsolve", lambda self, root, x: self._by_columns(self._downwards, root, x, True))

    def row_norms(self, root: Structured, transposed: bool = False) -> Tensor:
        """diag(L Lᵀ), or diag(Lᵀ L), (*batch, D)."""
        ones = root.new_ones(*root.shape[:-1], self.dim)
        return (self.tmv if transposed else self.mv)(root.square(), ones)

    # ---------------------------------------------------------------------------- matrices

    def matmul(self, left: Structured, right: Structured) -> Structured:
        """Multiply two roots of the forest: L M."""
        kinds, lefts, out = self.on(left), self.parts(left), []
        chains = _chains(kinds, lefts)
        for k, ((square, border), other) in enumerate(zip(lefts, self.parts(right), strict=True)):
            down, above = product(border, other.square), chains.of_parents(k)
            if above is not None:
                down = down + below(kinds[k], above, other.border)
            out.append(Part(product(square, other.square), down))
        return self.matrix(out)

    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """The entries of Lᵀ A on and below the diagonal, zeros above."""
        kinds, roots, out = self.on(root), self.parts(root), []
        chains = _chains(kinds, roots)
        for k, ((square, border), other) in enumerate(zip(roots, self.parts(symmetric), strict=True)):
            own, above = product(square.mT, other.square) + border.mT @ other.border, chains.of_parents(k)
            down = border if above is None else below(kinds[k], above.mT, other.border)
            out.append(Part(own.tril(), down))
        return self.matrix(out)

    def inverse(self, root: Structured) -> Structured:
        """Compute L⁻¹ from the roots downwards."""
        kinds, out = self.on(root), self.parts(root)
        chains = Chains(kinds)  # of the inverse
        for k, (square, border) in reversed(list(enumerate(out))):
            own, above = linalg.small_inverse(square), chains.of_parents(k)
            down = border if above is None else -below(kinds[k], above, product(border, own))
            out[k] = Part(own, down)
            chains.keep(k, own, down)
        return self.matrix(out)

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Factor A = L Lᵀ from the leaves upwards, without fill-in, and say for which members the factor exists."""
        inbox, out, fine = Inbox(self.on(symmetric), symmetric=True), [], []
        for k, (square, border) in enumerate(self.parts(symmetric)):
            lower, ok = linalg.small_cholesky(inbox.own(k, square, -1))
            down = linalg.small_solve(lower, inbox.border(k, border, -1).mT).mT
            inbox.post(k, down, down.mT)
            out.append(Part(lower, down))
            fine.append(ok.all(-1))
        return self.matrix(out), torch.stack(fine).all(0)

    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """Compute the symmetric matrix L A Lᵀ, which has the pattern of the forest."""
        kinds, roots, out = self.on(root), self.parts(root), []
        chains, inbox = _chains(kinds, roots), Inbox(kinds, symmetric=True)
        for k, ((square, border), other) in enumerate(zip(roots, self.parts(symmetric), strict=True)):
            own, down, above = product(product(square, other.square), square.mT), border, chains.of_parents(k)
            if above is not None:
                turned = below(kinds[k], above, other.border)
                half = product(border, other.square) + turned
                down = product(half, square.mT)
                inbox.post(k, half, border.mT, border, turned.mT)
            out.append(Part(inbox.own(k, own), inbox.border(k, down)))
        return self.matrix(out)

    def gram(self, root: Structured, weights: Tensor, transposed: bool = False) -> Structured:
        """Compute the stored entries of Cᵀ diag(w) C for C = L, or for C = Lᵀ where ``transposed``."""
        weights = weights.expand(*root.shape[:-1], self.dim)
        if transposed:
            return self.congruence(root, self.with_diagonal(torch.zeros_like(root), weights))
        kinds, roots, out = self.on(root), self.parts(root), []
        chains, rows, w = _chains(kinds, roots), Rows(kinds), self.split(weights[..., None])
        for k, (square, border) in reversed(list(enumerate(roots))):
            rows.keep(k, w[k])
            own, down = product(square.mT, w[k] * square), border
            above, w_above = chains.of_parents(k), rows.of_parents(k)
            if above is not None and w_above is not None:
                weighted = inherited(kinds[k], w_above) * border
                own, down = own + border.mT @ weighted, below(kinds[k], above.mT, weighted)
            out.append(Part(own, down))
        return self.matrix(out[::-1])

    def lower(self, left: Tensor, right: Tensor) -> Structured:
        """Compute the stored entries of Σ_n left_n right_nᵀ."""
        kinds, rows, out = self.on(left), Rows(self.on(left)), []
        lefts, rights = self.split(left.mT), self.split(right.mT)  # the N rows are columns of each node
        for k in reversed(range(len(kinds))):
            rows.keep(k, lefts[k])
            square, above = lefts[k] @ rights[k].mT, rows.of_parents(k)
            border = square[..., :0, :] if above is None else below(kinds[k], above, rights[k].mT)
            out.append(Part(square, border))
        return self.matrix(out[::-1])

    # ---------------------------------------------------------------------------- sparse rows

    def sparse_gram(self, root: Structured, rows: Tensor, weights: Tensor, transposed: bool = False) -> Structured:
        """Compute the stored entries of Cᵀ Xᵀ diag(b) X C; without a D x D matrix where each row is of one clique."""
        where = placed(self, rows) if transposed else None  # Lᵀ of a row leaves its clique
        if where is None:
            return super().sparse_gram(root, rows, weights, transposed)
        vectors: list[Tensor | None] = []
        matrices: list[Tensor | None] = []
        for k, kind in enumerate(self.kinds):
            x = where[k].dense(rows.values())
            H = root.new_zeros(kind.nodes, x.shape[-1], x.shape[-1])
            outer = (weights[where[k].rows, None] * x)[:, :, None] * x[:, None, :]
            matrices.append(H.index_add(0, where[k].clique, outer))
            vectors.append(H[..., 0])
        return self.congruence(root, self.scatter(vectors, matrices)[1])

    def sparse_row_norms(self, root: Structured, rows: Tensor, transposed: bool = False) -> Tensor:
        """Compute ‖Cᵀx_n‖², (N,), without a D x D matrix where each row is of one clique."""
        where = placed(self, rows) if transposed else None
        if where is None:
            return super().sparse_row_norms(root, rows, transposed)
        norms = root.new_zeros(len(rows))
        for here, chain in zip(where, self.cliques(root), strict=True):
            x = (chain[here.clique] @ here.dense(rows.values())[..., None])[..., 0]
            norms = norms.index_add(0, here.rows, x.square().sum(-1))
        return norms

    # ---------------------------------------------------------------------------- cliques

    def cliques(self, root: Structured) -> list[Tensor]:
        """The root restricted to each node and its ancestors, (*batch, n, k, k) for each kind: of marginals."""
        parts = self.parts(root)
        chains = _chains(self.on(root), parts)
        return [chains.restricted(k, *part) for k, part in enumerate(parts)]

    def scatter(
        self,
        vectors: list[Tensor | None],  # a_c of each kind, (*batch, n, k); None of kinds without a term
        matrices: list[Tensor | None],  # W_c, (*batch, n, k, k), symmetric
    ) -> tuple[Tensor, Structured]:
        """Sums over cliques of Cᵀg and of Π(CᵀHC) in their frames: the vector (*batch, D) and the symmetric matrix."""
        like = next(x for x in vectors if x is not None)
        kinds, a, W = self.on(like), [], []
        inboxes = Inbox(kinds), Inbox(kinds, symmetric=True)
        for k, (kind, vector, matrix) in enumerate(zip(kinds, vectors, matrices, strict=True)):
            if vector is not None and matrix is not None:
                inboxes[0].deliver(k, vector[..., None])
                inboxes[1].deliver(k, matrix)
            for inbox in inboxes:
                inbox.forward(k)
            zeros = like.new_zeros(*like.shape[:-2], kind.nodes, kind.size + kind.above, kind.size)
            a.append(inboxes[0].own(k, zeros[..., : kind.size, :1]))
            W.append(
                Part(inboxes[1].own(k, zeros[..., : kind.size, :]), inboxes[1].border(k, zeros[..., kind.size :, :]))
            )
        return self.join(a)[..., 0], self.matrix(W)


def _chains(kinds: tuple[Kind, ...], parts: list[Part]) -> Chains:
    chains = Chains(kinds)
    for k, part in reversed(list(enumerate(parts))):
        chains.keep(k, *part)
    return chains


# Forests as a model has them: groups below common parameters, groups in groups, or any parents

_ONES = "must be positive integers, at least one"


def arrow(
    *,
    groups: int | None = None,  # n
    local: int | Sequence[int],  # r, the local parameters of each group, or one number a group
    globals: int,  # p
) -> Forest:
    """The pattern of n groups with local parameters, and of global ones: θ = (b₁, ..., bₙ, g).

    Given g the groups are independent.  Wanted for a hierarchical model: the precision S of its posterior then has n
    blocks S_i, n borders S_gi and one block S_g, which takes n r (r + p) + p² numbers in the place of (n r + p)².

    Args:
        groups: n; left out where ``local`` has one number a group.
        local: r, of all groups or of each.
        globals: p, the parameters that all groups share; the last coordinates of θ.

    Returns:
        The structure, for a posterior that holds a precision or its root.

    Raises:
        InputError: numbers that are no positive integers, or not one a group.

    >>> arrow(groups=59, local=2, globals=9)
    Forest(59 of 2 below 9, 1 of 9)
    >>> arrow(local=[1, 2, 2], globals=1).dim
    6
    """
    if isinstance(local, Iterable):
        sizes = list(read_sizes("local", local, _ONES, none=False))
        if groups is not None and groups != len(sizes):
            raise InputError(f"local must be one number, or one for each of the {groups} groups; got {len(sizes)}.")
    else:
        if groups is None:
            raise InputError("say how many groups there are, groups=n, or give local= one number for each group.")
        sizes = [read_size("local", local, "is a number of parameters")] * read_size("groups", groups, "counts groups")
    globals = read_size("globals", globals, "is a number of parameters")  # noqa: A001
    return Forest((len(sizes),) * len(sizes) + (-1,), (*sizes, globals))


def nested(
    *within: Sequence[int],  # of each node of a level, the number of its parent in the next
    local: Sequence[int],  # parameters of each node, one number a level, innermost first
    globals: int = 0,
) -> Forest:
    """The pattern of groups in groups: pupils in classes in schools, θ = (pupils, classes, schools, globals).

    Args:
        within: for each level but the outermost, one number a node: which node of the next level it belongs to,
            counted from 0.
        local: the parameters of each node of the first, second, ... level; one more than there are ``within``.
        globals: the parameters that all share, the last coordinates of θ; 0 for none.

    Returns:
        The structure, for a posterior that holds a precision or its root.

    Raises:
        InputError: another number of levels than of ``local``, parents that are not numbered 0, 1, ..., or numbers that
            are no positive integers.

    >>> nested([0, 0, 1, 1, 1, 2], [0, 0, 1], local=[1, 2, 1], globals=3)  # 6 pupils, 3 classes, 2 schools
    Forest(6 of 1 below 6, 3 of 2 below 4, 2 of 1 below 3, 1 of 3)
    """
    within = tuple(
        read_sizes("within", level, "is one parent a node, numbers from 0 on", at_least=0) for level in within
    )
    local = read_sizes("local", local, _ONES, none=False)
    globals = read_size("globals", globals, "is a number of parameters", at_least=0)  # noqa: A001
    if not within or len(local) != len(within) + 1:
        raise InputError(
            "nested groups need the parents of each level but the outermost, and one number of parameters a level; got "
            f"{len(within)} lists of parents and {len(local)} numbers."
        )
    counts = [len(level) for level in within] + [max(within[-1], default=-1) + 1]
    for level, (parents, count) in enumerate(zip(within, counts[1:], strict=True)):
        if not len(parents) or any(not 0 <= parent < count for parent in parents):
            raise InputError(
                f"the parents of level {level + 1} must be numbers from 0 to {count - 1} of the nodes of the next "
                f"level, at least one; got {min(parents, default=None)} to {max(parents, default=None)}."
            )
    parents_of, sizes, start = [], [], 0
    for level, count in enumerate(counts):
        start += count
        upper = within[level] if level < len(within) else [0 if globals else -1 - start] * count
        parents_of += [start + parent for parent in upper]
        sizes += [local[level]] * count
    return Forest((*parents_of, -1), (*sizes, globals)) if globals else Forest(tuple(parents_of), tuple(sizes))


def forest(
    *,
    parents: Sequence[int | None],  # of each node, the number of a later one; -1 or None of a root
    sizes: Sequence[int],  # of the nodes, in the order of θ
) -> Forest | FullAlgebra:
    """The pattern of a forest: each node holds a block of coordinates, beside those of all its ancestors.

    The entries of θ stand in the order of the nodes, and children before their parents: locals first, globals last.

    Args:
        parents: of each node the number of its parent, a later node; -1 or None of a root.
        sizes: the number of coordinates of each node.

    Returns:
        The structure, for a posterior that holds a precision or its root; of roots alone independent blocks, which
        every posterior takes.

    Raises:
        InputError: parents and sizes of different numbers, a parent that does not come later, or a size that is no
            positive integer.

    >>> forest(parents=[3, 3, 4, 4, -1], sizes=[1, 1, 2, 1, 2])
    Forest(2 of 1 below 3, 1 of 2 below 2, 1 of 1 below 2, 1 of 2)
    >>> forest(parents=[-1, -1], sizes=[2, 2])  # roots only
    EqualBlocks(count=2, size=2)
    """
    sizes = read_sizes("sizes", sizes, _ONES)
    what = "are numbers of nodes, or -1 or None of a root"
    given = [-1 if parent is None else parent for parent in read_list("parents", parents, what)]
    parents = read_sizes("parents", given, what, at_least=-1)
    if len(parents) != len(sizes) or not sizes:
        raise InputError(
            f"a forest needs one parent and one size a node, at least one; got {len(parents)} parents and "
            f"{len(sizes)} sizes."
        )
    for node, parent in enumerate(parents):
        if parent != -1 and not node < parent < len(sizes):
            raise InputError(
                f"children stand before their parents, and roots have the parent -1: node {node} of {len(sizes)} must "
                f"have a later node for a parent; got {parent}."
            )
    return block_diagonal(sizes) if set(parents) == {-1} else Forest(parents, sizes)
