"""The settings of a run in words, and its data as a number: to tell whether a checkpoint is of this run."""

import ctypes
import hashlib
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchngvi.averaging import Averaging
from torchngvi.expectations.draws import Draws
from torchngvi.fitting.stopping import Criterion
from torchngvi.interfaces import Estimator, Metric, Momentum, Posterior, Rule, StepSize, Target
from torchngvi.numerics import sparse
from torchngvi.optim import NaturalGradientVI

_PARTS = (Rule, StepSize, Estimator, Metric, Momentum, Draws, Averaging, Criterion)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A digest of the dtypes, shapes and entries of tensors, which is the same on every device."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        parts: tuple[Tensor, ...] = (tensor,)
        if sparse.is_sparse(tensor):
            parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        for part in parts:
            whole = part.detach().cpu().contiguous()
            size = whole.numel() * whole.element_size()
            if size:
                digest.update((ctypes.c_char * size).from_address(whole.data_ptr()))
    return digest.hexdigest()


def of_data(tensors: tuple[Tensor, ...]) -> dict[str, str]:
    """The fingerprint of the data, as a setting."""
    return {"fingerprint of the data": fingerprint(tensors)} if tensors else {}


def of_tensors(kind: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """The shape and dtype of each tensor, as settings: ``{'posterior mean': '(3,) float32'}``."""
    return {
        f"{kind} {name}": f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
    }


def of_problem(q: Posterior, target: Target) -> dict[str, str]:
    """The settings of a problem: the class of its target, the tensors of its posterior, and its data."""
    return {"target": type(target).__name__, **of_tensors("posterior", q.state_dict()), **of_data(target.known_data())}


def of_optimizer(optimizer: NaturalGradientVI) -> dict[str, str]:
    """The settings of an optimizer: its class, its parts with their settings, and its learning rates."""
    names = ("step_size", "estimator", "metric", "momentum", "averaging")
    parts = {name: described(getattr(optimizer, name)) for name in names if hasattr(optimizer, name)}
    rates = {
        name: described([_first(group, name) for group in optimizer.param_groups]) for name in ("lr", "loss_scale")
    }
    return {"method": type(optimizer).__name__, "rule": described(optimizer.rule), **parts, **rates}


def of_torch_optimizer(kind: str, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The settings of an optimizer of torch: its class, and what it was built with."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    given = {name: described(value) for name, value in optimizer.defaults.items() if name != "lr" and value}
    return {
        kind: type(optimizer).__name__,
        f"{kind} lr": described([_first(group, "lr") for group in optimizer.param_groups if "lr" in group]),
        **{f"{kind} {name}": text for name, text in given.items()},
        f"shapes in {kind}": described([tuple(parameter.shape) for parameter in held]),
    }


def _first(group: dict[str, Any], name: str) -> object:
    """The setting of a parameter group before any scheduler changed it."""
    return group.get(f"initial_{name}", group[name])


def described(part: object, short: int = 8) -> str:
    """A value, or a part with its settings, in words; of a tensor that is not short its fingerprint.

    >>> from torchngvi import KLRadius
    >>> described(KLRadius(0.5)), described([0.1, None])
    ('KLRadius(radius=0.5)', '[0.1, None]')
    """
    if isinstance(part, Tensor):
        return described(part.tolist()) if part.numel() <= short else fingerprint([part])
    if part is None or isinstance(part, bool | str):
        return repr(part)
    if isinstance(part, numbers.Integral):
        return repr(int(part))
    if isinstance(part, numbers.Real):
        return repr(float(part))
    if isinstance(part, list | tuple):
        return f"[{', '.join(described(item) for item in part)}]"
    if not isinstance(part, _PARTS):
        return type(part).__name__  # of a generator that there is one: its state is saved
    settings = {name: value for name, value in sorted(vars(part).items()) if name[0] != "_" and value is not None}
    return f"{type(part).__name__}({', '.join(f'{name}={described(value)}' for name, value in settings.items())})"
