"""Gaussians stored as mean and covariance root: (m, C), V = C Cᵀ, C lower triangular.

The four moves in these coordinates, from N = U Uᵀ with U upper triangular:

    Congruence   C' = C U⁻ᵀ,  m' = m + C' U⁻¹ f
    Tangent      C' = C + Ċ,  m' = m + ṁ,  with natural gradient (C a, C tril½[P])
                 and Euclidean gradient (C⁻ᵀ a, tril[C⁻ᵀ P])
    Affine       C' = qr(M C), m' = m + s
    Root         C', m' as they stand

The natural gradient is SR-VN of Kumar et al. (2025), Eq 17, and Theorem 2 of Tan (2025).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi.interfaces import (
    Affine,
    Congruence,
    Coordinates,
    Expectation,
    Frame,
    LogTangent,
    Move,
    Root,
    RootTangent,
    Tangent,
)
from torchngvi.posteriors.gaussian import Gaussian, log_moved
from torchngvi.structures import Dense, Diagonal


class CovarianceRoot(Gaussian):
    """N(m, C Cᵀ) over a structure: abstract, see `CholeskyGaussian` and `DiagonalGaussian`."""

    takes = frozenset({Congruence, Tangent, RootTangent, LogTangent, Affine, Root})
    root_name: str  # the buffer that holds C

    @property
    def coordinates(self) -> Coordinates:
        """(m, C)."""
        return Coordinates(self.mean, getattr(self, self.root_name))

    @property
    def precision(self) -> Tensor:
        """S = V⁻¹, (*batch, D, D)."""
        return torch.cholesky_inverse(self.scale_tril)

    def frame(self) -> Frame:
        """(m, C)."""
        return Frame(*self.coordinates, self.structure)

    def unframe(self, a: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """C⁻ᵀ a and C⁻ᵀ W C⁻¹."""
        return self.structure.unconjugate(self.coordinates.matrix, a, W)

    def whiten(self, x: Tensor) -> Tensor:
        """C⁻¹ x, (*sample, *batch, D)."""
        return self.structure.solve_lower(self.coordinates.matrix, x)

    def tangent(self, e: Expectation) -> Coordinates:
        """(C a, C tril½[P])."""
        a, P = self.local(e)
        frame = self.frame()
        return Coordinates(frame.push(a), self.structure.matmul(frame.root, self.structure.tril_half(P)))

    def euclidean(self, e: Expectation) -> Coordinates:
        """(C⁻ᵀ a, tril[C⁻ᵀ P])."""
        a, P = self.local(e)
        upper = self.structure.transpose(self.coordinates.matrix)
        # C⁻ᵀ P = (P C⁻¹)ᵀ
        gradient = self.structure.transpose(self.structure.right_solve_transposed(P, upper))
        return Coordinates(self.structure.solve_upper(upper, a), self.structure.tril(gradient))

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """(m', C') with a positive diagonal, and where it is one and V' neither over- nor underflows."""
        mean, root = self.coordinates
        structure = self.structure
        in_cone = torch.ones(self.batch_shape, dtype=torch.bool, device=mean.device)
        match move:
            case Congruence(N, force):
                upper, in_cone = structure.reverse_cholesky(N)
                new = structure.right_solve_transposed(root, upper)
                vector = mean + structure.mv(new, structure.solve_upper(upper, force))
            case LogTangent((vector_change, matrix_change)):
                vector, new = mean + vector_change, log_moved(structure, root, matrix_change)
            case Tangent((vector_change, matrix_change)):
                vector, new = mean + vector_change, root + matrix_change
            case Affine(M, s):
                vector = mean + s
                new = structure.lower_root(structure.matmul(M, root))
            case Root(vector, new):
                pass
        new, ok = structure.positive_root(new)
        return Coordinates(vector, new), ok & in_cone & self._proper(vector, new)

    def log_det_root(self) -> Tensor:
        """Σ log C_ii, (*batch,)."""
        return self.structure.diagonal(self.coordinates.matrix).log().sum(-1)


class CholeskyGaussian(CovarianceRoot):
    """N(m, C Cᵀ) with a full lower-triangular root, in the buffers ``mean`` and ``scale_tril``.

    Args:
        dim: D.
        batch_shape: that many independent posteriors.
        mean: the start, a scalar or (*batch, D).
        scale: the start, a scalar, (*batch, D) standard deviations, or (*batch, D, D) a lower factor.
        dtype, device: of the start, or torch's defaults.

    Raises:
        InputError: a start that is not finite, not positive definite, or of the wrong shape.

    >>> q = CholeskyGaussian(2, scale=3.0)
    >>> q.covariance.tolist()
    [[9.0, 0.0], [0.0, 9.0]]
    """

    root_name = "scale_tril"

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
        self._register(("mean", "scale_tril"), mean, scale, dtype, device)

    def _coordinates_of(self, mean: Tensor, scale: Tensor) -> Coordinates:
        return Coordinates(mean, scale if scale.ndim > mean.ndim else torch.diag_embed(scale))


class DiagonalGaussian(CovarianceRoot):
    """N(m, diag(c)²), the mean-field Gaussian, in the buffers ``mean`` and ``scale``.

    Arguments and errors as in :class:`CholeskyGaussian`; of a lower factor the diagonal is kept.

    >>> DiagonalGaussian(2, scale=3.0).variance.tolist()
    [9.0, 9.0]
    """

    root_name = "scale"
    mean_field = True

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
        super().__init__(dim, batch_shape, Diagonal())
        self._register(("mean", "scale"), mean, scale, dtype, device)

    @property
    def scale_tril(self) -> Tensor:
        """diag(c), (*batch, D, D)."""
        return torch.diag_embed(self.coordinates.matrix)

    def _coordinates_of(self, mean: Tensor, scale: Tensor) -> Coordinates:
        return Coordinates(mean, scale.diagonal(dim1=-2, dim2=-1) if scale.ndim > mean.ndim else scale)
