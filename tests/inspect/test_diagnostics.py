"""Monte Carlo checks and predictive densities against closed forms, dense quadrature and known tails."""

import math

import pytest
import torch
from helpers import seeded
from scipy import integrate, stats

from torchngvi import CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, LogJoint, fit
from torchngvi.diagnostics import (
    accuracy,
    elbo,
    k_hat,
    log_predictive_density,
    log_weights,
    predictive_mean,
    predictor_moments,
)
from torchngvi.models.likelihoods import BernoulliLogit, GaussianNoise

F64 = torch.float64
Z = 4.5  # two-sided failure rate 7e-6 a comparison; seeds are fixed


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The problems are small, and the machine may be busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def posterior(mean, sd):
    return DiagonalGaussian(len(mean), mean=torch.tensor(mean, dtype=F64), scale=torch.tensor(sd, dtype=F64), dtype=F64)


def model_of(family, dim, y=(0.0, 1.0), **kwargs):
    return GeneralizedLinear(torch.ones(len(y), dim, dtype=F64), torch.tensor(y, dtype=F64), family, **kwargs)


def at(mean, sd, family, y):
    """log p(y) where the predictor has this mean and standard deviation."""
    q = posterior([mean, 0.0], [max(sd, 1e-300), 1.0])
    row = torch.tensor([[1.0, 0.0]], dtype=F64)
    return log_predictive_density(model_of(family, 2), q, row, torch.tensor([y], dtype=F64)).item()


MOMENTS = [(m, s) for m in (-30.0, -2.0, 0.0, 0.7, 6.0, 120.0) for s in (1e-3, 0.4, 1.0, 7.0, 50.0)]


class TestLogPredictiveDensity:
    @pytest.mark.sparse(7)
    @pytest.mark.parametrize(("mean", "sd"), MOMENTS)
    @pytest.mark.parametrize("y", [0.0, 1.0])
    def test_probit_is_a_normal_probability(self, mean, sd, y):
        exact = stats.norm.logcdf((2 * y - 1) * mean / math.sqrt(1 + sd**2))
        assert at(mean, sd, "bernoulli_probit", y) == pytest.approx(exact, rel=1e-10, abs=1e-10)

    @pytest.mark.sparse(7)
    @pytest.mark.parametrize(("mean", "sd"), MOMENTS)
    @pytest.mark.parametrize(("noise", "y"), [(0.01, 3.0), (1.0, -40.0), (25.0, 200.0)])
    def test_gaussian_noise_adds_to_the_variance(self, mean, sd, noise, y):
        exact = stats.norm.logpdf(y, mean, math.hypot(sd, noise))
        assert at(mean, sd, GaussianNoise(noise), y) == pytest.approx(exact, rel=1e-9, abs=1e-9)

    @pytest.mark.parametrize(("mean", "sd"), [(-30.0, 7.0), (-2.0, 0.4), (0.7, 1.0), (6.0, 7.0), (20.0, 50.0)])
    def test_logit_against_adaptive_quadrature(self, mean, sd):
        def integrand(eta):
            return stats.logistic.cdf(eta) * stats.norm.pdf(eta, mean, sd)

        low, high = mean - 14 * sd, mean + 14 * sd
        inner = [point for point in (mean, mean + sd**2, -5.0, 0.0, 5.0) if low < point < high]
        exact = integrate.quad(integrand, low, high, points=inner, epsabs=0, epsrel=1e-12, limit=500)[0]
        assert at(mean, sd, "bernoulli_logit", 1.0) == pytest.approx(math.log(exact), abs=1e-9)

    def test_logit_far_in_the_tail(self):
        # E[sigmoid] -> E[exp η] = exp(e + v/2) when sigmoid is exponential over all the mass
        assert at(-400.0, 10.0, "bernoulli_logit", 1.0) == pytest.approx(-350.0, abs=1e-8)

    @pytest.mark.parametrize(("mean", "sd", "y"), [(0.0, 1.0, 3), (2.0, 0.5, 0), (1.0, 5.0, 40), (3.0, 0.2, 17)])
    def test_poisson_against_adaptive_quadrature(self, mean, sd, y):
        def integrand(eta):
            return math.exp(y * eta - math.exp(eta) - math.lgamma(y + 1) - 0.5 * ((eta - mean) / sd) ** 2)

        inner = [mean, math.log(max(y, 1)), 0.5 * (mean + math.log(max(y, 1)))]
        exact = integrate.quad(integrand, mean - 14 * sd, 8.0, points=inner, epsabs=0, epsrel=1e-12, limit=500)[0]
        exact /= sd * math.sqrt(2 * math.pi)
        assert at(mean, sd, "poisson_log", float(y)) == pytest.approx(math.log(exact), abs=1e-9)

    def test_no_uncertainty_is_the_likelihood(self):
        assert at(1.5, 0.0, "bernoulli_logit", 1.0) == pytest.approx(-math.log1p(math.exp(-1.5)), abs=1e-12)

    def test_both_classes_sum_to_one(self):
        q, X = posterior([0.4, -1.0], [3.0, 20.0]), torch.randn(50, 2, dtype=F64, generator=seeded(1))
        model = model_of("bernoulli_logit", 2)
        logs = [log_predictive_density(model, q, X, torch.full((50,), v, dtype=F64)) for v in (0.0, 1.0)]
        assert torch.logaddexp(*logs).abs().max() < 1e-9

    def test_classes_coded_by_signs_or_by_zero_and_one(self):
        q, X = posterior([0.4], [1.0]), torch.tensor([[1.0], [2.0]], dtype=F64)
        model = model_of("bernoulli_logit", 1)
        by_signs = log_predictive_density(model, q, X, torch.tensor([-1.0, 1.0], dtype=F64))
        assert torch.equal(by_signs, log_predictive_density(model, q, X, torch.tensor([0.0, 1.0], dtype=F64)))

    def test_many_rows_in_pieces_and_offset(self):
        # wide predictors need many nodes, so that the rows are worked off in several pieces
        X = torch.linspace(-40, 40, 900, dtype=F64)[:, None]
        offset, y = torch.linspace(-3, 3, 900, dtype=F64), (torch.arange(900) % 2).to(F64)
        got = log_predictive_density(model_of("bernoulli_probit", 1), posterior([0.5], [2.0]), X, y, offset)
        mean, sd = 0.5 * X[:, 0] + offset, 2.0 * X[:, 0].abs()
        exact = stats.norm.logcdf(((2 * y - 1) * mean / torch.sqrt(1 + sd**2)).numpy())
        torch.testing.assert_close(got, torch.as_tensor(exact), rtol=1e-10, atol=1e-10)

    def test_batch_of_posteriors(self):
        q = CholeskyGaussian(2, (3,), mean=torch.randn(3, 2, dtype=F64, generator=seeded(2)), dtype=F64)
        X, y = torch.randn(5, 2, dtype=F64, generator=seeded(3)), torch.tensor([0.0, 1, 1, 0, 1], dtype=F64)
        model = model_of("bernoulli_logit", 2)
        got = log_predictive_density(model, q, X, y)
        assert got.shape == (3, 5)
        single = CholeskyGaussian(2, mean=q.mean[1], dtype=F64)
        torch.testing.assert_close(got[1], log_predictive_density(model, single, X, y), rtol=1e-12, atol=1e-12)

    def test_agrees_with_draws(self):
        X = torch.randn(6, 3, dtype=F64, generator=seeded(4))
        q = CholeskyGaussian(3, mean=0.3, scale=torch.tensor([[1.0, 0, 0], [0.5, 0.4, 0], [-1, 0.2, 2]]), dtype=F64)
        y = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0, 1.0], dtype=F64)
        model = model_of("poisson_log", 3)
        eta = q.sample((200_000,), seeded(5)) @ X.T
        p = torch.exp(-model.likelihood.energy(eta, y))
        z = (p.mean(0) - log_predictive_density(model, q, X, y).exp()) / (p.std(0) / math.sqrt(len(p)))
        assert z.abs().max() < Z

    def test_a_diverged_posterior_gives_nan_and_no_error(self):
        q = posterior([1.0], [1.0])
        q.mean.fill_(torch.nan)
        assert log_predictive_density(model_of("bernoulli_logit", 1), q, torch.ones(1, 1), torch.ones(1)).isnan().all()


class TestPredictiveMean:
    @pytest.mark.parametrize("family", ["bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian"])
    def test_agrees_with_draws_of_y(self, family):
        q = CholeskyGaussian(2, mean=0.2, scale=torch.tensor([[0.6, 0.0], [0.3, 0.2]]), dtype=F64)
        X, offset = torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=F64), torch.tensor([0.3, -0.5], dtype=F64)
        eta = q.sample((200_000,), seeded(6)) @ X.T + offset
        y = {
            "bernoulli_logit": lambda: torch.bernoulli(torch.sigmoid(eta), generator=seeded(7)),
            "bernoulli_probit": lambda: torch.bernoulli(torch.special.ndtr(eta), generator=seeded(7)),
            "poisson_log": lambda: torch.poisson(torch.exp(eta), generator=seeded(7)),
            "gaussian": lambda: eta,
        }[family]()
        z = (y.mean(0) - predictive_mean(model_of(family, 2), q, X, offset)) / (y.std(0) / math.sqrt(len(y)))
        assert z.abs().max() < Z


class Shifted(BernoulliLogit):
    """A link by which p is above ½ from the predictor -1 on."""

    link = ""

    def energy(self, eta, y):
        return super().energy(eta + 1, y)


class TestAccuracy:
    X = torch.tensor([[1.0], [2.0], [-1.0], [-3.0]], dtype=F64)
    y = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=F64)

    @pytest.mark.parametrize(("offset", "share"), [(-1.4, 1.0), (-1.6, 0.0)])
    def test_a_likelihood_that_is_not_symmetric(self, offset, share):
        model, q = model_of(Shifted(), 1), posterior([0.5], [1.0])
        shift, one = torch.tensor([offset], dtype=F64), torch.ones(1, 1, dtype=F64)
        assert accuracy(model, q, one, one[0], shift).item() == share

    def test_share_of_right_signs(self):
        model, q = model_of("bernoulli_logit", 1), posterior([0.5], [1.0])
        assert accuracy(model, q, self.X, self.y).item() == 0.5
        assert accuracy(model, q, self.X, self.y, weights=torch.tensor([3.0, 1.0, 1.0, 1.0])).item() == pytest.approx(
            4 / 6
        )
        # the offset turns the second and the fourth
        assert accuracy(model, q, self.X, self.y, torch.tensor([0.0, -2.0, 0.0, 2.0])).item() == 1.0


class TestSampling:
    def fitted(self, temperature=1.0, family="bernoulli_logit"):
        X = torch.randn(60, 3, dtype=F64, generator=seeded(8))
        y = (X @ torch.tensor([1.0, -1.0, 0.0], dtype=F64) > 0.3).to(F64)
        model = GeneralizedLinear(X, y, family, temperature=temperature)
        q = CholeskyGaussian(3, dtype=F64)
        assert fit(q, model, tolerance=1e-9, progress=False).converged
        return q, model

    @pytest.mark.parametrize("temperature", [1.0, 0.3])
    def test_elbo_agrees_with_the_exact_objective(self, temperature):
        q, model = self.fitted(temperature)
        with torch.no_grad():
            exact = -model.negative_elbo(q).item()
        sampled = elbo(q, model, 20_000, seeded(9))
        assert abs(sampled.estimate.item() - exact) < Z * sampled.standard_error.item()
        assert 0 < sampled.standard_error.item() < 0.05

    def test_standard_error_is_that_of_repetitions(self):
        q, model = self.fitted()
        stream = seeded(10)
        runs = [elbo(q, model, 200, stream) for _ in range(200)]
        spread = torch.stack([run.estimate for run in runs]).std().item()
        claimed = torch.stack([run.standard_error for run in runs]).mean().item()
        assert spread == pytest.approx(claimed, rel=0.25)  # 5 standard errors of a spread of 200

    def test_weights_of_the_exact_posterior_are_the_evidence(self):
        q, model = self.fitted(family="gaussian")
        weights = log_weights(q, model, 300, seeded(11))
        y, X = model.y, model.X
        evidence = stats.multivariate_normal(cov=(torch.eye(60) + X @ X.T).numpy()).logpdf(y.numpy())
        torch.testing.assert_close(weights, torch.full_like(weights, evidence), rtol=0, atol=1e-7)

    def test_tempered_weights_are_of_the_tempered_posterior(self):
        # γ = ½: the exact q is that of the data counted twice
        q, model = self.fitted(0.5, "gaussian")
        torch.testing.assert_close(q.precision, 2 * model.X.T @ model.X + torch.eye(3, dtype=F64))
        assert log_weights(q, model, 100, seeded(12)).std() < 1e-7

    def test_a_function_is_a_target(self):
        q = CholeskyGaussian(2, (3,), dtype=F64)
        weights = log_weights(q, lambda theta: -theta.square().sum(-1), 600, seeded(13))
        assert weights.shape == (600, 3)
        target = LogJoint(lambda theta: -theta.square().sum(-1))
        assert torch.equal(weights, log_weights(q, target, 600, seeded(13)))

    def test_predictor_moments(self):
        q = CholeskyGaussian(2, mean=torch.tensor([1.0, 2.0]), scale=torch.tensor([[1.0, 0], [3.0, 2.0]]), dtype=F64)
        X = torch.tensor([[1.0, -1.0]], dtype=F64)
        mean, variance = predictor_moments(model_of("gaussian", 2), q, X, torch.tensor([10.0]))
        assert mean.item() == 9.0
        assert variance.item() == pytest.approx(1.0 + 13.0 - 2 * 3.0)


class TestKHat:
    @pytest.mark.parametrize("shape", [0.2, 0.6, 1.2])
    def test_recovers_the_shape_of_pareto_tails(self, shape):
        # log of Pareto variates with tail exponent 1/k
        draws = shape * torch.empty(40_000, dtype=F64).exponential_(generator=seeded(14))
        assert k_hat(draws).item() == pytest.approx(shape, abs=0.15)

    def test_batch(self):
        draws = torch.empty(4000, 2, dtype=F64).exponential_(generator=seeded(15))
        together = k_hat(draws * torch.tensor([0.2, 1.2], dtype=F64))
        assert together.shape == (2,)
        assert together[0] < 0.5 < 0.7 < together[1]

    def test_constant_up_to_rounding(self):
        noise = 1e-12 * torch.randn(1000, dtype=F64, generator=seeded(16))
        assert k_hat(-500.0 + noise).item() == 0.0

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_not_finite(self, bad):
        assert math.isnan(k_hat(torch.tensor([0.0] * 100 + [bad])).item())
