"""Gaussians stored as mean and covariance root: (m, C), V = C Cᵀ, C lower triangular.

The four moves in these coordinates, from N = Lᵀ L with L lower triangular:

    Congruence   C' = C L⁻¹,  m' = m + C' L⁻ᵀ f
    Tangent      C' = C + Ċ,  m' = m + ṁ,  with natural gradient (C a, C tril½[P])
                 and Euclidean gradient (C⁻ᵀ a, tril[C⁻ᵀ P])
    Affine       C' = qr(M C), m' = m + s
    Root         C', m' as they stand

The natural gradient is SR-VN of Kumar et al. (2025), Eq 17, and Theorem 2 of Tan (2025).
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torchngvi.errors import PairError
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
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.roots import log_moved
from torchngvi.structures import Diagonal, FullAlgebra, Pattern


class CovarianceRoot(Gaussian):
    """N(m, C Cᵀ) over a structure: abstract, see `CholeskyGaussian` and `DiagonalGaussian`."""

    takes = frozenset({Congruence, Tangent, RootTangent, LogTangent, Affine, Root})
    structure: FullAlgebra
    root_name = "scale_tril"  # the buffer that holds C

    @property
    def coordinates(self) -> Coordinates:
        """(m, C)."""
        return Coordinates(self.mean, self._buffers[self.root_name])  # type: ignore[arg-type]

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
        return self.structure.solve(self.coordinates.matrix, x)

    def whitener(self) -> Tensor:
        """C⁻¹."""
        return self.structure.inverse(self.coordinates.matrix)

    def tangent(self, e: Expectation) -> Coordinates:
        """(C a, C tril½[P])."""
        a, P = self.local(e)
        frame = self.frame()
        return Coordinates(frame.push(a), self.structure.matmul(frame.root, self.structure.tril_half(P)))

    def euclidean(self, e: Expectation) -> Coordinates:
        """(C⁻ᵀ a, tril[C⁻ᵀ P])."""
        a, P = self.local(e)
        root, structure = self.coordinates.matrix, self.structure
        gradient = structure.transpose(structure.right_solve(P, root))  # C⁻ᵀ P = (P C⁻¹)ᵀ
        return Coordinates(structure.tsolve(root, a), structure.tril(gradient))

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """(m', C') with a positive diagonal, and where it is one and V' neither over- nor underflows."""
        mean, root = self.coordinates
        structure = self.structure
        in_cone = torch.ones(self.batch_shape, dtype=torch.bool, device=mean.device)
        match move:
            case Congruence(N, force):
                factor, in_cone = structure.reverse_cholesky(N)
                new = structure.right_solve(root, factor)
                vector = mean + structure.mv(new, structure.tsolve(factor, force))
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
        return Coordinates(vector, new), self.structure.everywhere(ok & in_cone & self._proper(vector, new))

    def log_det_root(self) -> Tensor:
        """Σ log C_ii, (*batch,)."""
        return self.structure.log_det(self.coordinates.matrix)

    @property
    def scale_tril(self) -> Tensor:
        """C, the lower Cholesky factor of V, (*batch, D, D)."""
        return self.structure.to_dense(self.coordinates.matrix)

    def _coordinates_of(self, mean: Tensor, scale: Tensor) -> Coordinates:
        matrix = scale.ndim > mean.ndim
        return Coordinates(mean, self.structure.from_dense(scale) if matrix else self._diagonal_matrix(scale))


class CholeskyGaussian(CovarianceRoot):
    """N(m, C Cᵀ) with a lower-triangular root C, in the buffers ``mean`` and ``scale_tril``.

    Args:
        dim: D.
        batch_shape: that many independent posteriors.
        mean: the start, a scalar or (*batch, D).
        scale: the start, a scalar, (*batch, D) standard deviations, or (*batch, D, D) a lower factor, of which the
            entries of the structure are kept.
        structure: which entries C has: every one below the diagonal by default, `block_diagonal(sizes)` for
            independent blocks of coordinates. The buffer holds them as the structure stores them.
        dtype, device: of the start, or torch's defaults.

    Raises:
        InputError: a start that is not finite, not positive definite, or of the wrong shape; a structure over
            another number of coordinates.
        PairError: a structure whose pattern a covariance root does not have.

    >>> q = CholeskyGaussian(2, scale=3.0)
    >>> q.covariance.tolist()
    [[9.0, 0.0], [0.0, 9.0]]
    >>> from torchngvi.structures import block_diagonal
    >>> CholeskyGaussian(4, structure=block_diagonal([2, 2])).structure.parameters
    6
    """

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
        if not isinstance(self.structure, FullAlgebra):
            raise PairError(
                f"CholeskyGaussian holds a root of the covariance, which {type(structure).__name__} does not have in "
                "its pattern: only that of the precision. Use a PrecisionCholeskyGaussian or a NaturalGaussian."
            )
        self._register(("mean", "scale_tril"), mean, scale, dtype, device)


class DiagonalGaussian(CovarianceRoot):
    """N(m, diag(c)²), the mean-field Gaussian, in the buffers ``mean`` and ``scale``.

    Arguments and errors as in :class:`CholeskyGaussian`, without a structure; of a lower factor the diagonal is kept.

    >>> DiagonalGaussian(2, scale=3.0).variance.tolist()
    [9.0, 9.0]
    """

    root_name = "scale"

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
        super().__init__(dim, batch_shape, Diagonal)
        self._register(("mean", "scale"), mean, scale, dtype, device)

    @classmethod
    def _pattern(cls, dim: int, structure: Pattern | None, kept: Pattern | None = None) -> Pattern:
        if structure is not None and not isinstance(structure, Diagonal):
            raise PairError(f"a DiagonalGaussian has the structure Diagonal({dim}); got {structure}.")
        return Diagonal(dim)

    @classmethod
    def _of(cls, mean: Tensor, scale: Tensor, structure: Pattern) -> Self:
        return cls(mean.shape[-1], mean.shape[:-1], mean=mean, scale=scale)
