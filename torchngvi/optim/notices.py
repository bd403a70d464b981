"""What the optimizer says, each once, at the line of the user that stepped: its warnings, and why it gives up."""

import sys
import warnings

from torch import Tensor

from torchngvi.distributed import Processes, ranks
from torchngvi.errors import DivergenceWarning, RejectedStepError, RejectedStepWarning, UnsummedRanksWarning
from torchngvi.interfaces import Posterior


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
