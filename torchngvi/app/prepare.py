"""Tables as pandas reads them, and what becomes of one: the formula and the rows of a fit, and the same of new rows."""

import bz2
import csv
import gzip
import io
import itertools
import lzma
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from shlex import join, quote
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.model_selection import train_test_split

from torchngvi.app.settings import Settings, file_name
from torchngvi.errors import InputError
from torchngvi.messages import SHOWN, hint, listed
from torchngvi.tables import cells as checks
from torchngvi.tables.cells import COMMAND, Door, as_levels, check_names, cleaned, is_number, refuse, without_unnamed
from torchngvi.tables.design import FormulaColumns, Sides, variables

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
        read = _of_typed(path, end)
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
        raise InputError(f"{str(path)!r} cannot be read as {what}: {said.rstrip('.')}. Correct the file.") from error


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
    first, second = (any(map(_NUMBER.fullmatch, row)) for row in rows[1:3]) if len(rows) > 2 else (False, False)
    if second and not first and len(rows[0]) < len(rows[1]) == len(rows[2]):
        raise InputError(
            f"the first line of {name!r} is {lines[0][:60]!r}, and not the names of the columns, which seem to be in "
            "the second. Delete it."
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


def _of_typed(path: Path, end: str) -> Read:
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


# ------------------------------------------------------------------------------------ the rows of a fit


CLASSES = ("bernoulli", "probit")  # families of two classes


@dataclass(frozen=True)
class Columns:
    """What a run keeps of its table, so that new rows are prepared alike; it is in posterior.pt."""

    formula: str
    needed: list[str]  # columns that new rows must have
    groups: list[str] = field(default_factory=list)  # columns of groups, which they may have
    levels: dict[str, list[str]] = field(default_factory=dict)  # of columns of categories, the baseline first
    fill: dict[str, Any] = field(default_factory=dict)  # what stands for a missing entry
    known: list[str] = field(default_factory=list)  # other columns of the table, which new rows may have
    plain: bool = True  # whether the formula was made of all columns

    @classmethod
    def read(cls, found: Any) -> "Columns":
        """The columns from a dict of a file, after a check that each has its type."""
        usual = asdict(cls("", []))
        try:
            right = all(type(found[key]) is type(value) for key, value in usual.items()) and len(found) == len(usual)
            lists = [found["needed"], found["groups"], found["known"], found["levels"], found["fill"]]
            right &= all(type(text) is str for texts in (*lists, *found["levels"].values()) for text in texts)
            right &= all(type(value) in (str, int, float, bool) for value in found["fill"].values())
            right &= all(type(levels) is list for levels in found["levels"].values())
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError):
            right = False
        if not right:
            raise InputError("its columns are not as a run writes them.")
        return cls(**found)

    def of(self, frame: Any, name: str, drop: Iterable[str] | None = None) -> pd.DataFrame:
        """New rows as the fit has them; a table from a file has a name, from which columns are left out by flags."""
        if not isinstance(frame, pd.DataFrame):
            got = type(frame).__name__
            raise InputError(f"predict takes a pandas DataFrame with the columns of the fit; got {got}.")
        there = [str(column) for column in frame.columns]
        lacking = [column for column in self.needed if column not in there]
        if lacking:
            raise InputError(
                f"{name} lacks {listed(lacking)}, which the model predicts from.{hint(lacking[0], there)} "
                f"It has {listed(there) or 'no columns'}. Add the column, or correct its name."
            )
        trials = FormulaColumns.of(self.formula).response if self.formula.startswith("prop(") else ()
        used = list(dict.fromkeys([*self.needed, *(column for column in (*self.groups, *trials) if column in there)]))
        others = sorted(set(there) - {*used, *self.known})
        if others:
            some = others[:SHOWN]
            how = f"frame.drop(columns={some!r})" if drop is None else " ".join(f"--drop {quote(one)}" for one in some)
            raise InputError(
                f"{name} has {listed(others)}, which the fit has not seen. Leave it out ({how}), or "
                "check that this is the right table."
            )
        frame = frame.set_axis(there, axis=1)[used]
        for column, levels in self.levels.items():
            entries = as_levels(frame[column]).fillna(self.fill.get(column))
            unseen = entries[~entries.isin(levels) & entries.notna()]
            if len(unseen):
                raise InputError(
                    f"column {column!r} has the level {unseen.iloc[0]!r} in {len(unseen)} of {len(entries)} rows, "
                    f"which the fit has not seen; its levels are {listed(levels)}. "
                    "Correct those rows, leave them out, or fit again with rows of that level."
                )
            frame = frame.assign(**{column: pd.Categorical(entries, levels)})
        return _filled(frame, self.fill)[0]

    def shown(self, name: str) -> str:
        """The name of a coefficient in a report: ``sex=male`` where the formula was made of all columns."""
        column, _, level = name.partition("[")
        return f"{column}={level.removesuffix(']')}" if self.plain and column in self.levels else name


class Prepared(NamedTuple):
    """The rows of a fit."""

    train: pd.DataFrame  # with the response
    test: pd.DataFrame  # rows held out
    columns: Columns
    notes: tuple[str, ...]  # what was done with the table
    positive: str | None = None  # the class that is predicted, where one was chosen


def _filled(frame: pd.DataFrame, fill: dict[str, Any]) -> tuple[pd.DataFrame, dict[str, int]]:
    """The table without missing entries in these columns, and how many there were."""
    gaps = {name: int(frame[name].isna().sum()) for name in fill if name in frame}
    return frame.assign(**{name: frame[name].fillna(fill[name]) for name, n in gaps.items() if n}), gaps


def _filling(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, Any]:
    """What stands for missing entries: medians of numbers, the commonest of all else."""
    found: dict[str, Any] = {}
    for name in names:
        there = frame[name].dropna()
        if not len(there):
            raise InputError(f"column {name!r} has no entry in the {len(frame)} training rows. Leave it out.")
        number = is_number(there) and not pd.api.types.is_bool_dtype(there)
        value = there.median() if number else there.mode().iloc[0]
        found[name] = value.item() if isinstance(value, np.generic) else value
    return found


def _split(frame: pd.DataFrame, s: Settings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the fit and those held out, by scikit-learn's train_test_split."""
    if not s.held_out:
        return frame, frame.iloc[:0]
    try:
        train, test = train_test_split(frame, test_size=s.held_out, random_state=s.seed)
    except ValueError as error:
        raise InputError(
            f"{len(frame)} rows cannot be split with test_fraction {s.held_out:g}: both parts need at least one. "
            "Set test_fraction to 0."
        ) from error
    return train, test


def of(read: Read, s: Settings, family: str) -> Prepared:
    """The rows of a fit, and its formula."""
    if s.formula is None:
        return _of_target(read, s, family)
    sides = Sides.of(s.formula)
    groups = sorted({key for block in sides.blocks for key in block.keys})
    there = variables([*sides.terms, *(term for block in sides.blocks for term in block.terms)])
    needed = sorted(name for name in there if name in read.frame and name not in groups)
    dates = [n for n in groups if n in read.frame and getattr(read.frame[n].dtype, "kind", "O") in "mM"]
    train, test = _split(read.frame.assign(**{name: read.frame[name].astype(str) for name in dates}), s)
    fill = _filling(train, needed) if s.impute else {}
    (train, gaps), (test, _) = _filled(train.sort_index(), fill), _filled(test.sort_index(), fill)
    notes = [f"{n} missing entries of {name} became {fill[name]!r} (--impute)" for name, n in gaps.items() if n]
    known = [str(name) for name in read.frame.columns if name not in (*needed, *groups)]
    kept = Columns(s.formula, needed, groups, {}, fill, known, False)
    return Prepared(train, test, kept, (*read.notes, *notes), s.success)


# ------------------------------------------------------------------------------------ a target and all other columns


def _of_target(read: Read, s: Settings, family: str, many: int = 10) -> Prepared:
    """The rows of the formula ``target ~ every other column``, with texts as categories, all faults in one error."""
    frame, target = read.frame, s.target or ("target" if "target" in read.frame else None)
    if target is None:
        there = ", ".join(frame.columns[:30])
        raise InputError(f"target is missing: name the column to predict (--target). The columns are: {there}.")
    named = {"target": target, "weights": s.weights, "offset": s.offset}
    roles = {role: name for role, name in named.items() if name is not None}
    asked = [*roles.items(), *(("drop", name) for name in s.drop), *(("categorical", name) for name in s.categorical)]
    refuse([fault for role, name in asked if (fault := _of_lacking(name, role, list(frame.columns)))])
    names, chosen = [name for name in frame.columns if name not in {*roles.values(), *s.drop}], set(s.categorical)
    if not names:
        raise InputError(f"no column is left to predict {target!r} from. Check target and drop.")
    found = cleaned(frame, names, COMMAND, chosen=chosen, comma=read.comma)
    frame, notes, faults = found.frame, [*read.notes, *found.notes], [*found.faults]
    for role, name in roles.items():
        of_role = cleaned(frame, [name], _of_role(role), comma=read.comma)
        frame, notes, faults = of_role.frame, [*notes, *of_role.notes], [*faults, *of_role.faults]
        if role != "target" and not of_role.faults and not is_number(frame[name]):
            faults.append(f"{role} column {name!r} must hold numbers; got texts such as {str(frame[name].iloc[0])!r}.")
    used = {name: frame[name].to_numpy() for name in (*names, *roles.values())}
    faults += checks.of_unusable(used, roles, impute=s.impute is not None)
    texts = {name: as_levels(frame[name]) for name in names if not is_number(frame[name]) or name in chosen}
    for name, column in texts.items():
        if not any(repr(name) in fault for fault in faults):
            faults += checks.of_levels(name, column.nunique(), COMMAND, chosen=name in chosen)
    refuse(faults)
    measured = [name for name in names if name not in texts]
    notes += checks.of_identifiers(frame, measured, COMMAND, read.zeros)
    notes += [*checks.of_codes(frame, measured, COMMAND), *checks.of_codes(frame, [target], _of_role("target"))]
    notes += [*checks.of_copies(frame[[*names, target]]), *checks.of_totals(read.frame)]
    levels = {name: sorted(column.dropna().unique(), key=_in_order) for name, column in texts.items()}
    frame = frame.assign(
        **{name: pd.Categorical(column, levels[name]) for name, column in texts.items()},
        **{name: frame[name].astype(np.float64) for name in measured},
    )
    positive = None
    if family in CLASSES:
        frame, positive = _coded(frame, target, s.success)
    elif s.success is not None:
        raise InputError(f"success names a class, and family {family} has none. Say --likelihood bernoulli.")
    elif not is_number(frame[target]) and family not in ("ordinal", "multinomial"):
        raise InputError(
            f"this family needs a target of numbers; {target!r} holds classes such as {str(frame[target].iloc[0])!r}. "
            "Say --likelihood bernoulli, or multinomial of several classes."
        )
    # many: categories from which on a column may be of groups
    response = target if positive is None or is_number(read.frame[target]) else f"{target}[{positive}]"
    notes += [
        f"column {name!r} has {len(of)} categories, each with a coefficient of its own. If they are groups that are "
        f'alike, as clinics or schools are: --formula "{response} ~ ... + (1 | {name})" --family {family}'
        for name, of in levels.items()
        if name not in chosen and len(of) >= many and family != "multinomial"
        if name.isidentifier() and re.fullmatch(r"\w+(\[[-+.\w]+\])?", response)  # a formula can be pasted
    ]
    return _of_columns(frame, names, levels, target, positive, notes, s)


def _of_role(role: str) -> Door:
    """The words by which a user chooses another column for a role."""
    return Door(f"name another column (--{role})", "")


def _of_columns(
    frame: pd.DataFrame,
    names: list[str],
    texts: dict[str, list[str]],  # of each column of categories its levels
    target: str,
    positive: str | None,
    notes: list[str],
    s: Settings,
) -> Prepared:
    """The rows to fit and those held out, with what is filled in and left out, and their formula."""
    train, test = _split(frame, s)
    new = pd.DataFrame({name: test[name].notna() & ~test[name].isin(train[name].dropna()) for name in texts})
    if texts and new.any(axis=None):
        notes.append(f"{int(new.any(axis=1).sum())} rows with levels that no other rows have were fitted, not held out")
        train, test = pd.concat([train, test[new.any(axis=1)]]), test[~new.any(axis=1)]
    if positive is not None and train[target].nunique() < 2:
        raise InputError(
            f"the {len(train)} training rows are all {train[target].iloc[0]!r}, and this family needs both classes. "
            "Choose another seed or a smaller test_fraction."
        )
    fill = _filling(train, names) if s.impute else {}
    (train, gaps), (test, others) = _filled(train, fill), _filled(test, fill)
    count = {name: gaps[name] + others[name] for name in fill}
    if total := sum(count[name] for name in fill if name not in texts):
        notes.append(f"{total} missing entries were filled in with medians of the training rows (--impute)")
    for name in texts:
        if count.get(name):
            notes.append(f"{count[name]} missing entries of {name} became {fill[name]!r}, its commonest level")
    alone = [name for name in names if train[name].nunique() < 2 and (s.intercept or name in texts)]
    if alone:
        said = listed([f"{name} = {train[name].iloc[0]}" for name in alone])
        notes.append(f"the same in all training rows, so that nothing can tell an effect of it, and left out: {said}")
    if len(alone) == len(names):
        raise InputError(f"no column differs between the training rows, to predict {target!r} from. Check the table.")
    kept = [name for name in names if name not in alone]
    shift = [s.offset] if s.offset else []
    right = ["1" if s.intercept else "0", *map(_quoted, kept), *(f"offset({_quoted(name)})" for name in shift)]
    columns = Columns(
        f"{_quoted(target)} ~ {_sum(right)}",
        [*kept, *shift],
        levels={name: of for name, of in texts.items() if name not in alone},
        fill={name: value for name, value in fill.items() if name not in alone},
        known=list(dict.fromkeys(name for name in (target, s.weights, *s.drop, *alone, "target") if name)),
    )
    return Prepared(train, test, columns, tuple(notes), positive)


def _quoted(name: str) -> str:
    """The name of a column in a formula."""
    if "`" in name:
        raise InputError(f"column {name!r} has a backtick in its name, which formulas cannot have. Rename it.")
    return f"`{name}`"


def _sum(terms: Sequence[str], at_once: int = 100) -> str:
    """The sum of terms, in parentheses within parentheses where there are many."""
    # at_once: terms of a sum without parentheses, which a parser reads by recursion
    half = len(terms) // 2
    return " + ".join(terms) if len(terms) <= at_once else f"({_sum(terms[:half])}) + ({_sum(terms[half:])})"


def _of_lacking(column: str, role: str, columns: list[str]) -> str | None:
    """What is wrong with a column that is named and not there."""
    if column in columns:
        return None
    shown = ", ".join(columns[:30]) + (f", .. ({len(columns)} in all)" if len(columns) > 30 else "")
    parts = column.split(",")
    several = role in ("drop", "categorical") and len(parts) > 1 and set(parts) <= set(columns)
    advice = f" Separate them by spaces, --{role} {join(parts)}." if several else hint(column, columns)
    return f"{role} column {column!r} is not in the data.{advice} The columns are: {shown}."


def _in_order(level: str) -> tuple[float, str]:
    """Numbers by their size, before texts."""
    number = pd.to_numeric(level, errors="coerce")
    return (np.inf if pd.isna(number) else float(number), level)


def _coded(frame: pd.DataFrame, target: str, success: str | None) -> tuple[pd.DataFrame, str]:
    """The table with two classes in the target, failure and success, and the second."""
    column = frame[target]
    ordered = isinstance(column.dtype, pd.CategoricalDtype)
    texts = column.astype(str) if ordered else as_levels(column)
    names = list(map(str, column.cat.categories)) if ordered else sorted(texts.unique(), key=_in_order)
    if len(names) == 1:
        raise InputError(
            f"target {target!r} has one class, {names[0]!r} in all {len(frame)} rows; a Bernoulli family needs "
            "two. Check the column, or that the file has all rows."
        )
    if success is None and len(names) > 2:
        some = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
        raise InputError(
            f"target {target!r} has {len(names)} classes ({some}); a Bernoulli family needs two. "
            f"{_remedy(column, names)}"
        )
    success = names[-1] if success is None else success
    if success not in names:
        known = ", ".join(names[:20])
        raise InputError(
            f"success {success!r} is no class of {target!r}.{hint(success, names)} The classes are: {known}."
        )
    rest = [name for name in names if name != success]
    failure = rest[0] if len(rest) == 1 else f"not {success}"
    coded = pd.Categorical(np.where(texts == success, success, failure), [failure, success])
    return frame.assign(**{target: coded}), success


def _remedy(column: pd.Series, names: Sequence[str], most_classes: int = 10) -> str:
    """What to do with a target of more than two values under a likelihood of two classes."""
    # most_classes: of a numeric target, before it is taken for counts or measurements
    remedy = f"Name the one to predict against the others (--success {names[-1]!r})"
    if not is_number(column):
        return f"{remedy}, or take them all (--likelihood multinomial)."
    counts = "--likelihood poisson, or negative_binomial, for counts"
    whole = column.min() >= 0 and bool((column == np.rint(column)).all())
    if len(names) <= most_classes:
        return f"{remedy}, or, if they are counts, say {counts}." if whole else f"{remedy}."
    if whole:
        return f"They are whole numbers: say {counts}, or gaussian for measurements."
    return "They are measurements: say --likelihood gaussian."
