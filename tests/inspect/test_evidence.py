"""The prior by evidence: against the exact marginal likelihood, and on data whose precision is known."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import multivariate_normal

from torchngvi import CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, prior_by_evidence
from torchngvi.models.likelihoods import GaussianNoise


def double(array):
    return torch.as_tensor(array, dtype=torch.float64)


def regression(seed, rows=60, columns=5, precision=4.0, noise=0.7):
    stream = np.random.default_rng(seed)
    X = stream.normal(size=(rows, columns))
    theta = stream.normal(size=columns) / math.sqrt(precision)
    return X, X @ theta + noise * stream.normal(size=rows)


def gaussian(size):
    return CholeskyGaussian(size, dtype=torch.float64)


def marginal(X, y, precision, noise):
    """log p(y) with the coefficients integrated out, precisions (D,)."""
    return multivariate_normal(cov=noise**2 * np.eye(len(y)) + X / precision @ X.T).logpdf(y)


class TestExact:
    def test_one_precision(self):
        """The zero of the derivative of log N(y; 0, σ²I + XXᵀ/τ), in the singular values of X."""
        X, y = regression(0)
        U, s, _ = np.linalg.svd(X, full_matrices=False)
        z = U.T @ y

        def slope(log_tau):
            variance = 0.49 + s**2 / np.exp(log_tau)
            return ((1 - z**2 / variance) * (s**2 / np.exp(log_tau)) / variance).sum()

        exact = math.exp(brentq(slope, -5, 8, xtol=1e-14))
        found = prior_by_evidence(gaussian(5), GeneralizedLinear(double(X), y, GaussianNoise(0.7)))
        assert found.converged
        assert found.precision[0] == pytest.approx(exact, rel=1e-6)
        assert found.curve[-1].elbo == pytest.approx(marginal(X, y, exact, 0.7), abs=1e-8)
        h = 1e-4
        curvature = (slope(math.log(exact) + h) - slope(math.log(exact) - h)) / (4 * h)
        assert found.log_sd[0] == pytest.approx(abs(curvature) ** -0.5, rel=0.01)

    def test_groups_and_noise(self):
        """No hyperparameter near the ones that are found has a larger marginal likelihood."""
        X, y = regression(1, rows=80)
        model = GeneralizedLinear(double(X), y, GaussianNoise(2.0), prior_precision=[1.0, 1.0, 1.0, 1.0, 0.01])
        found = prior_by_evidence(gaussian(5), model, [[0, 2], [1, 3]], noise=True)
        assert f", noise {found.noise:.4g}, found in {len(found.curve)} fits." in str(found)

        def at(logs):
            a, b, s = np.exp(logs)
            return marginal(X, y, np.array([a, b, a, b, 0.01]), s)

        logs = np.log([*found.precision, found.noise])
        assert found.curve[-1].elbo == pytest.approx(at(logs), abs=1e-8)
        step = 1e-3 * np.eye(3)
        slopes = np.array([(at(logs + 0.1 * row) - at(logs - 0.1 * row)) / 2e-4 for row in step])
        curvatures = np.array([(at(logs + row) - 2 * at(logs) + at(logs - row)) / 1e-6 for row in step])
        np.testing.assert_array_less(np.abs(slopes / curvatures), 1e-6)  # the distance to the maximum, in logarithms
        assert all(at(logs + sign * 30 * row) < at(logs) for row in step for sign in (1, -1))
        assert found.model.prior.precision[4] == 0.01
        assert model.prior.precision.tolist() == [1.0, 1.0, 1.0, 1.0, 0.01]  # as it was

    def test_the_elbo_rises(self):
        X, y = regression(2)
        found = prior_by_evidence(gaussian(5), GeneralizedLinear(double(X), y, GaussianNoise(0.7), prior_precision=1e4))
        elbos = [line.elbo for line in found.curve]
        assert elbos[-1] >= max(elbos) - 1e-8
        assert elbos[-1] > elbos[0] + 1
        assert "found in" in str(found)


class TestKnown:
    @pytest.mark.accuracy
    @pytest.mark.parametrize("family", ["bernoulli_logit", "poisson_log"])
    def test_found_within_its_own_error(self, family):
        """30 coefficients of precision 4, 8 times: the errors in standard errors have mean square about one."""
        errors = []
        for seed in range(8):
            stream = np.random.default_rng(seed)
            X, theta = stream.normal(size=(300, 30)) / 2, stream.normal(size=30) / 2
            eta = X @ theta
            y = (
                stream.random(300) < 1 / (1 + np.exp(-eta))
                if family == "bernoulli_logit"
                else stream.poisson(np.exp(eta))
            )
            found = prior_by_evidence(gaussian(30), GeneralizedLinear(double(X), double(y), family))
            errors.append((math.log(found.precision[0]) - math.log(4)) / found.log_sd[0])
            assert found.converged
            assert not found.at_limit
        assert np.abs(errors).max() < 3.5
        assert 0.3 < np.mean(np.square(errors)) < 2.5
        assert abs(np.mean(errors)) < 4 / math.sqrt(8)

    def test_no_effect(self):
        """The precision has no maximum, and it is said."""
        X, y = regression(5, precision=1e12)
        found = prior_by_evidence(gaussian(5), GeneralizedLinear(double(X), y - y.mean(), GaussianNoise(0.9)))
        assert found.at_limit == (0,)
        assert found.precision[0] > 100

    def test_a_mean_field(self):
        """The maximum is that of its own ELBO: a fixed point of τ = D/E|θ|²."""
        X, y = regression(6)
        q = DiagonalGaussian(5, dtype=torch.float64)
        found = prior_by_evidence(q, GeneralizedLinear(double(X), y, GaussianNoise(0.7)), fit_tolerance=1e-8)
        assert found.precision[0] == pytest.approx(float(5 / (q.mean.square() + q.stddev.square()).sum()), rel=1e-6)

    def test_data_that_are_met_exactly(self):
        """The noise has no maximum: the search ends at its end, and does not say more than it knows."""
        X = np.random.default_rng(7).normal(size=(20, 2))
        found = prior_by_evidence(gaussian(2), GeneralizedLinear(double(X), X.sum(1), GaussianNoise(1.0)), noise=True)
        assert found.noise < 1e-3
