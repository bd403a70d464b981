"""Gradients of the losses of labels: of their mean, of some of them one by one, or of single examples."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SINGLE = 256  # labels at most whose gradients are computed one by one, through a whole batch
_NUMBERS = 2**24  # in the gradients of examples that are held at a time: 64 MB in single precision


def of_labels(losses: Tensor, parameters: Sequence[nn.Parameter], single: bool, scale: float = 1.0) -> Sequence[Tensor]:
    """Return the gradients of the mean loss, or those of single losses over √B, whose squares have the same sum.

    Args:
        losses: of B labels, with their graph, which is kept.
        parameters: that require a gradient.
        single: whether those of single losses are wanted, of 256 at most.
        scale: a factor of the gradients.

    Returns:
        One tensor a parameter, with the labels first where they are single.
    """
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

    Args:
        model: the network, whose examples do not meet.
        parameters: that the gradients are taken of, by name.
        inputs: a batch: a tensor, a tuple of arguments or a dict of keywords, with the examples first.
        terms: the functions of what the network returns for one example.

    Yields:
        By name, the gradients of all functions of some examples, those first.

    >>> model, x = nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> [found["weight"].tolist() for found in of_examples(model, dict(model.named_parameters()), x, lambda out: out)]
    [[[[1.0, 2.0]], [[3.0, 4.0]]]]
    """
    held = {name: p.detach() for name, p in parameters.items()}

    def of_one(given: dict[str, Tensor], one: Any) -> Tensor:
        batch = _each(one, lambda tensor: tensor[None])
        arguments, keywords = ((), batch) if isinstance(batch, dict) else (batch, None)
        return terms(torch.func.functional_call(model, given, arguments, keywords)).flatten()

    jacobian = torch.func.vmap(torch.func.jacrev(of_one), in_dims=(None, 0), randomness="different")
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    first = first[0] if isinstance(first, tuple) else first
    with torch.no_grad():
        count = of_one(held, _each(inputs, operator.itemgetter(0))).numel()
    size = max(1, _NUMBERS // (count * sum(p.numel() for p in held.values())))
    for at in range(0, len(first), size):
        found = jacobian(held, _each(inputs, operator.itemgetter(slice(at, at + size))))
        yield {name: g.detach().flatten(0, 1) for name, g in found.items()}


def _each(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor changed."""
    if isinstance(inputs, dict):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return tuple(change(tensor) for tensor in inputs) if isinstance(inputs, tuple) else change(inputs)
