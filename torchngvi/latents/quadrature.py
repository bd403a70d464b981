"""Latents of which no two occur in one term, integrated out by quadrature, each along its own line.

Given θ such a log joint is a sum of functions of one latent each, log p(y, u, θ) = a(θ) + Σ_j f_j(u_j, θ), which it
does not name.  Its gradient in u has the slope of each at once, so that K gradients, at û + σ s_k with σ the Laplace
standard deviations, give the slopes of all f_j at K nodes of theirs, and f_j along the line by integration,

    log p(y, θ) = log p(y, û, θ) + Σ_j log ∫ exp(f_j(u) - f_j(û_j)) du.

With û and the nodes held fixed, the derivative in θ is one of ∂_θ log p at û and of ∂_θ f_j'(u_jk), weighted.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.latents.modes import Curvature, Modes


@dataclass(frozen=True)
class Rule:
    """Nodes in standard deviations, s = sinh(c t)/c for equally spaced t, and the integration of slopes along t."""

    t: Tensor  # the parameters of the nodes, (K,), the middle one 0
    bend: float  # c, by which the outer nodes stand further apart
    smooth: Tensor  # from slopes at the nodes to their integrals over the K - 1 intervals, (K - 1, K)
    trusted: float  # share of the trapezium by which the polynomial through the nodes around an interval may differ

    @classmethod
    def of(cls, half: int = 12, step: float = 0.35, bend: float = 0.7, order: int = 6, trusted: float = 0.5) -> Self:
        """Make the rule with ``half`` nodes on each side.

        The defaults are off by at most .02 nats for Poisson and binomial counts under normal priors of sd .3 to 8, by
        .06 for a Cauchy density, and by 1e-4 in the median, where Laplace is off by .57 and .006; chosen there among
        twelve rules and judged on the models of `benchmarks/pyro_public.py`.
        """
        intervals = torch.zeros(2 * half, 2 * half + 1, dtype=torch.float64, device="cpu")
        means = 1.0 / torch.arange(1, order + 1, dtype=torch.float64, device="cpu")
        for k in range(2 * half):
            first = min(max(k - order // 2 + 1, 0), 2 * half + 1 - order)
            places = torch.arange(first - k, first - k + order, dtype=torch.float64, device="cpu")
            powers = torch.linalg.vander(places).mT
            intervals[k, first : first + order] = step * torch.linalg.solve(powers, means)
        t = step * torch.arange(-half, half + 1, dtype=torch.float64, device="cpu")
        return cls(t, bend, intervals, trusted)

    def nodes(self, like: Tensor) -> Tensor:
        """The nodes, (K,)."""
        return ((self.bend * self.t).sinh() / self.bend).to(like)

    def speeds(self, like: Tensor) -> Tensor:
        """The derivatives of the nodes in t, (K,)."""
        return (self.bend * self.t).cosh().to(like)

    def log_density(
        self,
        slopes: Tensor,  # along t, (K, S, D)
    ) -> Tensor:
        """Integrate slopes from the middle, (K, S, D)."""
        step = float(self.t[1] - self.t[0])
        plain = 0.5 * step * (slopes[1:] + slopes[:-1])
        smooth = torch.tensordot(self.smooth.to(slopes), slopes, 1)
        fine = (smooth - plain).abs() <= self.trusted * (plain.abs() + 0.2)
        parts = torch.where(fine, smooth, plain)
        below, above = parts.split(len(parts) // 2)
        middle = torch.zeros_like(slopes[:1])
        return torch.cat([-below.flip(0).cumsum(0).flip(0), middle, above.cumsum(0)])

    def log_integral(
        self,
        slopes: Tensor,  # along t, (K, S, D)
    ) -> Tensor:
        """Integrate the exponential of what has these slopes over the line of s, (S, D)."""
        weights = (float(self.t[1] - self.t[0]) * self.speeds(slopes)).log()
        return (self.log_density(slopes) + weights[:, None, None]).logsumexp(0)

    def halved(self) -> "Rule":
        """Every second node."""
        half = len(self.t) // 4
        return Rule.of(half, 2 * float(self.t[1] - self.t[0]), self.bend, trusted=self.trusted)


class Members(NamedTuple):
    """Independent latents given θ, by the slopes of their log densities along their lines."""

    rule: Rule
    modes: Modes  # û and what belongs to it
    scale: Tensor  # σ, (S, D)
    slopes: Tensor  # of the log densities along t, (K, S, D)
    outside: bool  # whether some nodes are outside of the support, where a slope says nothing

    @classmethod
    def at(cls, curvature: Curvature, theta: Tensor, modes: Modes, rule: Rule) -> "Members":
        """Evaluate the gradients at the nodes, those that are not finite as steep walls."""
        scale = modes.factor.selected_inverse()[:, : curvature.dim].sqrt()
        nodes, speeds = rule.nodes(scale), rule.speeds(scale)
        points = (modes.u + nodes[:, None, None] * scale).flatten(0, 1)
        energy, gradient = curvature.gradient(theta.repeat(len(nodes), 1), points)
        slopes = -gradient.view(len(nodes), *scale.shape) * scale * speeds[:, None, None]
        wall = torch.finfo(slopes.dtype).max ** 0.25
        inwards = -wall * nodes.sign()[:, None, None]
        bounded = torch.where(slopes.isfinite(), slopes.clamp(-wall, wall), inwards)
        outside = ~energy.view(len(nodes), -1).isfinite() & slopes.isfinite().all(-1)
        return cls(rule, modes, scale, bounded, bool(outside.any()))

    def log_integral(self) -> Tensor:
        """log p(y, θ), (S,)."""
        return (self.rule.log_integral(self.slopes) + self.scale.log()).sum(-1) - self.modes.energy

    def error(self) -> Tensor:
        """By how much the integral changes with every second node, (S,)."""
        coarse = self.rule.halved().log_integral(self.slopes[::2])
        return (self.rule.log_integral(self.slopes) - coarse).sum(-1)

    def gradient(self, curvature: Curvature, theta: Tensor) -> Tensor:
        """Differentiate `log_integral` in θ, (S, P)."""
        with torch.enable_grad():
            slopes = self.slopes.detach().requires_grad_()
            (by_slope,) = torch.autograd.grad(self.rule.log_integral(slopes).sum(), slopes)
        nodes = self.rule.nodes(self.scale)
        weights = by_slope * self.scale * self.rule.speeds(self.scale)[:, None, None]
        points = self.modes.u + nodes[:, None, None] * self.scale
        return curvature.gradient_of_slopes(theta, self.modes.u, points, weights)

    @property
    def probabilities(self) -> Tensor:
        """Of the nodes, (K, S, D)."""
        log_density = self.rule.log_density(self.slopes)
        return (log_density + self.rule.speeds(log_density).log()[:, None, None]).softmax(0)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and variances, (S, D) each."""
        share, nodes = self.probabilities, self.rule.nodes(self.scale)[:, None, None]
        mean = (share * nodes).sum(0)
        return self.modes.u + self.scale * mean, self.scale**2 * (share * (nodes - mean).square()).sum(0)

    def sample(self, n: int, generator: torch.Generator | None = None, finer: int = 4) -> Tensor:
        """Draw n times at each θ, (n, S, D), by the inverse of the distribution function."""
        # finer: points of the distribution function between two nodes, by Hermite's cubic
        log_density, slopes = self.rule.log_density(self.slopes), self.slopes
        step = float(self.rule.t[1] - self.rule.t[0])
        x = torch.arange(finer, dtype=slopes.dtype, device=slopes.device)[:, None, None, None] / finer
        low, high, start, end = log_density[:-1], log_density[1:], step * slopes[:-1], step * slopes[1:]
        cubic = low + x * start + x**2 * (3 * (high - low) - 2 * start - end) + x**3 * (2 * (low - high) + start + end)
        fine = torch.cat([cubic.movedim(0, 1).flatten(0, 1), log_density[-1:]])  # along t, (4(K - 1) + 1, S, D)
        between = torch.arange(len(fine), dtype=torch.float64, device="cpu") * (step / finer) + float(self.rule.t[0])
        t = between.to(slopes)
        density = (fine + (self.rule.bend * t).cosh().log()[:, None, None] - fine.amax(0)).exp()
        upto = torch.cat([torch.zeros_like(fine[:1]), 0.5 * (density[1:] + density[:-1]).cumsum(0)])
        upto = (upto / upto[-1]).movedim(0, -1).contiguous()
        uniform = torch.rand(*upto.shape[:-1], n, dtype=t.dtype, device=t.device, generator=generator)
        k = torch.searchsorted(upto, uniform).clamp(1, len(t) - 1)
        left, right = upto.gather(-1, k - 1), upto.gather(-1, k)
        share = ((uniform - left) / (right - left).clamp_min(torch.finfo(t.dtype).tiny)).clamp(0.0, 1.0)
        nodes = (self.rule.bend * torch.lerp(t[k - 1], t[k], share)).sinh() / self.rule.bend
        return self.modes.u + self.scale * nodes.movedim(-1, 0)
