"""Lists of tensors that may not be finite, without a wait for a device."""

import torch
from torch import Tensor


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether all entries of some tensors are finite.

    Args:
        tensors: perhaps none, on any devices.

    Returns:
        A flag, a 0-d tensor on the device of the first.

    >>> bool(all_finite([torch.ones(2), torch.tensor([torch.inf])]))
    False
    """
    if not tensors:
        return torch.tensor(True)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)  # half precision would overflow
    if tensors[0].device.type == "cpu":  # where a sum costs half of a norm
        return torch.stack([tensor.sum(dtype=dtype) for tensor in tensors]).isfinite().all()
    norms = torch._foreach_norm(tensors, 2, dtype)
    return torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all()


def zero_where_(tensors: list[Tensor], bad: Tensor) -> None:
    """Fill tensors with zeros where a flag is set.

    Args:
        tensors: to be filled.
        bad: the flag, a 0-d tensor.

    >>> one = torch.ones(1)
    >>> zero_where_([one], torch.tensor(True))
    >>> one
    tensor([0.])
    """
    if bad.device.type == "cpu":
        if bad:
            torch._foreach_zero_(tensors)
    else:
        for tensor in tensors:
            tensor.masked_fill_(bad.to(tensor.device), 0.0)


def add_share_(tensors: list[Tensor], moves: list[Tensor], share: Tensor) -> None:
    """Add a share of moves to tensors.

    Args:
        tensors: to be added to.
        moves: which are used up.
        share: a 0-d tensor.

    >>> one = torch.ones(1)
    >>> add_share_([one], [torch.ones(1)], torch.tensor(0.5))
    >>> one
    tensor([1.5000])
    """
    if share.device.type == "cpu":
        torch._foreach_add_(tensors, moves, alpha=float(share))
    else:
        torch._foreach_mul_(moves, share.to(moves[0]))
        torch._foreach_add_(tensors, moves)
