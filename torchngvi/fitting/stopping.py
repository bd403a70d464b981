"""When to end a run: criteria, combined with ``|``, the first of which ends it.

``NormBelow(1e-5) | Evaluations(1000) | Seconds(60) | SlopeBelow(0.01)`` is one criterion.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_number
from torchngvi.errors import InputError
from torchngvi.fitting.records import Record
from torchngvi.interfaces import Coordinates, Posterior, Target, TractableTarget
from torchngvi.models.factors import VALUE
from torchngvi.numerics.arrays import anyone, everyone


class Standing(NamedTuple):
    """The state of a run after an evaluation, about which the criteria are asked."""

    record: Record  # its seconds are set by the loop
    members: Tensor  # whose norm is known to be within the tolerance, (*batch,)
    loss: Tensor  # as it was first evaluated here, which a resumed run must find again, (*batch,)
    spent: tuple[int, int]  # evaluations and gradients after that
    tolerance: float = 0.0  # on the norm
    stalled: int = 0  # steps in a row that were rejected
    rounded: bool = False  # some of the members are so near that rounding hides what a step could gain
    settled: bool = False  # the norm is within the tolerance, and the engine goes on to confirm it
    best: float = math.inf  # smallest smoothed value of a run that watches one
    idle: int = 0  # steps since then
    aside: bool = False  # a trial at another place, which an interrupt undoes
    told: bool = False  # the callbacks were told of it before the run was cut
    lost: str = ""  # why no step can help, as a sentence from "because" on
    climb: str = ""  # a warning that the loss rose far above its start, with a space before it
    remedy: str = ""  # what to do where a budget ends the run, unless it is to raise it
    where: str = ""  # in words, of an engine that holds no norm against a tolerance

    values: int = 0  # of the log joint without a gradient so far, where the engine counts them

    def place(self) -> str:
        """Where the run stands, in words for the reason of its end."""
        return self.where or f"natural-gradient norm {self.record.norm:.2g}"

    @property
    def cost(self) -> float:
        """What was asked of the log joint, in gradients."""
        return self.record.gradients + VALUE * self.values

    def at(self) -> str:
        """Where the run stands, with the tolerance that its norm is held against."""
        return self.where or f"{self.place()} against a tolerance of {self.tolerance:.2g}"


class Stop(NamedTuple):
    """The decision that a run is to end, with its reason: a sentence, from "because" on where it has not converged."""

    reason: str
    converged: bool = False


class Criterion(ABC):
    """The abstract base of the conditions under which a run ends; two are combined by ``|``.

    A criterion that remembers earlier records has ``state_dict`` and ``load_state_dict``; checkpoints hold its state.

    Attributes:
        tolerance: the bound on the natural-gradient norm, of those that have one.
        evaluations: the budget of expectations, of those that have one.
        most_gradients: the budget of gradients, of those that have one.

    >>> either = Evaluations(1000) | Seconds(60)
    >>> either.evaluations
    1000
    """

    tolerance = 0.0
    evaluations = math.inf
    most_gradients = math.inf

    @abstractmethod
    def asked(self, standing: Standing) -> Stop | None:
        """The reason to end the run where it stands, or None; the loop asks once a record."""

    def over(self, cost: float, seconds: float) -> bool:
        """Whether a budget is used up between two records, in gradients and seconds; no by default."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """The memory of the criterion, tensors, numbers and texts in new containers; it is empty by default."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Replace the memory of the criterion by what `state_dict` gave."""

    def __or__(self, other: "Criterion") -> "Criterion":
        """The criterion that ends a run where either of the two does."""
        if not isinstance(other, Criterion):
            return NotImplemented
        return _Either(self, other)


class _Either(Criterion):
    """All are asked at each record; where several say so the reason is the first one's."""

    def __init__(self, *parts: Criterion) -> None:
        self.parts: list[Criterion] = [
            inner for part in parts for inner in (part.parts if isinstance(part, _Either) else [part])
        ]
        self.tolerance = max(part.tolerance for part in self.parts)
        self.evaluations = min(part.evaluations for part in self.parts)
        self.most_gradients = min(part.most_gradients for part in self.parts)

    def asked(self, standing: Standing) -> Stop | None:
        """The first answer."""
        return next((stop for stop in [part.asked(standing) for part in self.parts] if stop is not None), None)

    def over(self, cost: float, seconds: float) -> bool:
        """Any of them."""
        return any(part.over(cost, seconds) for part in self.parts)

    def _named(self) -> dict[str, Criterion]:
        """Each part by its class and its number among those of its class."""
        kinds = [type(part).__name__ for part in self.parts]
        return {f"{kind} {kinds[: k + 1].count(kind)}": self.parts[k] for k, kind in enumerate(kinds)}

    def state_dict(self) -> dict[str, Any]:
        """By the names of the parts that remember something."""
        return {name: state for name, part in self._named().items() if (state := part.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Parts that were not there begin again."""
        for name, part in self._named().items():
            if name in state_dict:
                part.load_state_dict(state_dict[name])


class NormBelow(Criterion):
    """The run has converged: the natural-gradient norm of every batch member is known to be within the tolerance.

    If the norm is estimated from draws, three standard errors are added, and the engine confirms it by fresh draws.  A
    norm ν promises at most ½ν² nats: where steps no longer help, and the loss at neighbours of q that only rounding
    tells apart differs by more, as the one of counts of 10⁸ and more does, the run has converged too.

    Args:
        tolerance: the bound on the norm of ∇L/γ, positive.

    Raises:
        InputError: a tolerance that is not positive and finite.

    >>> NormBelow(1e-5).tolerance
    1e-05
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = read_number("tolerance", tolerance, "bounds the natural-gradient norm", above=0)

    def asked(self, standing: Standing) -> Stop | None:
        """End the run, as converged, once the norm of every member is within the tolerance."""
        diverged = standing.rounded and standing.climb  # what a huge loss hides is no optimum
        if diverged or not everyone(standing.members):
            return None
        least = ", the least that the rounding of the ELBO allows" if standing.rounded else ""
        return Stop(f"natural-gradient norm {standing.record.norm:.2g}{least}.{standing.climb}", converged=True)


class Rounding:
    """Whether the ½ν² nats that a norm ν promises are less than what rounding hides of the loss near q."""

    def __init__(self) -> None:
        self._best, self._idle = math.inf, 0

    def asked(self, norm: Tensor, members: Tensor, alive: Tensor) -> bool:
        """Whether rounding is to be looked at, ever more seldom: norms of those that have not converged do not fall."""
        moving = alive & ~members
        if not anyone(moving):
            return False
        size = float(norm.where(moving, 0.0).max())
        if size < 0.5 * self._best:
            self._best, self._idle = size, 0
            return False
        self._idle += 1
        return self._idle >= 2 and self._idle & (self._idle - 1) == 0  # after 2, 4, 8, .. evaluations

    def hides(
        self, q: Posterior, target: Target, loss: Tensor, norm: Tensor, units: Sequence[int] = (-8, -4, 4, 8)
    ) -> Tensor:
        """Say of which members, (*batch,), rounding hides what a step could gain."""
        gain, eps = 0.5 * norm.square(), torch.finfo(q.mean_probe.dtype).eps
        near = gain <= eps**0.5 * loss.abs().clamp_min(1.0)  # else there is something to gain
        if not (anyone(near) and isinstance(target, TractableTarget)):
            return torch.zeros_like(near)
        other, losses = copy.deepcopy(q), [loss]
        here = other.snapshot()
        for unit in units:
            other.restore(Coordinates(here.vector * (1 + unit * eps), here.matrix))
            with torch.no_grad():  # by values alone: a target may know its own q only
                energy = target.expected_energy(other.probed())[0]
                losses.append((energy - target.temperature * other.entropy()).to(loss))
        every = torch.stack(losses)
        return near & (gain <= every.amax(0) - every.amin(0))

    def state_dict(self) -> dict[str, Any]:
        """The smallest norm so far, and the evaluations since."""
        return {"best": self._best, "idle": self._idle}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave; without one begin."""
        self._best, self._idle = state_dict.get("best", math.inf), state_dict.get("idle", 0)


class Evaluations(Criterion):
    """A budget of expectations (value, gradient and curvature); it lets a run confirm a norm within the tolerance.

    Args:
        most: the number of expectations after which the run ends.

    Raises:
        InputError: a number that is not whole, or below 1.

    >>> (Evaluations(1000) | Evaluations(10)).evaluations
    10
    """

    def __init__(self, most: int) -> None:
        self.evaluations = read_count("max_evaluations", most, "is a budget of expectations")

    def asked(self, standing: Standing) -> Stop | None:
        """End the run once the budget is used up."""
        if standing.record.evaluations < self.evaluations or standing.settled:
            return None
        return used_up(standing, f"{self.evaluations} evaluations", "Raise max_evaluations.")


class Gradients(Criterion):
    """A budget of gradients of the log joint, one a draw; for a model, of passes over its data.

    Values without a gradient count as 0.4 of one where the engine counts them.  All that a fit asks of a log joint is
    counted, the search for a mode and the checks too.  A fit of a log joint without an optimizer makes no call that
    would exceed the budget: the run ends before it, where it was evaluated last.  But for its first average, over the
    fewest draws (2 D + 2 for a full covariance, or 32), without which there is no result, and which is made whatever
    the search for a start has taken.  Every other run ends after the evaluation that uses the budget up.

    Args:
        most: the number of gradients after which the run ends.

    Raises:
        InputError: a number that is not whole, or below 1.

    >>> Gradients(10_000).most
    10000
    """

    def __init__(self, most: int) -> None:
        self.most_gradients = self.most = read_count("Gradients", most, "is a budget of gradients")

    def asked(self, standing: Standing) -> Stop | None:
        """End the run once the budget is used up."""
        return gradients_used_up(standing, self.most) if self.over(standing.cost, 0.0) else None

    def over(self, cost: float, seconds: float) -> bool:
        """Say whether the budget of gradients is spent."""
        return cost >= self.most


def used_up(standing: Standing, budget: str, advice: str, more: str = "") -> Stop:
    """The end of a run whose budget is used up."""
    advice = standing.climb or f" {standing.remedy or advice}"
    return Stop(f"because the budget of {budget} is used up ({standing.at()}{more}).{advice}")


def gradients_used_up(standing: Standing, gradients: float) -> Stop:
    """The end of a run that has no gradients left for what it would do next."""
    unconfirmed = ", not confirmed by fresh draws" if standing.settled else ""
    return used_up(standing, f"{gradients:.0f} gradients", "Allow more gradients.", unconfirmed)


class Seconds(Criterion):
    """A budget of time, asked after each evaluation; a run that goes on from a checkpoint has the earlier ones counted.

    Args:
        most: the seconds after which the run ends.

    Raises:
        InputError: a number that is not positive and finite.

    >>> Seconds(60).most
    60.0
    """

    def __init__(self, most: float) -> None:
        self.most = read_number("Seconds", most, "is a budget of time", above=0)

    def asked(self, standing: Standing) -> Stop | None:
        """End the run once the time is over."""
        over = self.over(0.0, standing.record.seconds)
        return used_up(standing, f"{self.most:g} seconds", "Allow more time.") if over else None

    def over(self, cost: float, seconds: float) -> bool:
        """Say whether the time is up."""
        return seconds >= self.most


class Stalled(Criterion):
    """The run ends after so many rejected steps in a row, when rounding or the step size hinders any progress.

    Args:
        steps: the number of rejected steps.

    Raises:
        InputError: a number that is not whole, or below 1.

    >>> Stalled(20).steps
    20
    """

    def __init__(self, steps: int) -> None:
        self.steps = read_count("Stalled", steps, "counts rejected steps")

    def asked(self, standing: Standing) -> Stop | None:
        """End the run once so many steps in a row were rejected."""
        if standing.stalled < self.steps:
            return None
        return Stop(
            f"because {standing.stalled} steps in a row were rejected ({standing.at()}): a smaller lr, float64, or a "
            f"larger tolerance may be needed.{standing.climb}"
        )


class Unimproved(Criterion):
    """The smoothed value that a run watches has had no new best for so many steps: it has converged.

    It is for engines that watch such a value, as that of `torchngvi.ifvb.run`.  A run ends too, and has not converged,
    where more than half of the last steps were rejected, or where the value was never finite.

    Args:
        steps: the number of steps without a new best.

    Raises:
        InputError: a number that is not whole, or below 1.

    >>> Unimproved(200).steps
    200
    """

    def __init__(self, steps: int) -> None:
        self.steps = read_count("Unimproved", steps, "counts steps without a new best")
        self._rejections: list[int] = []  # so far, at the last steps

    def asked(self, standing: Standing) -> Stop | None:
        """End the run once the value has not improved for so many steps, or too many of them were rejected."""
        self._rejections = [*self._rejections[-self.steps :], standing.record.rejections]
        rejected = self._rejections[-1] - self._rejections[0]
        if len(self._rejections) > self.steps and 2 * rejected > self.steps:
            return Stop(
                f"because {rejected} of the last {self.steps} steps were not finite or left the domain: use a smaller "
                "lr, a clip, or a larger eps."
            )
        if standing.idle < self.steps:
            return None
        if not math.isfinite(standing.best):
            return Stop("because the value was never finite: start elsewhere, or use a smaller lr.")
        return Stop(f"the smoothed value has not improved for {self.steps} steps.", converged=True)

    def state_dict(self) -> dict[str, Any]:
        """The memory of the criterion: the number of rejected steps so far, at the last steps."""
        return {"rejections": list(self._rejections)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self._rejections = list(state_dict["rejections"])


def joined(criteria: Criterion, stop: Any) -> Criterion:
    """The criteria of a run with those that its user adds."""
    if stop is None:
        return criteria
    if not isinstance(stop, Criterion):
        raise InputError(
            f"stop is a criterion of torchngvi.fitting, as Seconds(60) | Gradients(10_000); got {stop!r}. A function "
            "of the Record of a step goes into callbacks."
        )
    return criteria | stop


# Ending a run by the slope of its averaged bound: a criterion, and one with a cap for a loop of one's own


class SlopeBelow(Criterion):
    """The bound has stopped rising: a line through its averages over blocks of steps has a slope below so many nats.

    It is the criterion for steps by stochastic gradients, whose norm does not vanish.  The bound of a step is that
    before it, minus the loss.  The line is fitted by least squares to the last averages against the number of the
    block; one that falls ends the run too, and a slope that is not finite does not.

    Args:
        slope: the slope below which the run ends, in nats a block.
        block: the number of iterations in an average.
        blocks: the number of averages in the line.

    Attributes:
        means: the averages so far.
        steps: the number of bounds so far.

    Raises:
        InputError: a block below 1, fewer than two blocks.

    >>> stop = SlopeBelow(0.5, block=1)
    >>> [stop.add(bound) for bound in (0.0, 2.0, 4.0, 4.5, 4.5)]
    [False, False, False, False, True]
    >>> stop.means
    [0.0, 2.0, 4.0, 4.5, 4.5]
    """

    def __init__(self, slope: float = 0.01, block: int = 1000, blocks: int = 3) -> None:
        self.block = read_count("block", block, "counts iterations")
        self.blocks = read_count("blocks", blocks, "counts the averages in a line", at_least=2)
        self.slope = read_number("slope", slope, "is in nats a block")
        self.means: list[float] = []
        self.steps = 0
        self._bounds: list[Tensor] = []  # of the block that is not full, read once it is

    def asked(self, standing: Standing) -> Stop | None:
        """End the run once the line is that flat."""
        if not self.add(-standing.record.loss):
            return None
        return Stop(f"because {self._why()} ({standing.at()}).{standing.climb}")

    def add(self, bound: Tensor | float) -> bool:
        """Take the bound of one more step; its value is read from the device once a block.

        Args:
            bound: the estimate of the lower bound, 0-d, in nats.

        Returns:
            Whether to end the run.
        """
        self._bounds.append(
            bound.detach() if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64, device="cpu")
        )
        self.steps += 1
        if self.steps % self.block:
            return False
        # in double precision: a thousand bounds of -10⁶ nats, added in float32, would hide a slope of 0.01
        device = self._bounds[-1].device  # bounds from a checkpoint may be elsewhere
        self.means.append(float(torch.stack([each.to(device) for each in self._bounds]).cpu().double().mean()))
        self._bounds = []
        return self.rise() < self.slope

    def rise(self) -> float:
        """Return the slope of the line through the last averages, in nats a block; infinite while they are too few."""
        if len(self.means) < self.blocks:
            return math.inf
        y = torch.tensor(self.means[-self.blocks :], dtype=torch.float64, device="cpu")
        x = torch.arange(self.blocks, dtype=torch.float64, device="cpu")
        x = x - x.mean()
        rise = float(x @ y / (x @ x))
        return rise if math.isfinite(rise) else math.inf

    def _why(self) -> str:
        return f"the ELBO rises by {self.rise():.2g} nats in {self.block} steps, less than {self.slope:g}"

    def state_dict(self) -> dict[str, Any]:
        """The memory of the criterion: the averages so far, and the bounds of the block that is not full."""
        return {"means": list(self.means), "bounds": list(self._bounds), "steps": self.steps, "block": self.block}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, with the settings of this object.

        Raises:
            InputError: averages over blocks of another length.
        """
        block = state_dict.get("block", self.block)
        if block != self.block:
            raise InputError(
                f"the averages are over blocks of {block} steps, and here block={self.block}. Say block={block}."
            )
        self.means, self._bounds = list(state_dict["means"]), list(state_dict["bounds"])
        self.steps = state_dict["steps"]


class SlopeStop(SlopeBelow):
    """`SlopeBelow` with a cap, by the settings of Tan (2025), section 4; also for a loop of one's own, by `add`.

    The bound is averaged over each 1000 iterations, and the run ends when the slope of the line through the last three
    averages is below 0.01 nats a block, or after 10⁵ iterations.  It can be a callback of `fit` as well.

    Args:
        block, blocks, slope: those of `SlopeBelow`.
        max_steps: the number of steps after which it ends whatever the slope.

    Raises:
        InputError: block or max_steps below 1, fewer than two blocks.

    >>> stop = SlopeStop(block=1, max_steps=4)
    >>> [stop.add(bound) for bound in (0.0, 2.0, 4.0, 6.0)]
    [False, False, False, True]
    """

    def __init__(self, block: int = 1000, blocks: int = 3, slope: float = 0.01, max_steps: int = 100_000) -> None:
        super().__init__(slope, block, blocks)
        self.max_steps = read_count("max_steps", max_steps, "counts iterations")

    def __call__(self, record: Record) -> bool:
        """Whether to end the run of `fit`, whose bound is minus the loss of the record."""
        return self.add(-record.loss)

    def add(self, bound: Tensor | float) -> bool:
        """Take the bound of one more step, and tell whether to end the run, by the slope or the cap."""
        return super().add(bound) or self.steps >= self.max_steps

    def _why(self) -> str:
        return f"{self.steps} steps were made" if self.steps >= self.max_steps else super()._why()
