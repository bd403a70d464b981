"""What a training run was called with, in words: to tell whether a checkpoint is of this run."""

from collections.abc import Iterable

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torchngvi.adapters.gpytorch.batches import Batch
from torchngvi.fitting.checkpoints import describe, describe_data, describe_tensors, describe_torch_optimizer


def of_run(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int,
    hyper: torch.optim.Optimizer,
) -> dict[str, str]:
    """The settings of a run in batches, in words: model, kernels, likelihood, hyper-optimizer, data in memory."""
    settings = {"method": "train_svgp", "num_data": str(num_data), **of_model(model, likelihood)}
    if isinstance(batches, DataLoader):
        size = getattr(batches.batch_sampler, "batch_size", None)
        settings["batch size"] = describe(size)
    return settings | describe_torch_optimizer("hyper_optimizer", hyper) | describe_data(_data(batches))


def of_model(model: ApproximateGP, likelihood: Likelihood) -> dict[str, str]:
    """The settings of a model in words: its modules and theirs, its kernels, the shapes of its tensors."""
    settings: dict[str, str] = {}
    for name, module in (("model", model), ("likelihood", likelihood)):
        settings |= {f"{name} {path}".strip(): type(part).__name__ for path, part in module.named_modules()}
        settings |= describe_tensors(name, module.state_dict())
    for path, kernel in model.named_modules():
        if isinstance(kernel, Kernel):  # what is no parameter, such as the smoothness ν of a Matérn kernel
            settings |= {
                f"model {path} {name}": describe(value)
                for name, value in sorted(vars(kernel).items())
                if not name.startswith("_") and name != "training" and isinstance(value, bool | int | float | str)
            }
    return settings


def _data(batches: Iterable[Batch]) -> tuple[Tensor, ...]:
    """The data where they are in memory and have an order."""
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, TensorDataset):
        return batches.dataset.tensors
    pairs = batches if isinstance(batches, list | tuple) else ()
    return tuple(part for pair in pairs if isinstance(pair, tuple | list) for part in pair if isinstance(part, Tensor))
