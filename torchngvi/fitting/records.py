"""The result of a run: a line for each step, and a verdict."""

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
    """The verdict of a run: whether it converged, where it ended and why, with a `Record` of each evaluation.

    ``gradients`` and ``values`` count what the whole run has asked of the log joint, the checks after the last record
    included.
    """

    converged: bool
    reason: str  # one sentence
    loss: float  # negative ELBO
    norm: float
    evaluations: int
    members_converged: Tensor  # (*batch,)
    trace: list[Record] = field(repr=False)
    gradients: int = 0
    values: int = 0
    posterior: Posterior | None = field(default=None, repr=False)  # what was fitted, in place

    def __str__(self) -> str:
        verdict = "converged" if self.converged else "not converged"
        loss = f"{self.loss:.6f}" if abs(self.loss) < 1e9 else f"{self.loss:.6g}"
        return f"{verdict}, {self.reason} Negative ELBO {loss} after {self.evaluations} evaluations."


def record(
    optimizer: NaturalGradientVI,
    loss: Tensor,
    norm: Tensor,
    alive: Tensor,
    step: float,
    before: tuple[int, int],  # evaluations and gradients of the optimizer when the run began
    seconds: float,
) -> Record:
    """The record of an evaluation by an optimizer.

    Args:
        optimizer: the optimizer, whose counts are read.
        loss: the loss of each member, (*batch,).
        norm: the natural-gradient norm of each member, (*batch,).
        alive: the members whose loss is finite, (*batch,).
        step: the step size that led here.
        before: the evaluations and gradients of the optimizer when the run began.
        seconds: since the run began.

    Returns:
        The record.
    """
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
    """The words of a record on the progress bar.

    Args:
        record: the record.

    Returns:
        Texts by name.
    """
    return {
        "loss": f"{record.loss:.6g}",
        "norm": f"{record.norm:.1e}",
        "step": f"{record.step:.2g}",
        "rejected": str(record.rejections),
    }
