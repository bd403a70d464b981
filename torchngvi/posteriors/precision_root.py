"""Gaussians stored as mean and root of the precision: (m, T), S = V⁻¹ = T Tᵀ, T lower triangular.

The frame is C = T⁻ᵀ, upper triangular.  The moves in these coordinates, from N = L Lᵀ:

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
from torchngvi.linalg import triangular_inverse
from torchngvi.posteriors.gaussian import Gaussian, Tested, log_moved
from torchngvi.structures import Dense


class PrecisionCholeskyGaussian(Gaussian):
    """N(m, (T Tᵀ)⁻¹) with a full lower-triangular T, in the buffers ``mean`` and ``precision_tril``.

    Arguments and errors as in :class:`CholeskyGaussian`: the start is a scale of the covariance.

    >>> PrecisionCholeskyGaussian(2, scale=0.1).precision_tril.diagonal().tolist()
    [10.0, 10.0]
    """

    takes = frozenset({Congruence, Tangent, RootTangent, LogTangent})
    precision_tril: Tensor

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
        self._register(("mean", "precision_tril"), mean, scale, dtype, device)

    @property
    def coordinates(self) -> Coordinates:
        """(m, T)."""
        return Coordinates(self.mean, self.precision_tril)

    @property
    def precision(self) -> Tensor:
        """S = T Tᵀ, (*batch, D, D)."""
        return self.precision_tril @ self.precision_tril.mT

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor of V, (*batch, D, D)."""
        return self._lower_root_of_inverse(self.precision_tril)

    def _coordinates_of(self, mean: Tensor, scale: Tensor) -> Coordinates:
        if scale.ndim == mean.ndim:
            return Coordinates(mean, torch.diag_embed(scale.reciprocal()))
        return Coordinates(mean, self._lower_root_of_inverse(scale))

    def _lower_root_of_inverse(self, root: Tensor) -> Tensor:
        """The lower root of (A Aᵀ)⁻¹, A lower triangular, by a QR factorisation of A⁻ᵀ."""
        return self.structure.positive_root(self.structure.lower_root(triangular_inverse(root).mT))[0]

    def frame(self) -> Frame:
        """(m, T⁻ᵀ), kept until the coordinates change."""
        return Frame(self.mean, self._computed("root")["root"], self.structure, upper=True)

    def _compute_root(self) -> Tensor:
        return triangular_inverse(self.precision_tril).mT

    def snapshot(self) -> Coordinates:
        """A copy of the coordinates with what is known of them."""
        return Tested.of(*super().snapshot(), **self._computed("root"))

    def whiten(self, x: Tensor) -> Tensor:
        """C⁻¹ x = Tᵀ x, (*sample, *batch, D)."""
        return self.structure.mv(self.precision_tril.mT, x)

    def log_det_root(self) -> Tensor:
        """-Σ log T_ii, (*batch,)."""
        return -self.precision_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def unframe(self, a: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """T a and T W Tᵀ."""
        root = self.precision_tril
        return self.structure.mv(root, a), root @ W @ root.mT

    def tangent(self, e: Expectation) -> Coordinates:
        """(T⁻ᵀ a, -T tril½[P])."""
        a, P = self.local(e)
        return Coordinates(self.frame().push(a), -(self.precision_tril @ self.structure.tril_half(P)))

    def euclidean(self, e: Expectation) -> Coordinates:
        """(T a, -tril[T⁻ᵀ P])."""
        a, P = self.local(e)
        return Coordinates(self.structure.mv(self.precision_tril, a), -(self.frame().root @ P).tril())

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """(m', T') with a positive diagonal, and where it is one and V' neither over- nor underflows."""
        mean, root = self.coordinates
        structure = self.structure
        in_cone = torch.ones(self.batch_shape, dtype=torch.bool, device=mean.device)
        match move:
            case Congruence(N, force):
                lower, in_cone = structure.cholesky(N)
                new = root @ lower
                vector = mean + structure.solve_upper(new.mT, structure.solve_lower(lower, force))
            case LogTangent((vector_change, matrix_change)):
                vector, new = mean + vector_change, log_moved(structure, root, matrix_change)
            case Tangent((vector_change, matrix_change)):
                vector, new = mean + vector_change, root + matrix_change
            case _:
                raise NotImplementedError  # `takes` refuses it before
        new, ok = structure.positive_root(new)
        inverse = triangular_inverse(new).mT
        return Tested.of(vector, new, root=inverse), ok & in_cone & self._proper(vector, inverse)
