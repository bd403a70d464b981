"""Files of data, one reader a format: tables of text, parquet, svmlight, and npz archives.

A file that would take more memory than there is is refused before it is unpacked.
"""

import gzip
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets

from torchngvi.adapters.table_checks import (
    ZERO,
    Dialect,
    check_names,
    dialect,
    led_by_zeros,
    of_unusable,
    refuse,
    settled,
    without_unnamed,
)
from torchngvi.app import memory
from torchngvi.app.columns import Array, Read, Table, kept
from torchngvi.app.memory import Budget
from torchngvi.errors import InputError
from torchngvi.messages import hint

_CHUNK = 1 << 20  # bytes
_START = 1 << 16  # bytes from which the dialect is found
DELIMITED = {".csv": ",", ".tsv": "\t"}  # and the separators that these endings stand for


def _opened(path: Path) -> Any:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _require_memory_for_text(path: Path, separator: str) -> bool:
    """Go through a file piece by piece, as far as memory would suffice to read it whole; a few bytes may unpack to any
    number. Say whether a zero leads some cell.
    """
    need, size, separators, lines, header, free = 0, 0, 0, 0, 0, memory.available()
    zero = False
    mark = separator.encode()
    with _opened(path) as file:
        while need <= free and (chunk := file.read(_CHUNK)):
            size += len(chunk)
            header += 0 if lines else chunk.split(b"\n", 1)[0].count(mark)
            separators += chunk.count(mark)
            lines += chunk.count(b"\n")
            zero = zero or ZERO.search(chunk) is not None
            need = memory.of_text(size, separators + lines, header)
    memory.require(need, f"reading {str(path)!r}, {size} bytes of text or more,", "Use a smaller file.")
    return zero


def ending(path: Path) -> str:
    """The ending of a file's name, without that of a compression.

    >>> ending(Path("visits.CSV.gz"))
    '.csv'
    """
    return Path(path.name.lower().removesuffix(".gz")).suffix


def read_delimited(path: Path) -> Read:
    """Read a table of text; spaces around the names of its columns are dropped."""
    with readable(path):
        found = text_dialect(path)
        zero = _require_memory_for_text(path, found.separator)
        try:
            frame = parsed(path, found)
        except UnicodeDecodeError:  # beyond what was looked at
            found = found._replace(encoding="cp1252")
            frame = parsed(path, found)
        frame = settled(frame, found, partial(parsed, path, found), repr(str(path)))
        zeros = led_by_zeros(frame, partial(parsed, path, found)) if zero else ()
    frame, notes = without_unnamed(frame)
    frame.columns = check_names(frame.columns)
    comma = found.separator == ";" or found.decimal == ","
    return Read(frame, (*text_notes(path, found), *notes), tuple(name.strip() for name in zeros), comma)


def text_dialect(path: Path) -> Dialect:
    """How a table of text is written, found from its first lines."""
    with readable(path), _opened(path) as file:
        start = file.read(_START) + file.readline() + file.readline()  # whole lines, of a wide table two
        start += b"\0" * (start[:2] == b"\xff\xfe" and len(start) % 2)  # the second byte of a line's end
    if b"\0" in start[:4096] and start[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{str(path)!r} is no table of text: it holds binary data. Save it as csv.")
    return dialect(start, DELIMITED.get(ending(path), ","), str(path))


def text_notes(path: Path, found: Dialect) -> tuple[str, ...]:
    """What is unlike a table of text with the ending of this file."""
    return found.notes(DELIMITED.get(ending(path), ","))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """A block that reads a table of text, whose errors become sentences."""
    try:
        yield
    except pd.errors.EmptyDataError as error:
        raise InputError(f"{str(path)!r} is empty: a table needs a line of column names, and rows.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(path)!r} is no table of text in UTF-8 or Latin-1 ({error}), perhaps in Mac Roman. Save it as "
            "csv in UTF-8."
        ) from error
    except (pd.errors.ParserError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{str(path)!r} cannot be read as a table: {str(error).strip()}.") from error


def parsed(path: Path, found: Dialect, **options: Any) -> Any:
    """A table of text that is written in this way, or with ``chunksize`` a reader of its batches."""
    return pd.read_csv(
        path,
        **options,
        sep=found.separator,
        decimal=found.decimal,
        encoding=found.encoding,
        skiprows=found.skip,
        skipinitialspace=True,
        low_memory=False,
    )


def read_parquet(path: Path) -> pd.DataFrame:
    """Read a parquet file; numbers that may be missing become float64."""
    from pyarrow import parquet

    with readable_parquet(path):
        shape = parquet.read_metadata(path)
        memory.require(8 * shape.num_rows * shape.num_columns, f"reading {str(path)!r}", "Use a smaller file.")
        frame = pd.read_parquet(path, engine="pyarrow")
    return without_nullable(frame)


@contextmanager
def readable_parquet(path: Path) -> Iterator[None]:
    """A block that reads a parquet file, whose errors become sentences."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read as a parquet file ({' '.join(str(error).split())}).") from error


def without_nullable(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with names that are texts, and with numbers that may be missing, and decimal ones, as float64."""
    frame.columns = check_names(frame.columns)
    nullable = [name for name in frame.columns if pd.api.types.is_extension_array_dtype(frame[name].dtype)]
    numbers = [name for name in nullable if pd.api.types.is_numeric_dtype(frame[name].dtype)]
    objects = [name for name in frame.columns if frame[name].dtype == object]
    numbers += [name for name in objects if isinstance(next(iter(frame[name].dropna()), None), Decimal)]
    return frame.astype(dict.fromkeys(numbers, np.float64))


def read_columns(path: Path) -> Read:
    """Read a table with named columns: csv, tsv or parquet."""
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}. Check the path.")
    if ending(path) == ".parquet":
        return Read(*without_unnamed(read_parquet(path)))
    if ending(path) not in DELIMITED:
        raise InputError(f"a table of named columns is a csv, tsv or parquet file; got {str(path)!r}. Save it as csv.")
    return read_delimited(path)


def read_svmlight(
    path: Path, columns: dict[str, str | None], drop: Iterable[str], n_features: int | None, budget: Budget
) -> Table:
    """Read a svmlight file, with lines such as '1 3:0.5 7:1': the target, then features by number."""
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
    refuse(of_unusable({**dict(zip(names, table.X.T, strict=True)), "target": y}, None))
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


def read_npz(
    path: Path, columns: dict[str, str | None], drop: Iterable[str], budget: Budget, *, impute: bool = False
) -> Table:
    """Read an npz archive with arrays X and y, and others that columns name."""
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
    table = Table(
        X[:, places], y, tuple(names[k] for k in places), keys["y"], (), extra.get("weights"), extra.get("offset")
    )
    named = {"target": keys["y"], **{role: keys[role] for role in extra}}
    used = {**dict(zip(table.names, table.X.T, strict=True)), keys["y"]: y}
    refuse(of_unusable({**used, **{keys[role]: column for role, column in extra.items()}}, named, impute=impute))
    return table


def _npz_names(given: Array | None, count: int) -> tuple[str, ...]:
    if given is not None and given.shape == (count,):
        return tuple(str(name) for name in given)
    return tuple(f"x{index + 1}" for index in range(count))
