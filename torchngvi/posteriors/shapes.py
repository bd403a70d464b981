"""Shapes of samples: a number of draws, or sizes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi.arguments import is_size, read_generator, read_size, read_sizes, shown
from torchngvi.errors import InputError

Shape = int | Sequence[int]  # of a sample: a number of draws, or their shape


def sizes(shape: Shape) -> tuple[int, ...]:
    """Read the shape of a sample, in which a number of draws n stands for (n,).

    >>> sizes(3), sizes((2, 5)), sizes(())
    ((3,), (2, 5), ())
    """
    what = "is of a number of draws or of a shape, such as 10 or (2, 5)"
    if is_size(shape, at_least=0):
        return (int(shape),)  # type: ignore[arg-type]
    if not isinstance(shape, Sequence):
        raise InputError(f"a sample {what}; got {shown(shape)}.")
    return read_sizes("a sample", shape, what, at_least=0)


def normal(shape: Shape, own: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal noise.

    >>> normal(3, (2,), torch.zeros(1), None).shape
    torch.Size([3, 2])
    """
    generator = read_generator("generator", generator, like.device)
    return torch.randn((*sizes(shape), *own), dtype=like.dtype, device=like.device, generator=generator)


def check_points(theta: object, dim: int, like: Tensor) -> None:
    """Check that points are a tensor of real numbers, (*sample, *batch, D), where the posterior is.

    >>> check_points(torch.zeros(5, 2), 2, torch.zeros(2))
    """
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
    """A number of draws, after a check that it is one.

    >>> number_of_draws(3)
    3
    """
    return read_size("n", n, "is a number of draws")
