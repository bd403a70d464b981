"""Generated tables, messed up as people's files are: each is fitted right, refused in a sentence, or noted.

    python -m benchmarks.messy_tables [--count 500] [--seed 0] [--only CASE] [--each] [--log FILE]

A clean table comes from a random design, is fitted, and then made a mess of in one to four ways, each of which says
what may become of it: the fit of the clean table, a refusal that names the column, or a fit with a note that does.  The
messy table goes in as a file of the command line or as a frame.  An outcome is *right*, *noted*, *refused*, or one of
what should not be: *raw*, another exception than those of `torchngvi.errors`; *silent*, another fit without a note;
*needless*, a refusal of what has one meaning; *slow*.  The exit code is 1 if there are any of these.  A run with a log
goes on where it was interrupted.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from torchngvi.app import fits
from torchngvi.app.settings import parser, settings_from
from torchngvi.errors import TorchngviError
from torchngvi.tables.model import regression

SECONDS = 60.0  # of the processor, after which a fit is slow
CLOSE = 1e-3  # standard deviations by which a right fit may differ
WRONG = ("raw", "silent", "needless", "slow")
COUNTS = ("poisson", "negative_binomial")
OUTCOMES: dict[str, Callable[[Any, Any], Any]] = {  # of each family, given the linear predictor
    "gaussian": lambda eta, draw: (eta + draw.normal(size=len(eta))).round(3),
    "student_t": lambda eta, draw: (eta + draw.standard_t(4, len(eta))).round(3),
    "bernoulli": lambda eta, draw: np.where(draw.random(len(eta)) < 1 / (1 + np.exp(-eta)), "yes", "no"),
    "poisson": lambda eta, draw: draw.poisson(np.exp(eta)),
    "negative_binomial": lambda eta, draw: draw.poisson(np.exp(eta) * draw.gamma(2, 0.5, len(eta))),
    "binomial": lambda eta, draw: draw.binomial(12, 1 / (1 + np.exp(-eta))),
    "ordinal": lambda eta, draw: 1 + np.digitize(eta + draw.logistic(size=len(eta)), [-1, 1]),
    "multinomial": lambda eta, draw: np.array(["bus", "car", "walk"])[
        np.digitize(eta + draw.normal(size=len(eta)), [-0.5, 0.7])
    ],
    "beta": lambda eta, draw: draw.beta(4 / (1 + np.exp(-eta)), 4 / (1 + np.exp(eta))).round(4).clip(1e-3, 1 - 1e-3),
    "gamma": lambda eta, draw: (draw.gamma(3, np.exp(eta) / 3) + 0.001).round(4),
    "lognormal": lambda eta, draw: np.exp(eta + 0.5 * draw.normal(size=len(eta))).round(4) + 1e-4,
}
WORDS = ("missing", "unknown")
MISSING = (*WORDS, "NA", "N/A", "-", ".", "", " ", "NaN", "null", "?", "n.a.", "#N/A", "NULL", "--")
NAMES = (
    "body mass (kg)",
    "x.1",
    "class",
    "lambda",
    "Größe",
    "it's",
    "a~b",
    "C",
    "1st",
    "pay [€]",
    "x|z",
    "T",
    "log",
    "Intercept 2",
    "y/x",
    "0",
    "温度",
    "np",
    'a"b',
    "a,b",
    "a\nb",
    "rate%",
    "$x",
    "-",
    "True",
    "offset",
    "a:b",
)


@dataclasses.dataclass
class Case:
    """A messy table, with the clean one and what may become of it."""

    draw: Any
    family: str
    outcome: str  # the name of its column
    terms: list[str]  # of the formula, besides the groups
    columns: dict[str, list[str]]  # by kind: number, text, group
    right: pd.DataFrame
    messy: pd.DataFrame
    file: bool  # for the command line, or a frame
    plain: bool  # of the command line, a target and all other columns
    left: str
    groups: list[str]
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # those that the mess has changed
    ends: dict[str, tuple[str, str]] = dataclasses.field(
        default_factory=dict
    )  # of each mess: what it may end in, words
    write: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of to_csv
    lines: list[Callable[[list[str]], list[str]]] = dataclasses.field(
        default_factory=list
    )  # what is done to the text of a file
    done: set[str] = dataclasses.field(default_factory=set)  # columns of which a mess was made

    def formula(self, messy: bool) -> str:
        """The formula, of the columns as they are named now."""
        text = f"{self.left} ~ {' + '.join([*self.terms, *(f'(1 | {name})' for name in self.groups)])}"
        for old, new in self.names.items() if messy else ():
            text = re.sub(rf"\b{old}\b", lambda _, new=new: f"`{new}`", text)
        return text

    def pick(self, *kinds: str) -> str:
        """A column of the formula of one of some kinds, that no other mess has; an empty text where there is none."""
        there = [name for kind in kinds for name in self.columns.get(kind, []) if name not in self.done]
        found = str(self.draw.choice(there)) if there else ""
        self.done.add(found)
        return found

    def rows(self, most: int = 4) -> Any:
        return self.draw.choice(len(self.messy), int(self.draw.integers(1, most + 1)), replace=False)

    def put(self, name: str, rows: Any, value: Any) -> None:
        """Write a value into cells of the messy table."""
        column = self.messy[name].astype(object)
        column.iloc[rows] = value
        self.messy[name] = column


def drawn(seed: int) -> Case:
    """A clean table of a random design."""
    draw = np.random.default_rng(seed)
    n, family = int(draw.integers(20, 201)), str(draw.choice(list(OUTCOMES)))
    file = bool(draw.random() < 0.6)
    plain = file and bool(draw.random() < 0.4) and family not in ("binomial", "ordinal", "multinomial")
    frame = pd.DataFrame(
        {
            "age": draw.normal(50, 12, n).round(1),
            "dose": draw.exponential(2, n).round(3) + 0.01,
            "salary": draw.integers(900, 90_000, n) + 0,
            "visits": draw.poisson(4, n),
            "town": draw.choice(["Bern", "Köln", "Paris", "Rom"], n, p=[0.4, 0.3, 0.2, 0.1]),
            "sex": draw.choice(["f", "m"], n),
            "quarter": draw.choice(["2020-Q1", "2020-Q2", "2020-Q3"], n),
            "smoker": draw.random(n) < 0.4,
        }
    )
    some = [str(name) for name in draw.permutation(list(frame))[: draw.integers(1, 5)]]
    groups = [] if plain or family == "multinomial" else ["site", "rater"][: draw.choice(3, p=[0.5, 0.35, 0.15])]
    eta = 0.4 * np.where(frame.sex == "m", 1, 0) + 0.3 * (frame.dose - 2) + 0.02 * (frame.age - 50)
    for name in groups:
        levels = draw.integers(0, int(draw.integers(4, 9)), n)
        frame[name] = levels + 101 if name == "rater" else [f"s{k}" for k in levels]
        eta = eta + 0.5 * draw.normal(size=9)[levels]
    frame = frame[[*some, *groups]]
    terms, numbers = list(some), [name for name in some if frame[name].dtype.kind in "if"]
    if numbers and not plain and draw.random() < 0.5:
        place, way = (
            terms.index(numbers[0]),
            str(draw.choice(["log({} + 1)", "center({})", "scale({})", "bs({}, df=4)"])),
        )
        terms[place] = way.format(numbers[0])
    elif len(numbers) > 1 and not plain and draw.random() < 0.4:
        terms.append(f"{numbers[0]}:{numbers[1]}")
    if family in COUNTS and not plain and draw.random() < 0.4:
        frame["days"] = draw.integers(1, 30, n)
        terms.append("offset(log(days))")
        eta = eta + np.log(frame.days / 10)
    y = OUTCOMES[family](np.asarray(eta, dtype=float), draw)
    left = "result"
    if family == "binomial":
        frame["trials"], left = 12, "prop(result, trials)"
    frame["result"] = y
    texts = [name for name in some if frame[name].dtype.kind not in "if" and name != "smoker"]
    columns = {"number": numbers, "text": texts, "bool": ["smoker"] * ("smoker" in some), "group": groups}
    columns |= {"outcome": ["result"], "added": []}
    return Case(draw, family, "result", terms, columns, frame.copy(), frame, file, plain, left, groups)


# ------------------------------------------------------------------------------------ messes

# What a mess may end in: right, the fit of the clean table; note, another fit that says so; refused.
End = tuple[str, str] | None  # the ends, and a pattern of what is said; None where a table cannot have the mess
STYLES: dict[str, Callable[[Any], str]] = {  # how a number is written
    "decimal comma": lambda v: f"{v}".replace(".", ","),
    "thousands": lambda v: f"{v:,}",
    "swiss thousands": lambda v: f"{v:,}".replace(",", "'"),
    "spaced thousands": lambda v: f"{v:,}".replace(",", "\u00a0"),
    "percent": lambda v: f"{v}%",
    "currency": lambda v: f"${v}",
    "unit": lambda v: f"{v} kg",
    "spaces behind": lambda v: f" {v} ",
    "scientific": lambda v: f"{v:.8e}",
    "typeset minus": lambda v: f"{v}".replace("-", "−"),
    "plus sign": lambda v: f"{v:+}",
    "excel text": lambda v: f"'{v}",
    "formula text": lambda v: f'="{v}"',
    "full width": lambda v: f"{v}".translate({ord("0") + k: 0xFF10 + k for k in range(10)}),
}
SPELLINGS: dict[str, tuple[Callable[[str], str], str]] = {  # of some entries of a column of texts
    "case": (lambda text: text.upper() if text.upper() != text else text.lower(), "note refused"),
    "spaces around": (lambda text: f"{text} ", "right"),
    "space within": (lambda text: f"{text[0]} {text[1:]}", "right note refused"),
    "decomposed": (lambda text: unicodedata.normalize("NFD", text), "right note"),
}
OPTIONS: dict[str, dict[str, Any]] = {  # of a file
    "semicolons": {"sep": ";"},
    "tabs": {"sep": "\t"},
    "bars": {"sep": "|"},
    "european": {"sep": ";", "decimal": ","},
    "quoted": {"quoting": 1},
    "lines of Windows": {"lineterminator": "\r\n"},
    "lines of Mac": {"lineterminator": "\r"},
    "row numbers": {"index": True},
    "byte order mark": {"encoding": "utf-8-sig"},
    "UTF-16": {"encoding": "utf-16"},
    "Latin-1": {"encoding": "latin-1"},
}
LINES: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {  # what is done to the lines of a file of commas
    "header again": (lambda lines: [*lines[:9], lines[0], *lines[9:]], "refused note"),
    "comment in front": (lambda lines: ["# exported 2024-01-31, by hand", *lines], "right refused"),
    "title in front": (lambda lines: ["Table 1", *lines], "right refused"),
    "source below": (lambda lines: [*lines, "Source: own survey"], "refused note"),
    "blank lines": (lambda lines: [*lines[:5], "", *lines[5:], "", ""], "right"),
    "empty cells below": (lambda lines: [*lines, re.sub("[^,]", "", lines[0])], "right refused"),
    "too many fields": (lambda lines: [*lines[:6], lines[6] + ",7,8", *lines[7:]], "refused"),
    "cut off": (lambda lines: [*lines[:-1], lines[-1].rsplit(",", 1)[0]], "refused"),
    "spaces in the header": (lambda lines: [lines[0].replace(",", " , "), *lines[1:]], "right"),
    "spaces behind commas": (lambda lines: [line.replace(",", ", ") for line in lines], "right"),
    "separators behind": (lambda lines: [f"{line}," for line in lines], "right"),
    "a line for Excel": (lambda lines: ["sep=,", *lines], "right"),
    "names of rows": (lambda lines: [lines[0], *(f"r{k},{line}" for k, line in enumerate(lines[1:]))], "refused"),
    "no names": (lambda lines: lines[1:], "refused"),
}
FRAMES: dict[str, Callable[[pd.DataFrame, Case], pd.DataFrame]] = {  # other dtypes, and indexes
    "nullable": lambda table, case: table.convert_dtypes(),
    "pyarrow": lambda table, case: table.convert_dtypes(dtype_backend="pyarrow"),
    "objects": lambda table, case: table.astype(object),
    "categories": lambda table, case: table.astype(
        {name: pd.CategoricalDtype([*sorted(table[name].unique()), "nobody"]) for name in case.columns["text"]}
    ),
    "decimals": lambda table, case: table.assign(
        **{name: [Decimal(f"{value}") for value in table[name]] for name in case.columns["number"]}
    ),
    "small dtypes": lambda table, case: table.astype(dict.fromkeys(table.select_dtypes("int"), "int32")),
    "index": lambda table, case: table.set_axis(case.draw.integers(0, 5, len(table))),
}


def styled(case: Case, kind: str) -> End:
    """A column of numbers as texts; those of a frame may be taken for categories."""
    name = case.pick("number", *(["outcome"] if case.family in ("gaussian", *COUNTS) else []))
    if not name or "european" in case.ends:
        return None
    case.messy[name] = [STYLES[kind](value) for value in case.messy[name]]
    return "right refused" if case.file else "right refused note", re.escape(name)


def spelled(case: Case, kind: str) -> End:
    """Some entries of a column of texts, spelled in another way."""
    if not (name := case.pick("text", *["site"] * ("site" in case.groups))):
        return None
    respell, ends = SPELLINGS[kind]
    rows = case.rows(5)
    case.put(name, rows, [respell(text) for text in case.messy[name].iloc[rows]])
    return None if list(case.messy[name]) == list(case.right[name]) else (ends, name)


def option(case: Case, kind: str) -> End:
    """A way to write a file, one that none before has fixed."""
    taken = (
        "newline" in case.ends
        or set(case.write) & set(OPTIONS[kind])
        or case.lines
        or (kind == "european" and set(STYLES) & set(case.ends))
    )
    if not case.file or taken:
        return None
    case.write |= OPTIONS[kind]
    return "right", ""


def of_lines(case: Case, kind: str) -> End:
    """A file whose lines are changed, behind all that is done to its cells."""
    first = {"comment in front", "title in front", "a line for Excel", "no names"} & set(case.ends)
    if not case.file or case.write or case.names or first or "newline" in case.ends:
        return None
    if kind == "no names" and (case.lines or set(case.messy) - {*case.columns["number"], "result", "rater"}):
        return None  # a line of cells with texts looks like names
    change, ends = LINES[kind]
    case.lines.append(change)
    return ends, "."


def framed(case: Case, kind: str) -> End:
    """A frame of other dtypes."""
    if case.file or set(FRAMES) & set(case.ends) or kind in ("categories", "decimals") and case.done:
        return None
    case.messy = FRAMES[kind](case.messy, case)
    case.done |= {*case.columns["text"]} if kind == "categories" else set()
    return "right", ""


def missing(case: Case) -> End:
    """Missing entries, as people write them; "unknown" among texts may be meant."""
    name, word = case.pick("number", "text", "bool", "group", "outcome"), str(case.draw.choice(MISSING))
    if not name or (word in WORDS and case.messy[name].dtype.kind not in "if"):
        return None
    case.put(name, case.rows(), word if case.file else [word, None, np.nan, pd.NA][case.draw.integers(4)])
    return "refused note", re.escape(name)


def code(case: Case) -> End:
    """Missing entries as numbers."""
    name = case.pick("number", "outcome")
    if not name or name == "salary" or case.messy[name].dtype.kind not in "if":
        return None
    case.put(name, case.rows(), int(case.draw.choice([-999, 9999, -99, -9999])))
    case.messy[name] = case.messy[name].astype(float)
    return "refused note", f"{name}|family"


def one_text(case: Case) -> End:
    """A text among numbers."""
    name = case.pick("number", "outcome")
    if not name or case.messy[name].dtype.kind not in "if":
        return None
    case.put(name, case.rows(2), str(case.draw.choice(["abc", "<5", "12 (?)", "see note", "3-4", "1,2,3"])))
    return "refused", re.escape(name)


def infinite(case: Case) -> End:
    """Infinite entries."""
    name = case.pick("number", "outcome", *["rater"] * ("rater" in case.groups))
    if not name or case.messy[name].dtype.kind not in "if":
        return None
    case.put(name, case.rows(), [np.inf, -np.inf, "inf", "Infinity"][case.draw.integers(4)])
    return "refused", re.escape(name)


def booleans(case: Case) -> End:
    """Truth values in other words."""
    if not (name := case.pick("bool")):
        return None
    pairs = [("no", "yes"), ("Nein", "ja"), ("FALSE", "TRUE"), ("F", "T"), ("n", "y"), (0, 1), ("0", "1")]
    pair = pairs[case.draw.integers(len(pairs))]
    case.messy[name] = [pair[value] for value in case.messy[name]]
    return "right", ""


def newline(case: Case) -> End:
    """A line that ends within a cell."""
    if not (name := case.pick("text", *["site"] * ("site" in case.groups))) or case.lines or case.write:
        return None
    case.messy[name] = [f"{text}\nN" for text in case.messy[name]]
    return "right", ""


def totals(case: Case) -> End:
    """The sums in a last row."""
    numbers = [name for name in case.messy if case.messy[name].dtype.kind in "if"]
    if len(numbers) < 2 or "constant" in case.ends:
        return None
    last = {name: case.messy[name].sum() if name in numbers else "Total" for name in case.messy}
    case.messy = pd.concat([case.messy, pd.DataFrame([last])], ignore_index=True)
    case.done |= set(case.messy)
    return "refused note", "otal|family"


def same_name(case: Case) -> End:
    """A column twice."""
    if not (name := case.pick("number", "text")):
        return None
    case.messy = pd.concat([case.messy, case.messy[[name]]], axis=1)
    case.done |= set(case.messy)
    return "refused", name


def odd_name(case: Case) -> End:
    """A name that a formula does not read as it is."""
    if not (name := case.pick("number", "text", "group", "bool")) or case.lines or case.names:
        return None
    case.names = {name: str(case.draw.choice(NAMES))}
    case.messy = case.messy.rename(columns=case.names)
    return "right", ""


def other_case(case: Case) -> End:
    """A name in the formula that the table has in another case."""
    if not (name := case.pick("number", "text")) or case.plain:
        return None
    case.messy = case.messy.rename(columns={name: name.title()})
    return "refused", name


def constant(case: Case) -> End:
    """A column of one value."""
    if not (name := case.pick("number", "text")):
        return None
    case.messy[name] = case.messy[name].iloc[0]
    return "refused note", f"{name}|no column differs"


def added(case: Case, name: str, values: Callable[[pd.DataFrame], Any]) -> None:
    """Put a column into both tables and the formula, behind the other columns of numbers and texts."""
    for frame in (case.messy, case.right):
        frame.insert(frame.columns.get_loc("result"), name, values(frame))
    case.columns["added"].append(name)
    before = sum(len(case.columns[kind]) for kind in ("number", "text", "bool", "added"))
    case.terms.insert(before - 1, name)


def copied(case: Case) -> End:
    """A column in another unit."""
    name = case.pick("number")
    if not name or name not in case.terms or f"{name}:" in case.formula(False):
        return None
    added(case, "copy", lambda frame: frame[name] * 2.54)
    return "right note", "copy"


def identifier(case: Case) -> End:
    """A column of numbers of rows."""
    added(case, "id", lambda frame: 100_001 + np.arange(len(frame)))
    return "note", "'id'"


def alone(case: Case) -> End:
    """A level, or a group, of one row."""
    if not (name := case.pick("text", "group")):
        return None
    for frame in (case.messy, case.right):
        frame[name] = frame[name].where(frame.index > 0, 999 if name == "rater" else "alone")
    return "right", ""


def separation(case: Case) -> End:
    """A column that separates two classes."""
    name = case.pick("number")
    if case.family != "bernoulli" or name not in case.terms or "result" in case.done:
        return None
    case.done.add("result")
    for frame in (case.messy, case.right):
        frame["result"] = np.where(frame[name] > frame[name].median(), "yes", "no")
    return "right note", f"{name}.*separat"


def outlier(case: Case) -> End:
    """A number far off, which is fitted as it is."""
    if not (name := case.pick("number")) or case.messy[name].dtype.kind not in "if":
        return None
    for frame in (case.messy, case.right):
        frame[name] = frame[name].where(frame.index > 0, 1_000_000)
    return "right", ""


def dates(case: Case) -> End:
    """Dates in the place of numbers."""
    if not (name := case.pick("number")):
        return None
    days = pd.date_range("2020-01-31", periods=len(case.messy), freq="31h")
    ways = ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%y", "%d %b %Y", "%Y-%m-%dT%H:%M:%SZ", "", "%H:%M", "%Y%m%d"]
    way = str(case.draw.choice(ways))
    case.messy[name] = days.strftime(way) if way else days
    return "refused note", name


def impossible(case: Case) -> End:
    """An outcome that the family cannot have."""
    values = {"bernoulli": "maybe", "poisson": -1, "negative_binomial": 2.5, "binomial": 13, "beta": 1, "gamma": 0}
    if case.family not in values or "result" in case.done:
        return None
    case.done.add("result")
    case.put("result", case.rows(), values[case.family])
    if case.family != "bernoulli":
        case.messy["result"] = case.messy["result"].astype(float)
    return "refused", "."


def no_exposure(case: Case) -> End:
    """An exposure of 0, whose logarithm is infinite."""
    if "days" not in case.messy or "days" in case.done:
        return None
    case.done.add("days")
    case.put("days", case.rows(), 0)
    case.messy["days"] = case.messy["days"].astype(int)
    return "refused", "days"


TABLES = {styled: STYLES, spelled: SPELLINGS, option: OPTIONS, of_lines: LINES, framed: FRAMES}
ALONE = (missing, code, one_text, infinite, booleans, newline, totals, same_name, odd_name, other_case, constant)
ALONE += (copied, identifier, alone, separation, outlier, dates, impossible, no_exposure)
MESSES: dict[str, Callable[[Case], End]] = {
    kind: functools.partial(make, kind=kind) for make, kinds in TABLES.items() for kind in kinds
} | {make.__name__.replace("_", " "): make for make in ALONE}


def made(seed: int) -> Case:
    """A messy table."""
    case = drawn(seed)
    count = case.draw.choice([1, 2, 3, 4], p=[0.5, 0.25, 0.15, 0.1])
    for kind in case.draw.permutation(list(MESSES)):
        if len(case.ends) == count or not case.messy.columns.is_unique:
            break
        trial = copy.deepcopy(case)
        if (end := MESSES[kind](trial)) is not None:
            case = trial
            case.ends[str(kind)] = end
    return case


# ------------------------------------------------------------------------------------ fits


class NoEnd(BaseException):
    """The time is over; no library catches it."""


def _alarm(*_: Any) -> None:
    raise NoEnd


def numbers(result: Any) -> Any:
    """Means and standard deviations of all parameters, a row each."""
    table = result.summary()
    blocks = [table.fixed, *(of.sd for of in table.random.values()), *([table.likelihood] if table.likelihood else [])]
    return torch.cat([torch.stack([block.mean, block.sd], 1) for block in blocks])


def said_by(result: Any) -> list[str]:
    """The remarks of a result, without those that each small table has."""
    return [text for text in result.remarks if not text.startswith(("The data hardly", "The standard deviation"))]


def fit_clean(case: Case) -> Any:
    """The expected numbers."""
    return numbers(regression(case.formula(False), case.right, case.family).fit(draws=400, seed=1, progress=False))


def fit_messy(case: Case) -> tuple[Any, str]:
    """The numbers of the fit of the messy table, by the command line or from a frame, and what was said."""
    if not case.file:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = regression(case.formula(True), case.messy, case.family)
            result = model.fit(draws=400, seed=1, progress=False)
        return numbers(result), "\n".join([*(str(one.message) for one in caught), *said_by(result)])
    options = {"index": False, **case.write}
    encoding = options.pop("encoding", "utf-8")
    lines = case.messy.to_csv(**options)
    for change in case.lines:
        lines = "\n".join(change(lines.splitlines())) + "\n"
    plain = all(sign.encode(encoding, "replace") != b"?" for sign in set(lines) - {"?"})
    Path("table.csv").write_bytes(lines.encode(encoding if plain else "utf-8"))
    words = ["fit", "--data", "table.csv", "--likelihood", case.family, "--draws", "400", "--seed", "1"]
    words += ["--test-fraction", "0", "--no-progress"]
    words += ["--target", "result"] if case.plain else [f"--formula={case.formula(True)}"]
    keys = {
        key: value for key, value in vars(parser().parse_args(words)).items() if key not in ("command", "overwrite")
    }
    shown: list[Any] = []
    show = fits.show
    with (
        mock.patch.object(fits, "show", lambda *given: (shown.append(given[0]), show(*given))),
        mock.patch.object(fits, "figure", return_value=Figure()),  # which takes longer than the fit
    ):
        result = fits.run(settings_from(keys)[0], True)
    return numbers(result), "\n".join([*shown[0].notes, *shown[0].warnings, *said_by(result)])


def judged(case: Case, expected: Any) -> tuple[str, str]:
    """What becomes of a case, and what was said."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        found, said = fit_messy(case)
    except TorchngviError as error:
        right = any("refused" in ends and re.search(words, str(error)) for ends, words in case.ends.values())
        return "raw" if "cannot be computed" in str(error) else "refused" if right else "needless", str(error)
    except NoEnd as error:
        return "slow", place(error)
    except Exception as error:
        return "raw", f"{place(error)} {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    noted = {name for name, (_, words) in case.ends.items() if words and re.search(words, said)}
    same = expected is not None and found.shape == expected.shape
    if same:
        scale = expected[:, 1:].clamp_min(1e-12)
        same = bool(((found - expected).abs() <= CLOSE * scale).all())
    open_to = {name for name, (ends, _) in case.ends.items() if "note" in ends.split()}
    needed = {name for name, (ends, _) in case.ends.items() if "right" not in ends.split()}
    if needed <= noted and (same or noted & open_to):
        return ("right" if same else "noted"), said
    return "silent", ("" if same else "another fit; ") + said


def place(error: BaseException) -> str:
    """The innermost line of the package that an error passed."""
    inside = [one for one in traceback.extract_tb(error.__traceback__) if f"{os.sep}torchngvi{os.sep}" in one.filename]
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno}" if inside else "outside"


def run(seed: int) -> dict[str, Any]:
    """Make, fit and judge one case."""
    case, begun = made(seed), time.process_time()
    quiet = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(quiet):
        with warnings.catch_warnings(), contextlib.suppress(TorchngviError):
            warnings.simplefilter("ignore")
            expected = None
            expected = fit_clean(case)
        word, said = judged(case, expected)
    door = "target" if case.plain else "file" if case.file else "frame"
    return {
        "seed": seed,
        "word": word,
        "messes": list(case.ends),
        "door": door,
        "family": case.family,
        "formula": case.formula(True),
        "said": said[:600],
        "seconds": round(time.process_time() - begun, 2),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=500)
    options.add_argument("--seed", type=int, default=0, help="the first; each case has its own")
    options.add_argument("--only", help="messes with this in their names, or the seed of a case")
    options.add_argument("--each", action="store_true", help="print every case")
    options.add_argument("--log", type=Path, help="a file of lines of JSON, from which an interrupted run goes on")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _alarm)
    lines = chosen.log.read_text().splitlines() if chosen.log and chosen.log.exists() else []
    known = {found["seed"]: found for found in map(json.loads, lines)}
    words, messes = collections.Counter(), collections.defaultdict(collections.Counter)
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        if chosen.only and (
            seed != int(chosen.only)
            if chosen.only.isdigit()
            else not any(chosen.only in name for name in made(seed).ends)
        ):
            continue
        found = known.get(seed) or run(seed)
        if chosen.log and seed not in known:
            with chosen.log.open("a") as file:
                file.write(json.dumps(found, ensure_ascii=False) + "\n")
        words[found["word"]] += 1
        for name in found["messes"]:
            messes[name][found["word"]] += 1
        if chosen.each or found["word"] in WRONG:
            print(" | ".join(str(value) for value in found.values()), flush=True)
    for name in sorted(messes):
        print(f"{name:28} {dict(messes[name])}")
    print(f"{sum(words.values())} cases: {dict(words)}")
    return int(any(words[word] for word in WRONG))


if __name__ == "__main__":
    sys.exit(main())
