"""Shapes of samples, a number of draws or sizes, and what a posterior refuses that has no frame."""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchngvi.arguments import is_size, read_generator, read_size, read_sizes, shown
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Posterior

Shape = int | Sequence[int]  # of a sample: a number of draws, or their shape


def sizes(shape: Shape) -> tuple[int, ...]:
    """Read the shape of a sample, in which a number of draws n stands for (n,)."""
    what = "is of a number of draws or of a shape, such as 10 or (2, 5)"
    if is_size(shape, at_least=0):
        return (int(shape),)  # type: ignore[arg-type]
    if not isinstance(shape, Sequence):
        raise InputError(f"a sample {what}; got {shown(shape)}.")
    return read_sizes("a sample", shape, what, at_least=0)


def normal(shape: Shape, own: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal noise (*shape, *own)."""
    generator = read_generator("generator", generator, like.device)
    return torch.randn((*sizes(shape), *own), dtype=like.dtype, device=like.device, generator=generator)


def check_points(theta: object, dim: int, like: Tensor) -> None:
    """Check that points are a tensor of real numbers, (*sample, *batch, D), where the posterior is."""
    if not isinstance(theta, Tensor) or theta.is_complex():
        raise InputError(f"theta must be a tensor of real numbers that ends in D = {dim}; got {shown(theta)}.")
    if not theta.ndim or theta.shape[-1] != dim:
        raise InputError(f"theta must end in D = {dim}; got shape {tuple(theta.shape)}.")
    if theta.device != like.device:
        raise InputError(f"theta is on {theta.device} and the posterior on {like.device}; move one of them with .to().")
    batch = like.shape[:-1]
    if batch and any(n not in (1, m) and m != 1 for n, m in zip(theta.shape[-2::-1], batch[::-1], strict=False)):
        raise InputError(
            f"theta must end in {(*batch, dim)}, as the batch of posteriors; got shape {tuple(theta.shape)}."
        )


def number_of_draws(n: int) -> int:
    """Read a number of draws."""
    return read_size("n", n, "is a number of draws")


def refused(sentence: str, *names: str) -> list[Any]:
    """Methods of these names for a class that lacks them: each raises a PairError with a sentence."""

    def refuse(name: str) -> Any:
        def method(self: Posterior, *_: Any) -> NoReturn:
            raise PairError(sentence)

        method = functools.update_wrapper(method, getattr(Posterior, name), updated=())
        method.__doc__ = "Refuse, with a PairError that says what to use."
        return method

    return [refuse(name) for name in names]
