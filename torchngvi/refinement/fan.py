"""A Gaussian that is bent to the posterior by layers: maps of standard normal noise x to a whitened z.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.importance import Proposal, Quality, smoothed
from torchngvi.diagnostics.linear_response import Residuals, finite_pairs, third_order
from torchngvi.diagnostics.verdict import name_of
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.interfaces import Target
from torchngvi.methods import VN
from torchngvi.models import LogJoint
from torchngvi.models.factors import Guarded
from torchngvi.numerics.arrays import writable
from torchngvi.numerics.linalg import eigh
from torchngvi.optim import Status
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warps import SinhArcsinh

DRAWS = 1024  # by which a density is judged
LOG_TAU = 0.5 * math.log(2 * math.pi)
LogDensity = Callable[[Tensor], Tensor]  # points (N, D) -> (N,), differentiable

# What a refined posterior offers: draws, a density, moments


class Density(nn.Module, ABC):
    """A distribution over θ that can be drawn from and evaluated, without a graph.

    Moments and quantiles that have no closed form are those of 16,384 draws, the same at each call.

    >>> from torchngvi.refinement import LayeredGaussian
    >>> density = LayeredGaussian(torch.zeros(2), torch.eye(2))
    >>> isinstance(density, Density), density.sample(5).shape
    (True, torch.Size([5, 2]))
    """

    dim: int

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D)."""

    @abstractmethod
    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(θ), (*sample,), at θ (*sample, D).

        Raises:
            InputError: θ of another width than D.
        """

    def _flat(self, theta: Tensor) -> Tensor:
        """θ as (N, D)."""
        if theta.shape[-1] != self.dim:
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        return theta.reshape(-1, self.dim)

    def _seeded(self, count: int, seed: int) -> Tensor:
        """Draw so many times by a seed."""
        return self.sample(count, torch.Generator(next(self.buffers()).device).manual_seed(seed))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D)."""
        draws = self._seeded(16_384, 0)
        exact = draws.double()  # sums of float32 would be off by sd where the mean is large
        return exact.mean(0).to(draws), torch.atleast_2d(exact.mT.cov()).to(draws)

    @property
    def mean(self) -> Tensor:
        """The mean E[θ], (D,)."""
        return self.moments()[0]

    @property
    def covariance(self) -> Tensor:
        """The covariance matrix Cov[θ], (D, D)."""
        return self.moments()[1]

    @property
    def variance(self) -> Tensor:
        """The marginal variances Var[θ_k], (D,)."""
        return self.covariance.diagonal()

    @property
    def stddev(self) -> Tensor:
        """The marginal standard deviations √Var[θ_k], (D,)."""
        return self.variance.sqrt()

    def quantile(self, levels: Sequence[float] | Tensor) -> Tensor:
        """Quantiles of each coordinate, (len(levels), D).

        Raises:
            InputError: a level outside of (0, 1).
        """
        draws = self._seeded(16_384, 0)
        at = torch.as_tensor(writable(levels), dtype=draws.dtype, device=draws.device).reshape(-1)
        if not bool(((at > 0) & (at < 1)).all()):
            raise InputError(f"levels are probabilities between 0 and 1; got {at.tolist()}.")
        return draws.quantile(at, dim=0)


# The log joint that a refinement is about, each evaluation of it counted, and how near a density comes to it


class Joint:
    """log p^(1/γ) as a function of points (N, D), with counts of what was asked; errors become -∞."""

    def __init__(self, target: Target) -> None:
        if target.temperature == 0:
            raise InputError(
                "refine looks for the density exp(log joint / temperature), and there is none at temperature 0. Use a "
                "positive temperature."
            )
        if not target.comparable:
            raise InputError(
                f"refine compares values of the log joint, and {type(target).__name__} gives others at each call. "
                "Give the log joint of all data, or a DataLogJoint."
            )
        self.target = Guarded(target)
        self.temperature = target.temperature

    @property
    def gradients(self) -> int:
        """Points at which a gradient was wanted."""
        return self.target.gradients

    @property
    def values(self) -> int:
        """Points at which none was."""
        return self.target.values

    def __call__(self, theta: Tensor) -> Tensor:
        """log p(θ)/γ, (N,); -∞ or NaN where the log joint fails."""
        if torch.is_grad_enabled() and theta.requires_grad:
            return self.target.log_joint(theta) / self.temperature
        return torch.cat([self.target.log_joint(part) for part in theta.split(4096)]) / self.temperature


def residuals_of(log_density: LogDensity, fewest: int, seed: int, like: Tensor) -> Residuals:
    """How far the gradient of a log density is from that of N(0, I), at so many draws or 16 D; less those that fail."""
    z = Fixed(max(fewest, 16 * len(like)), seed=seed)(like)
    energy, gradient = energy_and_gradient(LogJoint(log_density), z)
    return finite_pairs(Residuals(z, torch.where(energy.isfinite()[:, None], gradient - z, torch.nan)))


def widened(q: Gaussian, log_density: LogDensity, seed: int, fewest: int = 512) -> Proposal:
    """A proposal as wide as the linear response of a log density in the frame of q."""
    kept = residuals_of(log_density, fewest, seed, q.mean_probe.detach())
    return Proposal(q, third_order(*kept).matrix if len(kept.z) >= fewest // 2 else None)


@torch.no_grad()
def quality(density: Density, joint: Joint, seed: int) -> Quality:
    """Judge a density by log w = log p/γ - log q at 1,024 of its draws."""
    theta = density._seeded(DRAWS, seed)
    return Quality.of(joint(theta) - density.log_prob(theta), DRAWS)


# Weighted draws: importance sampling from q and wide t distributions beside it, from values of the log joint


class WeightedDraws(Density):
    """Draws of θ with weights that sum to one: moments, quantiles and resampling, and no density.

    Args:
        theta: (S, D).
        log_weights: (S,), of which the exponentials sum to one.

    >>> q = WeightedDraws(torch.tensor([[0.0], [2.0]]), torch.tensor([0.75, 0.25]).log())
    >>> q.mean.item(), q.variance.item()
    (0.5, 0.75)
    """

    theta: Tensor
    log_weights: Tensor

    def __init__(self, theta: Tensor, log_weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("theta", theta)
        self.register_buffer("log_weights", log_weights.to(theta))
        self.dim = theta.shape[-1]

    def log_prob(self, theta: Tensor) -> Tensor:
        """Refused: weighted draws have none.

        Raises:
            InputError: always.
        """
        raise InputError(
            'weighted draws have no density to be evaluated. Use kind="fan" or kind="mixture" of refine for one.'
        )

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D): systematic resampling, in any order."""
        like = self.theta
        place = torch.rand((), dtype=torch.float64, device=like.device, generator=generator)
        ranks = (torch.randperm(n, device=like.device, generator=generator) + place) / n
        cumulated = self.log_weights.double().softmax(0).cumsum(0)
        return like[torch.searchsorted(cumulated, ranks).clamp_max(len(like) - 1)]

    def moments(self) -> tuple[Tensor, Tensor]:
        """The weighted mean (D,) and covariance (D, D)."""
        weights, theta = self.log_weights.double().softmax(0), self.theta.double()
        covariance = torch.atleast_2d(theta.mT.cov(correction=0, aweights=weights))
        return (weights @ theta).to(self.theta), covariance.to(self.theta)

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "WeightedDraws":
        """The draws that a state_dict is of."""
        return cls(state["theta"], state["log_weights"])


@torch.no_grad()
def weighted_draws(q: Gaussian, joint: Joint, seed: int) -> tuple[WeightedDraws, Quality, Proposal] | None:
    """Draw 2,048 times from q and from t distributions as wide as its linear response, and weigh by p."""
    frame = q.frame()
    wider = widened(q, lambda x: joint(frame.mean + frame.push(x)), seed)
    theta, x = wider.draws(2048, torch.Generator().manual_seed(seed))
    log_weights = joint(theta) - wider.log_density(x)[0]
    if not bool(log_weights.isfinite().any()) or bool(log_weights.isnan().any()):
        return None
    return WeightedDraws(theta, smoothed(log_weights).log_weights), Quality.of(log_weights, DRAWS), wider


# ------------------------------------------------------------------------------------ layers


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


# -------------------------------------------------------------------------------- a Gaussian under layers

#     θ = m + C z₁        z₁ = T₁(z₂)        ...        z_K = T_K(x)        x ~ N(0, I)
#
# Seen from the space of x the posterior is nearer to N(0, I) with each layer.  A layer is chosen there by what would be
# gained by it, as far as third and fourth derivatives at N(0, I) tell,
#
#     KL ≈ Σ_ijk B_ijk²/12 + Σ_i κ_i²/48 + ...        B_ijk = E[∂_i ∂_j ∂_k ℓ]        κ_i = E[∂_i⁴ ℓ]
#
# which a fan along u lowers by all terms with an index along u, and a warp by its diagonal terms; it is kept where the
# ELBO on fresh draws is the better for it.


# The density


class LayeredGaussian(Density):
    """A Gaussian in whose whitened space layers are laid: fans of conditional Gaussians, and warps.

    Args:
        mean: m, (D,).
        root: C, lower triangular (D, D).
        layers: the one nearest to θ first.

    >>> import torch
    >>> q = LayeredGaussian(torch.zeros(2), torch.eye(2))
    >>> q.log_prob(torch.zeros(2)).item() == q.log_prob(torch.zeros(3, 2))[0].item()
    True
    """

    centre: Tensor
    root: Tensor

    def __init__(self, mean: Tensor, root: Tensor, layers: tuple[Layer, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("centre", mean.detach().clone())
        self.register_buffer("root", root.detach().clone())
        self.layers = nn.ModuleList(layers)
        self.dim = len(mean)

    def with_layer(self, layer: Layer) -> "LayeredGaussian":
        """The same with one layer more."""
        return LayeredGaussian(self.centre, self.root, (*self.layers, layer))

    def push(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """θ and log|det dθ/dx| of standard normal noise (N, D), differentiable in x."""
        total = self.root.diagonal().log().sum().expand(len(x))
        for layer in reversed(self.layers):
            x, stretch = layer.push(x)  # type: ignore[operator]
            total = total + stretch
        return self.centre + x @ self.root.mT, total

    def log_density(self, joint: Joint) -> LogDensity:
        """The posterior as a density of x."""

        def at(x: Tensor) -> Tensor:
            theta, stretch = self.push(x)
            return joint(theta) + stretch

        return at

    @torch.no_grad()
    def log_prob(self, theta: Tensor) -> Tensor:
        """Compute log q(θ) by pulling θ back to the noise, (*sample,)."""
        parts = self._flat(theta).split(self.at_once)
        return torch.cat([self._log_prob(part) for part in parts]).reshape(theta.shape[:-1])

    @property
    def at_once(self) -> int:
        """Rows for which a fan may write out its roots: bounds the memory."""
        return max(1, 10_000_000 // self.dim**2)

    def _log_prob(self, theta: Tensor) -> Tensor:
        x = torch.linalg.solve_triangular(self.root, (theta - self.centre).mT, upper=False).mT
        total = -self.root.diagonal().log().sum()
        for layer in self.layers:
            x, stretch = layer.pull(x)  # type: ignore[operator]
            total = total + stretch
        return total - 0.5 * x.square().sum(-1) - self.dim * LOG_TAU

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D); along the direction of the last layer, if a fan, in n strata of equal mass."""
        device = self.root.device
        x = torch.randn(n, self.dim, dtype=self.root.dtype, device=device, generator=generator)
        last = self.layers[-1] if len(self.layers) else None
        if isinstance(last, FanLayer):
            u = last.basis[:, 0]
            place = torch.rand(n, dtype=torch.float64, device=device, generator=generator)
            order = torch.randperm(n, device=device, generator=generator)
            score = torch.special.ndtri((order + place) / n).to(x)
            x = x + (score - x @ u)[:, None] * u
        return torch.cat([self.push(part)[0] for part in x.split(self.at_once)])

    @torch.no_grad()
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D): exact without layers, a quadrature for a single fan, draws for others."""
        if not self.layers:
            return self.centre, self.root @ self.root.mT
        if len(self.layers) == 1 and isinstance(self.layers[0], FanLayer):
            mean, covariance = self.layers[0].moments()
            return self.centre + self.root @ mean, self.root @ covariance @ self.root.mT
        return super().moments()

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Self:
        """The posterior that a state_dict is of, whatever its layers.

        >>> import torch
        >>> q = LayeredGaussian(torch.zeros(2), torch.eye(2), (WarpLayer(2, torch.zeros(1)),))
        >>> len(LayeredGaussian.from_state_dict(q.state_dict()).layers)
        1
        """
        root = state["root"]
        layers: list[Layer] = []
        while any(name.startswith(f"layers.{len(layers)}.") for name in state):
            nodes = state.get(f"layers.{len(layers)}.nodes")
            layers.append(WarpLayer(len(root), root) if nodes is None else FanLayer.blank(len(root), nodes))
        density = cls(state["centre"], root, tuple(layers))
        density.load_state_dict(state)
        return density


# Which layer is tried, and whether it is kept


class _Plan(NamedTuple):
    """A layer that may be tried."""

    gain: float  # nats, as far as third and fourth derivatives tell
    name: str
    make: Callable[[], Layer | None]


class Layering:
    """Lays layers while the ELBO rises; what was kept is in `steps`, in words."""

    most = 8  # layers
    worth = 0.02  # nats that a layer has to gain
    hope = 0.01  # nats that have to be expected of one that is tried
    aligned = 0.7  # share of what the worst direction promises at which a coordinate of θ is preferred

    def __init__(self, start: LayeredGaussian, joint: Joint, seed: int, names: Sequence[str] = ()) -> None:
        self.density, self.joint, self.seed, self.names = start, joint, seed, names
        self.quality = quality(start, joint, seed)
        self.steps: list[str] = []

    def run(self, coordinate: int | None = None) -> None:
        """Lay one after the other, the first along a coordinate of θ where one is named."""
        if coordinate is not None:
            name = f"a fan along {name_of(self.names, coordinate)}"
            self._try(_Plan(torch.inf, name, self._fan(self._axes()[coordinate])))
        while not self._done and any(self._try(plan) for plan in self._plans()):
            pass

    @property
    def _done(self) -> bool:
        """Whether nothing can be hoped for: KL is about half of the variance of log w."""
        return len(self.density.layers) >= self.most or self.quality.nats < self.hope

    def _try(self, plan: _Plan) -> bool:
        """Make the layer, and keep it where it is worth it, or was asked for and has an ELBO."""
        layer = plan.make()
        if layer is None:
            return False
        density = self.density.with_layer(layer)
        new, old = quality(density, self.joint, self.seed), self.quality
        least = max(self.worth, (new.error**2 + old.error**2) ** 0.5) if plan.gain < torch.inf else -torch.inf
        if not new.elbo - old.elbo > least:
            return False
        self.density, self.quality = density, new
        self.steps.append(plan.name)
        return True

    # -------------------------------------------------------------------------------- what to try

    def _axes(self) -> Tensor:
        """Along which direction of x each coordinate of θ changes most, at x = 0, (D, D) by rows."""
        zero = self.density.root.new_zeros(self.density.dim)
        jacobian = torch.autograd.functional.jacobian(lambda x: self.density.push(x[None])[0][0], zero)
        return jacobian / jacobian.norm(dim=1, keepdim=True)

    def _plans(self) -> list[_Plan]:
        """Layers by what is expected of them, the best first: a warp, and fans along two directions."""
        dim = self.density.dim
        seed = self.seed + len(self.density.layers)
        residuals = residuals_of(self.density.log_density(self.joint), 1024, seed, self.density.centre)
        if len(residuals.z) < 512:
            return []
        M = third_order(*residuals).matrix
        eigenvectors = eigh(M)[1]
        axes = torch.cat([eigenvectors[:, -1:].mT, self._axes()])
        expected = _gains(axes, M, residuals)
        best = 1 + int(expected[1:].argmax())
        fans = [(best, f"a fan along {name_of(self.names, best - 1)}"), (0, "a fan along the worst direction")]
        if not expected[best] > self.aligned * expected[0]:
            fans.reverse()
        plans = [_Plan(float(expected[k]), name, self._fan(axes[k])) for k, name in fans]
        if dim > 1:  # along a line a fan has it all
            warp = _Plan(_warp_gain(residuals), "a warp of each coordinate", self._warp)
            plans.insert(0 if warp.gain > max(plan.gain for plan in plans) else len(plans), warp)
        return [plan for plan in plans if plan.gain > self.hope]

    def _fan(self, direction: Tensor) -> Callable[[], Layer | None]:
        def make() -> Layer | None:
            nodes = trace(self.density.log_density(self.joint), direction, self.seed)
            return None if nodes is None else FanLayer(direction, nodes)

        return make

    def _warp(self) -> Layer:
        """Fitted to fixed draws by L-BFGS."""
        dim, density = self.density.dim, self.density.log_density(self.joint)
        x = Fixed(max(512, 16 * dim), seed=self.seed + self.most)(self.density.centre)
        layer = WarpLayer(dim, x)
        settings = layer.settings.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([settings], max_iter=20, tolerance_change=1e-3, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            layer.settings = settings
            z, stretch = layer.push(x)
            value = -(density(z) + stretch).mean()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        layer.settings = settings.detach()
        return layer


def _gains(axes: Tensor, M: Tensor, residuals: Residuals) -> Tensor:
    """The share of KL that has to do with each direction u, (K, D); of fourth derivatives those with u thrice."""
    half, even, odd = residuals.halves
    along = half @ axes.mT
    twice, thrice = along.square() - 1, along.pow(3) - 3 * along
    third, fourth = _own_squares(twice, even @ axes.mT), _own_squares(thrice, odd @ axes.mT)
    # Σ B² over all entries with an index along u is 12 (½ uᵀMu - ¼ |B_uu|² + B_uuu²/12), Σ K² over those with three
    # and more is 4 |K_uuu|² - 3 K_uuuu²
    share = 0.5 * ((axes @ M) * axes).sum(1) - _squares(twice, even) / 4 + third / 12
    return share + (4 * _squares(thrice, odd) - 3 * fourth) / 48


def _warp_gain(residuals: Residuals) -> float:
    """Σ_i B_iii²/12 + κ_i²/48."""
    half, even, odd = residuals.halves
    third, fourth = _own_squares(half.square() - 1, even), _own_squares(half.pow(3) - 3 * half, odd)
    return float((third / 12 + fourth / 48).sum())


def _own_squares(polynomial: Tensor, force: Tensor) -> Tensor:
    """E[f_k(z) r_k]² of both (S, K), less the variance of its estimate, (K,)."""
    each = polynomial * force
    return each.mean(0).square() - each.var(0) / len(each)


def _squares(polynomial: Tensor, force: Tensor) -> Tensor:
    """|E[f_k(z) r]|² of f (S, K) and r (S, D), less the variance of its estimate, (K,)."""
    square = (polynomial.mT @ force / len(force)).square().sum(1)
    spread = (polynomial.square().mT @ force.square() / len(force)).sum(1)
    return square - (spread - square) / len(force)


# Several Gaussians side by side, each brought to its optimum over fixed draws


class Fits(NamedTuple):
    """Gaussians that were fitted, an entry a member."""

    mean: Tensor  # (B, D)
    root: Tensor  # lower triangular, (B, D, D)
    elbo: Tensor  # on other draws, (B,)
    ok: Tensor  # the fit has ended, and its ELBO is finite, (B,)
    draws: int  # over which they were fitted


@torch.no_grad()
def fitted(
    target: Target,
    mean: Tensor,
    root: Tensor,
    seed: int,
    draws: int | None = None,
    noise: float = 0.1,  # squared standard error of a natural gradient that is put up with: 0.05 nats
) -> Fits:
    """Fit from these starts (B, D) and (B, D, D) by VN over fixed draws, 32 or 2 D + 2 at first and 512 at most."""
    q = CholeskyGaussian(mean.shape[-1], mean.shape[:-1], mean=mean, scale=root)
    least = max(32, 2 * q.dim + 2)
    first = least if draws is None else draws
    status = _minimised(q, target, first, seed)
    if draws is None:
        assert status.noise2 is not None
        wanted = first * float(status.noise2.nan_to_num(0.0, 0.0).max()) / noise
        draws = 2 * math.ceil(0.5 * min(max(least, wanted), max(least, 512)))
        if draws > first:
            status = _minimised(q, target, draws, seed)
    judges = Fixed(max(draws, 128), seed=seed + 1)(q.mean)
    elbo = target.log_joint(q.push_noise(judges)).mean(0) + q.entropy()
    return Fits(q.mean.clone(), q.scale_tril.clone(), elbo, (status.norm2 < 1.0) & elbo.isfinite(), draws)


def _minimised(q: CholeskyGaussian, target: Target, draws: int, seed: int, near: float = 0.05) -> Status:
    """Minimise L over fixed draws, until norm² is that small, in twelve steps at most."""
    optimizer = VN(q, estimator=SampleAverage(Fixed(draws, seed=seed)))
    status = optimizer.evaluate(target)
    for _ in range(12):
        if bool(((status.norm2 < near) | ~status.loss.isfinite()).all()):
            break
        optimizer.step(target)
        status = optimizer.evaluate(target)
    optimizer.step_untried(target)  # near the optimum it is right, and costs nothing
    return status


# The nodes of a fan: Gaussians fitted along a line, outwards from the middle, both sides at once


@dataclass(frozen=True)
class _Node:
    """A Gaussian of y at one s."""

    s: float
    elbo: float
    mean: Tensor  # μ, (E,)
    root: Tensor  # L, (E, E)


class _Side:
    """Nodes outwards from the middle, and the step to the next one; short where a node is a single value."""

    little, much = 1.5, 5.0  # nats of fall below which the next step is wider, and above which a node is dropped
    short = 0.3  # a step that is not halved for it
    deep = 9.0  # nats below the top at which a side ends

    def __init__(self, middle: _Node, sign: float) -> None:
        first, self.wider, self.longest = (1.0, 1.6, 10) if len(middle.mean) else (0.25, 1.1, 40)
        self.nodes, self.step, self.done = [middle], sign * first, False

    def proposal(self) -> _Node:
        """Where the next node is, on the line through the last two means, with the last root."""
        last = self.nodes[-1]
        s, mean = last.s + self.step, last.mean
        if len(self.nodes) > 1:
            before = self.nodes[-2]
            mean = mean + (s - last.s) / (last.s - before.s) * (mean - before.mean)
        return _Node(s, last.elbo, mean, last.root)

    def take(self, node: _Node, top: float) -> None:
        """Keep a node; or drop one that failed or fell too far, and go less far."""
        fell = self.nodes[-1].elbo - node.elbo if math.isfinite(node.elbo) else math.inf
        if fell > self.much and abs(self.step) > self.short:
            self.step *= 0.5
            return
        if fell == math.inf:
            self.done = True
            return
        self.nodes.append(node)
        self.step *= self.wider if fell < self.little else 1.0
        self.done = node.elbo < top - self.deep or len(self.nodes) > self.longest


def trace(log_density: LogDensity, direction: Tensor, seed: int) -> Nodes | None:
    """Fit Gaussians conditional on s = uᵀx along a direction u, of a log density of x that is near N(0, I)."""
    basis, inner = orthogonal(direction), len(direction) - 1
    eye = torch.eye(inner, dtype=direction.dtype, device=direction.device)
    start = _Node(0.0, 0.0, direction.new_zeros(inner), eye)
    (middle,), draws = _fitted(log_density, basis, [start], None, seed)
    if not math.isfinite(middle.elbo):
        return None
    sides, top = [_Side(middle, -1.0), _Side(middle, 1.0)], middle.elbo
    while active := [side for side in sides if not side.done]:
        found, _ = _fitted(log_density, basis, [side.proposal() for side in active], draws, seed)
        top = max([top, *(node.elbo for node in found)])
        for side, node in zip(active, found, strict=True):
            side.take(node, top)
    nodes = [*reversed(sides[0].nodes), *sides[1].nodes[1:]]
    s, elbo = (direction.new_tensor([getattr(node, name) for node in nodes]) for name in ("s", "elbo"))
    return Nodes(s, elbo, torch.stack([node.mean for node in nodes]), torch.stack([node.root for node in nodes]))


def _fitted(
    log_density: LogDensity, basis: Tensor, starts: list[_Node], draws: int | None, seed: int
) -> tuple[list[_Node], int | None]:
    """Gaussians at these places, side by side, with an ELBO of -∞ where there is none; and over how many draws."""
    s = basis.new_tensor([node.s for node in starts])

    def at(y: Tensor) -> Tensor:
        """The log density at s u + P y, (S, B, E) -> (S, B)."""
        points = torch.cat([s[:, None].expand(*y.shape[:-1], 1), y], -1) @ basis.mT
        return log_density(points.flatten(0, -2)).unflatten(0, points.shape[:-1])

    target: Target = LogJoint(at)
    mean, root = torch.stack([node.mean for node in starts]), torch.stack([node.root for node in starts])
    if mean.shape[-1]:
        mean, root, elbo, ok, draws = fitted(target, mean, root, seed, draws)
    else:  # a single coordinate: the density itself
        with torch.no_grad():
            elbo = target.log_joint(mean[None])[0]
        ok = elbo.isfinite()
    rows = zip(starts, torch.where(ok, elbo, -torch.inf).tolist(), mean, root, strict=True)
    return [_Node(start.s, value, m, r) for start, value, m, r in rows], draws
