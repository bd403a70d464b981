"""Tables as people have them, through every door: each cell is read right, or what is wrong is said."""

import datetime
import decimal
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import torchngvi
from torchngvi.adapters.sklearn import (
    BayesianLinearRegression,
    BayesianLogisticRegression,
    BayesianMixedRegressor,
    BayesianPoissonRegression,
)
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.messages import shown

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


COMMON = ("--likelihood", "gaussian", "--no-progress", "--test-fraction", "0", "--overwrite")


def fit(name, *flags, target="y", common=COMMON):
    return main(["fit", "--data", name, *(("--target", target) if target else ()), *common, *flags])


def coefficients(name="a"):
    table = pd.read_csv(f"runs/{name}/coefficients.csv").set_index("name")
    return table["mean"]


def said(capsys):
    """Both streams, without the lines of the box and in one line."""
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).replace("│", " ").split())


def by_command(table, capsys, *flags, **options):
    """The coefficients of a table by the command line, or the sentence that refuses it."""
    table.to_csv("a.csv", index=False, **options)
    code = fit("a.csv", *flags)
    text = said(capsys)
    return (coefficients() if code == 0 else None), text


def by_formula(table, formula="y ~ x + town + pay + (1 | g)", family="gaussian", fitted=False):
    """The design of a table by a formula with its warnings, or the sentence that refuses it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = torchngvi.mixed(formula, table, family)
            if fitted:
                model.fit(progress=False, draws=100)
        except InputError as error:
            return None, " ".join([str(error), *(str(warning.message) for warning in caught)])
    return model.formula.rows.X, " ".join(str(warning.message) for warning in caught)


def by_estimator(table, kind=BayesianLinearRegression):
    """The coefficients of the columns of a table by an estimator with its warnings, or the sentence that refuses it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = kind().fit(table.drop(columns="y"), table["y"])
        except ValueError as error:
            return None, str(error)
    return model.coef_, " ".join(str(warning.message) for warning in caught)


def grouped(table):
    return table.assign(g=np.arange(len(table)) % 8)


# ------------------------------------------------------------------------------------ 1: numbers in texts

WRITTEN = {
    "thousands by commas": lambda v: f"{v:,}",
    "thousands by points": lambda v: f"{v:,}".replace(",", "."),
    "thousands by apostrophes": lambda v: f"{v:,}".replace(",", "'"),
    "thousands by spaces": lambda v: f"{v:,}".replace(",", " "),
    "thousands by narrow spaces": lambda v: f"{v:,}".replace(",", "\u202f"),
    "points and a decimal comma": lambda v: f"{v:,}".replace(",", ".") + ",0",
    "lakhs": lambda v: f"{v:,}" if v < 1e5 else f"{v // 100_000},{v % 100_000 // 1000:02},{v % 1000:03}",
}


@pytest.mark.accuracy
@pytest.mark.parametrize("how", WRITTEN)
def test_numbers_with_separators(how, capsys):
    """The coefficients are those of the plain table, at every door, and what was read is said."""
    table = clean()
    written = table.assign(pay=[WRITTEN[how](int(v)) for v in table.pay])
    expected, _ = by_command(table, capsys)
    found, text = by_command(written, capsys)
    pd.testing.assert_series_equal(found, expected, rtol=1e-10)
    assert "column 'pay' was read as numbers: " in text
    right, text = by_formula(grouped(written))
    np.testing.assert_array_equal(right, by_formula(grouped(table))[0])
    assert "Column 'pay' was read as numbers: " in text
    right, text = by_estimator(written.drop(columns="town"))
    np.testing.assert_allclose(right, by_estimator(table.drop(columns="town"))[0], rtol=1e-12)
    assert "Column 'pay' was read as numbers: " in text


def test_decimal_commas_in_a_file_of_semicolons(capsys):
    """Also where some columns have thousands too, and where all cells of one have three decimals."""
    table = clean()
    expected, _ = by_command(table, capsys)
    lines = ["x;town;pay;y"]
    for row in table.itertuples():
        pay = f"{row.pay:,}".replace(",", ".")
        lines.append(f"{row.x};{row.town};{pay};{row.y:.3f}".replace(f"{row.x};", f"{row.x};".replace(".", ",")))
    text = "\n".join(lines)
    Path("a.csv").write_text(re.sub(r";(-?\d+)\.(\d{3})$", r";\1,\2", text, flags=re.MULTILINE))
    assert fit("a.csv") == 0
    assert "with decimal commas" in said(capsys)
    pd.testing.assert_series_equal(coefficients(), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["12%", "7%", "9.5%", "30%"], ["numbers with a unit", "'12%'", "write the numbers alone"]),
        (["$12", "$1,250", "$9", "$30"], ["numbers with a unit", "'$12'"]),
        (["12 kg", "7 kg", "8.5 kg", "31 kg"], ["numbers with a unit", "'12 kg'"]),
        (["(1,250)", "(30)", "12", "9"], ["numbers with a unit", "'(1,250)'"]),
        (["?", "?", "?", "4.5"], ["numbers except for", "'?'", "leave those cells empty"]),
        (["3", "1", "2", "unknown"], ["numbers except for", "'unknown'"]),
        (
            ["2024-01-31", "2024-02-01", "2023-12-24", "2022-01-01"],
            ["dates or times", "'2024-01-31'", "number of days"],
        ),
        (["31.01.2024", "01.02.2024", "24.12.2023", "1.1.2022"], ["dates or times"]),
        (["2024-01-31 10:30", "2024-02-01 9:15", "2023-12-24 0:00", "2022-01-01 1:01"], ["dates or times"]),
        (["31 Jan 2024", "1 Feb 2024", "24 Dec 2023", "1 Jan 2022"], ["dates or times"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and len(value) > 3 else "",
)
def test_cells_that_are_refused(cells, words, capsys):
    """Never categories in silence; a column that is named as one of categories is one."""
    table = clean()
    bad = table.assign(pay=[cells[k % len(cells)] for k in range(len(table))])
    found, text = by_command(bad, capsys)
    assert found is None
    for word in (*words, "--drop pay", "--categorical pay"):
        assert word.lower() in text.lower()
    found, _ = by_command(bad, capsys, "--categorical", "pay")
    assert f"pay={cells[0]}" in found.index or f"pay={cells[1]}" in found.index
    for found, text in (by_formula(grouped(bad)), by_estimator(bad.drop(columns="town"))):
        assert found is None
        assert "pay" in text
        for word in words[:1]:
            assert word in text
    assert "write C(pay) for categories" in by_formula(grouped(bad))[1]
    assert by_formula(grouped(bad), "y ~ x + C(pay) + (1 | g)")[0].shape[1] == 1 + 1 + len(set(cells)) - 1


@pytest.mark.accuracy
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
def test_categories_stay_categories(cells, capsys):
    table = clean()
    found, _ = by_command(table.assign(pay=[cells[k % len(cells)] for k in range(len(table))]), capsys)
    assert sum(name.startswith("pay=") for name in found.index) == len(set(cells)) - 1


def test_all_faults_at_once(capsys):
    table = clean().assign(day="2024-01-31", dose="5 mg", gap=np.nan, odd=["?", *range(79)], note=range(80))
    table["dose"] = [f"{k} mg" for k in range(80)]
    table["note"] = [f"note {'abcdefghij'[k % 10]}{k}" for k in range(80)]
    _, text = by_command(table, capsys)
    assert "the table has 5 faults: 1. column 'day'" in text
    for part in ("column 'dose' holds numbers with a unit", "column 'odd' is numbers except for 1 of 80 rows"):
        assert part in text
    assert "column 'gap' has missing or infinite entries in 80 of 80 rows" in text
    assert "text column 'note' has 80 different values" in text
    _, text = by_formula(grouped(table), "y ~ x + day + dose + gap + odd + note + (1 | g)")
    assert "the table has 5 faults" in text
    _, text = by_estimator(table[["x", "day", "dose", "odd", "town", "y"]])
    assert "the table has 4 faults" in text


# ------------------------------------------------------------------------------------ 2: names


def test_duplicate_names(capsys):
    for header in ("x,town,y,x", "x,town,y,y", "x,town,y, x"):
        Path("a.csv").write_text(f"{header}\n" + "".join(f"{k},A,{k % 3},{k * k}\n" for k in range(20)))
        assert fit("a.csv") == 2
        assert f"two columns of the table are named '{header[-1]}'" in said(capsys)
        assert fit("a.csv", "--formula", "y ~ x + (1 | town)", target=None) == 2
        assert "Rename one of them." in said(capsys)
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 3)), columns=["x", "x", "y"]).assign(
        g=list("ab") * 10
    )
    assert "two columns of the table are named 'x'" in by_formula(frame, "y ~ x + (1 | g)")[1]
    assert "two columns of X are named 'x'" in by_estimator(frame.drop(columns="g"))[1]
    with pytest.raises(InputError, match="two columns of X are named 'x'"):
        BayesianMixedRegressor("g").fit(frame.drop(columns="y"), frame.y)


# ------------------------------------------------------------------------------------ 3: shifted rows


def test_shifted_rows(capsys):
    Path("a.csv").write_text("y,x\n" + "".join(f"{k}.2,0.{k},{k * 7 % 5}\n" for k in range(10, 40)))
    for flags in ((), ("--formula", "y ~ x + (1 | x)")):
        assert fit("a.csv", *flags, target=None if flags else "y") == 2
        text = said(capsys)
        assert "has 2 names, and its rows have 3 fields" in text
        assert "Give every field a name" in text
    assert fit("a.csv", "--batch-rows", "10", "--noise", "1") == 2
    assert "has 2 names, and its rows have 3 fields" in said(capsys)


def test_a_separator_at_the_end_of_every_row(capsys):
    """Nothing is lost of it, with a name in the first line or without."""
    table = clean()
    expected, _ = by_command(table, capsys)
    lines = table.to_csv(index=False).splitlines()
    for first in (lines[0], f"{lines[0]},"):
        Path("a.csv").write_text("\n".join([first, *(f"{line}," for line in lines[1:])]))
        assert fit("a.csv") == 0
        pd.testing.assert_series_equal(coefficients(), expected, rtol=1e-10)


@pytest.mark.accuracy
@pytest.mark.parametrize("names", [False, True], ids=["numbers", "names"])
def test_row_numbers_of_to_csv(names, capsys):
    table = clean()
    expected, _ = by_command(table, capsys)
    rows = table.set_axis([f"row {k}" for k in range(len(table))]) if names else table
    rows.to_csv("a.csv")
    assert fit("a.csv") == 0
    what = "names the rows" if names else "numbers the rows"
    assert f"the column without a name in place 1 was left out, which {what}" in said(capsys)
    pd.testing.assert_series_equal(coefficients(), expected, rtol=1e-10)
    pd.read_csv("a.csv").to_csv("b.csv")  # written twice
    assert fit("b.csv") == 0
    pd.testing.assert_series_equal(coefficients("b"), expected, rtol=1e-10)
    rows.drop(columns="y").to_csv("new.csv")
    assert main(["predict", "runs/a", "new.csv"]) == 0
    twice = pd.read_csv("a.csv") if not names else table.assign(**{"Unnamed: 0": range(len(table))})
    assert "'Unnamed: 0' had no name" in by_estimator(twice.drop(columns="town"))[1]


# ------------------------------------------------------------------------------------ 4, 5: identifiers


WARDS = [1150000000000000101, 1150000000000000399, 1150000000000001200, 1150000000000002300]


@pytest.mark.parametrize("gap", [False, True], ids=["whole", "with a missing entry"])
def test_wards_of_nineteen_digits(gap, capsys):
    """Four wards whose log odds are up to 4 apart stay four."""
    draw = np.random.default_rng(0)
    ward = draw.integers(0, 4, 400)
    x = draw.normal(size=400)
    y = draw.random(400) < 1 / (1 + np.exp(-(x + np.array([-2.0, 2.0, 0.0, 1.0])[ward])))
    ids = pd.array([WARDS[k] for k in ward], dtype="Int64")
    table = pd.DataFrame({"x": x, "ward": ids, "y": y.astype(int)})
    if gap:
        table.loc[5, "ward"] = pd.NA
    table.to_csv("a.csv", index=False)
    flags = ("--categorical", "ward", *(("--impute", "median") if gap else ()))
    assert fit("a.csv", *flags, common=("--no-progress", "--test-fraction", "0")) == 0
    found = coefficients()
    assert [name for name in found.index if name.startswith("ward=")] == [f"ward={w}" for w in WARDS[1:]]
    np.testing.assert_allclose(found[[f"ward={w}" for w in WARDS[1:]]], [4, 2, 3], atol=1.0)


def test_identifiers_are_noted(capsys):
    table = clean().assign(policy=range(100_000, 100_080), id=range(1, 81), code=np.arange(80) % 7)
    _, text = by_command(table.drop(columns="pay"), capsys)
    for name in ("policy", "id"):
        assert f"column '{name}' is a whole number that differs in every row, as identifiers do" in text
    assert "column 'code'" not in text
    _, text = by_formula(grouped(table), "y ~ x + policy + (1 | g)")
    assert "Column 'policy' is a whole number that differs in every row" in text
    _, text = by_estimator(table.drop(columns=["town", "pay"]))
    assert "Column 'policy' is a whole number that differs in every row" in text
    zips = table[["x", "y"]].assign(zip=[f"{k % 9:05d}" for k in range(80)])
    _, text = by_command(zips, capsys)
    assert "column 'zip' has entries that a zero leads, as codes have" in text
    assert fit("a.csv", "--formula", "y ~ x + zip", target=None) == 0
    assert "column 'zip' has entries that a zero leads, as codes have" in said(capsys)


# ------------------------------------------------------------------------------------ 6, 7: counts


def exposed(rows=160):
    draw = np.random.default_rng(5)
    time, x, g = draw.uniform(1, 60, rows), draw.normal(size=rows), np.arange(rows) % 8
    y = draw.poisson(time * np.exp(-1 + 0.4 * x + 0.3 * draw.normal(size=8)[g]))
    return pd.DataFrame({"x": x, "time": time.round(2), "g": g, "y": y})


@pytest.mark.accuracy
def test_an_exposure_without_its_logarithm(capsys):
    table = exposed()
    question = "Did you mean offset(log(time))?"
    assert question in by_formula(table, "y ~ x + offset(time) + (1 | g)", "poisson", fitted=True)[1]
    assert question not in by_formula(table, "y ~ x + offset(log(time)) + (1 | g)", "poisson")[1]
    table.to_csv("a.csv", index=False)
    counts = ("--likelihood", "poisson", "--no-progress", "--test-fraction", "0", "--overwrite")
    fit("a.csv", "--formula", "y ~ x + offset(time) + (1 | g)", target=None, common=counts[:3])
    assert question in said(capsys)
    fit("a.csv", "--formula", "y ~ x + offset(time)", target=None, common=counts)
    assert "Did you mean the logarithm of time?" in said(capsys)
    fit("a.csv", "--offset", "time", "--drop", "g", common=counts)
    assert "Did you mean the logarithm of time?" in said(capsys)
    table.assign(time=np.log(table.time)).to_csv("a.csv", index=False)
    assert fit("a.csv", "--offset", "time", "--drop", "g", common=counts) == 0
    assert "Did you mean" not in said(capsys)


@pytest.mark.parametrize("log", [18, 22, 28])
def test_large_counts_converge(log, capsys):
    """The end test is relative to what the rounding of the ELBO leaves."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=200)
    y = draw.poisson(np.exp(log + 0.3 * x))
    model = BayesianPoissonRegression().fit(x[:, None], y)
    assert model.converged_
    assert model.n_iter_ < 50
    np.testing.assert_allclose([model.intercept_, model.coef_[0]], [log, 0.3], atol=1e-4)
    pd.DataFrame({"x": x, "y": y}).to_csv("a.csv", index=False)
    assert fit("a.csv", common=("--likelihood", "poisson", "--no-progress", "--test-fraction", "0")) == 0
    np.testing.assert_allclose(coefficients(), [log, 0.3], atol=1e-4)


def test_the_end_at_rounding_is_said_and_is_the_optimum():
    draw = np.random.default_rng(0)
    X = np.column_stack([np.ones(200), draw.normal(size=200)])
    y = draw.poisson(np.exp(18 + 0.3 * X[:, 1])).astype(float)
    model = torchngvi.GeneralizedLinear(torch.tensor(X), y, "poisson_log", prior_precision=1.0)
    q = torchngvi.CholeskyGaussian(2, dtype=torch.float64)
    result = torchngvi.fit(q, model, progress=False, tolerance=1e-8, examine=False)
    assert result.converged
    assert "the least that the rounding of the ELBO allows" in result.reason
    theta = q.mean.clone()
    for _ in range(3):  # Newton's method for the mode, which is that of q to e^(-18)
        rate = (model.X @ theta).exp()
        hessian = model.X.mT * rate @ model.X + torch.eye(2, dtype=torch.float64)
        theta = theta - torch.linalg.solve(hessian, model.X.mT @ (rate - model.y) + theta)
    assert ((theta - q.mean) / q.stddev).abs().max() < 1e-3


# ------------------------------------------------------------------------------------ 8: copies


@pytest.mark.accuracy
def test_copies_are_named(capsys):
    table = clean().assign(double=lambda t: 2 * t.x + 1)
    table["sum"] = table.x - 3 * table.pay + 5
    words = "column double is x in other units, a multiple of it plus a constant"
    _, text = by_command(table.drop(columns="sum"), capsys)
    assert words in text
    _, text = by_command(table.drop(columns="double"), capsys)
    assert "column sum is a sum of multiples of x, pay and a constant" in text
    _, text = by_command(clean(), capsys)
    assert "in other units" not in text
    formula = "y ~ x + double + (1 | g)"
    assert f"C{words[1:]}" in by_formula(grouped(table), formula, fitted=True)[1]
    table.to_csv("a.csv", index=False)
    assert fit("a.csv", "--formula", "y ~ x + pay + sum", target=None) == 0
    assert "column sum is a sum of multiples" in said(capsys)
    bare = table.drop(columns=["town", "sum"])
    assert f"C{words[1:]}" in by_estimator(bare)[1]
    classes = bare.assign(y=np.where(bare.y > bare.y.median(), "high", "low"))
    assert f"C{words[1:]}" in by_estimator(classes, BayesianLogisticRegression)[1]
    with pytest.warns(UserWarning, match=re.escape(f"C{words[1:]}")):
        BayesianMixedRegressor("g", draws=100).fit(grouped(bare).drop(columns="y"), bare.y)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (lambda x: 0 * x + 3, "Column 2 is the same in all rows, as 0 is"),
        (lambda x: 0 * x, "Column 2 is the same in all rows, as 0 is"),
        (lambda x: 2 * x + 1, "Column 2 is 1 in other units, a multiple of it plus a constant"),
    ],
)
def test_columns_of_arrays_that_say_nothing(column, words):
    """Columns are centred and scaled before they are looked at, so that one that is the same in all rows is 0 there."""
    rng, ones = np.random.default_rng(0), np.ones(60)
    x, y = rng.normal(size=60), rng.poisson(2.0, size=60)
    model = torchngvi.MixedModel(np.stack([ones, x, column(x)], 1), y, (ones[:, None], np.arange(60) // 6), "poisson")
    with pytest.warns(UserWarning, match=words):
        model.fit(progress=False, draws=400)


def test_groups_that_are_fixed_effects_too():
    table = grouped(clean())
    said = "is both a fixed effect and a grouping factor"
    for formula in ("y ~ C(g) + (1 | g)", "y ~ x + town + (1 | town)", "y ~ x + C(g) + (1 + x | g)"):
        assert said in by_formula(table, formula)[1]
    for formula in ("y ~ x + (1 | g)", "y ~ g + (1 | g)", "y ~ C(g) + (0 + x | g)"):
        assert said not in by_formula(table, formula)[1]


# ------------------------------------------------------------------------------------ 9: files


def test_the_separator_line_of_excel(capsys):
    table = clean()
    expected, _ = by_command(table, capsys)
    Path("a.csv").write_text("sep=;\n" + table.to_csv(index=False, sep=";"))
    assert fit("a.csv") == 0
    pd.testing.assert_series_equal(coefficients(), expected, rtol=1e-10)


def test_namibia(capsys):
    table = clean().assign(town=["DE", "FR", "NA", "ZA"] * 20)
    found, _ = by_command(table, capsys)
    assert [name for name in found.index if name.startswith("town=")] == ["town=FR", "town=NA", "town=ZA"]
    gap = table.assign(town=["Köln", "Wien", None, "Rom"] * 20)
    _, text = by_command(gap, capsys, na_rep="NA")  # as R writes missing entries
    assert "column 'town' has missing or infinite entries in 20 of 80 rows" in text


@pytest.mark.accuracy
@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "latin-1", "mac_roman"])
def test_encodings(encoding, capsys):
    table = clean().replace({"town": {"Aa": "Ems", "Bb": "Köln", "Cc": "Münster"}})
    expected, _ = by_command(table, capsys)
    table.to_csv("a.csv", index=False, encoding=encoding)
    assert fit("a.csv") == 0
    text = said(capsys)
    np.testing.assert_allclose(
        np.sort(coefficients()), np.sort(expected), atol=1.0 if encoding == "mac_roman" else 1e-9
    )
    assert {"utf-16": "in UTF-16", "utf-8-sig": "", "latin-1": "in Latin-1"}.get(encoding, "in Mac Roman") in text
    assert ("Mac Roman" in text) == (encoding == "mac_roman")
    if encoding == "mac_roman":
        assert "'Köln'" in text or "'Münster'" in text


def test_decimals(capsys):
    """Numbers of the decimal module, of databases and Parquet files, are numbers."""
    table = clean()
    exact = table.assign(x=[decimal.Decimal(str(v)) for v in table.x])
    right, text = by_formula(grouped(exact))
    np.testing.assert_array_equal(right, by_formula(grouped(table))[0])
    assert "column 'x'" not in text.lower()
    np.testing.assert_allclose(
        by_estimator(exact.drop(columns="town"))[0], by_estimator(table.drop(columns="town"))[0], rtol=1e-12
    )
    pytest.importorskip("pyarrow")
    expected, _ = by_command(table, capsys)
    exact.to_parquet("a.parquet")
    assert fit("a.parquet") == 0
    pd.testing.assert_series_equal(coefficients(), expected, rtol=1e-10)


def test_dates_of_python():
    day = [datetime.date(2024, 1, 1) + datetime.timedelta(days=k) for k in range(80)]
    for column in (day, pd.to_datetime(day)):
        table = clean().assign(x=column)
        for _, text in (by_formula(grouped(table)), by_estimator(table.drop(columns="town"))):
            assert "column 'x' holds dates or times" in text
            assert "dt.days" in text


def test_texts_of_numbers_in_python():
    """Few of them are categories, as ``astype(str)`` makes them, which is said."""
    table = clean().assign(pay=lambda t: (np.arange(len(t)) % 5).astype(str))
    X, text = by_formula(grouped(table))
    assert X.shape[1] == 1 + 1 + 2 + 4
    assert "Column 'pay' holds numbers as texts" in text
    assert "astype(float)" in text


def test_new_rows_are_read_as_those_of_the_fit(capsys):
    table = clean()
    table.to_csv("a.csv", index=False)
    assert fit("a.csv") == 0
    table.to_csv("plain.csv", index=False)
    table.assign(pay=[f"{v:,}" for v in table.pay]).to_csv("written.csv", index=False)
    for name in ("plain", "written"):
        assert main(["predict", "runs/a", f"{name}.csv", "--out", f"{name}.out.csv"]) == 0
    pd.testing.assert_frame_equal(pd.read_csv("plain.out.csv"), pd.read_csv("written.out.csv"))
    result = torchngvi.mixed("y ~ x + pay + (1 | g)", grouped(table)).fit(progress=False, draws=100)
    written = grouped(table).assign(pay=[f"{v:,}" for v in table.pay])
    assert torch.equal(result.predict(written).mean, result.predict(grouped(table)).mean)
    with pytest.raises(InputError, match="'12 kg'"):
        result.predict(grouped(table).assign(pay="12 kg"))


# ------------------------------------------------------------------------------------ what is printed


def test_three_significant_digits(capsys):
    assert [shown(v) for v in (9.66e-4, 1.47e-4, 0.0, -0.01234567, 3.21e-9, 123456.7)] == [
        "0.000966",
        "0.000147",
        "0",
        "-0.01235",
        "3.21e-09",
        "123457",
    ]
    table = clean().assign(pay=lambda t: t.pay * 1000)
    found, text = by_command(table.drop(columns=["x", "town"]), capsys)
    row = re.search(r" pay (\S+) (\S+) (\S+) (\S+) ", text)
    for printed, exact in zip(row.groups(), json_row("pay"), strict=True):
        assert float(printed) == pytest.approx(exact, rel=5e-3)
    assert found["pay"] < 1e-6
    result = torchngvi.mixed("y ~ pay + (1 | g)", grouped(table)).fit(progress=False, draws=100)
    row, fixed = re.search(r"\n  pay +(\S+) +(\S+) ", str(result)), result.summary().fixed
    for printed, exact in zip(row.groups(), (fixed.mean[1], fixed.sd[1]), strict=True):
        assert float(printed) == pytest.approx(float(exact), rel=5e-3)


def json_row(name):
    table = pd.read_csv("runs/a/coefficients.csv").set_index("name").loc[name]
    return table[["mean", "sd", "low", "high"]].tolist()


def test_success_is_said_first_and_chosen(capsys):
    table = clean().assign(y=lambda t: np.where(t.y > t.y.median(), "ja", "nein"))
    flags = ("--no-progress", "--test-fraction", "0", "--overwrite")
    table.to_csv("a.csv", index=False)
    assert fit("a.csv", common=flags) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "Predicted is 'nein' against 'ja', the class that sorts last; --positive ja predicts the other."
    of_no = coefficients()
    assert fit("a.csv", "--positive", "ja", common=flags) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Predicted is 'ja' against 'nein'."
    np.testing.assert_allclose(coefficients(), -of_no, atol=1e-6)
    assert json.loads(Path("runs/a/summary.json").read_text())["classes"] == {"failure": "nein", "success": "ja"}


def test_models_are_alike_within_four_nats_and_two_standard_errors():
    """A difference of 2.1 with a standard error of 0.7 is none that chance makes; of a nested model of noise it is."""
    draw = np.random.default_rng(1)
    X = np.column_stack([np.ones(120), draw.normal(size=(120, 2))])
    fits = {}
    for name, columns, y in (("one", 2, 0.2), ("noise", 3, 0.2), ("far", 1, 0.2)):
        model = torchngvi.GeneralizedLinear(torch.tensor(X[:, :columns]), X[:, 1] * y + draw_of_noise(), "gaussian")
        q = torchngvi.CholeskyGaussian(columns, dtype=torch.float64)
        fits[name] = torchngvi.fit(q, model, progress=False)
    found = torchngvi.compare_models(fits)
    lines = str(found).splitlines()[1 + len(fits) :]
    alike = [
        name
        for name, behind, error in zip(found.names, found.elpd_diff.tolist(), found.dse.tolist(), strict=True)
        if behind < 4 and behind <= 2 * error
    ][1:]
    assert alike == [name for name in found.names[1:] if lines and name in lines[0].partition(" as well as ")[0]]
    assert lines[0].endswith("as far as these rows can tell: less than 4 nats and 2 standard errors behind.")


def draw_of_noise():
    return np.random.default_rng(2).normal(size=120)


# ------------------------------------------------------------------------------------ messy tables, one fault each


def plant(kind, table, draw):
    """A clean table with one fault, as text of a file and as a frame, and whether it can be read right."""
    column = draw.choice(["pay", "x"]) if kind in ("unit", "dates", "unknown", "placeholders") else "pay"
    decimals = ["x", "y"]
    frame, text = table.copy(), None
    rows = draw.choice(len(table), draw.integers(1, 5), replace=False)
    if kind == "thousands":
        mark = str(draw.choice([",", "'", " ", "\u00a0", "\u202f", "’"]))
        frame[column] = [f"{v:,}".replace(",", mark) for v in table[column]]
    elif kind == "european":
        frame[decimals] = table[decimals].map(lambda v: f"{v}".replace(".", ","))
        frame[column] = [f"{v:,}".replace(",", ".") for v in table[column]]
        text = frame.to_csv(index=False, sep=str(draw.choice([";", "\t"])))
    elif kind == "minus":
        frame["x"] = [f"{v}".replace("-", "−") for v in table.x]
    elif kind == "unit":
        units = ["{} kg", "{}%", "${}", "€{}", "{} km/h", "{} years", "{}mg", "EUR {}"]
        unit = str(draw.choice(units))
        frame[column] = [unit.format(v) for v in table[column]]
    elif kind == "dates":
        pattern = str(
            draw.choice(["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%d %H:%M", "%d %b %Y", "%H:%M:%S", "%Y/%m"])
        )
        frame[column] = [
            (datetime.datetime(2020, 1, 1) + k * datetime.timedelta(hours=31)).strftime(pattern) for k in range(80)
        ]
    elif kind == "unknown":
        frame[column] = table[column].astype(object)
        frame.loc[rows, column] = str(draw.choice(["?", "unknown", "n.a.", "see note", "<5", "-", "."]))
    elif kind == "placeholders":
        frame[column] = table[column].astype(object)
        frame.loc[draw.choice(80, 60, replace=False), column] = str(draw.choice(["?", "-", "*", "missing"]))
    elif kind == "missing":
        frame.loc[rows, column] = np.nan
    elif kind == "copied name":
        frame = frame.set_axis([*table.columns[:-1], "y"], axis=1).assign(other=table.pay)
        frame.columns = [*table.columns, str(draw.choice(["x", "pay", "y", "town"]))]
    elif kind == "shifted":
        lines = table.to_csv().splitlines()
        text = "\n".join([lines[0].lstrip(","), *lines[1:]])
    elif kind == "row numbers":
        text = table.set_axis(table.index + int(draw.integers(2))).to_csv()
        frame = None
    elif kind == "trailing":
        text = "\n".join(f"{line}," for line in table.to_csv(index=False).splitlines())
        frame = None
    elif kind == "excel":
        text = "sep=|\n" + table.to_csv(index=False, sep="|")
        frame = None
    elif kind == "copy":
        frame["more"] = draw.normal() * table[column] + draw.normal()
    elif kind == "identifier":
        frame["key"] = draw.permutation(80) + int(10 ** draw.integers(0, 9))
    elif kind == "infinite":
        frame["x"] = table.x.where(~table.index.isin(rows), np.inf)
    elif kind == "spaces":
        frame["town"] = [f"{' ' * draw.integers(3)}{v}{' ' * draw.integers(3)}" for v in table.town]
    elif kind == "quoted":
        text, frame = table.to_csv(index=False, quoting=1), None
    elif kind == "no names":
        text, frame = table.drop(columns="town").to_csv(index=False, header=False), None
    elif kind == "constant":
        frame["same"] = 7
    return frame, text


RIGHT = {"thousands", "european", "minus", "row numbers", "trailing", "excel", "spaces", "quoted"}
WORDS = {  # of what is said, where the coefficients are not those of the clean table
    "unit": "numbers with a unit",
    "dates": "dates or times",
    "unknown": "is numbers except for",
    "placeholders": "is numbers except for",
    "missing": "missing|misses values|NaN",
    "copied name": "two columns",
    "shifted": "has 4 names, and its rows have 5 fields",
    "copy": "in other units",
    "identifier": "differs in every row, as identifiers do",
    "infinite": "missing or infinite|not finite|infinity",
    "no names": "has no line of column names",
    "constant": "the same in all|7 in all 80 rows",
}
KINDS = sorted(RIGHT | set(WORDS))


def check_planted(number, capsys):
    """Right or said, through each door that the fault comes to."""
    draw = np.random.default_rng(number)
    table = clean()
    kind = KINDS[number % len(KINDS)]
    frame, text = plant(kind, table, draw)
    expected, _ = by_command(table, capsys)
    Path("a.csv").write_text(text if text is not None else frame.to_csv(index=False), encoding="utf-8")
    code = fit("a.csv")
    out = said(capsys)
    if kind in RIGHT:
        assert code == 0, out
        pd.testing.assert_series_equal(coefficients(), expected, rtol=1e-8)
    else:
        assert re.search(WORDS[kind], out), out
    Path("b.csv").write_text(Path("a.csv").read_text(encoding="utf-8"), encoding="utf-8")
    names = ["x", "town", "pay", *(name for name in ("more", "key", "same") if frame is not None and name in frame)]
    code = main(["fit", "--data", "b.csv", "--formula", f"y ~ {' + '.join(names)}", *COMMON])
    out = said(capsys)
    if kind not in RIGHT:
        assert re.search(WORDS[kind], out), out
    else:
        pd.testing.assert_series_equal(coefficients("b"), expected, rtol=1e-8)
    if frame is None or kind == "shifted":
        return
    formula = f"y ~ {' + '.join(names)} + (1 | g)"
    X, out = by_formula(frame.assign(g=np.arange(80) % 8), formula, fitted=kind == "copy")
    if kind in RIGHT:
        right, _ = by_formula(grouped(table))
        np.testing.assert_allclose(X[:, : right.shape[1]], right, rtol=1e-12)
    else:
        assert re.search(WORDS[kind], out), out
    X, out = by_estimator(frame.drop(columns="town").assign(**({"y": table.y} if kind == "european" else {})))
    if kind in RIGHT:
        np.testing.assert_allclose(X, by_estimator(table.drop(columns="town"))[0], rtol=1e-10)
    else:
        assert re.search(WORDS[kind].replace("7 in all", "x"), out, re.IGNORECASE), out


@pytest.mark.accuracy
@pytest.mark.parametrize("number", range(30))
def test_messy_tables(number, capsys):
    check_planted(number, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30, 140))
def test_more_messy_tables(number, capsys):
    check_planted(number, capsys)
