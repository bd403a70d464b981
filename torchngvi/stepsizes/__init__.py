"""How far along a path: one control a file."""

from torchngvi.stepsizes.constant import Constant
from torchngvi.stepsizes.convex import Convex
from torchngvi.stepsizes.kl_radius import KLRadius
from torchngvi.stepsizes.schedules import harmonic_schedule, theorem_schedule
from torchngvi.stepsizes.sufficient_decrease import SufficientDecrease

__all__ = ["Constant", "Convex", "KLRadius", "SufficientDecrease", "harmonic_schedule", "theorem_schedule"]
