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
from torchngvi.interfaces import Coordinates, Rule
from torchngvi.models.guarded import FAILING, Guarded
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import LocalExponential, Retraction
from torchngvi.stepsizes import KLRadius

MEAN_FIELD = 0.3  # learning rate of independent coordinates, whose steps are less noisy
_RADIUS = (0.5, 0.05)  # nats, and nats a coordinate, that a step may move q by
_MISSED = 8  # steps in a row that could not be taken, after which a block ends
_JUDGES = 256  # fixed draws that judge a block, beside its own
_TOGETHER = 6  # blocks after the first for which starts that might overtake are kept
_BLOCKS = 40  # at most
_GAIN = (0.2, 0.004)  # nats, and nats a coordinate, that the last few blocks have to gain for another
_PATIENCE = 2  # such blocks
CONFINED = 15.0  # log of the factor by which a standard deviation may grow
BOUNDED = 1e12  # nats to which the ELBO may rise
_RATES = (0.1, 0.1, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02)  # of these blocks; over the second half q is averaged
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
    """

    name: str
    coordinates: Coordinates
    loss: float
    gain: float = 0.0
    judged: float = math.inf

    @property
    def next(self) -> float:
        """The loss after another block, if that gains as much as the last."""
        return self.loss - max(self.gain, 0.0)


class Race:
    """Steps of one posterior from several starts.

    Args:
        q: moved from start to start.
        target: the log joint.
        seed: of all draws: the same seed is the same race, bit for bit.
        over: whether a budget is used up; asked before each step.
        show: shows a phase.
        keep: takes the coordinates of the best start so far.
        lr: of the steps of a block; by default 0.1, of data in passes 0.3.

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
        """Leave q where the best of the starts has come to; as it is where none has a finite loss.

        Args:
            starts: those that race.
            blocks: the most that a start runs.
        """
        alive = [start for start in starts if math.isfinite(start.loss)]
        if not alive:
            return
        enough = self.unit * max(_GAIN[0], _GAIN[1] * self.q.dim)
        best, widest, idle = min(alive, key=lambda start: start.loss), self._widest(alive), 0
        least = math.inf
        for block in range(blocks):
            self.keep(best.coordinates)
            if self.over():
                break
            self.show(f"{len(alive)} start{'s' * (len(alive) > 1)}, block {block + 1}")
            for number, start in enumerate(starts):
                if start in alive and not self.over():
                    self._block(start, self.seed + 101 * (block + 1) + number)
            best = min(alive, key=lambda start: start.loss)
            alive = [start for start in alive if start is best or start.next < best.loss]
            if block >= _TOGETHER:
                alive = [best]
            self.q.restore(best.coordinates)
            lost = best.loss < -BOUNDED or float((self.q.stddev.log() - widest).max()) > CONFINED
            idle = idle + 1 if best.judged > least - enough else 0
            least = least if idle else best.judged
            if lost or (len(alive) == 1 and idle >= _PATIENCE):
                break
        self.q.restore(best.coordinates)
        self.reached = best.loss

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
        start.judged = sampled_loss(self.q, self.target, _JUDGES, self.seed + 3)
        reached = min(mean, start.judged)
        if not math.isfinite(reached):  # as it was, and it will gain nothing
            start.gain = 0.0
            return
        start.gain, start.loss = start.loss - reached, reached
        start.coordinates = self.q.snapshot()

    def steps(self, count: int, lr: float, seed: int, average: ExpectationAverage | None = None) -> list[float]:
        """Take a number of stochastic steps of q, and return the losses before each by its draws.

        One that is not finite is not taken, and its draws are drawn anew; after eight in a row no more are tried.
        """
        generator = torch.Generator(self.q.device).manual_seed(seed)
        optimizer = _stochastic(self.q, lr, self.pace.draws, generator)
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

    def finish(self, other: Coordinates | None = None) -> tuple["Compared", "Compared"]:
        """Two thousand steps of falling size, and the average of the last thousand; q at the best of all.

        Args:
            other: coordinates to begin at, where they are better than those of q: averages that cannot be minimised
                may have led q astray.

        Returns:
            The ELBO before and after, from the same fresh draws.
        """
        before, here = compared(self.q, self.target, self.seed), self.q.snapshot()
        if other is not None:
            self.q.restore(other)
            if (there := compared(self.q, self.target, self.seed)).elbo > before.elbo:
                before, here = there, other
            self.q.restore(here)
        average = ExpectationAverage(self.q) if self.q.structure.closed else None
        for number, lr in enumerate(_RATES):
            if self.over():
                break
            self.show(f"steps of falling size, block {number + 1} of {len(_RATES)}")
            averaged = average if 2 * number >= len(_RATES) else None
            self.steps(self.pace.finish, lr, self.seed + 10_007 * (number + 1), averaged)
        reached = [(before, here), (compared(self.q, self.target, self.seed), self.q.snapshot())]
        if average is not None and bool((average.steps > 0).all()):
            self.q.restore(average.posterior().coordinates)
            reached.append((compared(self.q, self.target, self.seed), self.q.snapshot()))
        after, best = max(reached, key=lambda place: place[0].elbo)
        self.q.restore(best)
        return before, after


@dataclass(frozen=True)
class Compared:
    """The ELBO of q on fresh draws."""

    elbo: float
    error: float

    def __str__(self) -> str:
        return f"{self.elbo:.6g} ± {self.error:.1g}"


@torch.no_grad()
def compared(q: Gaussian, target: Guarded, seed: int) -> Compared:
    """The ELBO at q with its standard error, of a batch the sum; minus infinity where it is not finite."""
    values = kept_values(q, target, _COMPARED, seed + 5)
    values = (values + target.temperature * q.entropy()).reshape(len(values), -1).sum(1)
    if not len(values) or not bool(values.isfinite().all()):
        return Compared(-math.inf, math.inf)
    return Compared(float(values.mean()), float(values.std()) / math.sqrt(len(values)))


@torch.no_grad()
def sampled_loss(q: Gaussian, target: Guarded, draws: int, seed: int, *, failing: float = FAILING) -> float:
    """L at q from whitened draws, the same for every q, of a batch the sum; infinite where it is not finite.

    Draws at which it is NaN are left out where they are no larger a share than ``failing``, two of them at least unless
    that is 0.
    """
    values = kept_values(q, target, draws, seed, failing)
    loss = float((-values.mean(0) - target.temperature * q.entropy()).sum()) if len(values) else math.inf
    return loss if math.isfinite(loss) else math.inf


def kept_values(q: Gaussian, target: Guarded, draws: int, seed: int, share: float = FAILING) -> Tensor:
    """The log joint at whitened draws of q, (S, *batch); of one q without those where it is NaN, if these are few."""
    theta = q.push_noise(Fixed(draws, seed=seed)(q.mean_probe.detach())).detach()
    values = target.log_joint(theta)
    failing = values.isnan()
    few = not q.batch_shape and 0 < int(failing.sum()) <= max(2 * (share > 0), share * draws)
    return values[~failing] if few else values


def _stochastic(q: Gaussian, lr: float, draws: int, generator: torch.Generator) -> NaturalGradientVI:
    """Steps that stay in the cone: IBLR, or in patterns that are not closed under products a triangular exponential."""
    rule: Rule = Retraction() if q.structure.closed else LocalExponential()
    radius = KLRadius(max(_RADIUS[0], _RADIUS[1] * q.dim))
    return NaturalGradientVI(q, rule, lr, step_size=radius, estimator=Stein(Antithetic(draws, generator)))
