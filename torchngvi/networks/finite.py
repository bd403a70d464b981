"""Lists of tensors that may not be finite, without a wait for a device."""

import math

import torch
from torch import Tensor


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether all entries of some tensors are finite."""
    if not tensors:
        return torch.tensor(True, device="cpu")
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)  # half precision would overflow
    if tensors[0].device.type == "cpu":  # where a sum costs half of a norm
        return torch.tensor(all(math.isfinite(tensor.sum(dtype=dtype)) for tensor in tensors), device="cpu")
    norms = torch._foreach_norm(tensors, 2, dtype)
    return torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all()


def zero_where_(tensors: list[Tensor], bad: Tensor) -> None:
    """Fill tensors with zeros where a flag is set."""
    if bad.device.type == "cpu":
        if bad:
            torch._foreach_zero_(tensors)
    else:
        for tensor in tensors:
            tensor.masked_fill_(bad.to(tensor.device), 0.0)
