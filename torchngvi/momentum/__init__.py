"""The momenta, which average the changes of q's coordinates over the steps."""

from torchngvi.momentum.averages import Adam, ExponentialAverage, NormalizedMomentum

__all__ = ["Adam", "ExponentialAverage", "NormalizedMomentum"]
