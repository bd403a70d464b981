"""Lengths in nats that grow with the number of groups of a model.

A step of 1 nat is long where L is about one block of coordinates.  Where it is a sum over n groups, a step in which
each of them moves by a little, 0.1 nats say, is of n/10 nats: limits that do not know n make the number of steps grow
with n.  Far from the optimum the promise of a step does not hold for its sum any more than for a dense q, so that
the lengths grow only where the squared natural norm of the gradient is at most n, 1 for each group.
"""

import torch
from torch import Tensor

_SHARE = 0.1  # nats for each group


def raised(least: float, norm2: Tensor, leaves: int) -> Tensor:
    """A limit of the squared length of a step, raised in proportion to the number of groups near the optimum.

    >>> raised(4.0, torch.tensor([99.0, 101.0]), 100).tolist(), raised(4.0, torch.tensor(0.0), 1).item()
    ([10.0, 4.0], 4.0)
    """
    near = torch.full_like(norm2, max(least, _SHARE * leaves))
    return torch.where(norm2 <= leaves, near, least)
