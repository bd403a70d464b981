"""Patterns of the scale matrix C in z = m + C u, and the two gradient estimators in each.

    closed entropy          g_m = a    g_C = Π[a uᵀ] - ∇ log|det C|        a = ∇ℓ(m + C u)
    sticking the landing    g_m = r    g_C = Π[r uᵀ]                       r = a + C⁻ᵀ(log φ)'(u)

(Kim, Ma and Gardner 2024, Definitions 4 and 5, with the sign of descent: E g = ∇F for F = E ℓ - log|det C|.)  Π keeps
the free entries of the pattern.  All parametrisations are linear in C: with c = exp(s), F'' vanishes as c does.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.numerics.linalg import eigh
from torchngvi.theory.kim2024.bases import Base


class Gradient(NamedTuple):
    """The gradient estimates in m and C, one for each draw."""

    mean: Tensor  # (*sample, D)
    scale: Tensor  # (*sample, D, D)

    def square(self) -> Tensor:
        """The squared length |g_m|² + ‖g_C‖²_F."""
        return self.mean.square().sum(-1) + self.scale.square().sum((-2, -1))


class Scale(ABC):
    """The abstract base of the patterns of C, which is written out as (D, D).

    See `Triangular`, `MeanField`, `SquareRoot` and `Unrestricted`.

    >>> scale: Scale = MeanField()
    >>> scale.kept(torch.ones(2, 2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    @abstractmethod
    def kept(self, matrix: Tensor) -> Tensor:
        """Return Π[A], the gradient with respect to the free entries, (*sample, D, D)."""

    @abstractmethod
    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return ∇ log|det C| with respect to the free entries, (D, D)."""

    @abstractmethod
    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return the nearest C of the domain, (D, D).

        Raises:
            InputError: if the floor is not positive, or the pattern has no convex domain.
        """

    @abstractmethod
    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v (D,) and W (D, D) in E[|r|² + ‖Π[r uᵀ]‖²] = Σ v_i h_i² + Σ W_ij G_ij² for r = Gu + h."""

    def closed_entropy(
        self,
        C: Tensor,  # (D, D)
        gradient: Tensor,  # a, (*sample, D)
        u: Tensor,  # (*sample, D)
    ) -> Gradient:
        """The estimator with the entropy in closed form (CFE).

        Args:
            C: the scale matrix, (D, D).
            gradient: a = ∇ℓ at the draws, (*sample, D).
            u: the noise of the draws, (*sample, D).

        Returns:
            One gradient for each draw.
        """
        return Gradient(gradient, self.kept(_outer(gradient, u)) - self.entropy_gradient(C))

    def landing(
        self,
        C: Tensor,  # (D, D)
        gradient: Tensor,  # a, (*sample, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Gradient:
        """The estimator that sticks the landing (STL): zero at each draw where q is the target.

        Args:
            C: the scale matrix, (D, D).
            gradient: a = ∇ℓ at the draws, (*sample, D).
            u: the noise of the draws, (*sample, D).
            base: the density φ of the noise.

        Returns:
            One gradient for each draw.
        """
        residual = gradient + self.pulled_score(C, u, base)
        return Gradient(residual, self.kept(_outer(residual, u)))

    def control_variate(
        self,
        C: Tensor,  # (D, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Gradient:
        """The closed entropy minus sticking the landing, of mean 0, which does not depend on the target.

        Args:
            C: the scale matrix, (D, D).
            u: the noise of the draws, (*sample, D).
            base: the density φ of the noise.

        Returns:
            One difference for each draw.
        """
        score = self.pulled_score(C, u, base)
        return Gradient(-score, -self.kept(_outer(score, u)) - self.entropy_gradient(C))

    def pulled_score(
        self,
        C: Tensor,  # (D, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Tensor:
        """The score of q at the draws, ∇_z log q = C⁻ᵀ(log φ)'(u).

        Args:
            C: the scale matrix, (D, D).
            u: the noise of the draws, (*sample, D).
            base: the density φ of the noise.

        Returns:
            One score for each draw, (*sample, D).
        """
        return torch.linalg.solve(C.mT, base.score(u)[..., None])[..., 0]


@final
class Triangular(Scale):
    """Lower triangular matrices with C_ii ≥ c: full rank, with a projection of D operations.

    >>> Triangular().projected(torch.tensor([[0.1, 0.0], [3.0, 2.0]]), 0.5).tolist()
    [[0.5, 0.0], [3.0, 2.0]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the lower triangle."""
        return matrix.tril()

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return the diagonal matrix of 1/C_ii."""
        return torch.diag_embed(1 / C.diagonal())

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return C with the diagonal max(C_ii, c).

        Raises:
            InputError: if the floor is not positive.
        """
        return C + torch.diag_embed(C.diagonal().clamp_min(_positive(floor)) - C.diagonal())

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = i + 1 and W_ij = i + 1 + (k - 1)[j ≤ i]."""
        v = torch.arange(2.0, dim + 2, dtype=torch.float64)
        return v, v[:, None] + (kurtosis - 1) * torch.ones(dim, dim, dtype=torch.float64).tril()

    def pulled_score(self, C: Tensor, u: Tensor, base: Base) -> Tensor:
        """Return the score by one back-substitution, of D² operations a draw."""
        columns = base.score(u).reshape(-1, len(C)).mT
        return torch.linalg.solve_triangular(C.mT, columns, upper=True).mT.reshape(u.shape)


@final
class MeanField(Scale):
    """Diagonal matrices with C_ii ≥ c: independent coordinates.

    >>> MeanField().projected(torch.tensor([[2.0, 0.0], [0.0, 0.1]]), 0.5).tolist()
    [[2.0, 0.0], [0.0, 0.5]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the diagonal, as a matrix."""
        return torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return the diagonal matrix of 1/C_ii."""
        return torch.diag_embed(1 / C.diagonal())

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return the diagonal matrix of max(C_ii, c).

        Raises:
            InputError: if the floor is not positive.
        """
        return torch.diag_embed(C.diagonal().clamp_min(_positive(floor)))

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = 2 and W_ij = 2 + (k - 1)[j = i]."""
        v = torch.full((dim,), 2.0, dtype=torch.float64)
        return v, 2 + (kurtosis - 1) * torch.eye(dim, dtype=torch.float64)


@final
class SquareRoot(Scale):
    """Symmetric positive definite matrices with eigenvalues of at least c: a projection of D³ operations (Domke 2020).

    >>> SquareRoot().kept(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the symmetric part (A + Aᵀ)/2."""
        return 0.5 * (matrix + matrix.mT)

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return the inverse C⁻¹."""
        return torch.linalg.solve(C, torch.eye(len(C), dtype=C.dtype, device=C.device))

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return C with its eigenvalues clipped at c.

        Raises:
            InputError: if the floor is not positive.
        """
        values, vectors, ok = eigh(C)
        projected = (vectors * values.clamp_min(_positive(floor))) @ vectors.mT
        return torch.where(ok[..., None, None], projected, torch.nan)

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Refuse, since the moment is not of this form: its cross terms mix G_ij and G_ji.

        Raises:
            InputError: always.
        """
        raise InputError(
            "the second moment of a symmetrised gradient is no weighted sum of squares. Use Unrestricted, above it."
        )


@final
class Unrestricted(Scale):
    """Matrices with every entry free, for which the bounds of full rank are derived; not an algorithm.

    >>> v, W = Unrestricted().second_moment_weights(2, 3.0)
    >>> v.tolist(), W.tolist()  # D + 1 and D + k
    ([3.0, 3.0], [[5.0, 5.0], [5.0, 5.0]])
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the matrix as it is."""
        return matrix

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return the inverse transpose C⁻ᵀ."""
        return torch.linalg.solve(C.mT, torch.eye(len(C), dtype=C.dtype, device=C.device))

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Refuse, since there is no convex domain to project on.

        Raises:
            InputError: always.
        """
        raise InputError("an unrestricted C has no convex domain to project on. Use Triangular or SquareRoot.")

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = D + 1 and W_ij = D + k."""
        v = torch.full((dim,), dim + 1.0, dtype=torch.float64)
        return v, torch.full((dim, dim), dim + kurtosis, dtype=torch.float64)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]


def _positive(floor: float) -> float:
    if not floor > 0:
        raise InputError(f"floor is the smallest scale of the domain, positive; got {floor:g}. Use 1/√L.")
    return floor
