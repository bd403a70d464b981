"""The front door: step until the natural gradient vanishes, and say plainly when it did not.

The norm |∇L|_F⁻¹/γ of the natural gradient is free of units, of coordinates and of the temperature:
near a well-conditioned optimum L/γ is about half its square, in nats, above the minimum.

A posterior names its engine by a word, its attribute ``engine``; where that is empty, as for a Gaussian, the target
names it.  The engine's own module reads the rest of the `Request`, and refuses what it cannot do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_flag, read_number, read_path
from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.fitting.loop import Engine, Loop, checked_callbacks
from torchngvi.fitting.records import FitResult, Record
from torchngvi.fitting.stopping import (
    Criterion,
    Evaluations,
    Gradients,
    NormBelow,
    Seconds,
    Stalled,
    Unimproved,
    joined,
)
from torchngvi.interfaces import Posterior, Target
from torchngvi.models import GeneralizedLinear
from torchngvi.models.log_joint import as_target, read_posterior
from torchngvi.numerics.arrays import tracked
from torchngvi.optim import NaturalGradientVI, Watch
from torchngvi.posteriors.gaussian import Gaussian

# the module of each engine, and in it the function that makes of a `Request` the engine and what ends its run; a
# subclass of a posterior, or of a target, asks for it by ``engine = "..."``
ENGINES = {
    "averages": "torchngvi.fitting.sample_average:averages_of",  # a log joint without an optimizer
    "chunks": "torchngvi.fitting.steps:chunks_of",  # a regression: steps, of a large batch some members at a time
    "flat": "torchngvi.fitting.smoothed:flat_steps_of",  # a flat posterior: until a smoothed bound stops rising
    "groups": "torchngvi.fitting.steps:passes_of",  # a mixed model in batches of groups: a pass for each step
    "mixture": "torchngvi.fitting.mixtures:mixture_steps_of",  # natural gradients of components and weights
    "product": "torchngvi.fitting.coordinate_sweeps:sweeps_of",  # a product and a `FactorGraph`: coordinate ascent
    "steps": "torchngvi.fitting.steps:steps_of",  # an optimizer is given, or E_q[ℓ] has a closed form
    "warped": "torchngvi.fitting.warped:warped_averages_of",  # the Gaussian, then its curves
}


@dataclass(frozen=True)
class Request:
    """The arguments of `torchngvi.fit` that engines read, checked."""

    q: Posterior
    target: Target
    optimizer: NaturalGradientVI | None
    tolerance: float | None
    max_evaluations: int
    stop: Criterion | None
    batch_size: int | None
    batch_groups: int | None
    examine: bool

    def engine(self, word: str = "") -> tuple[Engine, Criterion]:
        """Make the engine that a word names, by default that of q, or else of the target, and what ends its run."""
        own = "groups" if self.batch_groups is not None else self.q.engine or self.target.engine
        if (asked := word or own) not in ENGINES:
            raise InputError(
                f"{type(self.q).__name__} and {type(self.target).__name__} name the engine {asked!r}, which the table "
                f"torchngvi.fitting.fit.ENGINES does not have; it has {', '.join(ENGINES)}. Add a row, or call an "
                "attribute of your own something else than engine."
            )
        module, function = ENGINES[asked].split(":")
        found: tuple[Engine, Criterion] = getattr(import_module(module), function)(self)
        return found

    def tolerance_or(self, usual: Callable[[Posterior], float]) -> float:
        """Return the tolerance that the user gave, or the usual one for q."""
        return usual(self.q) if self.tolerance is None else self.tolerance

    def until_small(self, tolerance: float) -> Criterion:
        """Return what ends a run to a small norm, in the order in which the reasons count."""
        return joined(
            NormBelow(tolerance) | Stalled(int(Watch.rejections)) | Evaluations(self.max_evaluations), self.stop
        )

    def until_unimproved(self, tolerance: float | None, patience: int = 200) -> Criterion:
        """Return what ends a run whose smoothed bound is watched, with a tolerance on the norm or without."""
        ends = Unimproved(patience) | Evaluations(self.max_evaluations)
        return joined(NormBelow(tolerance) | ends if tolerance else ends, self.stop)


def tolerance_of(q: Posterior, double: float = 1e-5, single: float = 1e-2) -> float:
    """Return the usual tolerance on the norm where E_q[ℓ] is known to rounding."""
    return double if torch.finfo(q.mean_probe.dtype).eps < 1e-12 else single


def tolerance_by_draws(q: Posterior, wide: float = 100, usual: float = 0.1) -> float:
    """Return the usual tolerance where E_q[ℓ] is an average over draws: 0.005 nats for each ``wide`` coordinates."""
    return usual * max(q.dim / wide, 1.0) ** 0.5


@tracked
def fit(
    q: Posterior,
    target: Target | Callable[[Tensor], Tensor],
    optimizer: NaturalGradientVI | None = None,
    *,
    tolerance: float | None = None,
    max_evaluations: int = 1000,
    max_gradients: int | None = None,
    max_seconds: float | None = None,
    stop: Criterion | None = None,
    callbacks: Iterable[Callable[[Record], Any]] = (),
    progress: bool = True,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 10,
    batch_size: int | None = None,
    batch_groups: int | None = None,
    examine: bool = True,
) -> FitResult:
    """Fit q to the target, in place.

    Args:
        q: the posterior, updated in place. For a log joint its mean is where a mode is looked for, and q itself
            the start where no better one is found there.
        target: a model, or a function of theta returning the log joint.
        optimizer: built over q; by default `VN(q)`, which finds its own steps, or for a regression whose log likelihood
            is concave `NewtonCG(q)`; both go to the mode of such a model first, where that is better than q, after a
            few passes that are counted as gradients. For a log joint without a closed form it is VN over averages that
            grow, see `torchngvi.fitting.sample_average`; for a flat posterior, such as a flow, `IFVB(q)`, whose norm is
            never small: the run ends when the mean of the bound over 100 steps has had no new best for 200, which does
            not say that it has converged; the best is put back, see `torchngvi.fitting.smoothed`. An exponential family
            begins at the posterior where the log joint is found to be conjugate to it, and has converged there. A
            warped posterior has steps of its own, see `torchngvi.fitting.warped`, after those of its Gaussian.
        tolerance: on the natural-gradient norm, with three standard errors where it is estimated from draws; by
            default 1e-5 in float64, 1e-2 in float32, and 0.1 for a log joint or a mixture: about half its square, in
            nats, is lost. Under a q over a forest, as for a `FactorTarget`, with D > 100 it is 0.1 √(D/100), as
            accurate in each coordinate; of a warped posterior with D > 20 0.1 √(D/20).
        max_evaluations: budget of expectations (value, gradient, curvature), one for all members of a batch.
        max_gradients, max_seconds: budgets of the log joint and of time, those of the criteria ``Gradients`` and
            ``Seconds``; all that the fit does is counted, the search for a start and the checks too.
        stop: what else ends the run, one criterion of `torchngvi.fitting` or several combined with ``|``; the tolerance
            and the budgets above stay in force.
        callbacks: called with the `Record` of each step; a true result stops the run.
        progress: show a bar.
        checkpoint: a file that holds q, the optimizer and the trace; a run that finds it goes on from there, bit for
            bit as if it had not been interrupted, draws included (those of torch's default generator, and of the
            estimator's own). One of other data, another optimizer or other settings is refused; the tolerance and the
            budget may be others. A write that fails is a `CheckpointWarning`, and the run goes on.
        checkpoint_every: records between two writes; the start of a run, its end, and an interrupt from the keyboard
            are always written.
        batch_size: of a `GeneralizedLinear` with many rows: begin with one pass over mini-batches of so many,
            the prior known from the first one on, which saves most of the passes over all of them. A
            `DataLogJoint` or `Streamed` begins so by itself.
        batch_groups: of a `MixedModel` with more groups than fit into memory at once: every evaluation is a pass
            over batches of so many, in which each group is brought to its best given the global parameters, and the
            steps are those of the globals alone. The optimum is the same; see `torchngvi.models.mixed_batches`.
        examine: of a log joint without an optimizer: say in the end whether a Gaussian fits, which takes as much of the
            log joint as the fit at most, mostly 1,024 values; `FitResult.summary` has the table. Data in batches are
            left to that.

    Returns:
        The verdict with its reason, the loss and the trace.  An interrupt from the keyboard ends the
        run as a callback would: q is that of the last record, or before the first the best start known.

    Raises:
        InputError: something that is no posterior in the place of q, a tolerance, a budget or an interval that is not
            positive, an optimizer over another q, a checkpoint that cannot be written or read, or is of another run.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.eye(2).double(), [1.0, 0.0], prior_precision=1.0)
    >>> result = fit(CholeskyGaussian(2, dtype=torch.float64), model, progress=False)
    >>> result.converged, round(result.loss, 4)
    (True, 1.3865)
    """
    q, target = read_posterior("fit", q, target), as_target(target)
    processes = target.processes or Processes.alone()
    processes.same_draws()
    examine = read_flag("examine", examine)
    if tolerance is not None:
        tolerance = read_number("tolerance", tolerance, "bounds the natural-gradient norm", above=0)
        if tolerance**2 == 0:
            raise InputError(f"tolerance bounds the natural-gradient norm; got {tolerance!r}, whose square is 0.")
    checkpoint = None if checkpoint is None else read_path("checkpoint", checkpoint, "is the path of a file, or None")
    every = read_count("checkpoint_every", checkpoint_every, "counts steps")
    callbacks = checked_callbacks(callbacks)
    if batch_size is not None:
        if not isinstance(target, GeneralizedLinear) or not isinstance(q, Gaussian) or q.batch_shape:
            raise InputError(
                "batch_size is for one posterior of a GeneralizedLinear model; give a log joint its batches by "
                "DataLogJoint."
            )
        batch_size = read_count("batch_size", batch_size, "counts rows")
    groups = target.groups_at_once if batch_groups is None else batch_groups
    request = Request(q, target, optimizer, tolerance, max_evaluations, stop, batch_size, groups, examine)
    engine, criteria = request.engine()
    criteria = criteria if max_gradients is None else criteria | Gradients(max_gradients)
    criteria = criteria if max_seconds is None else criteria | Seconds(max_seconds)
    loop = Loop(
        engine,
        criteria,
        callbacks=callbacks,
        progress=progress,
        checkpoint=checkpoint,
        every=every,
        processes=processes,
    )
    return replace(loop.run(), target=target, posterior=q)
