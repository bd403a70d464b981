"""``python -m examples.papers``: tables and figures, each from one TOML file in the folder configs/papers.

A file that names a ``paper`` is run by its module in `papers`; others are experiments of several methods, as those of
Kumar et al. (2025).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from examples import papers
from examples.compare_methods import comparison, datasets, experiments, plots, settings
from examples.compare_methods.settings import Experiment
from examples.papers import kumar2025
from torchngvi.app.saved import OutputFolder, read_frame
from torchngvi.app.settings import read_toml
from torchngvi.errors import InputError
from torchngvi.messages import hint

CONFIGS = Path(__file__).parents[2] / "configs" / "papers"


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
        comparison.write_log(folder, settings.to_dict(experiment), log)
    if experiment.kind == "table":
        kumar2025.show_comparison(experiment, log, folder)
        return folder.path
    with folder.writing() as place:
        plots.save(_DRAW[experiment.kind](log, experiment), place / path.stem)
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
        comparison.write_log(folder, keys | {"full": full}, log)
    with folder.writing() as place:
        study.draw(log, place / path.stem)
    return folder.path


def _read_log(folder: OutputFolder) -> pd.DataFrame:
    path = folder.path / "log.csv"
    if not path.exists():
        raise InputError(f"there is no log {str(path)!r} to draw from. Run it without --from-logs.")
    return read_frame(path)


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
