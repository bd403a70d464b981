"""Triangular roots in a pattern: moved along their logarithm, inverted, and cut to the marginals of a pattern."""

from torch import Tensor

from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


def kept_covariance(structure: Pattern, scale_tril: Tensor) -> Tensor:
    """The lower factor (*batch, D, D) of the covariance with the same marginals of the blocks of a pattern."""
    if structure.widest == structure.dim or not isinstance(structure, FullAlgebra):
        return scale_tril
    root, _ = structure.cholesky(structure.from_dense(scale_tril @ scale_tril.mT))
    return structure.to_dense(root)


def log_moved(
    structure: Pattern,
    root: Structured,  # Λ, triangular, in q's pattern
    change: Tensor,  # of log Λ_ii on the diagonal, of Λ_ij elsewhere
) -> Tensor:
    """The root after that change: Λ_ii exp(change_ii) and Λ_ij + change_ij."""
    diagonal = structure.diagonal(root) * structure.diagonal(change).exp()
    return structure.with_diagonal(root + change, diagonal)


def root_of_inverse(
    structure: FullAlgebra,
    root: Structured,  # A, lower triangular
) -> Structured:
    """The lower root of (A Aᵀ)⁻¹, by a QR factorisation of A⁻ᵀ."""
    return structure.positive_root(structure.lower_root(structure.transpose(structure.inverse(root))))[0]
