"""The result of a run: a line for each step, and a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_names
from torchngvi.diagnostics.certificate import Certificate, certificate
from torchngvi.diagnostics.verdict import ABOUT, FAN, FITS, NOT, Verdict, examine
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.shapes import number_of_draws
from torchngvi.posteriors.warps import Warped

_LATER = "summary() of the result does it"
_BENT = "a warped Gaussian"
_FINISH = "let the fit converge first, with a larger budget"


class Record(NamedTuple):
    """One line of a trace, at the q before a step; over batch members the loss is a sum, the norm the largest."""

    evaluations: int
    loss: float  # negative ELBO
    norm: float  # natural-gradient norm of L/γ, with three standard errors where they are known
    step: float  # ρ of the step that led here, the smallest; 0 at the start
    rejections: int  # so far
    gradients: int  # of the log joint so far, one a draw; for a model, passes over its data
    seconds: float


@dataclass(frozen=True)
class FitResult:
    """The verdict of a run: whether it converged, where it ended and why, with a `Record` of each evaluation.

    A run that has converged has found the q with the largest ELBO in its family.  How far that family is from the
    density itself is told by the `torchngvi.diagnostics.Verdict`, which a fit of a log joint without an optimizer has
    from the start, and every other one of a Gaussian posterior once `summary` was asked for.

    Attributes:
        converged: whether every member has.
        reason: why the run ended, one sentence.
        loss: the negative ELBO at the end, in nats, summed over the members.
        norm: the natural-gradient norm of L/γ at the end, the largest of the members.
        evaluations: of L and its gradient; of a batch those of the member that took most, the others having stood
            still from their own convergence on.
        members_converged: which members have converged, (*batch,).
        trace: a `Record` of each evaluation, but for one from which q was put at the mode.
        gradients: how many of the log joint the whole run took, the checks after the last record included; one a draw.
        values: the same of the log joint itself.
        posterior: what was fitted, in place.
        target: what it was fitted to; it is left out of pickles and copies.
        examination: what an examination has found, which is ``verdict``; None where nothing was examined.
        unexamined: why nothing was examined, a clause.
        names: of the coordinates, for the verdict.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.ones(2, 1).double(), [0.0, 1.0])
    >>> result = fit(CholeskyGaussian(1, dtype=torch.float64), model, progress=False)
    >>> result.converged, bool(result.certificate.bound < 1e-9)
    (True, True)
    >>> result.verdict.word
    'not examined'
    >>> _ = result.summary()
    >>> result.verdict.word
    'fits'
    """

    converged: bool
    reason: str
    loss: float
    norm: float
    evaluations: int
    members_converged: Tensor
    trace: list[Record] = field(repr=False)
    gradients: int = 0
    values: int = 0
    posterior: Posterior | None = field(default=None, repr=False)
    target: Target | None = field(default=None, repr=False)
    examination: Verdict | None = field(default=None, repr=False)
    unexamined: str = field(default="", repr=False)
    names: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        verdict = "converged" if self.converged else "not converged"
        loss = f"{self.loss:.6f}" if abs(self.loss) < 1e9 else f"{self.loss:.6g}"
        count = f"{self.evaluations} evaluation{'' if self.evaluations == 1 else 's'}"
        text = f"{verdict}, {self.reason} Negative ELBO {loss} after {count}."
        return f"{text} {self.approximation}".rstrip()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "target": None}  # mostly a function, of which there is no pickle

    @property
    def verdict(self) -> Verdict:
        """Whether the family of q fits; of the word "not examined", with the reason, where nobody has looked yet."""
        return self.examination or Verdict.none(self.unexamined or _why_not(self))

    @property
    def approximation(self) -> str:
        """Two answers in one sentence, whether q is the best Gaussian and whether a Gaussian fits, and what to do next.

        Where a Gaussian does not fit the worst coordinates are named; of another posterior it says nothing.
        """
        verdict = self.examination
        if not isinstance(self.posterior, Gaussian | Warped) or (verdict is None and self.target is None):
            return ""
        gaussian = _kind(self.posterior) if verdict is None or verdict.family != FAN else FAN
        if verdict is None or verdict.word not in (FITS, ABOUT, NOT):
            seen = verdict is not None and "; ".join((*verdict.reasons, *verdict.effort.unexamined))
            if verdict is not None and verdict.sampled is not None:  # looked at, and not settled
                then = "try torchngvi.examine(result.posterior, log_joint), which has a budget of its own"
                return f"Whether {gaussian} fits could not be told: {seen}; {then}."
            return f"Whether {gaussian} fits was not examined: {seen or self.unexamined or _why_not(self)}."
        best = (
            f"q {'is' if self.converged else 'may not be'} the best {'Gaussian' if gaussian == FAN else gaussian[2:]}"
        )
        and_ = "and" if self.converged == (verdict.word != NOT) else "but"
        words = {FITS: "fits", ABOUT: "is about right", NOT: "DOES NOT FIT"}[verdict.word]
        worst = {reason.partition(": ")[0]: reason for reason in reversed(verdict.reasons)}  # one a coordinate
        reasons = f": {'; '.join(reversed(worst.values()))}" if worst else ""
        one = gaussian if gaussian in ("a Gaussian", _BENT, FAN) else "such a Gaussian"
        return f"{best}, {and_} {one} {words}{reasons}{_then(self, verdict)}."

    @property
    def certificate(self) -> Certificate:
        """A proof of how far q, as it is now, is from the best Gaussian of its family, see `torchngvi.certificate`."""
        if self.posterior is None or self.target is None:
            return Certificate.none("this result has no target: it is a copy, or was read from a file")
        return certificate(self.posterior, self.target)

    def summary(self) -> str:
        """Both answers, and the table of the verdict with the coordinates that are most in doubt.

        Where it was not examined whether a Gaussian fits, it is examined now, at q as it is now, and kept; that takes
        up to 50,000 gradients of the log joint, see `torchngvi.examine`, which are not counted in ``gradients``.
        """
        if self.examination is None and _why_not(self) == _LATER:
            assert isinstance(self.posterior, Gaussian | Warped)
            assert self.target is not None
            verdict = examine(self.posterior, self.target)
            object.__setattr__(self, "examination", verdict.named(self.names) if self.names else verdict)
        if self.examination is None:
            return str(self)
        told, next_ = str(self.verdict), self.verdict.next
        return f"{self}\n{told.replace(next_, _FINISH) if _unfinished(self, self.verdict) else told}"

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times from the posterior, θ in the order of the log joint's coordinates.

        Args:
            n: the number of draws.
            generator: the source of the noise, on the device of the posterior; torch's default generator if None.

        Returns:
            Independent draws, (n, *batch, D).

        Raises:
            InputError: a number of draws that is none, or a result without a posterior.
        """
        if self.posterior is None:
            raise InputError("this result holds no posterior to draw from. Keep the q that was fitted, and sample it.")
        return self.posterior.sample(number_of_draws(n), generator)  # type: ignore[operator]

    def named(self, names: Sequence[str]) -> Self:
        """The same, with names for the coordinates in the verdict.

        Raises:
            InputError: another number of names than of coordinates.
        """
        names = read_names("names", names, "are those of the coordinates, a list of texts")
        if isinstance(self.posterior, Gaussian | Warped) and len(names) != self.posterior.dim:
            raise InputError(f"names must have one entry a coordinate, {self.posterior.dim}; got {len(names)}.")
        examination = None if self.examination is None else self.examination.named(names)
        return replace(self, names=names, examination=examination)


def _kind(q: Gaussian | Warped) -> str:
    """What may fit."""
    if isinstance(q, Warped) and bool(q.phi.any()):
        return _BENT
    if q.structure.widest == q.dim:
        return "a Gaussian"
    independent = "with independent coordinates" if q.structure.widest == 1 else f"of structure {q.structure}"
    return f"a Gaussian {independent}"


def _unfinished(result: FitResult, verdict: Verdict) -> bool:
    """Whether the advice is on a q that the fit has not brought to its end: its means are not those of the best q."""
    return not result.converged and verdict.word == ABOUT and not verdict.modes


def _then(result: FitResult, verdict: Verdict) -> str:
    """What to do next, as a clause; nothing where a Gaussian fits."""
    q = result.posterior
    assert isinstance(q, Gaussian | Warped)
    if _unfinished(result, verdict):
        return f"; {_FINISH}"
    # in the pattern of the log joint the best q has no other correlations
    base = q.base if isinstance(q, Warped) else q
    assert isinstance(base, Gaussian)
    whole = q.structure.widest == q.dim or (result.target is not None and result.target.pattern == base.structure)
    if verdict.word != FITS and not whole and not verdict.modes and verdict.family != FAN:
        return "; try a CholeskyGaussian, which has all correlations"
    then = verdict.next.replace("refine(q, log_joint", "refine(result")
    if result.target is not None:
        then = then.replace("fit(q.warped(), log_joint)", "fit(result.posterior.warped(), result.target)")
    return f"; {then}" if then else ""


def _why_not(result: FitResult) -> str:
    """Why there is no verdict: mostly since nobody has asked."""
    q, target = result.posterior, result.target
    if not isinstance(q, Gaussian | Warped):
        return f"the posterior is no Gaussian but {type(q).__name__}"
    if q.batch_shape:
        return f"it is asked of one posterior at a time, and this is a batch of shape {tuple(q.batch_shape)}"
    if target is None:
        return "the log joint of this run is not known to its result"
    if not target.temperature:
        return "at temperature 0 there is no density"
    return _LATER


def read_result(door: str, result: Any) -> FitResult:
    """Check that what stands in the place of the result of a fit is one."""
    if not isinstance(result, FitResult):
        raise InputError(
            f"{door} takes the result of a fit first, as fit(q, model) returns it; got {type(result).__name__} first."
        )
    return result
