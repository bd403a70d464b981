"""``torchngvi fit`` on tables of more rows than memory holds: an exact fit in passes over batches of rows."""

import math
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from torchngvi import registry
from torchngvi.app import approximation, devices, families, findings, problems, psis, report, varying
from torchngvi.app.config import Settings
from torchngvi.app.findings import Findings, HeldOut
from torchngvi.app.frames import Frames
from torchngvi.app.names import AUTO, REAL
from torchngvi.app.outputs import OutputFolder
from torchngvi.app.psis import Proposal
from torchngvi.app.runs import too_few_rows
from torchngvi.app.streams import Designs, first_pass, roles
from torchngvi.diagnostics import accuracy, log_predictive_density, log_weights, predictive_mean
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.models import Streamed
from torchngvi.models.likelihoods import Likelihood
from torchngvi.posteriors.gaussian import Gaussian

_ROWS = 100_000  # of a batch
_DRAWS = (200, 256)  # behind k-hat, at least and at most: what the log joint takes in one call
_AT_ONCE = 25_000_000  # linear predictors of a batch


def in_batches(settings: Settings) -> bool:
    """Say whether the rows are to be read in batches: a pattern of files, or a number of rows was given."""
    return settings.is_pattern or settings.batch_rows is not None


def run(settings: Settings, overwrite: bool) -> FitResult:
    """Fit a regression to the rows of files, print the result, and write it into a folder.

    The report and the files are those of a table in memory, but for the examination of q, of which there is k-hat
    alone, and `torchngvi.load` reads them.

    Args:
        settings: the settings of the run.
        overwrite: whether files of an earlier run may be replaced.

    Returns:
        The result.

    Raises:
        InputError: files, columns or settings that cannot be used.
    """
    device = devices.chosen(settings.device, settings.dtype)
    _check(settings)
    frames = _frames(settings)
    out = OutputFolder(settings.folder, overwrite=overwrite)
    layout, likelihood, dtype = first_pass(frames, settings), _likelihood(settings), getattr(torch, settings.dtype)
    prior = problems.prior(settings, layout.units, layout.mean_square, layout.summary)
    model = Streamed.linear(
        Designs(frames, layout, settings),
        layout.rows[0],
        likelihood,
        dtype=dtype,
        device=device,
        prior_precision=prior.precision.to(dtype),
        prior_mean=prior.mean.to(dtype),
        temperature=settings.temperature,
        classes=(0, 1) if settings.has_classes else None,
    )
    q = problems.start(settings, prior, layout.row_norm).to(device)
    assert isinstance(q, Gaussian)
    optimizer = None if settings.by_usual_steps else registry.method(settings.method, q, settings.lr)
    tolerance = problems.tolerance(settings)
    result = fit(
        q,
        model,
        optimizer,
        tolerance=tolerance,
        max_evaluations=settings.max_evaluations,
        progress=settings.progress,
    )
    q.to("cpu")  # for the report
    result = replace(result, unexamined="the rows are read in batches").named(layout.names)
    found = Findings(
        settings,
        layout,
        layout.encoding,
        likelihood,
        prior,
        layout.rows[0],
        q,
        result,
        report.coefficients(layout.names, q.mean, q.stddev),
        report.coefficients(layout.names, *layout.units.marginals(q)),
        _scores(model, q, Designs(frames, layout, settings, train=False)) if layout.rows[1] else None,
        tolerance,
        (*frames.notes, *varying.told(layout.same)),
        too_few_rows(layout.rows[0], layout.positive),
    )
    proposal = _proposal(q, model, settings)
    folder = None
    try:
        with out.writing() as place:
            own = {**psis.numbers(proposal), **approximation.numbers(None)}
            findings.write(found, findings.numbers(found, own), place)
        folder = out.path
    finally:
        said = approximation.sentence(result, proposal)
        findings.show(found, optimizer, folder, approximation=said, unit="passes over the rows")
    return result


def _proposal(q: Gaussian, model: Streamed, settings: Settings) -> Proposal:
    """What the importance weights of draws from q are worth, all of them in one pass over the rows."""
    count = max(_DRAWS[0], min(_DRAWS[1], _AT_ONCE // (settings.batch_rows or _ROWS)))
    generator = torch.Generator().manual_seed(settings.seed)
    return psis.proposal(None, log_weights(q, model, count, generator))


def _frames(settings: Settings) -> Frames:
    """The rows, after a look at the columns of the first batch."""
    frames = Frames(settings.data, settings.batch_rows or _ROWS)
    for first in islice(frames, 1):
        roles(first, settings)
    return frames


def _check(settings: Settings) -> None:
    """Refuse what cannot be done in passes."""
    if not settings.has_gaussian_posterior:
        got = f"{settings.posterior} and {settings.method}"
        raise InputError(f"rows in batches need a Gaussian posterior and a method for it; got {got}.")
    if settings.prior_precision == AUTO:
        raise InputError(
            "prior_precision auto takes many fits, which rows in batches are not read for. Set a number, such as that "
            "which auto finds on a part of the rows."
        )
    if settings.impute is not None:
        raise InputError(
            "impute needs the medians of the columns, which are not found from rows in batches. Fill the entries in "
            "before, and leave impute out."
        )


def _likelihood(settings: Settings) -> Likelihood:
    if settings.family in REAL and settings.noise is None:
        raise InputError(
            "noise is the standard deviation of y about its mean, and is not found from rows in batches. Set it "
            "(--noise)."
        )
    if settings.family == "negative_binomial" and settings.dispersion is None:
        raise InputError(
            "dispersion is r in the variance mean + mean^2/r, and is not found from rows in batches. Set it "
            "(--dispersion), such as the one that is found on a part of the rows."
        )
    return families.open_parameter(
        settings.family, noise=settings.noise, dispersion=settings.dispersion, dof=settings.dof, start=lambda: 1.0
    )[0]


def _scores(model: Streamed, q: Gaussian, batches: Designs) -> HeldOut:
    """Of the rows held out, summed over a pass."""
    rows, weight, sums, right = 0, 0.0, torch.zeros(4, dtype=torch.float64), 0.0
    first: Any = model.first.to("cpu")  # type: ignore[attr-defined]
    discrete = model.likelihood.discrete
    for design, y, w, offset in batches:
        assert design is not None
        assert y is not None
        X, w = design.to(q.dtype), torch.ones_like(y) if w is None else w
        loss = -log_predictive_density(first, q, X, y, offset).double()
        sums += torch.stack([(w * loss).sum(), (w * loss).square().sum(), (w**2 * loss).sum(), (w**2).sum()])
        if discrete:
            right += float(accuracy(first, q, X, y, offset, w)) * float(w.sum())
        else:
            right += float((w * (predictive_mean(first, q, X, offset) - y).square()).sum())
        rows, weight = rows + len(y), weight + float(w.sum())
    nll = float(sums[0]) / weight
    error = math.sqrt(max(float(sums[1] - 2 * nll * sums[2] + nll**2 * sums[3]), 0.0)) / weight
    share = right / weight
    return HeldOut(rows, nll, error, share if discrete else None, None if discrete else math.sqrt(share))
