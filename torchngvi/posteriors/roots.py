"""Triangular roots in a pattern, moved along their logarithm, inverted, and cut to the marginals of a pattern."""

from torch import Tensor

from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


def kept_covariance(structure: Pattern, scale_tril: Tensor) -> Tensor:
    """Keep the marginal distributions of the blocks of a pattern, as the nearest q in KL(p‖q) does.

    Args:
        structure: the pattern; one without blocks keeps everything.
        scale_tril: a lower factor of the covariance, (*batch, D, D).

    Returns:
        The lower factor of the covariance of the blocks, (*batch, D, D).

    >>> import torch
    >>> from torchngvi.structures import Diagonal
    >>> kept_covariance(Diagonal(2), torch.tensor([[1.0, 0.0], [3.0, 4.0]])).tolist()
    [[1.0, 0.0], [0.0, 5.0]]
    """
    if structure.widest == structure.dim or not isinstance(structure, FullAlgebra):
        return scale_tril
    root, _ = structure.cholesky(structure.from_dense(scale_tril @ scale_tril.mT))
    return structure.to_dense(root)


def log_moved(
    structure: Pattern,
    root: Structured,  # Λ, triangular, in q's pattern
    change: Tensor,  # of log Λ_ii on the diagonal, of Λ_ij elsewhere
) -> Tensor:
    """Move a root so that its diagonal moves by its logarithm: Λ_ii exp(change_ii), and Λ_ij + change_ij elsewhere.

    Args:
        structure: the pattern of q.
        root: Λ, triangular, in the pattern.
        change: the change of log Λ_ii on the diagonal, and that of Λ_ij elsewhere, in the pattern.

    Returns:
        The new root, whose diagonal has the signs that it had.

    >>> import torch
    >>> from torchngvi.structures import Dense
    >>> root = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    >>> log_moved(Dense(2), root, torch.tensor([[0.0, 0.0], [1.0, 0.0]])).tolist()
    [[1.0, 0.0], [4.0, 4.0]]
    """
    diagonal = structure.diagonal(root) * structure.diagonal(change).exp()
    return structure.with_diagonal(root + change, diagonal)


def root_of_inverse(
    structure: FullAlgebra,
    root: Structured,  # A, lower triangular
) -> Structured:
    """Find the lower root of (A Aᵀ)⁻¹, by a QR factorisation of A⁻ᵀ.

    Args:
        structure: the pattern, whose squares are closed under all products.
        root: A, lower triangular, in the pattern.

    Returns:
        The root in the pattern, with a positive diagonal.

    >>> import torch
    >>> from torchngvi.structures import Dense
    >>> root_of_inverse(Dense(1), torch.tensor([[4.0]])).item()
    0.25
    """
    return structure.positive_root(structure.lower_root(structure.transpose(structure.inverse(root))))[0]
