"""The nodes of a fan: Gaussians fitted along a line, outwards from the middle, both sides at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sample_average import SampleAverage
from torchngvi.interfaces import Target
from torchngvi.methods import VN
from torchngvi.optim import Status
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.refinement.density import LogDensity
from torchngvi.refinement.layers import Nodes, orthogonal

# Several Gaussians side by side, each brought to its optimum over fixed draws

FEWEST = 32  # draws, or 2 D + 2, over which a Gaussian target is fitted exactly
_MOST = 512  # draws, unless whitening takes more
_NOISE = 0.1  # squared standard error of a natural gradient that is put up with: 0.05 nats
_NEAR = 0.05  # norm² at which a fit ends
_FAR = 1.0  # norm² above which it has failed
_STEPS = 12
_JUDGES = 128  # draws of the ELBO, or as many as of the fit


@final
class Batched(Target):
    """A log density of points (S, *batch, D), each batch member with one of its own.

    >>> Batched(lambda y: -y.square().sum(-1)).log_joint(torch.ones(4, 3, 2)).shape
    torch.Size([4, 3])
    """

    temperature = 1.0

    def __init__(self, log_density: Callable[[Tensor], Tensor]) -> None:
        self.log_density = log_density

    def log_joint(self, theta: Tensor) -> Tensor:
        """Evaluate the log density at points (S, *batch, D)."""
        return self.log_density(theta)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the function depends on are unknown."""
        return ()


class Fits(NamedTuple):
    """Gaussians that were fitted, an entry a member."""

    mean: Tensor  # (B, D)
    root: Tensor  # lower triangular, (B, D, D)
    elbo: Tensor  # on other draws, (B,)
    ok: Tensor  # the fit has ended, and its ELBO is finite, (B,)
    draws: int  # over which they were fitted


@torch.no_grad()
def fitted(
    target: Target,
    mean: Tensor,  # (B, D)
    root: Tensor,  # (B, D, D)
    seed: int,
    draws: int | None = None,
) -> Fits:
    """Fit from these starts by VN over fixed draws; the ELBO is of others.

    >>> fits = fitted(Batched(lambda y: -2 * y.square().sum(-1)), torch.ones(1, 2), torch.eye(2)[None], seed=0)
    >>> bool(fits.ok), fits.draws, fits.root.diagonal(dim1=-2, dim2=-1).tolist()
    (True, 32, [[0.5, 0.5]])
    """
    q = CholeskyGaussian(mean.shape[-1], mean.shape[:-1], mean=mean, scale=root)
    least = max(FEWEST, 2 * q.dim + 2)
    first = least if draws is None else draws
    status = _minimised(q, target, first, seed)
    if draws is None:
        assert status.noise2 is not None
        wanted = first * float(status.noise2.nan_to_num(0.0, 0.0).max()) / _NOISE
        draws = 2 * math.ceil(0.5 * min(max(least, wanted), max(least, _MOST)))
        if draws > first:
            status = _minimised(q, target, draws, seed)
    judges = Fixed(max(draws, _JUDGES), seed=seed + 1)(q.mean)
    elbo = target.log_joint(q.push_noise(judges)).mean(0) + q.entropy()
    return Fits(q.mean.clone(), q.scale_tril.clone(), elbo, (status.norm2 < _FAR) & elbo.isfinite(), draws)


def _minimised(q: CholeskyGaussian, target: Target, draws: int, seed: int) -> Status:
    optimizer = VN(q, estimator=SampleAverage(Fixed(draws, seed=seed)))
    status = optimizer.evaluate(target)
    for _ in range(_STEPS):
        if bool(((status.norm2 < _NEAR) | ~status.loss.isfinite()).all()):
            break
        optimizer.step(target)
        status = optimizer.evaluate(target)
    optimizer.step_untried(target)  # near the optimum it is right, and costs nothing
    return status


_WIDER, _LITTLE = 1.6, 1.5  # the next step, where the ELBO fell by less than so many nats
_MUCH, _SHORT = 5.0, 0.3  # nats by which a node may fall, unless the step was as short
_DEEP = 9.0  # nats below the top at which a side ends
_LONGEST = 10  # nodes on a side
_FINE, _FINE_WIDER, _FINE_LONGEST = 0.25, 1.1, 40  # first step, growth and nodes where a node is a single value


@dataclass(frozen=True)
class _Node:
    """A Gaussian of y at one s."""

    s: float
    elbo: float
    mean: Tensor  # μ, (E,)
    root: Tensor  # L, (E, E)


class _Side:
    """Nodes outwards from the middle, and the step to the next one."""

    def __init__(self, middle: _Node, sign: float) -> None:
        alone = not len(middle.mean)
        self.nodes, self.step, self.done = [middle], sign * (_FINE if alone else 1.0), False
        self.wider, self.longest = (_FINE_WIDER, _FINE_LONGEST) if alone else (_WIDER, _LONGEST)

    def proposal(self) -> _Node:
        """Where the next node is, on the line through the last two means, with the last root."""
        last = self.nodes[-1]
        s, mean = last.s + self.step, last.mean
        if len(self.nodes) > 1:
            before = self.nodes[-2]
            mean = mean + (s - last.s) / (last.s - before.s) * (mean - before.mean)
        return _Node(s, last.elbo, mean, last.root)

    def take(self, node: _Node, top: float) -> None:
        """Keep a node; or drop one that failed or fell too far, and go less far."""
        fell = self.nodes[-1].elbo - node.elbo if math.isfinite(node.elbo) else math.inf
        if fell > _MUCH and abs(self.step) > _SHORT:
            self.step *= 0.5
            return
        if fell == math.inf:
            self.done = True
            return
        self.nodes.append(node)
        self.step *= self.wider if fell < _LITTLE else 1.0
        self.done = node.elbo < top - _DEEP or len(self.nodes) > self.longest


def trace(
    log_density: LogDensity,
    direction: Tensor,  # u, of length 1, (D,)
    seed: int,
) -> Nodes | None:
    """Fit Gaussians conditional on s = uᵀx, of a log density of x that is near N(0, I).

    >>> nodes = trace(lambda x: -0.5 * x.square().sum(-1), torch.tensor([1.0, 0.0]), seed=0)
    >>> bool((nodes.elbo - nodes.elbo.max() + 0.5 * nodes.s**2).abs().max() < 1e-5)
    True
    """
    basis, inner = orthogonal(direction), len(direction) - 1
    start = _Node(
        0.0, 0.0, direction.new_zeros(inner), torch.eye(inner, dtype=direction.dtype, device=direction.device)
    )
    (middle,), draws = _fitted(log_density, basis, [start], None, seed)
    if not math.isfinite(middle.elbo):
        return None
    sides, top = [_Side(middle, -1.0), _Side(middle, 1.0)], middle.elbo
    while active := [side for side in sides if not side.done]:
        found, _ = _fitted(log_density, basis, [side.proposal() for side in active], draws, seed)
        top = max([top, *(node.elbo for node in found)])
        for side, node in zip(active, found, strict=True):
            side.take(node, top)
    nodes = [*reversed(sides[0].nodes), *sides[1].nodes[1:]]
    s, elbo = (direction.new_tensor([getattr(node, name) for node in nodes]) for name in ("s", "elbo"))
    return Nodes(s, elbo, torch.stack([node.mean for node in nodes]), torch.stack([node.root for node in nodes]))


def _conditional(log_density: LogDensity, basis: Tensor, s: Tensor) -> Batched:
    """y (S, B, E) -> log density at s u + P y."""

    def at(y: Tensor) -> Tensor:
        points = torch.cat([s[:, None].expand(*y.shape[:-1], 1), y], -1) @ basis.mT
        return log_density(points.flatten(0, -2)).unflatten(0, points.shape[:-1])

    return Batched(at)


def _fitted(
    log_density: LogDensity, basis: Tensor, starts: list[_Node], draws: int | None, seed: int
) -> tuple[list[_Node], int | None]:
    """Gaussians at these places, side by side, with an ELBO of -∞ where there is none; and over how many draws."""
    target = _conditional(log_density, basis, basis.new_tensor([node.s for node in starts]))
    mean, root = torch.stack([node.mean for node in starts]), torch.stack([node.root for node in starts])
    if mean.shape[-1]:
        mean, root, elbo, ok, draws = fitted(target, mean, root, seed, draws)
    else:  # a single coordinate: the density itself
        with torch.no_grad():
            elbo = target.log_joint(mean[None])[0]
        ok = elbo.isfinite()
    rows = zip(starts, torch.where(ok, elbo, -torch.inf).tolist(), mean, root, strict=True)
    return [_Node(start.s, value, m, r) for start, value, m, r in rows], draws
