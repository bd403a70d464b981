"""What GPyTorch's modules keep: values of an older q or kernel, in eval mode until they are cleared, and their modes.

Direct steps move q and the kernels without a call of the model, which is where GPyTorch clears what it keeps.
"""

import contextlib
from collections.abc import Iterator

import gpytorch
import torch


def forget(model: torch.nn.Module) -> None:
    """Clear the caches of every strategy and kernel of a model: the next prediction sees q and the kernels as they are.

    Args:
        model: the model, or any module that holds parts of GPyTorch.
    """
    for module in model.modules():
        if isinstance(module, gpytorch.Module):
            module._clear_cache()


def as_in_predictions(model: torch.nn.Module) -> None:
    """Put the layers of a network within a model in eval mode: without dropout, with the statistics that were kept."""
    for module in model.modules():
        if type(module).__module__.startswith("torch.nn."):
            module.eval()


@contextlib.contextmanager
def kept_modes(*owners: torch.nn.Module) -> Iterator[None]:
    """A block in which models may be evaluated, in any mode.

    >>> model = torch.nn.Sequential(torch.nn.Dropout().eval())
    >>> with kept_modes(model):
    ...     _ = model.eval()
    >>> model.training, model[0].training
    (True, False)
    """
    modes = [(module, module.training) for owner in owners for module in owner.modules()]
    for owner in owners:
        forget(owner)
    try:
        yield
    finally:
        for module, training in modes:  # a module before its parts, whose own mode comes last
            module.train(training)
        for owner in owners:
            forget(owner)
