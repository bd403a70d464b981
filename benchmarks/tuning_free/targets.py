"""The grid of targets, each with the Gaussian of its family that has the largest ELBO.

A target is a density of z carried over by theta = mu + A z, so that its best full-covariance Gaussian is that of z
carried over likewise: the ELBO of a family that is closed under affine maps is equivariant.  z has independent
coordinates, whose best normal distribution comes from quadrature in one dimension; or is a funnel, whose best Gaussian
is known in closed form; or the weights of a logistic regression, whose ELBO `GeneralizedLinear` has exactly.

Covariances are full up to `WIDEST` dimensions, A then a random rotation of scales from the smallest to the largest.
Above that q is a mean field, and A diagonal; but the Gaussian is rotated in blocks of ten coordinates, where the best
mean field of a precision P has the standard deviations P_ii^-1/2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from torchngvi import CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, fit

WIDEST = 64  # dimensions with a full covariance
BLOCK = 10  # coordinates rotated together in a mean field
NODES = 100  # of the quadrature in one dimension
FUNNEL_SD = 0.5  # of the log variance
ROWS = (50, 4, 500)  # of a regression: at least, for each coordinate, at most


class Setting(NamedTuple):
    """Condition number of the covariance, the largest standard deviation, and how far the mean is from the start."""

    condition: float
    scale: float
    distance: float


SETTINGS = (Setting(1.0, 1.0, 1.0), Setting(1e2, 1.0, 30.0), Setting(1e4, 100.0, 1.0), Setting(1e8, 1.0, 3.0))
DIMS = {1: SETTINGS, 2: SETTINGS, 5: SETTINGS, 10: SETTINGS, 20: SETTINGS, 50: SETTINGS[1::2]}
DIMS |= {100: SETTINGS, 300: SETTINGS[::2] + SETTINGS[3:], 1000: SETTINGS[::3]}

# log densities of one coordinate, up to a constant
COORDINATES: dict[str, Callable[[Tensor], Tensor]] = {
    "Gaussian": lambda z: -0.5 * z.square(),
    "log-gamma": lambda z: 2 * z - z.exp(),
    "skew normal": lambda z: -0.5 * z.square() + torch.special.log_ndtr(3 * z),
    "logistic": lambda z: -z - 2 * softplus(-z),
    "Student": lambda z: -3.0 * torch.log1p(z.square() / 5),
}


SHAPES = (*COORDINATES, "funnel", "logistic regression")


def funnel(z: Tensor) -> Tensor:
    """z = (v, x), v ~ N(0, 1/4), x | v ~ N(0, e^v)."""
    v, x = z[..., 0], z[..., 1:]
    return -0.5 * (v / FUNNEL_SD).square() - 0.5 * ((-v).exp() * x.square().sum(-1) + x.shape[-1] * v)


class Base(NamedTuple):
    """A density of z, and its best Gaussian: the root is (D, D), or (D,) of a mean field."""

    log_density: Callable[[Tensor], Tensor]  # z (..., D) -> (...)
    mean: Tensor
    root: Tensor


def base(name: str, dim: int) -> Base:
    """The density of a shape, before it is scaled, turned and shifted."""
    if name == "logistic regression":
        return regression(dim)
    if name == "funnel":  # E e^-v = e^(-m + s²/2); the x have the variance 1/that, and m = 0
        variance = 1 / (FUNNEL_SD**-2 + (dim - 1) / 2)
        sd = torch.full((dim,), math.exp(-variance / 4), dtype=torch.float64)
        sd[0] = math.sqrt(variance)
        return Base(funnel, torch.zeros_like(sd), sd.diag() if dim <= WIDEST else sd)
    coordinate = COORDINATES[name]
    mean, sd = (torch.full((dim,), value, dtype=torch.float64) for value in best_normal(coordinate))
    return Base(lambda z: coordinate(z).sum(-1), mean, sd.diag() if dim <= WIDEST else sd)


def regression(dim: int) -> Base:
    """Logistic regression, weights and columns so that the predictor has the variance 4 under the prior."""
    least, each, most = ROWS
    rows, variance = max(least, min(each * dim, most)), 4 / dim
    X = normals(10 * dim + 7, rows, dim)
    chance = (X @ (math.sqrt(variance) * normals(10 * dim + 8, dim))).sigmoid()
    y = (torch.rand(rows, generator=torch.Generator().manual_seed(dim), dtype=torch.float64) < chance).double()
    q = (CholeskyGaussian if dim <= WIDEST else DiagonalGaussian)(dim, dtype=torch.float64)
    result = fit(q, GeneralizedLinear(X, y, prior_precision=1 / variance), progress=False)
    if not result.converged:
        raise RuntimeError(f"no optimum in {dim} dimensions: {result}")
    sign = 2 * y - 1

    def log_density(z: Tensor) -> Tensor:
        return logsigmoid(sign * (z @ X.mT)).sum(-1) - 0.5 * z.square().sum(-1) / variance

    return Base(log_density, q.mean.clone(), (q.scale_tril if dim <= WIDEST else q.stddev).clone())


def best_normal(log_density: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """The normal distribution with the largest ELBO: damped natural steps, expectations by quadrature."""
    nodes, weights = gauss_hermite(NODES)
    mean, precision = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    for _ in range(500):
        x = (mean + nodes / precision.sqrt()).requires_grad_()
        (first,) = torch.autograd.grad(log_density(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x) if first.requires_grad else (torch.zeros_like(x),)
        precision = 0.5 * precision - 0.5 * weights @ second
        mean = mean + 0.5 * (weights @ first.detach()) / precision
    return mean.item(), (1 / precision.sqrt()).item()


def gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the standard normal distribution, from the eigenvectors of the Jacobi matrix."""
    beside = torch.diag(torch.arange(1, count, dtype=torch.float64).sqrt(), 1)
    nodes, vectors = torch.linalg.eigh(beside + beside.mT)
    return nodes, vectors[0].square()


@dataclass(frozen=True, eq=False)
class Stack:
    """Targets of one shape and dimension, one a setting, evaluated together."""

    shape: str
    settings: tuple[Setting, ...]
    mean: Tensor  # of the best q, (n, D)
    root: Tensor  # (n, D, D), or (n, D) of a mean field
    log_joint: Callable[[Tensor, list[int]], Tensor]  # theta (..., m, D) and which m of them -> (..., m)

    def one(self, member: int) -> Callable[[Tensor], Tensor]:
        """The log joint of one of them: theta (..., D) -> (...)."""
        return lambda theta: self.log_joint(theta[..., None, :], [member])[..., 0]

    def all(self, theta: Tensor) -> Tensor:
        """That of all: theta (..., n, D) -> (..., n)."""
        return self.log_joint(theta, list(range(len(self.settings))))


def stacks(dim: int) -> list[Stack]:
    """All shapes in so many dimensions."""
    skipped = {"funnel"} if dim == 1 else {"skew normal"} if dim > WIDEST else set()
    return [stack(name, dim, 100 * dim + i) for i, name in enumerate(SHAPES) if name not in skipped]


def scales(dim: int, setting: Setting) -> Tensor:
    """Standard deviations (D,), geometric from the smallest to the largest."""
    smallest = setting.scale / math.sqrt(setting.condition)
    if dim == 1:
        return torch.tensor([smallest], dtype=torch.float64)
    return torch.logspace(math.log10(smallest), math.log10(setting.scale), dim, dtype=torch.float64)


def normals(seed: int, *shape: int) -> Tensor:
    """Standard normal draws of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stack(name: str, dim: int, seed: int) -> Stack:
    """theta = mu + A z for every setting of a dimension."""
    settings, (density, centre, factor) = DIMS[dim], base(name, dim)
    sd = torch.stack([scales(dim, setting) for setting in settings])
    mu = torch.stack([setting.distance * normals(100 * seed + i, dim) for i, setting in enumerate(settings)])
    if dim > WIDEST and name != "Gaussian":
        sd = sd[:, torch.randperm(dim, generator=torch.Generator().manual_seed(seed))]

        def scaled(theta: Tensor, members: list[int]) -> Tensor:
            return density((theta - mu[members]) / sd[members])

        return Stack(name, settings, mu + sd * centre, sd * factor, scaled)
    width = BLOCK if dim > WIDEST else dim
    sd = sd.unflatten(-1, (width, dim // width)).mT  # each block has scales of all sizes: (n, blocks, width)
    turn = torch.linalg.qr(normals(100 * seed + 50, len(settings), dim // width, width, width))[0]
    back = turn.mT / sd[..., None]  # A⁻¹ = diag(sd)⁻¹ Qᵀ, block by block

    def turned(theta: Tensor, members: list[int]) -> Tensor:
        away = (theta - mu[members]).unflatten(-1, (-1, width))
        return density(torch.einsum("...nbi,nbji->...nbj", away, back[members]).flatten(-2))

    if dim > WIDEST:
        return Stack(name, settings, mu, back.square().sum(-2).rsqrt().flatten(1), turned)
    A = turn[:, 0] * sd
    upper = torch.linalg.qr((A @ factor).mT).R
    return Stack(name, settings, mu + A @ centre, (upper.diagonal(0, -2, -1).sign()[..., None] * upper).mT, turned)


def gap(
    log_joint: Callable[[Tensor], Tensor],  # theta (..., *batch, D) -> (..., *batch)
    mean: Tensor,  # of q, (*batch, D)
    root: Tensor,  # (*batch, D, D), or (*batch, D) of a mean field
    best: tuple[Tensor, Tensor],  # mean and root of the best, likewise
    pairs: int = 512,
) -> tuple[Tensor, Tensor]:
    """The ELBO of the best q less that of q, on common antithetic draws, with its standard error: (*batch,) each."""
    noise = sphered(normals(0, pairs, mean.shape[-1])).unflatten(0, (pairs, *(1,) * (mean.ndim - 1)))
    differences = []
    for half in noise.split(32):
        best_values, values = (
            sum(log_joint(centre + push(factor, sign * half)) for sign in (1, -1)) / 2
            for centre, factor in (best, (mean, root))
        )
        differences.append(best_values - values)
    difference = torch.cat(differences)
    entropy = log_det(best[1], best[0]) - log_det(root, mean)
    return difference.mean(0) + entropy, difference.std(0) / math.sqrt(pairs)


def sphered(z: Tensor) -> Tensor:
    """Draws (S, D) with second moments of exactly I, or where there are too few for that, variances of exactly 1."""
    second = z.mT @ z / len(z)
    if len(z) < 2 * z.shape[-1]:
        return z / second.diagonal().sqrt()
    return torch.linalg.solve_triangular(torch.linalg.cholesky(second), z.mT, upper=False).mT


def push(root: Tensor, z: Tensor) -> Tensor:
    """C z for z (S, ..., D)."""
    return root * z if root.ndim < z.ndim else torch.einsum("...ij,s...j->s...i", root, z)


def log_det(root: Tensor, mean: Tensor) -> Tensor:
    """log|det C|."""
    return (root if root.ndim == mean.ndim else root.diagonal(0, -2, -1)).abs().log().sum(-1)
