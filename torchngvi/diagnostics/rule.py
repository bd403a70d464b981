"""The rule: from the numbers of an examination to one of three words, with its reasons.

Limits are on the logarithm of a standard deviation: a fit is called wrong where one is off by more than 30 per cent,
log 1.3 = 0.26, or a mean by more than 0.3 of them.  As no estimate decides at one limit, there are two.  A lower bound
is no estimate: where a standard deviation is at least 30 per cent too small, q does not fit.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.confirmation import LARGEST
from torchngvi.diagnostics.importance import Corrected, Sampled
from torchngvi.diagnostics.marginal import Margin

FITS, ABOUT, NOT, UNSEEN = "fits", "about right", "does not fit", "not examined"
WORDS = (FITS, ABOUT, NOT)
_SMALL = "times too small"  # of a standard deviation, in a clause
_MEAN = ": mean off by "

LIMITS = (0.2, 0.35)  # of a log sd, and of a mean in sds: "fits" up to the first, "does not fit" from the second on
_WRONG = math.log(1.3)  # of a log sd, of which it is known that there may be more
_TAILS = (0.95, 1.15)  # of -κ
_EFFECTIVE = 200.0  # draws from which importance weights are believed
_K_HAT = 0.7  # below which they are
_WILD = (0.6, 0.7)  # of the k-hat of an sd: from the first on there may be more, from the second on more draws help
WIDE = 2.0  # standard errors
_NOTED = 0.1  # log sd from which a wild one is looked at again
_DOUBTED = (
    0.4  # k-hat of an sd from which its margin is asked for: it is known to about 0.1, and above 0.5 errors are not
)
_SEEN = 2.0  # standard errors below what draws have found up to which a margin is believed
_WILD_LIMIT = 0.15  # of a log sd up to which q fits where there may be more
_PLAIN = (0.5, 0.1)  # k-hat of the wider proposal, and nats from the posterior, below which q fits plainly
_USEFUL = 100.0  # draws from which what they find speaks against q, though there may be more
_SHOWN = 4  # coordinates of a mode that are printed
_BEYOND = 0.7  # log sd from which the third order decides alone where importance weights are of no use
_SKEWED = (0.05, 0.15)  # nats of skewness along the axes, and their share of all, from which a warp is offered
_AGREED = 0.2  # nats a coordinate up to which the evidence by Laplace's method is that of the weights
_CLEAR = 1.0  # standard errors by which weights that are not believed must be beyond a limit

_NOTHING: Mapping[int, float] = MappingProxyType({})


def name_of(names: Sequence[str], k: int) -> str:
    """The name of coordinate k, ``theta[k]`` where there are no names.

    >>> name_of(("mu", "log tau"), 1), name_of((), 1)
    ('log tau', 'theta[1]')
    """
    return names[k] if names else f"theta[{k}]"


class Marginals(NamedTuple):
    """The means and standard deviations of q, coordinate by coordinate."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)
    names: tuple[str, ...] = ()

    def name(self, k: int) -> str:
        """The name of coordinate k, ``theta[k]`` where none was given."""
        return name_of(self.names, k)


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


def grade(value: float, limits: tuple[float, float]) -> int:
    """0 below the first limit, 1 between the two, 2 from the second on.

    >>> [grade(x, (0.2, 0.35)) for x in (0.1, 0.2, 0.35)]
    [0, 1, 2]
    """
    return (value >= limits[0]) + (value >= limits[1])


def trusted(sampled: Sampled | None) -> bool:
    """Whether the wider proposal has reached the density: its k̂ below 0.7, and 200 effective draws."""
    return sampled is not None and sampled.corrected.k_hat < _K_HAT and sampled.corrected.effective >= _EFFECTIVE


def useful(sampled: Sampled | None) -> bool:
    """Whether there are draws enough for what they find to count."""
    return sampled is not None and sampled.corrected.effective >= _USEFUL


def skewed(sampled: Sampled | None) -> bool:
    """Whether skewness of the margins is a good part of what q misses, which a curve around each coordinate mends.

    Σ skewness²/12 over the coordinates is about what it costs in nats, where these are nearly independent; weights that
    are not trusted say nothing of third moments.  The limits were set on densities of the part "tune" of
    benchmarks/truths, and judged on those of "held".

    >>> skewed(None)
    False
    """
    if sampled is None or sampled.corrected.skewness is None or not trusted(sampled):
        return False
    lost = float(sampled.corrected.skewness.square().sum()) / 12
    return lost >= _SKEWED[0] and not lost < _SKEWED[1] * sampled.from_q.nats


def doubts_means(reasons: Sequence[str]) -> bool:
    """Whether the means of q are not to be relied on: one is off, or an sd is too small, by more than is seen.

    >>> doubts_means(("theta[0]: sd about 1.3 times too large",)), doubts_means(("theta[0]: mean off by about 0.3 sd",))
    (False, True)
    """
    return any(_SMALL in reason or _MEAN in reason for reason in reasons)


def plain(marginals: Marginals, sampled: Sampled) -> bool:
    """Whether few draws of a proposal that knows nothing but q leave no doubt that q fits."""
    found, own = sampled.corrected, sampled.from_q
    log_sd = log_ratio(marginals, found).abs() + 2 * found.log_sd_error
    shift = ((found.mean - marginals.mean).abs() + 2 * found.mean_error) / found.sd
    clear = trusted(sampled) and found.k_hat < _PLAIN[0] and own.nats < _PLAIN[1]
    return clear and bool(((log_sd < _limit(found)) & (shift < LIMITS[0])).all())


def _limit(found: Corrected) -> Tensor:
    """Of each log sd the limit up to which q fits: lower where the squares that make it up have no finite variance."""
    wild = _wild(found, _WILD[0])
    return torch.where(wild, _WILD_LIMIT, LIMITS[0])


def _wild(found: Corrected, limit: float) -> Tensor:
    """Where the k̂ of a standard deviation is at least so large, (D,); nowhere if it is unknown."""
    own = torch.zeros_like(found.sd) if found.sd_k_hat is None else found.sd_k_hat.nan_to_num(0.0)
    return own >= limit


def unsure(sampled: Sampled | None) -> bool:
    """Whether some standard deviation has a k̂ beyond which what was found is no measure of what there is."""
    return sampled is not None and bool(_wild(sampled.corrected, _WILD[1]).any())


def undecided(marginals: Marginals, sampled: Sampled, measured: Mapping[int, float] = _NOTHING) -> bool:
    """Whether more draws may change the word."""
    found = sampled.corrected
    size, error = log_ratio(marginals, found).abs(), WIDE * found.log_sd_error
    both = (size - error < LIMITS[0]) & (size + error > LIMITS[1])
    wild = _wild(found, _WILD[1]) & (size > _NOTED) & (size < LIMITS[1])
    return bool(((both | wild) & ~_known(marginals, found, measured)[1]).any())


def _known(marginals: Marginals, found: Corrected, measured: Mapping[int, float]) -> tuple[Tensor, Tensor]:
    """The log sds of margins, minus infinity elsewhere, and where they are believed, (D,) each."""
    own = torch.full_like(found.sd, -math.inf)
    for k, value in measured.items():
        own[k] = value
    return own, own >= log_ratio(marginals, found) - _SEEN * found.log_sd_error


def doubted(marginals: Marginals, sampled: Sampled, shape: Shape | None) -> list[int]:
    """Coordinates of which the weights find an sd too small, and may not have found all of it; the worst first."""
    if not useful(sampled):
        return [] if shape is None else in_doubt(shape)
    found = sampled.corrected
    log_sd = log_ratio(marginals, found)
    sizes = log_sd - (0.0 if trusted(sampled) else _CLEAR) * found.log_sd_error
    if bool((sizes >= LIMITS[1]).any()):
        return []
    asked = log_sd >= _NOTED
    asked &= _wild(found, _DOUBTED) | (not trusted(sampled))
    order = log_sd.argsort(descending=True)
    return [k for k in order.tolist() if bool(asked[k])]


def agrees(margin: Margin, sampled: Sampled) -> bool:
    """Whether Laplace's method has the evidence of importance weights, about, without which its margins say nothing."""
    apart = margin.log_evidence - sampled.corrected.log_evidence
    return abs(apart) <= _AGREED * len(sampled.corrected.sd)


def in_doubt(shape: Shape) -> list[int]:
    """Coordinates whose response may be above the first limit, by two standard errors, the worst first."""
    likely = shape.log_sd.abs() + WIDE * shape.standard_error
    return [k for k in likely.argsort(descending=True).tolist() if float(likely[k]) >= LIMITS[0]]


def log_ratio(marginals: Marginals, corrected: Corrected) -> Tensor:
    """log(sd by importance sampling / sd of q), (D,)."""
    return (corrected.sd / marginals.sd).log()


def judge(
    marginals: Marginals,
    shape: Shape | None,
    sampled: Sampled | None,
    modes: Sequence[OtherMode],
    measured: Mapping[int, float] = _NOTHING,
) -> tuple[str, tuple[str, ...]]:
    """The word and its reasons.

    >>> import torch
    >>> judge(Marginals(torch.zeros(1), torch.ones(1)), None, None, ())
    ('not examined', ('no importance weights to tell more',))
    """
    findings = _by_sampling(marginals, sampled, measured) + _by_modes(marginals, modes, sampled)
    if not trusted(sampled):
        findings += _by_response(marginals, shape, sampled, measured) + _by_tails(shape) + _unsettled(sampled)
    findings = sorted((one for one in findings if one.grade), key=lambda one: (-one.grade, -one.size))
    highest = findings[0].grade if findings else 0
    if shape is None and not trusted(sampled) and highest < 2:
        return UNSEEN, tuple(one.clause for one in findings)
    largest = {one.about or one.clause: one for one in reversed(findings) if one.grade == highest}
    return WORDS[highest], tuple(one.clause for one in findings if one in largest.values())


def _unsettled(sampled: Sampled | None) -> list[Finding]:
    """That importance sampling does not say that q fits."""
    if sampled is None:
        return [Finding(1, 0.0, "no importance weights to tell more")]
    return [Finding(1, 0.0, "importance weights do not tell more")]


def _by_sampling(marginals: Marginals, sampled: Sampled | None, measured: Mapping[int, float]) -> list[Finding]:
    """The standard deviation and the mean that importance weights, or a margin that was measured, move most."""
    if not useful(sampled):
        return [
            Finding(grade(value, LIMITS), value, f"{marginals.name(k)}: {_times(value)}", marginals.name(k))
            for k, value in measured.items()
        ]
    assert sampled is not None
    found = sampled.corrected
    log_sd, (own, known) = log_ratio(marginals, found), _known(marginals, found, measured)
    shift = (found.mean - marginals.mean) / found.sd
    error = found.mean_error / found.sd
    margin = 0.0 if trusted(sampled) else _CLEAR
    sizes, shifts = log_sd.abs() - margin * found.log_sd_error, shift.abs() - margin * error
    sizes = torch.where(known, sizes.maximum(own), sizes)
    more = ~known & (_wild(found, _WILD[0]) | (not trusted(sampled)))
    beyond = more & (log_sd - _CLEAR * found.log_sd_error >= _WRONG)
    limit = torch.where(known, LIMITS[0], _limit(found))
    grades = (sizes >= limit).int() + (sizes >= LIMITS[1]).int()
    grades = torch.where(beyond, 2, grades)
    k, j = int((10 * grades + sizes.nan_to_num(0.0)).argmax()), int(shifts.nan_to_num(0.0).argmax())
    first, second = float(sizes[k]), float(shifts[j])
    size = max(float(log_sd[k]), float(own[k])) if bool(known[k]) else float(log_sd[k])
    bound = "at least " if bool(more[k]) and int(grades[k]) == 2 else ""
    return [
        Finding(int(grades[k]), first, f"{marginals.name(k)}: {_times(size, bound)}", marginals.name(k)),
        Finding(grade(second, LIMITS), second, f"{marginals.name(j)}{_MEAN}about {float(shift[j].abs()):.2g} sd"),
    ]


def _times(log_sd: float, bound: str = "") -> str:
    """By what factor an sd is off; with a bound where draws tell it, which see no more of a density than they reach."""
    if log_sd > 0:
        return f"sd {bound}about {math.exp(log_sd):.2g} {_SMALL}"
    return f"sd about {math.exp(-log_sd):.2g} times too large"


def _by_response(
    marginals: Marginals, shape: Shape | None, sampled: Sampled | None, measured: Mapping[int, float]
) -> list[Finding]:
    """The worst coordinate by linear response."""
    if shape is None:
        return []
    size = torch.where(shape.singular, LARGEST, shape.log_sd.abs())
    known = bool(shape.confirmed.any()) or bool(measured)
    alone = sampled is not None and not useful(sampled) and not known
    beyond = (size - WIDE * shape.standard_error >= _BEYOND) & alone
    size = torch.where(shape.confirmed | beyond, size, size.clamp_max(0.0 if measured else LIMITS[1] - 1e-6))
    k = int(size.argmax())
    value = float(size[k])
    clause = f"sd at least 3 {_SMALL}, by linear response" if value >= LARGEST else _times(float(shape.log_sd[k]))
    clause += "" if bool(shape.confirmed[k]) else ", by the third order alone"
    return [Finding(grade(value, LIMITS), value, f"{marginals.name(k)}: {clause}", marginals.name(k))]


def _by_tails(shape: Shape | None) -> list[Finding]:
    """The heaviest tails; of a direction in the frame, which is no coordinate of θ and has no name."""
    if shape is None:
        return []
    value = float((-shape.tails).nan_to_num(0.0).max())
    return [Finding(grade(value, _TAILS), value, "tails much heavier than normal")]


def _by_modes(marginals: Marginals, modes: Sequence[OtherMode], sampled: Sampled | None) -> list[Finding]:
    """What the mixture of q and the other modes would have for moments, each mode as wide as q."""
    if not modes:
        return []
    share = torch.tensor([mode.share for mode in modes], device="cpu").to(marginals.mean)
    apart = (torch.stack([mode.mean for mode in modes]) - marginals.mean) / marginals.sd
    shift = share @ apart
    spread = (1 + share @ apart.square() - shift.square()).clamp_min(1.0)
    log_sd, shift = 0.5 * spread.log(), shift / spread.sqrt()
    level = max(grade(float(size.abs().max()), LIMITS) for size in (log_sd, shift))
    first = max(modes, key=lambda mode: mode.share)
    place = ", ".join(f"{x:.3g}" for x in first.mean[:_SHOWN].tolist()) + (", .." if len(first.mean) > _SHOWN else "")
    beside = "" if sampled is None else f", evidence {first.log_evidence - sampled.from_q.elbo:+.1f}"
    many = f"{len(modes)} other mode{'s' * (len(modes) > 1)}"
    return [Finding(level, float(log_sd.max()), f"{many}, at ({place}){beside}")]
