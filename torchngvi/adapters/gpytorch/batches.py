"""Batches of data: pairs (x, y), each held against the model before it is used."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

from torchngvi.adapters.gpytorch.latents import Latents
from torchngvi.arguments import read_instance, shown
from torchngvi.errors import InputError, PairError

_OF_ONE_TASK = (
    "For rows of one task each take a model of one function with the number of the task among the inputs, and a kernel "
    "such as RBFKernel(active_dims=[0]) * IndexKernel(num_tasks=3, active_dims=[1])."
)
Batch = tuple[Tensor, Tensor]  # x (*batch, B, features), y (*batch, B), or (B, tasks)


def count(
    x: Tensor,  # (*batch, B, features), or (B,)
) -> int:
    """The number of rows B of a batch of inputs."""
    return x.shape[-1 if x.ndim == 1 else -2]


def check_num_data(num_data: float, rows: int) -> None:
    """Check that a batch has no more rows than all of the data."""
    if rows > num_data:
        raise InputError(
            f"num_data counts the rows of the whole data, and is {num_data:g} where one batch has {rows} rows: the KL "
            f"divergence would weigh {rows / num_data:.3g} times as much as it should, or more. Give "
            "len(train_x), and not the number of batches."
        )


def row_dimension(
    y: Tensor,
    latents: Latents,
) -> int:
    """The dimension of the targets that runs over the rows."""
    return -2 if latents.coupled and y.ndim > 1 else -1


def pairs(batches: Iterable[Any], latents: Latents) -> Iterator[Batch]:
    """The batches one after another, each checked against the model before it is used."""
    features = latents.strategy.inducing_points.shape[-1]
    if isinstance(batches, str | bytes | type) or not hasattr(batches, "__iter__") or getattr(batches, "ndim", 1) == 0:
        raise InputError(f"batches is a DataLoader or a list of pairs (x, y) of tensors; got {shown(batches)}.")
    for batch in batches:
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            what = ", ".join(type(part).__name__ for part in parts)
            arrays = "torch.as_tensor(x) and torch.as_tensor(y) of arrays, " * any(
                _is_array(part) and not isinstance(part, Tensor) for part in parts
            )
            raise InputError(
                f"batches are pairs (x, y) of tensors; got {what}. Give {arrays}a DataLoader over TensorDataset(x, y), "
                f"or [(x, y)] for all data at once. {_OF_ONE_TASK if latents.coupled else ''}".rstrip()
            )
        x, y = (part.detach() if part.requires_grad else part for part in parts)
        if x.ndim == 0 or count(x) == 0:
            raise InputError(
                f"a batch has inputs of shape {tuple(x.shape)}, which are no rows: give x as (rows, features)."
            )
        if x.ndim > 1 and x.shape[-1] != features or x.ndim == 1 and features != 1:
            raise InputError(
                f"the inducing points have {features} features; got inputs of shape {tuple(x.shape)}. "
                "Give x as (rows, features)."
            )
        own = latents.strategy.inducing_points.dtype
        if x.is_floating_point() and torch.promote_types(x.dtype, own) != own:
            raise InputError(
                f"the inputs are in {x.dtype} and the model is in {own}: call model.double() and "
                "likelihood.double(), or give the data in the dtype of the model."
            )
        if y.ndim == 0 or y.shape[row_dimension(y, latents)] != count(x):
            column = " Give y[:, 0] for y." if y.shape == (count(x), 1) else ""
            raise InputError(
                f"a batch has {count(x)} rows of inputs and targets of shape {tuple(y.shape)}: check the shape of the "
                f"targets, (rows,) of one value a datum and (rows, tasks) of several.{column}"
            )
        if latents.each and y.shape[1:] != (latents.count,):
            raise InputError(
                f"the model gives {latents.count} values a datum, with a target for each, (rows, {latents.count}); got "
                f"targets of shape {tuple(y.shape)}. {_OF_ONE_TASK if y.ndim == 1 else ''}".rstrip()
            )
        if latents.one_noise:
            raise PairError(
                f"the likelihood has the noise of one value a datum, and the model gives {latents.count}. Give "
                f"MultitaskGaussianLikelihood(num_tasks={latents.count})."
            )
        if latents.labels and y.ndim > 1:
            raise InputError(
                f"a softmax takes one label a datum, (rows,); got targets of shape {tuple(y.shape)}. Give "
                f"{'y[:, 0]' if y.shape[1:] == (1,) else 'y.argmax(-1) for one-hot rows y'}."
            )
        yield x, y


def _is_array(part: Any) -> bool:
    """Whether something is a tensor, or what NumPy and pandas hold."""
    return hasattr(part, "__array__")


def all_rows(data: Any, latents: Latents) -> Batch:
    """All rows of the data at once."""
    if isinstance(data, DataLoader):
        data = _all_tensors(data) or data
    if type(data) is TensorDataset:
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_array, data)):
        data = [tuple(data)]
    given = [(x[:, None] if x.ndim == 1 else x, y) for x, y in pairs(data, latents)]
    if not given:
        raise InputError("train_svgp got no data: the batches are empty. Give one pair (x, y), or a list of pairs.")
    row = row_dimension(given[0][1], latents)
    return torch.cat([x for x, _ in given], -2), torch.cat([y for _, y in given], row)


def check_call(model: Any, likelihood: Likelihood, data: Any) -> None:
    """Check that the model and the likelihood are such, and that rows with a noise of their own come in their order."""
    read_instance("model", model, torch.nn.Module, "is a model of GPyTorch, such as an ApproximateGP", other=likelihood)
    if isinstance(likelihood, type):
        raise PairError(f"the likelihood is the class {likelihood.__name__}. Call it, and pass what it makes.")
    if not hasattr(likelihood, "expected_log_prob"):
        instead = (
            "mll.likelihood in the place of mll" if hasattr(likelihood, "likelihood") else "one of gpytorch.likelihoods"
        )
        raise PairError(
            "the call takes the model, its likelihood and the data; got "
            f"{type(likelihood).__name__} as the likelihood. Give {instead}."
        )
    if not isinstance(likelihood, FixedNoiseGaussianLikelihood) or not isinstance(data, DataLoader):
        return
    sampler = _sampler(data)
    if sampler is not None and not isinstance(sampler, SequentialSampler):
        raise InputError(
            "FixedNoiseGaussianLikelihood holds a noise for each row in their order, and the DataLoader gives the rows "
            f"in that of a {type(sampler).__name__}. Build it with shuffle=False, or give one pair (x, y)."
        )


def _sampler(loader: DataLoader) -> Any:
    """What draws the rows of a loader, within its batches if it makes them itself."""
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else batches or loader.sampler


def _all_tensors(loader: DataLoader) -> tuple[Tensor, ...] | None:
    """The two tensors of a loader that gives each row of them once, as it is; None of any other."""
    dataset, sampler = loader.dataset, _sampler(loader)
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2 or loader.collate_fn is not default_collate:
        return None
    every = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
    return dataset.tensors if every or type(sampler) is SequentialSampler else None
