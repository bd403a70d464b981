"""`torchngvi fit --formula`: a mixed model of a table, with its answers printed and written into a folder."""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from torchngvi.adapters import table_checks
from torchngvi.adapters.formula import Formula, mixed
from torchngvi.adapters.table_checks import FORMULA
from torchngvi.adapters.terms import FormulaColumns
from torchngvi.app import counts, formula_tables, mixed_scores, saved_formula
from torchngvi.app.columns import Read, numbers
from torchngvi.app.config import family_of, file_name, impute_of, seed_of
from torchngvi.app.findings import HeldOut, held_out_line, held_out_numbers
from torchngvi.app.formula_tables import Filling
from torchngvi.app.outputs import OutputFolder, write_content, write_rows
from torchngvi.app.readers import DELIMITED, ending, read_columns
from torchngvi.app.report import exponential
from torchngvi.app.runs import too_few_rows
from torchngvi.errors import InputError
from torchngvi.mixed_models import Marginals, MixedResult, MultilevelResult, MultilevelTable

FLAGS = ("formula", "data", "family", "weights", "impute", "test_fraction", "seed", "out", "progress")
_COLUMNS = ("name", "mean", "sd", "low", "high")


def run(flags: Mapping[str, Any], overwrite: bool) -> MixedResult | MultilevelResult:
    """Fit the model of a formula to a csv or tsv file, print the table of its parameters, and write what it says.

    The folder gets ``parameters.csv``, ``effects.csv`` with the effects of each group, ``summary.json``, the
    caterpillar plot ``effects.png``, and ``posterior.pt``, with which `torchngvi.load` predicts: draws from the
    posterior, and the columns of the table that the formula names.

    Args:
        flags: those that were given, of `FLAGS`.
        overwrite: whether files of an earlier run may be replaced.

    Returns:
        The result.

    Raises:
        InputError: other flags, no table, or what `torchngvi.mixed` refuses.
    """
    others = [f"--{name.replace('_', '-')}" for name in flags if name not in FLAGS]
    if others:
        raise InputError(
            f"{', '.join(others)} cannot be combined with --formula, which says what is predicted, and from what. "
            f"Leave out all but {', '.join(f'--{name}' for name in FLAGS)}."
        )
    path, seed = table_of(flags), seed_of(flags.get("seed", 0))
    folder = OutputFolder(flags.get("out", f"runs/{path.name.partition('.')[0]}"), overwrite=overwrite)
    family, weights = family_of(flags.get("family", "gaussian")), flags.get("weights")
    columns = FormulaColumns.of(flags["formula"])
    read = read_columns(path)
    whole, notes = _looked_at(flags["formula"], columns, read)
    train, test = mixed_scores.parted(whole, float(flags.get("test_fraction", 0.0)), seed)
    frame, fill, more = _prepared(train, flags["formula"], impute_of(flags.get("impute")) is not None, weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = mixed(flags["formula"], frame, family, weights=weights)
    said = {note.lower().rstrip(".") for note in notes}
    more += tuple(text for w in caught if (text := str(w.message)).lower().rstrip(".") not in said)
    result = model.fit(seed=seed, progress=flags.get("progress", True))
    more += baselines(frame, FormulaColumns.of(flags["formula"]).predictors, result.summary().fixed.names)
    held_out = _held_out(model.formula, result, frame, _filled(test, flags["formula"], fill, weights), weights)
    print(result)
    print(f"held out: {held_out_line(held_out)}")
    for note in (*notes, *more):
        print(f"note: {note}")
    unsaid = () if "family" in flags else counts.not_gaussian(frame, model.formula.response)
    cautions = (*too_few_rows(len(model.formula.y), None), *unsaid, *counts.overdispersed(result))
    for warning in cautions:
        print(f"warning: {warning}")
    told = {"notes": [*notes, *more], "warnings": list(cautions), **held_out_numbers(held_out)}
    with folder.writing() as place:
        _write(place, flags["formula"], result, told)
        write_content(place, saved_formula.content(model.formula, result, fill, dict(flags)))
    print(f"written to {folder.path}/; for new rows: torchngvi predict {folder.path} NEW.csv")
    return result


def _looked_at(formula: str, columns: FormulaColumns, read: Read) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The table with numbers where cells stand for numbers, and notes of it."""
    table_checks.check_there(read.frame, [*columns.predictors, *columns.response, *columns.groups])
    door = FORMULA._replace(keeps_texts=False)
    response, predictors = columns.response, columns.predictors
    found = table_checks.of_formula(formula, read.frame, response, predictors, door, comma=read.comma, zeros=read.zeros)
    table_checks.refuse(found.faults)
    return found.frame, (*read.notes, *found.notes)


def table_of(flags: Mapping[str, Any]) -> Path:
    """The file of the table of a formula."""
    if not flags.get("data"):
        raise InputError("data is missing: name the table of the formula, --data visits.csv.")
    path = Path(file_name("data", flags["data"]))
    if ending(path) not in (*DELIMITED, ".parquet"):
        raise InputError(f"--formula needs a csv, tsv or parquet file, --data visits.csv; got {str(path)!r}.")
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r} (--data).")
    return path


def _prepared(
    frame: pd.DataFrame, formula: str, impute: bool, weights: str | None
) -> tuple[pd.DataFrame, Filling, tuple[str, ...]]:
    """The table with missing predictors filled in where that is asked for, with what, and notes of it."""
    columns = FormulaColumns.of(formula)
    if weights in frame:
        numbers(frame[weights], "weights")
    frame = formula_tables.dated(frame, columns.groups)
    fill = formula_tables.filling(frame, columns) if impute else {}
    frame, notes = formula_tables.filled(frame, fill)
    formula_tables.refuse_missing(frame, columns, impute=impute, weights=weights)
    return frame, fill, notes


def _filled(test: pd.DataFrame, formula: str, fill: Filling, weights: str | None) -> pd.DataFrame:
    """The rows that were held out, with what the training rows say of missing predictors."""
    columns = FormulaColumns.of(formula)
    test, _ = formula_tables.filled(formula_tables.dated(test, columns.groups), fill)
    formula_tables.refuse_missing(test, columns, impute=bool(fill), weights=weights)
    return test


def _held_out(
    formula: Formula,
    result: MixedResult | MultilevelResult,
    train: pd.DataFrame,
    test: pd.DataFrame,
    weights: str | None,
) -> HeldOut | None:
    """The scores on the rows that were held out, if any were."""
    if not len(test):
        return None
    y = mixed_scores.targets(formula, pd.concat([train, test]), train, test)
    return mixed_scores.scores(result, test, y, None if weights is None else numbers(test[weights], "weights"))


def baselines(frame: pd.DataFrame, predictors: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """A note of the levels to which the effects of the other levels are relative.

    >>> baselines(pd.DataFrame({"sex": ["f", "m"]}), ["sex"], ["Intercept", "sex[m]"])
    ('baselines are sex = f; the effects of other levels are relative to them',)
    """
    names, found = set(names), []
    for name in predictors:
        if name not in frame:
            continue
        levels = {str(level) for level in frame[name].dropna().unique()}
        without = [level for level in levels if not names & {f"{name}[{level}]", f"C({name})[{level}]"}]
        if len(without) == 1 and len(levels) > 1:
            found.append(f"{name} = {without[0]}")
    return (f"baselines are {', '.join(found)}; the effects of other levels are relative to them",) if found else ()


def _write(place: Path, formula: str, result: MixedResult | MultilevelResult, told: dict[str, Any]) -> None:
    table = result.summary()
    parts = {"fixed effect": table.fixed}
    if isinstance(table, MultilevelTable):
        for name, of in table.random.items():
            parts |= {f"sd of {name}": of.sd, f"correlation of {name}": of.correlation}
    else:
        parts |= {"sd": table.sd, "correlation": table.correlation}
    if table.likelihood is not None:
        parts["likelihood"] = table.likelihood
    rows, header = _rows(parts.items()), ["kind", *_COLUMNS]
    if table.ratio:
        header += ["ratio", "ratio_low", "ratio_high"]
        for row in rows:
            of_fixed = row[0] == "fixed effect"
            row += [exponential(row[at]) if of_fixed else "" for at in (2, 4, 5)]
    write_rows(place / "parameters.csv", header, rows)
    effects = _effects(result)
    write_rows(place / "effects.csv", ["effect", "group", *_COLUMNS[1:]], _rows((name, of) for name, of, _ in effects))
    summary = {
        "formula": formula,
        "priors": result.priors,
        "converged": result.converged,
        "reason": result.reason,
        "method": result.method,
        "elbo": result.elbo,
        "log_evidence": result.log_evidence,
        "k_hat": result.k_hat,
        "effective_draws": result.effective,
        "rows": len(result.model.rows.y),
        "groups": _counts(result),
        **told,
    }
    (place / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    figure = Figure(figsize=(5.0 * len(effects), 5.0), layout="constrained")
    for (_, _, plot), ax in zip(effects, figure.subplots(1, len(effects), squeeze=False)[0], strict=True):
        plot(ax=ax)
    figure.savefig(place / "effects.png", dpi=150)


def _effects(result: MixedResult | MultilevelResult) -> list[tuple[str, Marginals, Callable[..., Any]]]:
    """Each random effect: its name, its values in the groups, and what draws them."""
    if isinstance(result, MixedResult):
        named = zip(result.random_names, result.effects(), strict=True)
        return [(name, of, partial(result.plot_effects, k)) for k, (name, of) in enumerate(named)]
    return [
        (f"{factor}: {name}", of, partial(result.plot_effects, factor, k))
        for factor, some in result.effects().items()
        for k, (name, of) in enumerate(zip(result.random_names[factor], some, strict=True))
    ]


def _counts(result: MixedResult | MultilevelResult) -> int | dict[str, int]:
    """The number of groups, of several factors of each."""
    if isinstance(result, MixedResult):
        return result.model.rows.n
    return {name: len(labels) for name, labels in result.group_names.items()}


def _rows(parts: Iterable[tuple[str, Marginals]]) -> list[list[Any]]:
    """A row for each entry of each part: its kind, its name, and four numbers."""
    rows: list[list[Any]] = []
    for kind, part in parts:
        numbers = zip(*(x.tolist() for x in (part.mean, part.sd, part.low, part.high)), strict=True)
        rows += [[kind, name, *four] for name, four in zip(part.names, numbers, strict=True)]
    return rows
