"""Minimising the average of a log joint over one fixed set of draws after another.

Near the optimum two steps are taken as they come, and the second is not evaluated; the first that turns out to be
wrong is undone, and all later ones are tried.

Draws at which the log joint fails or is NaN where the minimisation begins give way to others, with their mirror images:
one in twenty at most.  The set is then the same to the end, and a step to where others fail is a rejected one.

A log joint in factors, under a q over their forest, is seen factor by factor, by draws of each clique.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.expectations import PerFactor
from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sample_average import SampleAverage
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.engine import Standing
from torchngvi.fitting.records import Record
from torchngvi.interfaces import Coordinates, Estimator, Target
from torchngvi.methods import VN
from torchngvi.models.guarded import FAILING, Guarded
from torchngvi.models.guarded_factors import guarded_factors
from torchngvi.posteriors import clique_marginals
from torchngvi.posteriors.gaussian import Gaussian

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
_HOPELESS = (256, 20.0)  # draws whose noise² is that large: gradients with heavy tails
_SLOW = 30_000  # draws that the evaluations of one average may take, where steps on fresh draws may follow
_ROUNDS = 6  # in which they are looked for: the others move a little, as the set is whitened again
_NUMBERS = 20_000_000  # of the draws of all cliques, at most
_FEWEST = 32  # draws, whatever the number of cliques
_COUNTS = ("left_out", "draws", "near", "daring", "evaluations", "rejections", "open", "step_taken", "stalled", "first")


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


class Descent:
    """VN with a memory of the curvature that outlives the draws.

    Attributes:
        draws: in the present average.
        near: steps are taken without a trial.
        daring: no such step has been wrong.
        open: the minimisation over the present draws has begun and has not ended.
        point: where q was evaluated last; where it ended, what its last step is known to leave.
    """

    most = 16_384  # draws of one sample average

    def __init__(self, q: Gaussian, target: Guarded, seed: int, tolerance: float) -> None:
        self.q, self.target, self.seed, self.tolerance = q, target, seed, tolerance
        self.draws = self.evaluations = self.rejections = 0
        self.near, self.daring, self.open = False, True, False
        self.left_out: tuple[int, ...] = ()  # pairs of the present average
        self.optimizer: VN | None = None
        self.factors = guarded_factors(q, target.target)
        if self.factors is not None:
            numbers = sum(kind.nodes * (kind.size + kind.above) for kind in self.factors.structure.kinds)
            self.most = max(min(self.most, _NUMBERS // numbers), 2 * q.structure.widest + 2, _FEWEST)
        self._forget_average()

    def _forget_average(self) -> None:
        self.step_taken, self.stalled, self.first = 0.0, 0, self.evaluations
        self.before: Coordinates | None = None  # where the last step without a trial began
        self.previous: Point | None = None  # there

    def begin(self) -> None:
        """Begin with the present draws, where q is."""
        self._forget_average()
        self.left_out = ()
        self._renew()
        self.open = True

    def _fixed(self, left_out: tuple[int, ...]) -> Fixed:
        return Fixed(self.draws, self.seed + self.draws, left_out, apart=self.factors is not None)

    def _estimator(self) -> Estimator:
        average = SampleAverage(self._fixed(self.left_out))
        return average if self.factors is None else PerFactor(average)

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
        # a pair has a draw of each clique, and is left out where one of them fails
        members = 1 if self.factors is None else max(kind.nodes for kind in self.factors.structure.kinds)
        most, left_out = max(1, int(FAILING * self.draws / 2 * members)), self.left_out
        for _ in range(_ROUNDS):
            fixed = self._fixed(left_out)
            pairs = self._failing(fixed).nonzero()[:, 0].tolist()
            if not pairs:
                self.left_out = left_out
                return bool(left_out)
            numbers = fixed.pairs()
            left_out = (*left_out, *(numbers[pair] for pair in pairs))
            if len(left_out) > most:
                break
        return False

    def _failing(self, fixed: Fixed) -> Tensor:
        """At which pairs of draws the log joint, or one of its factors, fails, (S / 2,)."""
        seen: list[tuple[Gaussian, Target]] = [(self.q, self.target)]
        if self.factors is not None:
            cliques = clique_marginals(self.q)
            seen = [(cliques[kind], term) for kind, term in self.factors.drawn.items()]
        fails = torch.zeros(self.draws // 2, dtype=torch.bool, device=self.q.device)
        for q, target in seen:
            theta = q.push_noise(fixed(q.mean_probe.detach())).detach()
            energy, gradient = energy_and_gradient(target, theta)
            bad = energy.isnan() | (gradient.isnan().any(-1) & energy.isfinite())
            fails |= bad.reshape(2, self.draws // 2, -1).any(-1).any(0)
        self._count_factors()
        return fails

    def _count_factors(self) -> None:
        if self.factors is not None:
            self.factors.count_for(self.target)

    def _evaluated(self) -> Point:
        assert self.optimizer is not None
        gamma = self.target.temperature or 1.0
        status = self._count(self.optimizer.evaluate)
        noise2 = torch.zeros_like(status.norm2) if status.noise2 is None else status.noise2  # of exact factors alone
        self.point = Point(status.norm2 / gamma**2, noise2 / gamma**2 * self._overfit(), status.loss)
        return self.point

    def _count(self, do: Callable[[Target], Any]) -> Any:
        """Do it on the target, and count what it takes."""
        assert self.optimizer is not None
        before = self.optimizer.evaluations
        result = do(self.target if self.factors is None else self.factors)
        self._count_factors()
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

    def hopeless(self) -> bool:
        """Whether there is no use in minimising the average: its noise does not fall as it should, or it takes long."""
        draws, noise2 = _HOPELESS
        solved = self._solved()
        noisy = solved and not self.near and self.draws >= draws and not float(self.point.noise2.max()) <= noise2
        return noisy or (not solved and self.draws * (self.evaluations - self.first) > _SLOW)

    def failed(self) -> bool:
        """Whether the minimisation over these draws has ended far from a minimum, by more than noise."""
        return not self._solved() and not bool((self.point.norm2 <= self.point.noise2.clamp_min(_FAR)).all())

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
        point = self.point
        solved = torch.clamp_min(_SOLVED * point.noise2, 0.05 * self.tolerance**2)
        spare = self.tolerance**2 - point.noise2  # these draws may do, with a little more accuracy on them
        done = point.norm2 <= torch.where(spare > _SPARE * self.tolerance**2, torch.minimum(solved, spare), solved)
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
            torch.full(self.q.batch_shape, False),
            point.loss,
            (self.evaluations, gradients),
            tolerance=self.tolerance,
            settled=record.norm <= self.tolerance,
            aside=aside,
            values=self.target.values,
        )

    # -------------------------------------------------------------------------------- places

    def place(self) -> Place:
        """What is needed to come back here, between two sets of draws."""
        return Place(self.q.snapshot(), self.optimizer, self.near, self.draws, self.point)

    def leave(self, draws: int) -> None:
        """Begin from another start with so many draws; nothing is known of the curvature there."""
        self.optimizer, self.near, self.draws, self.open = None, False, draws, False

    def come_back(self, place: Place) -> None:
        """Go back to a place, with the optimizer and the draws that it had."""
        self.q.restore(place.coordinates)
        self.optimizer, self.near, self.draws, self.point = place[1:]
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
            setattr(self, name, state[name])
        self.optimizer = None
        if state["optimizer"] is not None:
            self.optimizer = VN(self.q, estimator=self._estimator())
            self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.before = None if state["before"] is None else Coordinates(*state["before"])
        self.previous = None if state["previous"] is None else Point(*state["previous"])
