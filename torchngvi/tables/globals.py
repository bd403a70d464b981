"""The posterior of the globals of one model: its mode, its curvature, and draws weighted to the density itself.

Effects are integrated out first (`torchngvi.tables.integrated`), so that what is left has few dimensions.  The mode is
found by quasi-Newton steps, the Hessian there by differences of gradients, which also give how the modes of the effects
follow the globals.  Draws of a mixture of a Gaussian and a wider t distribution about the mode are weighted to the
density; where the standard deviation of the effects may be 0 they come from a grid over its logarithm.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor
from tqdm import tqdm

from torchngvi.arguments import read_size
from torchngvi.diagnostics.importance import USELESS, smoothed
from torchngvi.numerics.linalg import cholesky
from torchngvi.tables.families import Family
from torchngvi.tables.integrated import Closed, Integrated, Integration, LogJoint, Valued, finite, inverse_root
from torchngvi.tables.parts import Coordinates, Design, Posterior, Weighted, draw_normal, draw_uniform
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
        factor, ok = cholesky(B)
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
    """½ N(m, R Rᵀ) + ½ t with the same centre, wider; its draws in equal parts from both.

    Half of the draws are from the Gaussian, so that an exact one keeps half of its draws at the least; the other half
    reaches what the Gaussian misses.  Each column of R may be of other lengths on either side of the mode, as where the
    posterior has a longer tail in one direction (Geweke 1989).
    """

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

    At each point t of the grid the other globals are at their mode, with the Hessian H there by differences, and

        log p(t | y) = log p(y, mode, t) - ½ log|H| + constant

    by Laplace; between the points by monotone cubics (Fritsch and Carlson 1980), beyond them on the right with the
    slope of the end, on the left with 1, since the density falls like τ itself.  Draws of t are stratified.
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
    root, ok = cholesky(apart.mT @ (weights[:, None] * apart))
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


def integrate(
    design: Design,
    family: Family,
    coordinates: Coordinates,
    priors: Priors,
    settings: FitSettings,
    seed: int,
    progress: bool,
) -> IntegratedPosterior:
    """Find the posterior of the globals of a design with no grouping factor or one, the effects integrated out."""
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
