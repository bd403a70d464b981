"""What speaks for and against a fit, and the fit in print, by rich, as tables of numbers, and as one picture."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
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
from torch import Tensor

from torchngvi.app.outputs import write_frame
from torchngvi.app.prepare import CLASSES, Prepared
from torchngvi.app.readers import Read
from torchngvi.app.settings import Settings
from torchngvi.diagnostics.importance import USELESS
from torchngvi.messages import listed, shown
from torchngvi.tables.model import regression
from torchngvi.tables.result import TableResult
from torchngvi.tables.table import Marginals

_LOOSE = re.compile(r"The data hardly bound (.+): sd ")
_NUMBERS = ["mean", "sd", "low", "high"]
_OFFSET = re.compile(r"offset\((?:[^()]|\([^()]*\))*\)")


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


def held_out(result: TableResult, s: Settings, made: Prepared) -> tuple[HeldOut, HeldOut] | None:
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


def classes(result: TableResult) -> tuple[str, str] | None:
    """Failure and success of a result with two classes."""
    success = str(result.formula.success or "")
    if not success and result.family.name in CLASSES:  # two numbers
        failure, success = (f"{value:g}" for value in result.formula.design.y[0].unique().tolist())
        return failure, success
    if not success:
        return None
    levels = result.formula.table[result.formula.columns.response[0]].astype(str).unique()
    others = [str(level) for level in levels if level != success]
    return (others[0] if len(others) == 1 else f"not {success}"), success


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
