"""The engine of `torchngvi.fit` for mixed models in batches of groups: a pass over the groups for each step of q(g).

What is fitted is q(g), a Gaussian over the few global parameters, to the bound with all groups at their best given q(g)
(`torchngvi.models.mixed_batches`), by the steps of VN that are found by trial; the q of the user has both parts.
"""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_count
from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.fit import Request, tolerance_of
from torchngvi.fitting.steps import Steps
from torchngvi.fitting.stopping import Criterion, Standing
from torchngvi.interfaces import Coordinates, Posterior, Target
from torchngvi.methods import VN
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_batches import BoundOfMembers, MixedInBatches
from torchngvi.optim import Status
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian


def passes_of(request: Request) -> tuple["PassesOverGroups", Criterion]:
    """Make the engine of a `Request` in batches of groups, and what ends its run."""
    if request.optimizer is not None or request.batch_size is not None:
        raise InputError("batch_groups= has its own steps and its own batches; leave optimizer= and batch_size= out.")
    criteria = request.until_small(request.tolerance_or(tolerance_of))
    return PassesOverGroups(request.q, request.target, request.batch_groups, criteria), criteria


class PassesOverMembers(Steps):
    """Passes over the members of a bound until the natural-gradient norm over all coordinates is small."""

    unit = "pass"

    def __init__(self, q: PrecisionCholeskyGaussian, bound: BoundOfMembers, stop: Criterion) -> None:
        super().__init__(q, bound, VN(q), stop)
        self.bound, self.entered = bound, bound.state()  # with which the pass began that led to where q(g) is

    def advance(self) -> Standing:
        """A pass, after a step of q(g) but for the first time."""
        if self._members is None:
            self.entered = self.bound.state()
        return super().advance()

    def _take_step(self) -> None:
        """A step, and the pass that decides whether it is kept; the members go back with q(g)."""
        before = self.bound.state()
        super()._take_step()
        assert self.optimizer.last is not None
        if bool(self.optimizer.last.accepted):
            self.entered = before
        else:
            self.bound.load_state(before)

    def _norm(self, status: Status) -> tuple[Tensor, Tensor]:
        """Over all coordinates: with what the members have left."""
        norm, alive = super()._norm(status)
        return (norm.square() + self.bound.left**2).sqrt(), alive

    def here(self) -> Any:
        """Both parts of q."""
        return self.q.snapshot(), self.bound.state()

    @torch.no_grad()
    def go_back(self, coordinates: Any) -> None:
        """Put both parts of q where `here` was called."""
        self.q.restore(coordinates[0])
        self.bound.load_state(coordinates[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the last pass, which a resumed run makes again."""
        return {**super().state_dict(), "groups": self.entered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        super().load_state_dict(state)
        self.entered = copied(state["groups"])
        self.bound.load_state(self.entered)


@final
class PassesOverGroups(PassesOverMembers):
    """Passes over batches of groups of a mixed model."""

    apart = ("groups",)  # those of each process
    bound: MixedInBatches

    def __init__(self, q: Posterior, model: Target, batch_groups: int | None, stop: Criterion) -> None:
        processes = model.processes or Processes.alone()
        with processes.together():
            groups = read_count("batch_groups", batch_groups, "counts groups")
            if not isinstance(model, MixedLogJoint) or not isinstance(q, Gaussian):
                raise InputError("batch_groups is for a Gaussian q of a MixedModel; leave it out for other targets.")
            model.rows.check_one("a fit in batches of groups")
            if q.structure != model.structure or not q.upper or q.batch_shape:
                raise InputError(
                    f"batch_groups needs a q over the arrow of the model, {model.structure}, as model.posterior() "
                    f"makes; got a {type(q).__name__} over {q.structure}."
                )
            model.check(q)
            self.whole, bound = q, MixedInBatches(model, groups, stop.tolerance)
            top = bound.begin_at(q.mean.detach(), q.whitener())
        self.spread = {} if model.processes is None else {"groups of each process": str(processes.gather(model.rows.n))}
        shared = PrecisionCholeskyGaussian(bound.dim, dtype=q.dtype, device=q.device)
        shared.restore(Coordinates(bound.mean.clone(), top.clone()))
        super().__init__(shared, bound, stop)

    def advance(self) -> Standing:
        """A pass, of which the q of the user has the result."""
        standing = super().advance()
        self._write()
        return standing

    @torch.no_grad()
    def _write(self) -> None:
        """Put the q of the user where q(g) and the groups are."""
        shared = self.q.snapshot()
        mean, root = self.bound.whole(shared.vector, shared.matrix)
        self.whole.restore(self.whole._coordinates_with(mean, root))

    def settings(self) -> dict[str, str]:
        """The problem, with the number of groups in a batch."""
        return {**super().settings(), "batch_groups": str(self.bound.groups), **self.spread}

    def go_back(self, coordinates: Any) -> None:
        """Put all parts of q where `here` was called."""
        super().go_back(coordinates)
        self._write()
