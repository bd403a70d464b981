"""Posteriors of two or three coordinates, by quadrature: samples, regressions, survival times, curves.

All have proper Gaussian priors; positive parameters are in log coordinates.  Few data leave a posterior that is far
from Gaussian, many do not.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .target import Target, normal, normals, on_grid, uniforms, vector


def wide(theta: Tensor, sd: float) -> Tensor:
    """Independent priors N(0, sd²)."""
    return normal(theta, 0.0, sd).sum(-1)


def design(rows: int, columns: int, seed: int) -> Tensor:
    """An intercept and standard normal columns."""
    return torch.cat([torch.ones(rows, 1, dtype=torch.float64), normals(seed)(rows, columns - 1)], -1)


# tune


def normal_sample() -> list[Target]:
    """Mean and log sd of n observations."""
    found = []
    for n, spread in ((2, 1.5), (3, 3.0), (5, 1.5), (12, 1.5), (60, 1.5)):
        y = 1 + 2 * normals(100 + n)(n)

        def log_joint(theta: Tensor, y: Tensor = y, spread: float = spread) -> Tensor:
            mu, log_sd = theta[..., :1], theta[..., 1:]
            prior = normal(mu, 0.0, 5.0) + normal(log_sd, 0.0, spread)
            return prior[..., 0] + (normal((y.to(theta) - mu) * torch.exp(-log_sd)) - log_sd).sum(-1)

        found.append(on_grid(f"normal sample of {n}", log_joint, [-30.0, -12.0], [30.0, 12.0]))
    return found


def logistic_regression() -> list[Target]:
    """Two or three coefficients; few rows are separated, and only the prior bounds them."""
    found = []
    for rows, columns, sd in ((6, 2, 10.0), (10, 3, 5.0), (30, 3, 2.5), (200, 2, 2.5)):
        X = design(rows, columns, 110 + rows)
        y = (uniforms(rows)(rows) < torch.sigmoid(X @ vector(0.5, 1.5, -1.0)[:columns])).double()

        def log_joint(theta: Tensor, X: Tensor = X, y: Tensor = y, sd: float = sd) -> Tensor:
            return wide(theta, sd) + logsigmoid((theta @ X.to(theta).mT) * (2 * y - 1).to(theta)).sum(-1)

        found.append(on_grid(f"logistic regression {rows} x {columns}", log_joint, [-40.0] * columns, [40.0] * columns))
    return found


def gamma_sample() -> list[Target]:
    """Log shape and log rate of a gamma sample."""
    found = []
    for n in (2, 4, 15, 80):
        draw = uniforms(120 + n)
        y = -(draw(n).log() + draw(n).log()) / 1.5  # Gamma(2, 1.5)

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            log_shape, log_rate = theta[..., :1], theta[..., 1:]
            shape, t = log_shape.exp(), y.to(theta)
            likelihood = shape * log_rate - torch.lgamma(shape) + (shape - 1) * t.log() - log_rate.exp() * t
            return wide(theta, 2.0) + likelihood.sum(-1)

        found.append(on_grid(f"gamma sample of {n}", log_joint, [-12.0, -12.0], [12.0, 12.0]))
    return found


def growth() -> list[Target]:
    """Oxygen demand, y = a (1 - exp(-b x)) + noise (Bates and Watts 1988), over more or less of the curve."""
    found = []
    for last, noise in ((7.0, 2.5), (1.5, 2.5), (4.0, 0.5), (7.0, 0.3)):
        x = torch.linspace(0.15, 1, 6, dtype=torch.float64) * last
        y = 20 * (1 - torch.exp(-0.5 * x)) + noise * normals(130)(6)

        def log_joint(theta: Tensor, x: Tensor = x, y: Tensor = y, noise: float = noise) -> Tensor:
            log_a, log_b = theta[..., :1], theta[..., 1:]
            mean = -log_a.exp() * torch.expm1(-log_b.exp() * x.to(theta))
            prior = normal(log_a, 3.0, 1.5) + normal(log_b, -1.0, 1.5)
            return prior[..., 0] + normal(y.to(theta), mean, noise).sum(-1)

        name = f"oxygen demand to {last:g}, noise {noise:g}"
        found.append(on_grid(name, log_joint, [-6.0, -9.0], [12.0, 8.0]))
    return found


def outliers() -> list[Target]:
    """Location and log scale of a Student t sample, ν = 2, which some data split in two."""
    samples = ((-0.2, 0.1, 0.3, 8.0), (-3.2, -3.0, 3.0, 3.3), (-1.0, -0.4, 0.0, 0.3, 0.5, 1.2, 1.9, 12.0))
    found = []
    for values in samples:
        y = vector(*values)

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            mu, log_s = theta[..., :1], theta[..., 1:]
            u = (y.to(theta) - mu) * torch.exp(-log_s)
            prior = normal(mu, 0.0, 4.0) + normal(log_s, -1.0, 1.0)
            return prior[..., 0] + (-1.5 * torch.log1p(0.5 * u.square()) - log_s - 1.5 * math.log(2)).sum(-1)

        found.append(
            on_grid(f"t sample of {len(values)}, at {values[0]:g}", log_joint, [-25.0, -8.0], [25.0, 6.0], nodes=401)
        )
    return found


def negative_binomial() -> list[Target]:
    """Log mean and log dispersion of counts; counts without overdispersion do not bound the second."""
    samples = ((0, 0, 1, 0), (3, 2, 4, 3, 2, 3), (0, 9, 1, 4, 0, 22, 3, 6, 1, 15), (5, 0, 2, 12, 1, 3, 8, 0) * 6)
    found = []
    for i, values in enumerate(samples):
        y = vector(*map(float, values))

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            log_mean, log_r = theta[..., :1], theta[..., 1:]
            r, count, logit = log_r.exp(), y.to(theta), log_mean - log_r
            ways = torch.lgamma(count + r) - torch.lgamma(r) - torch.lgamma(count + 1)
            likelihood = ways + count * logsigmoid(logit) + r * logsigmoid(-logit)
            return wide(theta, 3.0) + likelihood.sum(-1)

        found.append(on_grid(f"negative binomial {i + 1}", log_joint, [-15.0, -15.0], [15.0, 15.0]))
    return found


# held


def poisson_regression() -> list[Target]:
    """Two or three coefficients; where all counts are nought only the prior bounds the intercept."""
    found = []
    for rows, columns, level in ((4, 2, -4.0), (8, 3, -1.0), (25, 3, 0.5), (150, 2, 1.0)):
        X = design(rows, columns, 140 + rows)
        draws = uniforms(rows)
        rate = torch.exp(X @ vector(level, 0.6, -0.4)[:columns])
        y = (draws(rows, 60).log().cumsum(-1) > -rate[:, None]).sum(-1).double()  # arrivals before the rate

        def log_joint(theta: Tensor, X: Tensor = X, y: Tensor = y) -> Tensor:
            eta = theta @ X.to(theta).mT
            return wide(theta, 3.0) + (y.to(theta) * eta - eta.exp() - torch.lgamma(y + 1).to(theta)).sum(-1)

        found.append(on_grid(f"Poisson regression {rows} x {columns}", log_joint, [-25.0] * columns, [25.0] * columns))
    return found


def probit_regression() -> list[Target]:
    """Two or three coefficients, few rows and many."""
    found = []
    for rows, columns, sd in ((5, 2, 8.0), (12, 3, 4.0), (120, 2, 2.5)):
        X = design(rows, columns, 150 + rows)
        y = (normals(rows)(rows) < X @ vector(0.3, 1.0, -0.7)[:columns]).double()

        def log_joint(theta: Tensor, X: Tensor = X, y: Tensor = y, sd: float = sd) -> Tensor:
            eta = (theta @ X.to(theta).mT) * (2 * y - 1).to(theta)
            return wide(theta, sd) + torch.special.log_ndtr(eta).sum(-1)

        found.append(on_grid(f"probit regression {rows} x {columns}", log_joint, [-30.0] * columns, [30.0] * columns))
    return found


def weibull_survival() -> list[Target]:
    """Log shape and log scale of Weibull survival times, censored at 2."""
    found = []
    for n in (2, 5, 12, 80):
        waited = 1.5 * (-uniforms(160 + n)(n).log()).pow(1 / 1.4)
        y, seen = waited.clamp(max=2.0), (waited < 2).double()

        def log_joint(theta: Tensor, y: Tensor = y, seen: Tensor = seen) -> Tensor:
            log_shape, log_scale = theta[..., :1], theta[..., 1:]
            reach = log_shape.exp() * (y.to(theta).log() - log_scale)
            hazard = log_shape + reach - y.to(theta).log()
            return wide(theta, 2.0) + (seen.to(theta) * hazard - reach.exp()).sum(-1)

        found.append(on_grid(f"Weibull survival of {n}", log_joint, [-10.0, -10.0], [10.0, 10.0]))
    return found


def dose_response() -> list[Target]:
    """Michaelis-Menten, y = a x / (b + x) + noise, in log coordinates; doses far below b leave a/b alone."""
    found = []
    for last, noise in ((0.3, 0.15), (1.0, 0.15), (6.0, 0.3), (6.0, 0.05)):
        x = torch.linspace(0.1, 1, 7, dtype=torch.float64) * last
        y = 3 * x / (1 + x) + noise * normals(170)(7)

        def log_joint(theta: Tensor, x: Tensor = x, y: Tensor = y, noise: float = noise) -> Tensor:
            log_a, log_b, dose = theta[..., :1], theta[..., 1:], x.to(theta)
            mean = log_a.exp() * dose / (log_b.exp() + dose)
            return wide(theta, 2.0) + normal(y.to(theta), mean, noise).sum(-1)

        found.append(on_grid(f"dose response to {last:g}, noise {noise:g}", log_joint, [-9.0, -9.0], [9.0, 9.0]))
    return found


def mixture_means() -> list[Target]:
    """Two unknown means of an equal mixture of N(., 1): labels switch, and where the data are one heap they blur."""
    found = []
    for gap, n in ((4.0, 12), (1.0, 12), (2.0, 30)):
        draw = normals(180 + n)
        y = draw(n) + gap * (torch.arange(n) % 2 - 0.5)

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            each = normal(y.to(theta), theta[..., None])  # (*batch, 2, N)
            return wide(theta, 3.0) + (torch.logsumexp(each, -2) - math.log(2)).sum(-1)

        found.append(on_grid(f"two means {gap:g} apart, n = {n}", log_joint, [-10.0, -10.0], [10.0, 10.0], turn=False))
    return found


def two_variances() -> list[Target]:
    """Log sds of two errors: y ~ N(0, s² + t²) sees their sum, x ~ N(0, s²) the first."""
    found = []
    for both, first in ((6, 0), (6, 4), (40, 40)):
        draw = normals(190 + first)
        y, x = math.sqrt(2) * draw(both), draw(first)

        def log_joint(theta: Tensor, y: Tensor = y, x: Tensor = x) -> Tensor:
            log_s = theta[..., :1]
            log_sum = 0.5 * torch.logsumexp(2 * theta, -1, keepdim=True)
            likelihood = (normal(y.to(theta) * torch.exp(-log_sum)) - log_sum).sum(-1)
            return wide(theta, 1.5) + likelihood + (normal(x.to(theta) * torch.exp(-log_s)) - log_s).sum(-1)

        found.append(on_grid(f"two variances of {both} and {first}", log_joint, [-9.0, -9.0], [9.0, 9.0]))
    return found
