"""The step sizes, which say how far along a path a step goes: one a file."""

from torchngvi.stepsizes.backtracking import Backtracking
from torchngvi.stepsizes.clip import Clip
from torchngvi.stepsizes.constant import Constant
from torchngvi.stepsizes.convex import Convex
from torchngvi.stepsizes.kl_radius import KLRadius
from torchngvi.stepsizes.schedules import PowerSchedule, harmonic_schedule, theorem_schedule
from torchngvi.stepsizes.shortest import Shortest
from torchngvi.stepsizes.sufficient_decrease import SufficientDecrease

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
