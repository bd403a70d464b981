"""The step sizes, which say how far along a path a step goes: by the step count, with a bound, or by trial."""

from torchngvi.stepsizes.bounds import Clip, KLRadius, Shortest
from torchngvi.stepsizes.line_search import Backtracking, SufficientDecrease
from torchngvi.stepsizes.schedules import Constant, Convex, PowerSchedule, harmonic_schedule, theorem_schedule

__all__ = [
    "Backtracking",
    "Clip",
    "Constant",
    "Convex",
    "KLRadius",
    "PowerSchedule",
    "Shortest",
    "SufficientDecrease",
    "harmonic_schedule",
    "theorem_schedule",
]
