"""Joint training: natural steps for q, any torch optimizer for the hyper-parameters, one evaluation a batch.

How long the natural steps are is said in `natural_steps`.  In a float32 model the sums over all data are in float64,
and so is q from the first mini-batch whose step float32 cannot take; at the end q has the model's dtype again.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP

from torchngvi.adapters.gpytorch.batches import Batch
from torchngvi.adapters.gpytorch.epochs import Epochs
from torchngvi.adapters.gpytorch.memory import forget, kept_modes
from torchngvi.adapters.gpytorch.refinement import refine_svgp, restored_dtype
from torchngvi.adapters.gpytorch.settings import of_run
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
from torchngvi.distributed import Processes, processes_of, synchronize
from torchngvi.errors import InputError
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.records import FitResult, Record
from torchngvi.fitting.stopping import Criterion, Gradients, joined
from torchngvi.models.shards import threads
from torchngvi.posteriors.gaussian import Gaussian

_INTERRUPTED = "because it was interrupted"


@dataclass(frozen=True)
class TrainingResult(FitResult):
    """The `FitResult` of `train_svgp`, of which a record is an epoch, with what only joint training has to tell.

    Its loss is the negative ELBO per datum, the mean over the batches of the last epoch.  It never says that training
    has converged, since hyper-parameters move by an optimizer of the user's own; the verdict on q at the last of them
    is ``refined``, where it was asked for.
    """

    rejections: int = 0  # natural steps that were not taken
    refined: FitResult | None = None  # the verdict on q, where asked
    interrupted: bool = False  # from the keyboard, within an epoch that is not counted

    @property
    def losses(self) -> list[float]:
        """The negative ELBO per datum of each epoch."""
        return [record.loss for record in self.trace]

    def __str__(self) -> str:
        """The result in one line."""
        last = f"negative ELBO per datum {self.losses[-1]:.4f}" if self.losses else "none complete"
        if len(self.losses) > 1:
            last += f", {self.losses[-2] - self.losses[-1]:.2g} less than an epoch before"
        verdict = "" if self.refined is None else f"; q {self.refined}"
        stopped = ", then interrupted" if self.interrupted else ""
        return f"{len(self.losses)} epochs{stopped}, {last}, {self.rejections} natural steps not taken{verdict}"


def train_svgp(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int,
    hyper_optimizer: torch.optim.Optimizer | None = None,
    *,
    epochs: int = 10,
    refine: bool = False,
    callbacks: Iterable[Callable[[int, float], Any]] = (),
    progress: bool = True,
    checkpoint: str | Path | None = None,
    stop: Criterion | None = None,
    group: Any = None,
) -> TrainingResult:
    """Train q by natural gradients and the hyper-parameters by any torch optimizer, from one evaluation a batch.

    Use it for a sparse GP with the whitened strategy; for other strategies and objectives use `natural_optimizer` in a
    loop of your own.

    Args:
        model: an `ApproximateGP` with a `VariationalStrategy` over a `NaturalGradientVariationalDistribution`, alone or
            within an `IndependentMultitaskVariationalStrategy` or an `LMCVariationalStrategy`.
        likelihood: see `SparseGP`.
        batches: a ``DataLoader`` of (x, y), or a list of such pairs; gone through once an epoch.
        num_data: the number of rows of an epoch.
        hyper_optimizer: over parameters of the model and the likelihood, as you like it; without it the
            hyper-parameters stay and the epochs are not run: `refine_svgp` alone is faster and exact.
        epochs: the number of passes over the data.
        refine: end with `refine_svgp`, at the final hyper-parameters.
        callbacks: called with the epoch and its loss; a true result ends the epochs.  They may evaluate the model, in
            whichever mode.
        progress: show a bar.
        checkpoint: a file, written after each epoch; where it exists, the run goes on from there, with torch's
            default generator, and those of a ``DataLoader`` and its samplers, as they were.
        stop: a further criterion that ends the epochs, asked after each, as ``Seconds(60)`` of `torchngvi.fitting`.
        group: a `torchngvi.Processes`, or a group of torch.distributed, whose processes train one model together, each
            on ``batches`` of its own rows, of which ``num_data`` counts those of all; a batch is what the processes
            have at the same time, and one that has none left waits with nothing. All begin from the model of rank 0,
            which shows the bar, calls the callbacks and writes the checkpoint. None for one process.

    Returns:
        What was done.  An interrupt from the keyboard ends the run, with everything as the last step left it.

    Raises:
        InputError: no data, another number of rows than ``num_data``, ``refine`` or no hyper-optimizer with several
            processes, on which hyper-parameters or settings differ, a hyper-optimizer that holds q or none of the
            parameters or evaluates more than once a step, a loss that is not finite, a checkpoint that cannot be
            written or is of another model, optimizer or other data: they are told by tensors in memory, and by the loss
            of the first batch of an epoch, but for an iterator, which cannot be looked into.
        PairError: a model or a likelihood it cannot serve; the message says what to use.

    >>> import gpytorch
    >>> from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution
    >>> class Model(gpytorch.models.ApproximateGP):
    ...     def __init__(self, Z):
    ...         q = NaturalGradientVariationalDistribution(len(Z))
    ...         super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
    ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> x = torch.linspace(-2, 2, 100)[:, None]
    >>> model, likelihood = Model(x[::10]), gpytorch.likelihoods.GaussianLikelihood()
    >>> adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    >>> batches = list(zip(x.split(25), torch.sin(3 * x[:, 0]).split(25)))
    >>> result = train_svgp(model, likelihood, batches, 100, adam, epochs=5, progress=False)
    >>> len(result.losses), result.losses[-1] < result.losses[0]
    (5, True)
    """
    processes = None if group is None else processes_of(group)
    with processes_of(group).together():
        callbacks = _checked(callbacks)
        if num_data < 1:
            raise InputError(f"num_data counts the rows of an epoch and must be at least 1; got {num_data}.")
        if processes is not None and (refine or hyper_optimizer is None):
            raise InputError(
                "refine_svgp passes over all rows in one process, and here they are spread over "
                f"{processes.world}. Give a hyper_optimizer and leave refine= out."
            )
        if hyper_optimizer is not None:
            model.train()
            likelihood.train()
            q = SparseGP(model, likelihood, []).posterior
            _check_optimizer(hyper_optimizer, q, [*model.parameters(), *likelihood.parameters()])
    trained = _untrained("because no epoch was run.")
    if hyper_optimizer is not None:
        if processes is not None:
            _begin_alike(processes, epochs, model, likelihood, num_data, hyper_optimizer)
        if epochs > 0:
            engine = Epochs(model, likelihood, batches, num_data, hyper_optimizer, epochs, processes)
            trained = _trained(engine, joined(Gradients(epochs), stop), callbacks, progress, checkpoint)
    forget(model)
    if trained.interrupted or not (refine or hyper_optimizer is None):
        return trained
    return replace(trained, refined=refine_svgp(model, likelihood, batches, progress=progress))


def _untrained(reason: str) -> TrainingResult:
    return TrainingResult(False, reason, math.nan, math.nan, 0, torch.tensor(False), [])


def _trained(
    engine: Epochs,
    stop: Criterion,
    callbacks: tuple[Callable[[int, float], Any], ...],
    progress: bool,
    checkpoint: str | Path | None,
) -> TrainingResult:
    """The epochs; q has the dtype of the model again at the end."""

    def told(record: Record) -> bool:
        with kept_modes(engine.model, engine.likelihood):
            answers = [callback(record.gradients - 1, record.loss) for callback in callbacks]
        return any(answers)

    with restored_dtype(engine.gaussian):
        loop = Loop(
            engine,
            stop,
            callbacks=[told],
            progress=progress,
            checkpoint=checkpoint,
            every=1,
            processes=engine.processes,
        )
        try:
            result = loop.run()
        except KeyboardInterrupt:
            if not engine.begun:
                raise
            result = _untrained(f"{_INTERRUPTED} before an epoch was complete.")
        told_by_all = {part.name: getattr(result, part.name) for part in fields(FitResult)}
        rejections, interrupted = engine.natural.optimizer.rejections, result.reason.startswith(_INTERRUPTED)
        return TrainingResult(**told_by_all, rejections=rejections, interrupted=interrupted)


def _begin_alike(
    processes: Processes,
    epochs: int,
    model: ApproximateGP,
    likelihood: Likelihood,
    num_data: int,
    hyper_optimizer: torch.optim.Optimizer,
) -> None:
    """The same settings on all ranks, and the leader's model, likelihood and draws."""
    processes.agree(epochs=epochs, **threads(), **of_run(model, likelihood, (), num_data, hyper_optimizer))
    synchronize(model, group=processes)
    synchronize(likelihood, group=processes)
    processes.same_draws()


def _checked(callbacks: Iterable[Callable[[int, float], Any]]) -> tuple[Callable[[int, float], Any], ...]:
    if callable(callbacks):
        raise InputError("callbacks is a list of functions of the epoch and its loss; put the one you have in a list.")
    return tuple(callbacks)


def _check_optimizer(optimizer: object, q: Gaussian, parameters: list[torch.nn.Parameter]) -> None:
    """One evaluation a step, of hyper-parameters of this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"hyper_optimizer must be a torch optimizer over hyper-parameters; got {type(optimizer).__name__}. "
            "Give torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS evaluates a batch several times a step, and train_svgp evaluates it once. Give Adam or SGD, or "
            "let LBFGS step on DualELBO."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held & {id(part) for part in q.buffers()}:
        raise InputError(
            "hyper_optimizer holds the posterior, which moves by natural gradients; give it model.parameters() and "
            "likelihood.parameters(), which leave q out."
        )
    if not held & {id(p) for p in parameters}:
        raise InputError(
            "hyper_optimizer holds no parameter of this model or likelihood; was it built over an earlier model? "
            "Build it over [*model.parameters(), *likelihood.parameters()]."
        )
