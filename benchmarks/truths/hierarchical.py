"""Hierarchical models whose locals are integrated out given one or two hyper-parameters, on a grid of these."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from ..posteriors_hierarchical import EFFECTS, ERRORS, RATS, TUMOURS, counts, half_cauchy, half_normal
from .target import Conditional, LogJoint, Target, by_quadrature, normal, normals, vector

LOCAL = 81  # nodes of a local coordinate, over ±7
Conditionals = Callable[[Tensor, int], Conditional]


def integrated(
    name: str, dim: int, log_joint: LogJoint, conditional: Conditionals, box: Sequence, locals_: str
) -> Target:
    """A target by a grid of hyper-parameters."""
    truth = by_quadrature(conditional, *box, nodes=81 if len(box[0]) == 2 else None)
    how = f"Trapezoidal rule in {len(box[0])} hyper-parameter(s), {locals_}; checked on a grid twice as fine."
    return Target(name, dim, log_joint, truth.mean, truth.sd, how, truth.error, truth.log_evidence)


def hierarchical_normal(
    name: str, y: Tensor, sd: Tensor, centred: bool, log_prior: Callable[[Tensor], Tensor], top: float = 5.0
) -> Target:
    """y_j ~ N(b_j, sd_j²), b_j ~ N(mu, tau²), mu ~ N(0, top²); theta = (mu, log tau, b), or z = (b - mu)/tau for b."""

    def log_joint(theta: Tensor) -> Tensor:
        mu, log_tau, local = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        tau = log_tau.exp()
        prior = normal((local - mu) / tau) - log_tau if centred else normal(local)
        effect = local if centred else mu + tau * local
        likelihood = normal((y.to(theta) - effect) / sd.to(theta)) - sd.log().to(theta)
        return (normal(mu, 0.0, top) + log_prior(log_tau))[..., 0] + (prior + likelihood).sum(-1)

    def conditional(log_tau: Tensor, level: int) -> Conditional:
        tau2 = (2 * log_tau).exp()
        total = tau2 + sd.square()  # (G, J): var(y_j | mu, tau)
        precision = 1 / top**2 + (1 / total).sum(-1, keepdim=True)
        mu = (y / total).sum(-1, keepdim=True) / precision
        evidence = -0.5 * (total.log() + y.square() / total + math.log(2 * math.pi)).sum(-1, keepdim=True)
        evidence = evidence + 0.5 * precision * mu.square() - 0.5 * (precision * top**2).log()
        share = tau2 / total  # E[b_j | mu] = mu + share (y_j - mu)
        slope, variance = (1 - share, share * sd.square()) if centred else (-tau2.sqrt() / total, sd.square() / total)
        mean = mu + share * (y - mu) if centred else tau2.sqrt() * (y - mu) / total
        local = variance + slope.square() / precision
        zero = torch.zeros_like(log_tau)
        density = (evidence + log_prior(log_tau))[:, 0]
        return Conditional(density, torch.cat([mu, log_tau, mean], -1), torch.cat([1 / precision, zero, local], -1))

    name = f"{name}, {'' if centred else 'non-'}centred"
    return integrated(name, len(y) + 2, log_joint, conditional, ([-25.0], [10.0]), "all others Gaussian given it")


def random_intercepts(name: str, y: Tensor, n: Tensor, likelihood: str) -> list[Target]:
    """Counts y_j of mean n_j exp(mu + s z_j), or of n_j with log odds mu + s z_j; mu ~ N(0, 2²), s ~ N⁺(0, 1).

    The centred form, theta = (mu, log s, b = mu + s z), and the non-centred one, theta = (mu, log s, z).
    """
    groups = len(y)

    def log_likelihood(eta: Tensor, y: Tensor, n: Tensor) -> Tensor:
        return y * eta - n * (softplus(eta) if likelihood == "binomial" else eta.exp())

    def top(mu: Tensor, log_s: Tensor) -> Tensor:
        return (normal(mu, 0.0, 2.0) + half_normal(log_s))[..., 0]

    def centred(theta: Tensor) -> Tensor:
        mu, log_s, b = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        prior = normal((b - mu) * torch.exp(-log_s)) - log_s
        return top(mu, log_s) + (prior + log_likelihood(b, y.to(theta), n.to(theta))).sum(-1)

    def noncentred(theta: Tensor) -> Tensor:
        mu, log_s, z = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        likelihood = log_likelihood(mu + log_s.exp() * z, y.to(theta), n.to(theta))
        return top(mu, log_s) + (normal(z) + likelihood).sum(-1)

    def conditional(theta: Tensor, level: int) -> Conditional:  # of (mu, log s, b, z)
        mu, log_s = theta[:, :1], theta[:, 1:]
        z = torch.linspace(-7, 7, level * (LOCAL - 1) + 1, dtype=torch.float64)
        eta = mu + log_s.exp() * z  # (G, K)
        value = normal(z)[None, :, None] + log_likelihood(eta[..., None], y, n)  # (G, K, J)
        highest = value.amax(1, keepdim=True)
        powers = torch.stack([torch.ones_like(z), z, z.square()])
        total, first, second = (powers @ (value - highest).exp_()).unbind(1)
        mean, variance, s = first / total, second / total - (first / total).square(), log_s.exp()
        density = top(mu, log_s) + (highest[:, 0] + (total * (z[1] - z[0])).log()).sum(-1)
        means = torch.cat([theta, mu + s * mean, mean], -1)
        return Conditional(density, means, torch.cat([0 * theta, s.square() * variance, variance], -1))

    truth = by_quadrature(conditional, [-8.0, -9.0], [8.0, 4.0], nodes=65)
    how = "Trapezoidal rule in two hyper-parameters, each local by a rule of its own; checked on a grid twice as fine."
    forms, found = {"centred": (centred, 2), "non-centred": (noncentred, 2 + groups)}, []
    for form, (log_joint, start) in forms.items():
        kept = [0, 1, *range(start, start + groups)]
        moments = truth.mean[kept], truth.sd[kept]
        title = f"{likelihood} intercepts {name}, {form}"
        found.append(Target(title, 2 + groups, log_joint, *moments, how, truth.error, truth.log_evidence))
    return found


def beta_binomial(name: str, y: Tensor, n: Tensor) -> Target:
    """y_j ~ Binomial(n_j, p_j), p_j ~ Beta(phi kappa, (1 - phi) kappa); theta = (logit phi, log(kappa - 1), logit p).

    phi ~ U(0, 1), and 1.5 kappa^-2.5 on kappa > 1; without the binomial coefficients.
    """

    def parts(phi: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        size = 1 + kappa.exp()
        a, b = size * phi.sigmoid(), size * (-phi).sigmoid()
        prior = logsigmoid(phi) + logsigmoid(-phi) + math.log(1.5) - 2.5 * softplus(kappa) + kappa
        return prior, a, b, torch.lgamma(size) - torch.lgamma(a) - torch.lgamma(b)

    def log_joint(theta: Tensor) -> Tensor:
        prior, a, b, constant = parts(theta[..., :1], theta[..., 1:2])
        p, yes, no = theta[..., 2:], y.to(theta), (n - y).to(theta)
        return prior[..., 0] + (constant + (a + yes) * logsigmoid(p) + (b + no) * logsigmoid(-p)).sum(-1)

    def conditional(theta: Tensor, level: int) -> Conditional:
        prior, a, b, constant = parts(theta[:, :1], theta[:, 1:])
        a, b = a + y, b + n - y
        evidence = (constant + torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)).sum(-1)
        variance = torch.polygamma(1, a) + torch.polygamma(1, b)
        mean = torch.digamma(a) - torch.digamma(b)
        return Conditional(prior[:, 0] + evidence, torch.cat([theta, mean], -1), torch.cat([0 * theta, variance], -1))

    box = ([-6.0, -8.0], [6.0, 12.0])
    return integrated(name, len(y) + 2, log_joint, conditional, box, "log odds of a beta variable in closed form")


def gamma_poisson(name: str, y: Tensor, n: Tensor) -> Target:
    """y_j ~ Poisson(n_j r_j), r_j ~ Gamma(a, a/m), log a ~ N(0, 1.5²), log m ~ N(0, 2²): theta = logs of (a, m, r)."""

    def log_joint(theta: Tensor) -> Tensor:
        log_a, log_m, rate = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        a, slope = log_a.exp(), log_a - log_m
        prior = a * slope - torch.lgamma(a) + a * rate - (slope + rate).exp()
        likelihood = y.to(theta) * rate - n.to(theta) * rate.exp()
        return (normal(log_a, 0.0, 1.5) + normal(log_m, 0.0, 2.0))[..., 0] + (prior + likelihood).sum(-1)

    def conditional(theta: Tensor, level: int) -> Conditional:
        log_a, log_m = theta[:, :1], theta[:, 1:]
        a, slope = log_a.exp(), log_a - log_m
        shape, rate = a + y, slope.exp() + n
        evidence = a * slope - torch.lgamma(a) + torch.lgamma(shape) - shape * rate.log()
        density = (normal(log_a, 0.0, 1.5) + normal(log_m, 0.0, 2.0))[:, 0] + evidence.sum(-1)
        mean, variance = torch.digamma(shape) - rate.log(), torch.polygamma(1, shape)
        return Conditional(density, torch.cat([theta, mean], -1), torch.cat([0 * theta, variance], -1))

    box = ([-8.0, -8.0], [10.0, 8.0])
    return integrated(name, len(y) + 2, log_joint, conditional, box, "log rates of a gamma variable in closed form")


def linear_regression(rows: int, columns: int) -> Target:
    """y ~ N(X b, s²), b ~ N(0, 2²), log s ~ N(0, 1.5²): theta = (log s, b)."""
    draw = normals(200 + rows)
    X = draw(rows, columns)
    y = X @ draw(columns) + draw(rows)
    left, spectrum, right = torch.linalg.svd(X)  # rows >= columns
    along = left.mT @ y
    padded = torch.cat([spectrum, torch.zeros(rows - columns, dtype=torch.float64)])

    def log_joint(theta: Tensor) -> Tensor:
        log_s, b = theta[..., :1], theta[..., 1:]
        residual = (y.to(theta) - b @ X.to(theta).mT) * torch.exp(-log_s)
        return normal(log_s, 0.0, 1.5)[..., 0] + normal(b, 0.0, 2.0).sum(-1) + (normal(residual) - log_s).sum(-1)

    def conditional(log_s: Tensor, level: int) -> Conditional:
        noise = (2 * log_s).exp()
        total = noise + 4 * padded.square()  # variances of y along the left singular vectors
        evidence = -0.5 * (total.log() + along.square() / total + math.log(2 * math.pi)).sum(-1)
        mean = (4 * spectrum * along[:columns] / total[:, :columns]) @ right
        variance = (4 * noise / total[:, :columns]) @ right.square()
        density = normal(log_s, 0.0, 1.5)[:, 0] + evidence
        return Conditional(density, torch.cat([log_s, mean], -1), torch.cat([0 * log_s, variance], -1))

    name = f"linear regression {rows} x {columns}"
    return integrated(name, columns + 1, log_joint, conditional, ([-12.0], [8.0]), "coefficients Gaussian given it")


# tune


def eight_schools() -> list[Target]:
    """Eight schools (Rubin 1981), tau ~ C⁺(0, 5), both forms."""
    y, sd = vector(*EFFECTS), vector(*ERRORS)
    return [hierarchical_normal("eight schools", y, sd, c, lambda t: half_cauchy(t, 5.0)) for c in (True, False)]


def binomial_intercepts() -> list[Target]:
    """Random intercepts of log odds."""
    small, large = vector(1, 3, 1, 2, 2, 0), vector(12, 25, 18, 31, 9, 22)
    few = random_intercepts("3 x 6", small, torch.full_like(small, 3.0), "binomial")
    return few + random_intercepts("40 x 6", large, torch.full_like(large, 40.0), "binomial")


def beta_binomials() -> list[Target]:
    """The 71 groups of tumours, and few groups of more."""
    few, many = vector(1, 4, 0, 7, 2), vector(4, 30, 18, 9, 45, 22, 13, 38, 27, 6, 33, 16)
    return [
        beta_binomial("tumours", counts(TUMOURS), counts(RATS)),
        beta_binomial("beta-binomial 10 x 5", few, torch.full_like(few, 10.0)),
        beta_binomial("beta-binomial 50 x 12", many, torch.full_like(many, 50.0)),
    ]


# held


def other_schools() -> list[Target]:
    """Hierarchical normals with tau ~ N⁺(0, 1) or N⁺(0, 2²): few vague groups, few precise ones, many precise ones."""
    vague = vector(0.4, -1.1, 0.7, 1.5, -0.2), vector(1.0, 0.8, 1.2, 0.9, 1.1)
    precise = vector(2.0, -1.0, 0.5, 1.4), torch.full((4,), 0.15, dtype=torch.float64)
    many = 1.2 * normals(210)(25), torch.full((25,), 0.3, dtype=torch.float64)
    return [
        hierarchical_normal("vague groups", *vague, True, lambda t: half_normal(t, 1.0)),
        hierarchical_normal("vague groups", *vague, False, lambda t: half_normal(t, 1.0)),
        hierarchical_normal("few precise groups", *precise, True, lambda t: half_normal(t, 2.0)),
        hierarchical_normal("many precise groups", *many, True, lambda t: half_normal(t, 2.0)),
        hierarchical_normal("many precise groups", *many, False, lambda t: half_normal(t, 2.0)),
    ]


def poisson_intercepts() -> list[Target]:
    """Random intercepts of log means."""
    small, large = vector(0, 2, 0, 1, 4), vector(14, 33, 9, 25, 18, 30)
    few = random_intercepts("of 5 small counts", small, torch.ones_like(small), "Poisson")
    return few + random_intercepts("of 6 counts", large, torch.full_like(large, 5.0), "Poisson")


def gamma_poissons() -> list[Target]:
    """Failures of ten pumps over their times (Gaver and O'Muircheartaigh 1987), of four, and 20 large counts."""
    y, hours = vector(5, 1, 5, 14, 3, 19, 1, 1, 4, 22), vector(94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5)
    large = (60 * (0.5 * normals(220)(20)).exp()).round()
    return [
        gamma_poisson("ten pumps", y, hours),
        gamma_poisson("four pumps", y[:4], hours[:4]),
        gamma_poisson("20 large counts", large, torch.full_like(large, 30.0)),
    ]


def linear_regressions() -> list[Target]:
    """Linear regressions with unknown noise."""
    return [linear_regression(*shape) for shape in ((3, 3), (6, 4), (14, 6), (60, 8))]
