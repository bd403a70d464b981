"""Training in two ways.  Without an optimizer the hyper-parameters are learnt by L-BFGS, `rounds`, and q after them.

With one, joint training: natural steps for q, any torch optimizer for the hyper-parameters, one evaluation a batch.
How long the natural steps are is said in `natural_steps`.  In a float32 model the sums over all data are in float64,
and so is q from the first mini-batch whose step float32 cannot take; at the end q has the model's dtype again.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP

from torchngvi.adapters.gpytorch.batches import Batch, all_rows, check_order
from torchngvi.adapters.gpytorch.epochs import Epochs
from torchngvi.adapters.gpytorch.inducing import choose_inducing_points, left_open
from torchngvi.adapters.gpytorch.latents import latents_of
from torchngvi.adapters.gpytorch.lent import lent_posterior
from torchngvi.adapters.gpytorch.memory import forget, kept_modes
from torchngvi.adapters.gpytorch.refinement import refine_svgp, restored_dtype
from torchngvi.adapters.gpytorch.rounds import Rounds
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
    """The `FitResult` of `train_svgp`, of which a record is an epoch or a round, with what only training has to tell.

    Its loss is the negative ELBO per datum: the mean over the batches of the last epoch, or that at the optimal q for
    the rows of the last round, less the log priors.  It never says that the hyper-parameters have converged; the
    verdict on q at the last of them is ``refined``, where it was asked for.
    """

    rejections: int = 0  # natural steps that were not taken
    refined: FitResult | None = None  # the verdict on q, where asked
    interrupted: bool = False  # from the keyboard, within an epoch or a round that is not counted
    unit: str = "epochs"  # or "rounds", without an optimizer of the hyper-parameters

    @property
    def losses(self) -> list[float]:
        """The negative ELBO per datum of each epoch or round."""
        return [record.loss for record in self.trace]

    def __str__(self) -> str:
        """The result in one line."""
        last = f"negative ELBO per datum {self.losses[-1]:.4f}" if self.losses else "none complete"
        if len(self.losses) > 1:
            before = "an epoch" if self.unit == "epochs" else "a round"
            last += f", {self.losses[-2] - self.losses[-1]:.2g} less than {before} before"
        if self.unit == "epochs":
            last += f", {self.rejections} natural steps not taken"
        verdict = "" if self.refined is None else f"; q {self.refined}"
        stopped = ", then interrupted" if self.interrupted else ""
        return f"{len(self.losses)} {self.unit}{stopped}, {last}{verdict}"


def train_svgp(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int | None = None,
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
    """Train a sparse GP: ``train_svgp(model, likelihood, (x, y))``, without a learning rate, or in mini-batches.

    Given data alone, all hyper-parameters and the inducing points are learnt by L-BFGS at the optimal q (for a Gaussian
    likelihood on the collapsed bound of Titsias 2009), in rounds on growing parts of the rows, and q is refined on all
    rows at the end.  Inducing points that coincide, as ``torch.zeros(M, features)``, are put on rows of the data first.
    This is the way for rows that fit into memory.

    Given ``num_data`` and a ``hyper_optimizer``, q moves by natural gradients and the hyper-parameters by any torch
    optimizer, from one evaluation a batch: for data that come in batches, several latent functions, several processes.

    Use either for a sparse GP with the whitened strategy, the first also with the unwhitened one; for other strategies
    and objectives use `natural_optimizer` in a loop of your own.

    Args:
        model: an `ApproximateGP` with a `VariationalStrategy` over a `NaturalGradientVariationalDistribution`; with a
            ``hyper_optimizer`` also within an `IndependentMultitaskVariationalStrategy` or an `LMCVariationalStrategy`,
            without one also over a full Gaussian of GPyTorch, as `CholeskyVariationalDistribution`, which then holds
            what was found, and with an `UnwhitenedVariationalStrategy` over one.
        likelihood: see `SparseGP`.
        batches: a ``DataLoader`` of (x, y), or a list of such pairs; gone through once an epoch.  Without ``num_data``
            also one pair (x, y) of all rows.
        num_data: the number of rows of an epoch.  With it and without an optimizer the hyper-parameters stay, and q is
            refined alone.
        hyper_optimizer: over parameters of the model and the likelihood, as you like it.
        epochs: the number of passes over the data, or the largest number of rounds.
        refine: end with `refine_svgp`, at the final hyper-parameters; done in any case without an optimizer.
        callbacks: called with the epoch, or the round, and its loss; a true result ends them.  They may evaluate the
            model, in whichever mode.
        progress: show a bar.
        checkpoint: a file, written after each epoch or round; where it exists, the run goes on from there, with torch's
            default generator, and those of a ``DataLoader`` and its samplers, as they were.
        stop: a further criterion that ends the epochs or rounds, asked after each, as ``Seconds(60)`` of
            `torchngvi.fitting`.
        group: a `torchngvi.Processes`, or a group of torch.distributed, whose processes train one model together, each
            on ``batches`` of its own rows, of which ``num_data`` counts those of all; a batch is what the processes
            have at the same time, and one that has none left waits with nothing. All begin from the model of rank 0,
            which shows the bar, calls the callbacks and writes the checkpoint. None for one process.

    Returns:
        What was done.  An interrupt from the keyboard ends the run, with everything as the last step left it, or the
        last round.

    Raises:
        InputError: no data, another number of rows than ``num_data``, ``refine`` or no hyper-optimizer with several
            processes, on which hyper-parameters or settings differ, a hyper-optimizer without ``num_data``, or one that
            holds q or none of the parameters or evaluates more than once a step, a loss that is not finite, a
            checkpoint that cannot be written or is of another model, optimizer or other data: they are told by tensors
            in memory, and by the loss of the first batch of an epoch, but for an iterator, which cannot be looked into.
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
    >>> y = torch.sin(3 * x[:, 0])
    >>> train_svgp(model, likelihood, (x, y), progress=False).refined.converged
    True

    In mini-batches:

    >>> adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    >>> batches = list(zip(x.split(25), y.split(25)))
    >>> len(train_svgp(model, likelihood, batches, 100, adam, epochs=5, progress=False).losses)
    5
    """
    if isinstance(num_data, torch.Tensor):
        raise InputError(
            "num_data is the number of rows of an epoch; got a tensor. Give inputs and targets as one pair, "
            "train_svgp(model, likelihood, (x, y))."
        )
    check_order(likelihood, batches)
    if num_data is None:
        _check_alone(hyper_optimizer, group)
        return _in_rounds(model, likelihood, batches, epochs, _checked(callbacks), progress, checkpoint, stop)
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


def _check_alone(hyper_optimizer: object, group: Any) -> None:
    """Without num_data there is neither an optimizer nor another process."""
    if hyper_optimizer is not None:
        raise InputError(
            "num_data counts the rows of an epoch, by which a batch is weighed; give it beside hyper_optimizer. "
            "Without both the hyper-parameters are learnt by L-BFGS."
        )
    if group is not None:
        raise InputError(
            "hyper-parameters are learnt without an optimizer in one process, on rows in memory. With group= give "
            "num_data and a hyper_optimizer."
        )


def _in_rounds(
    model: ApproximateGP,
    likelihood: Likelihood,
    data: Any,
    rounds: int,
    callbacks: tuple[Callable[[int, float], Any], ...],
    progress: bool,
    checkpoint: str | Path | None,
    stop: Criterion | None,
) -> TrainingResult:
    """Rounds of L-BFGS for the hyper-parameters, then q on all rows."""
    with lent_posterior(model) as returned:
        model.train()
        likelihood.train()
        latents = latents_of(model, likelihood)
        x, y = all_rows(data, latents)

        def told(callback: Callable[[int, float], Any], number: int, loss: float) -> Any:
            with returned(), kept_modes(model, likelihood):  # q is the model's own, as after the run
                return callback(number, loss)

        trained = replace(_untrained("because no round was run."), unit="rounds")
        if rounds > 0 and any(p.requires_grad for p in (*model.parameters(), *likelihood.parameters())):
            engine = Rounds(model, likelihood, x, y, rounds)
            told_by = tuple(functools.partial(told, callback) for callback in callbacks)
            trained = _trained(engine, joined(Gradients(rounds), stop), told_by, progress, checkpoint)
        elif left_open(latents.strategy):
            choose_inducing_points(latents.strategy, x)
        forget(model)
        if trained.interrupted:
            return trained
        return replace(trained, refined=refine_svgp(model, likelihood, [(x, y)], progress=progress))


def _untrained(reason: str) -> TrainingResult:
    return TrainingResult(False, reason, math.nan, math.nan, 0, torch.tensor(False), [])


def _trained(
    engine: Epochs | Rounds,
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
            result = _untrained(f"{_INTERRUPTED} before the first {engine.unit_of_a_record} was complete.")
        told_by_all = {part.name: getattr(result, part.name) for part in fields(FitResult)}
        interrupted, unit = result.reason.startswith(_INTERRUPTED), f"{engine.unit_of_a_record}s"
        return TrainingResult(**told_by_all, rejections=engine.rejections, interrupted=interrupted, unit=unit)


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
            "rows in memory to train_svgp(model, likelihood, (x, y)), which steps by L-BFGS itself."
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
