"""Maps of standard normal noise x to a whitened z, laid one on the other.

A `FanLayer` has one coordinate s = uᵀz with a free density, and Gaussians conditional on it,

    q(z) = p(s) N(y; μ(s), L(s) L(s)ᵀ)        z = s u + P y        [u P] orthogonal

whose curves go through the nodes at which the Gaussians were fitted: the integrated nested Laplace approximation (Rue,
Martino and Chopin 2009) with variational fits inside.  As a map, s = F⁻¹(Φ(uᵀx)) and y = μ(s) + L(s) Pᵀx, where F is
the distribution function of p.

A `WarpLayer` takes each coordinate through a curve of its own (Jones and Pewsey 2009, Biometrika 96), which skews it
and makes its tails heavier or lighter:

    z_i = a_i + b_i sinh((asinh x_i + ε_i) δ_i)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchngvi.refinement.curves import LineDensity, Spline

LOG_TAU = 0.5 * math.log(2 * math.pi)


class Layer(nn.Module, ABC):
    """An invertible map x -> z."""

    @abstractmethod
    def push(
        self,
        x: Tensor,  # (N, D)
    ) -> tuple[Tensor, Tensor]:
        """Map x to z (N, D), and compute log|det dz/dx| (N,), differentiable in x."""

    @abstractmethod
    def pull(
        self,
        z: Tensor,  # (N, D)
    ) -> tuple[Tensor, Tensor]:
        """Map z back to x (N, D), and compute log|det dx/dz| (N,)."""


class Nodes(NamedTuple):
    """What was fitted along a direction, E = D - 1."""

    s: Tensor  # (K,), rising
    elbo: Tensor  # of the conditional Gaussians, (K,)
    mean: Tensor  # μ, (K, E)
    root: Tensor  # L, lower triangular, (K, E, E)


class FanLayer(Layer):
    """Gaussians conditional on the coordinate along one direction.

    Between the nodes the ELBO, μ, log diag L and L with its columns divided by its diagonal are splines in s.

    Args:
        direction: u, of length 1, (D,).
        nodes: what was fitted along it.

    >>> nodes = Nodes(torch.linspace(-4, 4, 9), -0.5 * torch.linspace(-4, 4, 9) ** 2, torch.zeros(9, 1),
    ...               torch.ones(9, 1, 1))  # of N(0, I)
    >>> z, stretch = FanLayer(torch.tensor([1.0, 0.0]), nodes).push(torch.ones(1, 2))
    >>> bool((z - 1).abs().max() < 1e-4), bool(stretch.abs() < 1e-4)
    (True, True)
    """

    basis: Tensor  # [u P], (D, D)
    nodes: Tensor  # (K,)
    heights: Tensor  # (K,)
    curves: Tensor  # μ, log diag L and L with the diagonal taken out, (K, 2 E + E²)

    def __init__(self, direction: Tensor, nodes: Nodes) -> None:
        super().__init__()
        scales = nodes.root.diagonal(dim1=-2, dim2=-1)
        curves = [nodes.mean, scales.log(), (nodes.root / scales[:, None, :]).flatten(1)]
        self.register_buffer("basis", orthogonal(direction))
        self.register_buffer("nodes", nodes.s.clone())
        self.register_buffer("heights", nodes.elbo.clone())
        self.register_buffer("curves", torch.cat(curves, -1))
        self._derive()
        self.register_load_state_dict_post_hook(_derived)

    def _derive(self) -> None:
        self.spline = Spline(self.nodes)
        self.line = LineDensity(self.nodes, self.heights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._derive()
        return self

    @classmethod
    def blank(cls, dim: int, nodes: Tensor) -> Self:
        """One with nodes at these s and nothing on them, to load a state into."""
        roots = torch.eye(dim - 1, dtype=nodes.dtype, device=nodes.device).expand(len(nodes), -1, -1)
        direction = torch.nn.functional.one_hot(torch.zeros((), dtype=torch.long, device="cpu"), dim).to(nodes)
        return cls(direction, Nodes(nodes, torch.zeros_like(nodes), nodes.new_zeros(len(nodes), dim - 1), roots))

    @property
    def log_mass(self) -> Tensor:
        """log ∫ exp ELBO(s) ds: the ELBO of the fan, as far as the nodes know it."""
        return self.line.log_mass

    def conditional(
        self,
        s: Tensor,  # (N,)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """μ (N, E), log diag L (N, E) and L (N, E, E)."""
        inner = self.basis.shape[-1] - 1
        mean, log_scale, flat = (self.spline.basis(s) @ self.curves).split([inner, inner, inner * inner], -1)
        return mean, log_scale, flat.unflatten(-1, (inner, inner)) * log_scale.exp()[:, None, :]

    def push(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map the rank of the first coordinate to s, and the others to y by their conditional Gaussian given s."""
        turned = x @ self.basis
        s = self.line.from_normal(turned[:, 0].double()).to(x)
        mean, log_scale, root = self.conditional(s)
        y = mean + (root @ turned[:, 1:, None])[..., 0]
        stretch = log_scale.sum(-1) - 0.5 * turned[:, 0].square() - LOG_TAU - self.line.log_prob(s.double()).to(x)
        return torch.cat([s[:, None], y], -1) @ self.basis.mT, stretch

    def pull(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Map s to its normal score, and whiten y by its conditional Gaussian given s."""
        turned = z @ self.basis
        s, y = turned[:, 0], turned[:, 1:]
        mean, log_scale, root = self.conditional(s)
        inner = torch.linalg.solve_triangular(root, (y - mean)[..., None], upper=False)[..., 0]
        score = self.line.normal_score(s.double()).to(z)
        stretch = self.line.log_prob(s.double()).to(z) + 0.5 * score.square() + LOG_TAU - log_scale.sum(-1)
        return torch.cat([score[:, None], inner], -1) @ self.basis.mT, stretch

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D) of z, by a quadrature over s."""
        s, weights = (x.to(self.nodes) for x in self.line.quadrature())
        mean, _, root = self.conditional(s)
        points = torch.cat([s[:, None], mean], -1)
        centre = weights @ points
        covariance = (points - centre).mT @ ((points - centre) * weights[:, None])
        within = root * weights[:, None, None].sqrt()
        covariance[1:, 1:] += torch.einsum("kij,klj->il", within, within)
        return self.basis @ centre, self.basis @ covariance @ self.basis.mT


def _derived(fan: FanLayer, _: Any) -> None:
    """Derive spline and density of a fan anew from what it has loaded; no lambda, so that fans can be pickled."""
    fan._derive()


class WarpLayer(Layer):
    """Each coordinate through a sinh-arcsinh curve of its own; the identity at the start.

    Args:
        dim: D.
        like: a tensor of the dtype and on the device wanted.

    >>> warp = WarpLayer(2, torch.zeros(1))
    >>> warp.push(torch.ones(1, 2))[0].tolist()
    [[1.0, 1.0]]
    """

    settings: Tensor  # a, log b, ε, log δ, (4, D)

    def __init__(self, dim: int, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("settings", torch.zeros(4, dim, dtype=like.dtype, device=like.device))

    def push(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Warp each coordinate for itself by sinh(δ (asinh x + ε)), shifted and scaled."""
        shift, log_scale, skew, log_tail = self.settings
        inner = log_tail.exp() * (torch.asinh(x) + skew)
        stretch = log_scale + log_tail + _log_cosh(inner) - 0.5 * torch.log1p(x.square())
        return shift + log_scale.exp() * torch.sinh(inner), stretch.sum(-1)

    def pull(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Undo the warp of each coordinate."""
        shift, log_scale, skew, log_tail = self.settings
        inner = torch.asinh((z - shift) / log_scale.exp())
        x = torch.sinh(inner / log_tail.exp() - skew)
        return x, -self.push(x)[1]


def _log_cosh(x: Tensor) -> Tensor:
    """log cosh x, for any x."""
    return x.abs() + torch.nn.functional.softplus(-2 * x.abs()) - math.log(2)


def orthogonal(
    direction: Tensor,  # (D,), of length 1
) -> Tensor:  # (D, D)
    """Make an orthogonal matrix [u P] whose first column is a direction, by a Householder reflection.

    >>> orthogonal(torch.tensor([0.0, 1.0]))[:, 0].tolist()
    [0.0, 1.0]
    """
    axis = direction.clone()
    axis[0] += 1.0 if float(direction[0]) > 0 else -1.0
    basis = torch.eye(len(direction), dtype=direction.dtype, device=direction.device)
    basis = basis - 2 * torch.outer(axis, axis) / axis.square().sum()
    basis[:, 0] = direction
    return basis
