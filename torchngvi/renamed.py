"""Names that have changed: for one release the old spelling works, and warns; or a sentence says where it is now."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torchngvi.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(where: str, old: str, new: str) -> None:
    """Warn that a name has changed, at the line that still uses the old one: the caller of the caller.

    Args:
        where: the class or function, for the message.
        old: the old name.
        new: the new name.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_renamed("fit", "acceleration=", "metric=")
    >>> str(caught[0].message)
    'fit: acceleration= is now called metric=. The old name is understood in this release only; write metric=.'
    """
    warnings.warn(
        f"{where}: {old} is now called {new}. The old name is understood in this release only; write {new}.",
        FutureWarning,
        stacklevel=3,
    )


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator by which a function takes the old names of its keyword arguments, too, with a warning.

    Args:
        names: old name to new name.

    Returns:
        The decorator.

    Raises:
        InputError: on a call, both spellings of one argument.

    >>> @renamed(size="dim")
    ... def zeros(dim):
    ...     return [0.0] * dim
    >>> with warnings.catch_warnings(action="ignore"):
    ...     zeros(size=2)
    [0.0, 0.0]
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        where = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def called(*arguments: P.args, **keywords: P.kwargs) -> R:
            for old in [old for old in names if old in keywords]:
                new = names[old]
                if new in keywords:
                    raise InputError(f"{where} got both {new}= and its old name {old}=. Leave {old}= out.")
                warn_renamed(where, f"{old}=", f"{new}=")
                keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return called

    return decorate


def moved(**places: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator by which a function refuses keyword arguments that it had once, and says where each is now.

    Args:
        places: old name to what one writes in its place.

    Returns:
        The decorator.

    Raises:
        InputError: on a call, one of the old names.

    >>> @moved(radius="step_size=KLRadius(...)")
    ... def fitted(step_size=None):
    ...     return step_size
    >>> fitted(radius=0.1)
    Traceback (most recent call last):
    torchngvi.errors.InputError: fitted: radius= has moved. Write step_size=KLRadius(...) in its place.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        where = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def called(*arguments: P.args, **keywords: P.kwargs) -> R:
            for old, place in places.items():
                if old in keywords:
                    raise InputError(f"{where}: {old}= has moved. Write {place} in its place.")
            return function(*arguments, **keywords)

        return called

    return decorate
