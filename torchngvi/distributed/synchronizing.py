"""Bring the ranks to the same q, and sum what `loss.backward()` has left in its probes."""

import itertools
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.distributed.processes import Processes


def processes_of(group: Any) -> Processes:
    """The processes that a caller names, for functions that work in one process unless they are told otherwise.

    Args:
        group: a `Processes`, a group of torch.distributed, or None for this process alone.

    Returns:
        The processes.

    >>> processes_of(None).world
    1
    """
    if group is None:
        return Processes.alone()
    return group if isinstance(group, Processes) else Processes(group)


@torch.no_grad()
def synchronize(q: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, group: Any = None) -> None:
    """Give q, and an optimizer over it, the state that they have on the leader.

    One wants it after a change of q on one rank, such as a start from a file, and before a fit of several processes.

    Args:
        q: the posterior, of the same class and shape on every rank.
        optimizer: the optimizer over it; None for q alone.
        group: a group of torch.distributed, or a `Processes`; by default that of all processes.

    Raises:
        InputError: on every rank, where one of them is elsewhere in the program.

    >>> from torchngvi import CholeskyGaussian
    >>> synchronize(CholeskyGaussian(2))
    """
    processes = group if isinstance(group, Processes) else Processes(group)
    if processes.world == 1:
        return
    q.load_state_dict(processes.one(q.state_dict()))
    if optimizer is not None:
        optimizer.load_state_dict(processes.one(optimizer.state_dict()))


def sum_gradients(optimizer: torch.optim.Optimizer, group: Any = None) -> Any:
    """Sum the gradients of all parameters over the ranks before each step, in one all-reduce.

    It is for ``loss.backward(); opt.step()`` where the losses of the ranks add up to the loss: each its rows, and the
    prior and the entropy on one of them, or in R equal parts.

    Args:
        optimizer: an optimizer whose gradients were filled when it steps.
        group: a group of torch.distributed, or a `Processes`; by default that of all processes.

    Returns:
        The handle of the hook, whose ``remove()`` takes it back.

    >>> from torchngvi import VN, CholeskyGaussian
    >>> handle = sum_gradients(VN(CholeskyGaussian(1), lr=0.1))
    >>> handle.remove()
    """
    read_instance("optimizer", optimizer, torch.optim.Optimizer, "is an optimizer, such as VN(q, lr=0.1)")
    processes = group if isinstance(group, Processes) else Processes(group)
    held = list(itertools.chain.from_iterable(entry["params"] for entry in optimizer.param_groups))

    @torch.no_grad()
    def hook(*_: object) -> None:
        filled: list[Tensor] = [p.grad if p.grad is not None else torch.zeros_like(p) for p in held]
        for parameter, total in zip(held, processes.total(filled), strict=True):
            parameter.grad = total

    return optimizer.register_step_pre_hook(hook)
