"""What the optimizer warns of, each once, at the line of the user that stepped."""

import sys
import warnings

from torch import Tensor

from torchngvi.distributed import ranks
from torchngvi.errors import RejectedStepWarning, UnsummedRanksWarning
from torchngvi.interfaces import Posterior


def warn_of_rejection(method: str, q: Posterior, rho: Tensor) -> None:
    """A step that was not taken, and what to do about it."""
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
    """At the first step: q is in buffers, whose gradients DistributedDataParallel does not reduce."""
    if ranks() > 1:
        warn(
            f"{method}: this is one of {ranks()} processes, and a step does not sum over them what "
            "the data of each say of q, nor does DistributedDataParallel. That is right where every process has "
            "all the data, or where the gradients of q.mean_probe and q.root_probe were summed by "
            "torch.distributed.all_reduce before step(); otherwise every process fits its own q to its own data.",
            UnsummedRanksWarning,
        )


def warn(text: str, category: type[Warning]) -> None:
    """At the first frame that is neither of this library nor of torch."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torchngvi", "torch"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, category, stacklevel=depth)
