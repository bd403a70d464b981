"""What is known of the latents, and those of which no two occur in one term, integrated out by quadrature.

Given θ such a log joint is a sum of functions of one latent each, log p(y, u, θ) = a(θ) + Σ_j f_j(u_j, θ), which it
does not name.  Its gradient in u has the slope of each at once, so that K gradients, at û + σ s_k with σ the Laplace
standard deviations, give the slopes of all f_j at K nodes of theirs, and f_j along the line by integration,

    log p(y, θ) = log p(y, û, θ) + Σ_j log ∫ exp(f_j(u) - f_j(û_j)) du.

With û and the nodes held fixed, the derivative in θ is one of ∂_θ log p at û and of ∂_θ f_j'(u_jk), weighted.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import shown
from torchngvi.diagnostics.verdict import name_of
from torchngvi.errors import InputError
from torchngvi.latents.modes import Curvature, Modes
from torchngvi.models.checks import numbers
from torchngvi.posteriors.shapes import number_of_draws


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


# ------------------------------------------------------------------------------------ what is known of the latents


# How far Laplace's approximation of an integral over latents is off, by draws of its own Gaussian
#
# With u = û + w ± L⁻ᵀz, w the first-order difference of mean and mode, the integral is Laplace's times E[exp r],
# r = log p(y, u, θ) - log p(y, û, θ) + ½ zᵀz: where r varies little, the error is log E[exp r], by weights.  Where it
# varies more, as over thousands of latents, it is the next term of the expansion (Shun and McCullagh 1995), for
# f = log p(y, u, θ)
#
#     ⅛ f_ijkl Σ_ij Σ_kl + ½ wᵀHw + ¹⁄₁₂ f_ijk f_lmn Σ_il Σ_jm Σ_kn  =  E[T₄] + ½ wᵀHw + ⅙ E|g - ∇c|²_Σ,
#
# with T₄ the part of fourth order of f and g that of second order of ∇f at û + x, x ~ N(0, Σ), by differences along x.
# Both are sums over all latents already for one draw, so that few draws are enough, however many latents there are.


@dataclass(frozen=True)
class LaplaceError:
    """The error of Laplace's log p(y, θ) at values of the hyperparameters, in nats: what has to be added to it.

    A constant error does not change the posterior of θ.  What changes it is how the error varies: to first order a mean
    moves by the covariance of θ and the error over the posterior, which is `shift`, in standard deviations.

    Attributes:
        theta: the values, (S, P).
        error: log p(y, θ) minus its approximation, (S,).
        standard_error: of each, (S,); the draws of the latents are common to all θ, so that differences are known
            better.
        expanded: where the latents vary too much for weights and the expansion was used, (S,).
        names: of the hyperparameters.

    >>> error, noise = torch.tensor([0.1, 0.2]), torch.tensor([0.01, 0.01])
    >>> found = LaplaceError(torch.zeros(2, 1), error, noise, torch.zeros(2) > 0)
    >>> print(found)
    Laplace's log p(y, theta) is off by 0.1 to 0.2 nats, standard error 0.01, at 2 values of theta.
    """

    theta: Tensor  # (S, P)
    error: Tensor  # (S,)
    standard_error: Tensor  # (S,)
    expanded: Tensor  # (S,)
    names: tuple[str, ...] = ()

    def named(self, names: Sequence[str]) -> Self:
        """The same with names for the hyperparameters."""
        return replace(self, names=tuple(names))

    @property
    def nats(self) -> float:
        """KL from the posterior of θ by Laplace's approximation to that without, to second order."""
        return 0.5 * float(self.error.var())

    @property
    def shift(self) -> Tensor:
        """By how many standard deviations the error moves the posterior mean of each hyperparameter, (P,)."""
        apart = self.theta - self.theta.mean(0)
        moved = (apart * (self.error - self.error.mean())[:, None]).mean(0)
        return moved / apart.square().mean(0).sqrt().clamp_min(torch.finfo(moved.dtype).tiny)

    @property
    def shifts_known(self) -> bool:
        """Whether there are values enough to know `shift`."""
        return len(self.theta) >= 4 * self.theta.shape[-1]

    def __str__(self) -> str:
        low, high, noise = (float(x) for x in (self.error.amin(), self.error.amax(), self.standard_error.amax()))
        off = f"{low:.2g}" if len(self.theta) == 1 else f"{low:.2g} to {high:.2g}"
        where = "1 value" if len(self.theta) == 1 else f"{len(self.theta)} values"
        how = " (by expansion)" if bool(self.expanded.any()) else ""
        text = f"Laplace's log p(y, theta) is off by {off} nats{how}, standard error {noise:.1g}, at {where} of theta."
        if not self.shifts_known:
            return text
        shift, worst = self.shift, int(self.shift.abs().argmax())
        name = name_of(self.names, worst)
        return f"{text} That moves the mean of {name} by {float(shift[worst]):+.2g} sd, the others less."


@torch.no_grad()
def laplace_error(
    theta: Tensor,  # (S, P)
    z: Tensor,  # (N, D)
    curvature: Curvature,
    found: Iterable[tuple[Tensor, Modes]],
) -> LaplaceError:
    """Estimate the error at each θ from the same noise."""
    parts = [_error(GaussianMembers.at(curvature, part, modes), z) for part, modes in found]
    error, noise, expanded = (torch.cat(some) for some in zip(*parts, strict=True))
    return LaplaceError(theta, error, noise, expanded)


class GaussianMembers(NamedTuple):
    """The Gaussian of the latents given θ, N(û + w, H⁻¹), beside the log joint."""

    curvature: Curvature
    theta: Tensor  # (S, P)
    modes: Modes
    slope: Tensor  # ∇c, (S, D)
    w: Tensor  # H⁻¹∇c, the first-order difference of mean and mode, (S, D)
    variance: Tensor  # (S, D)

    @classmethod
    def at(cls, curvature: Curvature, theta: Tensor, modes: Modes) -> "GaussianMembers":
        """With what follows from the selected inverse."""
        inverse = modes.factor.selected_inverse()
        slope = curvature.slope(theta, modes.u, inverse)
        return cls(curvature, theta, modes, slope, modes.factor.solve(slope), inverse[:, : curvature.dim])

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and variances, (S, D) each."""
        return self.modes.u + self.w, self.variance

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times at each θ, (n, S, D): û + w + L⁻ᵀz, H = L Lᵀ."""
        z = torch.randn(*self.w.shape, n, generator=generator, dtype=self.w.dtype, device=self.w.device)
        return self.modes.u + self.w + self.modes.factor.spread(z).movedim(-1, 0)

    def deviations(self, z: Tensor, at_once: int = 2**19) -> Iterator[tuple[Tensor, Tensor]]:
        """A few z at a time, (n, D), with L⁻ᵀz, (n, S, D)."""
        # at_once: numbers of the latents of some draws, at all θ of a part
        for some in z.split(max(1, at_once // self.slope.numel())):
            yield some, self.modes.factor.spread(some.mT.expand(len(self.theta), -1, -1)).movedim(-1, 0)

    def jet(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """ℓ (n, S) and ∇ℓ (n, S, D) at latents (n, S, D)."""
        copies = self.theta.expand(len(u), -1, -1).flatten(0, 1)
        energy, gradient = self.curvature.gradient(copies, u.flatten(0, 1))
        return energy.unflatten(0, u.shape[:2]), gradient.unflatten(0, u.shape[:2])


def _error(given: GaussianMembers, z: Tensor, varies: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The error at each θ, its standard error, and whether by expansion."""
    # varies: variance of r up to which weights are used
    r = _log_weights(given, z)
    value = torch.logsumexp(r, (0, 1)) - math.log(2 * len(z))
    noise = (r - value).exp().mean(0).std(0) / math.sqrt(len(z))
    expanded = ~(r.flatten(0, 1).var(0) <= varies)
    if bool(expanded.any()):
        terms = _terms(given, z)
        value = torch.where(expanded, terms.mean(0), value)
        noise = torch.where(expanded, terms.std(0) / math.sqrt(len(z)), noise)
    return value, noise, expanded


def _log_weights(given: GaussianMembers, z: Tensor) -> Tensor:
    """r at û + w ± L⁻ᵀz, (2, N, S)."""
    found = []
    for some, apart in given.deviations(z):
        mean = given.modes.u + given.w
        copies = given.theta.expand(len(some), -1, -1).flatten(0, 1)
        ends = [given.curvature.energy(copies, u.flatten(0, 1)) for u in (mean + apart, mean - apart)]
        energy = torch.stack(ends).unflatten(1, apart.shape[:2])
        found.append(given.modes.energy - energy + 0.5 * some.square().sum(-1)[:, None])
    return torch.cat(found, 1)


def _terms(given: GaussianMembers, z: Tensor) -> Tensor:
    """What is averaged over z for the next term of the expansion, (N, S)."""
    u, energy, solve = given.modes.u, given.modes.energy, given.modes.factor.solve
    h = torch.finfo(z.dtype).eps ** (1 / 12)
    found = []
    for some, apart in given.deviations(z):
        (up, g_up), (down, g_down) = given.jet(u + h * apart), given.jet(u - h * apart)
        fourth = (energy - 0.5 * (up + down)) / h**4 + 0.5 * some.square().sum(-1)[:, None] / h**2
        bend = -0.5 * (g_up + g_down) / h**2 - given.slope
        length = (bend * solve(bend.movedim(0, -1)).movedim(-1, 0)).sum(-1)
        found.append(fourth + length / 6)
    return torch.cat(found) + 0.5 * (given.w * given.slope).sum(-1)


# What is known of the latents: their marginals, which are mixtures over the hyperparameters, and joint draws

_BISECTIONS = 60  # of an interval that holds a quantile
_WIDE = 40.0  # standard deviations within which every quantile in double precision lies


@dataclass(frozen=True)
class Latents:
    """The distribution of the latents given the data, an even mixture of Gaussians: one for each value of θ.

    Attributes:
        theta: the values of the hyperparameters, (S, P).
        means: of the latents given each θ, (S, D).
        stddevs: the same, (S, D).
        members: finds the distributions of the latents given values of θ again.

    >>> def joint(theta, u):
    ...     return -0.5 * (u - theta).square().sum(-1)
    >>> from torchngvi import marginal
    >>> target = marginal(joint, latents=3, at=torch.zeros(1, dtype=torch.float64))
    >>> found = target.latents(torch.tensor([[-1.0], [1.0]]))
    >>> [round(x, 4) for x in found.mean.tolist()], round(found.stddev[0].item() ** 2, 4)
    ([0.0, 0.0, 0.0], 2.0)
    """

    theta: Tensor  # (S, P)
    means: Tensor = field(repr=False)  # (S, D)
    stddevs: Tensor = field(repr=False)  # (S, D)
    members: Callable[[Tensor], Iterator[GaussianMembers | Members]] = field(repr=False)

    @property
    def mean(self) -> Tensor:
        """The marginal means, (D,)."""
        return self.means.mean(0)

    @property
    def stddev(self) -> Tensor:
        """The marginal standard deviations, (D,): those given θ, and the spread of the means over θ."""
        return (self.stddevs.square().mean(0) + self.means.var(0, correction=0)).sqrt()

    def quantile(self, probability: float) -> Tensor:
        """Compute a quantile of each marginal by bisection, (D,).

        Raises:
            InputError: a probability that is no number, or not between 0 and 1.
        """
        if isinstance(probability, bool) or not isinstance(probability, Real):
            raise InputError(
                f"a quantile needs one probability, a number between 0 and 1; got {probability!r}. Ask for several in "
                "turn."
            )
        if not 0 < probability < 1:
            raise InputError(f"a quantile needs a probability between 0 and 1; got {probability}.")
        low = (self.means - _WIDE * self.stddevs).amin(0)
        high = (self.means + _WIDE * self.stddevs).amax(0)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = torch.special.ndtr((middle - self.means) / self.stddevs).mean(0) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw all latents jointly, (n, D): each θ in its turn, and the latents given it.

        Their distributions are computed again, since those of all θ would not fit the memory.
        """
        n = number_of_draws(n)
        some = self.theta[:n]
        rounds = -(-n // len(some))
        return torch.cat([each.sample(rounds, generator) for each in self.members(some)], 1).flatten(0, 1)[:n]


def thetas_of(
    source: Any,
    like: Tensor,  # (P,)
    draws: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Take values of the hyperparameters from what a user has."""
    if isinstance(source, type):
        raise InputError(f"theta is a posterior, a result or values; got {shown(source)}.")
    posterior = getattr(source, "posterior", source)
    if hasattr(posterior, "sample"):
        shape: Any = (draws,) if hasattr(posterior, "batch_shape") else draws  # densities of refine take a number
        theta = posterior.sample(shape, generator).to(like)
    else:
        theta = numbers("theta", source, like)
    theta = theta[None] if theta.ndim == 1 else theta
    if theta.ndim != 2 or theta.shape[-1] != len(like) or not math.prod(theta.shape):
        raise InputError(
            f"values of the {len(like)} hyperparameters are (S, {len(like)}), or come from a posterior over them; got "
            f"shape {tuple(theta.shape)}."
        )
    return theta
