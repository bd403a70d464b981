"""Whether a Gaussian fits the posterior of a regression: examined after the run, and told as numbers."""

import math
from dataclasses import replace
from typing import Any

from torchngvi.app.memory import examination
from torchngvi.app.problems import Problem
from torchngvi.app.psis import Proposal
from torchngvi.diagnostics.allowance import Allowance
from torchngvi.diagnostics.examination import examine_fitted
from torchngvi.diagnostics.verdict import Verdict
from torchngvi.errors import TorchngviError
from torchngvi.fitting.records import FitResult
from torchngvi.models.guarded import Guarded
from torchngvi.posteriors.gaussian import Gaussian


def examined(result: FitResult, q: Gaussian, problem: Problem) -> FitResult:
    """The result with a verdict on the Gaussian, in the names of the columns; or with the reason for none."""
    model, settings = problem.model, problem.settings
    allowed = examination(model.num_data, model.dim)
    if not math.isfinite(result.loss) or not allowed:
        why = "the data are large" if math.isfinite(result.loss) else "the ELBO is not finite"
        return replace(result, unexamined=why)
    try:
        target = Guarded(model)
        verdict = examine_fitted(q, Allowance(target, allowed, allowed), seed=settings.seed)
    except (TorchngviError, RuntimeError, ArithmeticError) as error:  # the fit is not lost for it
        return replace(result, unexamined=str(error).rstrip("."))
    return replace(result, examination=verdict).named(problem.data.names)


def sentence(result: FitResult, proposal: Proposal) -> str:
    """What the line says: the word and what to do; k-hat of q only where no verdict was reached, which has it too."""
    known = result.examination is not None
    said = result.approximation if known else f"{result.approximation} k-hat of q: {proposal}."
    return said + ("" if result.converged else " (Before convergence.)")


def numbers(verdict: Verdict | None) -> dict[str, Any]:
    """Of ``summary.json``; all None where nothing was examined.

    >>> numbers(None)["gaussian"] is None
    True
    """
    if verdict is None:
        return dict.fromkeys(("gaussian", "gaussian_reasons", "gaussian_worst", "gaussian_nats", "other_modes"))
    own = None if verdict.sampled is None else verdict.sampled.from_q.nats
    return {
        "gaussian": verdict.word,
        "gaussian_reasons": list(verdict.reasons),
        "gaussian_worst": [_coordinate(verdict, k) for k in verdict.worst()],
        "gaussian_nats": own,
        "other_modes": len(verdict.modes),
    }


def _coordinate(verdict: Verdict, k: int) -> dict[str, Any]:
    """Standard deviations of one coefficient, by q and by what ought to be."""
    shape, sampled, sd = verdict.shape, verdict.sampled, float(verdict.marginals.sd[k])
    found = {
        "name": verdict.marginals.name(k),
        "sd": sd,
        "response_sd": None if shape is None else sd * math.exp(float(shape.log_sd[k])),
        "sampled_sd": None if sampled is None else float(sampled.corrected.sd[k]),
        "sampled_mean": None if sampled is None else float(sampled.corrected.mean[k]),
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }
