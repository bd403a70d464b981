"""When to end a run: criteria, combined with ``|``, the first of which ends it.

``NormBelow(1e-5) | Evaluations(1000) | Seconds(60) | SlopeBelow(0.01)`` is one criterion.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.fitting.engine import Standing, Stop
from torchngvi.fitting.records import Record
from torchngvi.models.arguments import bound, count


class Criterion(ABC):
    """A condition under which a run ends.

    One that remembers earlier records has ``state_dict`` and ``load_state_dict``; checkpoints hold what they give.

    Attributes:
        tolerance: on the natural-gradient norm, for those that are about it.
        evaluations: the budget of expectations, for those that are about it.
    """

    tolerance = 0.0
    evaluations = math.inf

    @abstractmethod
    def asked(self, standing: Standing) -> Stop | None:
        """Whether the run ends where it stands, and why; called once a record."""

    def over(self, cost: float, seconds: float) -> bool:
        """Whether a budget is used up between two records, in gradients and seconds; no by default."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, in new containers; nothing by default."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Remember that instead."""

    def __or__(self, other: "Criterion") -> "Criterion":
        """Either of the two, whichever comes first."""
        if not isinstance(other, Criterion):
            return NotImplemented
        return _Either(self, other)


class _Either(Criterion):
    """Both are asked at each record; where both say so the reason is the first one's."""

    def __init__(self, *parts: Criterion) -> None:
        self.parts: tuple[Criterion, ...] = tuple(
            inner for part in parts for inner in (part.parts if isinstance(part, _Either) else (part,))
        )
        self.tolerance = max(part.tolerance for part in self.parts)
        self.evaluations = min(part.evaluations for part in self.parts)

    def asked(self, standing: Standing) -> Stop | None:
        """The first answer."""
        return next((stop for stop in [part.asked(standing) for part in self.parts] if stop is not None), None)

    def over(self, cost: float, seconds: float) -> bool:
        """Any of them."""
        return any(part.over(cost, seconds) for part in self.parts)

    def _named(self) -> Iterator[tuple[str, Criterion]]:
        """Each part by its class and its number among those of its class."""
        seen: dict[str, int] = {}
        for part in self.parts:
            kind = type(part).__name__
            seen[kind] = seen.get(kind, 0) + 1
            yield f"{kind} {seen[kind]}", part

    def state_dict(self) -> dict[str, Any]:
        """By the names of the parts that remember something."""
        return {name: state for name, part in self._named() if (state := part.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Parts that were not there begin anew."""
        for name, part in self._named():
            if name in state_dict:
                part.load_state_dict(state_dict[name])


class NormBelow(Criterion):
    """The run has converged: the natural-gradient norm of every batch member is known to be within the tolerance.

    Where it is estimated from draws, three standard errors are added, and the engine confirms it by fresh draws.

    Raises:
        InputError: a tolerance that is not positive and finite.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = bound("tolerance", tolerance, "bounds the natural-gradient norm")

    def asked(self, standing: Standing) -> Stop | None:
        """Whether all members are there."""
        if not bool(standing.members.all()):
            return None
        return Stop(f"natural-gradient norm {standing.record.norm:.2g}.{standing.climb}", converged=True)


class Evaluations(Criterion):
    """A budget of expectations (value, gradient and curvature); it lets a run confirm a norm within the tolerance.

    Raises:
        InputError: a number that is not whole, or below 1.
    """

    def __init__(self, most: int) -> None:
        self.evaluations = count("max_evaluations", most, "is a budget of expectations")

    def asked(self, standing: Standing) -> Stop | None:
        """Whether it is used up."""
        if standing.record.evaluations < self.evaluations or standing.settled:
            return None
        advice = standing.climb or f" {standing.remedy or 'Raise max_evaluations.'}"
        return Stop(f"because the budget of {self.evaluations} evaluations is used up ({standing.at()}).{advice}")


class Gradients(Criterion):
    """A budget of gradients of the log joint, one a draw; for a model, of passes over its data.

    Values without a gradient count as 0.4 of one where the engine counts them.  All that a fit asks of a log joint is
    counted, the search for a mode and the checks too, and the run ends within one call of the budget.

    Raises:
        InputError: a number that is not whole, or below 1.
    """

    def __init__(self, most: int) -> None:
        self.most = count("Gradients", most, "is a budget of gradients")

    def asked(self, standing: Standing) -> Stop | None:
        """Whether it is used up."""
        if not self.over(standing.cost, 0.0):
            return None
        advice = standing.climb or f" {standing.remedy or 'Allow more gradients.'}"
        return Stop(f"because the budget of {self.most} gradients is used up ({standing.at()}).{advice}")

    def over(self, cost: float, seconds: float) -> bool:
        """Of gradients."""
        return cost >= self.most


class Seconds(Criterion):
    """A budget of time, asked after each evaluation; a run that goes on from a checkpoint has the earlier ones counted.

    Raises:
        InputError: a number that is not positive and finite.
    """

    def __init__(self, most: float) -> None:
        self.most = bound("Seconds", most, "is a budget of time")

    def asked(self, standing: Standing) -> Stop | None:
        """Whether they are over."""
        if not self.over(0.0, standing.record.seconds):
            return None
        advice = standing.climb or f" {standing.remedy or 'Allow more time.'}"
        return Stop(f"because the budget of {self.most:g} seconds is used up ({standing.at()}).{advice}")

    def over(self, cost: float, seconds: float) -> bool:
        """Of time."""
        return seconds >= self.most


class Stalled(Criterion):
    """So many steps in a row were rejected: nothing more is to be had.

    Raises:
        InputError: a number that is not whole, or below 1.
    """

    def __init__(self, steps: int) -> None:
        self.steps = count("Stalled", steps, "counts rejected steps")

    def asked(self, standing: Standing) -> Stop | None:
        """Whether it is so."""
        if standing.stalled < self.steps:
            return None
        return Stop(
            f"because {standing.stalled} steps in a row were rejected ({standing.at()}): a smaller lr, float64, or a "
            f"larger tolerance may be needed.{standing.climb}"
        )


class SlopeBelow(Criterion):
    """The bound has stopped rising: a line through its averages over blocks of steps has a slope below so many nats.

    The bound of a step is that before it, minus the loss.  The line is fitted by least squares to the last averages
    against the number of the block; one that falls ends the run too, and a slope that is not finite does not.

    Args:
        slope: below which the run ends, in nats a block.
        block: iterations in an average.
        blocks: averages in the line.

    Attributes:
        means: the averages so far.
        steps: the bounds so far.

    Raises:
        InputError: a block below 1, fewer than two blocks.

    >>> stop = SlopeBelow(0.5, block=1)
    >>> [stop.add(bound) for bound in (0.0, 2.0, 4.0, 4.5, 4.5)]
    [False, False, False, False, True]
    >>> stop.means
    [0.0, 2.0, 4.0, 4.5, 4.5]
    """

    def __init__(self, slope: float = 0.01, block: int = 1000, blocks: int = 3) -> None:
        if block < 1:
            raise InputError(f"block counts iterations, at least 1; got {block}.")
        if blocks < 2:
            raise InputError(f"a line needs at least 2 blocks; got {blocks}.")
        self.block, self.blocks, self.slope = block, blocks, slope
        self.means: list[float] = []
        self.steps = 0
        self._bounds: list[Tensor] = []  # of the block that is not full, read once it is

    def asked(self, standing: Standing) -> Stop | None:
        """Whether the line is that flat."""
        if not self.add(-standing.record.loss):
            return None
        return Stop(f"because {self._why()} ({standing.at()}).{standing.climb}")

    def add(self, bound: Tensor | float) -> bool:
        """Take the bound of one more step; whether to end the run.  Read once a block."""
        self._bounds.append(bound.detach() if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64))
        self.steps += 1
        if self.steps % self.block:
            return False
        # in double precision: a thousand bounds of -10⁶ nats, added in float32, would hide a slope of 0.01
        device = self._bounds[-1].device  # bounds from a checkpoint may be elsewhere
        self.means.append(float(torch.stack([each.to(device) for each in self._bounds]).cpu().double().mean()))
        self._bounds = []
        return self.rise() < self.slope

    def rise(self) -> float:
        """The slope of the line through the last averages, in nats a block; infinite while there are too few."""
        if len(self.means) < self.blocks:
            return math.inf
        y = torch.tensor(self.means[-self.blocks :], dtype=torch.float64)
        x = torch.arange(self.blocks, dtype=torch.float64)
        x = x - x.mean()
        rise = float(x @ y / (x @ x))
        return rise if math.isfinite(rise) else math.inf

    def _why(self) -> str:
        return f"the ELBO rises by {self.rise():.2g} nats in {self.block} steps, less than {self.slope:g}"

    def state_dict(self) -> dict[str, Any]:
        """The averages so far, and the bounds of the block that is not full."""
        return {"means": list(self.means), "bounds": list(self._bounds), "steps": self.steps, "block": self.block}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, with the settings of this object.

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
        block: iterations in an average.
        blocks: averages in the line.
        slope: below which the run ends.
        max_steps: after which it ends whatever the slope.

    Raises:
        InputError: block or max_steps below 1, fewer than two blocks.
    """

    def __init__(self, block: int = 1000, blocks: int = 3, slope: float = 0.01, max_steps: int = 100_000) -> None:
        if block < 1 or max_steps < 1:
            raise InputError(f"block and max_steps count iterations, at least 1; got {block} and {max_steps}.")
        super().__init__(slope, block, blocks)
        self.max_steps = max_steps

    def __call__(self, record: Record) -> bool:
        """Whether to end the run of `fit`, whose bound is minus the loss."""
        return self.add(-record.loss)

    def add(self, bound: Tensor | float) -> bool:
        """Take the bound of one more step; whether to end the run.  Read once a block."""
        return super().add(bound) or self.steps >= self.max_steps

    def _why(self) -> str:
        return f"{self.steps} steps were made" if self.steps >= self.max_steps else super()._why()
