"""One loop for every fit: engines that advance, criteria that say when to end, and the front door `torchngvi.fit`.

Read `loop` first: it says what an engine is asked for, and when.
"""

from torchngvi.fitting.laplace import LaplaceResult, mixture_at_modes
from torchngvi.fitting.row_space import RowSpace
from torchngvi.fitting.stopping import (
    Criterion,
    Evaluations,
    Gradients,
    NormBelow,
    Seconds,
    SlopeBelow,
    SlopeStop,
    Stalled,
    Unimproved,
)

__all__ = [
    "Criterion",
    "Evaluations",
    "Gradients",
    "LaplaceResult",
    "NormBelow",
    "RowSpace",
    "Seconds",
    "SlopeBelow",
    "SlopeStop",
    "Stalled",
    "Unimproved",
    "mixture_at_modes",
]
