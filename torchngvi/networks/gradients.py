"""Gradients of the losses of labels: of their mean, of some of them one by one, or of single examples."""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.errors import InputError

_SINGLE = 256  # labels at most whose gradients are computed one by one, through a whole batch
_NUMBERS = 2**24  # in the gradients of examples that are held at a time: 64 MB in single precision
_MOST = 2**31  # numbers in those of one example: 8 GB in single precision
_REFUSED = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)  # by torch.func, where it cannot


def of_labels(losses: Tensor, parameters: Sequence[nn.Parameter], single: bool, scale: float = 1.0) -> Sequence[Tensor]:
    """Return the gradients of the mean loss, or those of single losses over √B, whose squares have the same sum."""
    if not single:
        return torch.autograd.grad(losses.mean() * scale, parameters, retain_graph=True, materialize_grads=True)
    every = losses.flatten()[:: -(-losses.numel() // _SINGLE)]  # of tokens some are enough
    each = every * (scale / losses.numel() ** 0.5)
    return torch.autograd.grad(
        each,
        parameters,
        torch.eye(len(each), device="cpu").to(each),
        True,
        is_grads_batched=True,
        materialize_grads=True,
    )


def of_examples(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    inputs: Any,
    terms: Callable[[Any], Tensor],
) -> Iterator[dict[str, Tensor]]:
    """Iterate over the gradients of functions of the output, of one example at a time, some examples together.

    >>> model, x = nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> [found["weight"].tolist() for found in of_examples(model, dict(model.named_parameters()), x, lambda out: out)]
    [[[[1.0, 2.0]], [[3.0, 4.0]]]]
    """
    held = {name: p.detach() for name, p in parameters.items()}

    def of_one(given: dict[str, Tensor], one: Any) -> Tensor:
        batch = each_tensor(one, lambda tensor: tensor[None])
        arguments, keywords = ((), batch) if isinstance(batch, dict) else (batch, None)
        return terms(torch.func.functional_call(model, given, arguments, keywords)).flatten()

    places = each_tensor(inputs, lambda tensor: 0, None)
    jacobian = torch.func.vmap(torch.func.jacrev(of_one), in_dims=(None, places), randomness="different")
    with torch.no_grad():
        count = of_one(held, each_tensor(inputs, operator.itemgetter(0))).numel()
    numbers = count * sum(p.numel() for p in held.values())
    if numbers > _MOST:
        raise InputError(
            f"The expectation over all labels takes {numbers:,} derivatives of an example; say labels=1, which draws "
            "labels and passes back once a batch."
        )
    size = max(1, _NUMBERS // numbers)
    for at in range(0, size_of(inputs), size):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # of operations that run one by one
                found = jacobian(held, each_tensor(inputs, operator.itemgetter(slice(at, at + size))))
        except _REFUSED as error:
            raise InputError(
                f"torch.func cannot take the derivatives of this network by single examples: {str(error)[:200]!r}. Say "
                "labels=1, which draws labels and passes back through whole batches."
            ) from error
        yield {name: g.detach().flatten(0, 1) for name, g in found.items()}


def each_tensor(inputs: Any, change: Callable[[Tensor], Any], *other: Any) -> Any:
    """Return a batch with every tensor changed."""
    if isinstance(inputs, dict):
        return {name: each_tensor(part, change, *other) for name, part in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(each_tensor(part, change, *other) for part in inputs)
    if isinstance(inputs, Tensor):
        return change(inputs)
    return other[0] if other else inputs


def size_of(inputs: Any) -> int:
    """Return the number of examples in a batch, the length of its first tensor; 1 where it has none."""
    sizes: list[int] = []
    each_tensor(inputs, lambda tensor: sizes.extend(tensor.shape[:1]))
    return sizes[0] if sizes else 1
