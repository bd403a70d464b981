"""The loop: step until the natural gradient vanishes, and say plainly when it did not.

The natural-gradient norm |∇L|_F⁻¹ is free of units and of coordinates: near a well-conditioned
optimum the objective is about ½|∇L|² nats above its minimum.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchngvi.arguments import as_target
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target
from torchngvi.methods import VN
from torchngvi.optim import NaturalGradientVI, Status

_STALL = 30  # rejected steps in a row after which nothing more is to be had


class Record(NamedTuple):
    """One line of a trace, at the q before a step; over batch members the loss is a sum, the norm the largest."""

    evaluations: int
    loss: float  # negative ELBO
    norm: float  # natural-gradient norm
    step: float  # ρ of the step that led here, the smallest; 0 at the start
    rejections: int  # so far
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

    def __str__(self) -> str:
        verdict = "converged" if self.converged else "not converged"
        return f"{verdict}, {self.reason} Negative ELBO {self.loss:.6f} after {self.evaluations} evaluations."


def fit(
    q: Posterior,
    target: Target | Callable[[Tensor], Tensor],
    optimizer: NaturalGradientVI | None = None,
    *,
    tolerance: float | None = None,
    max_evaluations: int = 1000,
    callbacks: Iterable[Callable[[Record], Any]] = (),
    progress: bool = True,
) -> FitResult:
    """Fit q to the target, in place.

    Args:
        q: the posterior, updated in place.
        target: a model, or a function of theta returning the log joint.
        optimizer: built over q; by default `VN(q)`, which finds its own steps.
        tolerance: on the natural-gradient norm; by default 1e-5 in float64, 1e-2 in float32.
        max_evaluations: budget of expectations (value, gradient, curvature).
        callbacks: called with the `Record` of each step; a true result stops the run.
        progress: show a bar.

    Returns:
        The verdict with its reason, the loss and the trace.  An interrupt from the keyboard ends the
        run as a callback would: q keeps its last accepted state.

    Raises:
        InputError: a tolerance or a budget that is not positive, an optimizer over another q.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.eye(2).double(), [1.0, 0.0], prior_precision=1.0)
    >>> result = fit(CholeskyGaussian(2, dtype=torch.float64), model, progress=False)
    >>> result.converged, round(result.loss, 4)
    (True, 1.3865)
    """
    optimizer = VN(q) if optimizer is None else optimizer
    if optimizer.posteriors != [q]:
        raise InputError("the optimizer must hold the posterior that is fitted, and no other; build it as VN(q).")
    if tolerance is None:
        tolerance = 1e-5 if torch.finfo(q.mean_probe.dtype).eps < 1e-12 else 1e-2
    if not tolerance > 0:
        raise InputError(f"tolerance bounds the natural-gradient norm and must be positive; got {tolerance}.")
    if max_evaluations < 1:
        raise InputError(f"max_evaluations must be at least 1; got {max_evaluations}.")
    callbacks, target = tuple(callbacks), as_target(target)

    trace: list[Record] = []
    start, first, stalled = time.perf_counter(), optimizer.evaluations, 0
    reason, converged, status = "", False, None
    with tqdm(total=max_evaluations, disable=not progress, desc=type(optimizer).__name__, unit="eval") as bar:
        try:
            while True:
                status = optimizer.evaluate(target)
                record = _record(optimizer, status, first, bool(trace), time.perf_counter() - start)
                trace.append(record)
                _show(bar, record)
                converged = record.norm <= tolerance
                reason = _why_stop(record, trace[0], converged, tolerance, max_evaluations, stalled)
                answers = [callback(record) for callback in callbacks]
                if any(answers) and not reason:
                    reason = f"because a callback stopped it at natural-gradient norm {record.norm:.2g}."
                if reason:
                    break
                optimizer.step(target)
                assert optimizer.last is not None
                stalled = 0 if bool(optimizer.last.accepted.any()) else stalled + 1
            bar.total = bar.n if converged else bar.total  # done is done, whatever is left of the budget
            bar.refresh()
        except KeyboardInterrupt:
            reason = reason if converged else "because it was interrupted."
    if status is None:
        raise KeyboardInterrupt
    last = trace[-1]
    members = status.norm2.sqrt() <= tolerance
    return FitResult(converged, reason, last.loss, last.norm, last.evaluations, members, trace)


def _why_stop(record: Record, first: Record, converged: bool, tolerance: float, budget: int, stalled: int) -> str:
    """The reason to end the run here, or nothing."""
    at = f"natural-gradient norm {record.norm:.2g} against a tolerance of {tolerance:.2g}"
    if converged:
        return f"natural-gradient norm {record.norm:.2g}."
    if not math.isfinite(record.loss) or math.isnan(record.norm):
        if math.isfinite(first.loss):
            return f"because the run diverged to a negative ELBO of {record.loss}: use a smaller lr, or none at all."
        return (
            f"because the negative ELBO is {record.loss} at this q: start from another mean or a smaller scale "
            "(initialize_)."
        )
    if stalled >= _STALL:
        return (
            f"because {stalled} steps in a row were rejected ({at}): a smaller lr, float64, or a larger tolerance "
            "may be needed."
        )
    if record.evaluations >= budget:
        return f"because the budget of {budget} evaluations is used up ({at}). Raise max_evaluations."
    return ""


def _record(optimizer: NaturalGradientVI, status: Status, first: int, stepped: bool, seconds: float) -> Record:
    last = optimizer.last if stepped else None
    return Record(
        optimizer.evaluations - first,
        float(status.loss.sum()),
        float(status.norm2.max().sqrt()),
        0.0 if last is None else float(last.rho.min()),
        optimizer.rejections,
        seconds,
    )


def _show(bar: tqdm, record: Record) -> None:
    bar.n = min(record.evaluations, bar.total)
    bar.set_postfix(
        {
            "loss": f"{record.loss:.6g}",
            "norm": f"{record.norm:.1e}",
            "step": f"{record.step:.2g}",
            "rejected": record.rejections,
        }
    )
