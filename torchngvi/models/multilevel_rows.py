"""Rows with the effects of several grouping factors, and where these stand in a forest.

A row of the data couples one group of each factor, so that its groups must lie on one path from a leaf to the root.
Factors within which others are nested, as schools hold classes, make a chain: the groups of the innermost are leaves,
and each group is below the one that holds it.  The effects of all others, the crossed factors, stand in the root,
beside the parameters that all rows share: θ = (b of the leaves, b of the next level, ..., b of crossed factors, β, ω).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.standardize import Standardization
from torchngvi.structures import Forest
from torchngvi.structures.pattern import Structured

LARGEST_ROOT = 3000  # coordinates of crossed factors with the fixed effects, a dense block
MOST_ENTRIES = 2**25  # numbers of one stored matrix, 256 MB in float64


class Arrangement(NamedTuple):
    """Which factors are levels of the forest, leaves first, and which stand in the root."""

    chain: tuple[int, ...]
    root: tuple[int, ...]


def holds(
    inner: Tensor,  # (N,)
    outer: Tensor,  # (N,)
) -> bool:
    """Whether all rows of each inner group are of one outer group.

    >>> holds(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])), holds(torch.tensor([0, 0]), torch.tensor([0, 1]))
    (True, False)
    """
    of = torch.zeros(int(inner.max()) + 1, dtype=outer.dtype, device=outer.device)
    of[inner] = outer
    return bool((of[inner] == outer).all())


def arranged(factors: Sequence[GroupedRows]) -> Arrangement:
    """Find the chain of nested factors that leaves the fewest effects in the root.

    >>> from torchngvi.models import GeneralizedLinear
    >>> fixed = GeneralizedLinear(torch.ones(4, 1), [1.0, 0.0, 2.0, 1.0], "poisson_log")
    >>> groups = [0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 0, 1]  # schools, classes, teachers
    >>> arranged([GroupedRows(fixed, torch.ones(4, 1), some) for some in groups])
    Arrangement(chain=(1, 0), root=(2,))
    """
    order = sorted(range(len(factors)), key=lambda k: -factors[k].n)
    chains = []
    for leaf in order:
        chain = [leaf]
        for k in order:
            if k not in chain and holds(factors[chain[-1]].groups, factors[k].groups):
                chain.append(k)
        chains.append(tuple(chain))
    best = max(chains, key=lambda some: sum(factors[k].n * factors[k].r for k in some))
    return Arrangement(best, tuple(k for k in range(len(factors)) if k not in best))


class MultilevelRows:
    """Rows with fixed effects β and the effects of several grouping factors, η = Xβ + Σ_k Z_k b_k[group] + offset.

    Attributes:
        structure: the forest of θ = (b, β, ω).
        bare: the forest of (b, β).
        places: for each factor the slice of its effects in θ.
        omegas: for each factor the slice of its ω in θ.
        root: the first coordinate of the root.

    >>> from torchngvi.models import GeneralizedLinear
    >>> fixed = GeneralizedLinear(torch.ones(4, 1), [1.0, 0.0, 2.0, 1.0], "poisson_log")
    >>> subjects, items = (GroupedRows(fixed, torch.ones(4, 1), some) for some in ([0, 0, 1, 2], [0, 1, 0, 1]))
    >>> MultilevelRows([subjects, items]).structure
    Forest(3 of 1 below 5, 1 of 5)
    """

    def __init__(self, factors: Sequence[GroupedRows]) -> None:
        first = factors[0]
        self.factors = tuple(factors)
        self.fixed, self.X, self.likelihood = first.fixed, first.X, first.likelihood
        self.y, self.weights, self.offset, self.p = first.y, first.weights, first.offset, first.p
        self.arrangement = arranged(factors)
        chain, crossed = self.arrangement
        levels = [factors[k] for k in chain]
        self.places, self.omegas = [slice(0)] * len(factors), [slice(0)] * len(factors)
        start = 0
        for k in (*chain, *crossed):
            size = factors[k].n * factors[k].r
            self.places[k] = slice(start, start + size)
            start += size
        self.root = start - sum(factors[k].n * factors[k].r for k in crossed)
        self.beta = slice(start, start + self.p)
        start += self.p
        for k, factor in enumerate(factors):
            size = factor.r * (factor.r + 1) // 2
            self.omegas[k] = slice(start, start + size)
            start += size
        self.dim = start
        _check_size(levels, [factors[k] for k in crossed], start - self.root)
        parents = _parents(levels)
        sizes = tuple(factor.r for factor in levels for _ in range(factor.n))
        self.structure = Forest(parents, (*sizes, start - self.root))
        self.bare = Forest(parents, (*sizes, self.beta.stop - self.root))

    @property
    def columns(self) -> Standardization | None:
        """How X has been centred and scaled; None where it is as it was given."""
        return self.factors[0].columns

    # ---------------------------------------------------------------------------- coordinates

    def parts(
        self,
        theta: Tensor,  # (*any, D), with ω or without
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Take θ apart: b (*any, n, r) and ω (*any, r(r + 1)/2) of each factor, and β (*any, p)."""
        b = [theta[..., at].unflatten(-1, (of.n, of.r)) for at, of in zip(self.places, self.factors, strict=True)]
        return b, theta[..., self.beta], [theta[..., at] for at in self.omegas]

    def predictor(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute η = Xβ + Σ_k Z_k b_k + offset, (*sample, *batch, N)."""
        eta = theta[..., self.beta] @ self.X.mT + self.offset
        for of, b in zip(self.factors, self.parts(theta)[0], strict=True):
            eta = eta + (b.index_select(-2, of.groups) * of.Z).sum(-1)
        return eta

    def present(
        self,
        x: Tensor,  # (*batch, N)
        otherwise: float,
    ) -> Tensor:
        """Put a number for rows of weight 0, which are not there, also where their loss would be infinite."""
        return torch.where(self.weights > 0, x, otherwise)

    # ---------------------------------------------------------------------------- second moments

    def variances(
        self,
        V: Structured,  # in the pattern of `structure`
    ) -> Tensor:
        """The variances of the predictors of rows, uᵀVu with u the row (z_1, ..., z_K, x) in θ, (*batch, N)."""
        top, at = self.structure.parts(V)[-1].square[..., 0, :, :], self._in_root(self.beta)
        total = ((self.X @ top[..., at, at]) * self.X).sum(-1)
        for pair in self._pairs(self.structure):
            taken = V[..., pair.places].unflatten(-1, (len(self.X), pair.left.shape[1], pair.right.shape[1]))
            double = 1 if pair.same else 2
            total = total + double * ((taken * pair.right[:, None, :]).sum(-1) * pair.left).sum(-1)
        return total

    def gathered(
        self,
        alpha: Tensor,  # of each row, (*batch, N)
        dim: int,
    ) -> Tensor:
        """Σ α u over the rows, (*batch, D), for the first ``dim`` coordinates of θ."""
        g = alpha.new_zeros(*alpha.shape[:-1], dim)
        g[..., self.beta] = alpha @ self.X
        for of, at in zip(self.factors, self.places, strict=True):
            sums = alpha.new_zeros(*alpha.shape[:-1], of.n, of.r).index_add(-2, of.groups, alpha[..., None] * of.Z)
            g[..., at] = sums.flatten(-2)
        return g

    def gram(
        self,
        beta: Tensor,  # of each row, (*batch, N)
        structure: Forest,  # `structure` or `bare`
    ) -> Structured:
        """Σ β u uᵀ over the rows, in the pattern, which has all its entries, (*batch, E)."""
        H = beta.new_zeros(*beta.shape[:-1], *structure.shape)
        for pair in self._pairs(structure):
            entries = (beta[..., None] * pair.left)[..., None] * pair.right[:, None, :]
            H = H.index_add(-1, pair.places, entries.flatten(-3))
            if pair.mirrored is not None:
                H = H.index_add(-1, pair.mirrored, entries.flatten(-3))
        at = self._in_root(self.beta)
        structure.parts(H)[-1].square[..., 0, at, at] += (self.X * beta[..., None]).mT @ self.X
        return H

    def _in_root(self, at: slice) -> slice:
        return slice(at.start - self.root, at.stop - self.root)

    def _pairs(self, structure: Forest) -> "list[_Pair]":
        """The stored blocks that a row touches but that of (β, β): of each factor with itself, with another, with β."""
        chain, crossed = self.arrangement
        offsets, start = [], 0  # of squares and borders, level by level
        for kind in structure.kinds:
            offsets.append((start, start + kind.nodes * kind.size * kind.size))
            start += kind.nodes * kind.size * (kind.size + kind.above)
        width, N = structure.kinds[-1].size, len(self.X)
        nothing = self.factors[0].groups.new_zeros(N)
        in_root = [
            (self._in_root(self.places[k]).start + self.factors[k].groups * self.factors[k].r, self.factors[k].Z)
            for k in crossed
        ]
        in_root.append((nothing + self._in_root(self.beta).start, self.X))
        pairs = []
        for level, k in enumerate(chain):
            of, (square, border) = self.factors[k], offsets[level]
            pairs.append(_Pair.at(square + of.groups * of.r * of.r, of.r, of.Z, of.Z, same=True))
            row = nothing + border + of.groups * structure.kinds[level].above * of.r  # of the first ancestor
            for above in chain[level + 1 :]:
                pairs.append(_Pair.at(row, of.r, self.factors[above].Z, of.Z))
                row = row + self.factors[above].r * of.r
            pairs += [_Pair.at(row + place * of.r, of.r, Z, of.Z) for place, Z in in_root]
        square = offsets[-1][0]
        for i, (here, left) in enumerate(in_root[:-1]):
            pairs.append(_Pair.at(square + here * width + here, width, left, left, same=True))
            for there, right in in_root[i + 1 :]:
                pair = _Pair.at(square + here * width + there, width, left, right)
                pairs.append(pair._replace(mirrored=_Pair.turned(square + there * width + here, width, left, right)))
        return pairs


class _Pair(NamedTuple):
    """The block of two terms in the stored matrix: for each row the places of its entries, and the two designs."""

    places: Tensor  # (N · a · b,)
    left: Tensor  # (N, a), of the rows of the block
    right: Tensor  # (N, b), of its columns
    same: bool
    mirrored: Tensor | None = None  # the places of the transposed block, where the matrix has it too

    @classmethod
    def at(cls, base: Tensor, stride: int, left: Tensor, right: Tensor, same: bool = False) -> "_Pair":
        """The block whose first entries stand at ``base`` (N,), its rows ``stride`` apart."""
        i, j = (torch.arange(x.shape[1], device=x.device) for x in (left, right))
        return cls((base[:, None, None] + i[:, None] * stride + j).flatten(), left, right, same)

    @staticmethod
    def turned(base: Tensor, stride: int, left: Tensor, right: Tensor) -> Tensor:
        """The places of the transposed block, in the order of the entries of the block itself."""
        i, j = (torch.arange(x.shape[1], device=x.device) for x in (left, right))
        return (base[:, None, None] + i[:, None] + j * stride).flatten()


def _parents(levels: Sequence[GroupedRows]) -> tuple[int, ...]:
    """The parent of each node: of a group the one that holds it, of the last level the root; -1 of the root."""
    parents: list[int] = []
    end = 0
    for level, of in enumerate(levels):
        end += of.n
        if level + 1 == len(levels):
            parents += [end] * of.n
            continue
        held = torch.zeros_like(of.groups[: of.n])
        held[of.groups] = levels[level + 1].groups
        parents += (end + held).tolist()
    return (*parents, -1)


def _check_size(levels: Sequence[GroupedRows], crossed: Sequence[GroupedRows], root: int) -> None:
    """Refuse what would not fit into the memory."""
    above, entries = root, root * root
    for of in reversed(levels):
        entries += of.n * of.r * (of.r + above)
        above += of.r
    if root <= LARGEST_ROOT and entries <= MOST_ENTRIES:
        return
    counts = " and ".join(f"{of.n} groups of {of.r} effect{'s' * (of.r > 1)}" for of in crossed) or "no crossed factors"
    raise InputError(
        f"crossed factors need a dense matrix of their effects and the fixed ones, of at most {LARGEST_ROOT} rows, and "
        f"at most {MOST_ENTRIES} numbers with its borders to the groups of the largest factor; got {root} rows and "
        f"{entries} numbers, of {counts}. Leave out a factor, or group its levels more coarsely."
    )
