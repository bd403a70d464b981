"""The nodes of a fan: Gaussians fitted along a line, outwards from the middle, both sides at once."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.refinement.joint import LogDensity
from torchngvi.refinement.layers import Nodes, orthogonal
from torchngvi.refinement.newton import Batched, fitted

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
