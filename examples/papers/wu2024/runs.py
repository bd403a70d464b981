"""What both figures have in common: the clamp of SGD, when runs are looked at, the names, and lines with bands."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from examples.compare_methods import plots

CLAMP = 1e-10  # smallest diagonal entry of C under SGD
NAMES = {
    "NGD": "natural gradients (NGD)",
    "NGD, average": "NGD, average of the iterates",
    "SGD": "SGD in (m, C)",
    "NGD (p)": "NGD, Price's gradient (p)",
    "SGD (p)": "SGD in (m, C), Price's gradient (p)",
    "SGD (r)": "SGD in (m, C), reparametrised (r)",
}


def due(iterations: int, points: int) -> set[int]:
    """Steps after which a run is looked at, even on a logarithmic axis."""
    return {0, *np.geomspace(1, iterations, points).round().astype(int).tolist()}


def band(axes: Axes, log: pd.DataFrame, column: str, label: str, index: int, dash: int | None = None) -> None:
    """Draw the mean over the seeds with their range, without the start, which a logarithmic axis does not have."""
    plots.band(axes, log[log["iteration"] > 0], column, label, index, dash=dash, floor=1e-12)
