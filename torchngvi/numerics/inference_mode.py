"""The modes of torch under which a call runs."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def tracked(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function run outside of ``torch.inference_mode``, where tensors have neither gradients nor versions.

    >>> with torch.inference_mode():
    ...     tracked(torch.ones)(2).is_inference(), torch.ones(2).is_inference()
    (False, True)
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run
