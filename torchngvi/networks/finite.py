"""Lists of tensors that may not be finite, without a wait for a device."""

import math

import torch
from torch import Tensor


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether all entries of some tensors are finite."""
    return look_at(tensors)[0]


def look_at(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return whether all entries of some tensors are finite, and whether one of them is not 0."""
    if not tensors:
        return torch.tensor(True, device="cpu"), torch.tensor(False, device="cpu")
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)  # half precision would overflow
    if tensors[0].device.type == "cpu":  # where a sum costs half of a norm
        sums = [float(tensor.sum(dtype=dtype)) for tensor in tensors]
        some = any(sums) or any(bool(tensor.any()) for tensor in tensors)
        return torch.tensor(all(map(math.isfinite, sums)), device="cpu"), torch.tensor(some, device="cpu")
    norms = torch.stack([norm.to(tensors[0].device) for norm in torch._foreach_norm(tensors, 2, dtype)])
    return norms.isfinite().all(), norms.any()


def zero_where_(tensors: list[Tensor], bad: Tensor) -> None:
    """Fill tensors with zeros where a flag is set."""
    if bad.device.type == "cpu":
        if bad:
            torch._foreach_zero_(tensors)
    else:
        for tensor in tensors:
            tensor.masked_fill_(bad.to(tensor.device), 0.0)
