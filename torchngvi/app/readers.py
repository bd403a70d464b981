"""Tables as pandas reads them, with notes of what is unusual: text, Excel, Parquet, svmlight, bundled sets."""

import bz2
import csv
import gzip
import io
import itertools
import lzma
import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn import datasets

from torchngvi.app.settings import file_name
from torchngvi.errors import InputError
from torchngvi.messages import hint
from torchngvi.tables.cells import check_names, is_number, without_unnamed

BUNDLED = ("breast_cancer", "diabetes", "digits", "iris", "wine")  # with scikit-learn
_SVMLIGHT = (".svm", ".libsvm", ".txt")
_KNOWN = ".csv, .tsv, .xlsx, .parquet, .svm, .libsvm, .txt (svmlight), each also with .gz, .bz2, .xz, .zip or .zst"
_GONE = "numpy.savez files are read in Python: torchngvi.regression takes a pandas DataFrame of the arrays"
_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}([.,]\d{3})+")
_ZERO = re.compile(r'(?:^|[,;\t|\n"])\s*0\d+\s*[,;\t|\r\n"]')  # a cell that a zero leads
_MAC_WORD = re.compile(r"[A-Za-z]+[€\x81‚ƒ†‡ˆ‰Š‹Œ\x8dŽ\x8f\x90˜™š›œ\x9džŸ][A-Za-z]+")


class Read(NamedTuple):
    """A table as it was read."""

    frame: pd.DataFrame
    notes: tuple[str, ...] = ()  # what is unusual about it
    zeros: tuple[str, ...] = ()  # columns of whole numbers some of whose entries a zero leads
    comma: bool = False  # whether decimals are behind commas


def read_table(data: str) -> Read:
    """Read a bundled set by its name, or a file by its ending."""
    path = Path(file_name("data", data))
    end = Path(re.sub(r"\.(gz|bz2|xz|zip|zst)$", "", path.name.lower())).suffix
    if data in BUNDLED and not path.is_file():
        bunch = getattr(datasets, f"load_{data}")(as_frame=True)
        labels = [str(label) for label in bunch.get("target_names", ())]
        codes = pd.Categorical.from_codes(bunch.target, labels, ordered=True) if labels else bunch.target
        return Read(bunch.frame.assign(target=codes))
    if not path.is_file():
        raise InputError(_no_such_data(data, path, end))
    if end in (".csv", ".tsv"):
        read = _of_text(path, "," if end == ".csv" else "\t")
    elif end in (".parquet", ".xlsx"):
        read = _of_columns(path, end)
    elif end in _SVMLIGHT:
        read = _of_svmlight(path)
    else:
        known = _GONE if end in (".npz", ".npy") else f"known are {_KNOWN}"
        raise InputError(f"cannot tell the format of {data!r} from its ending; {known}. Save it as csv.")
    if len(read.frame) == 0:
        raise InputError(f"{data!r} has column names and no rows: a data set needs at least two. Check the file.")
    return read


def _no_such_data(data: str, path: Path, end: str) -> str:
    if path.exists():
        return f"data must be a file; {data!r} is a folder. Name one file in it."
    if any(mark in data for mark in "*?["):
        return (
            f"there is no file {data!r}: rows of several files, or in batches, are fitted in Python: see "
            "torchngvi.models.Streamed and torchngvi.adapters.files."
        )
    bundled = f"The bundled sets are {', '.join(BUNDLED)}."
    if end or len(path.parts) > 1:
        return f"there is no data file {data!r} (looked for {path.absolute()}). Check the path. {bundled}"
    return f"{data!r} is neither a file nor a bundled set.{hint(data, BUNDLED)} {bundled}"


def _content(path: Path) -> bytes:
    """The bytes of a file, unpacked by its ending."""
    packed, kind = path.read_bytes(), path.suffix.lower()
    if kind == ".zip":
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX")]
            if len(names) != 1:
                raise InputError(f"{str(path)!r} holds {len(names)} files. Put the table alone into it.")
            return archive.read(names[0])
    if kind == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise InputError(f"{str(path)!r} needs zstandard: pip install zstandard. Or unpack it.") from error
        return bytes(zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True).read())
    unpack: dict[str, Any] = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}
    return bytes(unpack.get(kind, bytes)(packed))


def _readable(path: Path, what: str, read: Callable[[], Any]) -> Any:
    """What is read, or a sentence of what its reader says."""
    try:
        return read()
    except (InputError, ImportError, MemoryError):
        raise
    except pd.errors.EmptyDataError as error:
        raise InputError(f"{str(path)!r} is empty: a table needs a line of column names, and rows.") from error
    except Exception as error:  # at a broken file a reader raises anything
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{str(path)!r} cannot be read as {what}: {said.rstrip('.')}.") from error


# ------------------------------------------------------------------------------------ text


class Dialect(NamedTuple):
    """How the cells of a table of text are distinguished and read."""

    separator: str
    decimal: str
    skip: int = 0  # lines before that of the names
    shifted: bool = False  # all rows have more fields than there are names


def _of_text(path: Path, usual: str) -> Read:
    """Read a table of text; spaces around the names of its columns are dropped."""
    text, written, notes = _decoded(path, _readable(path, "a table", partial(_content, path)))
    found = dialect(text, usual, str(path))
    read = partial(_parsed, path, text, found)
    frame = read()
    if found.shifted or not isinstance(frame.index, pd.RangeIndex):
        if not frame.iloc[:, -1].isna().all():
            raise InputError(
                f"the first line of {str(path)!r} has {frame.shape[1]} names, and its rows have "
                f"{frame.shape[1] + frame.index.nlevels} fields. Give every field a name: of names of rows, put a name "
                "and a separator in front of the first line; of decimal commas, separate fields by semicolons."
            )
        frame = read(index_col=False)
    frame, zeros = _reread(frame, read), list[str]()
    if _ZERO.search(text):
        whole = [name for name in frame.columns if getattr(frame[name].dtype, "kind", "O") in "iu"]
        again = read(usecols=whole, dtype=str) if whole else frame
        zeros = [name.strip() for name in whole if again[name].str.strip().str.fullmatch(r"0\d+").any()]
    frame, more = without_unnamed(frame)
    frame.columns = check_names(frame.columns)
    kinds = [] if found.separator == usual else [f"separated by {_NAMES.get(found.separator, repr(found.separator))}"]
    kinds += [*(["with decimal commas"] if found.decimal == "," else []), *written]
    said = [f"the table was read as {', '.join(kinds)}"] if kinds else []
    return Read(frame, (*said, *notes, *more), tuple(zeros), found.separator == ";" or found.decimal == ",")


def _decoded(path: Path, content: bytes) -> tuple[str, list[str], list[str]]:
    """The text, in what it was written where that is not UTF-8, and notes."""
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    if b"\0" in content[:4096] and not wide:
        raise InputError(f"{str(path)!r} is no table of text: it holds binary data. Save it as csv.")
    try:
        return content.decode("utf-16" if wide else "utf-8-sig"), ["in UTF-16"] if wide else [], []
    except UnicodeDecodeError:
        pass
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(path)!r} is no table of text in UTF-8 or Latin-1 ({error}), perhaps in Mac Roman. Save it as "
            "csv in UTF-8."
        ) from error
    notes, word = list[str](), _MAC_WORD.search(text)
    if word:
        other = word[0].encode("cp1252").decode("mac_roman", errors="replace")
        notes = [f"{word[0]!r} would be {other!r} in Mac Roman: if it is that, save the table in UTF-8"]
    return text, ["in Latin-1 (Windows-1252)"], notes


def dialect(text: str, usual: str, name: str, most_lines: int = 50) -> Dialect:
    """Find how a table of text is written; `usual` is the separator that the ending of its name stands for."""
    start = itertools.islice(io.StringIO(text, newline=None), most_lines + 1)
    lines = [line.rstrip("\n") for line in start if line.strip()]
    said = re.fullmatch(r'"?sep=(.)"?[,;]*', lines[0].strip()) if lines else None
    lines = lines[1:] if said else lines
    separator = said[1] if said else _separator(lines, usual)
    rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True))
    if len(rows) > 1 and all(_NUMBER.fullmatch(cell.strip()) for cell in rows[0]):
        names = separator.join(f"x{k + 1}" for k in range(min(3, len(rows[0]))))
        raise InputError(
            f"{name!r} has no line of column names: its first line is {lines[0][:60]!r}. Put a line in front with one "
            f"name for each of the {len(rows[0])} columns, such as {names}."
        )
    if rows:
        check_names(rows[0])
    numbers = [cell.strip() for row in rows[1:] for cell in row if not _THOUSANDS.fullmatch(cell.strip())]
    commas = separator != "," and any(_COMMA.fullmatch(cell) for cell in numbers)
    points = any(_NUMBER.fullmatch(cell) and "." in cell for cell in numbers)
    shifted = len(rows) > 1 and all(len(row) > len(rows[0]) for row in rows[1:])
    return Dialect(separator, "," if commas and not points else ".", int(bool(said)), shifted)


def _separator(lines: Sequence[str], usual: str) -> str:
    """The separator that gives a constant number of columns and the most cells that are numbers."""
    shares = {}
    for mark in _NAMES:
        rows = list(csv.reader(lines, delimiter=mark, skipinitialspace=True))
        if rows and len(rows[0]) > 1 and all(len(row) == len(rows[0]) for row in rows):
            cells = [cell.strip() for row in rows for cell in row]
            shares[mark] = sum(bool(_NUMBER.fullmatch(cell)) for cell in cells) / len(cells)
    return max(shares, key=lambda mark: (shares[mark], mark == usual), default=usual)


def _parsed(path: Path, text: str, found: Dialect, **options: Any) -> Any:
    """The table as pandas parses it."""
    options |= {"sep": found.separator, "decimal": found.decimal, "skiprows": found.skip}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.ParserWarning)  # of the empty field behind a last separator
        read = partial(pd.read_csv, io.StringIO(text), skipinitialspace=True, low_memory=False, **options)
        return _readable(path, "a table", read)


def _reread(frame: pd.DataFrame, read: Callable[..., Any]) -> pd.DataFrame:
    """The table with the texts of columns that pandas reads as something else without a word."""
    for name in [name for name in frame.columns if frame[name].isna().any()]:
        column = frame[name]
        if is_number(column) and (column.abs() >= 2**53).any():  # integers with gaps
            again, pattern = read(usecols=[name], dtype=str)[name], r"\s*[-+]?\d+\s*"
        elif (words := column.dropna().astype(str)).nunique() > 1 and words.str.fullmatch("[A-Z]{2}").all():
            again = read(usecols=[name], dtype=str, keep_default_na=False, na_values=[""])[name]  # the country NA
            pattern = r"\s*[A-Z]{2}\s*"
        else:
            continue
        if again.dropna().str.fullmatch(pattern).all():
            frame = frame.assign(**{name: again})
    return frame


# ------------------------------------------------------------------------------------ other files


def _of_columns(path: Path, end: str) -> Read:
    """Read an Excel or a Parquet file; numbers that may be missing, and decimal ones, become float64."""
    notes: tuple[str, ...] = ()
    if end == ".xlsx":
        try:
            import openpyxl  # noqa: F401
        except ImportError as error:
            raise InputError(f"{str(path)!r} needs openpyxl: pip install openpyxl. Or save it as csv.") from error
        book = _readable(path, "an Excel file", lambda: pd.ExcelFile(io.BytesIO(_content(path)), engine="openpyxl"))
        names = _readable(path, "an Excel file", lambda: pd.read_excel(book, header=None, nrows=1))
        if not len(names):
            raise InputError(f"{str(path)!r} is empty: a table needs a line of column names, and rows.")
        check_names(names.iloc[0].dropna())
        frame = _readable(path, "an Excel file", lambda: pd.read_excel(book))
        sheets = book.sheet_names
        notes = (f"the first of {len(sheets)} sheets was read, {sheets[0]!r}",) if len(sheets) > 1 else ()
    else:
        import pyarrow  # noqa: F401

        frame = _readable(path, "a parquet file", lambda: pd.read_parquet(io.BytesIO(_content(path))))
    frame.columns = check_names(frame.columns)
    numbers = [name for name in frame if pd.api.types.is_extension_array_dtype(frame[name]) and is_number(frame[name])]
    objects = [name for name in frame if frame[name].dtype.kind == "O"]
    numbers += [name for name in objects if isinstance(next(iter(frame[name].dropna()), None), Decimal)]
    frame, more = without_unnamed(frame.astype(dict.fromkeys(numbers, np.float64)))
    return Read(frame, (*notes, *more))


def _of_svmlight(path: Path) -> Read:
    """Read a svmlight file, with lines such as '1 3:0.5 7:1': the target, then features by number."""
    what = "a svmlight file, lines such as '1 3:0.5 7:1'"
    X, y = _readable(path, what, lambda: datasets.load_svmlight_file(io.BytesIO(_content(path)), dtype=np.float64))
    if X.shape[0] and X.nnz == 0:
        raise InputError(f"{str(path)!r} has targets and no features. Check the file.")
    names = [f"x{index + 1}" for index in range(X.shape[1])]
    return Read(pd.DataFrame(X.toarray(), columns=names).assign(target=y))
