"""``torchngvi reproduce``: tables and figures, each from one TOML file in the folder configs/ beside this file.

A file that names a ``paper`` is run by its module in `papers`; others are experiments of several methods, as those of
Kumar et al. (2025).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from torchngvi.app import datasets
from torchngvi.app.outputs import OutputFolder, read_frame, write_frame
from torchngvi.app.toml import read_toml
from torchngvi.errors import InputError
from torchngvi.messages import hint
from torchngvi.studies import comparison, experiments, figures, papers, settings
from torchngvi.studies.papers import kumar2025
from torchngvi.studies.settings import Experiment

CONFIGS = Path(__file__).parent / "configs"


def known() -> dict[str, Path]:
    """The experiments of the library, in the order of the papers: names, and their files.

    >>> "srvn-table3" in known()
    True
    """
    found = {path.stem: path for path in CONFIGS.glob("*.toml")}
    order = [*papers.PAPERS]

    def place(stem: str) -> tuple[int, int, str]:
        return order.index(stem.partition("-")[0]), len(stem), stem

    return {stem: found[stem] for stem in sorted(found, key=place)}


def listing() -> str:
    """One line for each experiment: its name, and the first sentence of its file."""
    lines = [f"  {name:16} {_told(path)}" for name, path in known().items()]
    return "\n".join(
        [
            "the experiments, each with its settings in a TOML file:",
            *lines,
            "",
            f"The files are in {CONFIGS}. Data sets of LIBSVM are downloaded into",
            f"{datasets.cache()}, and checked; all others are looked for in the folder $TORCHNGVI_DATA, and a",
            "sentence says which file is missing.",
        ]
    )


def _told(path: Path) -> str:
    """The title of an experiment, or the first line of its file."""
    title = read_toml(path).get("title")
    first = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    paper = "Kumar et al. (2025), " if title else ""
    return f"{paper}{title or first.partition(': see docs')[0].rstrip('.')}"


def find(name: str) -> Path:
    """The TOML file of an experiment: a path, or a name of `known`."""
    if name.endswith(".toml"):
        return Path(name)
    there = known()
    if name in there:
        return there[name]
    raise InputError(f"there is no experiment {name!r}.{hint(name, there)} The experiments are: {', '.join(there)}.")


def reproduce(
    name: str, out: str | None = None, *, full: bool = False, from_logs: bool = False, overwrite: bool = False
) -> Path:
    """Run an experiment, and write log.csv, settings.json and its figure or table."""
    path = find(name)
    try:
        return _run(path, out, full, from_logs, overwrite)
    except KeyError as error:
        if not from_logs:
            raise
        where = str(out or Path("runs") / path.stem)
        raise InputError(
            f"the log in {where!r} is not one of {path.stem}: it has no {error}. Name the folder of its run (--out), "
            "or run it without --from-logs."
        ) from error


def _run(path: Path, out: str | None, full: bool, from_logs: bool, overwrite: bool) -> Path:
    """Run or draw again the experiment of a file."""
    keys = read_toml(str(path))
    # to draw again from logs is to replace what was drawn from them
    folder = OutputFolder(out or Path("runs") / path.stem, overwrite=overwrite or from_logs)
    if "paper" in keys:
        return _study(path, keys, folder, full, from_logs)
    experiment = settings.read(path, full)
    if from_logs:
        log = _read_log(folder)
    else:
        log = _RUN[experiment.kind](experiment)
        write_log(folder, settings.to_dict(experiment), log)
    if experiment.kind == "table":
        kumar2025.show_comparison(experiment, log, folder)
        return folder.path
    with folder.writing() as place:
        figures.save(_DRAW[experiment.kind](log, experiment), place / path.stem)
    if experiment.kind == "curves":
        comparison.show_table(log, experiment.title)
    for pair, away in kumar2025.differences(log).items() if experiment.kind == "quadratic" else ():
        print(f"{pair}: largest difference of m and V from VN {away:.2e}")
    return folder.path


def _study(path: Path, keys: dict[str, Any], folder: OutputFolder, full: bool, from_logs: bool) -> Path:
    """Run or draw again a study of `papers`."""
    study, arguments = papers.study(keys, path)
    if from_logs:
        log = _read_log(folder)
    else:
        log = study.run(**arguments, full=full)
        write_log(folder, keys | {"full": full}, log)
    with folder.writing() as place:
        study.draw(log, place / path.stem)
    return folder.path


def _read_log(folder: OutputFolder) -> pd.DataFrame:
    path = folder.path / "log.csv"
    if not path.exists():
        raise InputError(f"there is no log {str(path)!r} to draw from. Run it without --from-logs.")
    return read_frame(path)


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
            raise InputError(f"{config} is of kind {experiment.kind!r}: say torchngvi reproduce {config}.")
    else:
        experiment = _from_flags(methods or ("vn", "srvn"), **flags)
    folder = OutputFolder(out or Path("runs") / (Path(config).stem if config else "compare"), overwrite=overwrite)
    log = experiments.run_all(experiment)
    write_log(folder, settings.to_dict(experiment), log)
    with folder.writing() as place:
        figures.save(comparison.curves(log, experiment), place / "compare")
    comparison.show_table(log, experiment.title)
    return folder.path


def _from_flags(methods: Sequence[str], **flags: Any) -> Experiment:
    if "data" not in flags:
        raise InputError("data is missing: torchngvi compare --data breast_cancer, or name a TOML file.")
    starts = flags.pop("starts", 5)
    contenders = [_contender(text) for text in methods]
    columns = ["objective over evaluations", "objective over seconds", "test_nll over evaluations"]
    case = {"name": Path(flags["data"]).name, "as_fit": True, "iterations": 50, "standardize": True,
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


_RUN: dict[str, Callable[[Experiment], pd.DataFrame]] = {
    "curves": experiments.run_all,
    "table": experiments.run_all,
    "quadratic": kumar2025.run_quadratic,
    "run_time": kumar2025.run_time,
}
_DRAW: dict[str, Callable[[pd.DataFrame, Experiment], Figure]] = {
    "curves": comparison.curves,
    "quadratic": kumar2025.draw_quadratic,
    "run_time": kumar2025.draw_time,
}
