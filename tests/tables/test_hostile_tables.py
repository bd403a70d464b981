"""Tables as they come: each ends in a fit, or in one sentence with nothing written."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import train_test_split

from torchngvi.app import memory
from torchngvi.app.tables import read_table
from torchngvi.cli import main
from torchngvi.extras import install


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(rows=60):
    stream = np.random.default_rng(0)
    x, town = stream.normal(size=rows).round(3), stream.choice(["Århus", "Köln"], rows)
    return pd.DataFrame({"x": x, "town": town, "y": np.where(x + stream.normal(size=rows) > 0, "ja", "nein")})


def fit(name, *flags):
    return main(["fit", "--data", name, "--target", "y", "--no-progress", "--test-fraction", "0", *flags])


DIALECTS = {
    "semicolons": ({"sep": ";"}, "separated by semicolons"),
    "decimal commas": ({"sep": ";", "decimal": ","}, "separated by semicolons, with decimal commas"),
    "tabs, decimal commas": ({"sep": "\t", "decimal": ","}, "separated by tabs, with decimal commas"),
    "bars": ({"sep": "|"}, "separated by bars"),
    "Latin-1": ({"encoding": "latin-1"}, "in Latin-1 (Windows-1252)"),
    "a mark in front": ({"encoding": "utf-8-sig"}, None),
    "quoted": ({"quoting": 1}, None),
    "lines of Windows": ({"lineterminator": "\r\n"}, None),
}


@pytest.mark.parametrize("case", DIALECTS)
def test_dialects(case):
    """The same design however the table is written, and what is unusual is noted."""
    options, note = DIALECTS[case]
    table().to_csv("a.csv", index=False)
    table().to_csv("b.csv", index=False, **options)
    plain, other = (read_table(name, target="y") for name in ("a.csv", "b.csv"))
    assert other.names == plain.names == ("x", "town=Århus" if "town=Århus" in plain.names else "town=Köln")
    np.testing.assert_array_equal(other.X, plain.X)
    assert other.notes == (() if note is None else (f"the table was read as {note}",))


def test_latin_letters_beyond_the_first_lines():
    """The encoding is found though the first lines are plain."""
    lines = ["x,town,y"] + [f"{k},A,ja" for k in range(9000)] + ["1,K\xf6ln,nein"]
    Path("a.csv").write_bytes("\n".join(lines).encode("latin-1"))
    found = read_table("a.csv", target="y")
    assert found.names == ("x", "town=Köln")
    assert found.notes == ("the table was read as in Latin-1 (Windows-1252)",)


def test_commas_in_quotes_and_a_ragged_line():
    Path("a.csv").write_text('x,town,y\n1,"A, B",ja\n2,C,nein\n3,C,ja\n')
    assert read_table("a.csv", target="y").names == ("x", "town=C")
    Path("b.csv").write_text("x,y\n1,ja\n2,nein,5\n")
    assert fit("b.csv") == 2


def test_parquet(capsys):
    pytest.importorskip("pyarrow")
    frame = table().assign(count=pd.array([1, None] * 30, dtype="Int64"), truth=[True, False] * 30)
    frame.to_parquet("a.parquet")
    found = read_table("a.parquet", target="y", impute=True)
    assert found.names[:3] == ("x", "count", "truth")
    assert np.isnan(found.X[:, 1]).sum() == 30
    assert fit("a.parquet", "--impute", "median") == 0
    frame.drop(columns="y").to_parquet("new.parquet")
    assert main(["predict", "runs/a", "new.parquet"]) == 0
    Path("b.parquet").write_text("junk")
    assert fit("b.parquet") == 2
    assert "'b.parquet' cannot be read as a parquet file (" in capsys.readouterr().err


def test_missing_entries(capsys):
    """Of numbers medians of the training rows, of categories the commonest; a column without entries is refused."""
    frame = table()
    frame.loc[:4, "town"] = None
    frame.loc[:9, "x"] = None
    frame.to_csv("a.csv", index=False)
    assert fit("a.csv") == 2
    assert "column 'x' has missing or infinite entries in 10 of 60 rows (and 5 of 'town')" in (capsys.readouterr().err)
    assert fit("a.csv", "--impute", "median") == 0
    said = " ".join(capsys.readouterr().out.split())
    usual = frame.town.value_counts().index[0]
    assert f"5 missing entries of town became '{usual}', its commonest level" in said
    assert "10 missing entries were filled in with medians of the training rows" in said
    frame.assign(x=np.nan).to_csv("b.csv", index=False)
    assert fit("b.csv", "--impute", "median") == 2
    told = "column 'x' has missing or infinite entries in 60 of 60 rows. Leave the column out (--drop x)."
    assert told in capsys.readouterr().err
    frame.assign(x=np.nan).rename(columns={"x": "income, €/Yr"}).to_csv("c.csv", index=False)
    assert fit("c.csv") == 2  # without the advice to fill in what has no median
    told = "in 60 of 60 rows (and 5 of 'town'). Leave the column out (--drop 'income, €/Yr')."
    assert told in capsys.readouterr().err


def test_a_column_that_only_rows_held_out_have(capsys):
    frame = table()
    held_out = next(s for s in range(50) if 0 in train_test_split(np.arange(60), test_size=0.02, random_state=s)[1])
    frame.assign(x=[1.0] + [None] * 59).to_csv("a.csv", index=False)
    assert fit("a.csv", "--impute", "median", "--test-fraction", "0.02", "--seed", str(held_out)) == 2
    assert "column 'x' has no entry in the 58 training rows. Leave it out (--drop x)." in capsys.readouterr().err


def test_parquet_without_its_package(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    Path("a.parquet").touch()
    assert fit("a.parquet") == 2
    assert f"pyarrow is not installed, and this command needs it: {install('parquet')}." in capsys.readouterr().err


def test_formulas_in_cells():
    """They are texts as others, and no file of results has a cell that a spreadsheet would evaluate."""
    frame = table().assign(note=["=1+1", "@x", "-a"] * 20, y=["=1+1", "=2+2"] * 30).rename(columns={"x": "=cmd()"})
    frame.to_csv("a.csv", index=False)
    assert fit("a.csv") == 0
    assert main(["predict", "runs/a", "a.csv"]) == 0
    for path in (Path("runs/a/coefficients.csv"), Path("runs/a/predictions-a.csv")):
        cells = [cell for line in path.read_text().splitlines()[1:] for cell in line.split(",")]
        assert not [cell for cell in cells if cell[:1] in "=+@" and cell]
    assert "'=cmd()" in Path("runs/a/coefficients.csv").read_text()
    assert pd.read_csv("runs/a/predictions-a.csv")["class"].str.startswith("'=").all()


def test_entries_of_1e308(capsys):
    table().assign(x=[1e308, -1e308] * 30).to_csv("a.csv", index=False)
    assert fit("a.csv") == 2
    assert "column 'x' has entries of size 1e+308; sums of squares overflow" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_no_header(capsys):
    Path("a.csv").write_text("1.5,0\n2.5,1\n3.5,0\n")
    assert fit("a.csv") == 2
    assert (
        "'a.csv' has no line of column names: its first line is '1.5,0'. Put a line in front" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_200_000_rows(tmp_path):
    stream = np.random.default_rng(0)
    x = stream.normal(size=(200_000, 4))
    y = stream.random(200_000) < 1 / (1 + np.exp(-x[:, 0]))
    pd.DataFrame(x, columns=list("abcd")).assign(y=y.astype(int)).to_csv("a.csv", index=False)
    assert fit("a.csv") == 0
    assert main(["predict", "runs/a", "a.csv"]) == 0
    found = pd.read_csv("runs/a/predictions-a.csv")
    assert len(found) == 200_000
    assert abs(found.probability.mean() - y.mean()) < 1e-3


def wide(rows=20, columns=20_000):
    x = np.random.default_rng(0).normal(size=(rows, columns)).round(2)
    frame = pd.DataFrame(x, columns=[f"x{k}" for k in range(columns)])
    frame.assign(y=np.arange(rows) % 2).to_csv("a.csv", index=False)


@pytest.mark.accuracy
def test_columns_of_a_full_covariance(monkeypatch, capsys):
    """Refused where it would not fit into memory, before it is read into a design."""
    wide(rows=3, columns=5000)
    monkeypatch.setattr(memory, "available", lambda: 6e9)
    assert fit("a.csv") == 2
    error = capsys.readouterr().err
    assert "3 rows of 5000 columns, takes about" in error
    assert "Use posterior diagonal" in error


@pytest.mark.slow
def test_20_000_columns_of_independent_coefficients(capsys):
    wide()
    assert fit("a.csv", "--posterior", "diagonal", "--prior-precision", "100") == 0
    assert "60 of 20001 coefficients, clearest signs" in capsys.readouterr().out
