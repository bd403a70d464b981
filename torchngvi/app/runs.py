"""One run of ``torchngvi fit``: fit and judge.  `torchngvi.app.results` prints and writes what came of it."""

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from torchngvi.app import approximation, devices, families, memory, psis, report
from torchngvi.app.columns import Array
from torchngvi.app.findings import HeldOut
from torchngvi.app.names import AUTO
from torchngvi.app.problems import Problem
from torchngvi.diagnostics import accuracy, log_predictive_density, log_weights, predictive_mean, separation
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.evidence import Evidence, Round, prior_by_evidence
from torchngvi.fitting import Evaluations, Unimproved
from torchngvi.fitting.fit import fit
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.records import FitResult
from torchngvi.fitting.smoothed import SmoothedSteps
from torchngvi.methods import PreconditionedVI
from torchngvi.models.likelihoods import PoissonLog
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.registry import structure_of
from torchngvi.stepsizes import PowerSchedule

_PATIENCE = 200  # steps on a flat posterior without a new best of the smoothed bound, after which the run ends
_FEWEST_ROWS = 10  # of training, to say something about a posterior


@dataclass(frozen=True)
class Outcome:
    """The result of a fit, and the diagnostics of its posterior."""

    problem: Problem  # with the prior that was found, where it was by evidence
    result: FitResult
    coefficients: list[report.Coefficient]  # of the columns of the fit, which may be standardised
    effects: list[report.Coefficient]  # per unit of a column of the table
    elbo_sampled: float
    elbo_error: float
    curve: tuple[Round, ...]  # of the prior precision, where it was found by evidence
    draws: int  # behind the two numbers above
    proposal: psis.Proposal
    held_out: HeldOut | None
    warnings: tuple[str, ...]


def run(problem: Problem) -> Outcome:
    """Fit the posterior of a problem, in place, and measure how good it is.

    Args:
        problem: data, model, posterior and optimizer.

    Returns:
        The verdict, the coefficients, k-hat, the sampled ELBO, and the scores on the rows held out.

    >>> import tempfile
    >>> from torchngvi.app.config import Settings
    >>> from torchngvi.app.problems import build
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     outcome = run(build(Settings(data="iris", success="virginica", progress=False, out=folder)))
    >>> outcome.result.converged, outcome.held_out.rows, len(outcome.coefficients)
    (True, 30, 5)
    """
    settings, model = problem.settings, problem.model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RejectedStepWarning)
        found = _by_evidence(problem) if settings.prior_precision == AUTO else None
        if found is not None:
            problem = replace(problem, model=found.model, notes=(*problem.notes, str(found)))
            model = problem.model
        device = devices.chosen(settings.device, settings.dtype)
        result = _fitted(problem) if device.type == "cpu" else _fitted_on(device, problem)
    q = result.posterior
    assert isinstance(q, Gaussian)
    draws = memory.draws(model.num_data, model.dim)
    weights = log_weights(q, model, draws, torch.Generator().manual_seed(settings.seed))
    terms, train = settings.temperature * weights, problem.data.train
    result = approximation.examined(result, q, problem)
    return Outcome(
        problem,
        result,
        report.coefficients(problem.data.names, q.mean, q.stddev),
        report.coefficients(problem.data.names, *problem.data.units.marginals(q)),
        float(terms.mean()),
        float(terms.std() / math.sqrt(len(terms))),
        () if found is None else found.curve,
        len(weights),
        psis.proposal(result.verdict, weights),
        _scores(problem, q),
        (
            *(too_few_rows(len(train.y), _positive(train.weights)) or separated(problem)),
            *_overdispersed(problem, q),
            *problem.warnings,
            *(str(warning.message) for warning in caught),
        ),
    )


def _by_evidence(problem: Problem) -> Evidence:
    """The prior precision that the data speak for, and the noise too where it is not given."""
    settings, q = problem.settings, problem.q
    columns = [k for k in range(problem.model.dim) if k != problem.data.units.intercept]
    if not isinstance(q, Gaussian) or not columns:
        raise InputError("prior_precision auto needs coefficients, and a posterior of method vn. Set a number.")
    noise = settings.family == "gaussian" and settings.noise is None
    start = {name: tensor.clone() for name, tensor in q.state_dict().items()}
    found = prior_by_evidence(q, problem.model, [columns], noise=noise, max_evaluations=settings.max_evaluations)
    q.load_state_dict(start)  # so that the trace of the fit is that of a fit from its start
    return found


def _fitted_on(device: torch.device, problem: Problem) -> FitResult:
    """The same on a device, from which all comes back for the report."""
    problem.q.to(device)
    try:
        result = _fitted(replace(problem, model=problem.model.to(device)))
    finally:
        problem.q.to("cpu")
    assert isinstance(result.posterior, Gaussian)
    return replace(result, posterior=result.posterior.to("cpu"), target=result.target and problem.model)


def _fitted(problem: Problem) -> FitResult:
    """The result of the fit, whose posterior is the Gaussian of the report; of a flat one, in another form."""
    settings, q = problem.settings, problem.q
    if isinstance(q, Gaussian):
        return fit(
            q,
            problem.model,
            None if settings.by_usual_steps else problem.optimizer,
            tolerance=problem.tolerance,
            max_evaluations=settings.max_evaluations,
            progress=settings.progress,
        )
    assert isinstance(problem.optimizer, PreconditionedVI)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        engine = SmoothedSteps(problem.optimizer, problem.model, LambdaLR(problem.optimizer, PowerSchedule()))
        engine.remedy = "Raise max_evaluations."
        criteria = Unimproved(_PATIENCE) | Evaluations(settings.max_evaluations)
        result = Loop(engine, criteria, progress=settings.progress).run()
    return replace(result, posterior=as_gaussian(q, settings.posterior))


def as_gaussian(q: Gaussian | FlatGaussian, name: str) -> Gaussian:
    """The posterior; a flat one of that name in another form."""
    if isinstance(q, Gaussian):
        return q
    mean = q.mean.detach()
    if structure_of(name) == "diagonal":
        return DiagonalGaussian(q.dim, mean=mean, scale=q.stddev.detach())
    return CholeskyGaussian(q.dim, mean=mean, scale=q.scale_tril.detach())


def _overdispersed(problem: Problem, q: Gaussian) -> tuple[str, ...]:
    """A warning of counts that vary more than the family says."""
    model = problem.model
    if not isinstance(model.likelihood, PoissonLog):
        return ()
    mean = predictive_mean(model, q, model.X, model.offset)
    found = families.overdispersion(mean, model.y.double(), model.weights.double(), model.dim)
    return () if found is None else (found,)


def separated(problem: Problem) -> tuple[str, ...]:
    """Warnings of columns that separate the two classes of the training rows, each by itself."""
    train, names = problem.data.train, problem.data.names
    if problem.data.classes is None:
        return ()
    there = np.ones(len(train.y), dtype=bool) if train.weights is None else train.weights > 0
    X, y = (torch.from_numpy(part[there]) for part in (train.X, train.y))
    return separation.told(names, separation.separating(X, y > 0))


def _positive(weights: Array | None) -> int | None:
    return None if weights is None else int(np.count_nonzero(weights))


def too_few_rows(rows: int, positive: int | None) -> tuple[str, ...]:
    """A warning, where the data can say hardly anything."""
    rows = rows if positive is None else positive
    if rows >= _FEWEST_ROWS:
        return ()
    return (
        f"{rows} training rows{'' if positive is None else ' of positive weight'} are too few to believe the "
        f"result: the posterior is little more than the prior, converged or not. Take at least {_FEWEST_ROWS}.",
    )


def _scores(problem: Problem, q: Gaussian) -> HeldOut | None:
    test, model = problem.data.test, problem.model
    if len(test.y) == 0:
        return None
    X, y = torch.as_tensor(test.X, dtype=q.dtype), torch.as_tensor(test.y)
    offset = None if test.offset is None else torch.as_tensor(test.offset)
    w = torch.ones_like(y) if test.weights is None else torch.as_tensor(test.weights)
    nll, error = weighted_mean(-log_predictive_density(model, q, X, y, offset), w)
    discrete = model.likelihood.discrete
    right = float(accuracy(model, q, X, y, offset, w)) if discrete else None
    square = None if discrete else weighted_mean((predictive_mean(model, q, X, offset) - y).square(), w)[0]
    return HeldOut(len(y), nll, error, right, None if square is None else math.sqrt(square))


def weighted_mean(
    values: Tensor,  # (N,)
    weights: Tensor,  # (N,)
) -> tuple[float, float]:
    """The mean and its standard error, which is NaN of a single value.

    >>> weighted_mean(torch.tensor([1.0, 3.0]), torch.ones(2))
    (2.0, 0.7071067690849304)
    """
    share = weights / weights.sum()
    mean = (share * values).sum()
    error = (share.square() * (values - mean).square()).sum().sqrt()
    return float(mean), float(error) if len(values) > 1 else math.nan
