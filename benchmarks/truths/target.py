"""A target with its true moments, and the quadrature from which moments come that have no closed form.

The quadrature is the trapezoidal rule on a grid of one to three coordinates: for a smooth density that vanishes at the
faces of the grid its error falls faster than any power of the step (Trefethen and Weideman 2014).  Further coordinates
are integrated out given those of the grid, by their conditional means and variances.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError

LogJoint = Callable[[Tensor], Tensor]  # theta (*batch, D) -> (*batch,)

CUT = 20.0  # nats below the top at which a grid ends
TAIL = 1e-6  # what is beyond the grid, in its share of a variance: CUT² e^-CUT
FACES = 16.0  # nats below the top that it has to be there
NODES = {1: 2001, 2: 161, 3: 27}  # of the coarse grid, in each coordinate
SEEK = {1: 401, 2: 49, 3: 17}  # while it finds its box
ROUNDS = 10  # in which a grid finds its box
ROWS = 4096  # grid points evaluated together


@dataclass(frozen=True)
class Target:
    """A density known up to a constant, with the means and standard deviations of its coordinates."""

    name: str
    dim: int
    log_joint: LogJoint
    mean: Tensor  # (D,), float64
    sd: Tensor  # (D,), float64
    how: str  # one sentence on where the truth is from
    error: float = 0.0  # of the means in sds, and of the log sds: 0 for closed forms
    log_evidence: float | None = None
    half: str = ""  # "tune", "held", "fresh 1" or "fresh 2"

    def with_half(self, half: str) -> "Target":
        """The same target in one part of the suite."""
        return replace(self, half=half)


class Conditional(NamedTuple):
    """What a grid point says: its log density, and the moments of all D coordinates given it."""

    log_density: Tensor  # (G,)
    mean: Tensor  # (G, D)
    variance: Tensor  # (G, D)


class Truth(NamedTuple):
    """Moments, their error, and the log evidence."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)
    error: float
    log_evidence: float


class _Grid(NamedTuple):
    """Points centre + root u, u on a box."""

    centre: Tensor  # (d,)
    root: Tensor  # (d, d)
    low: Tensor  # (d,)
    high: Tensor  # (d,)

    def points(self, nodes: int) -> tuple[Tensor, Tensor]:
        """u and theta, (nodes^d, d) each."""
        box = torch.stack([self.low, self.high], -1).tolist()
        axes = [torch.linspace(low, high, nodes, dtype=torch.float64) for low, high in box]
        u = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        return u, self.centre + u @ self.root.mT

    def log_cell(self, nodes: int) -> float:
        """The log volume of a cell."""
        return float(((self.high - self.low) / (nodes - 1)).log().sum() + torch.linalg.slogdet(self.root)[1])


def _around(grid: _Grid, nodes: int, density: Callable[[Tensor], Tensor], turn: bool) -> _Grid:
    """A grid on the box of the points within `CUT` of the top, a step wider; turned to their covariance if asked."""
    u, theta = grid.points(nodes)
    value = density(theta)
    kept = value > value.max() - CUT
    step = (grid.high - grid.low) / (nodes - 1)
    low, high = u[kept].amin(0), u[kept].amax(0)
    half = 0.5 * (grid.high - grid.low)  # a box that cuts the density grows by a half
    low = low - torch.where(low <= grid.low + 0.5 * step, half, step)
    high = high + torch.where(high >= grid.high - 0.5 * step, half, step)
    if not turn:
        return grid._replace(low=low, high=high)
    weight = torch.softmax(value, 0)
    centre = weight @ theta
    root = torch.linalg.cholesky((theta - centre).mT @ (weight[:, None] * (theta - centre)))
    new = torch.linalg.solve_triangular(root, (theta[kept] - centre).mT, upper=False).mT
    margin = torch.linalg.solve_triangular(root, grid.root * step, upper=False).abs().sum(1)
    return _Grid(centre, root, new.amin(0) - margin, new.amax(0) + margin)


def by_quadrature(
    conditional: Callable[[Tensor, int], Conditional],  # grid points (G, d) and the level, 1 or 2
    low: Sequence[float],
    high: Sequence[float],
    turn: bool = True,
    nodes: int | None = None,  # of the coarse grid, in each coordinate
) -> Truth:
    """Moments by a grid that finds its own box, beginning from the box [low, high]; the error by one twice as fine.

    Level 2 asks for twice as many nodes of any inner quadrature as well.
    """

    def all_of(theta: Tensor, level: int) -> Conditional:
        parts = [conditional(part, level) for part in theta.split(ROWS)]
        return Conditional(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def density(theta: Tensor) -> Tensor:
        return all_of(theta, 1).log_density

    box = torch.tensor([low, high], dtype=torch.float64)
    nodes = nodes or NODES[len(low)]
    grid = _Grid(torch.zeros(len(low), dtype=torch.float64), torch.eye(len(low), dtype=torch.float64), *box)
    for step in range(ROUNDS):
        grid = _around(grid, SEEK[len(low)], density, turn and step == ROUNDS // 2)
    u, theta = grid.points(SEEK[len(low)])
    value, faces = density(theta), ((u == grid.low) | (u == grid.high)).any(-1)
    if float(value[faces].max()) > float(value.max()) - FACES:
        raise InputError(
            "the density does not vanish at the faces of the box; begin from a wider box, or give it a proper tail."
        )
    truths = []
    for level, count in enumerate((nodes, 2 * nodes - 1), 1):
        answer = all_of(grid.points(count)[1], level)
        total = torch.logsumexp(answer.log_density, 0)
        weight = torch.exp(answer.log_density - total)
        mean = weight @ answer.mean
        variance = weight @ (answer.variance + (answer.mean - mean).square())
        truths.append((mean, variance.sqrt(), float(total) + grid.log_cell(count)))
    (mean, sd, _), (fine_mean, fine_sd, evidence) = truths
    error = max(float(((mean - fine_mean) / fine_sd).abs().max()), float((sd / fine_sd).log().abs().max()))
    return Truth(fine_mean, fine_sd, max(error, TAIL), evidence)


def exactly(log_joint: LogJoint) -> Callable[[Tensor, int], Conditional]:
    """The grid holds every coordinate: nothing is left to integrate."""
    return lambda theta, level: Conditional(log_joint(theta), theta, torch.zeros_like(theta))


def on_grid(
    name: str,
    log_joint: LogJoint,
    low: Sequence[float],
    high: Sequence[float],
    turn: bool = True,
    nodes: int | None = None,
) -> Target:
    """A target of one to three coordinates by quadrature."""
    truth = by_quadrature(exactly(log_joint), low, high, turn, nodes)
    how = f"Trapezoidal rule in {len(low)} coordinates, checked on a grid twice as fine."
    return Target(name, len(low), log_joint, truth.mean, truth.sd, how, truth.error, truth.log_evidence)


def normals(seed: int) -> Callable[..., Tensor]:
    """Standard normal draws in float64, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniforms(seed: int) -> Callable[..., Tensor]:
    """Uniform draws in float64, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)


def rotation(dim: int, seed: int) -> Tensor:
    """An orthogonal matrix (D, D)."""
    return torch.linalg.qr(normals(seed)(dim, dim))[0]


def vector(*values: float) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def normal(x: Tensor, mean: Tensor | float = 0.0, sd: float = 1.0) -> Tensor:
    """log N(x; mean, sd²), entry by entry."""
    return -0.5 * ((x - mean) / sd).square() - math.log(sd) - 0.5 * math.log(2 * math.pi)
