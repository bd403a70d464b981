"""Gaussians stored as mean and root of the precision: (m, T), S = V⁻¹ = T Tᵀ, T lower triangular.

The frame is C = T⁻ᵀ, upper triangular, held by T⁻¹, which has the pattern of T.  The moves in these coordinates,
from N = L Lᵀ:

    Congruence   T' = T L,  m' = m + T'⁻ᵀ L⁻¹ f
    Tangent      T' = T + Ṫ,  m' = m + ṁ,  with natural gradient (T⁻ᵀ a, -T tril½[P])
                 and Euclidean gradient (T a, -tril[T⁻ᵀ P])

The natural gradient is Theorem 2 of Tan (2025), for the Cholesky factor of the precision.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi.interfaces import (
    Congruence,
    Coordinates,
    Expectation,
    Frame,
    LogTangent,
    Move,
    RootTangent,
    Tangent,
)
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.memory import Tested
from torchngvi.posteriors.roots import log_moved, root_of_inverse
from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


class PrecisionCholeskyGaussian(Gaussian):
    """N(m, (T Tᵀ)⁻¹) with a lower-triangular T, in the buffers ``mean`` and ``precision_tril``.

    Arguments and errors as in :class:`CholeskyGaussian`: the start is a scale of the covariance.  Every structure
    has a root of the precision; the buffer holds it as the structure stores it.

    >>> PrecisionCholeskyGaussian(2, scale=0.1).precision_tril.diagonal().tolist()
    [10.0, 10.0]
    """

    takes = frozenset({Congruence, Tangent, RootTangent, LogTangent})
    upper = True

    def __init__(
        self,
        dim: int,
        batch_shape: Sequence[int] = (),
        *,
        mean: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
        structure: Pattern | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dim, batch_shape, structure)
        self._register(("mean", "precision_tril"), mean, scale, dtype, device)

    @property
    def coordinates(self) -> Coordinates:
        """(m, T)."""
        return Coordinates(self.mean, self._buffers["precision_tril"])  # type: ignore[arg-type]

    @property
    def precision_tril(self) -> Tensor:
        """T, (*batch, D, D)."""
        return self.structure.to_dense(self.coordinates.matrix)

    @property
    def precision(self) -> Tensor:
        """S = T Tᵀ, (*batch, D, D)."""
        root = self.precision_tril
        return root @ root.mT

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor of V, (*batch, D, D)."""
        if isinstance(self.structure, FullAlgebra):
            return self.structure.to_dense(root_of_inverse(self.structure, self.coordinates.matrix))
        return cholesky(self.covariance)[0]

    def _coordinates_of(self, mean: Tensor, scale: Tensor) -> Coordinates:
        if scale.ndim == mean.ndim:
            return Coordinates(mean, self._diagonal_matrix(scale.reciprocal()))
        if isinstance(self.structure, FullAlgebra):
            return Coordinates(mean, root_of_inverse(self.structure, self.structure.from_dense(scale)))
        return Coordinates(mean, self.structure.cholesky(self.structure.from_dense(torch.cholesky_inverse(scale)))[0])

    def _coordinates_with(self, mean: Tensor, whitener: Structured) -> Coordinates:
        return Coordinates(mean, whitener)

    def frame(self) -> Frame:
        """(m, T⁻ᵀ), kept until the coordinates change."""
        return Frame(self.mean, self._computed("root")["root"], self.structure, upper=True)

    def _compute_root(self) -> Structured:
        return self.structure.inverse(self.coordinates.matrix)

    def snapshot(self) -> Coordinates:
        """A copy of the coordinates with what is known of them."""
        return Tested.of(*super().snapshot(), **self._computed("root"))

    def whiten(self, x: Tensor) -> Tensor:
        """C⁻¹ x = Tᵀ x, (*sample, *batch, D)."""
        return self.structure.tmv(self.coordinates.matrix, x)

    def whitener(self) -> Structured:
        """T."""
        return self.coordinates.matrix

    def log_det_root(self) -> Tensor:
        """-Σ log T_ii, (*batch,)."""
        return -self.structure.log_det(self.coordinates.matrix)

    def unframe(self, a: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """T a and T W Tᵀ."""
        root = self.coordinates.matrix
        return self.structure.mv(root, a), self.structure.congruence(root, W)

    def tangent(self, e: Expectation) -> Coordinates:
        """(T⁻ᵀ a, -T tril½[P])."""
        a, P = self.local(e)
        half = self.structure.tril_half(P)
        return Coordinates(self.frame().push(a), -self.structure.matmul(self.coordinates.matrix, half))

    def euclidean(self, e: Expectation) -> Coordinates:
        """(T a, -tril[T⁻ᵀ P])."""
        a, P = self.local(e)
        structure, (_, root) = self.structure, self.coordinates
        return Coordinates(structure.mv(root, a), -structure.tmatmul(self.frame().root, P))

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """(m', T') with a positive diagonal, and where it is one and V' neither over- nor underflows."""
        mean, root = self.coordinates
        structure = self.structure
        in_cone = torch.ones(self.batch_shape, dtype=torch.bool, device=mean.device)
        match move:
            case Congruence(N, force):
                lower, in_cone = structure.cholesky(N)
                new = structure.matmul(root, lower)
                vector = mean + structure.tsolve(new, structure.solve(lower, force))
            case LogTangent((vector_change, matrix_change)):
                vector, new = mean + vector_change, log_moved(structure, root, matrix_change)
            case Tangent((vector_change, matrix_change)):
                vector, new = mean + vector_change, root + matrix_change
            case _:
                raise NotImplementedError  # `takes` refuses it before
        new, ok = structure.positive_root(new)
        inverse = structure.inverse(new)
        return Tested.of(vector, new, root=inverse), self.structure.everywhere(
            ok & in_cone & self._proper(vector, inverse)
        )
