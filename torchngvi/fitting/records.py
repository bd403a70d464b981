"""What a run leaves behind: a line a step, and a verdict."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import Posterior
from torchngvi.optim import NaturalGradientVI


class Record(NamedTuple):
    """One line of a trace, at the q before a step; over batch members the loss is a sum, the norm the largest.

    Members whose loss is not finite are left out of both while there are others.
    """

    evaluations: int
    loss: float  # negative ELBO
    norm: float  # natural-gradient norm of L/γ, with three standard errors where they are known
    step: float  # ρ of the step that led here, the smallest; 0 at the start
    rejections: int  # so far
    gradients: int  # of the log joint so far, one a draw; for a model, passes over its data
    seconds: float


@dataclass(frozen=True)
class FitResult:
    """Where a run ended, and why."""

    converged: bool
    reason: str  # one sentence
    loss: float  # negative ELBO
    norm: float
    evaluations: int
    members_converged: Tensor  # (*batch,)
    trace: list[Record] = field(repr=False)
    posterior: Posterior | None = field(default=None, repr=False)  # what was fitted, in place

    def __str__(self) -> str:
        verdict = "converged" if self.converged else "not converged"
        return f"{verdict}, {self.reason} Negative ELBO {self.loss:.6f} after {self.evaluations} evaluations."


def record(
    optimizer: NaturalGradientVI,
    loss: Tensor,
    norm: Tensor,
    alive: Tensor,
    step: float,
    before: tuple[int, int],  # evaluations and gradients of the optimizer when the run began
    seconds: float,
) -> Record:
    """The line of an optimizer's run."""
    seen = alive if bool(alive.any()) else torch.ones_like(alive)
    return Record(
        optimizer.evaluations - before[0],
        float(loss[seen].sum()),
        float(norm[seen].max()),
        step,
        optimizer.rejections,
        optimizer.gradients - before[1],
        seconds,
    )


def in_words(record: Record) -> dict[str, str]:
    """What the progress bar says of it."""
    return {
        "loss": f"{record.loss:.6g}",
        "norm": f"{record.norm:.1e}",
        "step": f"{record.step:.2g}",
        "rejected": str(record.rejections),
    }
