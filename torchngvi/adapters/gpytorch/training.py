"""The ways to train a sparse GP: `train_svgp` on rows in memory, `train_svgp_in_batches`, and `refine_svgp`.

In a float32 model the sums over all data are in float64, and so is q from the first mini-batch whose step float32
cannot take; at the end q has the model's dtype again.  For hyper-parameters that stand still, `refine_svgp` finds q as
`sparse_gp` does, on all rows or on as many as fit, and ends with a verdict by full steps by trial on all of them,
`fit`.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from gpytorch import Module
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.models import ApproximateGP
from gpytorch.utils.transforms import inv_sigmoid, inv_softplus
from torch import Tensor, sigmoid
from torch.nn.functional import softplus

from torchngvi.adapters.gpytorch.distribution import base_strategy
from torchngvi.adapters.gpytorch.energies import check_labels, conjugate, latents_of, log_concave
from torchngvi.adapters.gpytorch.engines import Epochs, Rounds, Training, check_optimizer, of_run
from torchngvi.adapters.gpytorch.model import (
    Batch,
    all_rows,
    as_in_predictions,
    check_call,
    count,
    forget,
    kept_modes,
    lent_posterior,
    pairs,
    row_dimension,
    unwrapped,
)
from torchngvi.adapters.gpytorch.sparse_gp import ProfiledELBO, SparseGP
from torchngvi.adapters.gpytorch.starts import (
    STARTS,
    check_points,
    check_start,
    choose_inducing_points,
    constant_function,
    double_inducing_points,
    left_open,
)
from torchngvi.arguments import read_choice, read_count, read_flag, read_list, shown
from torchngvi.distributed import processes_of, synchronize
from torchngvi.errors import InputError, PairError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.records import FitResult, Record
from torchngvi.fitting.stopping import Criterion, Gradients, joined
from torchngvi.methods import IBLR, VN
from torchngvi.models.sharded import threads
from torchngvi.numerics.arrays import ENTRIES_KEPT
from torchngvi.posteriors import NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian

_INTERRUPTED = "because it was interrupted"


@dataclass(frozen=True)
class RefineSettings:
    """How `refine_svgp` searches the best q and knows rows again; of the first version, no benchmark chose them."""

    prior: float = 1.0  # nats from the prior within which q has seen no data
    first: int = 8  # the first search is on a part of the rows of one in so many
    rows: int = 4096  # for which the kernel is evaluated at once, or 4M if that is more
    remembered: int = 16  # rows of a call by which a later one sees whether these are given again; at most its square


_REFINING = RefineSettings()


@dataclass(frozen=True)
class TrainingResult(FitResult):
    """The `FitResult` of training, of which a record is an epoch or a round, with what only training has to tell.

    Its loss is the negative ELBO per datum: the mean over the batches of the last epoch, or that at the optimal q for
    the rows of the last round, less the log priors.  ``reason`` says why training ended, and nothing that the
    hyper-parameters have converged.  ``refined`` is the result of the search for the best q at the last of them, where
    there was one: ``converged``, ``verdict`` and ``certificate`` are of that q, and ``converged`` is false without it.
    ``found`` is "constant" where `train_svgp` ended with a function that says nothing of the targets.
    """

    rejections: int = 0  # natural steps that were not taken
    refined: FitResult | None = None  # the verdict on q, where asked
    interrupted: bool = False  # from the keyboard, within an epoch or a round that is not counted
    unit: str = "epochs"  # or "rounds", of `train_svgp`
    found: str = "function"  # or "constant": `train_svgp` ended no better than a constant function
    inducing: int = 0  # inducing points, where `train_svgp` chose their number
    doubling: float = math.nan  # nats a row that the last doubling of this number brought
    gap: float = math.nan  # nats a row from the bound up to the exact log evidence, on at most 1,500 rows

    @property
    def losses(self) -> list[float]:
        """The negative ELBO per datum of each epoch or round."""
        return [record.loss for record in self.trace]

    def __str__(self) -> str:
        """The result in one line."""
        return self._told("" if self.refined is None else str(self.refined))

    def summary(self) -> str:
        """The result, with the table of the verdict on q; where q was not examined, it is examined now."""
        if self.refined is None:
            return str(self)
        of_q = self.refined.summary()
        object.__setattr__(self, "examination", self.refined.examination)
        return self._told(of_q)

    def refined_by(self, refined: FitResult) -> "TrainingResult":
        """The same with the result of the search for q, which is what the verdicts are on."""
        names = "converged", "members_converged", "posterior", "target", "examination", "unexamined"
        return replace(self, refined=refined, **{name: getattr(refined, name) for name in names})

    def _told(self, of_q: str) -> str:
        last = f"negative ELBO per datum {self.losses[-1]:.4f}" if self.losses else "none complete"
        if len(self.losses) > 1:
            before = "an epoch" if self.unit == "epochs" else "a round"
            last += f", {self.losses[-2] - self.losses[-1]:.2g} less than {before} before"
        if self.unit == "epochs":
            last += f", {self.rejections} natural steps not taken"
        last += ", no better than a constant function" if self.found == "constant" else ""
        verdict = f"; q {of_q}" if of_q else ""
        stopped = ", then interrupted" if self.interrupted else ""
        return f"{len(self.losses)} {self.unit}{stopped}, {last}{verdict}"


def train_svgp(
    model: ApproximateGP,
    likelihood: Likelihood | None = None,
    data: Any = None,
    *others: Any,
    rounds: int = 10,
    inducing: str = "given",
    callbacks: Iterable[Callable[[int, float], Any]] = (),
    progress: bool = True,
    checkpoint: str | Path | None = None,
    stop: Criterion | None = None,
) -> TrainingResult:
    """Train a sparse GP without a learning rate: ``train_svgp(model, likelihood, (x, y))``.

    All hyper-parameters and the inducing points are learnt by L-BFGS at the optimal q (for a Gaussian likelihood on the
    collapsed bound of Titsias 2025), in rounds on growing parts of the rows, and q is refined on all rows at the end.
    Inducing points that coincide, as ``torch.zeros(M, features)``, are put on rows of the data first.

    Use it for rows that fit into memory; for data that come in batches or several processes `train_svgp_in_batches`,
    and for other strategies and objectives `natural_optimizer` in a loop of your own.

    Args:
        model: an `ApproximateGP` with a `VariationalStrategy` or an `UnwhitenedVariationalStrategy` over a
            `NaturalGradientVariationalDistribution`, or over a full Gaussian of GPyTorch, as
            `CholeskyVariationalDistribution`, which then holds what was found; the former also of several functions, as
            a batch of models or within an `IndependentMultitaskVariationalStrategy` or an `LMCVariationalStrategy`; or
            a ``SingleTaskVariationalGP`` of BoTorch alone, which has a likelihood, rows and transforms.
        likelihood: see `SparseGP`.
        data: one pair (x, y) of all rows, a list of such pairs, or a ``DataLoader`` of them.
        others: none; what stands here is refused, as y after x.
        rounds: the largest number of rounds.
        inducing: "given", or "auto" to double their number first, while a doubling and a round raise the bound by .01
            nats a row, in half as many rounds at most. The model takes more inducing points, and a q of as many, in
            the place of its own, and is trained as if they had been given. ``result.inducing``, ``doubling`` and
            ``gap`` say what came of it.
        callbacks: called with the round and its loss; a true result ends the rounds.  They may evaluate the model, in
            whichever mode.
        progress: show a bar.
        checkpoint: a file, written after each round; where it exists, the run goes on from there.
        stop: a further criterion that ends the rounds, asked after each, as ``Seconds(60)`` of `torchngvi.fitting`.

    Returns:
        What was done.  An interrupt from the keyboard ends the run, with everything as the last round left it.

    Raises:
        InputError: no data, targets that are NaN, a loss that is not finite, a checkpoint that cannot be written or is
            of another model or other data, or stands beside ``inducing="auto"``.
        PairError: a model or a likelihood it cannot serve; the message says what to use.

    Warns:
        ScaleWarning: targets on another scale than the model begins with, or a fit no better than a constant function.

    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> model, likelihood, x, y = example()
    >>> train_svgp(model, likelihood, (x, y), progress=False).refined.converged
    True
    """
    if others:
        raise InputError(
            f"train_svgp takes inputs and targets as one pair; got {'two tensors' if len(others) == 1 else 'more'}. "
            "Write train_svgp(model, likelihood, (x, y))."
        )
    model, likelihood, data = unwrapped(model, likelihood, data)
    check_call(model, likelihood, data)
    callbacks, rounds = _checked(callbacks), read_count("rounds", rounds, "counts rounds", at_least=0)
    grows, doubling = read_choice("inducing", inducing, ("given", "auto")) == "auto", math.nan
    if grows and checkpoint is not None:
        raise InputError(
            'a checkpoint holds a run with the inducing points that the model has: with inducing="auto" leave it out.'
        )
    learns = any(p.requires_grad for p in (*model.parameters(), *likelihood.parameters()))
    moved = (model, likelihood) if rounds > 0 else ()
    if grows and learns and rounds > 1:
        with _enforced_bounds(*moved):
            data, doubling = _grown(model, likelihood, data, rounds // 2)
    with _enforced_bounds(*moved) as released, lent_posterior(model) as returned:
        model.train()
        likelihood.train()
        latents = latents_of(model, likelihood)
        x, y = all_rows(data, latents)
        trained = _untrained("round")
        if rounds > 0 and learns:
            engine = Rounds(model, likelihood, x, y, rounds)
            forget_rows(model)
            check_points(latents.strategy, x)
            if latents.by_value or not latents.coupled:
                check_start(model, likelihood, latents, x, y)
            until, outside = joined(Gradients(rounds), stop), (released, returned)
            trained = _trained(engine, until, callbacks, outside, progress, checkpoint)
        elif left_open(latents.strategy):
            choose_inducing_points(latents.strategy, x)
        forget(model)
        if trained.interrupted:
            return trained
        if trained.losses and grows:
            size = latents.strategy.inducing_points.shape[-2]
            trained = replace(trained, inducing=size, doubling=doubling, gap=engine.gap())
            if doubling >= STARTS.doubling:
                still = f"{doubling:.2g} nats a row with the last doubling of the inducing points."
                trained = _remarked(trained, f"the bound still rose by {still}")
        if trained.losses and (remark := engine.remark()):
            trained = _remarked(trained, remark)
        if trained.losses and latents.by_value and (sentence := constant_function(likelihood, y, trained.losses[-1])):
            trained = replace(_remarked(trained, sentence), found="constant")
        return trained.refined_by(refine_svgp(model, likelihood, [(x, y)], progress=progress))


def train_svgp_in_batches(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int,
    hyper_optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 10,
    refine: bool = False,
    callbacks: Iterable[Callable[[int, float], Any]] = (),
    progress: bool = True,
    checkpoint: str | Path | None = None,
    stop: Criterion | None = None,
    group: Any = None,
) -> TrainingResult:
    """Train a sparse GP on mini-batches: natural steps for q, whose length is chosen, and your optimizer for the rest.

    From one evaluation a batch q moves by natural gradients and the hyper-parameters by any torch optimizer: for data
    that come in batches and several processes.  For rows in memory `train_svgp` is faster, and has no learning rate.

    Args:
        model: as `train_svgp` takes it.
        likelihood: see `SparseGP`.
        batches: a ``DataLoader`` of (x, y), or a list of such pairs; gone through once an epoch.
        num_data: the number of rows of an epoch.
        hyper_optimizer: over parameters of the model and the likelihood, as you like it.
        epochs: the number of passes over the data.
        refine: end with `refine_svgp`, at the final hyper-parameters.
        callbacks: called with the epoch and its loss; a true result ends the epochs.  They may evaluate the model, in
            whichever mode.
        progress: show a bar.
        checkpoint: a file, written after each epoch; where it exists, the run goes on from there, with torch's default
            generator, and those of a ``DataLoader`` and its samplers, as they were.
        stop: a further criterion that ends the epochs, asked after each, as ``Seconds(60)`` of `torchngvi.fitting`.
        group: a `torchngvi.Processes`, or a group of torch.distributed, whose processes train one model together, each
            on ``batches`` of its own rows, of which ``num_data`` counts those of all; a batch is what the processes
            have at the same time, and one that has none left waits with nothing. All begin from the model of rank 0,
            which shows the bar, calls the callbacks and writes the checkpoint. None for one process.

    Returns:
        What was done.  An interrupt from the keyboard ends the run, with everything as the last step left it.

    Raises:
        InputError: no data, another number of rows than ``num_data``, ``refine`` with several processes, on which
            hyper-parameters or settings differ, a hyper-optimizer that holds q or none of the parameters or evaluates
            more than once a step, a loss that is not finite, a checkpoint that cannot be written or is of another
            model, optimizer or other data: they are told by tensors in memory, and by the loss of the first batch of an
            epoch, but for an iterator, which cannot be looked into.
        PairError: a model or a likelihood it cannot serve; the message says what to use.

    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> model, likelihood, x, y = example()
    >>> adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    >>> batches = list(zip(x.split(25), y.split(25)))
    >>> len(train_svgp_in_batches(model, likelihood, batches, 100, adam, epochs=5, progress=False).losses)
    5
    """
    check_call(model, likelihood, batches)
    refine = read_flag("refine", refine)
    epochs = read_count("epochs", epochs, "counts passes over the data", at_least=0)
    processes = None if group is None else processes_of(group)
    with ExitStack() as until_the_end:
        with processes_of(group).together():
            callbacks = _checked(callbacks)
            num_data = read_count("num_data", num_data, "counts the rows of an epoch")
            if processes is not None and refine:
                raise InputError(
                    "refine_svgp passes over all rows in one process, and here they are spread over "
                    f"{processes.world}. Leave refine= out."
                )
            returned = until_the_end.enter_context(lent_posterior(model))
            model.train()
            likelihood.train()
            target = SparseGP(model, likelihood, [])
            q = target.posterior
            check_optimizer(hyper_optimizer, q, [*model.parameters(), *likelihood.parameters()])
        if processes is not None:  # the same settings on all ranks, and the leader's model, likelihood and draws
            alike = of_run(model, likelihood, (), num_data, hyper_optimizer)
            processes.agree(epochs=epochs, **threads(), **alike)
            synchronize(model, group=processes)
            synchronize(likelihood, group=processes)
            processes.same_draws()
        trained = _untrained("epoch")
        if epochs > 0:
            forget_rows(model)
            engine = Epochs(model, likelihood, batches, num_data, hyper_optimizer, epochs, processes)
            trained = _trained(engine, joined(Gradients(epochs), stop), callbacks, (returned,), progress, checkpoint)
        forget(model)
    if trained.interrupted or not refine:
        return trained
    return trained.refined_by(refine_svgp(model, likelihood, batches, progress=progress))


@contextmanager
def _enforced_bounds(*owners: Any) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A block in which bounds of one parameter that an optimizer would keep, as BoTorch's, hold by a transform."""
    own = [owner for owner in owners if isinstance(owner, Module)]  # anything else is refused later
    of_all = [part[1:] for owner in own for part in owner.named_parameters_and_constraints() if part[2] is not None]
    of_all = list({(id(p), id(bound)): (p, bound) for p, bound in of_all}.values())
    alone = Counter(id(part) for pair in of_all for part in pair)
    bounded = [(p, b) for p, b in of_all if not b.enforced and p.requires_grad and alone[id(p)] == alone[id(b)] == 1]
    bounded = [(p, b) for p, b in bounded if bool((b.lower_bound > -math.inf).all() | (b.upper_bound < math.inf).all())]
    given = [(p.data.clone(), b._transform, b._inv_transform) for p, b in bounded]
    inside, begun = STARTS.inside, list[Tensor]()

    def enforce() -> None:
        for _, bound in bounded:
            both = bool((bound.upper_bound - bound.lower_bound).isfinite().all())
            bound._transform, bound._inv_transform = (sigmoid, inv_sigmoid) if both else (softplus, inv_softplus)

    def release() -> None:
        for (p, bound), start, (value, *transforms) in zip(bounded, begun, given, strict=True):
            p.data = value.clone() if torch.equal(p.data, start) else bound.transform(p.data).to(p.dtype)
            bound._transform, bound._inv_transform = transforms

    @contextmanager
    def released() -> Iterator[None]:
        values = [p.data for p, _ in bounded]
        release()
        try:
            yield
        finally:
            enforce()
            for (p, _), value in zip(bounded, values, strict=True):
                p.data = value

    enforce()
    for p, bound in bounded:
        low, high = bound.lower_bound.to(p), bound.upper_bound.to(p)
        width = high - low
        margin = inside * torch.where(width.isfinite(), width, torch.minimum(low.abs(), high.abs()) + inside)
        within = torch.where((p.data > low) & (p.data < high), p.data, p.data.clamp(low + margin, high - margin))
        p.data = bound.inverse_transform(within).to(p.dtype)
        begun.append(p.data.clone())
    try:
        yield released
    finally:
        release()


def _remarked(trained: TrainingResult, sentence: str) -> TrainingResult:
    return replace(trained, reason=f"{trained.reason.rstrip('.')}; {sentence}")


def _grown(model: ApproximateGP, likelihood: Likelihood, data: Any, most: int) -> tuple[Batch, float]:
    """Double the inducing points for as long as that pays, the rest being as it was; the rows and the last gain."""
    strategy = base_strategy(model)
    parts, Z = [*model.parameters(), *likelihood.parameters()], strategy.inducing_points.detach().clone()
    first, chosen, losses = [part.detach().clone() for part in parts], left_open(strategy), list[float]()
    while True:
        with lent_posterior(model):
            x, y = data = all_rows(data, latents_of(model, likelihood))
            engine = Rounds(model, likelihood, x, y, 1)
            if not losses:
                engine.begin()
            engine.one_round()
            losses += engine.losses
        size = base_strategy(model).inducing_points.shape[-2]
        gain = losses[-2] - losses[-1] if len(losses) > 1 else math.nan
        if len(losses) == most or gain < STARTS.doubling or 4 * size > count(x) or not engine.allows(2 * size):
            break
        double_inducing_points(strategy, x)
    with torch.no_grad():  # learnt with fewer points, they would be a worse start
        for part, value in zip(parts, first, strict=True):
            part.copy_(value)
        if chosen:  # again, with the kernel as it was
            strategy.inducing_points.zero_()
        else:
            strategy.inducing_points[..., : Z.shape[-2], :] = Z
    return data, gain


def _untrained(unit: str) -> TrainingResult:
    why, none = f"training ended because no {unit} was run.", torch.tensor(False)
    return TrainingResult(False, why, math.nan, math.nan, 0, none, [], unit=f"{unit}s")


def _trained(
    engine: Training,
    stop: Criterion,
    callbacks: tuple[Callable[[int, float], Any], ...],
    outside: Sequence[Callable[[], AbstractContextManager[None]]],
    progress: bool,
    checkpoint: str | Path | None,
) -> TrainingResult:
    """The epochs or rounds; q has the dtype of the model again at the end."""

    def told(record: Record) -> bool:
        with ExitStack() as as_after_the_run:  # q and the bounds are the model's own
            for context in (*(block() for block in outside), kept_modes(engine.model, engine.likelihood)):
                as_after_the_run.enter_context(context)
            answers = [callback(record.gradients - 1, record.loss) for callback in callbacks]
        return any(answers)

    with restored_dtype(engine.q):
        loop = Loop(
            engine,
            stop,
            callbacks=[told],
            progress=progress,
            checkpoint=checkpoint,
            every=1,
            processes=engine.processes,
        )
        result = loop.run()
        told_by_all = {part.name: getattr(result, part.name) for part in fields(FitResult)}
        interrupted, unit = result.reason.startswith(_INTERRUPTED), f"{engine.unit_of_a_record}s"
        told_by_all["reason"] = re.sub("^because", "training ended because", result.reason)
        return TrainingResult(**told_by_all, rejections=engine.natural_steps()[1], interrupted=interrupted, unit=unit)


def _checked(callbacks: Iterable[Callable[[int, float], Any]]) -> tuple[Callable[[int, float], Any], ...]:
    if callable(callbacks):
        raise InputError("callbacks is a list of functions of the epoch and its loss; put the one you have in a list.")
    what = "is a list of functions of the epoch and its loss"
    functions = read_list("callbacks", callbacks, what)
    if not all(callable(function) for function in functions):
        raise InputError(f"callbacks {what}; got {shown(callbacks)}.")
    return tuple(functions)


def train_mll(mll: _ApproximateMarginalLogLikelihood, closure: Any = None, **options: Any) -> Any:
    """Train a model of BoTorch by `train_svgp`: ``fit_gpytorch_mll(mll, optimizer=train_mll)``.

    Args:
        mll: a `VariationalELBO` of the ``model.likelihood`` and the ``model.model`` of a ``SingleTaskVariationalGP``.
        closure: none, as BoTorch gives it.
        options: those of `train_svgp`, from ``optimizer_kwargs`` of ``fit_gpytorch_mll``.

    Returns:
        BoTorch's ``OptimizationResult``.

    Raises:
        PairError: another objective, a closure.
    """
    from botorch.optim.core import OptimizationResult, OptimizationStatus

    if type(mll) is not VariationalELBO or mll.beta != 1 or closure is not None:
        raise PairError(
            f"train_mll maximises the ELBO of the rows that the model holds, without a closure; got "
            f"{type(mll).__name__}. Give VariationalELBO(model.likelihood, model.model, num_data=len(train_X))."
        )
    data = mll.model.train_inputs[0], mll.model.train_targets
    result = train_svgp(mll.model, mll.likelihood, data, **{"progress": False, **options})
    loss = result.losses[-1] if result.losses else math.nan
    return OptimizationResult(len(result.losses), loss, OptimizationStatus.SUCCESS, message=result.reason)


@torch.no_grad()
def refine_svgp(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    *,
    tolerance: float | None = None,
    max_evaluations: int = 1000,
    progress: bool = True,
) -> FitResult:
    """Find the optimal q(u) for hyper-parameters as they are, without a step size.

    The q of several functions is searched by steps of all means at once, see `train_svgp`.

    Args:
        model, likelihood: see `train_svgp`; q may be a full Gaussian of GPyTorch, which is left at the optimum.
        batches: all of the data, kept in memory.
        tolerance, max_evaluations: see `torchngvi.fit`.
        progress: show a bar.

    Returns:
        The verdict; its loss is the negative ELBO, summed over data.

    Raises:
        InputError: no data, a K_ZZ that is not positive definite.
        PairError: a model or a likelihood it cannot serve.

    >>> import gpytorch
    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> model, _, x, y = example()
    >>> likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    >>> refine_svgp(model, likelihood, [(x, (y > 0).double())], progress=False).converged
    True
    """
    check_call(model, likelihood, batches)
    with lent_posterior(model), kept_modes(model, likelihood):
        model.train()
        likelihood.train()
        as_in_predictions(model)  # where hyper-parameters stay, q is for the function that predicts
        target = SparseGP(model, likelihood, [])
        target.batches = _pieces(batches, target)
        forgotten = _forgotten(target)
        with restored_dtype(target.posterior) as q:
            # beside a small noise float32 loses the prior, which is 1 in S
            q.double()
            if conjugate(likelihood) or target.coupled or (log_concave(likelihood) and _at_the_prior(q)):
                _search(target)
            steps = VN(q) if log_concave(likelihood) else IBLR(q)
            result = fit(q, target, steps, tolerance=tolerance, max_evaluations=max_evaluations, progress=progress)
        if forgotten:
            warnings.warn(f"{forgotten}.", stacklevel=3)
            return replace(result, reason=f"{result.reason.rstrip('.')}; {forgotten}.")
    return result


# of each model some of the rows for which q was found last
_fitted: WeakKeyDictionary[ApproximateGP, Tensor] = WeakKeyDictionary()


def forget_rows(model: ApproximateGP, x: Tensor | None = None) -> None:
    """Forget for which rows q was found before: where a training begins all of them, else those of x."""
    before = _fitted.pop(model, None)
    if before is not None and x is not None:
        left = ~torch.tensor(_are_among(before, [x]), dtype=torch.bool)
        if bool(left.any()):
            _fitted[model] = before[left]


def remember_rows(model: ApproximateGP, parts: list[Tensor]) -> None:
    """Keep some of the rows for which q was found, beside those that are kept already."""
    total = sum(len(x) for x in parts)
    some = torch.cat([x[:: -(-total // _REFINING.remembered)] for x in parts]).clone()
    kept = torch.cat([_fitted[model].to(some), some]) if model in _fitted else some
    _fitted[model] = kept[:: 1 + len(kept) // _REFINING.remembered**2]


def _are_among(rows: Tensor, parts: list[Tensor]) -> list[bool]:
    """Whether each row is one of those of the parts, which may have been converted."""
    short = min(rows.dtype, parts[0].dtype, key=lambda dtype: torch.finfo(dtype).bits)
    rows, parts = rows.to(parts[0].device, short), [x.to(short) for x in parts]
    return [any(bool((x == row).all(-1).any()) for x in parts) for row in rows]


def _forgotten(target: SparseGP) -> str:
    """Say where rows for which q was found before are not among those that are given now; keep some of these."""
    assert isinstance(target.batches, list)
    if not target.batches or target.batches[0][0].ndim != 2:
        return ""
    before, parts = _fitted.pop(target.model, None), [x for x, _ in target.batches]
    remember_rows(target.model, parts)
    total = sum(len(x) for x in parts)
    if before is None or before.shape[-1] != parts[0].shape[-1]:
        return ""
    lost = _are_among(before, parts).count(False)
    if not lost:
        return ""
    return (
        f"q was found for other rows before, of which {lost / len(before):.0%} are not among the {total} rows given "
        "now: q is for the rows of this call alone, and what the others said is forgotten. Give the old rows and the "
        "new ones together, or add the new ones by condition(model, likelihood, x, y)"
    )


@contextmanager
def restored_dtype(q: Gaussian) -> Iterator[Gaussian]:
    """A block in which q may be converted; at its end q has the dtype again that it had."""
    dtype = q.dtype
    try:
        yield q
    finally:
        q.to(dtype)


def _pieces(batches: Iterable[Batch], target: SparseGP) -> list[Batch]:
    """The data in an order of no meaning, in pieces of a good size; untouched where each row has its own noise."""
    given = list(pairs(batches, target.latents))
    for _, y in given:
        check_labels(target.likelihood, y)
    if not given or given[0][0].ndim == 1 or isinstance(target.likelihood, FixedNoiseGaussianLikelihood):
        return given
    row = row_dimension(given[0][1], target.latents)
    x, y = torch.cat([x for x, _ in given], -2), torch.cat([y for _, y in given], row)
    order = torch.randperm(x.shape[-2], generator=torch.Generator().manual_seed(0)).to(x.device)
    size = max(_REFINING.rows, 4 * target.posterior.dim)
    return [(x.index_select(-2, part), y.index_select(row, part)) for part in order.split(size)]


def _search(target: SparseGP) -> None:
    """Bring q to its optimum for all rows, or for a part that fits; not where targets are missing."""
    x, y = all_rows(target.batches, target.latents)
    rows, row = count(x), row_dimension(y, target.latents)
    most = min(rows, ENTRIES_KEPT // target.posterior.mean.numel())
    if isinstance(target.likelihood, FixedNoiseGaussianLikelihood):
        most = rows
    if bool(y.isnan().any()):
        return
    searches = [(most, 1e-15 if target.coupled else 1e-10)]
    if not (target.coupled or conjugate(target.likelihood)):  # from a part of the rows q is near
        searches = [(-(-most // _REFINING.first), 1e-3), *searches]
    for size, tolerance in searches:
        part = x.narrow(-2, 0, size), y.narrow(row, 0, size)
        bound = ProfiledELBO(target.model, target.likelihood, part, rows, tolerance)
        as_in_predictions(target.model)
        bound.search()
        bound.assign()


def _at_the_prior(q: Gaussian) -> bool:
    prior = NaturalGaussian(q.dim, q.batch_shape, dtype=q.dtype, device=q.device)
    return bool((q.kl(prior) < _REFINING.prior).all())
