"""Triangular roots in a pattern, moved along their logarithm, inverted, and cut to the marginals of a pattern."""

from torch import Tensor

from torchngvi.interfaces import Coordinates, LogTangent, Move, Tangent
from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


def kept_covariance(structure: Pattern, scale_tril: Tensor) -> Tensor:
    """Keep the marginal distributions of the blocks of a pattern, as the nearest q in KL(p‖q) does.

    >>> import torch
    >>> from torchngvi.structures import Diagonal
    >>> kept_covariance(Diagonal(2), torch.tensor([[1.0, 0.0], [3.0, 4.0]])).tolist()
    [[1.0, 0.0], [0.0, 5.0]]
    """
    if structure.widest == structure.dim or not structure.closed:
        return scale_tril
    root, _ = structure.cholesky(structure.from_dense(scale_tril @ scale_tril.mT))
    return structure.to_dense(root)


def tangent_moved(
    structure: Pattern,
    here: Coordinates,  # m and a triangular root Λ
    move: Move,
) -> tuple[Coordinates, Tensor]:
    """Move mean and root along a tangent: Λ + change, the diagonal by its logarithm where the move is a `LogTangent`.

    >>> import torch
    >>> from torchngvi.structures import Dense
    >>> here = Coordinates(torch.zeros(2), torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
    >>> change = Coordinates(torch.ones(2), torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    >>> new, positive = tangent_moved(Dense(2), here, LogTangent(change))
    >>> new.matrix.tolist(), positive.item()
    ([[1.0, 0.0], [4.0, 4.0]], True)
    >>> tangent_moved(Dense(2), here, Tangent(Coordinates(torch.ones(2), -2 * torch.eye(2))))[1].item()
    False
    """
    match move:
        case LogTangent((vector, matrix)):
            diagonal = structure.diagonal(here.matrix) * structure.diagonal(matrix).exp()
            new = Coordinates(here.vector + vector, structure.with_diagonal(here.matrix + matrix, diagonal))
            return new, (diagonal > 0).all(-1)
        case Tangent((vector, matrix)):
            root = here.matrix + matrix
            return Coordinates(here.vector + vector, root), (structure.diagonal(root) > 0).all(-1)
    raise NotImplementedError  # `takes` refuses it before


def root_of_inverse(
    structure: Pattern,
    root: Structured,  # A, lower triangular
) -> Structured:
    """Find the lower root of (A Aᵀ)⁻¹, by a QR factorisation of A⁻ᵀ.

    >>> import torch
    >>> from torchngvi.structures import Dense
    >>> root_of_inverse(Dense(1), torch.tensor([[4.0]])).item()
    0.25
    """
    assert isinstance(structure, FullAlgebra)  # it is closed: for the type alone
    return structure.positive_root(structure.lower_root(structure.transpose(structure.inverse(root))))[0]
