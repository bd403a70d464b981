"""What ranks say of their parts of the data, and what has to be the same on all of them."""

from collections.abc import Iterator
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from torchngvi.distributed import Processes
from torchngvi.distributed.prints import shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Additive, AdditiveTractable, Frame, FullPrior, Prior, Raw, Sites, Target
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_prior import Precision
from torchngvi.models.summands import nothing

_ALIKE = (
    *("model", "dtype", "device", "temperature", "classes", "likelihood", "settings of the likelihood"),
    *("number of coefficients", "number of random effects", "prior of the random effects", "prior"),
)
Part = TypeVar("Part", bound=Additive | MixedLogJoint)


def part_of(local: Part | None, num_data: int, processes: Processes) -> "Part | NoRows":
    """Check that the parts of all ranks are of one model, and have all of its rows."""
    with processes.together():
        if local is not None and not isinstance(local, Additive | MixedLogJoint):
            raise InputError(
                f"Sharded takes a model whose data add up, with its prior apart; got {type(local).__name__}. Use "
                "DataLogJoint or PerDatum, or ShardedDraws, which spreads the draws."
            )
        if isinstance(local, MixedLogJoint):
            local.rows.check_one("Sharded")
        if local is not None:
            refuse_sharded(local)
    said = processes.gather(None if local is None else _facts(local))
    known = [(rank, facts) for rank, facts in enumerate(said) if facts is not None]
    if not known:
        raise InputError("no rank has any rows. Pass a model on those that have some.")
    (first, facts), *others = known
    for rank, theirs in others:
        _compare(first, facts, rank, theirs)
    _check_rows([facts["rows"] for _, facts in known], num_data)
    if len(known) < len(said) and facts["alone"]:
        raise InputError(
            f"{facts['model']} needs a part on every rank: a rank without rows is told the prior only where it is "
            "Gaussian, and all that the model adds to its data. Give that rank a row of weight 0."
        )
    processes.agree(**threads())
    return NoRows(facts["prior"], facts["temperature"], facts["classes"]) if local is None else local


def _facts(local: Additive | MixedLogJoint) -> dict[str, Any]:
    """What a rank says of its part."""
    if isinstance(local, MixedLogJoint):
        rows, own, asked = local.rows, local.fixed.prior, local.asked
        alone: dict[str, Any] = {"rows": len(rows.y), "alone": True, "number of random effects": rows.r}
        alone["prior of the random effects"] = _prior_of_effects(local)
        if getattr(local, "learned", None) is not None:  # it begins elsewhere on each rank
            alone["settings of the likelihood"] = {}
        return {
            **_facts(local.fixed),
            "model": type(local).__name__,
            **alone,
            "prior": None if asked.fixed_scale is None else own,
        }
    prior = local.prior if isinstance(local.prior, tuple) else None  # a Gaussian
    dtype = None if prior is None else prior.mean.dtype
    likelihood = getattr(local, "likelihood", None)
    return {
        "model": type(local).__name__,
        "dtype": dtype,
        "device": None if prior is None else prior.mean.device.type,
        "temperature": local.temperature,
        "classes": local.coding,
        "likelihood": None if likelihood is None else type(likelihood).__name__,
        "settings of the likelihood": _numbers_of(likelihood),
        "number of coefficients": getattr(local, "dim", None),
        "prior": None if prior is None else type(prior)(*(part.cpu() for part in prior)),
        "rows": getattr(local, "num_data", None),
        "alone": not isinstance(local, AdditiveTractable) or not local.prior_alone or prior is None,
    }


def _prior_of_effects(local: MixedLogJoint) -> str:
    """The prior of the random effects as it was asked for: one that depends on the data is made of those of all."""
    asked, prior = local.asked, local.covariance_prior
    if asked.usual or isinstance(asked.precision, str):
        return f"{asked.precision or 'the default one'}, {asked.concentration:g}"
    if isinstance(prior, Precision):
        return f"{prior.dof:g}, {shown(prior.scale)}"
    return str(prior.settings())


def _numbers_of(part: object) -> dict[str, float | str]:
    """The numbers and texts among the attributes of a likelihood."""
    held = {} if part is None else vars(part)
    return {name: value for name, value in held.items() if isinstance(value, int | float | str)}


def _compare(first: int, facts: dict[str, Any], rank: int, theirs: dict[str, Any]) -> None:
    """Check what has to be the same."""
    for name in _ALIKE:
        ours, other = facts.get(name), theirs.get(name)
        if name != "prior":
            same, (left, right) = ours == other, (str(ours), str(other))
        elif ours is None or other is None:
            continue
        else:
            same = all(torch.equal(*torch.broadcast_tensors(a, b)) for a, b in zip(ours, other, strict=True))
            left, right = (f"precision {float(prior.precision.flatten()[0]):g}" for prior in (ours, other))
        if not same:
            raise InputError(
                f"all ranks must have the same {name}; got {left} on rank {first}, {right} on rank {rank}."
                + (" Name them on every rank: classes=(0, 1)." if name == "classes" else "")
            )


def _check_rows(rows: list[int | None], num_data: int) -> None:
    counted = [number for number in rows if number is not None]
    if len(counted) == len(rows) and sum(counted) != num_data:
        raise InputError(
            f"the parts have {sum(counted)} rows together ({', '.join(map(str, counted))}), where num_data is "
            f"{num_data}: give every row to one rank. A DistributedSampler repeats rows to make parts equal."
        )


def refuse_sharded(target: Target) -> None:
    """Refuse a target that is sharded already."""
    if target.processes is not None:
        raise InputError(f"{type(target).__name__} is evaluated by several processes already. Wrap it once.")


def threads() -> dict[str, Any]:
    """What else the bits of a sum depend on: the number of threads, by the name that a message gives it."""
    return {"number of threads (torch.set_num_threads)": torch.get_num_threads()}


@final
class NoRows(AdditiveTractable):
    """The part of a rank that has no rows: zeros, and the prior of the others.

    >>> part = NoRows(Prior(torch.zeros(1), torch.ones(1)), 1.0, ())
    >>> part.data_log_likelihood(torch.ones(3, 1)).tolist()
    [0.0, 0.0, 0.0]
    """

    def __init__(self, prior: Prior | FullPrior, temperature: float, coding: tuple[float, ...]) -> None:
        self.prior, self.temperature, self.coding = prior, temperature, coding

    def data_energy(self, frame: Frame) -> tuple[Tensor, Raw | Sites]:
        """Return zeros, as functions of the frame."""
        value, g, H = nothing(frame, False)[:3]
        return value + 0 * (frame.mean.sum(-1) + frame.root.sum()), Raw(g, H)

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Return zeros, (*sample, *batch)."""
        return 0 * theta.sum(-1)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the prior."""
        return tuple(self.prior)

    def pieces(self) -> Iterator[Additive]:
        """Yield nothing."""
        return iter(())
