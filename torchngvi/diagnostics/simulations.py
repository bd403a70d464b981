"""What a calibration is given: functions that take what they are called with, and names of all quantities."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchngvi.arguments import shown
from torchngvi.errors import InputError


def takes(name: str, function: Callable[..., Any], arguments: str) -> None:
    """Refuse a function that cannot be called as a calibration calls it.

    >>> takes("prior", lambda generator: None, "generator")
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some built-in functions it is not known
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise InputError(
            f"{name} is called as {name}({arguments}), with a torch.Generator to draw from; got a function of "
            f"{signature}. Add the generator, even if it draws from that of torch, which is seeded too."
        ) from error


def labels_of(
    theta: Tensor, names: Sequence[str] | None, quantities: Mapping[str, Any], known: tuple[str, ...]
) -> tuple[str, ...]:
    """Name all quantities, after a check of θ.

    >>> import torch
    >>> labels_of(torch.zeros(2), None, {"log likelihood": None}, ())
    ('theta[0]', 'theta[1]', 'log likelihood')
    """
    if not isinstance(theta, Tensor) or theta.ndim != 1 or not theta.is_floating_point():
        raise InputError(f"prior must return one theta, a tensor of numbers (D,); got {shown(theta)}.")
    if names is not None and len(names) != len(theta):
        raise InputError(f"names must have one for each of the {len(theta)} coordinates; got {len(names)}.")
    coordinates = tuple(names) if names is not None else tuple(f"theta[{i}]" for i in range(len(theta)))
    labels = (*coordinates, *quantities)
    if known and labels != known:
        raise InputError(f"what is resumed had the quantities {', '.join(known)}; got {', '.join(labels)}.")
    return labels
