"""Targets that several processes evaluate together: each its rows, or each its share of the draws.

The parts of the data add up, so that the sum of the values and of their derivatives is that of one process with all the
rows, up to the order of summation.  It is the target that sums, in one all-reduce an evaluation; optimizers, step
sizes, criteria and checkpoints are functions of what all ranks have in common, and do the same on each of them.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final, overload

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_instance
from torchngvi.distributed import Processes, shown
from torchngvi.errors import InputError
from torchngvi.interfaces import (
    Additive,
    AdditiveTractable,
    Frame,
    Framed,
    FullPrior,
    Posterior,
    Prior,
    Raw,
    Sites,
    Target,
)
from torchngvi.models.log_joint import LogJoint
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_prior import Precision
from torchngvi.models.streamed import assembled, halved, in_frame, nothing, summands, whole, with_prior

# What ranks say of their parts of the data, and what has to be the same on all of them

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
    counted = [facts["rows"] for _, facts in known]
    if None not in counted and sum(counted) != num_data:
        raise InputError(
            f"the parts have {sum(counted)} rows together ({', '.join(map(str, counted))}), where num_data is "
            f"{num_data}: give every row to one rank. A DistributedSampler repeats rows to make parts equal."
        )
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
        return {
            **_facts(local.fixed),
            "model": type(local).__name__,
            **alone,
            "prior": None if asked.fixed_scale is None else own,
        }
    prior = local.prior if isinstance(local.prior, tuple) else None  # a Gaussian
    dtype = None if prior is None else prior.mean.dtype
    likelihood = getattr(local, "likelihood", None)
    held = {} if likelihood is None else vars(likelihood)
    return {
        "model": type(local).__name__,
        "dtype": dtype,
        "device": None if prior is None else prior.mean.device.type,
        "temperature": local.temperature,
        "classes": local.coding,
        "likelihood": None if likelihood is None else type(likelihood).__name__,
        "settings of the likelihood": {
            name: value for name, value in held.items() if isinstance(value, int | float | str)
        },
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


def refuse_sharded(target: Target) -> None:
    """Refuse a target that is sharded already."""
    if target.processes is not None:
        raise InputError(f"{type(target).__name__} is evaluated by several processes already. Wrap it once.")


def threads() -> dict[str, Any]:
    """What else the bits of a sum depend on: the number of threads, by the name that a message gives it."""
    return {"number of threads (torch.set_num_threads)": torch.get_num_threads()}


@final
class NoRows(AdditiveTractable):
    """The part of a rank that has no rows: zeros, and the prior of the others."""

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


# Values of a log joint to which several processes contribute, with their gradients in one all-reduce


class Together(Target):
    """The abstract base of a log joint, or of that of the data, to which every rank contributes a part."""

    processes: Processes
    _refused: Exception | None = None  # by a check on this rank, passed to the others at the next sum

    @abstractmethod
    def mine(self, theta: Tensor) -> Tensor:
        """Compute what this rank contributes at θ, (*sample, *batch), differentiable in θ."""

    def value(self, theta: Tensor) -> Tensor:
        """Sum what the ranks contribute, differentiable where gradients are recorded."""
        if torch.is_grad_enabled() and theta.requires_grad:
            total: Tensor = _Summed.apply(theta, self)
            return total
        return self.summed(lambda: [self.mine(theta)], theta)[0]

    def summed(self, parts: Callable[[], list[Tensor]], *key: Tensor) -> list[Tensor]:
        """Sum over the ranks what a call gives on each; an error of it is raised on all of them."""
        error, self._refused = self._refused, None
        return self.processes.summed(parts, key, error)

    def checked(self, check: Callable[[], None]) -> None:
        """Check on this rank: the others learn what is refused at the next sum, so that no one waits."""
        try:
            check()
        except Exception as error:
            if self.processes.world == 1:
                raise
            self._refused = error


class _Summed(torch.autograd.Function):
    """The sum over ranks, with its gradient in the same all-reduce."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, target: Together) -> Tensor:
        def parts() -> list[Tensor]:
            with torch.enable_grad():
                copy = theta.detach().requires_grad_()
                value = target.mine(copy)
                slope = None
                if value.requires_grad:
                    (slope,) = torch.autograd.grad(value.sum(), copy, allow_unused=True)
            reached = value.new_full((1,), float(slope is not None))
            return [value.detach(), torch.zeros_like(copy) if slope is None else slope, reached]

        value, gradient, reached = target.summed(parts, theta)
        if not bool(reached > 0):
            raise InputError(
                "the log joint does not depend on theta on any rank. Compute it from the theta it is given, by torch "
                "operations without detach(), item() or NumPy."
            )
        ctx.target = target
        ctx.save_for_backward(theta, gradient)
        return value

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None]:
        theta, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is differentiated again: by a graph, with a sum in every pass
            value = _Total.apply(ctx.target.mine(_Spread.apply(theta, ctx.target)), ctx.target)
            return torch.autograd.grad(value, theta, weight, create_graph=True)[0], None
        return weight[..., None] * gradient, None


class _Total(torch.autograd.Function):
    """Summed over ranks forwards, handed through backwards; an error on one rank in a backward pass stays there."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Together) -> Tensor:
        ctx.target = target
        return target.processes.total([part])[0].clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(weight, ctx.target), None


class _Spread(torch.autograd.Function):
    """Handed through forwards, summed over ranks backwards."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, target: Together) -> Tensor:
        ctx.target = target
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(weight, ctx.target), None


Mixed = TypeVar("Mixed", bound=MixedLogJoint)


class _ShardedRows(Additive, Together):
    """The data of all ranks, with the prior once."""

    local: Additive

    def _take(self, local: Additive, processes: Processes, num_data: int) -> None:
        """Take what the target has from the part of this rank, after a check of the arguments."""
        read_instance("local", local, Additive, "is the model of the rows of this process")
        read_instance("processes", processes, Processes, "are those that sum, Processes()")
        self.num_data = read_count("num_data", num_data, "counts the rows of all processes")
        self.processes, self.prior = processes, local.prior
        self.temperature, self.comparable, self.coding = local.temperature, local.comparable, local.coding
        self.draws_at_once, self.batches, self.in_passes = local.draws_at_once, local.batches, local.in_passes

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Sum the log likelihood over the rows of all ranks, (*sample, *batch)."""
        return self.value(theta)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Compute what the prior adds to the log joint, (*sample, *batch), the same on every rank."""
        return self.local.log_prior(theta)

    def check(self, q: Posterior) -> None:
        """Check q as the part of this rank does; where it refuses, every rank will, at the next evaluation."""
        self.checked(lambda: self.local.check(q))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of this rank's part."""
        return self.local.tensors()

    def settings(self) -> tuple[object, ...]:
        """Return the settings of this rank's part."""
        return self.local.settings()

    def known_data(self) -> tuple[Tensor, ...]:
        """Return nothing: of the rows of other ranks the value of the loss tells, at any number of ranks."""
        return ()

    def mine(self, theta: Tensor) -> Tensor:
        """Return the log likelihood of the rows of this rank."""
        return self.local.data_log_likelihood(theta)


@final
class ShardedLogJoint(_ShardedRows):
    """A log joint whose rows are spread over processes; `Sharded` makes it.

    Args:
        local: the part of this rank.
        processes: the processes that sum.
        num_data: the number of rows of all of them.

    >>> from torchngvi.models import PerDatum
    >>> y = torch.tensor([0.0, 2.0])
    >>> part = PerDatum(lambda theta: -0.5 * (y - theta).square(), lambda theta: -0.5 * theta.square().sum(-1), 1.0)
    >>> Sharded(part, 2).log_joint(torch.zeros(1, 1)).item()
    -2.0
    """

    def __init__(self, local: Additive, processes: Processes, num_data: int) -> None:
        self._take(local, processes, num_data)
        self.local = local


@final
class ShardedTractable(AdditiveTractable, _ShardedRows):
    """A model with known expectations whose rows are spread over processes; `Sharded` makes it.

    Args:
        local: the part of this rank.
        processes: the processes that sum.
        num_data: the number of rows of all of them.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> bool(Sharded(model, 2).negative_elbo(q) == model.negative_elbo(q))
    True
    """

    def __init__(self, local: AdditiveTractable, processes: Processes, num_data: int) -> None:
        self._take(local, processes, num_data)
        self.local: AdditiveTractable = local
        self.prior_alone = local.prior_alone
        here = isinstance(local, NoRows) or (local.curved and local.prior_alone)
        self.convex = all(processes.gather(here))

    def second_order(self, theta: Tensor) -> tuple[Tensor, Raw]:
        """Sum ℓ(θ), (*batch,), with ∇ℓ and ∇²ℓ over the rows of all ranks, in one all-reduce, the prior once."""
        prior = self.prior
        assert not isinstance(prior, Target)  # parts of a convex ℓ have a Gaussian one
        prior = prior.scaled(self.temperature)
        energy, g, H = (
            self.temperature * self.prior.energy(theta),
            prior.force(theta),
            prior.add_to(theta.new_zeros(*theta.shape, theta.shape[-1])),
        )

        def parts() -> list[Tensor]:
            if isinstance(self.local, NoRows):
                return [torch.zeros_like(energy), torch.zeros_like(theta), torch.zeros_like(H)]
            value, derivative = self.local.second_order(theta)
            assert not isinstance(derivative, Framed)
            return [all_ - own for all_, own in zip((value, *derivative.raw()[:2]), (energy, g, H), strict=True)]

        value, slope, curvature = self.summed(parts, theta)
        return value + energy, Raw(slope + g, curvature + H)

    def data_energy(self, frame: Frame) -> tuple[Tensor, Any]:
        """Sum the expectation of the data over all ranks, with its derivative, in one all-reduce."""
        framed = in_frame(self, frame)
        parts = self.summed(lambda: halved(summands(self.local, frame, framed), framed), frame.mean, frame.root)
        return assembled(frame, whole(parts, framed), framed)

    def with_prior(self, frame: Frame, value: Tensor, derivative: Any) -> tuple[Tensor, Any]:
        """Add the prior of the model once, the same on every rank."""
        if in_frame(self, frame):
            return with_prior(self.local, frame, value, derivative)
        return self.local.with_prior(frame, value, derivative)


@final
class ShardedDraws(Together):
    """A log joint whose draws are spread over processes, each of which has all the data.

    Use it for a costly log joint that does not split into rows: of S draws of θ each of R processes evaluates
    S/R, and one all-reduce hands the values and gradients to all.  Every rank draws the same θ: give the generator of
    an estimator the same seed on all of them, or none; `torchngvi.fit` takes the leader's.

    Args:
        target: the log joint, or a function of θ (S, D) -> (S,), the same on every rank.
        group: a group of torch.distributed, or a `Processes`; by default that of all processes.

    Raises:
        InputError: a target that several processes evaluate already; temperatures that differ.

    >>> target = ShardedDraws(lambda theta: -0.5 * theta.square().sum(-1))
    >>> target.log_joint(torch.ones(3, 2)).tolist()
    [-1.0, -1.0, -1.0]
    """

    def __init__(self, target: Target | Callable[[Tensor], Tensor], group: Any = None) -> None:
        target = target if isinstance(target, Target) else LogJoint(target)
        refuse_sharded(target)
        self.target, self.processes = target, group if isinstance(group, Processes) else Processes(group)
        self.processes.agree(target=type(target).__name__, temperature=target.temperature, **threads())
        self.temperature, self.comparable = target.temperature, target.comparable
        self.draws_at_once = min(self.processes.world * target.draws_at_once, 2**62)
        self.batches, self.in_passes = target.batches, target.in_passes

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute the log joint at every draw, (*sample, *batch), a share of the draws on each rank."""
        return self.value(theta)

    def mine(self, theta: Tensor) -> Tensor:
        """Return the values of this rank's draws, between zeros; draws are the first dimension."""
        processes, count = self.processes, len(theta)
        low, high = (count * (processes.rank + k) // processes.world for k in (0, 1))
        blank = theta.new_zeros(theta.shape[:-1])
        if low == high:
            return blank
        return torch.cat([blank[:low], self.target.log_joint(theta[low:high]), blank[high:]])

    def check(self, q: Posterior) -> None:
        """Check q as the target does; where it refuses on one rank, every rank will."""
        self.checked(lambda: self.target.check(q))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the target."""
        return self.target.tensors()

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the target."""
        return self.target.settings()

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors that tell the problem of the target from another."""
        return self.target.known_data()


@overload
def Sharded(local: Mixed, num_data: int, group: Any = None) -> Mixed:
    """Of mixed models one of their kind."""


@overload
def Sharded(local: Additive | None, num_data: int, group: Any = None) -> ShardedLogJoint | ShardedTractable:
    """Of other models a target, with exact expectations where the parts have them."""


def Sharded(
    local: Additive | MixedLogJoint | None, num_data: int, group: Any = None
) -> ShardedLogJoint | ShardedTractable | MixedLogJoint:
    """Make one target of the rows of several processes, of which each has a part.

    Use it for more rows than one process can hold or get through in time.  Every rank builds a model of its own
    rows with the whole prior; the sharded target is that of all rows with the prior counted once, to rounding, for
    ``fit`` and for any optimizer.  An evaluation is one all-reduce of 1 + D + D(D + 1)/2 numbers for a dense q, 1 + 2D
    for a mean field, and S(D + 1) for S draws of a log joint.  Without a process group, in one process, it is the part
    itself.

    Of a mixed model each rank has groups of its own, numbered from 0 there, with all of their rows.  It is the same
    kind of model again, for ``fit(model.posterior(), model)``; each rank holds a q over the effects of its own groups
    and over the globals, of which the latter is the same everywhere.  An evaluation is one all-reduce of 2 + P + P²
    numbers for P globals, however many groups there are; see `torchngvi.models.mixed_batches`.

    Parts need not have the same number of rows.  Do not take them by a ``DistributedSampler``, which repeats rows.

    Args:
        local: the part of this rank, such as a `GeneralizedLinear` with ``classes=``, a `Streamed` model, a
            `DataLogJoint`, a `PerDatum` or a `torchngvi.models.MixedLogJoint`; None on a rank without rows, where the
            model has a Gaussian prior.
        num_data: the number of rows on all ranks together, which is checked where parts count their rows.
        group: a group of torch.distributed, or a `Processes`; by default that of all processes.

    Returns:
        A target with exact expectations where the parts have them, otherwise a log joint; of a mixed model another one.

    Raises:
        InputError: on every rank, where a part is no sum over data, where parts have other priors, temperatures,
            dtypes or classes, or other rows than ``num_data`` in all; where ranks compute with other numbers of
            threads, since then they would not find the same bits.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> part = GeneralizedLinear(torch.eye(2).double(), [1.0, 0.0], classes=(0, 1))
    >>> fit(CholeskyGaussian(2, dtype=torch.float64), Sharded(part, num_data=2), progress=False).converged
    True
    """
    processes = group if isinstance(group, Processes) else Processes(group)
    num_data = read_count("num_data", num_data, "counts the rows of all processes")
    part = part_of(local, num_data, processes)
    if isinstance(part, MixedLogJoint):
        return part.spread(processes)
    if isinstance(part, AdditiveTractable):
        return ShardedTractable(part, processes, num_data)
    return ShardedLogJoint(part, processes, num_data)
