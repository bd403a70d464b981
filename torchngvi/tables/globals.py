"""The posterior of the globals of one model: its mode, its curvature, and draws weighted to the density itself.

Effects are integrated out first (`torchngvi.tables.integrated`), so that what is left has few dimensions.  The mode is
found by quasi-Newton steps, the Hessian there by differences of gradients, which also give how the modes of the effects
follow the globals.  Draws of a mixture of a Gaussian and a wider t distribution about the mode are weighted to the
density; where the standard deviation of the effects may be 0 they come from a grid over its logarithm.

With several grouping factors, nested or crossed, effects are integrated out by Laplace's approximation, corrected.
With the effects b_k = C_k u_k of all factors, u ~ N(0, I) in D dimensions, û the mode of log p(y, u | θ), A the rows of
the designs Z_k C_k, W the curvatures of -log p(y | η, φ) there, and H = I + AᵀWA,

    log p(y | θ) ≈ log p(y | û, θ) - ½|û|² - ½ log|H|

is Laplace's approximation (Tierney and Kadane 1986; Bates and others 2015 for the sparse factor H = T Tᵀ, which has the
pattern of a forest).  Its gradient follows û: with λ = ½ H⁻¹ ∂log|H|/∂u,

    d/dθ = ∂/∂θ [log p(y | û, θ) - ½ log|H| + λᵀ ∂log p(y, u | θ)/∂u],

since dû/dθ = H⁻¹ ∂²log p/∂u∂θ.  The search for the mode of the globals takes this.  The weights of draws are corrected:
the effects v of all factors but the largest are drawn from the Gaussian N(û, H⁻¹), and given these the effects w_j of
the groups of the largest, which are then independent, are integrated by nodes (see `torchngvi.tables.integrated`),

    p(y | θ) ≈ 1/M Σ_m p(v_m)/N(v_m; û, H⁻¹) Π_j ∫ p(y_j | w_j, v_m, θ) N(w_j; 0, I) dw_j,

without a bias up to that of the nodes (Durbin and Koopman 1997).  The M normal draws, in pairs z and -z, are the same
for all θ, so that differences between values of θ have little noise.  With Gaussian noise M = 1 with one node is exact.

A row couples one group of each factor, so that its groups must lie on one path from a leaf to the root of the forest.
Factors within which others are nested, as schools hold classes, make a chain: the groups of the innermost are leaves,
and each group is below the one that holds it.  The effects of all other factors, which are crossed with these, stand in
the root: u = (those of the leaves, of the next level, ..., of the crossed factors).  Matrices Σ_i w_i a_i a_iᵀ over
rows whose entries are the designs of their groups have the pattern of the forest, and so have their Cholesky factors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor
from tqdm import tqdm

from torchngvi.arguments import read_size
from torchngvi.diagnostics.importance import USELESS, smoothed
from torchngvi.errors import InputError
from torchngvi.numerics import linalg
from torchngvi.numerics.special import normal_rule
from torchngvi.structures.forest import Forest
from torchngvi.structures.pattern import Structured
from torchngvi.tables.families import Family
from torchngvi.tables.integrated import (
    Closed,
    Integrated,
    Integration,
    LogJoint,
    Valued,
    choose,
    find_start,
    finite,
    inverse_root,
)
from torchngvi.tables.parts import (
    Coordinates,
    Design,
    Factor,
    Posterior,
    Weighted,
    covariance_root,
    draw_normal,
    draw_uniform,
    replace_where,
    take_rows,
)
from torchngvi.tables.priors import Priors

_ROUNDING = 64  # units of rounding of a log joint, below which nothing is said of its changes
_ENOUGH = 1e-4  # of what the slope promises, at which a step is taken
_FLAT = 1e-8  # of what a step promises, below which its change of slope says nothing of the curvature


@dataclass(frozen=True)
class FitSettings:
    """All numbers of a fit, each with what chose it; data sets are those of `benchmarks`.

    Attributes:
        draws: weighted draws of the globals to begin with. Of 400 about 340 are effective, so that means are right to
            .02 to .1 sds and sds to 6 %: two digits of a table.
        at_once: rows times nodes times draws that take a tenth of a second: of a small table so many draws are taken,
            up to ``most_draws``, and fewer than that only where a person asks for fewer.
        effective: the effective number of draws from which on there are enough; the draws are doubled until then.
        most_draws: at which doubling ends. A third digit needs about 4,096 draws.
        nodes: of the quadrature, in each dimension of the effects; None for the smallest number that makes no
            difference of ``settled`` nats.
        several_draws: draws with two or more effects a group, where correlations are far from Gaussian: with 1,000
            k-hat was .2 to .44 in five fits.
        end: of the search for the mode: gᵀH⁻¹g, twice the nats that a step of Newton's method still promises.
        gradients: of the search at most; it takes 7 to 30 where there is a mode.
        trials: of the length of one step, each a tenth to a half of the one before.
        stuck: share of a step to which it may be cut near the end, before gradients are said to contradict values, as
            they do by the error of the quadrature.
        cut: share of a step below which, after cuts, the curvature is taken from differences once more.
        stride: by which a step may move a logarithm of a scale, or a coordinate of the likelihood.
        apart: sds, in the metric of the search, between which gradients are differenced for the Hessian.
        orders: numbers of nodes that are tried; three are enough for groups of many rows.
        most_nodes: of one group, over all dimensions.
        settled: nats by which log joints of draws may differ from those with more nodes: weights then differ by 2 %.
            An order counts as enough if the next two agree with it: of epilepsy one node and three agree within .01
            nats, three and five differ by .05.
        looked: draws at which that is looked at.
        far: sds of these draws.
        wider: sds of the t distribution of the mixture, in those of the Gaussian.
        dof: of the t distribution of the mixture: with 5, and 1.2, 260 to 385 of 400 draws were effective in ten sets.
        k_hat: above which another proposal is tried; the variance of weights is finite below .5.
        sides: sds of a direction at which the log joint is looked at on either side, where draws about the mode fail.
            The size of negative binomial counts that are Poisson's has a long tail on one side: k-hat .95, so .31.
        longest: of a side, in sds of the Gaussian.
        again: how often draws may come from their own weighted moments; once was enough in nine of nine data sets.
        grid_above: sd of log τ above which its density has a tail like τ itself, which no Gaussian has: of 100 tables
            without spread 6 had a k-hat above .7 by the mixture, and none by the grid.
        grid_points: of log τ.
        grid_below: how far below its mode the grid begins, in sds or in units of log τ, whichever is less.
        grid_beyond: how far above its mode it ends, in the same units.
        grid_steps: chord steps to the mode of all other globals at each point.
        grid_close: nats that a chord step may promise at its end: the rest is made good by a step with the Hessian.
        grid_dof: of the t distribution of all other globals given τ.
        tail: nats by which the density of log τ falls beyond the ends of the grid before it is cut off.
        cells: of the density of log τ between the ends of the grid, and beyond, for its distribution function.
        candidates: of each group, of which one is drawn as its effects.
        candidates_wider: their sds, in those of the Gaussian at the mode. With 8 candidates and 1.8 the mean of an
            effect of three binary outcomes is right to .004 sds and its sd to .5 % up to a standard deviation of 5;
            with 16 and 1.2 they are to .04 sds and 6 %.
        integration: of the quadrature itself.
        exact: digits, as a share, to which columns must not give an outcome whose noise is learned; None for no limit.

    >>> FitSettings().asked(draws=1000).draws
    1000
    """

    draws: int = 400
    at_once: int = 2**22
    effective: int = 200
    most_draws: int = 4096
    nodes: int | None = None
    several_draws: int = 1000
    end: float = 1e-6
    gradients: int = 200
    trials: int = 12
    stuck: float = 0.02
    cut: float = 0.3
    stride: float = 2.0
    apart: float = 0.3
    orders: tuple[int, ...] = (3, 5, 7, 9, 15, 25, 41, 61)
    most_nodes: int = 1000
    settled: float = 0.02
    looked: int = 32
    far: float = 1.6
    wider: float = 1.2
    dof: float = 5.0
    k_hat: float = 0.5
    sides: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    longest: float = 5.0
    again: int = 2
    grid_above: float = 0.3
    grid_points: int = 13
    grid_below: float = 5.0
    grid_beyond: float = 2.5
    grid_steps: int = 8
    grid_close: float = 5e-3
    grid_dof: float = 8.0
    tail: float = 15.0
    cells: int = 4000
    candidates: int = 8
    candidates_wider: float = 1.8
    integration: Integration = Integration()
    exact: float | None = 1e-8

    def asked(self, draws: int | None = None, nodes: int | None = None) -> Self:
        """These settings with what a person has asked for.

        Args:
            draws: the number of weighted draws; None for that of the settings.
            nodes: the number of quadrature nodes in each dimension; None for that of the settings.

        Returns:
            The settings.

        Raises:
            InputError: fewer than 100 draws, or no node.
        """
        new = self
        if draws is not None:
            count = read_size("draws", draws, "is the number of weighted draws of the globals", at_least=100)
            new = replace(new, draws=count, at_once=0, most_draws=max(count, self.most_draws))
        if nodes is not None:
            what = "is the number of quadrature nodes in each dimension of the effects"
            new = replace(new, nodes=read_size("nodes", nodes, what, at_least=1))
        return new


# ------------------------------------------------------------------------------------------------- the mode


class Found(NamedTuple):
    """The mode of the globals, as a search has left it."""

    theta: Tensor  # (dim,)
    at: Valued  # what the log joint says there
    root: Tensor  # C with C Cᵀ about the inverse of the Hessian of -log p(y, θ), (dim, dim)
    converged: bool  # whether gᵀH⁻¹g has fallen below the end
    reason: str  # why the search has ended, one sentence


def search(joint: LogJoint, settings: FitSettings, begin: tuple[Tensor, Tensor] | None = None) -> Found:
    """Find the mode of a log joint of the globals, by BFGS from about its Hessian, or by Newton's method."""
    theta, modes = joint.start() if begin is None else begin
    spent = joint.gradients
    here = joint.with_gradient(theta[None], modes)
    root, fresh = inverse_root(joint.curvature(theta, here.modes)), True
    B = root @ root.mT

    def ended(converged: bool, reason: str) -> Found:
        factor, ok = linalg.cholesky(B)
        return Found(theta, here, factor if bool(ok) else root, converged, reason)

    while joint.gradients - spent < settings.gradients:
        value, slope = -float(here.value[0]), -here.gradient[0]
        step = -(B @ slope)
        left = -float(slope @ step)
        rounding = _ROUNDING * torch.finfo(theta.dtype).eps * abs(value)
        if not math.isfinite(left):
            return ended(False, "The log joint is not finite any more: perhaps the posterior has no mode.")
        if left < max(settings.end, rounding):
            if joint.refine(theta, False):
                here = joint.with_gradient(theta[None], here.modes)
                continue
            return ended(True, f"A step of Newton's method promises {0.5 * left:.1g} nats.")
        longest = float(step[joint.scales :].abs().max()) if len(step) > joint.scales else 0.0
        size = full = min(1.0, settings.stride / max(longest, settings.stride))
        after: Valued | None = None
        for _ in range(settings.trials):
            trial = joint.with_gradient((theta + size * step)[None], here.modes)
            change = -float(trial.value[0]) - value
            if change <= -_ENOUGH * size * left + rounding:
                after = trial
                break
            curved = change + size * left  # of a parabola through both values and the slope
            size *= min(max(0.5 * size * left / curved, 0.1), 0.5) if math.isfinite(curved) and curved > 0 else 0.25
        close = left < settings.settled
        if after is None or (close and size < settings.stuck):
            if (fresh or close) and joint.refine(theta, True):
                here = joint.with_gradient(theta[None], here.modes)
                continue
            if fresh or close:
                return ended(close, f"No step lessens the energy further; {0.5 * left:.1g} nats are promised.")
            root, fresh = inverse_root(joint.curvature(theta, here.modes)), True
            B = root @ root.mT
            continue
        cut = size < settings.cut * full
        moved, turned = size * step, -after.gradient[0] - slope
        theta, here, inner = theta + moved, after, float(moved @ turned)
        if joint.newton or cut or inner <= _FLAT * size * left:  # exact, or no longer that of before
            root, fresh = inverse_root(joint.curvature(theta, here.modes)), True
            B = root @ root.mT
        else:
            along, across = (1 + turned @ B @ turned / inner) * moved, B @ turned
            B, fresh = B + 2 * _symmetric(torch.outer(moved, 0.5 * along - across)) / inner, False
    return ended(False, f"The search has spent {settings.gradients} gradients: perhaps the posterior has no mode.")


def _symmetric(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix + matrix.mT)


def _inverse(matrix: Tensor) -> Tensor:
    """The inverse of square matrices; not finite where there is none."""
    return torch.linalg.inv_ex(matrix).inverse


def _lower(root: Tensor) -> Tensor:
    """Lower triangular roots of the same products, with diagonals that are not negative."""
    lower = torch.linalg.qr(root.mT, mode="r").R.mT
    return lower * torch.where(lower.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(lower)[..., None, :]


# ------------------------------------------------------------------------------------------------- proposals


class Proposal(Protocol):
    """A distribution of the globals that draws are weighted from."""

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw θ, (count, dim)."""

    def log_density(self, theta: Tensor) -> Tensor:
        """The log density of each, (S,)."""

    def modes(self, theta: Tensor) -> Tensor:
        """About the modes of the effects, (n, S, r)."""


class Frame(NamedTuple):
    """The globals about their mode, and how the modes of the effects follow."""

    theta: Tensor  # the mode, (dim,)
    root: Tensor  # R with R Rᵀ the inverse of the Hessian, (dim, dim)
    effects: Tensor  # modes of the effects at the mode, (n, 1, r)
    slopes: Tensor | None  # their derivatives by θ, (n, dim, r); None without effects

    @classmethod
    def around(cls, joint: LogJoint, found: Found, apart: float) -> Self:
        """Take central differences of gradients, along the columns of the root of the search."""
        if joint.newton:
            return cls(found.theta, found.root, found.at.modes, None)
        C, dim = found.root, len(found.theta)
        ends = joint.with_gradient(
            torch.cat([found.theta + apart * C.mT, found.theta - apart * C.mT]), found.at.modes.expand(-1, 2 * dim, -1)
        )
        inner = _symmetric((ends.gradient[dim:] - ends.gradient[:dim]) @ C / (2 * apart))  # Cᵀ H C
        along = (ends.modes[:, :dim] - ends.modes[:, dim:]) / (2 * apart)
        slopes = _inverse(C).mT @ along
        return cls(found.theta, C @ inverse_root(inner), found.at.modes, slopes)

    def draw_near(self, settings: FitSettings, generator: torch.Generator) -> Tensor:
        """Values of the globals near their mode, at which the number of nodes is looked at, (S, dim)."""
        z = draw_normal(settings.looked, len(self.theta), generator=generator, like=self.theta)
        return self.theta + settings.far * z @ self.root.mT

    def modes(self, theta: Tensor) -> Tensor:
        """The modes of the effects to first order, (n, S, r)."""
        if self.slopes is None:
            return self.effects.expand(-1, len(theta), -1)
        return self.effects + (theta - self.theta) @ self.slopes


class Mixture(NamedTuple):
    """½ N(m, R Rᵀ) + ½ of a wider t, drawn in equal parts, of other lengths on either side of m (Geweke 1989)."""

    mean: Tensor  # (dim,)
    root: Tensor  # R, (dim, dim)
    sides: Tensor  # factors of the columns of R below and above, (2, dim)
    frame: Frame
    wider: float
    dof: float

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw θ, (count, dim); noise is drawn on the CPU in float64, the same on every device."""
        half = count // 2
        share = torch.cat([spread_evenly(some, len(self.mean), generator) for some in (half, count - half)])
        below, above = self.sides.double().cpu()
        apart = share - below / (below + above)  # a share of each side, from which a half of the normal one is read
        part = apart.abs() / torch.where(apart > 0, above, below) * (below + above)
        z = torch.where(apart > 0, above, -below) * torch.special.ndtri(0.5 + 0.5 * part)
        z[half:] *= self.wider * _stretch(count - half, self.dof, generator)[:, None]
        return self.mean + z.to(self.mean) @ self.root.mT

    def log_density(self, theta: Tensor) -> Tensor:
        """The log density of each, (S,)."""
        z, dim = (theta - self.mean) @ _inverse(self.root).mT, len(self.mean)
        square = (z / torch.where(z > 0, self.sides[1], self.sides[0])).square().sum(-1)
        volume = torch.linalg.slogdet(self.root).logabsdet + self.sides.mean(0).log().sum()
        return mixture_log_density(square, dim, self.wider, self.dof) - volume

    def modes(self, theta: Tensor) -> Tensor:
        """About the modes of the effects, (n, S, r)."""
        return self.frame.modes(theta)


def spread_evenly(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Points of the unit cube that are spread evenly, (count, dim): Sobol's, scrambled by the generator."""
    sobol, seed = torch.quasirandom.SobolEngine, int(torch.randint(2**31, (), generator=generator, device="cpu"))
    if dim > sobol.MAXDIM:
        return torch.rand(count, dim, generator=generator, dtype=torch.float64, device="cpu")
    share = sobol(dim, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    least = torch.finfo(torch.float64).eps
    return share.clamp(least, 1 - least)


def _stretch(count: int, dof: float, generator: torch.Generator) -> Tensor:
    """Factors that make normal draws those of a t distribution, (count,)."""
    gamma = torch._standard_gamma(
        torch.full((count,), 0.5 * dof, dtype=torch.float64, device="cpu"), generator=generator
    )
    return (0.5 * dof / gamma).sqrt()


def mixture_log_density(square: Tensor, dim: int, wider: float, dof: float) -> Tensor:
    """The log density of ½ N(0, I) + ½ t, so much wider, at a squared length."""
    gaussian = -0.5 * square - 0.5 * dim * math.log(2 * math.pi)
    return torch.logaddexp(gaussian, _student(square / wider**2, dim, dof) - dim * math.log(wider)) - math.log(2)


def _student(square: Tensor, dim: int, dof: float) -> Tensor:
    """The log density of a t distribution at a squared length."""
    size = math.lgamma(0.5 * (dof + dim)) - math.lgamma(0.5 * dof) - 0.5 * dim * math.log(dof * math.pi)
    return size - 0.5 * (dof + dim) * torch.log1p(square / dof)


class Grid:
    """A proposal for one effect a group: log τ by its marginal density on a grid, the other globals given it a t.

    log p(t | y) = log p(y, mode, t) - ½ log|H| + constant at points of a grid, by Laplace; monotone cubics (Fritsch and
    Carlson 1980) between them, beyond them lines with the slope of the end on the right and 1, that of τ, on the left.
    """

    def __init__(self, joint: LogJoint, frame: Frame, settings: FitSettings) -> None:
        self.place, self.settings = joint.scales, settings
        place, theta = self.place, frame.theta
        keep = torch.arange(len(theta), device=theta.device) != place
        inverse = _inverse(frame.root)
        precision = inverse.mT @ inverse
        chord = inverse_root(precision[keep][:, keep])
        unit = min(1.0, float(frame.root[place].norm()))
        ends = (-settings.grid_below * unit, settings.grid_beyond * unit)
        self.t = theta[place] + torch.linspace(*ends, settings.grid_points, dtype=theta.dtype, device="cpu").to(theta)
        points, modes, root = self._modes(joint, frame, keep, chord, precision)
        # own Hessians, by differences along the columns of the roots
        dim, G, h = int(keep.sum()), len(self.t), settings.apart
        moves = h * torch.cat([root.mT, -root.mT], -2)  # (G, 2 dim, dim)
        around = points[:, None].repeat(1, 2 * dim, 1)
        around[..., keep] += moves
        sides = joint.with_gradient(around.flatten(0, 1), modes.repeat_interleave(2 * dim, 1))
        gradient = sides.gradient[:, keep].unflatten(0, (G, 2 * dim))
        inner = (gradient[:, dim:] - gradient[:, :dim]) @ root / (2 * h)
        own = torch.stack([root[k] @ inverse_root(_symmetric(inner[k])) for k in range(G)])
        at = joint.with_gradient(points, modes)
        slope = at.gradient[:, keep]
        promised = (own.mT @ slope[..., None])[..., 0]
        self.mean = points[:, keep] + (own @ promised[..., None])[..., 0]
        self.root = _lower(own)
        self.effects, self.keep, self.dim = at.modes, keep, dim
        above, below = sides.modes.unflatten(1, (G, 2 * dim)).split(dim, 2)
        self.slopes = _inverse(root).mT @ ((above - below) / (2 * h))  # (n, G, dim, r)
        self.at = points[:, keep]
        log_p = at.value + 0.5 * promised.square().sum(-1) + self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self._density(log_p)

    def _modes(
        self, joint: LogJoint, frame: Frame, keep: Tensor, chord: Tensor, precision: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The modes of the other globals given each point, by damped chord steps."""
        place, apart = self.place, (self.t - frame.theta[self.place]).clamp(-1, 1)
        follow = -(chord @ (chord.mT @ precision[keep, place]))
        points = frame.theta.repeat(len(self.t), 1)
        points[:, place] = self.t
        points[:, keep] += apart[:, None] * follow
        at = joint.with_gradient(points, frame.modes(points))
        size = torch.ones_like(self.t)
        for _ in range(self.settings.grid_steps):
            promised = at.gradient[:, keep] @ chord
            if bool((0.5 * promised.square().sum(-1) < self.settings.grid_close).all()):
                break
            new = points.clone()
            new[:, keep] += size[:, None] * (promised @ chord.mT)
            there = joint.with_gradient(new, at.modes)
            better = there.value >= at.value
            points = torch.where(better[:, None], new, points)
            at = Valued(
                torch.where(better, there.value, at.value),
                torch.where(better[:, None], there.gradient, at.gradient),
                torch.where(better[None, :, None], there.modes, at.modes),
                at.of_groups,
            )
            size = torch.where(better, (2 * size).clamp_max(1.0), 0.5 * size)
        return points, at.modes, chord.expand(len(points), -1, -1)

    def _density(self, log_p: Tensor, least: float = -200.0) -> None:
        """The density of t in cells, and its distribution function."""
        # least: nats below the largest, where a density is 0
        t, step = self.t, float(self.t[1] - self.t[0])
        log_p = (log_p - log_p.max()).clamp_min(least)
        slope = (log_p[1:] - log_p[:-1]) / step
        left, right = slope[:-1], slope[1:]
        harmonic = torch.where(left * right > 0, 2 * left * right / (left + right), 0.0)
        d = torch.cat([torch.ones_like(slope[:1]), harmonic, slope[-1:].clamp_max(-1.0)])
        begin, end = (float(t[k] - self.settings.tail / d[k]) for k in (0, -1))
        edges = torch.linspace(begin, end, self.settings.cells + 1, dtype=t.dtype, device="cpu").to(t)
        x = 0.5 * (edges[1:] + edges[:-1])
        k = ((x - t[0]) / step).floor().long().clamp(0, len(t) - 2)
        s = ((x - t[k]) / step).clamp(0.0, 1.0)
        value = (
            (1 + 2 * s) * (1 - s).square() * log_p[k]
            + s * (1 - s).square() * step * d[k]
            + s.square() * (3 - 2 * s) * log_p[k + 1]
            + s.square() * (s - 1) * step * d[k + 1]
        )
        value = value + d[0] * (x - t[0]).clamp_max(0.0) + d[-1] * (x - t[-1]).clamp_min(0.0)
        width = float(edges[1] - edges[0])
        self.edges, self.width, self.log_cell = edges, width, value.log_softmax(0) - math.log(width)
        self.cumulative = torch.cat([value.new_zeros(1), value.softmax(0).cumsum(0)])

    def _between(self, t: Tensor, table: Tensor) -> Tensor:
        """Interpolate a table (G, ..) linearly at t (S,)."""
        x = ((t - self.t[0]) / (self.t[1] - self.t[0])).clamp(0, len(self.t) - 1)
        k = x.floor().long().clamp(0, len(self.t) - 2)
        share = (x - k).reshape(-1, *(1,) * (table.ndim - 1))
        return (1 - share) * table[k] + share * table[k + 1]

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw θ, (count, dim), in random order."""
        order = torch.arange(count, dtype=torch.float64, device="cpu")
        places = (order + draw_uniform(count, generator=generator, like=order)) / count
        places = places[torch.randperm(count, generator=generator, device="cpu")].to(self.t) * self.cumulative[-1]
        cell = (torch.searchsorted(self.cumulative, places) - 1).clamp(0, len(self.log_cell) - 1)
        inner = (places - self.cumulative[cell]) / (self.cumulative[cell + 1] - self.cumulative[cell]).clamp_min(1e-300)
        t = self.edges[cell] + self.width * inner.clamp(0, 1)
        z = draw_normal(count, self.dim, generator=generator, like=order)
        z = (z * _stretch(count, self.settings.grid_dof, generator)[:, None]).to(t)
        theta = t.new_empty(count, self.dim + 1)
        theta[:, self.place] = t
        theta[:, self.keep] = self._between(t, self.mean) + (self._between(t, self.root) @ z[..., None])[..., 0]
        return theta

    def log_density(self, theta: Tensor) -> Tensor:
        """The log density of each, (S,)."""
        t = theta[:, self.place]
        cell = ((t - self.edges[0]) / self.width).floor().long().clamp(0, len(self.log_cell) - 1)
        root = self._between(t, self.root)
        apart = (theta[:, self.keep] - self._between(t, self.mean))[..., None]
        z = torch.linalg.solve_triangular(root, apart, upper=False)
        volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self.log_cell[cell] + _student(z[..., 0].square().sum(-1), self.dim, self.settings.grid_dof) - volume

    def modes(self, theta: Tensor) -> Tensor:
        """About the modes of the effects, (n, S, r), linear in the other globals and between the points."""
        t = theta[:, self.place]
        apart = theta[:, self.keep] - self._between(t, self.at)
        slopes = self._between(t, self.slopes.transpose(0, 1))  # (S, n, dim, r)
        follow = torch.einsum("sd,sndr->nsr", apart, slopes)
        return self._between(t, self.effects.transpose(0, 1)).transpose(0, 1) + follow


# ------------------------------------------------------------------------------------------------- weights


class Weighing(NamedTuple):
    """Draws of one proposal with their weights."""

    proposal: Proposal
    theta: Tensor  # (S, dim)
    log_weights: Tensor  # log p(y, θ) - log q(θ), (S,)
    weighted: Weighted

    @classmethod
    def of(cls, proposal: Proposal, theta: Tensor, log_weights: Tensor) -> Self:
        """Smooth the weights; where none is positive, draws have equal weights and a k-hat of infinity."""
        smooth = smoothed(log_weights)
        k_hat, effective, weights = float(smooth.k_hat), float(smooth.effective), smooth.log_weights.exp().to(theta)
        if not bool(weights.isfinite().all()):
            k_hat, effective, weights = math.inf, 0.0, torch.full_like(weights, 1 / len(weights))
        return cls(proposal, theta, log_weights, Weighted(theta, weights, k_hat, effective))

    def equally(self) -> Self:
        """The Gaussian half of the draws with equal weights, for where weights are of no use."""
        theta = self.theta[: len(self.theta) // 2]
        weights = torch.full_like(theta[:, 0], 1 / len(theta))
        return self._replace(weighted=self.weighted._replace(theta=theta, weights=weights))

    def fine(self, settings: FitSettings) -> bool:
        """Whether nothing better is looked for."""
        return self.weighted.k_hat <= settings.k_hat and self.weighted.effective >= settings.effective

    @property
    def log_evidence(self) -> float:
        """The logarithm of the mean weight."""
        return float(torch.logsumexp(self.log_weights, 0)) - math.log(len(self.log_weights))

    @property
    def merit(self) -> tuple[bool, float]:
        """What is compared between proposals."""
        return self.weighted.k_hat < USELESS, self.weighted.effective / len(self.theta)


class Weigher:
    """Draws proposals and weights them by a log joint, whose mode, curvature and value at the mode are known."""

    def __init__(
        self, joint: LogJoint, frame: Frame, value: float, settings: FitSettings, generator: torch.Generator
    ) -> None:
        self.joint, self.frame, self.value, self.settings, self.generator = joint, frame, value, settings, generator

    def log_joint(self, theta: Tensor, proposal: "Proposal | Frame") -> Tensor:
        """The log joint of draws, some at a time, (S,)."""
        parts = theta.split(self.joint.together)
        return torch.cat([self.joint.log_joint(part, proposal.modes(part)) for part in parts])

    def weigh(self, proposal: Proposal, count: int, before: Weighing | None = None) -> Weighing:
        """Draw and weight some more draws of a proposal."""
        theta = proposal.sample(count, self.generator)
        log_weights = finite(self.log_joint(theta, proposal) - proposal.log_density(theta))
        if before is not None:
            theta, log_weights = torch.cat([before.theta, theta]), torch.cat([before.log_weights, log_weights])
        return Weighing.of(proposal, theta, log_weights)

    def of_mixture(self, mean: Tensor, root: Tensor, count: int, sides: Tensor | None = None) -> Weighing:
        """Weight draws of a Gaussian and a wider t distribution."""
        sides = torch.ones_like(root[:1]).expand(2, -1) if sides is None else sides
        return self.weigh(Mixture(mean, root, sides, self.frame, self.settings.wider, self.settings.dof), count)

    def from_mixture(self, count: int) -> Weighing:
        """Weight draws about the mode; where they are not fine, of unequal sides, and of the weighted moments."""
        frame, settings = self.frame, self.settings
        best = self.of_mixture(frame.theta, frame.root, count)
        if not best.fine(settings):
            root, sides = self._sides()
            other = self.of_mixture(frame.theta, root, count, sides)
            best = max(best, other, key=lambda one: one.merit)
        for _ in range(settings.again):
            draws = best.weighted
            if best.fine(settings) or draws.effective < 3 * len(frame.theta):  # too few for a covariance
                break
            mean, own = moments(draws.theta, draws.weights)
            if own is None:
                break
            other = self.of_mixture(mean, own, count)
            best = max(best, other, key=lambda one: one.merit)
        return best

    def _sides(self) -> tuple[Tensor, Tensor]:
        """A root whose first columns move scales and the likelihood, and how long its columns are on either side."""
        frame, dim = self.frame, len(self.frame.theta)
        order = torch.arange(dim, device=frame.theta.device).roll(-self.joint.scales)
        root = torch.empty_like(frame.root)
        root[order] = _lower(frame.root[order])
        lengths = torch.tensor(self.settings.sides, dtype=root.dtype, device=root.device)
        moves = torch.stack([-lengths, lengths])[..., None, None] * root.mT  # (2, L, dim, dim)
        theta = (frame.theta + moves).flatten(0, 2)
        fall = self.value - self.log_joint(theta, frame).reshape(2, len(lengths), dim)
        # of a normal density the fall at δ lengths is ½δ²
        sides = lengths[:, None] / (2 * fall.clamp_min(self.settings.settled)).sqrt()
        return root, sides.amax(1).clamp(0.5, self.settings.longest)

    def enough(self, found: Weighing, progress: bool) -> Weighing:
        """Double the draws of a proposal until enough of them are effective."""
        settings = self.settings
        with tqdm(total=settings.effective, desc="effective draws", disable=not progress, leave=False) as bar:
            while found.weighted.effective < settings.effective and len(found.theta) < settings.most_draws:
                more = min(len(found.theta), settings.most_draws - len(found.theta))
                found = self.weigh(found.proposal, more, found)
                bar.update(max(0, int(found.weighted.effective) - bar.n))
        return found


def moments(theta: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """The mean of weighted draws and a root of their covariance, (dim, dim); None where it is singular."""
    mean = weights @ theta
    apart = theta - mean
    root, ok = linalg.cholesky(apart.mT @ (weights[:, None] * apart))
    return mean, root if bool(ok) else None


# ------------------------------------------------------------------------------------------------- the posterior


def enough_nodes(joint: Integrated, frame: Frame, settings: FitSettings, generator: torch.Generator) -> int:
    """The smallest number of nodes with which more make no difference between draws near the posterior."""
    if settings.nodes is not None:
        return settings.nodes
    if joint.exact or not joint.r:
        return 1
    theta = frame.draw_near(settings, generator)
    orders = [order for order in settings.orders if order**joint.r <= settings.most_nodes]
    modes, found = frame.modes(theta), list[Tensor]()
    for place, order in enumerate(orders[:-1]):
        found += [joint.values(theta, modes, more, one_step=True).value for more in orders[len(found) : place + 3]]
        change = torch.stack(found[place + 1 :]) - found[place]
        if float((change - change.mean(1, keepdim=True)).abs().max()) < settings.settled:
            return order
    return orders[-1]


_EQUALLY = " have equal weights"
_NEAREST, _AT_MODE = "the nearest Gaussian", f"a Gaussian at their mode{_EQUALLY}"


class IntegratedPosterior(Posterior):
    """The posterior of the globals of a model with at most one factor."""

    def __init__(
        self,
        joint: Integrated,
        over: LogJoint,
        found: Found,
        frame: Frame,
        settings: FitSettings,
        generator: torch.Generator,
        progress: bool,
    ) -> None:
        self.joint, self.coordinates, self.settings = joint, joint.coordinates, settings
        self.mode, self.nodes = found.theta, joint.draw_nodes  # of the scales alone where coefficients are integrated
        self.near = frame if over is joint else Frame(found.theta, frame.root, joint.start()[1], None)
        self.converged, self.reason = found.converged, found.reason
        self.gradients = over.gradients
        weigher = Weigher(over, frame, float(found.at.value[0]), settings, generator)
        best, how = self._drawn(weigher, over, found, progress)
        self.weighted = best.weighted._replace(theta=over.completed(best.weighted.theta, generator))
        self.log_evidence = best.log_evidence + self._correction(found)
        self.method = self._said(how, over is joint)

    def _drawn(self, weigher: Weigher, over: LogJoint, found: Found, progress: bool) -> tuple[Weighing, str]:
        """Draws of the proposal that fits best, and its name."""
        joint, settings, frame = self.joint, self.settings, weigher.frame
        about_mode = "a Gaussian and a wider t distribution about their mode"
        count = max(settings.draws, settings.several_draws) if joint.r > 1 else settings.draws
        cheap = settings.at_once // max(1, len(self.coordinates.X) * self.nodes**joint.r)
        count = max(count, min(settings.most_draws, cheap))
        if not found.converged:
            return weigher.of_mixture(frame.theta, frame.root, count), about_mode
        wide = joint.r == 1 and float(frame.root[over.scales].norm()) > settings.grid_above
        tried = [] if wide else [(weigher.from_mixture(count), about_mode)]
        if joint.r == 1 and (wide or tried[0][0].weighted.k_hat > settings.k_hat):
            tried.append((weigher.weigh(Grid(over, frame, settings), count), "a grid over the log sd of effects"))
            if wide and not tried[0][0].fine(settings):
                tried.append((weigher.from_mixture(count), about_mode))
        best, how = max(tried, key=lambda one: one[0].merit)
        if best.weighted.k_hat <= USELESS:
            return weigher.enough(best, progress), how
        if joint.r or over is not joint:
            best = weigher.enough(best, progress)
            if best.weighted.effective >= settings.effective:
                return best, how
            return weigher.of_mixture(frame.theta, frame.root, 2 * count).equally(), _AT_MODE
        best = weigher.of_mixture(*joint.nearest(found.theta, frame.root, weigher.generator), 2 * count)
        if best.weighted.k_hat <= USELESS:
            return weigher.enough(best, progress), _NEAREST
        return best.equally(), f"{_NEAREST}{_EQUALLY}"

    def _correction(self, found: Found) -> float:
        """The error of the quadrature at the mode, which is that of all draws, by the next order."""
        orders = [order for order in self.settings.orders if order > self.nodes]
        if self.joint.exact or not self.joint.r or not orders:
            return 0.0
        fewer, more = (self.joint.values(found.theta[None], found.at.modes, k).value for k in (self.nodes, orders[0]))
        return float(more - fewer) if bool((more - fewer).isfinite()) else 0.0

    def _said(self, how: str, of_all: bool) -> str:
        """What was computed, one sentence."""
        what = " and ".join(["random effects"] * (self.joint.r > 0) + ["coefficients"] * (not of_all))
        weighted = f"draws of {how} are weighted to the posterior."
        if how.endswith(_EQUALLY):
            weighted = f"draws of {how}, since weights to the posterior are of no use."
        if not what:
            return f"{weighted[0].upper()}{weighted[1:]}"
        power = f"{self.nodes}" if self.joint.r == 1 else f"{self.nodes}^{self.joint.r}"
        nodes = f"adaptive Gauss-Hermite quadrature with {power} node{'s' * (power != '1')}"
        by = "in closed form" if self.joint.exact or not of_all else f"by {nodes}"
        return f"{what.capitalize()} are integrated out {by}; {weighted}"

    def effects(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the effects of all groups given the globals, (S, n, r), of centred and scaled columns."""
        if not self.joint.r:
            return ()
        one = self.joint.exact
        candidates, wider = (1, 1.0) if one else (self.settings.candidates, self.settings.candidates_wider)
        parts = theta.split(self.joint.together)
        drawn = [self.joint.draw(part, self.near.modes(part), candidates, wider, generator) for part in parts]
        return (torch.cat([self.joint.effects(u, part) for u, part in zip(drawn, parts, strict=True)]),)

    def of_groups(self, theta: Tensor) -> Tensor:
        """Compute log p(y_i | θ) of the rows of each group, (S, n); without a factor of each row."""
        parts = theta.split(self.joint.together)
        found = [self.joint.values(part, self.near.modes(part), self.nodes).of_groups for part in parts]
        return torch.cat(found, 1)[self.joint.place].mT


# ------------------------------------------------------------------------------------ several factors


@dataclass(frozen=True)
class Correction:
    """How Laplace's approximation is corrected: the numbers that several factors need beside `FitSettings`.

    Attributes:
        pairs: numbers of pairs of normal draws that are tried. With 4 the means of crossed binary data, 20 by 20 in 120
            rows, varied by .02 to .06 sds between seeds, with 8 by .02 to .04, 3,000 draws of the globals alone by .02.
        agreed: nats of the standard deviation, between draws near the posterior, by which two sets of pairs may differ:
            it moves a mean by half as many sds. One set in ten is worse than the others, so that few pairs agree by
            chance: the smallest number is 4.
        few: nodes, in each dimension, with which groups are integrated given each draw of the others. The difference
            to the nodes of the fit is taken at the mode of the others alone: what it misses had a standard deviation
            of .007 to .022 nats between draws near the posterior, in four sets of crossed binary data where that of
            the correction itself was .1 to .6.
        end: nats that the last step of Newton's method towards the modes of the effects may promise.
        trust: the same where draws are weighted: what is left after this step is about its square.
        mirrored: standard deviations at most that are drawn as they are and mirrored at 0; densities add over signs.
        candidates: of the effects of each draw, of which one is taken.
    """

    pairs: tuple[int, ...] = (4, 8, 16, 32)
    agreed: float = 0.1
    few: int = 2
    end: float = 1e-8
    trust: float = 0.02
    mirrored: int = 6
    candidates: int = 16


LARGEST_ROOT = 4_000  # crossed effects, whose matrix is dense: a factor of it takes about a second
MOST_ENTRIES = 2**27  # of a matrix in the pattern: one gigabyte


class _Pair(NamedTuple):
    """The block of two factors in the stored matrix: where the entries of each row stand."""

    left: int  # the factor of the rows of the block
    right: int  # of its columns
    places: Tensor  # (N · r_left · r_right,)


def holds(inner: Tensor, outer: Tensor) -> bool:  # inner (N,), outer (N,)
    """Whether all rows of each inner group are of one outer group."""
    of = outer.new_zeros(int(inner.max()) + 1)
    of[inner] = outer
    return bool((of[inner] == outer).all())


def chain_of(factors: Sequence[Factor]) -> tuple[int, ...]:
    """Find the chain of nested factors, leaves first, that leaves the fewest effects in the root."""
    sizes = [len(of.levels) * of.Z.shape[1] for of in factors]
    order = sorted(range(len(factors)), key=lambda k: -len(factors[k].levels))
    chains = []
    for leaf in order:
        chain = [leaf]
        for k in order:
            if k not in chain and holds(factors[chain[-1]].groups, factors[k].groups):
                chain.append(k)
        chains.append(tuple(chain))
    return max(chains, key=lambda chain: sum(sizes[k] for k in chain))


class Arranged:
    """The effects u of all groups of K ≥ 1 factors, as the coordinates of a forest."""

    def __init__(self, factors: Sequence[Factor]) -> None:
        self.groups = [of.groups for of in factors]
        self.n, self.r = [len(of.levels) for of in factors], [of.Z.shape[1] for of in factors]
        self.chain = chain_of(factors)  # the factors that make the levels of the forest, leaves first
        self.crossed = tuple(k for k in range(len(factors)) if k not in self.chain)  # those in its root
        self.places = [slice(0)] * len(factors)  # of the effects of each factor in u
        start = 0
        for k in (*self.chain, *self.crossed):
            self.places[k] = slice(start, start + self.n[k] * self.r[k])
            start = self.places[k].stop
        self.dim, self.root = start, sum(self.n[k] * self.r[k] for k in self.crossed)
        self._check_size()
        sizes = [self.r[k] for k in self.chain for _ in range(self.n[k])]
        self.structure = Forest(self._parents(), (*sizes, self.root) if self.root else tuple(sizes))
        self.pairs = self._pairs()

    def predictor(
        self,
        designs: Sequence[Tensor],  # of each factor, (*batch, N, r)
        u: Tensor,  # (*batch, dim)
    ) -> Tensor:
        """Compute Σ_k a_kᵀu_k[group], (*batch, N)."""
        total = designs[0].new_zeros(())
        for a, at, groups, r in zip(designs, self.places, self.groups, self.r, strict=True):
            total = total + (u[..., at].unflatten(-1, (-1, r)).index_select(-2, groups) * a).sum(-1)
        return total

    def gathered(self, designs: Sequence[Tensor], slope: Tensor) -> Tensor:  # designs (S, N, r), slope (S, N)
        """Sum slope · a over the rows, (S, dim)."""
        S = len(slope)
        out = slope.new_zeros(S, self.dim)
        for a, at, groups, r in zip(designs, self.places, self.groups, self.r, strict=True):
            index = (groups[:, None] * r + torch.arange(r, device=groups.device) + at.start).flatten()
            out = out.scatter_add(-1, index.expand(S, -1), (slope[..., None] * a).flatten(-2))
        return out

    def gram(self, designs: Sequence[Tensor], weights: Tensor) -> Structured:  # designs (S, N, r), weights (S, N)
        """Sum weight · a aᵀ over the rows, (S, E), of squares at least the lower triangles."""
        S = len(weights)
        out = weights.new_zeros(S, *self.structure.shape)
        for pair in self.pairs:
            left, right = weights[..., None] * designs[pair.left], designs[pair.right]
            entries = (left[..., :, None] * right[..., None, :]).flatten(-3)
            out.scatter_add_(-1, pair.places.expand(S, -1), entries)
        return out

    def variances(
        self,
        designs: Sequence[Tensor],  # (S, N, r)
        V: Structured,  # (S, E), symmetric squares
    ) -> Tensor:
        """Compute aᵀVa of each row, (S, N), differentiable in the designs."""
        total = V.new_zeros(())
        for pair in self.pairs:
            left, right = designs[pair.left], designs[pair.right]
            block = V[:, pair.places].unflatten(-1, (-1, left.shape[-1], right.shape[-1]))
            term = ((block * right[..., None, :]).sum(-1) * left).sum(-1)
            total = total + (term if pair.left == pair.right else 2 * term)
        return total

    def _pairs(self) -> list[_Pair]:
        """The blocks on and below the diagonal that a row touches."""
        kinds, starts, end = self.structure.kinds, [], 0
        for kind in kinds:
            starts.append((end, end + kind.nodes * kind.size**2))
            end += kind.nodes * kind.size * (kind.size + kind.above)
        origin = self.dim - self.root
        pairs = []
        for level, k in enumerate(self.chain):
            r, groups, (square, border) = self.r[k], self.groups[k], starts[level]
            pairs.append(self._pair(k, k, square + groups * r * r, r))
            row = border + groups * kinds[level].above * r  # of the first ancestor
            for above in self.chain[level + 1 :]:
                pairs.append(self._pair(above, k, row, r))
                row = row + self.r[above] * r
            for c in self.crossed:
                inside = self.places[c].start - origin + self.groups[c] * self.r[c]
                pairs.append(self._pair(c, k, row + inside * r, r))
        for i, left in enumerate(self.crossed):
            for right in self.crossed[: i + 1]:
                row, column = (self.places[k].start - origin + self.groups[k] * self.r[k] for k in (left, right))
                pairs.append(self._pair(left, right, starts[-1][0] + row * self.root + column, self.root))
        return pairs

    def _pair(self, left: int, right: int, base: Tensor, stride: int) -> _Pair:
        """The block whose first entries stand at ``base`` (N,), its rows ``stride`` apart."""
        i, j = (torch.arange(self.r[k], device=base.device) for k in (left, right))
        return _Pair(left, right, (base[:, None, None] + i[:, None] * stride + j).flatten())

    def _parents(self) -> tuple[int, ...]:
        """The parent of each node: of a group the one that holds it, of the last level the root, if there is one."""
        parents: list[int] = []
        end = 0
        for level, k in enumerate(self.chain):
            end += self.n[k]
            if level + 1 == len(self.chain):
                parents += [end if self.root else -1] * self.n[k]
                continue
            held = self.groups[k].new_zeros(self.n[k])
            held[self.groups[k]] = self.groups[self.chain[level + 1]]
            parents += (end + held).tolist()
        return (*parents, -1) if self.root else tuple(parents)

    def _check_size(self) -> None:
        """Refuse what would not fit into the memory."""
        above, entries = self.root, self.root**2
        for k in reversed(self.chain):
            entries += self.n[k] * self.r[k] * (self.r[k] + above)
            above += self.r[k]
        if self.root > LARGEST_ROOT or entries > MOST_ENTRIES:
            raise InputError(
                f"crossed factors need a dense matrix of their effects, of at most {LARGEST_ROOT} rows, and at most "
                f"{MOST_ENTRIES} numbers with its borders to the groups of the largest factor; got {self.root} rows "
                f"and {entries} numbers. Leave out a factor, or group its levels more coarsely."
            )


# ------------------------------------------------------------------------------------------------- the log joint


class _Linear(NamedTuple):
    """The linear predictor as a function of u at S values of the globals."""

    designs: list[Tensor]  # Z_k C_k, (S, N, r)
    fixed: Tensor  # X a + offset, (S, N)
    phi: Tensor  # (S, nphi)


class ByLaplace(LogJoint):
    """log p(y, θ) of a design with K ≥ 1 factors, all constants included, by Laplace's approximation or corrected."""

    def __init__(
        self,
        design: Design,
        family: Family,
        coordinates: Coordinates,
        priors: Priors,
        settings: Integration | None = None,
        correction: Correction | None = None,
    ) -> None:
        self.family, self.coordinates, self.priors = family, coordinates, priors
        self.settings = Integration() if settings is None else settings
        self.correction = Correction() if correction is None else correction
        pairs = zip(design.factors, coordinates.Z, strict=True)
        scaled = design._replace(X=coordinates.X, factors=tuple(of._replace(Z=Z) for of, Z in pairs))
        self.rows = take_rows(scaled, design.weights > 0)
        self.X, self.offset, self.weights, self.y = self.rows.X, self.rows.offset, self.rows.weights, self.rows.y
        self.arranged = Arranged(self.rows.factors)
        self.forest = self.arranged.structure
        self.leaf = self.arranged.chain[0]  # the largest factor, or the innermost of nested ones, integrated by nodes
        self.r, self.others = self.arranged.r[self.leaf], self.arranged.dim > self.arranged.places[self.leaf].stop
        self.exact = family.name == "gaussian"  # log p(y, u) is a parabola in u
        self.gradients = 0
        self.scales = coordinates.p
        self.begin, unit = find_start(self.rows, family, coordinates)
        self.difference = torch.full_like(self.begin, self.settings.difference)
        self.difference[: self.scales] *= unit
        self.together = max(1, 10 * self.settings.at_once // self.arranged.dim)
        self.nodes = 1
        self.z: Tensor | None = None

    # ---------------------------------------------------------------------------- what the search asks for

    def start(self) -> tuple[Tensor, Tensor]:
        """Where a search begins: see `find_start`."""
        return self.begin, self.begin.new_zeros(self.arranged.dim, 1, 1)

    @torch.no_grad()
    def with_gradient(self, theta: Tensor, modes: Tensor) -> Valued:
        """Evaluate Laplace's approximation and its gradient, with modes found to their end."""
        theta, found = theta.detach(), torch.empty_like(modes)
        value, slope = theta.new_empty(len(theta)), torch.empty_like(theta)
        self.gradients += len(theta)
        for part in self._parts(len(theta), len(self.X)):
            u = self._modes(self._linear(theta[part]), modes[:, part, 0].mT, self.correction.end)[0]
            value[part], slope[part] = self._laplace(theta[part], u)
            found[:, part, 0] = u.mT
        value = finite(value)
        return Valued(value, slope.nan_to_num(0.0, 0.0, 0.0), found, value[None])

    def _laplace(
        self,
        theta: Tensor,  # (S, dim)
        u: Tensor,  # modes, (S, D)
    ) -> tuple[Tensor, Tensor]:
        """The log joint (S,) and its gradient (S, dim)."""
        with torch.enable_grad():
            theta = theta.clone().requires_grad_()
            of, at = self._linear(theta), u.clone().requires_grad_()
            f, slope, curvature = self._jet(of, at)
            with torch.no_grad():
                root, turned = self._factored(of, curvature)
                covariance = self.forest.gram(self.forest.inverse(root), torch.ones_like(u))
            trace = (curvature.clamp_min(0.0) * self.arranged.variances(of.designs, covariance)).sum()
            total = self.priors.log_prob(theta) - f.sum(-1)
            aim = total.sum() - 0.5 * trace
            if not self.exact:
                (change,) = torch.autograd.grad(trace, at, retain_graph=True)
                follow = 0.5 * self.forest.tsolve(turned, self.forest.solve(turned, change))
                aim = aim + (follow * self.arranged.gathered(of.designs, slope)).sum()
            (gradient,) = torch.autograd.grad(aim, theta)
        return total.detach() - 0.5 * u.square().sum(-1) - self.forest.log_det(root), gradient

    # ---------------------------------------------------------------------------- the modes of the effects

    def _parts(self, count: int, table: int) -> Iterator[slice]:
        """Ranges of values of the globals, so that neither matrices nor tables of rows are large."""
        most = max(1, self.settings.at_once // max(table, self.forest.shape[0]))
        for low in range(0, count, most):
            yield slice(low, min(count, low + most))

    def _linear(self, theta: Tensor) -> _Linear:
        """The linear predictor at values of the globals."""
        a, xis, phi = self.coordinates.split(theta)
        pairs = zip(self.rows.factors, xis, strict=True)
        designs = [linalg.small_product(of.Z, covariance_root(xi, of.Z.shape[1])) for of, xi in pairs]
        return _Linear(designs, a @ self.X.mT + self.offset, phi)

    def _jet(self, of: _Linear, u: Tensor) -> tuple[Tensor, ...]:
        """-log p(y | η, φ) of rows, times their weights, with two derivatives in η, (S, N)."""
        eta = of.fixed + self.arranged.predictor(of.designs, u)
        jet = self.family.jet(eta.mT, tuple(part[:, None] for part in self.y), of.phi)
        return tuple(self.weights * part.mT for part in jet)

    def _factored(self, of: _Linear, curvature: Tensor) -> tuple[Structured, Structured]:
        """The roots of H with curvatures clamped to ≥ 0, and of H as it is where that is positive definite."""

        def factor(weights: Tensor) -> tuple[Structured, Tensor]:
            H = self.arranged.gram(of.designs, weights)
            return self.forest.cholesky(self.forest.with_diagonal(H, self.forest.diagonal(H) + 1))

        root, _ = factor(curvature.clamp_min(0.0))
        if bool((curvature >= 0).all()):
            return root, root
        true, ok = factor(curvature)
        return root, torch.where(ok[:, None], true, root)

    def _quadratic(self, of: _Linear, u: Tensor) -> tuple[Tensor, Tensor, Structured]:
        """-log p(y, u | θ) up to a constant (S,), its gradient (S, D), and the root of its Hessian."""
        f, slope, curvature = self._jet(of, u)
        gradient = self.arranged.gathered(of.designs, slope) + u
        return f.sum(-1) + 0.5 * u.square().sum(-1), gradient, self._factored(of, curvature.clamp_min(0.0))[0]

    def _modes(self, of: _Linear, u: Tensor, end: float) -> tuple[Tensor, Structured]:
        """Damped Newton steps: û (S, D), and the root of the Hessian where the last step began."""
        value, gradient, root = self._quadratic(of, u)
        size = torch.ones_like(value)
        for _ in range(self.settings.steps):
            half = self.forest.solve(root, gradient)
            step = self.forest.tsolve(root, half)
            if self.exact or bool((0.5 * half.square().sum(-1) < end).all()):
                return u - step, root
            new = u - size[:, None] * step
            there = self._quadratic(of, new)
            better = there[0] <= value + 1e-12 * value.abs()  # what rounding leaves
            u, value, gradient, root = replace_where(better, (new, *there), (u, value, gradient, root))
            size = torch.where(better, (2 * size).clamp_max(1.0), 0.5 * size)
        return u, root

    # ---------------------------------------------------------------------------- corrected

    def log_joint(self, theta: Tensor, modes: Tensor) -> Tensor:
        """Evaluate the corrected log joint of draws, (S,)."""
        return self.values(theta, modes, self.nodes, True, self.z).value

    @torch.no_grad()
    def values(
        self,
        theta: Tensor,  # (S, dim)
        modes: Tensor,  # near the modes, (D, S, 1)
        nodes: int,
        one_step: bool = False,
        z: Tensor | None = None,  # (M, 1, D), normal draws, those of the largest factor unused; None: v = its mode
    ) -> Valued:
        """Compute log p(y, θ) by nodes for the largest factor and M draws of the others."""
        found, value = torch.empty_like(modes), theta.new_empty(len(theta))
        points = max(nodes**self.r, 0 if z is None else len(z) * min(self.correction.few, nodes) ** self.r)
        for part in self._parts(len(theta), len(self.X) * points):
            of = self._linear(theta[part])
            u, root = self._modes(of, modes[:, part, 0].mT, self.correction.trust if one_step else self.correction.end)
            if nodes == 1:  # Laplace's approximation
                f = self._jet(of, u)[0].sum(-1)
                value[part] = -f - 0.5 * u.square().sum(-1) - self.forest.log_det(root)
            else:
                value[part] = self._of_draws(of, u, root, torch.zeros_like(u)[None], nodes)[0]
            if z is not None:
                few = min(self.correction.few, nodes)
                drawn = self._of_draws(of, u, root, torch.cat([torch.zeros_like(z[:1]), z]).expand(-1, len(u), -1), few)
                value[part] += drawn[1:].logsumexp(0) - math.log(len(z)) - drawn[0]
            found[:, part, 0] = u.mT
        value = finite(value + self.priors.log_prob(theta))
        return Valued(value, torch.zeros_like(theta), found, value[None])

    def _of_draws(
        self,
        of: _Linear,
        u: Tensor,  # (S, D)
        root: Structured,  # T, (S, E)
        z: Tensor,  # (M, S, D)
        nodes: int,
    ) -> Tensor:
        """The logarithms of M estimates of p(y | θ), (M, S)."""
        leaves = self.arranged.places[self.leaf]
        z = z.clone()
        z[..., leaves] = 0.0
        points = u + self.forest.tsolve(root, z)
        own = points[..., leaves].square().sum(-1)
        node, log_w = normal_rule(nodes, self.r, u)
        integrand, _ = self._of_leaves(of, points, root, node.expand(*u.shape[:1], len(own), -1, -1)[:, :, None])
        inner = torch.logsumexp(integrand + log_w + 0.5 * node.square().sum(-1), -1).sum(0).mT
        others = 0.5 * (z.square().sum(-1) - points.square().sum(-1) + own)
        return inner + others - self.forest.log_det(root)

    def _of_leaves(
        self,
        of: _Linear,
        points: Tensor,  # u, (M, S, D), the groups of the largest factor at their means given the others
        root: Structured,  # (S, E)
        z: Tensor,  # (S, M, n or 1, K, r)
    ) -> tuple[Tensor, Tensor]:
        """log p(y_j | w, v, θ) - ½|w|² of groups j of the largest factor at w = mean + L⁻ᵀz, (n, S, M, K), and w."""
        leaf = self.leaf
        n, r, groups = self.arranged.n[leaf], self.arranged.r[leaf], self.arranged.groups[leaf]
        square = self.forest.parts(root)[0].square  # (S, n, r, r)
        apart = linalg.small_tsolve(square[:, None], z.mT.expand(-1, -1, n, -1, -1)).mT  # (S, M, n, K, r)
        w = points[..., self.arranged.places[leaf]].unflatten(-1, (n, r)).transpose(0, 1)[..., None, :] + apart
        eta = (of.fixed + self.arranged.predictor(of.designs, points)).permute(2, 1, 0)[..., None]  # (N, S, M, 1)
        design = of.designs[leaf].transpose(0, 1)[:, :, None, None, :]  # (N, S, 1, 1, r)
        eta = eta + (apart.permute(2, 0, 1, 3, 4)[groups] * design).sum(-1)
        log_p = self.family.log_prob(eta, tuple(part[:, None, None, None] for part in self.y), of.phi[:, None, None])
        log_p = self.weights[:, None, None, None] * log_p
        data = log_p.new_zeros(n, *log_p.shape[1:]).index_add(0, groups, log_p)
        w = w.permute(2, 0, 1, 3, 4)  # (n, S, M, K, r)
        return data - 0.5 * w.square().sum(-1), w

    # ---------------------------------------------------------------------------- effects given the globals

    @torch.no_grad()
    def draw(
        self,
        theta: Tensor,  # (S, dim)
        modes: Tensor,  # near the modes, (D, S, 1)
        generator: torch.Generator,
    ) -> tuple[Tensor, ...]:
        """Draw b = C u of the groups of each factor given the globals, (S, n, r).

        Of some candidates for the effects of all factors but the largest one is taken by its importance weight, and
        given these of some candidates for each group of the largest factor.
        """
        leaf, n, r, D = self.leaf, self.arranged.n[self.leaf], self.r, self.arranged.dim
        count = 1 if self.exact else self.correction.candidates
        drawn = theta.new_empty(len(theta), D)

        def best_of(log_weights: Tensor) -> Tensor:
            return choose(log_weights, draw_uniform(*log_weights.shape[:-1], generator=generator, like=theta))

        for part in self._parts(len(theta), len(self.X) * count * self.nodes**r):
            of = self._linear(theta[part])
            u, root = self._modes(of, modes[:, part, 0].mT, self.correction.end)
            z = draw_normal(count, len(u), D, generator=generator, like=theta)
            if self.others and count > 1:
                best = best_of(self._of_draws(of, u, root, z, min(self.correction.few, self.nodes)).mT)
                z = z.gather(0, best[None, :, None].expand(1, -1, D))
            else:
                z = z[:1]
            z[..., self.arranged.places[leaf]] = 0.0
            points = u + self.forest.tsolve(root, z)
            own = draw_normal(len(u), 1, n, count, r, generator=generator, like=theta)
            integrand, w = self._of_leaves(of, points, root, own)
            best = best_of(integrand[:, :, 0] + 0.5 * own[:, 0].square().sum(-1).transpose(0, 1))  # (n, S)
            w = w[:, :, 0].gather(2, best[..., None, None].expand(-1, -1, 1, r))[:, :, 0]
            drawn[part] = points[0]
            drawn[part, self.arranged.places[leaf]] = w.transpose(0, 1).flatten(1)
        xis = self.coordinates.split(theta)[1]
        pairs = zip(self.arranged.places, xis, self.arranged.r, strict=True)
        return tuple(
            linalg.small_product(drawn[:, at].unflatten(-1, (-1, r)), covariance_root(xi, r).mT) for at, xi, r in pairs
        )


# ------------------------------------------------------------------------------------------------- the posterior


class Mirrored(NamedTuple):
    """A proposal for standard deviations that may be 0, whose density is flat there: in τ itself, mirrored at 0."""

    inner: Mixture  # of x
    scales: Tensor  # which coordinates of θ are log τ of these, (k,)

    @classmethod
    def of(cls, before: Weighing, scales: Tensor, frame: Frame, settings: FitSettings) -> Self | None:
        """The proposal with the moments of weighted draws; None where they have no covariance."""
        x = before.theta.clone()
        x[:, scales] = x[:, scales].exp()
        mean, root = moments(x, before.weighted.weights)
        even = torch.ones_like(x[:1]).expand(2, -1)
        return None if root is None else cls(Mixture(mean, root, even, frame, settings.wider, settings.dof), scales)

    def again(self, draws: Weighing, settings: FitSettings) -> Self | None:
        """The same with the moments of other draws."""
        return self.of(draws, self.scales, self.inner.frame, settings)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw θ, (count, dim)."""
        x = self.inner.sample(count, generator)
        x[:, self.scales] = x[:, self.scales].abs().clamp_min(torch.finfo(x.dtype).tiny).log()
        return x

    def log_density(self, theta: Tensor) -> Tensor:
        """The log density of each, (S,)."""
        x = theta.clone()
        x[:, self.scales] = x[:, self.scales].exp()
        signs = torch.cartesian_prod(*[theta.new_tensor([1.0, -1.0])] * len(self.scales)).reshape(-1, len(self.scales))
        found = []
        for sign in signs:
            turned = x.clone()
            turned[:, self.scales] *= sign
            found.append(self.inner.log_density(turned))
        return torch.stack(found).logsumexp(0) + theta[:, self.scales].sum(-1)

    def modes(self, theta: Tensor) -> Tensor:
        """About the modes of the effects, (n, S, r)."""
        return self.inner.modes(theta)


class SeveralPosterior(Posterior):
    """The posterior of the globals of a model with K ≥ 1 factors."""

    def __init__(
        self, joint: ByLaplace, found: Found, frame: Frame, settings: FitSettings, seed: int, progress: bool
    ) -> None:
        self.joint, self.coordinates, self.settings = joint, joint.coordinates, settings
        self.mode, self.frame = found.theta, frame
        self.converged, self.reason, self.gradients = found.converged, found.reason, joint.gradients
        generator = torch.Generator().manual_seed(seed)
        weigher = Weigher(joint, frame, float(found.at.value[0]), settings, generator)
        mirrored = self._mirrored(weigher)
        self.agreed = self._refined(generator)  # whether other normal draws would give nearly the same weights
        weigher.value = float(joint.log_joint(frame.theta[None], frame.effects))
        best, how = self._weighted(weigher, mirrored)
        if found.converged and best.weighted.k_hat <= USELESS:
            best = weigher.enough(best, progress)
        self.weighted, self.log_evidence = best.weighted, best.log_evidence
        self.method = self._said(how)

    def _mirrored(self, weigher: Weigher) -> Mirrored | None:
        """A proposal where standard deviations may be 0, of draws weighted by Laplace's approximation."""
        sds, place, wide = self.frame.root.norm(dim=1).tolist(), self.coordinates.p, list[int]()
        for r, length in zip(self.coordinates.sizes, self.coordinates.lengths[1:], strict=False):
            wide += [k for k in range(place, place + r) if sds[k] > self.settings.grid_above]
            place += length
        if not wide:
            return None
        wide = sorted(wide, key=lambda k: -sds[k])[: self.joint.correction.mirrored]
        draws = weigher.of_mixture(self.frame.theta, self.frame.root, self.settings.draws)
        first = Mirrored.of(draws, torch.tensor(wide, device=draws.theta.device), self.frame, self.settings)
        return None if first is None else first.again(weigher.weigh(first, self.settings.draws), self.settings)

    def _refined(self, generator: torch.Generator) -> bool:
        """Choose nodes and normal draws by what they change between draws near the posterior."""
        joint, settings, frame = self.joint, self.settings, self.frame
        joint.nodes = enough_nodes(joint, frame, settings, generator)  # type: ignore[arg-type]  # it asks for r and values
        if joint.exact or not joint.others:
            return True
        theta = frame.draw_near(settings, generator)
        modes = joint.values(theta, frame.modes(theta), 1).modes
        for pairs in joint.correction.pairs:
            z = draw_normal(2, pairs, 1, joint.arranged.dim, generator=generator, like=theta)
            joint.z, other = (torch.cat([half, -half]) for half in z)
            one, two = (joint.values(theta, modes, joint.nodes, True, half).value for half in (joint.z, other))
            if float((one - two).std()) < joint.correction.agreed:
                return True
        return False

    def _weighted(self, weigher: Weigher, mirrored: Mirrored | None) -> tuple[Weighing, str]:
        """Draws with weights, and how they were drawn."""
        best, settings = None, self.settings
        for _ in range(settings.again):
            if mirrored is None or (best is not None and best.fine(settings)):
                break
            found = weigher.weigh(mirrored, settings.draws)
            best = found if best is None else max(best, found, key=lambda one: one.merit)
            mirrored = mirrored.again(found, settings)
        if best is None or not best.fine(settings):
            other = weigher.from_mixture(settings.draws)
            if best is None or other.merit > best.merit:
                return other, "a Gaussian and a wider t distribution about their mode"
        return best, "a Gaussian and a wider t distribution of standard deviations, mirrored at 0"

    def _said(self, how: str) -> str:
        """What was computed, one sentence."""
        joint = self.joint
        if joint.exact:
            by = "in closed form"
        else:
            leaf = joint.rows.factors[joint.leaf].name
            by = f"by Laplace's approximation, corrected by {joint.nodes} nodes for each group of {leaf}"
            if len(joint.rows.factors) > 1:
                by += f" and {0 if joint.z is None else len(joint.z)} draws of the other effects"
                by += "" if self.agreed else ", with which other draws do not quite agree"
        return f"Random effects are integrated out {by}; draws of {how} are weighted to the posterior."

    def effects(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the effects of all groups given the globals, (S, n, r), of centred and scaled columns."""
        parts = theta.split(self.joint.together)
        drawn = [self.joint.draw(part, self.frame.modes(part), generator) for part in parts]
        return tuple(torch.cat(of) for of in zip(*drawn, strict=True))

    def of_groups(self, theta: Tensor) -> Tensor:
        """Refuse: with several factors the rows of a group depend on those of others."""
        raise InputError("the log density of a group is for models of one grouping factor; this one has several.")


def integrate(
    design: Design,
    family: Family,
    coordinates: Coordinates,
    priors: Priors,
    settings: FitSettings,
    seed: int,
    progress: bool,
    correction: Correction | None = None,  # of several factors
) -> IntegratedPosterior | SeveralPosterior:
    """Find the posterior of the globals of a design, the effects of its grouping factors integrated out."""
    if len(design.factors) > 1:
        laplace = ByLaplace(design, family, coordinates, priors, settings.integration, correction)
        found = search(laplace, settings)
        return SeveralPosterior(laplace, found, Frame.around(laplace, found, settings.apart), settings, seed, progress)
    generator = torch.Generator().manual_seed(seed)
    joint = Integrated(design, family, coordinates, priors, settings.integration)
    over: LogJoint = Closed(joint) if Closed.fits(joint) else joint
    found = search(over, settings)
    frame = Frame.around(over, found, settings.apart)
    if over is joint and found.converged:
        joint.draw_nodes = enough_nodes(joint, frame, settings, generator)
        if joint.draw_nodes > joint.nodes > 1:
            joint.nodes = joint.draw_nodes
            found = search(joint, settings, (found.theta, found.at.modes))
            frame = Frame.around(joint, found, settings.apart)
    return IntegratedPosterior(joint, over, found, frame, settings, generator, progress)
