"""What is told of every fit of a regression, its rows in memory or in files: in print, as numbers, and in files."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from rich.console import Group
from rich.text import Text

from torchngvi.app import figures, report
from torchngvi.app.config import Settings, to_dict, to_toml
from torchngvi.app.design import Columns
from torchngvi.app.encoding import Column, Encoding
from torchngvi.app.families import described
from torchngvi.app.outputs import write_content, write_rows
from torchngvi.fitting.records import FitResult, Record
from torchngvi.models.likelihoods import GaussianNoise, Likelihood
from torchngvi.models.standardize import NormalPrior
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.gaussian import Gaussian

RATIOS = {  # what exp(coefficient) is
    "bernoulli_logit": "odds ratio",
    "poisson_log": "rate ratio",
    "negative_binomial": "rate ratio",
}


@dataclass(frozen=True)
class HeldOut:
    """Scores on the rows that were held out, weighted where the data have weights."""

    rows: int
    nll: float  # -log p(y | x) a row
    nll_error: float  # standard error
    accuracy: float | None  # of classes
    rmse: float | None  # of the predictive mean, for counts and real numbers


@dataclass(frozen=True)
class Findings:
    """The model, the data and the posterior of a fit, as the report speaks of them."""

    settings: Settings
    columns: Columns
    encoding: Encoding | None  # of a table with named columns
    likelihood: Likelihood
    prior: NormalPrior  # of the columns of the fit
    rows: int  # of training
    q: Gaussian | FlatGaussian  # as it was fitted
    result: FitResult
    coefficients: list[report.Coefficient]  # of the columns of the fit, which may be standardised
    effects: list[report.Coefficient]  # per unit of a column of the table
    held_out: HeldOut | None
    tolerance: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Whether the run has converged, and why it ended."""
        return f"{'converged' if self.result.converged else 'not converged'}, {self.result.reason}"

    @property
    def baselines(self) -> dict[str, str]:
        """Of each column of categories, the level that the effects of the others are relative to."""
        return {} if self.encoding is None else {c.name: c.baseline for c in self.encoding.categories}


def held_out_numbers(held_out: HeldOut | None) -> dict[str, Any]:
    """The scores under their names in summary.json.

    >>> held_out_numbers(None)["held_out_rows"]
    0
    """
    named = {
        "held_out_rows": 0 if held_out is None else held_out.rows,
        "held_out_nll_per_row": None if held_out is None else held_out.nll,
        "held_out_nll_standard_error": None if held_out is None else held_out.nll_error,
        "held_out_accuracy": None if held_out is None else held_out.accuracy,
        "held_out_rmse": None if held_out is None else held_out.rmse,
    }
    return _finite(named)


def _finite(named: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in named.items()}


def numbers(found: Findings, own: Mapping[str, Any]) -> dict[str, Any]:
    """The run as plain numbers and texts; numbers that are not finite become None."""
    result, classes = found.result, found.columns.classes
    every = {
        "converged": result.converged,
        "verdict": found.verdict,
        "elbo": -result.loss,
        "natural_gradient_norm": result.norm,
        "tolerance": found.tolerance,
        **own,
        **held_out_numbers(found.held_out),
        "evaluations": result.evaluations,
        "rejected_steps": result.trace[-1].rejections,
        "seconds": result.trace[-1].seconds,
        "training_rows": found.rows,
        "coefficients": len(found.columns.names),
        "classes": None if classes is None else {"failure": classes[0], "success": classes[1]},
        "prior": _prior_line(found),
        **_prior_numbers(found),
        "baselines": found.baselines,
        "likelihood": described(found.likelihood)[1],
        "noise": found.likelihood.noise if isinstance(found.likelihood, GaussianNoise) else None,
        "notes": list(found.notes),
        "warnings": list(found.warnings),
        "settings": to_dict(found.settings),
    }
    return _finite(every)


def show(
    found: Findings,
    optimizer: NaturalGradientVI | None,
    folder: Path | None,
    *,
    approximation: str,
    sampled: str = "",
    unit: str = "evaluations",
) -> None:
    """Print the table of coefficients and the summary, and where they are written."""
    s, result = found.settings, found.result
    tempered = "" if s.temperature == 1 else f", at temperature {s.temperature:g}"
    lines = [
        ("verdict", found.verdict),
        ("ELBO", f"{-result.loss:.4f}{tempered}{sampled}"),
        ("approximation", approximation),
        ("held out", held_out_line(found.held_out)),
        ("cost", f"{result.evaluations} {unit}, {result.trace[-1].seconds:.2f} s"),
        ("data", _data_line(found)),
        ("model", _model_line(found)),
        ("priors", _prior_line(found)),
        *(("baselines", text) for text in [_baseline_line(found)] if text),
        *(("note", note) for note in found.notes),
        ("method", _method_line(s, optimizer)),
        *(("warning", text) for text in found.warnings),
        ("written to", f"{folder}/" if folder else "no folder"),
    ]
    good = result.converged and not found.warnings
    report.show(*_classes(found), _table(found), report.summary_block(_title(found), lines, good=good))


def _classes(found: Findings) -> list[Text]:
    """Which class is predicted: the first line of a result with classes."""
    if found.columns.classes is None:
        return []
    failure, success = found.columns.classes
    if found.settings.success:
        return [Text(f"Predicted is {success!r} against {failure!r}.")]
    order = "" if found.encoding is None or found.settings.target is None else ", the class that sorts last"
    turned = f"--positive {quote(failure)} predicts the other"
    return [Text(f"Predicted is {success!r} against {failure!r}{order}; {turned}.")]


def _table(found: Findings) -> Group:
    s = found.settings
    standardized = found.coefficients if s.scales_columns else ()
    return report.coefficient_table(found.effects, ratio=RATIOS.get(s.family), standardized=standardized)


def _baseline_line(found: Findings) -> str:
    texts = [f"{name} = {level}" for name, level in found.baselines.items()]
    return f"{', '.join(texts)}; the effects of other levels are relative to them" if texts else ""


def _prior_numbers(found: Findings) -> dict[str, float | None]:
    """The precision of the prior of a coefficient, and the mean and standard deviation of that of the intercept."""
    (mean, precision), place = found.prior, found.columns.units.intercept
    others = [float(value) for k, value in enumerate(precision) if k != place]
    return {
        "prior_precision": others[0] if others else None,
        "intercept_mean": None if place is None else float(mean[place]),
        "intercept_sd": None if place is None else float(precision[place]) ** -0.5,
    }


def _prior_line(found: Findings) -> str:
    units = found.columns.units
    return found.prior.describe(units if found.settings.scales_columns else None, units.intercept)


def _method_line(s: Settings, optimizer: NaturalGradientVI | None) -> str:
    structure = f" of structure {s.structure}" if s.structure else ""
    by_trial = optimizer is None or optimizer.step_size.needs_trial
    steps = "steps found by trial" if by_trial else f"lr {_lr(optimizer.param_groups[0]):g}"  # type: ignore[union-attr]
    return f"{s.method}, {s.posterior} posterior{structure}, {steps}"


def _lr(group: dict[str, Any]) -> float:
    """The rate of a method, before any schedule."""
    return group.get("initial_lr", group["lr"])


def _model_line(found: Findings) -> str:
    family, parameters = described(found.likelihood)
    return ", ".join([family, *(f"{name} {value:.4g}" for name, value in parameters.items())])


def _title(found: Findings) -> str:
    if not found.result.converged:
        return "NOT CONVERGED"
    return "converged, with a warning" if found.warnings else "converged"


def held_out_line(held_out: HeldOut | None) -> str:
    """The scores in one line.

    >>> held_out_line(HeldOut(20, 0.5, 0.1, 0.75, None))
    'accuracy 0.750, negative log likelihood 0.5000 +- 0.1000 a row, 20 rows'
    """
    if held_out is None:
        return "no rows (test_fraction 0)"
    score = f"accuracy {held_out.accuracy:.3f}" if held_out.rmse is None else f"RMSE {held_out.rmse:.4g}"
    return (
        f"{score}, negative log likelihood {held_out.nll:.4f} +- {held_out.nll_error:.4f} a row, {held_out.rows} rows"
    )


def _data_line(found: Findings) -> str:
    classes = found.columns.classes
    s = found.settings
    line = f"{s.data}: {found.rows} training rows, {len(found.columns.names)} coefficients"
    line += "" if s.weights is None else f", weights {s.weights!r}"
    line += "" if s.offset is None else f", offset {s.offset!r}"
    return line if classes is None else f"{line}; success is {classes[1]!r}, failure {classes[0]!r}"


def write(found: Findings, summary: Mapping[str, Any], folder: Path) -> None:
    """Write posterior.pt, coefficients.csv, trace.csv, summary.json, fit.png and config.toml."""
    settings, result = found.settings, found.result
    verdict = f"{'converged' if result.converged else 'not converged'} after {result.evaluations} evaluations"
    title = f"{Path(settings.data).name}: {settings.family}, {verdict}"
    write_content(folder, saved(found))
    write_rows(folder / "coefficients.csv", *_effect_rows(found))
    write_rows(folder / "trace.csv", Record._fields, result.trace)
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    (folder / "config.toml").write_text(to_toml(settings), encoding="utf-8")
    figure = figures.fit_figure(result.trace, found.coefficients, title=title, tolerance=found.tolerance)
    figure.savefig(folder / "fit.png")


def _effect_rows(found: Findings) -> tuple[list[str], list[list[Any]]]:
    """The header and the rows of coefficients.csv: per unit of a column, ratios where there are, and as fitted."""
    header = list(report.Coefficient._fields)
    rows: list[list[Any]] = [list(row) for row in found.effects]
    if found.settings.family in RATIOS:
        header += ["ratio", "ratio_low", "ratio_high"]
        for row in rows:
            row += [report.exponential(row[place]) for place in (1, 3, 4)]
    header += [f"fitted_{name}" for name in report.Coefficient._fields[1:]]
    for row, fitted in zip(rows, found.coefficients, strict=True):
        row += fitted[1:]
    return header, rows


def saved(found: Findings) -> dict[str, Any]:
    """The content of posterior.pt: tensors and plain values, for ``torch.load(weights_only=True)``."""
    columns, likelihood = found.columns, found.likelihood
    names = columns.names[int(found.settings.intercept) :]
    encoding = found.encoding or Encoding(tuple(Column(name) for name in names))  # of a file without texts
    return {
        "posterior": {name: tensor.clone() for name, tensor in found.q.state_dict().items()},
        "settings": to_dict(found.settings),
        "feature_names": list(columns.names),
        "center": columns.units.centers,
        "scale": columns.units.scales,
        "intercept": columns.units.intercept,
        "classes": None if columns.classes is None else list(columns.classes),
        "fill": torch.as_tensor(columns.fill),
        "columns": [[c.name, list(c.levels), c.usual] for c in encoding.columns],
        "likelihood": described(likelihood)[1],
    }
