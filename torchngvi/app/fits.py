"""One run of ``torchngvi fit``: read, prepare, fit, score, and write what came of it."""

import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scipy.optimize import minimize_scalar

from torchngvi.app import prepare, report
from torchngvi.app.outputs import OutputFolder, write_content
from torchngvi.app.prepare import Columns, Prepared
from torchngvi.app.readers import read_table
from torchngvi.app.report import Outcome
from torchngvi.app.settings import Settings
from torchngvi.errors import InputError
from torchngvi.tables.design import usual_family
from torchngvi.tables.exports import state_of
from torchngvi.tables.families import family_of
from torchngvi.tables.model import TableModel, regression
from torchngvi.tables.result import TableResult

_DRAWS = 400, 4096  # of a model without groups, at least and at most: of 4,096 a third digit is known
_DENSITIES = 2**28  # of rows under all draws, which take five seconds
_ENDS = (1e-6, 1e6)  # of a prior precision that is looked for
_PRIOR = re.compile(r"(.+?)=\s*([A-Za-z][\w-]*\s*\(.*\)|flat|default)\s*")


def run(s: Settings, overwrite: bool) -> TableResult:
    """Fit, print the report, and write the folder of the run."""
    family = s.family or ("bernoulli" if s.formula is None else usual_family(s.formula, s.success))
    name = family_of(family).name
    read = read_table(s.data)
    made = prepare.of(read, s, name)
    out = OutputFolder(s.folder, overwrite=overwrite)  # named after the data, which are wrong more often
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _model(s, made, family)
        model, note, priors = _with_priors(model, s, made.columns)
        draws = s.draws
        if draws is None and not model.design.factors:
            draws = min(max(_DENSITIES // len(model.design.X), _DRAWS[0]), _DRAWS[1])
        result = model.fit(draws=draws, seed=s.seed, progress=s.progress)
        held_out = report.held_out(result, s, made)
        marginal = {column: result.marginal_effects(column) for column in s.marginal}
    warned = dict.fromkeys(str(w.message).rstrip(".") for w in caught if not issubclass(w.category, DeprecationWarning))
    asked = [text for text in warned if text.startswith("Did you mean")]
    notes = [*made.notes, *(f"{text[0].lower()}{text[1:]}" for text in warned if text not in asked), *note]
    found = (*asked, *report.cautions(result, s, read))
    outcome = Outcome(s, made, result, held_out, tuple(notes), found, marginal, priors or result.priors)
    folder = None
    try:
        with out.writing() as place:
            _write(outcome, place)
        folder = out.path
    finally:
        report.show(outcome, folder)  # also where nothing could be written, so that the fit is not lost
    return result


def _model(s: Settings, made: Prepared, family: str) -> TableModel:
    """The model; what is said to users of Python about missing values is said in flags."""
    try:
        return regression(made.columns.formula, made.train, family, weights=s.weights, positive=made.positive)
    except InputError as error:
        instead = "in the file" if s.impute else "or fill them in (--impute median)"
        raise InputError(str(error).replace("table.dropna(), or impute them", instead)) from error


# ------------------------------------------------------------------------------------ priors


def _with_priors(model: TableModel, s: Settings, columns: Columns) -> tuple[TableModel, list[str], str]:
    """The model with the priors of the settings, a note where one was looked for, and many priors in one sentence."""

    def under(priors: Any) -> TableModel:
        return TableModel(model.design, model.family, priors=priors, formula=model.formula)

    if s.prior:
        own = {columns.shown(name): name for name in (*model.design.names, *model.coordinates.names)}
        pairs = [_PRIOR.fullmatch(text) for text in s.prior]
        for text, pair in zip(s.prior, pairs, strict=True):
            if pair is None:
                raise InputError(f"a prior is written NAME=PRIOR, such as 'x=normal(0, 1)'; got {text!r}.")
        return under({own.get(pair[1], pair[1]): pair[2] for pair in pairs if pair}), [], ""
    if s.prior_precision is None or s.prior_precision == "flat":
        return under("flat") if s.prior_precision else model, [], ""
    precision, note = s.prior_precision, list[str]()
    if not isinstance(precision, float):
        precision, note = _by_evidence(lambda B: under(_of_precision(model, B, s)[0]), s)
    priors, said = _of_precision(model, precision, s)
    return under(priors), note, said


def _of_precision(model: TableModel, precision: float, s: Settings, sds: float = 10.0) -> tuple[dict[str, str], str]:
    """N(0, 1/B) of each coefficient per standard deviation of its column, and a wide prior of the intercept."""
    # sds: sds of an intercept's prior beside a number for the others, in the units of the family
    units, y = model.coordinates.columns, model.design.y[0]
    unit = math.sqrt(float(y.square().mean())) if model.family.link == "identity" else 1.0
    wide, found = s.intercept_sd or sds * (unit or 1.0), {}
    for place, (name, scale) in enumerate(zip(model.design.names, units.scales.tolist(), strict=True)):
        sd = wide if place == units.intercept else precision**-0.5 / (abs(scale) if s.standardize else 1.0)
        found[name] = f"normal(0, {sd!r})"
    per = "per sd of a column " if s.standardize else ""
    said = [f"coefficients N(0, {precision**-0.5:.4g}^2) {per}(precision {precision:.4g})"]
    said += [f"intercept at the means N(0, {wide:.4g}^2)"] if units.intercept is not None else []
    said += [f"{name} {prior}" for name, prior in model.priors.table() if name not in model.coordinates.names]
    return found, ", ".join(said)


def _by_evidence(
    of: Callable[[float], TableModel], s: Settings, close: float = 0.1, fits: int = 20
) -> tuple[float, list[str]]:
    """The prior precision with the largest evidence p(y), and a note of it."""
    # close, fits: of its logarithm, in which the evidence is flat, and fits at most

    def loss(log: float) -> float:
        evidence = of(math.exp(log)).fit(seed=s.seed, progress=False).log_evidence
        assert evidence is not None  # of a fit that is not read from a file
        return -evidence

    ends, options = tuple(map(math.log, _ENDS)), {"xatol": close, "maxiter": fits}
    best = minimize_scalar(loss, bounds=ends, method="bounded", options=options)
    note = f"prior precision {math.exp(best.x):.3g} has the largest evidence of the data, found in {best.nfev} fits"
    if ends[1] - best.x < 2 * close:
        note += ", and is at the end of the range: the data speak for no effect"
    return math.exp(best.x), [note]


# ------------------------------------------------------------------------------------ files


def _write(outcome: Outcome, place: Path) -> None:
    """Write all files of the run."""
    write_content(place, {**state_of(outcome.result), "run": asdict(outcome.prepared.columns)})
    (place / "config.toml").write_text(outcome.settings.to_toml(), encoding="utf-8")
    text = json.dumps(_summary(outcome), indent=2, ensure_ascii=False)
    (place / "summary.json").write_text(text + "\n", encoding="utf-8")
    report.write_tables(outcome, place)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ")  # that no font of this machine has
        report.figure(outcome).savefig(place / "fit.png", dpi=120)


def _summary(outcome: Outcome) -> dict[str, Any]:
    """The run as plain numbers and texts; numbers that are not finite become None."""
    result, pair = outcome.result, report.classes(outcome.result)
    own, base = outcome.held_out or (report.HeldOut(), report.HeldOut())
    found = {
        "formula": outcome.prepared.columns.formula,
        "family": result.family.name,
        **{name: getattr(result, name) for name in ("converged", "reason", "method", "log_evidence", "k_hat")},
        "effective_draws": result.effective,
        "training_rows": len(outcome.prepared.train),
        "coefficients": len(result.fixed_names),
        "groups": {name: len(levels) for name, levels in result.group_names.items()},
        "classes": dict(zip(("failure", "success"), pair, strict=True)) if pair else None,
        "priors": outcome.priors,
        "baselines": report.baselines(outcome),
        **{f"held_out_{key}": value for key, value in own._asdict().items()},
        **{f"base_rate_{key}": value for key, value in base._asdict().items()},
        "notes": outcome.notes,
        "warnings": outcome.warnings,
        "marginal": {column: table.table.to_dict("records") for column, table in outcome.marginal.items()},
        "settings": asdict(outcome.settings),
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
