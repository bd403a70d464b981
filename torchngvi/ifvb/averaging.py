"""The weighted average of the iterates (Godichon-Baggioni, Nguyen and Tran 2023, section 4.3).

    λ̄⁽ˢ⁺¹⁾ = λ̄⁽ˢ⁾ + w_s/Σ_{k≤s} w_k (λ⁽ˢ⁺¹⁾ - λ̄⁽ˢ⁾),      w_s = log(s + 1)^w

For w > 0 the first weight is 0/0, which the paper leaves open: λ̄⁽¹⁾ = λ⁽¹⁾ here.  The second is exactly 1,
so that the choice is forgotten.  w = 0 is the plain mean.
"""

import math
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.errors import InputError


@final
class Averaging:
    """w and when to begin.

    Args:
        w: power of the logarithm, not negative; 2 in the paper.
        burn_in: iterations before the first that counts; until then the average is the iterate.

    Raises:
        InputError: a negative w or burn_in.

    >>> rule, state = Averaging(w=0), {"average": torch.zeros(1), "weight": 0.0}
    >>> for index, iterate in enumerate((3.0, 5.0, 10.0)):
    ...     rule.update(state, torch.tensor([iterate]), index)
    >>> state["average"].item()
    6.0
    """

    def __init__(self, w: float = 2.0, burn_in: int = 0) -> None:
        if not (w >= 0 and math.isfinite(w)):
            raise InputError(f"w is the power of the logarithm in the weights, not negative; got {w}.")
        if not burn_in >= 0:
            raise InputError(f"burn_in counts iterations, not negative; got {burn_in}.")
        self.w, self.burn_in = float(w), burn_in

    def update(
        self,
        state: dict[str, Any],
        iterate: Tensor,  # (*batch, D), λ⁽ˢ⁺¹⁾
        index: int,  # s, from 0
    ) -> None:
        """One more iterate."""
        place = index - self.burn_in
        weight = 0.0 if place < 0 else math.log(place + 1) ** self.w  # 0⁰ = 1
        state["weight"] += weight
        share = weight / state["weight"] if state["weight"] > 0 else 1.0
        state["average"] = torch.lerp(state["average"], iterate, share)
