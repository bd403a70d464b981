"""Log joints of well-known hierarchical models, in unconstrained coordinates: what an engine should fit by default.

    from benchmarks.posteriors_hierarchical import MODELS
    name, dim, log_joint = MODELS["rats"]()

    python benchmarks/posteriors_hierarchical.py        # names, dimensions, values at zero and at N(0, .01)

A log joint takes theta (*batch, D), in float32 or float64, to (*batch,).  Scales are in log coordinates, probabilities
in logits and correlations in inverse hyperbolic tangents, with the Jacobians.  Priors are normalised.  The tumours and
the schools are the published counts and effects; all other data are simulated from the model, by a seed of their own.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Model(NamedTuple):
    """A log joint of D coordinates, by its name."""

    name: str
    dim: int
    log_joint: Callable[[Tensor], Tensor]  # theta (*batch, D) -> (*batch,)


def normal(x: Tensor, mean: Tensor | float = 0.0, log_sd: Tensor | float = 0.0) -> Tensor:
    """log N(x; mean, sd²), entry by entry."""
    log_sd = torch.as_tensor(log_sd, dtype=x.dtype, device=x.device)
    return -0.5 * ((x - mean) * torch.exp(-log_sd)).square() - log_sd - HALF_LOG_2PI


def half_cauchy(log_x: Tensor, scale: float = 1.0) -> Tensor:
    """Log density of log x where x ~ C⁺(0, scale)."""
    u = log_x - math.log(scale)
    return math.log(2 / math.pi) + u - softplus(2 * u)


def half_normal(log_x: Tensor, scale: float = 1.0) -> Tensor:
    """Log density of log x where x ~ N⁺(0, scale²)."""
    return math.log(2) + normal(log_x.exp(), 0.0, math.log(scale)) + log_x


def poisson(y: Tensor, eta: Tensor) -> Tensor:
    """log Poisson(y; exp η)."""
    return y * eta - eta.exp() - torch.lgamma(y + 1)


def bernoulli(y: Tensor, eta: Tensor) -> Tensor:
    """log Bernoulli(y; sigmoid η)."""
    return logsigmoid(torch.where(y > 0.5, eta, -eta))


def generator(seed: int) -> Callable[..., Tensor]:
    """Standard normal draws in float64 from a generator of their own."""
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TUMOURS = (
    "0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 2 1 5 2 5 3 2 7 7 3 3 2 9 10 "
    "4 4 4 4 4 4 4 10 4 4 4 5 11 12 5 5 6 5 6 6 6 6 16 15 15 9 4"
)
RATS = (
    "20 20 20 20 20 20 20 19 19 19 19 18 18 17 20 20 20 20 19 19 18 18 25 24 23 20 20 20 20 20 20 10 49 19 46 27 17 "
    "49 47 20 20 13 48 50 20 20 20 20 20 20 20 48 19 19 19 22 46 49 20 20 23 19 22 20 20 20 52 46 47 24 14"
)


def counts(text: str) -> Tensor:
    """The numbers of a line."""
    return torch.tensor([float(word) for word in text.split()], dtype=torch.float64)


def rats() -> Model:
    """Tumours in 71 groups of rats (Tarone 1982; Gelman et al., Bayesian Data Analysis, chapter 5), D = 73.

    y_i ~ Binomial(n_i, p_i), p_i ~ Beta(phi kappa, (1 - phi) kappa), phi ~ U(0, 1) and a Pareto density
    1.5 kappa^-2.5 on kappa > 1; theta = (logit phi, log(kappa - 1), logit p).
    """
    y, n = counts(TUMOURS), counts(RATS)
    ways = float((torch.lgamma(n + 1) - torch.lgamma(y + 1) - torch.lgamma(n - y + 1)).sum())

    def log_joint(theta: Tensor) -> Tensor:
        phi, kappa, p = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        size = 1 + kappa.exp()
        a, b = size * phi.sigmoid(), size * (-phi).sigmoid()
        yes, no = y.to(theta), (n - y).to(theta)
        top = (logsigmoid(phi) + logsigmoid(-phi) + math.log(1.5) - 2.5 * softplus(kappa) + kappa)[..., 0] + ways
        beta = torch.lgamma(size) - torch.lgamma(a) - torch.lgamma(b)
        return top + (beta + (a + yes) * logsigmoid(p) + (b + no) * logsigmoid(-p)).sum(-1)

    return Model("rats", 73, log_joint)


EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)


def eight_schools(centred: bool = True) -> Model:
    """Coaching in eight schools (Rubin 1981): mu ~ N(0, 5²), tau ~ C⁺(0, 5); theta = (mu, log tau, 8 effects)."""
    y, sd = torch.tensor(EFFECTS, dtype=torch.float64), torch.tensor(ERRORS, dtype=torch.float64)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_tau, local = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        prior = normal(local, mu, log_tau) if centred else normal(local)
        effect = local if centred else mu + log_tau.exp() * local
        top = normal(mu, 0.0, math.log(5)) + half_cauchy(log_tau, 5.0)
        return top[..., 0] + (prior + normal(y.to(theta), effect, sd.log().to(theta))).sum(-1)

    return Model(f"eight schools, {'' if centred else 'non-'}centred", 10, log_joint)


def horseshoe(centred: bool = False, rows: int = 60, columns: int = 50) -> Model:
    """Sparse linear regression (Carvalho, Polson and Scott 2010), D = 2 · 50 + 2; five of 50 coefficients are not zero.

    b_j = tau lambda_j z_j, lambda_j ~ C⁺(0, 1), tau ~ C⁺(0, .1), noise ~ N⁺(0, 1); theta = (log tau, log noise, log
    lambda, z), or b in the place of z.
    """
    draw = generator(1)
    X = draw(rows, columns)
    truth = torch.zeros(columns, dtype=torch.float64)
    truth[:5] = torch.tensor([2.0, -1.5, 1.0, -1.0, 0.5], dtype=torch.float64)
    y = X @ truth + 0.5 * draw(rows)

    def log_joint(theta: Tensor) -> Tensor:
        log_tau, log_noise = theta[..., :1], theta[..., 1:2]
        log_lambda, z = theta[..., 2 : 2 + columns], theta[..., 2 + columns :]
        scale = log_tau + log_lambda
        prior = normal(z, 0.0, scale) if centred else normal(z)
        b = z if centred else scale.exp() * z
        top = half_cauchy(log_tau, 0.1) + half_normal(log_noise)
        locals_ = (half_cauchy(log_lambda) + prior).sum(-1)
        return top[..., 0] + locals_ + normal(y.to(theta), b @ X.to(theta).mT, log_noise).sum(-1)

    return Model(f"horseshoe, {'' if centred else 'non-'}centred", 2 * columns + 2, log_joint)


def lkj(x: Tensor, size: int, shape: float) -> tuple[Tensor, Tensor]:
    """The Cholesky factor (*batch, size, size) of an LKJ(shape) correlation matrix, and log p(x) without its constant.

    tanh x are the canonical partial correlations (Lewandowski, Kurowicka and Joe 2009), of the first column, then the
    second, ...: those of column k = 1, 2, ... have densities (1 - r²)^(shape + (size - 1 - k)/2 - 1).
    """
    partial, entries, density, start = x.tanh(), {}, torch.zeros_like(x[..., 0]), 0
    rest = [torch.ones_like(x[..., 0]) for _ in range(size)]
    for column in range(size):
        entries[column, column] = rest[column].sqrt()
        for row in range(column + 1, size):
            r = partial[..., start]
            start += 1
            entries[row, column] = r * rest[row].sqrt()
            rest[row] = rest[row] * (1 - r.square())
            density = density + (shape + 0.5 * (size - 2 - column)) * torch.log1p(-r.square())
    zero = torch.zeros_like(x[..., 0])
    rows = [torch.stack([entries.get((i, j), zero) for j in range(size)], -1) for i in range(size)]
    return torch.stack(rows, -2), density


def random_slopes(groups: int = 30, each: int = 8) -> Model:
    """Correlated random intercepts and two slopes with an LKJ(2) prior, D = 3 + 3 + 3 + 1 + 3 · 30, non-centred.

    y = x'(b + diag(s) L z_g) + noise; b ~ N(0, 2²), s ~ N⁺(0, 1), noise ~ N⁺(0, 1); theta = (b, log s, partial
    correlations, log noise, z).
    """
    draw, size = generator(2), 3
    X = torch.cat([torch.ones(groups, each, 1, dtype=torch.float64), draw(groups, each, size - 1)], -1)
    root = torch.tensor([[0.8, 0.0, 0.0], [0.3, 0.4, 0.0], [-0.2, 0.1, 0.3]], dtype=torch.float64)
    effect = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64) + draw(groups, size) @ root.mT
    y = (X * effect[:, None]).sum(-1) + 0.5 * draw(groups, each)

    def log_joint(theta: Tensor) -> Tensor:
        b, log_s, x, log_noise = theta[..., :3], theta[..., 3:6], theta[..., 6:9], theta[..., 9:10]
        z = theta[..., 10:].unflatten(-1, (groups, size))
        L, prior = lkj(x, size, 2.0)
        local = b[..., None, :] + log_s.exp()[..., None, :] * (z @ L.mT)
        eta = torch.einsum("gnk,...gk->...gn", X.to(theta), local)
        top = normal(b, 0.0, math.log(2)).sum(-1) + half_normal(log_s).sum(-1) + half_normal(log_noise)[..., 0] + prior
        likelihood = normal(y.to(theta), eta, log_noise[..., None]).sum((-2, -1))
        return top + normal(z).sum((-2, -1)) + likelihood

    return Model("correlated random slopes, LKJ", 10 + size * groups, log_joint)


def crossed(rows: int = 25, columns: int = 20) -> Model:
    """Negative-binomial counts with crossed effects of rows and columns, D = 4 + 25 + 20, non-centred.

    y_ij ~ NB(mean exp(mu + s a_i + t b_j), dispersion r), mu ~ N(0, 2²), s, t ~ N⁺(0, 1), r ~ N⁺(0, 10²); theta =
    (mu, log s, log t, log r, a, b).
    """
    draw, random = generator(3), torch.Generator().manual_seed(3)
    eta = 1 + 0.7 * draw(rows, 1) + 0.4 * draw(1, columns)
    shape = torch.full_like(eta, 3.0)
    rate = torch._standard_gamma(shape, generator=random) / shape * eta.exp()
    y = torch.poisson(rate, generator=random)

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_s, log_t, log_r = theta[..., :4].unbind(-1)
        a, b = theta[..., 4 : 4 + rows], theta[..., 4 + rows :]
        x = (
            mu[..., None, None]
            + (log_s.exp()[..., None] * a)[..., :, None]
            + (log_t.exp()[..., None] * b)[..., None, :]
        )
        r, count = log_r.exp()[..., None, None], y.to(theta)
        ways = torch.lgamma(count + r) - torch.lgamma(r) - torch.lgamma(count + 1)
        logit = x - log_r[..., None, None]  # of the share mean / (mean + r)
        likelihood = (ways + count * logsigmoid(logit) + r * logsigmoid(-logit)).sum((-2, -1))
        top = normal(mu, 0.0, math.log(2)) + half_normal(log_s) + half_normal(log_t) + half_normal(log_r, 10.0)
        return top + normal(theta[..., 4:]).sum(-1) + likelihood

    return Model("crossed negative binomial", 4 + rows + columns, log_joint)


def item_response(persons: int = 100, items: int = 20) -> Model:
    """Two-parameter logistic item response (Birnbaum 1968), D = 100 + 2 · 20.

    y_pi ~ Bernoulli(sigmoid(a_i (ability_p - b_i))), ability ~ N(0, 1), log a ~ N(0, .5²), b ~ N(0, 1.5²); theta =
    (ability, log a, b).
    """
    draw, random = generator(4), torch.Generator().manual_seed(4)
    logit = (0.4 * draw(items)).exp() * (draw(persons, 1) - draw(items))
    y = torch.bernoulli(logit.sigmoid(), generator=random)

    def log_joint(theta: Tensor) -> Tensor:
        ability, log_a, b = theta.split([persons, items, items], -1)
        eta = log_a.exp()[..., None, :] * (ability[..., :, None] - b[..., None, :])
        prior = (
            normal(ability).sum(-1) + normal(log_a, 0.0, math.log(0.5)).sum(-1) + normal(b, 0.0, math.log(1.5)).sum(-1)
        )
        return prior + bernoulli(y.to(theta), eta).sum((-2, -1))

    return Model("item response, 2PL", persons + 2 * items, log_joint)


def network(rows: int = 100, inputs: int = 3, hidden: int = 10) -> Model:
    """A small Bayesian neural network, one tanh layer: D = 3 · 10 + 10 + 10 + 1 + 1; weights N(0, 1), noise N⁺(0, 1).

    Its posterior has 10! 2^10 copies of every mode.
    """
    draw = generator(5)
    X = draw(rows, inputs)
    y = torch.sin(2 * X[:, 0]) + 0.5 * X[:, 1] * X[:, 2] + 0.2 * draw(rows)
    sizes = [inputs * hidden, hidden, hidden, 1, 1]

    def log_joint(theta: Tensor) -> Tensor:
        first, shift, second, offset, log_noise = theta.split(sizes, -1)
        layer = torch.tanh(X.to(theta) @ first.unflatten(-1, (inputs, hidden)) + shift[..., None, :])
        mean = (layer * second[..., None, :]).sum(-1) / math.sqrt(hidden) + offset
        prior = normal(theta[..., :-1]).sum(-1) + half_normal(log_noise)[..., 0]
        return prior + normal(y.to(theta), mean, log_noise).sum(-1)

    return Model("Bayesian neural network", sum(sizes), log_joint)


def poisson_regression(rows: int = 480, columns: int = 240) -> Model:
    """Poisson regression, X = .5 N(0, 1); data of rate exp(Xw + .3), w = .1 N(0, 1), prior N(0, I); no intercept."""
    draw, random = generator(6), torch.Generator().manual_seed(6)
    X = 0.5 * draw(rows, columns)
    y = torch.poisson((X @ (0.1 * draw(columns)) + 0.3).exp(), generator=random)

    def log_joint(theta: Tensor) -> Tensor:
        return normal(theta).sum(-1) + poisson(y.to(theta), theta @ X.to(theta).mT).sum(-1)

    return Model(f"Poisson regression {rows} x {columns}", columns, log_joint)


MODELS: dict[str, Callable[[], Model]] = {
    "rats": rats,
    "schools-centred": eight_schools,
    "schools-noncentred": functools.partial(eight_schools, False),
    "horseshoe": horseshoe,
    "horseshoe-centred": functools.partial(horseshoe, True),
    "slopes": random_slopes,
    "crossed": crossed,
    "irt": item_response,
    "network": network,
    "poisson": poisson_regression,
}


def main() -> None:
    """Print the names, the dimensions and two values."""
    for key, make in MODELS.items():
        name, dim, log_joint = make()
        theta = 0.1 * generator(0)(64, dim)
        print(f"{key:20}{name:32}{dim:6}{log_joint(0 * theta[0]):14.2f}{log_joint(theta).mean():14.2f}")


if __name__ == "__main__":
    main()
