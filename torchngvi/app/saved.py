"""A fit that was written to a folder, read again: predictions for new rows of a table."""

import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.text import Text

from torchngvi.app import report
from torchngvi.app.outputs import POSTERIOR, file_of, read_content, write_frame
from torchngvi.app.prepare import Columns
from torchngvi.app.readers import read_table
from torchngvi.app.settings import check_file, file_name
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import remove_left, write_whole
from torchngvi.tables import effects
from torchngvi.tables.result import TableResult
from torchngvi.tables.saved import result_of

__all__ = ["Fitted", "load"]

_SHOWN = 10  # rows of predictions in print


@dataclass(frozen=True, repr=False)
class Fitted:
    """A run of ``torchngvi fit``: the fit, with all that turns a table of new rows into predictions.

    `load` makes it from the folder of a run.

    Attributes:
        result: the fit, with `torchngvi.tables.TableResult.summary`, `to_arviz` and the rest.
        columns: how new rows are prepared, see `torchngvi.app.prepare.Columns`.
        name: of the folder.
    """

    result: TableResult
    columns: Columns
    name: str

    def __repr__(self) -> str:
        made = self.columns.formula
        return f"Fitted({self.name!r}, {made!r}, {self.result.family.name}, {len(self.result.design.X)} rows)"

    @property
    def told(self) -> str:
        """What is predicted, in words."""
        pair = report.classes(self.result)
        return f"probability of {pair[1]!r}" if pair else f"mean of {str(self.result.formula.response).strip('`')}"

    def predict(
        self,
        frame: pd.DataFrame,
        *,
        kind: str = "mean",
        interval: float = 0.95,
        population: bool = False,
        name: str = "the table",
        drop: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Predict new rows, with central intervals.

        For two classes the table has the likelier ``class`` and the ``probability`` of success, averaged over the
        posterior, with the interval of that probability, ``low`` and ``high``. For counts and real numbers it has the
        ``mean`` with its interval ``mean_low`` and ``mean_high``, and the interval of a new observation, ``low`` and
        ``high``; of ordered categories the probability of each, of trials the ``probability`` of a success. Of a model
        with groups ``new_groups`` names the factors whose group the fit has not seen.

        Args:
            frame: the new rows, with the columns of the fit as they were there; the target may be among them.
            kind: "mean", or "linear" for the linear predictor, or "response" for a new observation.
            interval: the probability of the intervals.
            population: whether rows are those of new groups, averaged over these.
            name: the table, for messages.
            drop: of a table from a file, the columns that were left out.

        Returns:
            One row for each of the frame, with its index.

        Raises:
            InputError: columns that are missing or unknown, entries that are missing or unseen.
        """
        made, result = self.columns.of(frame, name, drop), self.result
        asked: dict[str, Any] = {"interval": interval, "population": population}
        first = result.predict(made, kind=kind, **asked)
        mean, low, high = (part.numpy() for part in (first.mean, first.low, first.high))
        labels, pair = result.family.outcomes or result.formula.outcomes, report.classes(result)
        if mean.ndim > 1:
            names = list(map(str, labels or range(mean.shape[1])))[-mean.shape[1] :]  # of predictors all but the first
            most = {} if kind == "linear" else {"class": np.array(names)[mean.argmax(1)]}
            found: dict[str, Any] = {**most, **dict(zip(names, mean.T, strict=True))}
        elif kind == "mean" and ("trials" in result.family.extra or (result.family.discrete and pair)):
            label = {"class": np.where(mean > 0.5, pair[1], pair[0])} if pair else {}
            found = {**label, "probability": mean, "low": low, "high": high}
        elif kind == "mean":
            new = result.predict(made, kind="response", **asked)
            found = {"mean": mean, "mean_low": low, "mean_high": high, "low": new.low.numpy(), "high": new.high.numpy()}
        else:
            found = {kind: mean, "low": low, "high": high}
        factors = result.formula.of(made).factors
        if factors:
            new_of = (np.where(of.groups.numpy() < 0, of.name, "") for of in factors)
            found["new_groups"] = [", ".join(filter(None, names)) for names in zip(*new_of, strict=True)]
        return pd.DataFrame(found, index=frame.index)

    def to_arviz(self, frame: Any = None, *, seed: int = 0) -> Any:
        """Export draws for ArviZ, see `TableResult.to_arviz`; the run keeps its table, and a frame is not looked at."""
        return self.result.to_arviz(seed=seed)


def load(run: str | Path) -> Any:
    """Read what ``torchngvi fit`` or `TableResult.save` has written, to predict with it.

    The files from which a run predicts are checked against their digests in manifest.json, and each of their values
    against what a run can hold, so that a run of a stranger runs no code. A folder without digests, and other files of
    it that have changed, are a warning.

    Args:
        run: the folder of the run, or the file posterior.pt in it.

    Returns:
        `Fitted`, whose `Fitted.predict` takes a table of new rows; of a folder that `TableResult.save` has written the
        `torchngvi.tables.TableResult`.

    Raises:
        ImportError: without formulae.
        InputError: no such folder, a folder or a file of something else, a run of an earlier version, one that is not
            as it was written, or that holds what no run holds.
    """
    if not isinstance(run, str | os.PathLike):
        raise InputError(f"load takes the folder of a run, such as 'runs/patients'; got {type(run).__name__}.")
    folder = Path(run) if Path(run).is_dir() or Path(run).name != POSTERIOR else Path(run).parent
    if not folder.is_dir() or not file_of(folder, POSTERIOR).is_file():
        there = f"there is no {POSTERIOR} in it" if folder.is_dir() else "it is not there"
        raise InputError(
            f"{str(run)!r} is no folder of a run: {there}. Name the folder that torchngvi fit has written, such as "
            "runs/breast_cancer. Of a state dict call q.load_state_dict(torch.load(path))."
        )
    content, notes = read_content(folder)
    for note in notes:
        warnings.warn(f"{note}.", stacklevel=2)
    path = str(file_of(folder, POSTERIOR))
    try:
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # of a broken file torch, zipfile and pickle raise anything
        said = (str(error).splitlines() or [""])[0].partition(". ")[0]
        raise InputError(f"{path!r} cannot be read as the posterior of a run ({said}). Fit again.") from error
    if not isinstance(state, dict) or "made" not in state:
        raise InputError(
            f"{path!r} is of an earlier version, or no run of torchngvi fit. Fit again. A state dict is read by "
            "q.load_state_dict(torch.load(path)), into a q that is made as the saved one was."
        )
    columns = state.pop("run", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = result_of(state, name=path)
            return result if columns is None else Fitted(result, Columns.read(columns), folder.resolve().name)
    except (InputError, Warning) as error:
        raise InputError(f"{path!r} holds what no run has written: {error} Fit again.") from error


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
    rows = report.of_rows(list(found), found.head(_SHOWN).itertuples(index=False))
    report.printed(Text(f"{title}{more}", style="bold"), rows, *notes, Text(f"{len(found)} rows written to {to}"))


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
