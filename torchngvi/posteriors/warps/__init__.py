"""Monotone curves of one coordinate that keep the mean 0 and the standard deviation 1 of a standard normal variable.

    w(ξ; φ) = (u(ξ; φ) - E u) / sd u        ξ ~ N(0, 1)

with a curve u that is known in closed form.  So the moments of what is warped do not depend on φ, and at the identity
φ = 0 the scores of φ are uncorrelated with those of a shift and of a scale.

E u and sd u are sums over the nodes of Gauss and Legendre on [-10, 0] and [0, 10], under the normal density.  A curve
may be bent at 0 alone, and has its singularities off the real line: the sums are exact to rounding.
"""

import functools
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from torchngvi.numerics.linalg import eigh

__all__ = ["SinhArcsinh", "Warp", "YeoJohnson"]


class Warp(ABC):
    """A family of increasing curves w(ξ; φ), with E w = 0 and Var w = 1 under N(0, 1), the identity at φ = 0: abstract.

    A class says its ``parameters`` and the curve before it is standardised, with its logarithmic slope and its inverse.
    All functions act on each coordinate for itself: ξ is (*sample, *batch, D), φ is (*batch, D, ``parameters``).

    Attributes:
        parameters: numbers a coordinate.
        names: of these numbers.

    >>> from torchngvi.posteriors.warps import SinhArcsinh
    >>> warp, phi = SinhArcsinh(), torch.tensor([[0.5, -0.2]], dtype=torch.float64)
    >>> xi = torch.tensor([[-1.0], [2.0]], dtype=torch.float64)
    >>> torch.allclose(warp.inverse(warp.forward(xi, phi), phi), xi)
    True
    """

    parameters: int
    names: tuple[str, ...]

    @abstractmethod
    def curve(
        self,
        xi: Tensor,  # (*sample, *batch, D)
        phi: Tensor,  # (*batch, D, parameters)
    ) -> tuple[Tensor, Tensor]:
        """Compute u(ξ; φ) and log ∂u/∂ξ, each (*sample, *batch, D), differentiable in both."""

    @abstractmethod
    def curve_inverse(self, u: Tensor, phi: Tensor) -> Tensor:
        """Compute the ξ with u(ξ; φ) = u."""

    @abstractmethod
    def bend(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute the derivative of the logarithmic slope, w''/w', (*sample, *batch, D); scales do not enter it."""

    def moments(
        self,
        phi: Tensor,  # (*batch, D, parameters)
    ) -> tuple[Tensor, Tensor]:
        """Compute the mean and the standard deviation of u(ξ; φ) under ξ ~ N(0, 1), each (*batch, D)."""
        nodes, weights = normal_nodes(phi)
        shape = (-1, *(1,) * (phi.ndim - 1))
        u = self.curve(nodes.reshape(shape).expand(-1, *phi.shape[:-1]), phi)[0]
        weights = weights.reshape(shape)
        mean = (weights * u).sum(0)
        return mean, (weights * (u - mean).square()).sum(0).sqrt()

    def with_log_slope(
        self,
        xi: Tensor,  # (*sample, *batch, D)
        phi: Tensor,  # (*batch, D, parameters)
    ) -> tuple[Tensor, Tensor]:
        """Compute w(ξ; φ) and log w'(ξ; φ), each (*sample, *batch, D), differentiable in both.

        Args:
            xi: standardised coordinates.
            phi: the numbers of the curves.

        Returns:
            The values and the logarithms of the slopes.
        """
        mean, sd = self.moments(phi)
        u, log_slope = self.curve(xi, phi)
        return (u - mean) / sd, log_slope - sd.log()

    def forward(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute w(ξ; φ), (*sample, *batch, D)."""
        return self.with_log_slope(xi, phi)[0]

    def log_slope(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute log ∂w/∂ξ, (*sample, *batch, D)."""
        return self.with_log_slope(xi, phi)[1]

    def inverse(self, w: Tensor, phi: Tensor) -> Tensor:
        """Compute the ξ with w(ξ; φ) = w, (*sample, *batch, D)."""
        mean, sd = self.moments(phi)
        return self.curve_inverse(mean + sd * w, phi)

    @torch.no_grad()
    def fisher(
        self,
        phi: Tensor,  # (parameters,)
    ) -> Tensor:
        """Compute the Fisher matrix of φ for the density of w(ξ; φ), (parameters, parameters).

        The score is (ξ + ∂_ξ log w') w_φ/w' - ∂_φ log w', and its second moment a sum over nodes.

        Args:
            phi: of one coordinate.

        Returns:
            The matrix.

        >>> from torchngvi.posteriors.warps import SinhArcsinh
        >>> SinhArcsinh().fisher(torch.zeros(2, dtype=torch.float64)).diagonal().round(decimals=3).tolist()
        [0.51, 0.227]
        """
        xi, weights = normal_nodes(phi)
        with torch.enable_grad():
            each = phi.detach().expand(len(xi), -1).clone().requires_grad_()  # a copy a node, for its derivative
            w, log_slope = self.with_log_slope(xi, each)
            (change,) = torch.autograd.grad(w.sum(), each, retain_graph=True)
            (stretch,) = torch.autograd.grad(log_slope.sum(), each)
        bend, slope = self.bend(xi, each.detach()), log_slope.detach().exp()
        score = ((xi + bend) / slope)[:, None] * change - stretch
        return score.mT @ (weights[:, None] * score)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def normal_nodes(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E[f(ξ)] ≈ Σ_k w_k f(ξ_k) for ξ ~ N(0, 1), of functions that are smooth but at 0.

    >>> xi, weights = normal_nodes(torch.zeros((), dtype=torch.float64))
    >>> round((weights * xi.abs()).sum().item(), 12), round((2 / torch.pi) ** 0.5, 12)
    (0.797884560803, 0.797884560803)
    """
    with torch.inference_mode(False):
        nodes, weights = _halves()
        return nodes.to(like), weights.to(like)


@functools.cache
def _halves(half: int = 56, end: float = 10.0) -> tuple[Tensor, Tensor]:
    """By the rule of Gauss and Legendre on [-end, 0] and [0, end], in float64 (Golub and Welsch 1969)."""
    k = torch.arange(1, half, dtype=torch.float64, device="cpu")
    beside = k / (4 * k.square() - 1).sqrt()
    nodes, vectors, _ = eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    right, weights = 0.5 * end * (1 + nodes), end * vectors[0].square()
    density = weights * (-0.5 * right.square()).exp()
    both = torch.cat([density.flip(0), density])
    return torch.cat([-right.flip(0), right]), both / both.sum()


# The sinh-arcsinh curves of Jones and Pewsey (2009): both tails, light or heavy, and skewness


@final
class SinhArcsinh(Warp):
    """u = sinh(δ asinh ξ + ε), φ = (ε, log δ): ε > 0 skews to the right, δ > 1 makes both tails heavier than normal.

    (Jones and Pewsey 2009, Biometrika 96, with ε and δ of the inverse curve.)  The first choice, for a
    `torchngvi.posteriors.Warped` has it by default.

    >>> warp = SinhArcsinh()
    >>> warp.forward(torch.ones(1), torch.zeros(1, 2)).item()  # the identity
    1.0
    """

    parameters, names = 2, ("epsilon", "log_delta")

    def curve(self, xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u and log u' = log cosh(δ asinh ξ + ε) + log δ - ½ log(1 + ξ²)."""
        log_delta = phi[..., 1]
        inner = log_delta.exp() * torch.asinh(xi) + phi[..., 0]
        return torch.sinh(inner), _log_cosh(inner) + log_delta - 0.5 * torch.log1p(xi.square())

    def curve_inverse(self, u: Tensor, phi: Tensor) -> Tensor:
        """Compute ξ = sinh((asinh u - ε)/δ)."""
        return torch.sinh((torch.asinh(u) - phi[..., 0]) * (-phi[..., 1]).exp())

    def bend(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute δ tanh(δ asinh ξ + ε)/√(1 + ξ²) - ξ/(1 + ξ²)."""
        delta, square = phi[..., 1].exp(), 1 + xi.square()
        return delta * torch.tanh(delta * torch.asinh(xi) + phi[..., 0]) * square.rsqrt() - xi / square


def _log_cosh(x: Tensor) -> Tensor:
    """log cosh x, for any x, smooth at 0: log((1 + e^-2x)/2) + x on the right, and its mirror image."""
    size = torch.where(x < 0, -x, x)
    return size + torch.log1p(torch.expm1(-2 * size) / 2)


# The inverse of the power curves of Yeo and Johnson (2000): skewness in one number


@final
class YeoJohnson(Warp):
    """u = (1 + λξ)^(1/λ) - 1 on the right of 0, 1 - (1 - (2 - λ)ξ)^(1/(2-λ)) on its left, λ = 2/(1 + e^-φ).

    θ so warped is what the transform of Yeo and Johnson (2000, Biometrika 87) with that λ makes normal: φ < 0 skews to
    the right.  One number a coordinate, for skewness alone; its second derivative jumps at 0.

    >>> warp = YeoJohnson()
    >>> round(warp.forward(torch.ones(1), torch.zeros(1, 1)).item(), 6)  # the identity
    1.0
    """

    parameters, names = 1, ("phi",)

    def curve(self, xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u and log u' = (1/λ - 1) log(1 + λξ), or (1/(2-λ) - 1) log(1 - (2-λ)ξ)."""
        right, power, log_base, _ = _side(xi, phi)
        size = torch.expm1(log_base / power)
        return torch.where(right, size, -size), (1 / power - 1) * log_base

    def curve_inverse(self, u: Tensor, phi: Tensor) -> Tensor:
        """Compute ((1 + u)^λ - 1)/λ, or (1 - (1 - u)^(2-λ))/(2 - λ)."""
        right, power, *_ = _side(u, phi)
        size = torch.expm1(power * torch.log1p(torch.where(right, u, -u))) / power
        return torch.where(right, size, -size)

    def bend(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute (1 - λ)/(1 + λξ) on both sides, with 2 - λ and -ξ on the left, where its sign turns."""
        right, power, log_base, _ = _side(xi, phi)
        size = (1 - power) * (-log_base).exp()
        return torch.where(right, size, -size)


def _side(xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which side of 0, the power λ or 2 - λ there, log(1 + power |ξ|), and |ξ|."""
    right = xi >= 0
    power = torch.where(right, 2 * torch.sigmoid(phi[..., 0]), 2 * torch.sigmoid(-phi[..., 0]))
    size = torch.where(right, xi, -xi)
    return right, power, torch.log1p(power * size), size
