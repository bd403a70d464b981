"""The pattern without an entry, for a posterior whose coordinates are one vector, with no matrix beside it."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.structures.pattern import Pattern


def _refused(*_: Any) -> Any:
    raise NotImplementedError("a pattern without entries has no root")


_has_no_root: Any = _refused


@final
@dataclass(frozen=True)
class NoMatrix(Pattern):
    """The pattern without entries: tensors (*batch, 0), so that what moves, masks, scales or saves a matrix finds one.

    >>> NoMatrix(3).eye(torch.zeros(2, 3)).shape
    torch.Size([2, 0])
    """

    dim: int  # D, of the vector

    shape = (0,)
    widest = 0

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return two empty tensors, since no entry is stored."""
        return torch.empty(0, dtype=torch.long, device="cpu"), torch.empty(0, dtype=torch.long, device="cpu")

    mv = tmv = solve = tsolve = matmul = tmatmul = inverse = cholesky = congruence = lower = _has_no_root
