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
    Derivative,
    Expectation,
    Frame,
    Framed,
    Move,
    Raw,
    Tangent,
)
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.memory import Tested
from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


class NaturalGaussian(Gaussian):
    """N(m, S⁻¹), in the buffers ``precision_mean`` (S m) and ``precision``.

    Arguments and errors as in :class:`CholeskyGaussian`.  Every structure has a precision; the buffer holds it as the
    structure stores it.

    >>> NaturalGaussian(2, mean=1.0, scale=0.5).precision_mean.tolist()
    [4.0, 4.0]
    """

    takes = frozenset({Congruence, Tangent})
    upper = True
    precision_mean: Tensor

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
        self._register(("precision_mean", "precision"), mean, scale, dtype, device)

    @property
    def mean(self) -> Tensor:
        """m, (*batch, D)."""
        return self._computed("mean")["mean"]

    def _compute_mean(self) -> Tensor:
        return self._solved(self.factor(), self.precision_mean)

    def _solved(self, factor: Structured, vector: Tensor) -> Tensor:
        """(T Tᵀ)⁻¹ x."""
        return self.structure.tsolve(factor, self.structure.solve(factor, vector))

    @property
    def coordinates(self) -> Coordinates:
        """(S m, S)."""
        return Coordinates(self.precision_mean, self._buffers["precision"])  # type: ignore[arg-type]

    @property
    def precision(self) -> Tensor:
        """S, (*batch, D, D)."""
        return self.structure.full(self.coordinates.matrix)

    def factor(self) -> Structured:
        """T with S = T Tᵀ, kept until S changes."""
        return self._computed("factor")["factor"]

    def _compute_factor(self) -> Structured:
        return self.structure.cholesky(self.coordinates.matrix)[0]

    def frame(self) -> Frame:
        """(m, T⁻ᵀ), kept until the coordinates change."""
        known = self._computed("mean", "root")
        return Frame(known["mean"], known["root"], self.structure, upper=True)

    def _compute_root(self) -> Structured:
        return self.structure.inverse(self.factor())

    def snapshot(self) -> Coordinates:
        """A copy of the coordinates with what is known of them."""
        return Tested.of(*super().snapshot(), **self._computed("mean", "factor", "root"))

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor of V, (*batch, D, D)."""
        return cholesky(self.covariance)[0]

    def _coordinates_of(self, mean: Tensor, scale: Tensor) -> Coordinates:
        if scale.ndim == mean.ndim:
            return Coordinates(mean / scale.square(), self._diagonal_matrix(scale.pow(-2)))
        structure = self.structure
        if isinstance(structure, FullAlgebra):  # the blocks of the factor are a factor of the blocks
            scale = structure.to_dense(structure.from_dense(scale))
        precision = structure.from_dense(torch.cholesky_inverse(scale))
        return Coordinates(structure.smv(precision, mean), precision)

    def _coordinates_with(self, mean: Tensor, whitener: Structured) -> Coordinates:
        structure = self.structure
        return Coordinates(structure.mv(whitener, structure.tmv(whitener, mean)), structure.marginals(whitener))

    def whiten(self, x: Tensor) -> Tensor:
        """C⁻¹ x = Tᵀ x, (*sample, *batch, D)."""
        return self.structure.tmv(self.factor(), x)

    def whitener(self) -> Structured:
        """T."""
        return self.factor()

    def log_det_root(self) -> Tensor:
        """-Σ log T_ii, (*batch,)."""
        return -self.structure.log_det(self.factor())

    def unframe(self, a: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """T a and T W Tᵀ."""
        factor = self.factor()
        return self.structure.mv(factor, a), self.structure.congruence(factor, W)

    def tangent(self, e: Expectation) -> Coordinates:
        """(g - G m, -G), G = H - γS."""
        g, H = self._raw(e.derivative)
        G = torch.sub(H, self.coordinates.matrix, alpha=e.temperature)
        return Coordinates(g - self.structure.smv(G, self.mean), G.neg_())

    def _raw(self, derivative: Derivative) -> tuple[Tensor, Structured]:
        """g and H in the pattern, with no detour through the frame where squares can be cut out of H."""
        if isinstance(derivative, Framed) or not isinstance(self.structure, FullAlgebra):
            return self.unframe(*derivative.framed(self.frame()))
        g, H = derivative if isinstance(derivative, Raw) else derivative.raw()
        return g, self.structure.from_dense(H)

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """(S'm', S'), and where S' is positive definite and V' neither over- nor underflows."""
        vector, precision = self.coordinates
        match move:
            case Tangent((vector_change, matrix_change)):
                vector, matrix = vector + vector_change, precision + matrix_change
            case Congruence(N, force):
                # S' = T N Tᵀ,  S'm' = S'm + T f
                shift, matrix = self.unframe(force, N)
                matrix = self.structure.one_sided(matrix)
                vector = self.structure.smv(matrix, self.mean) + shift
            case _:
                raise NotImplementedError  # `takes` refuses it before
        factor, ok = self.structure.cholesky(matrix)
        mean, root = self._solved(factor, vector), self.structure.inverse(factor)
        new = Tested.of(vector, matrix, mean=mean, factor=factor, root=root)
        return new, self.structure.everywhere(ok & torch.isfinite(vector).all(-1) & self._proper(mean, root))
