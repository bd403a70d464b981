"""Gaussians stored in natural parameters: (S m, S), S = V⁻¹ = T Tᵀ; the frame is C = T⁻ᵀ.

The natural gradient is (g - G m, -G) with G = H - γS, so that the tangent step of length ρ is
VN: S' = (1 - γρ) S + ρH, m' = m - ρ S'⁻¹ g (Khan and Rue 2023; Kumar et al. 2025, Eq 7), without
a factor of V or a product of D x D matrices.
"""

import math

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
from torchngvi.numerics.linalg import finite
from torchngvi.posteriors.memory import Tested
from torchngvi.posteriors.precision import PrecisionGaussian
from torchngvi.structures.pattern import Structured, is_whole

_SMALL = 64  # D up to which an inverse costs no more than to know that it is not needed


class NaturalGaussian(PrecisionGaussian):
    """N(m, S⁻¹), in the buffers ``precision_mean`` (S m) and ``precision`` (S).

    A step of the natural gradient adds to S, without a factor of V or a product of D x D matrices, and every structure,
    an arrow or a forest too, has a precision.  Rules that follow the gradient of a root need a posterior that stores
    one, a `CholeskyGaussian` or a `PrecisionCholeskyGaussian`.

    Args:
        dim, batch_shape, mean, scale, dtype, device: as in :class:`CholeskyGaussian`, with a scale of the covariance.
        structure: which entries S has, every one by default; the buffer holds them as the structure stores them.

    Raises:
        InputError: as in :class:`CholeskyGaussian`.

    >>> NaturalGaussian(2, mean=1.0, scale=0.5).precision_mean.tolist()
    [4.0, 4.0]
    """

    takes = frozenset({Congruence, Tangent})
    coordinate_names = ("precision_mean", "precision")
    precision_mean: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean m = S⁻¹(S m), (*batch, D), kept until the coordinates change."""
        return self._computed("mean")["mean"]

    def _compute_mean(self) -> Tensor:
        return self._solved(self.factor(), self.precision_mean)

    def _solved(self, factor: Structured, vector: Tensor) -> Tensor:
        """(T Tᵀ)⁻¹ x."""
        return self.structure.tsolve(factor, self.structure.solve(factor, vector))

    @property
    def precision(self) -> Tensor:
        """The precision S, written out, (*batch, D, D)."""
        return self.structure.full(self.coordinates.matrix)

    def factor(self) -> Structured:
        """Return T with S = T Tᵀ in the pattern, kept until S changes."""
        return self._computed("factor")["factor"]

    def _compute_factor(self) -> Structured:
        return self.structure.cholesky(self.coordinates.matrix)[0]

    def frame(self) -> Frame:
        """Return m and the root T⁻ᵀ, kept until the coordinates change."""
        known = self._computed("mean", "root")
        return Frame(known["mean"], known["root"], self.structure, upper=True)

    def snapshot(self) -> Coordinates:
        """Copy the coordinates with what is known of them."""
        return Tested.of(*super().snapshot(), **self._computed("mean", "factor", "root"))

    def _of_stddev(self, mean: Tensor, stddev: Tensor) -> Coordinates:
        return Coordinates(mean / stddev.square(), self._diagonal_matrix(stddev.pow(-2)))

    def _of_factor(self, mean: Tensor, factor: Tensor) -> Coordinates:
        structure = self.structure
        if structure.closed:  # the blocks of the factor are a factor of the blocks
            factor = structure.to_dense(structure.from_dense(factor))
        precision = structure.from_dense(torch.cholesky_inverse(factor))
        return Coordinates(structure.smv(precision, mean), precision)

    def _coordinates_with(self, mean: Tensor, whitener: Structured) -> Coordinates:
        structure = self.structure
        return Coordinates(structure.mv(whitener, structure.tmv(whitener, mean)), structure.marginals(whitener))

    def tangent(self, e: Expectation) -> Coordinates:
        """Compute the natural gradient in (S m, S), which is (g - G m, -G) with G = H - γS."""
        g, H = self._raw(e.derivative)
        G = torch.sub(H, self.coordinates.matrix, alpha=e.temperature)
        return Coordinates(g - self.structure.smv(G, self.mean), G.neg_())

    def _raw(self, derivative: Derivative) -> tuple[Tensor, Structured]:
        """g and H in the pattern, with no detour through the frame where squares can be cut out of H."""
        if isinstance(derivative, Framed) or not self.structure.closed:
            return self.unframe(*derivative.framed(self.frame()))
        g, H = derivative if isinstance(derivative, Raw) else derivative.raw()
        return g, self.structure.from_dense(H)

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Compute (S'm', S'), and where S' is positive definite and V' neither over- nor underflows."""
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
        mean = self._solved(factor, vector)
        ok = ok & torch.isfinite(vector).all(-1)
        if self._bounded(matrix, factor):  # the next evaluation inverts T, if it needs the root
            new, proper = Tested.of(vector, matrix, mean=mean, factor=factor), finite(mean).all(-1)
        else:
            root = self.structure.inverse(factor)
            new, proper = Tested.of(vector, matrix, mean=mean, factor=factor, root=root), self._proper(mean, root)
        return new, self.structure.everywhere(ok & proper)

    def _bounded(self, matrix: Structured, factor: Structured) -> bool:
        """Whether all variances are known to be finite and positive without an inverse of T; of a large q only."""
        structure, others = self.structure, self.dim - 1
        if self.dim <= _SMALL or not matrix.is_cpu or not is_whole(structure):
            return False
        trace, log_det = structure.diagonal(matrix).sum(-1), 2 * structure.log_det(factor)
        range_ = 0.5 * math.log(torch.finfo(matrix.dtype).max)
        smallest = log_det - others * (trace / others).log()
        return bool(((smallest > -range_) & (trace.log() < range_)).all())
