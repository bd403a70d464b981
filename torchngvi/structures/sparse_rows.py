"""Rows of a sparse design on the cliques of a forest: each row's columns lie in one node and its ancestors.

Of such rows H = Xᵀ diag(b) X has the pattern, and the variance of a predictor is that under the marginal of one clique.
Designs of group-wise and global columns are of that kind: nothing of D x D is needed for them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torchngvi.structures.storage import Stored


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
    """Find for each row of a sparse design the clique that its columns lie in: a node and its ancestors.

    >>> from torchngvi.numerics.sparse import compressed
    >>> from torchngvi.structures import arrow
    >>> X = compressed(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), torch.ones(3), (2, 3))
    >>> groups, root = placed(arrow(groups=2, local=1, globals=1), X)
    >>> groups.clique.tolist(), groups.rows.tolist(), len(root.rows)
    ([0, 1], [0, 1], 0)
    """
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
