"""What a posterior that was found to rounding allows: derivatives of it, and rows taken out of it or put in."""

from torchngvi.solved.leave_one_out import Comparison, LeaveOneOut, compare_models, leave_one_out, stacking_weights
from torchngvi.solved.response import Sensitivity, SiteSum, Solution, add, forget, merge, sensitivity, site_sum, solve

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
