"""One run of ``torchngvi fit``: read, prepare, fit, score, and write what came of it."""

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from torchngvi.app import prepare, report
from torchngvi.app.outputs import OutputFolder, write_content
from torchngvi.app.prepare import CLASSES, Prepared
from torchngvi.app.readers import Read, read_table
from torchngvi.app.settings import Settings
from torchngvi.errors import InputError
from torchngvi.tables.families import family_of
from torchngvi.tables.model import TableModel, regression
from torchngvi.tables.result import TableResult
from torchngvi.tables.saved import state_of

_WIDE = 10.0  # sds of an intercept's prior beside a number for the others, in the units of the family
_DRAWS = 4096  # of a model without groups, where they cost hardly anything: a third digit is known then
_FEWEST_ROWS = 10  # of training, to say something about a posterior
_ENDS = (1e-6, 1e6)  # of a prior precision that is looked for
_CLOSE, _FITS = 0.1, 20  # of its logarithm, of which the evidence is flat, and fits at most
_SMALL = 10  # the least of the counts from which on a Gaussian is usual for them
_PRIOR = re.compile(r"(.+?)=\s*([A-Za-z][\w-]*\s*\(.*\)|flat|default)\s*")


class HeldOut(NamedTuple):
    """Scores on rows that were held out, weighted where the data have weights.

    Attributes:
        rows: how many.
        nll: -log p(y | x) a row.
        error: its standard error.
        accuracy: of classes, the share of rows whose likeliest class is theirs.
        rmse: of the mean, for counts and real numbers.
    """

    rows: int
    nll: float
    error: float
    accuracy: float | None
    rmse: float | None

    def __str__(self) -> str:
        first = f"RMSE {self.rmse:.4g}" if self.accuracy is None else f"accuracy {self.accuracy:.3f}"
        return f"{first}, negative log likelihood {self.nll:.4f} +- {self.error:.4f} a row"


class Outcome(NamedTuple):
    """A fit and what is said of it.

    Attributes:
        settings: of the run.
        prepared: the rows.
        result: the fit.
        held_out: its scores, and those of the base rate, the same family with an intercept alone.
        notes: what was done with the table.
        warnings: what speaks against the result.
        marginal: tables of average marginal effects by column.
    """

    settings: Settings
    prepared: Prepared
    result: TableResult
    held_out: tuple[HeldOut, HeldOut | None] | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    marginal: Mapping[str, Any]
    priors: str


def run(settings: Settings, overwrite: bool) -> TableResult:
    """Fit, print the report, and write the folder of the run."""
    family = settings.family or ("gaussian" if settings.formula is not None else "bernoulli")
    name = family_of(family).name
    read = read_table(settings.data)
    made = prepare.of(read, settings, name)
    out = OutputFolder(settings.folder, overwrite=overwrite)  # named after the data, which are wrong more often
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = regression(made.columns.formula, made.train, family, weights=settings.weights, positive=made.positive)
        model, said, priors = _with_priors(model, settings, made)
        draws = settings.draws or (None if model.design.factors else _DRAWS)
        result = model.fit(draws=draws, seed=settings.seed, progress=settings.progress)
        held_out = _held_out(result, settings, made, family)
        marginal = {column: result.marginal_effects(column) for column in settings.marginal}
    told = [str(w.message).rstrip(".") for w in caught if not issubclass(w.category, DeprecationWarning)]
    told = [f"{text[0].lower()}{text[1:]}" for text in dict.fromkeys(told)]
    outcome = Outcome(
        settings,
        made,
        result,
        held_out,
        (*made.notes, *told, *said),
        _cautions(result, settings, read, made),
        marginal,
        priors or result.priors,
    )
    folder = None
    try:
        with out.writing() as place:
            _write(outcome, place)
        folder = out.path
    finally:
        report.show(outcome, folder)  # also where nothing could be written, so that the fit is not lost
    return result


# ------------------------------------------------------------------------------------ priors


def _with_priors(model: TableModel, s: Settings, made: Prepared) -> tuple[TableModel, tuple[str, ...], str]:
    """The model with the priors of the settings, a note where one was looked for, and priors that are one in words."""
    if not s.prior and s.prior_precision is None:
        return model, (), ""

    def under(priors: Any) -> TableModel:
        return TableModel(model.design, model.family, priors=priors, formula=model.formula)

    if s.prior:
        own = {prepare.renamed(made.columns, name): name for name in model.design.names}
        pairs = [_PRIOR.fullmatch(text) for text in s.prior]
        for text, pair in zip(s.prior, pairs, strict=True):
            if pair is None:
                raise InputError(f"a prior is written NAME=PRIOR, such as 'x=normal(0, 1)'; got {text!r}.")
        return under({own.get(pair[1], pair[1]): pair[2] for pair in pairs if pair}), (), ""
    if s.prior_precision == "flat":
        return under("flat"), (), ""

    def of(precision: float) -> TableModel:
        return under(_of_precision(model, precision, s)[0])

    precision: Any = s.prior_precision
    note: tuple[str, ...] = ()
    if not isinstance(precision, float):
        precision, note = _by_evidence(of, s)
    return of(precision), note, _of_precision(model, precision, s)[1]


def _of_precision(model: TableModel, precision: float, s: Settings) -> tuple[dict[str, str], str]:
    """N(0, 1/B) of each coefficient per standard deviation of its column, and a wide prior of the intercept."""
    units, y = model.coordinates.columns, model.design.y[0]
    unit = math.sqrt(float(y.square().mean())) if model.family.link == "identity" else 1.0
    wide = s.intercept_sd or _WIDE * (unit or 1.0)
    found = {}
    for place, (name, scale) in enumerate(zip(model.design.names, units.scales.tolist(), strict=True)):
        sd = wide if place == units.intercept else precision**-0.5 / (abs(scale) if s.standardize else 1.0)
        found[name] = f"normal(0, {sd!r})"
    per = "per sd of a column " if s.standardize else ""
    said = [f"coefficients N(0, {precision**-0.5:.4g}^2) {per}(precision {precision:.4g})"]
    said += [f"intercept at the means N(0, {wide:.4g}^2)"] if units.intercept is not None else []
    said += [f"{name} {prior}" for name, prior in model.priors.table() if name not in model.design.names]
    return found, ", ".join(said)


def _by_evidence(of: Callable[[float], TableModel], s: Settings) -> tuple[float, tuple[str, ...]]:
    """The prior precision with the largest evidence p(y), and a note of it."""
    fits: dict[float, float] = {}

    def loss(log: float) -> float:
        evidence = of(math.exp(log)).fit(seed=s.seed, progress=False).log_evidence
        if evidence is None:
            raise InputError("prior_precision auto needs log p(y), which this model has not. Set a number.")
        fits[log] = -evidence
        return -evidence

    ends = tuple(map(math.log, _ENDS))
    options = {"xatol": _CLOSE, "maxiter": _FITS}
    best = float(minimize_scalar(loss, bounds=ends, method="bounded", options=options).x)
    at_end = min(abs(best - end) for end in ends) < 2 * _CLOSE
    note = f"prior precision {math.exp(best):.3g} has the largest evidence of the data, found in {len(fits)} fits"
    note += ", and is at the end of the range: the data speak for no effect" if at_end and best > 0 else ""
    return math.exp(best), (note,)


# ------------------------------------------------------------------------------------ scores


def _held_out(result: TableResult, s: Settings, made: Prepared, family: str) -> tuple[HeldOut, HeldOut | None] | None:
    """The scores on the rows held out, and those of the base rate, if any were."""
    if not len(made.test):
        return None
    left = made.columns.formula.partition("~")[0]
    offset = re.findall(r"offset\((?:[^()]|\([^()]*\))*\)", made.columns.formula)
    own = scores(result, made.test)
    try:
        base = regression(
            f"{left}~ {' + '.join(['1', *offset])}", made.train, family, weights=s.weights, positive=made.positive
        ).fit(seed=s.seed, progress=False)
        return own, scores(base, made.test)
    except InputError:  # a family that cannot have an intercept alone
        return own, None


@torch.no_grad()
def scores(result: TableResult, test: Any) -> HeldOut:
    """Score the predictions for rows that were held out; p(y) of a row is its mean over the draws."""
    rows, family, parts = result.formula.of(test, require_response=True), result.family, []
    y, w = family.checked(rows.y), rows.weights
    predictor = result.predictor(rows, "", 0)
    for at in predictor.parts():
        eta = predictor.linear(at)[0]
        log_p = family.log_prob(eta, tuple(part[at] for part in y), predictor.draws.phi[:, None])
        parts.append(math.log(len(eta)) - log_p.logsumexp(0))
    nll, mean = torch.cat(parts), predictor.all("mean").mean(0)
    loss, error = _weighted_mean(nll, w)
    classes = family.outcomes is not None or family.name in CLASSES
    if classes:
        likeliest = mean.argmax(-1) if mean.ndim > 1 else mean > 0.5
        return HeldOut(len(test), loss, error, _weighted_mean((likeliest == y[0]).double(), w)[0], None)
    seen = y[0] / y[1] if "trials" in family.extra else y[0]
    return HeldOut(len(test), loss, error, None, math.sqrt(_weighted_mean((mean - seen).square(), w)[0]))


def _weighted_mean(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """The mean and its standard error, which is NaN of a single value."""
    share = weights / weights.sum()
    mean = (share * values).sum()
    error = (share.square() * (values - mean).square()).sum().sqrt()
    return float(mean), float(error) if len(values) > 1 else math.nan


# ------------------------------------------------------------------------------------ cautions


def _cautions(result: TableResult, s: Settings, read: Read, made: Prepared) -> tuple[str, ...]:
    """What speaks against a result that has converged."""
    found = [result.formula.asked] if result.formula.asked else []
    rows = int((result.design.weights > 0).sum())
    if rows < _FEWEST_ROWS:
        positive = " of positive weight" if rows < len(made.train) else ""
        found.append(
            f"{rows} training rows{positive} are too few to believe the result: the posterior is little more than the "
            f"prior, converged or not. Take at least {_FEWEST_ROWS}."
        )
    if s.formula is not None and s.family is None:
        found += _not_gaussian(read, result.formula.response)
    return (*found, *_overdispersed(result))


def _not_gaussian(read: Read, response: str) -> list[str]:
    """A warning of a response that looks like counts, or like two classes, where no family was said."""
    if response not in read.frame or getattr(read.frame[response].dtype, "kind", "O") not in "iu":
        return []
    values = read.frame[response]
    if set(values.unique()) <= {0, 1}:
        return [f"{response} is 0 or 1, fitted as gaussian. If these are two classes, say --likelihood bernoulli."]
    if not 0 <= values.min() < _SMALL:
        return []
    return [
        f"{response} are whole numbers, fitted as gaussian. If they are counts, say --likelihood poisson, or "
        "negative_binomial where their variance exceeds their mean."
    ]


@torch.no_grad()
def _overdispersed(result: TableResult) -> tuple[str, ...]:
    """A warning of counts that vary more about their means, given the effects of their groups, than Poisson's.

    By Pearson's χ² over N - tr H, where the effective number of coefficients is tr H = Σ μ Var(η), with the posterior
    variance of each linear predictor: an effect that is shrunk to its mean counts as less than one.
    """
    if result.family.name != "poisson":
        return ()
    predictor, y, w = result.predictor(result.design, "", 0), result.design.y[0], result.design.weights
    etas = [predictor.linear(at)[0] for at in predictor.parts()]
    mean, variance = (torch.cat(some) for some in zip(*((e.exp().mean(0), e.var(0)) for e in etas), strict=True))
    freedom = float(w.sum() - (w * mean * variance).sum())
    if freedom <= 0:
        return ()
    ratio = float((w * (y - mean).square() / mean.clamp_min(1e-12)).sum()) / freedom
    if not ratio > 1 + max(0.5, 4 * math.sqrt(2 / freedom)):  # half as much again, and beyond four standard errors
        return ()
    return (
        f"the counts vary {ratio:.3g} times as much about their means as those of a Poisson distribution: intervals "
        "are too narrow. Say --likelihood negative_binomial.",
    )


# ------------------------------------------------------------------------------------ files


def _write(outcome: Outcome, place: Path) -> None:
    """Write all files of the run."""
    write_content(place, {**state_of(outcome.result), "run": outcome.prepared.columns.to_dict()})
    (place / "config.toml").write_text(outcome.settings.to_toml(), encoding="utf-8")
    text = json.dumps(summary(outcome), indent=2, ensure_ascii=False)
    (place / "summary.json").write_text(text + "\n", encoding="utf-8")
    report.write_tables(outcome, place)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ")  # that no font of this machine has
        report.figure(outcome).savefig(place / "fit.png", dpi=120)


def summary(outcome: Outcome) -> dict[str, Any]:
    """The run as plain numbers and texts; numbers that are not finite become None."""
    result, made, held_out = outcome.result, outcome.prepared, outcome.held_out
    pair = report.classes(result)
    scored = {"held_out": held_out and held_out[0], "base_rate": held_out and held_out[1]}
    found = {
        "formula": made.columns.formula,
        "family": result.family.name,
        "converged": result.converged,
        "reason": result.reason,
        "method": result.method,
        "log_evidence": result.log_evidence,
        "k_hat": result.k_hat,
        "effective_draws": result.effective,
        "training_rows": len(made.train),
        "coefficients": len(result.fixed_names),
        "groups": {name: len(levels) for name, levels in result.group_names.items()},
        "classes": dict(zip(("failure", "success"), pair, strict=True)) if pair else None,
        "priors": outcome.priors,
        "baselines": report.baselines(outcome),
        **{
            f"{name}_{key}": value
            for name, of in scored.items()
            for key, value in (of._asdict() if of else dict.fromkeys(HeldOut._fields)).items()
        },
        "notes": list(outcome.notes),
        "warnings": list(outcome.warnings),
        "marginal": {column: table.table.to_dict("records") for column, table in outcome.marginal.items()},
        "settings": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(outcome.settings).items()},
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
