"""Lists of tensors that may not be finite, without a wait for a device."""

import math

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


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


def add_share_(tensors: list[Tensor], moves: list[Tensor], share: float | Tensor) -> None:
    """Add a share of moves to tensors.

    >>> one = torch.ones(1)
    >>> add_share_([one], [torch.ones(1)], 0.5)
    >>> one
    tensor([1.5000])
    """
    if isinstance(share, Tensor):
        torch._foreach_mul_(moves, share.to(moves[0]))
        torch._foreach_add_(tensors, moves)
    else:
        torch._foreach_add_(tensors, moves, alpha=share)


def share_within(
    length: float, kl: Tensor, bad: bool | Tensor, largest: float = 1.0
) -> tuple[float | Tensor, bool | Tensor]:
    """Return the share of a move that is no longer than a length, and whether the move is usable.

    >>> share_within(0.25, torch.tensor(1.0), False), share_within(0.25, torch.tensor(torch.nan), False)
    ((0.5, True), (0.0, False))
    """
    if kl.device.type == "cpu":
        whole = float(kl)
        usable = math.isfinite(whole) and not bad
        return (min(largest, math.sqrt(length / max(whole, _TINY))) if usable else 0.0), usable
    fine = kl.isfinite() & ~bad
    return torch.where(fine, (length / kl.clamp_min(_TINY)).sqrt().clamp(max=largest), 0.0), fine
