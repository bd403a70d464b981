"""The bar of a fit."""

import math

from tqdm import tqdm

from torchngvi.fitting.engine import Engine
from torchngvi.fitting.stopping import Criterion


def bar(engine: Engine, stop: Criterion, *, shown: bool) -> tqdm:
    """Open the bar of a run, up to the budget where there is one."""
    total = engine.total(stop.evaluations)
    return tqdm(
        total=None if math.isinf(total) else int(total),
        disable=not shown,
        desc=engine.name,
        unit=engine.unit,
        unit_scale=engine.scaled,
    )
