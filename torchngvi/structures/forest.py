"""Matrices of a forest of nodes: arrows and nested groups.

Every node holds a block of coordinates, children before their parents.  A lower-triangular matrix has entries in the
square of each node and in the border below it, whose rows are those of the node's ancestors.  Products, inverses and
congruences stay in the pattern, and a Cholesky factor fills nothing in (perfect elimination: Rose 1970).  As that of a
precision it says that nodes of different branches are independent, given their common ancestors: what a model with
local parameters of groups and global ones says of its posterior.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.numerics import small_blocks
from torchngvi.numerics.small_blocks import product
from torchngvi.structures.levels import Chains, Inbox, Kind, Rows, below, inherited
from torchngvi.structures.pattern import Structured
from torchngvi.structures.sparse_rows import placed
from torchngvi.structures.storage import Part, Stored


class Forest(Stored):
    """Lower-triangular matrices over a forest of nodes, stored flat, (*batch, E): see `arrow`, `nested`, `forest`.

    The entries of nodes of one size whose parents are of one kind stand together, squares (n, r, r) before borders
    (n, p, r), and every verb is a few batches of small products for each kind.  Time and memory of a verb grow with E.

    Args:
        parents: of each node, the number of a later node; -1 for a root.
        sizes: of the nodes, in the order of θ.

    >>> tree = Forest((2, 2, -1), (1, 1, 1))
    >>> tree.to_dense(torch.arange(1.0, 6.0)).tolist()
    [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    """

    # ---------------------------------------------------------------------------- vectors

    def _by_columns(self, verb: Callable[[list[Part], Tensor], Tensor], root: Structured, x: Tensor) -> Tensor:
        """A verb for columns (*batch, D, S), of a vector with samples on the left of the batch."""
        extra, parts = x.ndim - root.ndim, self.parts(root)
        if extra <= 0:
            return verb(parts, x[..., None])[..., 0]
        columns = x.flatten(0, extra - 1).movedim(0, -1)
        return verb(parts, columns).movedim(-1, 0).unflatten(0, x.shape[:extra])

    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """Compute L x from the leaves upwards."""

        def verb(parts: list[Part], columns: Tensor) -> Tensor:
            inbox, out = Inbox(self.on(columns)), []
            for k, ((square, border), x) in enumerate(zip(parts, self.split(columns), strict=True)):
                out.append(inbox.own(k, product(square, x)))
                inbox.post(k, border, x)
            return self.join(out)

        return self._by_columns(verb, root, x)

    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """Compute L⁻¹ x from the leaves upwards."""

        def verb(parts: list[Part], columns: Tensor) -> Tensor:
            inbox, out = Inbox(self.on(columns)), []
            for k, ((square, border), x) in enumerate(zip(parts, self.split(columns), strict=True)):
                out.append(small_blocks.solve(square, inbox.own(k, x, -1)))
                inbox.post(k, border, out[k])
            return self.join(out)

        return self._by_columns(verb, root, x)

    def tmv(self, root: Structured, x: Tensor) -> Tensor:
        """Compute Lᵀ x from the roots downwards."""

        def verb(parts: list[Part], columns: Tensor) -> Tensor:
            rows, out = Rows(self.on(columns)), self.split(columns)
            for k, (square, border) in reversed(list(enumerate(parts))):
                x, above = out[k], rows.seen(k, border)
                rows.keep(k, x)
                own = product(square.mT, x)
                out[k] = own if above is None else own + above
            return self.join(out)

        return self._by_columns(verb, root, x)

    def tsolve(self, root: Structured, x: Tensor) -> Tensor:
        """Compute L⁻ᵀ x from the roots downwards."""

        def verb(parts: list[Part], columns: Tensor) -> Tensor:
            rows, out = Rows(self.on(columns)), self.split(columns)
            for k, (square, border) in reversed(list(enumerate(parts))):
                above = rows.seen(k, border)
                out[k] = small_blocks.tsolve(square, out[k] if above is None else out[k] - above)
                rows.keep(k, out[k])
            return self.join(out)

        return self._by_columns(verb, root, x)

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
            own, above = small_blocks.inverse(square), chains.of_parents(k)
            down = border if above is None else -below(kinds[k], above, product(border, own))
            out[k] = Part(own, down)
            chains.keep(k, own, down)
        return self.matrix(out)

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Factor A = L Lᵀ from the leaves upwards, without fill-in, and say for which members the factor exists."""
        inbox, out, fine = Inbox(self.on(symmetric), symmetric=True), [], []
        for k, (square, border) in enumerate(self.parts(symmetric)):
            lower, ok = small_blocks.cholesky(inbox.own(k, square, -1))
            down = small_blocks.solve(lower, inbox.border(k, border, -1).mT).mT
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
        """The root restricted to each node and its ancestors, (*batch, n, k, k) for each kind of nodes.

        Of the root T of a precision these are the roots of the precisions of θ_c, for each clique c: the Gaussian
        marginal over a node and its ancestors has a dense frame of its own.
        """
        parts = self.parts(root)
        chains = _chains(self.on(root), parts)
        return [chains.restricted(k, *part) for k, part in enumerate(parts)]

    def scatter(
        self,
        vectors: list[Tensor | None],  # a_c of each kind, (*batch, n, k); None of kinds without a term
        matrices: list[Tensor | None],  # W_c, (*batch, n, k, k), symmetric
    ) -> tuple[Tensor, Structured]:
        """Sums over cliques: the vector (*batch, D) and the symmetric matrix whose parts they are.

        With a_c = C_cᵀ g_c and W_c = C_cᵀ H_c C_c in the frames of the cliques these are Cᵀg and Π(CᵀHC) of the sums
        g and H over all cliques.
        """
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
