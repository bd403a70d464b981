"""Predictions under q: outputs averaged over draws of the weights, and the parts of their uncertainty."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchngvi.arguments import read_callable, read_size
from torchngvi.errors import InputError
from torchngvi.networks.weights import NetworkWeights, warn_caller

Read = Callable[[Any], Tensor]  # finds the outputs in what a network returns


class Predictive(NamedTuple):
    """What q predicts for each label.

    Attributes:
        mean: the probabilities of the classes, or the mean of a number.
        epistemic: the uncertainty that more data would remove: the mutual information of label and weights in nats, or
            the variance of the means.  A score for inputs unlike the training data.
        aleatoric: what is left: the mean entropy in nats, or the variance of the noise.
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor

    def __repr__(self) -> str:
        """Say the shape and the two parts in the mean, and not every number."""
        parts = f"epistemic {self.epistemic.mean():.4g}, aleatoric {self.aleatoric.mean():.4g} in the mean"
        return f"Predictive(mean of shape {tuple(self.mean.shape)}; {parts})"

    @property
    def total(self) -> Tensor:
        """The whole uncertainty: the entropy in nats, or the variance."""
        return self.epistemic + self.aleatoric


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode until the block ends; each module has its own mode back then."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def warn_of_no_data(q: NetworkWeights) -> None:
    """Warn of a posterior that has observed no curvature where predictions are asked of it."""
    if not q.observed:
        warn_caller(
            "The posterior has seen no data: its standard deviations are those that it starts from, and its "
            "uncertainty says nothing. Train it with an optimizer and torchngvi.attach, load its own state with that "
            "of the network, or, if the network is trained already, call q.laplace(loader)."
        )


def called(model: nn.Module, inputs: Any, read: Read | None) -> Tensor:
    """Call a network on a batch and return its outputs."""
    positional, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    positional = positional if isinstance(positional, tuple) else (positional,)
    try:
        output = model(*positional, **named)
    except (TypeError, AttributeError) as error:
        kinds = [type(part).__name__ for part in (*positional, *named.values()) if not isinstance(part, Tensor)]
        if not kinds:
            raise
        raise InputError(
            f"The network cannot be called on a {kinds[0]}: {error}. Give one batch as the network takes it: a tensor "
            "(torch.as_tensor(x) of an array of NumPy, in the dtype of the network), a tuple of arguments or a dict of "
            "keywords."
        ) from error
    return read_from(output, read)


def check_function(read: Read, name: str) -> Read:
    """Return what finds the outputs, if it is a function."""
    what = "is a function of what the network returns, as lambda returned: returned[0]"
    return read_callable(name, read, what, arguments="returned")


def logits_in(returned: Any) -> Any:
    """Return the outputs in what a network returned: that itself if it is a tensor, or its entry ``logits``."""
    if isinstance(returned, Tensor):
        return returned
    return returned.get("logits") if isinstance(returned, dict) else getattr(returned, "logits", None)


def read_from(
    returned: Any, read: Read | None, name: str = "read", hint: str = "read=lambda returned: returned[0]"
) -> Tensor:
    """Read the tensor of outputs from what a network returned, by a function of the user where there is one."""
    found = logits_in(returned) if read is None else check_function(read, name)(returned)
    if isinstance(found, Tensor):
        return found
    if read is None:
        raise InputError(
            f"The outputs of the network are needed as one tensor; got a {type(returned).__name__}. Say where they "
            f"are: {hint}."
        )
    raise InputError(f"{name} returns the tensor of outputs; got a {type(found).__name__} from it.")


def drawn_outputs(q: NetworkWeights, inputs: Any, samples: int, read: Read | None) -> Tensor:
    """Return the outputs under draws of the weights, for a caller that has looked whether q has seen data."""
    samples = read_size("samples", samples, "is the number of draws of the weights")
    found = []
    with evaluating(q.model), torch.no_grad():
        for number in range(samples):  # a forward pass of a network fills the device by itself
            with q.drawn(number):
                found.append(called(q.model, inputs, read))
    stacked = torch.stack(found)
    return stacked.to(torch.promote_types(stacked.dtype, torch.float32))  # of half precision, as under autocast


def mean_density(each: Tensor) -> Tensor:
    """Return the log of the mean of densities over draws."""
    return each.logsumexp(0) - math.log(len(each))


def batches(loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Read a loader of (inputs, labels)."""
    try:
        each = iter(loader)
    except TypeError as error:
        raise InputError(
            f"a loader of data is a DataLoader or a list of pairs (inputs, labels); got a {type(loader).__name__}."
        ) from error
    for batch in each:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputError(
                f"a loader of data gives pairs (inputs, labels); got a {type(batch).__name__}. "
                "One batch is a loader in a list: [(x, y)]."
            )
        yield batch[0], batch[1]
