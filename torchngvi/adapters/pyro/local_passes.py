"""The engine of `fit_guide` for a guide with memoised locals: a pass of visits, then passes for q(g) by trial.

The first pass goes through the plate once, batch by batch, and leaves every member with a site.  VN in that form has a
linear tail; so from there each pass is an evaluation of the bound as a function of q(g) alone (`local_bound`), whose
steps are those of `torchngvi.fit`.  The end is looked at on fresh draws.
"""

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.adapters.pyro.local_bound import MemoisedBound
from torchngvi.adapters.pyro.local_elbo import fresh_elbo
from torchngvi.adapters.pyro.local_guide import AutoLocalGaussian
from torchngvi.adapters.pyro.local_sites import Globals
from torchngvi.adapters.pyro.local_steps import Visits
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.loop import Ending, Loop, checked_callbacks
from torchngvi.fitting.records import FitResult
from torchngvi.fitting.steps import Steps
from torchngvi.fitting.stopping import Criterion, Evaluations, NormBelow, Seconds, Stalled, Standing, Stop, joined
from torchngvi.interfaces import Coordinates
from torchngvi.methods import VN
from torchngvi.optim import Status
from torchngvi.posteriors import PrecisionCholeskyGaussian

_PASSES = 100  # at most, unless options say otherwise
_STALL = 10  # rejected steps in a row after which nothing more is to be had
_KNOWN = ("tolerance", "max_evaluations", "max_seconds", "stop", "callbacks", "progress", "checkpoint")


@final
class PassesOverPlate(Steps):
    """Passes over the members of a plate until the natural-gradient norm over all coordinates is small."""

    unit = "pass"

    def __init__(self, q: PrecisionCholeskyGaussian, visits: Visits, stop: Criterion, resumed: bool) -> None:
        self.visits, self.bound = visits, MemoisedBound(visits, stop.tolerance)
        self.resumed = resumed
        super().__init__(q, self.bound, VN(q), stop)
        self.name = "AutoLocalGaussian"
        self.entered = self._sites()  # with which the pass began that led to where q(g) is

    def begin(self) -> None:
        """Visit all members once, unless an earlier run has."""
        if self.resumed:
            return
        self.show("first visits")
        for index, _ in self.bound.batches:
            self.visits.visit(index, 1.0, first=True)
        self.show("")
        self.visits.sites.sum_up()
        top = self.visits.sites.top()
        self.q.restore(Coordinates(top.mean, top.root))

    def advance(self) -> Standing:
        """A pass, after a step of q(g) but for the first time."""
        if self._members is None:
            self.entered = self._sites()
        return super().advance()

    def _take_step(self) -> None:
        """A step, and the pass that decides whether it is kept; the members go back with q(g)."""
        before = self._sites()
        super()._take_step()
        assert self.optimizer.last is not None
        if bool(self.optimizer.last.accepted):
            self.entered = before
        else:
            self._put(before)

    def _norm(self, status: Status) -> tuple[Tensor, Tensor]:
        """Over all coordinates: with what the members have left."""
        norm, alive = super()._norm(status)
        return (norm.square() + self.bound.left**2).sqrt(), alive

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """Say how far from the best q is on draws that no pass has seen."""
        ending = super().ending(stop, last)
        self._settle()
        self.show("fresh draws")
        judged = fresh_elbo(self.visits, self._top(), self.bound.batches)
        self.show("")
        if not math.isfinite(judged.elbo):
            reason = f"because {judged}: no Gaussian fits inside the support. Transform the constrained coordinates."
            return ending._replace(converged=False, reason=reason, loss=-judged.elbo, members=torch.tensor(False))
        ending = ending._replace(loss=-judged.elbo)
        if last.stalled >= _STALL:
            reason = (
                f"because {last.stalled} steps in a row were rejected ({last.at()}): on the draws of the run "
                "the bound and its derivatives agree no further. Use more num_particles, or a larger tolerance."
            )
            return ending._replace(reason=f"{reason} On{str(judged)[2:]}.")
        if not ending.converged:
            return ending._replace(reason=f"{ending.reason.rstrip('.')}; {judged}.")
        norm = self.bound.norm_at(self._top())
        above = 0.5 * norm**2
        reason = (
            f"{ending.reason.rstrip('.')}; {judged}, and the norm is {norm:.2g}, which puts q about {above:.2g} nats "
            f"from the best, {1e3 * above / self.bound.members:.2g} a thousand members."
        )
        return ending._replace(reason=reason, norm=norm)

    def interrupted(self, reason: str, last: Standing) -> Ending:
        """As of every engine, with the sites in agreement with q(g)."""
        self._settle()
        return super().interrupted(reason, last)

    # -------------------------------------------------------------------------------- where it is

    def _top(self) -> Globals:
        assert isinstance(self.q, PrecisionCholeskyGaussian)
        return Globals(self.q.mean.detach().clone(), self.q.precision_tril.detach().clone())

    def _settle(self) -> None:
        self.visits.sites.come_to(self._top())

    def _sites(self) -> dict[str, Any]:
        state = {name: value.clone() for name, value in self.visits.sites.state_dict().items()}
        return {**state, "left": self.bound.left, "gradient": self.bound.gradient}

    def _put(self, state: dict[str, Any]) -> None:
        self.bound.left, self.bound.gradient = state["left"], state["gradient"]
        self.visits.sites.load_state_dict({k: v for k, v in state.items() if k not in ("left", "gradient")})

    def here(self) -> Any:
        """Both parts of q."""
        return self.q.snapshot(), self._sites()

    @torch.no_grad()
    def go_back(self, coordinates: Any) -> None:
        """Put both parts of q where `here` was called."""
        self.q.restore(coordinates[0])
        self._put(coordinates[1])

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """The problem, with the sizes of plate and subsample."""
        layout = self.visits.density.layout
        sizes = f"{layout.plate}: {layout.members} of {layout.size}, {self.visits.num_particles} particles"
        return {**super().settings(), "plate": sizes}

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the last pass, which a resumed run makes again."""
        batches = [torch.stack([index, new.long()]) for index, new in self.bound.batches]
        return {**super().state_dict(), "sites": self.entered, "seed": self.bound.seed, "batches": batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        super().load_state_dict(state)
        self.bound.seed = state["seed"]
        self.bound.batches = [(both[0].clone(), both[1].bool()) for both in state["batches"]]
        self.entered = copied(state["sites"])
        self._put(self.entered)


def fit_locals(
    model: Callable[..., Any],
    guide: AutoLocalGaussian,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> FitResult:
    """Fit a guide with memoised locals, in place: what `fit_guide` does with one."""
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise InputError(
            f"of the options of fit_guide an AutoLocalGaussian knows {', '.join(_KNOWN)}; got {', '.join(unknown)}."
        )
    visits = guide.visits(model, args, kwargs)
    dim = visits.density.layout.size * visits.density.layout.r + visits.density.layout.P
    tolerance = options.get("tolerance")
    tolerance = 0.1 * math.sqrt(max(dim, 100) / 100) if tolerance is None else tolerance
    stop: Criterion = NormBelow(tolerance) | Evaluations(options.get("max_evaluations", _PASSES)) | Stalled(_STALL)
    if options.get("max_seconds") is not None:
        stop = stop | Seconds(options["max_seconds"])
    engine = PassesOverPlate(guide.posterior, visits, joined(stop, options.get("stop")), bool(guide.memo.visited.all()))
    return Loop(
        engine,
        joined(stop, options.get("stop")),
        callbacks=checked_callbacks(options.get("callbacks", ())),
        progress=options.get("progress", True),
        checkpoint=options.get("checkpoint"),
        every=1,
    ).run()
