"""From a table to predictions by formula: groups of the fit and others, by the command line and by `load`."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import torchngvi
from torchngvi.app import counts, formula_tables
from torchngvi.app.contents import Content
from torchngvi.app.mixed_runs import baselines
from torchngvi.cli import main
from torchngvi.errors import InputError

FORMULA = "survived[yes] ~ sex + deck + age + (1 | party)"


def passengers(rows, seed):
    """Parties that fared alike, texts, and ages of which some are missing."""
    stream = np.random.default_rng(seed)
    sex, deck = stream.choice(["female", "male"], rows), stream.choice(list("ABC"), rows)
    party, age = stream.integers(0, 25, rows), stream.normal(35, 12, rows).round()
    of_party = np.random.default_rng(0).normal(size=25)[party]
    eta = 1 - 1.6 * (sex == "male") - 0.7 * (deck == "C") - 0.02 * (age - 35) + of_party
    survived = np.where(stream.random(rows) < 1 / (1 + np.exp(-eta)), "yes", "no")
    age = np.where(stream.random(rows) < 0.2, np.nan, age)
    return pd.DataFrame({"survived": survived, "sex": sex, "deck": deck, "age": age, "party": party})


@pytest.fixture(scope="module")
def ship(tmp_path_factory):
    """A folder with a table, and a run of a formula on it."""
    folder = tmp_path_factory.mktemp("ship")
    passengers(240, 1).to_csv(folder / "ship.csv", index=False)
    flags = ("--data", str(folder / "ship.csv"), "--formula", FORMULA, "--likelihood", "bernoulli", "--no-progress")
    assert main(["fit", *flags, "--impute", "median", "--out", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def fitted(ship):
    return torchngvi.load(ship / "run")


@pytest.mark.accuracy
def test_the_predictions_are_those_of_the_result(ship, fitted):
    """The same draws, formula and medians as in Python, for parties of the fit and for a new one."""
    table = pd.read_csv(ship / "ship.csv")
    whole = table.fillna({"age": table.age.median()})
    result = torchngvi.mixed(FORMULA, whole, "bernoulli").fit(progress=False)
    new = passengers(9, 2).assign(party=[*range(8), 99])
    expected = result.predict(new.fillna({"age": table.age.median()}))
    found = fitted.predict(new.set_index(pd.Index(list("abcdefghi"))))
    np.testing.assert_allclose(found.probability, expected.mean, rtol=1e-10)
    np.testing.assert_allclose(found[["low", "high"]].T, torch.stack([expected.low, expected.high]), rtol=1e-10)
    assert found.new_groups.tolist() == [""] * 8 + ["party"]
    assert found.index.tolist() == list("abcdefghi")
    assert (found["class"] == np.where(found.probability > 0.5, "yes", "no")).all()
    assert fitted.columns == ("age", "deck", "sex", "party")
    assert repr(fitted) == f"FittedFormula({FORMULA!r}, bernoulli_logit, 240 rows)"


def test_a_new_group_is_less_known(fitted):
    someone = pd.DataFrame({"sex": ["male"], "deck": ["A"], "age": [30.0]})
    known, new, none = (fitted.predict(frame) for frame in (someone.assign(party=3), someone.assign(party=77), someone))
    assert (new.high - new.low).item() > (known.high - known.low).item()
    pd.testing.assert_frame_equal(new, none)  # without the column all groups are new


def test_from_a_shell(ship, fitted, capsys):
    new = passengers(30, 3).drop(columns="survived")
    new.to_csv(ship / "new.csv", index=False, sep=";", decimal=",")
    assert main(["predict", str(ship / "run"), str(ship / "new.csv")]) == 0
    said = capsys.readouterr().out
    assert "probability of 'yes', with 95% intervals, the first 10 of 30 rows" in said
    written = pd.read_csv(ship / "run" / "predictions-new.csv")
    np.testing.assert_allclose(written.probability, fitted.predict(new).probability)


def test_baselines_are_named(ship):
    """The levels without a coefficient, where the others have one."""
    notes = json.loads((ship / "run" / "summary.json").read_text(encoding="utf-8"))["notes"]
    assert "baselines are deck = A, sex = female; the effects of other levels are relative to them" in notes
    frame = pd.DataFrame({"year": [1, 2, 3], "kind": ["a", "a", "b"], "x": [0.1, 0.2, 0.3]})
    all_levels = ["kind[a]", "kind[b]", "C(year)[2]", "C(year)[3]", "x"]
    assert baselines(frame, ["year", "kind", "x", "z"], all_levels) == (
        "baselines are year = 1; the effects of other levels are relative to them",
    )
    assert baselines(frame, ["x"], ["x"]) == ()


def test_counts_of_several_factors(tmp_path, monkeypatch, capsys):
    """Means with their intervals, new observations, crossed factors of which one group is new; a date as a group."""
    monkeypatch.chdir(tmp_path)
    stream = np.random.default_rng(4)
    x, who, day = stream.normal(size=240), stream.integers(0, 12, 240), stream.integers(0, 8, 240)
    eta = 1 + 0.5 * x + 0.4 * stream.normal(size=12)[who] + 0.4 * stream.normal(size=8)[day]
    days = pd.to_datetime("2020-01-01") + pd.to_timedelta(day, unit="D")
    table = pd.DataFrame({"n": stream.poisson(np.exp(eta)), "x": x, "who": who, "day": days})
    table.to_parquet("t.parquet")
    flags = ("--data", "t.parquet", "--formula", "n ~ x + (1 | who) + (1 | day)", "--likelihood", "poisson")
    assert main(["fit", *flags, "--no-progress"]) == 0
    assert "for new rows: torchngvi predict runs/t NEW.csv" in capsys.readouterr().out
    fitted = torchngvi.load("runs/t")
    found = fitted.predict(table)
    inside = (table.n >= found.low) & (table.n <= found.high)
    assert 0.93 < inside.mean() <= 1.0
    assert (found.mean_low < found["mean"]).all()
    assert not found.new_groups.any()
    new = fitted.predict(table.head(2).assign(day=pd.Timestamp("2021-01-01"), who=[99, who[1]]))
    assert new.new_groups.tolist() == ["who, day", "day"]
    assert fitted.told == "mean of n"


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda f: f.drop(columns="age"), "the table lacks age, which the model predicts from."),
            (lambda f: f.assign(party=None), "the table misses entries of party, of party in 9 of 9 rows. Fill them"),
            (lambda f: f.to_numpy(), "predict takes a pandas DataFrame with the columns of the fit; got ndarray."),
            (lambda f: f.head(0), "the table has no rows to predict. Check the file."),
            (lambda f: f.assign(deck="Z"), "The new rows do not fit"),
            (
                lambda f: f.assign(age="old"),
                "column 'age' held numbers when the model was fitted; got texts",
            ),
        ],
    )
    def test_in_predicting(self, fitted, change, message):
        with pytest.raises(InputError, match=re.escape(message)):
            fitted.predict(change(passengers(9, 5)))

    @pytest.mark.filterwarnings("ignore:.* has no manifest.json")
    def test_missing_where_none_were_filled(self, ship, fitted):
        saved = torch.load(ship / "run" / "posterior.pt", weights_only=True)
        torch.save({**saved, "fill": {}}, ship / "unfilled.pt")
        message = "the table misses entries of age, of age in 1 of 2 rows. Fill them in, leave those rows out, or"
        with pytest.raises(InputError, match=re.escape(message)):
            torchngvi.load(ship / "unfilled.pt").predict(passengers(2, 6).assign(age=[1.0, None]))
        with pytest.raises(InputError, match=r"Fill them in, leave those rows out\.$"):  # a party is not filled in
            torchngvi.load(ship / "unfilled.pt").predict(passengers(2, 6).assign(age=1.0, party=[None, 2]))

    @pytest.mark.parametrize(
        ("change", "flags", "message"),
        [
            ({}, (), "the table misses entries in its 40 rows: 4 of age. Fill them in (--impute median), or leave"),
            ({"age": np.nan}, (), "40 of age. There is no entry of age to fill in from: leave it out of the formula."),
            ({"age": np.nan}, ("--impute", "median"), "40 of age. There is no entry of age to fill in from: leave it"),
            (
                {"party": [None, *["a", "b", "c"] * 13]},
                ("--impute", "median"),
                "1 of party. The response, the groups and the weights are not filled in: leave out the rows that miss",
            ),
            ({}, ("--seed", "-1"), "seed must be from 0 to 4294967295; got -1."),
            ({}, ("--weights", "sex"), "weights column 'sex' must hold numbers; got texts such as"),
            ({}, ("--data", ""), "data is missing: name the table of the formula, --data visits.csv."),
            ({}, ("--likelihood", "binomial"), "got 'binomial'. For two classes say bernoulli; for counts of events"),
            ({}, ("--impute", "mean"), "impute must be median; got 'mean'. Leave it out where nothing is missing."),
        ],
    )
    def test_in_fitting(self, tmp_path, monkeypatch, capsys, change, flags, message):
        monkeypatch.chdir(tmp_path)
        table = passengers(40, 7)
        table["age"] = [np.nan] * 4 + [30.0] * 36
        table.assign(**change).to_csv("ship.csv", index=False)
        flags = ("--data", "ship.csv", "--formula", FORMULA, "--likelihood", "bernoulli", *flags)
        assert main(["fit", *flags, "--no-progress"]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()


def test_few_rows_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"y": [1.0, 2.0, 4.0, 3.0], "g": list("aabb")}).to_csv("few.csv", index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two groups
        assert main(["fit", "--data", "few.csv", "--formula", "y ~ 1 + (1 | g)", "--no-progress"]) in (0, 1)
    assert "warning: 4 training rows are too few to believe the result" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "runs" / "few" / "summary.json").read_text())["warnings"]) == 1


class TestCounts:
    """The family that counts need is named: where none was said, and where they vary more than Poisson's."""

    MORE = "times as much about their means as those of a Poisson distribution: intervals are too narrow. Say "

    @staticmethod
    def visits(seed, dispersion=None, size=4):
        """Counts of 50 groups, each with a mean of its own; with a dispersion those of a negative binomial."""
        stream = np.random.default_rng(seed)
        group, x = np.repeat(np.arange(50), size), stream.normal(size=50 * size)
        mean = np.exp(1.5 + 0.3 * x + 0.5 * stream.normal(size=50)[group])
        more = 1.0 if dispersion is None else stream.gamma(dispersion, 1 / dispersion, len(x))
        return pd.DataFrame({"n": stream.poisson(mean * more), "x": x, "g": group, "h": np.arange(len(x)) % 9})

    def said(self, folder, table, *flags, formula="n ~ x + (1 | g)"):
        table.to_csv(folder / "visits.csv", index=False)
        flags = ("--data", str(folder / "visits.csv"), "--formula", formula, "--out", str(folder / "run"), *flags)
        assert main(["fit", *flags, "--no-progress"]) in (0, 1)
        return json.loads((folder / "run" / "summary.json").read_text())["warnings"]

    def test_no_family_was_said(self, tmp_path, capsys):
        (warning,) = self.said(tmp_path, self.visits(1))
        assert warning == (
            "n are whole numbers, fitted as gaussian. If they are counts, say --likelihood poisson, or "
            "negative_binomial where their variance exceeds their mean."
        )
        assert f"warning: {warning}" in capsys.readouterr().out
        assert self.said(tmp_path, self.visits(1), "--family", "gaussian", "--overwrite") == []

    @pytest.mark.parametrize(
        ("values", "response", "expected"),
        [
            ([0, 1, 1], "n", "n is 0 or 1, fitted as gaussian. If these are two classes, say --likelihood bernoulli."),
            ([-1, 4, 6], "n", None),
            ([170, 181, 169], "n", None),
            ([0.5, 1.0, 2.0], "n", None),
            ([0, 4, 6], "log(n + 1)", None),
        ],
    )
    def test_what_looks_like_no_measurement(self, values, response, expected):
        found = counts.not_gaussian(pd.DataFrame({"n": values}), response)
        assert found == (() if expected is None else (expected,))

    @pytest.mark.parametrize("formula", ["n ~ x + (1 | g)", "n ~ x + (1 | g) + (1 | h)"])
    def test_counts_that_vary_more(self, tmp_path, formula):
        (warning,) = self.said(tmp_path, self.visits(2, 1.0), "--family", "poisson", formula=formula)
        assert self.MORE + "--likelihood negative_binomial." in warning

    def test_the_ratio_counts_the_effects_of_the_groups(self):
        """Of rows in pairs half of the freedom goes to the groups, and the ratio of Poisson's counts is near 1."""
        result = torchngvi.mixed("n ~ x + (1 | g)", self.visits(3, size=2), "poisson").fit(progress=False)
        found = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counts, "overdispersion", lambda mean, y, w, dim: found.update(mean=mean, y=y, dim=dim))
            assert counts.overdispersed(result) == ()
        table = result.predict(self.visits(3, size=2))
        torch.testing.assert_close(found["mean"], table.mean)
        assert 20 < found["dim"] < 52
        chi = float(((found["y"] - found["mean"]).square() / found["mean"]).sum())
        assert chi / (100 - found["dim"]) == pytest.approx(1.0, abs=0.35)

    @pytest.mark.accuracy
    @pytest.mark.parametrize("family", ["poisson", "negative_binomial"])
    def test_nothing_is_said_of_counts_that_do_not(self, tmp_path, family):
        table = self.visits(4, 1.0 if family == "negative_binomial" else None)
        assert self.said(tmp_path, table, "--family", family) == []


def test_columns_are_kept_as_they_were():
    frame = pd.DataFrame({"b": [True, False], "i": [1, 2], "f": [0.5, 1.5], "t": ["a", "b"], "m": [1, "x"]})
    frame["c"] = pd.Categorical(["lo", "hi"], ["lo", "hi"], ordered=True)
    content = Content(Path("posterior.pt"), {"table": formula_tables.packed(frame)})
    pd.testing.assert_frame_equal(formula_tables.unpacked(content), frame)


def test_names_of_classes():
    table = {"died": pd.Series(["no", "yes", "lost"])}
    assert formula_tables.classes_of("died['yes'] ~ x", np.array([0.0, 1.0]), table) == ("not yes", "yes")
