"""One run of ``torchngvi fit``: read and build, fit, judge, write.  Nothing is written before the end."""

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchngvi.app import figures, memory, psis, report, tables
from torchngvi.app.config import Settings, to_dict, to_toml
from torchngvi.app.outputs import OutputFolder, write_rows
from torchngvi.diagnostics import accuracy, log_predictive_density, log_weights, predictive_mean
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult, Record
from torchngvi.methods import BWGD, SRVN, VN
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import FAMILIES, GaussianNoise, Likelihood
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian

POSTERIORS: dict[str, type[CholeskyGaussian] | type[NaturalGaussian] | type[DiagonalGaussian]] = {
    "cholesky": CholeskyGaussian,
    "natural": NaturalGaussian,
    "diagonal": DiagonalGaussian,
}
_FEWEST_ROWS = 10  # of training, to say something about a posterior
_PRIOR_PRECISION = 0.1  # of the families without units, standard deviation 3.2


@dataclass(frozen=True)
class Problem:
    """Everything a fit needs, checked."""

    settings: Settings
    data: tables.Prepared
    model: GeneralizedLinear
    q: Gaussian
    optimizer: NaturalGradientVI
    tolerance: float
    notes: tuple[str, ...]  # values that were chosen from the data
    out: OutputFolder


@dataclass(frozen=True)
class HeldOut:
    """Scores on the rows held out, weighted where the data have weights."""

    rows: int
    nll: float  # -log p(y | x) a row
    nll_error: float  # standard error
    accuracy: float | None  # of classes
    rmse: float | None  # of the predictive mean, for counts and real numbers


@dataclass(frozen=True)
class Outcome:
    """A fit and what is known about it."""

    problem: Problem
    result: FitResult
    coefficients: list[report.Coefficient]
    elbo_sampled: float
    elbo_error: float
    k_hat: float
    draws: int  # behind the three numbers above
    held_out: HeldOut | None
    warnings: tuple[str, ...]


# ------------------------------------------------------------------------------------ build


def build(settings: Settings, *, overwrite: bool = False) -> Problem:
    """Read the data and make model, posterior and optimizer.

    Raises:
        InputError: data, settings or an output folder that cannot be used, too little memory.
        PairError: a method and a posterior that do not fit.
    """
    out = OutputFolder(settings.folder, overwrite=overwrite)
    table = tables.read_table(
        settings.data,
        target=settings.target,
        weights=settings.weights,
        offset=settings.offset,
        drop=settings.drop,
        n_features=settings.n_features,
        budget=memory.Budget(settings.posterior, trial=settings.lr is None),
    )
    y, classes = tables.coded_target(table, classes=settings.has_classes, success=settings.success)
    _check_rows(settings, table, y)
    data = tables.prepare(
        table,
        y,
        classes,
        standardize=settings.standardize,
        intercept=settings.intercept,
        test_fraction=settings.test_fraction,
        seed=settings.seed,
    )
    dtype = getattr(torch, settings.dtype)
    likelihood, precision, notes = _likelihood_and_prior(settings, data.train)
    model = GeneralizedLinear(
        torch.as_tensor(data.train.X, dtype=dtype),
        data.train.y,
        likelihood,
        prior_precision=torch.tensor(precision, dtype=dtype),
        weights=data.train.weights,
        offset=data.train.offset,
        temperature=settings.temperature,
    )
    # predictors start with unit standard deviation, coefficients never wider than the prior
    row_norm = float(np.sqrt(np.square(data.train.X).sum(1).mean()))
    scale = min(precision**-0.5, 1 / row_norm) if row_norm > 0 else precision**-0.5
    q = POSTERIORS[settings.posterior](model.dim, scale=scale, dtype=dtype)
    tolerance = settings.tolerance or (1e-5 if settings.dtype == "float64" else 1e-2)
    return Problem(settings, data, model, q, _optimizer(settings, q), tolerance, notes, out)


def _check_rows(settings: Settings, table: tables.Table, y: tables.Array) -> None:
    """Rules for all rows, held out or not."""
    if not settings.has_classes:
        FAMILIES[settings.family]().checked(torch.as_tensor(y))
    if table.weights is not None and table.weights.min() < 0:
        raise InputError(f"weights must not be negative; column {settings.weights!r} has {table.weights.min():g}.")


def _likelihood_and_prior(settings: Settings, train: tables.Rows) -> tuple[Likelihood, float, tuple[str, ...]]:
    """What the settings leave open, for the Gaussian family in the units of y."""
    precision = settings.prior_precision
    if settings.family != "gaussian":
        return FAMILIES[settings.family](), precision or _PRIOR_PRECISION, ()
    notes = []
    noise = settings.noise
    if noise is None:
        noise = _residual_noise(train)
        notes.append(f"noise {noise:.4g} is the residual standard deviation of least squares (--noise sets another)")
    if precision is None:
        square = float(np.mean(np.square(train.y)))
        precision = 1 / square if square > 0 else _PRIOR_PRECISION
        notes.append(f"prior precision {precision:.3g} is 1/mean(y^2) (--prior-precision sets another)")
    return GaussianNoise(noise), precision, tuple(notes)


def _residual_noise(train: tables.Rows) -> float:
    """√(Σ w r²/(Σ w - rank)) of weighted least squares."""
    w = np.ones(len(train.y)) if train.weights is None else train.weights
    y = train.y if train.offset is None else train.y - train.offset
    root = np.sqrt(w)
    solution, _, rank, _ = np.linalg.lstsq(train.X * root[:, None], y * root, rcond=None)
    freedom = w.sum() - rank
    square = float((w * np.square(y - train.X @ solution)).sum())
    if freedom <= 0 or square <= 1e-20 * max(1.0, float(np.square(y * root).sum())):
        raise InputError(
            f"noise cannot be found from the data: {len(y)} training rows leave no residual about the least squares "
            f"fit of {train.X.shape[1]} coefficients. Set noise, the standard deviation of y about its mean (--noise)."
        )
    return math.sqrt(square / freedom)


def _optimizer(settings: Settings, q: Gaussian) -> NaturalGradientVI:
    if settings.method == "bwgd":
        assert settings.lr is not None  # Settings refuses it
        return BWGD(q, settings.lr)
    return {"vn": VN, "srvn": SRVN}[settings.method](q, settings.lr)


# ------------------------------------------------------------------------------------ fit and judge


def run(problem: Problem) -> Outcome:
    """Fit, in place, and measure."""
    settings, model, q = problem.settings, problem.model, problem.q
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RejectedStepWarning)
        result = fit(
            q,
            model,
            problem.optimizer,
            tolerance=problem.tolerance,
            max_evaluations=settings.max_evaluations,
            progress=settings.progress,
        )
    draws = memory.draws(model.num_data, model.dim)
    weights = log_weights(q, model, draws, torch.Generator().manual_seed(settings.seed))
    terms = settings.temperature * weights
    return Outcome(
        problem,
        result,
        report.coefficients(problem.data.names, q.mean, q.stddev),
        float(terms.mean()),
        float(terms.std() / math.sqrt(len(terms))),
        float(psis.k_hat(weights)),
        len(weights),
        _scores(problem),
        (*_too_few_rows(problem.data.train), *(str(warning.message) for warning in caught)),
    )


def _too_few_rows(train: tables.Rows) -> tuple[str, ...]:
    """A warning, where the data can say hardly anything."""
    rows = len(train.y) if train.weights is None else int(np.count_nonzero(train.weights))
    if rows >= _FEWEST_ROWS:
        return ()
    return (
        f"{rows} training rows{'' if train.weights is None else ' of positive weight'} are too few to believe the "
        f"result: the posterior is little more than the prior, converged or not. Take at least {_FEWEST_ROWS}.",
    )


def _scores(problem: Problem) -> HeldOut | None:
    test, model, q = problem.data.test, problem.model, problem.q
    if len(test.y) == 0:
        return None
    X, y = torch.as_tensor(test.X, dtype=q.dtype), torch.as_tensor(test.y)
    offset = None if test.offset is None else torch.as_tensor(test.offset)
    w = torch.ones_like(y) if test.weights is None else torch.as_tensor(test.weights)
    nll, error = _weighted_mean(-log_predictive_density(model, q, X, y, offset), w)
    discrete = model.likelihood.discrete
    right = float(accuracy(model, q, X, y, offset, w)) if discrete else None
    square = None if discrete else _weighted_mean((predictive_mean(model, q, X, offset) - y).square(), w)[0]
    return HeldOut(len(y), nll, error, right, None if square is None else math.sqrt(square))


def _weighted_mean(
    values: Tensor,  # (N,)
    weights: Tensor,  # (N,)
) -> tuple[float, float]:
    """Mean and its standard error; NaN where there is too little for either."""
    share = weights / weights.sum()
    mean = (share * values).sum()
    error = (share.square() * (values - mean).square()).sum().sqrt()
    return float(mean), float(error) if len(values) > 1 else math.nan


# ------------------------------------------------------------------------------------ tell


def summary(outcome: Outcome) -> dict[str, Any]:
    """The run as plain numbers and texts; what is not finite becomes None."""
    result, problem, held_out = outcome.result, outcome.problem, outcome.held_out
    data = problem.data
    likelihood = problem.model.likelihood
    numbers = {
        "converged": result.converged,
        "verdict": _verdict(result),
        "elbo": -result.loss,
        "elbo_sampled": outcome.elbo_sampled,
        "elbo_sampled_standard_error": outcome.elbo_error,
        "natural_gradient_norm": result.norm,
        "tolerance": problem.tolerance,
        "draws": outcome.draws,
        "k_hat": outcome.k_hat,
        "k_hat_verdict": psis.verdict(outcome.k_hat, outcome.draws),
        "held_out_rows": 0 if held_out is None else held_out.rows,
        "held_out_nll_per_row": None if held_out is None else held_out.nll,
        "held_out_nll_standard_error": None if held_out is None else held_out.nll_error,
        "held_out_accuracy": None if held_out is None else held_out.accuracy,
        "held_out_rmse": None if held_out is None else held_out.rmse,
        "evaluations": result.evaluations,
        "rejected_steps": result.trace[-1].rejections,
        "seconds": result.trace[-1].seconds,
        "training_rows": len(data.train.y),
        "coefficients": len(data.names),
        "classes": None if data.classes is None else {"failure": data.classes[0], "success": data.classes[1]},
        "prior_precision": float(problem.model.prior.precision[0]),
        "noise": likelihood.noise if isinstance(likelihood, GaussianNoise) else None,
        "notes": list(problem.notes),
        "warnings": list(outcome.warnings),
        "settings": to_dict(problem.settings),
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}


def _verdict(result: FitResult) -> str:
    return f"{'converged' if result.converged else 'not converged'}, {result.reason}"


def show(outcome: Outcome, folder: Path | None) -> None:
    """Print the table and the summary, and where they are written."""
    problem, held_out = outcome.problem, outcome.held_out
    s, result = problem.settings, outcome.result
    tempered = "" if s.temperature == 1 else f", at temperature {s.temperature:g}"
    lines = [
        ("verdict", _verdict(result)),
        ("ELBO", f"{-result.loss:.4f}{tempered} (by sampling: {outcome.elbo_sampled:.3f} +- {outcome.elbo_error:.3f})"),
        (
            "approximation",
            psis.verdict(outcome.k_hat, outcome.draws) + ("" if result.converged else " (Before convergence.)"),
        ),
        ("held out", _held_out_line(held_out)),
        ("cost", f"{result.evaluations} evaluations, {result.trace[-1].seconds:.2f} s"),
        ("data", _data_line(problem)),
        ("model", f"{s.family}, prior precision {float(problem.model.prior.precision[0]):.4g}"),
        *(("note", note) for note in problem.notes),
        ("method", f"{s.method}, {s.posterior} posterior, " + (f"lr {s.lr:g}" if s.lr else "steps found by trial")),
        *(("warning", text) for text in outcome.warnings),
        ("written to", f"{folder}/" if folder else "no folder"),
    ]
    unit = "per standard deviation of a column" if s.standardize else "per unit of a column"
    report.show(
        report.coefficient_table(outcome.coefficients, unit),
        report.summary_block(_title(outcome), lines, good=result.converged and not outcome.warnings),
    )


def _title(outcome: Outcome) -> str:
    if not outcome.result.converged:
        return "NOT CONVERGED"
    return "converged, with a warning" if outcome.warnings else "converged"


def _held_out_line(held_out: HeldOut | None) -> str:
    if held_out is None:
        return "no rows (test_fraction 0)"
    score = f"accuracy {held_out.accuracy:.3f}" if held_out.rmse is None else f"RMSE {held_out.rmse:.4g}"
    return (
        f"{score}, negative log likelihood {held_out.nll:.4f} +- {held_out.nll_error:.4f} a row, {held_out.rows} rows"
    )


def _data_line(problem: Problem) -> str:
    data = problem.data
    line = f"{problem.settings.data}: {len(data.train.y)} training rows, {len(data.names)} coefficients"
    return line if data.classes is None else f"{line}; success is {data.classes[1]!r}, failure {data.classes[0]!r}"


# ------------------------------------------------------------------------------------ write


def write(outcome: Outcome) -> Path:
    """Write posterior.pt, coefficients.csv, trace.csv, summary.json, fit.png and config.toml; returns their folder.

    Raises:
        InputError: the files cannot be written.
    """
    problem = outcome.problem
    title = f"{Path(problem.settings.data).name}: {problem.settings.family}, {_short_verdict(outcome.result)}"
    with problem.out.writing() as folder:
        torch.save(saved(outcome), folder / "posterior.pt")
        write_rows(folder / "coefficients.csv", report.Coefficient._fields, outcome.coefficients)
        write_rows(folder / "trace.csv", Record._fields, outcome.result.trace)
        text = json.dumps(summary(outcome), indent=2, ensure_ascii=False)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        (folder / "config.toml").write_text(to_toml(problem.settings), encoding="utf-8")
        trace, rows = outcome.result.trace, outcome.coefficients
        figures.fit_figure(trace, rows, title=title, tolerance=problem.tolerance).savefig(folder / "fit.png")
    return problem.out.path


def _short_verdict(result: FitResult) -> str:
    return f"{'converged' if result.converged else 'not converged'} after {result.evaluations} evaluations"


def saved(outcome: Outcome) -> dict[str, Any]:
    """The content of posterior.pt: tensors and plain values, for ``torch.load(weights_only=True)``."""
    problem = outcome.problem
    return {
        "posterior": {name: tensor.clone() for name, tensor in problem.q.state_dict().items()},
        "settings": to_dict(problem.settings),
        "feature_names": list(problem.data.names),
        "center": torch.as_tensor(problem.data.center),
        "scale": torch.as_tensor(problem.data.scale),
        "classes": None if problem.data.classes is None else list(problem.data.classes),
    }
