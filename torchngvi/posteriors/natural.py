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
)
from torchngvi.linalg import cholesky, triangular_inverse
from torchngvi.posteriors.gaussian import Gaussian, Tested
from torchngvi.structures import Dense


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
        return self._computed("mean")["mean"]

    def _compute_mean(self) -> Tensor:
        return torch.cholesky_solve(self.precision_mean[..., None], self.factor())[..., 0]

    @property
    def coordinates(self) -> Coordinates:
        """(S m, S)."""
        return Coordinates(self.precision_mean, self.precision)

    def factor(self) -> Tensor:
        """T with S = T Tᵀ, kept until S changes."""
        return self._computed("factor")["factor"]

    def _compute_factor(self) -> Tensor:
        return cholesky(self.precision)[0]

    def frame(self) -> Frame:
        """(m, T⁻ᵀ), kept until the coordinates change."""
        known = self._computed("mean", "root")
        return Frame(known["mean"], known["root"], self.structure, upper=True)

    def _compute_root(self) -> Tensor:
        return triangular_inverse(self.factor()).mT

    def snapshot(self) -> Coordinates:
        """A copy of the coordinates with what is known of them."""
        return Tested.of(*super().snapshot(), **self._computed("mean", "factor", "root"))

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
        """(S'm', S'), and where S' is positive definite and V' neither over- nor underflows."""
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
        mean = torch.cholesky_solve(vector[..., None], factor)[..., 0]
        root = triangular_inverse(factor).mT
        new = Tested.of(vector, matrix, mean=mean, factor=factor, root=root)
        return new, ok & torch.isfinite(vector).all(-1) & self._proper(mean, root)
