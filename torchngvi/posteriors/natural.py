"""Gaussians stored in natural parameters: (S m, S), S = V⁻¹ = T Tᵀ; the frame is C = T⁻ᵀ.

The natural gradient is (g - G m, -G) with G = H - γS, so that the tangent step of length ρ is
VN: S' = (1 - γρ) S + ρH, m' = m - ρ S'⁻¹ g (Khan and Rue 2023; Kumar et al. 2025, Eq 7), without
a factor of V or a product of D x D matrices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi.interfaces import (
    Congruence,
    Coordinates,
    Expectation,
    Frame,
    Framed,
    Move,
    Raw,
    Tangent,
    Versions,
    where_members,
)
from torchngvi.linalg import cholesky, triangular_inverse
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Dense


class _Factored(Coordinates):
    """(S m, S) with the factor of S beside it."""

    factor: Tensor

    @classmethod
    def of(cls, vector: Tensor, matrix: Tensor, factor: Tensor) -> "_Factored":
        new = cls(vector, matrix)
        new.factor = factor
        return new


class NaturalGaussian(Gaussian):
    """N(m, S⁻¹) with a full precision, in the buffers ``precision_mean`` (S m) and ``precision``.

    Arguments and errors as in :class:`CholeskyGaussian`.

    >>> NaturalGaussian(2, mean=1.0, scale=0.5).precision_mean.tolist()
    [4.0, 4.0]
    """

    takes = frozenset({Congruence, Tangent})
    precision_mean: Tensor

    def __init__(
        self,
        dim: int,
        batch_shape: Sequence[int] = (),
        *,
        mean: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dim, batch_shape, Dense())
        self._register(("precision_mean", "precision"), mean, scale, dtype, device)

    @property
    def mean(self) -> Tensor:
        """m, (*batch, D)."""
        return self._remembered("mean", self._mean)

    def _mean(self) -> Tensor:
        return torch.cholesky_solve(self.precision_mean[..., None], self.factor())[..., 0]

    @property
    def coordinates(self) -> Coordinates:
        """(S m, S)."""
        return Coordinates(self.precision_mean, self.precision)

    def factor(self) -> Tensor:
        """T with S = T Tᵀ, kept until S changes."""
        return self._remembered("factor", lambda: cholesky(self.precision)[0])

    def frame(self) -> Frame:
        """(m, T⁻ᵀ), kept until the coordinates change."""
        return self._remembered("frame", self._frame)

    def _frame(self) -> Frame:
        return Frame(self.mean, triangular_inverse(self.factor()).mT, self.structure, upper=True)

    def snapshot(self) -> Coordinates:
        """A copy of the coordinates with the factor."""
        return _Factored.of(self.precision_mean.clone(), self.precision.clone(), self.factor())

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """As every posterior; the factor that the test of the cone has made is kept."""
        factor = where_members(where, new.factor, self.factor()) if isinstance(new, _Factored) else None
        # graphs through what was computed from the old coordinates are stale: let torch know
        for _, (_, value) in self._memory.items():
            parts = (value.mean, value.root) if isinstance(value, Frame) else value
            torch.autograd.graph.increment_version(parts)
        super().assign(new, where)
        if factor is not None:
            self._memory["factor"] = (Versions(self.coordinates), factor)

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor of V, (*batch, D, D)."""
        return cholesky(self.covariance)[0]

    def _coordinates_of(self, mean: Tensor, scale: Tensor) -> Coordinates:
        if scale.ndim == mean.ndim:
            return Coordinates(mean / scale.square(), torch.diag_embed(scale.pow(-2)))
        precision = torch.cholesky_inverse(scale)
        return Coordinates((precision @ mean[..., None])[..., 0], precision)

    def whiten(self, x: Tensor) -> Tensor:
        """C⁻¹ x = Tᵀ x, (*sample, *batch, D)."""
        return self.structure.mv(self.factor().mT, x)

    def log_det_root(self) -> Tensor:
        """-Σ log T_ii, (*batch,)."""
        return -self.factor().diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def unframe(self, a: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """T a and T W Tᵀ."""
        factor = self.factor()
        return self.structure.mv(factor, a), factor @ W @ factor.mT

    def tangent(self, e: Expectation) -> Coordinates:
        """(g - G m, -G), G = H - γS."""
        d = e.derivative
        g, H = Raw(*self.unframe(d.a, d.W)) if isinstance(d, Framed) else d if isinstance(d, Raw) else d.raw()
        G = torch.sub(H, self.precision, alpha=e.temperature)
        return Coordinates(g - self.structure.mv(G, self.mean), G.neg_())

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """(S'm', S'), and where S' is positive definite."""
        vector, precision = self.coordinates
        match move:
            case Tangent((vector_change, matrix_change)):
                vector, matrix = vector + vector_change, precision + matrix_change
            case Congruence(N, force):
                # S' = T N Tᵀ,  S'm' = S'm + T f
                shift, matrix = self.unframe(force, N)
                matrix = 0.5 * (matrix + matrix.mT)
                vector = self.structure.mv(matrix, self.mean) + shift
            case _:
                raise NotImplementedError  # `takes` refuses it before
        factor, ok = cholesky(matrix)
        return _Factored.of(vector, matrix, factor), ok & torch.isfinite(vector).all(-1)
