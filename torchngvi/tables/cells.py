"""What the cells and the columns of a table say: checked once, for every door through which a table comes in.

A cell is a text, and a number is only what can be read as one in a way that is said: "29,278" is read as 29278 with a
note; "12 kg", "$12", a date, or "?" among numbers is refused with what to do about it.  No column becomes categories
because a number was written in a way that was not expected.  The command line, formulas and the estimators of
scikit-learn ask the same questions here, and one error names all that is wrong with a table.
"""

import datetime
import decimal
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from torchngvi.errors import InputError
from torchngvi.messages import hint, listed
from torchngvi.solved.leave_one_out import CLOSE
from torchngvi.tables.families import MOST_CATEGORIES

try:
    import pandas as pd
except ImportError:  # arrays need none
    pd = None

Array = np.ndarray[Any, Any]

_NINES = re.compile(r"-9|-?99+")  # numbers that are used as codes for missing values


def refuse(faults: Sequence[str]) -> None:
    """Raise one error for all that is wrong with a table."""
    if len(faults) == 1:
        raise InputError(faults[0])
    if faults:
        lines = (f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
        raise InputError("\n".join([f"the table has {len(faults)} faults:", *lines]))


class Door(NamedTuple):
    """The words by which a user of one door leaves a column out, or takes it as categories."""

    leave_out: str  # with "{name}" for the column, and "{quoted}" for its name as an argument of a shell
    as_categories: str  # the same; an empty text where that is not offered
    keeps_texts: bool = False  # whether texts that are plain numbers stay texts, as they come in a table of Python

    def to_leave_out(self, name: str) -> str:
        """How to leave a column out."""
        return self.leave_out.format(name=name, quoted=quote(name))

    def remedies(self, name: str, first: str = "") -> str:
        """What to do about a column, as a sentence."""
        categories = self.as_categories.format(name=name, quoted=quote(name))
        parts = [part for part in (first, self.to_leave_out(name), categories) if part]
        said = ", ".join(parts[:-1]) + (", or " if len(parts) > 1 else "") + parts[-1]
        return f"{said[0].upper()}{said[1:]}."


COMMAND = Door("leave the column out (--drop {quoted})", "take it as categories (--categorical {quoted})")
FORMULA = Door("leave it out of the formula", "write C({name}) for categories", keeps_texts=True)
FRAME = Door("leave the column out (table.drop(columns=[{name!r}]))", "")


# ------------------------------------------------------------------------------------ cells


class Style(NamedTuple):
    """How numbers are written in a column: what separates thousands, and what separates the decimals."""

    thousands: str
    decimal: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """The cells that are numbers in this style, thousands at every three digits, or as in India."""
        whole = r"\d+"
        if self.thousands:
            mark = re.escape(self.thousands)
            whole += rf"|[1-9]\d{{0,2}}(?:{mark}\d{{3}})+|[1-9]\d?(?:{mark}\d\d)+{mark}\d{{3}}"
        point = re.escape(self.decimal)
        return re.compile(rf"[-+−]?(?:(?:{whole})(?:{point}\d*)?|{point}\d+)(?:[eE][-+]?\d+)?")

    def number(self, cell: str) -> float:
        """The number that a cell stands for."""
        bare = _bare(cell).replace(self.thousands, "") if self.thousands else _bare(cell)
        return float(bare.replace(self.decimal, ".").replace("−", "-"))

    def said(self, cell: str) -> str:
        """How such a cell was read, for a note."""
        words = {",": "a comma", ".": "a point", "'": "an apostrophe", "’": "an apostrophe"}
        parts = {
            f"{words.get(self.thousands, 'a space')} between thousands": self.thousands and self.thousands in cell[1:],
            "a comma before decimals": self.decimal == "," and "," in cell,
            "digits of another script": any(sign.isdigit() and not sign.isascii() for sign in cell),
            "quotation marks": _bare(cell) != cell,
            "a minus sign of typesetting": "−" in cell,
        }
        return f"{cell!r} as {self.number(cell):.15g}, with {' and '.join(part for part in parts if parts[part])}"


_SPACES = (" ", "\u00a0", "\u202f", "\u2009")
_STYLES = tuple(Style(mark, point) for point in ".," for mark in ("", ",", ".", "'", "’", *_SPACES) if mark != point)
_WORDS = {"none", "missing", "unknown", "not available"}  # which may be categories
_PLACEHOLDERS = {"", "?", "-", "--", ".", "*", "n/a", "n.a.", "#n/a", "na", "nan", "null", "<na>", *_WORDS}
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s*[ap]m)?"
_DATE = re.compile(
    rf"(?:\d{{4}}[-/.](?:0?[1-9]|1[0-2])(?:[-/.]\d{{1,2}})?|\d{{1,2}}[-/.]\d{{1,2}}[-/.](?:\d{{4}}|\d{{2}})"
    rf"|\d{{1,2}}[-. ]{_MONTH}[-., ]+\d{{2,4}}|{_MONTH}[- ]+(?:\d{{1,2}},?[- ]+)?\d{{2,4}})"
    rf"(?:[T ]+{_CLOCK})?\s*(?:Z|UTC|[-+]\d{{2}}:?\d{{2}})?|{_CLOCK}",
    re.IGNORECASE,
)
_CURRENCY = r"[$€£¥₹]|USD|EUR|GBP|CHF|JPY|CNY|INR|SEK|NOK|DKK|AUD|CAD"
_AMOUNT = r"[-+−]?\d[\d.,'’]*(?:[eE][-+]?\d+)?"
_WITH_UNIT = re.compile(rf"(?P<front>{_CURRENCY})?\s?(?P<number>{_AMOUNT})\s?(?P<back>[^\d\s.,:/+–-][^\d]{{0,11}})?")
_IN_BRACKETS = re.compile(rf"\((?:{_CURRENCY})?\s?{_AMOUNT}\)")
_ORDINALS = {"st", "nd", "rd", "th"}
_UNIT_WORDS = (
    "% ‰ °c °f c f k kg g mg µg ug lb lbs oz t m km cm mm µm nm in ft mi yd l ml dl h hr hrs min s sec ms d day days "
    "week weeks month months y yr yrs year years hz khz mhz ghz w kw mw v a mmhg bpm mb gb kb tb € $ £ usd eur"
)
_UNITS = frozenset(_UNIT_WORDS.split())


class Look(NamedTuple):
    """What the texts of a column are."""

    kind: str  # "numbers" as they are, "styled" numbers, "dates", "units", "mixed" numbers and texts, or "texts"
    example: str = ""  # one of the cells that say so
    style: Style | None = None  # of styled numbers
    bad: int = 0  # rows that hold no number, of a mixed column
    rows: int = 0  # all of them


def look_at(counts: Mapping[str, int], *, comma: bool = False) -> Look:
    """Say what the texts of a column are."""
    cells = {cell: str(cell).strip() for cell in counts}
    rows = sum(counts.values())
    plain = {cell for cell, text in cells.items() if _is_plain(text)}
    if len(plain) == len(cells):
        return Look("numbers", next(iter(cells), ""), rows=rows)
    style, numeric = _best_style({cell: _bare(text) for cell, text in cells.items()}, plain, comma)
    rest = {cell: text for cell, text in cells.items() if cell not in numeric}
    odd = next(cell for cell in cells if cell not in plain)
    if not rest:
        sample = max((cell for cell in cells if cell not in plain), key=lambda cell: len(str(cell)))
        return Look("styled", cells[sample], style, rows=rows)
    said = {cell: text for cell, text in rest.items() if text.lower() not in _PLACEHOLDERS}
    if said and 2 * sum(counts[cell] for cell, text in said.items() if _DATE.fullmatch(text)) >= rows:
        return Look("dates", next(iter(said.values())), rows=rows)
    if said and _have_units(set(said.values()), len(numeric)):
        return Look("units", next(iter(said.values())), rows=rows)
    bad = sum(counts[cell] for cell in rest)
    alike = numeric and (not said or len(rest) == 1 and len(numeric) > 1)
    if 2 * bad < rows or alike:
        return Look("mixed", cells[next(iter(rest))], bad=bad, rows=rows)
    return Look("texts", cells[odd], bad=bad, rows=rows)


def _is_plain(text: str) -> bool:
    """Whether a cell is a number as Python and pandas read one."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text and text.isascii()


def _bare(text: str) -> str:
    """A cell without the quotation marks by which spreadsheets keep a number a text, but for a code with a zero."""
    return re.sub(r"""=?"((?!0\d).*)"|'((?!0\d).*)""", r"\1\2", text) if text[:1] in "='\"" else text


def _best_style(cells: Mapping[str, str], plain: set[str], comma: bool) -> tuple[Style | None, set[str]]:
    """The style in which the most cells are numbers, and these cells, the plain numbers among them."""
    first = [cells[cell] for cell in cells if cell not in plain][:100]
    best: tuple[int, Style | None, set[str]] = (len(plain), None, plain)
    for style in sorted(_STYLES, key=lambda style: (style.decimal == ",") != comma):
        matches = style.pattern.fullmatch
        if 2 * sum(matches(text) is not None for text in first) >= len(first):
            found = {cell for cell, text in cells.items() if matches(text)}
            best = (len(found), style, found) if len(found) > best[0] else best
    return best[1], best[2]


def _have_units(texts: set[str], others: int) -> bool:
    """Whether texts are numbers with a unit or a currency: all with the same one, or with units that are known."""
    if all(_IN_BRACKETS.fullmatch(text) for text in texts):
        return True
    found = [_WITH_UNIT.fullmatch(text) for text in texts if not _IN_BRACKETS.fullmatch(text)]
    if not all(found):
        return False
    fronts, backs = ({(match[part] or "").strip().lower() for match in found if match} for part in ("front", "back"))
    if backs & _ORDINALS or (backs == {""} and fronts == {""}):
        return False
    several = len({match["number"] for match in found if match}) + others > 1
    return several and (backs <= _UNITS | {""} or len(backs) == 1)


# ------------------------------------------------------------------------------------ columns


class Cleaned(NamedTuple):
    """A table whose cells have been looked at."""

    frame: Any  # with numbers where cells stand for numbers
    notes: tuple[str, ...]  # what was read in a way that one may not expect
    faults: tuple[str, ...]  # sentences about the columns that cannot be used, for `refuse`


def cleaned(
    frame: Any, names: Iterable[str], door: Door, *, chosen: Iterable[str] = (), comma: bool = False
) -> Cleaned:
    """Look at the cells of some columns of a table."""
    spared, names = set(chosen), list(names)
    frame, notes = stripped(frame, names)
    comma = comma or has_commas(frame, names)
    new, faults = {}, []
    for name in names:
        column, texts = frame[name], None
        if isinstance(column.dtype, pd.CategoricalDtype) or name in spared:
            continue
        if getattr(column.dtype, "kind", "O") == "c":
            faults.append(f"column {name!r} is complex. Take its real part, or its size.")
        elif getattr(column.dtype, "kind", "O") in "mM" or isinstance(column.dtype, pd.PeriodDtype):
            faults.append(_of_dates(name, str(column.dropna().iloc[0]) if column.notna().any() else "", door))
        elif not is_number(column):
            column, texts = _without_objects(column)
            if texts is None:
                new[name] = column
        if texts is None or not len(texts):
            continue
        counts = texts.value_counts(sort=False).to_dict()
        look = look_at(counts, comma=comma)
        if look.kind == "units" and len(counts) == 2:  # two classes, such as "30 days" and "60 days"
            continue
        if look.kind == "styled":
            assert look.style is not None
            new[name] = column.map(look.style.number, na_action="ignore").astype(np.float64)
            notes.append(f"column {name!r} was read as numbers: {look.style.said(look.example)}")
        elif look.kind == "numbers" and not door.keeps_texts:
            new[name] = _beyond_64_bits(column)
        elif (fault := of_look(name, look, door)) is not None:
            faults.append(fault)
        elif (note := _of_texts(name, look, texts)) is not None:
            notes.append(note)
    return Cleaned(frame.assign(**new) if new else frame, tuple(notes), tuple(faults))


def has_commas(frame: Any, names: Iterable[str]) -> bool:
    """Whether decimals are behind commas in some column, so that "1,234" in another one is 1.234."""
    for name in names:
        column = frame[name]
        if is_number(column) or isinstance(column.dtype, pd.CategoricalDtype):
            continue
        texts = column.dropna().astype(str)
        if texts.str.contains(",", regex=False).any():
            style = look_at(texts.value_counts(sort=False).to_dict()).style
            if style is not None and style.decimal == ",":
                return True
    return False


def stripped(frame: Any, names: Iterable[str]) -> tuple[Any, list[str]]:
    """The table without spaces around texts, and notes of it and of levels that may not be meant."""
    new, notes = {}, []
    for name in names:
        column = frame[name]
        if isinstance(column.dtype, pd.ArrowDtype):  # which formulae does not read
            new[name] = column = column.astype(object).where(column.notna(), None).infer_objects()
        if is_number(column):
            continue
        if not isinstance(column.dtype, pd.CategoricalDtype):
            bare = column.map(lambda cell: cell.strip() if isinstance(cell, str) else cell)
            if bool((bare[column.notna()] != column[column.notna()]).any()):
                new[name] = column = bare
                notes.append(f"spaces around entries of column {name!r} were left out")
        notes += _of_spellings(name, column)
    return (frame.assign(**new) if new else frame), notes


def _of_spellings(name: str, column: Any) -> list[str]:
    """Notes of levels that differ only in case or spaces, and of one that stands for missing entries."""
    alike, cells = dict[str, list[str]](), dict.fromkeys(column.dropna().astype(str))
    for cell in (cell for cell in cells if not _is_plain(cell)):
        alike.setdefault("".join(unicodedata.normalize("NFKC", cell).casefold().split()), []).append(cell)
    found = [
        f"column {name!r} has entries that differ only in case or spaces, {listed([*map(repr, some)])}, and are taken "
        "as different. If they are the same: write them alike"
        for some in alike.values()
        if len(some) > 1
    ]
    meant = set() if len(alike) == 1 < len(cells) else _WORDS  # none among numbers
    meant = meant if any(sign.isalnum() for cell in cells for sign in str(cell)) else _PLACEHOLDERS  # + and -
    for some in (alike[word] for word in sorted(_PLACEHOLDERS - meant) if word in alike):
        rows = f"{column.isin(some).sum()} of {len(column)} rows"
        found.append(
            f"column {name!r} holds {some[0]!r} in {rows}, as missing entries are written, and it is taken as a "
            "category. If it is none: leave those cells empty, which then count as missing"
        )
    return found


def of_look(name: str, look: Look, door: Door) -> str | None:
    """What is wrong with the texts of a column: a sentence with the remedy, or None."""
    if look.kind == "dates":
        return _of_dates(name, look.example, door)
    if look.kind == "units":
        first = "write the numbers alone, and the unit into the name of the column"
        return f"column {name!r} holds numbers with a unit, such as {look.example!r}. {door.remedies(name, first)}"
    if look.kind == "mixed":
        placeholder = look.example.lower() in _PLACEHOLDERS
        first = "leave those cells empty, which then count as missing" if placeholder else "correct them"
        return (
            f"column {name!r} is numbers except for {look.bad} of {look.rows} rows, the first {look.example!r}. "
            f"{door.remedies(name, first)}"
        )
    return None


def _of_dates(name: str, example: str, door: Door) -> str:
    first = "write the number of days since some day, or the year, the month or the hour as columns"
    if door is not COMMAND:
        first = f"count the days, (day - day.min()).dt.days of day = pandas.to_datetime(table[{name!r}]), or take parts"
    return f"column {name!r} holds dates or times such as {example!r}. {door.remedies(name, first)}"


def _of_texts(name: str, look: Look, texts: Any) -> str | None:
    """A note of texts that are taken as categories though some, or all, are numbers."""
    if look.kind == "numbers" and texts.nunique() > 2:
        return (
            f"column {name!r} holds numbers as texts, such as {look.example!r}, and is taken as categories: "
            f"table[{name!r}].astype(float) makes numbers of them"
        )
    if look.kind == "texts" and look.bad < look.rows:
        return (
            f"column {name!r} is taken as categories, though {look.rows - look.bad} of its {look.rows} cells are "
            "numbers"
        )
    return None


def _without_objects(column: Any) -> tuple[Any, Any]:
    """A column of objects as numbers, or as it is with its cells as texts; None for these where it is numbers."""
    cells = column.dropna()
    if len(cells) and all(isinstance(cell, bool | np.bool_) for cell in cells):
        return (column, cells.astype(str)) if len(cells) < len(column) else (column.astype(bool), None)
    if len(cells) and all(isinstance(cell, int | float | decimal.Decimal | np.number) for cell in cells):
        if any(isinstance(cell, int) and abs(cell) >= 2**63 for cell in cells):
            return column, cells.astype(str)
        whole = column.infer_objects()
        return whole if is_number(whole) else column.where(column.notna(), np.nan).astype(np.float64), None
    if len(cells) and all(isinstance(cell, datetime.date | datetime.time) for cell in cells):
        return column, cells.map(lambda cell: cell.isoformat())
    return column, cells.astype(str)


def _beyond_64_bits(column: Any) -> Any:
    """Integers beyond 64 bits come as objects or texts: as float64 where that tells all apart, and no zero leads."""
    texts = column.astype(str).str.strip()
    numbers = pd.to_numeric(texts, errors="coerce").astype(np.float64)
    codes = texts.str.fullmatch(r"0\d+").any()
    exact = bool(numbers[column.notna()].notna().all()) and numbers.nunique() == column.nunique() and not codes
    return numbers if exact else column


def of_identifiers(
    frame: Any, names: Iterable[str], door: Door, zeros: Iterable[str] = (), fewest: int = 10
) -> tuple[str, ...]:
    """Notes of whole numbers that look like identifiers, and are taken as measurements."""
    # fewest: rows from which on numbers that differ in every row look like identifiers
    zeros, found = set(zeros), []
    for name in names:
        column = frame[name]
        kind = getattr(column.dtype, "kind", "O")
        if kind in "iuf" and _are_days(column):
            why = f"reads as dates, such as {column.iloc[0]:.0f}"
        elif kind not in "iu":
            continue
        elif name in zeros:
            why = "has entries that a zero leads, as codes have"
        elif len(column) >= fewest and column.is_unique and _is_numbering(column):
            why = "is a whole number that differs in every row, as identifiers do"
        else:
            continue
        found.append(f"column {name!r} {why}, and is taken as a measurement. If it is none: {door.to_leave_out(name)}")
    return tuple(found)


def _are_days(column: Any) -> bool:
    """Whether numbers are days as 20200131 is."""
    days = column.dropna().astype(np.float64)
    near = 0 < len(days) == len(column) and bool((days.between(18000101, 22001231) & (days % 1 == 0)).all())
    return near and bool(pd.to_datetime(days.astype(int).astype(str), format="%Y%m%d", errors="coerce").notna().all())


def of_codes(frame: Any, names: Iterable[str], door: Door) -> tuple[str, ...]:
    """Find columns of measurements with a number that stands for missing values, such as -999."""
    found = []
    for name in names:
        if getattr(frame[name].dtype, "kind", "O") not in "iuf":
            continue
        values = frame[name].dropna().to_numpy(dtype=float)
        for code in {values.min(), values.max()} if len(values) else ():
            same = values == code
            others = values[~same]
            if not _NINES.fullmatch(f"{code:g}") or not len(others):
                continue
            if np.abs(others - code).min() > max(np.ptp(others), 1.0):
                found.append(
                    f"column {name!r} holds {code:g} in {same.sum()} of {len(same)} rows, far from all its others, as "
                    "codes for missing values are, and is taken as a measurement. If it is none: leave these cells "
                    f"empty, or {door.to_leave_out(name)}"
                )
    return tuple(found)


def of_copies(frame: Any) -> tuple[str, ...]:
    """Say that more than half of the rows are copies of others, where a column has decimals, as measurements have."""
    numbers = [frame[name].dropna().to_numpy() for name in frame if getattr(frame[name].dtype, "kind", "O") == "f"]
    if not any(len(column) and bool((column % 1 != 0).mean() > 0.5) for column in numbers):
        return ()
    copies = int(frame.duplicated(keep=False).sum())
    if 2 * copies <= len(frame):
        return ()
    return (
        f"{copies} of {len(frame)} rows are there more than once, the same in every column, and count as often. If the "
        "table was put together twice: leave the copies out",
    )


_TOTALS = re.compile(r"(?:grand |sub)?totals?:?|sums?:?|overall|mean|average|summe|gesamt|total général", re.IGNORECASE)


def of_totals(frame: Any, fewest: int = 3) -> tuple[str, ...]:
    """Say that the last row holds the sums of the rows above, by a word or in all columns of numbers."""
    # fewest: rows of a table, of which the last can be such
    if len(frame) < fewest:
        return ()
    numbers, words = [], False
    for place in range(frame.shape[1]):
        column = frame.iloc[:, place]
        last, above = column.iloc[-1], column.iloc[:-1]
        if getattr(column.dtype, "kind", "O") in "iuf":
            numbers.append(pd.notna(last) and above.sum() != 0 and math.isclose(last, above.sum(), rel_tol=1e-9))
        elif isinstance(last, str) and _TOTALS.fullmatch(last):
            words |= not (above.astype(str) == last).any()
    if not words and (len(numbers) < 2 or not all(numbers)):
        return ()
    return (
        "the last row looks like totals of those above, by a word in it or as the sums of all columns of numbers, and "
        "is taken as one more row. If it is none: leave it out",
    )


def _is_numbering(column: Any, gaps: int = 10) -> bool:
    """Whether different whole numbers fill their range but for gaps, or all have the same number of digits."""
    # gaps: numbers of a range for each that is there, in a numbering with gaps
    low, high = int(column.min()), int(column.max())
    return high - low < gaps * len(column) or (low > 0 and len(str(low)) == len(str(high)) > len(str(len(column))))


def of_levels(name: str, levels: int, door: Door, *, chosen: bool) -> list[str]:
    """What is wrong with a column of categories of so many levels: a sentence, or nothing."""
    if levels <= MOST_CATEGORIES:
        return []
    groups = f'model it as groups that are alike, {"--formula " if door is COMMAND else ""}"... + (1 | {name})".'
    leave_out = door.to_leave_out(name).replace("the column", "it")
    leave_out = leave_out[0].upper() + leave_out[1:]
    if chosen:
        return [
            f"column {name!r} has {levels} different values, more than the {MOST_CATEGORIES} of a category at most. "
            f"{leave_out}, or {groups}"
        ]
    return [
        f"text column {name!r} has {levels} different values, more than {MOST_CATEGORIES}: it looks like names or "
        f"dates, not categories. {leave_out}, or {groups}"
    ]


def is_number(column: Any) -> bool:
    """Whether a column holds numbers, or truth values, which count as 0 and 1."""
    return bool(pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column))


def as_levels(column: Any) -> Any:
    """The entries as texts, equal numbers alike however they were written; missing ones stay so."""
    if is_number(column) and not pd.api.types.is_bool_dtype(column):
        texts = column.map(_level, na_action="ignore")
    else:
        texts = column.astype(str).str.strip()
    return texts.astype(object).where(column.notna(), None)


def _level(value: Any) -> str:
    whole = isinstance(value, int | np.integer) or (math.isfinite(value) and value == int(value))
    return str(int(value)) if whole else f"{value:.15g}"


def check_names(names: Iterable[Any], what: str = "the table") -> list[str]:
    """The names of columns as texts, without spaces around them, after a check that no two are the same."""
    texts = [str(name).strip() for name in names]
    twice = sorted({name for name in texts if name and texts.count(name) > 1}) if len(set(texts)) < len(texts) else []
    if twice:
        some = f"named {twice[0]!r}" if len(twice) == 1 else f"of the same name: {', '.join(map(repr, twice))}"
        raise InputError(
            f"two columns of {what} are {some}, without the spaces around their names. Rename one of them."
        )
    return texts


def without_unnamed(frame: Any) -> tuple[Any, tuple[str, ...]]:
    """The table without columns that have no name in the file, as ``DataFrame.to_csv()`` writes the row numbers."""
    notes, drop = [], []
    for place, name in enumerate(frame.columns):
        if not re.fullmatch(r"Unnamed: \d+(\.\d+)*|", str(name)):
            continue
        column = frame.iloc[:, place]
        if column.isna().all():
            what = "which is empty"
        elif pd.api.types.is_integer_dtype(column) and column.is_unique:
            what = "which numbers the rows"
        elif not is_number(column) and column.is_unique:
            what = "which names the rows"
        else:
            raise InputError(
                f"the column in place {place + 1} of the table has no name, and is no number of rows: its first entry "
                f"is {column.iloc[0]!r}. Give it a name in the first line."
            )
        drop.append(place)
        notes.append(f"the column without a name in place {place + 1} was left out, {what}")
    kept = [place for place in range(frame.shape[1]) if place not in drop]
    return (frame.iloc[:, kept] if drop else frame), tuple(notes)


def of_unusable(
    columns: Mapping[str, Array],
    roles: Mapping[str, str],  # to the columns that have one
    *,
    impute: bool = False,
    largest: float = 1e140,
) -> list[str]:
    """Find columns with missing or infinite entries, or with one whose square overflows."""
    # largest: entry of a column, whose square is still a number
    bad, found = {}, []
    instead = {name: COMMAND.to_leave_out(name) for name in columns}
    instead |= {name: f"name another column (--{role})" for role, name in roles.items()}
    for name, column in columns.items():
        sizes = np.abs(column) if column.dtype.kind == "f" else np.zeros(0)
        missing = ~np.isfinite(column) if column.dtype.kind == "f" else pd.isna(column)
        if impute and name not in roles.values():
            missing = missing if missing.all() else sizes == np.inf
        if missing.any():
            bad[name] = int(missing.sum())
        elif len(sizes) and (size := float(np.nanmax(sizes))) > largest:
            found.append(
                f"column {name!r} has entries of size {size:.3g}; sums of squares overflow from {largest:g} on. "
                f"Divide it by a constant, or {instead[name]}."
            )
    if not bad:
        return found
    first = max(bad, key=lambda name: bad[name])
    others = [f"{count} of {name!r}" for name, count in bad.items() if name != first]
    more = f" (and {listed(others)})" if others else ""
    rows, fill = len(columns[first]), first not in roles.values() and not impute
    advice = "fill them in (--impute median), drop those rows" if fill else "drop or impute those rows"
    if first in roles.values() and impute:
        advice = "drop those rows, since --impute fills in predictors alone"
    # of an empty column there is nothing to fill in from, and no row to keep
    advice = instead[first] if bad[first] == rows else f"{advice}, or {instead[first]}"
    found.append(
        f"column {first!r} has missing or infinite entries in {bad[first]} of {rows} rows{more}. "
        f"{advice[0].upper()}{advice[1:]}."
    )
    return found


# ------------------------------------------------------------------------------------ formulas


def check_there(frame: Any, names: Sequence[str], asking: str = "The formula") -> None:
    """Check that a table has columns, each once."""
    if not (hasattr(frame, "columns") and hasattr(frame, "iloc")):
        raise InputError(f"A formula needs a pandas DataFrame with its columns; got {type(frame).__name__}.")
    lacking = [name for name in names if name not in frame]
    if lacking:
        advice = hint(lacking[0], map(str, frame.columns))
        raise InputError(
            f"{asking} names {', '.join(lacking)}; the table has {', '.join(map(str, frame.columns))}.{advice}"
        )
    check_names([name for name in frame.columns if name in set(names)])


def of_missing(frame: Any, names: Sequence[str]) -> list[str]:
    """What is wrong with columns that miss values: a sentence, or nothing."""
    gaps = frame[list(names)].isna()
    found = ", ".join(f"{count} of {name}" for name, count in gaps.sum().items() if count)
    first = gaps.to_numpy().any(1).argmax() if found else 0
    advice = f"Leave those rows out, table.dropna(), or impute them. The first is row {first}, counted from 0."
    return [f"The table misses values: {found}. {advice}"] if found else []


_CODED = re.compile(r"\b[CST]\(\s*`?([^`,()]+?)`?\s*[,)]")  # the column of C(ward), C(ward, Sum)
_ALONE = re.compile(r"\boffset\(\s*`?([^`()]+?)`?\s*\)")  # the column of offset(time)


def of_formula(
    formula: str,
    frame: Any,
    response: Sequence[str],
    predictors: Sequence[str],
    categories: Sequence[str],  # predictors that may be categories, as they are not within a call of numbers alone
    door: Door,
) -> Cleaned:
    """Look at the cells of the columns that a formula names as response and predictors."""
    coded = set(_CODED.findall(formula))
    comma = has_commas(frame, [*response, *predictors])
    left = [] if "[" in formula.partition("~")[0] else response
    within = [] if re.search("['\"]", re.sub("`[^`]*`", "", formula)) else predictors  # I(x == 'a') is of a text
    of_numbers = [*left, *(name for name in within if name not in {*left, *categories, *coded})]
    as_numbers = cleaned(frame, of_numbers, door._replace(as_categories="", keeps_texts=False), comma=comma)
    rest = [name for name in predictors if name not in of_numbers]
    found = cleaned(as_numbers.frame, rest, door, chosen=coded, comma=comma)
    faults = [*as_numbers.faults, *found.faults]
    for name in predictors:
        column = found.frame[name]
        texts = not is_number(column) and not isinstance(column.dtype, pd.CategoricalDtype)
        if texts and name not in coded and not any(repr(name) in fault for fault in faults):
            look = look_at(dict.fromkeys(column.dropna(), 1), comma=comma)
            many = of_levels(name, column.nunique(), door, chosen=False)
            note = _of_texts(name, look, column) if many and look.kind == "numbers" else None
            faults += [f"{note}."] if note else many
    plain = [name for name in predictors if name not in coded]
    notes = (*of_identifiers(found.frame, plain, door), *of_codes(found.frame, plain, door))
    notes += of_codes(found.frame, left, Door("leave their rows out", ""))
    return Cleaned(found.frame, (*as_numbers.notes, *found.notes, *notes), tuple(faults))


def offset_alone(formula: str) -> str | None:
    """The column that a formula adds to the linear predictor as it is, or None."""
    found = _ALONE.search(formula)
    return found[1] if found else None


def check_finite(name: str, values: Array) -> None:
    """Check that a term of a formula is finite, which the logarithm of a negative number is not."""
    bad = np.asarray(~np.isfinite(values.reshape(len(values), math.prod(values.shape[1:]))).all(1))
    if bad.any():
        raise InputError(
            f"The term {name} of the formula is not finite in {bad.sum()} of {len(bad)} rows, the first of them row "
            f"{int(bad.argmax())}, counted from 0. Check what it is computed from."
        )


def used(frame: Any) -> Any:
    """The table without categories that no row has."""
    kept = {
        name: column.cat.remove_unused_categories() for name, column in frame.items() if str(column.dtype) == "category"
    }
    return frame.assign(**kept) if kept else frame


def of_exposure(name: str, offset: Array, y: Array, remedy: str) -> str | None:  # offset (N,), y (N,)
    """Ask whether an offset of a logarithmic link is an exposure of which no logarithm was taken."""
    offset, y = (np.asarray(part, dtype=np.float64) for part in (offset, y))
    if len(offset) != len(y) or not (offset > 0).all() or not (y >= 0).all() or offset.min() == offset.max():
        return None
    if _profile(np.log(offset), y) <= _profile(offset, y) + CLOSE:
        return None
    return (
        f"Did you mean {remedy}? As it is, {name} multiplies the mean by e^{name}, and the logarithm explains the "
        "counts better."
    )


def _profile(offset: Array, y: Array) -> float:
    """The log likelihood of Poisson counts with one rate at its largest, without what does not depend on the offset."""
    top = offset.max()
    return float(y @ offset - y.sum() * (top + math.log(np.exp(offset - top).sum())))


def as_numbers(new: Any, names: Iterable[str]) -> Any:
    """New rows with numbers in columns that held numbers in a fit, by the same reading of cells."""
    texts = [name for name in names if not is_number(new[name])]
    found = cleaned(new, texts, COMMAND)
    faults = []
    for name in texts:
        column = found.frame[name]
        column = column.astype(str) if getattr(column.dtype, "kind", "O") in "mM" else column
        bad = column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
        if len(bad):
            faults.append(
                f"column {name!r} held numbers when the model was fitted; got texts such as {bad.iloc[0]!r} in "
                f"{len(bad)} of {len(column)} rows. Correct those rows."
            )
    refuse(faults)
    empty = {name: np.nan for name in texts if not is_number(found.frame[name])}
    return found.frame.assign(**empty)


# ------------------------------------------------------------------------------------ estimators


def numeric(X: Any) -> tuple[Any, tuple[str, ...]]:
    """The covariates of an estimator as numbers; arrays and other tables than those of pandas as they are."""
    if pd is None or not isinstance(X, pd.DataFrame):
        return X, ()
    check_names(X.columns, "X")
    found = cleaned(X, list(X.columns), FRAME, chosen=())
    faults = list(found.faults)
    for name in found.frame.columns:
        column = found.frame[name]
        if not is_number(column) and not any(repr(name) in fault for fault in faults) and column.notna().any():
            faults.append(
                f"column {name!r} holds texts such as {str(column.dropna().iloc[0])!r}, and an estimator takes "
                "numbers: encode it first, as sklearn.preprocessing.OneHotEncoder(drop='first') does."
            )
    refuse(faults)
    unnamed = [str(name) for name in X.columns if re.fullmatch(r"Unnamed: \d+(\.\d+)*", str(name))]
    some = [f"column {name!r} had no name in its file, where it numbers the rows" for name in unnamed]
    rest = [name for name in found.frame.columns if str(name) not in unnamed]
    return found.frame, (
        *found.notes,
        *some,
        *of_identifiers(found.frame, rest, FRAME),
        *of_codes(found.frame, rest, FRAME),
    )
