"""Patterns of the scale matrix C in z = m + C u, and the two gradient estimators in each.

    closed entropy          g_m = a    g_C = Π[a uᵀ] - ∇ log|det C|        a = ∇ℓ(m + C u)
    sticking the landing    g_m = r    g_C = Π[r uᵀ]                       r = a + C⁻ᵀ(log φ)'(u)

(Kim, Ma and Gardner 2024, Definitions 4 and 5, with the sign of descent: E g = ∇F for F = E ℓ - log|det C|.)  Π keeps
the family's free entries.  All parametrisations are linear in C: with c = exp(s), F'' vanishes as c does.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.numerics.linalg import eigh
from torchngvi.theory.kim2024.bases import Base


class Gradient(NamedTuple):
    """One estimate a draw."""

    mean: Tensor  # (*sample, D)
    scale: Tensor  # (*sample, D, D)

    def square(self) -> Tensor:
        """|g_m|² + ‖g_C‖²_F, (*sample,)."""
        return self.mean.square().sum(-1) + self.scale.square().sum((-2, -1))


class Scale(ABC):
    """A pattern of C, written out as (D, D): abstract, see `Triangular`, `MeanField`, `SquareRoot`, `Unrestricted`."""

    @abstractmethod
    def kept(self, matrix: Tensor) -> Tensor:
        """Π: the gradient with respect to the free entries, (*sample, D, D)."""

    @abstractmethod
    def entropy_gradient(self, C: Tensor) -> Tensor:
        """∇ log|det C|, (D, D)."""

    @abstractmethod
    def projected(self, C: Tensor, floor: float) -> Tensor:
        """The nearest C of the domain.

        Raises:
            InputError: a floor that is not positive, a pattern without a domain.
        """

    @abstractmethod
    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """v (D,) and W (D, D) in E[|r|² + ‖Π[r uᵀ]‖²] = Σ v_i h_i² + Σ W_ij G_ij² for r = Gu + h."""

    def closed_entropy(
        self,
        C: Tensor,  # (D, D)
        gradient: Tensor,  # a, (*sample, D)
        u: Tensor,  # (*sample, D)
    ) -> Gradient:
        """The estimator with the entropy in closed form (CFE)."""
        return Gradient(gradient, self.kept(_outer(gradient, u)) - self.entropy_gradient(C))

    def landing(
        self,
        C: Tensor,  # (D, D)
        gradient: Tensor,  # a, (*sample, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Gradient:
        """The estimator that sticks the landing (STL): zero at each draw where q is the target."""
        residual = gradient + self.pulled_score(C, u, base)
        return Gradient(residual, self.kept(_outer(residual, u)))

    def control_variate(
        self,
        C: Tensor,  # (D, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Gradient:
        """Closed entropy minus sticking the landing, of mean 0, which does not depend on the target."""
        score = self.pulled_score(C, u, base)
        return Gradient(-score, -self.kept(_outer(score, u)) - self.entropy_gradient(C))

    def pulled_score(
        self,
        C: Tensor,  # (D, D)
        u: Tensor,  # (*sample, D)
        base: Base,
    ) -> Tensor:
        """∇_z log q = C⁻ᵀ(log φ)'(u), (*sample, D)."""
        return torch.linalg.solve(C.mT, base.score(u)[..., None])[..., 0]


@final
class Triangular(Scale):
    """Lower triangular, C_ii ≥ c: a projection of D operations.

    >>> Triangular().projected(torch.tensor([[0.1, 0.0], [3.0, 2.0]]), 0.5).tolist()
    [[0.5, 0.0], [3.0, 2.0]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """tril."""
        return matrix.tril()

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """diag(1/C_ii)."""
        return torch.diag_embed(1 / C.diagonal())

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """max(C_ii, c)."""
        return C + torch.diag_embed(C.diagonal().clamp_min(_positive(floor)) - C.diagonal())

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """i + 1, and i + 1 + (k - 1)[j ≤ i]."""
        v = torch.arange(2.0, dim + 2, dtype=torch.float64)
        return v, v[:, None] + (kurtosis - 1) * torch.ones(dim, dim, dtype=torch.float64).tril()

    def pulled_score(self, C: Tensor, u: Tensor, base: Base) -> Tensor:
        """One back-substitution, D²."""
        columns = base.score(u).reshape(-1, len(C)).mT
        return torch.linalg.solve_triangular(C.mT, columns, upper=True).mT.reshape(u.shape)


@final
class MeanField(Scale):
    """Diagonal, C_ii ≥ c."""

    def kept(self, matrix: Tensor) -> Tensor:
        """The diagonal."""
        return torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """diag(1/C_ii)."""
        return torch.diag_embed(1 / C.diagonal())

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """max(C_ii, c)."""
        return torch.diag_embed(C.diagonal().clamp_min(_positive(floor)))

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """2, and 2 + (k - 1)[j = i]."""
        v = torch.full((dim,), 2.0, dtype=torch.float64)
        return v, 2 + (kurtosis - 1) * torch.eye(dim, dtype=torch.float64)


@final
class SquareRoot(Scale):
    """Symmetric positive definite, eigenvalues at least c: a projection of D³ operations (Domke 2020)."""

    def kept(self, matrix: Tensor) -> Tensor:
        """(A + Aᵀ)/2."""
        return 0.5 * (matrix + matrix.mT)

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """C⁻¹."""
        return torch.linalg.solve(C, torch.eye(len(C), dtype=C.dtype, device=C.device))

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """The spectrum, clipped."""
        values, vectors, ok = eigh(C)
        projected = (vectors * values.clamp_min(_positive(floor))) @ vectors.mT
        return torch.where(ok[..., None, None], projected, torch.nan)

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Not of this form: its cross terms mix G_ij and G_ji.

        Raises:
            InputError: always.
        """
        raise InputError(
            "the second moment of a symmetrised gradient is no weighted sum of squares. Use Unrestricted, above it."
        )


@final
class Unrestricted(Scale):
    """Every entry free, for which the bounds of the full-rank family are derived; not an algorithm."""

    def kept(self, matrix: Tensor) -> Tensor:
        """All of it."""
        return matrix

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """C⁻ᵀ."""
        return torch.linalg.solve(C.mT, torch.eye(len(C), dtype=C.dtype, device=C.device))

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """There is no domain that is convex.

        Raises:
            InputError: always.
        """
        raise InputError("an unrestricted C has no convex domain to project on. Use Triangular or SquareRoot.")

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """D + 1 and D + k."""
        v = torch.full((dim,), dim + 1.0, dtype=torch.float64)
        return v, torch.full((dim, dim), dim + kurtosis, dtype=torch.float64)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]


def _positive(floor: float) -> float:
    if not floor > 0:
        raise InputError(f"floor is the smallest scale of the domain, positive; got {floor:g}. Use 1/√L.")
    return floor
