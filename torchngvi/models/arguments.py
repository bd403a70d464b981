"""What a user may hand in: a target, a log joint, or a closure; and how a closure is run."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Posterior, Target
from torchngvi.models import LogJoint
from torchngvi.posteriors.gaussian import Gaussian


def kind_of(value: object) -> str:
    """The class of an object, or which class it is, as messages say it."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def read_posterior(door: str, q: Any, target: object = None) -> Posterior:
    """Check that what stands in the place of a posterior is one.

    >>> read_posterior("fit", 3)
    Traceback (most recent call last):
    torchngvi.errors.InputError: fit takes a posterior first, such as CholeskyGaussian(dim), then the model or log \
    joint; got int first.
    """
    if isinstance(q, type):
        raise InputError(f"{door} takes a posterior; got the class {q.__name__}. Make one of it: {q.__name__}(dim).")
    if not isinstance(q, Posterior):
        swapped = " The arguments are swapped." if isinstance(target, Posterior) else ""
        inside = " Pass its posterior." if isinstance(getattr(q, "posterior", None), Posterior) else ""
        raise InputError(
            f"{door} takes a posterior first, such as CholeskyGaussian(dim), then the model or log joint; got "
            f"{type(q).__name__} first.{swapped}{inside}"
        )
    return q


def read_gaussian(door: str, q: Any, target: object = None) -> Gaussian:
    """Check that what stands in the place of a Gaussian posterior is one."""
    q = read_posterior(door, q, target)
    if not isinstance(q, Gaussian):
        raise PairError(f"{door} needs a Gaussian posterior, such as CholeskyGaussian(dim); got {type(q).__name__}.")
    return q


def as_target(source: Any) -> Target:
    """Make a target of what a user gives: a target stays as it is, and a function of theta becomes a `LogJoint`."""
    if isinstance(source, Target):
        return source
    if isinstance(source, Posterior | type):
        raise InputError(
            f"a model or a log joint of theta is needed; got {kind_of(source)}. A posterior comes first, then the "
            "target."
        )
    target = classify(source)
    if not isinstance(target, Target):
        raise InputError("this needs a model or a log joint of theta; got a function without arguments.")
    return target


def classify(function: Any) -> Target | Callable[[], Tensor]:
    """Make a `LogJoint` of a function that needs its one argument; a closure, which can take none, stays."""
    if not callable(function) or isinstance(function, Posterior | type):
        raise InputError(
            f"step takes a model, a log joint of theta, or a closure that returns the loss; got {kind_of(function)}."
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
    """A context that switches autocast off around a step, so that no factorisation is in half precision."""

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
        """Wrap a closure so that it runs under the autocast that its author meant."""

        def run() -> Tensor:
            with self._autocast(True):
                return closure()

        return run
