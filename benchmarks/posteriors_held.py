"""Hierarchies on which no constant of `fit` was chosen: they were written first, and run when the engine was done.

    python -m benchmarks.engine --held --seeds 2

All are centred, from data of diverse scales; conventions are those of `posteriors_hierarchical`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.posteriors_hierarchical import Model, bernoulli, generator, half_cauchy, half_normal, normal, poisson


def reaction_times(persons: int = 30, days: int = 8) -> Model:
    """Milliseconds by day with intercepts and slopes of each person, priors in the units of the data; D = 5 + 2 · 30.

    y_pt ~ N(a_p + b_p t, e²), a_p ~ N(alpha, s²), b_p ~ N(beta, t²); alpha ~ N(300, 100²), beta ~ N(0, 50²),
    s ~ N⁺(0, 100²), t ~ N⁺(0, 20²), e ~ N⁺(0, 100²); theta = (alpha, beta, log s, log t, log e, a, b).
    """
    draw = generator(31)
    day = torch.arange(days, dtype=torch.float64)
    y = 250 + 35 * draw(persons, 1) + (10 + 6 * draw(persons, 1)) * day + 25 * draw(persons, days)

    def log_joint(theta: Tensor) -> Tensor:
        alpha, beta, log_s, log_t, log_e = (theta[..., k : k + 1] for k in range(5))
        a, b = theta[..., 5:].chunk(2, -1)
        top = normal(alpha, 300.0, math.log(100)) + normal(beta, 0.0, math.log(50))
        top = top + half_normal(log_s, 100.0) + half_normal(log_t, 20.0) + half_normal(log_e, 100.0)
        prior = normal(a, alpha, log_s).sum(-1) + normal(b, beta, log_t).sum(-1)
        mean = a[..., None] + b[..., None] * day.to(theta)
        return top[..., 0] + prior + normal(y.to(theta), mean, log_e[..., None]).sum((-2, -1))

    return Model("reaction times", 5 + 2 * persons, log_joint)


def rasch(persons: int = 80, items: int = 15) -> Model:
    """Rasch's model with both populations unknown: ability ~ N(0, s²), difficulty ~ N(mu, t²), D = 3 + 80 + 15.

    mu ~ N(0, 2²), s, t ~ C⁺(0, 1); theta = (mu, log s, log t, ability, difficulty).
    """
    draw, random = generator(32), torch.Generator().manual_seed(32)
    y = torch.bernoulli((1.2 * draw(persons, 1) - 0.5 - 0.8 * draw(items)).sigmoid(), generator=random)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_s, log_t = (theta[..., k : k + 1] for k in range(3))
        ability, hard = theta[..., 3:].split([persons, items], -1)
        top = normal(mu, 0.0, math.log(2)) + half_cauchy(log_s) + half_cauchy(log_t)
        prior = normal(ability, 0.0, log_s).sum(-1) + normal(hard, mu, log_t).sum(-1)
        eta = ability[..., :, None] - hard[..., None, :]
        return top[..., 0] + prior + bernoulli(y.to(theta), eta).sum((-2, -1))

    return Model("Rasch, populations unknown", 3 + persons + items, log_joint)


def local_level(length: int = 150) -> Model:
    """A random walk seen through Poisson counts, x_t ~ N(x_{t-1}, s²), y_t ~ Poisson(exp x_t); D = 1 + 150.

    x_1 ~ N(0, 5²), log s ~ N(-1, 1.5²); theta = (log s, x).
    """
    draw, random = generator(33), torch.Generator().manual_seed(33)
    y = torch.poisson((3 + 0.15 * draw(length).cumsum(0)).exp(), generator=random)

    def log_joint(theta: Tensor) -> Tensor:
        log_s, x = theta[..., :1], theta[..., 1:]
        prior = normal(x[..., 0], 0.0, math.log(5)) + normal(x[..., 1:], x[..., :-1], log_s).sum(-1)
        return normal(log_s[..., 0], -1.0, math.log(1.5)) + prior + poisson(y.to(theta), x).sum(-1)

    return Model("random walk of counts", 1 + length, log_joint)


def cox_process(cells: int = 60) -> Model:
    """Counts on a line, log intensity a Gaussian process of unknown scale and length, f itself sampled; D = 3 + 60.

    f ~ N(mu, a² exp(-½ d²/l²) + 1e-4 I), mu ~ N(0, 3²), log a ~ N(0, 1), log l ~ N(log .2, .5²), y ~ Poisson(e^f).
    """
    draw, random = generator(34), torch.Generator().manual_seed(34)
    x = torch.linspace(0, 1, cells, dtype=torch.float64)
    gap2 = (x[:, None] - x).square()
    y = torch.poisson((1.5 + torch.sin(9 * x) + 0.5 * torch.cos(23 * x)).exp(), generator=random)
    draw(1)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_a, log_l, f = theta[..., 0], theta[..., 1], theta[..., 2], theta[..., 3:]
        kernel = torch.exp(2 * log_a[..., None, None] - 0.5 * gap2.to(theta) * torch.exp(-2 * log_l[..., None, None]))
        jitter = 1e-4 * torch.eye(cells, dtype=theta.dtype, device=theta.device)
        root, bad = torch.linalg.cholesky_ex(kernel + jitter * (1 + kernel[..., :1, :1]))
        white = torch.linalg.solve_triangular(root, (f - mu[..., None])[..., None], upper=False)[..., 0]
        prior = normal(white).sum(-1) - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        top = normal(mu, 0.0, math.log(3)) + normal(log_a) + normal(log_l, math.log(0.2), math.log(0.5))
        value = top + prior + poisson(y.to(theta), f).sum(-1)
        return torch.where(bad > 0, torch.nan, value)

    return Model("Cox process, latent function", 3 + cells, log_joint)


def decay(subjects: int = 20, times: int = 7) -> Model:
    """Absorption and elimination in subjects (Bateman's equation), parameters of each about the population's.

    y ~ LogNormal(log c(t), e²), c = dose ka/(V (ka - k)) (e^-kt - e^-ka t); (log ka, log k, log V)_i ~ N(m, diag s²);
    m ~ N((0, -2, 3), 1), s ~ N⁺(0, 1), e ~ N⁺(0, 1); theta = (m, log s, log e, 3 · subjects).
    """
    draw = generator(35)
    t = torch.tensor([0.25, 0.5, 1.0, 2.0, 5.0, 9.0, 24.0], dtype=torch.float64)[:times]
    centre = torch.tensor([0.3, -2.3, 3.4], dtype=torch.float64)
    spread = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)

    def concentration(local: Tensor) -> Tensor:
        ka, k, volume = local.exp().unbind(-1)
        gap = ka - k
        gap = torch.where(gap.abs() < 1e-6, 1e-6, gap)[..., None]
        shape = (torch.exp(-k[..., None] * t.to(local)) - torch.exp(-ka[..., None] * t.to(local))) / gap
        return (320 * ka / volume)[..., None] * shape

    y = concentration(centre + spread * draw(subjects, 3)).log() + 0.2 * draw(subjects, times)

    def log_joint(theta: Tensor) -> Tensor:
        m, log_s, log_e = theta[..., :3], theta[..., 3:6], theta[..., 6]
        local = theta[..., 7:].unflatten(-1, (subjects, 3))
        top = normal(m, centre.round().to(theta)).sum(-1) + half_normal(log_s).sum(-1) + half_normal(log_e)
        prior = normal(local, m[..., None, :], log_s[..., None, :]).sum((-2, -1))
        mean = concentration(local).clamp_min(1e-30).log()
        return top + prior + normal(y.to(theta), mean, log_e[..., None, None]).sum((-2, -1))

    return Model("absorption and elimination", 7 + 3 * subjects, log_joint)


def sparse_logistic(rows: int = 100, columns: int = 20) -> Model:
    """Logistic regression under a centred horseshoe, b_j ~ N(0, (tau lambda_j)²), D = 2 + 2 · 20.

    lambda_j ~ C⁺(0, 1), tau ~ C⁺(0, .5), intercept ~ N(0, 3²); theta = (intercept, log tau, log lambda, b).
    """
    draw, random = generator(36), torch.Generator().manual_seed(36)
    X, truth = draw(rows, columns), torch.zeros(columns, dtype=torch.float64)
    truth[:3] = torch.tensor([2.0, -2.0, 1.0], dtype=torch.float64)
    y = torch.bernoulli((0.5 + X @ truth).sigmoid(), generator=random)

    def log_joint(theta: Tensor) -> Tensor:
        start, log_tau = theta[..., :1], theta[..., 1:2]
        log_lambda, b = theta[..., 2:].chunk(2, -1)
        prior = (half_cauchy(log_lambda) + normal(b, 0.0, log_tau + log_lambda)).sum(-1)
        top = normal(start, 0.0, math.log(3)) + half_cauchy(log_tau, 0.5)
        return top[..., 0] + prior + bernoulli(y.to(theta), start + b @ X.to(theta).mT).sum(-1)

    return Model("sparse logistic regression, centred", 2 + 2 * columns, log_joint)


def frailty(clinics: int = 25, each: int = 6) -> Model:
    """Weibull times in clinics with a frailty each, some censored; D = 4 + 25; times in days, some hundreds.

    log scale of clinic c: u_c + b x, u_c ~ N(mu, s²); mu ~ N(5, 3²), b ~ N(0, 2²), log s ~ N(-1, 1), log shape ~ N(0,
    .5²); theta = (mu, b, log s, log shape, u).
    """
    draw, random = generator(37), torch.Generator().manual_seed(37)
    x = draw(clinics, each)
    uniform = torch.rand(clinics, each, generator=random, dtype=torch.float64)
    t = (5.5 + 0.4 * draw(clinics, 1) - 0.5 * x).exp() * (-uniform.log()) ** (1 / 1.5)
    died = (t < 600).double()
    log_t = t.clamp_max(600.0).log()

    def log_joint(theta: Tensor) -> Tensor:
        mu, b, log_s, log_k = (theta[..., k : k + 1] for k in range(4))
        u = theta[..., 4:]
        top = normal(mu, 5.0, math.log(3)) + normal(b, 0.0, math.log(2)) + normal(log_s, -1.0)
        top = top + normal(log_k, 0.0, math.log(0.5))
        z = log_k.exp()[..., None] * (log_t.to(theta) - u[..., None] - b[..., None] * x.to(theta))
        likelihood = died.to(theta) * (log_k[..., None] + z - log_t.to(theta)) - z.exp()
        return top[..., 0] + normal(u, mu, log_s).sum(-1) + likelihood.sum((-2, -1))

    return Model("Weibull times with frailties", 4 + clinics, log_joint)


def nested_schools(districts: int = 12, schools: int = 8, pupils: int = 5) -> Model:
    """Three levels, pupils in schools in districts, scores in the hundreds; D = 4 + 12 + 96.

    y ~ N(b, e²), b_ds ~ N(a_d, t²), a_d ~ N(mu, s²); mu ~ N(500, 200²), log s, log t, log e ~ N(3, 1.5²).
    """
    draw = generator(38)
    a = 480 + 30 * draw(districts, 1, 1)
    y = a + 15 * draw(districts, schools, 1) + 60 * draw(districts, schools, pupils)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_s, log_t, log_e = (theta[..., k : k + 1] for k in range(4))
        a, b = theta[..., 4:].split([districts, districts * schools], -1)
        b = b.unflatten(-1, (districts, schools))
        top = normal(mu, 500.0, math.log(200))
        for log_scale in (log_s, log_t, log_e):
            top = top + normal(log_scale, 3.0, math.log(1.5))
        prior = normal(a, mu, log_s).sum(-1) + normal(b, a[..., None], log_t[..., None]).sum((-2, -1))
        likelihood = normal(y.to(theta), b[..., None], log_e[..., None, None]).sum((-3, -2, -1))
        return top[..., 0] + prior + likelihood

    return Model("pupils in schools in districts", 4 + districts * (1 + schools), log_joint)


def overdispersed(sites: int = 280) -> Model:
    """Counts with an effect each, y_i ~ Poisson(exposure e^u_i), exposures up to thousands; D = 4 + 280.

    u_i ~ N(x_i b, s²), b ~ N(0, 5²) for an intercept and two slopes, s ~ N⁺(0, 2²); theta = (b, log s, u).
    """
    draw, random = generator(39), torch.Generator().manual_seed(39)
    X = torch.cat([torch.ones(sites, 1, dtype=torch.float64), draw(sites, 2)], -1)
    exposure = (4 + 1.5 * draw(sites)).exp()
    u = X @ torch.tensor([-2.0, 0.6, -0.3], dtype=torch.float64) + 0.8 * draw(sites)
    y = torch.poisson(exposure * u.exp(), generator=random)

    def log_joint(theta: Tensor) -> Tensor:
        b, log_s, u = theta[..., :3], theta[..., 3:4], theta[..., 4:]
        top = normal(b, 0.0, math.log(5)).sum(-1) + half_normal(log_s, 2.0)[..., 0]
        prior = normal(u, b @ X.to(theta).mT, log_s).sum(-1)
        return top + prior + poisson(y.to(theta), exposure.log().to(theta) + u).sum(-1)

    return Model("counts with an effect each", 4 + sites, log_joint)


def few_groups() -> Model:
    """Five groups whose spread the data hardly tell, a robust likelihood (t, 4 degrees of freedom); D = 3 + 5.

    y_gj ~ t_4(theta_g, e), theta_g ~ N(mu, s²), mu ~ N(0, 10²), s ~ C⁺(0, 2), e ~ C⁺(0, 2).
    """
    draw = generator(40)
    y = 4 + 0.5 * draw(5, 1) + 1.5 * draw(5, 6)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_s, log_e, local = theta[..., :1], theta[..., 1:2], theta[..., 2:3], theta[..., 3:]
        top = normal(mu, 0.0, math.log(10)) + half_cauchy(log_s, 2.0) + half_cauchy(log_e, 2.0)
        z2 = ((y.to(theta) - local[..., None]) * torch.exp(-log_e)[..., None]).square()
        likelihood = (-2.5 * torch.log1p(z2 / 4) - log_e[..., None]).sum((-2, -1))
        return top[..., 0] + normal(local, mu, log_s).sum(-1) + likelihood

    return Model("five groups, robust", 8, log_joint)


HELD: dict[str, Callable[[], Model]] = {
    "reactions": reaction_times,
    "rasch": rasch,
    "walk": local_level,
    "cox": cox_process,
    "decay": decay,
    "sparse": sparse_logistic,
    "frailty": frailty,
    "nested": nested_schools,
    "sites": overdispersed,
    "five": few_groups,
}
