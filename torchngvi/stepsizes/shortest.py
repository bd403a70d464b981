"""Several limits at once: the shortest of their steps."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Path, StepSize


@final
class Shortest(StepSize):
    """ρ = min over step sizes that need no trial.

    Args:
        parts: step sizes such as `KLRadius(0.1)` and `Clip(5.0)`.

    Raises:
        InputError: no parts.
        PairError: one that finds its step by trial.

    >>> from torchngvi.stepsizes import Clip, KLRadius
    >>> Shortest(KLRadius(0.1), Clip(5.0)).needs_natural
    True
    """

    def __init__(self, *parts: StepSize) -> None:
        if not parts:
            raise InputError("Shortest compares the steps of one step size or more; got none.")
        for part in parts:
            if part.needs_trial:
                raise PairError(
                    f"Shortest compares steps before they are taken, and {type(part).__name__} finds its own by "
                    "trial. Use KLRadius, Clip or Constant."
                )
        self.parts = parts
        self.needs_natural = any(part.needs_natural for part in parts)
        self.needs_tangent = any(part.needs_tangent for part in parts)

    def init(self, like: Tensor) -> dict[str, Any]:
        """The state of each, by its place."""
        return {str(place): part.init(like) for place, part in enumerate(self.parts)}

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict) -> Tensor:
        """The smallest ρ; NaN where one is, which is then no step."""
        proposals = [part.propose(path, lr, like, state[str(place)]) for place, part in enumerate(self.parts)]
        return torch.stack(proposals).amin(0)
