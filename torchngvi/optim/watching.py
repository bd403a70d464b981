"""How a run whose steps are not found by trial is watched: rejections in a row, and losses far above the start."""

import sys
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.distributed import Processes, ranks
from torchngvi.errors import DivergenceWarning, InputError, RejectedStepError, RejectedStepWarning, UnsummedRanksWarning
from torchngvi.interfaces import Posterior, may_be_asked
from torchngvi.numerics.arrays import Fetched
from torchngvi.optim.records import Evaluation, Heading, State

# What the optimizer says, each once, at the line of the user that stepped: its warnings, and why it gives up


def give_up(method: str, q: Posterior, rows: int, rho: Tensor) -> None:
    """Raise because q stands still: the last steps were all rejected."""
    remedy = "step_size=KLRadius(0.1), or IBLR, none of whose steps leaves the cone"
    if not q.framed:
        remedy = "a limit such as step_size=Clip(5.0)"
    raise RejectedStepError(
        f"{method}: {rows} steps in a row left {_domain(q)} or were not finite, the last of size "
        f"{float(rho.max()):.3g}: q has stood still, while whatever else the loop trains has moved on. Check that the "
        f"loss is finite; use a smaller lr, {remedy}. "
        "With opt.watch = torchngvi.optim.Watch(rejections=...) more of them are allowed."
    )


def warn_of_divergence(method: str, what: str, rho: Tensor) -> None:
    """Warn that a run is far above its start."""
    warn(
        f"{method}: {what}: the run diverges, at steps of size {float(rho.max()):.3g}, unless the loss itself has "
        "grown, as with data that come later. Begin again from the start with a smaller lr, or with "
        "step_size=KLRadius() in place of Constant(); VN and SRVN without an lr find their steps by trial.",
        DivergenceWarning,
    )


def warn_of_falling(method: str, loss: float) -> None:
    """Warn that a loss falls without bound while its gradient grows."""
    warn(
        f"{method}: the loss has fallen to {loss:.3g}, and its gradient grows: the run diverges, since the log joint "
        "does not confine q. If the function returns -log p, an energy, return its negative; give every parameter a "
        "proper prior.",
        DivergenceWarning,
    )


def _domain(q: Posterior) -> str:
    return q.domain if q.framed else f"the domain where {q.domain}"


def warn_of_rejection(method: str, q: Posterior, rho: Tensor) -> None:
    """Warn that a step was not taken, and say what to do about it."""
    remedy = "or VN or SRVN without one, which find their steps by trial"
    if not q.framed:
        remedy = "a limit such as step_size=Clip(5.0), or a metric with a larger eps or warmup"
    warn(
        f"{method}: a step of size {float(rho.max()):.3g} left {_domain(q)} or was not "
        "finite; q was left as it is, and steps like it will be skipped without another warning. "
        f"Use a smaller lr, {remedy}.",
        RejectedStepWarning,
    )


def warn_if_unsummed(method: str) -> None:
    """Warn, in a run of several processes, that a step sums nothing over them."""
    if ranks() > 1 and not Processes.met:  # where they meet, a closure or a hook sums
        warn(
            f"{method}: this is one of {ranks()} processes, and a step does not sum over them what "
            "the data of each say of q, nor does DistributedDataParallel. That is right where every process has "
            "all the data, or where the gradients of q.mean_probe and q.root_probe were summed by "
            "torch.distributed.all_reduce before step(); otherwise every process fits its own q to its own data. For "
            "rows that are spread over the processes give the step torchngvi.Sharded(model, num_data).",
            UnsummedRanksWarning,
        )


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the first frame of the call stack that belongs neither to this library nor to torch."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torchngvi", "torch"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, category, stacklevel=depth)


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
    """Read counts on the CPU at once; on CUDA those of a step before, once they have arrived."""
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
        value = seen.heading.norm2() if q.framed else seen.heading.path.slope()
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
        warn_of_falling(method, float(seen.start.loss.max()))
        said = True
    if not said and above >= watch.steps:
        what = "the squared natural norm of the gradient was" if seen.lossless else "the loss was"
        warn_of_divergence(method, f"{what} far above its start in {int(above)} of the last steps", seen.rho)
        said = True
    if watch.rejections < rejected < float("inf"):
        give_up(method, q, int(rejected), seen.rho)
    return said
