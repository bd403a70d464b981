"""A fit in print, by rich, as tables of numbers, and as one picture."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.text import Text as Label
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchngvi.app.outputs import write_rows
from torchngvi.app.prepare import renamed
from torchngvi.messages import listed, shown
from torchngvi.tables.result import TableResult
from torchngvi.tables.table import Marginals

if TYPE_CHECKING:
    from torchngvi.app.fits import Outcome

_LOOSE = re.compile(r"The data hardly bound (.+): sd ")
_FEW = 4  # sentences of that, from which on they are one
_MOST_ROWS = 60  # coefficients in print
_FILE_WIDTH = 120  # columns
_NUMBERS = ("mean", "sd", "low", "high")


def baselines(outcome: "Outcome") -> dict[str, str]:
    """Of each column of categories, the level that the effects of the others are relative to."""
    frame, names, found = outcome.result.formula.table, set(outcome.result.fixed_names), {}
    for name in (name for name in outcome.prepared.train if name in outcome.result.formula.columns.predictors):
        levels = [str(level) for level in frame[name].dropna().unique()]
        without = [level for level in levels if not names & {f"{name}[{level}]", f"C({name})[{level}]"}]
        if len(without) == 1 and len(levels) > 1:
            found[name] = without[0]
    return found


def _blocks(outcome: "Outcome") -> Iterator[tuple[str, Marginals]]:
    """The parts of the table of parameters, with a title."""
    table = outcome.result.summary()
    names = tuple(renamed(outcome.prepared.columns, name) for name in table.fixed.names)
    yield "coefficient", table.fixed._replace(names=names)
    for name, of in table.random.items():
        yield f"sd of {name}", of.sd
        yield f"correlation of {name}", of.correlation
    if table.likelihood is not None:
        yield table.title, table.likelihood


def _rows(of: Marginals) -> list[tuple[str, list[float]]]:
    columns = (getattr(of, name).tolist() for name in _NUMBERS)
    return [(name, list(row)) for name, *row in zip(of.names, *columns, strict=True)]


def _exp(x: float) -> float:
    return math.exp(x) if x < 709.0 else math.inf


def write_tables(outcome: "Outcome", place: Path) -> None:
    """Write coefficients.csv, all parameters, and effects.csv, the effects of each group."""
    ratio, rows = outcome.result.family.ratio, []
    scales = [*outcome.result.fitted.coordinates.columns.scales.tolist()]
    for kind, of in _blocks(outcome):
        first = kind == "coefficient"
        for place_, (name, four) in enumerate(_rows(of)):
            three = [_exp(four[k]) if first else "" for k in (0, 2, 3)] if ratio else []
            rows.append([name, kind, *four, *three, four[0] * scales[place_] if first else ""])
    header = ["name", "kind", *_NUMBERS, *(("ratio", "ratio_low", "ratio_high") if ratio else ()), "per_sd"]
    write_rows(place / "coefficients.csv", header, rows)
    result, found = outcome.result, []
    for factor, some in result.effects().items():
        for effect, of in zip(result.random_names[factor], some, strict=True):
            found += [[factor, effect, group, *four] for group, four in _rows(of)]
    if found:
        write_rows(place / "effects.csv", ["factor", "effect", "group", *_NUMBERS], found)


def figure(outcome: "Outcome") -> Figure:
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


def show(outcome: "Outcome", folder: Path | None) -> None:
    """Print which class is predicted, the table of parameters, and a box with the rest."""
    s, made, result = outcome.settings, outcome.prepared, outcome.result
    remarks = _remarks(result)
    cautions = [*outcome.warnings, *(text for text in remarks if "separate" in text or text.startswith("k-hat"))]
    held_out = outcome.held_out
    scored = ["no rows (test_fraction 0)"] if held_out is None else [f"{held_out[0]}, {held_out[0].rows} rows"]
    scored += [f"by the base rate: {held_out[1]}"] if held_out and held_out[1] else []
    based = ", ".join(f"{name} = {level}" for name, level in baselines(outcome).items())
    data = f"{s.data}: {len(made.train)} training rows, {len(result.fixed_names)} coefficients"
    data += "".join(f", {len(levels)} of {name}" for name, levels in result.group_names.items())
    data += "".join(f", {role} {name!r}" for role, name in (("weights", s.weights), ("offset", s.offset)) if name)
    reason = f"{result.reason[0].lower()}{result.reason[1:].rstrip('.')}" if result.reason else ""
    evidence = "" if result.log_evidence is None else f"; log evidence {result.log_evidence:.4g}"
    lines = [
        ("verdict", f"{'converged' if result.converged else 'not converged'}: {reason}{evidence}"),
        (
            "approximation",
            f"{result.method.rstrip('.')}: k-hat {result.k_hat:.2f}, {result.effective:.0f} effective draws",
        ),
        ("held out", "\n".join(scored)),
        ("data", data),
        ("model", result.family.name if s.formula is None else f"{result.family.name}, {s.formula}"),
        ("priors", outcome.priors),
        *([("baselines", f"{based}; the effects of other levels are relative to them")] if based else []),
        *(("note", note) for note in (*outcome.notes, *(text for text in remarks if text not in cautions))),
        *(("warning", text) for text in cautions),
        ("written to", f"{folder}/" if folder else "no folder"),
    ]
    title = "NOT CONVERGED" if not result.converged else "converged, with a warning" if cautions else "converged"
    marginal = [Text(str(table)) for table in outcome.marginal.values()]
    printed(*_predicted(outcome), *_tables(outcome), *marginal, _box(title, lines))


def _remarks(result: TableResult) -> list[str]:
    """What the result says of itself below its priors and its method, of many coefficients in one sentence."""
    lines = result.summary().foot.split("\n")
    above = len("".join(f"priors: {result.priors}{result.method}".split()))
    while above > 0:
        above -= len("".join(lines.pop(0).split()))
    loose = [found[1] for line in lines if (found := _LOOSE.match(line))]
    if len(loose) < _FEW:
        return lines
    kept = [line for line in lines if not _LOOSE.match(line)]
    return [*kept, f"The data hardly bound {listed(loose)}: their sds are more than half of those under their priors."]


def classes(result: TableResult) -> tuple[str, str] | None:
    """Failure and success of a result with two classes."""
    success = str(result.formula.success or "")
    if not success:
        return None
    levels = result.formula.table[result.formula.columns.response[0]].astype(str).unique()
    others = [str(level) for level in levels if level != success]
    return (others[0] if len(others) == 1 else f"not {success}"), success


def _predicted(outcome: "Outcome") -> list[Text]:
    """Which class is predicted: the first line of a result with classes."""
    pair = classes(outcome.result)
    if pair is None:
        return []
    said = f"Predicted is {pair[1]!r} against {pair[0]!r}"
    if outcome.settings.success or "[" in outcome.result.formula.response:
        return [Text(f"{said}.")]
    last = ", the class that sorts last" if pair[1] > pair[0] else ""
    return [Text(f"{said}{last}; --positive {quote(pair[0])} predicts the other.")]


def _tables(outcome: "Outcome") -> list[RenderableType]:
    """The coefficients per unit of a column, as ratios and per standard deviation, and all other parameters."""
    ratio, units = outcome.result.family.ratio, outcome.result.fitted.coordinates.columns
    found: list[RenderableType] = []
    (_, fixed), *others = _blocks(outcome)
    rows = [(*row, scale) for row, scale in zip(_rows(fixed), units.scales.tolist(), strict=True)]
    clear = sorted(range(len(rows)), key=lambda k: -abs(rows[k][1][0]) / max(rows[k][1][1], 1e-300))[:_MOST_ROWS]
    kept = [rows[k] for k in sorted(clear)]
    some = f"{len(kept)} of {len(rows)} coefficients, clearest signs"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("column", overflow="fold", max_width=32)
    for heading in ("per unit", "sd", "2.5%", "97.5%", *((ratio, "2.5%", "97.5%") if ratio else ()), "per sd"):
        table.add_column(heading, justify="right")
    for name, four, scale in kept:
        cells = [shown(cell) for cell in (*four, *([_exp(four[k]) for k in (0, 2, 3)] if ratio else []))]
        cells.append("" if name == "Intercept" else shown(four[0] * scale))
        bold = "bold" if four[2] > 0 or four[3] < 0 else ""
        table.add_row(Text(name), *cells, style=bold)
    found += [Text("Coefficients" if len(kept) == len(rows) else some, style="bold"), table]
    if any(of.names for _, of in others):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("parameter", overflow="fold")
        for heading in ("mean", "sd", "2.5%", "97.5%"):
            table.add_column(heading, justify="right")
        for kind, of in others:
            for name, four in _rows(of):
                table.add_row(
                    Text(name if kind in ("likelihood", "thresholds") else f"{kind}: {name}"), *map(shown, four)
                )
        found.append(table)
    return found


def _box(title: str, lines: list[tuple[str, str]]) -> Panel:
    """A box with the results of a run, a label and a text on each line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, text in lines:
        grid.add_row(label, Text(text))
    color = "green" if title == "converged" else "yellow"
    return Panel(
        grid, title=Text(title, style=f"bold {color}"), title_align="left", border_style=color, box=box.ROUNDED
    )


def of_frame(frame: pd.DataFrame, title: str, most: int) -> Group:
    """The first rows of a frame as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in frame.columns:
        table.add_column(name, justify="left" if name == "class" else "right")
    for row in frame.head(most).itertuples(index=False):
        table.add_row(*(Text(shown(value) if isinstance(value, float) else str(value)) for value in row))
    more = f", the first {most} of {len(frame)} rows" if len(frame) > most else ""
    return Group(Text(f"{title}{more}", style="bold"), table)


def printed(*parts: RenderableType) -> None:
    """Print to standard output; into a file or a pipe at a width that cuts no column."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    console.print(Group(*parts))
