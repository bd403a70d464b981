"""The door to posteriors that are no Gaussian: what is tried, how it is judged, and what is returned."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi import posteriors
from torchngvi.arguments import is_size, read_choice, read_seed, read_tensor, shown
from torchngvi.diagnostics.importance import USELESS, Proposal, Quality, Sampled, weigh, weighted_moments
from torchngvi.diagnostics.verdict import ABOUT, FITS, NOT, UNSEEN, Marginals, judge, undecided, unsure
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Posterior, Target
from torchngvi.mode import distinct_modes, find_modes, search_points
from torchngvi.models import LogJoint
from torchngvi.models.log_joint import FullPrecision, as_target, read_posterior
from torchngvi.numerics.arrays import tracked
from torchngvi.optim.evaluating import warn
from torchngvi.posteriors.gaussian import CholeskyGaussian, Gaussian
from torchngvi.posteriors.shapes import number_of_draws
from torchngvi.posteriors.warps import Warped
from torchngvi.refinement.fan import (
    DRAWS,
    LOG_TAU,
    Density,
    Joint,
    LayeredGaussian,
    Layering,
    fitted,
    quality,
    weighted_draws,
    widened,
)

KINDS = ("fan", "mixture", "importance")
_ADVICE = " Try other coordinates of the parameters, more starts, or Markov chains."
_FULL = " Fit a CholeskyGaussian, which has all correlations, and refine that."

# -------------------------------------------------------------------------------- a Gaussian at each mode


class Mixture(Density):
    """The mixture of Gaussians Σ_k π_k N(m_k, C_k C_kᵀ).

    Args:
        shares: π, (K,), which sum to one.
        mean: (K, D).
        root: lower triangular, (K, D, D).

    >>> q = Mixture(torch.tensor([0.5, 0.5]), torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1))
    >>> q.mean.item(), q.variance.item()
    (0.0, 10.0)
    """

    shares: Tensor
    centres: Tensor
    roots: Tensor

    def __init__(self, shares: Tensor, mean: Tensor, root: Tensor) -> None:
        super().__init__()
        self.register_buffer("shares", shares.detach().clone())
        self.register_buffer("centres", mean.detach().clone())
        self.register_buffer("roots", root.detach().clone())
        self.dim = mean.shape[-1]

    def member_log_prob(self, theta: Tensor) -> Tensor:
        """log N(θ; m_k, C_k C_kᵀ) at θ (N, D), (N, K)."""
        square, log_det = distances(self, theta)
        return -0.5 * square - log_det - self.dim * LOG_TAU

    @torch.no_grad()
    def log_prob(self, theta: Tensor) -> Tensor:
        """Compute the log density of the mixture, (*sample,)."""
        each = self.member_log_prob(self._flat(theta)) + self.shares.log()
        return each.logsumexp(-1).reshape(theta.shape[:-1])

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D), from each member its share of them, in any order."""
        like = self.centres
        place = torch.rand((), dtype=like.dtype, device=like.device, generator=generator)
        ranks = (torch.randperm(n, device=like.device, generator=generator) + place) / n
        member = torch.searchsorted(self.shares.cumsum(0), ranks).clamp_max(len(self.shares) - 1)
        z = torch.randn(n, self.dim, dtype=like.dtype, device=like.device, generator=generator)
        return like[member] + (self.roots[member] @ z[..., None])[..., 0]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D), in closed form."""
        mean = self.shares @ self.centres
        within = (self.shares[:, None, None] * (self.roots @ self.roots.mT)).sum(0)
        apart = self.centres - mean
        return mean, within + (apart.mT * self.shares) @ apart

    def as_posterior(self) -> posteriors.Mixture:
        """The same mixture as a posterior that `torchngvi.fit` improves, where the members overlap.

        Returns:
            A new mixture, whose components are `torchngvi.CholeskyGaussian`.

        >>> Mixture(torch.tensor([0.5, 0.5]), torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1)).as_posterior()
        Mixture(2 x CholeskyGaussian, D = 1, weights 0.5, 0.5)
        """
        number = len(self.shares)
        return posteriors.Mixture(
            posteriors.CholeskyGaussian(self.dim, (number,), mean=self.centres, scale=self.roots), self.shares
        )

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "Mixture":
        """The mixture that a state_dict is of."""
        return cls(state["shares"], state["centres"], state["roots"])


def distances(mixture: Mixture, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances of θ (N, D) from the means in the standard deviations of each member, (N, K), and log |C_k|."""
    apart = (theta[:, None] - mixture.centres).movedim(0, -1)  # (K, D, N)
    square = torch.linalg.solve_triangular(mixture.roots, apart, upper=False).square().sum(-2).mT
    return square, mixture.roots.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@torch.no_grad()
def mix(
    mean: Tensor,
    root: Tensor,
    joint: Joint,
    elbo: float,
    starts: Tensor | None,
    seed: int,
    known: Sequence[Tensor] = (),
) -> Mixture | None:
    """Search modes, fit a Gaussian at each, and find the shares with which their mixture has the largest ELBO."""
    own = mean, root
    points = search_points(mean, root.norm(dim=1), seed)
    points = points if starts is None else starts.to(points)
    if known:
        points = torch.cat([points, torch.stack(list(known)).to(points)])
    with torch.enable_grad():
        found = find_modes(joint.target, points, 200 + 20 * len(mean))
    modes = [mode for mode in found if mode is not None and mode.found]
    least = max([elbo, *(mode.log_evidence for mode in modes)]) - 5.0
    kept = distinct_modes((mode for mode in modes if _distance((mode.theta, mode.root), own) > 1), least)
    if not kept:
        return None
    mean, root = torch.stack([mode.theta for mode in kept]), torch.stack([mode.root for mode in kept])
    target = LogJoint(lambda theta: joint(theta.flatten(0, -2)).unflatten(0, theta.shape[:-1]))
    with torch.enable_grad():
        fits = fitted(target, mean, root, seed)
    members = [own]
    for m, r, ok in zip(fits.mean, fits.root, fits.ok.tolist(), strict=True):
        if ok and all(_distance((m, r), other) > 1 for other in members):
            members.append((m, r))
    if len(members) == 1:
        return None
    mean, root = (torch.stack(part) for part in zip(*members, strict=True))
    shares = best_shares(mean, root, joint, seed)
    large = shares > 1e-3
    if int(large.sum()) < 2:
        return None
    return Mixture(shares[large] / shares[large].sum(), mean[large], root[large])


def _distance(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    """Between two means, in standard deviations of the Gaussian for which it is less."""
    apart = (first[0] - second[0])[:, None]
    return min(float(torch.linalg.solve_triangular(root, apart, upper=False).norm()) for _, root in (first, second))


def best_shares(mean: Tensor, root: Tensor, joint: Joint, seed: int, draws: int = 512) -> Tensor:
    """The shares π (K,) at which Σ_k π_k E_k[log p - log Σ_l π_l q_l] is largest, over fixed draws of each member."""
    count, dim = mean.shape
    generator = torch.Generator(mean.device).manual_seed(seed)
    z = torch.randn(draws, 1, dim, dtype=mean.dtype, device=mean.device, generator=generator)
    theta = (mean + (root @ z[..., None])[..., 0]).flatten(0, 1)
    log_joint = joint(theta).reshape(draws, count)
    uniform = torch.full_like(mean[:, 0], 1 / count)
    each = Mixture(uniform, mean, root).member_log_prob(theta).reshape(draws, count, count)
    log_shares = uniform.log()
    for _ in range(200):
        gain = (log_joint - (each + log_shares).logsumexp(-1)).mean(0).nan_to_num(-torch.inf, neginf=-1e30)
        new = (log_shares + gain).log_softmax(0)
        moved = float((new.exp() - log_shares.exp()).abs().max())
        log_shares = new
        if moved < 1e-6:
            break
    return log_shares.exp()


# -------------------------------------------------------------------------------- a second examination

# Is the refined density the posterior?  Draws from something wider than it say.
#
# An ELBO and a k-hat from draws of a density tell nothing of where these draws do not come.  Half of the draws here are
# of the density, the others of t distributions in the space in which it is a Gaussian: as wide as the linear response
# of the posterior there, or half as wide again around each member of a mixture.


class Second(NamedTuple):
    """What the second examination found."""

    word: str  # "fits", "about right", "does not fit" or "not examined"
    reasons: tuple[str, ...]  # clauses
    sampled: Sampled | None

    @property
    def doubtful(self) -> bool:
        """Whether the density is not the posterior, or an sd may be off by more than was found, or nobody can tell."""
        return self.word in (NOT, UNSEEN) or (self.word == ABOUT and unsure(self.sampled))

    def __str__(self) -> str:
        """One sentence."""
        why = "; ".join(self.reasons)
        if self.word == FITS:
            return "A second examination finds nothing against it."
        if self.word == NOT:
            return f"It still is NOT the posterior: {why}."
        if self.word == UNSEEN:
            return f"Whether it is the posterior cannot be told: {why or 'no importance weights'}."
        return f"It is about right: {why}."


@torch.no_grad()
def examined_again(
    density: Density, joint: Joint, seed: int, wider: Proposal | None = None, names: Sequence[str] = ()
) -> Second:
    """Compare the moments of a refined density with those by importance sampling from something wider."""
    found = _sampled(density, joint, seed, wider, 4096)
    if found is not None and undecided(*found):
        found = _sampled(density, joint, seed + 1, wider, 16_384)
    if found is None:
        return Second(UNSEEN, (), None)
    word, reasons = judge(found[0]._replace(names=tuple(names)), None, found[1], ())
    return Second(word, reasons, found[1])


def _sampled(
    density: Density, joint: Joint, seed: int, wider: Proposal | None, draws: int
) -> tuple[Marginals, Sampled] | None:
    """Moments of the density and of the posterior by the same draws, so that noise in common cancels."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(density, LayeredGaussian):
        theta, own, wide = _of_layers(density, joint, generator, seed, draws)
    elif isinstance(density, Mixture):
        theta, own, wide = _of_mixture(density, generator, draws)
    else:
        assert wider is not None
        theta, x = wider.draws(draws, generator)
        own = wide = wider.log_density(x)[0]
    log_joint = joint(theta).nan_to_num(nan=-math.inf)
    if not bool((log_joint < math.inf).all() & log_joint.isfinite().any()):
        return None
    mean, covariance = density.moments()
    marginals = Marginals(mean, covariance.diagonal().sqrt())
    if own is not wide:
        itself = weighted_moments(theta, own - wide, marginals.sd)
        marginals = Marginals(itself.mean, itself.sd)
    return marginals, weigh(theta, log_joint, own, wide, marginals.sd)


def _of_layers(
    density: LayeredGaussian, joint: Joint, generator: torch.Generator, seed: int, draws: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws, and the log densities of the layered Gaussian and of the wider proposal, in the space of the noise."""
    noise = CholeskyGaussian(density.dim, dtype=density.centre.dtype, device=density.centre.device)
    proposal = widened(noise, density.log_density(joint), seed)
    x = proposal.sample(draws, generator)
    wide, own = proposal.log_density(x)
    parts = [density.push(part) for part in x.split(density.at_once)]
    theta, stretch = (torch.cat(each) for each in zip(*parts, strict=True))
    return theta, own - stretch, wide - stretch


def _of_mixture(
    density: Mixture, generator: torch.Generator, draws: int, wider: float = 1.5
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws, half of the mixture, half of t distributions around its members, and both log densities."""
    like, dim, half = density.centres, density.dim, draws // 2
    member = torch.multinomial(density.shares.double().cpu(), draws, replacement=True, generator=generator)
    z = torch.randn(draws, dim, generator=generator, dtype=torch.float64, device="cpu")
    z[half:] *= wider * Proposal.stretch(half, generator)
    member = member.to(like.device)
    theta = density.centres[member] + (density.roots[member] @ z.to(like)[..., None])[..., 0]
    square, log_det = distances(density, theta)
    each = Proposal.student(square / wider**2, dim) - (log_det + dim * math.log(wider)) + density.shares.log()
    own = density.log_prob(theta)
    return theta, own, torch.logaddexp(own, each.logsumexp(-1)) - math.log(2)


class RefinementWarning(UserWarning):
    """What `refine` returns is not the posterior, or nobody can tell."""


@dataclass(frozen=True)
class Refinement:
    """A posterior beyond a Gaussian, and how good it is.

    Attributes:
        posterior: it has ``sample(n, generator)``, ``log_prob``, ``mean``, ``stddev``, ``covariance`` and ``quantile``;
            weighted draws have no density.
        kind: "fan", "mixture" or "importance"; "gaussian" where q itself was the best.
        before: the Gaussian.
        after: the posterior; for weighted draws their proposal, whose ELBO says nothing of them.
        tried: every candidate that was judged, by its kind.
        reason: one sentence.
        second: a second examination of the posterior, by draws from something wider: whether it still is not the
            posterior that was asked for, of which `refine` warns.
        gradients: of the log joint, one a draw.
        values: of the log joint without a gradient.

    >>> from torchngvi import CholeskyGaussian
    >>> refined = refine(CholeskyGaussian(1), lambda theta: -0.5 * theta.square().sum(-1), "importance")
    >>> refined.kind, list(refined.tried), refined.gradients
    ('importance', ['importance'], 512)
    >>> refined.sample(5).shape
    torch.Size([5, 1])
    """

    posterior: Density
    kind: str
    before: Quality
    after: Quality
    tried: dict[str, Quality]
    reason: str
    second: Second
    gradients: int
    values: int

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times from the posterior, θ in the order of the log joint's coordinates.

        Args:
            n: the number of draws.
            generator: the source of the noise, on the device of the posterior; torch's default generator if None.

        Returns:
            Draws, (n, D); those of weighted draws are resampled, so that some are equal.

        Raises:
            InputError: a number of draws that is none.
        """
        return self.posterior.sample(number_of_draws(n), generator)

    def __repr__(self) -> str:
        after = self.after.worth if self.kind == "importance" else f"ELBO {self.after.elbo:.3f}, {self.after.worth}"
        return f"Refinement({self.kind!r}: {after}; before ELBO {self.before.elbo:.3f}, {self.before.worth})"

    def __str__(self) -> str:
        def of(quality: Quality) -> str:
            return f"ELBO {quality.elbo:.3f} ± {quality.error:.1g}, {quality.worth}"

        weighted = f"log evidence {self.after.log_evidence:.3f}, {self.after.worth}"
        lines = [
            f"{self.kind}: {self.reason}",
            f"  before: {of(self.before)}",
            f"  after:  {weighted if self.kind == 'importance' else of(self.after)}",
            f"  {self.second}",
            f"  {self.gradients} gradients and {self.values} values of the log joint",
        ]
        return "\n".join(lines)


@tracked
@torch.no_grad()
def refine(
    result_or_q: Any,
    log_joint: Target | Callable[[Tensor], Tensor] | None = None,
    kind: str | None = None,
    *,
    coordinate: int | None = None,
    starts: Tensor | None = None,
    seed: int = 0,
) -> Refinement:
    """Find a posterior that a Gaussian does not fit, starting from the Gaussian that was fitted.

    Three kinds of answer, each judged by its own draws:

    - "fan": layers in the whitened space of q. A fan frees one direction, with Gaussians conditional on it, and repairs
      funnels, bananas and scales of hierarchical models; a warp skews all coordinates and changes their tails. They are
      laid one on the other, each chosen by third and fourth derivatives, as long as the ELBO rises.
    - "mixture": a search for modes, a Gaussian at each, and the shares with the largest ELBO.
    - "importance": 2,048 weighted draws of q and of t distributions with the covariance by linear response; moments
      at the price of values, and no density.

    Args:
        result_or_q: a Gaussian posterior that was fitted, or the result of its fit, whose names of coordinates are
            kept; it is not changed.
        log_joint: what it was fitted to: a model, or a function of theta that gives the same value twice; by default
            that of the result.
        kind: one of the three; by default all are tried, and the best is returned.
        coordinate: the parameter of interest, along which the first fan is laid; by default the worst direction.
        starts: where modes are searched from, (K, D); by default 4 to 16 points, half of them uniform on (-2, 2), half
            within six standard deviations of q.  The modes that the verdict of a result has found are added.
        seed: of all draws.

    Returns:
        The posterior, its ELBO, k-hat and effective number of draws beside those of q, and what it took.

    Warns:
        RefinementWarning: a second examination says that the posterior still is not that of the log joint, or cannot
            tell whether it is.

    Raises:
        InputError: no log joint, a kind or a coordinate that there is not, a batch of posteriors, a log joint that is
            not finite at draws of q or gives other values each time, temperature 0.
        PairError: something else than a Gaussian posterior.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, fit
    >>> def two(theta):  # at -3 and 3
    ...     return torch.logaddexp(-0.5 * (theta - 3) ** 2, -0.5 * (theta + 3) ** 2).sum(-1)
    >>> q = CholeskyGaussian(1, mean=3.0, dtype=torch.float64)
    >>> refined = refine(q, two, "mixture")
    >>> refined.kind, round(refined.posterior.stddev.item(), 1), round(refined.after.elbo - refined.before.elbo, 1)
    ('mixture', 3.2, 0.7)
    """
    q, joint = _checked(result_or_q, log_joint, kind, coordinate)
    if starts is not None:
        starts = read_tensor("starts", starts, f"must be points (K, {q.dim})", like=q.mean_probe, shape=(None, q.dim))
    seed = read_seed("seed", seed)
    with FullPrecision(q.device.type):
        refining = _Refining(q, joint, seed, getattr(result_or_q, "names", ()))
        refining.modes = [mode.mean for mode in getattr(getattr(result_or_q, "verdict", None), "modes", ())]
        refined = refining.run(kind, coordinate, starts)
    if refined.second.doubtful:
        whole = q.structure.widest == q.dim or joint.target.pattern == q.structure
        warn(f"refine, {refined.kind}: {refined.second}{_ADVICE if whole else _FULL}", RefinementWarning)
    return refined


class _Refining:
    """One q, and the candidates."""

    def __init__(self, q: Gaussian, joint: Joint, seed: int, names: Sequence[str]) -> None:
        self.q, self.joint, self.seed, self.names = q, joint, seed, names
        self.gaussian = LayeredGaussian(q.mean, q.scale_tril)
        self.before = quality(self.gaussian, joint, seed + 1)
        if not math.isfinite(self.before.elbo):
            raise InputError(
                "refine begins at draws of q, and the log joint is not finite at some of them. Fit q first, or "
                f"transform constrained coordinates.{joint.target.failures()}"
            )
        self.tried: dict[str, Quality] = {}
        self.found: dict[str, Density] = {}
        self.why: dict[str, str] = {}
        self.wider: Proposal | None = None
        self.modes: list[Tensor] = []  # that the verdict knows

    def run(self, kind: str | None, coordinate: int | None, starts: Tensor | None) -> Refinement:
        """Try one kind or all."""
        wanted = KINDS if kind is None else (kind,)
        if "mixture" in wanted:
            self._mixture(starts)
        if "fan" in wanted:
            self._fan(coordinate)
        if "importance" in wanted:
            self._importance()
        best = self._best() if kind is None else kind if kind in self.found else "gaussian"
        posterior, after = self.found.get(best, self.gaussian), self.tried.get(best, self.before)
        none = "no candidate is better than the Gaussian" + ("" if kind is None else f": {self.why[kind]}")
        reason = f"{none if best == 'gaussian' else self.why[best]}."
        wider = self.wider if best == "importance" else None
        coarse = Marginals(self.q.mean, self.q.stddev, tuple(self.names)).unresolved()
        second = Second(UNSEEN, (coarse,), None) if coarse else None
        second = second or examined_again(posterior, self.joint, self.seed + 2, wider, self.names)
        spent = self.joint.gradients, self.joint.values
        return Refinement(posterior, best, self.before, after, self.tried, reason, second, *spent)

    def _mixture(self, starts: Tensor | None) -> None:
        centre, root, elbo = self.gaussian.centre, self.gaussian.root, self.before.elbo
        mixture = mix(centre, root, self.joint, elbo, starts, self.seed, self.modes)
        if mixture is None:
            self.why["mixture"] = "no other mode was found"
            return
        count = len(mixture.shares)
        shares = " and ".join(f"{share:.2g}" for share in mixture.shares.tolist())
        self.why["mixture"] = f"{count} Gaussians at different modes share the mass by {shares}"
        self._judge("mixture", mixture)

    def _fan(self, coordinate: int | None) -> None:
        layering = Layering(self.gaussian, self.joint, self.seed, self.names)
        layering.run(coordinate)
        if not layering.steps:
            self.why["fan"] = "no fan and no warp raises the ELBO"
            return
        self._judge("fan", layering.density)
        gained = self.tried["fan"].elbo - self.before.elbo
        self.why["fan"] = f"{', then '.join(layering.steps)} raised the ELBO by {gained:.2g} nats"

    def _importance(self) -> None:
        weighed = weighted_draws(self.q, self.joint, self.seed)
        if weighed is None:
            self.why["importance"] = "the log joint is finite at no draw of the proposal"
            return
        self.found["importance"], self.tried["importance"], self.wider = weighed
        self.why["importance"] = (
            "draws of q and of wide t distributions, weighted by the posterior, are worth "
            f"{weighed[1].effective:.0f} of {DRAWS}"
        )

    def _judge(self, kind: str, density: Density) -> None:
        """On draws that nothing was chosen by."""
        self.found[kind], self.tried[kind] = density, quality(density, self.joint, self.seed + 1)

    def _best(self) -> str:
        """The density with the largest ELBO; weighted draws where they are worth more and see as much of space."""
        densities = {name: self.tried[name] for name in ("fan", "mixture") if name in self.tried}
        best, chosen = "gaussian", self.before
        for name, candidate in densities.items():
            if candidate.elbo > chosen.elbo + (0.02 if best == "gaussian" else 0.0):
                best, chosen = name, candidate
        weighted = self.tried.get("importance")
        if weighted is None or best == "mixture" or not weighted.k_hat < USELESS:
            return best
        worth = weighted.effective > 1.2 * chosen.effective
        return "importance" if worth else best


def _checked(result_or_q: Any, log_joint: Any, kind: str | None, coordinate: int | None) -> tuple[Gaussian, Joint]:
    """The posterior and the log joint, or a sentence."""
    q = getattr(result_or_q, "posterior", result_or_q)
    log_joint = getattr(result_or_q, "target", None) if log_joint is None else log_joint
    q = q.base if isinstance(q, Warped) else q
    if isinstance(q, Target) or isinstance(log_joint, Posterior):
        read_posterior("refine", q, log_joint)
    if not isinstance(q, Gaussian):
        raise PairError(
            "refine begins at a Gaussian posterior, such as a CholeskyGaussian, or at the result of its fit; got "
            f"{type(q).__name__}."
        )
    if log_joint is None and hasattr(result_or_q, "k_hat"):
        raise InputError(
            f"the draws of a {type(result_or_q).__name__} are weighted to the posterior already, as refine does; "
            "result.k_hat says whether they can be trusted."
        )
    if log_joint is None:
        raise InputError(
            "refine evaluates the log joint, which the result of a fit knows until it is pickled. Pass what q was "
            "fitted to, as refine(q, log_joint)."
        )
    if q.batch_shape:
        raise InputError(
            f"refine takes one posterior at a time; got a batch of shape {tuple(q.batch_shape)}. Pass each member as a "
            "CholeskyGaussian of its own."
        )
    if kind is not None:
        read_choice("kind", kind, KINDS, f"is one of {', '.join(KINDS)}, or None for the best of them")
    if coordinate is not None and not (is_size(coordinate, at_least=0) and coordinate < q.dim):
        raise InputError(f"coordinate is the index of a parameter, from 0 to {q.dim - 1}; got {shown(coordinate)}.")
    return q, Joint(as_target(log_joint))
