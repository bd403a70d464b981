"""Autoregressions and a hidden Markov model."""

import torch
from torch import Tensor

from .densities import cauchy, dirichlet, exponential, normal
from .model import Model, Values
from .transforms import positive, positive_ordered, real, simplex

LARGEST = 1e100  # error; with |θ| > 1 they grow at every step, and beyond this no more, so that no square overflows


def arK(data: Values) -> Model:
    """yₜ ~ normal(α + Σₖ βₖ yₜ₋ₖ, σ), given the first K."""
    y, order = data["y"], int(data["K"])
    lags = torch.stack([y[order - k : len(y) - k] for k in range(1, order + 1)])  # (K, T - K)

    def log_density(p: Values) -> Tensor:
        prior = normal(p["alpha"], 0, 10) + normal(p["beta"], 0, 10).sum(-1) + cauchy(p["sigma"], 2.5)
        mean = p["alpha"][..., None] + p["beta"] @ lags
        return prior + normal(y[order:], mean, p["sigma"][..., None]).sum(-1)

    return Model({"alpha": real(), "beta": real(order), "sigma": positive()}, log_density)


def arma11(data: Values) -> Model:
    """yₜ = μ + φ yₜ₋₁ + θ eₜ₋₁ + eₜ, e₀ = 0 and y₀ = μ."""
    y = data["y"]

    def log_density(p: Values) -> Tensor:
        mu, phi, theta = p["mu"], p["phi"], p["theta"]
        prior = normal(mu, 0, 10) + normal(phi, 0, 2) + normal(theta, 0, 2) + cauchy(p["sigma"], 2.5)
        residuals = (y[1:] - mu[..., None] - phi[..., None] * y[:-1]).unbind(-1)
        errors = [y[0] - mu - phi * mu]
        for residual in residuals:
            errors.append((residual - theta * errors[-1]).clamp(-LARGEST, LARGEST))
        return prior + normal(torch.stack(errors, -1), 0, p["sigma"][..., None]).sum(-1)

    return Model({"mu": real(), "phi": real(), "theta": real(), "sigma": positive()}, log_density)


def hmm_drive_0(data: Values) -> Model:
    """Two hidden states, uₜ ~ exponential(φ) and vₜ ~ exponential(λ); the initial state has weight one, not a half."""
    u, v, concentration = data["u"], data["v"], data["alpha"]

    def log_density(p: Values) -> Tensor:
        transition = torch.stack([p["theta1"], p["theta2"]], -2)
        phi, rate = p["phi"], p["lambda"]
        prior = dirichlet(transition, concentration).sum(-1)
        for x in (phi, rate):
            prior = prior + normal(x[..., 0], 0, 1) + normal(x[..., 1], 3, 1)
        emission = exponential(u[:, None], phi[..., None, :]) + exponential(v[:, None], rate[..., None, :])
        moves = transition.log()[..., None, :, :] + emission[..., 1:, None, :]  # (..., N - 1, K, K)
        paths = emission[..., 0, :, None] + _log_product(moves)
        return prior + paths.logsumexp((-2, -1))

    parameters = {name: simplex(2) for name in ("theta1", "theta2")}
    parameters |= {name: positive_ordered(2) for name in ("phi", "lambda")}
    return Model(parameters, log_density)


def _log_product(factors: Tensor) -> Tensor:
    """log of the product in order of the matrices e^factors, (..., T, K, K) -> (..., K, K), halving T at a time."""
    while factors.shape[-3] > 1:
        even = factors.shape[-3] // 2 * 2
        left, right = factors[..., 0:even:2, :, :, None], factors[..., 1:even:2, None, :, :]
        factors = torch.cat([(left + right).logsumexp(-2), factors[..., even:, :, :]], -3)
    return factors.squeeze(-3)
