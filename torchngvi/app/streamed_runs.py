"""``torchngvi fit`` on tables of more rows than memory holds: an exact fit in passes over batches of rows."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchngvi import registry
from torchngvi.app import report
from torchngvi.app.config import Settings, to_dict, to_toml
from torchngvi.app.outputs import OutputFolder, write_rows
from torchngvi.app.streams import Designs, Frames, Layout, first_pass
from torchngvi.diagnostics import accuracy, log_predictive_density, predictive_mean
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult, Record
from torchngvi.models import Streamed
from torchngvi.models.likelihoods import FAMILIES, GaussianNoise, Likelihood
from torchngvi.posteriors.gaussian import Gaussian

_PRIOR_PRECISION = 0.1
_ROWS = 100_000  # of a batch


def in_batches(settings: Settings) -> bool:
    """Say whether the rows are to be read in batches: a pattern of files, or a number of rows was given."""
    return settings.is_pattern or settings.batch_rows is not None


@dataclass(frozen=True)
class Scores:
    """Scores on the rows that were held out, weighted where there are weights."""

    rows: int
    nll: float  # -log p(y | x) a row
    nll_error: float  # standard error
    accuracy: float | None  # of classes
    rmse: float | None  # of the predictive mean, for counts and real numbers


@dataclass(frozen=True)
class Run:
    """The outcome of a fit in batches."""

    settings: Settings
    layout: Layout
    result: FitResult
    precision: float  # of the prior
    held_out: Scores | None


def run(settings: Settings, overwrite: bool) -> FitResult:
    """Fit a regression to the rows of files, print the result, and write it into a folder.

    The folder gets ``posterior.pt``, ``coefficients.csv``, ``trace.csv``, ``summary.json`` and ``config.toml``.

    Args:
        settings: the settings of the run.
        overwrite: whether files of an earlier run may be replaced.

    Returns:
        The result.

    Raises:
        InputError: files, columns or settings that cannot be used.
    """
    out = OutputFolder(settings.folder, overwrite=overwrite)
    if not settings.has_gaussian_posterior:
        got = f"{settings.posterior} and {settings.method}"
        raise InputError(f"rows in batches need a Gaussian posterior and a method for it; got {got}.")
    frames = Frames(settings.data, settings.batch_rows or _ROWS)
    layout = first_pass(frames, settings)
    likelihood, precision = _likelihood(settings), _precision(settings, layout)
    dtype = getattr(torch, settings.dtype)
    model = Streamed.linear(
        Designs(frames, layout, settings),
        layout.rows[0],
        likelihood,
        dtype=dtype,
        prior_precision=torch.tensor(precision, dtype=dtype),
        temperature=settings.temperature,
        classes=(0, 1) if settings.has_classes else None,
    )
    dim = len(layout.names)
    scale = min(precision**-0.5, dim**-0.5)
    q = registry.posterior(settings.posterior, dim, structure=settings.structure, scale=scale, dtype=dtype)
    assert isinstance(q, Gaussian)
    usual = settings.method == "vn" and settings.lr is None  # which begins on a part of the rows
    result = fit(
        q,
        model,
        None if usual else registry.method(settings.method, q, settings.lr),
        tolerance=settings.tolerance,
        max_evaluations=settings.max_evaluations,
        progress=settings.progress,
    )
    result = replace(result, unexamined="the rows are read in batches").named(layout.names)
    held = _scores(model, q, Designs(frames, layout, settings, train=False)) if layout.rows[1] else None
    outcome = Run(settings, layout, result, precision, held)
    try:
        _write(out, outcome, q)
    finally:
        _show(outcome, q)
    return result


def _likelihood(settings: Settings) -> Likelihood:
    if settings.family != "gaussian":
        return FAMILIES[settings.family]()
    if settings.noise is None:
        raise InputError(
            "noise is the standard deviation of y about its mean, and is not found from rows in batches. Set it "
            "(--noise)."
        )
    return GaussianNoise(settings.noise)


def _precision(settings: Settings, layout: Layout) -> float:
    if settings.prior_precision is not None:
        return settings.prior_precision
    if settings.family == "gaussian" and layout.mean_square > 0:
        return 1 / layout.mean_square
    return _PRIOR_PRECISION


def _scores(model: Streamed, q: Gaussian, batches: Designs) -> Scores:
    """Of the rows held out, summed over a pass."""
    rows, weight, sums, right = 0, 0.0, torch.zeros(4, dtype=torch.float64), 0.0
    first = model.first
    discrete = model.likelihood.discrete
    for design, y, w, offset in batches:
        assert design is not None
        assert y is not None
        X, w = design.to(q.dtype), torch.ones_like(y) if w is None else w
        loss = -log_predictive_density(first, q, X, y, offset).double()  # type: ignore[arg-type]
        sums += torch.stack([(w * loss).sum(), (w * loss).square().sum(), (w**2 * loss).sum(), (w**2).sum()])
        if discrete:
            right += float(accuracy(first, q, X, y, offset, w)) * float(w.sum())  # type: ignore[arg-type]
        else:
            right += float((w * (predictive_mean(first, q, X, offset) - y).square()).sum())  # type: ignore[arg-type]
        rows, weight = rows + len(y), weight + float(w.sum())
    nll = float(sums[0]) / weight
    error = math.sqrt(max(float(sums[1] - 2 * nll * sums[2] + nll**2 * sums[3]), 0.0)) / weight
    share = right / weight
    return Scores(rows, nll, error, share if discrete else None, None if discrete else math.sqrt(share))


def _summary(outcome: Run) -> dict[str, Any]:
    result, layout, held = outcome.result, outcome.layout, outcome.held_out
    return {
        "converged": result.converged,
        "verdict": _verdict(result),
        "elbo": -result.loss if math.isfinite(result.loss) else None,
        "natural_gradient_norm": result.norm if math.isfinite(result.norm) else None,
        "evaluations": result.evaluations,
        "seconds": result.trace[-1].seconds,
        "training_rows": layout.rows[0],
        "held_out_rows": layout.rows[1],
        "held_out_nll_per_row": None if held is None else held.nll,
        "held_out_nll_standard_error": None if held is None else held.nll_error,
        "held_out_accuracy": None if held is None else held.accuracy,
        "held_out_rmse": None if held is None else held.rmse,
        "coefficients": len(layout.names),
        "classes": None if layout.classes is None else {"failure": layout.classes[0], "success": layout.classes[1]},
        "prior_precision": outcome.precision,
        "settings": to_dict(outcome.settings),
    }


def _verdict(result: FitResult) -> str:
    return f"{'converged' if result.converged else 'not converged'}, {result.reason}"


def _write(out: OutputFolder, outcome: Run, q: Gaussian) -> None:
    settings, layout = outcome.settings, outcome.layout
    with out.writing() as folder:
        saved = {
            "posterior": {name: tensor.clone() for name, tensor in q.state_dict().items()},
            "settings": to_dict(settings),
            "feature_names": list(layout.names),
            "center": torch.as_tensor(layout.center),
            "scale": torch.as_tensor(layout.scale),
            "classes": None if layout.classes is None else list(layout.classes),
        }
        torch.save(saved, folder / "posterior.pt")
        rows = report.coefficients(layout.names, q.mean, q.stddev)
        write_rows(folder / "coefficients.csv", report.Coefficient._fields, rows)
        write_rows(folder / "trace.csv", Record._fields, outcome.result.trace)
        text = json.dumps(_summary(outcome), indent=2, ensure_ascii=False)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        (folder / "config.toml").write_text(to_toml(settings), encoding="utf-8")


def _show(outcome: Run, q: Gaussian) -> None:
    settings, layout, result, held = outcome.settings, outcome.layout, outcome.result, outcome.held_out
    score = "no rows (test_fraction 0)"
    if held is not None:
        score = f"accuracy {held.accuracy:.3f}" if held.rmse is None else f"RMSE {held.rmse:.4g}"
        score += f", negative log likelihood {held.nll:.4f} +- {held.nll_error:.4f} a row, {held.rows} rows"
    lines = [
        ("verdict", _verdict(result)),
        ("ELBO", f"{-result.loss:.4f}"),
        ("held out", score),
        ("cost", f"{result.evaluations} passes over the rows, {result.trace[-1].seconds:.2f} s"),
        ("data", f"{settings.data}: {layout.rows[0]} training rows, {len(layout.names)} coefficients"),
        ("model", f"{settings.family}, prior precision {outcome.precision:.4g}"),
        ("written to", f"{settings.folder}/"),
    ]
    unit = "per standard deviation of a column" if settings.standardize else "per unit of a column"
    report.show(
        report.coefficient_table(report.coefficients(layout.names, q.mean, q.stddev), unit),
        report.summary_block("converged" if result.converged else "NOT CONVERGED", lines, good=result.converged),
    )
