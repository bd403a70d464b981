"""The bar of a fit."""

import math
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from torchngvi.arguments import read_list, shown
from torchngvi.errors import InputError
from torchngvi.fitting.engine import Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.stopping import Criterion

# What the user hands to a run to be called after each record


def checked_callbacks(callbacks: Any) -> tuple[Callable[[Record], Any], ...]:
    """Check that callbacks are functions of a record."""
    what = "is a list of functions that take the Record of a step"
    one = " Of one function f pass [f]." if callable(callbacks) else ""
    functions = () if one else tuple(read_list("callbacks", callbacks, what))
    if one or not all(callable(function) for function in functions):
        raise InputError(f"callbacks {what}; got {shown(callbacks)}.{one}")
    return functions


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
