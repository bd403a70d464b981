"""Diagonal matrices: the algebra of a mean field, without a square anywhere."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.numerics import sparse
from torchngvi.structures.blocks import FullAlgebra, verb
from torchngvi.structures.pattern import Structured


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
    norm2 = verb("norm2", lambda self, symmetric: self.total(symmetric.square().sum(-1)))

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
