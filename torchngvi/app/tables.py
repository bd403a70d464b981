"""Data sets as arrays, as they are stored: files of several formats, and the sets bundled with scikit-learn."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sklearn import datasets

from torchngvi.app.columns import Table, from_frame
from torchngvi.app.config import file_name
from torchngvi.app.memory import Budget
from torchngvi.app.readers import DELIMITED, ending, read_columns, read_npz, read_svmlight
from torchngvi.errors import InputError
from torchngvi.messages import hint

BUNDLED: dict[str, Callable[..., Any]] = {
    "breast_cancer": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
    "digits": datasets.load_digits,
    "iris": datasets.load_iris,
    "wine": datasets.load_wine,
}
_SVMLIGHT = (".svm", ".libsvm", ".txt")
_FORMATS = ".csv, .tsv, .svm, .libsvm, .txt (svmlight), each also with .gz, .parquet and .npz"
_TABLE_ALONE = Budget()


def read_table(
    data: str,
    *,
    target: str | None = None,
    weights: str | None = None,
    offset: str | None = None,
    drop: Iterable[str] = (),
    n_features: int | None = None,
    categorical: Iterable[str] = (),
    impute: bool = False,
    budget: Budget = _TABLE_ALONE,
) -> Table:
    """Read a bundled set by name, or a file by its ending.

    >>> read_table("iris").X.shape
    (150, 4)
    """
    path = Path(file_name("data", data))
    end = ending(path)
    if n_features is not None and (data in BUNDLED or end not in _SVMLIGHT):
        raise InputError(f"n_features is for svmlight files (.svm, .libsvm, .txt); {data!r} is none. Leave it out.")
    columns = {"target": target, "weights": weights, "offset": offset}
    if data in BUNDLED:
        table = _from_bundled(data, columns, drop, budget)
    elif not path.exists():
        raise InputError(_no_such_data(data, path, end))
    elif not path.is_file():
        raise InputError(f"data must be a file; {data!r} is a folder. Name one file in it.")
    elif end in DELIMITED or end == ".parquet":
        read = read_columns(path)
        table = from_frame(read.frame, columns, drop, budget, categorical=categorical, impute=impute, read=read)
        table = replace(table, notes=(*read.notes, *table.notes))
    elif list(categorical):
        raise InputError(f"categorical names columns of a csv, tsv or parquet file; {data!r} is none. Leave it out.")
    elif end in _SVMLIGHT:
        table = read_svmlight(path, columns, drop, n_features, budget)
    elif end == ".npz":
        table = read_npz(path, columns, drop, budget, impute=impute)
    else:
        raise InputError(f"cannot tell the format of {data!r} from its ending; known are {_FORMATS}. Rename the file.")
    if len(table.y) == 0:
        raise InputError(f"{data!r} has no rows: a data set needs at least two. Check the file.")
    return table


def _no_such_data(data: str, path: Path, end: str) -> str:
    bundled = f"The bundled sets are {', '.join(BUNDLED)}."
    if end or len(path.parts) > 1:
        return f"there is no data file {data!r} (looked for {path.absolute()}). Check the path. {bundled}"
    return f"{data!r} is neither a file nor a bundled set.{hint(data, BUNDLED)} {bundled}"


def _from_bundled(data: str, columns: dict[str, str | None], drop: Iterable[str], budget: Budget) -> Table:
    bunch = BUNDLED[data](as_frame=True)
    frame = bunch.frame
    table = from_frame(frame, {**columns, "target": columns["target"] or "target"}, drop, budget)
    labels = tuple(str(label) for label in bunch.get("target_names", ())) if table.target == "target" else ()
    return replace(table, labels=labels)
