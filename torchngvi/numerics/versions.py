"""Whether tensors are what they were, and the modes of torch under which a call runs."""

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from operator import is_not
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from torchngvi.numerics import sparse

# The modes of torch under which a call runs

_P = ParamSpec("_P")
_T = TypeVar("_T")


def tracked(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function run outside of ``torch.inference_mode``, where tensors have neither gradients nor versions."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


# Whether tensors are what they were, by torch's count of writes and by their contents

_BY_VALUE = (int, float, str, numbers.Number)  # the usual ones first
_Count = tuple[object, torch.dtype, torch.device]
_SMALL = 65_536  # entries up to which a copy of a tensor is kept, to know it by


class Versions:
    """A memory of which tensors there were, how often torch had counted a write to each, and what they held."""

    def __init__(self, tensors: Iterable[Tensor], before: "Versions | None" = None) -> None:
        if torch.compiler.is_compiling():  # a graph counts no writes: nothing is known
            self.tensors: tuple[Tensor, ...] = ()
            self.counts: list[_Count] = []
            self.contents: list[Tensor] = []
            return
        self.tensors = tuple(tensors)  # held, so that no other tensor takes their place in memory
        self.counts = _counts(self.tensors)
        # of a tensor that was not written to since, what it held is known
        known = {} if before is None else dict(zip(map(id, before.tensors), before.counted(), strict=True))
        self.contents = [
            kept[1] if (kept := known.get(id(tensor))) is not None and kept[0] == count else _contents(tensor)
            for tensor, count in zip(self.tensors, self.counts, strict=True)
        ]

    def counted(self) -> Iterable[tuple[_Count, Tensor]]:
        """Iterate over the count of writes and the contents of each tensor."""
        return zip(self.counts, self.contents, strict=True)

    def hold(
        self,
        tensors: Iterable[Tensor],
        wait: bool = False,  # for an accelerator
        contents: bool = True,  # compare them, or go by the counts alone
    ) -> bool:
        """Say whether these are the same tensors and nothing in them has changed."""
        tensors = tuple(tensors)
        if (
            torch.compiler.is_compiling()
            or len(tensors) != len(self.tensors)
            or any(map(is_not, tensors, self.tensors))
        ):
            return False
        if _counts(tensors) != self.counts:
            return False
        for tensor, content in zip(tensors, self.contents, strict=True) if contents else ():
            if (wait or tensor.is_cpu) and not _holds(tensor, content):
                torch.autograd.graph.increment_version(tensor)  # who else remembers it goes by the count
                return False
        return True


def _counts(tensors: Iterable[Tensor]) -> list[_Count]:
    # a conversion changes dtype or device and nothing else; what inference_mode made keeps no count, and is never
    # the same again
    return [(object() if x.is_inference() else x._version, x.dtype, x.device) for x in tensors]


def _contents(tensor: Tensor) -> Tensor:
    """A copy, or of a large tensor what would tell it from another."""
    small = tensor.ndim < 2 or not tensor.is_floating_point() or tensor.numel() <= _SMALL
    return tensor.detach().clone() if small and tensor.layout == torch.strided else _row_sums(tensor)


def _row_sums(tensor: Tensor) -> Tensor:
    """A weighted sum of each row in float64, numbers of their own in place of NaN and of ±∞."""
    weights = torch.arange(1, tensor.shape[-1] + 1, dtype=torch.float64, device=tensor.device).sin()
    if sparse.is_sparse(tensor):
        return sparse.with_values(tensor, _as_numbers(tensor.detach().values())) @ weights
    rows = tensor.detach().flatten(0, -2)
    parts = rows.split(max(1, _SMALL // rows.shape[-1]))
    if tensor.is_cpu:  # where every sum is a number, so is every entry
        sums = torch.cat([part.double() @ weights for part in parts])
        if bool(sums.isfinite().all()):
            return sums
    return torch.cat([_as_numbers(part) @ weights for part in parts])


def _as_numbers(entries: Tensor) -> Tensor:
    """In float64, without NaN and ±∞."""
    return entries.double().nan_to_num(math.pi, math.e, -math.e)


def _holds(tensor: Tensor, content: Tensor) -> bool:
    """Whether these are its contents, NaN equal to NaN."""
    now = tensor if tensor.shape == content.shape else _row_sums(tensor)
    if torch.equal(now, content):
        return True
    return now.is_floating_point() and torch.allclose(now, content, rtol=0.0, atol=0.0, equal_nan=True)


def settings_of(part: object) -> tuple[object, ...]:
    """Describe a part by its class and its attributes, but for tensors, so that two descriptions can be compared."""
    values = {
        name: value if isinstance(value, _BY_VALUE) else id(value)
        for name, value in vars(part).items()
        if not isinstance(value, Tensor)
    }
    return type(part), values


def tensors_of(part: object) -> tuple[Tensor, ...]:
    """Collect the tensors among the attributes of a part."""
    return tuple(value for value in vars(part).values() if isinstance(value, Tensor))
