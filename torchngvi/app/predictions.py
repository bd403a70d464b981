"""`torchngvi predict`: the predictions for the rows of a table, shown in part and written as csv."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from torchngvi.app import report
from torchngvi.app.config import file_name
from torchngvi.app.outputs import write_frame
from torchngvi.app.readers import read_columns
from torchngvi.app.saved import load
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import remove_left, write_whole
from torchngvi.messages import shown

_SHOWN = 10  # rows


def run(folder: str, table: str, drop: Sequence[str], out: str | None, overwrite: bool) -> pd.DataFrame:
    """Predict the rows of a table with an earlier fit, show the first of them, and write all as csv.

    Args:
        folder: that of the run.
        table: a csv, tsv or parquet file.
        drop: columns of it to leave out.
        out: the file that is written; by default predictions-TABLE.csv in the folder.
        overwrite: whether that file may be there already.

    Returns:
        The predictions, one row for each of the table.

    Raises:
        InputError: a folder, a table or a file that cannot be used.
    """
    with warnings.catch_warnings(record=True) as said:  # of the folder
        warnings.simplefilter("always")
        fitted = load(file_name("RUN", folder))
    path = Path(file_name("TABLE", table))
    to = Path(file_name("out", out)) if out else Path(folder) / f"predictions-{path.name.split('.')[0]}.csv"
    if to.exists() and not overwrite:
        raise InputError(f"{str(to)!r} is there already. Say --overwrite to replace it, or name another file (--out).")
    frame = read_columns(path).frame
    lacking = [name for name in drop if name not in frame]
    if lacking:
        raise InputError(f"drop column {lacking[0]!r} is not in {str(path)!r}. Leave it out.")
    found = fitted.predict(frame.drop(columns=list(drop)), name=str(path))
    found.insert(0, "row", range(1, len(found) + 1))
    _write(to, found)
    notes = [Text(f"note: {one.message}") for one in said]
    report.show(_table(found, f"{fitted.told}, with 95% intervals"), *notes, Text(f"{len(found)} rows written to {to}"))
    return found


def _write(to: Path, found: pd.DataFrame) -> None:
    """Under its name only when it is whole."""
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


def _table(found: pd.DataFrame, title: str) -> Group:
    table = Table(box=box.SIMPLE_HEAD)
    for name in found.columns:
        table.add_column(name, justify="left" if name == "class" else "right")
    for row in found.head(_SHOWN).itertuples(index=False):
        table.add_row(*(Text(shown(value) if isinstance(value, float) else str(value)) for value in row))
    more = f", the first {_SHOWN} of {len(found)} rows" if len(found) > _SHOWN else ""
    return Group(Text(f"{title}{more}", style="bold"), table)
