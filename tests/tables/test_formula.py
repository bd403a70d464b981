"""Formulas with random effects: the designs are those that one would write by hand, and a bad one is one sentence."""

import json
import pickle
import re
import shlex
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import torchngvi
from torchngvi import MixedModel
from torchngvi.adapters import terms as module
from torchngvi.adapters.formula import Formula, mixed
from torchngvi.app.outputs import read_frame
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.extras import install
from torchngvi.models import NegativeBinomial, PoissonLog


@pytest.fixture
def table():
    return pandas.DataFrame(
        {
            "y": [0.0, 1, 0, 1, 2, 2],
            "x": [1.0, 2, 3, 4, 5, 6],
            "kind": list("abcabc"),
            "group": list("wwuuvv"),
            "half": [1, 2, 1, 2, 1, 2],
        }
    )


class TestDesigns:
    def test_by_hand(self, table):
        made = Formula("y ~ x + kind + (1 + x | group)", table)
        b, c = (table.kind == "b").to_numpy(), (table.kind == "c").to_numpy()
        np.testing.assert_array_equal(made.rows.X, np.stack([np.ones(6), table.x, b, c], 1))
        np.testing.assert_array_equal(made.rows.Z, np.stack([np.ones(6), table.x], 1))
        np.testing.assert_array_equal(made.rows.groups, [2, 2, 0, 0, 1, 1])
        np.testing.assert_array_equal(made.y, table.y)
        assert made.levels == ["u", "v", "w"]
        assert made.fixed == ["Intercept", "x", "kind[b]", "kind[c]"]
        assert made.random == ["Intercept", "x"]

    def test_without_intercepts(self, table):
        made = Formula("y ~ 0 + x + (0 + x | group)", table)
        np.testing.assert_array_equal(made.rows.X, table.x.to_numpy()[:, None])
        np.testing.assert_array_equal(made.rows.Z, table.x.to_numpy()[:, None])

    def test_an_offset_is_no_column(self, table):
        made = Formula("y ~ x + offset(log(x)) + (1 | group)", table)
        assert made.fixed == ["Intercept", "x"]
        np.testing.assert_allclose(made.rows.offset, np.log(table.x), rtol=1e-15)

    def test_functions_of_columns(self, table):
        made = Formula("log(y + 1) ~ np.sin(x) + (1 | group)", table)
        np.testing.assert_allclose(made.y, np.log(table.y + 1), rtol=1e-15)
        np.testing.assert_allclose(made.rows.X[:, 1], np.sin(table.x), rtol=1e-15)

    def test_groups_of_two_columns(self, table):
        made = Formula("y ~ x + (1 | group:half)", table)
        assert made.levels == ["u:1", "u:2", "v:1", "v:2", "w:1", "w:2"]
        np.testing.assert_array_equal(made.rows.groups, [4, 5, 0, 1, 2, 3])

    def test_one_category_against_the_others(self, table):
        np.testing.assert_array_equal(Formula("kind[b] ~ x + (1 | group)", table).y, table.kind == "b")

    @pytest.mark.accuracy
    def test_no_design_with_a_column_for_each_group(self):
        """100,000 groups would be a table of 10¹⁰ numbers."""
        n = 100_000
        big = pandas.DataFrame({"y": np.zeros(n), "x": np.ones(n), "group": np.arange(n)})
        assert Formula("y ~ x + (1 | group)", big).rows.Z.shape == (n, 1)


class TestNewRows:
    def test_codings_and_centres_are_those_of_the_fit(self, table):
        made = Formula("y ~ scale(x) + kind + (1 + scale(x) | group)", table)
        new = made.of(table.iloc[[4, 1]].drop(columns="y"))
        np.testing.assert_allclose(new.X, made.rows.X[[4, 1]], rtol=1e-14)
        np.testing.assert_allclose(new.Z, made.rows.Z[[4, 1]], rtol=1e-14)
        np.testing.assert_array_equal(new.groups, made.rows.groups[[4, 1]])

    def test_new_groups(self, table):
        made = Formula("y ~ x + (1 | group)", table)
        np.testing.assert_array_equal(made.of(table.assign(group="z")).groups, [-1] * 6)
        np.testing.assert_array_equal(made.of(table[["x"]]).groups, [-1] * 6)


@pytest.fixture(scope="module")
def visits():
    rng = np.random.default_rng(0)
    n = 30
    patient, week = np.repeat(np.arange(n), 4), np.tile([0.0, 1, 2, 3], n)
    rate = np.exp(0.5 - 0.2 * week + 0.6 * rng.normal(size=n)[patient])
    columns = {"seizures": rng.poisson(2.0 * rate), "week": week, "hours": np.full(4 * n, 2.0)}
    return pandas.DataFrame({**columns, "patient": [f"p{k:02}" for k in patient], "twice": np.full(4 * n, 2.0)})


@pytest.fixture(scope="module")
def result(visits):
    made = mixed("seizures ~ week + offset(log(hours)) + (1 | patient)", visits, "poisson")
    return made.fit(draws=500, progress=False)


class TestMixed:
    def test_its_short_name(self):
        assert torchngvi.mixed is mixed
        with pytest.raises(AttributeError, match="module 'torchngvi' has no attribute 'mixd'"):
            torchngvi.mixd  # noqa: B018

    def test_the_same_as_by_arrays(self, visits, result):
        X = np.stack([np.ones(len(visits)), visits.week], 1)
        groups = pandas.factorize(visits.patient, sort=True)[0]
        arrays = MixedModel(
            X, visits.seizures.to_numpy(), (X[:, :1], groups), "poisson_log", offset=np.log(visits.hours)
        )
        other = arrays.fit(draws=500, progress=False)
        torch.testing.assert_close(result.summary().fixed.mean, other.summary().fixed.mean, rtol=1e-12, atol=0)

    def test_a_model_is_named_by_its_formula(self, table):
        assert repr(mixed("y ~ x + (1 | group)", table)) == "TableModel('y ~ x + (1 | group)', 6 rows)"

    def test_it_speaks_of_columns_and_groups(self, visits, result):
        assert {"Intercept", "week"} <= set(str(result.summary()).split())
        assert result.group_names == tuple(sorted(set(visits.patient)))
        assert torch.equal(result.random["patient"][0].mean, result.effects()[0].mean)

    def test_predictions_of_tables(self, visits, result):
        new = visits.drop(columns="seizures").head(3).assign(patient=["p00", "p05", "eve"])
        by_table, rows = result.predict(new), Formula("seizures ~ week + (1 | patient)", visits).of(new)
        by_array = result.predict(rows.X, rows.Z, rows.groups, offset=np.log(new.hours.to_numpy()))
        torch.testing.assert_close(by_table.mean, by_array.mean, rtol=0, atol=0)
        assert by_table.sd[2] > by_table.sd[:2].max()

    def test_weights_by_name(self, visits):
        named, given = (
            mixed("seizures ~ week + (1 | patient)", visits, "poisson", weights=w).model.rows.weights
            for w in ("twice", np.full(len(visits), 2.0))
        )
        assert torch.equal(named, given)
        with pytest.raises(InputError, match="^weights names size; the table has"):
            mixed("seizures ~ week + (1 | patient)", visits, "poisson", weights="size")

    def test_families_by_their_short_names(self, visits):
        formula = "seizures ~ week + (1 | patient)"
        kinds = {"Poisson": PoissonLog, "poisson_log": PoissonLog, "negbin": NegativeBinomial, "nb": NegativeBinomial}
        for word, kind in kinds.items():
            assert isinstance(mixed(formula, visits, word).model.rows.likelihood, kind)
        families = "gaussian, student_t, poisson, negative_binomial, bernoulli, probit, or a Likelihood"
        hints = {
            "posson": " Did you mean 'poisson'?",
            "neg_bin": " Did you mean 'negbin'?",
            "binomial": " For two classes say bernoulli; for counts of events poisson, or negative_binomial.",
            None: "",
        }
        for word, told in hints.items():
            text = f"family must be one of {families}; got {word!r}.{told}"
            with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
                mixed(formula, visits, word)

    def test_a_prior_of_another_kind(self, visits):
        with pytest.raises(InputError, match="^prior is a torchngvi.models.MixedPrior, or None; got int.$"):
            mixed("seizures ~ week + (1 | patient)", visits, prior=3)

    def test_a_result_is_pickled(self, visits, result):
        again = pickle.loads(pickle.dumps(result))
        new = visits.head(2)
        assert torch.equal(again.predict(new).mean, result.predict(new).mean)

    def test_a_plot_by_name(self, result):
        assert result.plot_effects("Intercept").get_xlabel() == "Intercept"
        with pytest.raises(InputError, match="or one of the names Intercept; got 'week'"):
            result.plot_effects("week")


class TestGroups:
    def test_of_two_columns_are_not_merged(self, table):
        table["left"], table["right"] = ["a:b", "a", "a"] * 2, ["c", "b:c", "b:c"] * 2
        made = Formula("y ~ x + (1 | left:right)", table)
        assert made.rows.groups.tolist() == [1, 0, 0, 1, 0, 0]

    def test_labels_of_several_kinds(self, table):
        table["group"] = pandas.Series([1, 1, "s2", "s2", 3, 3], dtype=object)
        made = Formula("y ~ x + (1 | group)", table)
        assert made.of(table).groups.tolist() == made.rows.groups.tolist() == [0, 0, 2, 2, 1, 1]

    def test_numbers_that_have_become_text(self, table):
        made = Formula("y ~ x + (1 | half)", table)
        with pytest.raises(
            InputError, match=r"groups half of the fit are as 1 \(int\), those of the table as '1' \(str\)"
        ):
            made.of(table.assign(half=table.half.astype(str)))

    def test_no_rows(self, table):
        assert Formula("y ~ x + (1 | group)", table).of(table.iloc[:0]).groups.dtype == int

    def test_categories_without_rows(self, table):
        table["kind"] = pandas.Categorical(table.kind, categories=["a", "b", "c", "zz"])
        made = Formula("y ~ kind + (1 | group)", table)
        assert made.fixed == ["Intercept", "kind[b]", "kind[c]"]
        assert made.of(table).X.shape == (6, 3)


class TestRefusals:
    @pytest.mark.parametrize(
        ("formula", "sentence"),
        [
            ("y ~ x", r"a grouping factor, as y ~ x \+ \(1 \+ x \| group\); 'y ~ x' has none\."),
            ("y ~ (1 | group) + (1 + x | group)", r"lets the intercept vary over group twice\. Leave one out"),
            (" ", r"A formula is a text, as 'y ~ x \+ \(1 \| group\)'; got ' '"),
            ("log(y - 2) ~ x + (1 | group)", r"The term log\(y - 2\) of the formula is not finite in 6 of 6 rows"),
            ("y ~ log(x - 2) + (1 | group)", r"term log\(x - 2\) .* in 2 of 6 rows, the first of them row 0"),
            ("y ~ x + (log(x - 2) | group)", r"term log\(x - 2\) of the formula is not finite"),
            ("x + (1 | group)", r"begins with its response"),
            ("y ~ 0 + (1 | group)", r"at least one fixed effect.*leave out the 0"),
            ("y ~ x ++* (1 | group)", r"cannot be read"),
            ("y ~ age + (1 | group)", r"names age; the table has y, x, kind, group, half"),
            ("y ~ X + (1 | group)", r"names X; the table has y, x, kind, group, half\. Did you mean 'x'\?"),
            ("y ~ unknown(x) + (1 | group)", r"calls unknown, which no formula may"),
            ("kind ~ x + (1 | group)", r"a number; kind holds categories, a, b, c\. .* as 1: kind\[c\]\."),
        ],
    )
    def test_formulas(self, table, formula, sentence):
        with pytest.raises(InputError, match=sentence):
            Formula(formula, table)

    def test_a_response_of_many_categories(self, table):
        with pytest.raises(InputError, match=r"name holds categories, a, b, c, d, e, \.\.\. Name the one"):
            Formula("name ~ x + (1 | group)", table.assign(name=list("abcdef")))

    def test_a_table_in_the_place_of_the_formula(self, table):
        with pytest.raises(InputError, match=r"A formula is a text, as .*; got DataFrame\.$"):
            mixed(table, "y ~ x + (1 | group)")

    def test_a_response_of_two_columns(self, table):
        with pytest.raises(InputError, match=r"one number a row; prop\(y, trials\) is 2\.$"):
            Formula("prop(y, trials) ~ x + (1 | group)", table.assign(trials=3))

    def test_missing_values(self, table):
        table.loc[[0, 3], "x"] = np.nan
        with pytest.raises(InputError, match=r"misses values: 2 of x\. Leave those rows out, table\.dropna\(\)"):
            Formula("y ~ x + (1 | group)", table)

    def test_no_table(self):
        with pytest.raises(InputError, match="needs a pandas DataFrame with its columns; got ndarray"):
            Formula("y ~ x + (1 | group)", np.ones((3, 3)))

    def test_new_categories(self, table):
        made = Formula("y ~ kind + (1 | group)", table)
        with pytest.raises(InputError, match=r"new rows do not fit .* levels \(d\) in 'kind'"):
            made.of(table.assign(kind="d"))

    def test_a_number_that_has_become_text(self, table):
        made = Formula("y ~ x + (1 | group)", table)
        with pytest.raises(InputError, match="column 'x' held numbers when the model was fitted; got texts"):
            made.of(table.assign(x="w"))

    def test_without_the_library(self, table, monkeypatch):
        monkeypatch.setattr(module, "formulae", None)
        with pytest.raises(ImportError, match=re.escape(install("formula"))):
            Formula("y ~ x + (1 | group)", table)


class TestCommandLine:
    @pytest.fixture
    def folder(self, visits, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        visits.to_csv("visits.csv", index=False)
        return tmp_path

    def run(self, *flags):
        return main(["fit", "--data", "visits.csv", "--no-progress", *flags])

    def test_everything_is_written(self, folder, capsys):
        assert self.run("--formula", "seizures ~ week + (1 | patient)", "--family", "poisson") == 0
        assert "standard deviations of random effects" in capsys.readouterr().out
        written = folder / "runs" / "visits"
        assert {path.name for path in written.iterdir()} == {
            "effects.csv", "effects.png", "manifest.json", "parameters.csv", "posterior.pt", "summary.json"
        }  # fmt: skip
        parameters, effects = (read_frame(written / f"{name}.csv") for name in ("parameters", "effects"))
        assert parameters[["kind", "name"]].to_numpy().tolist() == [
            ["fixed effect", "Intercept"],
            ["fixed effect", "week"],
            ["sd", "Intercept"],
        ]
        assert (parameters.low < parameters["mean"]).all()
        assert (effects.group == [f"p{k:02}" for k in range(30)]).all()
        summary = json.loads((written / "summary.json").read_text())
        assert (summary["converged"], summary["rows"], summary["groups"]) == (True, 120, 30)
        assert self.run("--formula", "seizures ~ week + (1 | patient)") == 2
        assert "Say --overwrite" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (["--target", "seizures"], "--target cannot be combined with --formula, which says what is predicted"),
            (["--data", "iris"], "--formula needs a csv, tsv or parquet file, --data visits.csv; got 'iris'."),
            (["--data", "none.csv"], "there is no file 'none.csv' (--data)."),
            (["--family", "gamma"], "family must be one of"),
        ],
    )
    def test_refusals(self, folder, capsys, flags, sentence):
        assert self.run("--formula", "seizures ~ week + (1 | patient)", *flags) == 2
        assert sentence in capsys.readouterr().err
        assert not (folder / "runs").exists()

    def test_without_the_library(self, folder, capsys, monkeypatch):
        monkeypatch.setattr(module, "formulae", None)
        assert self.run("--formula", "seizures ~ week + (1 | patient)") == 2
        assert f"formulae is not installed, and this command needs it: {install('formula')}" in (
            capsys.readouterr().err
        )


class TestWithoutGroups:
    """A formula without a grouping factor is a regression: the same run as with the flags that it is told as."""

    @pytest.fixture(autouse=True)
    def _people(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        draw = np.random.default_rng(0)
        people = pandas.DataFrame(
            {"id": range(60), "age": draw.normal(50, 10, 60), "ward": draw.choice(["a", "b"], 60),
             "kind": draw.integers(1, 4, 60), "time": draw.normal(size=60), "size of tumour": draw.normal(size=60)}
        )  # fmt: skip
        eta = 0.05 * (people.age - 50) + people.time
        people["died"] = np.where(draw.random(60) < 1 / (1 + np.exp(-eta)), "yes", "no")
        people["dead"] = (people.died == "yes").astype(int)
        people["pain"] = eta + 0.5 * draw.normal(size=60)
        people.to_csv("people.csv", index=False)

    @pytest.mark.accuracy
    @pytest.mark.parametrize(
        ("formula", "flags", "same"),
        [
            ("pain ~ age + time", [], "--target pain --likelihood gaussian --test-fraction 0 --data people.csv"),
            (
                "died[yes] ~ age + ward + C(kind) + offset(time)",
                ["--likelihood", "logit", "--prior-precision", "2"],
                "--target died --success yes --likelihood logit --prior-precision 2 --categorical kind --offset time "
                "--test-fraction 0 --data people.csv",
            ),
            (
                "pain ~ 0 + age + `size of tumour`",
                ["--weights", "kind", "--test-fraction", "0.5"],
                "--target pain --no-intercept --weights kind --test-fraction 0.5 --family normal --data people.csv",
            ),
        ],
    )
    def test_it_is_the_regression_of_its_columns(self, capsys, formula, flags, same):
        assert main(["fit", "--data", "people.csv", "--formula", formula, *flags, "--no-progress", "--out", "a"]) == 0
        told = capsys.readouterr().out.splitlines()[0]
        begin = "The formula has no grouping factor, and is fitted as: torchngvi "
        assert told.startswith(begin)
        assert main(shlex.split(told.removeprefix(begin).replace("--out a", "--out b"))) == 0
        used = [name for name in pandas.read_csv("people.csv") if re.search(rf"\b{name}\b", f"{formula} {flags}")]
        drop = [name for name in pandas.read_csv("people.csv") if name not in used]
        assert main(["fit", *same.split(), "--drop", *drop, "--no-progress", "--out", "c"]) == 0
        one, two, three = (Path(name, "coefficients.csv").read_text() for name in "abc")
        assert one == two == three
        assert len(torchngvi.load("a").predict(pandas.read_csv("people.csv").drop(columns=drop))) == 60

    def test_two_classes_as_numbers_are_asked_about(self, capsys):
        assert main(["fit", "--data", "people.csv", "--formula", "dead ~ age", "--no-progress"]) == 0
        assert "warning: dead is 0 or 1, fitted as gaussian. If these are two classes, say" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("formula", "flags", "sentence"),
        [
            (
                "pain ~ log(age)",
                [],
                "The formula 'pain ~ log(age)' has no grouping factor: it is a regression on columns as they are, and "
                "log(age) is none. Write a column of it into the table and name that, or add a factor, (1 | group).",
            ),
            ("pain ~ age * time", [], "it is a regression on columns as they are, and age:time is none."),
            ("log(pain) ~ age", [], "it is a regression on columns as they are, and log(pain) is none."),
            ("pain ~ offset(log(age))", [], "columns as they are, and offset(log(age)) is none."),
            (
                "pain ~ aeg",
                [],
                "The formula names aeg, which is not in the data. Did you mean 'age'? The columns are: id,",
            ),
            (
                "pain ~ age",
                ["--drop", "id", "--target", "pain"],
                "--target, --drop cannot be combined with --formula, which says the same. Leave out what it says.",
            ),
            ("age + time", [], "A formula begins with its response, as y ~ x + (1 | group); got 'age + time'."),
        ],
    )
    def test_refusals(self, capsys, formula, flags, sentence):
        assert main(["fit", "--data", "people.csv", "--formula", formula, *flags]) == 2
        said = capsys.readouterr()
        assert sentence in said.err
        assert said.out == ""
        assert not Path("runs").exists()

    def test_in_python_there_are_estimators(self):
        text = (
            "A formula of a mixed model has a grouping factor, as y ~ x + (1 + x | group); 'pain ~ age' has none. For "
            "a regression take an estimator of torchngvi.adapters.sklearn, or torchngvi fit on a command line."
        )
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            mixed("pain ~ age", pandas.read_csv("people.csv"))
