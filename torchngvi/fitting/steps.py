"""The engine of `torchngvi.fit` with an optimizer: a step, and an evaluation where it led."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchngvi.arguments import read_count
from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.expectations.draws import drawn_seed
from torchngvi.fitting.checkpoints import copied, describe_optimizer, describe_problem
from torchngvi.fitting.fit import Request, tolerance_of
from torchngvi.fitting.laplace import has_start, laplace_within, may_be_written_out, start_at_mode
from torchngvi.fitting.loop import Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.starts import start_in_passes, stream_rows
from torchngvi.fitting.stopping import Criterion, Rounding, Standing
from torchngvi.interfaces import Coordinates, Posterior, Target, TractableTarget, known_everywhere
from torchngvi.methods import VN, NewtonCG
from torchngvi.models import GeneralizedLinear
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_batches import BoundOfMembers, MixedInBatches
from torchngvi.numerics.arrays import Versions, anyone, everyone, on_host
from torchngvi.numerics.linalg import finite
from torchngvi.optim import NaturalGradientVI, Status
from torchngvi.optim.evaluating import Report
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_NOISY = (
    "Its gradients are noisy and the norm has a floor: judge the run by its loss, or use more draws and a smaller lr."
)


def steps_of(request: Request) -> tuple["Steps", Criterion]:
    """Make the engine of a `Request` by steps of its optimizer, or of the usual one, and what ends its run."""
    q, target, starts = request.q, request.target, request.optimizer is None
    optimizer = usual_optimizer(q, target) if request.optimizer is None else request.optimizer
    if not isinstance(optimizer, NaturalGradientVI) or optimizer.posteriors != [q]:
        raise InputError("the optimizer must hold the posterior that is fitted, and no other; build it as VN(q).")
    criteria = request.until_small(request.tolerance_or(tolerance_of))
    return Steps(q, target, optimizer, criteria, request.batch_size, starts), criteria


def usual_optimizer(q: Posterior, target: Target, widest_full: int = 200, widest: int = 500) -> NaturalGradientVI:
    """Newton's method on the bound where it is convex, products with its Hessian are cheap and D is small, else VN."""
    if not (isinstance(target, TractableTarget) and isinstance(q, Gaussian) and target.curved and target.comparable):
        return VN(q)
    full = q.structure.widest == q.dim
    dear = full and (q.dim > widest_full or bool(q.batch_shape) or not target.products)
    newton = q.dim <= widest and q.structure.closed and not dear and not target.coupled
    return NewtonCG(q) if newton else VN(q)


@dataclass(frozen=True)
class StepsSettings:
    """The numbers of a run by steps of an optimizer."""

    errors: float = 3.0  # standard errors that a norm from draws must leave room for
    repeats: int = 16  # fresh evaluations at one q, whose scatter tells the standard error of their mean
    far: float = 1e4  # natural-gradient norm from which q begins at the mode
    near: float = 1.0  # the same of a convex ℓ, whose mode is found by a few passes without an expectation
    passes: int = 100  # Newton steps for the mode of a model that is not convex
    climb: float = 100.0  # nats, beside the size of the first loss, by which a run ends far above its start
    doubted: int = 5  # rejections in a row after which two passes over batches are compared


class Steps(Engine):
    """Steps of an optimizer until the natural-gradient norm is small."""

    engine_settings = StepsSettings()

    def __init__(
        self,
        q: Posterior,
        target: Target,
        optimizer: NaturalGradientVI,
        stop: Criterion,
        batch_size: int | None = None,
        starts: bool = False,
    ) -> None:
        super().__init__(q)
        self.name = type(optimizer).__name__
        self.target, self.optimizer, self.batch_size = target, optimizer, batch_size
        self.starts = starts and target.in_passes and isinstance(q, Gaussian)
        self.convex = isinstance(target, TractableTarget) and isinstance(q, Gaussian) and has_start(q, target)
        general = isinstance(target, GeneralizedLinear) and may_be_written_out(q) and target.temperature > 0
        self.places = starts and (self.convex or general)  # q may yet go to the mode
        self.batches = target.batches
        self.tolerance, self.budget = stop.tolerance, stop.evaluations
        self.exact = optimizer.evaluates_exactly(target)
        self.averages = optimizer.averages(target)
        self.remedy = "" if self.exact or self.averages else _NOISY
        self.step, self.stalled = 0.0, 0
        self.first_loss: float | None = None
        self._before = optimizer.evaluations, optimizer.gradients
        self._rejections = 0  # so far
        self._spent: tuple[int, int] | None = None  # by the run that is gone on from, with the evaluation made again
        self._alive: Tensor | None = None  # members whose loss and norm are finite, where q was evaluated; (*batch,)
        self._members: Tensor | None = None  # converged there, (*batch,)
        self.rounding = Rounding()

    def begin(self) -> None:
        """One pass over mini-batches, where it is wanted; or a fit to some of the rows."""
        if self.starts:
            assert isinstance(self.q, Gaussian)
            self.show("a part of the rows")
            start_in_passes(self.q, self.target, 0)
            self.show("")
        if self.batch_size is not None:
            assert isinstance(self.q, Gaussian)
            assert isinstance(self.target, GeneralizedLinear)
            self.show("a pass over mini-batches")
            stream_rows(self.q, self.target, self.batch_size, seed=drawn_seed())
            self.show("")

    def advance(self) -> Standing:
        """A step, but for the first time, and an evaluation."""
        again = self._spent is not None  # of a run that is gone on from: what was told is told as it was
        stepped = self._members is not None and not self.places
        if stepped:
            self._take_step()
            if self.capture is not None:  # the mark holds what became of the step
                self._note_step(*on_host(*self._last()))
        self.mark()
        status, *step = self._seen(self._evaluate(at_once=stepped), *self._last())
        if stepped and self.capture is None:
            self._note_step(*step)
        if self._spent is not None:
            evaluations, gradients = self._spent
            self._before = self.optimizer.evaluations - evaluations, self.optimizer.gradients - gradients
            self._spent = None
        if self.places and not again and self._counts()[0] < self.budget:
            status = self._at_the_mode(status)
        loss, spent = status.loss, self._counts()
        norm, alive = self._norm(status)
        known, refuted, repeats = self.exact, "", self.engine_settings.repeats
        small = not self.exact and bool(alive.any() and (norm <= self.tolerance)[alive].all())
        if small and self.target.comparable and self.budget - spent[0] >= repeats:
            # one evaluation is small by chance too, and of a mini-batch says nothing of the other rows
            on_average, known = float(norm[alive].max()), True
            status, *_ = self._seen(self.optimizer.averaged(self.target, repeats))
            norm, alive = self._norm(status)
            if not self.averages:
                self.remedy = f"It was {float(norm[alive].max()):.2g} over {repeats} fresh evaluations. {_NOISY}"
            elif not bool((norm <= self.tolerance)[alive].all()):
                refuted = self._why_refuted(on_average, norm, alive)
        self._members, self._alive = (norm <= self.tolerance) & known, alive
        rounded = False
        if self.exact and self.rounding.asked(norm, self._members, alive):
            near = self.rounding.hides(self.q, self.target, status.loss, norm)
            rounded = anyone(near & ~self._members)
            self._members = self._members | near
        standing = self._standing(status.loss, norm, self._alive, self._members)
        return standing._replace(loss=loss, spent=spent, lost=standing.lost or refuted, rounded=rounded)

    # -------------------------------------------------------------------------------- the mode

    def _at_the_mode(self, status: Status) -> Status:
        """Go on from Laplace's approximation with the members that begin very far off, and are better there."""
        # E_q e^η grows as e^(ν²/2) with the variance ν² of η: from a wide q natural-gradient steps take it down by few
        # nats each, where Newton's method for the mode does not see the width of q; a pass of that costs a fraction of
        # an evaluation where ℓ is convex
        self.places = False
        settings, device = self.engine_settings, self.q.mean_probe.device
        limit = settings.near if self.convex and self.batch_size is None else settings.far  # a pass has led near
        far = status.loss.isposinf() | (~status.loss.isnan() & (status.norm2 > (limit * self.target.temperature) ** 2))
        if not anyone(far):
            self.mark()
            return status
        here = self.q.snapshot()
        if not self._go_to_the_mode():
            return status
        if not everyone(far):
            self.q.assign(here, ~far.to(device))
        there = self._seen(self._evaluate())[0]
        better = ~far | (finite(there.loss) & ~(there.loss >= status.loss))
        if not everyone(better):
            self.q.assign(here, ~better.to(device))
            if not anyone(better | finite(status.loss)):  # nobody is anywhere
                return status
            there = self._seen(self._evaluate())[0]
        self.mark()
        return there

    def _go_to_the_mode(self) -> bool:
        """Go there, as near as the budgets allow; False where they allow nothing, or ℓ has no numbers at the start."""
        assert isinstance(self.q, Gaussian)
        spent, each = self._counts()[1], 1 if self.convex else 1 + self.q.dim  # a column of a Hessian is a gradient

        def over(passes: int) -> bool:
            """Whether no two evaluations would be left, at the mode and where q was; the last may use up the budget."""
            return self.over(spent + each * passes + 1)

        if over(1):
            return False
        here, target, most = self.q.snapshot(), self.target, self.engine_settings.passes
        try:
            if self.convex:
                passes = self._to_the_mode(over)
            else:
                passes = laplace_within(self.q, target, None, most, over).iterations + 1
        except InputError:  # not finite at the mean, or no numbers of this dtype
            self.q.restore(here)
            return False
        self.optimizer.gradients += each * passes
        return True

    def _to_the_mode(self, over: Callable[[int], bool]) -> int:
        """Put q at the mode of a convex ℓ, unless a budget is over; the number of passes."""
        assert isinstance(self.q, Gaussian)
        assert isinstance(self.target, TractableTarget)
        return start_at_mode(self.q, self.target, over)

    # -------------------------------------------------------------------------------- steps and evaluations

    def _take_step(self) -> None:
        """A step of the members that have not converged: where the others end does not depend on these."""
        assert self._members is not None
        rest = self.exact and not self.target.coupled and anyone(self._members)
        self._step(self._members.to(self.q.mean_probe.device) if rest else None)

    def _step(self, resting: Tensor | None) -> None:
        """A step of all members but those (*batch,) that rest."""
        self.optimizer.step(self.target, resting=resting)

    def _evaluate(self, at_once: bool = False) -> Status:
        """L at q with the norm of its gradient."""
        return self.optimizer.evaluate(self.target, at_once=at_once)

    def _rejected(self) -> Tensor:
        """The number of rejected steps of each member so far, (*batch,)."""
        rejections: Tensor = self.optimizer._state(0)["rejections"]
        return rejections

    def _last(self) -> tuple[Tensor, ...]:
        """The size of the last step and whether it was taken, on the device of q; nothing before the first."""
        return () if self.optimizer.last is None else tuple(self.optimizer.last)

    def _note_step(self, rho: Tensor, accepted: Tensor) -> None:
        """Remember how far the last step went, and for how many in a row nobody has moved."""
        assert self._alive is not None
        assert self._members is not None
        moving = ~self._members
        self.step = float(rho.where(moving, torch.inf).min() if anyone(moving) else rho.min())
        self.stalled = 0 if anyone(accepted & self._alive & moving) else self.stalled + 1

    def _seen(self, status: Status, *step: Tensor) -> tuple[Any, ...]:
        """What all questions of the run are asked of: the status and the last step, for which the host waits once."""
        parts = [part for part in status if part is not None]
        loss, norm2, *rest = on_host(*parts, self._rejected(), *step)
        noise2 = None if status.noise2 is None else rest.pop(0)
        self._rejections = int(rest.pop(0).sum())
        return Status(loss, norm2, noise2), *rest

    def _counts(self) -> tuple[int, int]:
        """Evaluations and gradients of this run."""
        return self.optimizer.evaluations - self._before[0], self.optimizer.gradients - self._before[1]

    def _norm(self, status: Status) -> tuple[Tensor, Tensor]:
        """The natural norm of L/γ with its standard errors, and where it is finite, (*batch,)."""
        norm = status.norm2.sqrt()
        if status.noise2 is not None:
            norm = norm + self.engine_settings.errors * status.noise2.sqrt()
        norm = norm / (self.target.temperature or 1.0)
        return norm, finite(status.loss) & finite(norm)

    # -------------------------------------------------------------------------------- in words

    def _standing(self, loss: Tensor, norm: Tensor, alive: Tensor, members: Tensor) -> Standing:
        """The state of the run, with what is to be said of it."""
        if not known_everywhere(alive) and anyone(alive):
            loss, norm = loss[alive], norm[alive]
        value, (evaluations, gradients) = float(loss.sum()), self._counts()
        record = Record(evaluations, value, float(norm.max()), self.step, self._rejections, gradients, 0.0)
        self.first_loss = value if self.first_loss is None else self.first_loss
        climb = ""
        if value - self.first_loss > self.engine_settings.climb + abs(self.first_loss) and everyone(alive):
            climb = (
                f" The negative ELBO climbed from {self.first_loss:.6g} to {value:.6g}, far above its start: use a "
                "smaller lr or radius, or neither."
            )
        if self.target.in_passes and self.stalled == self.engine_settings.doubted:
            _check_passes(self.q, self.target)
        lost = "" if anyone(alive & ~members) else self._why_lost(value, alive, members)
        standing = Standing(record, members, loss, (0, 0), tolerance=self.tolerance, stalled=self.stalled)
        return standing._replace(lost=lost, climb=climb, remedy=self.remedy)

    def _why_refuted(self, on_average: float, norm: Tensor, alive: Tensor) -> str:
        """Why a run over fixed draws has not converged whose norm is small."""
        return (
            f"because q is at the minimum of the average over its fixed draws (natural-gradient norm {on_average:.2g} "
            f"against a tolerance of {self.tolerance:.2g}), which is not known to be that of the negative ELBO: on "
            f"fresh draws the norm is {float(norm[alive].max()):.2g}, three standard errors included. Use more draws, "
            "raise the tolerance, or leave the optimizer out: fit then takes as many draws as the tolerance asks for."
        )

    def _why_lost(self, loss: float, alive: Tensor, members: Tensor) -> str:
        """Nobody is left who could get anywhere: why, or nothing where all have converged."""
        if everyone(members):
            return ""
        if members.ndim and bool(members.any()):
            lost = int((~alive).sum())
            return (
                f"because the negative ELBO of {lost} of {members.numel()} members is not finite; the others converged."
            )
        assert self.first_loss is not None
        if math.isfinite(self.first_loss):
            return f"because the run diverged to a negative ELBO of {loss}: use a smaller lr, or none at all."
        return (
            f"because the negative ELBO is {loss} at this q: start from another mean or a smaller scale (initialize_)."
        )

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """The problem, and the optimizer with its parts."""
        return {**describe_problem(self.q, self.target), **describe_optimizer(self.optimizer)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of q and of the optimizer, with what the verdicts remember."""
        return {
            "posterior": self.q.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "stalled": self.stalled,
            "remedy": self.remedy,
            "first_loss": self.first_loss,
            "places": self.places,
            "rounding": self.rounding.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The evaluation there is done again, and has been counted."""
        self.q.load_state_dict(state["posterior"])
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.step, self.stalled, self.remedy = state["step"], state["stalled"], state["remedy"]
        self.first_loss, self._spent = state["first_loss"], state.get("spent")
        self.places = state.get("places", False)
        self.rounding.load_state_dict(state.get("rounding", {}))
        self._members = self._alive = None


@torch.no_grad()
def _check_passes(q: Posterior, target: Target, apart: float = 1e-4) -> None:
    """Check that two passes over the data see the same rows with the same labels, since steps are found by trial."""
    if not isinstance(target, TractableTarget):
        return
    first, second = (target.negative_elbo(q).double() for _ in range(2))
    if bool(((first - second).abs() > apart * (first.abs() + 1)).any()):  # by more than rounding
        raise InputError(
            f"two passes over the batches give the losses {float(first.sum()):.6g} and {float(second.sum()):.6g} at "
            "the same q: they do not hold the same rows with the same labels. Let one loader give the rows with their "
            "labels, shuffled together or not at all, and each row once, without a sampler with replacement."
        )


# A large batch, some of its members at a time, so that what a step works on stays in the cache
#
# Every member of a batch is a posterior of its own, so that a step of all of them is a step of some, then of others.
# The run sees none of this: a record, a checkpoint and a callback are of all members after each has taken a step.
# Chunks whose members have all converged are left alone.


def chunks_of(request: Request) -> tuple[Steps, Criterion]:
    """Make the engine of a `Request` for a regression, in chunks where its batch is large, and what ends its run."""
    q, target = request.q, request.target
    size = None if request.optimizer is not None else members_at_once(q, target)
    if size is None:
        return steps_of(request)
    assert isinstance(q, Gaussian)
    assert isinstance(target, GeneralizedLinear)
    optimizer, criteria = usual_optimizer(q, target), request.until_small(request.tolerance_or(tolerance_of))
    return ChunkedSteps(q, target, optimizer, criteria, size), criteria


def members_at_once(q: Posterior, target: Target) -> int | None:
    """The number of members, along the first dimension, of which a step is taken at once, if not of all."""
    if not (isinstance(q, Gaussian) and isinstance(target, GeneralizedLinear) and target.convex):
        return None
    if not (q.batch_shape and q.mean_probe.is_cpu and target.comparable):
        return None
    members, others = q.batch_shape[0], q.batch_shape[1:].numel()
    most = max(1, ChunkedSteps.numbers // (target.X.shape[-2] * target.dim * others))
    chunks = math.ceil(members / most)
    return math.ceil(members / chunks) if chunks > 1 else None


class _Chunk(NamedTuple):
    """Some members: a posterior, a target and an optimizer of their own."""

    here: slice
    q: Gaussian
    target: GeneralizedLinear
    optimizer: NaturalGradientVI

    @classmethod
    def of(cls, q: Gaussian, target: GeneralizedLinear, kind: Any, here: slice) -> "_Chunk":
        """The members of a slice."""
        part = copy.copy(q)  # what it has computed is left out
        part._buffers = {
            name: None if buffer is None else buffer.detach()[here].clone().requires_grad_(buffer.requires_grad)
            for name, buffer in q._buffers.items()
        }
        part.batch_shape = part.mean_probe.shape[:-1]
        return cls(here, part, target.of_members(here, q.batch_shape), kind(part))


class ChunkedSteps(Steps):
    """Steps of the usual optimizer on a batch of regressions, a chunk of its members after another."""

    numbers = 1_000_000  # of XC in one chunk, which the cache holds

    def __init__(
        self, q: Gaussian, target: GeneralizedLinear, optimizer: NaturalGradientVI, stop: Criterion, size: int
    ) -> None:
        target.admit(q)
        super().__init__(q, target, optimizer, stop, starts=True)
        self.size = size
        self._chunks = [
            _Chunk.of(q, target, type(optimizer), slice(first, first + size))
            for first in range(0, q.batch_shape[0], size)
        ]
        self._seen_at: Versions | None = None  # what the chunks know of q
        self._statuses: list[Status] = []
        self._resting = [False] * len(self._chunks)  # chunks of which nobody took the last step

    def _evaluate(self, at_once: bool = False) -> Status:
        if not at_once:
            self._read()
            self._resting = [False] * len(self._chunks)
        last = self._statuses

        def status(number: int, chunk: _Chunk) -> Status:
            return last[number] if self._resting[number] else chunk.optimizer.evaluate(chunk.target, at_once=at_once)

        self._statuses = self._each(status)
        loss, norm2 = [status.loss for status in self._statuses], [status.norm2 for status in self._statuses]
        return Status(torch.cat(loss), torch.cat(norm2), None)

    def _step(self, resting: Tensor | None) -> None:
        moved = self._read()
        rests = [None if resting is None else resting[chunk.here] for chunk in self._chunks]
        self._resting = [rest is not None and bool(rest.all()) and not moved for rest in rests]

        def step(number: int, chunk: _Chunk) -> None:
            if not self._resting[number]:
                chunk.optimizer.step(chunk.target, resting=rests[number])

        self._each(step)
        self._write()

    def _last(self) -> tuple[Tensor, ...]:
        if all(chunk.optimizer.last is None for chunk in self._chunks):
            return ()
        reports = [chunk.optimizer.last or _nobody(chunk.q) for chunk in self._chunks]
        return tuple(map(torch.cat, zip(*reports, strict=True)))

    def _rejected(self) -> Tensor:
        return torch.cat([chunk.optimizer._state(0)["rejections"] for chunk in self._chunks])

    def _to_the_mode(self, over: Callable[[int], bool]) -> int:
        self._read()
        passes = [start_at_mode(chunk.q, chunk.target, over) for chunk in self._chunks]
        self._write()
        return max(passes)

    def _each(self, do: Callable[[int, _Chunk], Any]) -> list[Any]:
        """What each chunk gives; of the evaluations and gradients the largest number is counted."""
        optimizers = [chunk.optimizer for chunk in self._chunks]
        before = [(optimizer.evaluations, optimizer.gradients) for optimizer in optimizers]
        results = [do(number, chunk) for number, chunk in enumerate(self._chunks)]
        spent = [(o.evaluations - e, o.gradients - g) for o, (e, g) in zip(optimizers, before, strict=True)]
        evaluations, gradients = map(max, zip(*spent, strict=True))
        self.optimizer.evaluations += evaluations
        self.optimizer.gradients += gradients
        return results

    def _read(self) -> bool:
        """Bring the chunks to where q is, if somebody has moved it since they wrote it; whether that was so."""
        if self._seen_at is not None and self._seen_at.hold(self.q.coordinates):
            return False
        for chunk in self._chunks:
            chunk.q.restore(Coordinates(*(buffer[chunk.here] for buffer in self.q.coordinates)))
        self._seen_at = Versions(self.q.coordinates)
        return True

    @torch.no_grad()
    def _write(self) -> None:
        """Bring q to where the chunks are."""
        parts = zip(*(chunk.q.coordinates for chunk in self._chunks), strict=True)
        self.q.restore(Coordinates(*map(torch.cat, parts)))
        self._seen_at = Versions(self.q.coordinates)

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """Those of `Steps`, and the size of a chunk."""
        return {**super().settings(), "members at once": str(self.size)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of q and of the optimizer of each chunk."""
        return {**super().state_dict(), "chunks": [chunk.optimizer.state_dict() for chunk in self._chunks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Steps`, for each chunk."""
        super().load_state_dict(state)
        for chunk, saved in zip(self._chunks, state["chunks"], strict=True):
            chunk.optimizer.load_state_dict(copied(saved))
        self._seen_at = None


def _nobody(q: Gaussian) -> Report:
    """The report of a chunk of which nobody has taken a step since the run was gone on with."""
    like = q.mean_probe.detach()[..., 0]
    return Report(torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool))


# Mixed models in batches of groups: a pass over the groups for each step of q(g)
#
# What is fitted is q(g), a Gaussian over the few global parameters, to the bound with all groups at their best given
# q(g) (`torchngvi.models.mixed_batches`), by steps of VN found by trial; the q of the user has both parts.


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
