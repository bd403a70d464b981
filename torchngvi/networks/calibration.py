"""The temperature, and the scale of the noise, from validation data: two numbers, after the training."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import CalibrationWarning, InputError
from torchngvi.networks.posterior import NetworkGaussian
from torchngvi.networks.predictions import batches, drawn_outputs, mean_density, warn_of_no_data

_SMALLEST = 2.0**-10  # a posterior 32 times narrower than at the temperature 1 is a point for a network
_FLAT = 0.001  # nats a label: of temperatures that differ by no more the largest is chosen


class Calibrated(NamedTuple):
    """What :func:`calibrate` found.

    Attributes:
        temperature: the one chosen, which q has now.
        nll: its negative log likelihood a label on the validation data, in nats.
        tried: the negative log likelihood by temperature, each with its best factor.
        factor: of the scale of the noise, which the likelihood of q has now; 1 for classes.
    """

    temperature: float
    nll: float
    tried: dict[float, float]
    factor: float = 1.0

    def __repr__(self) -> str:
        """Say what was chosen, and from how many."""
        factor = "" if self.factor == 1 else f", factor={self.factor:.3g}"
        return f"Calibrated(temperature={self.temperature:.4g}, nll={self.nll:.4f}{factor}, of {len(self.tried)} tried)"


def calibrate(
    q: NetworkGaussian,
    loader: Iterable[Any],
    samples: int = 16,
    largest: float = 16.0,
    read: Callable[[Any], Tensor] | None = None,
) -> Calibrated:
    """Choose the temperature of q by the likelihood of validation data, after the training and without any more of it.

    V is proportional to the temperature; the mean stays.  The negative log likelihood of the predictions is computed
    for temperatures a factor of two apart, with the same draws for all of them, down from the largest until it has
    risen twice or 2⁻¹⁰ is reached, and the best one is kept, the largest of those that are within 0.001 nats of it.
    Mean-field posteriors at T = 1 are too wide for small data, which the ELBO cannot see.
    Where the labels are numbers with Gaussian noise, a factor of its scale in predictions is chosen with each
    temperature, from ¼ to 64: the noise that is learned from the training data makes up for what the draws of the
    training did there, and for a network that has learned its labels by heart.  A temperature at an end of what was
    tried, a factor of 8 or more, or a noise that was to be learned and has not moved, is a `CalibrationWarning`.

    Args:
        q: the posterior; its temperature is changed, and the factor of its likelihood.
        loader: batches (inputs, labels) of validation data, gone through once a temperature.
        samples: draws of the weights for a prediction.
        largest: the temperature to begin with.
        read: where the tensor of outputs is in what the network returns.

    Returns:
        The temperature chosen, its negative log likelihood, and those of the others.

    Raises:
        InputError: for another kind of posterior, if the loader is empty, the likelihood is not finite at any
            temperature, or `largest` is no number from 2⁻¹⁰ on; the temperature is then as it was.

    >>> import torch
    >>> import torchngvi
    >>> model = torch.nn.Linear(1, 2)
    >>> q = torchngvi.network(model, num_data=20)
    >>> x = torch.zeros(20, 1)
    >>> _ = q.laplace([(x, torch.arange(20) % 2)])
    >>> found = torchngvi.calibrate(q, [(x, torch.arange(20) % 2)], largest=0.05)
    >>> q.temperature == found.temperature
    True
    """
    if not isinstance(q, NetworkGaussian):
        raise InputError(
            f"calibrate takes the posterior from torchngvi.network, and then a loader; got a {type(q).__name__}."
        )
    largest = read_number("largest", largest, "is the temperature to begin with", at_least=_SMALLEST)
    warn_of_no_data(q)
    tried: dict[float, float] = {}
    factors: dict[float, float] = {}
    before, temperature = q.temperature, float(largest)
    try:
        while temperature >= _SMALLEST:
            values = list(tried.values())
            if len(values) > 3 and min(values[-2:]) > min(values[:-2]):  # it has risen twice
                break
            q.temper_(temperature)
            tried[temperature], factors[temperature] = _best(q, loader, samples, read)
            temperature /= 2
    finally:
        q.temper_(before)  # of a loader that fails, as it was
    finite = {t: nll for t, nll in tried.items() if math.isfinite(nll)}
    if not finite:
        raise InputError(f"The likelihood of the validation data is not finite at any temperature tried: {tried}.")
    best = max(t for t, nll in finite.items() if nll <= min(finite.values()) + _FLAT)
    q.temper_(best)
    q.likelihood.factor = factors[best]
    found = Calibrated(best, finite[best], tried, factors[best])
    nearest = min(finite, key=lambda t: abs(math.log(t / before)) if before else t)
    for sentence in filter(None, _ends(found, finite[nearest], q)):
        warnings.warn(sentence, CalibrationWarning, stacklevel=2)
    return found


def _ends(found: Calibrated, trained: float, q: NetworkGaussian, noticed: float = 0.01) -> Iterator[str | None]:
    """What to say of a choice at an end of what was tried, each with what to do."""
    # noticed: nats a label: less between the temperatures of the training and of the choice is not worth a word
    temperature, factor, factors = found.temperature, found.factor, q.likelihood.factors
    smallest, lowest = min(found.tried), min(found.tried.values())
    if trained - found.nll > noticed and temperature == max(found.tried):
        yield (
            f"The temperature chosen, {temperature:g}, is the largest one tried: a wider posterior may predict better. "
            f"Call calibrate with largest={4 * temperature:g}, or train at a higher temperature."
        )
    elif smallest / 2 < _SMALLEST and found.tried[smallest] == lowest < trained - noticed:
        yield (
            f"The temperature chosen, {temperature:g}, is as good as the smallest one tried, to which predictions only "
            "become better: on these validation data the mean alone predicts as well as q does. Its uncertainty is "
            "that of the labels alone; for more of it, train at a lower temperature, or calibrate on more data."
        )
    if len(factors) > 1 and (factor == factors[0] or factor >= 8):
        yield (
            f"The factor of the noise, {factor:.3g}, is far from 1, of {factors[0]:g} to {factors[-1]:g} tried: the "
            "network fits its training labels much more closely than new ones, the scale of the noise is not that of "
            "the labels, or the loss is not that of the likelihood. Train for fewer steps or with a larger "
            "prior_precision, and with networks.Gaussian(scale).loss(output, y), the scale another one or learned."
        )
    yield q.likelihood.doubt()
    yield None if q.ending is None else q.ending()


def _best(
    q: NetworkGaussian, loader: Iterable[Any], samples: int, read: Callable[[Any], Tensor] | None
) -> tuple[float, float]:
    """The mean negative log likelihood of a loader's labels with the best factor of the noise, and that factor."""
    before, factors = q.likelihood.factor, q.likelihood.factors
    totals: list[Tensor | float] = [0.0] * len(factors)
    count: Tensor | float = 0
    try:
        for inputs, y in batches(loader):
            found = drawn_outputs(q, inputs, samples, read)
            for k, factor in enumerate(factors):
                q.likelihood.factor = factor
                each = mean_density(q.likelihood.log_prob(found, y))
                weights = q.likelihood.weigh(found, y)
                totals[k] = totals[k] - (each if weights is None else each * weights).sum()
            count = count + (each.numel() if weights is None else weights.sum())
    finally:
        q.likelihood.factor = before
    if not count:
        raise InputError(
            "The loader of validation data is empty; it is gone through once a temperature, so that it must be a "
            "DataLoader or a list, not a generator."
        )
    means = [float(total) / float(count) for total in totals]
    best = min(range(len(means)), key=lambda k: means[k] if means[k] == means[k] else float("inf"))
    return means[best], factors[best]
