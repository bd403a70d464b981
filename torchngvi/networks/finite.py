"""Lists of tensors that may not be finite, without a wait for a device."""

import math

import torch
from torch import Tensor


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether all entries of some tensors are finite.

    >>> bool(all_finite([torch.ones(2), torch.tensor([torch.inf])]))
    False
    """
    if not tensors:
        return torch.tensor(True, device="cpu")
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)  # half precision would overflow
    if tensors[0].device.type == "cpu":  # where a sum costs half of a norm
        return torch.tensor(all(math.isfinite(tensor.sum(dtype=dtype)) for tensor in tensors), device="cpu")
    norms = torch._foreach_norm(tensors, 2, dtype)
    return torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all()


def squared_norm(norms: list[Tensor]) -> Tensor:
    """Return the square of the norm of a vector from the norms of its parts, a number.

    >>> squared_norm([torch.tensor(3.0), torch.tensor(4.0)])
    tensor(25.)
    """
    first = norms[0].device
    if first.type != "cpu":  # perhaps not one device alone
        norms = [norm.to(first) for norm in norms]
    each = torch.stack(norms)
    return torch.dot(each, each)


def zero_where_(tensors: list[Tensor], bad: Tensor) -> None:
    """Fill tensors with zeros where a flag is set.

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
