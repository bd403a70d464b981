"""The tables and figures of the papers, one module or folder a paper, named as in `torchngvi.theory`.

``python -m examples.papers`` in the root of a clone lists them, and with a name runs one.  A TOML file in the folder
configs/papers names the paper in a word as ``paper`` and one of its studies as ``study``; all other keys are keyword
arguments of the study's ``run``.  Figures and tables are made from the log alone.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from torchngvi.errors import InputError
from torchngvi.messages import hint

PAPERS = {
    "srvn": "kumar2025",
    "tan": "tan2025",
    "bbvi": "kim2024",
    "ngvi": "wu2024",
    "ifvb": "godichon2023",
    "price": "kim2026",
    "open": "open_questions",
    "bam": "cai2024",
}  # word to module


class Study(NamedTuple):
    """A table or figure of a paper: a function that runs it, and one that draws it from the log."""

    run: Callable[..., pd.DataFrame]  # settings as keywords, and ``full``: longer runs -> the log
    draw: Callable[[pd.DataFrame, Path], None]  # the log, the path of the figure or table without its suffix


def study(settings: Mapping[str, Any], path: Path) -> tuple[Study, dict[str, Any]]:
    """The study that a TOML file names, with its keyword arguments."""
    arguments = dict(settings)
    paper, name = arguments.pop("paper"), arguments.pop("study", None)
    if paper not in [*PAPERS, *PAPERS.values()]:
        raise InputError(f"{path}: paper is one of {', '.join(PAPERS)}; got {paper!r}.")
    studies: dict[str, Study] = importlib.import_module(f"examples.papers.{PAPERS.get(paper, paper)}").STUDIES
    if name not in studies:
        raise InputError(
            f"{path}: study is one of {', '.join(studies)}; got {name!r}.{hint(name, studies) if name else ''}"
        )
    known = [key for key in inspect.signature(studies[name].run).parameters if key != "full"]
    for key in arguments:
        if key not in known:
            raise InputError(f"{path}: {name} has no setting {key!r}.{hint(key, known)} It has: {', '.join(known)}.")
    return studies[name], arguments


def two_errors(mean: pd.Series, error: pd.Series, scale: pd.Series | float = 1.0) -> pd.DataFrame:
    """A mean with two standard errors at either side of it.

    >>> two_errors(pd.Series([3.0]), pd.Series([0.5])).loc[0].tolist()
    [3.0, 2.0, 4.0]
    """
    return pd.DataFrame({"middle": scale * mean, "low": scale * (mean - 2 * error), "high": scale * (mean + 2 * error)})
