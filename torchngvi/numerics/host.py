"""Numbers brought to the host: together, since each transfer waits for the device."""

import torch
from torch import Tensor


def on_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Bring tensors to the CPU in one transfer; on the CPU they are what they were.

    Args:
        tensors: real or boolean tensors of one device; the first decides the dtype of the transfer, in which the
            others have to be exact.

    Returns:
        The tensors on the CPU, in their shapes and dtypes.

    >>> loss, accepted = on_host(torch.tensor(2.0), torch.tensor([True, False]))
    >>> loss.item(), accepted.tolist()
    (2.0, [True, False])
    """
    if all(tensor.is_cpu for tensor in tensors):
        return tensors
    flat = torch.cat([tensor.detach().flatten().to(tensors[0].dtype) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return tuple(part.reshape(old.shape).to(old.dtype) for part, old in zip(parts, tensors, strict=True))
