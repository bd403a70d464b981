"""What a posterior that was found to rounding allows: derivatives of it, and rows taken out of it."""

from torchngvi.solved.differentiable import Solution, solve
from torchngvi.solved.leave_one_out import LeaveOneOut, leave_one_out

__all__ = ["LeaveOneOut", "Solution", "leave_one_out", "solve"]
