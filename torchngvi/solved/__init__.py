"""What a posterior that was found to rounding allows: derivatives of it, and rows taken out of it or put in."""

from torchngvi.solved.comparison import Comparison, compare_models, stacking_weights
from torchngvi.solved.leave_one_out import LeaveOneOut, leave_one_out
from torchngvi.solved.response import Sensitivity, Solution, sensitivity, solve
from torchngvi.solved.update import SiteSum, add, forget, merge, site_sum

__all__ = [
    "Comparison",
    "LeaveOneOut",
    "Sensitivity",
    "SiteSum",
    "Solution",
    "add",
    "compare_models",
    "forget",
    "leave_one_out",
    "merge",
    "sensitivity",
    "site_sum",
    "solve",
    "stacking_weights",
]
