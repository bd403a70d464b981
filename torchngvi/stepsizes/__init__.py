"""How far along a path: one control a file."""

from torchngvi.stepsizes.constant import Constant
from torchngvi.stepsizes.kl_radius import KLRadius
from torchngvi.stepsizes.sufficient_decrease import SufficientDecrease

__all__ = ["Constant", "KLRadius", "SufficientDecrease"]
