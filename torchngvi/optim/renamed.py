"""Arguments under their names of the release before."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torchngvi.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keywords by their old names, with a FutureWarning, for one release.

    Args:
        names: the new name of each old one.

    Returns:
        A decorator.  What it makes raises an InputError where both names are given.

    >>> @renamed(colour="color")
    ... def paint(color: str) -> str:
    ...     return color
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     paint(colour="red")
    'red'
    >>> str(caught[0].message)
    'colour= is color= now, and the next release will not take it by the old name.'
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> R:
            for old in names.keys() & options.keys():
                new = names[old]
                if new in options:
                    raise InputError(f"{old}= is the old name of {new}=, and both are given. Leave {old}= out.")
                warnings.warn(
                    f"{old}= is {new}= now, and the next release will not take it by the old name.",
                    FutureWarning,
                    stacklevel=2,
                )
                options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return decorated
