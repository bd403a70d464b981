"""The regressions as estimators: scikit-learn's own checks, closed forms, units, and what a posterior adds."""

import math
import pickle
import re
import warnings

import numpy as np
import pandas
import pytest
import torch
from scipy import optimize, stats

pytest.importorskip("sklearn", reason="scikit-learn is in the extra sklearn", minversion="1.6")

from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
from torchngvi.adapters.sklearn import (
    BayesianLinearRegression,
    BayesianLogisticRegression,
    BayesianPoissonRegression,
    QuasiCounts,
)
from torchngvi.adapters.sklearn.estimators import softmax_model
from torchngvi.errors import InputError
from torchngvi.models.likelihoods import PoissonLog
from torchngvi.tables.model import MixedModel
from torchngvi.testing import check_likelihood

LOGISTIC, LINEAR, POISSON = BayesianLogisticRegression, BayesianLinearRegression, BayesianPoissonRegression
FAR = 2.0**-4 * 10**6  # standard deviations of the first column
CHANGES = {"up": lambda x: (x + FAR) * 1e9, "down": lambda x: (x - FAR) * 1e-9, "unit": lambda x: x * 1e9}
KINDS = {
    "linear": (LINEAR(), "numbers"),
    "linear default": (LINEAR(prior_precision="default"), "numbers"),
    "linear flat": (LINEAR(prior_precision="flat"), "numbers"),
    "logistic": (LOGISTIC(), "two"),
    "logistic auto": (LOGISTIC(prior_precision="auto"), "two"),
    "three": (LOGISTIC(), "three"),
    "poisson": (POISSON(), "counts"),
}


def data(rows=80, seed=0):
    """Rows whose first column has the sd 1/16, so that its digits survive a shift by 10⁶ sds, and targets."""
    stream = np.random.default_rng(seed)
    X = np.c_[np.round(stream.normal(size=rows) / 16, 6), stream.normal(size=rows)]
    eta = 0.4 + X @ [8, -0.5]
    targets = {
        "numbers": 5 + eta + 0.5 * stream.normal(size=rows),
        "two": np.where(stream.random(rows) < stats.logistic.cdf(eta), "yes", "no"),
        "counts": stream.poisson(np.exp(eta)),
    }
    targets["three"] = np.where(X[:, 1] > 0.7, "maybe", targets["two"])
    return X, targets


def predictions(model, X):
    """Means with their standard deviations."""
    found = model.predict(X, return_std=True)
    return (model.predict_proba(X), found[1]) if hasattr(model, "predict_proba") else found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        LINEAR(prior_precision=1.0, noise=1.0),
        pytest.param(LOGISTIC(class_weight="balanced"), marks=pytest.mark.accuracy),
        pytest.param(POISSON(), marks=pytest.mark.accuracy),
        pytest.param(LINEAR(), marks=pytest.mark.slow),
        pytest.param(LOGISTIC(), marks=pytest.mark.slow),
        pytest.param(LOGISTIC(prior_precision="auto"), marks=pytest.mark.slow),
    ],
    ids=lambda e: str(e)[:40],
)
def test_check_estimator(estimator):
    done = check_estimator(estimator, on_skip=None, on_fail="raise")
    assert len(done) > 50
    skipped = {check["check_name"] for check in done if check["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}  # needs an environment variable of SciPy


class TestClosedForms:
    def test_linear(self):
        X, y = data()
        model = LINEAR(prior_precision=2.0, noise=0.5, intercept_sd=3.0).fit(X, y["numbers"])
        design = np.c_[X, np.ones(80)]
        covariance = np.linalg.inv(design.T @ design / 0.25 + np.diag([2.0, 2.0, 1 / 9]))
        mean = covariance @ design.T @ y["numbers"] / 0.25
        np.testing.assert_allclose([*model.coef_, model.intercept_], mean, rtol=1e-7)
        np.testing.assert_allclose([*model.coef_sd_, model.intercept_sd_], np.sqrt(np.diag(covariance)), rtol=1e-7)
        found, sd = model.predict(X, return_std=True)
        np.testing.assert_allclose(found, design @ mean, rtol=1e-7)
        variance = np.einsum("nd,de,ne->n", design, covariance, design)
        np.testing.assert_allclose(sd, np.sqrt(variance + 0.25), rtol=1e-7)

    def test_many_columns(self):
        """More than rows, where the posterior has a rank: the ridge regression of as many penalties."""
        stream = np.random.default_rng(0)
        X, y = stream.normal(size=(20, 300)), stream.normal(size=20)
        model = LINEAR(prior_precision=2.0, noise=1.0, fit_intercept=False).fit(X, y)
        np.testing.assert_allclose(model.coef_, X.T @ np.linalg.solve(X @ X.T + 2 * np.eye(20), y), atol=1e-8)

    @pytest.mark.accuracy
    @pytest.mark.parametrize("classes", [2, 3])
    @pytest.mark.parametrize("precision", [1e-6, 50.0])
    def test_the_modes_of_scikit_learn(self, classes, precision):
        """With many rows the posterior mean is near the penalised mode, C = 1/precision whatever the classes."""
        stream = np.random.default_rng(3)
        X = stream.normal(size=(2000, 2))
        y = (X @ [[0.0, 1.0, 0.5], [0.0, 0.3, -1.0]] + stream.gumbel(size=(2000, 3)) + [0, 0.5, 0.2]).argmax(1)
        y = np.minimum(y, classes - 1)
        mine = LOGISTIC(prior_precision=precision, intercept_sd=1e3).fit(X, y)
        other = LogisticRegression(C=1 / precision, tol=1e-8).fit(X, y)
        sd = np.reshape(mine.coef_sd_, mine.coef_.shape)
        np.testing.assert_array_less(np.abs(mine.coef_ - other.coef_), 0.1 * sd)
        np.testing.assert_array_less(np.abs(mine.intercept_ - other.intercept_), 0.1 * mine.intercept_sd_ + 1e-3)

    def test_weights_are_repetitions_and_those_of_classes_weigh_rows(self):
        X, y = data()
        w = np.random.default_rng(1).integers(0, 3, 80)
        one = LOGISTIC().fit(X, y["two"], sample_weight=w)
        two = LOGISTIC().fit(np.repeat(X, w, 0), np.repeat(y["two"], w))
        np.testing.assert_allclose(one.coef_, two.coef_, rtol=1e-6)
        by_class = LOGISTIC(class_weight={"yes": 3.0, "no": 1.0}).fit(X, y["two"], sample_weight=w)
        by_row = LOGISTIC().fit(X, y["two"], sample_weight=w * np.where(y["two"] == "yes", 3, 1))
        np.testing.assert_array_equal(by_class.coef_, by_row.coef_)

    def test_the_prior_and_the_noise_by_evidence(self):
        X, y = data(200)
        model = LINEAR().fit(X, y["numbers"])
        assert model.noise_ == pytest.approx(0.5, rel=0.15)
        assert model.evidence_.converged
        X = (X - X.mean(0)) / X.std(0)
        for noise, precision in ((0.4, model.prior_precision_), (model.noise_, 10 * model.prior_precision_)):
            other = LINEAR(noise=noise, prior_precision=precision).fit(X, y["numbers"])
            assert other.elbo_ < model.elbo_

    @pytest.mark.parametrize("kind", ["logistic", "three", "poisson"])
    def test_predictions_are_averages_over_draws(self, kind):
        X, y = data(30)
        model, target = KINDS[kind]
        model = clone(model).set_params(prior_precision=0.5).fit(X, y[target])
        draws = model.sample_posterior(40_000, random_state=0)
        eta = draws @ np.c_[X, np.ones(30)].T
        found, sd = predictions(model, X)
        if kind == "poisson":
            p, sd = np.exp(eta), np.sqrt(sd**2 - found)  # without the noise of counts
        elif kind == "logistic":
            p, found = stats.logistic.cdf(eta), found[:, 1]
        else:
            place = found.argmax(1)
            assert model.predict(X).tolist() == model.classes_[place].tolist()
            np.testing.assert_array_equal(model.decision_function(X).argmax(1), place)
            np.testing.assert_allclose(draws.sum(1), 0, atol=1e-9)
            p, found = np.exp(eta) / np.exp(eta).sum(1, keepdims=True), found[range(30), place]
            p = p[:, place, range(30)]
        np.testing.assert_allclose(found, p.mean(0), rtol=0.03)
        np.testing.assert_allclose(sd, p.std(0), rtol=0.05, atol=1e-3)


FAMILIES = {"linear default": "gaussian", "logistic": "bernoulli", "poisson": "poisson"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_priors_and_answers_are_those_of_a_regression_of_a_table(kind):
    """By 40,000 weighted draws: means to 4.5 of their errors and what the best Gaussian leaves, sds to 4 %."""
    X, y = data()
    model, target = KINDS[kind]
    y = (y[target] == "yes").astype(float) if target == "two" else y[target].astype(float)
    model = clone(model).fit(X, y)
    result = MixedModel(np.c_[np.ones(80), X], y, None, FAMILIES[kind]).fit(draws=40_000, progress=False)
    fixed = result.summary().fixed
    mean, sd = np.r_[model.intercept_, np.ravel(model.coef_)], np.r_[model.intercept_sd_, model.coef_sd_]
    error = 4.5 / math.sqrt(result.effective) + 0.02
    np.testing.assert_array_less(np.abs(mean - fixed.mean.numpy()) / sd, error)
    np.testing.assert_allclose(fixed.sd.numpy(), sd, rtol=0.04)
    ours, theirs = (re.findall(r"N\(([^,]+), ([^,]+)\^2\)", text) for text in (model.prior_, result.priors))
    np.testing.assert_allclose(np.array(ours, float), np.array(theirs, float), rtol=5e-3)


class TestPosterior:
    def test_draws(self):
        X, y = data()
        model = LOGISTIC(fit_intercept=False).fit(X, y["two"])
        draws = model.sample_posterior(20_000, random_state=1)
        assert draws.shape == (20_000, 2)
        np.testing.assert_array_less(np.abs(draws.mean(0) - model.coef_[0]) / model.coef_sd_, 5 / math.sqrt(20_000))
        np.testing.assert_allclose(draws.std(0), model.coef_sd_, rtol=0.03)
        np.testing.assert_array_equal(draws, model.sample_posterior(20_000, random_state=1))
        assert not np.array_equal(model.sample_posterior(5), model.sample_posterior(5))
        assert (model.intercept_, model.intercept_sd_) == (0, 0)
        for count in (-1, 1.5, True, "a"):
            with pytest.raises(InputError, match=r"^n_samples is a number of draws and must be a whole number"):
                model.sample_posterior(count)
        model = LOGISTIC(fit_intercept=False, posterior="diagonal").fit(X, y["three"])
        assert model.converged_
        assert model.sample_posterior(2).shape == (2, 3, 2)
        assert model.intercept_.tolist() == model.intercept_sd_.tolist() == [0, 0, 0]

    @pytest.mark.parametrize("kind", ["logistic", "poisson"])
    def test_the_attributes_and_draws_are_in_the_units_of_the_columns(self, kind):
        X, y = data()
        model, target = KINDS[kind]
        model = clone(model).fit(np.c_[CHANGES["down"](X[:, 0]), 100 * X[:, 1]], y[target])
        draws = model.sample_posterior(40_000, random_state=0)
        sd = np.array([*model.coef_sd_, np.ravel(model.intercept_sd_)[0]])
        mean = [*np.ravel(model.coef_), *np.ravel(model.intercept_)]
        np.testing.assert_array_less(np.abs(draws.mean(0) - mean) / sd, 4.5 / 200)
        np.testing.assert_allclose(draws.std(0), sd, rtol=0.02)
        assert model.prior_.startswith("coefficients N(0, 2.5^2) per sd of a column")

    def test_a_diagonal_posterior_is_narrower(self):
        X, y = data()
        X[:, 1] = X[:, 1] + 16 * X[:, 0]
        wide, narrow = (LOGISTIC(posterior=kind).fit(X, y["two"]) for kind in ("cholesky", "diagonal"))
        assert (narrow.coef_sd_ < 0.9 * wide.coef_sd_).all()

    def test_pipelines_searches_and_names_of_columns(self):
        X, y = data()
        pipe = make_pipeline(StandardScaler(), LOGISTIC())
        assert cross_val_score(pipe, X * [1, 1000], y["two"], cv=3).mean() > 0.55
        search = GridSearchCV(pipe, {"bayesianlogisticregression__prior_precision": [0.1, 100.0]}, cv=3)
        assert search.fit(X, y["two"]).best_params_["bayesianlogisticregression__prior_precision"] in (0.1, 100.0)
        frame = pandas.DataFrame(X, columns=["a", "b"])
        model = LOGISTIC().fit(frame, y["two"])
        assert model.feature_names_in_.tolist() == ["a", "b"]
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(frame[["b", "a"]])

    def test_no_class_is_a_baseline(self):
        """With other names, and so another first class, the same coefficients and probabilities."""
        X, y = data()
        one = LOGISTIC(intercept_sd=2.0).fit(X, y["three"])
        other = LOGISTIC(intercept_sd=2.0).fit(X, np.where(y["three"] == "no", "zzz", y["three"]))
        for name in ("coef_", "coef_sd_", "intercept_", "intercept_sd_"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name)[[0, 2, 1]], rtol=1e-3)
        np.testing.assert_allclose(one.predict_proba(X), other.predict_proba(X)[:, [0, 2, 1]], atol=1e-4)
        np.testing.assert_allclose(one.coef_.sum(0), 0, atol=1e-12)

    def test_softmax_of_two_classes_is_logistic_regression(self):
        X, y = data(40)
        design, precision = torch.as_tensor(np.c_[X, np.ones(40)]), torch.tensor([2.0, 2.0, 0.01])
        codes = (y["two"] == "yes").astype(int)
        model = softmax_model(design, codes, 2 * precision, None)  # a coefficient of two classes is a difference
        other = GeneralizedLinear(design, torch.as_tensor(codes), prior_precision=precision.double())
        one, two = (CholeskyGaussian(3, dtype=torch.float64) for _ in range(2))
        for q, joint in ((one, model), (two, other)):
            fit(q, joint, progress=False, examine=False, tolerance=1e-8)
        torch.testing.assert_close(one.mean, two.mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(one.covariance, two.covariance, rtol=0, atol=1e-6)

    def test_three_classes_have_the_default_prior_of_two(self):
        """Without data to speak of: the difference of any two coefficients per sd of a column has the sd 2.5."""
        X, y = np.array([[-1.0], [1.0], [0.0]] * 2), np.array([0, 0, 1, 1, 2, 2])
        model = LOGISTIC().fit(X, y, sample_weight=np.full(6, 1e-6))
        draws = model.sample_posterior(20_000, random_state=0)[:, :, 0] * X.std()
        for one, two in ((0, 1), (1, 2), (0, 2)):
            assert (draws[:, one] - draws[:, two]).std() == pytest.approx(2.5, rel=0.03)


class TestUnits:
    @pytest.mark.accuracy
    @pytest.mark.parametrize(
        ("kind", "posterior"), [*((kind, "cholesky") for kind in KINDS), ("linear", "diagonal"), ("three", "diagonal")]
    )
    def test_units_origins_and_the_order_of_rows_change_no_prediction(self, kind, posterior):
        X, y = data()
        model, target = KINDS[kind]
        model = clone(model).set_params(posterior=posterior)
        plain = predictions(model.fit(X, y[target]), X)
        sd, tables = plain[1].min(), [np.c_[change(X[:, 0]), X[:, 1]] for change in CHANGES.values()]
        found = [predictions(model.fit(other, y[target]), other) for other in tables]
        found.append(predictions(model.fit(X[::-1], y[target][::-1]), X))
        for one in found:
            np.testing.assert_allclose(one[0], plain[0], rtol=0, atol=1e-6 * sd)
            np.testing.assert_allclose(one[1], plain[1], rtol=0, atol=1e-6 * sd)

    @pytest.mark.sparse(3)
    @pytest.mark.parametrize(("scale", "shift"), [(1e-9, 0.0), (1e9, 0.0), (1e-9, 1e6), (1.0, -1e6)])
    @pytest.mark.parametrize("kind", ["linear", "linear default"])
    def test_the_unit_and_the_origin_of_y_are_those_of_the_predictions(self, kind, scale, shift):
        X, y = data()
        y = np.round(y["numbers"], 6)
        one, other = clone(KINDS[kind][0]).fit(X, y), clone(KINDS[kind][0]).fit(X, (y + shift) * scale)
        assert other.converged_
        for a, b, origin in zip(predictions(one, X), predictions(other, X), (shift, 0.0), strict=True):
            np.testing.assert_allclose(b / scale - origin, a, rtol=0, atol=1e-6 * one.noise_)

    @pytest.mark.parametrize("unit", [1.0, 1e-2, 1e-3, 1e-8])
    def test_the_evidence_is_searched_from_the_scale_of_the_data(self, unit):
        """R² was .993 at X·.01 and .000 at X·.001 where the search began at a precision of 1."""
        stream = np.random.default_rng(0)
        X = stream.normal(size=(200, 5))
        y = X @ [3.0, -2.0, 1.0, 0.5, 0.0] + 0.3 * stream.normal(size=200)
        model = LINEAR().fit(X * unit, y)
        assert model.score(X * unit, y) > 0.99
        np.testing.assert_allclose(model.coef_ * unit, [3.0, -2.0, 1.0, 0.5, 0.0], atol=0.1)

    @pytest.mark.parametrize(("kind", "slope"), [("linear", 0.2), ("poisson", 0.1), ("logistic", 0.3)])
    def test_the_slope_of_a_year_is_that_of_maximum_likelihood(self, kind, slope):
        """A covariate far from 0, whose slope a prior at X = 0 would pull to 0."""
        stream = np.random.default_rng(1)
        t = np.repeat(np.arange(-5.0, 5.0), 30)
        y, energy = {
            "linear": (slope * t + stream.normal(size=300), lambda eta: 0.5 * eta**2),
            "poisson": (stream.poisson(np.exp(0.5 + slope * t)), np.exp),
            "logistic": (1 * (stream.random(300) < stats.logistic.cdf(slope * t)), lambda eta: np.logaddexp(0, eta)),
        }[kind]  # of exponential families: ℓ(η) = A(η) - yη
        found = optimize.minimize(lambda b: (energy(b[0] + b[1] * t) - y * (b[0] + b[1] * t)).sum(), [0.0, 0.0]).x[1]
        model = clone(KINDS[kind][0]).fit(t[:, None] + 2015, y)
        assert abs(np.ravel(model.coef_)[0] - found) < 0.1 * model.coef_sd_[0]

    @pytest.mark.parametrize("kind", ["linear", "linear default", "logistic", "poisson"])
    def test_ones_and_a_full_set_of_indicators_are_an_intercept(self, kind):
        X, y = data()
        model, target = KINDS[kind]
        y = y[target] + 1000 if target == "numbers" else y[target]
        X[:, 0] += 2010
        levels = np.eye(3)[np.arange(80) % 3]
        one, two = clone(model).fit(X, y), clone(model).set_params(fit_intercept=False).fit(np.c_[X, np.ones(80)], y)
        np.testing.assert_allclose(np.ravel(two.coef_), [*np.ravel(one.coef_), *np.ravel(one.intercept_)], rtol=1e-5)
        plain, full = np.c_[X, levels[:, 1:]], np.c_[X, levels]
        other = predictions(clone(model).fit(plain, y), plain)
        found = predictions(clone(model).set_params(fit_intercept=False).fit(full, y), full)
        np.testing.assert_allclose(found[0], other[0], rtol=0, atol=0.3 * float(np.mean(other[1])))

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("fit_intercept", [True, False])
    def test_columns_that_are_constant_or_zero_and_float32(self, fit_intercept):
        X, y = data()
        more = np.c_[X, np.full(80, 7.0), np.zeros(80)]
        model = POISSON(fit_intercept=fit_intercept).fit(more, y["counts"])
        plain = POISSON().fit(X, y["counts"])
        np.testing.assert_allclose(model.predict(more), plain.predict(X), rtol=1e-6)
        single = (X * [1e-9, 1e9]).astype(np.float32)
        np.testing.assert_allclose(POISSON().fit(single, y["counts"]).predict(single), plain.predict(X), rtol=1e-5)


def test_quasi_counts():
    y = torch.tensor([0.0, 1.0, 5.0]).double()
    check_likelihood(QuasiCounts, torch.tensor([0.0, 0.3, 1.0, 7.5]))
    eta, v = torch.tensor([0.3, -1.0, 2.0]).double(), torch.tensor([0.1, 1.0, 0.5]).double()
    for mine, exact in zip(QuasiCounts().expected(eta, v, y), PoissonLog().expected(eta, v, y), strict=True):
        torch.testing.assert_close(mine, exact)


def test_weights_of_whole_numbers_are_weights():
    """2⁶³ is an unsigned long long of NumPy, which PyTorch does not take."""
    X, y = [[0.0], [1.0], [2.0], [4.0]], [0.0, 1.5, 1.0, 3.0]
    ours, theirs = (LINEAR(noise=1.0).fit(X, y, sample_weight=w) for w in (2**63, [2.0**63] * 4))
    assert ours.coef_ == theirs.coef_


PRECISION = "prior_precision must be positive, or one of 'default', 'flat', 'auto'; got "
SD = "intercept_sd is a standard deviation, positive, or None; got "


@pytest.mark.parametrize(
    ("estimator", "y", "message"),
    [
        (LOGISTIC(prior_precision="auto"), [0, 1, 2], "Only binary classification is supported. The type of the"),
        (LOGISTIC(), [1, 1, 1], "y has one class, 1; the classifier needs two."),
        (LOGISTIC(posterior="natural"), [0, 1, 1], "posterior must be one of cholesky, diagonal; got"),
        (LOGISTIC(prior_precision=0), [0, 1, 1], f"{PRECISION}0."),
        (LINEAR(prior_precision=[1, 2]), [0, 1, 2], f"{PRECISION}[1, 2]."),
        (LOGISTIC(prior_precision=True), [0, 1, 1], f"{PRECISION}True."),
        (POISSON(intercept_sd="a"), [0, 1, 1], f"{SD}'a'."),
        (LINEAR(intercept_sd=-1), [0, 1, 2], f"{SD}-1."),
        (LINEAR(intercept_sd=1e-320), [0, 1, 2], "got 1e-320, whose square is 0 or infinite"),
        (LINEAR(intercept_sd=1e200), [0, 1, 2], "got 1e+200, whose square is 0 or infinite"),
        (POISSON(), [0, 1, -1], "y must be counts, not negative; got -1 among them."),
        (LINEAR(noise=-1), [0, 1, 2], "noise must be a positive standard deviation, or 'auto'; got -1."),
        (LINEAR(noise=True), [0, 1, 2], "noise must be a positive standard deviation, or 'auto'; got True."),
        (LINEAR(), ["a", "b", "a"], "y must be numbers"),
        (LINEAR(), torch.ones(3, requires_grad=True), "y must be an array of numbers; got a tensor of shape (3,)"),
    ],
)
def test_refused(estimator, y, message):
    with pytest.raises(InputError, match=re.escape(message)):
        estimator.fit(np.arange(6.0).reshape(3, 2), y)


@pytest.mark.accuracy
def test_slips_are_said_and_right_usage_is_silent():
    X, y = data()
    frame, half = pandas.DataFrame(X, columns=["a", "b"]), (X[:, 0] > 0).astype(int)
    with pytest.warns(UserWarning, match="in another order"):
        POISSON().fit(frame, pandas.Series(y["counts"]).sample(frac=1, random_state=0))
    with pytest.raises(
        InputError, match="'c' holds texts such as 'b', and an estimator takes numbers: encode it first"
    ):
        LOGISTIC().fit(frame.assign(c=["b", "a"] * 40), half)
    with pytest.warns(UserWarning, match="^Column 'Unnamed: 0' had no name in its file, where it numbers the rows"):
        LOGISTIC().fit(frame.assign(**{"Unnamed: 0": range(80)}), half)
    with pytest.raises(InputError, match="class 0 have the weight 0"):
        LOGISTIC().fit(frame, half, sample_weight=half)
    with pytest.warns(UserWarning, match="sum to 1"):
        LOGISTIC().fit(frame, y["two"], sample_weight=np.ones(80) / 80)
    with pytest.warns(UserWarning, match=r"^Column c is a in other units, a multiple of it plus a constant"):
        LOGISTIC().fit(frame.assign(c=2 * frame.a + 1), y["three"])
    with pytest.warns(UserWarning, match=r"^The same in all 80 rows, so that the prior alone .* column c = 3\. Leave"):
        POISSON().fit(frame.assign(c=3), y["counts"])
    speechless = np.repeat([1.0, -1.0], 40) + 1e-3 * np.random.default_rng(0).normal(size=80)
    with pytest.warns(UserWarning, match="speak for no effect of any column"):
        model = LINEAR().fit(np.c_[np.tile([1.0, -1.0], 40)], speechless)
    assert model.evidence_.at_limit == (0,)
    assert "no effect of any column" in str(model.evidence_)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LINEAR().fit(np.c_[np.tile([1.0, -1.0], 40)], speechless + 3 * np.tile([1.0, -1.0], 40))
        LINEAR().fit(frame, pandas.Series(y["numbers"], index=range(60, 140)))
        LINEAR(fit_intercept=False).fit(frame.assign(c=3), frame.a)


@pytest.mark.parametrize("target", ["two", "three", "counts", "numbers"])
def test_a_pickle_of_0_2_0(target):
    """It has no standardization, which a number as the precision does not make, and a classifier no class weights."""
    draw = np.random.default_rng(0)
    X = draw.normal(size=(80, 2))
    y = {
        "two": X[:, 0] > 0.3 * draw.normal(size=80),
        "three": np.digitize(X[:, 0] + 0.3 * draw.normal(size=80), [-0.5, 0.5]),
        "counts": draw.poisson(np.exp(0.5 * X[:, 0])),
        "numbers": X[:, 0] + draw.normal(size=80),
    }[target]
    model = {"counts": POISSON, "numbers": LINEAR}.get(target, LOGISTIC)(prior_precision=1.0).fit(X, y)
    older = clone(model).fit(X, y)
    for name in {"standardization_", "class_weight"} & set(vars(older)):
        delattr(older, name)
    old = pickle.loads(pickle.dumps(older))
    np.testing.assert_array_equal(old.predict(X), model.predict(X))
    np.testing.assert_array_equal(old.sample_posterior(3, random_state=0), model.sample_posterior(3, random_state=0))
    assert clone(old).get_params() == model.get_params()
