"""The curvature of all data at weights that are trained, for the Laplace approximation: passes over data, no step."""

import copy
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchngvi.arguments import is_size
from torchngvi.distributed import average_over_ranks_, rank, ranks
from torchngvi.errors import InputError
from torchngvi.networks.families import Family
from torchngvi.networks.finite import all_finite
from torchngvi.networks.gradients import each_tensor, of_examples, of_labels, size_of
from torchngvi.networks.likelihoods import OutputLikelihood
from torchngvi.networks.noise import generator
from torchngvi.networks.predictions import batches, called, evaluating, read_from

Read = Callable[[Any], Tensor]
Totals = list[list[Tensor | None]]  # of each family its part of a curvature
_SAME = 0.02  # of the largest output: an example alone and among others differ by less, by rounding of half precision
_HALF_SCALE = 1024.0  # keeps gradients of half precision from vanishing


class AtMean(Protocol):
    """What the curvature needs of a posterior whose network holds the mean."""

    likelihood: OutputLikelihood
    names: list[str]
    num_data: int
    observed: int
    parameters_of_network: list[nn.Parameter]
    seed: int

    @property
    def model(self) -> nn.Module:
        """The network."""

    def each(self) -> Iterator[Family]:
        """The families of the posterior."""


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


def settle_(q: AtMean, loader: Iterable[Any], labels: int | None, read: Read | None) -> int:
    """Give each family of q its part of the curvature at the weights that the network holds."""
    count = 0
    families = list(q.each())
    last = max(family.passes for family in families) - 1
    moving = [family for family in families if family.passes > 1]
    before = [(buffer, buffer.clone()) for family in moving for buffer in family.buffers()]
    try:
        for family in moving:
            family.restart_(q.observed > 0)
        for number in range(last + 1):
            totals, count = curvature_of(q, loader, labels, read, number == 0)
            for family, curvature in zip(families, totals, strict=True):
                if number == last or family.passes > 1:
                    family.settle_(curvature)
    except BaseException:
        for buffer, held in before:
            buffer.copy_(held)
        raise
    return count


def curvature_of(
    q: AtMean, loader: Iterable[Any], labels: int | None, read: Read | None, first: bool = True
) -> tuple[Totals, int]:
    """Return the generalised Gauss-Newton matrix a label, H = Σᵢ E[gᵢgᵢᵀ]/n, at the weights that the network holds."""
    if labels is not None and not is_size(labels):
        raise InputError(f"labels is the number of labels drawn for each output, 1 or more, or None; got {labels!r}.")
    totals: Totals = []
    count = 0
    with evaluating(q.model):
        for number, (inputs, _) in enumerate(batches(loader)):
            if not size_of(inputs):
                continue
            for own, seen in _of_batch(q, inputs, number, labels, read):
                count += own
                totals = _sum(totals, seen)
    if not count:
        raise InputError(
            "The loader of laplace is empty; give the training data, or a part of them."
            if first
            else "The loader of laplace can be read only once, and a Kronecker family takes several passes over the "
            "data; give a list of batches or a DataLoader."
        )
    known = [total for part in totals for total in part if total is not None]
    counts = known[0].new_full((), count)
    average_over_ranks_([*known, counts])
    for total in known:
        total /= counts.to(total)
    if not all_finite(known):
        raise InputError(
            "The curvature of the data at the weights of the network is not finite, and the posterior is as it was; "
            "look at the weights and at the inputs."
        )
    number_of_labels = round(float(counts) * ranks() / (labels or 1))
    if first:
        _tell_of_frozen(q)
        _tell_of_number(q, number_of_labels)
    return totals, number_of_labels


def _of_batch(
    q: AtMean, inputs: Any, number: int, labels: int | None, read: Read | None
) -> Iterator[tuple[int, Totals]]:
    """Numbers of labels with the sums of their curvatures."""
    trained = _trained(q)
    with torch.enable_grad():
        output = called(q.model, inputs, read)
    exact = q.likelihood.curvature_terms(output) if labels is None else None
    if exact is None:
        draws = generator(output.device, q.seed, number, f"labels of rank {rank()} for laplace")
        for _ in range(labels or 1):
            yield _drawn(q, output, draws, trained)
        return
    if number == 0:
        _check_apart(q, inputs, output.detach(), read)

    def terms(returned: Any) -> Tensor:
        found = q.likelihood.curvature_terms(read_from(returned, read))
        assert found is not None
        return found

    for gradients in of_examples(q.model, trained, inputs, terms):
        count = len(next(iter(gradients.values())))
        seen = [
            family.statistics(
                [_like(gradients.get(name), m) for name, m in _means(family)], count if family.single else 1
            )
            for family in q.each()
        ]
        summed = [
            part if family.single or family.passes > 1 else [None if h is None else h.sum(0) for h in part]
            for family, part in zip(q.each(), seen, strict=True)
        ]
        yield count // exact.shape[-1], summed


@torch.no_grad()
def _check_apart(q: AtMean, inputs: Any, output: Tensor, read: Read | None) -> None:
    """Refuse outputs that depend on the other examples of the batch, by the last one, which is passed alone."""
    try:
        alone = called(q.model, each_tensor(inputs, operator.itemgetter(slice(-1, None))), read).flatten()
        together = output.flatten()[-len(alone) :]
        meet = bool((alone - together).abs().max() > _SAME * together.abs().max())
    except (RuntimeError, ValueError):  # of a batch of one, or of other shapes
        meet = True
    if meet:
        raise InputError(
            "The outputs for an example are others alone than in its batch: examples meet in the network, as under the "
            "statistics of a batch, are not along the first dimension, or the network is random. Say labels=1, which "
            "draws labels and passes whole batches, or pass the examples first."
        )


def _tell_of_frozen(q: AtMean) -> None:
    """Warn of parameters that are drawn and have no curvature, neither from a training nor from here."""
    frozen = [name for name, p in zip(q.names, q.parameters_of_network, strict=True) if not p.requires_grad]
    if frozen and len(frozen) < len(q.names) and not q.observed:
        warnings.warn(
            f"{len(frozen)} parameters, {frozen[0]!r} the first, were frozen after the posterior was made: laplace "
            "observes no curvature of them, and predictions draw them with the covariance of the prior. Freeze them "
            "before torchngvi.network, which then leaves them as they are.",
            UserWarning,
            stacklevel=5,
        )


def _tell_of_number(q: AtMean, count: int) -> None:
    """Warn of more labels than q was told of, which is as many times too wide."""
    if count > 1.01 * q.num_data:  # samplers for several processes repeat some
        warnings.warn(
            f"The loader of laplace has {count:,} labels, more than num_data={q.num_data:,}, by which their mean "
            "curvature is multiplied. num_data is the number of labels in the training data: every token counts, and "
            "every number where there are several a row. If the loader has none of them twice, make q with that.",
            UserWarning,
            stacklevel=5,
        )


def _trained(q: AtMean) -> dict[str, nn.Parameter]:
    """The parameters of q that are not frozen, of which every family whose weights depend on one another has all."""
    trained = {name: p for name, p in zip(q.names, q.parameters_of_network, strict=True) if p.requires_grad}
    if not any(trained.keys() >= set(family.names) or (trained and not family.single) for family in q.each()):
        raise InputError(
            "All parameters of the posterior, or parts of all its dense layers, are frozen, so that laplace has no "
            "curvature to observe; call requires_grad_(True) on what is to be uncertain."
        )
    return trained


@torch.enable_grad()
def _drawn(q: AtMean, output: Tensor, draws: torch.Generator, trained: dict[str, nn.Parameter]) -> tuple[int, Totals]:
    """The number of labels that were drawn, and the sum of their curvatures as SampledLabels estimates it."""
    losses = copy.copy(q.likelihood).sampled_losses(output, draws)  # of one that remembers nothing of it
    scale = _HALF_SCALE if output.dtype == torch.float16 else 1.0
    gradients: dict[str, Tensor] = {}
    for single in (False, True):
        own = {name: trained[name] for f in q.each() if f.single == single for name in f.names if name in trained}
        if own:
            gradients |= zip(own, of_labels(losses, list(own.values()), single, scale), strict=True)
    found = []
    for family in q.each():
        seen = family.statistics(
            [_like(gradients.get(name), m) for name, m in _means(family)], losses.numel() / scale**2
        )
        found.append([None if h is None else h * losses.numel() for h in seen])
    return losses.numel(), found


def _means(family: Family) -> Iterator[tuple[str, Tensor]]:
    return zip(family.names, family.mean, strict=True)


def _like(gradient: Tensor | None, mean: Tensor) -> Tensor | None:
    """In the dtype of the mean."""
    return None if gradient is None else gradient.to(mean.dtype)


def _sum(totals: Totals, seen: Totals) -> Totals:
    """The sums of corresponding parts; the second where there is no first."""
    for part, own in zip(totals, seen, strict=False):
        for total, new in zip(part, own, strict=True):
            if total is not None and new is not None:
                total += new
    return totals or seen
