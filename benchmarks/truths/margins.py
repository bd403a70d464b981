"""Fresh densities by their margins: skewed and heavy tails, soft truncation, copulas, compositions, unlike normals."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .products import Density, mapped, of_line, product
from .target import Target, by_quadrature, exactly, normals, rotation, vector

LOG_2PI = math.log(2 * math.pi)


# ------------------------------------------------------------------------------------ products


def skew_t() -> list[Target]:
    """The skew t of Jones and Faddy (2003), √c (2B - 1)/(2 √(B(1 - B))) with B ~ Beta(a, b), rotated in four."""
    found = []
    for i, (a, b) in enumerate(((4.0, 1.4), (3.0, 6.0), (12.0, 5.0), (30.0, 20.0))):
        c = a + b

        def density(x: Tensor, a: float = a, b: float = b, c: float = c) -> Tensor:
            return (a - b) * torch.asinh(x / math.sqrt(c)) - 0.5 * (c + 1) * torch.log1p(x.square() / c)

        gammas = math.lgamma(a - 0.5) + math.lgamma(b - 0.5) - math.lgamma(a) - math.lgamma(b)
        mean = 0.5 * (a - b) * math.sqrt(c) * math.exp(gammas)
        square = 0.25 * c * ((a - b) ** 2 + c - 2) / ((a - 1) * (b - 1))
        how = "Closed form: moments of B^-1 and (1 - B)^-1."
        line = product(f"skew t ({a:g}, {b:g})", density, mean, math.sqrt(square - mean**2), 4, how)
        found.append(mapped(line, 300 + 2 * i, 10.0))
    return found


def johnson() -> list[Target]:
    """Johnson's S_U (1949), γ + δ asinh x ~ N(0, 1), in six coordinates."""
    found = []
    for gamma, delta in ((0.0, 1.0), (1.0, 1.2), (0.0, 1.7), (0.5, 3.0)):
        w = math.exp(delta**-2)
        mean = -math.sqrt(w) * math.sinh(gamma / delta)
        variance = 0.5 * (w - 1) * (w * math.cosh(2 * gamma / delta) + 1)

        def density(x: Tensor, gamma: float = gamma, delta: float = delta) -> Tensor:
            return -0.5 * (gamma + delta * torch.asinh(x)).square() - 0.5 * torch.log1p(x.square())

        name = f"Johnson S_U ({gamma:g}, {delta:g})"
        found.append(product(name, density, mean, math.sqrt(variance), 6, "Closed form (Johnson 1949)."))
    return found


def log_inverse_gaussian() -> list[Target]:
    """The logarithm of a generalised inverse Gaussian variable, exp(p x - ω cosh x): flat tops with sharp ends."""
    found = []
    for i, (p, omega) in enumerate(((0.0, 0.003), (1.0, 0.02), (0.5, 0.5), (1.0, 6.0))):
        name = f"log inverse Gaussian ({p:g}, {omega:g})"
        line = of_line(name, lambda x, p=p, omega=omega: p * x - omega * torch.cosh(x), 5)
        found.append(mapped(line, 310 + 2 * i, 10.0))
    return found


def soft_truncation() -> list[Target]:
    """A normal cut on one side, and a box with soft walls, in three coordinates."""

    def cut(k: float, c: float) -> Density:
        return lambda x: -0.5 * x.square() + logsigmoid(k * (x - c))

    def box(k: float) -> Density:
        return lambda x: logsigmoid(k * (x + 1)) + logsigmoid(k * (1 - x))

    return [
        of_line("normal cut at 1.5", cut(12.0, 1.5), 3),
        of_line("normal cut at -0.5", cut(5.0, -0.5), 3),
        of_line("hard box", box(25.0), 3),
        of_line("soft box", box(3.0), 3),
    ]


def contaminated() -> list[Target]:
    """Nine tenths of N(0, 1) and one of N(0, s²), each coordinate by itself, in eight; one in 40, rotated."""
    found = []
    for s, dim in ((5.0, 8), (3.0, 8), (2.0, 8), (1.7, 40)):

        def density(x: Tensor, s: float = s) -> Tensor:
            wide = math.log(0.1 / s) - 0.5 * (x / s).square()
            return torch.logaddexp(math.log(0.9) - 0.5 * x.square(), wide)

        how = "Closed form: the variance of a mixture."
        one = product(f"contaminated by sd {s:g}, D = {dim}", density, 0.0, math.sqrt(0.9 + 0.1 * s**2), dim, how)
        found.append(mapped(one, 320, 30.0) if dim == 40 else one)
    return found


# ------------------------------------------------------------------------------------ dependent margins


class Margin:
    """A coordinate x with g(x) ~ N(0, 1), g rising: its log density is log N(g(x)) + log g'(x)."""

    def __init__(self, g: Callable[[Tensor], Tensor], log_slope: Callable[[Tensor], Tensor]) -> None:
        self.g, self.log_slope = g, log_slope
        truth = by_quadrature(exactly(lambda x: (-0.5 * g(x).square() + log_slope(x))[..., 0]), [-30.0], [30.0])
        self.mean, self.sd, self.error = float(truth.mean), float(truth.sd), truth.error


def heavy(c: float) -> Margin:
    """Both tails longer than normal."""
    return Margin(lambda x: c * torch.asinh(x), lambda x: math.log(c) - 0.5 * torch.log1p(x.square()))


def light(c: float) -> Margin:
    """Both shorter."""
    return Margin(lambda x: x + c * x.pow(3), lambda x: torch.log1p(3 * c * x.square()))


def skewed(c: float) -> Margin:
    """The left one longer, the right one shorter."""
    return Margin(lambda x: 0.5 * (x + torch.expm1(c * x) / c), lambda x: (0.5 + 0.5 * torch.exp(c * x)).log())


def copulas() -> list[Target]:
    """Gaussian copulas with correlations r^|i - j|, margins in turn."""
    found = []
    for name, r, dim, margins in (
        ("heavy", 0.9, 5, [heavy(1.0)]),
        ("skewed", 0.7, 12, [skewed(1.5), skewed(0.7)]),
        ("mixed", 0.5, 24, [heavy(1.6), light(0.15), skewed(0.5)]),
        ("mild", 0.8, 60, [heavy(3.0), light(0.02)]),
    ):
        at = torch.arange(dim, dtype=torch.float64)
        precision = torch.linalg.inv(r ** (at[:, None] - at).abs())
        every = [margins[k % len(margins)] for k in range(dim)]

        def log_joint(theta: Tensor, margins: list[Margin] = margins, precision: Tensor = precision) -> Tensor:
            x, slopes = torch.empty_like(theta), torch.zeros_like(theta[..., 0])
            for k, margin in enumerate(margins):
                part = theta[..., k :: len(margins)]
                x[..., k :: len(margins)] = margin.g(part)
                slopes = slopes + margin.log_slope(part).sum(-1)
            return slopes - 0.5 * ((x @ precision.to(x)) * x).sum(-1)

        mean, sd = vector(*(one.mean for one in every)), vector(*(one.sd for one in every))
        how = "Each margin by the trapezoidal rule, checked on a grid twice as fine."
        error = max(one.error for one in margins)
        found.append(Target(f"copula of {name} margins", dim, log_joint, mean, sd, how, error))
    return found


def compositions() -> list[Target]:
    """Log ratios log(p_i/p_K) of a Dirichlet variable: given counts n_i, with a prior of one half each."""
    found = []
    rare = (0.5, 1.5, 0.5, 2.5, 0.5, 0.5, 12.5)
    many = tuple(float(3 + (7 * k) % 11) for k in range(31))
    for name, shapes in (("three", (0.3, 0.3, 0.3)), ("rare", rare), ("31", many), ("two and a rest", (4.5, 9.5, 6.5))):
        a = vector(*shapes)

        def log_joint(theta: Tensor, a: Tensor = a) -> Tensor:
            whole = torch.cat([theta, torch.zeros_like(theta[..., :1])], -1)
            return theta @ a[:-1].to(theta) - float(a.sum()) * torch.logsumexp(whole, -1)

        first, second = torch.digamma(a), torch.polygamma(1, a)
        mean, sd = first[:-1] - first[-1], (second[:-1] + second[-1]).sqrt()
        how = "Closed form: mean ψ(a_i) - ψ(a_K), variance ψ'(a_i) + ψ'(a_K)."
        found.append(Target(f"composition of {name}", len(shapes) - 1, log_joint, mean, sd, how))
    return found


def unlike_normals() -> list[Target]:
    """Two normals of unequal weight, mean and covariance; and products of lines with two bumps each."""

    def mixture(name: str, weights: tuple[float, ...], means: Tensor, roots: Tensor) -> Target:
        w, dim = vector(*weights), means.shape[1]
        constants = w.log() - roots.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * dim * LOG_2PI
        inverse = torch.linalg.inv(roots)

        def log_joint(theta: Tensor) -> Tensor:
            apart = theta[..., None, :] - means.to(theta)
            z = (inverse.to(theta) @ apart[..., None])[..., 0]
            return torch.logsumexp(constants.to(theta) - 0.5 * z.square().sum(-1), -1)

        mean = w @ means
        variance = w @ (roots.square().sum(-1) + (means - mean).square())
        how = "Closed form: the mean and the variance of a mixture."
        return Target(name, dim, log_joint, mean, variance.sqrt(), how, 0.0, 0.0)

    def root(dim: int, seed: int, spread: float) -> Tensor:
        scale = torch.linspace(-spread, spread, dim, dtype=torch.float64).exp() if dim > 1 else torch.ones(1).double()
        A = rotation(dim, seed)
        return torch.linalg.cholesky((A * scale) @ A.mT)

    line = torch.tensor([[0.0], [5.0]], dtype=torch.float64)
    six = torch.stack([torch.zeros(6), 1.8 * torch.ones(6)]).double()
    near = torch.stack([torch.zeros(12), 0.2 * normals(330)(12)])
    crossed = torch.zeros(2, 2, dtype=torch.float64)
    one = torch.eye(1, dtype=torch.float64)
    found = [
        mixture("unlike normals on a line", (0.8, 0.2), line, torch.stack([one, 0.5 * one])),
        mixture("unlike normals, D = 6", (0.85, 0.15), six, torch.stack([root(6, 331, 0.5), 0.5 * root(6, 332, 0.5)])),
        mixture("unlike normals, D = 12", (0.5, 0.5), near, torch.stack([root(12, 333, 0.3), root(12, 334, 0.3)])),
        mixture("crossed normals", (0.5, 0.5), crossed, torch.diag_embed(vector(3, 0.4, 0.4, 3).reshape(2, 2))),
    ]

    def bumps(x: Tensor) -> Tensor:
        first, second = (x + 1.5) / 0.6, (x - 1.5) / 0.8
        return torch.logaddexp(math.log(0.6 / 0.6) - 0.5 * first.square(), math.log(0.4 / 0.8) - 0.5 * second.square())

    return [*found, of_line("eight bumps", bumps, 3)]
