"""What the optimizer warns of, each once, at the line of the user that stepped."""

import sys
import warnings

from torch import Tensor

from torchngvi.distributed import Processes, ranks
from torchngvi.errors import RejectedStepWarning, UnsummedRanksWarning
from torchngvi.interfaces import Posterior


def warn_of_rejection(method: str, q: Posterior, rho: Tensor) -> None:
    """Warn that a step was not taken, and say what to do about it.

    Args:
        method: the name of the optimizer's class.
        q: the posterior that was left as it is.
        rho: the step size that was tried, (*batch,).
    """
    domain, remedy = q.domain, "or VN or SRVN without one, which find their steps by trial"
    if not q.framed:
        domain = f"the domain where {domain}"
        remedy = "a limit such as step_size=Clip(5.0), or a metric with a larger eps or warmup"
    warn(
        f"{method}: a step of size {float(rho.max()):.3g} left {domain} or was not "
        "finite; q was left as it is, and steps like it will be skipped without another warning. "
        f"Use a smaller lr, {remedy}.",
        RejectedStepWarning,
    )


def warn_if_unsummed(method: str) -> None:
    """Warn, in a run of several processes, that a step sums nothing over them.

    The coordinates of q are buffers, whose gradients DistributedDataParallel does not reduce.

    Args:
        method: the name of the optimizer's class.
    """
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
    """Warn at the first frame of the call stack that belongs neither to this library nor to torch.

    Args:
        text: the warning.
        category: the class of the warning.
    """
    depth, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torchngvi", "torch"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, category, stacklevel=depth)
