"""What a user may hand in: numbers, a target, a log joint, or a closure; and how a closure is run."""

import inspect
import math
import numbers
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models import LogJoint


def real(name: str, value: Any, what: str) -> float:
    """Read a number, or a tensor of one, as a float.

    Args:
        name: the name of the argument, for errors.
        value: what the user gave.
        what: what the argument is, for errors.

    Returns:
        The float.

    Raises:
        InputError: if it is something else.

    >>> real("lr", torch.tensor(0.5), "is a number")
    0.5
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{name} {what}; got {value!r}.")
    return float(value)


def bound(name: str, value: Any, what: str) -> float:
    """Read a bound that something has to fall below.

    Args:
        name: the name of the argument, for errors.
        value: what the user gave.
        what: what the argument does, for errors.

    Returns:
        The bound, positive and finite.

    Raises:
        InputError: if it is something else.

    >>> bound("tolerance", 1, "bounds the norm")
    1.0
    """
    number = real(name, value, f"{what} and must be a number")
    if not 0 < number < math.inf:
        raise InputError(f"{name} {what} and must be positive and finite; got {value!r}.")
    return number


def count(name: str, value: Any, what: str) -> int:
    """Read a whole number of at least 1.

    Args:
        name: the name of the argument, for errors.
        value: what the user gave.
        what: what the argument counts, for errors.

    Returns:
        The number.

    Raises:
        InputError: if it is something else.

    >>> count("max_evaluations", 1e3, "counts evaluations")
    1000
    """
    number = real(name, value, f"{what} and must be a whole number, at least 1")
    if not (number >= 1 and number.is_integer()):
        raise InputError(f"{name} {what} and must be a whole number, at least 1; got {value!r}.")
    return int(number)


def as_target(source: Any) -> Target:
    """Make a target of what a user gives: a target stays as it is, and a function of theta becomes a `LogJoint`.

    Args:
        source: a target, or a function of theta.

    Returns:
        The target.

    Raises:
        InputError: if it is a function without arguments, or cannot be called.

    >>> as_target(lambda theta: -theta.square().sum(-1)).log_joint(torch.ones(1, 2)).item()
    -2.0
    """
    if isinstance(source, Target):
        return source
    target = classify(source)
    if not isinstance(target, Target):
        raise InputError("this needs a model or a log joint of theta; got a function without arguments.")
    return target


def classify(function: Any) -> Target | Callable[[], Tensor]:
    """Tell a log joint, which needs its one argument, from a closure, which can take none.

    Args:
        function: a function of theta, or a closure without arguments.

    Returns:
        A `LogJoint` of the function, or the closure as it is.

    Raises:
        InputError: if the function can be called in both ways, in neither, or not at all.

    >>> type(classify(lambda theta: -theta.square().sum(-1))).__name__
    'LogJoint'
    """
    if not callable(function):
        raise InputError(
            "step takes a model, a log joint of theta, or a closure that returns the loss; "
            f"got {type(function).__name__}."
        )

    def binds(*arguments: object) -> bool:
        try:
            inspect.signature(function).bind(*arguments)
        except (TypeError, ValueError):
            return False
        return True

    without, with_one = binds(), binds(None)
    if not without and not with_one:
        raise InputError(
            "step calls a log joint with theta alone, or a closure with nothing; this callable needs other arguments. "
            "Bind them: functools.partial(f, ...), or a lambda."
        )
    if with_one and not without:
        return LogJoint(function)
    if without and not with_one:
        return function
    raise InputError(
        "step cannot tell whether this callable is a log joint of theta (which goes up) or a closure that returns "
        "the loss (which goes down). Wrap it: LogJoint(f), or lambda: f()."
    )


class FullPrecision:
    """A context that switches autocast off around a step, so that no factorisation is in half precision.

    Args:
        device_type: the type of the device of q, such as "cuda".

    >>> with FullPrecision("cpu") as off:
    ...     off.active
    False
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.active = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)

    def _autocast(self, enabled: bool) -> AbstractContextManager[Any]:
        if not self.active:
            return nullcontext()
        return torch.autocast(self.device_type, torch.get_autocast_dtype(self.device_type), enabled)

    def __enter__(self) -> "FullPrecision":
        self.context = self._autocast(False)
        self.context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.context.__exit__(*exception)

    def restored(self, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Wrap a closure so that it runs under the autocast that its author meant.

        Args:
            closure: the user's closure, which returns the loss.

        Returns:
            The wrapped closure.
        """

        def run() -> Tensor:
            with self._autocast(True):
                return closure()

        return run
