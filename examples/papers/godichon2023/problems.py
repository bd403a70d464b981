"""The models of Godichon-Baggioni, Nguyen and Tran (2023), Examples 1 to 3, with their bounds in closed form."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FLOAT = torch.float64
LOG_2PI = math.log(2 * math.pi)

# ------------------------------------------------------------------------------------ Example 1

COIN = torch.tensor([58.0, 144.0], dtype=FLOAT)  # the posterior of 57 successes in 200 trials, uniform prior


def coin_log_joint(
    theta: Tensor,  # (..., 1)
) -> Tensor:
    """The log joint of Example 1, 57 log θ + 143 log(1 - θ), (..., 1) -> (...)."""
    return (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0]


def coin_bound(
    lam: Tensor,  # (..., 2)
) -> Tensor:
    """The lower bound of Beta(a, b) in Example 1, log p(y) - KL(Beta(a, b), Beta(58, 144)), (..., 2) -> (...)."""
    evidence = torch.lgamma(COIN).sum() - torch.lgamma(COIN.sum())
    q = torch.distributions.Beta(lam[..., 0], lam[..., 1])
    return evidence - torch.distributions.kl_divergence(q, torch.distributions.Beta(*COIN))


# ------------------------------------------------------------------------------------ Example 2

NORMAL_DATA = torch.tensor(
    [11.0, 12, 8, 10, 9, 8, 9, 10, 13, 7], dtype=FLOAT
)  # prior: mean N(0, 10²), variance IG(1, 1)
NORMAL_START = torch.tensor([9.7, 0.5, 1.0, 1.0], dtype=FLOAT)


def normal_log_joint(
    theta: Tensor,  # (..., 2), mean and variance
) -> Tensor:
    """The log joint log p(y, μ, σ²) of Example 2, with all constants, (..., 2) -> (...)."""
    mean, variance = theta.unbind(-1)
    away = (NORMAL_DATA - mean[..., None]).square().sum(-1)
    likelihood = -0.5 * (len(NORMAL_DATA) * (LOG_2PI + variance.log()) + away / variance)
    return likelihood - 0.5 * (LOG_2PI + math.log(100) + mean.square() / 100) - 2 * variance.log() - 1 / variance


def normal_bound(
    lam: Tensor,  # (..., 4)
) -> Tensor:
    """The lower bound of N(m, v) IG(a, b) in Example 2, (..., 4) -> (...)."""
    m, v, a, b = lam.unbind(-1)
    n, log_variance, precision = len(NORMAL_DATA), b.log() - torch.digamma(a), a / b
    away = (NORMAL_DATA - m[..., None]).square().sum(-1) + n * v
    energy = -0.5 * (n * (LOG_2PI + log_variance) + precision * away)
    energy = energy - 0.5 * (LOG_2PI + math.log(100) + (m.square() + v) / 100) - 2 * log_variance - precision
    entropy = 0.5 * (LOG_2PI + 1 + v.log()) + a + b.log() + torch.lgamma(a) - (1 + a) * torch.digamma(a)
    return energy + entropy


def normal_optimum(sweeps: int = 100) -> Tensor:
    """The mean-field optimum (m, v, a, b) of Example 2, by coordinate ascent: a and b, then m and v, in turn."""
    n, total = len(NORMAL_DATA), float(NORMAL_DATA.sum())
    a, b = 1 + n / 2, 10.0
    for _ in range(sweeps):
        v = 1 / (n * a / b + 1 / 100)
        m = v * total * a / b
        b = 1 + 0.5 * (float((NORMAL_DATA - m).square().sum()) + n * v)
    return torch.tensor([m, v, a, b], dtype=FLOAT)


def normal_gibbs(draws: int, burn_in: int = 1000, seed: int = 0) -> np.ndarray:
    """Draws of (μ, σ²) from the posterior by Gibbs sampling, (draws, 2)."""
    random, n = np.random.default_rng(seed), len(NORMAL_DATA)
    data = NORMAL_DATA.numpy()
    mean, variance, out = float(data.mean()), 4.0, np.empty((draws, 2))
    for index in range(-burn_in, draws):
        precision = n / variance + 1 / 100
        mean = random.normal(data.sum() / variance / precision, precision**-0.5)
        variance = (1 + 0.5 * ((data - mean) ** 2).sum()) / random.gamma(1 + n / 2)
        if index >= 0:
            out[index] = mean, variance
    return out


# ------------------------------------------------------------------------------------ Example 3


class PoissonRegression(NamedTuple):
    """The Poisson regression of Example 3: y_i ~ Poisson(exp(x_iᵀθ)), θ ~ N(0, 100 I)."""

    X: Tensor  # (n, d)
    y: Tensor  # (n,)
    prior_variance: float = 100.0

    def log_joint(
        self,
        theta: Tensor,  # (..., d)
    ) -> Tensor:
        """The log joint with all constants, (..., d) -> (...)."""
        rate = theta @ self.X.mT
        likelihood = (self.y * rate - rate.exp() - torch.lgamma(self.y + 1)).sum(-1)
        prior = theta.square() / self.prior_variance + math.log(self.prior_variance) + LOG_2PI
        return likelihood - 0.5 * prior.sum(-1)

    def rates(
        self,
        mean: Tensor,  # (..., d)
        covariance: Tensor,  # (..., d, d)
    ) -> Tensor:  # (..., n)
        """The expected rates under N(μ, Σ): E exp(xᵀθ) = exp(xᵀμ + ½ xᵀΣx), (..., n)."""
        return (mean @ self.X.mT + 0.5 * ((self.X @ covariance) * self.X).sum(-1)).exp()

    def bound(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The lower bound of N(μ, Σ) in closed form, (...)."""
        d, s2 = self.X.shape[1], self.prior_variance
        fit = mean @ (self.X.mT @ self.y) - self.rates(mean, covariance).sum(-1) - torch.lgamma(self.y + 1).sum()
        trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        log_det = torch.linalg.slogdet(covariance)[1]
        return fit - (mean.square().sum(-1) + trace) / (2 * s2) + 0.5 * log_det + 0.5 * d * (1 - math.log(s2))

    def gradients(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients ∇_μ LB = Xᵀ(y - w) - μ/s₀² and ∇_Σ LB = ½(Σ⁻¹ - XᵀWX - I/s₀²) of the lower bound."""
        w = self.rates(mean, covariance)
        for_mean = (self.y - w) @ self.X - mean / self.prior_variance
        eye = torch.eye(self.X.shape[1], dtype=self.X.dtype)
        precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
        return for_mean, 0.5 * (precision - self.X.mT @ (w[..., None] * self.X) - eye / self.prior_variance)

    def natural_step(self, mean: Tensor, precision: Tensor, rho: float) -> tuple[Tensor, Tensor]:
        """An exact natural-gradient step: Σ⁻¹ ← Σ⁻¹ - 2ρ ∇_Σ LB, then μ ← μ + ρ Σ ∇_μ LB with the new Σ."""
        for_mean, for_covariance = self.gradients(mean, torch.cholesky_inverse(torch.linalg.cholesky(precision)))
        precision = precision - 2 * rho * for_covariance
        step = torch.cholesky_solve(for_mean[..., None], torch.linalg.cholesky(precision))[..., 0]
        return mean + rho * step, precision

    def optimum(self, steps: int = 200) -> tuple[Tensor, Tensor]:
        """The mean and the covariance of the best Gaussian, by natural-gradient steps of a half from N(0, I/100)."""
        d = self.X.shape[1]
        mean, precision = self.X.new_zeros(d), 100 * torch.eye(d, dtype=self.X.dtype)
        for _ in range(steps):
            mean, precision = self.natural_step(mean, precision, 0.5)
        return mean, torch.cholesky_inverse(torch.linalg.cholesky(precision))


def poisson_data(seed: int, n: int = 200, d: int = 3) -> PoissonRegression:
    """Data of Example 3: n rows x ~ N(0, I) of d features, with counts at θ = 1."""
    random = np.random.default_rng(seed)
    X = random.standard_normal((n, d))
    y = random.poisson(np.exp(X @ np.ones(d)))
    return PoissonRegression(torch.as_tensor(X), torch.as_tensor(y, dtype=FLOAT))
