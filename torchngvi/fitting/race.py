"""Where no mode can be trusted: starts that race by stochastic natural steps, and a finish by them.

In a hierarchical model the mode of the joint density is where the scales of the groups vanish, or not at all: far from
where the posterior has its mass.  Then several starts take steps along stochastic natural gradients, which see the
log joint where q is and not at a point (the improved Bayesian learning rule by 16 antithetic draws, Lin, Schmidt and
Khan 2020), and whichever reaches the least negative ELBO is where the sample averages begin.  A start that gains slowly
is left behind; one that could overtake in another block is not, since one block is mostly noise.

The finish is for gradients with tails so heavy that no average of them over fixed draws has a useful minimum.  What the
steps end with is their noise, most of which the average of the iterates does not have (Wu and Gardner 2024).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.averaging import ExpectationAverage
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import Stein
from torchngvi.expectations.draws import Antithetic, Fixed
from torchngvi.interfaces import Coordinates, Rule, where_members
from torchngvi.models.guarded import FAILING, Guarded
from torchngvi.optim import NaturalGradientVI
from torchngvi.optim.watching import UNWATCHED
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import LocalExponential, Retraction
from torchngvi.stepsizes import KLRadius

MEAN_FIELD = 0.3  # learning rate of independent coordinates, whose steps are less noisy
_RADIUS = (0.5, 0.05)  # nats, and nats a coordinate, that a step of a race may move q by
_FALLING = 0.1  # nats that a step of the finish may move q by, whatever its draws
_MISSED = 8  # steps in a row that could not be taken, after which a block ends
_JUDGES = 256  # fixed draws that judge a block, beside its own
_TOGETHER = 6  # blocks after the first for which starts that might overtake are kept
_BLOCKS = 40  # at most
_GAIN = (0.2, 0.004)  # nats, and nats a coordinate, that the last few blocks have to gain for another
_PATIENCE = 2  # such blocks
CONFINED = 15.0  # log of the factor by which a standard deviation may grow
BOUNDED = 1e12  # nats to which the ELBO may rise
_RATES = (0.5, 0.5, 0.5, 0.5, 0.5, 0.1, 0.05, 0.02, 0.02, 0.02)  # of these blocks; over the second half q is averaged
_COMPARED = 4096  # draws by which the finish is judged


class _Pace(NamedTuple):
    """Draws of a step, steps of a block with their learning rate, and steps of a block of the finish."""

    draws: int
    steps: int
    lr: float
    finish: int


_USUAL = _Pace(16, 32, 0.1, 250)
_IN_PASSES = _Pace(64, 8, 0.3, 30)  # where a step is a pass over data: fewer of them, and longer ones


@dataclass(eq=False)
class Start:
    """One of those that race.

    Attributes:
        name: for the bar.
        coordinates: of q there.
        loss: the negative ELBO there, as far as known.
        gain: in the last block.
        judged: the negative ELBO by draws that are the same for all and in all blocks, which tells small gains.
        members: that of each member of a batch, (*batch,).
        gains: of each in the last block, (*batch,).
    """

    name: str
    coordinates: Coordinates
    loss: float
    gain: float = 0.0
    judged: float = math.inf
    members: Tensor | None = None
    gains: Tensor | None = None

    @property
    def next(self) -> float:
        """The loss after another block, if that gains as much as the last."""
        return self.loss - max(self.gain, 0.0)

    def overtakes(self, best: "Start") -> bool:
        """Whether it may be better than another after another block, were it for one member of a batch."""
        if self.next < best.loss:
            return True
        if self.members is None or self.gains is None or best.members is None or not self.members.ndim:
            return False
        return bool((self.members - self.gains.clamp_min(0.0) < best.members).any())


class Race:
    """Steps of one posterior from several starts.

    Attributes:
        reached: the negative ELBO where the race has ended.
    """

    def __init__(
        self,
        q: Gaussian,
        target: Guarded,
        seed: int,
        over: Callable[[], bool] = lambda: False,
        show: Callable[[str], None] = lambda phase: None,
        keep: Callable[[Coordinates], None] = lambda coordinates: None,
        lr: float | None = None,
    ) -> None:
        self.q, self.target, self.seed, self.over, self.show, self.keep = q, target, seed, over, show, keep
        self.pace = _IN_PASSES if target.in_passes else _USUAL
        self.lr, self.reached = lr or self.pace.lr, math.inf
        self.unit = target.temperature or 1.0

    def run(self, starts: Sequence[Start], blocks: int = _BLOCKS) -> None:
        """Leave q where the best of the starts has come to; as it is where none has a finite loss."""
        alive = [start for start in starts if math.isfinite(start.loss)]
        if not alive:
            return
        enough = self.unit * max(_GAIN[0], _GAIN[1] * self.q.dim)
        best, widest, idle = min(alive, key=lambda start: start.loss), self._widest(alive), 0
        least, joined = math.inf, False
        for block in range(blocks):
            if block:  # before, the starts are known
                self.keep(best.coordinates)
            if self.over():
                break
            self.show(f"{len(alive)} start{'s' * (len(alive) > 1)}, block {block + 1}")
            for number, start in enumerate(starts):
                if start in alive and not self.over():
                    self._block(start, self.seed + 101 * (block + 1) + number)
            best = min(alive, key=lambda start: start.loss)
            alive = [start for start in alive if start is best or start.overtakes(best)]
            if block >= _TOGETHER:
                alive = [best]
            if self.q.batch_shape and len(alive) == 1 and not joined:
                self._join(best, starts)
                joined = True
            self.q.restore(best.coordinates)
            lost = best.loss < -BOUNDED or float((self.q.stddev.log() - widest).max()) > CONFINED
            idle = idle + 1 if best.judged > least - enough else 0
            least = least if idle else best.judged
            if lost or (len(alive) == 1 and idle >= _PATIENCE):
                break
        self.q.restore(best.coordinates)
        self.reached = best.loss

    def _join(self, best: Start, starts: Sequence[Start]) -> None:
        """Every member of the best start goes to where any of them has brought it farthest."""
        places = [start.coordinates for start in starts if math.isfinite(start.loss)]
        found = put_at_best(self.q, self.target, places, _JUDGES, self.seed + 3)
        best.coordinates, best.loss = self.q.snapshot(), min(best.loss, -found.elbo)

    def _widest(self, starts: Sequence[Start]) -> Tensor:
        """The largest log standard deviations of the starts, (D,): those of a collapsed mode say nothing."""
        widest = []
        for start in starts:
            self.q.restore(start.coordinates)
            widest.append(self.q.stddev.log())
        return torch.stack(widest).amax(0)

    def _block(self, start: Start, seed: int) -> None:
        """One block of steps from there; the start goes to where they end."""
        self.q.restore(start.coordinates)
        losses = self.steps(self.pace.steps, self.lr, seed)[-self.pace.steps // 2 :]
        mean = sum(losses) / len(losses) if losses else math.inf
        members = member_losses(self.q, self.target, _JUDGES, self.seed + 3)
        start.judged = _finite(members.sum())
        reached = min(mean, start.judged)
        if not math.isfinite(reached):  # as it was, and it will gain nothing
            start.gain, start.gains = 0.0, None
            return
        start.gains = None if start.members is None else start.members - members
        start.members = members
        start.gain, start.loss = start.loss - reached, reached
        start.coordinates = self.q.snapshot()

    def steps(
        self,
        count: int,
        lr: float,
        seed: int,
        average: ExpectationAverage | None = None,
        radius: float | None = None,  # nats that a step may move q by; by default those of a race
    ) -> list[float]:
        """Take a number of stochastic steps of q, and return the losses before each by its draws."""
        generator = torch.Generator(self.q.device).manual_seed(seed)
        radius = radius or max(_RADIUS[0], _RADIUS[1] * self.q.dim)
        optimizer = _stochastic(self.q, lr, self.pace.draws, radius, generator)
        losses: list[float] = []
        missed = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RejectedStepWarning)
            for _ in range(count):
                if self.over():
                    break
                value = optimizer.step(self.target)
                assert value is not None
                assert optimizer.last is not None
                loss = float(value)
                missed = 0 if bool(optimizer.last.accepted.all()) else missed + 1
                if missed >= _MISSED:
                    break
                if average is not None:
                    average.update(self.q)
                if math.isfinite(loss):
                    losses.append(loss)
        return losses

    def finish(self, other: Coordinates | None = None, share: float = 1.0) -> tuple["Compared", "Compared"]:
        """Steps of falling size, and the average over the second half of them; q at the best of all."""
        places = [self.q.snapshot()] + ([] if other is None else [other])
        before = put_at_best(self.q, self.target, places, _COMPARED, self.seed + 5)
        places = [self.q.snapshot()]
        average = ExpectationAverage(self.q) if self.q.structure.closed else None
        for number, lr in enumerate(_RATES):
            if self.over():
                break
            self.show(f"steps of falling size, block {number + 1} of {len(_RATES)}")
            averaged = average if 2 * number >= len(_RATES) else None
            self.steps(math.ceil(share * self.pace.finish), lr, self.seed + 10_007 * (number + 1), averaged, _FALLING)
        places.append(self.q.snapshot())
        if average is not None and bool((average.steps > 0).all()):
            ok = average.structure.cholesky(average.spread)[1]  # rounding may have made it indefinite
            average.spread = where_members(ok, average.spread, self.q.frame().marginals())
            if bool(average.structure.cholesky(average.spread)[1].all()):  # and that of q where noise has nearly gone
                places.append(average.posterior().coordinates)
        return before, put_at_best(self.q, self.target, places, _COMPARED, self.seed + 5)


@dataclass(frozen=True)
class Compared:
    """The ELBO of q on fresh draws."""

    elbo: float
    error: float

    def __str__(self) -> str:
        return f"{self.elbo:.6g} ± {self.error:.1g}"


@torch.no_grad()
def put_at_best(q: Gaussian, target: Guarded, places: Sequence[Coordinates], draws: int, seed: int) -> Compared:
    """Put each member of q where it has the best ELBO of several places, by the same draws; the sum of all ELBOs."""
    best, most, chosen = places[0], torch.tensor(-math.inf, device="cpu"), torch.zeros(0, device="cpu")
    for number, place in enumerate(places):
        q.restore(place)
        values = kept_values(q, target, draws, seed) + target.temperature * q.entropy()
        elbo = values.mean(0).nan_to_num(-math.inf, posinf=-math.inf)
        if number == 0:
            most, chosen = elbo, values
            continue
        better = elbo > most
        most = torch.where(better, elbo, most)
        best = Coordinates(*(where_members(better, new, old) for new, old in zip(place, best, strict=True)))
        chosen = torch.where(better, values, chosen) if q.batch_shape else values if bool(better) else chosen
    q.restore(best)
    chosen = chosen.reshape(len(chosen), -1).sum(1)
    if not len(chosen) or not bool(chosen.isfinite().all()):
        return Compared(-math.inf, math.inf)
    return Compared(float(chosen.mean()), float(chosen.std()) / math.sqrt(len(chosen)))


@torch.no_grad()
def member_losses(q: Gaussian, target: Guarded, draws: int, seed: int, *, failing: float = FAILING) -> Tensor:
    """L of each member of q from whitened draws, the same for every q, (*batch,)."""
    values = kept_values(q, target, draws, seed, failing)
    return -values.mean(0) - target.temperature * q.entropy()


def sampled_loss(q: Gaussian, target: Guarded, draws: int, seed: int, *, failing: float = FAILING) -> float:
    """The sum of `member_losses`; infinite where it is not finite."""
    return _finite(member_losses(q, target, draws, seed, failing=failing).sum())


def _finite(loss: Tensor) -> float:
    """The number, infinite where it is not finite."""
    number = float(loss)
    return number if math.isfinite(number) else math.inf


def kept_values(q: Gaussian, target: Guarded, draws: int, seed: int, share: float = FAILING) -> Tensor:
    """The log joint at whitened draws of q, (S, *batch); of one q without those where it is NaN, if these are few."""
    theta = q.push_noise(Fixed(draws, seed=seed)(q.mean_probe.detach())).detach()
    values = target.log_joint(theta)
    failing = values.isnan()
    few = not q.batch_shape and 0 < int(failing.sum()) <= max(2 * (share > 0), share * draws)
    return values[~failing] if few else values


def _stochastic(q: Gaussian, lr: float, draws: int, radius: float, generator: torch.Generator) -> NaturalGradientVI:
    """Steps that stay in the cone: IBLR, or in patterns that are not closed under products a triangular exponential."""
    rule: Rule = Retraction() if q.structure.closed else LocalExponential()
    estimator = Stein(Antithetic(draws, generator))
    optimizer = NaturalGradientVI(q, rule, lr, step_size=KLRadius(radius), estimator=estimator)
    optimizer.watch = UNWATCHED  # the race judges its rates, and drops those that run away
    return optimizer
