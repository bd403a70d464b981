"""The command line, in process: what it writes and prints, and each bad input with nothing written."""

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import torchngvi
from torchngvi import CholeskyGaussian, PrecisionCholeskyGaussian, registry
from torchngvi.adapters import words
from torchngvi.adapters.sklearn import BayesianLogisticRegression
from torchngvi.app import families, names
from torchngvi.app.config import Settings, settings_from, to_toml
from torchngvi.app.toml import read_toml
from torchngvi.cli import main, parser
from torchngvi.extras import install
from torchngvi.messages import shown
from torchngvi.models.likelihoods import FAMILIES
from torchngvi.structures import block_diagonal

CONFIGS = Path(__file__).parents[2] / "configs"
WRITTEN = {"posterior.pt", "coefficients.csv", "trace.csv", "summary.json", "fit.png", "config.toml", "manifest.json"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The problems are small, and the machine may be busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*flags):
    return main(["fit", "--no-progress", *(str(flag) for flag in flags)])


def summary(folder):
    return json.loads(Path(folder, "summary.json").read_text())


def coefficients(folder):
    with Path(folder, "coefficients.csv").open() as file:
        return list(csv.DictReader(file))


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
    def test_everything_is_written(self, cancer):
        assert {path.name for path in cancer.iterdir()} == WRITTEN
        assert (cancer / "fit.png").read_bytes().startswith(b"\x89PNG")
        result = summary(cancer)
        assert result["converged"] is True
        assert result["classes"] == {"failure": "malignant", "success": "benign"}
        assert result["natural_gradient_norm"] <= result["tolerance"] == 1e-5

    def test_trace_ends_where_the_summary_says(self, cancer):
        with (cancer / "trace.csv").open() as file:
            rows = list(csv.DictReader(file))
        losses = [float(row["loss"]) for row in rows]
        assert losses[-1] == -summary(cancer)["elbo"]
        assert losses[0] > losses[-1] + 5  # from the mode on
        assert int(rows[-1]["evaluations"]) == summary(cancer)["evaluations"]

    def test_saved_posterior_reloads_and_gives_the_table(self, cancer):
        saved = torch.load(cancer / "posterior.pt", weights_only=True)
        q = CholeskyGaussian(len(saved["feature_names"]), dtype=torch.float64)
        q.load_state_dict(saved["posterior"])
        rows = coefficients(cancer)
        assert [row["name"] for row in rows] == saved["feature_names"]
        for column, values in {
            "mean": q.mean,
            "sd": q.stddev,
            "low": torch.as_tensor(stats.norm.ppf(0.025, q.mean, q.stddev)),
            "high": torch.as_tensor(stats.norm.ppf(0.975, q.mean, q.stddev)),
        }.items():
            found = torch.tensor([float(row[f"fitted_{column}"]) for row in rows], dtype=torch.float64)
            torch.testing.assert_close(found, values)

    def test_coefficients_per_unit_of_the_columns(self, cancer):
        """By a matrix: θ = A θ_fitted, with which raw columns have the same linear predictor."""
        saved = torch.load(cancer / "posterior.pt", weights_only=True)
        A = np.diag(1 / saved["scale"].numpy())
        A[0, 1:] = -saved["center"].numpy()[1:] / saved["scale"].numpy()[1:]
        mean, root = (saved["posterior"][name].numpy() for name in ("mean", "scale_tril"))
        x = np.r_[1.0, load_breast_cancer().data[7]]
        np.testing.assert_allclose(
            x @ A @ mean, np.r_[1.0, ((x - saved["center"].numpy()) / saved["scale"].numpy())[1:]] @ mean
        )
        rows = coefficients(cancer)
        sd = np.sqrt(np.diag(A @ root @ root.T @ A.T))
        np.testing.assert_allclose([float(row["mean"]) for row in rows], A @ mean)
        np.testing.assert_allclose([float(row["sd"]) for row in rows], sd)
        high = A @ mean + stats.norm.ppf(0.975) * sd
        near = high < 700  # beyond, the ratio is not a number
        np.testing.assert_allclose(np.log([float(row["ratio_high"]) for row in rows])[near], high[near])
        assert (~near).sum() == sum(row["ratio_high"] == "inf" for row in rows) > 0

    def test_held_out_scores_by_draws_from_the_saved_posterior(self, cancer):
        saved = torch.load(cancer / "posterior.pt", weights_only=True)
        data = load_breast_cancer()
        _, _, _, y = train_test_split(data.data, data.target, test_size=0.2, random_state=42)
        X = (train_test_split(data.data, test_size=0.2, random_state=42)[1] - saved["center"][1:].numpy()) / saved[
            "scale"
        ][1:].numpy()
        X = np.c_[np.ones(len(X)), X]
        mean, root = (saved["posterior"][name].numpy() for name in ("mean", "scale_tril"))
        draws = mean + np.random.default_rng(0).standard_normal((40_000, len(mean))) @ root.T
        p = stats.logistic.cdf((2 * y - 1) * (draws @ X.T))
        nll = -np.log(p.mean(0))
        # delta method: the error of -log p is sd/(p √S) a row
        error = np.sqrt(np.square(p.std(0) / p.mean(0)).sum() / len(draws)) / len(y)
        result = summary(cancer)
        assert abs(result["held_out_nll_per_row"] - nll.mean()) < 4.5 * error < 0.01
        assert result["held_out_nll_standard_error"] == pytest.approx(nll.std() / np.sqrt(len(y)), rel=0.02)
        assert result["held_out_accuracy"] == np.mean((X @ mean > 0) == y)

    def test_elbo_agrees_with_its_check_by_sampling(self, cancer):
        result = summary(cancer)
        assert abs(result["elbo"] - result["elbo_sampled"]) < 4.5 * result["elbo_sampled_standard_error"] < 0.1

    def test_linear_regression_is_the_exact_posterior(self, tmp_path, capsys):
        assert main(["fit", str(CONFIGS / "diabetes_gaussian.toml"), "--no-progress", "--out", "linear"]) == 0
        train, test, y, y_test = design(*load_diabetes(return_X_y=True))
        prior = np.diag([1 / (100 * np.mean(y**2)), *[1e-4] * 10])  # the intercept's is wide
        covariance = np.linalg.inv(train.T @ train / 55**2 + prior)
        mean = covariance @ train.T @ y / 55**2
        rows = coefficients("linear")
        np.testing.assert_allclose([float(row["fitted_mean"]) for row in rows], mean, rtol=1e-8)
        np.testing.assert_allclose([float(row["fitted_sd"]) for row in rows], np.sqrt(np.diag(covariance)), rtol=1e-8)
        result = summary("linear")
        spread = np.sqrt(np.einsum("nd,de,ne->n", test, covariance, test) + 55**2)
        assert result["held_out_nll_per_row"] == pytest.approx(-stats.norm.logpdf(y_test, test @ mean, spread).mean())
        assert result["held_out_rmse"] == pytest.approx(np.sqrt(np.mean((test @ mean - y_test) ** 2)))
        evidence = stats.multivariate_normal(
            cov=55**2 * np.eye(len(y)) + train @ np.linalg.inv(prior) @ train.T
        ).logpdf(y)
        assert result["elbo"] == pytest.approx(evidence, abs=1e-6)
        assert result["evaluations"] == 2
        out = capsys.readouterr().out
        bmi = next(line for line in out.splitlines() if line.split()[:1] == ["bmi"]).split()
        assert (bmi[1], bmi[-1]) == (shown(float(rows[3]["mean"])), shown(mean[3]))
        assert "and a Gaussian fits. " in unwrapped(out)
        assert "k-hat" not in out
        assert (result["k_hat"], result["k_hat_draws"]) == (0.0, 512)
        assert (result["gaussian"], result["gaussian_reasons"], result["other_modes"]) == ("fits", [], 0)
        assert {row["name"] for row in result["gaussian_worst"]} <= {row["name"] for row in rows}
        for row in result["gaussian_worst"]:
            assert row["sampled_sd"] == pytest.approx(row["sd"], rel=0.15)

    def test_gaussian_defaults_come_from_the_data_and_are_told(self, capsys):
        assert run("--data", "diabetes", "--family", "gaussian") == 0
        train, _, y, _ = design(*load_diabetes(return_X_y=True))
        residual = y - train @ np.linalg.lstsq(train, y, rcond=None)[0]
        result = summary("runs/diabetes")
        assert result["noise"] == pytest.approx(np.sqrt((residual**2).sum() / (len(y) - 11)))
        assert result["prior_precision"] == pytest.approx(1 / (2.5**2 * np.var(y)))
        assert (result["intercept_mean"], result["intercept_sd"]) == pytest.approx((np.mean(y), 2.5 * np.std(y)))
        assert "is the residual standard deviation of least squares" in unwrapped(capsys.readouterr().out)

    def test_settings_written_repeat_the_run(self, cancer):
        assert run(cancer / "config.toml", "--out", "again") == 0
        first, second = (summary(folder) for folder in (cancer, "again"))
        assert second["elbo"] == pytest.approx(first["elbo"], abs=1e-8)
        assert second["k_hat"] == pytest.approx(first["k_hat"], abs=1e-3)
        assert second["held_out_nll_per_row"] == pytest.approx(first["held_out_nll_per_row"], abs=1e-6)
        assert {**second["settings"], "out": None} == {**first["settings"], "out": None}

    def test_counts_with_offset_and_weights(self, capsys):
        stream = np.random.default_rng(1)
        exposure, w = stream.uniform(0.5, 3.0, 400), stream.integers(0, 3, 400)
        counts = stream.poisson(2.0 * exposure)
        table = np.c_[counts, np.log(exposure), w, np.zeros(400)]
        np.savetxt("claims.csv", table, "%.17g", delimiter=",", header="claims,log_exposure,w,zero", comments="")
        flags = ("--family", "poisson_log", "--offset", "log_exposure", "--weights", "w", "--test-fraction", 0)
        assert run("--data", "claims.csv", "--target", "claims", "--prior-precision", "1e-6", *flags) == 0
        rows = coefficients("runs/claims")
        assert [row["name"] for row in rows] == ["intercept", "zero"]
        said = "claims.csv: 400 training rows, 2 coefficients, weights 'w', offset 'log_exposure'"
        assert said in unwrapped(capsys.readouterr().out)
        # without other columns the posterior of the rate is nearly Gamma(Σwy, Σw exposure)
        assert float(rows[0]["mean"]) == pytest.approx(np.log((w * counts).sum() / (w * exposure).sum()), abs=2e-3)
        assert float(rows[0]["sd"]) == pytest.approx((w * counts).sum() ** -0.5, rel=0.01)
        assert summary("runs/claims")["held_out_nll_per_row"] is None

    def test_weights_count_in_the_fit_and_in_the_scores(self):
        stream = np.random.default_rng(3)
        x, w, o = stream.normal(size=60), stream.integers(1, 5, 60), stream.normal(size=60)
        y = 2 * x + o + stream.normal(size=60)
        header = "x,w,o,y"
        np.savetxt("a.csv", np.c_[x, w, o, y], "%.17g", delimiter=",", header=header, comments="")
        columns = ("--target", "y", "--weights", "w", "--offset", "o", "--no-standardize", "--no-intercept")
        flags = ("--family", "gaussian", "--noise", 0.8, "--prior-precision", 3, "--test-fraction", 0.5)
        assert run("--data", "a.csv", *columns, *flags) == 0
        i, j = train_test_split(np.arange(60), test_size=0.5, random_state=42)
        precision = (w[i] * x[i] ** 2).sum() / 0.8**2 + 3
        mean = (w[i] * x[i] * (y[i] - o[i])).sum() / 0.8**2 / precision
        assert float(coefficients("runs/a")[0]["mean"]) == pytest.approx(mean)
        nll = -stats.norm.logpdf(y[j], mean * x[j] + o[j], np.sqrt(x[j] ** 2 / precision + 0.8**2))
        result = summary("runs/a")
        assert result["held_out_nll_per_row"] == pytest.approx(np.average(nll, weights=w[j]))
        rmse = np.sqrt(np.average((mean * x[j] + o[j] - y[j]) ** 2, weights=w[j]))
        assert result["held_out_rmse"] == pytest.approx(rmse)

    def test_texts_as_classes_and_as_columns(self, capsys):
        write_people("people.csv")
        assert run("--data", "people.csv", "--target", "died", "--drop", "id") == 0
        out = unwrapped(capsys.readouterr().out)
        assert "sex=male" in out
        assert "success is 'yes', failure 'no'" in out

    def test_not_converged_is_said_and_written(self, capsys):
        assert run("--data", "breast_cancer", "--max-evaluations", 3) == 1
        captured = capsys.readouterr()
        assert "not converged, because the budget of 3 evaluations is used up" in captured.err
        assert "NOT CONVERGED" in captured.out
        assert {path.name for path in Path("runs/breast_cancer").iterdir()} == WRITTEN
        assert summary("runs/breast_cancer")["converged"] is False

    @pytest.mark.filterwarnings("always::torchngvi.errors.DivergenceWarning")
    @pytest.mark.filterwarnings("always::torchngvi.errors.RejectedStepWarning")
    def test_divergence_is_written_too(self, capsys):
        """The steps of Snngm are as long as lr says, and no bound in nats shortens them."""
        flags = ("--method", "snngm", "--posterior", "precision", "--lr", 1e60)
        assert run("--data", "iris", "--success", "virginica", *flags) == 1
        captured = capsys.readouterr()
        assert "not converged, because" in captured.err
        assert "the run diverges" in captured.out
        assert {path.name for path in Path("runs/iris").iterdir()} == WRITTEN
        elbo = summary("runs/iris")["elbo"]  # as large as the last evaluation left it, or nothing JSON could hold
        assert elbo is None or elbo < -1e100

    @pytest.mark.accuracy
    @pytest.mark.parametrize(
        "flags",
        [
            ("--posterior", "natural"),
            ("--method", "srvn"),
            ("--dtype", "float32"),
            ("--family", "bernoulli_probit", "--posterior", "diagonal"),
            ("--temperature", "0.5", "--no-intercept", "--no-standardize", "--prior-precision", "1"),
            ("--method", "bwgd", "--lr", "1e-2", "--tolerance", "0.5", "--seed", "1"),
            ("--posterior", "precision", "--structure", "1,2,2", "--method", "iblr"),
            ("--posterior", "natural", "--structure", "diagonal", "--method", "ngvi", "--lr", "0.5"),
            ("--posterior", "precision", "--method", "snngm", "--lr", "0.1", "--tolerance", "1"),
            ("--method", "root_gd", "--lr", "1e-2", "--tolerance", "0.5"),
            ("--method", "proximal_bbvi", "--lr", "1e-2", "--tolerance", "0.5"),
        ],
    )
    def test_choices(self, flags):
        assert run("--data", "iris", "--success", "setosa", *flags) == 0
        assert summary("runs/iris")["held_out_accuracy"] == 1.0

    @pytest.mark.accuracy
    @pytest.mark.parametrize(("method", "posterior"), [("ifvb", "mean_field"), ("aifvb", "flat_cholesky")])
    def test_flat_posteriors(self, capsys, method, posterior):
        """Near the q of that family that is found by trial; told as that Gaussian, saved as it is, repeatable."""
        flags = ("--data", "iris", "--success", "versicolor", "--max-evaluations", 250)
        found = []
        for folder in ("one", "two")[: 1 + (method == "ifvb")]:
            assert run(*flags, "--method", method, "--posterior", posterior, "--out", folder) == 1  # it never says so
            found.append(summary(folder))
        said = unwrapped(capsys.readouterr().out)
        assert f"{method}, {posterior} posterior, lr 1" in said
        assert "Raise max_evaluations." in said
        assert ("with independent coordinates" in said) is (posterior == "mean_field")
        assert found[0]["elbo_sampled"] == found[-1]["elbo_sampled"]
        other = "diagonal" if posterior == "mean_field" else "cholesky"
        assert run(*flags, "--posterior", other, "--out", "exact") == 0
        best = summary("exact")["elbo"]
        assert best - 1 < found[0]["elbo_sampled"] < best + 0.2
        q = registry.posterior(posterior, 5, dtype=torch.float64)
        q.load_state_dict(torch.load("one/posterior.pt", weights_only=True)["posterior"])
        assert [float(row["fitted_mean"]) for row in coefficients("one")] == pytest.approx(q.mean.tolist())
        assert [float(row["fitted_sd"]) for row in coefficients("one")] == pytest.approx(q.stddev.tolist())

    def test_structures_are_told_and_saved(self, capsys):
        flags = ("--posterior", "precision", "--structure", "1,4", "--max-evaluations", 30)
        assert run("--data", "iris", "--success", "setosa", *flags) == 0
        said = unwrapped(capsys.readouterr().out)
        assert "vn, precision posterior of structure 1,4, steps found by trial" in said
        assert summary("runs/iris")["settings"]["structure"] == "1,4"
        q = PrecisionCholeskyGaussian(5, structure=block_diagonal([1, 4]), dtype=torch.float64)
        q.load_state_dict(torch.load("runs/iris/posterior.pt", weights_only=True)["posterior"])
        assert (q.covariance[0, 1:] == 0).all()
        assert (q.covariance[1, 2:] != 0).all()

    def test_the_methods_of_the_registry_are_listed(self, capsys):
        assert main(["methods"]) == 0
        said = capsys.readouterr().out
        for name in (*registry.METHODS, *registry.FLAT_METHODS):
            with_lr = ", with --lr" if registry.needs_lr(name) else ""
            assert re.search(rf"^  {name}{with_lr} +{', '.join(registry.partners(name))}$", said, re.MULTILINE)

    def test_the_words_of_the_help_are_those_of_the_library(self, capsys):
        for name in ("METHODS", "FLAT_METHODS", "POSTERIORS", "FLAT_POSTERIORS", "STRUCTURES"):
            assert getattr(names, name) == tuple(getattr(registry, name))
        assert tuple(families.FAMILIES) == names.FAMILIES
        assert set(FAMILIES) < set(names.FAMILIES)
        assert {name for name, family in FAMILIES.items() if family.discrete} == set(names.DISCRETE)
        assert set(words.SHORT.values()) == set(names.FAMILIES)
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--help"])
        assert stop.value.code == 0
        assert "full, diagonal, or the sizes of blocks" in unwrapped(capsys.readouterr().out)

    def test_progress_goes_to_standard_error(self, capsys):
        assert main(["fit", "--data", "iris", "--success", "setosa"]) == 0
        captured = capsys.readouterr()
        assert "NewtonCG:" in captured.err
        assert "VN:" not in captured.out

    def test_as_a_program(self, tmp_path):
        root = str(Path(torchngvi.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torchngvi", "fit", "--data", "breast_cancer"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "worst texture" in done.stdout
        assert "converged" in done.stdout
        assert {path.name for path in (tmp_path / "runs/breast_cancer").iterdir()} == WRITTEN


def write_people(name):
    rows = [f"P{i},{50 + i * 7 % 31},{('male', 'female')[i % 2]},{('no', 'yes')[i % 3 > 0]}\n" for i in range(90)]
    Path(name).write_text("id,age,sex,died\n" + "".join(rows))


def unwrapped(text):
    """Console output without the frame and the line breaks of a narrow terminal."""
    return " ".join(text.replace("│", " ").split())


# ------------------------------------------------------------------------------------ settings


class TestSettings:
    def test_flags_override_the_file(self):
        Path("a.toml").write_text('data = "iris"\nsuccess = "setosa"\nposterior = "diagonal"\nseed = 3\n')
        assert run("a.toml", "--posterior", "cholesky") == 0
        settings = summary("runs/iris")["settings"]
        assert (settings["posterior"], settings["seed"]) == ("cholesky", 3)

    def test_every_field_is_a_flag_and_the_reverse(self):
        options = {
            action.dest for group in parser()._subparsers._group_actions for action in group.choices["fit"]._actions
        }
        assert options - {"help", "config", "overwrite", "formula"} == set(Settings.__dataclass_fields__)

    def test_toml_round_trip(self):
        settings = Settings(data='odd "name"\\.csv', lr=1e-7, drop=("a", "ß"), standardize=False, tolerance=1e16)
        assert settings_from(tomllib.loads(to_toml(settings))) == settings

    @pytest.mark.parametrize("name", ["breast_cancer.toml", "diabetes_gaussian.toml"])
    def test_configs_are_valid(self, name):
        assert settings_from(read_toml(CONFIGS / name)).folder == Path("runs") / Path(name).stem


# ------------------------------------------------------------------------------------ bad input


def _file(name, content):
    path = Path(name)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def _npz(**arrays):
    np.savez("a.npz", **arrays)
    return "a.npz"


def _csv(content, *flags):
    return lambda: ("--data", _file("a.csv", content), "--target", "y", *flags)


def _toml(content):
    return lambda: (_file("a.toml", content),)


GOOD = "x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20))
BAD_INPUT = {
    "unknown key": (_toml('data = "iris"\nfamliy = "gaussian"\n'), "unknown key 'famliy'. Did you mean 'family'?"),
    "known keys": (_toml('data = "iris"\nzzz = 1\n'), "unknown key 'zzz'. The keys are: data, target, family, method,"),
    "not toml": (_toml("data: iris\n"), "'a.toml' is not TOML: "),
    "binary config": (_toml(b"\xff\xfe\x00"), "'a.toml' is no readable TOML file"),
    "no config": (lambda: ("missing.toml",), "there is no settings file 'missing.toml'"),
    "a table in the config": (_toml('data = "iris"\n[model]\nlr = 1\n'), "unknown key 'model'."),
    "text for a number": (_toml('data = "iris"\nlr = "fast"\n'), "lr must be a number; got 'fast'."),
    "number for a text": (_toml("data = 3\n"), "data must be text in quotes; got 3."),
    "text for a boolean": (_toml('data = "iris"\nintercept = "no"\n'), "intercept must be true or false; got 'no'."),
    "boolean for a number": (_toml('data = "iris"\nlr = true\n'), "lr must be a number; got True."),
    "fraction for an integer": (_toml('data = "iris"\nseed = 1.5\n'), "seed must be a whole number; got 1.5."),
    "text for a list": (_toml('data = "iris"\ndrop = "id"\n'), "drop must be a list of texts; got 'id'."),
    "no data": (tuple, "data is missing: torchngvi fit --data breast_cancer, or a line"),
    "empty data": (lambda: ("--data", ""), "data is empty; name a data file or a bundled set"),
    "missing file": (lambda: ("--data", "nowhere.csv"), "there is no data file 'nowhere.csv' (looked for /"),
    "unknown name": (lambda: ("--data", "irris"), "'irris' is neither a file nor a bundled set. Did you mean 'iris'?"),
    "missing target column": (
        lambda: ("--data", _file("a.csv", "age,died\n1,0\n2,1\n"), "--target", "dead"),
        "target column 'dead' is not in the data. Did you mean 'died'? The columns are: age, died.",
    ),
    "missing values": (
        _csv("x,y\n1,0\n,1\n"),
        "column 'x' has missing or infinite entries in 1 of 2 rows. Fill them in (--impute median), drop those",
    ),
    "one class": (
        _csv("x,y\n1,0\n2,0\n"),
        "target 'y' has one class, '0' in all 2 rows; a Bernoulli family needs two.",
    ),
    "three classes": (
        lambda: ("--data", "iris"),
        "Name the one to predict against the others (--success 'virginica').",
    ),
    "real numbers": (lambda: ("--data", "diabetes"), "They are whole numbers: say --likelihood poisson for"),
    "no rows": (_csv("x,y\n"), "the table has column names and no rows: a data set needs at least two."),
    "empty file": (_csv(""), "'a.csv' is empty: a table needs a line of column names, and rows."),
    "binary junk": (_csv(bytes(range(256))), "'a.csv' is no table of text: it holds binary data."),
    "npz of objects": (
        lambda: ("--data", _npz(X=np.array([[None]]), y=[1])),
        "cannot be read as an npz archive of numbers",
    ),
    "npz of texts": (
        lambda: ("--data", _npz(X=np.array([["a"]]), y=[1])),
        "array 'X' of 'a.npz' must hold numbers; got dtype <U1.",
    ),
    "npz without y": (lambda: ("--data", _npz(X=np.eye(2))), "'a.npz' has no array 'y', it has X."),
    "npz of two lengths": (
        lambda: ("--data", _npz(X=np.eye(2), y=[0, 1, 0])),
        "array 'y' of 'a.npz' must have one entry for each of the 2 rows of X; got shape (3,).",
    ),
    "lr": (_csv(GOOD, "--lr", "0"), "lr (the learning rate) must be positive and finite; got 0."),
    "negative lr": (_csv(GOOD, "--lr=-1e-3"), "lr (the learning rate) must be positive and finite; got -0.001."),
    "prior precision": (_csv(GOOD, "--prior-precision", "-1"), "prior_precision must be positive and finite; got -1."),
    "intercept sd": (_csv(GOOD, "--intercept-sd", "0"), "intercept_sd must be positive and finite; got 0."),
    "impute": (_csv(GOOD, "--impute", "mean"), "impute must be median; got 'mean'. Leave it out where nothing is"),
    "a word for the prior precision": (
        _csv(GOOD, "--prior-precision", "wide"),
        "argument --prior-precision: invalid value: 'wide'; give a number, default, flat or auto. See torchngvi",
    ),
    "categories of a file without names": (
        lambda: ("--data", _npz(X=np.eye(2), y=[0, 1]), "--categorical", "x1"),
        "categorical names columns of a csv, tsv or parquet file; 'a.npz' is none. Leave it out.",
    ),
    "unknown category": (_csv(GOOD, "--categorical", "z"), "categorical column 'z' is not in the data."),
    "auto without coefficients": (
        _csv("x,y\n" + "1,0\n2,1\n" * 9, "--prior-precision", "auto", "--method", "ifvb", "--posterior", "mean_field"),
        "prior_precision auto needs coefficients, and a posterior of method vn. Set a number.",
    ),
    "noise": (_csv(GOOD, "--family", "gaussian", "--noise", "nan"), "noise must be positive and finite; got nan."),
    "noise of classes": (
        _csv(GOOD, "--noise", "1"),
        "noise belongs to family gaussian and student_t; got noise 1",
    ),
    "temperature": (_csv(GOOD, "--temperature", "0"), "temperature must be positive and finite; got 0."),
    "budget": (_csv(GOOD, "--max-evaluations", "0"), "max_evaluations must be positive and finite; got 0."),
    "test fraction": (_csv(GOOD, "--test-fraction", "1.5"), "at least 0 and below 1; got 1.5. Take 0.2, or 0"),
    "seed": (_csv(GOOD, "--seed", "-1"), "seed must be from 0 to 4294967295; got -1."),
    "unknown family": (
        _csv(GOOD, "--family", "poison_log"),
        "family must be one of bernoulli_logit, bernoulli_probit, poisson_log, gaussian, negative_binomial, student_t; "
        "got 'poison_log'. Did you mean 'poisson_log'?",
    ),
    "unknown word for a family": (_csv(GOOD, "--family", "ngbin"), "got 'ngbin'. Did you mean 'negbin'?"),
    "binomial": (
        _csv(GOOD, "--family", "binomial"),
        "got 'binomial'. For two classes say bernoulli; for counts of",
    ),
    "many classes": (_csv(GOOD, "--family", "softmax"), "got 'softmax'. Of more than two classes name one against the"),
    "amounts": (_csv(GOOD, "--family", "Gamma"), "got 'Gamma'. For positive amounts take their logarithms, and say"),
    "quasi": (_csv(GOOD, "--family", "quasipoisson"), "Counts that vary more than Poisson's are negative_binomial."),
    "heavy tails": (_csv(GOOD, "--family", "huber"), "got 'huber'. Noise with heavy tails is student_t."),
    "dispersion": (_csv(GOOD, "--dispersion", "1"), "dispersion belongs to family negative_binomial; got dispersion 1"),
    "dof": (_csv(GOOD, "--dof", "3"), "dof belongs to family student_t; got dof 3 with family bernoulli_logit."),
    "dof of zero": (_csv(GOOD, "--family", "t", "--dof", "0"), "dof must be positive and finite; got 0."),
    "counts that are none": (
        _csv("x,y\n1,3\n2,-1\n3,2\n", "--family", "nb"),
        "the negative binomial family needs counts 0, 1, 2, ..; got 1 other values, the first -1.",
    ),
    "unknown method": (
        _csv(GOOD, "--method", "adam"),
        "method must be one of vn, srvn, symmetric_srvn, newton_cg, iblr,",
    ),
    "a method for flat posteriors": (
        _csv(GOOD, "--method", "ifvb"),
        "method ifvb does not move posterior cholesky: it is for one of flat_cholesky, mean_field, vec, vech.",
    ),
    "a tolerance of stochastic gradients": (
        _csv(GOOD, "--method", "ifvb", "--posterior", "mean_field", "--tolerance", "1e-3"),
        "tolerance bounds the natural-gradient norm, and that of the stochastic gradients of ifvb does not vanish: the "
        "run ends when its smoothed bound stops rising. Leave tolerance out.",
    ),
    "bwgd without lr": (_csv(GOOD, "--method", "bwgd"), "method bwgd needs a learning rate"),
    "srvn on natural": (
        _csv(GOOD, "--method", "srvn", "--posterior", "natural"),
        "SRVN updates a root of the covariance, and NaturalGaussian holds (S m, S), where the same natural",
    ),
    "bwgd on precision, before the data are read": (
        lambda: ("--data", "nowhere.csv", "--method", "bwgd", "--lr", "1", "--posterior", "precision"),
        "BuresWasserstein moves q by Affine, which PrecisionCholeskyGaussian cannot do",
    ),
    "unknown posterior": (
        _csv(GOOD, "--posterior", "precison"),
        "posterior must be one of cholesky, precision, natural, diagonal, flat_cholesky, mean_field, vec, vech; got "
        "'precison'. Did you mean 'precision'?",
    ),
    "unknown structure": (
        _csv(GOOD, "--structure", "banded"),
        "structure must be one of full, diagonal, or the sizes of blocks such as 1,4,2; got 'banded'.",
    ),
    "structure of diagonal": (
        _csv(GOOD, "--posterior", "diagonal", "--structure", "full"),
        "posterior diagonal has the structure diagonal and no other; got 'full'. Any structure is taken by: cholesky,",
    ),
    "blocks that do not sum": (
        _csv(GOOD, "--structure", "1,4"),
        "the blocks of structure 1,4 hold 5 coordinates, and there are 2. Give sizes that sum to them.",
    ),
    "negative counts": (
        _csv("x,y\n1,3\n2,-1\n3,2\n", "--family", "poisson_log"),
        "the Poisson family needs counts 0, 1, 2, ..; got 1 other values, the first -1.",
    ),
    "texts for counts": (
        _csv("x,y\n1,a\n2,b\n", "--family", "poisson_log"),
        "this family needs a target of numbers; 'y' holds classes such as 'a'. Use family bernoulli_logit.",
    ),
    "success of counts": (_csv(GOOD, "--family", "poisson_log", "--success", "1"), "family poisson_log has none"),
    "negative weights": (
        _csv("x,w,y\n1,1,0\n2,-2,1\n", "--weights", "w"),
        "weights must not be negative; column 'w' has -2.",
    ),
    "no residual": (
        _csv("x,y\n1,3\n2,4\n", "--family", "gaussian", "--test-fraction", "0"),
        "noise cannot be found from",
    ),
    "svmlight junk": (lambda: ("--data", _file("a.svm", "junk\n")), "'a.svm' cannot be read as a svmlight file"),
    "lists in lists": (
        _toml("data = " + "[" * 20_000 + "]" * 20_000),
        "'a.toml' cannot be read as TOML: maximum recursion depth exceeded. Write flat lines of short values",
    ),
    "tables in tables": (_toml("data" + ".a" * 2000 + " = 1"), "data must be text in quotes; got {'a': {"),
    "thousands of digits": (_toml(f'data = "iris"\nseed = {"9" * 5000}\n'), "'a.toml' cannot be read as TOML: Exceeds"),
    "beyond 64 bits": (_toml(f'data = "iris"\nseed = {"9" * 400}\n'), "seed must be less than 2^63 in size; got 99999"),
    "beyond a float": (_toml(f'data = "iris"\nlr = {"9" * 400}\n'), "lr must be less than 2^63 in size; got 99999"),
    "an endless config": (
        lambda: ("/dev/zero",),
        "a file of settings has at most 60000 bytes, and '/dev/zero' has more.",
    ),
    "a folder for a config": (lambda: (".",), "'.' is no readable TOML file"),
    "NUL in the config": (
        lambda: ("a\0.toml",),
        "CONFIG.toml must be a name in UTF-8 without a NUL",
    ),
    "NUL in data": (
        _toml('data = "a\\u0000.csv"\n'),
        r"in UTF-8 without a NUL character; got 'a\x00.csv'",
    ),
    "NUL in out": (_csv(GOOD, "--out", "a\0"), r"out must be a name in UTF-8 without a NUL character; got 'a\x00'."),
    "bytes in data": (lambda: ("--data", "caf\udce9.csv"), "data must be a name in UTF-8 without a NUL character"),
    "entries of 1e308": (
        _csv("x,y\n" + "1e308,0\n-1e308,1\n" * 20),
        "column 'x' has entries of size 1e+308; sums of squares overflow from 1e+140 on. Divide it by a constant, or",
    ),
    "weights of 1e308": (
        _csv("x,w,y\n" + "1,1e308,0\n2,1e308,1\n" * 20, "--weights", "w"),
        "column 'w' has entries of size 1e+308;",
    ),
    "differences of 1e-200": (
        _csv("x,y\n" + "1e-200,0\n2e-200,1\n" * 20),
        "column 'x' differs by so little that its standard deviation rounds to 0. Multiply it by a constant, or leave",
    ),
    "out is a file": (
        _csv(GOOD, "--out", "a.csv"),
        "out must be a folder; 'a.csv' is a file. Choose another name (--out).",
    ),
    "out below a file": (_csv(GOOD, "--out", "a.csv/deep"), "a.csv' is a file. Choose another name (--out)."),
    "unknown flag": (lambda: ("--famly", "x"), "unrecognized arguments: --famly. Did you mean '--family'?"),
    "columns with commas between": (
        _csv("a,b,c,y\n" + "1,2,3,0\n2,3,5,1\n" * 20, "--drop", "a,b"),
        "drop column 'a,b' is not in the data. Separate them by spaces, --drop a b. The columns are: a, b, c, y.",
    ),
    "text for a flag": (
        _csv(GOOD, "--lr", "abc"),
        "argument --lr: invalid float value: 'abc'. See torchngvi fit --help.",
    ),
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


def _forget(monkeypatch, *names):
    """As if these packages had not been imported."""
    for name in [name for name in sys.modules if any(f"{name}.".startswith(f"{other}.") for other in names)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(torchngvi, "app", raising=False)


@pytest.mark.parametrize("extra", ["rich", "pandas", "matplotlib", "sklearn"])
def test_missing_extras(extra, capsys, monkeypatch):
    _forget(monkeypatch, "torchngvi.app", extra)
    monkeypatch.setitem(sys.modules, extra, None)
    assert run("--data", "iris", "--success", "setosa") == 2
    error = capsys.readouterr().err
    assert f"{extra} is not installed, and the command line needs it: {install('cli')}." in error
    assert list(Path.cwd().iterdir()) == []


def test_other_import_errors_are_not_hidden(monkeypatch):
    _forget(monkeypatch, "torchngvi.app")
    monkeypatch.setitem(sys.modules, "torchngvi.app.tables", None)
    with pytest.raises(ImportError):
        run("--data", "iris")


def test_no_command(capsys):
    assert main([]) == 0
    assert "usage: torchngvi [-h] [--version] COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "compare --data c.csv --target t --drop id --impute median",
            "unrecognized arguments: --drop --impute median. Only torchngvi fit takes --drop, --impute. "
            "See torchngvi compare --help.",
        ),
        (
            "compare --start 3",
            "unrecognized arguments: --start. Did you mean '--starts'? See torchngvi compare --help.",
        ),
        ("fit --drops=a", "unrecognized arguments: --drops=a. Did you mean '--drop'? See torchngvi fit --help."),
        (
            "fit --drop c.toml",
            "argument --drop: expected at least one argument before c.toml. See torchngvi fit --help.",
        ),
        (
            "predict runs/a new.csv --draws 5",
            "unrecognized arguments: --draws 5. A run of --formula predicts with the draws that it has kept, and "
            "others need none: leave it out. See torchngvi predict --help.",
        ),
        ("methods all", "unrecognized arguments: all. See torchngvi methods --help."),
        ("--verison", "unrecognized arguments: --verison. Did you mean '--version'? See torchngvi --help."),
    ],
)
def test_unknown_flags_of_a_command(command, message, capsys):
    assert main(command.split()) == 2
    assert capsys.readouterr().err == f"torchngvi: error: {message}\n"


@pytest.mark.accuracy
@pytest.mark.parametrize("precision", [None, "flat", "0.1"])
def test_the_prior_is_that_of_the_estimator(precision):
    """Of the same rows, by word; a number is per sd of a column here, and of the estimator behind a scaler."""
    flags = () if precision is None else ("--prior-precision", precision)
    assert run("--data", "iris", "--success", "virginica", "--test-fraction", "0", "--tolerance", "1e-8", *flags) == 0
    X, kind = load_iris(return_X_y=True)
    if precision == "0.1":
        found = [float(row["fitted_mean"]) for row in coefficients("runs/iris")]
        model = BayesianLogisticRegression(prior_precision=0.1).fit(StandardScaler().fit_transform(X), kind == 2)
    else:
        found = [float(row["mean"]) for row in coefficients("runs/iris")]
        model = BayesianLogisticRegression(prior_precision=precision or "default").fit(X, kind == 2)
    np.testing.assert_allclose(found, [*model.intercept_, *model.coef_[0]], rtol=1e-6)


def test_several_columns_after_one_flag():
    flags = ["fit", "--drop", "a", "b", "--drop", "c", "--categorical", "d", "--categorical", "e"]
    found = parser().parse_args(flags)
    assert (found.drop, found.categorical) == (["a", "b", "c"], ["d", "e"])


@pytest.mark.parametrize(
    ("command", "columns", "config"),
    [
        ("fit --drop id c.toml", ["id"], "c.toml"),
        ("fit --drop id name --lr 1 c.toml", ["id", "name"], "c.toml"),
        ("fit --drop id --drop name c.toml", ["id", "name"], "c.toml"),
        ("fit c.toml --drop id d.toml", ["id", "d.toml"], "c.toml"),
        ("compare --methods vn srvn c.toml", ["vn", "srvn"], "c.toml"),
    ],
)
def test_a_file_of_settings_behind_several_values(command, columns, config):
    found = parser().parse_args(command.split())
    assert getattr(found, "methods" if "methods" in command else "drop") == columns
    assert found.config == config


def test_a_run_with_a_file_of_settings_behind_several_values():
    _file("people.csv", "id,x,y\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(40)))
    _file("run.toml", 'data = "people.csv"\ntarget = "y"\nprogress = false\n')
    assert main(["fit", "--drop", "id", "run.toml"]) == 0
    assert [row["name"] for row in coefficients("runs/people")] == ["intercept", "x"]


def test_a_folder_without_permission(capsys, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    assert run("--data", "iris", "--success", "setosa") == 2
    error = capsys.readouterr().err
    assert "out must be a folder where files can be written; in " in error
    assert " none can ([Errno 13] Permission denied). Choose another folder (--out)." in error


def test_a_full_disk(capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert run("--data", "iris", "--success", "setosa") == 2
    captured = capsys.readouterr()
    sentence = "the results cannot be written into 'runs/iris' ([Errno 28] No space left on device), and nothing that"
    assert sentence in captured.err
    assert "petal length" in captured.out  # the fit is not lost with the disk
    assert "written to no folder" in unwrapped(captured.out)
    assert list(Path("runs").iterdir()) == []
