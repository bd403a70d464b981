"""When to end a run: criteria, combined with ``|``, the first of which ends it.

``NormBelow(1e-5) | Evaluations(1000) | Seconds(60) | SlopeBelow(0.01)`` is one criterion.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torchngvi.errors import InputError
from torchngvi.fitting.engine import Standing, Stop
from torchngvi.models.arguments import bound, count


class Criterion(ABC):
    """A condition under which a run ends.

    One that remembers earlier records has ``state_dict`` and ``load_state_dict``; checkpoints hold what they give.

    Attributes:
        tolerance: on the natural-gradient norm, for those that are about it.
        evaluations: the budget of expectations, for those that are about it.
        most_gradients: the budget of gradients, likewise.
    """

    tolerance = 0.0
    evaluations = math.inf
    most_gradients = math.inf

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
        self.most_gradients = min(part.most_gradients for part in self.parts)

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
        self.most_gradients = self.most = count("Gradients", most, "is a budget of gradients")

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


class Unimproved(Criterion):
    """The smoothed value that a run watches has had no new best for so many steps: it has converged.

    It is for engines that watch one, as that of `torchngvi.ifvb.run`.  A run ends too, and has not converged, where
    more than half of the last steps were rejected, or where the value was never finite.

    Raises:
        InputError: a number that is not whole, or below 1.
    """

    def __init__(self, steps: int) -> None:
        self.steps = count("Unimproved", steps, "counts steps without a new best")
        self._rejections: list[int] = []  # so far, at the last steps

    def asked(self, standing: Standing) -> Stop | None:
        """Whether it is so."""
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
        """The numbers of rejected steps."""
        return {"rejections": list(self._rejections)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._rejections = list(state_dict["rejections"])


def joined(criteria: Criterion, stop: Any) -> Criterion:
    """The criteria of a run with those that its user adds; None adds none.

    Raises:
        InputError: something that is no criterion.
    """
    if stop is None:
        return criteria
    if not isinstance(stop, Criterion):
        raise InputError(
            f"stop is a criterion of torchngvi.fitting, as Seconds(60) | Gradients(10_000); got {stop!r}. A function "
            "of the Record of a step goes into callbacks."
        )
    return criteria | stop
