"""What a posterior asks of the optimizers of torch that move its mean, and reads from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchngvi.errors import InputError
from torchngvi.networks.layout import refuse_sharded
from torchngvi.networks.weights import frames

# kept in the parameter group, hence in checkpoints of the optimizer
_PEAK, _FIRST, BEGUN = "largest_lr", "first_lr", "draws_before"
REFUSED = ("maximize", "weight_decay", "lambd")  # options of a group with parameters of q; the last is of ASGD


def check(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse optimizers that would not do what a posterior says."""
    of_q, held = set(parameters.values()), set()
    for opt in optimizers:
        kind = type(opt).__name__
        if isinstance(opt, torch.optim.LBFGS):
            raise InputError(
                "LBFGS evaluates its closure several times a step and compares gradients from step to step, and here "
                "each step has another draw and is shortened afterwards; take an optimizer that remembers no steps, "
                "such as AdamW."
            )
        for group in opt.param_groups:
            if not of_q.intersection(group["params"]):
                continue
            held |= set(group["params"])
            check_options(kind, group)
    missing = [name for name, p in parameters.items() if p not in held]
    if missing:
        for opt in optimizers:
            for group in opt.param_groups:
                for p in group["params"]:
                    refuse_sharded(f"A parameter of {type(opt).__name__}", p)
        raise InputError(
            f"No optimizer given has the parameter{'s' if len(missing) > 1 else ''} {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''} that q is over; give the optimizer all of model.parameters(), or "
            "several optimizers in a list."
        )


def check_options(kind: str, group: Mapping[str, Any]) -> None:
    """Refuse options of a group with parameters of q that would make other steps than the posterior needs."""
    if group.get("weight_decay", 0.0):
        raise InputError(
            f"{kind} has weight_decay={group['weight_decay']} for parameters of q, and the prior takes its place; set "
            "weight_decay=0.0 for them and say prior_precision= of torchngvi.network."
        )
    if group.get("lambd", 0.0):
        raise InputError(
            f"{kind} has lambd={group['lambd']} for parameters of q, which decays them as weight_decay does, and the "
            "prior takes its place; set lambd=0.0 for them and say prior_precision= of torchngvi.network."
        )
    if group.get("maximize", False):
        raise InputError(f"{kind} has maximize=True; a posterior needs the loss, -log p, and minimises it.")


def refuse_wrapped(given: Any) -> None:
    """Refuse an optimizer that only passes its steps on to one of torch, as that of Accelerate: it runs no hooks."""
    for one in given if isinstance(given, list | tuple) else [given]:
        if hasattr(one, "_optimizer_step_pre_hooks") and isinstance(one, Optimizer):
            continue
        kind = type(one).__name__
        if isinstance(getattr(one, "optimizer", None), Optimizer):
            raise InputError(
                f"The {kind} given wraps an optimizer of torch, whose steps the hooks of q belong to: attach to that "
                "one, its .optimizer, or attach before it is wrapped."
            )
        if isinstance(one, Optimizer):
            raise InputError(
                f"The {kind} given has not called __init__ of torch.optim.Optimizer, so that its steps run no hooks; "
                "attach to the optimizer of torch that it steps."
            )


def is_within_its_own_step(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer is within another one of its own, by ``super().step()``."""
    if sum("step" in kind.__dict__ for kind in type(optimizer).__mro__ if kind is not Optimizer) < 2:
        return False
    hooked = (f for f in frames() if f.f_globals.get("__name__") == "torch.optim.optimizer")
    return sum(f.f_code.co_name == "wrapper" and f.f_locals.get("self") is optimizer for f in hooked) > 1


def note_start(group: dict[str, Any], draw: int) -> None:
    """Let a group remember where a training begins: the learning rate, which a warm-up may then lower, and the draw."""
    group[_FIRST] = max(float(group["lr"]), group.get(_FIRST, 0.0))
    group.setdefault(BEGUN, draw)


def forget_start(group: dict[str, Any]) -> None:
    """Let a group forget what :func:`note_start` and :func:`share_of_lr` have left in it, when a training is over."""
    for name in (_PEAK, _FIRST, BEGUN):
        group.pop(name, None)


def keeps_iterate(optimizer: Optimizer) -> bool:
    """Return whether an optimizer remembers where it has put the parameters, so that no step may be lengthened.

    Schedule-Free optimizers, which have modes, and those that look ahead do.
    """
    return all(hasattr(optimizer, mode) for mode in ("train", "eval")) or hasattr(optimizer, "la_alpha")


def share_of_lr(group: dict[str, Any]) -> float:
    """Return the learning rate of a group over its largest one."""
    group[_PEAK] = largest_lr(group)
    return float(group["lr"]) / group[_PEAK] if group[_PEAK] > 0 else 0.0


def largest_lr(group: Mapping[str, Any]) -> float:
    """Return the largest learning rate that a group has had or that its schedule says it will have."""
    first = group["initial_lr"] if "initial_lr" in group else group.get(_FIRST, 0.0)
    return max(float(group["lr"]), group.get(_PEAK, 0.0), float(first), group.get("max_lr", 0.0))


def unscale_(optimizer: Optimizer, gradients: list[Tensor]) -> None:
    """Take the scale of a GradScaler out of gradients that a fused optimizer would have unscaled itself."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        if gradients:
            torch._foreach_mul_(gradients, scale.reciprocal().to(gradients[0]))
        optimizer.grad_scale = None  # type: ignore[attr-defined]
