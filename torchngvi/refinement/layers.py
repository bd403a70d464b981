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

from torchngvi.posteriors.warps import SinhArcsinh
from torchngvi.refinement.density import LOG_TAU

# Curves through a few nodes, and the density on a line whose logarithm is such a curve


class Spline:
    """The cubic spline through K nodes that has no knot at the second and the last but one."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes
        self.bends = _second_derivatives(nodes)  # (K, K): values at the nodes -> second derivatives there

    def basis(self, s: Tensor) -> Tensor:
        """The weights of the values at the nodes, (N, K), differentiable in s (N,)."""
        nodes, count = self.nodes, len(self.nodes)
        if count == 1:
            return torch.ones_like(s)[:, None]
        inside = s.clamp(nodes[0], nodes[-1])
        left = (torch.searchsorted(nodes, inside.detach().contiguous(), right=True) - 1).clamp(0, count - 2)
        width = nodes[left + 1] - nodes[left]
        # beyond the ends a line with the slope that the cubic has there, and then a constant
        beyond = ((s - inside) / width).clamp(-1.0, 1.0)
        b = (inside - nodes[left]) / width
        a, end = 1 - b, b.detach()
        slope_c, slope_d = 1 - 3 * (1 - end) ** 2, 3 * end**2 - 1
        c = (a**3 - a + slope_c * beyond) * width**2 / 6
        d = (b**3 - b + slope_d * beyond) * width**2 / 6
        a, b = a - beyond, b + beyond
        identity = torch.eye(count, dtype=s.dtype, device=s.device)
        straight = a[:, None] * identity[left] + b[:, None] * identity[left + 1]
        return straight + c[:, None] * self.bends[left] + d[:, None] * self.bends[left + 1]


def _second_derivatives(nodes: Tensor) -> Tensor:
    """(K, K), by the tridiagonal system of the spline with its two conditions at the ends."""
    count, zeros = len(nodes), nodes.new_zeros(len(nodes), len(nodes))
    if count < 3:
        return zeros
    h = nodes.diff()
    if count == 3:
        parabola = 2 * torch.stack([1 / (h[0] * (h[0] + h[1])), -1 / (h[0] * h[1]), 1 / (h[1] * (h[0] + h[1]))])
        return parabola.expand(3, 3).clone()
    left, right = zeros.clone(), zeros.clone()
    for k in range(1, count - 1):
        left[k, k - 1 : k + 2] = torch.stack([h[k - 1], 2 * (h[k - 1] + h[k]), h[k]])
        right[k, k - 1 : k + 2] = 6 * torch.stack([1 / h[k - 1], -1 / h[k - 1] - 1 / h[k], 1 / h[k]])
    left[0, :3] = torch.stack([h[1], -(h[0] + h[1]), h[0]])
    left[-1, -3:] = torch.stack([h[-1], -(h[-2] + h[-1]), h[-2]])
    return torch.linalg.solve(left, right)


class _Table(NamedTuple):
    """A density that is log-linear between points, with exponential tails."""

    points: Tensor  # (G,)
    heights: Tensor  # log density there, normalised
    slopes: Tensor  # (G + 1,): of the lower tail, the cells, the upper tail
    below: Tensor  # (G,), mass below each point
    above: Tensor  # (G,), mass above


class LineDensity:
    """The density p(s) ∝ exp h(s) of a curve h known at nodes, made positive everywhere."""

    cells = 2048  # of its table: of a normal density its logarithm is then right to 1e-5
    merged = 4  # cells in a stratum of a quadrature
    deep = 16.0  # nats below an end node at which the table of a tail ends and an exponential begins
    gentlest = 4.0  # nats over the width of the nodes by which a tail falls at least

    def __init__(self, nodes: Tensor, heights: Tensor) -> None:
        nodes, heights = nodes.double(), heights.double()
        points, curve = self._tabulated(nodes, heights)
        rise = curve.diff() / points.diff()
        least = 0.5 / float(points[-1] - points[0])  # half a nat over the width of the table
        slopes = torch.cat([rise[:1].clamp_min(least), rise, rise[-1:].clamp_max(-least)])
        masses = torch.cat(
            [
                curve[:1] - slopes[:1].log(),
                curve[:-1] + points.diff().log() + _expm1_ratio(rise * points.diff()).log(),
                curve[-1:] - (-slopes[-1:]).log(),
            ]
        )
        self.log_mass = masses.logsumexp(0)  # log ∫ exp h
        shares = (masses - self.log_mass).exp()
        self.table = _Table(
            points, curve - self.log_mass, slopes, shares[:-1].cumsum(0), shares[1:].flip(0).cumsum(0).flip(0)
        )

    def _cell(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The points at the left and the right of the pieces 0..G, as indices; those of tails at their one end."""
        last = len(self.table.points) - 1
        return (index - 1).clamp(0, last), index.clamp(0, last)

    def log_prob(self, s: Tensor) -> Tensor:
        """Compute log p(s), differentiable in s."""
        table = self.table
        index = torch.searchsorted(table.points, s.detach().contiguous())
        left, _ = self._cell(index)
        return table.heights[left] + table.slopes[index] * (s - table.points[left])

    def normal_score(self, s: Tensor) -> Tensor:
        """Φ⁻¹(P(s)), the standard normal with the same rank."""
        table = self.table
        index = torch.searchsorted(table.points, s.contiguous())
        left, right = self._cell(index)
        slope, last = table.slopes[index], len(table.points)
        up, down = s - table.points[left], table.points[right] - s
        p_left, p_right = table.heights[left].exp(), table.heights[right].exp()
        lower = table.below[left] + p_left * up * _expm1_ratio(slope * up)
        upper = table.above[right] + p_right * down * _expm1_ratio(-slope * down)
        lower = torch.where(index == 0, table.below[0] * (-slope * down).exp(), lower)
        upper = torch.where(index == last, table.above[-1] * (slope * up).exp(), upper)
        rank = torch.where(lower < upper, lower, upper)
        score = torch.special.ndtri(rank.clamp(1e-300, 0.5))
        return torch.where(lower < upper, score, -score)

    def quantile(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Find s with these masses below and above, (N,) each, differentiable in the smaller of the two."""
        table = self.table
        index = torch.searchsorted(table.below, lower.detach().contiguous())
        index = torch.where(
            lower.detach() > 0.5,
            len(table.above) - torch.searchsorted(table.above.flip(0).contiguous(), upper.detach().contiguous()),
            index,
        )
        left, right = self._cell(index)
        slope, last = table.slopes[index], len(table.points)
        low = index < last  # a piece that has a left or, at the other end, only a right point
        from_left = (lower - table.below[left]) / table.heights[left].exp()
        up = table.points[left] + from_left * _log1p_ratio(slope * from_left)
        from_right = (upper - table.above[right]) / table.heights[right].exp()
        down = table.points[right] - from_right * _log1p_ratio(-slope * from_right)
        s = torch.where(lower.detach() > 0.5, down, up)
        tail_low = table.points[0] + (lower / table.below[0]).clamp_min(1e-300).log() / table.slopes[0]
        tail_high = table.points[-1] + (upper / table.above[-1]).clamp_min(1e-300).log() / table.slopes[-1]
        s = torch.where(index == 0, tail_low, s)
        return torch.where(~low, tail_high, s)

    def from_normal(self, x: Tensor) -> Tensor:
        """Find s with the rank that x has in N(0, 1), differentiable in x."""
        # erfc keeps the relative accuracy of small masses, which ndtr loses
        root = math.sqrt(0.5)
        return self.quantile(0.5 * torch.special.erfc(-root * x), 0.5 * torch.special.erfc(root * x))

    def quadrature(self) -> tuple[Tensor, Tensor]:
        """Points and masses of 512 strata of equal width between the ends of the table."""
        edges, below = self.table.points[:: self.merged], self.table.below[:: self.merged]
        weights = below.diff()
        return 0.5 * (edges[1:] + edges[:-1]), weights / weights.sum()

    def _tabulated(self, nodes: Tensor, heights: Tensor) -> tuple[Tensor, Tensor]:
        """Points and h there: the spline between the nodes, beyond a parabola with the last slope and curvature."""
        ends, spline, deep = self._ends(nodes, heights), Spline(nodes), self.deep
        reach = [2 * deep / (math.sqrt(slope**2 - 2 * bend * deep) - slope) for slope, bend in ends]
        first, last = float(nodes[0]) - reach[0], float(nodes[-1]) + reach[1]
        points = torch.linspace(first, last, self.cells + 1, dtype=torch.float64, device="cpu").to(nodes)
        curve = spline.basis(points.clamp(nodes[0], nodes[-1])) @ heights
        for far, (slope, bend) in zip((nodes[0] - points, points - nodes[-1]), ends, strict=True):
            far = far.clamp_min(0)
            curve = curve + slope * far + 0.5 * bend * far**2
        return points, curve

    def _ends(self, nodes: Tensor, heights: Tensor) -> list[tuple[float, float]]:
        """The slope of h, measured away from the nodes, and its curvature at the first and the last of them."""
        if len(nodes) < 3:  # nothing is known of them
            return [(0.0, -1.0)] * 2
        spline = Spline(nodes)
        bends = (spline.bends @ heights)[[0, -1]]
        step = 1e-3 * nodes.diff().min()
        probes = torch.stack([nodes[0] - step, nodes[-1] + step])  # where the spline goes on in a line
        slopes = (spline.basis(probes) @ heights - heights[[0, -1]]) / step
        least, pairs = self.gentlest / float(nodes[-1] - nodes[0]), zip(slopes.tolist(), bends.tolist(), strict=True)
        return [(min(slope, -least), min(bend, 0.0)) for slope, bend in pairs]


def _expm1_ratio(x: Tensor) -> Tensor:
    """(eˣ - 1)/x, near 0 by its series."""
    small = x.abs() < 1e-6
    safe = torch.where(small, torch.ones_like(x), x)
    return torch.where(small, 1 + 0.5 * x, torch.expm1(safe) / safe)


def _log1p_ratio(x: Tensor) -> Tensor:
    """log(1 + x)/x, for x > -1, near 0 by its series."""
    small = x.abs() < 1e-6
    safe = torch.where(small, torch.ones_like(x), x.clamp_min(-1 + 1e-15))
    return torch.where(small, 1 - 0.5 * x, torch.log1p(safe) / safe)


class Layer(nn.Module, ABC):
    """An invertible map x -> z."""

    @abstractmethod
    def push(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x to z (N, D), and compute log|det dz/dx| (N,), differentiable in x."""

    @abstractmethod
    def pull(self, z: Tensor) -> tuple[Tensor, Tensor]:
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

    def conditional(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """μ (N, E), log diag L (N, E) and L (N, E, E) at s (N,)."""
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
    """Derive spline and density of a fan again from what it has loaded; no lambda, so that fans can be pickled."""
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

    @property
    def _phi(self) -> Tensor:
        """The parameters (δ ε, log δ) of each curve, (D, 2)."""
        return torch.stack([self.settings[3].exp() * self.settings[2], self.settings[3]], -1)

    def push(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Warp each coordinate for itself by sinh(δ (asinh x + ε)), shifted and scaled."""
        shift, log_scale = self.settings[:2]
        u, log_slope = SinhArcsinh().curve(x, self._phi)
        return shift + log_scale.exp() * u, (log_scale + log_slope).sum(-1)

    def pull(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Undo the warp of each coordinate."""
        x = SinhArcsinh().curve_inverse((z - self.settings[0]) / self.settings[1].exp(), self._phi)
        return x, -self.push(x)[1]


def orthogonal(direction: Tensor) -> Tensor:
    """Make an orthogonal matrix [u P] (D, D) whose first column is a direction u, by a Householder reflection."""
    axis = direction.clone()
    axis[0] += 1.0 if float(direction[0]) > 0 else -1.0
    basis = torch.eye(len(direction), dtype=direction.dtype, device=direction.device)
    basis = basis - 2 * torch.outer(axis, axis) / axis.square().sum()
    basis[:, 0] = direction
    return basis
