"""Files of data, one reader a format: csv and tsv, svmlight, and npz archives, each also with .gz.

A file that would take more memory than there is is refused before it is unpacked.
"""

import gzip
import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets

from torchngvi.app import memory
from torchngvi.app.columns import Array, Table, kept, refuse_unusable
from torchngvi.app.config import hint
from torchngvi.app.memory import Budget
from torchngvi.errors import InputError

_CHUNK = 1 << 20  # bytes


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


def read_delimited(path: Path, separator: str) -> pd.DataFrame:
    """A table of text, its names stripped.

    Raises:
        InputError: no table, another separator, too little memory.
    """
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


def read_svmlight(
    path: Path, columns: dict[str, str | None], drop: Iterable[str], n_features: int | None, budget: Budget
) -> Table:
    """Lines such as '1 3:0.5 7:1': the target, then features by number.

    Raises:
        InputError: no such file, named columns, too little memory, entries missing.
    """
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
    refuse_unusable({**dict(zip(names, table.X.T, strict=True)), "target": y}, None)
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


def read_npz(path: Path, columns: dict[str, str | None], drop: Iterable[str], budget: Budget) -> Table:
    """An archive with arrays X and y, and others that columns name.

    Raises:
        InputError: no such archive, arrays that do not fit, too little memory, entries missing.
    """
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
    places = kept(names, drop)
    table = Table(X[:, places], y, tuple(names[k] for k in places), keys["y"], (), **extra)
    named = {"target": keys["y"], **{role: keys[role] for role in extra}}
    used = {**dict(zip(table.names, table.X.T, strict=True)), keys["y"]: y}
    refuse_unusable({**used, **{keys[role]: column for role, column in extra.items()}}, named)
    return table


def _npz_names(given: Array | None, count: int) -> tuple[str, ...]:
    if given is not None and given.shape == (count,):
        return tuple(str(name) for name in given)
    return tuple(f"x{index + 1}" for index in range(count))
