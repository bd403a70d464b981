"""What all posteriors share: probes, dtype and device, shapes of samples, and how one refuses what it lacks."""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchngvi.arguments import is_size, read_device, read_dtype, read_generator, read_size, read_sizes, shown
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


def normal(shape: Shape, like: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal noise (*shape, *batch, dim) for a batch of vectors, in their dtype and on their device."""
    generator = read_generator("generator", generator, like.device)
    size = (*sizes(shape), *like.shape[:-1], dim)
    return torch.randn(size, dtype=like.dtype, device=like.device, generator=generator)


def zeros_for(
    shape: Sequence[int], mean: object, scale: object, dtype: torch.dtype | None, device: torch.device | str | None
) -> Tensor:
    """Make zeros for a start, in the dtype and on the device that are asked for, or those of its tensors."""
    given = [x for x in (mean, scale) if isinstance(x, Tensor)]
    usual = given[0].dtype if given else torch.get_default_dtype()
    dtype = read_dtype("dtype", usual if dtype is None else dtype)
    device = read_device("device", device if device is not None or not given else given[0].device)
    return torch.zeros(*shape, dtype=dtype, device=device)


def fits(value: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor broadcasts to a shape."""
    return value.ndim <= len(shape) and all(n in (1, m) for n, m in zip(value.shape[::-1], shape[::-1], strict=False))


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


class ProbedPosterior(Posterior):
    """A posterior whose buffers are where its probes are: abstract."""

    variance: Any

    def _add_probes(self, vector: Tensor, matrix: Tensor) -> None:
        """Make the two probes, zeros like these tensors."""
        for name, like in (("mean_probe", vector), ("root_probe", matrix)):
            self.register_buffer(name, torch.zeros_like(like, requires_grad=True), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the coordinates."""
        return self.mean_probe.dtype

    @property
    def device(self) -> torch.device:
        """The device that the coordinates are on."""
        return self.mean_probe.device

    @property
    def stddev(self) -> Any:
        """The marginal standard deviations of θ, (*batch, D), in the units of θ."""
        return self.variance.sqrt()
