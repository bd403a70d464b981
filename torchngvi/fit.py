"""The loop: step until the natural gradient vanishes, and say plainly when it did not.

The norm |∇L|_F⁻¹/γ of the natural gradient is free of units, of coordinates and of the temperature:
near a well-conditioned optimum L/γ is about half its square, in nats, above the minimum.
"""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchngvi import checkpoints, records
from torchngvi.arguments import as_target, bound, count
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Posterior, Target, TractableTarget
from torchngvi.methods import VN
from torchngvi.models import GeneralizedLinear
from torchngvi.modes import tracked
from torchngvi.optim import NaturalGradientVI, Status
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.records import FitResult, Record
from torchngvi.sample_average import fit_by_draws
from torchngvi.streaming import stream_rows

_BY_DRAWS = 0.1  # tolerance where E_q[ℓ] is an average over draws: about 0.005 nats
_STALL = 30  # rejected steps in a row after which nothing more is to be had
_ERRORS = 3.0  # standard errors that a norm from draws must leave room for
_REPEATS = 16  # fresh evaluations at one q, whose scatter tells the standard error of their mean
_NOISY = (
    "Its gradients are noisy and the norm has a floor: judge the run by its loss, or use more draws and a smaller lr."
)
_CLIMB = 100.0  # nats, beside the size of the first loss, by which a run ends far above its start


class _Kept(NamedTuple):
    """The last q that was evaluated, complete: what an interrupt goes back to, and what a checkpoint holds."""

    coordinates: Coordinates
    members: Tensor  # converged, (*batch,)
    records: int
    state: checkpoints.State | None


@tracked
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
    batch_size: int | None = None,
) -> FitResult:
    """Fit q to the target, in place.

    Args:
        q: the posterior, updated in place. For a log joint its mean is where a mode is looked for, and q itself
            the start where no better one is found there.
        target: a model, or a function of theta returning the log joint.
        optimizer: built over q; by default `VN(q)`, which finds its own steps; for a log joint without a closed
            form over averages that grow, see `torchngvi.sample_average`.
        tolerance: on the natural-gradient norm, with three standard errors where it is estimated from draws; by
            default 1e-5 in float64, 1e-2 in float32, and 0.1 for a log joint: about half its square, in nats, is lost.
        max_evaluations: budget of expectations (value, gradient, curvature).
        callbacks: called with the `Record` of each step; a true result stops the run.
        progress: show a bar.
        checkpoint: a file that holds q, the optimizer and the trace; a run that finds it goes on from there, bit for
            bit as if it had not been interrupted, draws included (those of torch's default generator, and of the
            estimator's own). One of other data, another optimizer or other settings is refused; the tolerance and the
            budget may be others. A write that fails is a `CheckpointWarning`, and the run goes on.
        checkpoint_every: steps between two writes; the end of a run, or an interrupt from the keyboard, is always
            written. A fit by growing averages is written at the start of each of them, and does its last one again.
        batch_size: of a `GeneralizedLinear` with many rows: begin with one pass over mini-batches of so many,
            the prior known from the first one on, which saves most of the passes over all of them. A
            `DataLogJoint` begins so by itself.

    Returns:
        The verdict with its reason, the loss and the trace.  An interrupt from the keyboard ends the
        run as a callback would: q is that of the last record.

    Raises:
        InputError: a tolerance, a budget or an interval that is not positive, an optimizer over another
            q, a checkpoint that cannot be written or read, or is of another run.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.eye(2).double(), [1.0, 0.0], prior_precision=1.0)
    >>> result = fit(CholeskyGaussian(2, dtype=torch.float64), model, progress=False)
    >>> result.converged, round(result.loss, 4)
    (True, 1.3865)
    """
    by_draws = optimizer is None and isinstance(q, Gaussian) and not isinstance(as_target(target), TractableTarget)
    optimizer = VN(q) if optimizer is None else optimizer
    if not isinstance(optimizer, NaturalGradientVI) or optimizer.posteriors != [q]:
        raise InputError("the optimizer must hold the posterior that is fitted, and no other; build it as VN(q).")
    if tolerance is None:
        tolerance = 1e-5 if torch.finfo(q.mean_probe.dtype).eps < 1e-12 else 1e-2
        tolerance = _BY_DRAWS if by_draws else tolerance
    tolerance = bound("tolerance", tolerance, "bounds the natural-gradient norm")
    max_evaluations = count("max_evaluations", max_evaluations, "is a budget of expectations")
    checkpoint_every = count("checkpoint_every", checkpoint_every, "counts steps")
    callbacks, target = _checked_callbacks(callbacks), as_target(target)
    if batch_size is not None:
        batch_size = _checked_batch_size(q, target, batch_size)
    if by_draws:
        assert isinstance(q, Gaussian)
        return fit_by_draws(q, target, tolerance, max_evaluations, callbacks, progress, checkpoint)

    file = None if checkpoint is None else checkpoints.of_fit(checkpoint, q, target, optimizer)
    saved = None if file is None else checkpoints.resumed(file, q, optimizer, target)
    if batch_size is not None and saved is None:
        assert isinstance(q, Gaussian)
        assert isinstance(target, GeneralizedLinear)
        stream_rows(q, target, batch_size, seed=int(torch.randint(2**31, ())))
    exact = optimizer.evaluates_exactly(target)
    remedy = "Raise max_evaluations." if exact else _NOISY
    trace: list[Record] = []
    step, stalled = 0.0, 0
    start, before = time.perf_counter(), (optimizer.evaluations, optimizer.gradients)
    if saved is not None:
        trace, start = [Record(*values) for values in saved["trace"]], start - saved["seconds"]
        step, stalled, remedy = saved["step"], saved["stalled"], saved["remedy"]
        # the evaluation at the saved q is done again, and has been counted
        before = before[0] + 1 - saved["spent"][0], before[1] + optimizer.last_cost - saved["spent"][1]
    reason, converged, origin = "", False, q.snapshot()
    kept: _Kept | None = None
    with tqdm(total=max_evaluations, disable=not progress, desc=type(optimizer).__name__, unit="eval") as bar:
        try:
            while True:
                here = q.snapshot()
                # before the evaluation, which may draw
                state = None if file is None else checkpoints.captured(file, q, optimizer)
                status = optimizer.evaluate(target)
                if state is not None:
                    spent = optimizer.evaluations - before[0], optimizer.gradients - before[1]
                    now = {"loss": status.loss.clone(), "spent": spent, "seconds": time.perf_counter() - start}
                    state |= {**now, "step": step, "stalled": stalled, "remedy": remedy}
                norm, alive = _norm(status, target)
                known, left = exact, max_evaluations - (optimizer.evaluations - before[0])
                small = bool(alive.any() and (norm <= tolerance)[alive].all())
                if small and not exact and target.comparable and left >= _REPEATS:
                    # one evaluation is small by chance too, and of a mini-batch says nothing of the other rows
                    status, known = optimizer.averaged(target, _REPEATS), True
                    norm, alive = _norm(status, target)
                    remedy = f"It was {float(norm[alive].max()):.2g} over {_REPEATS} fresh evaluations. {_NOISY}"
                members = (norm <= tolerance) & known
                record = records.record(optimizer, status.loss, norm, alive, step, before, time.perf_counter() - start)
                trace.append(record)
                kept = _Kept(here, members, len(trace), state)
                if (kept.records - 1) % checkpoint_every == 0:
                    _save(file, kept, trace)
                records.show(bar, record)
                converged = bool(members.all())
                reason = _why_stop(record, trace[0], members, alive, tolerance, max_evaluations, stalled, remedy)
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
            _go_back(q, origin if kept is None else kept.coordinates)
            if kept is None:
                raise
            del trace[kept.records :]
            reason = reason if converged else "because it was interrupted."
    assert kept is not None
    _save(file, kept, trace)
    last = trace[-1]
    return FitResult(converged, reason, last.loss, last.norm, last.evaluations, kept.members, trace)


def _save(file: checkpoints.Checkpoint | None, kept: _Kept, trace: list[Record]) -> None:
    """What was evaluated last, with the records before it: its own is made again."""
    if file is not None and kept.state is not None:
        file.save({**kept.state, "trace": [tuple(record) for record in trace[: kept.records - 1]]})


def _go_back(q: Posterior, coordinates: Coordinates) -> None:
    with torch.no_grad():
        q.assign(coordinates, torch.ones(q.batch_shape, dtype=torch.bool, device=q.mean_probe.device))


def _norm(status: Status, target: Target) -> tuple[Tensor, Tensor]:
    """The natural norm of L/γ with its standard errors, and where it is finite, (*batch,)."""
    norm = status.norm2.sqrt() if status.noise2 is None else status.norm2.sqrt() + _ERRORS * status.noise2.sqrt()
    norm = norm / (target.temperature or 1.0)
    return norm, status.loss.isfinite() & norm.isfinite()


def _checked_callbacks(callbacks: Any) -> tuple[Callable[[Record], Any], ...]:
    functions = tuple(callbacks) if isinstance(callbacks, Iterable) else None
    if functions is None or not all(callable(function) for function in functions):
        raise InputError(
            f"callbacks is a list of functions that take the Record of a step; got {callbacks!r}. Of one function f "
            "pass [f]."
        )
    return functions


def _checked_batch_size(q: Posterior, target: Target, batch_size: int) -> int:
    if not isinstance(target, GeneralizedLinear) or not isinstance(q, Gaussian) or q.batch_shape:
        raise InputError(
            "batch_size is for one posterior of a GeneralizedLinear model; give a log joint its batches by "
            "DataLogJoint."
        )
    return count("batch_size", batch_size, "counts rows")


def _why_stop(
    record: Record,
    first: Record,
    members: Tensor,
    alive: Tensor,
    tolerance: float,
    budget: int,
    stalled: int,
    remedy: str,
) -> str:
    """The reason to end the run here, or nothing."""
    at = f"natural-gradient norm {record.norm:.2g} against a tolerance of {tolerance:.2g}"
    climb = ""
    if bool(alive.all()) and record.loss - first.loss > _CLIMB + abs(first.loss):
        climb = (
            f" The negative ELBO climbed from {first.loss:.6g} to {record.loss:.6g}, far above its start: use a "
            "smaller lr or radius, or neither."
        )
    if bool(members.all()):
        return f"natural-gradient norm {record.norm:.2g}.{climb}"
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
            f"may be needed.{climb}"
        )
    if record.evaluations >= budget:
        return f"because the budget of {budget} evaluations is used up ({at}).{climb or f' {remedy}'}"
    return ""
