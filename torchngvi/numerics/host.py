"""Numbers brought to the host: together, since each transfer waits for the device, or later, without a wait."""

from typing import Any

import torch
from torch import Tensor


def on_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Bring tensors to the CPU in one transfer; on the CPU they are what they were.

    >>> loss, accepted = on_host(torch.tensor(2.0), torch.tensor([True, False]))
    >>> loss.item(), accepted.tolist()
    (2.0, [True, False])
    """
    if all(tensor.is_cpu for tensor in tensors):
        return tensors
    flat = torch.cat([tensor.detach().flatten().to(tensors[0].dtype) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return tuple(part.reshape(old.shape).to(old.dtype) for part, old in zip(parts, tensors, strict=True))


class Fetched:
    """Numbers on their way from a device, which are read when they have arrived, without a wait for it.

    >>> Fetched(torch.ones(2)).read()
    [1.0, 1.0]
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        if numbers.is_cuda:
            self._here = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))
        else:
            self._here = numbers.cpu()

    def read(self) -> Any:
        """Return the numbers, or None as long as they have not arrived."""
        return self._here.tolist() if self._event is None or self._event.query() else None
