"""The random effects of all groups given the globals, p(b | y, β, ω): by quadrature, or as a Gaussian q has them."""

import math
from typing import Protocol

import torch
from torch import Tensor

from torchngvi.models.mixed_integrated import IntegratedMixed
from torchngvi.numerics import small_blocks
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors import CholeskyGaussian, PrecisionCholeskyGaussian
from torchngvi.structures import Forest


class Locals(Protocol):
    """What draws random effects given globals."""

    def draw(
        self,
        globals: Tensor,  # (S, P)
        generator: torch.Generator,
    ) -> Tensor:
        """Draw the effects of all groups, one of each for each value of the globals, (S, n, r)."""


class ByQuadrature:
    """N(E[b | y, g], Var[b | y, g]) with both moments by the quadrature, or the closed form, that integrates b out."""

    def __init__(self, target: IntegratedMixed) -> None:
        self.target = target

    @torch.no_grad()
    def draw(self, globals: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the effects of all groups, (S, n, r)."""
        mean, covariance = self.target.moments(globals)
        root, ok = small_blocks.cholesky(covariance)
        # a variance that has underflown is 0
        root = torch.where(ok[..., None, None], root, covariance.diagonal(dim1=-2, dim2=-1).sqrt().diag_embed())
        return mean + (root @ noise(mean, generator)[..., None])[..., 0]


class Conditional:
    """The distribution of b given g under a Gaussian q over the arrow of the model.

    With S = T Tᵀ, b_i = m_i - K_iᵀ(g - m_g) + T_i⁻ᵀ z, K_i = T_gi T_i⁻¹.
    """

    def __init__(self, q: PrecisionCholeskyGaussian) -> None:
        structure, self.q = q.structure, q
        assert isinstance(structure, Forest)
        groups, top = structure.parts(q.coordinates.matrix.detach().clone())
        self.root = groups.square  # T_i, (n, r, r)
        self.slope = small_blocks.tsolve(self.root, groups.border.mT)  # K_iᵀ, (n, r, P)
        self.top = top.square[0]  # T_g, (P, P)
        n, r, mean = len(self.root), self.root.shape[-1], q.mean.detach().clone()
        self.local_mean, self.global_mean = mean[: n * r].reshape(n, r), mean[n * r :]

    def marginal(self) -> CholeskyGaussian:
        """Return q's marginal over the globals."""
        return CholeskyGaussian.from_moments(self.global_mean, torch.cholesky_inverse(self.top))

    def start(
        self,
        globals: Tensor,  # (S, P)
    ) -> Tensor:
        """The means of the effects given the globals, (n, S, r)."""
        return self.local_mean[:, None] - (globals - self.global_mean) @ self.slope.mT

    @torch.no_grad()
    def draw(self, globals: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the effects of all groups, (S, n, r)."""
        mean = self.start(globals).transpose(0, 1)
        return mean + small_blocks.tsolve(self.root, noise(mean, generator)[..., None])[..., 0]

    def log_prob(
        self,
        b: Tensor,  # (S, n, r)
        globals: Tensor,  # (S, P)
    ) -> Tensor:
        """log q(b | g), (S,)."""
        apart = b - self.start(globals).transpose(0, 1)
        z = (apart[..., None, :] @ self.root)[..., 0, :]
        constant = self.root.diagonal(dim1=-2, dim2=-1).log().sum() - 0.5 * z[0].numel() * math.log(2 * math.pi)
        return constant - 0.5 * z.square().sum((-2, -1))


def noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise, drawn on the CPU in float64 so that it is the same on every device."""
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def gaussian(
    mean: Tensor,  # (P,)
    covariance: Tensor,  # (P, P)
) -> CholeskyGaussian | None:
    """The Gaussian of these moments, or None where the covariance is not positive definite."""
    symmetric = 0.5 * (covariance + covariance.mT)
    return CholeskyGaussian.from_moments(mean, symmetric) if bool(cholesky(symmetric)[1]) else None
