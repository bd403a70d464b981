"""Targets that several processes evaluate together: each its rows, or each its share of the draws.

The parts of the data add up, so that the sum of the values and of their derivatives is that of one process with all the
rows, up to the order of summation.  It is the target that sums, in one all-reduce an evaluation; optimizers, step
sizes, criteria and checkpoints are functions of what all ranks have in common, and do the same on each of them.
"""

from collections.abc import Callable
from typing import Any, TypeVar, final, overload

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_instance
from torchngvi.distributed import Processes
from torchngvi.interfaces import Additive, AdditiveTractable, Frame, Framed, Posterior, Raw, Target
from torchngvi.models.log_joint import LogJoint
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.shards import NoRows, part_of, refuse_sharded, threads
from torchngvi.models.summands import assembled, halved, in_frame, summands, whole, with_prior
from torchngvi.models.together import Together

Mixed = TypeVar("Mixed", bound=MixedLogJoint)


class _ShardedRows(Additive, Together):
    """The data of all ranks, with the prior once."""

    local: Additive

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


def _checked(local: object, processes: object, num_data: Any) -> int:
    """The number of rows of all processes, after a check of the other arguments."""
    read_instance("local", local, Additive, "is the model of the rows of this process")
    read_instance("processes", processes, Processes, "are those that sum, Processes()")
    return read_count("num_data", num_data, "counts the rows of all processes")


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
        self.num_data = _checked(local, processes, num_data)
        self.local, self.processes, self.prior = local, processes, local.prior
        self.temperature, self.comparable, self.coding = local.temperature, local.comparable, local.coding
        self.draws_at_once, self.batches, self.in_passes = local.draws_at_once, local.batches, local.in_passes


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
        self.num_data = _checked(local, processes, num_data)
        self.local: AdditiveTractable = local
        self.prior_alone = local.prior_alone
        self.processes, self.prior = processes, local.prior
        self.temperature, self.comparable, self.coding = local.temperature, local.comparable, local.coding
        self.draws_at_once, self.batches, self.in_passes = local.draws_at_once, local.batches, local.in_passes
        here = isinstance(local, NoRows) or (local.curved and local.prior_alone)
        self.convex = all(processes.gather(here))

    def second_order(
        self,
        theta: Tensor,  # (*batch, D)
    ) -> tuple[Tensor, Raw]:
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

    One wants it for a costly log joint that does not split into rows: of S draws of θ each of R processes evaluates
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

    One wants it for more rows than one process can hold or get through in time.  Every rank builds a model of its own
    rows with the whole prior; the sharded target is that of all rows with the prior counted once, to rounding, for
    ``fit`` and for any optimizer.  An evaluation is one all-reduce of 1 + D + D(D + 1)/2 numbers for a dense q, 1 + 2D
    for a mean field, and S(D + 1) for S draws of a log joint.  Without a process group, in one process, it is the part
    itself.

    Of a mixed model each rank has groups of its own, numbered from 0 there, with all of their rows.  It is the same
    kind of model again, for ``fit(model.posterior(), model)`` and for `MixedModel.fit`; each rank holds a q over the
    effects of its own groups and over the globals, of which the latter is the same everywhere.  An evaluation is one
    all-reduce of 2 + P + P² numbers for P globals, however many groups there are; see
    `torchngvi.models.mixed_batches`.

    Parts need not have the same number of rows.  Do not take them by a ``DistributedSampler``, which repeats rows.

    Args:
        local: the part of this rank, such as a `GeneralizedLinear` with ``classes=``, a `Streamed` model, a
            `DataLogJoint`, a `PerDatum` or a `torchngvi.MixedModel` with one grouping factor; None on a rank without
            rows, where the model has a Gaussian prior.
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
