"""The pattern without an entry: of a posterior whose coordinates are one vector, with no matrix beside it."""

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
    """Tensors (*batch, 0), so that what moves, masks, scales or saves coordinates needs no case for their absence.

    Products and factors are those of a root, and there is none: a posterior that holds this pattern has no frame.

    >>> NoMatrix(3).eye(torch.zeros(2, 3)).shape
    torch.Size([2, 0])
    """

    dim: int  # D, of the vector

    shape = (0,)
    widest = 0

    def positions(self) -> tuple[Tensor, Tensor]:
        """None."""
        return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)

    mv = tmv = solve = tsolve = matmul = tmatmul = inverse = cholesky = congruence = lower = _has_no_root
