"""From a table to predictions for new rows: by the command line, and by `torchngvi.load`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import torchngvi
from torchngvi.app import families
from torchngvi.app.encoding import as_levels
from torchngvi.app.intervals import outcome_interval
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import BernoulliLogit, GaussianNoise, NegativeBinomial, PoissonLog, StudentT
from torchngvi.posteriors import CholeskyGaussian

FLAGS = ("--impute", "median", "--categorical", "deck", "--drop", "name")


def passengers(rows, seed):
    """Texts, a number that is a category, and ages of which some are missing."""
    stream = np.random.default_rng(seed)
    sex, deck, port = stream.choice(["f", "m"], rows), stream.integers(1, 4, rows), stream.choice(["A", "B"], rows)
    age = stream.normal(35, 12, rows).round(1)
    eta = 1.5 - 1.5 * (sex == "m") - 0.6 * (deck - 1) - 0.03 * (age - 35)
    survived = np.where(stream.random(rows) < 1 / (1 + np.exp(-eta)), "yes", "no")
    age = np.where(stream.random(rows) < 0.2, np.nan, age)
    names = [f"P{k}" for k in range(rows)]
    return pd.DataFrame({"name": names, "sex": sex, "deck": deck, "age": age, "port": port, "survived": survived})


@pytest.fixture(scope="module")
def ship(tmp_path_factory):
    """A folder with a table, and a run on it."""
    folder = tmp_path_factory.mktemp("ship")
    passengers(400, 1).to_csv(folder / "ship.csv", index=False)
    flags = ("--data", str(folder / "ship.csv"), "--target", "survived", "--out", str(folder / "run"), "--no-progress")
    assert main(["fit", *flags, *FLAGS]) == 0
    return folder


@pytest.fixture
def fitted(ship):
    return torchngvi.load(ship / "run")


def test_a_run_is_named_by_its_target(fitted):
    assert re.fullmatch(r"Fitted\('.*ship\.csv', target 'survived', bernoulli_logit, from .*\bage\b.*\)", repr(fitted))


def test_the_design_is_that_of_scikit_learn(ship, fitted):
    """Medians, scales and indicators of the training rows, by its own parts, and probabilities by draws from q."""
    table, new = passengers(400, 1), passengers(50, 2)
    train = train_test_split(table, test_size=0.2, random_state=42)[0]
    medians = SimpleImputer(strategy="median").fit(train[["age"]])

    def design(frame):
        dummies = [frame.sex == "m", frame.deck == 2, frame.deck == 3, frame.port == "B"]
        return np.column_stack([medians.transform(frame[["age"]]), *dummies]).astype(float)

    X = np.c_[np.ones(50), StandardScaler().fit(design(train)).transform(design(new))]
    saved = torch.load(ship / "run" / "posterior.pt", weights_only=True)["posterior"]
    draws = np.random.default_rng(0).standard_normal((20_000, 6)) @ saved["scale_tril"].numpy().T
    eta = (saved["mean"].numpy() + draws) @ X.T
    found = fitted.predict(new)
    p = stats.logistic.cdf(eta)
    np.testing.assert_allclose(found.probability, p.mean(0), atol=4.5 * 0.5 / np.sqrt(len(draws)))
    np.testing.assert_allclose(found[["low", "high"]].T, np.quantile(p, [0.025, 0.975], axis=0), atol=0.01)
    assert (found["class"] == np.where(found.probability > 0.5, "yes", "no")).all()
    assert json.loads((ship / "run" / "summary.json").read_text())["baselines"] == {
        "sex": "f",
        "deck": "1",
        "port": "A",
    }


def test_the_index_and_the_order_of_columns_do_not_matter(fitted):
    new = passengers(5, 3)
    turned = new[new.columns[::-1]].set_index(pd.Index(list("abcde")))
    found = fitted.predict(turned)
    assert found.index.tolist() == list("abcde")
    np.testing.assert_array_equal(found.probability, fitted.predict(new.drop(columns=["name", "survived"])).probability)
    assert fitted.columns == ("sex", "deck", "age", "port")


BAD = {
    "missing column": (lambda f: f.drop(columns="age"), "the table lacks age, which the model predicts from."),
    "close name": (
        lambda f: f.rename(columns={"deck": "Deck"}),
        "lacks deck, which the model predicts from. Did you mean",
    ),
    "other column": (
        lambda f: f.assign(cabin=1),
        "the table has cabin, which the fit has not seen. Leave it out (frame.drop(columns=['cabin'])), or",
    ),
    "unseen level": (
        lambda f: f.assign(port="C"),
        "column 'port' has the level 'C' in 9 of 9 rows, which the fit has not seen; its levels are A, B.",
    ),
    "unseen number": (lambda f: f.assign(deck=7), "column 'deck' has the level '7' in 9 of 9 rows"),
    "text": (
        lambda f: f.assign(age="old"),
        "column 'age' held numbers when the model was fitted; got texts such as 'old' in 9 of 9 rows.",
    ),
    "infinite": (lambda f: f.assign(age=np.inf), "column 'age' has missing or infinite entries in 9 of 9 rows."),
    "array": (lambda f: f.to_numpy(), "predict takes a pandas DataFrame with the columns of the fit; got ndarray."),
}


@pytest.mark.parametrize("case", BAD)
def test_tables_that_do_not_fit(fitted, case):
    change, message = BAD[case]
    with pytest.raises(InputError, match=re.escape(message)):
        fitted.predict(change(passengers(9, 4)))


@pytest.mark.accuracy
def test_missing_entries_where_none_were_filled(tmp_path):
    table = passengers(60, 5).dropna().drop(columns="name")
    table.to_csv(tmp_path / "whole.csv", index=False)
    flags = ("--data", str(tmp_path / "whole.csv"), "--target", "survived", "--out", str(tmp_path / "run"))
    assert main(["fit", *flags, "--no-progress", "--test-fraction", "0"]) == 0
    with pytest.raises(
        InputError, match=re.escape("the table misses entries of age, of age in 1 of 2 rows, and the fit")
    ):
        torchngvi.load(tmp_path / "run").predict(table.head(2).assign(age=[1.0, None]))


class TestCommand:
    def test_written(self, ship, capsys):
        new = passengers(30, 6).drop(columns="survived")
        new.to_csv(ship / "new.csv", index=False, sep=";", decimal=",")
        assert main(["predict", str(ship / "run"), str(ship / "new.csv")]) == 0
        said = capsys.readouterr().out
        assert "probability of 'yes', with 95% intervals, the first 10 of 30 rows" in said
        written = pd.read_csv(ship / "run" / "predictions-new.csv")
        expected = torchngvi.load(ship / "run").predict(new)
        assert written.row.tolist() == list(range(1, 31))
        np.testing.assert_allclose(written.probability, expected.probability)
        assert main(["predict", str(ship / "run"), str(ship / "new.csv")]) == 2
        assert "predictions-new.csv' is there already. Say --overwrite" in capsys.readouterr().err
        assert main(["predict", str(ship / "run"), str(ship / "new.csv"), "--overwrite"]) == 0

    def test_out_and_drop(self, ship, tmp_path):
        passengers(3, 7).assign(cabin=0).to_csv(tmp_path / "a.csv", index=False)
        to = tmp_path / "deep" / "b.csv"
        flags = (str(ship / "run"), str(tmp_path / "a.csv"), "--out", str(to))
        assert main(["predict", *flags]) == 2
        assert not to.exists()
        assert main(["predict", *flags, "--drop", "cabin"]) == 0
        assert len(pd.read_csv(to)) == 3

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("nowhere", "new.csv"), "'nowhere' is no folder of a run: it is not there. Name the folder"),
            (("RUN", "nowhere.csv"), "there is no file 'nowhere.csv'. Check the path."),
            (("RUN", "b.csv"), "which the fit has not seen. Leave it out (--drop 'Customer ID'), or check"),
            (("RUN", "a.svm"), "a table of named columns is a csv, tsv or parquet file; got 'a.svm'. Save it as csv."),
            (("RUN", "a.csv", "--drop", "b"), "drop column 'b' is not in 'a.csv'. Leave it out."),
            (("mixed", "a.csv"), "It is of --formula by an earlier version, which kept no draws. Fit again."),
            (("old", "a.csv"), "is of an earlier version, which kept no 'columns'. Fit again."),
            (
                ("state", "a.csv"),
                "'state/posterior.pt' is no run of torchngvi fit, which is what load reads. A state dict is read by "
                "q.load_state_dict(torch.load(path)), into a q that is made as the saved one was.",
            ),
            (
                ("junk", "a.csv"),
                "'junk/posterior.pt' cannot be read as the posterior of a run (unpack requires",
            ),
            (("RUN", "a.csv", "--out", "a.svm/b.csv"), "the predictions cannot be written to 'a.svm/b.csv'"),
        ],
    )
    def test_refused(self, ship, tmp_path, monkeypatch, capsys, flags, message):
        monkeypatch.chdir(tmp_path)
        passengers(3, 8).to_csv("a.csv", index=False)
        passengers(3, 8).assign(**{"Customer ID": 1}).to_csv("b.csv", index=False)
        Path("a.svm").write_text("1 1:1\n")
        for name in ("mixed", "old", "state", "junk"):
            Path(name).mkdir()
        Path("mixed/effects.csv").touch()
        Path("junk/posterior.pt").write_text("junk")
        torch.save({"settings": {}}, "old/posterior.pt")
        torch.save(torchngvi.CholeskyGaussian(2).state_dict(), "state/posterior.pt")
        assert main(["predict", *(str(ship / "run") if flag == "RUN" else flag for flag in flags)]) == 2
        assert message in capsys.readouterr().err


def test_counts_with_an_offset(tmp_path):
    stream = np.random.default_rng(9)
    x, exposure = stream.normal(size=500), stream.uniform(1, 3, 500)
    table = pd.DataFrame(
        {"x": x, "log_exposure": np.log(exposure), "n": stream.poisson(exposure * np.exp(1 + 0.5 * x))}
    )
    table.to_csv(tmp_path / "claims.csv", index=False)
    flags = (
        "--data",
        str(tmp_path / "claims.csv"),
        "--target",
        "n",
        "--offset",
        "log_exposure",
        "--likelihood",
        "poisson",
    )
    assert main(["fit", *flags, "--out", str(tmp_path / "run"), "--no-progress"]) == 0
    fitted = torchngvi.load(tmp_path / "run")
    found = fitted.predict(table)
    inside = (table.n >= found.low) & (table.n <= found.high)
    assert 0.94 < inside.mean() < 0.995
    assert (found.mean_low < found["mean"]).all()
    assert fitted.columns == ("x", "log_exposure")
    np.testing.assert_allclose(found["mean"], exposure * np.exp(1 + 0.5 * x), rtol=0.25)
    with pytest.raises(InputError, match="offset column 'log_exposure' must hold numbers; the table has texts there"):
        fitted.predict(table.assign(log_exposure="a"))


def test_real_numbers_and_a_flat_posterior(tmp_path):
    stream = np.random.default_rng(10)
    x = stream.normal(size=200)
    table = pd.DataFrame({"x": x, "y": 5 + 2 * x + stream.normal(size=200)})
    table.to_csv(tmp_path / "a.csv", index=False)
    flags = ("--data", str(tmp_path / "a.csv"), "--target", "y", "--likelihood", "gaussian", "--noise", "1")
    found = []
    for name in ("cholesky", "flat_cholesky"):
        others = ("--method", "ifvb", "--max-evaluations", "150") if name.startswith("flat") else ()
        assert main(["fit", *flags, "--posterior", name, *others, "--out", str(tmp_path / name), "--no-progress"]) in (
            0,
            1,
        )
        found.append(torchngvi.load(tmp_path / name).predict(table[["x"]]))
    np.testing.assert_allclose(found[0]["mean"], found[1]["mean"], atol=0.2)
    ols = np.polynomial.Polynomial.fit(x[:], table.y, 1)
    np.testing.assert_allclose(found[0]["mean"], ols(x), atol=0.15)  # of the 160 training rows
    half = (found[0].high - found[0].low) / 2 / stats.norm.ppf(0.975)
    spread = (found[0].mean_high - found[0].mean_low) / 2 / stats.norm.ppf(0.975)
    np.testing.assert_allclose(half, np.sqrt(1 + spread**2))


class TestIntervals:
    def test_counts_are_quantiles_of_the_mixture(self):
        """Against the distribution summed over a fine grid of the predictor."""
        mean, sd = torch.tensor([0.0, 2.0, 7.0, -3.0]).double(), torch.tensor([0.5, 0.1, 0.02, 1e-6]).double()
        low, high = outcome_interval(PoissonLog(), mean, sd**2)
        for e, s, a, b in zip(mean, sd, low, high, strict=True):
            p = np.linspace(0, 1, 20_002)[1:-1]
            rate = np.exp(float(e) + float(s) * stats.norm.ppf(p))
            for tail, count in ((0.025, float(a)), (0.975, float(b))):
                at = stats.poisson.cdf(count, rate).mean()
                before = stats.poisson.cdf(count - 1, rate).mean()
                assert before - 1e-4 < tail <= at + 1e-4

    def test_gaussian(self):
        low, high = outcome_interval(GaussianNoise(2.0), torch.ones(1).double(), torch.ones(1).double(), 0.5)
        np.testing.assert_allclose((low, high), np.array(stats.norm.interval(0.5, 1, 5**0.5))[:, None])

    def test_another_likelihood(self):
        with pytest.raises(InputError, match="for the families of the command line; got BernoulliLogit"):
            outcome_interval(BernoulliLogit(), torch.ones(1), torch.ones(1))

    def test_negative_binomial_counts_are_quantiles_of_the_mixture(self):
        mean, sd, r = torch.tensor([0.0, 2.0, -3.0]).double(), torch.tensor([0.5, 0.1, 1e-6]).double(), 1.7
        low, high = outcome_interval(NegativeBinomial(r), mean, sd**2)
        p = np.linspace(0, 1, 20_002)[1:-1]
        for e, s, a, b in zip(mean, sd, low, high, strict=True):
            rate = np.exp(float(e) + float(s) * stats.norm.ppf(p))
            for tail, count in ((0.025, float(a)), (0.975, float(b))):
                at, before = (stats.nbinom.cdf(k, r, r / (r + rate)).mean() for k in (count, count - 1))
                assert before - 1e-4 < tail <= at + 1e-4

    def test_student_noise_is_a_quantile_of_the_mixture(self):
        mean, sd = torch.tensor([0.0, 200.0]).double(), torch.tensor([0.5, 3.0]).double()
        p = np.linspace(0, 1, 20_002)[1:-1]
        for dof in (1.0, 4.0):
            for tail, ends in zip((0.025, 0.975), outcome_interval(StudentT(2.0, dof), mean, sd**2), strict=True):
                for e, s, end in zip(mean, sd, ends, strict=True):
                    eta = float(e) + float(s) * stats.norm.ppf(p)
                    assert abs(stats.t.cdf(float(end), dof, eta, 2.0).mean() - tail) < 1e-4
        low, high = outcome_interval(StudentT(2.0, 4.0), mean[:1], 0 * sd[:1])
        np.testing.assert_allclose((low, high), np.array(stats.t.interval(0.95, 4, 0, 2))[:, None], rtol=1e-9)


class TestLevels:
    def test_numbers_and_texts(self):
        assert as_levels(pd.Series([1, 2])).tolist() == as_levels(pd.Series([1.0, 2.0])).tolist() == ["1", "2"]
        assert as_levels(pd.Series([" a", None])).tolist() == ["a", None]
        assert as_levels(pd.Series([True, False])).tolist() == ["True", "False"]


def test_the_prior_by_evidence(tmp_path):
    passengers(300, 11).to_csv(tmp_path / "ship.csv", index=False)
    flags = ("--data", str(tmp_path / "ship.csv"), "--target", "survived", *FLAGS, "--no-progress")
    elbo = {}
    for precision in ("auto", "100"):
        folder = tmp_path / precision
        assert main(["fit", *flags, "--prior-precision", precision, "--out", str(folder)]) == 0
        elbo[precision] = json.loads((folder / "summary.json").read_text())
    assert elbo["auto"]["elbo"] > elbo["100"]["elbo"]
    curve = elbo["auto"]["evidence"]
    assert curve[-1]["precision"] == [pytest.approx(elbo["auto"]["prior_precision"])]
    assert curve[-1]["elbo"] == pytest.approx(elbo["auto"]["elbo"], abs=1e-8)
    assert elbo["100"]["evidence"] == []
    assert elbo["auto"]["intercept_sd"] == pytest.approx(2.5)


def test_noise_and_prior_by_evidence(tmp_path, capsys):
    """The estimator of scikit-learn's kind finds the same two numbers, on the same rows in the same scale."""
    from torchngvi.adapters.sklearn import BayesianLinearRegression

    stream = np.random.default_rng(12)
    X = StandardScaler().fit_transform(stream.normal(size=(80, 3)))
    y = X @ [1.0, 2.0, 0.0] + stream.normal(size=80)
    pd.DataFrame(X, columns=list("abc")).assign(y=y).to_csv(tmp_path / "a.csv", index=False)
    flags = ("--likelihood", "gaussian", "--prior-precision", "auto", "--test-fraction", "0", "--no-progress")
    assert (
        main(["fit", "--data", str(tmp_path / "a.csv"), "--target", "y", *flags, "--out", str(tmp_path / "run")]) == 0
    )
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    said = " ".join(capsys.readouterr().out.split())
    assert f"noise {found['noise']:.4g}, found in" in said
    assert "least squares" not in said
    model = BayesianLinearRegression().fit(X, y)
    assert found["noise"] == pytest.approx(model.noise_, rel=1e-5)
    assert found["prior_precision"] == pytest.approx(model.prior_precision_, rel=1e-5)
    assert found["elbo"] == pytest.approx(model.elbo_, abs=1e-6)


def test_two_rows_are_not_said_to_be_well(tmp_path, capsys):
    (tmp_path / "two.csv").write_text("x,y\n1,0\n2,1\n")
    flags = ("--data", str(tmp_path / "two.csv"), "--target", "y", "--test-fraction", "0", "--no-progress")
    assert main(["fit", *flags, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "converged, with a warning" in said
    assert "2 training rows are too few to believe the result" in said


def test_the_package_is_there_before_pytorch():
    """The help must not wait for it; and every name that is exported is found."""
    script = "import sys, torchngvi.cli as c; c.parser().format_help(); print({'torch', 'numpy'} & set(sys.modules))"
    root = str(Path(torchngvi.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n"
    for name in torchngvi.__all__:
        assert getattr(torchngvi, name) is not None
    with pytest.raises(AttributeError, match="module 'torchngvi' has no attribute 'fitt'"):
        torchngvi.fitt  # noqa: B018
    assert "fit" in dir(torchngvi)


def negative_binomial(rows, r, seed):
    stream = np.random.default_rng(seed)
    x = stream.normal(size=rows)
    return pd.DataFrame({"x": x, "n": stream.poisson(np.exp(1 + 0.5 * x) * stream.gamma(r, 1 / r, rows))})


class TestFamiliesWithAParameter:
    """Negative binomial counts and Student's noise: the parameter is where the ELBO of the best q is the largest."""

    def fit(self, folder, table, name, *flags, target="n", code=0):
        table.to_csv(folder / "t.csv", index=False)
        flags = ("--likelihood", name, "--test-fraction", "0", "--overwrite", *flags)
        assert main(["fit", "--data", str(folder / "t.csv"), "--target", target, *flags, "--no-progress",
                     "--out", str(folder / "run")]) == code  # fmt: skip
        return json.loads((folder / "run" / "summary.json").read_text())

    @pytest.mark.accuracy
    def test_negative_binomial(self, tmp_path, capsys):
        table = negative_binomial(800, 2.0, 13)
        best = self.fit(tmp_path, table, "negbin")
        found = best["likelihood"]["dispersion"]
        assert f"negative_binomial, dispersion {found:.4g}" in capsys.readouterr().out
        for factor in (0.95, 1.05):
            assert self.fit(tmp_path, table, "nb", "--dispersion", f"{factor * found}")["elbo"] < best["elbo"]
        assert 1.6 < found < 2.5
        again = self.fit(tmp_path, table, "nb", "--dispersion", f"{found}")
        assert again["elbo"] == pytest.approx(best["elbo"], abs=1e-9)
        assert again["notes"] == []
        fitted = torchngvi.load(tmp_path / "run")
        predictions = fitted.predict(table)
        inside = (table.n >= predictions.low) & (table.n <= predictions.high)
        assert 0.94 < inside.mean() < 0.995
        assert fitted.likelihood.dispersion == pytest.approx(found)

    @pytest.mark.accuracy
    def test_student(self, tmp_path):
        stream = np.random.default_rng(14)
        x = stream.normal(size=400)
        table = pd.DataFrame({"x": x, "y": 50 + 2 * x + 0.5 * stream.standard_t(3, 400)})
        best = self.fit(tmp_path, table, "student_t", "--dof", "3", target="y")
        scale = best["likelihood"]["scale"]
        assert 0.4 < scale < 0.6
        assert best["likelihood"]["dof"] == 3
        for factor in (0.95, 1.05):
            other = self.fit(tmp_path, table, "t", "--dof", "3", "--noise", f"{factor * scale}", target="y")
            assert other["elbo"] < best["elbo"]
        predictions = torchngvi.load(tmp_path / "run").predict(table)
        inside = (table.y >= predictions.low) & (table.y <= predictions.high)
        assert 0.92 < inside.mean() < 0.98

    def test_counts_that_vary_no_more_than_poisson(self, tmp_path):
        stream = np.random.default_rng(15)
        table = pd.DataFrame({"x": stream.normal(size=300), "n": stream.binomial(10, 0.3, 300)})
        found = self.fit(tmp_path, table, "negative_binomial")
        assert found["notes"][0].startswith("the counts vary no more than Poisson's, and dispersion ")
        assert self.fit(tmp_path, table, "poisson")["warnings"] == []

    @pytest.mark.accuracy
    def test_a_parameter_at_the_end_of_its_range_is_told(self, tmp_path, capsys):
        """The likelihood rises to that end: points on a line, counts that are all 0, counts that hardly vary."""
        x = np.random.default_rng(18).normal(size=60)
        line = pd.DataFrame({"x": x, "n": np.r_[2 * x[:-4], [5.0, -3.0, 4.0, 9.0]]})
        found = self.fit(tmp_path, line, "student_t")
        assert found["likelihood_at_limit"] == ["scale"]
        (warning,) = found["warnings"]
        assert warning == (
            f"scale {found['likelihood']['scale']:.4g} is the lower end of the range in which it is sought: most rows "
            "are fitted exactly, so that there is no noise to find it from, or none that is finite. Set it (--noise)."
        )
        assert "converged, with a warning" in capsys.readouterr().out
        found = self.fit(tmp_path, pd.DataFrame({"x": x, "n": 0}), "negative_binomial")
        assert found["likelihood_at_limit"] == ["dispersion"]
        assert found["likelihood"]["dispersion"] > 1  # near a Poisson distribution, as the prior has it
        assert found["warnings"] == [
            f"dispersion {found['likelihood']['dispersion']:.4g} is what its prior says: there are hardly any counts "
            "but 0 to find it from. Set it (--dispersion)."
        ]
        found = self.fit(tmp_path, pd.DataFrame({"x": x, "n": [4, 5] * 30}), "negative_binomial")
        assert (found["likelihood_at_limit"], found["warnings"]) == (["dispersion"], [])
        assert found["notes"] == [
            f"the counts vary no more than Poisson's, and dispersion {found['likelihood']['dispersion']:.4g} is the "
            "upper end of the range in which it is sought: --likelihood poisson says the same with one parameter less"
        ]

    def test_a_parameter_that_has_not_settled_is_told(self, tmp_path):
        found = self.fit(tmp_path, negative_binomial(60, 1.0, 19), "nb", "--max-evaluations", "3", code=1)
        assert found["likelihood_at_limit"] == []
        assert found["warnings"] == [
            f"dispersion {found['likelihood']['dispersion']:.4g} is where the search has ended after 1 fits, before it "
            "had settled. Raise max_evaluations, or set it (--dispersion)."
        ]

    @pytest.mark.accuracy
    def test_counts_that_vary_more(self, tmp_path, capsys):
        found = self.fit(tmp_path, negative_binomial(300, 1.0, 16), "poisson")
        (warning,) = found["warnings"]
        assert re.fullmatch(
            r"the counts vary \S+ times as much about their means as those of a Poisson distribution: intervals are "
            r"too narrow\. Say --likelihood negative_binomial\.",
            warning,
        )
        assert "converged, with a warning" in capsys.readouterr().out

    def test_a_fit_on_the_way_breaks_down(self, monkeypatch):
        table = negative_binomial(30, 1.0, 17)
        model = GeneralizedLinear(torch.ones(30, 1).double(), table.n.to_numpy(), NegativeBinomial(1.0))
        monkeypatch.setattr(families, "predictor_moments", lambda *_: (torch.tensor([torch.nan]), torch.ones(1)))
        with pytest.raises(InputError, match="as a fit on the way to it broke down. Set it"):
            families.maximised(CholeskyGaussian(1).double(), model, NegativeBinomial, max_evaluations=2)


@pytest.mark.parametrize("run", [3, None])
def test_what_is_no_folder(run):
    with pytest.raises(InputError, match=rf"^load takes the folder of a run, .*; got {type(run).__name__}\.$"):
        torchngvi.load(run)
