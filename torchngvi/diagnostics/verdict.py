"""What an examination of q found: the word, the numbers behind it, and the table that is printed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch

from torchngvi.diagnostics.confirmation import LARGEST
from torchngvi.diagnostics.figures import verdict_figure
from torchngvi.diagnostics.importance import Sampled
from torchngvi.diagnostics.marginal import Margin
from torchngvi.diagnostics.psis import worth
from torchngvi.diagnostics.rule import (
    ABOUT,
    FITS,
    NOT,
    UNSEEN,
    Marginals,
    OtherMode,
    Shape,
    doubts_means,
    log_ratio,
    skewed,
    trusted,
)
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models.log_joint import WarpedTarget

GAUSSIAN, BENT, FAN = "the Gaussian family", "the family of warped Gaussians", "a fan of Gaussians"
_ROWS = 4  # coordinates that are shown


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
        then = f"try {others}" if self.family == FAN else f"try torchngvi.refine(q, log_joint), or {others}"
        if self.word == ABOUT and doubts_means(self.reasons):
            then += ", before you rely on standard deviations or means"
        elif self.word == ABOUT:
            then = f"nothing found speaks against its means; where a standard deviation matters, {then}"
        return then + self._offer()

    def _offer(self) -> str:
        """The offer of curves to what has none, where draws find third moments, by chance where tails are heavy."""
        if self.family != GAUSSIAN or not skewed(self.sampled):
            return ""
        return "; its margins are not normal: try torchngvi.fit(q.warped(), log_joint) too, or .warped(inside=True)"

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
        everything = self.worst(len(self.marginals.sd)) or range(len(self.marginals.sd))
        return verdict_figure(self.marginals, self.shape, self.sampled, everything, self._head())

    def __str__(self) -> str:
        lines = ["; ".join([self._head(), *self.reasons])]
        lines += [f"  {line}" for line in (self._numbers(), *self._table())]
        if self.next:
            lines.append(f"  next: {self.next}")
        if self.effort.unexamined:
            lines.append("  not examined: " + "; ".join(self.effort.unexamined))
        return "\n".join(lines)

    def _head(self) -> str:
        if self.word == UNSEEN and self.sampled is not None:
            return f"{self.family}: whether it fits could not be told"
        return f"{self.family}: " + (self.word.upper() if self.word == NOT else self.word)

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
        names = [self.marginals.name(k) for k in worst]
        width = max(map(len, [*names, "coordinate"]))
        head = f"{'coordinate':{width}}{'mean':>11}{'sd':>11}"
        head += f"{'response sd':>14}" if self.shape is not None else ""
        head += f"{'sampled mean':>15}{'sampled sd':>13}" if self.sampled is not None else ""
        rows = [self._row(name, width, k) for name, k in zip(names, worst, strict=True)]
        return [head, *rows, *self._legend(worst)]

    def _row(self, name: str, width: int, k: int) -> str:
        row = f"{name:{width}}{self.marginals.mean[k]:11.4g}{self.marginals.sd[k]:11.4g}"
        if self.shape is not None:
            row += f"{self._response(k):>14}"
        if self.sampled is not None:
            found = self.sampled.corrected
            row += f"{found.mean[k]:15.4g}{found.sd[k]:13.4g} ± {found.sd[k] * found.log_sd_error[k]:.1g}"
        return row

    def _legend(self, shown: list[int]) -> list[str]:
        """What the marks before the standard deviations by linear response mean, where there are any."""
        responses = [] if self.shape is None else [self._response(k) for k in shown]
        marks = {
            "~": "~ to third order alone, which overshoots where it is large",
            ">=": ">= three sds of q or more, too far for linear response to measure",
        }
        found = [text for mark, text in marks.items() if any(mark in response for response in responses)]
        return [f"response sd is an estimate: {'; '.join(found)}"] if found else []

    def _response(self, k: int) -> str:
        """The standard deviation by linear response, with ~ where it is of third order only."""
        assert self.shape is not None
        mark = "" if bool(self.shape.confirmed[k]) else "~"
        if bool(self.shape.singular[k]) or float(self.shape.log_sd[k]) >= LARGEST:
            return f"{mark}>= {3 * self.marginals.sd[k]:.4g}"
        return f"{mark}{self.marginals.sd[k] * self.shape.log_sd[k].exp():.4g}"


def family_of(target: Target) -> str:
    """The family to which the best Gaussian for a target belongs, in words.

    >>> from torchngvi import LogJoint
    >>> family_of(LogJoint(lambda theta: -theta.square().sum(-1)))
    'the Gaussian family'
    """
    return BENT if isinstance(target, WarpedTarget) else GAUSSIAN


def _renamed(clause: str, table: dict[str, str]) -> str:
    """A clause with another name of its coordinate, which stands before the colon; names may have colons themselves."""
    known = [old for old in table if clause.startswith(f"{old}: ")]
    old = max(known, key=len, default="")
    return table.get(old, "") + clause[len(old) :]
