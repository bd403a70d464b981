"""How far a step goes: nats a datum at the outputs, and a share of its own size in each hidden unit.

A unit computes a = wᵀz + b from its inputs z.  A move of (w, b) changes it, over whitened inputs, by |Δ(w, b)| in root
mean square, where its first spread is about the norm ν of (w, b) at the start.  With S steps, after t of them,

    s = √(r φ²/κ),   κ = ½ dmᵀ(H + δ)dm,   r = c/√S,         the move is s dm, whatever the length of dm;
    |s Δ(w, b)| ≤ p φ ν,   p = k/√S,                         a unit that would go further is shortened alone;
    φ = min((t + 1)/(w S), ½(1 + cos πt/S), lr/its largest value).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchngvi.arguments import read_number

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_TRANSPOSED = nn.modules.conv._ConvTransposeNd
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_FALLS = 0.98  # share of the steps after which the factor stays at about .001, and not 0, for a training that goes on


@dataclass(frozen=True)
class StepLength:
    """How long the steps of :func:`torchngvi.attach` are; the defaults serve most networks.

    Args:
        nats: c of the radius r = c/√S, in nats a datum.
        units: k of the limit p = k/√S of a unit in a network of L layers is the larger one of ``units``/L² and
            ``deepest``; L counts the modules that have a matrix, and normalisations.
        deepest: the least k.
        warm_up: w, the share of the steps over which radius and limit rise.

    Raises:
        InputError: for a number that is not positive, or a warm-up over all steps.

    Radius and units were chosen with ``benchmarks/network_steps.py`` on power, bike, energy and digits, with one to
    three hidden layers, with and without LayerNorm, and judged on naval, elevators, wine_red, boston and MNIST.
    """

    nats: float = 0.12
    units: float = 5.6
    deepest: float = 0.35
    warm_up: float = 0.02

    def __post_init__(self) -> None:
        """Refuse numbers that give no length."""
        for name, below in {"nats": None, "units": None, "deepest": None, "warm_up": 1.0}.items():
            number = read_number(name, getattr(self, name), "of a StepLength", above=0, below=below)
            object.__setattr__(self, name, number)

    def share(self, taken: int, steps: int) -> float:
        """Return the planned factor of radius and limit after so many of the steps; it ends at its value at .98 S.

        >>> [round(StepLength().share(t, 1000), 4) for t in (0, 19, 500, 980, 2000)]
        [0.05, 0.9991, 0.5, 0.001, 0.001]
        """
        at = min(max(taken, 0), int(_FALLS * steps))
        return min((at + 1) / max(1.0, self.warm_up * steps), 0.5 * (1 + math.cos(math.pi * at / steps)))

    def limit(self, layers: int, steps: int) -> float:
        """Return p, the largest share of its first size that a unit moves by in a step, for so many layers.

        >>> [round(StepLength().limit(layers, 100), 3) for layers in (2, 3, 4, 50)]
        [0.14, 0.062, 0.035, 0.035]
        """
        return max(self.units / max(layers, 1) ** 2, self.deepest) / math.sqrt(steps)


class Unit(NamedTuple):
    """The units of one layer: the parameters that they consist of, by their places in q, and where units lie in them.

    An axis is that of the units, 1 for a transposed convolution; None where every number is of a unit of its own.
    """

    places: tuple[int, ...]
    axis: int | None = 0
    groups: int = 1  # of a transposed convolution

    def sum(self, square: Tensor) -> Tensor:
        """Return the sums over the units of a parameter."""
        if self.axis is None or square.ndim < 2:
            return square
        if self.axis == 0:
            return square.sum(list(range(1, square.ndim)))
        return square.unflatten(0, (self.groups, -1)).sum([1, *range(3, square.ndim + 1)]).flatten()

    def add_(self, means: Sequence[Tensor], moves: Sequence[Tensor], factors: Tensor) -> None:
        """Move the mean of each unit by a factor of its move."""
        for place in self.places:
            mean, move, factor = means[place], moves[place], factors
            if self.axis == 0 and mean.ndim > 1:
                factor = factors.view(-1, *[1] * (mean.ndim - 1))
            elif self.axis == 1 and mean.ndim > 1:
                mean, move = (tensor.unflatten(0, (self.groups, -1)) for tensor in (mean, move))
                factor = factors.view(self.groups, 1, -1, *[1] * (mean.ndim - 3))
            torch.addcmul(mean, move, factor, out=mean)


def find_units(model: nn.Module, names: Mapping[nn.Parameter, int]) -> tuple[list[Unit], int]:
    """Find the units of the parameters that have places, and the number of layers that they are in.

    A tied parameter belongs to its first layer.
    """
    left, found, layers = dict(names), [], 0
    for module in model.modules():
        own = {local: p for local, p in module.named_parameters(recurse=False) if p in left and p.numel()}
        if own and (_is_norm(module) or any(p.ndim > 1 for p in own.values())):
            layers += module.num_layers if isinstance(module, nn.RNNBase) else 1
        for members, axis, groups in _layers(module, own):
            found.append(Unit(tuple(left.pop(p) for p in members), axis, groups))
    return found, layers


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation, of torch or one of the user's own."""
    return isinstance(module, _NORMS) or type(module).__name__.lower().endswith("norm")


def is_last_linear(model: nn.Module, parameters: Collection[nn.Parameter]) -> bool:
    """Whether parameters are of the last layer of a network alone, and that is linear: their curvature is exact."""
    layers = [module for module in model.modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))]
    last = layers[-1] if layers else None
    return isinstance(last, nn.Linear) and set(parameters) <= set(last.parameters())


def _layers(module: nn.Module, own: dict[str, nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], int | None, int]]:
    """Iterate over the parameters that share units, with their axis and groups."""
    if _is_norm(module) or all(p.ndim < 2 for p in own.values()):
        shapes = {p.shape for p in own.values()}
        yield from (([p for p in own.values() if p.shape == shape], None, 1) for shape in shapes)
        return
    left = dict(sorted(own.items(), key=lambda item: -item[1].ndim))
    while left:
        first, p = next(iter(left.items()))
        groups = module.groups if isinstance(module, _TRANSPOSED) and p.ndim > 2 else 0
        axis = None if p.ndim < 2 else int(groups > 0)
        count = p.shape[1] * groups if groups else p.shape[:1].numel()
        rows = [o for o, q in left.items() if axis is not None and o != first and q.shape[:1] == (count,)]
        together = [first, *(other for other in rows if _alike(module, first, other, left[other]))]
        yield [left.pop(name) for name in together], axis, groups or 1


def _alike(module: nn.Module, first: str, other: str, p: Tensor) -> bool:
    """Whether a parameter shares its units with the first one: a bias, or what one gate of a recurrent layer sums."""
    if not isinstance(module, _RECURRENT):
        return p.ndim < 2 and "bias" in other
    return "_hr" not in first + other and first.partition("_l")[2] == other.partition("_l")[2]


def measure_units(units: Sequence[Unit], means: Sequence[Tensor]) -> list[float]:
    """Return ν of each layer, the root mean square of the norms of its units, and at least that of a usual start."""
    found = []
    for unit in units:
        own = [means[place] for place in unit.places]
        squares, count = sum(float(m.cpu().double().square().sum()) for m in own), sum(m.numel() for m in own)
        biases = 0 if unit.axis is None else sum(m.numel() for m in own if m.ndim < 2)
        number = unit.sum(own[0]).numel()
        found.append(math.sqrt(max(squares / max(number, 1), count / (3 * max(count - biases, 1)))))
    return found


def add_moves_(
    units: Sequence[Unit],
    means: Sequence[Tensor],
    moves: Sequence[Tensor],
    share: Tensor,
    sums: Sequence[Tensor],
    limits: Sequence[float],
) -> None:
    """Add a share of moves to means; a unit that would go further than its limit moves by that.

    Args:
        units, means, moves: of a network, by place.
        share: s, a number.
        sums: of the squares of moves in each unit, by place.
        limits: p φ ν of the units of each layer; infinite for none.
    """
    for unit, limit in zip(units, limits, strict=True):
        each = [sums[place] for place in unit.places]
        total = each[0] if len(each) == 1 else torch.stack(each).sum(0)
        factors = share.to(total)
        if math.isfinite(limit):
            longest = total.clamp_min(torch.finfo(total.dtype).tiny).rsqrt_().mul_(limit)
            factors = torch.fmin(longest, factors)  # of what is not finite the share, 0
        unit.add_(means, moves, factors)
