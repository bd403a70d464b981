"""What the user hands to a run to be called after each record."""

from collections.abc import Callable, Iterable
from typing import Any

from torchngvi.errors import InputError
from torchngvi.fitting.records import Record


def checked_callbacks(callbacks: Any) -> tuple[Callable[[Record], Any], ...]:
    """Check that callbacks are functions of a record.

    Args:
        callbacks: what the user gave.

    Returns:
        The functions.

    Raises:
        InputError: something that is no function, or a function that is not in a list.
    """
    functions = tuple(callbacks) if isinstance(callbacks, Iterable) else None
    if functions is None or not all(callable(function) for function in functions):
        raise InputError(
            f"callbacks is a list of functions that take the Record of a step; got {callbacks!r}. Of one function f "
            "pass [f]."
        )
    return functions
