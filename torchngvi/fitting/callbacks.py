"""What the user hands to a run to be called after each record."""

from collections.abc import Callable
from typing import Any

from torchngvi.arguments import read_list, shown
from torchngvi.errors import InputError
from torchngvi.fitting.records import Record


def checked_callbacks(callbacks: Any) -> tuple[Callable[[Record], Any], ...]:
    """Check that callbacks are functions of a record."""
    what = "is a list of functions that take the Record of a step"
    one = " Of one function f pass [f]." if callable(callbacks) else ""
    functions = () if one else tuple(read_list("callbacks", callbacks, what))
    if one or not all(callable(function) for function in functions):
        raise InputError(f"callbacks {what}; got {shown(callbacks)}.{one}")
    return functions
