"""The loop: step until the natural gradient vanishes, and say plainly when it did not.

The norm |∇L|_F⁻¹/γ of the natural gradient is free of units, of coordinates and of the temperature:
near a well-conditioned optimum L/γ is about half its square, in nats, above the minimum.
"""

import math
import os
import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchngvi.arguments import as_target
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target
from torchngvi.methods import VN
from torchngvi.optim import NaturalGradientVI

_STALL = 30  # rejected steps in a row after which nothing more is to be had


class Record(NamedTuple):
    """One line of a trace, at the q before a step; over batch members the loss is a sum, the norm the largest.

    Members whose loss is not finite are left out of both while there are others.
    """

    evaluations: int
    loss: float  # negative ELBO
    norm: float  # natural-gradient norm of L/γ
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
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 10,
) -> FitResult:
    """Fit q to the target, in place.

    Args:
        q: the posterior, updated in place.
        target: a model, or a function of theta returning the log joint.
        optimizer: built over q; by default `VN(q)`, which finds its own steps on models that can be
            evaluated exactly. For a function pass one with a learning rate: ``fit(q, f, VN(q, lr=0.1))``.
        tolerance: on the natural-gradient norm; by default 1e-5 in float64, 1e-2 in float32.
        max_evaluations: budget of expectations (value, gradient, curvature).
        callbacks: called with the `Record` of each step; a true result stops the run.
        progress: show a bar.
        checkpoint: a file that holds q, the optimizer and the trace; a run that finds it goes on from
            there, bit for bit as if it had not been interrupted (draws included where the estimator
            has a generator of its own, ``Stein(generator=...)``).
        checkpoint_every: steps between two writes; the end of a run is always written.

    Returns:
        The verdict with its reason, the loss and the trace.  An interrupt from the keyboard ends the
        run as a callback would: q keeps its last accepted state.

    Raises:
        InputError: a tolerance, a budget or an interval that is not positive, an optimizer over another
            q, a checkpoint of another problem.

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
    if checkpoint_every < 1:
        raise InputError(f"checkpoint_every counts steps and must be at least 1; got {checkpoint_every}.")
    callbacks, target = tuple(callbacks), as_target(target)

    exact = optimizer.evaluates_exactly(target)
    trace, step, seconds, done, expected = _resumed(checkpoint, q, optimizer)
    start, first, stalled = time.perf_counter() - seconds, optimizer.evaluations - done, 0
    reason, converged, status = "", False, None
    with tqdm(total=max_evaluations, disable=not progress, desc=type(optimizer).__name__, unit="eval") as bar:
        try:
            while True:
                if checkpoint is not None:
                    # before the evaluation, which may draw
                    done, seconds = optimizer.evaluations - first, time.perf_counter() - start
                    snapshot = _snapshot(q, optimizer, trace, step, seconds, done)
                    if trace and len(trace) % checkpoint_every == 0:
                        _save(checkpoint, snapshot)
                status = optimizer.evaluate(target)
                if expected is not None:
                    _check_same_problem(checkpoint, expected, status.loss)
                    expected = None
                norm = status.norm2.sqrt() / (target.temperature or 1.0)
                members, alive = norm <= tolerance, status.loss.isfinite() & norm.isfinite()
                record = _record(optimizer, status.loss, norm, alive, step, first, time.perf_counter() - start)
                trace.append(record)
                _show(bar, record)
                converged = bool(members.all())
                reason = _why_stop(record, trace[0], members, alive, tolerance, max_evaluations, stalled, exact)
                answers = [callback(record) for callback in callbacks]
                if any(answers) and not reason:
                    reason = f"because a callback stopped it at natural-gradient norm {record.norm:.2g}."
                if reason:
                    break
                optimizer.step(target)
                assert optimizer.last is not None
                step = float(optimizer.last.rho.min())
                stalled = 0 if bool((optimizer.last.accepted & alive & ~members).any()) else stalled + 1
            bar.total = bar.n if converged else bar.total  # done is done, whatever is left of the budget
            bar.refresh()
        except KeyboardInterrupt:
            reason = reason if converged else "because it was interrupted."
    if status is None:
        raise KeyboardInterrupt
    if checkpoint is not None:
        _save(checkpoint, snapshot)
    last = trace[-1]
    return FitResult(converged, reason, last.loss, last.norm, last.evaluations, members, trace)


def _snapshot(
    q: Posterior, optimizer: NaturalGradientVI, trace: list[Record], step: float, seconds: float, done: int
) -> dict[str, Any]:
    """Where a run stands between two steps; valid until the next one."""
    return {
        "posterior": q.state_dict(),
        "optimizer": optimizer.state_dict(),
        "trace": [tuple(record) for record in trace],
        "step": step,
        "method": type(optimizer).__name__,
        "loss": optimizer.state[q.mean_probe].get("loss") if optimizer.step_size.needs_trial and trace else None,
        "seconds": seconds,
        # the value a trial left behind is computed anew on resuming
        "evaluations": done - 1 if optimizer.step_size.needs_trial and trace else done,
    }


def _save(path: str | Path, snapshot: dict[str, Any]) -> None:
    """Write to a new file, then give it the name: a kill in between leaves the old one whole."""
    path = Path(path)
    new = path.with_name(path.name + ".new")
    torch.save(snapshot, new)
    os.replace(new, path)


def _resumed(
    path: str | Path | None, q: Posterior, optimizer: NaturalGradientVI
) -> tuple[list[Record], float, float, int, Tensor | None]:
    """Load a checkpoint if there is one: trace, last step, seconds, evaluations so far, and the loss at q if known."""
    if path is None or not Path(path).exists():
        return [], 0.0, 0.0, 0, None
    try:
        state = torch.load(path, weights_only=True, map_location=q.mean_probe.device)
        shapes = {name: value.shape for name, value in state["posterior"].items()}
    except (RuntimeError, KeyError, AttributeError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} is no checkpoint of fit ({error}). Remove it, or name another file.") from error
    mine = {name: value.shape for name, value in q.state_dict().items()}
    if shapes != mine:
        raise InputError(
            f"{path} holds another posterior, {_shown(shapes)} where this one has {_shown(mine)}. "
            "Remove it, or name another file."
        )
    if state["method"] != type(optimizer).__name__:
        raise InputError(
            f"{path} is a run of {state['method']}, this is {type(optimizer).__name__}. "
            "Remove it, or name another file."
        )
    q.load_state_dict(state["posterior"])
    optimizer.load_state_dict(state["optimizer"])
    records = [Record(*values) for values in state["trace"]]
    return records, state["step"], state["seconds"], state["evaluations"], state["loss"]


def _check_same_problem(path: str | Path | None, expected: Tensor, loss: Tensor) -> None:
    """The loss at the saved q must be the saved one."""
    if bool(((loss - expected.to(loss)).abs() > 1e-6 * loss.abs().clamp_min(1.0)).any()):
        raise InputError(
            f"{path} belongs to another problem: at its q the negative ELBO was {float(expected.sum()):.6g}, "
            f"here it is {float(loss.sum()):.6g}. Remove it, or name another file."
        )


def _shown(shapes: dict[str, torch.Size]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())


def _why_stop(
    record: Record,
    first: Record,
    members: Tensor,
    alive: Tensor,
    tolerance: float,
    budget: int,
    stalled: int,
    exact: bool,
) -> str:
    """The reason to end the run here, or nothing."""
    at = f"natural-gradient norm {record.norm:.2g} against a tolerance of {tolerance:.2g}"
    if bool(members.all()):
        return f"natural-gradient norm {record.norm:.2g}."
    if not bool((alive & ~members).any()):  # nobody is left who could get anywhere
        if members.ndim and bool(members.any()):
            lost = int((~alive).sum())
            return (
                f"because the negative ELBO of {lost} of {members.numel()} members is not finite; the others converged."
            )
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
        remedy = (
            "Raise max_evaluations."
            if exact
            else "Its gradients are noisy and the norm has a floor: judge the run by its loss, or use more draws and "
            "a smaller lr."
        )
        return f"because the budget of {budget} evaluations is used up ({at}). {remedy}"
    return ""


def _record(
    optimizer: NaturalGradientVI,
    loss: Tensor,
    norm: Tensor,
    alive: Tensor,
    step: float,
    first: int,
    seconds: float,
) -> Record:
    seen = alive if bool(alive.any()) else torch.ones_like(alive)
    return Record(
        optimizer.evaluations - first,
        float(loss[seen].sum()),
        float(norm[seen].max()),
        step,
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
