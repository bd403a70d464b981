"""What GPyTorch's modules keep: values of an older q or kernel, in eval mode until they are cleared, and their modes.

Direct steps move q and the kernels without a call of the model, which is where GPyTorch clears what it keeps.
"""

import contextlib
from collections.abc import Iterator

import gpytorch
import torch


def forget(model: torch.nn.Module) -> None:
    """Clear the memory of every strategy and kernel of a model: the next prediction sees q and kernels as they are."""
    for module in model.modules():
        if isinstance(module, gpytorch.Module):
            module._clear_cache()


@contextlib.contextmanager
def kept_modes(*owners: torch.nn.Module) -> Iterator[None]:
    """Inside, the models may be evaluated, in any mode; before and after they remember nothing, and modes are restored.

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
