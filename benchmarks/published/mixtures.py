"""The mixture of three normals of PyMC's gallery, with and without order of the means."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from benchmarks.truths.target import normal, vector

from .model import Model, numbered

SOURCE = "PyMC example gallery, marginalized Gaussian mixture model; {} simulated observations"


def sample(count: int) -> Tensor:
    """Draws from 0.35 N(0, 0.5²) + 0.4 N(2, 0.5²) + 0.25 N(5, 1)."""
    generator = torch.Generator().manual_seed(3)
    which = torch.multinomial(vector(0.35, 0.4, 0.25), count, replacement=True, generator=generator)
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    return vector(0, 2, 5)[which] + vector(0.5, 0.5, 1)[which] * noise


def mixture(count: int, ordered: bool = True) -> Model:
    """μ ~ N(0, 10²), τ ~ Gamma(1, 1), w ~ Dirichlet(1, 1, 1) by sticks; if ordered, μ by log gaps."""
    x = sample(count)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_tau, sticks = theta.split([3, 3, 2], -1)
        log_det = mu[..., 0] * 0.0
        if ordered:
            log_det = mu[..., 1:].sum(-1)
            mu = torch.cat([mu[..., :1], mu[..., 1:].exp()], -1).cumsum(-1)
        taken, left = logsigmoid(sticks), logsigmoid(-sticks)
        log_w = torch.cat([taken[..., :1], left[..., :1] + taken[..., 1:], left.sum(-1, keepdim=True)], -1)
        prior = normal(mu, 0.0, 10.0).sum(-1) + (log_tau - log_tau.exp()).sum(-1)
        prior = prior + (taken + left).sum(-1) + left[..., 0]  # sticks of Beta(1, 2) and Beta(1, 1)
        z = (x[:, None] - mu[..., None, :]) * (0.5 * log_tau[..., None, :]).exp()
        each = log_w[..., None, :] + 0.5 * log_tau[..., None, :] + normal(z)
        return each.logsumexp(-1).sum(-1) + prior + log_det

    means = ("mu[0]", "log gap 1", "log gap 2") if ordered else numbered("mu", 3)
    name = f"mixture of {count}, {'ordered' if ordered else 'no order'}"
    names = (*means, *numbered("log tau", 3), "stick 1", "stick 2")
    return Model(name, SOURCE.format(f"{count:,}"), names, log_joint)


def without_order(draws: Tensor) -> Tensor:
    """Draws (S, 8) of the ordered mixture as (6 S, 8) of that without order: each with its labels in all orders."""
    mu, log_tau, sticks = draws.split([3, 3, 2], -1)
    mu = torch.cat([mu[..., :1], mu[..., 1:].exp()], -1).cumsum(-1)
    taken, left = torch.sigmoid(sticks), torch.sigmoid(-sticks)
    w = torch.stack([taken[..., 0], left[..., 0] * taken[..., 1], left.prod(-1)], -1)
    found = []
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
        v = w[..., order]
        back = torch.stack([torch.logit(v[..., 0]), (v[..., 1] / v[..., 2]).log()], -1)
        found.append(torch.cat([mu[..., order], log_tau[..., order], back], -1))
    return torch.cat(found)


def models() -> list[Model]:
    """All of them."""
    return [mixture(1000), mixture(60), mixture(1000, ordered=False)]
