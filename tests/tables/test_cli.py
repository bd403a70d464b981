"""The command line, in process: what it writes and prints, and each bad input with nothing written."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import torchngvi
from torchngvi.app.settings import GONE, Settings, parser, read_toml, settings_from
from torchngvi.cli import main
from torchngvi.messages import install

pytest.importorskip("formulae")

ROOT = Path(torchngvi.__file__).parents[1]
CONFIGS = Path(__file__).parents[2] / "configs"
WRITTEN = {"posterior.pt", "coefficients.csv", "summary.json", "fit.png", "config.toml", "manifest.json"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*flags):
    return main(["fit", "--no-progress", *(str(flag) for flag in flags)])


def summary(folder):
    return json.loads(Path(folder, "summary.json").read_text())


def coefficients(folder):
    return pd.read_csv(Path(folder, "coefficients.csv")).set_index("name")


def unwrapped(text):
    """Console output without the frame and the line breaks of a narrow terminal."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def cancer(tmp_path_factory):
    """One run on the breast cancer data, read by several tests."""
    folder = tmp_path_factory.mktemp("runs") / "cancer"
    assert main(["fit", str(CONFIGS / "breast_cancer.toml"), "--no-progress", "--out", str(folder)]) == 0
    return folder


def design(X, y, seed=42):
    """Scikit-learn's own split and scales, with the intercept first."""
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=seed)
    scaler = StandardScaler().fit(X_train)
    train, test = (np.c_[np.ones(len(part)), scaler.transform(part)] for part in (X_train, X_test))
    return train, test, y_train, y_test


class TestOutputs:
    @pytest.mark.accuracy
    def test_everything_is_written(self, cancer):
        assert {path.name for path in cancer.iterdir()} == WRITTEN
        assert (cancer / "fit.png").read_bytes().startswith(b"\x89PNG")
        result = summary(cancer)
        assert result["converged"] is True
        assert result["k_hat"] < 0.7
        assert result["classes"] == {"failure": "malignant", "success": "benign"}
        assert result["held_out_accuracy"] > 0.95
        assert result["held_out_nll"] < 0.1 < 0.6 < result["base_rate_nll"] < 0.7
        assert result["priors"].startswith("coefficients N(0, 3.162^2) per sd of a column (precision 0.1), intercept")

    @pytest.mark.accuracy
    def test_the_table_has_units_ratios_and_sds(self, cancer):
        """By the saved result: the mean times the sd of the training column, and e to its power."""
        table, result = coefficients(cancer), torchngvi.load(cancer).result
        scales = result.fitted.coordinates.columns.scales.numpy()
        np.testing.assert_allclose(table["per_sd"], table["mean"] * scales)
        near = table["high"] < 700
        np.testing.assert_allclose(np.log(table["ratio_high"][near]), table["high"][near])
        assert np.isinf(table["ratio_high"][~near]).all()
        np.testing.assert_allclose(table["sd"], result.summary().fixed.sd.numpy())

    @pytest.mark.accuracy
    def test_settings_written_repeat_the_run(self, cancer):
        assert run(cancer / "config.toml", "--out", "again") == 0
        first, second = (summary(folder) for folder in (cancer, "again"))
        assert {**second["settings"], "out": None} == {**first["settings"], "out": None}
        pd.testing.assert_frame_equal(coefficients("again"), coefficients(cancer))

    @pytest.mark.accuracy
    def test_linear_regression_is_the_exact_posterior(self):
        """Given the noise the posterior is Gaussian; over its grid the mixture is known to four digits."""
        assert main(["fit", str(CONFIGS / "diabetes_gaussian.toml"), "--no-progress", "--out", "linear"]) == 0
        train, test, y, y_test = design(*load_diabetes(return_X_y=True))
        precision = np.array([1 / (100 * np.mean(y**2)), *[1e-4] * 10])  # the intercept's is wide
        unit = np.std(y)
        sds = np.linspace(45, 66, 100)
        logs, means, squares, scores = [], [], [], []
        for sd in sds:
            covariance = np.linalg.inv(train.T @ train / sd**2 + np.diag(precision))
            mean = covariance @ train.T @ y / sd**2
            cov = sd**2 * np.eye(len(y)) + train / precision @ train.T
            logs.append(stats.multivariate_normal(cov=cov).logpdf(y) + stats.t(3, scale=2.5 * unit).logpdf(sd))
            means.append(mean)
            squares.append(np.diag(covariance) + mean**2)
            spread = np.sqrt(np.einsum("nd,de,ne->n", test, covariance, test) + sd**2)
            scores.append(stats.norm.pdf(y_test, test @ mean, spread))
        w = np.exp(np.array(logs) - max(logs))
        w /= w.sum()
        mean, sd = w @ means, np.sqrt(w @ squares - (w @ means) ** 2)
        table = coefficients("linear")
        # 3,900 effective draws: five standard errors of a mean, and of an sd
        assert (np.abs(table["per_sd"][1:11] - mean[1:]) < 5 * sd[1:] / np.sqrt(3900)).all()
        scale = (table["per_sd"] / table["mean"])[1:11]
        np.testing.assert_allclose(table["sd"][1:11] * scale, sd[1:], rtol=5 / np.sqrt(2 * 3900))
        noise = w @ sds
        assert table["mean"]["residual sd"] == pytest.approx(noise, abs=5 * np.sqrt(w @ sds**2 - noise**2) / 60)
        result = summary("linear")
        assert result["held_out_nll"] == pytest.approx(-np.log(w @ scores).mean(), abs=2e-3)
        assert result["held_out_rmse"] == pytest.approx(np.sqrt(np.mean((test @ mean - y_test) ** 2)), abs=0.05)

    def test_counts_with_offset_and_weights(self, capsys):
        stream = np.random.default_rng(1)
        exposure, w = stream.uniform(0.5, 3.0, 400), stream.integers(0, 3, 400)
        counts, x = stream.poisson(2.0 * exposure), stream.normal(size=400)
        table = pd.DataFrame({"claims": counts, "log_exposure": np.log(exposure), "w": w, "x": x})
        table.to_csv("claims.csv", index=False)
        flags = ("--family", "poisson_log", "--offset", "log_exposure", "--weights", "w", "--test-fraction", 0)
        priors = ("--prior", "x=normal(0, 1e-6)", "--prior", "Intercept=normal(0, 1000)")
        assert run("--data", "claims.csv", "--target", "claims", *priors, *flags) == 0
        rows = coefficients("runs/claims")
        said = "claims.csv: 400 training rows, 2 coefficients, weights 'w', offset 'log_exposure'"
        assert said in (text := unwrapped(capsys.readouterr().out))
        assert "x N(0, 1e-06^2)" in text
        # the posterior of the rate is nearly Gamma(Σwy, Σw exposure)
        total = (w * counts).sum()
        assert rows["mean"]["Intercept"] == pytest.approx(np.log(total / (w * exposure).sum()), abs=3e-3)
        assert rows["sd"]["Intercept"] == pytest.approx(total**-0.5, rel=0.05)
        assert summary("runs/claims")["held_out_nll"] is None
        table[["claims", "log_exposure", "x"]].to_csv("new.csv", index=False)
        assert main(["predict", "runs/claims", "new.csv"]) == 0
        found = pd.read_csv("runs/claims/predictions-new.csv")
        np.testing.assert_allclose(found["mean"], total / (w * exposure).sum() * exposure, rtol=5e-3)
        assert ((found.low <= counts) & (counts <= found.high)).mean() > 0.9

    def test_weights_are_repetitions(self):
        stream = np.random.default_rng(3)
        table = pd.DataFrame({"x": stream.normal(size=60), "w": stream.integers(1, 4, 60)})
        table["y"] = 2 * table.x + stream.normal(size=60)
        table.to_csv("a.csv", index=False)
        table.loc[table.index.repeat(table.w), ["x", "y"]].to_csv("b.csv", index=False)
        flags = ("--target", "y", "--family", "gaussian", "--test-fraction", 0)
        assert run("--data", "a.csv", "--weights", "w", *flags) == run("--data", "b.csv", *flags) == 0
        columns = ["mean", "sd", "low", "high"]
        found, expected = (coefficients(f"runs/{name}")[columns] for name in "ab")
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    def test_progress_goes_to_standard_error(self, capsys):
        assert main(["fit", "--data", "iris", "--success", "virginica"]) == 0
        assert "effective draws:" not in capsys.readouterr().out

    @pytest.mark.accuracy
    def test_as_a_program(self, tmp_path):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torchngvi", "fit", "--data", "breast_cancer", "--prior-precision", "0.1"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "worst texture" in done.stdout
        assert "╭─ converged ─" in done.stdout
        assert {path.name for path in (tmp_path / "runs/breast_cancer").iterdir()} == WRITTEN

    def test_help_and_refused_paths_come_before_pytorch(self):
        Path("file").write_text("")
        script = (
            "import sys, torchngvi.app.settings as c, torchngvi.cli as d; c.parser().format_help();"
            "d.main(['fit', '--data', 'wine', '--out', 'file']); d.main(['predict', 'a', 'b', '--out', 'file']);"
            "print({'torch', 'numpy'} & {*sys.modules})"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert done.stdout == "set()\n"
        assert re.search(r"'.*file' is a file.*\n.*'file' is there already", done.stderr)


def passengers():
    """A table, and rows to predict, written into the folder."""
    draw = np.random.default_rng(1912)
    n = 320
    ship = pd.DataFrame({"sex": draw.choice(["female", "male"], n), "deck": draw.choice(["A", "B", "C"], n)})
    ship["age"] = draw.normal(32, 12, n).clip(1).round()
    ship["party"] = draw.integers(0, 40, n)
    eta = 1.5 - 2 * (ship.sex == "male") - 0.7 * (ship.deck == "C") - 0.03 * (ship.age - 32)
    eta += 0.6 * draw.normal(size=40)[ship.party]
    ship["survived"] = np.where(draw.random(n) < 1 / (1 + np.exp(-eta)), "yes", "no")
    ship.loc[draw.random(n) < 0.2, "age"] = None
    ship[:300].to_csv("ship.csv", index=False)
    ship[300:].drop(columns="survived").to_csv("new.csv", index=False)
    return ship


@pytest.fixture
def ship():
    return passengers()


TABLE = ("--data", "ship.csv", "--target", "survived", "--drop", "party", "--impute", "median")


def near(line, printed, rel):
    """Whether a line has these numbers, to the digits that the draws leave."""
    found = [float(cell) for cell in line.split()[1:]]
    return found == pytest.approx(printed, rel=rel)


def test_the_tutorial_of_a_table(ship, capsys):
    """Its numbers, from a Gaussian approximation to 3 %; the lines that the page shows are compared with the page."""
    assert run(*TABLE) == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line for line in lines if line.strip()}
    assert near(named["age"], [-0.02996, 0.0136, -0.05661, -0.003308, 0.9705, 0.945, 0.9967, -0.3173], 0.2)
    assert near(named["sex=male"], [-1.521, 0.2869, -2.083, -0.9583, 0.2186, 0.1246, 0.3835, -0.76], 0.03)
    assert any(line.startswith("│ note           71 missing entries were filled in with medians") for line in lines)
    assert main(["predict", "runs/ship", "new.csv"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r" +[12] +yes ", line)]
    assert [float(cell) for cell in rows[0][2:]] == pytest.approx([0.6023, 0.4588, 0.7337], abs=0.02)
    assert [float(cell) for cell in rows[1][2:]] == pytest.approx([0.746, 0.6262, 0.8431], abs=0.02)


def test_a_marginal_effect_of_no_column_is_refused_before_the_fit(ship, capsys, monkeypatch):
    monkeypatch.setattr("torchngvi.tables.model.TableModel.fit", lambda *args, **named: pytest.fail("it was fitted"))
    flags = ("--data", "ship.csv", "--formula", "survived[yes] ~ sex + deck", "--marginal", "sexx")
    assert run(*flags) == 2
    assert "the columns are deck, sex, survived; got 'sexx'. Did you mean 'sex'?" in capsys.readouterr().err
    assert run(*flags[:-1], "sex,deck") == 2
    assert "Separate them by spaces, --marginal sex deck." in capsys.readouterr().err


@pytest.mark.accuracy
def test_a_formula_with_groups(ship, capsys):
    formula = "survived[yes] ~ sex + deck + age + (1 | party)"
    flags = ("--data", "ship.csv", "--formula", formula, "--impute", "median")  # the level names the family
    assert run(*flags, "--marginal", "age", "sex", "--test-fraction", 0.1) == 0
    said = unwrapped(capsys.readouterr().out)
    for text in ("Predicted is 'yes' against 'no'.", "sd of party: Intercept", "average effects of age on"):
        assert text in said
    for text in ("sex=male - female", "missing entries of age became", "model bernoulli, survived[yes]"):
        assert text in said.replace("│", "")
    assert {path.name for path in Path("runs/ship").iterdir()} == WRITTEN | {"effects.csv"}
    effects = pd.read_csv("runs/ship/effects.csv")
    assert len(effects) == 40
    assert summary("runs/ship")["groups"] == {"party": 40}
    assert summary("runs/ship")["marginal"]["age"][0]["mean"] < 0
    pd.read_csv("new.csv").assign(party=[1000] * 10 + [3] * 10).to_csv("new.csv", index=False)
    assert main(["predict", "runs/ship", "new.csv"]) == 0
    found = pd.read_csv("runs/ship/predictions-new.csv")
    assert found.new_groups.fillna("").tolist() == ["party"] * 10 + [""] * 10
    result, frame = torchngvi.load("runs/ship"), pd.read_csv("new.csv")
    known = result.predict(frame.assign(party=3))
    stranger = result.predict(frame.drop(columns="party"))
    assert (stranger.high - stranger.low).mean() > (known.high - known.low).mean()
    average = result.predict(frame, population=True)
    assert (average.high - average.low).mean() < (stranger.high - stranger.low).mean()


def test_two_numbers_are_classes(capsys):
    draw = np.random.default_rng(0)
    x, g = draw.normal(size=120), np.arange(120) % 12
    y = 1 + (draw.random(120) < 1 / (1 + np.exp(-x)))
    pd.DataFrame({"x": x, "g": g, "y": y}).to_csv("a.csv", index=False)
    assert run("--data", "a.csv", "--formula", "y ~ x + (1 | g)", "--family", "bernoulli") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "Predicted is '2' against '1', the class that sorts last; --positive 1 predicts the other."
    found = torchngvi.load("runs/a").predict(pd.DataFrame({"x": [-2.0, 2.0]}))
    assert found["class"].tolist() == ["1", "2"]
    assert list(found) == ["class", "probability", "low", "high", "new_groups"]


class TestPriors:
    @pytest.mark.accuracy
    def test_a_number_is_per_standard_deviation_of_a_column(self, ship):
        assert run(*TABLE, "--prior-precision", 4) == 0
        table = coefficients("runs/ship")
        result = torchngvi.load("runs/ship").result
        rows = dict(result.settled.table())
        scales = result.fitted.coordinates.columns.scales.tolist()
        for name, scale in zip(result.fixed_names[1:], scales[1:], strict=True):
            assert rows[name] == f"N(0, {0.5 / scale:.3g}^2)"
        assert rows["Intercept"] == "N(0, 10^2)"
        assert run(*TABLE, "--prior-precision", 4, "--no-standardize", "--out", "raw") == 0
        assert dict(torchngvi.load("raw").result.settled.table())["age"] == "N(0, 0.5^2)"
        assert abs(table["mean"]["sex=male"]) < 1.5 * abs(coefficients("raw")["mean"]["sex=male"])

    @pytest.mark.accuracy
    def test_by_name(self, ship, capsys):
        """Those of a level in the words of the report, and in those of a formula."""
        priors = ("--prior", "sex=male=normal(0, 1e-3)", "--prior", "deck[B]=student_t(3, 1, 1e-3)")
        assert run(*TABLE, *priors) == 0
        table = coefficients("runs/ship")
        assert abs(table["mean"]["sex=male"]) < 0.01
        assert table["mean"]["deck=B"] == pytest.approx(1, abs=0.1)
        assert "sex[male] N(0, 0.001^2)" in unwrapped(capsys.readouterr().out)
        for bad, words in {"age": "a prior is written NAME=PRIOR", "size=normal(0, 1)": "size"}.items():
            assert run(*TABLE, "--prior", bad, "--overwrite") == 2
            assert words in capsys.readouterr().err

    @pytest.mark.accuracy
    def test_auto_is_where_the_evidence_is_largest(self, ship, capsys):
        assert run(*TABLE, "--prior-precision", "auto", "--draws", 400) == 0
        found = re.search(r"prior precision (\S+) has the largest evidence", capsys.readouterr().out)
        best = float(found[1])
        evidence = []
        for precision in (best / 8, best, best * 8):
            assert run(*TABLE, "--prior-precision", precision, "--overwrite") == 0
            evidence.append(summary("runs/ship")["log_evidence"])
        assert evidence[1] > max(evidence[0], evidence[2])

    def test_flat_is_the_estimate_without_a_prior(self):
        sm = pytest.importorskip("statsmodels.api")
        draw = np.random.default_rng(0)
        X = draw.normal(size=(200, 2))
        y = draw.random(200) < 1 / (1 + np.exp(-X @ [1.0, -0.5]))
        pd.DataFrame(X, columns=["a", "b"]).assign(y=y.astype(int)).to_csv("a.csv", index=False)
        assert run("--data", "a.csv", "--target", "y", "--prior-precision", "flat", "--test-fraction", 0) == 0
        expected = sm.Logit(y, sm.add_constant(X)).fit(disp=0)
        table = coefficients("runs/a")
        np.testing.assert_allclose(table["mean"], expected.params, atol=0.05)
        np.testing.assert_allclose(table["sd"], expected.bse, rtol=0.06)


class TestWarnings:
    @pytest.mark.parametrize(("family", "told"), [("poisson", True), ("negbin", False)])
    def test_counts_that_vary_more(self, family, told, capsys):
        draw = np.random.default_rng(1)
        x = draw.normal(size=200)
        y = draw.negative_binomial(1.0, 1 / (1 + np.exp(1 + 0.3 * x)))
        pd.DataFrame({"x": x, "y": y}).to_csv("a.csv", index=False)
        assert run("--data", "a.csv", "--target", "y", "--likelihood", family, "--test-fraction", 0) == 0
        said = unwrapped(capsys.readouterr().out)
        assert ("times as much about their means as those of a Poisson distribution" in said) == told
        assert ("╭─ converged, with a warning" in said) == told

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ([0, 1] * 20, "y is 0 or 1, fitted as gaussian. Of two classes, say --likelihood bernoulli."),
            ([3, 0, 1, 2] * 10, "y are whole numbers, fitted as gaussian. If they are counts, say --likelihood"),
            ([171, 183, 169, 190] * 10, None),
        ],
    )
    def test_no_family_was_said(self, values, words, capsys):
        pd.DataFrame({"x": np.arange(40) % 7, "y": values}).to_csv("a.csv", index=False)
        assert run("--data", "a.csv", "--formula", "y ~ x") == 0
        said = unwrapped(capsys.readouterr().out)
        assert words in said if words else "fitted as gaussian" not in said

    def test_classes_that_a_column_separates(self, capsys):
        assert run("--data", "iris", "--success", "setosa") == 0
        assert "separate" in unwrapped(capsys.readouterr().out)
        assert summary("runs/iris")["held_out_accuracy"] == pytest.approx(1.0)

    def test_success_is_said_first_and_chosen(self, capsys):
        draw = np.random.default_rng(0)
        x = draw.normal(size=80)
        y = np.where(x + draw.normal(size=80) > 0, "ja", "nein")
        pd.DataFrame({"x": x, "y": y}).to_csv("a.csv", index=False)
        flags = ("--data", "a.csv", "--target", "y", "--test-fraction", 0, "--overwrite")
        assert run(*flags) == 0
        first = capsys.readouterr().out.splitlines()[0]
        assert first == "Predicted is 'nein' against 'ja', the class that sorts last; --positive ja predicts the other."
        of_no = coefficients("runs/a")["mean"]
        assert run(*flags, "--positive", "ja") == 0
        assert capsys.readouterr().out.splitlines()[0] == "Predicted is 'ja' against 'nein'."
        np.testing.assert_allclose(coefficients("runs/a")["mean"], -of_no, rtol=0.1)
        assert summary("runs/a")["classes"] == {"failure": "nein", "success": "ja"}

    def test_rows_with_levels_of_their_own_are_fitted(self, capsys):
        table = pd.DataFrame({"x": np.arange(40.0), "town": ["a", "b"] * 19 + ["c", "d"], "y": np.arange(40) % 5})
        table.to_csv("a.csv", index=False)
        seed = next(
            s for s in range(99) if {38, 39} & set(train_test_split(range(40), test_size=0.2, random_state=s)[1])
        )
        assert run("--data", "a.csv", "--target", "y", "--family", "gaussian", "--seed", seed) == 0
        said = unwrapped(capsys.readouterr().out)
        assert "rows with levels that no other rows have were fitted, not held out" in said
        assert {"town=b", "town=c", "town=d"} <= set(coefficients("runs/a").index)


class TestPredict:
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory):
        """One run, of which each test gets a copy."""
        folder = tmp_path_factory.mktemp("predict")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            passengers()
            assert run(*TABLE, "--draws", 400) == 0
        return folder

    @pytest.fixture
    def fitted(self, folder):
        shutil.copytree(folder, ".", dirs_exist_ok=True)
        return torchngvi.load("runs/ship")

    def test_the_index_and_the_order_of_columns_do_not_matter(self, fitted):
        frame = pd.read_csv("new.csv").drop(columns="party")
        expected = fitted.predict(frame)
        other = fitted.predict(frame[["age", "deck", "sex"]].set_axis(list("abcdefghijklmnopqrst")))
        assert other.index.tolist() == list("abcdefghijklmnopqrst")
        np.testing.assert_array_equal(other["probability"], expected["probability"])
        gap, usual = fitted.predict(frame.assign(age=None)), fitted.columns.fill["age"]
        np.testing.assert_array_equal(gap.probability, fitted.predict(frame.assign(age=usual)).probability)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.drop(columns="sex"), "the table lacks sex, which the model predicts from."),
            (lambda t: t.rename(columns={"sex": "Sex"}), "Did you mean 'Sex'?"),
            (lambda t: t.assign(weight=1), "has weight, which the fit has not seen. Leave it out (frame.drop("),
            (lambda t: t.assign(deck="Z"), "column 'deck' has the level 'Z' in 20 of 20 rows, which the fit has not"),
            (lambda t: t.assign(age="old"), "column 'age' held numbers when the model was fitted; got texts such as"),
            (lambda t: t.assign(age=pd.Timestamp(9)), "held numbers when the model was fitted; got texts such as"),
            (lambda t: t.assign(age=["12 kg", "9 kg"] * 10), "got texts such as '12 kg' in 20 of 20 rows."),
            (lambda t: t.to_numpy(), "predict takes a pandas DataFrame with the columns of the fit; got ndarray."),
        ],
    )
    def test_tables_that_do_not_fit(self, fitted, change, message):
        with pytest.raises(torchngvi.errors.InputError, match=re.escape(message)):
            fitted.predict(change(pd.read_csv("new.csv").drop(columns="party")))

    def test_kinds_and_intervals(self, fitted):
        frame = pd.read_csv("new.csv").drop(columns="party")
        linear = fitted.predict(frame, kind="linear")
        assert list(linear) == ["linear", "low", "high"]
        wide, narrow = (fitted.predict(frame, interval=level) for level in (0.95, 0.5))
        assert ((wide.low < narrow.low) & (narrow.high < wide.high)).all()
        command = ["predict", "runs/ship", "new.csv", "--kind", "linear", "--interval", "0.5", "--out", "a.csv"]
        assert main(command) == 0
        np.testing.assert_allclose(pd.read_csv("a.csv")["linear"], linear["linear"])

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("nowhere", "new.csv"), "'nowhere' is no folder of a run: it is not there."),
            ((".", "new.csv"), "'.' is no folder of a run: there is no posterior.pt in it."),
            (("runs/ship", "nowhere.csv"), "there is no data file 'nowhere.csv'"),
            (("runs/ship", "new.csv", "--drop", "z"), "drop column 'z' is not in 'new.csv'. Leave it out."),
            (
                ("runs/ship", "more.csv"),
                "more.csv has weight, which the fit has not seen. Leave it out (--drop weight)",
            ),
            (("runs/ship", "new.csv", "--out", "ship.csv"), "'ship.csv' is there already. Say --overwrite to replace"),
            (("runs/ship", "new.csv", "--impute", "median"), "Only torchngvi fit takes --impute."),
        ],
    )
    def test_refused(self, fitted, flags, message, capsys):
        pd.read_csv("new.csv").assign(weight=1).to_csv("more.csv", index=False)
        before = {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}
        assert main(["predict", *flags]) == 2
        assert message in capsys.readouterr().err
        assert {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()} == before

    @pytest.mark.accuracy
    def test_real_numbers(self):
        draw = np.random.default_rng(0)
        x = draw.normal(size=300)
        pd.DataFrame({"x": x, "y": 1 + 2 * x + 0.5 * draw.normal(size=300)}).to_csv("a.csv", index=False)
        for family in ("gaussian", "student_t"):
            assert run("--data", "a.csv", "--target", "y", "--family", family, "--out", family) == 0
            found = torchngvi.load(family).predict(pd.DataFrame({"x": [0.0, 1.0]}))
            assert list(found) == ["mean", "mean_low", "mean_high", "low", "high"]
            np.testing.assert_allclose(found["mean"], [1, 3], atol=0.15)
            np.testing.assert_allclose(found["high"] - found["low"], 2 * 1.96 * 0.5, rtol=0.25)
            assert (found["mean_high"] - found["mean_low"] < 0.3).all()

    @pytest.mark.accuracy
    def test_ordered_categories(self, capsys):
        draw = np.random.default_rng(0)
        x = draw.normal(size=300)
        y = np.array(["1 low", "2 middle", "3 high"])[np.digitize(x + draw.logistic(size=300), [-1, 1])]
        pd.DataFrame({"x": x, "y": y}).to_csv("a.csv", index=False)
        assert run("--data", "a.csv", "--target", "y", "--family", "ordinal") == 0
        found = torchngvi.load("runs/a").predict(pd.DataFrame({"x": [-3.0, 3.0]}))
        assert list(found) == ["class", "1 low", "2 middle", "3 high"]
        assert found["class"].tolist() == ["1 low", "3 high"]
        np.testing.assert_allclose(found.iloc[:, 1:].sum(axis=1), 1, rtol=1e-9)
        for kind, said in (
            ("mean", "probabilities of the categories of y"),
            ("response", "categories counted from 0, 1 low < 2 middle < 3 high"),
        ):
            assert main(["predict", "runs/a", "a.csv", "--drop", "y", "--kind", kind, "--out", f"{kind}.csv"]) == 0
            assert said in unwrapped(capsys.readouterr().out)


@pytest.mark.accuracy
def test_runs_are_compared(ship, capsys):
    """The model with the column that matters predicts rows better; one with noise alike."""
    ship.assign(noise=np.random.default_rng(0).normal(size=320)).to_csv("ship.csv", index=False)
    rest = ("--target", "survived", "--impute", "median", "--test-fraction", 0, "--draws", 1000)
    for name, drop in {"all": "noise", "more": "party", "less": "sex"}.items():
        columns = {"party", "noise"} if name == "all" else {"party", drop} if name == "less" else {"party"}
        assert run("--data", "ship.csv", *rest, "--drop", *columns, "--out", name) == 0
    capsys.readouterr()
    assert main(["compare", "less", "all", "more"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines[:2]} == {"all", "more"}
    assert lines[2].startswith("less: ")
    assert "alike" in lines[3]
    assert "predicts left-out rows better than less" in lines[4]
    assert main(["compare", "all"]) == 2
    assert "compare is of two runs or more" in capsys.readouterr().err


class TestSettings:
    def test_flags_override_the_file(self):
        Path("a.toml").write_text('data = "iris"\nsuccess = "setosa"\nseed = 3\n')
        assert run("a.toml", "--success", "virginica", "--draws", 400) == 0
        settings = summary("runs/iris")["settings"]
        assert (settings["success"], settings["seed"]) == ("virginica", 3)

    def test_every_field_is_a_flag_and_the_reverse(self):
        options = {
            action.dest for group in parser()._subparsers._group_actions for action in group.choices["fit"]._actions
        }
        assert options - {"help", "config", "overwrite", *GONE} == set(Settings.__dataclass_fields__)

    def test_toml_round_trip(self):
        settings = Settings(data='odd "name"\\.csv', prior_precision=1e-7, drop=("a", "ß"), standardize=False, seed=7)
        assert settings_from(tomllib.loads(settings.to_toml())) == (settings, "")

    def test_a_file_of_the_earlier_release(self):
        keys = 'data = "iris"\nmethod = "vn"\nposterior = "cholesky"\ntolerance = 1e-5\ndtype = "float64"\n'
        settings, told = settings_from(tomllib.loads(keys))
        assert settings == Settings(data="iris")
        assert told.startswith("method, posterior, tolerance, dtype do nothing any more: the posterior is integrated")
        assert told.endswith("call torchngvi.fit(q, torchngvi.GeneralizedLinear(X, y, family)) in Python.")

    @pytest.mark.parametrize("name", ["breast_cancer.toml", "diabetes_gaussian.toml"])
    def test_configs_are_valid(self, name):
        assert settings_from(read_toml(CONFIGS / name))[0].folder == Path("runs") / Path(name).stem

    def test_a_file_of_settings_behind_several_values(self):
        found = parser().parse_args(["fit", "--drop", "a", "b", "--categorical", "c", "x.toml"])
        assert (found.drop, found.categorical, found.config) == (["a", "b"], ["c"], "x.toml")

    def test_several_columns_after_one_flag(self):
        found = parser().parse_args(
            ["fit", "--drop", "a", "b", "--drop", "c", "--prior", "x=flat", "--prior", "y=flat"]
        )
        assert (found.drop, found.prior) == (["a", "b", "c"], ["x=flat", "y=flat"])


def _file(name, content):
    path = Path(name)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def _csv(content, *flags):
    return lambda: ("--data", _file("a.csv", content), "--target", "y", *flags)


def _toml(content):
    return lambda: (_file("a.toml", content),)


GOOD = "x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20))
BAD_INPUT = {
    "unknown key": (_toml('data = "iris"\nfamliy = "gaussian"\n'), "unknown key 'famliy'. Did you mean 'family'?"),
    "known keys": (_toml('data = "iris"\nzzz = 1\n'), "unknown key 'zzz'. The keys are: data, target, formula,"),
    "not toml": (_toml("data: iris\n"), "'a.toml' cannot be read as TOML: "),
    "binary config": (_toml(b"\xff\xfe\x00"), "'a.toml' cannot be read as TOML: "),
    "no config": (lambda: ("missing.toml",), "there is no settings file 'missing.toml'"),
    "a table in the config": (_toml('data = "iris"\n[model]\nlr = 1\n'), "unknown key 'model'."),
    "text for a number": (_toml('data = "iris"\nintercept_sd = "x"\n'), "intercept_sd must be a number; got 'x'."),
    "number for a text": (_toml("data = 3\n"), "data must be text in quotes; got 3."),
    "text for a boolean": (_toml('data = "iris"\nintercept = "no"\n'), "intercept must be true or false; got 'no'."),
    "fraction for an integer": (_toml('data = "iris"\nseed = 1.5\n'), "seed must be a whole number; got 1.5."),
    "text for a list": (_toml('data = "iris"\ndrop = "id"\n'), "drop must be a list of texts; got 'id'."),
    "no data": (tuple, "data is missing: torchngvi fit --data breast_cancer, or a line"),
    "empty data": (lambda: ("--data", ""), "data is missing"),
    "one class": (
        _csv("x,y\n1,0\n2,0\n"),
        "target 'y' has one class, '0' in all 2 rows; a Bernoulli family needs two.",
    ),
    "three classes": (
        lambda: ("--data", "iris"),
        "target 'target' has 3 classes (setosa, versicolor, virginica); a Bernoulli family needs two. Name the one to "
        "predict against the others (--success 'virginica'), or take them all (--likelihood multinomial).",
    ),
    "a class that is none": (
        lambda: ("--data", "iris", "--success", "virginca"),
        "success 'virginca' is no class of 'target'. Did you mean 'virginica'?",
    ),
    "real numbers": (lambda: ("--data", "diabetes"), "They are whole numbers: say --likelihood poisson, or"),
    "training rows of one class": (
        _csv("x,y\n" + "".join(f"{i},{int(i == 7)}\n" for i in range(20)), "--seed", "1", "--test-fraction", "0.9"),
        "training rows are all '0', and this family needs both classes. Choose another seed or",
    ),
    "too few rows": (_csv("x,y\n1,0\n", "--family", "gaussian"), "1 rows cannot be split with test_fraction 0.2"),
    "prior precision": (_csv(GOOD, "--prior-precision", "-1"), "prior_precision must be positive and finite; got -1."),
    "two ways to say the priors": (
        _csv(GOOD, "--prior-precision", "1", "--prior", "x=flat"),
        "prior and prior_precision both say the priors.",
    ),
    "a prior of something else": (_csv(GOOD, "--prior", "z=normal(0, 1)"), "z"),
    "a word that is no prior": (_csv(GOOD, "--prior", "x=gauss(0, 1)"), "gauss"),
    "intercept sd": (_csv(GOOD, "--intercept-sd", "0"), "intercept_sd must be positive and finite; got 0."),
    "impute": (_csv(GOOD, "--impute", "mean"), "impute must be median; got 'mean'. Leave it out where nothing is"),
    "a word for the prior precision": (
        _csv(GOOD, "--prior-precision", "wide"),
        "argument --prior-precision: invalid value: 'wide'; give a number, auto or flat. See torchngvi",
    ),
    "a word for the prior precision in a file": (
        _toml('data = "iris"\nprior_precision = "wide"\n'),
        "prior_precision is a number, auto or flat; got 'wide'.",
    ),
    "a file of settings for a column": (
        lambda: ("--data", "iris", "--drop", "a.toml"),
        "argument --drop: expected at least one argument before a.toml",
    ),
    "measurements": (
        _csv("x,y\n" + "".join(f"{i},{i + 0.5}\n" for i in range(60))),
        "They are measurements: say --likelihood gaussian.",
    ),
    "a column without training entries": (
        _csv("x,z,y\n" + "".join(f"{i},{'1' * (i == 0)},{i % 2}\n" for i in range(20)), "--impute", "median"),
        "column 'z' has no entry in the 16 training rows. Leave it out.",
    ),
    "test fraction": (_csv(GOOD, "--test-fraction", "1.5"), "at least 0 and below 1; got 1.5. Take 0.2, or 0"),
    "seed": (_csv(GOOD, "--seed", "-1"), "seed must be from 0 to 4294967295; got -1."),
    "draws": (_csv(GOOD, "--draws", "0"), "draws"),
    "unknown family": (_csv(GOOD, "--family", "poison"), "there is no family 'poison'. Did you mean 'poisson'?"),
    "negative counts": (_csv("x,y\n1,3\n2,-1\n3,2\n", "--family", "poisson"), "the poisson family needs counts"),
    "texts for counts": (
        _csv("x,y\n1,a\n2,b\n", "--family", "poisson"),
        "this family needs a target of numbers; 'y' holds classes such as 'a'. Say --likelihood bernoulli, or "
        "multinomial of several classes.",
    ),
    "success of counts": (_csv(GOOD, "--family", "poisson", "--success", "1"), "family poisson has none"),
    "negative weights": (
        _csv("x,w,y\n1,1,0\n2,-2,1\n3,1,0\n4,1,1\n", "--weights", "w", "--test-fraction", "0"),
        "weights",
    ),
    "nothing differs": (_csv("x,y\n" + "1,0\n1,1\n" * 9), "no column differs between the training rows"),
    "formula and target": (
        lambda: ("--data", _file("a.csv", GOOD), "--target", "y", "--formula", "y ~ x"),
        "--target cannot be combined with --formula, which says the same. Leave it out.",
    ),
    "a formula of other columns": (
        lambda: ("--data", _file("a.csv", GOOD), "--formula", "y ~ z"),
        "names z; the table has x, y.",
    ),
    "a formula that runs code": (
        lambda: ("--data", _file("a.csv", GOOD), "--formula", "y ~ np.savetxt('MARK', x)"),
        "which no formula may, as it could run any code",
    ),
    "a formula with gaps": (
        lambda: ("--data", _file("a.csv", "x,y\n1,0\n,1\n2,1\n"), "--formula", "y ~ x"),
        "The table misses values: 1 of x. Leave those rows out, or fill them in (--impute median).",
    ),
    "a marginal effect of another column": (_csv(GOOD, "--marginal", "z"), "z"),
    "lists in lists": (_toml("data = " + "[" * 20_000 + "]" * 20_000), "'a.toml' cannot be read as TOML: maximum"),
    "thousands of digits": (_toml(f'data = "iris"\nseed = {"9" * 5000}\n'), "'a.toml' cannot be read as TOML: Exceeds"),
    "beyond 64 bits": (_toml(f'data = "iris"\nseed = {"9" * 400}\n'), "seed must be less than 2^63 in size; got 99999"),
    "an endless config": (
        lambda: ("/dev/zero",),
        "a file of settings has at most 60000 bytes, and '/dev/zero' has more.",
    ),
    "a folder for a config": (lambda: (".",), "'.' cannot be read as TOML: "),
    "NUL in the config": (lambda: ("a\0.toml",), "CONFIG.toml must be a name in UTF-8 without a NUL"),
    "NUL in data": (_toml('data = "a\\u0000.csv"\n'), r"in UTF-8 without a NUL character; got 'a\x00.csv'"),
    "NUL in out": (_csv(GOOD, "--out", "a\0"), r"out must be a name in UTF-8 without a NUL character; got 'a\x00'."),
    "bytes in data": (lambda: ("--data", "caf\udce9.csv"), "data must be a name in UTF-8 without a NUL character"),
    "out is a file": (
        _csv(GOOD, "--out", "a.csv"),
        "out must be a folder; 'a.csv' is a file. Choose another name (--out).",
    ),
    "out below a file": (_csv(GOOD, "--out", "a.csv/deep"), "a.csv' is a file. Choose another name (--out)."),
    "unknown flag": (lambda: ("--famly", "x"), "unrecognized arguments: --famly. Did you mean '--family'?"),
    "text for a flag": (_csv(GOOD, "--seed", "abc"), "argument --seed: invalid int value: 'abc'. See torchngvi fit"),
    "data for a config": (lambda: (_file("a.csv", GOOD),), "for a data file say --data FILE."),
}


@pytest.mark.parametrize("case", BAD_INPUT, ids=str)
def test_bad_input(case, capsys):
    make, message = BAD_INPUT[case]
    flags = make()
    before = {path: path.read_bytes() for path in Path.cwd().rglob("*")}
    assert run(*flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert re.fullmatch(r"torchngvi: error: [^\n]*\.[^\n]*\n", captured.err)
    assert captured.out == ""
    assert {path: path.read_bytes() for path in Path.cwd().rglob("*")} == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["bench", "--device", "cuda"], "torchngvi bench is python -m benchmarks.bench in a clone now."),
        (["demo"], "torchngvi demo has gone: run examples/training_script.py"),
        (["methods"], "torchngvi methods has gone: torchngvi.registry.partners(method)"),
        (["compare", "a.toml"], "python -m examples.compare_methods a.toml. Of runs name folders."),
        (["predict"], "the following arguments are required: RUN, TABLE. See torchngvi predict --help."),
        (["fitt"], "invalid choice: 'fitt'"),
    ],
)
def test_other_commands(command, message, capsys):
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_flags_that_are_gone_say_so(capsys):
    for name, why in GONE.items():
        _, said = settings_from({"data": "iris", name: "1"})
        assert said.startswith(f"{name} does nothing any more: {why}. For a method")
    flags = ("--posterior", "diagonal", "--lr", "1", "--device", "cpu", "--draws", 400)
    assert run("--data", "iris", "--success", "virginica", *flags) == 0
    error = capsys.readouterr().err
    assert error.startswith("torchngvi: warning: posterior, lr, device do nothing any more: ")
    assert error.count("\n") == 1


def _forget(monkeypatch, *names):
    """As if these packages had not been imported."""
    for name in [name for name in sys.modules if any(f"{name}.".startswith(f"{other}.") for other in names)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(torchngvi, "app", raising=False)


@pytest.mark.parametrize("extra", ["rich", "matplotlib"])
def test_missing_extras(extra, capsys, monkeypatch):
    _forget(monkeypatch, "torchngvi.app", extra)
    monkeypatch.setitem(sys.modules, extra, None)
    assert run("--data", "iris", "--success", "setosa") == 2
    error = capsys.readouterr().err
    assert f"{extra} is not installed, and the command line needs it: {install('cli')}." in error
    assert list(Path.cwd().iterdir()) == []


class TestLastResort:
    @pytest.mark.parametrize(
        ("error", "sentence"),
        [
            (MemoryError(), "there is too little memory (MemoryError). Use fewer rows or columns."),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "there is too little memory ("),
            (OSError(28, "No space left on device"), "a file cannot be read or written ("),
            (RecursionError("maximum recursion depth exceeded"), "the input is nested too deeply ("),
        ],
    )
    def test_one_sentence(self, error, sentence, capsys, monkeypatch):
        from torchngvi.app import fits

        def fail(*_):
            raise error

        monkeypatch.setattr(fits, "run", fail)
        assert run("--data", "iris") == 2
        assert sentence in capsys.readouterr().err

    def test_faults_of_the_library_are_not_hidden(self, monkeypatch):
        from torchngvi.app import fits

        monkeypatch.setattr(fits, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("--data", "iris")

    def test_any_error_of_reading_is_one_sentence(self, capsys, monkeypatch):
        from torchngvi.app import prepare

        Path("a.csv").write_text(GOOD)
        monkeypatch.setattr(prepare, "dialect", lambda *_: 1 / 0)
        assert run("--data", "a.csv", "--target", "y") == 2
        assert (
            "the input cannot be read (ZeroDivisionError: division by zero). Check the data" in capsys.readouterr().err
        )


def test_no_command(capsys):
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.accuracy
@pytest.mark.parametrize(("levels", "column"), [(9, "clinic"), (10, "clinic"), (10, "zip code")])
def test_a_column_of_many_categories_may_be_groups(levels, column, capsys):
    died, clinic = np.where(np.arange(200) % 3, "no", "yes"), [f"clinic {row % levels}" for row in range(200)]
    pd.DataFrame({"died": died, "x": np.sin(np.arange(200)), column: clinic}).to_csv("a.csv", index=False)
    assert run("--data", "a.csv", "--target", "died") == 0
    printed = unwrapped(capsys.readouterr().out)
    for said in ("'clinic' has 10 categories,", '--formula "died[yes] ~ ... + (1 | clinic)" --family bernoulli'):
        assert (said in printed) == (levels == 10 and column == "clinic")  # others no formula can name as they are


@pytest.mark.accuracy
def test_a_thousand_columns(capsys):
    """The formula of many columns is read, and means and intervals are those of ridge regression."""
    draw = np.random.default_rng(0)
    X = draw.normal(size=(300, 1000))
    pd.DataFrame(X, columns=[f"c {k}" for k in range(1000)]).assign(y=X[:, 0] + draw.normal(size=300)).to_csv(
        "a.csv", index=False
    )
    assert run("--data", "a.csv", "--target", "y", "--family", "gaussian", "--prior-precision", 1, "--draws", 400) in (
        0,
        1,
    )
    assert len(coefficients("runs/a")) == 1002
    assert csv.field_size_limit() > 0
    assert torch.isfinite(torch.tensor(coefficients("runs/a")["mean"].to_numpy())).all()


def test_trials_and_survival(capsys):
    """Of successes of trials the probability is predicted; of a time with its events also the time itself."""
    draw = np.random.default_rng(0)
    x, n = draw.normal(size=200), draw.integers(1, 20, 200)
    table = pd.DataFrame({"x": x, "n": n, "s": draw.binomial(n, 1 / (1 + np.exp(-0.5 * x)))})
    table.assign(t=draw.weibull(1.5, 200) * np.exp(0.5 * x), e=draw.random(200) < 0.7).to_csv("a.csv", index=False)
    pd.DataFrame({"x": [0.0, 1.0]}).to_csv("new.csv", index=False)
    assert run("--data", "a.csv", "--formula", "prop(s, n) ~ x", "--family", "binomial", "--test-fraction", 0.2) == 0
    assert main(["predict", "runs/a", "new.csv"]) == 0
    found = pd.read_csv("runs/a/predictions-new.csv")
    np.testing.assert_allclose(found.probability, 1 / (1 + np.exp([0.0, -0.5])), atol=0.05)
    flags = ("--formula", "censored(t, e) ~ x", "--family", "weibull", "--out", "runs/b")
    assert run("--data", "a.csv", *flags) == 0
    assert main(["predict", "runs/b", "new.csv"]) == 0
    assert list(pd.read_csv("runs/b/predictions-new.csv"))[1:] == ["mean", "mean_low", "mean_high", "low", "high"]
    assert "error" not in capsys.readouterr().err


def test_trials_of_new_rows_are_read(tmp_path, monkeypatch, capsys):
    """Responses of a binomial model are counts of the trials of each row, which predict takes of the table."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    x = draw.normal(size=60)
    pd.DataFrame({"x": x, "n": 10, "s": draw.binomial(10, 1 / (1 + np.exp(-x)))}).to_csv("a.csv", index=False)
    assert run("--data", "a.csv", "--formula", "prop(s, n) ~ x", "--family", "binomial") == 0
    pd.DataFrame({"x": [0.0, 0.0], "n": [10, 1000]}).to_csv("new.csv", index=False)
    pd.DataFrame({"x": [0.0]}).to_csv("less.csv", index=False)
    assert main(["predict", "runs/a", "new.csv", "--kind", "response"]) == 0
    found = pd.read_csv("runs/a/predictions-new.csv")
    assert 80 < found["response"][1] / found["response"][0] < 120
    assert main(["predict", "runs/a", "less.csv", "--kind", "response"]) == 2
    assert "needs the column n" in capsys.readouterr().err


@pytest.mark.accuracy
@pytest.mark.parametrize("formula", ["y ~ x", "y ~ x + (1 | g)", "y ~ x + (1 | g) + (1 | h)"])
def test_tables_take_no_notice_of_the_default_device(formula):
    """Under ``torch.set_default_device`` a table is fitted on the CPU, to the same numbers."""
    table = pd.DataFrame({"x": np.linspace(-1, 1, 40), "g": np.arange(40) % 8, "h": np.arange(40) % 5})
    table["y"] = np.random.default_rng(0).poisson(np.exp(0.3 * table.x))
    usual = torchngvi.mixed(formula, table, "poisson").fit(draws=100, progress=False)
    with torch.device("meta"):
        other = torchngvi.mixed(formula, table, "poisson").fit(draws=100, progress=False)
        assert torch.equal(other.predict(table.head(3)).mean, usual.predict(table.head(3)).mean)
    assert str(other) == str(usual)
