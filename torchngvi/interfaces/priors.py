"""The Gaussian priors, whose part of an expectation and of its derivative is known exactly."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces.frame import Frame
from torchngvi.structures.pattern import Structured


class Prior(NamedTuple):
    """A Gaussian prior N(m₀, Λ⁻¹) with a diagonal precision Λ.

    Attributes:
        mean: m₀, broadcasts to (*batch, D).
        precision: diag Λ, positive, broadcasts to (*batch, D).

    >>> prior = Prior(torch.zeros(2), torch.full((2,), 2 * torch.pi))
    >>> prior.energy(torch.zeros(2)).item()
    0.0
    """

    mean: Tensor  # m₀, broadcasts to (*batch, D)
    precision: Tensor  # diag Λ, broadcasts to (*batch, D)

    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute -log p(θ) with its constants, (*sample, *batch)."""
        square = self.precision * (theta - self.mean).square()
        return 0.5 * (square - torch.log(self.precision / (2 * torch.pi)).expand(square.shape)).sum(-1)

    def expected_energy(self, frame: Frame) -> Tensor:
        """Compute E_q[-log p(θ)] = -log p(m) + ½ Σ_i Λ_ii V_ii, (*batch,), differentiable in the frame."""
        return self.energy(frame.mean) + 0.5 * (self.precision * frame.variance).sum(-1)

    def force(
        self,
        mean: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Compute the gradient of E_q[-log p(θ)] in the mean, Λ(m - m₀), (*batch, D)."""
        return self.precision * (mean - self.mean)

    def product(
        self,
        x: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Multiply vectors by the precision: Λx, (*batch, D)."""
        return self.precision * x

    def framed(self, frame: Frame) -> Structured:
        """Bring the curvature of the prior into the frame: Π(CᵀΛC)."""
        return frame.gram(self.precision)

    def add_to(
        self,
        H: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """Add the precision to a Hessian in place, H + Λ, and return it."""
        H.diagonal(dim1=-2, dim2=-1).add_(self.precision)
        return H

    def scaled(self, factor: float) -> "Prior":
        """Return the prior with its precision times a factor, as a temperature or a share of the data weighs it."""
        return Prior(self.mean, factor * self.precision)


class FullPrior(NamedTuple):
    """A Gaussian prior N(m₀, Λ⁻¹) with a full precision Λ = RᵀR.

    Attributes:
        mean: m₀, broadcasts to (*batch, D).
        precision: Λ, (D, D), symmetric positive definite.
        root: R, (D, D), upper triangular, so that densities and expectations need no factorisation.

    >>> R = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    >>> FullPrior(torch.zeros(2), R.mT @ R, R).force(torch.tensor([1.0, 0.0])).tolist()
    [1.0, 1.0]
    """

    mean: Tensor  # m₀, broadcasts to (*batch, D)
    precision: Tensor  # Λ, (D, D)
    root: Tensor  # R, (D, D) upper triangular

    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute -log p(θ) = ½|R(θ - m₀)|² - log|R| + ½D log 2π, (*sample, *batch)."""
        square = ((theta - self.mean) @ self.root.mT).square().sum(-1)
        constant = 0.5 * theta.shape[-1] * math.log(2 * math.pi) - self.root.diagonal().log().sum()
        return 0.5 * square + constant

    def expected_energy(self, frame: Frame) -> Tensor:
        """Compute E_q[-log p(θ)] = -log p(m) + ½‖RC‖²_F, (*batch,), differentiable in the frame."""
        return self.energy(frame.mean) + 0.5 * frame.rows(self.root).square().sum((-2, -1))

    def force(
        self,
        mean: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Compute the gradient of E_q[-log p(θ)] in the mean, Λ(m - m₀), (*batch, D)."""
        return (mean - self.mean) @ self.precision

    def product(
        self,
        x: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Multiply vectors by the precision: Λx, (*batch, D)."""
        return x @ self.precision

    def framed(self, frame: Frame) -> Structured:
        """Bring the curvature of the prior into the frame: Π((RC)ᵀRC)."""
        projected = frame.rows(self.root)
        return frame.structure.lower(projected, projected)

    def add_to(
        self,
        H: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """Add the precision to a Hessian in place, H + Λ, and return it."""
        return H.add_(self.precision)

    def scaled(self, factor: float) -> "FullPrior":
        """Return the prior with its precision times a factor, and its root times the square root of that."""
        return FullPrior(self.mean, factor * self.precision, math.sqrt(factor) * self.root)
