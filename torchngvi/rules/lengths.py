"""The speed of q along a curve that does not follow the natural gradient, in the Fisher metric.

With u = C⁻¹ ṁ and Q = C⁻¹ V̇ C⁻ᵀ it is |q̇|²_F = |u|² + ½‖Q‖²_F, so that KL(q'‖q) = ½ρ²|q̇|²_F + O(ρ³).
"""

from torch import Tensor

from torchngvi.interfaces import Coordinates, Posterior
from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


def covariance_speed2(
    q: Posterior,
    mean: Tensor,  # ṁ, (*batch, D)
    covariance: Structured,  # V̇
) -> Tensor:
    """The squared Fisher length of a velocity of mean and covariance.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> covariance_speed2(CholeskyGaussian(1, scale=2.0), torch.tensor([2.0]), torch.tensor([[8.0]])).item()
    3.0
    """
    root, structure = q.frame().root, q.structure
    assert isinstance(structure, FullAlgebra)
    whitener = structure.inverse(root)
    u = structure.mv(whitener, mean)
    Q = structure.matmul(structure.matmul(whitener, covariance), structure.transpose(whitener))
    return structure.dot(u, u) + 0.5 * structure.entries_norm2(Q)


def map_speed2(
    q: Posterior,
    mean: Tensor,  # ṁ, (*batch, D)
    B: Structured,
) -> Tensor:
    """The squared Fisher length of the velocity θ ↦ ṁ + B(θ - m), with which V̇ = BV + VBᵀ.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> map_speed2(CholeskyGaussian(1, scale=2.0), torch.tensor([2.0]), torch.tensor([[1.0]])).item()
    3.0
    """
    root, structure = q.frame().root, q.structure
    assert isinstance(structure, FullAlgebra)
    BV = structure.matmul(structure.matmul(B, root), structure.transpose(root))
    return covariance_speed2(q, mean, BV + structure.transpose(BV))


def root_speed2(
    q: Posterior,
    velocity: Coordinates,  # of mean and root
) -> Tensor:
    """The squared Fisher length of a velocity of the mean and of the triangular root Λ that q stores.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(1, scale=2.0)
    >>> root_speed2(q, Coordinates(torch.tensor([2.0]), torch.tensor([[2.0]]))).item()
    3.0
    """
    root, structure = q.coordinates.matrix, q.structure
    u = structure.tmv(root, velocity.vector) if q.upper else structure.solve(root, velocity.vector)
    return triangular_speed2(structure, u, structure.matmul(structure.inverse(root), velocity.matrix))


def triangular_speed2(
    structure: Pattern,
    u: Tensor,  # (*batch, D)
    K: Structured,
) -> Tensor:
    """The squared Fisher length |u|² + ½‖K + Kᵀ‖²_F of a velocity of the root C' = C(I + ρK) in the frame.

    >>> import torch
    >>> from torchngvi.structures import Dense
    >>> triangular_speed2(Dense(1), torch.tensor([1.0]), torch.tensor([[1.0]])).item()
    3.0
    """
    diagonal = structure.diagonal(K)
    return structure.dot(u, u) + structure.entries_norm2(K) + structure.dot(diagonal, diagonal)
