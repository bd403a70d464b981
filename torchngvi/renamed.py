"""Names that have changed: for one release the old spelling works, and warns."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torchngvi.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(where: str, old: str, new: str) -> None:
    """Say that a name has changed, at the line that still uses the old one: the caller's caller."""
    warnings.warn(
        f"{where}: {old} is now called {new}. The old name is understood in this release only; write {new}.",
        FutureWarning,
        stacklevel=3,
    )


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function takes the old names of its keyword arguments, too.

    Args:
        names: old name to new name.

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
