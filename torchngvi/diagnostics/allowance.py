"""What an examination may ask of a log joint, counted in calls, and what it has asked.

No clock is read: the same q, log joint and seed are examined equally far on any machine, and have the same verdict.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torchngvi.models.guarded import VALUE, Guarded


@dataclass(frozen=True)
class ExaminationSettings:
    """How much an examination asks of a log joint: numbers of draws and calls, and never seconds.

    The numbers were chosen on the parts "tune" and "fresh 1" of ``benchmarks/truths`` and judged on "held" and "fresh
    2", by ``python -m benchmarks.verdicts --least 8000``, which prints the words and the cost with another budget.

    Attributes:
        least: cost, in gradients and values at 0.4 of one, that an examination at the end of a fit may take where the
            fit itself has taken less. Below 5,000 right fits are called wrong, 2 to 4 of 197 with 1,300 to 2,500;
            with 5,000 one of eight fits of eight schools, centred, is "about right" and none with 8,000; above that
            there is nothing to gain.
        share: of the cost of the fit that it may take where that is more.
        glance: values of the log joint that may suffice after a fit.
        draws: of the importance weights.
        more_draws: of these where the first do not decide.
        residuals: draws of the third order, at least.
        residuals_each: the same for each coordinate.
        mirrored: values in the place of residuals where there is no room for gradients, at least.
        confirmed: draws of a confirmation by conjugate gradients.
        products: of a coordinate for which the budget has to suffice.
        at_once: coordinates that are confirmed together.
        margins: coordinates whose margin is followed by Laplace's method where weights know too little of it.

    >>> ExaminationSettings().draws
    4096
    """

    least: float = 8_000.0
    share: float = 1.0
    glance: int = 1024
    draws: int = 4096
    more_draws: int = 16_384
    residuals: int = 512
    residuals_each: int = 16
    mirrored: int = 1024
    confirmed: int = 512
    products: int = 4
    at_once: int = 5
    margins: int = 2

    def cost_after(self, fitted: float) -> float:
        """What the examination at the end of a fit may cost.

        Args:
            fitted: what the fit has cost, in gradients and values at 0.4 of one.

        Returns:
            The cost, in the same unit.

        >>> ExaminationSettings(least=100.0, share=0.5).cost_after(1000.0)
        500.0
        """
        return max(self.least, self.share * fitted)


class Allowance:
    """A budget from now on.

    >>> from torchngvi.models import LogJoint
    >>> allowed = Allowance(Guarded(LogJoint(lambda theta: -theta.square().sum(-1))), 1000, 600.0)
    >>> allowed.left, allowed.affords(1500), allowed.affords(1501)
    (600, True, False)
    """

    def __init__(
        self,
        target: Guarded,
        gradients: int,
        cost: float = math.inf,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.target, self.gradients, self.cost, self.over = target, gradients, cost, over
        self._before = target.gradients, target.values

    @property
    def spent(self) -> tuple[int, int]:
        """Gradients and values since the beginning."""
        return self.target.gradients - self._before[0], self.target.values - self._before[1]

    @property
    def left(self) -> int:
        """Gradients that may still be asked for; none where the time is over."""
        gradients, values = self.spent
        left = min(self.gradients - gradients, self.cost - gradients - VALUE * values)
        return 0 if self.over() else max(int(left), 0)

    @property
    def values_left(self) -> float:
        """Values without a gradient that may still be asked for; none where the time is over."""
        gradients, values = self.spent
        return 0.0 if self.over() else (self.cost - gradients) / VALUE - values

    def affords(self, values: int) -> bool:
        """Whether so many more values may be asked for."""
        return values <= self.values_left

    def __str__(self) -> str:
        """The budget, as a clause."""
        return "no time left" if self.over() else f"a budget of {int(min(self.gradients, self.cost))} gradients"
