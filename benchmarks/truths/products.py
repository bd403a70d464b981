"""Products of densities of one coordinate, as they are or under an affine map: theta = shift + A x.

The mean of theta is shift + A E x, its covariance A diag(var x) Aᵀ; the best Gaussian is the image of the best of x.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .target import Target, by_quadrature, exactly, normals, on_grid, rotation, vector

Density = Callable[[Tensor], Tensor]  # entry by entry


def product(name: str, density: Density, mean: float, sd: float, dim: int, how: str, error: float = 0.0) -> Target:
    """D independent copies."""
    ones = torch.ones(dim, dtype=torch.float64)
    return Target(name, dim, lambda theta: density(theta).sum(-1), mean * ones, sd * ones, how, error)


def mapped(target: Target, seed: int, condition: float = 1.0) -> Target:
    """theta = shift + A x: A a rotation of scales from 1 to √condition, shift ~ N(0, 1)."""
    dim = target.dim
    A = rotation(dim, seed) * condition ** torch.linspace(0, 0.5, dim, dtype=torch.float64)
    inverse, shift = torch.linalg.inv(A), normals(seed + 1)(dim)

    def log_joint(theta: Tensor) -> Tensor:
        return target.log_joint((theta - shift.to(theta)) @ inverse.to(theta).mT)

    mean, sd = shift + A @ target.mean, (A.square() @ target.sd.square()).sqrt()
    how = f"{target.how} Mean and covariance under an affine map of condition number {condition:g}."
    return Target(f"{target.name}, rotated", dim, log_joint, mean, sd, how, target.error)


def of_line(name: str, density: Density, dim: int) -> Target:
    """Copies of a density whose moments come from quadrature."""
    line = by_quadrature(exactly(lambda theta: density(theta)[..., 0]), [-50.0], [50.0])
    how = "Each coordinate by the trapezoidal rule, checked on a grid twice as fine."
    return product(name, density, float(line.mean), float(line.sd), dim, how, line.error)


def polygamma(order: int, x: float) -> float:
    """ψ⁽ⁿ⁾(x)."""
    return float(torch.polygamma(order, vector(x)))


# tune


def log_gamma() -> list[Target]:
    """The logarithm of a Gamma(a, 1) variable, five times: skewed, more so for small a."""
    how = "Closed form: mean ψ(a), sd √ψ'(a)."
    return [
        product(
            f"log-gamma a = {a:g}",
            lambda x, a=a: a * x - x.exp(),
            polygamma(0, a),
            math.sqrt(polygamma(1, a)),
            5,
            how,
        )
        for a in (0.3, 0.5, 1.0, 3.0, 10.0)
    ]


def student() -> list[Target]:
    """Student's t in five coordinates: tails."""
    how = "Closed form: mean 0, sd √(ν/(ν - 2))."
    return [
        product(f"t ν = {nu:g}", lambda x, nu=nu: -0.5 * (nu + 1) * torch.log1p(x.square() / nu), 0.0, sd, 5, how)
        for nu in (2.5, 3.0, 5.0, 10.0)
        for sd in [math.sqrt(nu / (nu - 2))]
    ]


def logistic() -> list[Target]:
    """The logistic density, plain in five coordinates and rotated in 20."""
    how = "Closed form: mean 0, sd π/√3."
    makes = [
        product("logistic", lambda x: -x - 2 * softplus(-x), 0.0, math.pi / math.sqrt(3), dim, how) for dim in (5, 20)
    ]
    return [makes[0], mapped(makes[1], 11, 100.0)]


def skew_normal() -> list[Target]:
    """2 φ(x) Φ(αx) (Azzalini 1985) in three coordinates."""
    how = "Closed form: mean δ√(2/π), variance 1 - 2δ²/π, δ = α/√(1 + α²)."
    found = []
    for alpha in (1.0, 4.0, 20.0):
        delta = alpha / math.sqrt(1 + alpha**2)
        mean = delta * math.sqrt(2 / math.pi)
        found.append(
            product(
                f"skew normal α = {alpha:g}",
                lambda x, alpha=alpha: -0.5 * x.square() + torch.special.log_ndtr(alpha * x),
                mean,
                math.sqrt(1 - mean**2),
                3,
                how,
            )
        )
    return found


# held


def sinh_arcsinh(skew: float, tail: float) -> Density:
    """x with sinh(tail asinh x - skew) ~ N(0, 1) (Jones and Pewsey 2009)."""

    def density(x: Tensor) -> Tensor:
        angle = tail * torch.asinh(x) - skew
        return -0.5 * torch.sinh(angle).square() + torch.log(torch.cosh(angle)) - 0.5 * torch.log1p(x.square())

    return density


def sinh_arcsinhs() -> list[Target]:
    """Sinh-arcsinh densities, heavy, light and skewed, rotated in four coordinates; one in 30."""
    shapes = ((0.0, 0.5), (0.0, 0.75), (0.0, 1.5), (0.5, 1.0), (0.3, 0.65))
    found = [
        mapped(of_line(f"sinh-arcsinh ({skew:g}, {tail:g})", sinh_arcsinh(skew, tail), 4), 20 + i, 10.0)
        for i, (skew, tail) in enumerate(shapes)
    ]
    return [*found, mapped(of_line("sinh-arcsinh (0.2, 0.9), D = 30", sinh_arcsinh(0.2, 0.9), 30), 29, 100.0)]


def logit_beta() -> list[Target]:
    """The log odds of a Beta(a, b) variable, rotated in six coordinates; one in 50."""
    how = "Closed form: mean ψ(a) - ψ(b), variance ψ'(a) + ψ'(b)."
    found = []
    shapes = (
        (0.2, 0.2, 6),
        (0.4, 3.0, 6),
        (2.0, 2.0, 6),
        (5.0, 1.5, 6),
        (20.0, 7.0, 6),
        (4.0, 2.0, 50),
        (0.35, 5.0, 50),
    )
    for i, (a, b, dim) in enumerate(shapes):
        line = product(
            f"logit-beta ({a:g}, {b:g}), D = {dim}",
            lambda x, a=a, b=b: a * x - (a + b) * softplus(x),
            polygamma(0, a) - polygamma(0, b),
            math.sqrt(polygamma(1, a) + polygamma(1, b)),
            dim,
            how,
        )
        found.append(mapped(line, 30 + 2 * i, 10.0))
    return found


def hyperbolic() -> list[Target]:
    """exp(-a √(1 + x²)), between the Laplace density and a Gaussian, and exp(-x⁴/4), in six coordinates."""
    found = [
        of_line(f"hyperbolic a = {a:g}", lambda x, a=a: -a * torch.sqrt(1 + x.square()), 6) for a in (0.1, 0.5, 3.0)
    ]
    return [*found, of_line("quartic", lambda x: -0.25 * x.pow(4), 6)]


def gumbel_and_normal() -> list[Target]:
    """One coordinate far from Gaussian among others that are: log-gamma a = .25 beside normals, not rotated."""

    def log_joint(theta: Tensor) -> Tensor:
        x = theta[..., 0]
        return 0.25 * x - x.exp() - 0.5 * theta[..., 1:].square().sum(-1)

    found = []
    for dim in (2, 12):
        mean, sd = torch.zeros(dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64)
        mean[0], sd[0] = polygamma(0, 0.25), math.sqrt(polygamma(1, 0.25))
        how = "Closed form: ψ(a) and √ψ'(a), and standard normals."
        found.append(Target(f"one log-gamma of {dim}", dim, log_joint, mean, sd, how))
    return found


def two_bumps() -> list[Target]:
    """A density of one coordinate with two bumps that a Gaussian covers."""
    found = []
    for gap in (1.0, 1.8):

        def log_joint(theta: Tensor, gap: float = gap) -> Tensor:
            x = theta[..., 0]
            return torch.logaddexp(-0.5 * (x - gap).square(), -0.5 * (x + gap).square())

        found.append(on_grid(f"two bumps at ±{gap:g}", log_joint, [-10.0], [10.0]))
    return found
