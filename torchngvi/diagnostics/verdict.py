"""What an examination of q found: the numbers, three words, and the table that is printed.

Limits are on the logarithm of a standard deviation: a fit is called wrong where one is off by more than 30 per cent,
log 1.3 = 0.26, or a mean by more than 0.3 of them.  As no estimate decides at one limit, there are two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.diagnostics.confirmation import LARGEST
from torchngvi.diagnostics.importance import Corrected, Sampled
from torchngvi.errors import InputError

FITS, ABOUT, NOT, UNSEEN = "fits", "about right", "does not fit", "not examined"
WORDS = (FITS, ABOUT, NOT)

_ROWS = 4  # coordinates that are shown


class Marginals(NamedTuple):
    """The means and standard deviations of q, coordinate by coordinate."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)
    names: tuple[str, ...] = ()

    def name(self, k: int) -> str:
        """The name of coordinate k, ``theta[k]`` where none was given."""
        return self.names[k] if self.names else f"theta[{k}]"


class Shape(NamedTuple):
    """What third and fourth derivatives say."""

    log_sd: Tensor  # log(sd by linear response / sd of q): confirmed where so marked, else to third order, (D,)
    standard_error: Tensor  # (D,)
    confirmed: Tensor  # by conjugate gradients, (D,)
    singular: Tensor  # the response has no size: larger than a factor of 3, (D,)
    tails: Tensor  # κ of each direction of the frame, below zero where tails are heavy, (D,)
    tails_error: Tensor  # (D,)
    eigenvalue: float  # the largest of M, which is 0 for a Gaussian
    draws: int


class OtherMode(NamedTuple):
    """A mode of the density where q is not."""

    mean: Tensor  # (D,)
    log_evidence: float  # Laplace's
    distance: float  # in standard deviations of q, by its whole covariance
    share: float  # of the mass, by its evidence beside the ELBO of q and the evidence of the others


class Effort(NamedTuple):
    """What it took, and what was left out."""

    gradients: int
    values: int
    starts: int  # of the search for modes
    unexamined: tuple[str, ...]  # clauses: what, and why


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

    >>> marginals = Marginals(torch.zeros(1), torch.ones(1), ("mu",))
    >>> verdict = Verdict(UNSEEN, (), marginals, None, None, (), Effort(0, 0, 0, ("tails",)))
    >>> print(verdict)
    the Gaussian family: not examined
      no numbers
      not examined: tails
    """

    word: str
    reasons: tuple[str, ...]
    marginals: Marginals
    shape: Shape | None
    sampled: Sampled | None
    modes: tuple[OtherMode, ...]
    effort: Effort

    def named(self, names: Sequence[str]) -> Self:
        """The same with names for the coordinates.

        Raises:
            InputError: another number of names than of coordinates.
        """
        dim, names = len(self.marginals.mean), tuple(names)
        if len(names) != dim:
            raise InputError(f"names must have one entry a coordinate, {dim}; got {len(names)}.")
        marginals = self.marginals._replace(names=names)
        old = [self.marginals.name(k) for k in range(dim)]
        table = dict(zip(old, names, strict=True))
        reasons = tuple(_renamed(reason, table) for reason in self.reasons)
        return replace(self, marginals=marginals, reasons=reasons)

    def worst(self, count: int = _ROWS) -> list[int]:
        """The coordinates whose standard deviations are most in doubt, the worst first."""
        if self.sampled is not None and (trusted(self.sampled) or self.shape is None):
            size = log_ratio(self.marginals, self.sampled.corrected).abs()
        elif self.shape is not None:
            size = self.shape.log_sd.abs()
        else:
            return []
        return size.nan_to_num(0.0).topk(min(count, len(size))).indices.tolist()

    def __str__(self) -> str:
        head = "the Gaussian family: " + (self.word.upper() if self.word == NOT else self.word)
        lines = ["; ".join([head, *self.reasons]) if self.reasons else head]
        lines += [f"  {line}" for line in (self._numbers(), *self._table())]
        if self.effort.unexamined:
            lines.append("  not examined: " + "; ".join(self.effort.unexamined))
        return "\n".join(lines)

    def _numbers(self) -> str:
        parts = []
        if self.sampled is not None:
            own, corrected = self.sampled.from_q, self.sampled.corrected
            parts += [
                f"about {own.nats:.1g} nats from the posterior as far as draws of q can tell",
                f"PSIS k-hat {own.k_hat:.2f}",
                f"of a wider proposal {corrected.k_hat:.2f}, {corrected.effective:.0f} of {self.sampled.draws} draws",
            ]
        if self.shape is not None:
            parts.append(f"linear response: top eigenvalue {self.shape.eigenvalue:.2g}")
        if self.effort.starts:
            found = len(self.modes)
            parts.append(f"{found or 'no'} other mode{'s' * (found != 1)} from {self.effort.starts} starts in U(-2, 2)")
        return "; ".join(parts) or "no numbers"

    def _table(self) -> list[str]:
        worst = self.worst()
        if not worst:
            return []
        names = [self.marginals.name(k) for k in worst]
        width = max(map(len, [*names, "coordinate"]))
        head = f"{'coordinate':{width}}{'mean':>11}{'sd':>11}"
        head += f"{'response sd':>14}" if self.shape is not None else ""
        head += f"{'sampled mean':>15}{'sampled sd':>13}" if self.sampled is not None else ""
        return [head, *(self._row(name, width, k) for name, k in zip(names, worst, strict=True))]

    def _row(self, name: str, width: int, k: int) -> str:
        row = f"{name:{width}}{self.marginals.mean[k]:11.4g}{self.marginals.sd[k]:11.4g}"
        if self.shape is not None:
            row += f"{self._response(k):>14}"
        if self.sampled is not None:
            found = self.sampled.corrected
            row += f"{found.mean[k]:15.4g}{found.sd[k]:13.4g} ± {found.sd[k] * found.log_sd_error[k]:.1g}"
        return row

    def _response(self, k: int) -> str:
        """The standard deviation by linear response, with ~ where it is of third order only."""
        assert self.shape is not None
        mark = "" if bool(self.shape.confirmed[k]) else "~"
        if bool(self.shape.singular[k]) or float(self.shape.log_sd[k]) >= LARGEST:
            return f"{mark}>= {3 * self.marginals.sd[k]:.4g}"
        return f"{mark}{self.marginals.sd[k] * self.shape.log_sd[k].exp():.4g}"


def _renamed(text: str, table: dict[str, str]) -> str:
    """A clause with other names of its coordinates; the longest first, so that theta[1] spares theta[12]."""
    for old in sorted(table, key=len, reverse=True):
        text = text.replace(old, table[old])
    return text


# ------------------------------------------------------------------------------------ the rule

LIMITS = (0.2, 0.35)  # of a log sd, and of a mean in sds: "fits" up to the first, "does not fit" from the second on
_TAILS = (0.95, 1.15)  # of -κ
_EFFECTIVE = 200.0  # draws from which importance weights are believed
_K_HAT = 0.7  # below which they are
_PLAIN = (0.5, 0.1)  # k-hat, and nats from the posterior, below which q fits plainly
_USEFUL = 100.0  # draws from which what they find speaks against q, though there may be more
_CLEAR = 1.0  # standard errors by which weights that are not believed must be beyond a limit


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


def plain(marginals: Marginals, sampled: Sampled) -> bool:
    """Whether few draws of a proposal that knows nothing but q leave no doubt that q fits."""
    found, own = sampled.corrected, sampled.from_q
    log_sd = log_ratio(marginals, found).abs() + 2 * found.log_sd_error
    shift = ((found.mean - marginals.mean).abs() + 2 * found.mean_error) / found.sd
    clear = trusted(sampled) and max(found.k_hat, own.k_hat) < _PLAIN[0] and own.nats < _PLAIN[1]
    return clear and bool(((log_sd < LIMITS[0]) & (shift < LIMITS[0])).all())


def log_ratio(marginals: Marginals, corrected: Corrected) -> Tensor:
    """log(sd by importance sampling / sd of q), (D,)."""
    return (corrected.sd / marginals.sd).log()


def judge(
    marginals: Marginals,
    shape: Shape | None,
    sampled: Sampled | None,
    modes: Sequence[OtherMode],
) -> tuple[str, tuple[str, ...]]:
    """The word and its reasons.

    Importance sampling decides where it is trusted. Where it is not, what it finds is less than what there is: linear
    response and tails count as well, and q is "about right" at best. Modes are what none of them sees.

    Args:
        marginals: means and standard deviations of q.
        shape: linear response and tails, or None.
        sampled: what importance sampling has found, or None.
        modes: other modes of the density.

    Returns:
        One of the four words, and the clauses that speak against q, the worst first.

    >>> judge(Marginals(torch.zeros(1), torch.ones(1)), None, None, ())
    ('not examined', ('no importance weights to tell more',))
    """
    findings = _by_sampling(marginals, sampled) + _by_modes(marginals, modes, sampled)
    if not trusted(sampled):
        findings += _by_response(marginals, shape) + _by_tails(shape) + _unsettled(sampled)
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
    found = sampled.corrected
    weights = f"k-hat {found.k_hat:.2f}, {found.effective:.0f} of {sampled.draws} draws"
    return [Finding(1, 0.0, f"importance weights do not tell more ({weights})")]


def _by_sampling(marginals: Marginals, sampled: Sampled | None) -> list[Finding]:
    """The standard deviation and the mean that importance weights move most."""
    if not useful(sampled):
        return []
    assert sampled is not None
    found = sampled.corrected
    log_sd = log_ratio(marginals, found)
    shift = (found.mean - marginals.mean) / found.sd
    error = found.mean_error / found.sd
    margin = 0.0 if trusted(sampled) else _CLEAR
    sizes = log_sd.abs() - margin * found.log_sd_error, shift.abs() - margin * error
    k, j = (int(size.nan_to_num(0.0).argmax()) for size in sizes)
    first, second = float(sizes[0][k]), float(sizes[1][j])
    return [
        Finding(grade(first, LIMITS), first, f"{marginals.name(k)}: {_times(float(log_sd[k]))}", marginals.name(k)),
        Finding(
            grade(second, LIMITS), second, f"{marginals.name(j)}: mean off by about {float(shift[j].abs()):.2g} sd"
        ),
    ]


def _times(log_sd: float) -> str:
    return f"sd about {math.exp(abs(log_sd)):.2g} times too {'small' if log_sd > 0 else 'large'}"


def _by_response(marginals: Marginals, shape: Shape | None) -> list[Finding]:
    """The worst coordinate by linear response."""
    if shape is None:
        return []
    size = torch.where(shape.singular, LARGEST, shape.log_sd.abs())
    # without a confirmation the third order may overshoot: it is no more than a doubt
    size = torch.where(shape.confirmed, size, size.clamp_max(LIMITS[1] - 1e-6))
    k = int(size.argmax())
    value = float(size[k])
    clause = "sd at least 3 times too small" if value >= LARGEST else _times(float(shape.log_sd[k]))
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
    share = torch.tensor([mode.share for mode in modes]).to(marginals.mean)
    apart = (torch.stack([mode.mean for mode in modes]) - marginals.mean) / marginals.sd
    shift = share @ apart
    spread = (1 + share @ apart.square() - shift.square()).clamp_min(1.0)
    log_sd, shift = 0.5 * spread.log(), shift / spread.sqrt()
    level = max(grade(float(size.abs().max()), LIMITS) for size in (log_sd, shift))
    first = max(modes, key=lambda mode: mode.share)
    place = ", ".join(f"{x:.3g}" for x in first.mean[:_ROWS].tolist()) + (", .." if len(first.mean) > _ROWS else "")
    beside = "" if sampled is None else f", evidence {first.log_evidence - sampled.from_q.elbo:+.1f}"
    many = f"{len(modes)} other mode{'s' * (len(modes) > 1)}"
    return [Finding(level, float(log_sd.max()), f"{many}, at ({place}){beside}")]
