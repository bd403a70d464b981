"""How a run whose steps are not found by trial is watched: rejections in a row, and losses far above the start."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, may_be_asked
from torchngvi.numerics.host import Fetched
from torchngvi.optim import notices
from torchngvi.optim.records import Evaluation, Heading
from torchngvi.optim.state import State


@dataclass(frozen=True)
class Watch:
    """When a run with a learning rate says that it diverges, and when it ends with an error: ``opt.watch = ...``.

    A step whose length is given and not found by trial cannot take itself back, so that what it leads to is watched.
    Where q is on the CPU the answer comes at the step; on an accelerator it is copied behind the steps, and read
    once it is there, so that no step waits for it.

    Attributes:
        rejections: the number of rejected steps in a row that a run may have; one more raises a `RejectedStepError`.
            It is that after which `torchngvi.fit` ends: runs that recover had 12 in a row at most.
        climb: how far above its start a loss is far above it, in multiples of |loss| + D at the start, with D the
            number of latent variables (a draw of the loss differs from another by about √D).
        steep: the same of the squared natural norm of the gradient, where the optimizer does not see the loss, as after
            ``loss.backward()``, in multiples of that of the first step; and how many times beyond what is far above the
            start a value is said to be so at once.
        steps: the number of steps that have to be so, one for each that was, since single draws of a loss have long
            tails; one of them is forgotten after ``memory`` steps that are not so.
        memory: the number of such steps.  A loss may come back between two that are far above, as the
            variance of a q does whose mean goes from side to side.

    Raises:
        InputError: a value that is not positive.

    >>> from torchngvi import VN, CholeskyGaussian
    >>> opt = VN(CholeskyGaussian(2), lr=0.1)
    >>> opt.watch = Watch(rejections=100)
    >>> opt.watch.climb
    10.0
    """

    rejections: float = 30
    climb: float = 10.0
    steep: float = 1e6
    steps: int = 5
    memory: int = 10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"{name} of Watch must be positive; got {value!r}.")


UNWATCHED = Watch(rejections=torch.inf, climb=torch.inf, steep=torch.inf)  # of runs that are judged otherwise


class Seen(NamedTuple):
    """What is known of one step when it has been taken, or not."""

    start: Evaluation
    heading: Heading
    rho: Tensor  # (*batch,)
    refused: Tensor | None  # (*batch,), or None where every member was moved
    resting: Tensor | None  # the members that were to stay where they are, (*batch,)
    lossless: bool  # the loss is not known, as after loss.backward()


def read_later(counts: Tensor, pending: Fetched | None) -> tuple[list[float] | None, Fetched | None]:
    """Read counts where that costs nothing: on the CPU at once, on CUDA those of a step before, once they
    have arrived.
    """
    if may_be_asked(counts):
        return counts.tolist(), None
    if not counts.is_cuda or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None, pending
    if pending is None:
        return None, Fetched(counts)
    known = pending.read()
    return known, (Fetched(counts) if known is not None else pending)


def counted(watch: Watch, q: Posterior, seen: Seen, state: State) -> Tensor | None:
    """Count the steps in a row that were rejected, and those whose loss is far above the start."""
    value, dim = seen.start.loss, q.structure.total_dim if q.framed else q.dim
    if seen.lossless:
        value = q.norm2(q.local(seen.start.e)) if q.framed else seen.heading.path.slope()
    if not may_be_asked(value) or bool(state["far"].isnan().any()):
        far = watch.steep * (value + dim) if seen.lossless else value + watch.climb * (value.abs() + dim)
        state["far"] = torch.where(state["far"].isnan() & far.isfinite(), far, state["far"])
    high = value > state["far"]  # NaN is no step, and counted as such; an infinite draw says nothing of how far
    if q.framed and fallen(seen, state):
        high = high | ((value < -state["far"]) & (q.norm2(q.local(seen.start.e)) > watch.steep * dim))
    if seen.refused is None and may_be_asked(high) and not bool(high.any()) and not bool(state["counts"].any()):
        return None
    rejected, above = state["counts"]
    rejected = torch.zeros_like(rejected) if seen.refused is None else (rejected + 1) * seen.refused
    enough = value.isfinite() & (value > watch.steep * state["far"])  # so far that one is enough
    more = 1 + (watch.steps - 1) * enough
    above = torch.where(high, above + more, (above - 1 / watch.memory).clamp_min(0.0))
    state["counts"] = torch.stack([rejected, above])
    if seen.resting is not None:
        rejected = torch.where(seen.resting, torch.inf, rejected)
    return torch.stack([rejected.amin(), above.amax()])


def fallen(seen: Seen, state: State) -> bool:
    """Whether a loss that is known is as far below 0 as one that is far above its start is above it."""
    loss = seen.start.loss
    return not seen.lossless and may_be_asked(loss) and bool((loss < -state["far"]).any())


def speak(watch: Watch, method: str, q: Posterior, seen: Seen, known: list[float], said: bool) -> bool:
    """Warn of a run that diverges, once, and end one whose q stands still."""
    rejected, above = known
    if not said and above >= watch.steps and not seen.lossless and bool((seen.start.loss < 0).all()):
        notices.warn_of_falling(method, float(seen.start.loss.max()))
        said = True
    if not said and above >= watch.steps:
        what = "the squared natural norm of the gradient was" if seen.lossless else "the loss was"
        notices.warn_of_divergence(method, f"{what} far above its start in {int(above)} of the last steps", seen.rho)
        said = True
    if watch.rejections < rejected < float("inf"):
        notices.give_up(method, q, int(rejected), seen.rho)
    return said
