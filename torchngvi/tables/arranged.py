"""Rows with the effects of several grouping factors, and where these stand in a forest.

A row couples one group of each factor, so that its groups must lie on one path from a leaf to the root.  Factors within
which others are nested, as schools hold classes, make a chain: the groups of the innermost are leaves, and each group
is below the one that holds it.  The effects of all other factors, which are crossed with these, stand in the root:
u = (those of the leaves, of the next level, ..., of the crossed factors).  Matrices Σ_i w_i a_i a_iᵀ over rows whose
entries are the designs of their groups have the pattern of the forest, and so have their Cholesky factors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.structures.forest import Forest
from torchngvi.structures.pattern import Structured
from torchngvi.tables.parts import Factor

LARGEST_ROOT = 4_000  # crossed effects, whose matrix is dense: a factor of it takes about a second
MOST_ENTRIES = 2**27  # of a matrix in the pattern: one gigabyte


class _Pair(NamedTuple):
    """The block of two factors in the stored matrix: where the entries of each row stand."""

    left: int  # the factor of the rows of the block
    right: int  # of its columns
    places: Tensor  # (N · r_left · r_right,)


def holds(
    inner: Tensor,  # (N,)
    outer: Tensor,  # (N,)
) -> bool:
    """Whether all rows of each inner group are of one outer group.

    >>> holds(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])), holds(torch.tensor([0, 0]), torch.tensor([0, 1]))
    (True, False)
    """
    of = outer.new_zeros(int(inner.max()) + 1)
    of[inner] = outer
    return bool((of[inner] == outer).all())


def chain_of(factors: Sequence[Factor]) -> tuple[int, ...]:
    """Find the chain of nested factors, leaves first, that leaves the fewest effects in the root.

    >>> one = torch.ones(4, 1)
    >>> groups = {"school": [0, 0, 1, 1], "class": [0, 1, 2, 3], "teacher": [0, 1, 0, 1]}
    >>> factors = [Factor(k, ("1",), tuple(map(str, set(g))), one, torch.tensor(g)) for k, g in groups.items()]
    >>> chain_of(factors)
    (1, 0)
    """
    sizes = [len(of.levels) * of.Z.shape[1] for of in factors]
    order = sorted(range(len(factors)), key=lambda k: -len(factors[k].levels))
    chains = []
    for leaf in order:
        chain = [leaf]
        for k in order:
            if k not in chain and holds(factors[chain[-1]].groups, factors[k].groups):
                chain.append(k)
        chains.append(tuple(chain))
    return max(chains, key=lambda chain: sum(sizes[k] for k in chain))


class Arranged:
    """The effects u of all groups of K ≥ 1 factors, as the coordinates of a forest.

    Args:
        factors: whose groups each row has.

    Attributes:
        chain: the factors that make the levels of the forest, leaves first.
        crossed: those in its root.
        structure: the forest.
        places: for each factor the slice of its effects in u.

    >>> one = torch.ones(4, 1)
    >>> subject, item = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 0, 1])
    >>> of = Arranged([Factor("s", ("1",), ("a", "b", "c"), one, subject), Factor("i", ("1",), ("d", "e"), one, item)])
    >>> of.structure, of.chain, of.crossed
    (Forest(3 of 1 below 2, 1 of 2), (0,), (1,))
    """

    def __init__(self, factors: Sequence[Factor]) -> None:
        self.groups = [of.groups for of in factors]
        self.n, self.r = [len(of.levels) for of in factors], [of.Z.shape[1] for of in factors]
        self.chain = chain_of(factors)
        self.crossed = tuple(k for k in range(len(factors)) if k not in self.chain)
        self.places = [slice(0)] * len(factors)
        start = 0
        for k in (*self.chain, *self.crossed):
            self.places[k] = slice(start, start + self.n[k] * self.r[k])
            start = self.places[k].stop
        self.dim, self.root = start, sum(self.n[k] * self.r[k] for k in self.crossed)
        self._check_size()
        sizes = [self.r[k] for k in self.chain for _ in range(self.n[k])]
        self.structure = Forest(self._parents(), (*sizes, self.root) if self.root else tuple(sizes))
        self.pairs = self._pairs()

    def predictor(
        self,
        designs: Sequence[Tensor],  # of each factor, (*batch, N, r)
        u: Tensor,  # (*batch, dim)
    ) -> Tensor:
        """Compute Σ_k a_kᵀu_k[group], (*batch, N)."""
        total = designs[0].new_zeros(())
        for a, at, groups, r in zip(designs, self.places, self.groups, self.r, strict=True):
            total = total + (u[..., at].unflatten(-1, (-1, r)).index_select(-2, groups) * a).sum(-1)
        return total

    def gathered(
        self,
        designs: Sequence[Tensor],  # (S, N, r)
        slope: Tensor,  # (S, N)
    ) -> Tensor:
        """Sum slope · a over the rows, (S, dim)."""
        S = len(slope)
        out = slope.new_zeros(S, self.dim)
        for a, at, groups, r in zip(designs, self.places, self.groups, self.r, strict=True):
            index = (groups[:, None] * r + torch.arange(r, device=groups.device) + at.start).flatten()
            out = out.scatter_add(-1, index.expand(S, -1), (slope[..., None] * a).flatten(-2))
        return out

    def gram(
        self,
        designs: Sequence[Tensor],  # (S, N, r)
        weights: Tensor,  # (S, N)
    ) -> Structured:
        """Sum weight · a aᵀ over the rows, (S, E), of squares at least the lower triangles."""
        S = len(weights)
        out = weights.new_zeros(S, *self.structure.shape)
        for pair in self.pairs:
            left, right = weights[..., None] * designs[pair.left], designs[pair.right]
            entries = (left[..., :, None] * right[..., None, :]).flatten(-3)
            out.scatter_add_(-1, pair.places.expand(S, -1), entries)
        return out

    def variances(
        self,
        designs: Sequence[Tensor],  # (S, N, r)
        V: Structured,  # (S, E), symmetric squares
    ) -> Tensor:
        """Compute aᵀVa of each row, (S, N), differentiable in the designs."""
        total = V.new_zeros(())
        for pair in self.pairs:
            left, right = designs[pair.left], designs[pair.right]
            block = V[:, pair.places].unflatten(-1, (-1, left.shape[-1], right.shape[-1]))
            term = ((block * right[..., None, :]).sum(-1) * left).sum(-1)
            total = total + (term if pair.left == pair.right else 2 * term)
        return total

    def _pairs(self) -> list[_Pair]:
        """The blocks on and below the diagonal that a row touches."""
        kinds, starts, end = self.structure.kinds, [], 0
        for kind in kinds:
            starts.append((end, end + kind.nodes * kind.size**2))
            end += kind.nodes * kind.size * (kind.size + kind.above)
        origin = self.dim - self.root
        pairs = []
        for level, k in enumerate(self.chain):
            r, groups, (square, border) = self.r[k], self.groups[k], starts[level]
            pairs.append(self._pair(k, k, square + groups * r * r, r))
            row = border + groups * kinds[level].above * r  # of the first ancestor
            for above in self.chain[level + 1 :]:
                pairs.append(self._pair(above, k, row, r))
                row = row + self.r[above] * r
            for c in self.crossed:
                inside = self.places[c].start - origin + self.groups[c] * self.r[c]
                pairs.append(self._pair(c, k, row + inside * r, r))
        for i, left in enumerate(self.crossed):
            for right in self.crossed[: i + 1]:
                row, column = (self.places[k].start - origin + self.groups[k] * self.r[k] for k in (left, right))
                pairs.append(self._pair(left, right, starts[-1][0] + row * self.root + column, self.root))
        return pairs

    def _pair(self, left: int, right: int, base: Tensor, stride: int) -> _Pair:
        """The block whose first entries stand at ``base`` (N,), its rows ``stride`` apart."""
        i, j = (torch.arange(self.r[k], device=base.device) for k in (left, right))
        return _Pair(left, right, (base[:, None, None] + i[:, None] * stride + j).flatten())

    def _parents(self) -> tuple[int, ...]:
        """The parent of each node: of a group the one that holds it, of the last level the root, if there is one."""
        parents: list[int] = []
        end = 0
        for level, k in enumerate(self.chain):
            end += self.n[k]
            if level + 1 == len(self.chain):
                parents += [end if self.root else -1] * self.n[k]
                continue
            held = self.groups[k].new_zeros(self.n[k])
            held[self.groups[k]] = self.groups[self.chain[level + 1]]
            parents += (end + held).tolist()
        return (*parents, -1) if self.root else tuple(parents)

    def _check_size(self) -> None:
        """Refuse what would not fit into the memory."""
        above, entries = self.root, self.root**2
        for k in reversed(self.chain):
            entries += self.n[k] * self.r[k] * (self.r[k] + above)
            above += self.r[k]
        if self.root > LARGEST_ROOT or entries > MOST_ENTRIES:
            raise InputError(
                f"crossed factors need a dense matrix of their effects, of at most {LARGEST_ROOT} rows, and at most "
                f"{MOST_ENTRIES} numbers with its borders to the groups of the largest factor; got {self.root} rows "
                f"and {entries} numbers. Leave out a factor, or group its levels more coarsely."
            )
