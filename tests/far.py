"""Tensors that pass for those of a device, on the CPU: every question that a GPU would be waited for is counted."""

import collections
import traceback

import torch

READS = {
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


class Far(torch.Tensor):
    """Says that it is not on the CPU, and counts what reads it, by line of the library."""

    lines: collections.Counter = collections.Counter()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cpu.__get__:
            return False
        masked = func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
        if func in READS or masked:
            frame = [f for f in traceback.extract_stack() if "/torchngvi/" in f.filename][-1]
            cls.lines[f"{frame.filename.split('/torchngvi/')[-1]}:{frame.lineno}  {frame.line[:60]}"] += 1
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else out


def far(part):
    """A posterior or a model whose tensors pass for those of a device, in place."""
    held = part._buffers if isinstance(part, torch.nn.Module) else vars(part)
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            held[name] = value.detach().as_subclass(Far).requires_grad_(value.requires_grad)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            held[name] = type(value)(*(entry.as_subclass(Far) for entry in value))
    return part


def reads(do):
    """How often a call has read from the device, by line."""
    Far.lines = collections.Counter()
    result = do()
    return result, Far.lines
