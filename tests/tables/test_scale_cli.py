"""The command line on files of rows in batches: the same answers as on a table in memory, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import torchngvi
from torchngvi import GeneralizedLinear, NaturalGaussian, fit
from torchngvi.cli import main

N = 600


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table():
    g = np.random.default_rng(0)
    X = 2 * g.standard_normal((N, 3)) + [1, 0, -5]
    colour = g.choice(["red", "blue", "green"], N)
    eta = X @ [0.5, -0.5, 0.2] + 1.0 + (colour == "red")
    return pd.DataFrame(X, columns=list("abc")).assign(
        colour=colour,
        one=1.0,
        click=np.where(g.random(N) < 1 / (1 + np.exp(-eta)), "yes", "no"),
        count=g.poisson(np.exp(0.1 * X[:, 0])),
        w=g.random(N),
        o=0.1 * g.standard_normal(N),
    )


def run(*flags):
    return main(["fit", "--no-progress", *map(str, flags)])


def summary(folder):
    return json.loads(Path(folder, "summary.json").read_text())


def coefficients(folder):
    return pd.read_csv(Path(folder, "coefficients.csv")).set_index("name")


def assert_same_answers(left, right):
    left, right = coefficients(left), coefficients(right)
    assert list(left.index) == list(right.index)
    np.testing.assert_allclose(left.to_numpy(), right.to_numpy(), atol=1e-6)


@pytest.mark.accuracy
@pytest.mark.parametrize("family", ["bernoulli_logit", "poisson_log", "gaussian"])
def test_all_rows_in_batches_are_a_table_in_memory(family, capsys):
    """Texts, standard deviations, the prior, weights and offsets are those of all rows; files are read one by one."""
    frame = table()
    frame.to_csv("all.csv", index=False)
    frame[:250].to_csv("day_1.csv", index=False)
    frame[250:].to_csv("day_2.csv", index=False)
    target, other = ("click", "count") if family == "bernoulli_logit" else ("count", "click")
    flags = ["--target", target, "--drop", other, "--family", family, "--test-fraction", 0, "--weights", "w"]
    flags += ["--offset", "o", *(["--noise", 1.5] if family == "gaussian" else []), "--tolerance", 1e-8]
    assert run("--data", "all.csv", "--out", "whole", *flags) == 0
    assert run("--data", "day_*.csv", "--out", "parts", "--batch-rows", 100, *flags) == 0
    assert_same_answers("parts", "whole")
    one, two = summary("whole"), summary("parts")
    assert two["elbo"] == pytest.approx(one["elbo"], rel=1e-9)
    assert two["prior_precision"] == pytest.approx(one["prior_precision"])
    for name in ("classes", "intercept_sd", "baselines", "noise", "notes", "warnings", "tolerance"):
        assert two[name] == (pytest.approx(one[name]) if name == "intercept_sd" else one[name]), name
    assert two["training_rows"] == N
    assert {path.name for path in Path("parts").iterdir()} == {
        "manifest.json",
        "posterior.pt",
        "coefficients.csv",
        "trace.csv",
        "summary.json",
        "config.toml",
        "fit.png",
    }
    said = capsys.readouterr().out
    assert "passes over the rows" in said
    for label in ("priors  ", "baselines  ", "per unit  ", "  per sd "):
        assert said.count(label) == 2, label
    new = frame.head(20)
    left, right = (torchngvi.load(folder).predict(new.drop(columns=other)) for folder in ("whole", "parts"))
    pd.testing.assert_frame_equal(left, right, atol=1e-6)
    saved = [torch.load(f"{folder}/posterior.pt", weights_only=True) for folder in ("whole", "parts")]
    torch.testing.assert_close(saved[0]["center"], saved[1]["center"])
    torch.testing.assert_close(saved[0]["scale"], saved[1]["scale"])


@pytest.mark.accuracy
def test_parquet_and_rows_held_out():
    pytest.importorskip("pyarrow")
    frame = table()
    frame[:300].to_parquet("day_1.parquet")
    frame[300:].to_parquet("day_2.parquet")
    frame.to_csv("all.csv", index=False)
    flags = ["--target", "click", "--drop", "count", "--drop", "w", "--drop", "o"]
    assert run("--data", "day_*.parquet", *flags) == 0
    assert run("--data", "all.csv", "--batch-rows", 77, "--out", "text", *flags) == 0
    assert_same_answers("runs/day", "text")
    one, two = summary("runs/day"), summary("text")
    assert 0 < one["held_out_rows"] < 0.3 * N
    assert one["held_out_rows"] + one["training_rows"] == N
    assert one["held_out_nll_per_row"] == pytest.approx(two["held_out_nll_per_row"], rel=1e-6)
    assert 0.5 < one["held_out_accuracy"] <= 1


@pytest.mark.accuracy
def test_categories_and_dialects(capsys):
    """Numbers that are levels, which come in the order of numbers; decimal commas, and spaces around texts."""
    frame = table()[["a", "colour", "click"]].assign(ward=np.random.default_rng(1).integers(8, 12, N))
    frame["colour"] = " " + frame.colour + " "
    frame.to_csv("all.csv", index=False)
    frame[:200].to_csv("day_1.csv", index=False, sep=";", decimal=",")
    frame[200:].to_csv("day_2.csv", index=False, sep=";", decimal=",", encoding="cp1252")
    flags = ["--target", "click", "--categorical", "ward", "--test-fraction", 0, "--tolerance", 1e-8]
    assert run("--data", "all.csv", "--out", "whole", *flags) == 0
    assert run("--data", "day_*.csv", "--batch-rows", 90, *flags) == 0
    assert_same_answers("runs/day", "whole")
    assert "the table was read as separated by semicolons, with decimal commas" in capsys.readouterr().out
    frame.drop(columns="click").to_csv("new.csv", index=False)
    for folder in ("whole", "runs/day"):
        assert main(["predict", folder, "new.csv"]) == 0
    left, right = (pd.read_csv(f"{folder}/predictions-new.csv") for folder in ("whole", "runs/day"))
    pd.testing.assert_frame_equal(left, right, atol=1e-6)


def test_a_file_whose_name_looks_like_a_pattern():
    table()[["a", "click"]].to_csv("a[1]_.csv", index=False)
    assert run("--data", "a[1]_.csv", "--target", "click") == 0
    assert summary("runs/a[1]_")["gaussian"] is not None  # of a table in memory


def test_held_out_scores_are_those_of_the_rows():
    frame = table()[["a", "b", "count", "w"]]
    frame.to_csv("all.csv", index=False)
    flags = ["--target", "count", "--weights", "w", "--family", "poisson_log", "--posterior", "natural"]
    assert (
        run(
            "--data",
            "all.csv",
            "--batch-rows",
            100,
            *flags,
            "--no-standardize",
            "--no-intercept",
            "--prior-precision",
            0.1,
        )
        == 0
    )
    from torchngvi.app import psis
    from torchngvi.app.config import Settings
    from torchngvi.app.streams import held_out
    from torchngvi.diagnostics import k_hat, log_predictive_density, log_weights

    held = held_out(0, N, Settings(data="all.csv"))
    X, y, w = (torch.tensor(frame[names].to_numpy(dtype=float)) for names in (["a", "b"], "count", "w"))
    model = GeneralizedLinear(X[~held], y[~held], "poisson_log", prior_precision=0.1, weights=w[~held])
    q = NaturalGaussian(2, scale=0.1, dtype=torch.float64)
    assert fit(q, model, progress=False).converged
    loss, share = -log_predictive_density(model, q, X[held], y[held]), w[held] / w[held].sum()
    told = summary("runs/all")
    weights = log_weights(q, model, told["k_hat_draws"], torch.Generator().manual_seed(42))
    assert told["k_hat"] == pytest.approx(float(k_hat(weights)), abs=1e-2)
    assert told["k_hat_draws"] == 256
    assert told["k_hat_verdict"] == psis.verdict(told["k_hat"], 256)
    assert told["held_out_nll_per_row"] == pytest.approx(float((share * loss).sum()), rel=1e-5)
    error = (share.square() * (loss - (share * loss).sum()).square()).sum().sqrt()
    assert told["held_out_nll_standard_error"] == pytest.approx(float(error), rel=1e-4)


ROWS = ["--data", "a_*.csv", "--target", "y"]
REFUSED = {
    "nowhere": (["--data", "no_*.csv", "--target", "y"], "there are no files 'no_*.csv'."),
    "kind": (
        ["--data", "rows.npz", "--batch-rows", "9"],
        "rows are read in batches from csv, tsv and Parquet files; got",
    ),
    "target": (
        ["--data", "a_*.csv"],
        "target is missing: name the column to predict (--target). The columns are: a, y.",
    ),
    "column": (["--data", "a_*.csv", "--target", "z"], "target column 'z' is not in the data."),
    "drop": ([*ROWS, "--drop", "a"], "no column is left to predict 'y' from."),
    "others": (
        ["--data", "*_1.csv", "--target", "y"],
        "'b_1.csv' has other columns than 'a_1.csv': b, y. Fit files of",
    ),
    "class": (["--data", "one*.csv", "--target", "y"], "target 'y' has one class, '0' in all"),
    "kinds": (["--data", "k_*.csv", "--target", "y"], "column 'a' is numbers in some batches and texts in others."),
    "missing": (["--data", "gap*.csv", "--target", "y"], "column 'a' has missing or infinite entries in 1 of 2 rows."),
    "levels": (
        ["--data", "names*.csv", "--target", "y"],
        "text column 'a' has 60 different values, more than 50: it looks",
    ),
    "noise": (
        [*ROWS, "--family", "gaussian"],
        "noise is the standard deviation of y about",
    ),
    "dispersion": ([*ROWS, "--family", "nb"], "dispersion is r in the variance mean + mean^2/r, and is not found"),
    "scale": ([*ROWS, "--family", "student_t"], "noise is the standard deviation of y about"),
    "texts": (
        ["--data", "t_*.csv", "--target", "y", "--family", "poisson_log"],
        "this family needs a target of numbers; 'y' holds texts.",
    ),
    "weights": (
        ["--data", "w_*.csv", "--target", "y", "--weights", "w"],
        "weights must not be negative; column 'w' has",
    ),
    "flat": (
        [*ROWS, "--posterior", "mean_field", "--method", "ifvb"],
        "rows in batches need a Gaussian posterior and a method for it; got mean_field and ifvb.",
    ),
    "auto": ([*ROWS, "--prior-precision", "auto"], "prior_precision auto takes many fits, which rows in batches"),
    "impute": ([*ROWS, "--impute", "median"], "impute needs the medians of the columns, which are not found from"),
    "categorical": ([*ROWS, "--categorical", "b"], "categorical column 'b' is not in the data."),
    "spoilt": (
        ["--data", "spoilt*.csv", "--target", "y"],
        "column 'a' is numbers except for 1 of 5 rows, the first 'old'. Correct them",
    ),
    "text weights": (
        ["--data", "s_*.csv", "--target", "y", "--weights", "w"],
        "weights column 'w' must hold numbers; got texts such as 'no'.",
    ),
    "flat column": (
        ["--data", "near*.csv", "--target", "y", "--test-fraction", "0"],
        "column 'a' differs by so little that its standard deviation rounds to 0.",
    ),
    "training": (
        [*ROWS, "--test-fraction", "0.999"],
        "there are 2 rows, none of them for",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, capsys):
    for file, text in {
        "rows.npz": "",
        "a_1.csv": "a,y\n-1,0\n2,1\n",
        "b_1.csv": "b,y\n1,0\n2,1\n",
        "one.csv": "a,y\n1,0\n2,0\n",
        "k_1.csv": "a,y\n1,0\n2,1\n",
        "k_2.csv": "a,y\nred,0\nblue,1\n",
        "w_1.csv": "a,w,y\n1,1,0\n2,-1,1\n",
        "gap.csv": "a,y\n1,0\n,1\n",
        "names.csv": "a,y\n" + "".join(f"n{k},{k % 2}\n" for k in range(60)),
        "spoilt.csv": "a,y\n1,0\n2,1\nold,0\n3,1\n4,0\n",
        "near.csv": "a,b,y\n1e-200,1,0\n2e-200,2,1\n",
        "s_1.csv": "a,w,y\n1,no,1\n2,yes,0\n",
        "t_1.csv": "a,y\n1,no\n2,yes\n",
    }.items():
        Path(file).write_text(text)
    flags, text = REFUSED[name]
    assert run(*flags) == 2
    assert re.search(re.escape(f"torchngvi: error: {text}"), capsys.readouterr().err)
    assert not Path("runs").exists()
