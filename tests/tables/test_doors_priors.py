"""Default priors in the units of the data, through every door for a regression without groups.

Another unit or origin of a column, or another order of the rows, changes no prediction; what an explicit prior says
stays; and the posterior is that of an independent computation.
"""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import torchngvi
from torchngvi.adapters.sklearn import BayesianLogisticRegression, BayesianPoissonRegression
from torchngvi.cli import main

NEW = 20  # rows that are predicted
ERROR = 3 * (2 / 1000) ** 0.5  # sds, three standard errors of the difference of two means of 1,000 draws
FAMILIES = ("gaussian", "bernoulli", "poisson", "negative_binomial", "student_t", "probit")
FAR = 2.0**-4 * 10**6  # standard deviations of the column x
CHANGES = {"up": lambda x: (x + FAR) * 1e9, "down": lambda x: (x - FAR) * 1e-9, "unit": lambda x: x * 1e9}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(rows=80, seed=0):
    """Rows with a column x of the standard deviation 1/16, whose digits survive a shift by 10⁶ of them."""
    stream = np.random.default_rng(seed)
    x = np.round(stream.normal(size=rows) / 16, 6)
    kind = stream.choice(["a", "b", "c"], rows)
    z = stream.normal(size=rows)
    eta = 0.4 + 8 * x - 0.5 * z + 0.8 * (kind == "b")
    return pd.DataFrame(
        {
            "x": x,
            "z": z,
            "kind": kind,
            "gaussian": 5 + eta + 0.5 * stream.normal(size=rows),
            "student_t": 5 + eta + 0.5 * stream.standard_t(3, size=rows),
            "bernoulli": np.where(stream.random(rows) < stats.logistic.cdf(eta), "yes", "no"),
            "probit": (stream.random(rows) < stats.norm.cdf(eta)).astype(int),
            "poisson": stream.poisson(np.exp(eta)),
            "negative_binomial": stream.poisson(np.exp(eta) * stream.gamma(2, 0.5, rows)),
        }
    )


def run(frame, family, *flags, out="run"):
    """Predictions of the command line for the first rows."""
    names = [name for name in ("x", "z", "kind", "one", "w", "o") if name in frame]
    kept = frame[names].assign(y=frame[family])
    kept.to_csv("rows.csv", index=False)
    data = ["--data", "rows.csv", "--target", "y", "--likelihood", family, "--test-fraction", "0", "--no-progress"]
    assert main(["fit", *data, "--out", out, "--overwrite", *map(str, flags)]) == 0
    return torchngvi.load(out).predict(kept.drop(columns="y").head(NEW))


def summary(out="run"):
    with open(f"{out}/summary.json") as file:
        return json.load(file)


def coefficients(out="run"):
    return pd.read_csv(f"{out}/coefficients.csv").set_index("name")


def assert_same(one, other, tolerance=1e-6):
    """Equal to 10⁻⁶ of the interval of each prediction; where draws differ the means alone, to their error."""
    low, high, name = ("low", "high", "probability") if "probability" in one else ("mean_low", "mean_high", "mean")
    sd = (one[high] - one[low]).to_numpy() / (2 * 1.96)
    for column in (name, low, high) if tolerance < 0.01 else (name,):
        np.testing.assert_array_less(np.abs(one[column] - other[column]).to_numpy() / sd, tolerance)


class TestCommandLine:
    @pytest.mark.accuracy
    @pytest.mark.parametrize("family", FAMILIES)
    def test_units_origins_and_the_order_of_rows_change_no_prediction(self, family):
        frame = table()
        flags = ("--dof", 4) if family == "student_t" else ()
        flags += ("--tolerance", 1e-8)
        plain = run(frame, family, *flags)
        for name in ("up", "down") if family in ("gaussian", "bernoulli") else ("up",):
            other = frame.assign(x=CHANGES[name](frame.x))
            run(other[::-1], family, *flags, out="other")
            assert_same(plain, torchngvi.load("other").predict(other[["x", "z", "kind"]].head(NEW)))

    @pytest.mark.accuracy
    def test_another_baseline_of_a_category_moves_predictions_little(self):
        frame = table()
        plain = run(frame, "bernoulli")
        other = run(frame.assign(kind=frame.kind.map({"a": "z", "b": "b", "c": "c"})), "bernoulli", out="other")
        assert summary("other")["baselines"] != summary()["baselines"]
        assert_same(plain, other, 0.1 + ERROR)

    @pytest.mark.accuracy
    def test_rows_of_weight_0_are_not_there_and_weights_are_repetitions(self):
        frame = table().assign(w=np.tile([0.0, 1.0, 2.0, 1.0], 20))
        rows = frame[["x", "z", "kind"]].iloc[1:4]
        frame.loc[frame.w == 0, "x"] = 1e7
        run(frame, "poisson", "--weights", "w", "--tolerance", 1e-8)
        run(
            frame.loc[frame.index.repeat(frame.w.astype(int))].drop(columns="w"),
            "poisson",
            "--tolerance",
            1e-8,
            out="r",
        )
        assert_same(torchngvi.load("run").predict(rows), torchngvi.load("r").predict(rows))

    @pytest.mark.parametrize("flags", [(), ("--batch-rows", "2")])
    def test_weights_that_are_all_0_are_refused(self, flags, capsys):
        pd.DataFrame({"x": [1, 2, 3, 4], "w": 0, "y": [2, 3, 5, 6]}).to_csv("zeros.csv", index=False)
        data = ["--data", "zeros.csv", "--target", "y", "--weights", "w", "--likelihood", "poisson"]
        assert main(["fit", *data, "--test-fraction", "0", *flags]) == 2
        assert "row has a positive weight" in capsys.readouterr().err

    def test_the_prior_is_printed_and_saved(self, capsys):
        frame = table()
        run(frame, "gaussian")
        s = frame.gaussian.std(ddof=0)
        said = f"fixed effects N(0, {2.5 * s:.3g}^2) per sd of a column"
        assert said in summary()["priors"]
        assert said in " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert f"intercept at the means N({frame.gaussian.mean():.3g}, {2.5 * s:.3g}^2)" in summary()["priors"]

    def test_a_column_of_ones_is_the_intercept(self):
        frame = table().drop(columns="kind").assign(one=1.0)
        plain = run(frame.drop(columns="one"), "bernoulli")
        assert_same(plain, run(frame, "bernoulli", "--no-intercept", out="other"), ERROR)
        row, other = coefficients().loc["Intercept"], coefficients("other").loc["one"]
        assert abs(row["mean"] - other["mean"]) < 0.05 * row["sd"]

    def test_a_number_keeps_its_meaning(self):
        """N(0, 1/B) per sd of a column and N(0, S²) of the intercept, by a dense matrix."""
        frame = table().drop(columns="kind")
        run(frame, "gaussian", "--prior-precision", 3, "--intercept-sd", 2)
        X, found = frame[["x", "z"]].to_numpy(), coefficients()
        design, noise = np.c_[np.ones(80), (X - X.mean(0)) / X.std(0)], found["mean"]["residual sd"]
        precision = design.T @ design / noise**2 + np.diag([1 / 4, 3, 3])
        mean = np.linalg.solve(precision, design.T @ frame.gaussian / noise**2)[1:] / X.std(0)
        assert (np.abs(found["mean"][["x", "z"]] - mean) < 0.05 * found["sd"][["x", "z"]]).all()
        said = "coefficients N(0, 0.5774^2) per sd of a column (precision 3), intercept at the means N(0, 2^2)"
        assert said in summary()["priors"]


def exact_moments(X, y, family):
    """Means and sds of the coefficients under the priors of rstanarm, by importance sampling about the mode.

    The columns are standardised here by NumPy, the mode is found by Newton's method, and the moments are those of
    weighted draws from a t distribution about it: nothing of it is shared with the package.
    """
    design = np.c_[np.ones(len(X)), (X - X.mean(0)) / X.std(0)]
    rate = y.mean()
    center = np.r_[np.log(rate / (1 - rate)) if family == "bernoulli" else np.log(rate), np.zeros(X.shape[1])]
    mode = center
    for _ in range(30):
        mean = stats.logistic.cdf(design @ mode) if family == "bernoulli" else np.exp(design @ mode)
        curvature = mean * (1 - mean) if family == "bernoulli" else mean
        hessian = design.T @ (design * curvature[:, None]) + np.eye(len(mode)) / 2.5**2
        mode = mode - np.linalg.solve(hessian, design.T @ (mean - y) + (mode - center) / 2.5**2)
    proposal = stats.multivariate_t(mode, np.linalg.inv(hessian), df=7, seed=0)
    a = proposal.rvs(100_000)
    eta = a @ design.T
    data = (np.logaddexp(0, eta) if family == "bernoulli" else np.exp(eta)) - y * eta
    log = -data.sum(-1) - 0.5 * np.square((a - center) / 2.5).sum(-1) - proposal.logpdf(a)
    weights = np.exp(log - log.max())
    weights /= weights.sum()
    assert 1 / np.square(weights).sum() > 50_000  # effective draws
    b = a / np.r_[1, X.std(0)]
    b[:, 0] -= b[:, 1:] @ X.mean(0)
    mean = weights @ b
    return mean, np.sqrt(weights @ np.square(b - mean))


@pytest.mark.accuracy
@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_the_posterior_is_that_of_an_independent_computation(family):
    """Within what the best Gaussian and 50,000 effective draws leave: 3 percent of an sd."""
    frame = table(200, seed=3)
    X, y = frame[["x", "z"]].to_numpy() * [1, 40] + [2000, 0], frame[family]
    y = (y == "yes").to_numpy(float) if family == "bernoulli" else y.to_numpy(float)
    mean, sd = exact_moments(X, y, family)
    model = (BayesianLogisticRegression if family == "bernoulli" else BayesianPoissonRegression)().fit(X, y)
    found = np.r_[model.intercept_, np.ravel(model.coef_)], np.r_[model.intercept_sd_, model.coef_sd_]
    np.testing.assert_array_less(np.abs(found[0] - mean) / sd, 0.03)
    np.testing.assert_allclose(found[1], sd, rtol=0.03)
    frame[["x", "z"]] = X
    run(frame.drop(columns="kind"), family)
    rows = coefficients()
    np.testing.assert_array_less(np.abs(rows["mean"] - mean) / sd, 0.05)  # of 4,096 draws, evenly spread
    np.testing.assert_allclose(rows["sd"], sd, rtol=0.05)
