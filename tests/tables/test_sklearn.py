"""The estimators: scikit-learn's own checks, closed forms, and what a posterior adds."""

import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("sklearn", reason="scikit-learn is in the extra sklearn", minversion="1.6")

from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, PoissonRegressor
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
from torchngvi.adapters.sklearn.several import softmax_model
from torchngvi.errors import InputError
from torchngvi.models.likelihoods import PoissonLog
from torchngvi.testing import check_likelihood

ALL = [
    BayesianLogisticRegression(),
    BayesianPoissonRegression(),
    BayesianLinearRegression(prior_precision=1.0, noise=1.0),
]
BY_EVIDENCE = [BayesianLinearRegression(), BayesianLogisticRegression(prior_precision="auto")]


def data(seed=0, rows=200):
    stream = np.random.default_rng(seed)
    X = stream.normal(size=(rows, 3))
    eta = 0.5 + X @ [1.0, -0.5, 0.0]
    y = np.where(stream.random(rows) < stats.logistic.cdf(eta), "yes", "no")
    return X, y, stream.poisson(np.exp(eta)), eta + 0.5 * stream.normal(size=rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator", [*ALL, *(pytest.param(e, marks=pytest.mark.slow) for e in BY_EVIDENCE)], ids=lambda e: str(e)[:40]
)
def test_check_estimator(estimator):
    done = check_estimator(estimator, on_skip=None, on_fail="raise")
    assert len(done) > 50
    skipped = {check["check_name"] for check in done if check["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}  # needs an environment variable of SciPy


class TestClosedForms:
    def test_linear(self):
        X, _, _, y = data()
        model = BayesianLinearRegression(prior_precision=2.0, noise=0.5, intercept_sd=3.0).fit(X, y)
        design = np.c_[X, np.ones(200)]
        covariance = np.linalg.inv(design.T @ design / 0.25 + np.diag([2.0, 2.0, 2.0, 1 / 9]))
        mean = covariance @ design.T @ y / 0.25
        np.testing.assert_allclose([*model.coef_, model.intercept_], mean, rtol=1e-7)
        np.testing.assert_allclose([*model.coef_sd_, model.intercept_sd_], np.sqrt(np.diag(covariance)), rtol=1e-7)
        new = np.c_[np.eye(3), np.ones(3)]
        found, sd = model.predict(np.eye(3), return_std=True)
        np.testing.assert_allclose(found, new @ mean, rtol=1e-7)
        np.testing.assert_allclose(sd, np.sqrt(np.einsum("nd,de,ne->n", new, covariance, new) + 0.25), rtol=1e-7)

    def test_flat_priors_give_the_modes_of_scikit_learn(self):
        """With many rows the posterior mean is near the maximum likelihood estimate, within a part of an error."""
        X, y, counts, _ = data(rows=4000)
        for mine, other, target in (
            (BayesianLogisticRegression(prior_precision=1e-6), LogisticRegression(C=1e6), y),
            (BayesianPoissonRegression(prior_precision=1e-6), PoissonRegressor(alpha=0, tol=1e-8), counts),
        ):
            mine.fit(X, target)
            other.fit(X, target)
            np.testing.assert_array_less(np.abs(np.ravel(mine.coef_) - np.ravel(other.coef_)), 0.1 * mine.coef_sd_)

    def test_weights_are_repetitions(self):
        X, y, *_ = data(rows=60)
        w = np.random.default_rng(1).integers(0, 3, 60)
        one = BayesianLogisticRegression().fit(X, y, sample_weight=w)
        two = BayesianLogisticRegression().fit(np.repeat(X, w, 0), np.repeat(y, w))
        np.testing.assert_allclose(one.coef_, two.coef_, rtol=1e-6)

    def test_the_prior_and_the_noise_by_evidence(self):
        X, _, _, y = data()
        model = BayesianLinearRegression().fit(X, y)
        assert model.noise_ == pytest.approx(0.5, rel=0.15)
        assert model.evidence_.converged
        better = model.elbo_
        for noise, precision in ((0.4, model.prior_precision_), (model.noise_, 10 * model.prior_precision_)):
            assert BayesianLinearRegression(noise=noise, prior_precision=precision).fit(X, y).elbo_ < better

    @pytest.mark.parametrize("kind", [BayesianLogisticRegression, BayesianPoissonRegression])
    def test_predictions_are_averages_over_draws(self, kind):
        X, y, counts, _ = data(rows=30)
        model = kind(prior_precision=0.5).fit(X, y if kind is BayesianLogisticRegression else counts)
        draws = model.sample_posterior(40_000, random_state=0)
        eta = draws @ np.c_[X, np.ones(30)].T
        if kind is BayesianLogisticRegression:
            p = stats.logistic.cdf(eta)
            found, sd = model.predict_proba(X)[:, 1], model.predict(X, return_std=True)[1]
        else:
            p, (found, sd) = np.exp(eta), model.predict(X, return_std=True)
            assert (sd**2 > found).all()
            sd = np.sqrt(sd**2 - found)  # without the noise of counts
        np.testing.assert_allclose(found, p.mean(0), atol=1e-9, rtol=0.03)
        np.testing.assert_allclose(sd, p.std(0), rtol=0.05)


class TestPosterior:
    def test_draws(self):
        X, y, *_ = data()
        model = BayesianLogisticRegression(fit_intercept=False).fit(X, y)
        draws = model.sample_posterior(20_000, random_state=1)
        assert draws.shape == (20_000, 3)
        np.testing.assert_allclose(draws.mean(0), model.coef_[0], atol=5 * model.coef_sd_.max() / math.sqrt(20_000))
        np.testing.assert_array_equal(draws, model.sample_posterior(20_000, random_state=1))
        assert not np.array_equal(model.sample_posterior(5), model.sample_posterior(5))
        assert (model.intercept_, model.intercept_sd_) == (0, 0)

    def test_a_diagonal_posterior_is_narrower(self):
        X, y, *_ = data()
        X[:, 1] += X[:, 0]
        wide, narrow = (BayesianLogisticRegression(posterior=kind).fit(X, y) for kind in ("cholesky", "diagonal"))
        assert (narrow.coef_sd_[:2] < 0.9 * wide.coef_sd_[:2]).all()

    def test_pipelines_and_searches(self):
        X, y, *_ = data()
        pipe = make_pipeline(StandardScaler(), BayesianLogisticRegression())
        assert cross_val_score(pipe, X * [1, 1000, 1], y, cv=3).mean() > 0.65
        search = GridSearchCV(pipe, {"bayesianlogisticregression__prior_precision": [0.1, 100.0]}, cv=3).fit(X, y)
        assert search.best_params_["bayesianlogisticregression__prior_precision"] in (0.1, 100.0)
        assert clone(BayesianLinearRegression(noise=2.0)).noise == 2.0

    def test_names_of_columns(self):
        pandas = pytest.importorskip("pandas")
        X, y, *_ = data()
        frame = pandas.DataFrame(X, columns=["a", "b", "c"])
        model = BayesianLogisticRegression().fit(frame, y)
        assert model.feature_names_in_.tolist() == ["a", "b", "c"]
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(frame[["b", "a", "c"]])


class TestSeveralClasses:
    @staticmethod
    def three(rows=60, seed=0):
        X, y, *_ = data(seed, rows)
        return X, np.where(X[:, 1] > 0.7, "maybe", y)

    def test_two_classes_are_logistic_regression(self):
        X, y, *_ = data(rows=40)
        design, precision = np.c_[X, np.ones(40)], np.array([2.0, 2.0, 2.0, 0.01])
        codes = (y == "yes").astype(int)
        model = softmax_model(design, codes, 2 * precision, None)  # a coefficient of two classes is a difference
        one, two = (CholeskyGaussian(4, dtype=torch.float64) for _ in range(2))
        fit(one, model, progress=False, examine=False, tolerance=1e-8)
        other = GeneralizedLinear(torch.as_tensor(design), torch.as_tensor(codes), prior_precision=precision)
        fit(two, other, progress=False, examine=False, tolerance=1e-8)
        torch.testing.assert_close(one.mean, two.mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(one.covariance, two.covariance, rtol=0, atol=1e-6)

    def test_no_class_is_a_baseline(self):
        """With other names, and so another first class, the same coefficients and probabilities."""
        X, y = self.three()
        one = BayesianLogisticRegression(intercept_sd=2.0).fit(X, y)
        other = BayesianLogisticRegression(intercept_sd=2.0).fit(X, np.where(y == "no", "zzz", y))
        assert (one.classes_.tolist(), other.classes_.tolist()) == (["maybe", "no", "yes"], ["maybe", "yes", "zzz"])
        order = [0, 2, 1]
        for a, b in (
            (one.coef_, other.coef_),
            (one.coef_sd_, other.coef_sd_),
            (one.intercept_sd_, other.intercept_sd_),
        ):
            np.testing.assert_allclose(a, b[order], atol=1e-4)
        np.testing.assert_allclose(one.predict_proba(X), other.predict_proba(X)[:, order], atol=1e-4)
        np.testing.assert_allclose(one.coef_.sum(0), 0, atol=1e-12)

    def test_flat_priors_give_the_modes_of_scikit_learn(self):
        stream = np.random.default_rng(3)
        X = stream.normal(size=(2000, 2))
        eta = X @ [[0.0, 1.0, 0.5], [0.0, 0.3, -1.0]] + [0.0, 0.5, 0.2]
        y = (eta + stream.gumbel(size=eta.shape)).argmax(1)
        mine = BayesianLogisticRegression(prior_precision=1e-6).fit(X, y)
        other = LogisticRegression(C=1e6).fit(X, y)
        np.testing.assert_array_less(np.abs(mine.coef_ - other.coef_), 0.1 * mine.coef_sd_)
        np.testing.assert_array_less(np.abs(mine.intercept_ - other.intercept_), 0.1 * mine.intercept_sd_ + 1e-3)

    def test_predictions_are_averages_over_draws(self):
        X, y = self.three(30)
        model = BayesianLogisticRegression(prior_precision=0.5).fit(X, y)
        draws = model.sample_posterior(40_000, random_state=0)
        assert draws.shape == (40_000, 3, 4)
        np.testing.assert_allclose(draws.sum(1), 0, atol=1e-9)
        np.testing.assert_allclose(draws.std(0)[:, :3], model.coef_sd_, rtol=0.03)
        p = np.exp(draws @ np.c_[X, np.ones(30)].T)  # (S, K, N)
        p /= p.sum(1, keepdims=True)
        found = model.predict_proba(X)
        np.testing.assert_allclose(found, p.mean(0).T, atol=0.004)
        chosen, sd = model.predict(X, return_std=True)
        place = found.argmax(1)
        assert chosen.tolist() == model.classes_[place].tolist()
        np.testing.assert_allclose(sd, p.std(0).T[np.arange(30), place], rtol=0.05, atol=1e-3)
        np.testing.assert_array_equal(model.decision_function(X).argmax(1), place)

    def test_without_an_intercept(self):
        X, y = self.three(40)
        model = BayesianLogisticRegression(fit_intercept=False, posterior="diagonal").fit(X, y)
        assert model.converged_
        assert model.sample_posterior(2).shape == (2, 3, 3)
        assert model.intercept_.tolist() == model.intercept_sd_.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("estimator", "y", "message"),
    [
        (
            BayesianLogisticRegression(prior_precision="auto"),
            [0, 1, 2],
            "Only binary classification is supported. The type of the target is multiclass. It is so with",
        ),
        (BayesianLogisticRegression(), [1, 1, 1], "y has one class, 1; the classifier needs two."),
        (
            BayesianLogisticRegression(posterior="natural"),
            [0, 1, 1],
            "posterior must be one of cholesky, diagonal; got",
        ),
        (
            BayesianLogisticRegression(prior_precision=0),
            [0, 1, 1],
            "prior_precision must be positive, or one of 'default', 'flat', 'auto'; got 0.",
        ),
        (
            BayesianLinearRegression(prior_precision=[1, 2]),
            [0, 1, 2],
            "prior_precision must be positive, or one of 'default', 'flat', 'auto'; got [1, 2].",
        ),
        (
            BayesianLogisticRegression(prior_precision=True),
            [0, 1, 1],
            "prior_precision must be positive, or one of 'default', 'flat', 'auto'; got True.",
        ),
        (
            BayesianPoissonRegression(intercept_sd="a"),
            [0, 1, 1],
            "intercept_sd is a standard deviation, positive, or None; got 'a'.",
        ),
        (
            BayesianLinearRegression(intercept_sd=-1),
            [0, 1, 2],
            "intercept_sd is a standard deviation, positive, or None; got -1.",
        ),
        (BayesianPoissonRegression(), [0, 1, -1], "y must be counts, not negative; got -1 among them."),
        (
            BayesianLinearRegression(noise=-1),
            [0, 1, 2],
            "noise must be a positive standard deviation, or 'auto'; got -1.",
        ),
        (
            BayesianLinearRegression(noise=True),
            [0, 1, 2],
            "noise must be a positive standard deviation, or 'auto'; got True.",
        ),
    ],
)
def test_refused(estimator, y, message):
    with pytest.raises(InputError, match=re.escape(message)):
        estimator.fit(np.arange(6.0).reshape(3, 2), y)


@pytest.mark.parametrize("count", [-1, 1.5, True, "a"])
def test_refused_numbers_of_draws(count):
    X = np.arange(12.0).reshape(6, 2) ** 2
    for model in (BayesianLinearRegression().fit(X, X[:, 0]), BayesianLogisticRegression().fit(X, [0, 1, 2] * 2)):
        with pytest.raises(InputError, match=f"^{re.escape(f'n_samples is a number of draws; got {count!r}.')}$"):
            model.sample_posterior(count)


def test_quasi_counts():
    y = torch.tensor([0.0, 1.0, 5.0])
    check_likelihood(QuasiCounts, torch.tensor([0.0, 0.3, 1.0, 7.5]))
    eta, v = torch.tensor([0.3, -1.0, 2.0]).double(), torch.tensor([0.1, 1.0, 0.5]).double()
    for mine, exact in zip(
        QuasiCounts().expected(eta, v, y.double()), PoissonLog().expected(eta, v, y.double()), strict=True
    ):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("sd", [1e-320, 1e200])
def test_a_standard_deviation_whose_square_is_no_number(sd):
    with pytest.raises(InputError, match="intercept_sd is a standard deviation; got .* whose square is 0 or infinite"):
        BayesianLogisticRegression(intercept_sd=sd).fit([[0.0], [1.0], [2.0]], [0, 1, 0])


def test_weights_of_whole_numbers_are_weights():
    """2⁶³ is an unsigned long long of NumPy, which PyTorch does not take."""
    X, y = [[0.0], [1.0], [2.0], [4.0]], [0.0, 1.5, 1.0, 3.0]
    ours, theirs = (BayesianLinearRegression(noise=1.0).fit(X, y, sample_weight=w) for w in (2**63, [2.0**63] * 4))
    assert ours.coef_ == theirs.coef_
