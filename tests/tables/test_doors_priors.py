"""Default priors in the units of the data, through every door for a regression without groups.

Another unit or origin of a column, or another order of the rows, changes no prediction; what an explicit prior says
stays; and the posterior is that of an independent computation.
"""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

import torchngvi
from torchngvi.adapters.sklearn import (
    BayesianLinearRegression,
    BayesianLogisticRegression,
    BayesianPoissonRegression,
)
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

    def test_the_location_is_that_of_the_rate(self):
        frame = table().assign(o=np.log(np.linspace(1, 50, 80)))
        run(frame, "poisson", "--offset", "o")
        rate = np.log(frame.poisson.sum() / np.exp(frame.o).sum())
        assert f"intercept at the means N({rate:.3g}, 2.5^2)" in summary()["priors"]

    def test_a_column_of_ones_is_the_intercept(self):
        frame = table().drop(columns="kind").assign(one=1.0)
        plain = run(frame.drop(columns="one"), "bernoulli")
        assert_same(plain, run(frame, "bernoulli", "--no-intercept", out="other"), ERROR)
        row, other = coefficients().loc["Intercept"], coefficients("other").loc["one"]
        assert abs(row["mean"] - other["mean"]) < 0.05 * row["sd"]

    def test_without_an_intercept_nothing_is_centred(self):
        """By a dense matrix, the noise at its posterior mean; its own spread moves the means by less than .02 sds."""
        frame = table().drop(columns="kind")
        run(frame, "gaussian", "--no-intercept")
        X, found = frame[["x", "z"]].to_numpy(), coefficients()
        size, noise = np.square(frame.gaussian).mean() ** 0.5, found["mean"]["residual sd"]  # the line goes through 0
        precision = X.T @ X / noise**2 + np.diag((2.5 * size / X.std(0)) ** -2)
        mean = np.linalg.solve(precision, X.T @ frame.gaussian / noise**2)
        assert (np.abs(found["mean"][["x", "z"]] - mean) < 0.05 * found["sd"][["x", "z"]]).all()

    def test_flat_is_the_estimate_without_a_prior(self):
        frame = table().drop(columns="kind")
        run(frame, "gaussian", "--prior-precision", "flat")
        design, found = np.c_[np.ones(80), frame[["x", "z"]]], coefficients()
        names = ["Intercept", "x", "z"]
        mean = np.linalg.lstsq(design, frame.gaussian)[0]
        assert (np.abs(found["mean"][names] - mean) < 0.05 * found["sd"][names]).all()

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


def years(seed=1):
    stream = np.random.default_rng(seed)
    year = np.repeat(np.arange(2010, 2020), 30).astype(float)
    return stream, year, (year - 2015)


class TestAYear:
    """A covariate far from 0, whose slope a prior at X = 0 would pull to 0: y = .2 (year - 2015) + noise."""

    @pytest.mark.accuracy
    @pytest.mark.parametrize(("family", "slope"), [("gaussian", 0.2), ("poisson", 0.1), ("bernoulli", 0.3)])
    @pytest.mark.parametrize("door", ["formula", "sklearn"])
    def test_the_slope_is_that_of_maximum_likelihood(self, family, slope, door):
        stream, year, t = years()
        if family == "gaussian":
            y = slope * t + stream.normal(size=len(t))
            kind, energy = BayesianLinearRegression, lambda eta: 0.5 * (y - eta) ** 2
        elif family == "poisson":
            y = stream.poisson(np.exp(0.5 + slope * t))
            kind, energy = BayesianPoissonRegression, lambda eta: np.exp(eta) - y * eta
        else:
            y = (stream.random(len(t)) < stats.logistic.cdf(slope * t)).astype(int)
            kind, energy = BayesianLogisticRegression, lambda eta: np.logaddexp(0, eta) - y * eta
        found = optimize.minimize(lambda b: energy(b[0] + b[1] * t).sum(), [0.0, 0.0]).x[1]
        if door == "formula":
            pd.DataFrame({"year": year, "y": y}).to_csv("years.csv", index=False)
            flags = ["--formula", "y ~ year", "--data", "years.csv", "--likelihood", family, "--no-progress"]
            assert main(["fit", *flags, "--out", "run"]) == 0
            mean, sd = coefficients().loc["year", ["mean", "sd"]]
        else:
            model = kind().fit(year[:, None], y)
            mean, sd = np.ravel(model.coef_)[0], model.coef_sd_[0]
        assert abs(mean - found) < 0.1 * sd
        assert abs(mean - slope) < 3 * sd


ESTIMATORS = {
    "linear": lambda **more: BayesianLinearRegression(**more),
    "linear default": lambda **more: BayesianLinearRegression(prior_precision="default", **more),
    "linear flat": lambda **more: BayesianLinearRegression(prior_precision="flat", **more),
    "logistic": lambda **more: BayesianLogisticRegression(**more),
    "logistic auto": lambda **more: BayesianLogisticRegression(prior_precision="auto", **more),
    "three": lambda **more: BayesianLogisticRegression(**more),
    "poisson": lambda **more: BayesianPoissonRegression(**more),
}


def targets(name, frame):
    if name.startswith("linear"):
        return frame.gaussian.to_numpy()
    return {"poisson": frame.poisson, "three": frame.kind}.get(name, frame.bernoulli).to_numpy()


def predictions(model, X):
    """Means with their standard deviations."""
    if isinstance(model, BayesianLogisticRegression):
        return model.predict_proba(X), model.predict(X, return_std=True)[1]
    return model.predict(X, return_std=True)


class TestEstimators:
    @pytest.mark.parametrize("name", ESTIMATORS)
    @pytest.mark.parametrize("posterior", ["cholesky", "diagonal"])
    def test_units_origins_and_the_order_of_rows_change_no_prediction(self, name, posterior):
        frame = table()
        X, y = frame[["x", "z"]].to_numpy(), targets(name, frame)
        plain = predictions(ESTIMATORS[name](posterior=posterior).fit(X, y), X)
        sd = plain[1].min()
        for change in CHANGES.values():
            other = np.c_[change(X[:, 0]), X[:, 1]]
            found = predictions(ESTIMATORS[name](posterior=posterior).fit(other, y), other)
            for one, two in zip(plain, found, strict=True):
                np.testing.assert_allclose(two, one, rtol=0, atol=1e-6 * sd)
        found = predictions(ESTIMATORS[name](posterior=posterior).fit(X[::-1], y[::-1]), X)
        for one, two in zip(plain, found, strict=True):
            np.testing.assert_allclose(two, one, rtol=0, atol=1e-6 * sd)

    @pytest.mark.parametrize(("scale", "shift"), [(1e-9, 0.0), (1e9, 0.0), (1e-9, 1e6), (1.0, -1e6)])
    @pytest.mark.parametrize("name", ["linear", "linear default"])
    def test_the_unit_and_the_origin_of_y_are_those_of_the_predictions(self, name, scale, shift):
        frame = table()
        X, y = frame[["x", "z"]].to_numpy(), np.round(frame.gaussian.to_numpy(), 6)
        one, other = ESTIMATORS[name]().fit(X, y), ESTIMATORS[name]().fit(X, (y + shift) * scale)
        assert other.converged_
        for a, b, origin in zip(predictions(one, X), predictions(other, X), (shift, 0.0), strict=True):
            np.testing.assert_allclose(b / scale - origin, a, rtol=0, atol=1e-6 * one.noise_)

    @pytest.mark.parametrize("unit", [1.0, 1e-2, 1e-3, 1e-8])
    def test_the_evidence_is_searched_from_the_scale_of_the_data(self, unit):
        """R² was .993 at X·.01 and .000 at X·.001 where the search began at a precision of 1."""
        stream = np.random.default_rng(0)
        X = stream.normal(size=(200, 5))
        y = X @ [3.0, -2.0, 1.0, 0.5, 0.0] + 0.3 * stream.normal(size=200)
        model = BayesianLinearRegression().fit(X * unit, y)
        assert model.score(X * unit, y) > 0.99
        np.testing.assert_allclose(model.coef_ * unit, [3.0, -2.0, 1.0, 0.5, 0.0], atol=0.1)

    def test_data_that_speak_for_no_effect_are_said_to(self):
        stream = np.random.default_rng(0)
        X, y = np.c_[np.tile([1.0, -1.0], 50)], np.repeat([1.0, -1.0], 50) + 1e-3 * stream.normal(size=100)
        with pytest.warns(UserWarning, match="speak for no effect of any column"):
            model = BayesianLinearRegression().fit(X, y)
        assert model.evidence_.at_limit == (0,)
        assert "no effect of any column" in str(model.evidence_)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            BayesianLinearRegression().fit(X, y + 3 * X[:, 0])

    def test_the_attributes_and_draws_are_in_the_units_of_the_columns(self):
        frame = table()
        X = np.c_[CHANGES["down"](frame.x), 100 * frame.z]
        for model, y in ((BayesianLogisticRegression(), frame.bernoulli), (BayesianPoissonRegression(), frame.poisson)):
            model.fit(X, y)
            draws = model.sample_posterior(40_000, random_state=0)
            mean = [*np.ravel(model.coef_), *np.ravel(model.intercept_)]
            sd = np.array([*model.coef_sd_, np.ravel(model.intercept_sd_)[0]])
            np.testing.assert_array_less(np.abs(draws.mean(0) - mean) / sd, 4.5 / 200)
            np.testing.assert_allclose(draws.std(0), sd, rtol=0.02)
            assert model.prior_.startswith("coefficients N(0, 2.5^2) per sd of a column")

    def test_a_column_of_ones_is_the_intercept(self):
        frame = table()
        X, y = frame[["x", "z"]].to_numpy() + 30, frame.bernoulli
        one = BayesianLogisticRegression().fit(X, y)
        two = BayesianLogisticRegression(fit_intercept=False).fit(np.c_[np.ones(80), X], y)
        np.testing.assert_allclose(two.coef_[0], [*one.intercept_, *one.coef_[0]], rtol=1e-6)
        np.testing.assert_allclose(two.coef_sd_, [one.intercept_sd_, *one.coef_sd_], rtol=1e-6)

    @pytest.mark.parametrize("name", ["linear", "linear default", "logistic", "poisson"])
    def test_a_full_set_of_indicators_is_an_intercept(self, name):
        """Levels far from 0 were drawn towards it, and the column beside them lost its slope."""
        frame = table()
        years = frame.x.to_numpy() + 2010
        levels = np.stack([frame.kind == level for level in sorted(set(frame.kind))], 1).astype(float)
        y = targets(name, frame)
        if name.startswith("linear"):
            y = y + 1000
        one, other = np.c_[years, levels[:, 1:]], np.c_[years, levels]
        plain = predictions(ESTIMATORS[name]().fit(one, y), one)
        found = predictions(ESTIMATORS[name](fit_intercept=False).fit(other, y), other)
        np.testing.assert_allclose(found[0], plain[0], rtol=0, atol=0.3 * float(np.mean(plain[1])))

    def test_columns_that_are_constant_or_zero(self):
        frame = table()
        X = np.c_[frame[["x", "z"]], np.full(80, 7.0), np.zeros(80)]
        for fit_intercept in (True, False):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = BayesianPoissonRegression(fit_intercept=fit_intercept).fit(X, frame.poisson)
            assert model.converged_
            assert np.isfinite(model.predict(X)).all()
            plain = BayesianPoissonRegression().fit(X[:, :2], frame.poisson)
            np.testing.assert_allclose(model.predict(X), plain.predict(X[:, :2]), rtol=1e-6)

    def test_float32_columns_that_are_near_zero_in_their_units(self):
        """Computed in float64: what float32 loses is what it cannot hold on entry, 10⁻⁷ of an entry."""
        frame = table()
        X, y = frame[["x", "z"]].to_numpy(), frame.bernoulli
        single = (X * [1e-9, 1e9]).astype(np.float32)
        one, two = BayesianLogisticRegression().fit(X, y), BayesianLogisticRegression().fit(single, y)
        np.testing.assert_allclose(two.predict_proba(single), one.predict_proba(X), atol=1e-6)

    def test_a_number_for_several_classes_is_one_over_c(self):
        """With many rows the posterior mean is near the penalised mode of scikit-learn, C = 1/prior_precision."""
        from sklearn.linear_model import LogisticRegression

        stream = np.random.default_rng(3)
        X = stream.normal(size=(400, 2))
        y = (X @ [[0.0, 1.0, 0.5], [0.0, 0.3, -1.0]] + stream.gumbel(size=(400, 3))).argmax(1)
        for classes in (y, y > 0):
            mine = BayesianLogisticRegression(prior_precision=50.0, intercept_sd=1e3).fit(X, classes)
            other = LogisticRegression(C=1 / 50.0, tol=1e-8).fit(X, classes)
            np.testing.assert_array_less(
                np.abs(mine.coef_ - other.coef_), 0.1 * np.reshape(mine.coef_sd_, mine.coef_.shape)
            )

    def test_three_classes_have_the_default_prior_of_two(self):
        """Without data to speak of: the difference of any two coefficients per sd of a column has the sd 2.5."""
        X = np.array([[-1.0], [1.0], [0.0], [-1.0], [1.0], [0.0]])
        y = np.array([0, 0, 1, 1, 2, 2])
        model = BayesianLogisticRegression().fit(X, y, sample_weight=np.full(6, 1e-6))
        draws = model.sample_posterior(20_000, random_state=0)[:, :, 0] * X.std()
        for one, two in ((0, 1), (1, 2), (0, 2)):
            assert (draws[:, one] - draws[:, two]).std() == pytest.approx(2.5, rel=0.03)


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
