"""Tables as people have them: each cell of a file is read right, or what is wrong is said; and files of every kind."""

import bz2
import datetime
import decimal
import gzip
import io
import lzma
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import dump_svmlight_file

from torchngvi.app import prepare
from torchngvi.app.prepare import BUNDLED, read_table
from torchngvi.app.settings import parser, settings_from
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.tables.design import Formula
from torchngvi.tables.families import family_of
from torchngvi.tables.model import regression

pytest.importorskip("formulae")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def clean(rows=80):
    """A regression of y on x and pay, with towns; pay is whole and large."""
    draw = np.random.default_rng(3)
    x, town = draw.normal(size=rows).round(2), draw.choice(["Aa", "Bb", "Cc"], rows)
    pay = np.where(draw.random(rows) < 0.2, draw.integers(400, 999, rows), draw.integers(1_000, 2_900_000, rows))
    y = (2 + x + (town == "Bb") + pay / 1e6 + 0.5 * draw.normal(size=rows)).round(3)
    return pd.DataFrame({"x": x, "town": town, "pay": pay, "y": y})


def by_command(name, *flags, target="y", family="gaussian", fitted=False):
    """The design that the command line makes of a file, as a frame, and its notes; or the sentence that refuses it."""
    words = ["fit", "--data", name, "--test-fraction", "0", *flags]
    words += [] if target is None or "--formula" in flags else ["--target", target]
    keys = {k: v for k, v in vars(parser().parse_args(words)).items() if k not in ("command", "overwrite")}
    settings, _ = settings_from(keys)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = prepare.of(read_table(settings.data), settings, family)
            model = torchngvi_model(made, settings, family)
            if fitted:
                model.fit(draws=400, progress=False)
        except InputError as error:
            return None, str(error)
    names = [made.columns.shown(name) for name in model.design.names]
    notes = [*made.notes, *(str(w.message) for w in caught)]
    return pd.DataFrame(model.design.X.numpy(), columns=names), " ".join(notes)


def torchngvi_model(made, settings, family):
    return regression(made.columns.formula, made.train, family, weights=settings.weights, positive=made.positive)


def of_table(table, *flags, **options):
    table.to_csv("a.csv", index=False, **options)
    return by_command("a.csv", *flags)


def by_formula(table, formula="y ~ x + town + pay + (1 | g)"):
    """The design of a table of Python by a formula with its notes, or the sentence that refuses it."""
    try:
        made = Formula(formula, table, family_of("gaussian"))
    except InputError as error:
        return None, str(error)
    return made.design.X.numpy(), " ".join(made.notes)


def grouped(table):
    return table.assign(g=np.arange(len(table)) % 8)


WRITTEN = {
    "thousands by commas": lambda v: f"{v:,}",
    "thousands by points": lambda v: f"{v:,}".replace(",", "."),
    "thousands by apostrophes": lambda v: f"{v:,}".replace(",", "'"),
    "thousands by narrow spaces": lambda v: f"{v:,}".replace(",", "\u202f"),
    "points and a decimal comma": lambda v: f"{v:,}".replace(",", ".") + ",0",
    "quotation marks": lambda v: f'="{v}"',
    "an apostrophe in front": lambda v: f"'{v}",
    "digits of full width": lambda v: f"{v}".translate({ord("0") + k: 0xFF10 + k for k in range(10)}),
    "lakhs": lambda v: f"{v:,}" if v < 1e5 else f"{v // 100_000},{v % 100_000 // 1000:02},{v % 1000:03}",
}


@pytest.mark.parametrize("how", WRITTEN)
def test_numbers_with_separators(how):
    """The design is that of the plain table, at every door, and what was read is said."""
    table = clean()
    written = table.assign(pay=[WRITTEN[how](int(v)) for v in table.pay])
    expected, _ = of_table(table)
    found, text = of_table(written)
    pd.testing.assert_frame_equal(found, expected)
    assert "column 'pay' was read as numbers: " in text
    right, text = by_formula(grouped(written))
    np.testing.assert_array_equal(right, by_formula(grouped(table))[0])
    assert "column 'pay' was read as numbers: " in text


def test_decimal_commas_in_a_file_of_semicolons():
    """Also where some columns have thousands too, and where all cells of one have three decimals."""
    table = clean()
    expected, _ = of_table(table)
    lines = ["x;town;pay;y"]
    for row in table.itertuples():
        pay = f"{row.pay:,}".replace(",", ".")
        lines.append(f"{str(row.x).replace('.', ',')};{row.town};{pay};{f'{row.y:.3f}'.replace('.', ',')}")
    Path("a.csv").write_text("\n".join(lines))
    found, text = by_command("a.csv")
    assert "the table was read as separated by semicolons, with decimal commas" in text
    pd.testing.assert_frame_equal(found, expected)


REFUSED = {
    "12%": (["12%", "7%", "9.5%", "30%"], "numbers with a unit, such as '12%'. Write the numbers alone"),
    "$12": (["$12", "$1,250", "$9", "$30"], "numbers with a unit, such as '$12'"),
    "12 kg": (["12 kg", "7 kg", "8.5 kg", "31 kg"], "numbers with a unit, such as '12 kg'"),
    "(1,250)": (["(1,250)", "(30)", "12", "9"], "numbers with a unit, such as '(1,250)'"),
    "?": (["?", "?", "?", "4.5"], "numbers except for 60 of 80 rows, the first '?'. Leave those cells empty"),
    "unknown": (["3", "1", "2", "unknown"], "numbers except for 20 of 80 rows, the first 'unknown'"),
    "2024-01-31": (["2024-01-31", "2024-02-01", "2023-12-24", "2022-01-01"], "dates or times such as '2024-01-31'"),
    "31.01.2024": (["31.01.2024", "01.02.2024", "24.12.2023", "1.1.2022"], "dates or times"),
    "31 Jan 2024": (["31 Jan 2024", "1 Feb 2024", "24 Dec 2023", "1 Jan 2022"], "dates or times"),
    "10:30": (["10:30", "9:15", "0:00", "1:01"], "dates or times"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_cells_that_are_refused(case):
    """Never categories in silence; a column that is named as one of categories is one."""
    cells, words = REFUSED[case]
    table = clean()
    bad = table.assign(pay=[cells[k % len(cells)] for k in range(len(table))])
    found, text = of_table(bad)
    assert found is None
    for word in (words, "--drop pay", "--categorical pay"):
        assert word in text
    found, _ = of_table(bad, "--categorical", "pay")
    assert len(set(cells)) - 1 == sum(name.startswith("pay=") for name in found)
    found, text = by_formula(grouped(bad))
    assert found is None
    assert words.split(",")[0].split(" such")[0].split(" except")[0] in text
    assert "write C(pay) for categories" in text
    assert by_formula(grouped(bad), "y ~ x + C(pay) + (1 | g)")[0].shape[1] == 1 + 1 + len(set(cells)) - 1


NOTED = {  # entries that a table may have, of which something should be said
    "case": (["Aa", "Bb", "AA"], "entries that differ only in case or spaces, 'Aa', 'AA', and are taken as different"),
    "missing": (["Aa", "Bb", "-"], "holds '-' in 26 of 80 rows, as missing entries are written"),
    "empty": (["Aa", "Bb", " n.a. "], "holds 'n.a.' in 26 of 80 rows, as missing entries are written"),
}


@pytest.mark.parametrize("case", NOTED)
def test_levels_that_are_noted(case):
    """As categories, as groups, and as an outcome of which one is named."""
    entries, words = NOTED[case]
    table = clean().assign(town=[entries[k % 3] for k in range(80)])
    by_formulas = (by_formula(table, f"y ~ x + {term}") for term in ("town", "(1 | town)", "C(town)"))
    assert all(words in text for _, text in (of_table(table), *by_formulas))
    made = Formula("town[Bb] ~ x", table, family_of("bernoulli"))
    assert words in " ".join(made.notes)
    for entries in (["Aa", "Bb"], ["-", "+"], ["*", "**"]):  # signs among signs stand for themselves
        assert not by_formula(clean().assign(town=entries * 40), "y ~ x + (1 | town)")[1]


def test_totals():
    """A last row of sums, by a word in it or by its numbers, is noted; a level of that name elsewhere is none."""
    table = clean()
    words = "last row looks like totals of those above"
    below = pd.concat([table, table.sum(numeric_only=True).to_frame().T.assign(town="Total")], ignore_index=True)
    assert words in of_table(below)[1]
    assert words in by_formula(below, "y ~ x")[1]
    assert words in by_formula(below.drop(columns="town"), "y ~ x")[1]
    gap = pd.array([*range(79), None], dtype="Int64")
    assert words not in by_formula(table.assign(town=["Total", "Bb"] * 40, gap=gap), "y ~ x + town")[1]
    below.to_csv("b.csv", index=False)
    assert by_command("b.csv", "--formula", "y ~ x + town")[1].count(words) == 1


def test_codes_of_missing_entries():
    table = clean().assign(x=lambda t: t.x.where(t.index != 7, -999), y=lambda t: t.y.where(t.index != 5, 9999))
    for text in (of_table(table)[1], by_formula(table, "y ~ x")[1]):
        assert "olumn 'x' holds -999 in 1 of 80 rows" in text
        assert "olumn 'y' holds 9999 in 1 of 80 rows" in text


@pytest.mark.parametrize("formula", ["y ~ center(x)", "y ~ bs(x, df=4) + town"])
def test_numbers_as_texts_within_a_call(formula):
    """Within a call of numbers they have no other meaning; in a comparison with a text they stay texts."""
    expected, _ = by_formula(clean(), formula)
    np.testing.assert_array_equal(by_formula(clean().assign(x=lambda t: t.x.astype(str)), formula)[0], expected)
    assert by_formula(clean().assign(x=["1", "2"] * 40), "y ~ I(x == '1')")[0][:, 1].sum() == 40


@pytest.mark.parametrize("kind", ["pyarrow", "object", "numpy_nullable"])
def test_other_dtypes(kind):
    pytest.importorskip("pyarrow")
    table = clean().assign(b=lambda t: t.x > 0, day=lambda t: t.pay % 7)
    other = table.astype(object) if kind == "object" else table.convert_dtypes(dtype_backend=kind)
    formula = "y ~ x + b + C(day) + center(pay) + offset(log(pay)) + (1 | town)"
    np.testing.assert_array_equal(by_formula(other, formula)[0], by_formula(table, formula)[0])
    other.loc[3, "x"] = pd.NA
    assert "The table misses values: 1 of x" in by_formula(other, formula)[1]
    other["x"] = [pd.NA, *(decimal.Decimal(f"{v}") for v in table.x[1:])]
    assert "The table misses values: 1 of x" in by_formula(other, formula)[1]


@pytest.mark.parametrize("formula", ["town ~ x", "town[1] ~ x", "y ~ x + (1 | town)", "y ~ C(town)"])
def test_infinite_categories(formula):
    table = clean().assign(town=lambda t: (t.index % 3).where(t.index != 7, np.inf))
    family = {"town ~ x": "ordinal", "town[1] ~ x": "bernoulli"}.get(formula, "gaussian")
    with pytest.raises(InputError, match="town.* is not finite in 1 of 80 rows, the first of them row 7"):
        Formula(formula, table, family_of(family))


@pytest.mark.parametrize(
    "cells",
    [
        ["18-24", "25-34", "35+", "65 and over"],
        ["1st", "2nd", "3rd", "1st"],
        ["Q1", "Q2", "Q3", "Q4"],
        ["A1", "B2", "100", "C"],
        ["<=50K", ">50K", "<=50K", ">50K"],
        ["1 star", "2 stars", "5 stars", "4 stars"],
        ["12a", "12b", "13a", "7c"],
    ],
    ids=lambda cells: cells[0],
)
def test_categories_stay_categories(cells):
    table = clean()
    found, _ = of_table(table.assign(pay=[cells[k % len(cells)] for k in range(len(table))]))
    assert sum(name.startswith("pay=") for name in found) == len(set(cells)) - 1


def test_all_faults_at_once():
    table = clean().assign(day="2024-01-31", dose=[f"{k} mg" for k in range(80)], gap=np.nan, odd=["?", *range(79)])
    table["note"] = [f"note {'abcdefghij'[k % 10]}{k}" for k in range(80)]
    _, text = of_table(table)
    assert "the table has 5 faults:\n  1. column 'day'" in text
    for part in (
        "column 'dose' holds numbers with a unit",
        "column 'odd' is numbers except for 1 of 80 rows",
        "column 'gap' has missing or infinite entries in 80 of 80 rows",
        "text column 'note' has 80 different values",
    ):
        assert part in text
    table.to_csv("a.csv", index=False)
    _, text = by_command("a.csv", "--formula", "y ~ x + day + dose + odd + note + (1 | town)")
    assert "the table has 4 faults" in text


@pytest.mark.parametrize("header", ["x,town,y,x", "x,town,y,y", "x,town,y, x"])
def test_duplicate_names(header):
    Path("a.csv").write_text(f"{header}\n" + "".join(f"{k},A,{k % 3},{k * k}\n" for k in range(20)))
    for flags in ((), ("--formula", "y ~ x + (1 | town)")):
        found, text = by_command("a.csv", *flags)
        assert found is None
        assert f"two columns of the table are named '{header[-1]}'" in text
    frame = pd.DataFrame(np.ones((20, 3)), columns=["x", "x", "y"]).assign(g=list("ab") * 10)
    assert "two columns of the table are named 'x'" in by_formula(frame, "y ~ x + (1 | g)")[1]


def test_shifted_rows():
    Path("a.csv").write_text("y,x\n" + "".join(f"{k}.2,0.{k},{k * 7 % 5}\n" for k in range(10, 40)))
    for flags in ((), ("--formula", "y ~ x + (1 | x)")):
        found, text = by_command("a.csv", *flags)
        assert found is None
        assert "has 2 names, and its rows have 3 fields. Give every field a name" in text


def test_a_separator_at_the_end_of_every_row():
    """Nothing is lost of it, with a name in the first line or without."""
    expected, _ = of_table(clean())
    lines = clean().to_csv(index=False).splitlines()
    for first in (lines[0], f"{lines[0]},"):
        Path("a.csv").write_text("\n".join([first, *(f"{line}," for line in lines[1:])]))
        pd.testing.assert_frame_equal(by_command("a.csv")[0], expected)


@pytest.mark.parametrize("names", [False, True], ids=["numbers", "names"])
def test_row_numbers_of_to_csv(names):
    table = clean()
    expected, _ = of_table(table)
    rows = table.set_axis([f"row {k}" for k in range(len(table))]) if names else table
    rows.to_csv("a.csv")
    found, text = by_command("a.csv")
    what = "names the rows" if names else "numbers the rows"
    assert f"the column without a name in place 1 was left out, which {what}" in text
    pd.testing.assert_frame_equal(found, expected)
    pd.read_csv("a.csv").to_csv("b.csv")  # written twice
    pd.testing.assert_frame_equal(by_command("b.csv")[0], expected)


WARDS = [1150000000000000101, 1150000000000000399, 1150000000000001200, 1150000000000002300]


@pytest.mark.parametrize("gap", [False, True], ids=["whole", "with a missing entry"])
def test_wards_of_nineteen_digits(gap):
    """Four wards whose numbers agree to 15 digits stay four."""
    ids = pd.array([WARDS[k % 4] for k in range(80)], dtype="Int64")
    table = clean().drop(columns=["town", "pay"]).assign(ward=ids)
    if gap:
        table.loc[5, "ward"] = pd.NA
    found, _ = of_table(table, "--categorical", "ward", *(("--impute", "median") if gap else ()))
    assert list(found)[2:] == [f"ward={w}" for w in WARDS[1:]]
    counts = found[f"ward={WARDS[1]}"].sum()
    assert counts == 20 - (gap and 5 % 4 == 1)


def test_large_measurements_with_a_gap_stay_numbers():
    Path("a.csv").write_text("x,y\n1.5e17,1\n,2\n2e17,3\n")
    assert read_table("a.csv").frame["x"].dropna().tolist() == [1.5e17, 2e17]


def test_identifiers_are_noted():
    table = clean().assign(policy=range(100_000, 100_080), id=range(1, 81), code=np.arange(80) % 7)
    _, text = of_table(table.drop(columns="pay"))
    for name in ("policy", "id"):
        assert f"column '{name}' is a whole number that differs in every row, as identifiers do" in text
    assert "column 'code'" not in text
    assert "column 'policy' is a whole number" in by_formula(grouped(table), "y ~ x + policy + (1 | g)")[1]
    days = table[["x", "y"]].assign(day=[20200131 + 100 * (k % 9) - 3 for k in range(80)])
    for text in (of_table(days)[1], by_formula(days.assign(day=days.day.astype(str)), "y ~ center(day)")[1]):
        assert "olumn 'day' reads as dates, such as 20200128, and is taken as a measurement" in text
    gaps = days.assign(day=days.day.astype("Int64").where(days.index > 0))
    assert "The table misses values: 1 of day" in by_formula(gaps, "y ~ day")[1]
    assert "column 'id' is a whole number" in by_formula(table.astype(object), "y ~ x + id")[1]
    zips = table[["x", "y"]].assign(zip=[f"{k % 9:05d}" for k in range(80)])
    assert "column 'zip' has entries that a zero leads, as codes have" in of_table(zips)[1]


def test_an_exposure_without_its_logarithm():
    draw = np.random.default_rng(5)
    time, x = draw.uniform(1, 60, 160).round(2), draw.normal(size=160)
    table = pd.DataFrame({"x": x, "time": time, "y": draw.poisson(time * np.exp(-1 + 0.4 * x))})
    table.to_csv("a.csv", index=False)
    for flags in (("--offset", "time"), ("--formula", "y ~ x + offset(time)")):
        assert "Did you mean offset(log(time))?" in by_command("a.csv", *flags, family="poisson")[1]
    assert "Did you mean" not in by_command("a.csv", "--formula", "y ~ x + offset(log(time))", family="poisson")[1]


def test_copies_are_named():
    table = clean().assign(double=lambda t: 2 * t.x + 1)
    table["sum"] = table.x - 3 * table.pay + 5
    words = "olumn double is x in other units, a multiple of it plus a constant"
    for name, said in {"sum": words, "double": "olumn sum is a sum of multiples of x, pay and a constant"}.items():
        table.drop(columns=name).to_csv("a.csv", index=False)
        assert said in by_command("a.csv", fitted=True)[1]
    clean().to_csv("a.csv", index=False)
    assert "in other units" not in by_command("a.csv", fitted=True)[1]


def test_the_separator_line_of_excel():
    expected, _ = of_table(clean())
    Path("a.csv").write_text("sep=;\n" + clean().to_csv(index=False, sep=";"))
    pd.testing.assert_frame_equal(by_command("a.csv")[0], expected)


def test_namibia():
    table = clean().assign(town=["DE", "FR", "NA", "ZA"] * 20)
    found, _ = of_table(table)
    assert [name for name in found if name.startswith("town=")] == ["town=FR", "town=NA", "town=ZA"]
    gap = table.assign(town=["Köln", "Wien", None, "Rom"] * 20)
    _, text = of_table(gap, na_rep="NA")  # as R writes missing entries
    assert "column 'town' has missing or infinite entries in 20 of 80 rows" in text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig", "latin-1", "mac_roman"])
def test_encodings(encoding):
    table = clean().replace({"town": {"Aa": "Ems", "Bb": "Köln", "Cc": "Münster"}})
    expected, _ = of_table(table)
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    Path("a.csv").write_bytes((mark + table.to_csv(index=False)).encode(encoding))
    found, text = by_command("a.csv")
    said = {"utf-16": "in UTF-16", "utf-16-le": "in UTF-16", "utf-8-sig": "", "latin-1": "in Latin-1"}
    assert said.get(encoding, "in Mac Roman: if it is that, save the table in UTF-8") in text
    assert ("Mac Roman" in text) == (encoding == "mac_roman")
    np.testing.assert_array_equal(found.to_numpy(), expected.to_numpy())
    assert list(found) == list(expected) or encoding == "mac_roman"


def test_latin_letters_beyond_the_first_lines():
    lines = ["x,town,y"] + [f"{k},A,1" for k in range(9000)] + ["1,K\xf6ln,2"]
    Path("a.csv").write_bytes("\n".join(lines).encode("latin-1"))
    found = read_table("a.csv")
    assert found.frame.town.iloc[-1] == "Köln"
    assert found.notes == ("the table was read as in Latin-1 (Windows-1252)",)


DIALECTS = {
    "semicolons": ({"sep": ";"}, "separated by semicolons"),
    "decimal commas": ({"sep": ";", "decimal": ","}, "separated by semicolons, with decimal commas"),
    "tabs, decimal commas": ({"sep": "\t", "decimal": ","}, "separated by tabs, with decimal commas"),
    "bars": ({"sep": "|"}, "separated by bars"),
    "quoted": ({"quoting": 1}, None),
    "lines of Windows": ({"lineterminator": "\r\n"}, None),
}


@pytest.mark.parametrize("case", DIALECTS)
def test_dialects(case):
    options, note = DIALECTS[case]
    table = clean().drop(columns="pay")
    expected = of_table(table)[0]
    table.to_csv("b.csv", index=False, **options)
    pd.testing.assert_frame_equal(by_command("b.csv")[0], expected)
    assert read_table("b.csv").notes == (() if note is None else (f"the table was read as {note}",))


def zipped(content):
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("a.csv", content)
        archive.writestr("__MACOSX/._a.csv", "junk")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("end", "pack"),
    [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zip", zipped), ("zst", None)],
)
def test_compressed(end, pack, monkeypatch):
    expected, _ = of_table(clean())
    content = clean().to_csv(index=False).encode("utf-16")
    if end == "zst":
        Path("a.csv.zst").write_bytes(content)
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "zstandard", None)
            assert "'a.csv.zst' needs zstandard: pip install zstandard. Or unpack it." in by_command("a.csv.zst")[1]
    pack = pack or pytest.importorskip("zstandard").ZstdCompressor().compress
    Path(f"a.csv.{end}").write_bytes(pack(content))
    found, text = by_command(f"a.csv.{end}")
    pd.testing.assert_frame_equal(found, expected)
    assert "in UTF-16" in text
    Path(f"b.csv.{end}").write_bytes(b"nothing of the kind")
    assert f"'b.csv.{end}' cannot be read as a table" in by_command(f"b.csv.{end}")[1]


def test_parquet():
    pytest.importorskip("pyarrow")
    table = clean()
    expected, _ = of_table(table)
    count = pd.array([1, 3, 1, None] * 20, dtype="Int64")
    exact = table.assign(x=[decimal.Decimal(str(v)) for v in table.x])
    exact.assign(count=count, truth=[True, False] * 40).to_parquet("a.parquet")
    found, text = by_command("a.parquet", "--drop", "count", "truth")
    pd.testing.assert_frame_equal(found, expected)
    assert by_command("a.parquet", "--impute", "median")[0]["count"].tolist() == [1.0, 3.0, 1.0, 1.0] * 20
    Path("b.parquet").write_text("junk")
    assert "'b.parquet' cannot be read as a parquet file: " in by_command("b.parquet")[1]


def test_excel(monkeypatch):
    Path("a.xlsx").write_bytes(b"junk")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "openpyxl", None)
        assert "'a.xlsx' needs openpyxl: pip install openpyxl. Or save it as csv." in by_command("a.xlsx")[1]
    pytest.importorskip("openpyxl")
    assert "'a.xlsx' cannot be read as an Excel file: " in by_command("a.xlsx")[1]
    expected, _ = of_table(clean())
    with pd.ExcelWriter("a.xlsx") as book:
        clean().to_excel(book, index=False, sheet_name="first")
        clean().to_excel(book, sheet_name="second")
    found, text = by_command("a.xlsx")
    pd.testing.assert_frame_equal(found, expected)
    assert "the first of 2 sheets was read, 'first'" in text
    clean().to_excel("b.xlsx")
    pd.testing.assert_frame_equal(by_command("b.xlsx")[0], expected)
    clean().set_axis(["x", "x", "pay", "y"], axis=1).to_excel("c.xlsx", index=False)
    assert "two columns of the table are named 'x'" in by_command("c.xlsx")[1]


def test_svmlight():
    X, y = np.array([[1.0, 0.0, 2.5], [0.0, 3.0, 0.0]]), [3.0, 1.0]
    for name in ("a.svm", "a.libsvm", "a.txt"):
        dump_svmlight_file(X, y, name, zero_based=False)
        found = read_table(name).frame
        np.testing.assert_array_equal(found[["x1", "x2", "x3"]], X)
        assert found.target.tolist() == y
    Path("b.svm.gz").write_bytes(gzip.compress(Path("a.svm").read_bytes()))
    assert read_table("b.svm.gz").frame.shape == (2, 4)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled(name):
    frame = read_table(name).frame
    assert (
        frame.shape
        == {
            "breast_cancer": (569, 31),
            "diabetes": (442, 11),
            "digits": (1797, 65),
            "iris": (150, 5),
            "wine": (178, 14),
        }[name]
    )
    if name == "breast_cancer":
        assert frame.target.cat.categories.tolist() == ["malignant", "benign"]


BAD_FILES = {
    "empty csv": ("a.csv", "", (), "is empty: a table needs a line of column names"),
    "empty zip": (
        "a.csv.zip",
        b"PK\x05\x06" + bytes(18),
        (),
        "'a.csv.zip' holds 0 files. Put the table alone into it.",
    ),
    "binary csv": ("a.csv", b"PK\x03\x04\0\0\0\0", (), "is no table of text: it holds binary data"),
    "no text at all": ("a.csv", b"a,y\n\x81\x8d,1\n", (), "is no table of text in UTF-8 or Latin-1"),
    "no header": (
        "b.csv",
        "1;2,5\n3;4,5\n",
        (),
        "has no line of column names: its first line is '1;2,5'. Put a line in front with one name for each of the 2 "
        "columns, such as x1;x2.",
    ),
    "ragged csv": ("a.csv", "a,y\n1,2\n1,2,3\n", (), "cannot be read as a table: Error tokenizing data"),
    "a comment": (
        "a.csv",
        "# by, hand\na,b,y\n1,2,3\n2,1,4\n",
        (),
        "the first line of 'a.csv' is '# by, hand', and not",
    ),
    "a title": ("a.csv", "Table 1\na,y\n1,2\n2,1\n", (), "the first line of 'a.csv' is 'Table 1', and not the names"),
    "no rows": ("a.csv", "a,y\n", (), "has column names and no rows"),
    "wrong target": ("a.csv", "age,Y2\n1,2\n", (), "target column 'y' is not in the data. Did you mean 'Y2'?"),
    "wrong weights": ("a.csv", "a,y\n1,2\n", ("--weights", "w"), "weights column 'w' is not in the data."),
    "wrong drop": ("a.csv", "a,y\n1,2\n", ("--drop", "b"), "drop column 'b' is not in the data."),
    "commas for spaces": (
        "a.csv",
        "a,b,c,y\n1,2,3,4\n",
        ("--drop", "a,b"),
        "drop column 'a,b' is not in the data. Separate them by spaces, --drop a b.",
    ),
    "nothing left": ("a.csv", "a,y\n1,2\n", ("--drop", "a"), "no column is left to predict 'y' from"),
    "text weights": (
        "a.csv",
        "a,w,y\n1,x,2\n",
        ("--weights", "w"),
        "weights column 'w' must hold numbers; got texts such as 'x'",
    ),
    "missing": (
        "a.csv",
        "a,b,y\n1,,2\n,,3\n3,1,4\n",
        (),
        "column 'b' has missing or infinite entries in 2 of 3 rows (and 1 of 'a'). Fill them in (--impute median), "
        "drop those rows, or leave the column out (--drop b).",
    ),
    "too many categories": (
        "a.csv",
        "Customer ID,y\n" + "".join(f"{i},{i}\n" for i in range(60)),
        ("--categorical", "Customer ID"),
        "column 'Customer ID' has 60 different values, more than the 50 of a category at most. Leave it out (--drop "
        "'Customer ID'), or model it as groups that are alike, --formula \"... + (1 | Customer ID)\".",
    ),
    "names": (
        "a.csv",
        "id,y\n" + "".join(f"P{i},{i}\n" for i in range(60)),
        (),
        "text column 'id' has 60 different values, more than 50: it looks like names or dates",
    ),
    "long ids": (
        "a.csv",
        "id,y\n" + "".join(f"{10**25 + i},{i}\n" for i in range(60)),
        (),
        "text column 'id' has 60 different values, more than 50: it looks like names or dates",
    ),
    "infinite": ("a.csv", "a,y\ninf,1\n2,2\n", (), "column 'a' has missing or infinite entries in 1 of 2 rows"),
    "infinite target": (
        "a.csv",
        "a,y\n1,inf\n2,2\n",
        (),
        "in 1 of 2 rows. Drop or impute those rows, or name another column (--target).",
    ),
    "huge": ("a.csv", "a,y\n1e150,1\n2,2\n", (), "by a constant, or leave the column out (--drop a)."),
    "svmlight junk": ("a.svm", "a,b,c\n1,2,3\n", (), "cannot be read as a svmlight file, lines such as"),
    "svmlight empty": ("a.svm", "", (), "no rows: a data set needs at least two"),
    "svmlight bare": ("a.svm", "1\n0\n", (), "has targets and no features"),
    "npz": ("a.npz", b"junk", (), "numpy.savez files are read in Python"),
    "unknown ending": ("a.doc", "junk", (), "cannot tell the format of 'a.doc' from its ending; known are .csv"),
    "a backtick": ("a.csv", "a`b,y\n1,2\n2,1\n", (), "column 'a`b' has a backtick in its name"),
}


@pytest.mark.parametrize("case", BAD_FILES, ids=str)
def test_bad_files(case):
    name, content, flags, message = BAD_FILES[case]
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found, text = by_command(name, *flags)
    assert found is None
    assert message in text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("brest_cancer", "'brest_cancer' is neither a file nor a bundled set. Did you mean 'breast_cancer'?"),
        ("nowhere/there.csv", "there is no data file 'nowhere/there.csv' (looked for /"),
        ("day_*.parquet", "rows of several files, or in batches, are fitted in Python: see torchngvi.models.Streamed"),
        (".", "data must be a file; '.' is a folder"),
    ],
)
def test_no_such_data(data, message):
    assert message in by_command(data)[1]


def test_missing_entries():
    """Of numbers medians of the training rows, of categories the commonest; a column without entries is refused."""
    table = clean().drop(columns="pay")
    table.loc[:4, "town"] = None
    table.loc[:9, "x"] = None
    assert "column 'x' has missing or infinite entries in 10 of 80 rows (and 5 of 'town')" in of_table(table)[1]
    found, text = of_table(table, "--impute", "median")
    usual = table.town.value_counts().index[0]
    assert f"5 missing entries of town became '{usual}', its commonest level" in text
    assert "10 missing entries were filled in with medians of the training rows" in text
    assert (found.x[:10] == table.x.median()).all()
    _, text = of_table(table.assign(x=np.nan).rename(columns={"x": "income, €/Yr"}))  # no median to fill in
    assert "in 80 of 80 rows (and 5 of 'town'). Leave the column out (--drop 'income, €/Yr')." in text


def test_dates_of_python():
    day = [datetime.date(2024, 1, 1) + datetime.timedelta(days=k) for k in range(80)]
    for column in (day, pd.to_datetime(day)):
        _, text = by_formula(grouped(clean().assign(x=column)))
        assert "column 'x' holds dates or times" in text
        assert "dt.days" in text


@pytest.mark.parametrize("first", [0, pytest.param(20, marks=pytest.mark.accuracy)])
def test_messy_tables(first, monkeypatch):
    """Of generated messy tables each is fitted right, refused in a sentence, or noted."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    messy = pytest.importorskip("benchmarks.messy_tables")  # which a wheel has not
    found = [messy.run(seed) for seed in range(first, first + 20)]
    assert not [one for one in found if one["word"] in messy.WRONG]
    assert {"right", "refused"} <= {one["word"] for one in found}


@pytest.mark.accuracy
def test_new_rows_are_read_as_those_of_the_fit():
    table = clean()
    table.to_csv("a.csv", index=False)
    assert main(["fit", "--data", "a.csv", "--target", "y", "--likelihood", "gaussian", "--no-progress"]) == 0
    table.to_csv("plain.csv", index=False)
    table.assign(pay=[f"{v:,}" for v in table.pay]).to_csv("written.csv", index=False)
    ends = ["plain.csv", "written.csv"]
    Path("packed.csv.gz").write_bytes(gzip.compress(table.to_csv(index=False, sep=";", decimal=",").encode("utf-16")))
    ends.append("packed.csv.gz")
    try:
        table.to_parquet("columns.parquet")
        ends.append("columns.parquet")
        table.to_excel("book.xlsx")
        ends.append("book.xlsx")
    except ImportError:
        pass
    for name in ends:
        assert main(["predict", "runs/a", name, "--out", f"{name}.out"]) == 0
        pd.testing.assert_frame_equal(pd.read_csv("plain.csv.out"), pd.read_csv(f"{name}.out"))
