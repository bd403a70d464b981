"""How often the host waits for a device, counted without one: tensors on the CPU that pass for those of a GPU."""

import collections
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchngvi

_T = TypeVar("_T")
_PACKAGE = f"{Path(torchngvi.__file__).parent}{os.sep}"  # lines of the library begin with this
_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.nonzero,
    torch.Tensor.equal,
    torch.equal,
    torch.allclose,
}
# what waits on CUDA without being asked for a value: a test of a factorisation, a size that depends on entries
_TESTS = ("_linalg_check_errors", "_unique2", "masked_select")


class Far(torch.Tensor):
    """A tensor on the CPU that says it is not, and counts what reads it, by line of the library."""

    lines: collections.Counter[str] = collections.Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a read, and do what was asked for."""
        if func == torch.Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return False
        masked = func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if func in _READS or masked:
            _note()
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else out


class _Tests(TorchDispatchMode):
    """Notes operations that wait on CUDA inside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in _TESTS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            _note()
        return func(*args, **kwargs)


def far(part: Any) -> Any:
    """Make the tensors of a posterior or of a model pass for those of a device, in place."""
    held: dict[str, Any] = part._buffers if isinstance(part, torch.nn.Module) else vars(part)
    for name, value in list(held.items()):
        if isinstance(value, Tensor):
            held[name] = value.detach().as_subclass(Far).requires_grad_(value.requires_grad)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            held[name] = type(value)(*(entry.as_subclass(Far) for entry in value))
    return part


def reads(do: Callable[[], _T]) -> tuple[_T, collections.Counter[str]]:
    """Call a function, and count how often that would wait for the device."""
    Far.lines = collections.Counter()
    with _Tests():
        result = do()
    return result, Far.lines


def _note() -> None:
    """Count the line of the library, or else of the user, that is being run."""
    stack = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    frame = ([one for one in stack if one.filename.startswith(_PACKAGE)] or stack)[-1]
    Far.lines[f"{frame.filename.removeprefix(_PACKAGE)}:{frame.lineno}  {(frame.line or '')[:60]}"] += 1
