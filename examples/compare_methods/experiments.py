"""Several methods side by side on one data set: all starts of a method run as one batched posterior, logs as csv.

``python -m examples.compare_methods`` and the experiments of the papers (``python -m examples.papers``) both end here.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods import bounds, datasets, rows
from examples.compare_methods.settings import PENALTIES, Case, Contender, Experiment
from examples.compare_methods.stepping import printed, steps
from torchngvi import registry
from torchngvi.diagnostics import accuracy
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.expectations import Antithetic, MonteCarlo, PiecewiseBound, Quadrature
from torchngvi.interfaces import Estimator
from torchngvi.models import GeneralizedLinear, Regularized
from torchngvi.posteriors.gaussian import Gaussian

_LOST = 1e12  # nats above which a difference of energies is rounding
_NEWTON_STEPS = 500  # to the optimum, from which gaps are counted
_AT_OPTIMUM = 1e-12  # the squared natural norm there: about twice the nats that are left


@dataclass(frozen=True)
class Problem:
    """The models and the estimator of a case, ready to be run."""

    target: GeneralizedLinear | Regularized
    model: GeneralizedLinear
    held_out: GeneralizedLinear | None
    estimator: Estimator


def build(case: Case) -> Problem:
    """Read the data of a case, split them, and make the models."""
    (X, y), (X_test, y_test) = _data(case)
    precision, likelihood = _precision(case, X.shape[1]), case.likelihood
    model = GeneralizedLinear(X, y, likelihood, prior_precision=precision)
    held_out = None
    if len(y_test):
        held_out = GeneralizedLinear(X_test, y_test, likelihood, prior_precision=precision)
    target: GeneralizedLinear | Regularized = model
    if case.penalty:
        target = Regularized(model, PENALTIES[case.penalty](case.penalty_strength))
    return Problem(target, model, held_out, _estimator(case))


def _precision(case: Case, dim: int) -> Tensor:
    """The precision of the prior of each coefficient."""
    precision = torch.full((dim,), case.precision, dtype=torch.float64)
    if case.intercept and case.intercept_sd is not None:
        precision[0] = case.intercept_sd**-2
    return precision


def _data(case: Case) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training and the test rows of a case, float64."""
    if case.data in ("synthetic", "quadratic"):
        X, y = _synthetic(case) if case.data == "synthetic" else quadratic(case.eigenvalues, case.precision)
        count = round(case.test_fraction * len(y))
        return (X[count:], y[count:]), (X[:count], y[:count])
    if case.data == "mnist":
        return datasets.mnist_pair((case.digits[0], case.digits[1]), case.rows)
    if case.data in datasets.SOURCES:
        X_all, coded = datasets.load(case.data)
    else:
        classes = case.likelihood.discrete
        X_all, coded = rows.read(case.data, case.target, case.success, classes=classes)
    train, test = rows.prepared(
        X_all, coded, standardize=case.standardize, intercept=case.intercept,
        test_fraction=case.test_fraction, seed=case.seed,
    )  # fmt: skip
    parts = [torch.as_tensor(part, dtype=torch.float64) for part in (*train, *test)]
    return (parts[0], parts[1]), (parts[2], parts[3])


def _synthetic(case: Case) -> tuple[Tensor, Tensor]:
    """Logistic data: standard normal features, coefficients ~ N(0, 4/D)."""
    generator = torch.Generator().manual_seed(case.seed)
    X = torch.randn((case.rows, case.features), dtype=torch.float64, generator=generator)
    theta = 2 * torch.randn(case.features, dtype=torch.float64, generator=generator) / math.sqrt(case.features)
    chance = torch.rand(case.rows, dtype=torch.float64, generator=generator)
    return X, (chance < torch.sigmoid(X @ theta)).double()


def quadratic(eigenvalues: Sequence[float], prior_precision: float) -> tuple[Tensor, Tensor]:
    """Two rows of a linear regression with noise 1 whose posterior precision has these eigenvalues.

    >>> X, _ = quadratic((1.0, 10.0), 0.1)
    >>> torch.linalg.eigvalsh(X.mT @ X + 0.1 * torch.eye(2)).round(decimals=6).tolist()
    [1.0, 10.0]
    """
    if len(eigenvalues) != 2 or min(eigenvalues) <= prior_precision:
        raise InputError(f"eigenvalues must be two, larger than prior_precision; got {tuple(eigenvalues)}.")
    turn = math.pi / 6
    axes = torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]], dtype=torch.float64)
    X = (torch.tensor(eigenvalues, dtype=torch.float64) - prior_precision).sqrt()[:, None] * axes
    return X, X @ torch.tensor([1.0, -1.0], dtype=torch.float64)


def _estimator(case: Case) -> Estimator:
    if case.estimator == "quadrature":
        return Quadrature()
    if not case.bound:
        return PiecewiseBound(case.pieces)
    return PiecewiseBound(table=bounds.pieces(case.bound))


def start(case: Case, contender: Contender, problem: Problem, experiment: Experiment) -> Gaussian:
    """One batched posterior with all starts; the means are the same for every method."""
    shape = (experiment.starts, problem.model.dim)
    noise = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(case.seed))
    mean, scale, dim = experiment.start_sd * noise, experiment.start_scale, problem.model.dim
    q = registry.posterior(contender.posterior, dim, (experiment.starts,), mean=mean, scale=scale, dtype=torch.float64)
    assert isinstance(q, Gaussian)
    return q


def run(case: Case, contender: Contender, experiment: Experiment, problem: Problem) -> pd.DataFrame:
    """Run one method from all starts.

    Args:
        case, contender, experiment: the settings of the case, of the method, and of the starts.
        problem: the models of the case.

    Returns:
        A row for each start and record.  Seconds are CPU time of the steps alone, not of what is recorded: that of
        the batch over the number of starts.
    """
    q = start(case, contender, problem, experiment)
    noise = torch.Generator().manual_seed(case.seed)
    estimator = MonteCarlo(Antithetic(contender.draws, noise)) if contender.draws else problem.estimator
    optimizer = printed(contender.method, q, contender.lr, estimator=estimator)
    due = np.unique(np.r_[0, np.geomspace(1, case.iterations, case.points // 2).round(),
                          np.linspace(0, case.iterations, case.points // 2).round()].astype(int))  # fmt: skip

    def step(_: int) -> None:
        target: Any = problem.target
        if contender.batch:
            chosen = torch.stack([torch.randperm(problem.model.num_data, generator=noise) for _ in range(len(q.mean))])
            target = _minibatch(problem.model, chosen[:, : contender.batch])
        optimizer.step(target)

    records = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)  # counted in the log
        for at, seconds, _ in steps(step, case.iterations, set(due.tolist())):
            share = seconds / experiment.starts
            records.append(measured(q, problem, at, optimizer.evaluations, share, optimizer.rejections))
    frame = pd.concat(records, ignore_index=True)
    frame.insert(0, "case", case.name)
    frame.insert(1, "method", contender.label)
    return frame


def _minibatch(model: GeneralizedLinear, chosen: Tensor) -> GeneralizedLinear:
    """A mini-batch of its own for each start; the chosen rows are (starts, B)."""
    batch = model.minibatch(chosen.flatten())
    batch.X, batch.weights = batch.X.unflatten(0, chosen.shape), batch.weights * len(chosen)
    for name in ("y", "weights", "offset"):
        setattr(batch, name, getattr(batch, name).unflatten(0, chosen.shape))
    return batch


@torch.no_grad()
def measured(
    q: Gaussian, problem: Problem, iteration: int, evaluations: int, seconds: float, rejections: int
) -> pd.DataFrame:
    """The metrics at q."""
    model, frame = problem.model, q.frame()
    loss = problem.estimator(q, problem.target).value - q.entropy()
    precision = torch.as_tensor(model.prior.precision).expand(model.dim)
    constants = -0.5 * (precision.log() + 1).sum()
    columns: dict[str, Any] = {
        "start": range(q.batch_shape[0]),
        "iteration": iteration,
        "evaluations": evaluations,
        "seconds": seconds,
        "rejections": rejections,
        "objective": loss.numpy(),
        "train": (loss - constants - 0.5 * (precision * frame.variance).sum(-1)).numpy(),
    }
    if problem.held_out is not None:
        held_out = problem.held_out
        value = problem.estimator(q, held_out).value - held_out.prior.expected_energy(frame)
        lost = ~(loss < _LOST)  # a run that diverged has no scores
        columns["test_rows"] = held_out.num_data
        columns["test_nll"] = value.masked_fill(lost, math.nan).numpy()
        if held_out.likelihood.discrete:
            right = accuracy(model, q, held_out.X, held_out.y)
            columns["test_accuracy"] = right.masked_fill(lost, math.nan).numpy()
    return pd.DataFrame(columns)


def optimum(problem: Problem, diagonal: bool) -> dict[str, float]:
    """The objective, the training objective of Table 3 and the test loss at the optimum of a family, found by trial."""
    names: tuple[str, ...] = ("objective", "train", "test_nll")
    keys: tuple[str, ...] = ("optimum", "train_optimum", "test_nll_optimum", "stationary")
    if not problem.model.likelihood.convex:
        return dict.fromkeys(keys, math.nan)
    q = registry.posterior("diagonal" if diagonal else "cholesky", problem.model.dim, (1,), dtype=torch.float64)
    assert isinstance(q, Gaussian)
    newton = registry.method("vn", q, None, estimator=problem.estimator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)
        for _ in range(_NEWTON_STEPS):
            if newton.evaluate(problem.target).norm2 < _AT_OPTIMUM:
                break
            newton.step(problem.target)
        else:
            return dict.fromkeys(keys, math.nan)
    found = measured(q, problem, 0, 0, 0.0, 0).iloc[0]
    if isinstance(problem.target, Regularized):
        names, keys = ("objective",), keys[::-1]
    reached = {key: float(found.get(name, math.nan)) for key, name in zip(keys, names, strict=False)}
    return dict.fromkeys(keys, math.nan) | reached


def run_all(experiment: Experiment, say: Any = print) -> pd.DataFrame:
    """Run every method of every case; a case whose data cannot be had is skipped with a sentence."""
    logs = []
    for case in experiment.cases:
        if case.skip:
            say(f"{case.name} is skipped: {case.skip}")
            continue
        try:
            problem = build(case)
        except datasets.MissingDataError as error:
            say(f"{case.name} is skipped: {error}")
            continue
        best: dict[bool, dict[str, float]] = {}
        for contender in case.methods:
            diagonal = contender.posterior == "diagonal"
            if diagonal not in best:
                best[diagonal] = optimum(problem, diagonal)
            logs.append(run(case, contender, experiment, problem).assign(**best[diagonal]))
            say(
                f"{case.name}, {contender.label}: {case.iterations} steps, {logs[-1]['seconds'].iloc[-1]:.1f} s a start"
            )
    if not logs:
        raise InputError("nothing was run: every case was skipped, for the reasons above.")
    return pd.concat(logs, ignore_index=True)
