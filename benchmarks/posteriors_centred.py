"""Hierarchies as their users write them, centred for the most part: on these the constants of `fit` were chosen.

    python -m benchmarks.engine --only groups volatility ...

A log joint takes theta (*batch, D) to (*batch,), as in `posteriors_hierarchical`; scales are in log coordinates, with
the Jacobians.  All data are simulated from the model.  Those of `posteriors_held` are others, which were only run.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.posteriors_hierarchical import Model, bernoulli, generator, half_normal, normal, poisson


def poisson_groups(groups: int = 200, each: int = 5, log_sd: float = -0.71) -> Model:
    """Counts in groups with a common slope, y_gj ~ Poisson(exp(theta_g + b x_gj)), theta_g ~ N(mu, sigma²); centred.

    mu, b ~ N(0, 3²), log sigma ~ N(0, 2²); theta = (mu, b, log sigma, theta_1, ...).
    """
    draw, random = generator(11), torch.Generator().manual_seed(11)
    x = draw(groups, each)
    eta = 1.0 + math.exp(log_sd) * draw(groups, 1) + 0.5 * x
    y = torch.poisson(eta.exp(), generator=random)

    def log_joint(theta: Tensor) -> Tensor:
        mu, b, log_sigma, local = theta[..., :1], theta[..., 1:2], theta[..., 2:3], theta[..., 3:]
        top = normal(mu, 0.0, math.log(3)) + normal(b, 0.0, math.log(3)) + normal(log_sigma, 0.0, math.log(2))
        rate = local[..., None] + b[..., None] * x.to(theta)
        return top[..., 0] + normal(local, mu, log_sigma).sum(-1) + poisson(y.to(theta), rate).sum((-2, -1))

    return Model("Poisson groups, centred", 3 + groups, log_joint)


def volatility(centred: bool = True, length: int = 100) -> Model:
    """Stochastic volatility (Kim, Shephard and Chib 1998): y_t ~ N(0, e^h_t), h_t ~ N(mu + phi (h_{t-1} - mu), s²).

    mu ~ N(0, 3²), atanh phi ~ N(1, 1), log s ~ N(-1, 1); theta = (mu, atanh phi, log s, h), or innovations for h.
    """
    draw = generator(12)
    h, path = torch.zeros((), dtype=torch.float64), []
    for step in draw(length):
        h = 0.95 * h + 0.25 * step
        path.append(h)
    y = (0.5 * (torch.stack(path) - 1.0)).exp() * draw(length)

    def log_joint(theta: Tensor) -> Tensor:
        mu, x, log_s, local = theta[..., :1], theta[..., 1:2], theta[..., 2:3], theta[..., 3:]
        phi, top = x.tanh(), normal(mu, 0.0, math.log(3)) + normal(x, 1.0) + normal(log_s, -1.0)
        first = log_s - 0.5 * torch.log1p(-phi.square()).clamp_min(-30.0)  # log sd of the stationary law
        if centred:
            h = local
            prior = normal(h[..., :1], mu, first).sum(-1)
            prior = prior + normal(h[..., 1:], mu + phi * (h[..., :-1] - mu), log_s).sum(-1)
        else:
            state, states, prior = first.exp() * local[..., :1], [], normal(local).sum(-1)
            for t in range(length):
                state = state if t == 0 else phi * state + log_s.exp() * local[..., t : t + 1]
                states.append(state)
            h = mu + torch.cat(states, -1)
        return top[..., 0] + prior + normal(y.to(theta), 0.0, 0.5 * h).sum(-1)

    return Model(f"stochastic volatility, {'' if centred else 'non-'}centred", 3 + length, log_joint)


def measured_groups(groups: int = 40, each: int = 6, scale: float = 50.0) -> Model:
    """Measurements in groups, y_gj ~ N(theta_g, noise²), theta_g ~ N(mu, tau²): data far from zero in their own units.

    mu ~ N(0, (20 scale)²), log tau, log noise ~ N(log scale, 2²); theta = (mu, log tau, log noise, theta_1, ...).
    """
    draw = generator(13)
    y = scale * (10 + 0.3 * draw(groups, 1) + draw(groups, each))

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_tau, log_noise, local = theta[..., :1], theta[..., 1:2], theta[..., 2:3], theta[..., 3:]
        top = normal(mu, 0.0, math.log(20 * scale))
        for log_scale in (log_tau, log_noise):
            top = top + normal(log_scale, math.log(scale), math.log(2))
        likelihood = normal(y.to(theta), local[..., None], log_noise[..., None]).sum((-2, -1))
        return top[..., 0] + normal(local, mu, log_tau).sum(-1) + likelihood

    return Model("measured groups, centred", 3 + groups, log_joint)


def wells(groups: int = 60, trials: int = 12, columns: int = 5) -> Model:
    """Binomial counts in groups with covariates and centred intercepts, y_g ~ Bin(trials, sigmoid(a_g + x_g b)).

    a_g ~ N(mu, s²), b ~ N(0, t²), mu ~ N(0, 3²), log s, log t ~ N(0, 1); theta = (mu, log s, log t, b, a).
    """
    draw, random = generator(14), torch.Generator().manual_seed(14)
    X = draw(groups, columns)
    eta = -0.5 + 0.6 * draw(groups) + X @ (0.7 * draw(columns))
    y = torch.bernoulli(eta.sigmoid()[:, None].expand(-1, trials), generator=random).sum(1)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_s, log_t = theta[..., :1], theta[..., 1:2], theta[..., 2:3]
        b, a = theta[..., 3 : 3 + columns], theta[..., 3 + columns :]
        top = normal(mu, 0.0, math.log(3)) + normal(log_s) + normal(log_t)
        prior = normal(b, 0.0, log_t).sum(-1) + normal(a, mu, log_s).sum(-1)
        eta, yes = a + b @ X.to(theta).mT, y.to(theta)
        one = torch.ones_like(eta)
        likelihood = yes * bernoulli(one, eta) + (trials - yes) * bernoulli(0 * one, eta)
        return top[..., 0] + prior + likelihood.sum(-1)

    return Model("binomial groups, centred", 3 + columns + groups, log_joint)


def variances(groups: int = 25, each: int = 8) -> Model:
    """Groups with means and variances of their own: y_gj ~ N(m_g, e^2v_g), m_g ~ N(mu, s²), v_g ~ N(nu, t²); centred.

    mu, nu ~ N(0, 2²), s, t ~ N⁺(0, 1); theta = (mu, nu, log s, log t, m, v).
    """
    draw = generator(15)
    y = 2 + 0.5 * draw(groups, 1) + (-0.5 + 0.4 * draw(groups, 1)).exp() * draw(groups, each)

    def log_joint(theta: Tensor) -> Tensor:
        mu, nu, log_s, log_t = (theta[..., k : k + 1] for k in range(4))
        m, v = theta[..., 4:].chunk(2, -1)
        top = normal(mu, 0.0, math.log(2)) + normal(nu, 0.0, math.log(2)) + half_normal(log_s) + half_normal(log_t)
        prior = normal(m, mu, log_s).sum(-1) + normal(v, nu, log_t).sum(-1)
        return top[..., 0] + prior + normal(y.to(theta), m[..., None], v[..., None]).sum((-2, -1))

    return Model("means and variances, centred", 4 + 2 * groups, log_joint)


CENTRED: dict[str, Callable[[], Model]] = {
    "groups": poisson_groups,
    "volatility": volatility,
    "volatility-noncentred": functools.partial(volatility, False),
    "measured": measured_groups,
    "binomial": wells,
    "variances": variances,
}
