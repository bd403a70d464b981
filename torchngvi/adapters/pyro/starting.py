"""Where the latent sites of a Pyro model begin, and how many of them a sentence names."""

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to

from torchngvi.arguments import read_callable, shown
from torchngvi.errors import InputError

_MOST = 6  # names in a sentence


def listed(names: Iterable[str]) -> str:
    """Names for a sentence: the first six, and how many more there are.

    >>> listed(["a", "b"]), listed("abcdefghi")
    ('a, b', 'a, b, c, d, e, f and 3 more')
    """
    names = list(names)
    rest = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {rest} more" if rest > 0 else "")


def start(init_loc_fn: Callable[..., Tensor], site: Any) -> Tensor:
    """The initial value of a site; 0 in unconstrained space for an improper prior, from which nothing can be drawn."""
    fn = site["fn"]
    if fn.support.is_discrete:
        return fn.sample()
    try:
        value = read_callable("init_loc_fn", init_loc_fn, "is a strategy such as init_to_median")(site)
    except NotImplementedError:  # an improper prior
        transform = biject_to(fn.support)
        return transform(torch.zeros(transform.inverse_shape(fn.shape())))
    if not isinstance(value, Tensor | Real):
        raise InputError(f"init_loc_fn must give the latent site {site['name']!r} a tensor; got {shown(value)}.")
    shape = fn.shape()
    value = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if value.shape == shape:
        return value
    if value.numel() == shape.numel():  # one number in brackets is one number
        return value.reshape(shape)
    try:
        return value.expand(shape)
    except RuntimeError as error:
        raise InputError(
            f"init_loc_fn gives the latent site {site['name']!r} a value of shape {tuple(value.shape)}, and the model "
            f"has {tuple(shape)} there."
        ) from error
