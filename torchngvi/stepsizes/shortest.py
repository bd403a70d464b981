"""Several limits at once: the shortest of their steps."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Path, StepSize


@final
class Shortest(StepSize):
    """The smallest of several step sizes, none of which needs a trial.

    One wants it to hold a step to several limits at once, such as a KL divergence and a norm.

    Args:
        parts: the step sizes to compare, such as `KLRadius(0.1)` and `Clip(5.0)`.

    Raises:
        InputError: if there are no parts.
        PairError: if one of the parts finds its step by trial.

    >>> from torchngvi.stepsizes import Clip, KLRadius
    >>> Shortest(KLRadius(0.1), Clip(5.0)).needs_natural
    True
    """

    def __init__(self, *parts: StepSize) -> None:
        if not parts:
            raise InputError("Shortest compares the steps of one step size or more; got none.")
        for part in parts:
            read_instance("Shortest", part, StepSize, "compares step sizes, such as KLRadius(0.1)", error=PairError)
            if part.needs_trial:
                raise PairError(
                    f"Shortest compares steps before they are taken, and {type(part).__name__} finds its own by "
                    "trial. Use KLRadius, Clip or Constant."
                )
        self.parts = parts
        self.needs_natural = any(part.needs_natural for part in parts)
        self.needs_tangent = any(part.needs_tangent for part in parts)

    def init(self, like: Tensor) -> dict[str, Any]:
        """Return the state of every part, under its place in the list."""
        return {str(place): part.init(like) for place, part in enumerate(self.parts)}

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the smallest ρ (*batch,); where one part gives NaN it is NaN, and no step is taken."""
        proposals = [part.propose(path, lr, like, state[str(place)]) for place, part in enumerate(self.parts)]
        return torch.stack(proposals).amin(0)
