"""Passes over batches: predictions under draws, gradients of the losses of labels, and the curvature of all data."""

import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchngvi.arguments import is_size, read_callable, read_size
from torchngvi.distributed import average_over_ranks_, rank, ranks
from torchngvi.errors import InputError
from torchngvi.networks.families import Family, all_finite, generator
from torchngvi.networks.weights import NetworkWeights, warn_caller
from torchngvi.numerics.arrays import ENTRIES_AT_ONCE

Totals = list[list[Tensor | None]]  # of each family its part of a curvature
_MOST = 2**31  # numbers in those of one example: 8 GB in single precision
_REFUSED = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)  # by torch.func, where it cannot
Read = Callable[[Any], Tensor]  # finds the outputs in what a network returns


# ------------------------------------------------------------------------------------ predictions


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
                "One batch is a loader in a list: [(x, y)]; of batches that are dicts, whose rest the network takes by "
                "keyword, make pairs: [(batch, batch.pop('labels')) for batch in loader]."
            )
        yield batch[0], batch[1]


# ------------------------------------------------------------------------------------ the Laplace approximation


class LaplaceResult(NamedTuple):
    """What `NetworkGaussian.laplace` made, and how wide it is.

    Attributes:
        labels: whose curvature was averaged.
        num_data: N, by which that mean is multiplied.
        temperature: T of q; the standard deviations are √T of those of the Laplace approximation of the posterior.

    >>> LaplaceResult(labels=200, num_data=200, temperature=0.05)
    LaplaceResult(labels=200, num_data=200, temperature=0.05: standard deviations are 0.224 of the posterior's;
        torchngvi.calibrate(q, loader) chooses a temperature, and q.temper_(1.0) takes the posterior itself)
    """

    labels: int
    num_data: int
    temperature: float

    def __repr__(self) -> str:
        """Say how wide the posterior is that was made, and what to do about it."""
        wide = ": standard deviations are the posterior's"
        if self.temperature != 1:
            wide = (
                f": standard deviations are {self.temperature**0.5:.3g} of the posterior's;\n    torchngvi.calibrate("
                "q, loader) chooses a temperature, and q.temper_(1.0) takes the posterior itself"
            )
        numbers = f"labels={self.labels:,}, num_data={self.num_data:,}, temperature={self.temperature:g}"
        return f"LaplaceResult({numbers}{wide})"


def settle_(q: NetworkWeights, loader: Iterable[Any], labels: int | None, read: Read | None) -> int:
    """Give each family of q its part of the curvature at the weights that the network holds."""
    if labels is not None and not is_size(labels):
        raise InputError(f"labels is the number of labels drawn for each output, 1 or more, or None; got {labels!r}.")
    count, families = 0, list(q.each())
    last = max(family.passes for family in families) - 1
    moving = [family for family in families if family.passes > 1]
    before = [(buffer, buffer.clone()) for family in moving for buffer in family.buffers()]
    try:
        for family in moving:
            family.restart_(q.observed > 0)
        for number in range(last + 1):
            totals, count = _curvature_of(q, loader, labels, read, number == 0)
            for family, curvature in zip(families, totals, strict=True):
                if number == last or family.passes > 1:
                    family.settle_(curvature)
    except BaseException:
        for buffer, held in before:
            buffer.copy_(held)
        raise
    return count


def _curvature_of(
    q: NetworkWeights, loader: Iterable[Any], labels: int | None, read: Read | None, first: bool
) -> tuple[Totals, int]:
    """The generalised Gauss-Newton matrix a label, H = Σᵢ wᵢ E[gᵢgᵢᵀ]/Σᵢ wᵢ, and the number of labels."""
    totals: Totals = []
    count, weight = 0, 0.0
    with evaluating(q.model):
        for number, (inputs, _) in enumerate(batches(loader)):
            if not size_of(inputs):
                continue
            for own, share, seen in _of_batch(q, inputs, number, labels, read):
                count, weight = count + own, weight + own * share
                for part, new in zip(totals, seen, strict=False):
                    for total, h in zip(part, new, strict=True):
                        if total is not None and h is not None:
                            total += h
                totals = totals or seen
    if not count:
        raise InputError(
            "The loader of laplace is empty; give the training data, or a part of them."
            if first
            else "The loader of laplace can be read only once, and a Kronecker family takes several passes over the "
            "data; give a list of batches or a DataLoader."
        )
    known = [total for part in totals for total in part if total is not None]
    counts, weights = known[0].new_full((), count), known[0].new_full((), weight)
    average_over_ranks_([*known, counts, weights])
    for total in known:
        total /= weights.to(total)
    if not all_finite(known):
        raise InputError(
            "The curvature of the data at the weights of the network is not finite, and the posterior is as it was; "
            "look at the weights and at the inputs."
        )
    count = round(float(counts) * ranks() / (labels or 1))
    if first:
        _warn_of_slips(q, count)
    return totals, count


def _of_batch(
    q: NetworkWeights, inputs: Any, number: int, labels: int | None, read: Read | None
) -> Iterator[tuple[int, float, Totals]]:
    """Numbers of labels, their mean weight, and the sums of their curvatures."""
    trained = _trained(q)
    with torch.enable_grad():
        output = called(q.model, inputs, read)
    weights = q.likelihood.weigh(output)
    share = 1.0 if weights is None else float(weights.mean())
    exact = q.likelihood.curvature_terms(output) if labels is None else None
    if exact is None:
        draws = generator(output.device, q.seed, number, f"labels of rank {rank()} for laplace")
        likelihood = copy.copy(q.likelihood)  # one that remembers nothing of it
        for _ in range(labels or 1):
            with torch.enable_grad():
                losses = likelihood.sampled_losses(output, draws)
                gradients, count = gradients_of_labels(q, losses, output.dtype)
            seen = [family.statistics(_of_family(family, gradients), count) for family in q.each()]
            own = losses.numel()
            yield own, share, [[None if h is None else h * (own * share) for h in part] for part in seen]
        return
    if number == 0:
        _check_apart(q, inputs, output.detach(), read)

    def terms(returned: Any) -> Tensor:
        found = q.likelihood.curvature_terms(read_from(returned, read))
        assert found is not None
        return found

    for gradients in of_examples(q.model, trained, inputs, terms):
        count = len(next(iter(gradients.values())))
        totals: Totals = []
        for family in q.each():
            part = family.statistics(_of_family(family, gradients), count if family.single else 1)
            summed = family.single or family.passes > 1
            totals.append(part if summed else [None if h is None else h.sum(0) for h in part])
        yield count // exact.shape[-1], share, totals


def _of_family(family: Family, gradients: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The gradients of a family's parameters in the dtypes of their means."""
    each = zip(map(gradients.get, family.names), family.mean, strict=True)
    return [None if g is None else g.to(m.dtype) for g, m in each]


@torch.no_grad()
def _check_apart(q: NetworkWeights, inputs: Any, output: Tensor, read: Read | None, same: float = 0.02) -> None:
    """Refuse outputs that depend on the other examples of the batch, by the last one, which is passed alone."""
    # same: of the largest output: an example alone and among others differ by less, by rounding of half precision
    try:
        alone = called(q.model, each_tensor(inputs, operator.itemgetter(slice(-1, None))), read).flatten()
        together = output.flatten()[-len(alone) :]
        meet = bool((alone - together).abs().max() > same * together.abs().max())
    except (RuntimeError, ValueError):  # of a batch of one, or of other shapes
        meet = True
    if meet:
        raise InputError(
            "The outputs for an example are others alone than in its batch: examples meet in the network, as under the "
            "statistics of a batch, are not along the first dimension, or the network is random. Say labels=1, which "
            "draws labels and passes whole batches, or pass the examples first."
        )


def _warn_of_slips(q: NetworkWeights, count: int) -> None:
    """Warn of parameters that are drawn and have no curvature, and of more labels than num_data."""
    trained = q.trained
    frozen = [name for name in q.names if name not in trained]
    if frozen and trained and not q.observed:
        warn_caller(
            f"{len(frozen)} parameters, {frozen[0]!r} the first, were frozen after the posterior was made: laplace "
            "observes no curvature of them, and predictions draw them with the covariance of the prior. Freeze them "
            "before torchngvi.network, which then leaves them as they are."
        )
    warn_of_more_labels(q, count, "their mean curvature is multiplied")


def warn_of_more_labels(q: NetworkWeights, count: int, what: str) -> None:
    """Warn of more labels in a loader than num_data, by which something is multiplied."""
    if count > 1.01 * q.num_data:  # samplers for several processes repeat some
        warn_caller(
            f"The loader has {count:,} labels, more than num_data={q.num_data:,}, by which {what}. num_data is the "
            "number of labels in the training data: every token counts, and every number where there are several a "
            "row. If the loader has none of them twice, make q with that."
        )


def _trained(q: NetworkWeights) -> dict[str, nn.Parameter]:
    """The parameters of q that are not frozen, of which every family whose weights depend on one another has all."""
    trained = q.trained
    if not any(trained.keys() >= set(family.names) or (trained and not family.single) for family in q.each()):
        raise InputError(
            "All parameters of the posterior, or parts of all its dense layers, are frozen, so that laplace has no "
            "curvature to observe; call requires_grad_(True) on what is to be uncertain."
        )
    return trained


def gradients_of_labels(
    q: NetworkWeights, losses: Tensor, dtype: torch.dtype, one_by_one: int = 256
) -> tuple[dict[str, Tensor], float]:
    """Return the gradients that families observe, by name, of the mean loss or of single losses over √B, and B.

    Both are scaled, and B is divided by the square of the scale, where the outputs are of half precision.
    """
    # one_by_one: labels at most whose gradients are computed one by one, through a whole batch
    scale = 1024.0 if dtype == torch.float16 else 1.0  # keeps gradients from vanishing
    trained = q.trained
    gradients: dict[str, Tensor] = {}
    for single in (False, True):
        own = {name: trained[name] for f in q.each() if f.single == single for name in f.names if name in trained}
        if not own:
            continue
        terms, ones = losses.mean() * scale, None
        if single:  # of tokens some are enough
            terms = losses.flatten()[:: -(-losses.numel() // one_by_one)] * (scale / losses.numel() ** 0.5)
            ones = torch.eye(len(terms), device="cpu").to(terms)
        found = torch.autograd.grad(
            terms, list(own.values()), ones, True, is_grads_batched=single, materialize_grads=True
        )
        gradients |= zip(own, found, strict=True)
    return gradients, losses.numel() / scale**2


def of_examples(
    model: nn.Module, parameters: Mapping[str, Tensor], inputs: Any, terms: Callable[[Any], Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Iterate over the gradients of functions of the output, of one example at a time, some examples together."""
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
    size = max(1, ENTRIES_AT_ONCE // numbers)
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
