"""The Gaussian as an exponential family: its two systems of coordinates, and the convex functions between them.

    q(z) = (2π)^(-D/2) exp(λᵀz + tr(Λzzᵀ) - A(λ, Λ)),     λ = V⁻¹m,  Λ = -½V⁻¹,     ξ = m,  Ξ = V + mmᵀ

    A(λ, Λ) = -¼ λᵀΛ⁻¹λ - ½ log|-2Λ|        A*(ξ, Ξ) = -½ log|Ξ - ξξᵀ| - D/2        (ξ, Ξ) = ∇A,  (λ, Λ) = ∇A*

(Wainwright and Jordan 2008; Wu and Gardner 2024, section 2, which drops the -D/2 that Fenchel's equality needs.)
All functions are batched and differentiable; ∇ with respect to a symmetric matrix is the symmetric one under tr(AB).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.numerics.linalg import cholesky

__all__ = ["ExpectationParameters", "Natural", "bregman", "expectation_gradient", "inner"]


class Natural(NamedTuple):
    """The natural parameters η = (λ, Λ) of a Gaussian, with Λ negative definite.

    Where that is not so, the methods raise an `InputError`.

    >>> Natural.of(torch.tensor([1.0]), torch.tensor([[0.25]])).vector.item()
    4.0
    """

    vector: Tensor  # V⁻¹m, (*batch, D)
    matrix: Tensor  # -½V⁻¹, (*batch, D, D)

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> "Natural":
        """Compute the natural parameters from m and V.

        Args:
            mean: m, (*batch, D).
            covariance: V, (*batch, D, D).

        Returns:
            η = (V⁻¹m, -½V⁻¹).

        Raises:
            InputError: if the covariance is not positive definite.

        >>> Natural.of(torch.tensor([1.0]), torch.tensor([[0.25]])).matrix.item()
        -2.0
        """
        precision = torch.cholesky_inverse(_factor(covariance, "covariance"))
        return cls(_mv(precision, mean), -0.5 * precision)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Compute the mean, (*batch, D), and the covariance, (*batch, D, D)."""
        V = torch.cholesky_inverse(_factor(-2 * self.matrix, "-Λ"))
        return _mv(V, self.vector), V

    def log_partition(self) -> Tensor:
        """Compute the log-partition function A(η) = ½ mᵀλ - ½ log|-2Λ|, (*batch,)."""
        factor = _factor(-2 * self.matrix, "-Λ")
        half = torch.linalg.solve_triangular(factor, self.vector[..., None], upper=False)[..., 0]
        return 0.5 * half.square().sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def expectation(self) -> "ExpectationParameters":
        """Compute the expectation parameters of the same Gaussian, ω = ∇A(η)."""
        return ExpectationParameters.of(*self.moments())


class ExpectationParameters(NamedTuple):
    """The expectation parameters ω = (ξ, Ξ) of a Gaussian, with Ξ - ξξᵀ positive definite.

    Where that is not so, `conjugate` and `natural` raise an `InputError`.

    >>> ExpectationParameters(torch.tensor([2.0]), torch.tensor([[5.0]])).moments()[1].item()  # 5 - 2²
    1.0
    """

    vector: Tensor  # E z, (*batch, D)
    matrix: Tensor  # E zzᵀ, (*batch, D, D)

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> "ExpectationParameters":
        """Compute the expectation parameters from m and V.

        Args:
            mean: m, (*batch, D).
            covariance: V, (*batch, D, D).

        Returns:
            ω = (m, V + mmᵀ).

        >>> ExpectationParameters.of(torch.tensor([2.0]), torch.tensor([[1.0]])).matrix.item()
        5.0
        """
        return cls(mean, covariance + _square(mean))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Compute the mean, (*batch, D), and the covariance, (*batch, D, D)."""
        return self.vector, self.matrix - _square(self.vector)

    def conjugate(self) -> Tensor:
        """Compute the convex conjugate of the log-partition function, A*(ω) = max_η ⟨η, ω⟩ - A(η), (*batch,).

        Up to a constant it is minus the entropy of the Gaussian.
        """
        factor = _factor(self.moments()[1], "Ξ - ξξᵀ")
        return -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * self.vector.shape[-1]

    def natural(self) -> Natural:
        """Compute the natural parameters of the same Gaussian, η = ∇A*(ω)."""
        return Natural.of(*self.moments())


def inner(eta: Natural, omega: ExpectationParameters) -> Tensor:
    """The inner product of natural and expectation parameters, ⟨η, ω⟩ = λᵀξ + tr(ΛΞ).

    Args:
        eta: natural parameters.
        omega: expectation parameters, of any Gaussian.

    Returns:
        ⟨η, ω⟩, (*batch,).

    >>> eta = Natural.of(torch.tensor([1.0]), torch.tensor([[1.0]]))
    >>> inner(eta, eta.expectation()).item()
    0.0
    """
    return torch.linalg.vecdot(eta.vector, omega.vector) + (eta.matrix * omega.matrix).sum((-2, -1))


def bregman(omega: ExpectationParameters, other: ExpectationParameters) -> Tensor:
    """The Bregman divergence of A*, which is the KL divergence of the two Gaussians.

        D_A*(ω, ω') = A*(ω) - A*(ω') - ⟨∇A*(ω'), ω - ω'⟩ = KL(q‖q')

    Args:
        omega: the expectation parameters of q.
        other: those of q'.

    Returns:
        The divergence in nats, (*batch,).

    Raises:
        InputError: if the parameters belong to no Gaussian.

    >>> one, other = (ExpectationParameters.of(torch.tensor([m]), torch.eye(1)) for m in (2.0, 0.0))
    >>> bregman(one, other).item()
    2.0
    """
    change = ExpectationParameters(omega.vector - other.vector, omega.matrix - other.matrix)
    return omega.conjugate() - other.conjugate() - inner(other.natural(), change)


def expectation_gradient(mean: Tensor, g: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient in expectation parameters, by the chain rule from (m, V).

    Args:
        mean: m, (*batch, D).
        g: ∂L/∂m, (*batch, D).
        G: ∂L/∂V, symmetric, (*batch, D, D); half of what `Raw` calls H.

    Returns:
        ∂L/∂ξ = g - 2Gm, (*batch, D), and ∂L/∂Ξ = G, (*batch, D, D).

    >>> expectation_gradient(torch.ones(1), torch.ones(1), torch.ones(1, 1))[0].item()
    -1.0
    """
    return g - 2 * _mv(G, mean), G


def _factor(matrix: Tensor, name: str) -> Tensor:
    factor, ok = cholesky(matrix)
    if not bool(ok.all()):
        raise InputError(
            f"{name} must be positive definite; its Cholesky factorisation failed. "
            "These coordinates belong to no Gaussian."
        )
    return factor


def _mv(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _square(vector: Tensor) -> Tensor:
    return vector[..., :, None] * vector[..., None, :]
