"""Full prior precisions, temperature 0, and Bayesian linear regression in closed form."""

import re

import pytest
import torch
from helpers import DIM, DTYPE, EXACT, IDENTITY, ROWS, batches, close, posteriors, randn, random_posterior, step

from torchngvi import SRVN, VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, LogJoint, Stein, fit
from torchngvi.diagnostics import elbo, log_weights
from torchngvi.errors import InputError
from torchngvi.expectations import Antithetic, Autograd, Quadrature
from torchngvi.interfaces import FullPrior, Prior
from torchngvi.models import GaussianNoise
from torchngvi.rules import VariationalNewton
from torchngvi.stepsizes import Constant


def precision(seed=7, dim=DIM):
    x = randn(dim, dim, seed=seed)
    return x @ x.mT + 0.5 * torch.eye(dim, dtype=DTYPE)


def data():
    return randn(ROWS, DIM, seed=1), (randn(ROWS, seed=2) > 0).double()


class TestFullPrior:
    @pytest.mark.sparse(5)
    @batches
    @posteriors
    @pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
    def test_against_the_definition(self, name, batch, gamma):
        """The prior's share of value, g, H, a and W, from torch.distributions and matrix products."""
        Lambda, mu = precision(), randn(DIM, seed=8)
        X, y = data()
        with_prior, without = (
            GeneralizedLinear(X, y, prior_precision=Lambda, prior_mean=mu, temperature=g) for g in (gamma, 0.0)
        )
        q = random_posterior(name, batch, seed=1)
        e, bare = Quadrature()(q, with_prior), Quadrature()(q, without)
        normal = torch.distributions.MultivariateNormal(mu, precision_matrix=Lambda)
        trace = (Lambda * q.covariance).sum((-2, -1))
        close(e.value - bare.value, gamma * (0.5 * trace - normal.log_prob(q.mean)), IDENTITY)
        g, H = e.derivative.raw()
        g0, H0 = bare.derivative.raw()
        close(g - g0, gamma * (q.mean - mu) @ Lambda, IDENTITY)
        close(H - H0, gamma * Lambda.expand_as(H0), IDENTITY)
        a, W = e.derivative.framed(q.frame())
        root = q.frame().dense()
        close(a, (root.mT @ g[..., None])[..., 0], IDENTITY)
        close(W, q.structure.from_dense(root.mT @ H @ root), IDENTITY)
        other = Autograd()(q, with_prior)
        close(other.value, e.value, EXACT)
        close(other.derivative.a, a, IDENTITY)
        close(other.derivative.W, W, IDENTITY)

    @posteriors
    def test_a_diagonal_matrix_is_the_diagonal(self, name):
        X, y = data()
        diagonal = torch.exp(randn(DIM, seed=3))
        full, vector = (GeneralizedLinear(X, y, prior_precision=p) for p in (torch.diag(diagonal), diagonal))
        assert (type(full.prior), type(vector.prior)) == (FullPrior, Prior)
        q = random_posterior(name, (2,), seed=1)
        close(full.negative_elbo(q), vector.negative_elbo(q), EXACT)
        theta = randn(5, 2, DIM, seed=4)
        close(full.log_joint(theta), vector.log_joint(theta), EXACT)

    def test_it_moves_with_the_model(self):
        X, y = data()
        model = GeneralizedLinear(X, y, prior_precision=precision(), prior_mean=0.3)
        assert len(model.tensors()) == 7
        q, p = random_posterior("cholesky"), random_posterior("cholesky").float()
        close(model.to(torch.float32).negative_elbo(p).double(), model.negative_elbo(q), 1e-5)

    def test_a_fit(self):
        """Gaussian noise: the posterior in closed form, S = Λ + XᵀX/σ², exactly after one step."""
        X, y = randn(ROWS, DIM, seed=1), randn(ROWS, seed=2)
        Lambda, mu = precision(), randn(DIM, seed=8)
        model = GeneralizedLinear(X, y, "gaussian", prior_precision=Lambda, prior_mean=mu)
        for name in ("cholesky", "natural"):
            q = random_posterior(name, (), seed=4)
            VN(q, lr=1.0, step_size=Constant()).step(model)
            S = Lambda + X.mT @ X
            close(q.precision, S, IDENTITY)
            close(q.mean, torch.linalg.solve(S, Lambda @ mu + X.mT @ y), IDENTITY)

    def test_a_batch_of_diagonals_is_still_one(self):
        """(B, D) with B other than D: one prior a member."""
        X, y = data()
        each = torch.exp(randn(2, DIM, seed=3))
        model = GeneralizedLinear(X, y, prior_precision=each)
        q = random_posterior("cholesky", (2,), seed=1)
        for i in range(2):
            alone = CholeskyGaussian(DIM, mean=q.mean[i], scale=q.scale_tril[i])
            one = GeneralizedLinear(X, y, prior_precision=each[i])
            close(model.negative_elbo(q)[i], one.negative_elbo(alone), EXACT)

    @pytest.mark.parametrize("batch", [(DIM,), (DIM, 1), (2, DIM)])
    def test_as_many_members_as_coefficients(self, batch):
        """(*batch, 1, D) is one diagonal a member also where (D, D) would be a matrix."""
        X, y = data()
        each = torch.exp(randn(*batch, DIM, seed=3))
        model = GeneralizedLinear(X, y.expand(*batch, -1), prior_precision=each[..., None, :], prior_mean=each)
        assert torch.equal(model.prior.precision, each)
        q = random_posterior("cholesky", batch, seed=1)
        loss = model.negative_elbo(q)
        assert loss.shape == batch
        for i in ((0,) * len(batch), tuple(size - 1 for size in batch)):
            alone = CholeskyGaussian(DIM, mean=q.mean[i], scale=q.scale_tril[i])
            one = GeneralizedLinear(X, y, prior_precision=each[i], prior_mean=each[i])
            close(loss[i], one.negative_elbo(alone), EXACT)

    def test_rounding_is_no_asymmetry(self):
        X, y = data()
        Lambda = precision()
        Lambda[0, 1] *= 1 + 1e-15
        model = GeneralizedLinear(X, y, prior_precision=Lambda)
        assert torch.equal(model.prior.precision, model.prior.precision.mT)


class TestTemperatureZero:
    """Variational optimisation: L(q) = E_q[-log likelihood], and min ℓ ≤ L(q) for every q."""

    @pytest.mark.sparse(3)
    @posteriors
    @pytest.mark.parametrize("family", ["bernoulli_logit", "poisson_log", "gaussian"])
    def test_upper_bound(self, name, family):
        X = randn(20, DIM, seed=1)
        y = randn(20, seed=2).abs().round() if family == "poisson_log" else (randn(20, seed=2) > 0).double()
        model = GeneralizedLinear(X, y, family, temperature=0.0)
        theta = torch.zeros(DIM, dtype=DTYPE, requires_grad=True)
        newton = torch.optim.LBFGS([theta], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

        def loss():
            newton.zero_grad()
            value = -model.log_joint(theta)
            value.backward()
            return value

        newton.step(loss)
        smallest = float(-model.log_joint(theta.detach()))
        for seed in range(30):
            q = random_posterior(name, (), seed)
            q.initialize_(theta.detach() + 0.1 * seed * q.mean, 0.1 * seed * q.scale_tril + 1e-3 * torch.eye(DIM))
            assert model.negative_elbo(q).item() >= smallest - 1e-9

    def test_the_prior_and_the_entropy_are_gone(self):
        X, y = data()
        one, other = (GeneralizedLinear(X, y, prior_precision=p, temperature=0.0) for p in (0.1, 10.0))
        q = random_posterior("cholesky")
        close(one.negative_elbo(q), other.negative_elbo(q), 0.0)
        e = Quadrature()(q, one)
        close(one.negative_elbo(q), e.value, EXACT)
        close(q.local(e).P, e.derivative.framed(q.frame()).W, EXACT)

    def test_q_collapses_on_the_maximum_likelihood(self):
        """Every step decreases L; C → 0 like 1/√t, and the mean goes to the maximum."""
        X, y = randn(ROWS, DIM, seed=1), randn(ROWS, seed=2)
        model = GeneralizedLinear(X, y, "gaussian", temperature=0.0)
        least_squares = torch.linalg.lstsq(X, y[:, None]).solution[:, 0]
        for method in (VN, SRVN):
            q = CholeskyGaussian(DIM, dtype=DTYPE)
            result = fit(q, model, method(q), progress=False, max_evaluations=200)
            losses = [record.loss for record in result.trace]
            assert all(b <= a + 1e-12 for a, b in zip(losses, losses[1:], strict=False))
            assert float(q.variance.max()) < 0.02
            close(q.mean, least_squares, 0.02)

    def test_draws(self):
        """Stein's estimator and the diagnostics know of γ = 0."""
        X, y = data()
        model = GeneralizedLinear(X, y, temperature=0.0)
        q = random_posterior("cholesky")
        e = Stein(Antithetic(4, torch.Generator().manual_seed(1)))(q, model)
        assert e.temperature == 0.0
        estimate = elbo(q, model, 4000, torch.Generator().manual_seed(2))
        assert abs((estimate.estimate + model.negative_elbo(q)).item()) < 5 * float(estimate.standard_error)
        text = (
            "log weights compare q with the density exp(log joint / temperature); got temperature 0, where there is "
            "none. Use elbo, or a positive temperature."
        )
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            log_weights(q, model, 10)

    def test_of_a_function(self):
        target = LogJoint(lambda theta: -theta.square().sum(-1), temperature=0.0)
        assert target.temperature == 0.0


class TestBayesianLinearRegression:
    """Gaussian noise is ℓ = ½(θ - μ)ᵀA(θ - μ) + c: H = A and g = A(m - μ) at every q."""

    @staticmethod
    def problem(noise):
        X, y = randn(ROWS, DIM, seed=1), randn(ROWS, seed=2)
        Lambda, prior_mean = torch.exp(randn(DIM, seed=3)), randn(DIM, seed=4)
        A = X.mT @ X / noise**2 + torch.diag(Lambda)
        mu = torch.linalg.solve(A, X.mT @ y / noise**2 + Lambda * prior_mean)
        model = GeneralizedLinear(X, y, GaussianNoise(noise), prior_precision=Lambda, prior_mean=prior_mean)
        return model, A, mu

    @pytest.mark.sparse(5)
    @batches
    @posteriors
    @pytest.mark.parametrize("noise", [0.3, 1.0, 4.0])
    def test_packet(self, name, batch, noise):
        model, A, mu = self.problem(noise)
        q = random_posterior(name, batch, seed=5)
        g, H = Quadrature()(q, model).derivative.raw()
        close(H, A.expand_as(H), IDENTITY)
        close(g, (q.mean - mu) @ A, IDENTITY)

    @batches
    @pytest.mark.parametrize("name", ["cholesky", "natural"])
    def test_one_step_is_exact(self, name, batch):
        model, A, mu = self.problem(0.3)
        q = random_posterior(name, batch, seed=5)
        path = VariationalNewton()(q, Quadrature()(q, model))
        mean, covariance = step(q, path.at(torch.ones(batch, dtype=DTYPE)))
        close(mean, mu.expand_as(mean), IDENTITY)
        close(covariance, torch.linalg.inv(A).expand_as(covariance), IDENTITY)

    def test_mean_field(self):
        """The optimal diagonal q: precision diag(A), mean μ."""
        model, A, mu = self.problem(1.0)
        q = DiagonalGaussian(DIM, dtype=DTYPE)
        assert fit(q, model, progress=False, tolerance=1e-9).converged
        close(q.mean, mu, 1e-8)
        close(q.variance, 1 / A.diagonal(), 1e-8)
