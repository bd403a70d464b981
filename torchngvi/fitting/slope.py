"""Ending a run by the slope of its averaged bound: a criterion, and one with a cap for a loop of one's own."""

import math
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_number
from torchngvi.errors import InputError
from torchngvi.fitting.engine import Standing, Stop
from torchngvi.fitting.records import Record
from torchngvi.fitting.stopping import Criterion


class SlopeBelow(Criterion):
    """The bound has stopped rising: a line through its averages over blocks of steps has a slope below so many nats.

    It is the criterion for steps by stochastic gradients, whose norm does not vanish.  The bound of a step is that
    before it, minus the loss.  The line is fitted by least squares to the last averages against the number of the
    block; one that falls ends the run too, and a slope that is not finite does not.

    Args:
        slope: the slope below which the run ends, in nats a block.
        block: the number of iterations in an average.
        blocks: the number of averages in the line.

    Attributes:
        means: the averages so far.
        steps: the number of bounds so far.

    Raises:
        InputError: a block below 1, fewer than two blocks.

    >>> stop = SlopeBelow(0.5, block=1)
    >>> [stop.add(bound) for bound in (0.0, 2.0, 4.0, 4.5, 4.5)]
    [False, False, False, False, True]
    >>> stop.means
    [0.0, 2.0, 4.0, 4.5, 4.5]
    """

    def __init__(self, slope: float = 0.01, block: int = 1000, blocks: int = 3) -> None:
        self.block = read_count("block", block, "counts iterations")
        self.blocks = read_count("blocks", blocks, "counts the averages in a line", at_least=2)
        self.slope = read_number("slope", slope, "is in nats a block")
        self.means: list[float] = []
        self.steps = 0
        self._bounds: list[Tensor] = []  # of the block that is not full, read once it is

    def asked(self, standing: Standing) -> Stop | None:
        """End the run once the line is that flat."""
        if not self.add(-standing.record.loss):
            return None
        return Stop(f"because {self._why()} ({standing.at()}).{standing.climb}")

    def add(self, bound: Tensor | float) -> bool:
        """Take the bound of one more step; its value is read from the device once a block.

        Args:
            bound: the estimate of the lower bound, 0-d, in nats.

        Returns:
            Whether to end the run.
        """
        self._bounds.append(
            bound.detach() if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64, device="cpu")
        )
        self.steps += 1
        if self.steps % self.block:
            return False
        # in double precision: a thousand bounds of -10⁶ nats, added in float32, would hide a slope of 0.01
        device = self._bounds[-1].device  # bounds from a checkpoint may be elsewhere
        self.means.append(float(torch.stack([each.to(device) for each in self._bounds]).cpu().double().mean()))
        self._bounds = []
        return self.rise() < self.slope

    def rise(self) -> float:
        """The slope of the line through the last averages.

        Returns:
            Nats a block; infinite while there are too few averages.
        """
        if len(self.means) < self.blocks:
            return math.inf
        y = torch.tensor(self.means[-self.blocks :], dtype=torch.float64, device="cpu")
        x = torch.arange(self.blocks, dtype=torch.float64, device="cpu")
        x = x - x.mean()
        rise = float(x @ y / (x @ x))
        return rise if math.isfinite(rise) else math.inf

    def _why(self) -> str:
        return f"the ELBO rises by {self.rise():.2g} nats in {self.block} steps, less than {self.slope:g}"

    def state_dict(self) -> dict[str, Any]:
        """The memory of the criterion: the averages so far, and the bounds of the block that is not full."""
        return {"means": list(self.means), "bounds": list(self._bounds), "steps": self.steps, "block": self.block}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, with the settings of this object.

        Raises:
            InputError: averages over blocks of another length.
        """
        block = state_dict.get("block", self.block)
        if block != self.block:
            raise InputError(
                f"the averages are over blocks of {block} steps, and here block={self.block}. Say block={block}."
            )
        self.means, self._bounds = list(state_dict["means"]), list(state_dict["bounds"])
        self.steps = state_dict["steps"]


class SlopeStop(SlopeBelow):
    """`SlopeBelow` with a cap, by the settings of Tan (2025), section 4; also for a loop of one's own, by `add`.

    The bound is averaged over each 1000 iterations, and the run ends when the slope of the line through the last three
    averages is below 0.01 nats a block, or after 10⁵ iterations.  It can be a callback of `fit` as well.

    Args:
        block: the number of iterations in an average.
        blocks: the number of averages in the line.
        slope: the slope below which the run ends, in nats a block.
        max_steps: the number of steps after which it ends whatever the slope.

    Raises:
        InputError: block or max_steps below 1, fewer than two blocks.

    >>> stop = SlopeStop(block=1, max_steps=4)
    >>> [stop.add(bound) for bound in (0.0, 2.0, 4.0, 6.0)]
    [False, False, False, True]
    """

    def __init__(self, block: int = 1000, blocks: int = 3, slope: float = 0.01, max_steps: int = 100_000) -> None:
        super().__init__(slope, block, blocks)
        self.max_steps = read_count("max_steps", max_steps, "counts iterations")

    def __call__(self, record: Record) -> bool:
        """Whether to end the run of `fit`, whose bound is minus the loss of the record."""
        return self.add(-record.loss)

    def add(self, bound: Tensor | float) -> bool:
        """Take the bound of one more step, and tell whether to end the run, by the slope or the cap."""
        return super().add(bound) or self.steps >= self.max_steps

    def _why(self) -> str:
        return f"{self.steps} steps were made" if self.steps >= self.max_steps else super()._why()
