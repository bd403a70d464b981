"""What a sparse design needs beyond ``@``, with X in CSR storage and never written out.

XᵀXθ-like products are torch's own; torch has no Xᵀ diag(b) X, no square and no choice of rows for CSR.
"""

import warnings

import torch
from torch import Tensor


def is_sparse(X: Tensor) -> bool:
    """Say whether X is stored as compressed rows."""
    return X.layout == torch.sparse_csr


def compressed(pointers: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Make a CSR matrix, without torch's note that CSR is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(pointers, columns, values, shape, check_invariants=False)


def with_values(X: Tensor, values: Tensor) -> Tensor:
    """Replace the entries of a sparse matrix, in the places that it has."""
    return compressed(X.crow_indices(), X.col_indices(), values, X.shape)


def by_column(X: Tensor) -> Tensor:
    """Convert X to CSC storage, without torch's note that it is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSC tensor support is in beta state")
        return X.to_sparse_csc()


def square(X: Tensor) -> Tensor:
    """Square every entry of a sparse matrix: X ∘ X."""
    return with_values(X, X.values().square())


def gram(
    X: Tensor,  # (N, D) sparse CSR
    weights: Tensor,  # b, (N,)
) -> Tensor:
    """Compute the weighted Gram matrix Xᵀ diag(b) X, by a product of sparse matrices."""
    counts = X.crow_indices().diff()
    weighted = with_values(X, X.values() * weights.repeat_interleave(counts))
    # COO products need no vendor library
    return torch.sparse.mm(X.to_sparse_coo().mT, weighted.to_sparse_coo()).to_dense()


def rows(
    X: Tensor,  # (N, D) sparse CSR
    index: Tensor,  # (B,)
) -> Tensor:
    """Choose rows of a sparse matrix, in the order given and as often as they are named."""
    start = X.crow_indices()[:-1][index]
    counts = X.crow_indices().diff()[index]
    pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    # entry k of new row i is entry start_i + k of X
    entries = torch.arange(int(pointers[-1]), device=counts.device) + (start - pointers[:-1]).repeat_interleave(counts)
    return compressed(pointers, X.col_indices()[entries], X.values()[entries], (len(index), X.shape[-1]))
