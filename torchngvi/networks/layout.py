"""Which parameters of a network get which family, prior and start, and how far a step moves them."""

import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchngvi.arguments import is_number, read_number, shown
from torchngvi.errors import InputError
from torchngvi.networks.families import Dense, Diagonal, Family, Kronecker, Rows

FAMILIES: dict[str, type[Family]] = {"diagonal": Diagonal, "kronecker": Kronecker, "dense": Dense, "rows": Rows}

_SHARDED = {"DTensor", "FlatParameter"}  # of fully_shard and of FullyShardedDataParallel

Value = TypeVar("Value")
Structure = str | Mapping[str, str]
PriorPrecision = float | Mapping[str, float]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network inside the wrappers of torch.compile and DistributedDataParallel."""
    if not isinstance(model, nn.Module):
        raise InputError(f"A posterior over weights is made of a torch.nn.Module; got a {type(model).__name__}.")
    while True:
        if hasattr(model, "_orig_mod"):
            model = cast(nn.Module, model._orig_mod)  # of torch.compile
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, each once, under its first name."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise InputError("The network has no parameter that requires a gradient, so that there is nothing to infer.")
    for name, p in found.items():
        refuse_sharded(f"The parameter {name}", p)
        if is_lazy(p):
            raise InputError(f"The parameter {name} is not initialised yet; call the network once on a batch before.")
        if not p.is_floating_point():
            raise InputError(f"A posterior needs parameters of real numbers; {name} has the dtype {p.dtype}.")
        if p.dtype.itemsize < 2:
            raise InputError(
                f"A posterior needs parameters that a step can move, of 16 bits at least; {name} has the dtype "
                f"{p.dtype}. Freeze it, or make the network in bfloat16."
            )
        if p.is_meta:
            raise InputError(
                f"The parameter {name} is on the device meta, without values; load the weights (model.to_empty and "
                "load_state_dict) before the posterior is made."
            )
    return found


def refuse_sharded(what: str, p: nn.Parameter) -> None:
    """Refuse a parameter of which each process has a part."""
    if type(p).__name__ in _SHARDED:
        raise InputError(
            f"{what} is a {type(p).__name__}, sharded over processes, and a posterior needs whole parameters in every "
            "process; train with DistributedDataParallel."
        )


def matched(names: list[str], given: Mapping[str, Value], what: str) -> dict[str, Value]:
    """Look up what was given for each name by patterns, of which the first that fits counts."""
    for pattern in given:
        if not isinstance(pattern, str):
            raise InputError(f"{what} is by patterns of names of parameters, such as 'head.*'; got {pattern!r}.")
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"{what} names {pattern!r}, which fits none of the parameters {', '.join(names[:6])}"
                f"{', ...' if len(names) > 6 else ''}."
            )
    chosen = {}
    for name in names:
        for pattern, value in given.items():
            if fnmatch.fnmatchcase(name, pattern):
                chosen[name] = value
                break
    return chosen


def named_by(structure: Structure, name: str) -> bool:
    """Return whether a structure gives a parameter a family."""
    return isinstance(structure, str) or any(fnmatch.fnmatchcase(name, pattern) for pattern in structure)


def fan_in(model: nn.Module, name: str) -> int:
    """Return the number of inputs that a parameter's layer sums over."""
    layer, _, last = name.rpartition(".")
    module = model.get_submodule(layer)
    own = getattr(module, last)
    weight = own if own.ndim > 1 else getattr(module, "weight", own)
    if not hasattr(weight, "ndim") or weight.ndim < 2:
        return max(own.numel(), 1)
    return max(math.prod(weight.shape[1:]), 1)


def _read_kinds(names: list[str], structure: Structure) -> dict[str, str]:
    """Read the families of parameters by name."""
    if not isinstance(structure, str | Mapping):
        raise InputError(f"structure is the name of a family, or names them by patterns; got {structure!r}.")
    kinds = matched(names, {"*": structure} if isinstance(structure, str) else structure, "structure")
    if not kinds:
        raise InputError("structure names no parameter; give a family, as {'head.*': 'diagonal'} does, or one for all.")
    for kind in kinds.values():
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise InputError(f"structure is one of {', '.join(map(repr, FAMILIES))}, or names them; got {kind!r}.")
    return kinds


def families(
    model: nn.Module,
    num_data: int,
    structure: Structure,
    prior: PriorPrecision,
    centers: Mapping[str, Tensor],
    precisions: Mapping[str, Tensor],
) -> nn.ModuleList:
    """Make the families of q, with means of the prior by name, and precisions by weight in place of the given ones."""
    parameters = trainable(model)
    kinds = _read_kinds(list(parameters), structure)
    priors = matched(list(kinds), prior if isinstance(prior, Mapping) else {"*": prior}, "prior_precision")
    if centers and not kinds.keys() & centers.keys():
        raise InputError(
            f"The prior names {next(iter(centers))!r} and {len(centers) - 1} more, none of which is one of "
            f"{', '.join(list(kinds)[:6])}{', ...' if len(kinds) > 6 else ''}. The names of a wrapped network have a "
            "prefix, such as 'module.': take the state_dict() of the network itself."
        )
    for name in kinds:
        if name not in priors and name not in precisions:
            raise InputError(f'prior_precision says nothing of {name}; add a precision for "*".')
        if name not in precisions and not is_number(priors[name], above=0):
            raise InputError(
                f"prior_precision is larger than 0 and finite; got {shown(priors[name])} for {name}. It is one number, "
                "or one for each pattern of names, as {'head.*': 1.0, '*': 10.0}, and the same for all weights of a "
                "parameter."
            )
        for what, given in (("mean", centers.get(name)), ("posterior", precisions.get(name))):
            if given is not None and given.shape != parameters[name].shape:
                raise InputError(
                    f"The {what} that is the prior has the shape {tuple(given.shape)} for {name}, and the network has "
                    f"{tuple(parameters[name].shape)}. Leave that name out of the prior, or give a new layer a name of "
                    "its own: weights that the prior does not name take prior_precision."
                )
            if given is not None and not given.isfinite().all():
                raise InputError(f"The {what} that is the prior is not finite for {name}.")
    for name, kind in kinds.items():
        if kind == "kronecker" and (parameters[name].ndim < 2 or parameters[name].numel() == 0):
            kinds[name] = "diagonal"  # without two sides for a product
        elif kind == "kronecker" and name in precisions:
            raise InputError(
                f"A posterior as the prior has a precision for each weight, which structure='kronecker' of {name} "
                "cannot hold; use 'diagonal' or 'dense'."
            )
    delta = {n: precisions[n] / num_data if n in precisions else float(priors[n]) / num_data for n in kinds}
    start = {name: 12 * fan_in(model, name) / num_data for name in kinds}  # 1/(N σ₀²) with σ₀ = ½/√(3 fan_in)
    found: list[Family] = [
        FAMILIES[kind](
            {name: parameters[name] for name in kinds if kinds[name] == kind}, delta, start, num_data, centers
        )
        for kind in dict.fromkeys(kinds.values())
    ]
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    for family in found:
        family.picked = frozenset(name for name in family.names if parameters[name] in tables)
    return nn.ModuleList(found)


# ------------------------------------------------------------------------------------ how far a step goes
# In nats a datum at the outputs, and by a share of its own size in each hidden unit, by the formulas of `attach`.
# A unit computes a = wᵀz + b from its inputs z, and a move of (w, b) changes it, over whitened inputs, by |Δ(w, b)| in
# root mean square, where its first spread is about the norm ν of (w, b) at the start.


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
    """The units of one layer: the parameters that they are made of, by their places in q, and where they lie there."""

    places: tuple[int, ...]
    axis: int | None = 0  # 1 for a transposed convolution; None where every number is of a unit of its own
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
    """Find the units of the parameters that have places, and the number of layers that they are in."""
    left, found, layers = dict(names), [], 0  # a tied parameter belongs to its first layer
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
    """Add the share s of moves to means; a unit that would go further than its limit p φ ν moves by that."""
    for unit, limit in zip(units, limits, strict=True):
        each = [sums[place] for place in unit.places]
        total = each[0] if len(each) == 1 else torch.stack(each).sum(0)
        factors = share.to(total)
        if math.isfinite(limit):
            longest = total.clamp_min(torch.finfo(total.dtype).tiny).rsqrt_().mul_(limit)
            factors = torch.fmin(longest, factors)  # of what is not finite the share, 0
        unit.add_(means, moves, factors)
