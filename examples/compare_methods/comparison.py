"""Several methods on one data set; their curves and their table are made of the log alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from examples.compare_methods import drawing, plots, settings
from examples.compare_methods.experiments import run_all
from examples.compare_methods.settings import AXES, METRICS, Experiment
from torchngvi.app.saved import OutputFolder, write_frame
from torchngvi.errors import InputError

_SHOWN = {  # of the table: head and format
    "case": ("case", ""),
    "method": ("method", ""),
    "evaluations": ("evaluations", ".0f"),
    "rejections": ("rejected", ".0f"),
    "seconds": ("CPU s", ".3g"),
    "elbo": ("ELBO", ".3f"),
    "below": ("below best", ".3f"),
    "loss": ("held-out loss", ".4f"),
    "test_accuracy": ("accuracy", ".3f"),
}
_EXPLAINED = (
    "ELBO, below best: nats of the training rows, larger ELBOs are better; the best of a case is the optimum where it "
    "is known, else the best run; 1 nat below it is a factor of e in the bound of p(y).",
    "held-out loss: nats a row, E_q[-log p(y | x)]; -log E_q[p(y | x)] is smaller.",
    "evaluations: passes over the training rows, rejected trials among them. CPU s: seconds of the steps, a start.",
)
_DIVERGED = 1e9  # nats beyond which a run of the table is said to have diverged
_LOST = 1e3  # times the value at the start, beyond which a run has left the panel
_SEEN = 1e-6  # nats: a gap below it is not drawn
_BEST = {"objective": "optimum", "train": "train_optimum", "test_nll": "test_nll_optimum"}  # columns of the log


def last_values(log: pd.DataFrame) -> pd.DataFrame:
    """The last record of each method, as the mean over its starts."""
    last = log[log["iteration"] == log.groupby(["case", "method"])["iteration"].transform("max")]
    grouped = last.drop(columns="start").groupby(["case", "method"], sort=False)
    return grouped.agg(lambda values: values.mean(skipna=False)).reset_index()


def compared(log: pd.DataFrame) -> pd.DataFrame:
    """The last values of each method ELBOs in nats, losses in nats a row."""
    frame = last_values(log)
    frame["elbo"] = -frame["objective"]
    known = -frame["optimum"] if "optimum" in frame else frame["elbo"] * np.nan
    best = np.fmax(frame["elbo"].where(np.isfinite(frame["elbo"])), known).groupby(frame["case"]).transform("max")
    frame["below"] = best - frame["elbo"]
    if "test_rows" in frame:
        frame["loss"] = frame["test_nll"] / frame["test_rows"]
    return frame


def show_table(log: pd.DataFrame, title: str) -> None:
    """Print the last values of each method as a table, and what its columns mean."""
    frame = compared(log)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown = {name: of for name, of in _SHOWN.items() if name in frame}
    for name, (head, _) in shown.items():
        side: Any = "left" if name in ("case", "method") else "right"
        table.add_column(head, justify=side, no_wrap=True)
    for _, row in frame.iterrows():
        table.add_row(*(Text(_cell(row[name], form)) for name, (_, form) in shown.items()))
    told = [line for line in _EXPLAINED if not line.startswith("held-out") or "loss" in frame]
    heading = Text(f"{title} (last values, means over the starts)", style="bold")
    drawing.show(heading, table, *(Text(line, style="dim") for line in told))


def _cell(value: Any, form: str) -> str:
    """A number of the table, or "diverged" in the place of one that is none or would be wider than its column."""
    return "diverged" if form and not abs(value) < _DIVERGED else format(value, form)


def curves(log: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw one row of panels for each case: mean and min-max band over the starts."""
    named, found = [case.name for case in experiment.cases], list(dict.fromkeys(log["case"]))
    cases = [case for case in found if case in named]
    columns = experiment.columns
    height = 2.5 * len(cases) + 0.9
    figure = plots.blank_figure(3.4 * len(columns) + 1.9, height, experiment.title, experiment.note)
    grid = figure.subplots(len(cases), len(columns), squeeze=False)
    for row, case in enumerate(cases):
        part = log[log["case"] == case]
        for place, column in enumerate(columns):
            metric, _, axis = column.partition(" over ")
            _panel(grid[row, place], part, case, metric, axis)
    plots.legend(figure)
    return figure


def _panel(axes: Axes, log: pd.DataFrame, case: str, metric: str, axis: str) -> None:
    values, unit = _drawn(log, metric)
    if metric in log and not np.isfinite(values).any():  # Leukemia has no test rows
        plots.style(axes, f"{case}: no test rows")
        return
    gap = unit.startswith("nats above")
    plots.style(axes, case, AXES[axis], f"{METRICS[metric]}\n{unit}")
    log = log.assign(value=values)
    logarithmic = metric != "test_accuracy" and bool((values.dropna() > 0 if not gap else values.dropna() >= 0).all())
    for index, method in enumerate(dict.fromkeys(log["method"])):
        floor = 1e-9 if logarithmic else -np.inf
        plots.band(axes, log[log["method"] == method], "value", plots.spoken(method), index, x=axis, floor=floor)
    level = log[_BEST[metric]].iloc[0] if not gap and _BEST.get(metric) in log else np.nan
    if np.isfinite(level):
        axes.axhline(level, color=plots.INK, linewidth=0.8, linestyle=":", label="at the optimum")
    if logarithmic:
        axes.set_yscale("log")
        bottom, top = values[values > 0].quantile(0.01), values[log["iteration"] == 0].max()
        bottom = np.fmin(bottom, level)
        if bottom < top:
            axes.set_ylim(max(float(bottom), _SEEN) * (0.5 if gap else 0.8), (5 if gap else 1.3) * float(top))


def _drawn(log: pd.DataFrame, metric: str) -> tuple[pd.Series, str]:
    """The values of one case as they are drawn, and their unit, "nats above ..." where they are distances."""
    largest = _LOST * log.loc[log["iteration"] == 0, metric].abs().max()
    values = log[metric].where(log[metric].abs() <= largest)  # a start that diverges ends the line
    if metric in ("objective", "train"):
        gaps = plots.gap(values, log.get(_BEST[metric]))  # of Table 3 the optimum is not the smallest value
        if gaps is not None:
            return gaps, "nats above the optimum"
        gaps = plots.gap(values, log.get("stationary")) if metric == "objective" else None
        if gaps is not None:
            return gaps, "nats above the stationary point"
    return values, "share" if metric == "test_accuracy" else "nats"


def compare(
    config: str | None = None,
    out: str | None = None,
    methods: Sequence[str] = (),
    *,
    overwrite: bool = False,
    **flags: Any,
) -> Path:
    """Run several methods on one data set, from a TOML file or from flags, and write logs and curves."""
    if config is not None:
        if flags or methods:
            given = ", ".join("--" + key.replace("_", "-") for key in ([*flags, "methods"] if methods else flags))
            raise InputError(f"settings come from a file or from flags; got {config} and {given}. Edit the file.")
        experiment = settings.read(config)
        if experiment.kind != "curves":
            raise InputError(f"{config} is of kind {experiment.kind!r}: say python -m examples.papers {config}.")
    else:
        experiment = _from_flags(methods or ("vn", "srvn"), **flags)
    folder = OutputFolder(out or Path("runs") / (Path(config).stem if config else "compare"), overwrite=overwrite)
    log = run_all(experiment)
    write_log(folder, settings.to_dict(experiment), log)
    with folder.writing() as place:
        plots.save(curves(log, experiment), place / "compare")
    show_table(log, experiment.title)
    return folder.path


def _from_flags(methods: Sequence[str], **flags: Any) -> Experiment:
    if "data" not in flags:
        raise InputError("data is missing: --data breast_cancer, or name a TOML file.")
    starts = flags.pop("starts", 5)
    contenders = [_contender(text) for text in methods]
    columns = ["objective over evaluations", "objective over seconds", "test_nll over evaluations"]
    case = {"name": Path(flags["data"]).name, "iterations": 50, "standardize": True,
            "intercept": True, **flags, "methods": contenders}  # fmt: skip
    return settings.parsed(
        {"title": f"{case['name']}: {', '.join(methods)}", "cases": [case], "columns": columns, "starts": starts,
         "start_sd": 1.0, "start_scale": 0.5}
    )  # fmt: skip


def _contender(text: str) -> dict[str, Any]:
    """The settings of a method that is written as vn, or as bwgd=1e-3."""
    method, _, lr = text.partition("=")
    try:
        return {"method": method, "label": text} | ({"lr": float(lr)} if lr else {})
    except ValueError as error:
        raise InputError(f"a method is written METHOD or METHOD=LR, such as bwgd=1e-3; got {text!r}.") from error


def write_log(folder: OutputFolder, keys: Mapping[str, Any], log: pd.DataFrame) -> None:
    """Write log.csv and settings.json."""
    with folder.writing() as place:
        write_frame(place / "log.csv", log)
        (place / "settings.json").write_text(json.dumps(keys, indent=2) + "\n")
