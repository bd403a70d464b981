"""Data sets as arrays: csv and tsv files, svmlight files, npz archives, and the sets bundled with scikit-learn.

Two stages: `read_table` gives numbers as they are in the file, `prepare` codes the target, splits,
standardises with the statistics of the training rows, and adds the intercept.
"""

import gzip
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.model_selection import train_test_split

from torchngvi.app import memory
from torchngvi.app.config import file_name, hint
from torchngvi.app.memory import Budget
from torchngvi.errors import InputError

Array = np.ndarray[Any, Any]

BUNDLED: dict[str, Callable[..., Any]] = {
    "breast_cancer": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
    "digits": datasets.load_digits,
    "iris": datasets.load_iris,
    "wine": datasets.load_wine,
}
_DELIMITED = {".csv": ",", ".tsv": "\t"}
_SVMLIGHT = (".svm", ".libsvm", ".txt")
_FORMATS = ".csv, .tsv, .svm, .libsvm, .txt (svmlight), each also with .gz, and .npz"
_MOST_LEVELS = 50  # of a text column
_MOST_CLASSES = 10  # of a numeric target, before it is taken for counts or measurements
_LARGEST = 1e140  # entry of a column
_CHUNK = 1 << 20  # bytes
_TABLE_ALONE = Budget()


@dataclass(frozen=True)
class Table:
    """A data set as read."""

    X: Array  # (N, D), float64
    y: Array  # (N,), numbers or texts
    names: tuple[str, ...]  # of the columns of X
    target: str  # name of y
    labels: tuple[str, ...] = ()  # what y = 0, 1, .. stand for, where the source says it
    weights: Array | None = None  # (N,)
    offset: Array | None = None  # (N,)


class Rows(NamedTuple):
    """Some rows, ready for a model."""

    X: Array  # (n, D)
    y: Array  # (n,)
    weights: Array | None  # (n,)
    offset: Array | None  # (n,)


@dataclass(frozen=True)
class Prepared:
    """Training and held-out rows of one design."""

    train: Rows
    test: Rows
    names: tuple[str, ...]  # of the columns, the intercept first
    center: Array  # (D,), subtracted; 0 for the intercept
    scale: Array  # (D,), divided by; 1 for the intercept and for constant columns
    classes: tuple[str, str] | None  # failure and success


# ------------------------------------------------------------------------------------ reading


def read_table(
    data: str,
    *,
    target: str | None = None,
    weights: str | None = None,
    offset: str | None = None,
    drop: Iterable[str] = (),
    n_features: int | None = None,
    budget: Budget = _TABLE_ALONE,
) -> Table:
    """Read a bundled set by name, or a file by its ending.

    Args:
        data: breast_cancer, diabetes, digits, iris or wine; or a path.
        target: the column of the targets, of a csv or tsv file.
        weights, offset: columns (in an npz file arrays) of row weights and predictor offsets.
        drop: columns to leave out.
        n_features: the number of features of a svmlight file, where trailing ones are empty.
        budget: what the table is for, so that one too large for it is refused before it is read.

    Raises:
        InputError: no such data, not readable, no rows, columns missing, entries missing, too little memory.
    """
    path = Path(file_name("data", data))
    ending = _ending(path)
    if n_features is not None and (data in BUNDLED or ending not in _SVMLIGHT):
        raise InputError(f"n_features is for svmlight files (.svm, .libsvm, .txt); {data!r} is none. Leave it out.")
    columns = {"target": target, "weights": weights, "offset": offset}
    if data in BUNDLED:
        table = _from_bundled(data, columns, drop, budget)
    elif not path.exists():
        raise InputError(_no_such_data(data, path, ending))
    elif not path.is_file():
        raise InputError(f"data must be a file; {data!r} is a folder. Name one file in it.")
    elif ending in _DELIMITED:
        table = _from_frame(_read_delimited(path, _DELIMITED[ending]), columns, drop, budget)
    elif ending in _SVMLIGHT:
        table = _read_svmlight(path, columns, drop, n_features, budget)
    elif ending == ".npz":
        table = _read_npz(path, columns, drop, budget)
    else:
        raise InputError(f"cannot tell the format of {data!r} from its ending; known are {_FORMATS}. Rename the file.")
    if len(table.y) == 0:
        raise InputError(f"{data!r} has no rows: a data set needs at least two. Check the file.")
    return table


def _ending(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _no_such_data(data: str, path: Path, ending: str) -> str:
    bundled = f"The bundled sets are {', '.join(BUNDLED)}."
    if ending or len(path.parts) > 1:
        return f"there is no data file {data!r} (looked for {path.absolute()}). Check the path. {bundled}"
    return f"{data!r} is neither a file nor a bundled set.{hint(data, BUNDLED)} {bundled}"


def _from_bundled(data: str, columns: dict[str, str | None], drop: Iterable[str], budget: Budget) -> Table:
    bunch = BUNDLED[data](as_frame=True)
    frame = bunch.frame
    table = _from_frame(frame, {**columns, "target": columns["target"] or "target"}, drop, budget)
    labels = tuple(str(label) for label in bunch.get("target_names", ())) if table.target == "target" else ()
    return Table(table.X, table.y, table.names, table.target, labels, table.weights, table.offset)


def _opened(path: Path) -> Any:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _require_memory_for_text(path: Path, separator: str) -> None:
    """Go through a file piece by piece, as far as memory would suffice to read it whole; a few bytes may unpack to any
    number.
    """
    need, size, separators, lines, header, free = 0, 0, 0, 0, 0, memory.available()
    mark = separator.encode()
    with _opened(path) as file:
        while need <= free and (chunk := file.read(_CHUNK)):
            size += len(chunk)
            header += 0 if lines else chunk.split(b"\n", 1)[0].count(mark)
            separators += chunk.count(mark)
            lines += chunk.count(b"\n")
            need = memory.of_text(size, separators + lines, header)
    memory.require(need, f"reading {str(path)!r}, {size} bytes of text or more,", "Use a smaller file.")


def _read_delimited(path: Path, separator: str) -> pd.DataFrame:
    try:
        with _opened(path) as file:
            if b"\0" in file.read(4096):
                raise InputError(f"{str(path)!r} is no table of text: it holds binary data. Save it as csv.")
        _require_memory_for_text(path, separator)
        frame = pd.read_csv(path, sep=separator, skipinitialspace=True, low_memory=False)
    except pd.errors.EmptyDataError as error:
        raise InputError(f"{str(path)!r} is empty: a table needs a line of column names, and rows.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is no table of text in UTF-8 ({error}). Save it as csv in UTF-8.") from error
    except (pd.errors.ParserError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{str(path)!r} cannot be read as a table: {str(error).strip()}.") from error
    frame.columns = frame.columns.astype(str).str.strip()
    if frame.shape[1] == 1:
        other = next((mark for mark in (";", "\t", ",", "|") if mark in frame.columns[0]), None)
        if other is not None:
            raise InputError(
                f"{str(path)!r} has one column only, {frame.columns[0]!r}: it seems to be separated by {other!r} "
                f"and not by {separator!r}. Save it separated by commas (.csv) or tabs (.tsv)."
            )
    return frame


def _read_svmlight(
    path: Path, columns: dict[str, str | None], drop: Iterable[str], n_features: int | None, budget: Budget
) -> Table:
    for name, value in {**columns, "drop": next(iter(drop), None)}.items():
        if value is not None:
            raise InputError(
                f"a svmlight file has its target in the first field and no named columns; got {name} = {value!r}. "
                f"Leave {name} out, or save the data as csv."
            )
    try:
        _require_memory_for_text(path, ":")
        X, y = datasets.load_svmlight_file(str(path), n_features=n_features, dtype=np.float64)
    except InputError:
        raise
    except (ValueError, OverflowError, OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{str(path)!r} cannot be read as a svmlight file, lines such as '1 3:0.5 7:1' ({str(error).strip()}). "
            "A table with columns needs the ending .csv or .tsv."
        ) from error
    if X.shape[0] and X.nnz == 0:
        raise InputError(f"{str(path)!r} has targets and no features. Check the file.")
    budget.require(repr(str(path)), *X.shape)
    names = tuple(f"x{index + 1}" for index in range(X.shape[1]))
    table = Table(X.toarray(), y, names, "target")
    _refuse_unusable({**dict(zip(names, table.X.T, strict=True)), "target": y}, None)
    return table


def _npz_arrays(path: Path, wanted: Iterable[str], optional: str, budget: Budget) -> dict[str, Array]:
    """The arrays with these names, of which headers are read first: a few bytes may unpack to any number."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            taken = [name for name in dict.fromkeys([*wanted, optional]) if name in names]
            headers = {name: _npy_header(archive, name) for name in taken}
        missing = next((name for name in wanted if name not in names), None)
        if missing is None:
            _require_memory_for_arrays(path, headers, budget)
            with np.load(path, allow_pickle=False) as stored:
                return {name: stored[name] for name in taken}
    except InputError:
        raise
    except Exception as error:  # of a broken archive zipfile, zlib, numpy and the parser of headers raise anything
        raise InputError(
            f"{str(path)!r} cannot be read as an npz archive of numbers ({str(error) or type(error).__name__}). "
            "Write it by numpy.savez(path, X=X, y=y) with numeric arrays."
        ) from error
    raise InputError(
        f"{str(path)!r} has no array {missing!r}, it has {', '.join(sorted(names)) or 'none'}."
        f"{hint(missing, names)} Write it by numpy.savez(path, X=X, y=y)."
    )


def _npy_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array in an archive."""
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    return shape, dtype


def _require_memory_for_arrays(
    path: Path, headers: dict[str, tuple[tuple[int, ...], np.dtype[Any]]], budget: Budget
) -> None:
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in headers.values())
    memory.require(size, f"reading the arrays of {str(path)!r}", "Use a smaller file.")
    if len(shape := headers["X"][0]) == 2:
        budget.require(repr(str(path)), *shape)


def _read_npz(path: Path, columns: dict[str, str | None], drop: Iterable[str], budget: Budget) -> Table:
    keys = {"X": "X", "y": columns["target"] or "y"} | {k: v for k, v in columns.items() if v and k != "target"}
    arrays = _npz_arrays(path, keys.values(), "feature_names", budget)
    for name in (k for role, k in keys.items() if role != "y"):
        if arrays[name].dtype.kind not in "buif":
            raise InputError(f"array {name!r} of {str(path)!r} must hold numbers; got dtype {arrays[name].dtype}.")
    X, y = arrays["X"].astype(np.float64), arrays[keys["y"]]
    if X.ndim != 2 or X.shape[1] == 0:
        raise InputError(f"array 'X' of {str(path)!r} must be a matrix, one row an observation; got shape {X.shape}.")
    if y.dtype.kind not in "buifU":
        raise InputError(f"array {keys['y']!r} of {str(path)!r} must hold numbers or texts; got dtype {y.dtype}.")
    for name in list(keys.values())[1:]:
        if arrays[name].shape != (len(X),):
            raise InputError(
                f"array {name!r} of {str(path)!r} must have one entry for each of the {len(X)} rows of X; "
                f"got shape {arrays[name].shape}."
            )
    names = _npz_names(arrays.get("feature_names"), X.shape[1])
    extra: dict[str, Array] = {
        role: arrays[keys[role]].astype(np.float64) for role in ("weights", "offset") if role in keys
    }
    kept = _kept(names, drop)
    table = Table(X[:, kept], y, tuple(names[k] for k in kept), keys["y"], (), **extra)
    named = {"target": keys["y"], **{role: keys[role] for role in extra}}
    used = {**dict(zip(table.names, table.X.T, strict=True)), keys["y"]: y}
    _refuse_unusable({**used, **{keys[role]: column for role, column in extra.items()}}, named)
    return table


def _npz_names(given: Array | None, count: int) -> tuple[str, ...]:
    if given is not None and given.shape == (count,):
        return tuple(str(name) for name in given)
    return tuple(f"x{index + 1}" for index in range(count))


def _kept(names: tuple[str, ...], drop: Iterable[str]) -> list[int]:
    drop = set(drop)
    for name in drop:
        _require(name, "drop", names)
    return [index for index, name in enumerate(names) if name not in drop]


def _require(column: str, role: str, columns: Iterable[str]) -> None:
    columns = list(columns)
    if column not in columns:
        shown = ", ".join(columns[:30]) + (f", .. ({len(columns)} in all)" if len(columns) > 30 else "")
        raise InputError(
            f"{role} column {column!r} is not in the data.{hint(column, columns)} The columns are: {shown}."
        )


def _from_frame(frame: pd.DataFrame, columns: dict[str, str | None], drop: Iterable[str], budget: Budget) -> Table:
    """The columns of a frame: target, weights and offset apart, texts as indicators."""
    if columns["target"] is None:
        raise InputError(
            f"target is missing: name the column to predict (--target). "
            f"The columns are: {', '.join(frame.columns[:30])}."
        )
    named = {role: name for role, name in columns.items() if name is not None}
    for role, name in [*named.items(), *(("drop", name) for name in drop)]:
        _require(name, role, frame.columns)
    if len(frame) == 0:
        raise InputError("the table has column names and no rows: a data set needs at least two. Check the file.")
    features = frame.drop(columns=[*set(named.values()), *drop], errors="ignore")
    if features.shape[1] == 0:
        raise InputError(f"no column is left to predict {columns['target']!r} from. Check target and drop.")
    features = features.assign(**{name: _beyond_64_bits(features[name]) for name in _texts(features)})
    given = {role: _beyond_64_bits(frame[name]) for role, name in named.items()}
    used = {name: features[name] for name in features.columns} | {named[role]: given[role] for role in given}
    _refuse_unusable({name: column.to_numpy() for name, column in used.items()}, named)
    extra = {role: _numbers(column, role) for role, column in given.items() if role != "target"}
    design = _with_indicators(features, budget)
    return Table(
        design.to_numpy(dtype=np.float64),
        _plain(given["target"]),
        tuple(str(name) for name in design.columns),
        named["target"],
        (),
        **extra,
    )


def _beyond_64_bits(column: pd.Series) -> pd.Series:
    """Integers that need more than 64 bits come as objects or texts: as float64 where that tells all of them apart."""
    if _is_number(column):
        return column
    numbers = pd.to_numeric(column.astype(str), errors="coerce").astype(np.float64)
    exact = numbers.notna().all() and numbers.nunique() == column.nunique()
    return numbers if exact else column


def _is_number(column: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column))


def _texts(features: pd.DataFrame) -> list[str]:
    """The columns that are no numbers."""
    return [name for name in features.columns if not _is_number(features[name])]


def _plain(column: pd.Series) -> Array:
    """Numbers as they are, everything else as texts."""
    return column.to_numpy() if _is_number(column) else column.astype(str).to_numpy(dtype=str)


def _numbers(column: pd.Series, role: str) -> Array:
    if not _is_number(column):
        raise InputError(f"{role} column {column.name!r} must hold numbers; got texts such as {column.iloc[0]!r}.")
    return column.to_numpy(dtype=np.float64)


def _with_indicators(features: pd.DataFrame, budget: Budget) -> pd.DataFrame:
    """Texts as indicator columns name=level, without the first level."""
    texts = _texts(features)
    width = features.shape[1] - len(texts)
    for name in texts:
        column = features[name].astype(str)
        numeric = pd.to_numeric(column, errors="coerce").notna()
        if 0.5 < numeric.mean() < 1:
            bad = column[~numeric]
            raise InputError(
                f"column {name!r} is numbers except for {len(bad)} of {len(column)} rows, the first {bad.iloc[0]!r}. "
                f"Mend them, or leave the column out (--drop {name})."
            )
        if (levels := column.nunique()) > _MOST_LEVELS:
            raise InputError(
                f"text column {name!r} has {levels} different values, more than {_MOST_LEVELS}: it looks like names or "
                f"dates, not categories. Leave it out (--drop {name})."
            )
        width += levels - 1
    budget.require("the table", len(features), width)
    return pd.get_dummies(features, columns=texts, drop_first=True, prefix_sep="=", dtype=float)


def _instead(name: str, named: dict[str, str] | None) -> str:
    """What to do without a column; nothing where columns cannot be named."""
    if named is None:
        return ""
    role = next((role for role, column in named.items() if column == name), None)
    return f", or leave the column out (--drop {name})" if role is None else f", or name another column (--{role})"


def _refuse_unusable(
    columns: dict[str, Array],
    named: dict[str, str] | None,  # the columns that have a role; None where columns have no names
) -> None:
    """Raise if any column has missing or infinite entries, or one whose square overflows."""
    bad = {}
    for name, column in columns.items():
        missing = ~np.isfinite(column) if column.dtype.kind == "f" else pd.isna(column)
        if missing.any():
            bad[name] = int(missing.sum())
        elif column.dtype.kind == "f" and len(column) and (size := float(np.abs(column).max())) > _LARGEST:
            raise InputError(
                f"column {name!r} has entries of size {size:.3g}; sums of squares overflow from {_LARGEST:g} on. "
                f"Divide it by a constant{_instead(name, named)}."
            )
    if not bad:
        return
    first = max(bad, key=lambda name: bad[name])
    others = f" (and {len(bad) - 1} more columns have some)" if len(bad) > 1 else ""
    rows = len(next(iter(columns.values())))
    raise InputError(
        f"column {first!r} has missing or infinite entries in {bad[first]} of {rows} rows{others}. "
        f"Drop or impute those rows{_instead(first, named)}."
    )


# ------------------------------------------------------------------------------------ preparing


def coded_target(table: Table, *, classes: bool, success: str | None = None) -> tuple[Array, tuple[str, str] | None]:
    """Targets as numbers: for classes 0 and 1 with the names of both, else as they are.

    Of two classes the larger number, or the later in the alphabet, is the success; ``success`` names
    one class against all others.

    Raises:
        InputError: one class, more than two without ``success``, texts where numbers are needed.
    """
    if not classes:
        if table.y.dtype.kind == "U" or (table.labels and len(table.labels) == len(np.unique(table.y))):
            shown = table.labels[0] if table.labels else table.y[0]
            raise InputError(
                f"this family needs a target of numbers; {table.target!r} holds classes such as {str(shown)!r}. "
                "Use family bernoulli_logit."
            )
        return table.y.astype(np.float64), None
    values = np.unique(table.y)
    names = table.labels if len(table.labels) == len(values) else tuple(_name(value) for value in values)
    if len(values) == 1:
        raise InputError(
            f"target {table.target!r} has one class, {names[0]!r} in all {len(table.y)} rows; a Bernoulli family needs "
            "two. Check the column, or that the file has all rows."
        )
    if success is not None:
        if success not in names:
            raise InputError(
                f"success {success!r} is no class of {table.target!r}.{hint(success, names)} "
                f"The classes are: {', '.join(names[:20])}."
            )
        rest = [name for name in names if name != success]
        coded = (table.y == values[names.index(success)]).astype(np.float64)
        return coded, (rest[0] if len(rest) == 1 else f"not {success}", success)
    if len(values) > 2:
        some = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
        remedy = f"Name the one to predict against the others (--success {names[-1]!r})."
        if table.y.dtype.kind != "U" and not table.labels and len(values) > _MOST_CLASSES:
            remedy = "They look like numbers, not classes: use family gaussian, or poisson_log for counts."
        raise InputError(
            f"target {table.target!r} has {len(values)} classes ({some}); a Bernoulli family needs two. {remedy}"
        )
    return (table.y == values[1]).astype(np.float64), (names[0], names[1])


def _name(value: Any) -> str:
    return f"{value:g}" if isinstance(value, np.floating) else str(value)


def prepare(
    table: Table,
    y: Array,  # (N,), coded
    classes: tuple[str, str] | None,
    *,
    standardize: bool = True,
    intercept: bool = True,
    test_fraction: float = 0.2,
    seed: int = 42,
) -> Prepared:
    """Split with scikit-learn's train_test_split, standardise by the training rows, add the intercept first.

    Raises:
        InputError: too few rows for the split, training rows of one class, a column that cannot be standardised.
    """
    train, test = _split(len(y), test_fraction, seed)
    if classes is not None and len(np.unique(y[train])) < 2:
        raise InputError(
            f"the {len(train)} training rows are all {classes[int(y[train][0])]!r}, and a Bernoulli family needs both "
            "classes. Choose another seed or a smaller test_fraction."
        )
    center, scale = np.zeros(table.X.shape[1]), np.ones(table.X.shape[1])
    if standardize:
        fitted = table.X[train]
        constant = fitted.max(0) == fitted.min(0)
        center = np.where(constant, fitted[0], fitted.mean(0))
        scale = np.where(constant, 1.0, fitted.std(0))
        if not scale.all():
            name = table.names[int(np.argmin(scale))]
            raise InputError(
                f"column {name!r} differs by so little that its standard deviation rounds to 0. "
                f"Multiply it by a constant, or leave it out (--drop {name})."
            )
    X, names = (table.X - center) / scale, table.names
    if intercept:
        X, names = np.column_stack([np.ones(len(X)), X]), ("intercept", *names)
        center, scale = np.r_[0.0, center], np.r_[1.0, scale]

    def take(rows: Array) -> Rows:
        extras = (None if column is None else column[rows] for column in (table.weights, table.offset))
        return Rows(X[rows], y[rows], *extras)

    return Prepared(take(train), take(test), names, center, scale, classes)


def _split(count: int, test_fraction: float, seed: int) -> tuple[Array, Array]:
    rows = np.arange(count)
    if test_fraction == 0:
        return rows, rows[:0]
    try:
        train, test = train_test_split(rows, test_size=test_fraction, random_state=seed)
    except ValueError as error:
        raise InputError(
            f"{count} rows cannot be split with test_fraction {test_fraction:g}: both parts need at least one. "
            "Set test_fraction to 0."
        ) from error
    return train, test
