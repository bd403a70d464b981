"""The log joint of a Pyro model whose rows come in batches: one pass over all of them, as a `DataLogJoint`.

    log p(θ, y) = log p(θ) + Σ_batches Σ_rows log p(y_row | θ)

The model runs once for the first term, with its rows masked, and once a batch for the others, with everything else
masked; the factors N/B by which plates scale a subsample are taken out again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.guide import AutoGaussian
from torchngvi.adapters.pyro.layout import Layout, is_subsampled, listed, random_sites
from torchngvi.errors import InputError
from torchngvi.models import DataLogJoint
from torchngvi.models.data_log_joint import check_batches, rows_of, some_of

_SAME = 1e-4  # relative error at which two sums of the same rows differ


@final
class Portion(Messenger):
    """A messenger that keeps the density of the rows of a model, or that of everything else, and masks the other.

    Attributes:
        index: which members of the plate are the rows of this run, at most as many as it subsamples.
    """

    def __init__(self, rows: bool, plate: str | None = None) -> None:
        super().__init__()
        self.rows, self.plate = rows, plate
        self.index: Tensor | None = None

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            size = msg["fn"].subsample_size
            if msg["value"] is None and size is not None and size < msg["fn"].size:
                msg["value"] = self._members(msg["name"], size)
            return
        frames = [frame for frame in msg["cond_indep_stack"] if self.plate is None or frame.name == self.plate]
        if (bool(frames) if self.plate else msg["is_observed"]) != self.rows:
            msg["mask"] = False
        elif self.rows:
            for frame in filter(is_subsampled, frames):
                msg["scale"] = msg["scale"] * frame.size / frame.full_size
                if self.index is not None and len(self.index) < frame.size:
                    real = torch.arange(frame.size, device=msg["value"].device) < len(self.index)
                    real = real.reshape(-1, *(1,) * (-frame.dim - 1))
                    msg["mask"] = real if msg["mask"] is None else msg["mask"] & real

    def _members(self, name: str, size: int) -> Tensor:
        """As many as the plate subsamples; those that fill up a last batch are masked."""
        if name != self.plate or self.index is None:
            return torch.arange(size)
        return torch.cat([self.index, self.index[:1].expand(size - len(self.index))])


def subsampled_plate(density: ModelLogJoint) -> tuple[str, int, int] | None:
    """The one plate of a model that subsamples its members."""
    trace = density.trace(density.unpack(density.initial))
    found = {
        frame.name: (frame.name, frame.full_size, frame.size)
        for site in random_sites(trace)
        for frame in site["cond_indep_stack"]
        if is_subsampled(frame)
    }
    if len(found) > 1:
        raise InputError(
            f"the plates {listed(found)} all subsample, and a pass goes over one. Pass all data of the others, or "
            "take the steps of NaturalSVI."
        )
    if found:
        _check_not_enumerated(density)
    return next(iter(found.values()), None)


def pass_over_plate(
    model: Callable[..., Any],
    guide: AutoGaussian,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plate: tuple[str, int, int],
) -> DataLogJoint:
    """The log joint of all members of a plate that subsamples them, so many at once as it does."""
    name, members, size = plate
    prior, rows, portion = _portions(model, guide, args, kwargs, name)
    order = torch.randperm(members, generator=torch.Generator().manual_seed(0))
    for portion.index in order.split(size):
        rows.on(*args, **kwargs).validate(f"at its initial point, on some members of the plate {name!r}")

    def log_likelihood(theta: Tensor, index: Tensor) -> Tensor:
        portion.index = index
        return _without_jacobian(rows, theta)

    return DataLogJoint(log_likelihood, prior.log_joint, order.split(size), members)


def pass_over_batches(
    model: Callable[..., Any],
    guide: AutoGaussian,
    batches: Iterable[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[DataLogJoint, Layout]:
    """The log joint of all rows of batches that are arguments of the model."""
    check_batches(batches, 1)
    sizes = [rows_of(batch) for batch in batches]
    check_batches(batches, sum(sizes))
    first = next(iter(batches))
    guide.setup(*_positional(first, args), **_named(first, kwargs))
    prior, rows, _ = _portions(model, guide, _positional(first, args), _named(first, kwargs), None)

    def log_likelihood(theta: Tensor, batch: Any) -> Tensor:
        rows.on(*_positional(batch, args), **_named(batch, kwargs))
        return _without_jacobian(rows, theta)

    for number, batch in enumerate(batches, 1):
        rows.on(*_positional(batch, args), **_named(batch, kwargs)).validate(f"at its initial point, on batch {number}")
    if sizes[0] > 1:
        _check_sum(log_likelihood, prior.initial[None], first, sizes[0])
    return DataLogJoint(log_likelihood, prior.log_joint, batches, sum(sizes)), prior.layout


def _portions(
    model: Callable[..., Any],
    guide: AutoGaussian,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plate: str | None,
) -> tuple[ModelLogJoint, ModelLogJoint, Portion]:
    """The log joint without rows, that of the rows alone, and the messenger that says which rows."""
    portion = Portion(True, plate)
    prior = guide.density(Portion(False, plate)(model), args, kwargs)
    rows = guide.density(portion(model), args, kwargs)
    _check_not_enumerated(rows)
    for density in (prior, rows):
        density.comparable = True  # every run sees the rows that it is given
        density.check_comparable("fit_guide")
    return prior, rows, portion


def _without_jacobian(density: ModelLogJoint, theta: Tensor) -> Tensor:
    """The log joint without log|∂x/∂θ|, which goes with the prior."""
    return density.log_joint(theta) - density.layout.constrained(theta)[1].to(theta.dtype)


def _check_not_enumerated(density: ModelLogJoint) -> None:
    if density.enumerates:
        raise InputError(
            "fit_guide does not sum out discrete sites in a model whose rows come in batches. Pass all data, or take "
            "the steps of NaturalSVI."
        )


@torch.no_grad()
def _check_sum(log_likelihood: Callable[[Tensor, Any], Tensor], theta: Tensor, batch: Any, size: int) -> None:
    halves = [some_of(batch, slice(0, size // 2)), some_of(batch, slice(size // 2, size))]
    whole, parts = float(log_likelihood(theta, batch)), sum(float(log_likelihood(theta, half)) for half in halves)
    if abs(whole - parts) > _SAME * max(abs(whole), 1.0):
        raise InputError(
            f"the observed sites must be a sum over the rows of a batch; a batch gives {whole:.6g}, its two halves "
            f"together {parts:.6g}. Observe every row in a plate, pyro.plate(name, num_data, subsample_size=len(y)), "
            "without poutine.scale and without pyro.factor outside it."
        )


def _positional(batch: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(batch, Mapping):
        return args
    return (*batch, *args) if isinstance(batch, tuple | list) else (batch, *args)


def _named(batch: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**batch, **kwargs} if isinstance(batch, Mapping) else kwargs
