"""The results of a run of ``torchngvi fit``, printed and written; nothing is written before the end."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from torchngvi.app import approximation, figures, psis, report
from torchngvi.app.config import to_dict, to_toml
from torchngvi.app.encoding import Column, Encoding
from torchngvi.app.outputs import write_rows
from torchngvi.app.problems import Problem
from torchngvi.app.runs import HeldOut, Outcome
from torchngvi.fitting.records import FitResult, Record
from torchngvi.models.likelihoods import GaussianNoise

RATIOS = {"bernoulli_logit": "odds ratio", "poisson_log": "rate ratio"}  # what exp(coefficient) is


def summary(outcome: Outcome) -> dict[str, Any]:
    """The run as plain numbers and texts; numbers that are not finite become None.

    Args:
        outcome: the run.

    Returns:
        The content of summary.json.
    """
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
        "k_hat": outcome.proposal.k_hat,
        "k_hat_draws": outcome.proposal.draws,
        "effective_draws": outcome.proposal.effective,
        "k_hat_verdict": psis.verdict(outcome.proposal.k_hat, outcome.proposal.draws),
        **approximation.numbers(result.verdict),
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
        "prior_precision": float(problem.model.prior.precision[-1]),
        "intercept_sd": float(problem.model.prior.precision[0]) ** -0.5 if problem.settings.intercept else None,
        "baselines": _baselines(problem),
        "evidence": [round_._asdict() for round_ in outcome.curve],
        "noise": likelihood.noise if isinstance(likelihood, GaussianNoise) else None,
        "notes": list(problem.notes),
        "warnings": list(outcome.warnings),
        "settings": to_dict(problem.settings),
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}


def _verdict(result: FitResult) -> str:
    return f"{'converged' if result.converged else 'not converged'}, {result.reason}"


def show(outcome: Outcome, folder: Path | None) -> None:
    """Print the table of coefficients and the summary, and where they are written.

    Args:
        outcome: the run.
        folder: the folder of the results; None where nothing was written.
    """
    problem, held_out = outcome.problem, outcome.held_out
    s, result = problem.settings, outcome.result
    tempered = "" if s.temperature == 1 else f", at temperature {s.temperature:g}"
    lines = [
        ("verdict", _verdict(result)),
        ("ELBO", f"{-result.loss:.4f}{tempered} (by sampling: {outcome.elbo_sampled:.3f} +- {outcome.elbo_error:.3f})"),
        (
            "approximation",
            approximation.sentence(result, outcome.proposal),
        ),
        ("held out", _held_out_line(held_out)),
        ("cost", f"{result.evaluations} evaluations, {result.trace[-1].seconds:.2f} s"),
        ("data", _data_line(problem)),
        ("model", s.family),
        ("priors", _prior_line(problem)),
        *(("baselines", text) for text in [_baseline_line(problem)] if text),
        *(("note", note) for note in problem.notes),
        ("method", _method_line(problem)),
        *(("warning", text) for text in outcome.warnings),
        ("written to", f"{folder}/" if folder else "no folder"),
    ]
    table = report.coefficient_table(
        outcome.effects,
        ratio=RATIOS.get(s.family),
        standardized=outcome.coefficients if s.standardize else (),
    )
    report.show(
        table,
        report.summary_block(_title(outcome), lines, good=result.converged and not outcome.warnings),
    )


def _baselines(problem: Problem) -> dict[str, str]:
    """Of each column of categories, the level that the effects of the others are relative to."""
    return {} if problem.encoding is None else {c.name: c.baseline for c in problem.encoding.categories if c.levels}


def _baseline_line(problem: Problem) -> str:
    texts = [f"{name} = {level}" for name, level in _baselines(problem).items()]
    return f"{', '.join(texts)}; the effects of other levels are relative to them" if texts else ""


def _prior_line(problem: Problem) -> str:
    s, precision = problem.settings, problem.model.prior.precision
    unit = "per sd of a column" if s.standardize else "per unit of a column"
    parts = [f"intercept N(0, {float(precision[0]) ** -0.5:.4g}^2)"] if s.intercept else []
    if len(precision) > len(parts):
        scale = f"{float(precision[-1]) ** -0.5:.4g}^2"
        parts.insert(0, f"coefficients N(0, {scale}) {unit} (precision {float(precision[-1]):.4g})")
    return ", ".join(parts)


def _method_line(problem: Problem) -> str:
    s, optimizer = problem.settings, problem.optimizer
    structure = f" of structure {s.structure}" if s.structure else ""
    steps = "steps found by trial" if optimizer.step_size.needs_trial else f"lr {_lr(optimizer.param_groups[0]):g}"
    return f"{s.method}, {s.posterior} posterior{structure}, {steps}"


def _lr(group: dict[str, Any]) -> float:
    """The rate of a method, before any schedule."""
    return group.get("initial_lr", group["lr"])


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


def write(outcome: Outcome) -> Path:
    """Write posterior.pt, coefficients.csv, trace.csv, summary.json, fit.png and config.toml.

    Args:
        outcome: the run.

    Returns:
        Their folder.

    Raises:
        InputError: the files cannot be written.
    """
    problem = outcome.problem
    title = f"{Path(problem.settings.data).name}: {problem.settings.family}, {_short_verdict(outcome.result)}"
    with problem.out.writing() as folder:
        torch.save(saved(outcome), folder / "posterior.pt")
        write_rows(folder / "coefficients.csv", *_effect_rows(outcome))
        write_rows(folder / "trace.csv", Record._fields, outcome.result.trace)
        text = json.dumps(summary(outcome), indent=2, ensure_ascii=False)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        (folder / "config.toml").write_text(to_toml(problem.settings), encoding="utf-8")
        trace, rows = outcome.result.trace, outcome.coefficients
        figures.fit_figure(trace, rows, title=title, tolerance=problem.tolerance).savefig(folder / "fit.png")
    return problem.out.path


def _effect_rows(outcome: Outcome) -> tuple[list[str], list[list[Any]]]:
    """The header and the rows of coefficients.csv: per unit of a column, ratios where there are, and as fitted."""
    header = list(report.Coefficient._fields)
    rows: list[list[Any]] = [list(row) for row in outcome.effects]
    if outcome.problem.settings.family in RATIOS:
        header += ["ratio", "ratio_low", "ratio_high"]
        for row in rows:
            row += [report.exponential(row[place]) for place in (1, 3, 4)]
    header += [f"fitted_{name}" for name in report.Coefficient._fields[1:]]
    for row, fitted in zip(rows, outcome.coefficients, strict=True):
        row += fitted[1:]
    return header, rows


def _short_verdict(result: FitResult) -> str:
    return f"{'converged' if result.converged else 'not converged'} after {result.evaluations} evaluations"


def saved(outcome: Outcome) -> dict[str, Any]:
    """The content of posterior.pt: tensors and plain values, for ``torch.load(weights_only=True)``.

    Args:
        outcome: the run.

    Returns:
        The state of the posterior, the settings, and the names and scales of the columns.
    """
    problem = outcome.problem
    return {
        "posterior": {name: tensor.clone() for name, tensor in problem.q.state_dict().items()},
        "settings": to_dict(problem.settings),
        "feature_names": list(problem.data.names),
        "center": torch.as_tensor(problem.data.center),
        "scale": torch.as_tensor(problem.data.scale),
        "classes": None if problem.data.classes is None else list(problem.data.classes),
        "fill": torch.as_tensor(problem.data.fill),
        "columns": [[c.name, list(c.levels), c.usual] for c in _encoding(problem).columns],
        "noise": problem.model.likelihood.noise if isinstance(problem.model.likelihood, GaussianNoise) else None,
    }


def _encoding(problem: Problem) -> Encoding:
    """How a table of new rows becomes a design; of a file without texts, its columns as they are."""
    names = problem.data.names[int(problem.settings.intercept) :]
    return problem.encoding or Encoding(tuple(Column(name) for name in names))
