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
from torchngvi.posteriors.conversions import tangent_moved
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Diagonal, FullAlgebra, Pattern


class CovarianceRoot(Gaussian):
    """N(m, C Cᵀ) with C in the pattern of a structure: abstract, see `CholeskyGaussian` and `DiagonalGaussian`.

    >>> q = DiagonalGaussian(2, scale=2.0)
    >>> isinstance(q, CovarianceRoot), q.coordinates.matrix.tolist()
    (True, [2.0, 2.0])
    """

    takes = frozenset({Congruence, Tangent, RootTangent, LogTangent, Affine, Root})
    structure: FullAlgebra

    @property
    def precision(self) -> Tensor:
        """The precision S = V⁻¹, (*batch, D, D)."""
        return torch.cholesky_inverse(self.scale_tril)

    def frame(self) -> Frame:
        """Return m and C, which are the coordinates themselves."""
        return Frame(*self.coordinates, self.structure)

    def unframe(self, a: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """Take a and W out of the frame by substitutions with C: C⁻ᵀ a and C⁻ᵀ W C⁻¹."""
        return self.structure.unconjugate(self.coordinates.matrix, a, W)

    def whiten(self, x: Tensor) -> Tensor:
        """Divide vectors by the root: C⁻¹ x, (*sample, *batch, D)."""
        return self.structure.solve(self.coordinates.matrix, x)

    def whitener(self) -> Tensor:
        """Invert the root: C⁻¹, in the pattern."""
        return self.structure.inverse(self.coordinates.matrix)

    def tangent(self, e: Expectation) -> Coordinates:
        """Compute the natural gradient in (m, C), which is (C a, C tril½[P])."""
        a, P = self.local(e)
        frame = self.frame()
        return Coordinates(frame.push(a), self.structure.matmul(frame.root, self.structure.tril_half(P)))

    def euclidean(self, e: Expectation) -> Coordinates:
        """Compute the plain gradient in (m, C), which is (C⁻ᵀ a, tril[C⁻ᵀ P])."""
        a, P = self.local(e)
        root, structure = self.coordinates.matrix, self.structure
        gradient = structure.transpose(structure.right_solve(P, root))  # C⁻ᵀ P = (P C⁻¹)ᵀ
        return Coordinates(structure.tsolve(root, a), structure.tril(gradient))

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Compute (m', C') with a positive diagonal, and where it is one and V' neither over- nor underflows."""
        mean, root = here = self.coordinates
        structure = self.structure
        in_cone = torch.ones(self.batch_shape, dtype=torch.bool, device=mean.device)
        match move:
            case Congruence(N, force):
                factor, in_cone = structure.reverse_cholesky(N)
                new = structure.right_solve(root, factor)
                vector = mean + structure.mv(new, structure.tsolve(factor, force))
            case Affine(M, s):
                vector = mean + s
                new = structure.lower_root(structure.matmul(M, root))
            case Root(vector, new):
                pass
            case _:
                (vector, new), in_cone = tangent_moved(structure, here, move)
        new, ok = structure.positive_root(new)
        return Coordinates(vector, new), structure.everywhere(ok & in_cone & self._proper(vector, new))

    def log_det_root(self) -> Tensor:
        """Compute log|det C| = Σ log C_ii, (*batch,)."""
        return self.structure.log_det(self.coordinates.matrix)

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor C of the covariance, written out, (*batch, D, D)."""
        return self.structure.to_dense(self.coordinates.matrix)

    def _of_stddev(self, mean: Tensor, stddev: Tensor) -> Coordinates:
        return Coordinates(mean, self._diagonal_matrix(stddev))

    def _of_factor(self, mean: Tensor, factor: Tensor) -> Coordinates:
        return Coordinates(mean, self.structure.from_dense(factor))


class CholeskyGaussian(CovarianceRoot):
    """N(m, C Cᵀ) with a lower-triangular root C, in the buffers ``mean`` and ``scale_tril``.

    It is the first choice for a Gaussian posterior, since every kind of move can be made in these coordinates.
    Structures in which only the precision is sparse need a `PrecisionCholeskyGaussian` or a `NaturalGaussian`; for
    thousands of latent variables take blocks or a `DiagonalGaussian`.

    Args:
        dim: D, the number of latent variables.
        batch_shape: the number of independent posteriors, as a shape; () for one.
        mean: where m starts, a scalar or (*batch, D).
        scale: where C starts: a scalar, (*batch, D) standard deviations, or (*batch, D, D) a lower factor, of which the
            entries of the structure are kept.
        structure: which entries C has: every one below the diagonal by default, `block_diagonal(sizes)` for
            independent blocks of coordinates.  The buffer holds them as the structure stores them.
        dtype, device: those of the buffers; by default those of the start, or torch's defaults.

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

    coordinate_names = ("mean", "scale_tril")


class DiagonalGaussian(CovarianceRoot):
    """N(m, diag(c)²), the mean-field Gaussian, in the buffers ``mean`` and ``scale``.

    All latent variables are independent under it, so that a step costs O(D), and variances are too small where the true
    posterior is correlated.

    Args:
        dim, batch_shape, mean, dtype, device: as in :class:`CholeskyGaussian`.
        scale: where c starts, as there; of a lower factor the diagonal is kept.

    Raises:
        InputError: as in :class:`CholeskyGaussian`.

    >>> DiagonalGaussian(2, scale=3.0).variance.tolist()
    [9.0, 9.0]
    """

    coordinate_names = ("mean", "scale")

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
        super().__init__(dim, batch_shape, mean=mean, scale=scale, structure=Diagonal, dtype=dtype, device=device)

    @classmethod
    def _pattern(cls, dim: int, structure: Pattern | None, kept: Pattern | None = None) -> Pattern:
        if structure not in (None, Diagonal(dim)):
            raise PairError(f"a DiagonalGaussian has the structure Diagonal({dim}); got {structure}.")
        return Diagonal(dim)

    @classmethod
    def _of(cls, mean: Tensor, scale: Tensor, structure: Pattern) -> Self:
        return cls(mean.shape[-1], mean.shape[:-1], mean=mean, scale=scale)
