"""Densities by their shape: Gaussians, tails in all directions, funnels, shears and mixtures; mostly in closed form."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .target import Target, by_quadrature, exactly, normals, on_grid, rotation, vector

LOG_2PI = math.log(2 * math.pi)


def gaussian(name: str, mean: Tensor, covariance: Tensor) -> Target:
    """N(mean, covariance), normalised."""
    precision = torch.linalg.inv(covariance)
    constant = -0.5 * float(torch.logdet(covariance)) - 0.5 * len(mean) * LOG_2PI

    def log_joint(theta: Tensor) -> Tensor:
        x = theta - mean.to(theta)
        return constant - 0.5 * ((x @ precision.to(theta)) * x).sum(-1)

    how = "Closed form: the mean and the diagonal of the covariance."
    return Target(name, len(mean), log_joint, mean, covariance.diagonal().sqrt(), how, 0.0, 0.0)


def scales(v: Tensor, rest: Tensor, log_scale: Callable[[Tensor], Tensor], s: float) -> Tensor:
    """log N(v; 0, s²) + Σ log N(rest; 0, exp(2 log_scale(v)))."""
    log_sd = log_scale(v)
    dim = rest.shape[-1] + 1
    top = -0.5 * (v / s).square() - math.log(s) - 0.5 * dim * LOG_2PI
    return (top - rest.shape[-1] * log_sd)[..., 0] - 0.5 * (rest * torch.exp(-log_sd)).square().sum(-1)


# tune


def gaussians() -> list[Target]:
    """Gaussians rotated, of condition numbers 1 to 1e4."""
    found = []
    for dim, condition in ((2, 1.0), (10, 100.0), (50, 1e4)):
        A = rotation(dim, 40 + dim)
        scale = condition ** torch.linspace(0, 1, dim, dtype=torch.float64)
        found.append(gaussian(f"Gaussian of condition {condition:g}", 3 * normals(dim)(dim), (A * scale) @ A.mT))
    return found


def multivariate_t() -> list[Target]:
    """Student's t in all directions at once."""
    found = []
    for nu, dim in ((3.0, 4), (5.0, 10), (20.0, 10)):

        def log_joint(theta: Tensor, nu: float = nu, dim: int = dim) -> Tensor:
            return -0.5 * (nu + dim) * torch.log1p(theta.square().sum(-1) / nu)

        ones = torch.ones(dim, dtype=torch.float64)
        how = "Closed form: mean 0, sd √(ν/(ν - 2))."
        name = f"multivariate t ν = {nu:g}"
        found.append(Target(name, dim, log_joint, 0 * ones, math.sqrt(nu / (nu - 2)) * ones, how))
    return found


def funnels() -> list[Target]:
    """Neal's funnel (2003) of several scales: v ~ N(0, s²), x_i ~ N(0, exp v)."""
    found = []
    for s, dim in ((3.0, 10), (1.5, 5), (0.7, 5), (0.3, 5)):

        def log_joint(theta: Tensor, s: float = s) -> Tensor:
            return scales(theta[..., :1], theta[..., 1:], lambda v: 0.5 * v, s)

        mean, sd = torch.zeros(dim, dtype=torch.float64), torch.full((dim,), math.exp(s**2 / 4), dtype=torch.float64)
        sd[0] = s
        how = "Closed form: sd s of v and exp(s²/4) of the others."
        found.append(Target(f"funnel s = {s:g}", dim, log_joint, mean, sd, how, 0.0, 0.0))
    return found


def bananas() -> list[Target]:
    """x_2 ~ N(b x_1², t²) with x_1 ~ N(0, s²)."""
    found = []
    for b, s, t in ((1.0, 2.0, math.sqrt(0.1)), (0.1, 1.0, 0.5), (0.3, 1.0, 0.5), (1.0, 1.0, 1.0)):

        def log_joint(theta: Tensor, b: float = b, s: float = s, t: float = t) -> Tensor:
            x, y = theta.unbind(-1)
            return -0.5 * (x / s).square() - 0.5 * ((y - b * x.square()) / t).square() - math.log(s * t) - LOG_2PI

        how = "Closed form: means 0 and b s², sds s and √(2 b² s⁴ + t²)."
        mean, sd = vector(0.0, b * s**2), vector(s, math.sqrt(2 * b**2 * s**4 + t**2))
        found.append(Target(f"banana b = {b:g}, s = {s:g}", 2, log_joint, mean, sd, how, 0.0, 0.0))
    return found


def mixture(
    name: str, weights: Sequence[float], centres: Tensor, sds: Sequence[float], turn: Tensor | None = None
) -> Target:
    """Isotropic Gaussians of weights, centres (K, D) and sds."""
    w, s, dim = vector(*weights), vector(*sds), centres.shape[1]
    constants = w.log() - dim * s.log() - 0.5 * dim * LOG_2PI

    def log_joint(theta: Tensor) -> Tensor:
        distance = (theta[..., None, :] - centres.to(theta)).square().sum(-1)
        return torch.logsumexp(constants.to(theta) - 0.5 * distance / s.to(theta).square(), -1)

    mean = w @ centres
    variance = w @ (s.square()[:, None] + (centres - mean).square())
    how = "Closed form: the mean and the variance of a mixture."
    return Target(name, dim, log_joint, mean, variance.sqrt(), how, 0.0, 0.0)


def two_normals() -> list[Target]:
    """Two equal normals, far apart and near."""
    far, near = 3.0 * torch.ones(2, dtype=torch.float64), 0.75 * torch.ones(5, dtype=torch.float64)
    return [
        mixture("two normals", (0.5, 0.5), torch.stack([far, -far]), (1.0, 1.0)),
        mixture("two near normals", (0.5, 0.5), torch.stack([near, -near]), (0.5, 0.5)),
    ]


# held


def structured_gaussians() -> list[Target]:
    """An autoregression, an equicorrelated Gaussian, and a conjugate linear regression."""
    at = torch.arange(30, dtype=torch.float64)
    chain = 0.95 ** (at[:, None] - at).abs()
    equal = 0.9 * torch.ones(20, 20, dtype=torch.float64) + 0.1 * torch.eye(20, dtype=torch.float64)
    draw = normals(60)
    X = draw(25, 12)
    posterior = torch.linalg.inv(X.mT @ X / 0.25 + torch.eye(12, dtype=torch.float64))
    mean = posterior @ X.mT @ (X @ draw(12) + 0.5 * draw(25)) / 0.25
    return [
        gaussian("autoregression", draw(30), 4 * chain),
        gaussian("equicorrelated Gaussian", draw(20), equal),
        gaussian("conjugate linear regression", mean, posterior),
    ]


def elliptical() -> list[Target]:
    """exp(-|x|^p) in all directions, in eight coordinates: E|x|² = Γ((D + 2)/p) / Γ(D/p)."""
    found, dim = [], 8
    for p in (0.5, 0.8, 1.0, 1.5, 6.0):

        def log_joint(theta: Tensor, p: float = p) -> Tensor:
            return -(theta.square().sum(-1) + 1e-12).pow(0.5 * p)

        square = math.exp(math.lgamma((dim + 2) / p) - math.lgamma(dim / p))
        sd = math.sqrt(square / dim) * torch.ones(dim, dtype=torch.float64)
        how = "Closed form: E|x|² = Γ((D + 2)/p)/Γ(D/p), to 1e-12 for the rounded tip."
        found.append(Target(f"elliptical p = {p:g}", dim, log_joint, 0 * sd, sd, how, 1e-12))
    return found


def bounded_funnels() -> list[Target]:
    """Funnels that are bounded, v ~ N(0, 1), x_i ~ N(0, s²), log s = a tanh v, or on one side, s = sigmoid(a v)."""
    found = []
    for kind, a, dim in (
        ("tanh", 0.5, 4),
        ("tanh", 1.5, 4),
        ("tanh", 1.0, 15),
        ("sigmoid", 1.0, 6),
        ("sigmoid", 3.0, 6),
    ):

        def log_scale(v: Tensor, kind: str = kind, a: float = a) -> Tensor:
            return a * torch.tanh(v) if kind == "tanh" else logsigmoid(a * v)

        def log_joint(theta: Tensor, log_scale: Callable[[Tensor], Tensor] = log_scale) -> Tensor:
            return scales(theta[..., :1], theta[..., 1:], log_scale, 1.0)

        def tilted(v: Tensor, log_scale: Callable[[Tensor], Tensor] = log_scale) -> Tensor:
            return (-0.5 * v.square() + 2 * log_scale(v) - 0.5 * LOG_2PI)[..., 0]

        square = by_quadrature(exactly(tilted), [-10.0], [10.0])
        mean, sd = torch.zeros(dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64)
        sd[1:] = math.exp(0.5 * square.log_evidence)
        how = "sd 1 of v; E exp(2 log sd) of the others by the trapezoidal rule in v."
        found.append(Target(f"{kind} funnel a = {a:g}", dim, log_joint, mean, sd, how, square.error, 0.0))
    return found


def shears() -> list[Target]:
    """A Gaussian sheared by a wave, a cube or an exponential, x_i = z_i + f(z_1), rotated in D coordinates."""
    ways = {
        "wave": (lambda z: 1.5 * torch.sin(2 * z), 0.0, 1.5**2 * 0.5 * (1 - math.exp(-8)), 1.5 * 2 * math.exp(-2)),
        "cube": (lambda z: 0.3 * z.pow(3), 0.0, 0.09 * 15, 0.3 * 3),
        "slight cube": (lambda z: 0.05 * z.pow(3), 0.0, 0.0025 * 15, 0.05 * 3),
        "exponential": (torch.exp, math.exp(0.5), math.exp(2) - math.exp(1), math.exp(0.5)),
        "slight wave": (lambda z: 0.4 * torch.sin(z), 0.0, 0.16 * 0.5 * (1 - math.exp(-2)), 0.4 * math.exp(-0.5)),
    }  # f, E f, var f, E z f
    found = []
    for seed, (name, (f, first, second, slope)) in enumerate(ways.items()):
        dim = (3, 3, 5, 3, 20)[seed]
        A = rotation(dim, 70 + seed)

        def log_joint(theta: Tensor, f: Callable[[Tensor], Tensor] = f, A: Tensor = A) -> Tensor:
            x = theta @ A.to(theta)
            top, rest = x[..., :1], x[..., 1:]
            square = top.square()[..., 0] + (rest - f(top)).square().sum(-1)
            return -0.5 * square - 0.5 * theta.shape[-1] * LOG_2PI

        mean = torch.full((dim,), first, dtype=torch.float64)
        covariance = torch.full((dim, dim), second, dtype=torch.float64) + torch.eye(dim, dtype=torch.float64)
        covariance[0, :] = covariance[:, 0] = slope
        mean[0], covariance[0, 0] = 0.0, 1.0
        how = "Closed form: E f, var f and E z f of a standard normal z, rotated."
        sd = (A @ covariance @ A.mT).diagonal().sqrt()
        found.append(Target(f"{name} shear", dim, log_joint, A @ mean, sd, how, 0.0, 0.0))
    return found


def mixtures() -> list[Target]:
    """Unequal normals, three normals, a wide one around a narrow one."""
    one = torch.ones(4, dtype=torch.float64)
    corners = vector(0.0, 0.0, 5.0, 0.0, 0.0, 5.0).reshape(3, 2)
    return [
        mixture("unequal normals", (0.7, 0.3), torch.stack([0 * one, 2.5 * one]), (1.0, 0.7)),
        mixture("three normals", (0.4, 0.35, 0.25), corners, (1.0, 0.8, 1.2)),
        mixture("wide around narrow", (0.5, 0.5), torch.zeros(2, 4, dtype=torch.float64), (1.0, 3.0)),
        mixture("slight contamination", (0.95, 0.05), torch.stack([0 * one, one]), (1.0, 1.5)),
    ]


def curved() -> list[Target]:
    """A product of two coordinates near one, a ring, and a cross, in two coordinates by quadrature."""

    def hyperbola(theta: Tensor) -> Tensor:
        x, y = theta.unbind(-1)
        return -0.5 * ((x * y - 1) / 0.2).square() - 0.5 * (x.square() + y.square())

    def ring(theta: Tensor) -> Tensor:
        return -0.5 * ((theta.square().sum(-1) - 4) / 2).square()

    def cross(theta: Tensor) -> Tensor:
        return -0.5 * theta.square().prod(-1) - 0.125 * theta.square().sum(-1)

    box = ([-8.0, -8.0], [8.0, 8.0])
    return [
        on_grid("product of two", hyperbola, *box, turn=False),
        on_grid("ring", ring, *box),
        on_grid("cross", cross, *box),
    ]
