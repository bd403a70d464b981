"""Group effects and mixtures."""

import torch
from torch import Tensor

from .densities import beta, cauchy, normal
from .model import Model, Values
from .transforms import ordered, positive, real, unit_interval


def eight_schools_noncentered(data: Values) -> Model:
    """θⱼ = μ + τ zⱼ; sampled are z, μ, τ, published θ, μ, τ."""
    y, sigma = data["y"], data["sigma"]

    def theta(p: Values) -> Tensor:
        return p["mu"][..., None] + p["tau"][..., None] * p["theta_trans"]

    def log_density(p: Values) -> Tensor:
        prior = normal(p["theta_trans"], 0, 1).sum(-1) + normal(p["mu"], 0, 5) + cauchy(p["tau"], 5)
        return prior + normal(y, theta(p), sigma).sum(-1)

    def report(p: Values) -> Values:
        return {"theta": theta(p), "mu": p["mu"], "tau": p["tau"]}

    def recover(values: Values) -> Values:
        z = (values["theta"] - values["mu"][..., None]) / values["tau"][..., None]
        return {"theta_trans": z, "mu": values["mu"], "tau": values["tau"]}

    return Model({"theta_trans": real(len(y)), "mu": real(), "tau": positive()}, log_density, report, recover)


def low_dim_gauss_mix(data: Values) -> Model:
    """θ normal(μ₁, σ₁) + (1 - θ) normal(μ₂, σ₂), μ₁ < μ₂."""
    y = data["y"][:, None]

    def log_density(p: Values) -> Tensor:
        mu, sigma, theta = p["mu"], p["sigma"], p["theta"]
        prior = (normal(sigma, 0, 2) + normal(mu, 0, 2)).sum(-1) + beta(theta, 5, 5)
        log_weights = torch.stack([theta.log(), torch.log1p(-theta)], -1)
        components = log_weights[..., None, :] + normal(y, mu[..., None, :], sigma[..., None, :])  # (..., N, 2)
        return prior + components.logsumexp(-1).sum(-1)

    return Model({"mu": ordered(2), "sigma": positive(2), "theta": unit_interval()}, log_density)
