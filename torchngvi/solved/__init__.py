"""What a posterior that was found to rounding allows: derivatives of it."""

from torchngvi.solved.differentiable import Solution, solve

__all__ = ["Solution", "solve"]
