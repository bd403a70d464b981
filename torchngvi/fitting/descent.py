"""Minimising the average of a log joint over one fixed set of draws after another.

Near the optimum two steps are taken as they come, and the second is not evaluated; the first that turns out to be
wrong is undone, and all later ones are tried.

Where the largest average is still too noisy, in many dimensions, its minimum is averaged with those of other sets of as
many draws.  A step over a set that is new leads near its minimum, and q goes a share 1/(k + 1) of the way at the k-th.
It is then about the mean of k + 1 minima, with a noise² as many times smaller, for one evaluation a set (Polyak and
Juditsky 1992).  The norm before a step tells how good q is, since a set that q has not seen has

    E norm² = |∇L|² + noise²

where at the mean of k minima |∇L|² is noise²/k, and so norm² / (1 + 1/k) is noise² as the sets themselves tell it.

Draws at which the log joint fails or is NaN where the minimisation begins give way to others, with their mirror images:
one in twenty at most.  The set is then the same to the end, and a step to where others fail is a rejected one.

A log joint in factors, under a q over their forest, is seen factor by factor, by draws of each clique.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.linear_response import Residuals
from torchngvi.expectations.draws import Fixed
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.loop import Ending
from torchngvi.fitting.records import Record
from torchngvi.fitting.settings import EngineSettings
from torchngvi.fitting.sight import Sight
from torchngvi.fitting.stopping import Standing
from torchngvi.interfaces import Coordinates, Estimator, Target
from torchngvi.methods import VN
from torchngvi.models.guarded import FAILING, Guarded
from torchngvi.posteriors.gaussian import Gaussian

_USUAL = EngineSettings()
_NEAR = 0.3  # norm² + noise² below which steps need no trial
_FAR = 1.0  # the same where larger averages show that such steps were wrong
_RISE = 0.1  # share of noise² that the average may rise in such a step
_NEARER = 0.5  # share of norm² it may leave at most
_LEFT = 0.1  # share of norm² such a step leaves
_GROWTH = 6  # largest factor from one sample average to the next
_NEAR_GROWTH = (7, 14)  # the same where steps need no trial, and where it is the last
_SOLVED = 0.5  # share of noise² at which more accuracy on the same draws is of no use
_SPARE = 0.05  # share of tolerance² that has to be left for norm² where no more draws are to be taken
_STAGE = (30, 4000)  # evaluations, or draws of all of them, after which an average is given up for a larger one
_REJECTED = 3  # in a row: nothing more is to be had on these draws
_TAME = 0.02  # noise² a coordinate up to which the minima of several averages have a useful mean
_ROUNDS = 6  # in which they are looked for: the others move a little, as the set is whitened again
_SETS = 96  # draws a coordinate of all sets beside the first
_COUNTS = (
    *("draws", "left_out", "sets", "told", "near", "daring", "open"),
    *("evaluations", "rejections", "step_taken", "stalled", "first"),
)


class Point(NamedTuple):
    """The norm of the gradient, its noise and the loss of q on a set of draws."""

    norm2: Tensor  # (*batch,)
    noise2: Tensor  # (*batch,)
    loss: Tensor  # (*batch,)

    @property
    def total(self) -> float:
        """The root of norm² + noise²; about half its square, in nats, is lost."""
        return float((self.norm2 + self.noise2).max()) ** 0.5

    @property
    def finite(self) -> bool:
        """Whether loss and norm are finite for every batch member."""
        return bool((self.loss.isfinite() & self.norm2.isfinite()).all())


class Place(NamedTuple):
    """What a descent goes back to from another place."""

    coordinates: Coordinates
    optimizer: VN | None
    near: bool
    draws: int
    point: Point
    residuals: Residuals | None  # seen last there


class Descent:
    """VN with a memory of the curvature that outlives the draws.

    Attributes:
        draws: in the present average.
        sets: of so many draws that q has seen one step over, where the minima of several are averaged; else 0.
        near: steps are taken without a trial.
        daring: no such step has been wrong.
        open: the minimisation over the present draws has begun and has not ended.
        point: where q was evaluated last; where it ended, what its last step is known to leave.
    """

    most = 16_384  # draws of one sample average

    def __init__(
        self, q: Gaussian, target: Guarded, seed: int, tolerance: float, settings: EngineSettings = _USUAL
    ) -> None:
        self.settings = settings
        self.q, self.target, self.seed, self.tolerance = q, target, seed, tolerance
        self.draws = self.evaluations = self.rejections = 0
        self.near, self.daring, self.open, self.sets = False, True, False, 0
        self.told: list[Tensor] = []  # noise² of an average, by each of the sets
        self.left_out: tuple[int, ...] = ()  # pairs of the present average
        self.optimizer: VN | None = None
        self.sight = Sight(q, target)
        self.most = self.sight.most(self.most)
        self.forget_average()

    def forget_average(self) -> None:
        """Begin to count for another average."""
        self.step_taken, self.stalled, self.first = 0.0, 0, self.evaluations
        self.before: Coordinates | None = None  # where the last step without a trial began
        self.previous: Point | None = None  # there

    def begin(self) -> None:
        """Begin with the present draws, where q is."""
        self.forget_average()
        self.left_out = ()
        self._renew()
        self.open = True

    def _fixed(self, left_out: tuple[int, ...]) -> Fixed:
        return self.sight.fixed(self.draws, self._draws_seed, left_out)

    @property
    def _draws_seed(self) -> int:
        """Of the present draws."""
        return self.seed + self.draws + 10_007 * self.sets

    def _estimator(self) -> Estimator:
        return self.sight.estimator(self._fixed(self.left_out))

    def _renew(self) -> VN:
        """The optimizer that is running, on the present draws; a new one for a new start."""
        if self.optimizer is None:
            self.optimizer = VN(self.q, estimator=self._estimator())
        else:
            self.optimizer.resample(self._estimator())
        return self.optimizer

    def evaluate(self) -> Point:
        """Evaluate q on the present draws."""
        first = self.evaluations == self.first
        point = self._evaluated()
        if first and not point.finite and self._replace_failing():
            self._renew()
            point = self._evaluated()
        if first and self.near and not point.total**2 <= _FAR:  # the last step without a trial has led astray
            self.near = self.daring = False
        return point

    def _replace_failing(self) -> bool:
        """Leave out the pairs of draws at which the log joint fails; whether there are some, and few."""
        most, left_out = max(1, int(FAILING * self.draws / 2 * self.sight.members)), self.left_out
        for _ in range(_ROUNDS):
            fixed = self._fixed(left_out)
            pairs = self.sight.failing(fixed).nonzero()[:, 0].tolist()
            if not pairs:
                self.left_out = left_out
                return bool(left_out)
            numbers = fixed.pairs()
            left_out = (*left_out, *(numbers[pair] for pair in pairs))
            if len(left_out) > most:
                break
        return False

    def _evaluated(self) -> Point:
        assert self.optimizer is not None
        gamma = self.target.temperature or 1.0
        status = self._count(self.optimizer.evaluate)
        noise2 = torch.zeros_like(status.norm2) if status.noise2 is None else status.noise2  # of exact factors alone
        norm2, noise2 = status.norm2 / gamma**2, noise2 / gamma**2
        if self.sets:  # all that is left is noise; its error as if of D numbers
            self.told = [*self.told[: self.sets - 1], norm2 / (1 + 1 / self.sets)]
            share = torch.minimum(noise2, torch.stack(self.told).mean(0)) / self.sets
            left = torch.maximum(norm2 - noise2, share) + noise2 * math.sqrt(2 / self.q.dim)
            self.point = Point(torch.zeros_like(left), left, status.loss)
        else:
            self.point = Point(norm2, noise2 * self._overfit(), status.loss)
        return self.point

    def _count(self, do: Callable[[Target], Any]) -> Any:
        """Do it on the target, and count what it takes."""
        assert self.optimizer is not None
        before = self.optimizer.evaluations
        result = self.sight.evaluate(do)
        self.evaluations += self.optimizer.evaluations - before
        return result

    def _overfit(self) -> float:
        """S numbers a coordinate have to pay for 1 + (D + 1)/2 parameters a coordinate."""
        parameters = 1 + self.q.structure.parameters / self.q.dim
        return self.draws / max(self.draws - parameters, 0.25 * self.draws)

    def went_wrong(self) -> bool:
        """An untried step has to keep the average from rising, and to bring the norm down where it is not noise."""
        point, previous = self.point, self.previous
        if previous is None:
            return False
        fell = point.loss <= previous.loss + _RISE * previous.noise2
        nearer = point.norm2 <= torch.maximum(_NEARER * previous.norm2, previous.noise2)
        return not bool((fell & nearer).all())

    @property
    def seen(self) -> int:
        """Draws, in all sets."""
        return max(self.sets, 1) * self.draws

    @property
    def tame(self) -> bool:
        """Whether q is at the minimum of an average whose noise is small: no other steps than averages are of use."""
        return self._solved() and float(self.point.noise2.max()) <= max(1.0, _TAME * self.q.dim)

    def averages_sets(self) -> bool:
        """Begin to average the minima of several sets of as many draws, where that is to be done."""
        if self.sets or not self.tame or self.draws > _SETS * self.q.dim:
            return False
        self.sets = 1
        return True

    def _next_set(self) -> bool:
        """A share of a step over a set that q had not seen; False after the last."""
        if self.point.total <= self.tolerance:
            return False
        assert self.optimizer is not None
        here, share = self.q.snapshot(), 1 / (self.sets + 1)
        self._count(self.optimizer.step_untried)
        there = self.q.snapshot()
        self.q.restore(Coordinates(*(torch.lerp(old, new, share) for old, new in zip(here, there, strict=True))))
        if (self.sets + 1) * self.draws > _SETS * self.q.dim:
            self.point = self.point._replace(noise2=(1 - share) * self.point.noise2)
            return False
        self.sets += 1
        self.left_out, self.first = (), self.evaluations
        self._renew()
        return True

    def _solved(self) -> bool:
        """Whether q is nearer to the minimum of the average than the draws tell."""
        return bool((self.point.norm2 <= _SOLVED * self.point.noise2).all())

    def undo(self) -> None:
        """Back to where the last step without a trial began; all later ones are tried."""
        assert self.before is not None
        assert self.previous is not None
        self.q.restore(self.before)
        self.point = self.previous
        self.near, self.daring, self.optimizer, self.previous = False, False, None, None

    def step(self) -> bool:
        """A step from where q was evaluated; False where the minimisation over these draws has ended instead."""
        self.open = self._stepped()
        return self.open

    def _stepped(self) -> bool:
        if self.went_wrong():
            self.undo()
            self._renew()
            return True
        assert self.optimizer is not None
        if self.sets:
            return self._next_set()
        point = self.point
        solved = torch.clamp_min(_SOLVED * point.noise2, 0.05 * self.tolerance**2)
        spare = self.tolerance**2 - point.noise2  # these draws may do, once norm² is no more
        enough = spare if self.draws > self.settings.dear else torch.minimum(solved, spare)
        done = point.norm2 <= torch.where(spare > _SPARE * self.tolerance**2, enough, solved)
        most = max(_STAGE[0], _STAGE[1] // self.draws)  # few draws suffice to see that nothing confines q
        if bool(done.all()) or self.stalled >= _REJECTED or self.evaluations - self.first >= most:
            return False
        if self.near:
            second = self.previous is not None
            self.before, self.previous = self.q.snapshot(), point
            self._count(self.optimizer.step_untried)
            left = point._replace(norm2=_LEFT * point.norm2)
            if second and left.total > self.tolerance and self.draws < self.most:
                self.point = left
                return False
        else:
            self._count(self.optimizer.step)
        assert self.optimizer.last is not None
        self.step_taken = float(self.optimizer.last.rho.min())
        rejected = ~self.optimizer.last.accepted
        self.rejections += int(rejected.sum())
        self.stalled = self.stalled + 1 if bool((rejected | done).all()) else 0
        return True

    def more_draws(self) -> int:
        """The number of draws that brings noise² to half of tolerance², within limits."""
        wanted = float(self.point.noise2.max()) / (0.5 * self.tolerance**2)
        usual, last = _NEAR_GROWTH if self.near else (_GROWTH, 0)
        factor = min(max(wanted, 2), last if wanted <= last else usual) if math.isfinite(wanted) else 2
        return min(2 * math.ceil(0.5 * factor * self.draws), self.most)

    def judge_nearness(self) -> None:
        """Whether steps over the next draws need no trial."""
        self.near = self.daring and self.point.total**2 < _NEAR

    def standing(self, aside: bool) -> Standing:
        """What a run says of the last evaluation; ``aside`` where it is a trial at another place."""
        point, gradients = self.point, self.target.gradients
        loss = float(point.loss.sum())
        record = Record(self.evaluations, loss, point.total, self.step_taken, self.rejections, gradients, 0.0)
        return Standing(
            record,
            torch.full(self.q.batch_shape, False, device="cpu"),
            point.loss,
            (self.evaluations, gradients),
            tolerance=self.tolerance,
            settled=record.norm <= self.tolerance,
            aside=aside,
            values=self.target.values,
        )

    def ended(self, reason: str) -> Ending:
        """Return the outcome at the last point of a run that has not converged, with who is within the tolerance."""
        point = self.point
        within = (point.norm2 + point.noise2).sqrt() <= self.tolerance
        return Ending(False, reason, float(point.loss.sum()), point.total, within)

    # -------------------------------------------------------------------------------- places

    def place(self) -> Place:
        """What is needed to come back here, between two sets of draws."""
        return Place(self.q.snapshot(), self.optimizer, self.near, self.draws, self.point, self.sight.residuals)

    def leave(self, draws: int) -> None:
        """Begin from another start with so many draws; nothing is known of the curvature there."""
        self.optimizer, self.near, self.draws, self.open, self.sets = None, False, draws, False, 0

    def come_back(self, place: Place) -> None:
        """Go back to a place, with the optimizer and the draws that it had."""
        self.q.restore(place.coordinates)
        self.optimizer, self.near, self.draws, self.point, self.sight.residuals = place[1:]
        self.open = False

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what the descent remembers between two evaluations."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "before": None if self.before is None else tuple(self.before),
            "previous": None if self.previous is None else tuple(self.previous),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, after q has been loaded."""
        for name in _COUNTS:
            setattr(self, name, state.get(name, getattr(self, name)))
        self.optimizer = None
        if state["optimizer"] is not None:
            self.optimizer = VN(self.q, estimator=self._estimator())
            self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.before = None if state["before"] is None else Coordinates(*state["before"])
        self.previous = None if state["previous"] is None else Point(*state["previous"])
