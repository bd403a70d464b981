"""Losses of Pyro that cannot fit a guide whose density has constant coordinates, refused by name.

Trace_ELBO and its kin are exact: the derivative of log q in the coordinates of q has mean zero under q.  Under weights
that depend on the draws, or under draws of the model, it has not.
"""

import sys
from types import FrameType

import torch
from pyro.infer import (
    CSIS,
    ELBO,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    RenyiELBO,
    ReweightedWakeSleep,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
)

from torchngvi.errors import InputError

_WEIGHING = (CSIS, RenyiELBO, ReweightedWakeSleep, TraceTailAdaptive_ELBO)
_COMPILED = (JitTrace_ELBO, JitTraceEnum_ELBO, JitTraceGraph_ELBO)


def check_loss() -> None:
    """Check that the loss of Pyro that is calling the guide at this moment is one that can fit it."""
    loss = _loss_in_progress(sys._getframe(1))
    if isinstance(loss, _WEIGHING) and torch.is_grad_enabled():
        why = "it needs the derivative of log q in the coordinates of q, which this guide holds constant"
    elif isinstance(loss, TraceMeanField_ELBO):
        why = "it leaves out the log Jacobians of the supports of the latent sites"
    elif isinstance(loss, _COMPILED):
        why = "torch.jit takes no probes, through which the gradient reaches q"
    else:
        return
    raise InputError(
        f"{type(loss).__name__} cannot fit an AutoGaussian: {why}. Use Trace_ELBO or TraceEnum_ELBO, fit_guide "
        "or NaturalSVI."
    )


def _loss_in_progress(frame: FrameType | None) -> ELBO | CSIS | None:
    """Pyro tells its guides nothing of it: the innermost one on the call stack."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("pyro.infer."):
            caller = frame.f_locals.get("self")
            if isinstance(caller, ELBO | CSIS):
                return caller
        frame = frame.f_back
    return None


def refuse_loss(why: str) -> None:
    """Refuse every loss of Pyro that is calling the guide at this moment."""
    if (loss := _loss_in_progress(sys._getframe(1))) is not None:
        raise InputError(f"{type(loss).__name__} cannot fit this guide: {why}.")
