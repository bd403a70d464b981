"""When to end a stochastic run: the average bound over blocks of steps no longer rises.

Tan (2025), section 4: the bound is averaged over each 1000 iterations; a line is fitted by least squares to the
last three averages against the number of the block, and the run ends when its slope is below 0.01 nats a
block, falling lines included, or after 10⁵ iterations.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.records import Record


class SlopeStop:
    """Block averages of noisy bounds, and the slope of the last of them: a callback of `fit`, or in one's own loop.

    The bound of a step is that before it.  A slope that is not finite ends nothing.  To resume a run save
    ``state_dict()`` with its optimizer; the checkpoints of `fit` do not hold it.

    Args:
        block: iterations in an average.
        blocks: averages in the line.
        slope: below which the run ends.
        max_steps: after which it ends whatever the slope.

    Attributes:
        means: the averages so far.
        steps: the bounds so far.

    Raises:
        InputError: block or max_steps below 1, fewer than two blocks.

    >>> stop = SlopeStop(block=1, blocks=3, slope=0.5)
    >>> [stop.add(bound) for bound in (0.0, 2.0, 4.0, 4.5, 4.5)]
    [False, False, False, False, True]
    >>> stop.means
    [0.0, 2.0, 4.0, 4.5, 4.5]
    """

    def __init__(self, block: int = 1000, blocks: int = 3, slope: float = 0.01, max_steps: int = 100_000) -> None:
        if block < 1 or max_steps < 1:
            raise InputError(f"block and max_steps count iterations, at least 1; got {block} and {max_steps}.")
        if blocks < 2:
            raise InputError(f"a line needs at least 2 blocks; got {blocks}.")
        self.block, self.blocks, self.slope, self.max_steps = block, blocks, slope, max_steps
        self.means: list[float] = []
        self.steps = 0
        self._bounds: list[Tensor] = []  # of the block that is not full, read once it is

    def __call__(self, record: Record) -> bool:
        """Whether to end the run of `fit`, whose bound is minus the loss."""
        return self.add(-record.loss)

    def add(self, bound: Tensor | float) -> bool:
        """Take the bound of one more step; whether to end the run.  Read once a block."""
        self._bounds.append(bound.detach() if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64))
        self.steps += 1
        if self.steps % self.block:
            return self.steps >= self.max_steps
        # in double precision: a thousand bounds of -10⁶ nats, added in float32, would hide a slope of 0.01
        self.means.append(float(torch.stack(self._bounds).cpu().double().mean()))
        self._bounds = []
        return self.steps >= self.max_steps or self.rise() < self.slope

    def state_dict(self) -> dict[str, Any]:
        """The averages so far, and the bounds of the block that is not full."""
        return {"means": list(self.means), "bounds": list(self._bounds), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, with the settings of this object."""
        self.means, self._bounds = list(state_dict["means"]), list(state_dict["bounds"])
        self.steps = state_dict["steps"]

    def rise(self) -> float:
        """The slope of the line through the last averages, in nats a block; infinite while there are too few."""
        if len(self.means) < self.blocks:
            return math.inf
        y = torch.tensor(self.means[-self.blocks :], dtype=torch.float64)
        x = torch.arange(self.blocks, dtype=torch.float64)
        x = x - x.mean()
        rise = float(x @ y / (x @ x))
        return rise if math.isfinite(rise) else math.inf
