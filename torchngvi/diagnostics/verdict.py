"""Does a Gaussian fit?  The examination of a q that is at its optimum, and the verdict with the numbers behind it.

A fit that has converged has found the best Gaussian.  Five numbers speak of the rest:
    linear response       the standard deviations that q ought to have, `linear_response`
    importance weights    moments of the density from a proposal as wide as that, `importance`
    margins               of coordinates of which the weights may know too little, by Laplace's method, `laplace_margin`
    tails                 fourth derivatives, which the third order cannot see
    other modes           where draws of q never come

Limits are on the logarithm of a standard deviation: a fit is called wrong where one is off by more than 30 per cent,
log 1.3 = 0.26, or a mean by more than 0.3 of them.  As no estimate decides at one limit, there are two.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_instance, read_list, read_seed, read_tensor, shown
from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.importance import USELESS, Corrected, Sampled, corrected_moments, worth
from torchngvi.diagnostics.linear_response import (
    LARGEST,
    Margin,
    Residuals,
    ThirdOrder,
    confirm,
    finite_pairs,
    laplace_margin,
    tails,
    third_order,
    third_order_of_values,
)
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Target
from torchngvi.messages import install
from torchngvi.mode import Mode, distinct, distinct_modes, find_modes, number_of_starts, starting_points
from torchngvi.models.factors import FAILING, VALUE, Guarded
from torchngvi.models.log_joint import FullPrecision, WarpedTarget, as_target, read_gaussian, read_posterior, unwarped
from torchngvi.numerics.arrays import tracked, writable
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warps import Warped
from torchngvi.structures import Dense

FITS, ABOUT, NOT, UNSEEN = "fits", "about right", "does not fit", "not examined"
WORDS = (FITS, ABOUT, NOT)
GAUSSIAN, BENT, FAN = "the Gaussian family", "the family of warped Gaussians", "a fan of Gaussians"
_SMALL = "times too small"  # of a standard deviation, in a clause
_MEAN = ": mean off by "
_NOTHING: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class ExaminationLimits:
    """The limits of an examination and its verdict, set on "tune" of ``benchmarks/truths`` and judged on "held"."""

    # of a log sd, and of a mean in sds: q fits below the first, and does not fit from the second on
    off: tuple[float, float] = (0.2, 0.35)
    wrong: float = math.log(1.3)  # of a log sd too small that may be even more so, from which on q does not fit
    tails: tuple[float, float] = (0.95, 1.15)  # of -κ, in the same way as `off`
    effective: float = 200.0  # draws from which on importance weights are trusted
    useful: float = 100.0  # draws from which on what they find speaks against q, though there may be more
    # of the k-hat of an sd: from the first on there may be more, from the second on more draws help
    wild: tuple[float, float] = (0.6, 0.7)
    wild_off: float = 0.15  # of a log sd below which q fits where there may be more
    # k-hat of an sd, known to about 0.1, from which on its margin is asked for; above 0.5 its error has no bound
    doubted: float = 0.4
    noted: float = 0.1  # log sd too small from which on one that may be more is looked at again
    errors: float = 2.0  # standard errors by which an estimate may be off
    clear: float = 1.0  # standard errors by which weights that are not trusted must be beyond a limit
    plain: tuple[float, float] = (0.5, 0.1)  # k-hat of the wider proposal, and nats away, below which q fits plainly
    beyond: float = 0.7  # log sd from which on the third order decides alone where importance weights are of no use
    skewed: tuple[float, float] = (0.05, 0.15)  # nats along the axes, and their share, from which on a warp is offered
    agreed: float = 0.2  # nats a coordinate up to which the evidence by Laplace's method is that of the weights
    hopeful: float = 100.0  # effective draws that more importance weights have to promise
    widest: int = 2000  # dimensions up to which M, of third derivatives, is formed
    searched: int = 60  # dimensions below which other modes are searched for
    starts: tuple[int, int] = (2, 8)  # of that search, at least and at most
    far: float = 4.0  # sds of q by which another mode is away from q, or 2 √D if no mode is near that it is apart from
    faint: float = 5.0  # nats below the ELBO down to which another mode counts


LIMITS = ExaminationLimits()


def name_of(names: Sequence[str], k: int) -> str:
    """The name of coordinate k, ``theta[k]`` where there are no names."""
    return names[k] if names else f"theta[{k}]"


class Marginals(NamedTuple):
    """The means and standard deviations of q, coordinate by coordinate."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)
    names: tuple[str, ...] = ()

    def name(self, k: int) -> str:
        """The name of coordinate k."""
        return name_of(self.names, k)

    def unresolved(self, least: float = 2.0) -> str | None:
        """Say which sd is less than so many spacings of the dtype at its mean: its draws show rounding alone."""
        # least: from there on rounding makes the variance of draws at most 2 percent larger, 1/(12 least^2)
        mean, sd = self[:2]
        for at in (sd < least * torch.finfo(mean.dtype).eps * mean.abs()).nonzero()[:1, 0].tolist():
            finer = ", or compute in torch.float64" * (mean.dtype != torch.float64)
            return (
                f"{self.name(at)} has the mean {float(mean[at]):.6g} and the sd {float(sd[at]):.2g}, which "
                f"{mean.dtype} cannot tell apart from rounding: give the parameter another origin{finer}"
            )
        return None


class Shape(NamedTuple):
    """What third and fourth derivatives say."""

    log_sd: Tensor  # log(sd by linear response / sd of q): confirmed where so marked, else to third order, (D,)
    standard_error: Tensor  # (D,)
    confirmed: Tensor  # by conjugate gradients, (D,)
    singular: Tensor  # the response has no size: larger than a factor of 3, (D,)
    tails: Tensor  # κ of each direction of the frame, below zero where tails are heavy, (D,)
    eigenvalue: float  # the largest of M, which is 0 for a Gaussian
    draws: int


class OtherMode(NamedTuple):
    """A mode of the density where q is not."""

    mean: Tensor  # (D,)
    log_evidence: float  # Laplace's
    distance: float  # in standard deviations of q, by its whole covariance
    share: float  # of the mass, by its evidence beside the ELBO of q and the evidence of the others


class Finding(NamedTuple):
    """One thing that speaks against q."""

    grade: int  # 0 fits, 1 about right, 2 does not fit
    size: float
    clause: str
    about: str = ""  # the standard deviation of which coordinate, which two ways of looking may both find


def grade(value: float, limits: tuple[float, float] = LIMITS.off) -> int:
    """0 below the first limit, 1 between the two, 2 from the second on."""
    return (value >= limits[0]) + (value >= limits[1])


# How far importance weights and margins are believed


def trusted(sampled: Sampled | None) -> bool:
    """Whether the wider proposal has reached the density, by its k̂ and its effective draws."""
    return sampled is not None and sampled.corrected.k_hat < USELESS and sampled.corrected.effective >= LIMITS.effective


def useful(sampled: Sampled | None) -> bool:
    """Whether there are draws enough for what they find to count."""
    return sampled is not None and sampled.corrected.effective >= LIMITS.useful


def skewed(sampled: Sampled | None) -> bool:
    """Whether skewness of the margins, Σ skewness²/12 nats or so, is a good part of what q misses."""
    if sampled is None or sampled.corrected.skewness is None or not trusted(sampled):
        return False
    lost = float(sampled.corrected.skewness.square().sum()) / 12
    return lost >= LIMITS.skewed[0] and not lost < LIMITS.skewed[1] * sampled.from_q.nats


def plain(marginals: Marginals, sampled: Sampled) -> bool:
    """Whether few draws of a proposal that knows nothing but q leave no doubt that q fits."""
    found, own = sampled.corrected, sampled.from_q
    log_sd = log_ratio(marginals, found).abs() + LIMITS.errors * found.log_sd_error
    shift = ((found.mean - marginals.mean).abs() + LIMITS.errors * found.mean_error) / found.sd
    clear = trusted(sampled) and found.k_hat < LIMITS.plain[0] and own.nats < LIMITS.plain[1]
    return clear and bool(((log_sd < _limit(found)) & (shift < LIMITS.off[0])).all())


def _limit(found: Corrected) -> Tensor:
    """Of each log sd the limit up to which q fits: lower where the squares that make it up have no finite variance."""
    return torch.where(_wild(found, LIMITS.wild[0]), LIMITS.wild_off, LIMITS.off[0])


def _wild(found: Corrected, limit: float) -> Tensor:
    """Where the k̂ of a standard deviation is at least so large, (D,); nowhere if it is unknown."""
    own = torch.zeros_like(found.sd) if found.sd_k_hat is None else found.sd_k_hat.nan_to_num(0.0)
    return own >= limit


def unsure(sampled: Sampled | None) -> bool:
    """Whether some standard deviation has a k̂ beyond which what was found is no measure of what there is."""
    return sampled is not None and bool(_wild(sampled.corrected, LIMITS.wild[1]).any())


def undecided(marginals: Marginals, sampled: Sampled, measured: Mapping[int, float] = _NOTHING) -> bool:
    """Whether more draws may change the word."""
    found = sampled.corrected
    size, error = log_ratio(marginals, found).abs(), LIMITS.errors * found.log_sd_error
    both = (size - error < LIMITS.off[0]) & (size + error > LIMITS.off[1])
    wild = _wild(found, LIMITS.wild[1]) & (size > LIMITS.noted) & (size < LIMITS.off[1])
    own, known = _known(marginals, found, measured)
    beyond = torch.where(known, own, size - error if useful(sampled) else -math.inf) >= LIMITS.off[1]
    return bool(((both | wild) & ~known).any()) and not bool(beyond.any())


def _known(marginals: Marginals, found: Corrected, measured: Mapping[int, float]) -> tuple[Tensor, Tensor]:
    """The log sds of margins, minus infinity elsewhere, and where they are believed, (D,) each."""
    own = torch.full_like(found.sd, -math.inf)
    for k, value in measured.items():
        own[k] = value
    return own, own >= log_ratio(marginals, found) - LIMITS.errors * found.log_sd_error


def doubted(marginals: Marginals, sampled: Sampled, shape: Shape | None) -> list[int]:
    """Coordinates of which the weights find an sd too small, and may not have found all of it; the worst first."""
    if not useful(sampled):
        return [] if shape is None else in_doubt(shape)
    found, believed = sampled.corrected, trusted(sampled)
    log_sd = log_ratio(marginals, found)
    sizes = log_sd - (0.0 if believed else LIMITS.clear) * found.log_sd_error
    if bool((sizes >= LIMITS.off[1]).any()):
        return []
    asked = (log_sd >= LIMITS.noted) & (_wild(found, LIMITS.doubted) | (not believed))
    return [k for k in log_sd.argsort(descending=True).tolist() if bool(asked[k])]


def agrees(margin: Margin, sampled: Sampled) -> bool:
    """Whether Laplace's method has the evidence of importance weights, about, without which its margins say nothing."""
    apart = margin.log_evidence - sampled.corrected.log_evidence
    return abs(apart) <= LIMITS.agreed * len(sampled.corrected.sd)


def in_doubt(shape: Shape) -> list[int]:
    """Coordinates whose response may be above the first limit, by two standard errors, the worst first."""
    likely = shape.log_sd.abs() + LIMITS.errors * shape.standard_error
    return [k for k in likely.argsort(descending=True).tolist() if float(likely[k]) >= LIMITS.off[0]]


def log_ratio(marginals: Marginals, corrected: Corrected) -> Tensor:
    """log(sd by importance sampling / sd of q), (D,)."""
    return (corrected.sd / marginals.sd).log()


# The word and its reasons


def judge(
    marginals: Marginals,
    shape: Shape | None,
    sampled: Sampled | None,
    modes: Sequence[OtherMode],
    measured: Mapping[int, float] = _NOTHING,
) -> tuple[str, tuple[str, ...]]:
    """The word and its reasons; the log sds of margins in those of q are measured, by coordinate.

    >>> judge(Marginals(torch.zeros(1), torch.ones(1)), None, None, ())
    ('not examined', ('no importance weights to tell more',))
    """
    findings = _by_sampling(marginals, sampled, measured) + _by_modes(marginals, modes, sampled)
    if not trusted(sampled):
        findings += [] if shape is None else _by_response(marginals, shape, sampled, measured)
        unsettled = "no importance weights to tell more" if sampled is None else "importance weights do not tell more"
        findings.append(Finding(1, 0.0, unsettled))
    findings = sorted((one for one in findings if one.grade), key=lambda one: (-one.grade, -one.size))
    highest = findings[0].grade if findings else 0
    if shape is None and not trusted(sampled) and highest < 2:
        return UNSEEN, tuple(one.clause for one in findings)
    largest = {one.about or one.clause: one for one in reversed(findings) if one.grade == highest}
    return WORDS[highest], tuple(one.clause for one in findings if one in largest.values())


def _of_sd(marginals: Marginals, k: int, level: int, size: float, clause: str) -> Finding:
    """A finding about the standard deviation of a coordinate."""
    return Finding(level, size, f"{marginals.name(k)}: {clause}", marginals.name(k))


def _by_sampling(marginals: Marginals, sampled: Sampled | None, measured: Mapping[int, float]) -> list[Finding]:
    """The standard deviation and the mean that importance weights, or a margin that was measured, move most."""
    if not useful(sampled):
        return [_of_sd(marginals, k, grade(value), value, _times(value)) for k, value in measured.items()]
    assert sampled is not None
    found, believed = sampled.corrected, trusted(sampled)
    log_sd, (own, known) = log_ratio(marginals, found), _known(marginals, found, measured)
    shift, error = (found.mean - marginals.mean) / found.sd, found.mean_error / found.sd
    margin = 0.0 if believed else LIMITS.clear
    sizes, shifts = log_sd.abs() - margin * found.log_sd_error, shift.abs() - margin * error
    sizes = torch.where(known, sizes.maximum(own), sizes)
    more = ~known & (_wild(found, LIMITS.wild[0]) | (not believed))
    limit = torch.where(known, LIMITS.off[0], _limit(found))
    grades = (sizes >= limit).int() + (sizes >= LIMITS.off[1]).int()
    grades = torch.where(more & (log_sd - LIMITS.clear * found.log_sd_error >= LIMITS.wrong), 2, grades)
    k, j = int((10 * grades + sizes.nan_to_num(0.0)).argmax()), int(shifts.nan_to_num(0.0).argmax())
    size = max(float(log_sd[k]), float(own[k])) if bool(known[k]) else float(log_sd[k])
    bound = "at least " if bool(more[k]) and int(grades[k]) == 2 else ""
    clause, second = f"{marginals.name(j)}{_MEAN}about {float(shift[j].abs()):.2g} sd", float(shifts[j])
    return [
        _of_sd(marginals, k, int(grades[k]), float(sizes[k]), _times(size, bound)),
        Finding(grade(second), second, clause),
    ]


def _times(log_sd: float, bound: str = "") -> str:
    """By what factor an sd is off; with a bound where draws tell it, which see no more of a density than they reach."""
    if log_sd > 0:
        return f"sd {bound}about {math.exp(log_sd):.2g} {_SMALL}"
    return f"sd about {math.exp(-log_sd):.2g} times too large"


def _by_response(
    marginals: Marginals, shape: Shape, sampled: Sampled | None, measured: Mapping[int, float]
) -> list[Finding]:
    """The worst coordinate by linear response, and the heaviest tails, of a direction that has no name."""
    size = torch.where(shape.singular, LARGEST, shape.log_sd.abs())
    known = bool(shape.confirmed.any()) or bool(measured)
    alone = sampled is not None and not useful(sampled) and not known
    beyond = (size - LIMITS.errors * shape.standard_error >= LIMITS.beyond) & alone
    size = torch.where(shape.confirmed | beyond, size, size.clamp_max(0.0 if measured else LIMITS.off[1] - 1e-6))
    k = int(size.argmax())
    value = float(size[k])
    clause = f"sd at least 3 {_SMALL}, by linear response" if value >= LARGEST else _times(float(shape.log_sd[k]))
    clause += "" if bool(shape.confirmed[k]) else ", by the third order alone"
    heaviest = float((-shape.tails).nan_to_num(0.0).max())
    tails = Finding(grade(heaviest, LIMITS.tails), heaviest, "tails much heavier than normal")
    return [_of_sd(marginals, k, grade(value), value, clause), tails]


def _by_modes(
    marginals: Marginals, modes: Sequence[OtherMode], sampled: Sampled | None, shown: int = 4
) -> list[Finding]:
    """What the mixture of q and the other modes would have for moments, each mode as wide as q."""
    if not modes:
        return []
    share = torch.tensor([mode.share for mode in modes], device="cpu").to(marginals.mean)
    apart = (torch.stack([mode.mean for mode in modes]) - marginals.mean) / marginals.sd
    shift = share @ apart
    spread = (1 + share @ apart.square() - shift.square()).clamp_min(1.0)
    log_sd, shift = 0.5 * spread.log(), shift / spread.sqrt()
    level = max(grade(float(size.abs().max())) for size in (log_sd, shift))
    first = max(modes, key=lambda mode: mode.share)
    place = ", ".join(f"{x:.3g}" for x in first.mean[:shown].tolist()) + (", .." if len(first.mean) > shown else "")
    beside = "" if sampled is None else f", evidence {first.log_evidence - sampled.from_q.elbo:+.1f}"
    many = f"{len(modes)} other mode{'s' * (len(modes) > 1)}"
    return [Finding(level, float(log_sd.max()), f"{many}, at ({place}){beside}")]


# What is returned, and its table


class Effort(NamedTuple):
    """What it took, and what was left out."""

    gradients: int
    values: int
    starts: int  # of the search for modes
    unexamined: tuple[str, ...]  # clauses: what, and why
    climbed: int = 0  # draws of large weight from which modes were searched for too


@dataclass(frozen=True)
class Verdict:
    """Whether the family of q fits the density that q was fitted to, and the numbers that say so.

    ``str`` is the table: the word with its reasons, the numbers, and the four coordinates that are worst.

    Attributes:
        word: "fits", "about right", "does not fit", or "not examined" where nothing could be told.
        reasons: clauses, the worst first; none where q fits.
        marginals: means and standard deviations of q.
        shape: linear response and tails; None where not examined.
        sampled: importance sampling, from q and from a wider proposal; None where not examined.
        modes: other modes that were found.
        effort: gradients and values that it took, and what was not examined.
        coordinates: what would give other coordinates, a clause from who knows the model; empty where nobody does.
        family: what q is the best of, in words.  Of a warped one linear response and modes are in the space of its
            base, before it is bent.
        margins: by coordinate, its margin by Laplace's method where importance weights may know too little of it.

    >>> import torch
    >>> marginals = Marginals(torch.zeros(1), torch.ones(1), ("mu",))
    >>> verdict = Verdict(UNSEEN, (), marginals, None, None, (), Effort(0, 0, 0, ("tails",)))
    >>> print(verdict)
    the Gaussian family: not examined
      no numbers
      next: try torchngvi.examine(q, log_joint) with a larger max_gradients
      not examined: tails
    """

    word: str
    reasons: tuple[str, ...]
    marginals: Marginals
    shape: Shape | None
    sampled: Sampled | None
    modes: tuple[OtherMode, ...]
    effort: Effort
    coordinates: str = ""
    family: str = GAUSSIAN
    margins: Mapping[int, Margin] = field(default_factory=dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a pickle holds; one of 0.2.0 has no margins."""
        self.__dict__.update({"margins": {}} | state)

    @classmethod
    def none(cls, why: str) -> Self:
        """Say that nothing was examined, and why.

        >>> Verdict.none("nobody has asked").word
        'not examined'
        """
        nothing = torch.empty(0, device="cpu")
        return cls(UNSEEN, (), Marginals(nothing, nothing), None, None, (), Effort(0, 0, 0, (why,)))

    def named(self, names: Sequence[str]) -> Self:
        """The same with names for the coordinates; where nothing was examined there are none to name.

        Raises:
            InputError: another number of names than of coordinates.
        """
        dim, names = len(self.marginals.mean), tuple(names)
        if not dim:
            return self
        if len(names) != dim:
            raise InputError(f"names must have one entry a coordinate, {dim}; got {len(names)}.")
        table = {self.marginals.name(k): name for k, name in enumerate(names)}
        reasons = tuple(_renamed(reason, table) for reason in self.reasons)
        return replace(self, marginals=self.marginals._replace(names=names), reasons=reasons)

    def worst(self, count: int = 4) -> list[int]:
        """The coordinates whose standard deviations are most in doubt, the worst first."""
        if self.sampled is not None and (trusted(self.sampled) or self.shape is None):
            size = log_ratio(self.marginals, self.sampled.corrected).abs()
        elif self.shape is not None:
            size = self.shape.log_sd.abs()
        else:
            return []
        return size.nan_to_num(0.0).topk(min(count, len(size))).indices.tolist()

    @property
    def next(self) -> str:
        """What to do now, as a clause; nothing where q fits."""
        if self.word == FITS:
            return ""
        if self.word == UNSEEN:
            larger = "try torchngvi.examine(q, log_joint) with a larger max_gradients"
            return larger if len(self.marginals.mean) and self.family != FAN else ""
        if self.modes:
            return 'try torchngvi.refine(q, log_joint, kind="mixture"), with a Gaussian at each mode'
        others = self.coordinates or "other coordinates of the parameters"
        off = self.sampled is not None and self.sampled.from_q.nats == math.inf  # `refine` begins at draws of q too
        others += off * " without bounds, as the logarithm of a scale or the logit of a share"
        then = f"try {others}" if off or self.family == FAN else f"try torchngvi.refine(q, log_joint), or {others}"
        if self.word == ABOUT and any(_SMALL in reason or _MEAN in reason for reason in self.reasons):
            then += ", before you rely on standard deviations or means"
        elif self.word == ABOUT:
            then = f"nothing found speaks against its means; where a standard deviation matters, {then}"
        if self.family == GAUSSIAN and skewed(self.sampled):  # draws have third moments by chance where tails are heavy
            then += (
                "; its margins are not normal: try torchngvi.fit(q.warped(), log_joint) too, or .warped(inside=True)"
            )
        return then

    def plot(self) -> Any:
        """Draw the standard deviations that q ought to have beside its own, and the tail of the importance weights.

        On the left a row for each coordinate, the most doubtful first: the standard deviations by linear response and
        by importance sampling in those of q, with two standard errors, before the bands of "fits" and "about right".
        On the right the share of draws whose importance weight is larger, of q and of the wider proposal: the slope of
        its end is -1/k-hat.

        Returns:
            A matplotlib figure; ``figure.savefig(path)`` writes it.

        Raises:
            InputError: matplotlib is not installed, or nothing was examined.
        """
        if not len(self.marginals.mean):
            why = "; ".join(self.effort.unexamined)
            raise InputError(f"a verdict is drawn from what an examination has found, and there was none: {why}.")
        return _draw(self, (self.worst(len(self.marginals.sd)) or list(range(len(self.marginals.sd))))[:25])

    def _head(self) -> str:
        if self.word == UNSEEN and self.sampled is not None:
            return f"{self.family}: whether it fits could not be told"
        return f"{self.family}: " + (self.word.upper() if self.word == NOT else self.word)

    def __str__(self) -> str:
        lines = ["; ".join([self._head(), *self.reasons]), *(f"  {line}" for line in (self._numbers(), *self._table()))]
        if self.next:
            lines.append(f"  next: {self.next}")
        if self.effort.unexamined:
            lines.append("  not examined: " + "; ".join(self.effort.unexamined))
        return "\n".join(lines)

    def _numbers(self) -> str:
        parts = []
        if self.sampled is not None:
            own, corrected = self.sampled.from_q, self.sampled.corrected
            parts += [
                f"about {own.nats:.1g} nats from the posterior as far as draws of q can tell"
                if math.isfinite(own.nats)
                else "some draws of q are where the log joint has no value",
                f"importance weights of q: {worth(own.k_hat, own.effective, self.sampled.draws // 2)}",
                f"of a wider proposal: {worth(corrected.k_hat, corrected.effective, self.sampled.draws)}",
            ]
        if self.shape is not None:
            parts.append(f"linear response: top eigenvalue {self.shape.eigenvalue:.2g}")
        for k, margin in self.margins.items():
            parts.append(f"sd of {self.marginals.name(k)} along its margin, by Laplace's method: {margin.sd:.4g}")
        started = [f"{self.effort.starts} starts in U(-2, 2)"] if self.effort.starts else []
        started += [f"{self.effort.climbed} draws of large weight"] if self.effort.climbed else []
        if started:
            found = len(self.modes)
            parts.append(f"{found or 'no'} other mode{'s' * (found != 1)} from {' and '.join(started)}")
        return "; ".join(parts) or "no numbers"

    def _table(self) -> list[str]:
        worst = self.worst()
        if not worst:
            return []
        names, marginals = [self.marginals.name(k) for k in worst], self.marginals
        width = max(map(len, [*names, "coordinate"]))
        mean, sd = marginals.mean, marginals.sd
        lines = [f"{'coordinate':{width}}{'mean':>11}{'sd':>11}"]
        lines += [f"{name:{width}}{mean[k]:11.4g}{sd[k]:11.4g}" for name, k in zip(names, worst, strict=True)]
        legend = []
        if self.shape is not None:
            responses = [_response_sd(self.shape, marginals, k) for k in worst]
            lines = [f"{line}{cell:>14}" for line, cell in zip(lines, ["response sd", *responses], strict=True)]
            marks = {
                "~": "~ to third order alone, which overshoots where it is large",
                ">=": ">= three sds of q or more, too far for linear response to measure",
            }
            legend = [text for mark, text in marks.items() if any(mark in response for response in responses)]
        if self.sampled is not None:
            found = self.sampled.corrected
            cells = [f"{'sampled mean':>15}{'sampled sd':>13}"]
            cells += [
                f"{found.mean[k]:15.4g}{found.sd[k]:13.4g} ± {found.sd[k] * found.log_sd_error[k]:.1g}" for k in worst
            ]
            lines = [line + cell for line, cell in zip(lines, cells, strict=True)]
        return [*lines, *([f"response sd is an estimate: {'; '.join(legend)}"] if legend else [])]


def _response_sd(shape: Shape, marginals: Marginals, k: int) -> str:
    """The standard deviation by linear response, with ~ where it is of third order only."""
    mark = "" if bool(shape.confirmed[k]) else "~"
    if bool(shape.singular[k]) or float(shape.log_sd[k]) >= LARGEST:
        return f"{mark}>= {3 * marginals.sd[k]:.4g}"
    return f"{mark}{marginals.sd[k] * shape.log_sd[k].exp():.4g}"


def _renamed(clause: str, table: dict[str, str]) -> str:
    """A clause with another name of its coordinate, which stands before the colon; names may have colons themselves."""
    known = [old for old in table if clause.startswith(f"{old}: ")]
    old = max(known, key=len, default="")
    return table.get(old, "") + clause[len(old) :]


# The picture: standard deviations that q ought to have in those of q, and the tails of the importance weights

BLUE, ORANGE, RED, INK, FAINT = "#1f5a94", "#d1672b", "#c23b22", "#222222", "#9aa0a6"


def new_figure(what: str, width: float, height: float) -> Any:
    """Make an empty figure of a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"the picture of {what} needs matplotlib, which is not installed: {install('cli')}."
        ) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _draw(verdict: Verdict, shown: list[int]) -> Any:
    """Draw both panels for these coordinates."""
    figure = new_figure("a verdict", 9.0, max(4.2, 2.0 + 0.3 * len(shown)))
    figure.suptitle(verdict._head(), x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK, parse_math=False)
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1.0))
    for axes in (left, right):
        axes.tick_params(labelsize=9, color=FAINT, labelcolor=INK)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_deviations(left, verdict, shown)
    _draw_tails(right, verdict.sampled)
    return figure


def _draw_deviations(axes: Any, verdict: Verdict, shown: list[int]) -> None:
    """A row for each coordinate: q is at 1, before the bands of the two limits."""
    marginals, sampled, rows = verdict.marginals, verdict.sampled, list(range(len(shown)))
    of = f", the {len(shown)} most doubtful of {len(marginals.sd)}" if len(shown) < len(marginals.sd) else ""
    title = f"sd in units of q's{of} (shaded: fits, about right)"
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    for limit, shade in zip(LIMITS.off[::-1], ("#f4f4f2", "#e6ecf2"), strict=True):
        axes.axvspan(math.exp(-limit), math.exp(limit), color=shade, zorder=0)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    if verdict.shape is not None:
        _draw_response(axes, verdict.shape, shown)
    if sampled is not None:
        size = log_ratio(marginals, sampled.corrected)[shown]
        error = LIMITS.errors * sampled.corrected.log_sd_error[shown]
        spread = [(size.exp() - (size - error).exp()).tolist(), ((size + error).exp() - size.exp()).tolist()]
        believed = trusted(sampled)
        axes.errorbar(
            size.exp().tolist(), [row + 0.14 for row in rows], xerr=spread, fmt="s", color=ORANGE, markersize=4.5,
            markerfacecolor=ORANGE if believed else "white", elinewidth=1.1,
            label="by importance sampling" + ("" if believed else " (not believed)"),
        )  # fmt: skip
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.6), max(high, 1.7))
    ticks = [x for x in (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0, 20.0) if low <= x <= max(high, 1.7)]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(rows, [marginals.name(k) for k in shown], parse_math=False)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.06), fontsize=9, frameon=False, borderpad=0)


def _draw_response(axes: Any, shape: Shape, shown: list[int]) -> None:
    """Circles: full where confirmed, open to third order only, arrows where only a bound is known."""
    at = shape.log_sd[shown].clamp_max(LARGEST)
    beyond = (shape.singular[shown] | (shape.log_sd[shown] >= LARGEST)).tolist()
    confirmed = shape.confirmed[shown].tolist()
    for label, marker, face, chosen in (
        ("by linear response, confirmed", "o", BLUE, lambda k: confirmed[k] and not beyond[k]),
        ("by linear response, to third order", "o", "white", lambda k: not confirmed[k] and not beyond[k]),
        ("by linear response, 3 or more", ">", BLUE, lambda k: beyond[k]),
    ):
        rows = [k for k in range(len(shown)) if chosen(k)]
        if rows:
            x, y = [math.exp(LARGEST if beyond[k] else float(at[k])) for k in rows], [row - 0.14 for row in rows]
            axes.plot(x, y, marker, color=BLUE, markerfacecolor=face, markersize=5.5, label=label)


def _draw_tails(axes: Any, sampled: Sampled | None) -> None:
    """The share of draws whose weight is larger, on two logarithmic scales: -1/k-hat is the slope of its end."""
    axes.set_title("importance weights", loc="left", fontsize=9.5, color=INK)
    if sampled is None or sampled.weights is None:
        axes.text(0.5, 0.5, "no importance weights", ha="center", va="center", transform=axes.transAxes, color=FAINT)
        axes.set_axis_off()
        return
    for label, log_weights, found, colour in (
        ("draws of q", sampled.weights.from_q, sampled.from_q, INK),
        ("a wider proposal", sampled.weights.corrected, sampled.corrected, ORANGE),
    ):
        weight, share = _curve(log_weights)
        text = f"{label}: k-hat {found.k_hat:.2f}, worth {found.effective:.0f} of {len(log_weights)}"
        axes.plot(weight, share, color=colour, linewidth=1.4, label=text)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, 1e-2), max(high, 10.0))
    bottom, guide = axes.get_ylim()[0], [1.0, 10.0 ** (USELESS * 3)]
    axes.plot(guide, [0.3, 0.3e-3], color=FAINT, linestyle="--", linewidth=1.0, label=f"slope at k-hat {USELESS}")
    axes.set_ylim(bottom, 1.2)
    axes.set_xlabel("weight, 1 if all were equal", fontsize=9.5, color=INK)
    axes.set_ylabel("share of draws with a larger one", fontsize=9.5, color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.06), fontsize=9, frameon=False, borderpad=0)


def _curve(log_weights: Tensor, points: int = 400) -> tuple[list[float], list[float]]:
    """Weights, falling, and the share of draws as large; not all in the bulk, all in the tail."""
    ordered = log_weights.double().sort(descending=True).values
    ranks = torch.logspace(0, math.log10(len(ordered)), points, dtype=torch.float64, device="cpu")
    ranks = ranks.round().long().unique()
    kept = ordered[ranks - 1]
    seen = kept > -30.0
    return kept[seen].exp().tolist(), (ranks[seen] / len(ordered)).tolist()


# ------------------------------------------------------------------------------------ the examination

_RISES = "the log joint rises away from q, so that q is not its fit: does the function return -log p, an energy?"


@dataclass(frozen=True)
class ExaminationSettings:
    """How much an examination asks of a log joint: numbers of draws and calls, and never seconds.

    The numbers were chosen on the parts "tune" and "fresh 1" of ``benchmarks/truths`` and judged on "held" and "fresh
    2", by ``python -m benchmarks.verdicts --least 8000``, which prints the words and the cost with another budget.

    Attributes:
        least: cost, in gradients and values at 0.4 of one, that an examination at the end of a fit may take where the
            fit itself has taken less. Below 5,000 right fits are called wrong, 2 to 4 of 197 with 1,300 to 2,500;
            with 5,000 one of eight fits of eight schools, centred, is "about right" and none with 8,000; above that
            there is nothing to gain.
        share: of the cost of the fit that it may take where that is more.
        glance: values of the log joint that may suffice after a fit.
        draws: of the importance weights.
        more_draws: of these where the first do not decide.
        residuals: draws of the third order, at least.
        residuals_each: the same for each coordinate.
        mirrored: values in the place of residuals where there is no room for gradients, at least.
        confirmed: draws of a confirmation by conjugate gradients.
        products: of a coordinate for which the budget has to suffice.
        at_once: coordinates that are confirmed together.
        margins: coordinates whose margin is followed by Laplace's method where weights know too little of it.

    >>> ExaminationSettings().draws
    4096
    """

    least: float = 8_000.0
    share: float = 1.0
    glance: int = 1024
    draws: int = 4096
    more_draws: int = 16_384
    residuals: int = 512
    residuals_each: int = 16
    mirrored: int = 1024
    confirmed: int = 512
    products: int = 4
    at_once: int = 5
    margins: int = 2

    def cost_after(self, fitted: float) -> float:
        """What the examination at the end of a fit may cost.

        Args:
            fitted: what the fit has cost, in gradients and values at 0.4 of one.

        Returns:
            The cost, in the same unit.

        >>> ExaminationSettings(least=100.0, share=0.5).cost_after(1000.0)
        500.0
        """
        return max(self.least, self.share * fitted)


_USUAL = ExaminationSettings()


class Allowance:
    """A budget from now on."""

    def __init__(
        self, target: Guarded, gradients: int, cost: float = math.inf, over: Callable[[], bool] = lambda: False
    ) -> None:
        self.target, self.gradients, self.cost, self.over = target, gradients, cost, over
        self._before = target.gradients, target.values

    @property
    def spent(self) -> tuple[int, int]:
        """Gradients and values since the beginning."""
        return self.target.gradients - self._before[0], self.target.values - self._before[1]

    @property
    def left(self) -> int:
        """Gradients that may still be asked for; none where the time is over."""
        gradients, values = self.spent
        left = min(self.gradients - gradients, self.cost - gradients - VALUE * values)
        return 0 if self.over() else max(int(left), 0)

    @property
    def values_left(self) -> float:
        """Values without a gradient that may still be asked for; none where the time is over."""
        gradients, values = self.spent
        return 0.0 if self.over() else (self.cost - gradients) / VALUE - values

    def __str__(self) -> str:
        """The budget, as a clause."""
        return "no time left" if self.over() else f"a budget of {int(min(self.gradients, self.cost))} gradients"


@tracked
@torch.no_grad()
def examine(
    q: Gaussian | Warped,
    target: Target | Callable[[Tensor], Tensor],
    *,
    residuals: Residuals | None = None,
    modes: Sequence[Mode] | None = None,
    around: Tensor | float = 0.0,
    max_gradients: int = 50_000,
    seed: int = 0,
    settings: ExaminationSettings = _USUAL,
) -> Verdict:
    """Say whether the family of q fits the density that q was fitted to.

    What it cannot see: a region that neither draws of q nor the starts of the search for modes come to.

    Args:
        q: one posterior at the optimum of its ELBO, Gaussian or `Warped`; it is not changed.
        target: a model, or a function of theta returning the log joint, which gives the same value twice.
        residuals: Cᵀ∇ℓ/γ - z at antithetic draws, as the last sample average of a fit has them; too few are not used.
        modes: of the density, found elsewhere; by default they are searched for where D < 60. From draws with large
            weights they are in any case, where weights are not to be believed.
        around: where that search starts, (D,): the mean that q had before the fit, to which U(-2, 2) is added. Half of
            the points lie so about zero.
        max_gradients: a budget; what it does not reach is said in the verdict.
        seed: of all draws; the same q, log joint, seed and budget have the same verdict, whatever the machine does.
        settings: how many calls of the log joint each part takes.

    Returns:
        The verdict, which holds all numbers and prints as a table.

    Raises:
        InputError: a batch of posteriors, a temperature of 0, a budget or a shape that does not fit.
        PairError: a posterior that is not Gaussian.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> verdict = examine(q, lambda theta: -0.5 * theta.square().sum(-1))
    >>> verdict.word, verdict.effort.gradients < 1000
    ('fits', True)
    """
    q, target = unwarped(read_posterior("examine", q, target), as_target(target))
    q = read_gaussian("examine", q)
    around = read_tensor("around", around, like=q.mean_probe)
    if around.shape not in ((), (q.dim,)):
        raise InputError(f"around must be a scalar or ({q.dim},); got shape {tuple(around.shape)}.")
    seed = read_seed("seed", seed)
    read_instance("settings", settings, ExaminationSettings, "are those of an examination, ExaminationSettings()")
    what = "are those of the density, a list of torchngvi.mode.Mode, or None"
    if modes is not None and not all(isinstance(mode, Mode) for mode in read_list("modes", modes, what)):
        raise InputError(f"modes {what}; got {shown(modes)}.")
    if q.batch_shape:
        raise InputError(f"examine takes one posterior at a time; got a batch of shape {tuple(q.batch_shape)}.")
    if target.temperature == 0:
        raise InputError(
            "examine compares q with the density exp(log joint / temperature); got temperature 0, where there is none."
        )
    budget = read_count("max_gradients", max_gradients, "is a budget of gradients")
    if residuals is not None:
        _check_residuals(q, residuals)
    with FullPrecision(q.device.type):
        return _Examination(q, Allowance(Guarded(target), budget), seed, settings).run(residuals, modes, around)


@tracked
@torch.no_grad()
def examine_fitted(
    q: Gaussian,
    allowed: Allowance,
    *,
    modes: Sequence[Mode] | None = None,
    starts: int = 0,  # from which these were searched
    around: Tensor | float = 0.0,  # (D,)
    seed: int = 0,
    settings: ExaminationSettings = _USUAL,
) -> Verdict:
    """As `examine`, at the end of a fit: within an allowance, and no dearer than it need be."""
    with FullPrecision(q.device.type):
        return _Examination(q, allowed, seed, settings, starts).run(None, modes, around, glance=True)


def _check_residuals(q: Gaussian, residuals: Residuals) -> None:
    what = "are antithetic draws and what remains there, torchngvi.diagnostics.Residuals(z, residual)"
    read_instance("residuals", residuals, Residuals, what)
    for part in residuals:
        read_instance("residuals", part, Tensor, what)
    shapes = [tuple(part.shape) for part in residuals]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] != q.dim:
        raise InputError(f"residuals must be draws and residuals of shape (S, {q.dim}) each; got {shapes}.")


class _Examination:
    """One q, a budget, and what was left out."""

    def __init__(
        self, q: Gaussian, allowed: Allowance, seed: int, settings: ExaminationSettings, starts: int = 0
    ) -> None:
        self.q, self.target, self.allowed, self.seed, self.starts = q, allowed.target, allowed, seed, starts
        self.settings, self.margins, self.followed = settings, dict[int, Margin](), set[int]()
        self.frame, self.warped = q.frame(), isinstance(allowed.target.target, WarpedTarget)
        self.marginals = Marginals(self.frame.mean.clone(), q.stddev)
        self.unexamined: list[str] = []
        self.product = 2 * max(settings.confirmed, 2 * q.structure.widest + 2)  # gradients of one of a confirmation
        self.rises = False  # the log joint, away from q
        self.climbed = 0  # draws of large weight from which modes were searched for

    def run(
        self, residuals: Residuals | None, modes: Sequence[Mode] | None, around: Tensor | float, *, glance: bool = False
    ) -> Verdict:
        """The cheap numbers first; then modes, whose search has an end; then what is left for confirmations."""
        self.target.log_joint(self.frame.mean[None])  # raises as it would alone; later failures are found draw by draw
        if not self.warped and (coarse := self.marginals.unresolved()) is not None:
            return Verdict.none(coarse)
        sampled = shape = None
        if glance and self.settings.glance <= self.allowed.values_left:
            sampled = self._sampled(None, self.settings.glance, self.seed + 7)
        if sampled is not None and plain(self.marginals, sampled):
            self.unexamined.append("linear response and tails (importance weights leave no doubt)")
        elif trusted(sampled) and not self._affords_more():
            self.follow(sampled)
            self.unexamined += [
                f"{what} ({self.allowed})" for what in ("linear response and tails", "more importance weights")
            ]
        elif glance and judge(self.marginals, None, None, self.others(modes or (), sampled))[0] == NOT:
            self.unexamined.append("linear response and tails (q does not fit without them)")
        else:
            residuals = self.residuals(residuals)
            self.rises = residuals is not None and residuals.rise
            third = self.third(residuals)
            shape = None if third is None else self.shape(third, residuals)
            sampled = self.sampled(third, shape) or sampled
            self.follow(sampled, shape)
        doubtful = None if trusted(sampled) else shape
        if glance and modes is None:  # the search is the dearest part of all
            if doubtful is not None and self.judged(None, sampled)[0] != NOT:  # without the third order
                self.confirm(doubtful)
            doubtful = None
            if self.judged(shape, sampled)[0] == NOT:
                modes = ()
                self.unexamined.append("other modes (q does not fit without them)")
        found = [*(self.search(around) if modes is None else modes)]
        others = self.others(found, sampled)
        if self.judged(shape, sampled, others)[0] != NOT:
            others = self.others(found + self.uphill(sampled), sampled)
        if doubtful is not None:
            self.confirm(doubtful)
        word, reasons = self.judged(shape, sampled, others)
        if self.rises:
            word, reasons = NOT, (_RISES, *(reasons if word == NOT else ()))
        effort = Effort(*self.allowed.spent, self.starts, tuple(self.unexamined), self.climbed)
        family = BENT if self.warped else GAUSSIAN
        numbers = self.marginals, shape, sampled, others, effort
        return Verdict(word, reasons, *numbers, family=family, margins=self.margins)

    def judged(
        self, shape: Shape | None, sampled: Sampled | None, others: Sequence[OtherMode] = ()
    ) -> tuple[str, tuple[str, ...]]:
        """The word and its reasons by what was found so far."""
        return judge(self.marginals, shape, sampled, others, self.measured)

    @property
    def measured(self) -> dict[int, float]:
        """log(sd of a margin / sd of q), by coordinate."""
        return {k: math.log(margin.sd / float(self.marginals.sd[k])) for k, margin in self.margins.items()}

    def wanted(self, least: int) -> int:
        """Draws of the third order in so many dimensions."""
        return max(least, self.settings.residuals_each * self.q.dim)

    def _affords_more(self) -> bool:
        """Whether there is room for residuals, or the values in their place, and for weights by what these say."""
        residuals, values = self.wanted(self.settings.residuals), self.wanted(self.settings.mirrored)
        values = math.ceil(residuals / VALUE) if residuals <= self.allowed.left else values
        return values + self.settings.glance <= self.allowed.values_left

    # -------------------------------------------------------------------------------- importance sampling

    def sampled(self, third: ThirdOrder | None, shape: Shape | None) -> Sampled | None:
        """From a proposal as wide as linear response says; with more draws where neither they nor margins decide."""
        matrix = None if third is None else third.matrix
        draws = int(min(self.allowed.values_left, self.settings.draws)) // 4 * 4
        if draws < self.settings.glance:
            self.unexamined.append(f"more importance weights ({self.allowed})")
            return None
        found = self._sampled(matrix, draws, self.seed + 1)
        self.follow(found, shape)
        hopeful = found is not None and 4 * found.corrected.effective >= LIMITS.hopeful
        if found is not None and hopeful and undecided(self.marginals, found, self.measured):
            twice, every = 2 * self.settings.draws, self.allowed.values_left
            spare = every - self.product * self.settings.products / VALUE  # with one coordinate confirmed
            waits = not useful(found) and doubted(self.marginals, found, shape)  # for that, which may decide
            draws = int(min(spare if waits or spare >= twice else every, self.settings.more_draws)) // 4 * 4
            again = self._sampled(matrix, draws, self.seed + 6) if draws >= twice else None
            self.unexamined += [] if again else [f"more importance weights ({self.allowed})"]
            found = again or found
        if found is None:
            why = "no time left" if self.allowed.over() else "log joint NaN at draws of q, or finite at none"
            self.unexamined.append(f"importance weights ({why}){self.target.failures()}")
        elif not useful(found):
            effective = found.corrected.effective
            self.unexamined.append(f"importance weights ({effective:.0f} effective draws of {found.draws})")
        return found

    def _sampled(self, matrix: Tensor | None, draws: int, seed: int) -> Sampled | None:
        """Moments by so many draws."""
        return corrected_moments(self.q, self.target, matrix, num_samples=draws, seed=seed, over=self.allowed.over)

    def follow(self, sampled: Sampled | None, shape: Shape | None = None) -> None:
        """Margins of coordinates of which the weights may have found too little, until one is beyond the limit."""
        if sampled is None or not self.target.comparable or self.warped:
            return
        for k in doubted(self.marginals, sampled, shape)[: self.settings.margins]:
            if k in self.followed:
                continue
            self.followed.add(k)
            most = min(self.allowed.left, self.product * self.settings.products)  # no dearer than a confirmation
            margin = laplace_margin(self.q, self.target, k, max_gradients=most, over=self.allowed.over)
            if margin is not None and agrees(margin, sampled):
                self.margins[k] = margin
                if margin.sd >= math.exp(LIMITS.off[1]) * float(self.marginals.sd[k]):
                    return

    # -------------------------------------------------------------------------------- linear response and tails

    def residuals(self, given: Residuals | None) -> Residuals | None:
        """As many as the third order needs: those given, or new ones; without pairs at which the log joint fails."""
        wanted = self.wanted(self.settings.residuals)
        if given is None or len(given.z) < wanted:
            if wanted > self.allowed.left:
                return given
            z = Fixed(wanted, self.seed + 2)(self.frame.mean)
            energy, gradient = energy_and_gradient(self.target, self.frame.mean + self.frame.push(z))
            residual = self.frame.pull(gradient) / self.target.temperature - z
            given = Residuals(z, torch.where(energy.isfinite()[:, None], residual, torch.nan))
        kept = finite_pairs(given)
        if len(kept.z) < (1 - FAILING) * len(given.z):
            self.unexamined.append(f"linear response (log joint not finite at draws of q){self.target.failures()}")
            return None
        return kept

    def third(self, residuals: Residuals | None) -> ThirdOrder | None:
        """From residuals, or from values where the budget has none."""
        dim = self.q.dim
        # where no derivative is outside of the pattern of q, the response is that of a full q
        structure = Dense(dim) if self.target.target.pattern == self.q.structure else self.q.structure
        if dim > LIMITS.widest:
            self.unexamined.append(f"linear response (D = {dim} is above {LIMITS.widest})")
            return None
        if not structure.closed:
            self.unexamined.append(f"linear response (no third order for {structure})")
            return None
        if residuals is not None:
            return third_order(residuals.z, residuals.residual, structure)
        if self.unexamined and "linear response" in self.unexamined[-1]:
            return None
        mirrored = self.wanted(self.settings.mirrored)
        if structure.widest == dim and mirrored <= self.allowed.values_left:
            z = Fixed(mirrored, self.seed + 3)(self.frame.mean)
            theta = self.frame.mean + self.frame.push(z)
            log_weights = self.target.log_joint(theta) / self.target.temperature - self.q.log_prob(theta)
            if bool(log_weights.isfinite().all()):
                self.unexamined.append(f"tails ({self.allowed})")
                return third_order_of_values(z, log_weights)
        self.unexamined.append(f"linear response and tails ({self.allowed})")
        return None

    def shape(self, third: ThirdOrder, residuals: Residuals | None) -> Shape:
        """The response, not confirmed, and tails."""
        log_sd, error = third.log_sd(self.frame)
        none = torch.zeros_like(log_sd, dtype=torch.bool)
        kappa = torch.zeros_like(log_sd) if residuals is None else tails(*residuals)[0]
        draws = 0 if residuals is None else len(residuals.z)
        return Shape(log_sd, error, none, none.clone(), kappa, third.eigenvalue, draws)

    def confirm(self, shape: Shape, numbers: int = 20_000_000) -> None:
        """Coordinates that may be above the first limit, the worst alone first, until one is found above the second."""
        if not self.target.comparable:
            self.unexamined.append("a confirmation (the log joint gives other values at the same theta)")
            return
        waiting = torch.tensor(in_doubt(shape), dtype=torch.long, device=shape.log_sd.device)
        most, at_once = max(1, min(self.settings.at_once, numbers // (self.product * self.q.dim))), 1
        while len(waiting):
            some, waiting, at_once = waiting[:at_once], waiting[at_once:], most
            affordable = self.allowed.left // (self.product * self.settings.products)
            some, dropped = some[:affordable], len(some[affordable:]) + len(waiting)
            found = None
            if len(some):
                found = confirm(
                    self.q,
                    self.target,
                    some,
                    num_samples=self.product // 2,
                    seed=self.seed + 4,
                    max_gradients=self.allowed.left,
                    over=self.allowed.over,
                )
            if found is None:
                left = len(some) + dropped
                many = f"{left} coordinate{'s' * (left > 1)}"
                self.unexamined.append(f"{many} beyond the third order (the budget, or a log joint that is not finite)")
                break
            told = found.finished | (found.log_sd >= LIMITS.off[1])  # else a lower bound, which may be far below
            at = found.coordinates[told]
            shape.log_sd[at], shape.standard_error[at] = found.log_sd[told], found.standard_error[told]
            shape.singular[at], shape.confirmed[at] = found.singular[told], True
            if bool((found.log_sd.abs() >= LIMITS.off[1]).any()):
                return

    # -------------------------------------------------------------------------------- modes where q is not

    def search(self, around: Tensor | float) -> list[Mode]:
        """From a few starts in U(-2, 2) about a mean and about zero, each with its share of the budget."""
        dim, at = self.q.dim, self.q.mean
        starts = number_of_starts(dim, *LIMITS.starts) if dim < LIMITS.searched else 0
        middle = torch.as_tensor(writable(around), dtype=at.dtype, device=at.device).expand(dim)
        found = self._climb(starting_points(starts, middle, self.seed + 5))
        if found is None:
            why = str(self.allowed) if starts else f"D = {dim} is not below {LIMITS.searched}"
            self.unexamined.append(f"other modes ({why})")
            return []
        self.starts = starts
        return found

    def uphill(self, sampled: Sampled | None) -> list[Mode]:
        """From the draws with the largest weights, where weights are not believed, since these may be at an edge."""
        if sampled is None or sampled.heaviest is None or trusted(sampled) or self.q.dim >= LIMITS.searched:
            return []
        found = self._climb(sampled.heaviest)
        if found is not None:
            self.climbed = len(sampled.heaviest)
        return found or []

    def _climb(self, points: Tensor) -> list[Mode] | None:
        """The modes that searches from these points (K, D) arrive at; None without points, or a budget for them."""
        starts, dim = points.shape
        # a step in progress may take 23 points and two Hessians more than its budget
        each = min(200 + 20 * dim, self.allowed.left // starts - 2 * (dim + 1) - 23) if starts else 0
        if each < 2 * (dim + 2):
            return None
        modes = find_modes(self.target, points, each, over=self.allowed.over)
        return [mode for mode in modes if mode is not None and mode.found]

    def others(self, modes: Sequence[Mode], sampled: Sampled | None) -> tuple[OtherMode, ...]:
        """Those that are not q's own, each once, the one with the most evidence first."""
        q, elbo = self.q, -math.inf if sampled is None else sampled.from_q.elbo
        far = max(LIMITS.far, 2 * math.sqrt(q.dim))
        measured = [(mode, float(q.whiten(mode.theta - q.mean).norm())) for mode in modes]
        if not math.isfinite(elbo):
            elbo = max((mode.log_evidence for mode, apart in measured if apart <= far), default=-math.inf)
        measured.sort(key=lambda one: one[1])
        home = measured[:1]  # the mode of q itself, where it is near
        beside = (one for one, at in measured for own, near in home if at > LIMITS.far > near and distinct(one, own))
        kept = distinct_modes([*beside, *(mode for mode, apart in measured if apart > far)], elbo - LIMITS.faint)
        evidence = torch.tensor([elbo, *(mode.log_evidence for mode in kept)], dtype=torch.float64, device="cpu")
        return tuple(
            OtherMode(mode.theta, mode.log_evidence, float(q.whiten(mode.theta - q.mean).norm()), share)
            for mode, share in zip(kept, evidence.softmax(0)[1:].tolist(), strict=True)
        )
