"""Fingerprints: whether two processes hold the same numbers, without sending them."""

from collections.abc import Iterable

import torch
from torch import Tensor

_BITS = 2**50  # a whole number below it is exact in float64
_SHORT = 8  # entries up to which a tensor is written out
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an entry


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Sum the bits of all entries, as integers times odd weights, modulo 2⁵⁰.

    >>> x = torch.ones(3, dtype=torch.float64)
    >>> fingerprint([x]).item() == fingerprint([x.clone()]).item(), fingerprint([x]) == fingerprint([x * (1 + 1e-15)])
    (True, tensor(False))
    """
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        entries = tensor.detach().contiguous().flatten()
        entries = entries.byte() if entries.dtype == torch.bool else entries
        bits = entries.view(_INTEGERS[entries.element_size()]).long()
        weights = 2 * torch.arange(bits.numel(), device=bits.device) + 2_654_435_761 * (2 * number + 1)
        # the high bits go in too: products wrap around modulo 2⁶⁴
        part = (bits * weights).sum() + 31 * ((bits >> 20) * weights).sum() + bits.numel()
        total = part if total is None else 1_000_003 * total + part
    return torch.zeros((), dtype=torch.float64) if total is None else (total % _BITS).double()


def shown(value: object) -> str:
    """Write a value in a few words; of a large tensor its shape and its first entries.

    >>> shown(torch.tensor(2.0)), shown(torch.zeros(3, 3)), shown((0.0, 1.0))
    ('2.0', '(3, 3) entries, the first 0.0', '(0.0, 1.0)')
    """
    if not isinstance(value, Tensor):
        return str(value)
    if value.numel() <= _SHORT:
        return str(value.tolist())
    return f"{tuple(value.shape)} entries, the first {float(value.flatten()[0])}"
