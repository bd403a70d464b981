"""The commands: ``fit``, which reads, fits, scores, prints and writes; ``predict`` and ``compare`` of earlier runs."""

import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import join, quote
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text as Label
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from scipy.optimize import minimize_scalar
from torch import Tensor

from torchngvi.app import prepare
from torchngvi.app.prepare import CLASSES, Columns, Prepared, Read, read_table
from torchngvi.app.saved import Fitted, OutputFolder, classes, load, write_content, write_frame
from torchngvi.app.settings import Settings, check_file, file_name
from torchngvi.diagnostics.importance import USELESS
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import remove_left, write_whole
from torchngvi.messages import listed, shown
from torchngvi.tables import effects
from torchngvi.tables.design import usual_family
from torchngvi.tables.families import family_of
from torchngvi.tables.model import TableModel, regression
from torchngvi.tables.result import TableResult, state_of
from torchngvi.tables.table import Marginals

_DRAWS = 400, 4096  # of a model without groups, at least and at most: of 4,096 a third digit is known
_DENSITIES = 2**28  # of rows under all draws, which take five seconds
_ENDS = (1e-6, 1e6)  # of a prior precision that is looked for
_PRIOR = re.compile(r"(.+?)=\s*([A-Za-z][\w-]*\s*\(.*\)|flat|default)\s*")

_LOOSE = re.compile(r"The data hardly bound (.+): sd ")
_NUMBERS = ["mean", "sd", "low", "high"]
_OFFSET = re.compile(r"offset\((?:[^()]|\([^()]*\))*\)")
_SHOWN = 10  # rows of predictions in print


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
        assert model.formula is not None
        for column in s.marginal:  # before a fit that may take long
            if len(parts := column.split(",")) > 1 and {*parts} <= {*model.formula.table}:
                raise InputError(
                    f"--marginal {column} is no column. Separate them by spaces, --marginal {join(parts)}."
                )
            effects.check_column(column, model.formula.table)
        draws = s.draws
        if draws is None and not model.design.factors:
            draws = min(max(_DENSITIES // len(model.design.X), _DRAWS[0]), _DRAWS[1])
        result = model.fit(draws=draws, seed=s.seed, progress=s.progress)
        scored = score_held_out(result, s, made)
        marginal = {column: result.marginal_effects(column) for column in s.marginal}
    warned = dict.fromkeys(str(w.message).rstrip(".") for w in caught if not issubclass(w.category, DeprecationWarning))
    asked = [text for text in warned if text.startswith("Did you mean")]
    said = (f"{text[0].lower()}{text[1:]}" for text in warned if text not in asked)
    notes = [*dict.fromkeys([*made.notes, *said]), *note]
    found = (*asked, *cautions(result, s, read))
    outcome = Outcome(s, made, result, scored, tuple(notes), found, marginal, priors or result.priors)
    folder = None
    try:
        with out.writing() as place:
            _write(outcome, place)
        folder = out.path
    finally:
        show(outcome, folder)  # also where nothing could be written, so that the fit is not lost
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


# ------------------------------------------------------------------------------------ what speaks for and against


class HeldOut(NamedTuple):
    """Scores on rows that were held out, weighted where the data have weights."""

    rows: int | None = None
    nll: float | None = None  # -log p(y | x) a row
    error: float | None = None  # its standard error
    accuracy: float | None = None  # of classes, the share of rows whose likeliest class is theirs
    rmse: float | None = None  # of the mean, for counts and real numbers

    def __str__(self) -> str:
        first = f"RMSE {self.rmse:.4g}" if self.accuracy is None else f"accuracy {self.accuracy:.3f}"
        return f"{first}, negative log likelihood {self.nll:.4f} +- {self.error:.4f} a row"


def score_held_out(result: TableResult, s: Settings, made: Prepared) -> tuple[HeldOut, HeldOut] | None:
    """The scores on the rows held out, and those of the base rate: the same family with an intercept alone."""
    if not len(made.test):
        return None
    formula = made.columns.formula
    base = f"{formula.partition('~')[0]}~ {' + '.join(['1', *_OFFSET.findall(formula)])}"
    own = _scores(result, made.test)
    alone = regression(base, made.train, result.family.name, weights=s.weights, positive=made.positive)
    return own, _scores(alone.fit(seed=s.seed, progress=False), made.test)


@torch.no_grad()
def _scores(result: TableResult, test: Any) -> HeldOut:
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
    if family.outcomes is not None or family.name in CLASSES:
        right = (mean.argmax(-1) if mean.ndim > 1 else mean > 0.5) == y[0]
        return HeldOut(len(test), loss, error, accuracy=_weighted_mean(right.double(), w)[0])
    seen = y[0] / y[1] if "trials" in family.extra else y[0]
    return HeldOut(len(test), loss, error, rmse=math.sqrt(_weighted_mean((mean - seen).square(), w)[0]))


def _weighted_mean(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """The mean and its standard error, which is NaN of a single value."""
    share = weights / weights.sum()
    mean = (share * values).sum()
    error = (share.square() * (values - mean).square()).sum().sqrt()
    return float(mean), float(error) if len(values) > 1 else math.nan


def cautions(result: TableResult, s: Settings, read: Read, fewest_rows: int = 10, small: int = 10) -> list[str]:
    """What speaks against a result that has converged."""
    # fewest_rows: of training, to say something about a posterior
    # small: the least of the counts from which on a Gaussian is usual for them
    found, response, rows = [], result.formula.response, int((result.design.weights > 0).sum())
    if rows < fewest_rows:
        found.append(
            f"{rows} training rows are too few to believe the result: the posterior is little more than the prior, "
            f"converged or not. Take at least {fewest_rows}."
        )
    values = read.frame.get(response, read.frame.index.astype(str).to_series())
    if s.family is None and result.family.name == "gaussian" and getattr(values.dtype, "kind", "O") in "iu":
        if set(values.unique()) <= {0, 1}:
            found.append(f"{response} is 0 or 1, fitted as gaussian. Of two classes, say --likelihood bernoulli.")
        elif 0 <= values.min() < small:
            found.append(
                f"{response} are whole numbers, fitted as gaussian. If they are counts, say --likelihood poisson, or "
                "negative_binomial where their variance exceeds their mean."
            )
    return found


class Outcome(NamedTuple):
    """A fit and what is said of it."""

    settings: Settings
    prepared: Prepared
    result: TableResult
    held_out: tuple[HeldOut, HeldOut] | None  # its scores, and those of the base rate
    notes: tuple[str, ...]  # what was done with the table
    warnings: tuple[str, ...]  # what speaks against the result
    marginal: Mapping[str, Any]  # tables of average marginal effects by column
    priors: str


def baselines(outcome: Outcome) -> dict[str, str]:
    """Of each column of categories, the level that the effects of the others are relative to."""
    formula, names, found = outcome.result.formula, set(outcome.result.design.names), {}
    for name in (name for name in outcome.prepared.train if name in formula.columns.predictors):
        levels = [str(level) for level in formula.table[name].dropna().unique()]
        without = [level for level in levels if not names & {f"{name}[{level}]", f"C({name})[{level}]"}]
        if len(without) == 1 and len(levels) > 1:
            found[name] = without[0]
    return found


# ------------------------------------------------------------------------------------ files


def _frame(of: Marginals, **first: Any) -> pd.DataFrame:
    """Marginals as a table, behind columns that are the same in all rows."""
    return pd.DataFrame({"name": of.names, **first, **{name: getattr(of, name).numpy() for name in _NUMBERS}})


def parameters(outcome: Outcome) -> pd.DataFrame:
    """All parameters: coefficients with their ratios and per standard deviation of their columns, and the others."""
    table, ratio = outcome.result.summary(), outcome.result.family.ratio
    fixed = _frame(table.fixed, kind="coefficient")
    fixed["name"] = [outcome.prepared.columns.shown(name) for name in fixed.name]
    for end in ("", "_low", "_high") if ratio else ():
        fixed[f"ratio{end}"] = [math.exp(x) if x < 709.0 else math.inf for x in fixed[end[1:] or "mean"]]
    fixed["per_sd"] = fixed["mean"] * outcome.result.fitted.coordinates.scales.numpy()
    others = []
    for name, of in table.random.items():
        others += [_frame(of.sd, kind=f"sd of {name}"), _frame(of.correlation, kind=f"correlation of {name}")]
    others += [] if table.likelihood is None else [_frame(table.likelihood, kind=table.title)]
    return pd.concat([fixed, *(other for other in others if len(other))], ignore_index=True)


def write_tables(outcome: Outcome, place: Path) -> None:
    """Write coefficients.csv, all parameters, and effects.csv, the effects of each group."""
    write_frame(place / "coefficients.csv", parameters(outcome))
    result, names = outcome.result, outcome.result.random_names
    found = [
        _frame(of, factor=factor, effect=effect).rename(columns={"name": "group"})
        for factor, some in result.effects().items()
        for effect, of in zip(names[factor], some, strict=True)
    ]
    if found:
        write_frame(place / "effects.csv", pd.concat(found, ignore_index=True))


def figure(outcome: Outcome) -> Figure:
    """Coefficients with their intervals, and the effects of groups; texts are drawn as they are, never as formulas."""
    result = outcome.result
    panels = [(factor, effect) for factor, names in result.random_names.items() for effect in names]
    height = max(4.0, 1.0 + 0.22 * min(len(result.fixed_names), 100))
    found = Figure(figsize=(6.0 * (1 + len(panels)), height), layout="constrained")
    axes = found.subplots(1, 1 + len(panels), squeeze=False)[0]
    result.plot(ax=axes[0])
    for (factor, effect), ax in zip(panels, axes[1:], strict=True):
        result.plot_effects(factor, effect, ax=ax)
    for label in found.findobj(Label):
        label.set_parse_math(False)
    return found


def _write(outcome: Outcome, place: Path) -> None:
    """Write all files of the run."""
    write_content(place, {**state_of(outcome.result), "run": asdict(outcome.prepared.columns)})
    (place / "config.toml").write_text(outcome.settings.to_toml(), encoding="utf-8")
    text = json.dumps(_summary(outcome), indent=2, ensure_ascii=False)
    (place / "summary.json").write_text(text + "\n", encoding="utf-8")
    write_tables(outcome, place)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ")  # that no font of this machine has
        figure(outcome).savefig(place / "fit.png", dpi=120)


def _summary(outcome: Outcome) -> dict[str, Any]:
    """The run as plain numbers and texts; numbers that are not finite become None."""
    result, pair = outcome.result, classes(outcome.result)
    own, base = outcome.held_out or (HeldOut(), HeldOut())
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
        "baselines": baselines(outcome),
        **{f"held_out_{key}": value for key, value in own._asdict().items()},
        **{f"base_rate_{key}": value for key, value in base._asdict().items()},
        "notes": outcome.notes,
        "warnings": outcome.warnings,
        "marginal": {column: table.table.to_dict("records") for column, table in outcome.marginal.items()},
        "settings": asdict(outcome.settings),
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


# ------------------------------------------------------------------------------------ in print


def show(outcome: Outcome, folder: Path | None) -> None:
    """Print which class is predicted, the table of parameters, and a box with the rest."""
    s, made, result = outcome.settings, outcome.prepared, outcome.result
    remarks = _remarks(result)
    grave = [text for text in remarks if "separate" in text or text.startswith(("k-hat", "The counts vary"))]
    cautions = [*outcome.warnings, *grave]
    scored = "no rows (test_fraction 0)"
    if outcome.held_out is not None:
        own, base = outcome.held_out
        scored = f"{own}, {own.rows} rows" + (f"\nby the base rate: {base}" if base.rows else "")
    based = ", ".join(f"{name} = {level}" for name, level in baselines(outcome).items())
    data = f"{s.data}: {len(made.train)} training rows, {len(result.fixed_names)} coefficients"
    data += "".join(f", {len(levels)} of {name}" for name, levels in result.group_names.items())
    data += "".join(f", {role} {name!r}" for role, name in (("weights", s.weights), ("offset", s.offset)) if name)
    reason = f"{result.reason[:1].lower()}{result.reason[1:].rstrip('.')}"
    evidence = "" if result.log_evidence is None else f"; log evidence {result.log_evidence:.4g}"
    below = f", below {USELESS}, so that intervals can be trusted" * (result.k_hat < USELESS)
    method = f"{result.method.rstrip('.')}: k-hat {result.k_hat:.2f}{below}; {result.effective:.0f} effective draws"
    lines = [
        ("search", f"{'converged' if result.converged else 'not converged'}: {reason}{evidence}"),
        ("approximation", method),
        ("held out", scored),
        ("data", data),
        ("model", result.family.name + (f", {s.formula}" if s.formula else "")),
        ("priors", outcome.priors),
        *([("baselines", f"{based}; the effects of other levels are relative to them")] if based else []),
        *(("note", note) for note in (*outcome.notes, *(text for text in remarks if text not in cautions))),
        *(("warning", text) for text in cautions),
        ("written to", f"{folder}/" if folder else "no folder"),
    ]
    title = "NOT CONVERGED" if not result.converged else "converged, with a warning" if cautions else "converged"
    grid, color = Table.grid(padding=(0, 2)), "green" if title == "converged" else "yellow"
    grid.add_column(style="dim", no_wrap=True)
    for label, text in lines:
        grid.add_row(label, Text(text))
    head, look = Text(title, style=f"bold {color}"), {"title_align": "left", "border_style": color}
    marginal = [Text(str(table)) for table in outcome.marginal.values()]
    printed(*_predicted(outcome), *_tables(outcome), *marginal, Panel(grid, title=head, box=box.ROUNDED, **look))  # type: ignore[arg-type]


def _remarks(result: TableResult, few: int = 4) -> list[str]:
    """What the result says of itself, of many coefficients in one sentence."""
    # few: sentences of that, from which on they are one
    lines = result.remarks
    loose = [found[1] for line in lines if (found := _LOOSE.match(line))]
    if len(loose) < few:
        return lines
    kept = [line for line in lines if not _LOOSE.match(line)]
    return [*kept, f"The data hardly bound {listed(loose)}: their sds are more than half of those under their priors."]


def _predicted(outcome: Outcome) -> list[Text]:
    """Which class is predicted: the first line of a result with classes."""
    pair = classes(outcome.result)
    if pair is None:
        return []
    said = f"Predicted is {pair[1]!r} against {pair[0]!r}"
    if outcome.settings.success or "[" in outcome.result.formula.response:
        return [Text(f"{said}.")]
    last = ", the class that sorts last" if pair[1] > pair[0] else ""
    return [Text(f"{said}{last}; --positive {quote(pair[0])} predicts the other.")]


def _tables(outcome: Outcome, most_rows: int = 60) -> list[RenderableType]:
    """The coefficients per unit of a column, as ratios and per standard deviation, and all other parameters."""
    # most_rows: coefficients in print
    frame, ratio = parameters(outcome), outcome.result.family.ratio
    own = frame.kind == "coefficient"
    fixed, others = frame[own].drop(columns="kind"), frame[~own]
    fixed["per_sd"] = fixed.per_sd.where(fixed.name != "Intercept")  # which has no column
    clear = (-fixed["mean"].abs() / fixed.sd.clip(lower=1e-300)).argsort()[:most_rows].sort_values()
    some = f"{most_rows} of {len(fixed)} coefficients, clearest signs"
    ends = ["2.5%", "97.5%"]
    heads = ["column", "per unit", "sd", *ends, *([ratio, *ends] if ratio else []), "per sd"]
    found: list[RenderableType] = [Text("Coefficients" if len(clear) == len(fixed) else some, style="bold")]
    found.append(of_rows(heads, fixed.iloc[clear].itertuples(index=False), 32))
    if len(others):
        plain = others.kind.isin(["likelihood", "thresholds"])
        names = others.name.where(plain, others.kind + ": " + others.name)
        rows = zip(names, *(others[name] for name in _NUMBERS), strict=True)
        found.append(of_rows(["parameter", "mean", "sd", *ends], rows))
    return found


def of_rows(heads: Sequence[str], rows: Iterator[Any], width: int | None = None) -> Table:
    """A table, whose rows are in bold where their interval excludes zero."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for k, name in enumerate(heads):
        left = k == 0 or name == "class"
        table.add_column(name, justify="left" if left else "right", overflow="fold", max_width=None if k else width)
    for row in rows:
        bold = width is not None and (row[3] > 0 or row[4] < 0)
        cells = ("" if cell != cell else shown(cell) if isinstance(cell, float) else str(cell) for cell in row)
        table.add_row(*map(Text, cells), style="bold" if bold else "")
    return table


def printed(*parts: RenderableType, file_width: int = 120) -> None:
    """Print to standard output; into a file or a pipe at a width that cuts no column."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=file_width)
    console.print(Group(*parts))


# ------------------------------------------------------------------------------------ earlier runs


def predict(
    run: str, table: str, drop: Sequence[str] = (), out: str | None = None, overwrite: bool = False, **asked: Any
) -> None:
    """``torchngvi predict``: show the first predictions for the rows of a table, and write all as csv."""
    with warnings.catch_warnings(record=True) as said:  # of the folder
        warnings.simplefilter("always")
        fitted = load(file_name("RUN", run))
    if not isinstance(fitted, Fitted):
        raise InputError(f"{run!r} is no run of torchngvi fit. Predict with torchngvi.load({run!r}).predict in Python.")
    path = Path(file_name("TABLE", table))
    to = Path(out) if out else Path(run) / f"predictions-{path.name.split('.')[0]}.csv"
    check_file(to, overwrite=overwrite)
    read = read_table(table)
    lacking = [name for name in drop if name not in read.frame]
    if lacking:
        raise InputError(f"drop column {lacking[0]!r} is not in {str(path)!r}. Leave it out.")
    found = fitted.predict(read.frame.drop(columns=list(drop)), name=str(path), drop=drop, **asked)
    found.insert(0, "row", range(1, len(found) + 1))
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        remove_left(to)
        text = io.StringIO()
        write_frame(text, found)
        write_whole(to, text.getvalue().encode())
    except OSError as error:
        raise InputError(
            f"the predictions cannot be written to {str(to)!r} ({error}). Choose another file (--out)."
        ) from error
    kind = asked.get("kind", "mean")
    response = str(fitted.result.formula.response).strip("`")
    outcomes, nominal = fitted.result.family.outcomes or (), fitted.result.family.nominal
    what = fitted.told if kind == "mean" else f"{kind} of {response}"
    title = f"{what}, with {100 * asked.get('interval', 0.95):.4g}% intervals"
    if outcomes and kind in ("mean", "probability"):
        title = f"probabilities of the categories of {response}"
    elif outcomes and kind == "response":
        title += f", categories counted from 0, {(', ' if nominal else ' < ').join(outcomes)}"
    elif nominal:
        title = f"linear predictors of the categories of {response} against {outcomes[0]}"
    notes = [Text(f"note: {one.message}") for one in said]
    more = f", the first {_SHOWN} of {len(found)} rows" if len(found) > _SHOWN else ""
    rows = of_rows(list(found), found.head(_SHOWN).itertuples(index=False))
    printed(Text(f"{title}{more}", style="bold"), rows, *notes, Text(f"{len(found)} rows written to {to}"))


def compare(runs: Sequence[str]) -> None:
    """``torchngvi compare``: how well the models of runs predict rows that were left out, the best first."""
    fits = {run: load(file_name("RUN", run)) for run in runs}
    results = {run: one.result if isinstance(one, Fitted) else one for run, one in fits.items()}
    if len(results) < 2:
        raise InputError("compare is of two runs or more of the same table. Name another folder.")
    found = {run: one.leave_one_out() for run, one in results.items()}
    best, *others = sorted(found, key=lambda run: -found[run].total)
    for run in (best, *others):
        print(f"{run}: {found[run]}")
    for run in others:
        print(effects.compare(results[best], results[run], (best, run)))
