"""The problem of a run of ``torchngvi fit``: the data read, the model, the posterior and the optimizer made."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from torchngvi import registry
from torchngvi.adapters import table_checks
from torchngvi.app import design, devices, families, memory, tables, varying
from torchngvi.app.columns import Array, Table
from torchngvi.app.config import Settings
from torchngvi.app.design import Prepared, Rows
from torchngvi.app.encoding import Encoding, check_baselines
from torchngvi.app.names import AUTO, COUNTS, DEFAULT, REAL
from torchngvi.app.outputs import OutputFolder
from torchngvi.errors import InputError
from torchngvi.expectations import Quadrature
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import Likelihood, link_of
from torchngvi.models.standardize import NormalPrior, Standardization, TargetSummary, named_prior
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.gaussian import Gaussian

_MANY = 500.0  # means in a dispersion from which counts are as good as Poisson's
_BEYOND = {  # the ends of ranges
    "scale": "most rows are fitted exactly, so that there is no noise to find it from, or none that is finite. Set it",
    "dispersion": "there are hardly any counts but 0 to find it from. Set it",
}
_WIDE = 10.0  # standard deviations of an intercept's prior beside a number for the others, in the units of the family


@dataclass(frozen=True)
class Problem:
    """The data, model, posterior, optimizer and output folder of a fit, all of them checked."""

    settings: Settings
    data: Prepared
    model: GeneralizedLinear
    q: Gaussian | FlatGaussian
    optimizer: NaturalGradientVI
    tolerance: float
    notes: tuple[str, ...]  # values that were chosen from the data
    out: OutputFolder
    encoding: Encoding | None = None  # of a table with named columns
    warnings: tuple[str, ...] = ()
    at_limit: tuple[str, ...] = ()  # parameters of the likelihood at an end of the range in which they were sought


class Completed(NamedTuple):
    """A model with the parameter of its likelihood that the data speak for, and what is told of it."""

    model: GeneralizedLinear
    note: str = ""
    warning: str = ""
    at_limit: tuple[str, ...] = ()  # the parameter, where it is at an end of the range in which it was sought


def build(settings: Settings, *, overwrite: bool = False) -> Problem:
    """Read the data and make model, posterior and optimizer.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     problem = build(Settings(data="iris", success="virginica", structure="1,4", out=folder))
    >>> problem.q.structure.widest, problem.data.names[:2]
    (4, ('intercept', 'sepal length (cm)'))
    """
    devices.chosen(settings.device, settings.dtype)
    trial = settings.lr is None and registry.by_trial(settings.method)
    table = tables.read_table(
        settings.data,
        target=settings.target,
        weights=settings.weights,
        offset=settings.offset,
        drop=settings.drop,
        n_features=settings.n_features,
        categorical=settings.categorical,
        impute=settings.impute is not None,
        budget=memory.Budget(settings.posterior, settings.structure, trial),
    )
    check_baselines(table.encoding, settings.intercept)
    out = OutputFolder(settings.folder, overwrite=overwrite)  # named after the data, which are wrong more often
    y, classes = design.coded_target(table, classes=settings.has_classes, success=settings.success)
    _check_rows(settings, table, y)
    data = design.prepare(
        table,
        y,
        classes,
        standardize=settings.scales_columns,
        intercept=settings.intercept,
        test_fraction=settings.test_fraction,
        seed=settings.seed,
        impute=settings.impute is not None,
        in_units=settings.prior_word is not None,
    )
    dtype = getattr(torch, settings.dtype)
    likelihood, notes, at = likelihood_of(settings, data.train)
    chosen = prior(settings, data.units, float(np.mean(np.square(data.train.y))), summary(settings, data.train))
    if data.filled:
        notes = (*notes, f"{data.filled} missing entries were filled in with medians of the training rows (--impute)")
    model = GeneralizedLinear(
        torch.as_tensor(data.train.X, dtype=dtype),
        data.train.y,
        likelihood,
        prior_precision=chosen.precision.to(dtype),
        prior_mean=chosen.mean.to(dtype),
        weights=data.train.weights,
        offset=data.train.offset,
        temperature=settings.temperature,
    )
    q = start(settings, chosen, float(np.sqrt(np.square(data.train.X).sum(1).mean())))
    warnings: tuple[str, ...] = ()
    at_limit: tuple[str, ...] = ()
    if at is not None:
        done = completed(settings, model, q, at)
        model, notes = done.model, (*notes, *filter(None, [done.note]))
        warnings, at_limit = tuple(filter(None, [done.warning])), done.at_limit
    parts = {"estimator": Quadrature()} if isinstance(q, Gaussian) else {}
    optimizer = registry.method(settings.method, q, settings.lr, **parts)
    notes = (*table.notes, *varying.in_training(data, table.encoding), *notes)
    if settings.offset is not None and table.offset is not None and settings.family in COUNTS:
        of_log = table_checks.of_exposure(settings.offset, table.offset, y, f"the logarithm of {settings.offset}")
        warnings += (of_log,) if of_log else ()
    warnings += varying.copies(data)
    end = tolerance(settings)
    return Problem(settings, data, model, q, optimizer, end, notes, out, table.encoding, warnings, at_limit)


def start(settings: Settings, prior: NormalPrior, row_norm: float) -> Gaussian | FlatGaussian:
    """Where q starts: at the mean of the prior, predictors with unit standard deviation, never wider than the prior."""
    sd = float(prior.precision[-1]) ** -0.5
    scale = min(sd, 1 / row_norm) if row_norm > 0 else sd
    dtype = getattr(torch, settings.dtype)
    return registry.posterior(
        settings.posterior,
        len(prior.mean),
        structure=settings.structure,
        mean=prior.mean.to(dtype),
        scale=scale,
        dtype=dtype,
    )


def tolerance(settings: Settings) -> float:
    """The tolerance on the natural-gradient norm; where none is chosen what the type of numbers allows."""
    return settings.tolerance or (1e-5 if settings.dtype == "float64" else 1e-2)


def _check_rows(settings: Settings, table: Table, y: Array) -> None:
    """Rules for all rows, held out or not."""
    if not settings.has_classes:
        families.check_targets(settings.family, torch.as_tensor(y))
    if table.weights is not None and table.weights.min() < 0:
        raise InputError(f"weights must not be negative; column {settings.weights!r} has {table.weights.min():g}.")


def likelihood_of(
    settings: Settings, train: Rows
) -> tuple[Likelihood, tuple[str, ...], Callable[[float], Likelihood] | None]:
    """The likelihood, a note where its noise is found from the data, and of which parameter a fit is to find more."""
    noise = settings.noise
    notes: tuple[str, ...] = ()
    if settings.family == "gaussian" and noise is None:
        noise = _residual_noise(train)
        said = f"noise {noise:.4g} is the residual standard deviation of least squares (--noise sets another)"
        notes = (said,) if settings.prior_precision != AUTO else ()  # else a search begins there
    likelihood, at = families.open_parameter(
        settings.family,
        noise=noise,
        dispersion=settings.dispersion,
        dof=settings.dof,
        start=lambda: _residual_noise(train),
    )
    return likelihood, notes, at


def completed(
    settings: Settings, model: GeneralizedLinear, q: Gaussian | FlatGaussian, at: Callable[[float], Likelihood]
) -> Completed:
    """The model with the parameter of its likelihood that the data speak for, and what is told of it."""
    model = copy.copy(model)
    search = copy.deepcopy(q) if isinstance(q, Gaussian) else CholeskyGaussian(q.dim, scale=0.1, dtype=q.mean.dtype)
    found = families.maximised(search, model, at, max_evaluations=settings.max_evaluations)
    model.likelihood = found.likelihood
    name, flag = ("scale", "noise") if settings.family == "student_t" else ("dispersion", "dispersion")
    value = getattr(model.likelihood, name)
    under = " and the default prior" if settings.prior_precision == AUTO else ""
    told = f"{name} {value:.4g} is the most probable under {found.prior}{under}, found in {found.fits} fits"
    limit = (name,) if found.end else ()
    if name == "dispersion" and value > _MANY * max(1.0, float(model.y.mean())):
        at_end = f", and {name} {value:.4g} is the upper end of the range in which it is sought" if found.end else ""
        less = "--likelihood poisson says the same with one parameter less"
        return Completed(model, f"the counts vary no more than Poisson's{at_end}: {less}", at_limit=limit)
    if found.end:
        where = f"the {found.end} end of the range in which it is sought" if found.there else "what its prior says"
        warning = f"{name} {value:.4g} is {where}: {_BEYOND[name]}"
        return Completed(model, warning=f"{warning} (--{flag}).", at_limit=limit)
    if not found.settled:
        warning = f"{name} {value:.4g} is where the search has ended after {found.fits} fits, before it had settled. "
        return Completed(model, warning=f"{warning}Raise max_evaluations, or set it (--{flag}).")
    return Completed(model, f"{told} (--{flag} sets another)")


def prior(settings: Settings, units: Standardization, mean_square: float, targets: TargetSummary) -> NormalPrior:
    """The prior of the coefficients of the columns of the fit: of a number, or of a word in the units of the data.

    >>> from torchngvi.app.design import unscaled
    >>> prior(Settings(data="iris", prior_precision=0.1), unscaled(3, True), 1.0, TargetSummary(9, 0.5, 0.5)).precision
    tensor([0.0100, 0.1000, 0.1000], dtype=torch.float64)
    """
    word = settings.prior_word
    if word is not None:
        location, unit = targets.location_and_unit(link_of(settings.family), through_0=units.constant is None)
        return named_prior(DEFAULT if word == AUTO else word, location, unit, units, settings.intercept_sd)
    unit = math.sqrt(mean_square) if settings.family in REAL and mean_square > 0 else 1.0
    precision = torch.full_like(units.scales, float(settings.prior_precision or 0.0))
    if settings.intercept:
        precision[0] = (settings.intercept_sd or _WIDE * unit) ** -2
    return NormalPrior(torch.zeros_like(precision), precision)


def summary(settings: Settings, train: Rows) -> TargetSummary:
    """Summarise the targets of the training rows, as the priors in the units of the data read them."""
    y = torch.as_tensor(train.y)
    offset = torch.zeros_like(y) if train.offset is None else torch.as_tensor(train.offset)
    weights = torch.ones_like(y) if train.weights is None else torch.as_tensor(train.weights)
    return TargetSummary.of(y, link_of(settings.family), offset, weights)


def _residual_noise(train: Rows) -> float:
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
