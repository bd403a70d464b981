"""The momenta, which average the changes of q's coordinates over the steps: one file each."""

from torchngvi.momentum.adam import Adam
from torchngvi.momentum.exponential_average import ExponentialAverage
from torchngvi.momentum.normalized import NormalizedMomentum

__all__ = ["Adam", "ExponentialAverage", "NormalizedMomentum"]
