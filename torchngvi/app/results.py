"""The results of a run of ``torchngvi fit``, printed and written; nothing is written before the end."""

from pathlib import Path
from typing import Any

from torchngvi.app import approximation, findings, psis
from torchngvi.app.findings import Findings
from torchngvi.app.runs import Outcome
from torchngvi.models.standardize import NormalPrior


def _findings(outcome: Outcome) -> Findings:
    problem = outcome.problem
    return Findings(
        problem.settings,
        problem.data,
        problem.encoding,
        problem.model.likelihood,
        NormalPrior(*problem.model.prior[:2]),
        len(problem.data.train.y),
        problem.q,
        outcome.result,
        outcome.coefficients,
        outcome.effects,
        outcome.held_out,
        problem.tolerance,
        problem.notes,
        outcome.warnings,
    )


def summary(outcome: Outcome) -> dict[str, Any]:
    """The run as plain numbers and texts; numbers that are not finite become None."""
    proposal = outcome.proposal
    own = {
        "elbo_sampled": outcome.elbo_sampled,
        "elbo_sampled_standard_error": outcome.elbo_error,
        "draws": outcome.draws,
        **psis.numbers(proposal),
        **approximation.numbers(outcome.result.examination),
        "likelihood_at_limit": list(outcome.problem.at_limit),
        "evidence": [round_._asdict() for round_ in outcome.curve],
    }
    return findings.numbers(_findings(outcome), own)


def show(outcome: Outcome, folder: Path | None) -> None:
    """Print the table of coefficients and the summary, and where they are written."""
    findings.show(
        _findings(outcome),
        outcome.problem.optimizer,
        folder,
        approximation=approximation.sentence(outcome.result, outcome.proposal),
        sampled=f" (by sampling: {outcome.elbo_sampled:.3f} +- {outcome.elbo_error:.3f})",
    )


def write(outcome: Outcome) -> Path:
    """Write posterior.pt, coefficients.csv, trace.csv, summary.json, fit.png and config.toml."""
    out = outcome.problem.out
    with out.writing() as folder:
        findings.write(_findings(outcome), summary(outcome), folder)
    return out.path
