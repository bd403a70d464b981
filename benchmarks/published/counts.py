"""Counts and a sample of two: bioassay, O-rings, putts, monks, and two priors of Statistical Rethinking."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from benchmarks.truths.curves import linear_given
from benchmarks.truths.target import Conditional, Truth, by_quadrature, normal, normals, vector

from .model import Model, boxed, of_modes, vectors

PUTTS = """
2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20
1443 694 455 353 272 256 240 217 200 237 202 192 174 167 201 195 191 147 152
1346 577 337 208 149 136 111 69 67 75 52 46 54 28 27 31 33 20 24
"""  # feet, tries, successes


def bioassay() -> Model:
    """y ~ Bin(n, logit⁻¹(α + βx)), flat prior."""
    x, n, y = vector(-0.86, -0.30, -0.05, 0.73), 5.0, vector(0, 1, 3, 5)

    def log_joint(theta: Tensor) -> Tensor:
        eta = theta[..., :1] + theta[..., 1:] * x
        return (y * eta - n * softplus(eta)).sum(-1)

    source = "Gelman et al., Bayesian Data Analysis, 3rd ed., 3.7"
    return Model("bioassay", source, ("alpha", "beta"), log_joint, boxed(log_joint, [-6.0, -10.0], [12.0, 60.0]))


def challenger() -> Model:
    """d ~ Bernoulli(logit⁻¹(α + βx)), x the standardised temperature, α, β ~ N(0, 10²)."""
    t = vectors("66 70 69 68 67 72 73 70 57 63 70 78 67 53 67 75 70 81 76 79 75 76 58")
    damaged = vectors("0 1 0 0 0 0 0 0 1 1 1 0 0 1 0 0 0 0 0 0 1 0 1")
    x = (t - t.mean()) / t.std()

    def log_joint(theta: Tensor) -> Tensor:
        eta = theta[..., :1] + theta[..., 1:] * x
        return (damaged * eta - softplus(eta)).sum(-1) + normal(theta, 0.0, 10.0).sum(-1)

    source = "Dalal, Fowlkes and Hoadley 1989, O-rings of 23 flights"
    return Model("challenger", source, ("alpha", "beta"), log_joint, boxed(log_joint, [-7.0, -9.0], [4.0, 3.0]))


def putts() -> Model:
    """A putt of x feet goes in if its angle and its distance are right; half-normal priors of both sds."""
    x, n, y = vectors(PUTTS)
    widest = torch.asin((4.25 - 1.68) / 24 / x)  # the angle at which the ball touches the rim; diameters in inches
    cdf = torch.special.ndtr

    def log_joint(theta: Tensor) -> Tensor:
        angle, distance = theta.exp().split(1, -1)
        far = (x + 1) * distance
        p = (2 * cdf(widest / angle) - 1) * (cdf(2 / far) - cdf(-1 / far))
        p = p.clamp(1e-12, 1 - 1e-12)
        prior = (theta - 0.5 * theta.exp().square()).sum(-1)
        return (y * p.log() + (n - y) * torch.log1p(-p)).sum(-1) + prior

    source = "Gelman and Nolan 2002; Stan case study on golf putting, angle and distance"
    truth = of_modes(log_joint, ([-5.2, -1.9], [-4.4, -1.0]), ([-3.9, -3.9], [-3.35, -2.7]))
    return Model("golf putts", source, ("log sigma_angle", "log sigma_distance"), log_joint, truth)


def monks() -> Model:
    """Manuscripts of 40 days, no work on a fifth: y ~ ZIPoisson(p, λ), logit p ~ N(-1.5, 1), log λ ~ N(1, 0.5²)."""
    generator = torch.Generator().manual_seed(365)
    y = torch.poisson(torch.ones(40).double(), generator=generator)
    y = y * (torch.rand(40, generator=generator, dtype=torch.float64) > 0.2)

    def log_joint(theta: Tensor) -> Tensor:
        none, log_rate = theta.split(1, -1)
        rate = log_rate.exp()
        zero = torch.logaddexp(logsigmoid(none), logsigmoid(-none) - rate)
        likelihood = torch.where(y == 0, zero, logsigmoid(-none) + y * log_rate - rate)
        return likelihood.sum(-1) + (normal(none, -1.5, 1.0) + normal(log_rate, 1.0, 0.5))[..., 0]

    source = "McElreath, Statistical Rethinking, 2nd ed., 12.2; 40 simulated days"
    return Model("monks", source, ("logit p", "log lambda"), log_joint, boxed(log_joint, [-9.0, -3.0], [5.0, 4.0]))


def _normal_mean(
    columns: Tensor,  # (N, K)
    y: Tensor,  # (N,)
    centre: float,
    scale: float,
    rate: float,
    box: tuple[float, float],
) -> tuple[Callable[[Tensor], Tensor], Callable[[], Truth]]:
    """y ~ N(columns b, σ²), b ~ N(centre, scale²), σ ~ Exp(rate): theta = (b, log σ); its truth integrates b out."""

    def prior(log_s: Tensor) -> Tensor:
        return math.log(rate) - rate * log_s.exp() + log_s

    def log_joint(theta: Tensor) -> Tensor:
        b, log_s = theta[..., :-1], theta[..., -1:]
        z = (y - b @ columns.mT) / log_s.exp()
        likelihood = normal(z) - log_s
        return likelihood.sum(-1) + normal(b, centre, scale).sum(-1) + prior(log_s)[..., 0]

    def conditional(log_s: Tensor, level: int) -> Conditional:
        X = scale * columns.expand(len(log_s), *columns.shape)
        evidence, mean, covariance = linear_given(X, y - centre * columns.sum(-1), log_s.exp())
        variance = scale**2 * covariance.diagonal(dim1=-2, dim2=-1)
        means = torch.cat([centre + scale * mean, log_s], -1)
        return Conditional(prior(log_s)[:, 0] + evidence, means, torch.cat([variance, 0 * log_s], -1))

    return log_joint, lambda: by_quadrature(conditional, [box[0]], [box[1]])


def two_observations(tamed: bool) -> Model:
    """y = (-1, 1) ~ N(α, σ²): α ~ N(0, 1000²), σ ~ Exp(0.0001), or α ~ N(1, 10²), σ ~ Exp(1)."""
    centre, scale, rate = (1.0, 10.0, 1.0) if tamed else (0.0, 1000.0, 1e-4)
    y = vector(-1, 1)
    log_joint, truth = _normal_mean(torch.ones(2, 1).double(), y, centre, scale, rate, (-6.0, 4.0 if tamed else 14.0))
    source = f"McElreath, Statistical Rethinking, 2nd ed., m9.{3 if tamed else 2}"
    return Model(f"m9.{3 if tamed else 2}", source, ("alpha", "log sigma"), log_joint, truth)


def unidentified() -> Model:
    """100 simulated y ~ N(a1 + a2, σ²), a1, a2 ~ N(0, 10²), σ ~ Exp(1): the data tell the sum only."""
    log_joint, truth = _normal_mean(torch.ones(100, 2).double(), normals(41)(100), 0.0, 10.0, 1.0, (-1.0, 1.0))
    source = "McElreath, Statistical Rethinking, 2nd ed., m9.5"
    return Model("m9.5", source, ("a1", "a2", "log sigma"), log_joint, truth)


def models() -> list[Model]:
    """All of them."""
    return [bioassay(), challenger(), putts(), monks(), two_observations(False), two_observations(True), unidentified()]
