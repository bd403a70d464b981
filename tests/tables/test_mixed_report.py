"""The report of a mixed formula: priors, ratios, scores of rows held out; and columns that tell nothing, or all."""

import json
import math
import re
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

import torchngvi
from torchngvi.adapters.sklearn import BayesianLinearRegression, BayesianLogisticRegression, BayesianMixedRegressor
from torchngvi.app import mixed_scores
from torchngvi.cli import main
from torchngvi.diagnostics.separation import separating, told
from torchngvi.errors import InputError
from torchngvi.extras import install
from torchngvi.mixed_models.priors import described
from torchngvi.models import Exponential, HalfNormal, HalfT, MixedPrior, Wishart

FORMULA = "died[yes] ~ age + sex + (1 | ward)"


def patients(rows=160, seed=0):
    stream = np.random.default_rng(seed)
    age, sex, ward = stream.normal(size=rows).round(2), stream.choice(["f", "m"], rows), stream.integers(0, 10, rows)
    eta = age - 0.5 * (sex == "m") + np.random.default_rng(9).normal(size=10)[ward]
    died = np.where(stream.random(rows) < 1 / (1 + np.exp(-eta)), "yes", "no")
    return pd.DataFrame({"died": died, "age": age, "sex": sex, "ward": ward})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run with rows held out prints, and its folder."""
    folder = tmp_path_factory.mktemp("hospital")
    table = patients().assign(ward=lambda t: t.ward.where(t.index > 0, 77))  # a ward of one row
    table.to_csv(folder / "patients.csv", index=False)
    flags = ["--data", str(folder / "patients.csv"), "--formula", FORMULA, "--family", "bernoulli", "--no-progress"]
    seed = next(s for s in range(100) if 0 in mixed_scores.parted(table, 0.25, s)[1].index)  # which is held out
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["fit", *flags, "--test-fraction", "0.25", "--seed", str(seed), "--out", str(folder / "run")]) == 0
    return folder, table, seed, said.getvalue()


class TestReport:
    def test_the_score_is_that_of_the_predictions(self, run):
        """-log of the mean over draws of p(y | draw), from what `predict` draws: rows of a ward that is new too."""
        folder, table, seed, said = run
        train, test = mixed_scores.parted(table, 0.25, seed)
        result = torchngvi.mixed(FORMULA, train, "bernoulli").fit(progress=False, seed=seed)
        eta = result.predict(test, kind="linear").draws
        p = torch.where(torch.tensor((test.died == "yes").to_numpy()), eta.sigmoid(), 1 - eta.sigmoid()).mean(0)
        summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
        assert summary["held_out_rows"] == 40
        assert summary["held_out_nll_per_row"] == pytest.approx(-float(p.log().mean()), rel=1e-9)
        assert summary["held_out_accuracy"] == pytest.approx(float((p > 0.5).double().mean()))
        assert summary["held_out_rmse"] is None
        assert f"held out: accuracy {summary['held_out_accuracy']:.3f}, negative log likelihood" in said
        assert summary["rows"] == 120

    def test_priors_and_ratios(self, run):
        folder, _, _, said = run
        summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
        assert re.fullmatch(
            r"fixed effects N\(0, 2\.5\^2\) per sd of a column, intercept at the means N\([-\d.]+, 2\.5\^2\), "
            r"sd over ward half-t\(3, 2\.5\)",
            summary["priors"],
        )
        assert f"priors: {summary['priors']}" in " ".join(said.split())
        assert "odds ratios, e to the power of the fixed effects" in said
        table = pd.read_csv(folder / "run" / "parameters.csv")
        fixed = table[table.kind == "fixed effect"]
        np.testing.assert_allclose(fixed.ratio, np.exp(fixed["mean"]), rtol=1e-12)
        np.testing.assert_allclose(fixed.ratio_high, np.exp(fixed.high), rtol=1e-12)
        assert table[table.kind != "fixed effect"].ratio.isna().all()

    def test_no_ratios_of_a_gaussian_and_scores_of_several_factors(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        table = patients().assign(y=lambda t: t.age + 0.1 * np.arange(160) % 3, day=np.arange(160) % 7)
        table.to_csv("t.csv", index=False)
        flags = ["--data", "t.csv", "--formula", "y ~ age + (1 | ward) + (1 | day)", "--no-progress"]
        assert main(["fit", *flags, "--test-fraction", "0.2"]) == 0
        said = capsys.readouterr().out
        assert "ratio" not in said
        assert "sd over day half-t(3, " in " ".join(said.split())
        assert "residual sd half-t(3, " in said
        train, test = mixed_scores.parted(table, 0.2, 0)
        result = torchngvi.mixed(flags[3], train).fit(progress=False)
        summary = json.loads((tmp_path / "runs" / "t" / "summary.json").read_text(encoding="utf-8"))
        error = result.predict(test).mean.numpy() - test.y.to_numpy()
        assert summary["held_out_rmse"] == pytest.approx(math.sqrt(np.square(error).mean()), rel=1e-9)
        noise = result.draws().parameter[:, None]
        log_p = torch.distributions.Normal(result.predict(test, kind="linear").draws, noise).log_prob(
            torch.tensor(test.y.to_numpy())
        )
        nll = float((math.log(len(log_p)) - log_p.logsumexp(0)).mean())
        assert summary["held_out_nll_per_row"] == pytest.approx(nll, rel=1e-9)

    def test_a_response_that_depends_on_other_rows(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        patients(60).to_csv("t.csv", index=False)
        flags = ["--data", "t.csv", "--formula", "scale(age) ~ sex + (1 | ward)", "--no-progress"]
        assert main(["fit", *flags, "--test-fraction", "0.2"]) == 2
        said = "the response scale(age) depends on all rows of the table, and those held out have another. Write it"
        assert said in capsys.readouterr().err
        assert main(["fit", *flags, "--test-fraction", "1.5"]) == 2
        assert (
            "test_fraction is the share of rows held out, at least 0 and below 1; got 1.5." in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("family", "prior", "expected"),
    [
        ("negative_binomial", None, "half-t(3, 1)"),
        ("poisson_log", MixedPrior(10.0, sd=HalfNormal(2.0)), "fixed effects N(0, 10^2), sd over ward half-normal(2)"),
        ("poisson_log", MixedPrior(sd=HalfT(2.0, 0.5)), "intercept N(0.56, 2.5^2), sd over ward half-t(2, 0.5)"),
        ("poisson_log", MixedPrior(2.5, sd=Exponential(3.0)), "N(0, 2.5^2), sd over ward exponential(rate 3)"),
        ("poisson_log", MixedPrior(precision=Wishart(3.0, 2.0)), "1/variance over ward Wishart(3, scale 2)"),
    ],
)
def test_priors_in_words(family, prior, expected):
    X, groups = torch.ones(12, 1, dtype=torch.float64), torch.arange(12) // 4
    model = torchngvi.MixedModel(X, torch.arange(12) % 5, (X, groups), family, prior=prior)
    assert expected in described(model, "ward")


def test_priors_of_two_effects():
    X, groups = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) // 4
    prior = MixedPrior(sd=HalfNormal(2.0), concentration=2.0)
    model = torchngvi.MixedModel(X, torch.arange(12) % 5, (X, groups), "poisson_log", prior=prior)
    assert described(model).endswith("sd over group half-normal(2), correlations LKJ(2)")
    plain = torchngvi.MixedModel(X, torch.arange(12) % 5, (X, groups), "poisson_log")
    assert described(plain).endswith("sd over group half-t(3, 2.5) per sd of a column, correlations LKJ(1)")
    prior = MixedPrior(precision="kass-natarajan")
    named = torchngvi.MixedModel(X, torch.arange(12) % 5, (X, groups), "poisson_log", prior=prior)
    assert "inverse covariance over group Wishart(3, scale diagonal " in described(named)


class TestSeparation:
    def test_definition(self):
        """Of a column that separates, the likelihood rises along the coefficient for ever; of another it does not."""
        stream = torch.Generator().manual_seed(1)
        y = torch.rand(30, generator=stream) < 0.5
        sign = 2.0 * y - 1
        X = torch.stack([sign * (0.1 + torch.rand(30, generator=stream)), torch.randn(30, generator=stream)], 1)
        X = torch.cat([X, (y & (torch.arange(30) % 5 == 0))[:, None].float(), torch.ones(30, 1)], 1)
        found = separating(X, y)
        assert (found.complete, found.quasi) == ((0,), (2,))
        assert separating(-X, y) == found
        assert separating(X, torch.ones(30).bool()) == ((), ())

    def test_sentences(self):
        some = told(["a", "b", "c"], separating(torch.tensor([[0.0, 0, 5], [1, 1, 5]]), torch.tensor([False, True])))
        assert some == (
            "a, b each separates the classes (complete separation): all entries of one class are above all of the "
            "other; no finite coefficient is the likeliest, and the prior alone bounds it. Look whether the column "
            "says what is to be predicted.",
        )

    def test_command_line(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        table = patients(120).assign(buried=lambda t: (t.died == "yes").astype(int))
        table["coma"] = ((table.died == "yes") & (table.index % 4 == 0)).astype(int)
        table.to_csv("t.csv", index=False)
        assert main(["fit", "--data", "t.csv", "--target", "died", "--drop", "ward", "--no-progress"]) == 0
        warned = json.loads((tmp_path / "runs" / "t" / "summary.json").read_text(encoding="utf-8"))["warnings"]
        assert [text.partition(":")[0] for text in warned] == [
            "buried separates the classes (complete separation)",
            "coma separates the classes in part (quasi-complete separation)",
        ]
        assert "converged, with a warning" in capsys.readouterr().out

    def test_mixed_model(self):
        table = patients(80).assign(buried=lambda t: (t.died == "yes").astype(int))
        result = torchngvi.mixed("died[yes] ~ buried + (1 | ward)", table, "bernoulli").fit(progress=False)
        assert "buried separates the classes (complete separation)" in str(result)
        plain = torchngvi.mixed("died[yes] ~ age + (1 | ward)", table, "bernoulli").fit(progress=False)
        assert "separat" not in str(plain)


class TestConstantColumns:
    def test_the_command_line_tells_them(self, tmp_path, monkeypatch, capsys):
        """The coefficient of a number is that of the prior, and the others are those of the table without it."""
        monkeypatch.chdir(tmp_path)
        patients(100).to_csv("a.csv", index=False)
        patients(100).assign(site=3, land="sea").to_csv("b.csv", index=False)
        for name in "ab":
            assert main(["fit", "--data", f"{name}.csv", "--target", "died", "--no-progress"]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "the same in all training rows, so that its coefficient is that of the prior: site" in said
        assert "the same in all rows, so that there is no column of it: land = sea" in said
        a, b = (torchngvi.load(f"runs/{name}") for name in "ab")
        pd.testing.assert_frame_equal(
            a.predict(patients(5)), b.predict(patients(5).assign(site=3, land="sea")), atol=1e-4
        )
        assert main(["predict", "runs/b", "b.csv"]) == 0

    def test_in_training_rows_alone(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        table = patients(50)
        kept, _ = mixed_scores.parted(table, 0.2, 42)
        table["x"] = np.where(table.index.isin(kept.index), 1.0, 2.0)
        table.to_csv("t.csv", index=False)
        assert main(["fit", "--data", "t.csv", "--target", "died", "--no-progress"]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "the same in all training rows, so that its coefficient is that of the prior: x" in said

    def test_rows_in_batches(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        patients(100).assign(site=3).to_csv("t.csv", index=False)
        flags = ("--batch-rows", "50", "--no-progress")
        assert main(["fit", "--data", "t.csv", "--target", "died", *flags]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "the same in all training rows, so that its coefficient is that of the prior: site" in said

    def test_formula(self):
        message = "site is 3 in all 40 rows, and the intercept is there already: nothing can tell its effect. Leave it"
        with pytest.raises(InputError, match=re.escape(message)):
            torchngvi.mixed("age ~ site + (1 | ward)", patients(40).assign(site=3))
        torchngvi.mixed("age ~ 0 + site + (1 | ward)", patients(40).assign(site=3))  # an intercept by another name

    def test_mixed_models_of_arrays(self):
        X = torch.tensor([[1.0, 0.1 * k, 3.0] for k in range(20)], dtype=torch.float64)
        random = torch.ones(20, 1, dtype=torch.float64), torch.arange(20) % 4
        message = "^Column 2 is the same in all rows, as 0 is: .* Leave one of them out.$"
        with pytest.warns(UserWarning, match=message):
            torchngvi.MixedModel(X, X[:, 1].round().remainder(2), random, "bernoulli").fit(progress=False)

    @pytest.mark.accuracy
    def test_estimators(self):
        X = patients(40)[["age", "ward"]].assign(site=3.0)
        message = r"The same in all 40 rows, so that the prior alone says what the coefficient is: column site = 3\. "
        y = patients(40).died
        with pytest.warns(UserWarning, match=f"{message}Leave it out, as sklearn"):
            BayesianLogisticRegression().fit(X, y)
        with pytest.warns(UserWarning, match=message):
            BayesianLogisticRegression().fit(X, y.where(X.age < 1, "lost"))
        with (
            pytest.warns(UserWarning, match=message),
            pytest.warns(UserWarning, match="site is the same in all rows, as intercept is"),
        ):
            BayesianMixedRegressor("ward").fit(X, X.age)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            BayesianLogisticRegression().fit(X[["age"]], y)
            BayesianLinearRegression(fit_intercept=False).fit(X, X.age)


def test_how_extras_are_installed(tmp_path, monkeypatch):
    """Of a source tree the command is one on its folder; of an installed package one on its name."""
    root = tmp_path / "clone"
    (root / "torchngvi").mkdir(parents=True)
    monkeypatch.setattr("torchngvi.extras.__file__", str(root / "torchngvi" / "extras.py"))
    assert install("cli") == "pip install 'torchngvi[cli]'"
    (root / "setup.cfg").write_text("[metadata]\nname = torchngvi\n", encoding="utf-8")
    assert install("cli") == f"pip install -e '{root}[cli]'"
    monkeypatch.chdir(root)
    assert install("cli") == "pip install -e '.[cli]'"
