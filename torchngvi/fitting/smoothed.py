"""The loop: step until a smoothed value has stopped improving, keep the best, and say plainly why it ended.

Stochastic gradients have no norm that vanishes.  What is watched is the moving average of the lower bound, or
any value that goes down, such as an error on validation data; the best λ is put back at the end.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchngvi.errors import InputError
from torchngvi.expectations.flat import integrand
from torchngvi.methods.ifvb import AIFVB, PreconditionedVI
from torchngvi.models import LogJoint
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.renamed import renamed


class Line(NamedTuple):
    """One step of a run."""

    iteration: int
    value: float  # what is watched
    smoothed: float  # its mean over the window; ∞ until the window is full
    rejections: int  # so far
    fisher_draws: int  # so far
    log_joint_draws: int  # so far
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """Where a run ended, and why."""

    converged: bool
    reason: str  # one sentence
    best: float  # smallest smoothed value
    iteration: int  # where it was reached
    trace: list[Line] = field(repr=False)

    def __str__(self) -> str:
        verdict = "converged" if self.converged else "not converged"
        return f"{verdict}, {self.reason} Best {self.best:.6g} at iteration {self.iteration}."


def run(
    optimizer: PreconditionedVI,
    target: Any,
    max_steps: int = 5000,
    *,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    monitor: Callable[[], float] | None = None,
    window: int = 100,
    patience: int = 200,
    progress: bool = False,
) -> Outcome:
    """Step until the smoothed value has not improved for ``patience`` steps; the best λ stays in the family.

    Args:
        optimizer: over a family without batch dimensions.
        target: as `PreconditionedVI.step` takes it.
        max_steps: budget.
        schedule: of the learning rate, moved on after each step.
        monitor: a value that goes down, asked after each step with the estimate (the average where there is one)
            in the family; by default the estimate of minus the lower bound before the step.
        window: steps of the moving average; 1 for a value without noise.
        patience: steps without a new best after which the run ends.
        progress: show a bar.

    Raises:
        InputError: a batch of runs, counts below 1.

    >>> from torchngvi.ifvb import ClosedForm, Exact, MeanFieldGaussian
    >>> q = MeanFieldGaussian(torch.ones(2).double())
    >>> opt = PreconditionedVI(q, Exact(), 0.5, estimator=ClosedForm())
    >>> print(run(opt, lambda lam: -lam.square().sum(-1), window=1, patience=20))  # doctest: +ELLIPSIS
    converged, the smoothed value has not improved for 20 steps. Best ...
    """
    q = optimizer.posterior
    if q.batch_shape:
        raise InputError(f"run follows one lambda; this posterior holds {tuple(q.batch_shape)}. Call step.")
    for name, count in (("max_steps", max_steps), ("window", window), ("patience", patience)):
        if count < 1:
            raise InputError(f"{name} counts steps and must be at least 1; got {count}.")
    recent: deque[float] = deque(maxlen=window)
    trace: list[Line] = []
    best, best_at, start = math.inf, 0, time.perf_counter()
    kept = _estimate(optimizer)
    converged, reason = False, f"because the budget of {max_steps} steps is used up; raise max_steps."
    for _ in tqdm(range(max_steps), disable=not progress, desc=type(optimizer).__name__):
        loss = float(_stepped(optimizer, target))
        if schedule is not None:
            schedule.step()
        value = loss if monitor is None else _monitored(optimizer, monitor)
        recent.append(value)
        smoothed = sum(recent) / window if len(recent) == window else math.inf
        trace.append(_line(optimizer, value, smoothed, start))
        iteration = trace[-1].iteration
        if smoothed < best:
            best, best_at, kept = smoothed, iteration, _estimate(optimizer)
        last = trace[-patience - 1].rejections if len(trace) > patience else None
        if last is not None and 2 * (trace[-1].rejections - last) > patience:
            reason = (
                f"because {trace[-1].rejections - last} of the last {patience} steps were not finite or left the "
                "domain: use a smaller lr, a clip, or a larger eps."
            )
            break
        if iteration - max(best_at, trace[0].iteration + window - 1) >= patience:
            converged = math.isfinite(best)
            reason = f"the smoothed value has not improved for {patience} steps."
            if not converged:
                reason = "because the value was never finite: start elsewhere, or use a smaller lr."
            break
    with torch.no_grad():
        q.vector.copy_(kept)
    return Outcome(converged, reason, best, best_at, trace)


def _stepped(optimizer: PreconditionedVI, target: Any) -> Tensor:
    loss = optimizer.step(target)
    assert loss is not None
    return loss


def _estimate(optimizer: PreconditionedVI) -> Tensor:
    """The average where there is one, else the iterate; a copy."""
    return (optimizer.average if isinstance(optimizer, AIFVB) else optimizer.posterior.vector).detach().clone()


def _monitored(optimizer: PreconditionedVI, monitor: Callable[[], float]) -> float:
    """The value with the estimate in the family; λ is put back."""
    if not isinstance(optimizer, AIFVB):
        return float(monitor())
    vector = optimizer.posterior.vector
    iterate = vector.detach().clone()
    try:
        with torch.no_grad():
            vector.copy_(optimizer.average)
        return float(monitor())
    finally:
        with torch.no_grad():
            vector.copy_(iterate)


def _line(optimizer: PreconditionedVI, value: float, smoothed: float, start: float) -> Line:
    return Line(
        optimizer.evaluations,
        value,
        smoothed,
        optimizer.rejections,
        optimizer.memory["fisher_draws"],
        optimizer.gradients + optimizer.values,
        time.perf_counter() - start,
    )


@renamed(family="q")
@torch.no_grad()
def lower_bound(
    q: FlatPosterior,
    log_joint: Callable[[Tensor], Tensor],
    draws: int = 1000,
    generator: torch.Generator | None = None,
    at: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """LB(λ) = E_q[log p(θ, y) - log q(θ)] and its standard error, both (*batch,), by Monte Carlo.

    >>> from torchngvi.ifvb import Beta
    >>> value, error = lower_bound(Beta(torch.ones(2)), lambda theta: 0 * theta[..., 0], 10)
    >>> value.item(), error.item()  # q is the uniform density
    (0.0, 0.0)
    """
    theta = q.sample(draws, generator, at)
    h = integrand(q, LogJoint(log_joint), theta, at)
    return h.mean(0), h.std(0) / math.sqrt(draws)
