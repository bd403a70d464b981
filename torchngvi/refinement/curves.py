"""Curves through a few nodes, and the density on a line whose logarithm is such a curve."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_CELLS = 2048  # of the table of a density: of a normal one its log density is then right to 1e-5
_MERGED = 4  # cells in a stratum of a quadrature
_DEEP = 16.0  # nats below an end node at which the table of a tail ends and an exponential begins
_BEYOND = 1.0  # distances of the last two nodes for which a curve goes on beyond them
_GENTLEST = 4.0  # nats over the width of the nodes by which a tail falls at least
_FLAT = 1e-6  # below which expm1(x)/x and log1p(x)/x are their series


class Spline:
    """The cubic spline through K nodes that has no knot at the second and the last but one.

    >>> nodes = torch.tensor([-2.0, -1.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    >>> at = torch.tensor([-1.5, 2.0], dtype=torch.float64)
    >>> (Spline(nodes).basis(at) @ nodes**3).round(decimals=9).tolist()
    [-3.375, 8.0]
    """

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes
        self.bends = _second_derivatives(nodes)  # (K, K): values at the nodes -> second derivatives there

    def basis(
        self,
        s: Tensor,  # (N,)
    ) -> Tensor:  # (N, K)
        """The weights of the values at the nodes, differentiable in s."""
        nodes, count = self.nodes, len(self.nodes)
        if count == 1:
            return torch.ones_like(s)[:, None]
        inside = s.clamp(nodes[0], nodes[-1])
        left = (torch.searchsorted(nodes, inside.detach().contiguous(), right=True) - 1).clamp(0, count - 2)
        width = nodes[left + 1] - nodes[left]
        # beyond the ends a line with the slope that the cubic has there, and then a constant
        beyond = ((s - inside) / width).clamp(-_BEYOND, _BEYOND)
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
    """The density p(s) ∝ exp h(s) of a curve h known at nodes, made positive everywhere.

    Attributes:
        log_mass: log ∫ exp h.

    >>> s = torch.linspace(-4, 4, 9, dtype=torch.float64)
    >>> normal = LineDensity(s, -0.5 * s**2)
    >>> abs(float(normal.log_mass) - 0.5 * math.log(2 * math.pi)) < 1e-4
    True
    """

    def __init__(self, nodes: Tensor, heights: Tensor) -> None:
        nodes, heights = nodes.double(), heights.double()
        points, curve = _tabulated(nodes, heights)
        rise = curve.diff() / points.diff()
        slopes = torch.cat([rise[:1].clamp_min(_gentlest(points)), rise, rise[-1:].clamp_max(-_gentlest(points))])
        masses = torch.cat(
            [
                curve[:1] - slopes[:1].log(),
                curve[:-1] + points.diff().log() + _expm1_ratio(rise * points.diff()).log(),
                curve[-1:] - (-slopes[-1:]).log(),
            ]
        )
        self.log_mass = masses.logsumexp(0)
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

    def quantile(
        self,
        lower: Tensor,  # mass below, (N,)
        upper: Tensor,  # mass above, 1 minus it, exact where it is small
    ) -> Tensor:
        """Find s with these masses below and above, differentiable in the smaller of the two."""
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
        edges, below = self.table.points[::_MERGED], self.table.below[::_MERGED]
        weights = below.diff()
        return 0.5 * (edges[1:] + edges[:-1]), weights / weights.sum()


def _gentlest(points: Tensor) -> float:
    """The least slope of an exponential tail: half a nat over the width of the table."""
    return 0.5 / float(points[-1] - points[0])


def _tabulated(nodes: Tensor, heights: Tensor) -> tuple[Tensor, Tensor]:
    """Points and h there: the spline between the nodes, and beyond a parabola with the last slope and curvature."""
    ends, spline = _ends(nodes, heights), Spline(nodes)
    reach = [2 * _DEEP / (math.sqrt(slope**2 - 2 * bend * _DEEP) - slope) for slope, bend in ends]
    first, last = float(nodes[0]) - reach[0], float(nodes[-1]) + reach[1]
    points = torch.linspace(first, last, _CELLS + 1, dtype=torch.float64, device="cpu").to(nodes)
    curve = spline.basis(points.clamp(nodes[0], nodes[-1])) @ heights
    for far, (slope, bend) in zip((nodes[0] - points, points - nodes[-1]), ends, strict=True):
        far = far.clamp_min(0)
        curve = curve + slope * far + 0.5 * bend * far**2
    return points, curve


def _ends(nodes: Tensor, heights: Tensor) -> list[tuple[float, float]]:
    """The slope of h, measured away from the nodes, and its curvature at the first and the last of them."""
    if len(nodes) < 3:  # nothing is known of them
        return [(0.0, -1.0)] * 2
    spline = Spline(nodes)
    bends = (spline.bends @ heights)[[0, -1]]
    step = 1e-3 * nodes.diff().min()
    probes = torch.stack([nodes[0] - step, nodes[-1] + step])  # where the spline goes on in a line
    slopes = (spline.basis(probes) @ heights - heights[[0, -1]]) / step
    gentlest = _GENTLEST / float(nodes[-1] - nodes[0])
    return [
        (min(slope, -gentlest), min(bend, 0.0)) for slope, bend in zip(slopes.tolist(), bends.tolist(), strict=True)
    ]


def _expm1_ratio(x: Tensor) -> Tensor:
    """(eˣ - 1)/x."""
    small = x.abs() < _FLAT
    safe = torch.where(small, torch.ones_like(x), x)
    return torch.where(small, 1 + 0.5 * x, torch.expm1(safe) / safe)


def _log1p_ratio(x: Tensor) -> Tensor:
    """log(1 + x)/x, for x > -1."""
    small = x.abs() < _FLAT
    safe = torch.where(small, torch.ones_like(x), x.clamp_min(-1 + 1e-15))
    return torch.where(small, 1 - 0.5 * x, torch.log1p(safe) / safe)
