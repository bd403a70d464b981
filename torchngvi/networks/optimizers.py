"""What a posterior asks of the optimizers of torch that move its mean, and reads from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchngvi.errors import InputError
from torchngvi.networks.layout import refuse_sharded

_PEAK, _FIRST = "largest_lr", "first_lr"  # kept in the parameter group, hence in checkpoints of the optimizer


def check(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse optimizers that would not do what a posterior says.

    Args:
        optimizers: that are to move the mean.
        parameters: of the posterior, by name.

    Raises:
        InputError: with a sentence that says what to do.
    """
    of_q, held = set(parameters.values()), set()
    for opt in optimizers:
        kind = type(opt).__name__
        if isinstance(opt, torch.optim.LBFGS):
            raise InputError(
                "LBFGS evaluates its closure several times a step, at the mean and not at a draw; take an optimizer "
                "that needs one gradient a step."
            )
        for group in opt.param_groups:
            if not of_q.intersection(group["params"]):
                continue
            held |= set(group["params"])
            if group.get("weight_decay", 0.0):
                raise InputError(
                    f"{kind} has weight_decay={group['weight_decay']} for parameters of q, and the prior takes its "
                    "place; set weight_decay=0.0 for them and say prior_precision= of torchngvi.network."
                )
            if group.get("maximize", False):
                raise InputError(f"{kind} has maximize=True; a posterior needs the loss, -log p, and minimises it.")
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


def closure_of(arguments: tuple, keywords: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure of a step, which evaluates the loss and its gradient where gradients are recorded.

    Args:
        arguments: of the step, the optimizer itself first.
        keywords: of the step.

    Returns:
        The closure, or None.

    >>> closure_of((None,), {"closure": lambda: 2.0})()
    2.0
    """
    closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
    return None if closure is None else torch.enable_grad()(closure)


def note_lr(group: dict[str, Any]) -> None:
    """Let a group remember the learning rate that it has before the first step, which a warm-up may then lower.

    Args:
        group: of parameters.

    >>> group = {"lr": 0.5}
    >>> note_lr(group)
    >>> group["lr"] = 0.1
    >>> share_of_lr(group)
    0.2
    """
    group[_FIRST] = max(float(group["lr"]), group.get(_FIRST, 0.0))


def share_of_lr(group: dict[str, Any]) -> float:
    """Return the learning rate of a group over the largest one that it has had or that its schedule says it will have.

    The rate that an optimizer is made with is one that it has had, unless a scheduler has set another one since.

    Args:
        group: of parameters, which remembers the largest one of a step.

    Returns:
        A number from 0 to 1.

    >>> group = {"lr": 0.5, "initial_lr": 2.0}
    >>> share_of_lr(group), group["largest_lr"]
    (0.25, 2.0)
    """
    lr = float(group["lr"])
    first = group["initial_lr"] if "initial_lr" in group else group.get(_FIRST, 0.0)
    group[_PEAK] = max(lr, group.get(_PEAK, 0.0), float(first), group.get("max_lr", 0.0))
    return lr / group[_PEAK] if group[_PEAK] > 0 else 0.0


def unscale_(optimizer: Optimizer, gradients: list[Tensor]) -> None:
    """Take the scale of a GradScaler out of gradients that a fused optimizer would have unscaled itself.

    Args:
        optimizer: on which the scaler has left its scale, perhaps.
        gradients: scaled, in place.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        if gradients:
            torch._foreach_mul_(gradients, scale.reciprocal().to(gradients[0]))
        optimizer.grad_scale = None  # type: ignore[attr-defined]
