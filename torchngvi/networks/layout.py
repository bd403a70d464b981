"""Which parameters of a network get which family, prior and start: read once, by name, when q is made."""

import fnmatch
import math
from collections.abc import Mapping
from typing import TypeVar, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchngvi.arguments import is_number, shown
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
