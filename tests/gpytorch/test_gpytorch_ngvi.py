"""Stochastic natural-gradient VI of Wu and Gardner (2024), section 4, as a sparse GP with steps of 2/(2 + t)."""

import pytest
import torch

gpytorch = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

from helpers import IDENTITY, close  # noqa: E402
from test_gpytorch import FULL, NGVD, M, N, data, gaussian, model_with, step  # noqa: E402

from torchngvi import VN  # noqa: E402
from torchngvi.adapters.gpytorch import SparseGP, natural_optimizer, variational_posteriors  # noqa: E402
from torchngvi.stepsizes import Constant  # noqa: E402

gp = gpytorch
v = gp.variational
BATCH = 10


def regression(model, x):
    """X = K_fu K_uu⁻¹, the prior's covariance K_uu and its factor."""
    with torch.no_grad():
        strategy = model.variational_strategy
        Z, jitter = strategy.inducing_points, strategy.jitter_val
        K = model.covar_module(Z).to_dense() + jitter * torch.eye(M, dtype=x.dtype)
        L = torch.linalg.cholesky(K)
        return torch.cholesky_solve(model.covar_module(Z, x).to_dense(), L).mT, K, L


def draws(steps, seed=0):
    """Rows of each mini-batch, with replacement."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(N, (steps, BATCH), generator=generator)


def closed_form(X, y, K, noise, batches):
    """λ <- (1-γ)λ + γ N/(σ²B) Σ yₖaₖ,  S <- (1-γ)S + γ(K⁻¹ + N/(σ²B) Σ aₖaₖᵀ) with γ = 2/(2 + t), in u."""
    prior = torch.linalg.inv_ex(K).inverse
    weight = N / (noise * BATCH)
    vector, precision = torch.zeros(M, dtype=X.dtype), torch.eye(M, dtype=X.dtype)
    for t, some in enumerate(batches):
        gamma = 2 / (2 + t)
        vector = (1 - gamma) * vector + gamma * weight * (X[some].mT @ y[some])
        precision = (1 - gamma) * precision + gamma * (prior + weight * X[some].mT @ X[some])
    return vector, precision


class TestRegression:
    @pytest.mark.sparse(4)
    @pytest.mark.parametrize("family", FULL)
    @pytest.mark.parametrize("path", ["whitened", "unwhitened", "direct"])
    def test_iterates(self, path, family):
        """Twelve steps of a sparse GP are those of Bayesian linear regression on rows of K_fu K_uu⁻¹."""
        x, y = data()
        strategy = v.UnwhitenedVariationalStrategy if path == "unwhitened" else v.VariationalStrategy
        model, likelihood, batches = model_with(NGVD(M, posterior=family), strategy=strategy), gaussian(0.05), draws(12)
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        q = variational_posteriors(model)[0]
        natural = VN(q, lr=1.0, step_size=Constant()) if path == "direct" else natural_optimizer(mll, lr=1.0)
        for t, some in enumerate(batches):
            natural.param_groups[0]["lr"] = 2 / (2 + t)
            if path == "direct":
                natural.step(SparseGP(model, likelihood, [(x[some], y[some])], N))
            else:
                step(model, mll, natural, x[some], y[some])
        X, K, L = regression(model, x)
        vector, precision = closed_form(X, y, K, likelihood.noise.detach()[0], batches)
        mean = torch.cholesky_solve(vector[:, None], torch.linalg.cholesky(precision))[:, 0]
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        if path == "unwhitened":
            close(q.mean, mean, IDENTITY)
            close(q.covariance, covariance, IDENTITY)
        else:  # u = L v
            close(L @ q.mean, mean, IDENTITY)
            close(L @ q.covariance @ L.mT, covariance, IDENTITY)

    def test_the_start_is_forgotten(self):
        """γ₀ = 1 erases q₀."""
        x, y = data()
        ends = []
        for start in (0.0, 3.0):
            model = model_with(NGVD(M))
            target = SparseGP(model, gaussian(0.05), [])
            q = target.posterior.initialize_(start, 1.0 + start)
            natural = VN(q, lr=1.0, step_size=Constant())
            for t, some in enumerate(draws(5)):
                natural.param_groups[0]["lr"] = 2 / (2 + t)
                natural.step(SparseGP(model, gaussian(0.05), [(x[some], y[some])], N))
            ends.append((q.mean.clone(), q.covariance))
        close(ends[0][0], ends[1][0], IDENTITY)
        close(ends[0][1], ends[1][1], IDENTITY)

    @pytest.mark.accuracy
    def test_rate(self):
        """E KL(q_t‖q*) falls as 1/t: the mean over 40 runs, slope -1 on logarithmic axes from t = 25 to 200."""
        x, y = data()
        runs, steps, asked = 40, 200, (25, 50, 100, 200)
        model, best, likelihood = model_with(NGVD(M, (runs,))), model_with(NGVD(M)), gaussian(0.05)
        mll = gp.mlls.VariationalELBO(likelihood, best, num_data=N)
        step(best, mll, natural_optimizer(mll, lr=1.0), x, y)
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        natural = natural_optimizer(mll, lr=1.0)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        rows = torch.randint(N, (steps, runs, BATCH), generator=torch.Generator().manual_seed(1))
        divergences = []
        for t, some in enumerate(rows):
            natural.param_groups[0]["lr"] = 2 / (2 + t)
            step(model, mll, natural, x[some], y[some])
            if t + 1 in asked:
                divergences.append(natural.posteriors[0].kl(variational_posteriors(best)[0]).mean().detach())
        times, logs = torch.tensor(asked, dtype=x.dtype).log(), torch.stack(divergences).log()
        centred = times - times.mean()
        assert -1.1 < float((centred @ logs) / (centred @ centred)) < -0.9
