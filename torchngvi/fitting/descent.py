"""Minimising the average of a log joint over one fixed set of draws after another.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.linear_response import PAIRS, Residuals, flatness
from torchngvi.expectations import PerFactor
from torchngvi.expectations.draws import Fixed, Seen
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.loop import Ending
from torchngvi.fitting.records import Record
from torchngvi.fitting.starts import EngineSettings
from torchngvi.fitting.stopping import Standing
from torchngvi.interfaces import Coordinates, Estimator, Target
from torchngvi.methods import VN
from torchngvi.models.factors import FAILING, Guarded, guarded_factors
from torchngvi.posteriors import clique_marginals
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.precision import forest_of

_STATE = (
    *("draws", "left_out", "sets", "set_noises", "open"),
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


class SampledObjective:
    """How a log joint is evaluated; one in factors, under a q over their forest, is seen factor by factor."""

    def __init__(self, q: Gaussian, target: Guarded) -> None:
        self.q, self.target, self.factors = q, target, guarded_factors(q, target.target)
        self.pattern = forest_of(q) if self.factors is None else None
        self.residuals: Residuals | None = None  # some of those that were seen last, of the whole

    def most(self, most: int, numbers: int = 20_000_000, fewest: int = 32) -> int:
        """Return the most draws of one average: those of all cliques have so many numbers at most, for the memory."""
        if self.factors is None:
            return most
        each = sum(kind.nodes * (kind.size + kind.above) for kind in self.factors.structure.kinds)
        return max(min(most, 2 * (numbers // (2 * each))), 2 * self.q.structure.widest + 2, fewest)

    @property
    def members(self) -> int:
        """Draws that belong together: a pair has a draw of each clique, and is left out where one of them fails."""
        return 1 if self.factors is None else max(kind.nodes for kind in self.factors.structure.kinds)

    def fixed(self, draws: int, seed: int, left_out: tuple[int, ...]) -> Fixed:
        """Return fixed draws; each clique has its own, or of those of the whole they are whitened in each clique."""
        return Fixed(draws, seed, left_out, apart=self.factors is not None, pattern=self.pattern)

    def estimator(self, fixed: Fixed) -> Estimator:
        """Return the average over draws."""

        def saw(seen: Seen) -> None:
            if self.factors is None and not self.q.batch_shape:
                self.keep(seen.z, seen.pulled)

        average = SampleAverage(fixed, saw)
        return average if self.factors is None else PerFactor(average)

    def keep(self, z: Tensor, pulled: Tensor) -> None:
        """Keep what was seen at some pairs of draws, both (S, D), for `growth`."""
        if self.target.temperature:
            z, pulled = (torch.cat([half[:PAIRS] for half in part.chunk(2)]) for part in (z, pulled))
            self.residuals = Residuals(z, pulled / self.target.temperature - z)

    @property
    def growth(self) -> float:
        """At most how many times half of norm² the distance from the best q is, as far as what was seen last tells."""
        flat = None if self.residuals is None else flatness(self.residuals, self.q.structure)
        return 1.0 if flat is None else flat.growth

    def evaluate(self, do: Callable[[Target], Any]) -> Any:
        """Do it on what is seen, and count it."""
        with self._counted():
            return do(self.target if self.factors is None else self.factors)

    def failing(self, fixed: Fixed) -> Tensor:
        """Find the pairs of mirrored draws at which the log joint, or a factor of it, is NaN or has such a gradient."""
        seen: list[tuple[Gaussian, Target]] = [(self.q, self.target)]
        if self.factors is not None:
            cliques = clique_marginals(self.q)
            seen = [(cliques[kind], term) for kind, term in self.factors.drawn.items()]
        fails = torch.zeros(fixed.num_samples // 2, dtype=torch.bool, device=self.q.device)
        with self._counted():
            for q, target in seen:
                theta = q.push_noise(fixed(q.mean_probe.detach())).detach()
                energy, gradient = energy_and_gradient(target, theta)
                bad = energy.isnan() | (gradient.isnan().any(-1) & energy.isfinite())
                fails |= bad.reshape(2, len(fails), -1).any(-1).any(0)
        return fails

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Calls of the factors, within the budget of the whole, count for it."""
        if self.factors is not None:
            self.factors.allow(self.target)
        try:
            yield
        finally:
            if self.factors is not None:
                self.factors.count_for(self.target)


class Place(NamedTuple):
    """What a descent goes back to from another place."""

    coordinates: Coordinates
    optimizer: VN | None
    draws: int
    point: Point
    residuals: Residuals | None  # seen last there


class Descent:
    """VN with a memory of the curvature that outlives the draws."""

    most = 16_384  # draws of one sample average
    spread = 96  # draws a coordinate of all sets whose minima are averaged, after the first

    def __init__(self, q: Gaussian, target: Guarded, seed: int, tolerance: float, settings: EngineSettings) -> None:
        self.settings = settings
        self.q, self.target, self.seed, self.tolerance = q, target, seed, tolerance
        self.draws = self.evaluations = self.rejections = 0
        self.open = False  # the minimisation over the present draws has begun and has not ended
        self.sets = 0  # of so many draws that q has seen one step over, where the minima of several are averaged
        self.set_noises: list[Tensor] = []  # noise² of an average, by each of the sets
        self.left_out: tuple[int, ...] = ()  # pairs of the present average
        self.optimizer: VN | None = None
        self.objective = SampledObjective(q, target)
        self.most = self.objective.most(self.most)
        self.forget_average()

    def forget_average(self) -> None:
        """Begin to count for another average."""
        self.step_taken, self.stalled, self.first = 0.0, 0, self.evaluations

    def begin(self) -> None:
        """Begin with the present draws, where q is."""
        self.forget_average()
        self.left_out = ()
        self._renew()
        self.open = True

    def _fixed(self, left_out: tuple[int, ...]) -> Fixed:
        return self.objective.fixed(self.draws, self.seed + self.draws + 10_007 * self.sets, left_out)

    def _renew(self) -> VN:
        """Give the optimizer the present draws; a new start has a new one."""
        estimator = self.objective.estimator(self._fixed(self.left_out))
        if self.optimizer is None:
            self.optimizer = VN(self.q, estimator=estimator)
        else:
            self.optimizer.resample(estimator)
        return self.optimizer

    def evaluate(self) -> Point:
        """Evaluate q on the present draws."""
        first = self.evaluations == self.first
        point = self._evaluated()
        if first and not point.finite and self._replace_failing():
            self._renew()
            point = self._evaluated()
        return point

    def _replace_failing(self, rounds: int = 6) -> bool:
        """Leave out the pairs of draws at which the log joint fails; whether there are some, and few.

        There are rounds of it, since the others move a little as the set is whitened again.
        """
        most, left_out = max(1, int(FAILING * self.draws / 2 * self.objective.members)), self.left_out
        for _ in range(rounds):
            fixed = self._fixed(left_out)
            pairs = self.objective.failing(fixed).nonzero()[:, 0].tolist()
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
            self.set_noises = [*self.set_noises[: self.sets - 1], norm2 / (1 + 1 / self.sets)]
            share = torch.minimum(noise2, torch.stack(self.set_noises).mean(0)) / self.sets
            left = torch.maximum(norm2 - noise2, share) + noise2 * math.sqrt(2 / self.q.dim)
            self.point = Point(torch.zeros_like(left), left, status.loss)
        else:
            # S numbers a coordinate have to pay for 1 + (D + 1)/2 parameters a coordinate
            parameters = 1 + self.q.structure.parameters / self.q.dim
            overfit = self.draws / max(self.draws - parameters, 0.25 * self.draws)
            self.point = Point(norm2, noise2 * overfit, status.loss)
        return self.point

    def _count(self, do: Callable[[Target], Any]) -> Any:
        """Do it on the target, and count what it takes."""
        assert self.optimizer is not None
        before = self.optimizer.evaluations
        result = self.objective.evaluate(do)
        self.evaluations += self.optimizer.evaluations - before
        return result

    @property
    def seen(self) -> int:
        """Draws, in all sets."""
        return max(self.sets, 1) * self.draws

    @property
    def _solved(self) -> Tensor:
        """norm² at which q is nearer to the minimum of the average than the draws tell."""
        return 0.5 * self.point.noise2

    def averages_sets(self, tame: float = 0.02) -> bool:
        """Begin to average the minima of several sets, where q is at one, and noise² a coordinate small."""
        solved = bool((self.point.norm2 <= self._solved).all())
        small = float(self.point.noise2.max()) <= max(1.0, tame * self.q.dim)
        if self.sets or not (solved and small) or self.draws > self.spread * self.q.dim:
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
        if (self.sets + 1) * self.draws > self.spread * self.q.dim:
            self.point = self.point._replace(noise2=(1 - share) * self.point.noise2)
            return False
        self.sets += 1
        self.left_out, self.first = (), self.evaluations
        self._renew()
        return True

    def step(self) -> bool:
        """A step from where q was evaluated; False where the minimisation over these draws has ended instead."""
        self.open = self._stepped()
        return self.open

    def _stepped(self, few: int = 30, long: int = 4000, least: float = 0.05, rejected: int = 3) -> bool:
        """A step, unless norm² is small enough, or nothing more is to be had on these draws.

        An average is given up after a few evaluations, or as many as take so many draws: few draws suffice to see that
        nothing confines q.  Where no more draws are to be taken a least share of tolerance² has to be left for norm².
        """
        assert self.optimizer is not None
        if self.sets:
            return self._next_set()
        point = self.point
        solved = torch.clamp_min(self._solved, 0.05 * self.tolerance**2)
        spare = self.tolerance**2 - point.noise2  # these draws may do, once norm² is no more
        enough = spare if self.draws > self.settings.dear else torch.minimum(solved, spare)
        done = point.norm2 <= torch.where(spare > least * self.tolerance**2, enough, solved)
        spent = self.evaluations - self.first >= max(few, long // self.draws)
        if bool(done.all()) or self.stalled >= rejected or spent:
            return False
        self._count(self.optimizer.step)
        assert self.optimizer.last is not None
        self.step_taken = float(self.optimizer.last.rho.min())
        back = ~self.optimizer.last.accepted
        self.rejections += int(back.sum())
        self.stalled = self.stalled + 1 if bool((back | done).all()) else 0
        return True

    def more_draws(self, most: int = 6) -> int:
        """The number of draws that brings noise² to half of tolerance², at most so many times as many."""
        wanted = float(self.point.noise2.max()) / (0.5 * self.tolerance**2)
        factor = min(max(wanted, 2), most) if math.isfinite(wanted) else 2
        return min(2 * math.ceil(0.5 * factor * self.draws), self.most)

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
        return Place(self.q.snapshot(), self.optimizer, self.draws, self.point, self.objective.residuals)

    def leave(self, draws: int) -> None:
        """Begin from another start with so many draws; nothing is known of the curvature there."""
        self.optimizer, self.draws, self.open, self.sets = None, draws, False, 0

    def come_back(self, place: Place) -> None:
        """Go back to a place, with the optimizer and the draws that it had."""
        self.q.restore(place.coordinates)
        self.optimizer, self.draws, self.point, self.objective.residuals = place[1:]
        self.open = False

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what the descent remembers between two evaluations."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return {**{name: getattr(self, name) for name in _STATE}, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, after q has been loaded."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.optimizer = None
        if state["optimizer"] is not None:
            self._renew().load_state_dict(copied(state["optimizer"]))
