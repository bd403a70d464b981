"""Gaussians stored as mean and root of the precision: (m, T), S = V⁻¹ = T Tᵀ, T lower triangular.

The frame is C = T⁻ᵀ, upper triangular, held by T⁻¹, which has the pattern of T.  The moves in these coordinates,
from N = L Lᵀ:

    Congruence   T' = T L,  m' = m + T'⁻ᵀ L⁻¹ f
    Tangent      T' = T + Ṫ,  m' = m + ṁ,  with natural gradient (T⁻ᵀ a, -T tril½[P])
                 and Euclidean gradient (T a, -tril[T⁻ᵀ P])

The natural gradient is Theorem 2 of Tan (2025), for the Cholesky factor of the precision.
"""

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
from torchngvi.posteriors.memory import Tested
from torchngvi.posteriors.precision import PrecisionGaussian
from torchngvi.posteriors.roots import root_of_inverse, tangent_moved
from torchngvi.structures.pattern import Structured


class PrecisionCholeskyGaussian(PrecisionGaussian):
    """N(m, (T Tᵀ)⁻¹) with a lower-triangular T, in the buffers ``mean`` and ``precision_tril``.

    Take it for rules that follow a root where only the precision is sparse, as in hierarchical models: every structure,
    an arrow or a forest too, has a root of the precision.

    Args:
        dim, batch_shape, mean, scale, dtype, device: as in :class:`CholeskyGaussian`, with a scale of the covariance.
        structure: which entries T has, every one below the diagonal by default; the buffer holds them as the structure
            stores them.

    Raises:
        InputError: as in :class:`CholeskyGaussian`.

    >>> PrecisionCholeskyGaussian(2, scale=0.1).precision_tril.diagonal().tolist()
    [10.0, 10.0]
    """

    takes = frozenset({Congruence, Tangent, RootTangent, LogTangent})
    coordinate_names = ("mean", "precision_tril")

    def factor(self) -> Structured:
        """Return T itself, which is a coordinate."""
        return self.coordinates.matrix

    @property
    def precision_tril(self) -> Tensor:
        """The lower factor T of the precision, written out, (*batch, D, D)."""
        return self.structure.to_dense(self.coordinates.matrix)

    @property
    def precision(self) -> Tensor:
        """The precision S = T Tᵀ, (*batch, D, D)."""
        root = self.precision_tril
        return root @ root.mT

    def _of_stddev(self, mean: Tensor, stddev: Tensor) -> Coordinates:
        return Coordinates(mean, self._diagonal_matrix(stddev.reciprocal()))

    def _of_factor(self, mean: Tensor, factor: Tensor) -> Coordinates:
        structure = self.structure
        if structure.closed:  # the root of the precision follows from that of the covariance, block by block
            return Coordinates(mean, root_of_inverse(structure, structure.from_dense(factor)))
        return Coordinates(mean, structure.cholesky(structure.from_dense(torch.cholesky_inverse(factor)))[0])

    def _coordinates_with(self, mean: Tensor, whitener: Structured) -> Coordinates:
        return Coordinates(mean, whitener)

    def frame(self) -> Frame:
        """Return m and the root T⁻ᵀ, kept until the coordinates change."""
        return Frame(self.mean, self._computed("root")["root"], self.structure, upper=True)

    def snapshot(self) -> Coordinates:
        """Copy the coordinates with what is known of them."""
        return Tested.of(*super().snapshot(), **self._computed("root"))

    def tangent(self, e: Expectation) -> Coordinates:
        """Compute the natural gradient in (m, T), which is (T⁻ᵀ a, -T tril½[P])."""
        a, P = self.local(e)
        half = self.structure.tril_half(P)
        return Coordinates(self.frame().push(a), -self.structure.matmul(self.coordinates.matrix, half))

    def euclidean(self, e: Expectation) -> Coordinates:
        """Compute the plain gradient in (m, T), which is (T a, -tril[T⁻ᵀ P])."""
        a, P = self.local(e)
        structure, (_, root) = self.structure, self.coordinates
        return Coordinates(structure.mv(root, a), -structure.tmatmul(self.frame().root, P))

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Compute (m', T') with a positive diagonal, and where it is one and V' neither over- nor underflows."""
        mean, root = here = self.coordinates
        structure = self.structure
        in_cone = torch.ones(self.batch_shape, dtype=torch.bool, device=mean.device)
        match move:
            case Congruence(N, force):
                lower, in_cone = structure.cholesky(N)
                new = structure.matmul(root, lower)
                vector = mean + structure.tsolve(new, structure.solve(lower, force))
            case _:
                (vector, new), in_cone = tangent_moved(structure, here, move)
        new, ok = structure.positive_root(new)
        inverse = structure.inverse(new)
        return Tested.of(vector, new, root=inverse), structure.everywhere(ok & in_cone & self._proper(vector, inverse))
