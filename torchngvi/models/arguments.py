"""What a user may hand in: a target, a log joint, or a closure; and how a closure is run."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models import LogJoint


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
