"""Fresh posteriors of one to three parameters by quadrature: curves, series, samples; and wide regressions of few rows.

Coefficients that enter linearly with normal errors are integrated out given the others.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from .regressions import design, wide
from .target import Conditional, LogJoint, Target, by_quadrature, normal, normals, on_grid, uniforms, vector

# ------------------------------------------------------------------------------------ coefficients integrated out


def linear_given(
    X: Tensor,  # (G, N, K)
    y: Tensor,  # (N,)
    sd: Tensor,  # of the errors, (G, 1)
) -> tuple[Tensor, Tensor, Tensor]:
    """Log evidence (G,), mean (G, K) and covariance (G, K, K) of z ~ N(0, I) given y ~ N(X z, sd²)."""
    scaled, target = X / sd[..., None], y / sd
    precision = scaled.mT @ scaled + torch.eye(X.shape[-1], dtype=X.dtype)
    root = torch.linalg.cholesky(precision)
    pull = (scaled.mT @ target[..., None])[..., 0]
    mean = torch.cholesky_solve(pull[..., None], root)[..., 0]
    half_log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    evidence = 0.5 * (pull * mean).sum(-1) - half_log_det - 0.5 * target.square().sum(-1)
    evidence = evidence - (sd.log() + 0.5 * math.log(2 * math.pi)).expand(len(X), len(y)).sum(-1)
    return evidence, mean, torch.cholesky_inverse(root)


def with_coefficients(
    name: str,
    y: Tensor,
    sd: float,
    columns: Callable[[Tensor], Tensor],  # nonlinear parameters (*batch, d) -> (*batch, N, K)
    log_prior: Callable[[Tensor], Tensor],
    scale: float,
    box: tuple[list[float], list[float]],
) -> Target:
    """y ~ N(columns(t) b, sd²), b ~ N(0, scale²): theta = (t, b)."""
    count = len(box[0])

    def log_joint(theta: Tensor) -> Tensor:
        t, b = theta[..., :count], theta[..., count:]
        mean = (columns(t) @ b[..., None])[..., 0]
        return log_prior(t) + normal(b, 0.0, scale).sum(-1) + normal(y.to(theta), mean, sd).sum(-1)

    def conditional(t: Tensor, level: int) -> Conditional:
        evidence, mean, covariance = linear_given(scale * columns(t), y, torch.full_like(t[:, :1], sd))
        variance = scale**2 * covariance.diagonal(dim1=-2, dim2=-1)
        means = torch.cat([t, scale * mean], -1)
        return Conditional(log_prior(t) + evidence, means, torch.cat([0 * t, variance], -1))

    truth = by_quadrature(conditional, *box)
    how = f"Trapezoidal rule in {count} parameter(s), coefficients Gaussian given them; checked twice as fine."
    return Target(name, len(truth.mean), log_joint, truth.mean, truth.sd, how, truth.error, truth.log_evidence)


def changepoints() -> list[Target]:
    """A level that changes at an unknown time, over a sixth of a step: theta = (time, level before, change)."""
    found = []
    for n, change, sd in ((8, 0.6, 1.0), (12, 3.0, 1.0), (40, 2.5, 0.7)):
        at = torch.arange(n, dtype=torch.float64) / n
        y = 1 + change * (at > 0.4) + sd * normals(400 + n)(n)

        def columns(t: Tensor, at: Tensor = at, n: int = n) -> Tensor:
            step = torch.sigmoid((at.to(t) - t) * n * 1.5)
            return torch.stack([torch.ones_like(step), step], -1)

        prior = lambda t: normal(t, 0.5, 0.3)[..., 0]  # noqa: E731
        found.append(
            with_coefficients(f"changepoint of {change:g} in {n}", y, sd, columns, prior, 3.0, ([-3.0], [4.0]))
        )
    return found


def two_decays() -> list[Target]:
    """y = a exp(-x e^s) + b exp(-x e^t) + noise: theta = (s, t, a, b); without a difference the labels switch."""
    found = []
    for n, noise, split in ((8, 0.3, 1.0), (15, 0.1, 1.0), (15, 0.02, 0.2)):
        x = torch.linspace(0.1, 4, n, dtype=torch.float64)
        y = 2 * torch.exp(-2.5 * x) + 1.5 * torch.exp(-0.4 * x) + noise * normals(410 + n)(n)

        def columns(t: Tensor, x: Tensor = x) -> Tensor:
            return torch.exp(-x.to(t)[:, None] * t.exp()[..., None, :])

        def prior(t: Tensor, split: float = split) -> Tensor:
            return normal(t[..., 0], 0.9, split) + normal(t[..., 1], -0.9, split)

        name = f"two decays, noise {noise:g}, n = {n}"
        found.append(with_coefficients(name, y, noise, columns, prior, 3.0, ([-5.0, -7.0], [7.0, 5.0])))
    return found


def logistic_growth() -> list[Target]:
    """dy/dx = r y (1 - y/K): theta = (log r, time of the bend, K); before the bend K is open above."""
    found = []
    for last, noise in ((1.8, 0.2), (3.0, 0.3), (6.0, 0.2)):
        x = torch.linspace(0, last, 9, dtype=torch.float64)
        y = 4 / (1 + torch.exp(-1.5 * (x - 2.5))) + noise * normals(440)(9)

        def columns(t: Tensor, x: Tensor = x) -> Tensor:
            return torch.sigmoid(t[..., :1].exp() * (x.to(t) - t[..., 1:]))[..., None]

        prior = lambda t: normal(t[..., 0], 0.0, 1.0) + normal(t[..., 1], 2.0, 2.0)  # noqa: E731
        box = ([-5.0, -9.0], [5.0, 12.0])
        found.append(with_coefficients(f"logistic growth to {last:g}", y, noise, columns, prior, 6.0, box))
    return found


# ------------------------------------------------------------------------------------ all on the grid


def cauchy_regression() -> list[Target]:
    """A line through nought with Cauchy errors: slope, log scale."""
    found = []
    for n, spread in ((4, 4.0), (8, 1.0), (60, 1.0)):
        x = torch.linspace(0.3, 2, n, dtype=torch.float64)
        y = 2 * x + 0.3 * torch.tan(math.pi * (uniforms(420 + n)(n) - 0.5)) * spread

        def log_joint(theta: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            slope, log_s = theta[..., :1], theta[..., 1:]
            u = (y.to(theta) - slope * x.to(theta)) * torch.exp(-log_s)
            prior = normal(slope, 0.0, 5.0) + normal(log_s, -1.0, 1.0)
            return prior[..., 0] - (torch.log1p(u.square()) + log_s).sum(-1)

        found.append(on_grid(f"Cauchy regression of {n}", log_joint, [-25.0, -6.0], [25.0, 5.0], nodes=401))
    return found


def gp_hyperparameters() -> list[Target]:
    """Log length and log noise of a Gaussian process with a squared exponential kernel."""
    found = []
    for n, shape in ((6, "noise"), (10, "wave"), (25, "wave")):
        x = torch.linspace(0, 1, n, dtype=torch.float64)
        y = 0.3 * normals(430 + n)(n) + (torch.sin(7 * x) if shape == "wave" else 0 * x)
        square = (x[:, None] - x).square()

        def log_joint(theta: Tensor, y: Tensor = y, square: Tensor = square) -> Tensor:
            log_l, log_s = theta[..., None, None, :].unbind(-1)
            eye = torch.eye(len(y)).to(theta)
            K = torch.exp(-0.5 * square.to(theta) * torch.exp(-2 * log_l)) + (torch.exp(2 * log_s) + 1e-6) * eye
            root = torch.linalg.cholesky(K)
            z = torch.linalg.solve_triangular(root, y.to(theta)[:, None].expand(*K.shape[:-1], 1), upper=False)
            likelihood = -0.5 * z.square().sum((-2, -1)) - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            return likelihood + normal(theta[..., 0], -1.0, 1.0) + normal(theta[..., 1], -1.0, 1.0)

        box = ([-6.0, -6.0], [5.0, 4.0])
        found.append(on_grid(f"Gaussian process of {n}, {shape}", log_joint, *box, nodes=81 if n > 10 else None))
    return found


def ordered_logit() -> list[Target]:
    """Three ordered classes: slope, first cut, log of the distance to the second."""
    found = []
    for n in (5, 12, 100):
        x, u = normals(450 + n)(n), uniforms(450 + n)(n)
        latent = 1.2 * x + torch.log(u / (1 - u))
        y = (latent > -0.7).long() + (latent > 0.9).long()

        def log_joint(theta: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            slope, cut, log_gap = theta[..., :1], theta[..., 1:2], theta[..., 2:]
            eta, gap = slope * x.to(theta), log_gap.exp()
            low, high = logsigmoid(cut - eta), logsigmoid(eta - cut - gap)
            inner = logsigmoid(eta - cut) + logsigmoid(cut + gap - eta) + torch.log(-torch.expm1(-gap))
            each = torch.where(y == 0, low, torch.where(y == 1, inner, high))
            return wide(theta[..., :2], 3.0) + normal(log_gap, 0.0, 1.5)[..., 0] + each.sum(-1)

        found.append(on_grid(f"ordered logit of {n}", log_joint, [-15.0, -15.0, -9.0], [15.0, 15.0, 6.0], nodes=41))
    return found


def zero_inflated() -> list[Target]:
    """Counts that are nought by a share of their own: log odds of that share, log mean of the others."""
    samples = ((0, 0, 0, 1), (0, 3, 0, 0, 5, 2, 0, 4), (0, 2, 0, 4, 1, 0, 3, 0, 6, 2, 0, 0) * 6)
    found = []
    for values in samples:
        y = vector(*map(float, values))

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            odds, log_mean = theta[..., :1], theta[..., 1:]
            count = y.to(theta)
            poisson = count * log_mean - log_mean.exp() + logsigmoid(-odds)
            nought = torch.logaddexp(logsigmoid(odds), logsigmoid(-odds) - log_mean.exp())
            return wide(theta, 2.5) + torch.where(count == 0, nought, poisson).sum(-1)

        found.append(on_grid(f"zero-inflated {len(values)}", log_joint, [-14.0, -14.0], [14.0, 10.0]))
    return found


def correlations() -> list[Target]:
    """Two log sds and the inverse hyperbolic tangent of the correlation of n pairs."""
    found = []
    for n in (2, 5, 50):
        draw = normals(460 + n)(n, 2)
        y = torch.stack([draw[:, 0], 0.8 * draw[:, 0] + 0.6 * draw[:, 1]], -1)

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            scaled = y.to(theta) * torch.exp(-theta[..., None, :2])
            r = torch.tanh(theta[..., 2:])
            log_rest = -2 * (theta[..., 2:] + softplus(-2 * theta[..., 2:]) - math.log(2))  # log(1 - r²)
            rest = scaled[..., 1] - r * scaled[..., 0]
            likelihood = -0.5 * scaled[..., 0].square() - 0.5 * rest.square() * torch.exp(-log_rest) - 0.5 * log_rest
            return wide(theta, 1.5) + likelihood.sum(-1) - len(y) * theta[..., :2].sum(-1)

        found.append(on_grid(f"correlation of {n} pairs", log_joint, [-9.0] * 3, [9.0] * 3, nodes=41))
    return found


def autoregressive() -> list[Target]:
    """An autoregression of order one: inverse hyperbolic tangent of the coefficient, log sd."""
    found = []
    for n, phi in ((4, 0.5), (10, 0.97), (100, 0.6)):
        noise, series = normals(470 + n)(n), [torch.zeros((), dtype=torch.float64)]
        for each in noise:
            series.append(phi * series[-1] + each)
        y = torch.stack(series)

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            phi, log_s = torch.tanh(theta[..., :1]), theta[..., 1:]
            rest = (y[1:].to(theta) - phi * y[:-1].to(theta)) * torch.exp(-log_s)
            return wide(theta, 1.5) + (normal(rest) - log_s).sum(-1)

        found.append(on_grid(f"autoregression of {n}, {phi:g}", log_joint, [-9.0, -9.0], [9.0, 9.0]))
    return found


def cured() -> list[Target]:
    """Times to an event that only some will see: log odds of these, log rate; followed for a shorter or longer time."""
    found = []
    for n, last in ((6, 0.5), (20, 1.0), (80, 4.0)):
        u = uniforms(480 + n)
        waited = torch.where(u(n) < 0.6, -u(n).log(), math.inf)
        seen, t = waited < last, waited.clamp(max=last)

        def log_joint(theta: Tensor, seen: Tensor = seen, t: Tensor = t) -> Tensor:
            odds, log_rate = theta[..., :1], theta[..., 1:]
            reach = log_rate.exp() * t.to(theta)
            event = logsigmoid(odds) + log_rate - reach
            none = torch.logaddexp(logsigmoid(-odds), logsigmoid(odds) - reach)
            return wide(theta, 2.0) + torch.where(seen, event, none).sum(-1)

        found.append(on_grid(f"cured, {n} followed to {last:g}", log_joint, [-12.0, -14.0], [12.0, 10.0]))
    return found


def ordered_means() -> list[Target]:
    """An equal mixture of N(., 1) whose means are in order: the first, and the log of the distance."""
    found = []
    for gap, n in ((0.5, 10), (3.0, 10), (4.0, 60)):
        y = normals(490 + n)(n) + gap * (torch.arange(n) % 2 - 0.5)

        def log_joint(theta: Tensor, y: Tensor = y) -> Tensor:
            first, log_gap = theta[..., :1], theta[..., 1:]
            each = torch.logaddexp(normal(y.to(theta), first), normal(y.to(theta), first + log_gap.exp()))
            return normal(first, 0.0, 3.0)[..., 0] + normal(log_gap, 0.0, 1.5)[..., 0] + each.sum(-1)

        found.append(on_grid(f"ordered means {gap:g} apart, n = {n}", log_joint, [-14.0, -11.0], [12.0, 6.0]))
    return found


def ratios() -> list[Target]:
    """Measurements of a ratio a/b with a vague measurement of b, both in log coordinates or as they are."""

    def of(noise: float) -> LogJoint:
        def log_joint(theta: Tensor) -> Tensor:
            a, b = theta.unbind(-1)
            return wide(theta, 2.0) + normal(a, 1.2 * b, noise) + normal(b.square(), 1.5, 1.5)

        return log_joint

    return [
        on_grid(f"ratio, noise {noise:g}", of(noise), [-12.0, -12.0], [12.0, 12.0], turn=False) for noise in (0.3, 1.5)
    ]


# ------------------------------------------------------------------------------------ few rows, many columns


def wide_regression(family: str, rows: int, columns: int, scale: float, seed: int) -> Target:
    """N rows and D > N columns, b ~ N(0, scale²): quadrature in the N coordinates of the row space.

    With Q (D, N) orthonormal, X = R Qᵀ, b = Q u + rest: the likelihood sees u alone, the rest is N(0, scale²) still.
    """
    X = design(rows, columns, seed)
    Q, R = torch.linalg.qr(X.mT)
    y = (uniforms(seed)(rows) < 0.5).double() if family == "logistic" else (4 * uniforms(seed)(rows)).floor()

    def likelihood(eta: Tensor) -> Tensor:
        count = y.to(eta)
        return (count * eta - (softplus(eta) if family == "logistic" else eta.exp())).sum(-1)

    def log_joint(theta: Tensor) -> Tensor:
        return wide(theta, scale) + likelihood(theta @ X.to(theta).mT)

    def of_rows(u: Tensor) -> Tensor:
        return wide(u, scale) + likelihood(u @ R)

    def moments(u: Tensor, level: int) -> Conditional:
        square = scale**2 * (1 - Q.square().sum(-1))
        return Conditional(of_rows(u), u @ Q.mT, square.expand(len(u), -1))

    truth = by_quadrature(moments, [-8 * scale] * rows, [8 * scale] * rows, nodes=161 if rows == 2 else 41)
    how = f"Trapezoidal rule in the {rows} coordinates of the row space, the prior beside it; checked twice as fine."
    name = f"{family} {rows} x {columns}, prior {scale:g}"
    return Target(name, columns, log_joint, truth.mean, truth.sd, how, truth.error, truth.log_evidence)


def wide_regressions() -> list[Target]:
    """Two or three rows, and up to sixty columns."""
    return [
        wide_regression("logistic", 2, 3, 10.0, 500),
        wide_regression("logistic", 3, 15, 3.0, 501),
        wide_regression("logistic", 2, 60, 2.0, 502),
        wide_regression("Poisson", 3, 30, 1.0, 503),
        wide_regression("Poisson", 2, 3, 5.0, 504),
    ]
