"""Steps by stochastic gradients until a smoothed value has stopped improving; the best λ is put back at the end.

The norm of a stochastic gradient does not vanish.  What is watched is the moving average of the lower bound, or of any
value that goes down, such as an error on validation data (Tran, Nguyen and Dao 2021).
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchngvi.arguments import read_callable, read_count, read_instance, read_size, read_tensor, shown
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.expectations import StatisticRegression
from torchngvi.expectations.flat import integrand
from torchngvi.fitting.checkpoints import copied, describe, describe_optimizer, describe_problem
from torchngvi.fitting.fit import Request
from torchngvi.fitting.loop import Ending, Engine, Loop, checked_callbacks
from torchngvi.fitting.records import FitResult, Record
from torchngvi.fitting.stopping import Criterion, Evaluations, Standing, Stop, Unimproved, joined
from torchngvi.interfaces import Target
from torchngvi.methods import AIFVB, IFVB, PreconditionedVI
from torchngvi.models import LogJoint
from torchngvi.models.log_joint import FullPrecision, classify
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat import ExponentialFamily
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.rules import NaturalGradient
from torchngvi.stepsizes import KLRadius, PowerSchedule
from torchngvi.theory.godichon2023 import check_exponents


def run(
    optimizer: PreconditionedVI,
    target: Any,
    max_steps: int = 5000,
    *,
    schedule: LRScheduler | None = None,
    monitor: Callable[[], float] | None = None,
    window: int = 100,
    patience: int = 200,
    stop: Criterion | None = None,
    callbacks: Iterable[Callable[[Record], Any]] = (),
    progress: bool = False,
    checkpoint: str | Path | None = None,
) -> FitResult:
    """Step until the smoothed value has not improved for ``patience`` steps, and leave the best λ in the posterior.

    It is the loop of `IFVB` and its kin, whose stochastic gradients never vanish; for a Gaussian posterior use
    `torchngvi.fit`, which converges to a tolerance.

    Args:
        optimizer: over a flat posterior without batch dimensions.
        target: as `PreconditionedVI.step` takes it.
        max_steps: the budget of steps.
        schedule: the schedule of the learning rate, moved on after each step.  The exponents of a `PowerSchedule`
            and of the metric must go together where the method is `IFVB` or `AIFVB`.
        monitor: a value that goes down, asked after each step with the estimate (the average where there is one)
            in the posterior; by default the estimate of minus the lower bound before the step.
        window: the number of steps in the moving average; 1 for a value without noise.
        patience: the number of steps without a new best after which the run ends.
        stop: a further criterion that ends the run, see `torchngvi.fit`.
        callbacks: called with the `Record` of each step; a true result ends the run.
        progress: show a bar.
        checkpoint: a file that holds the run, and from which it goes on to the last bit, see `torchngvi.fit`.

    Returns:
        The verdict, whose loss is the smoothed estimate of the negative ELBO where the watched value was at its best,
        and which says at which step that was.  A run of fewer steps than the window stays where it is.

    Raises:
        InputError: a batch of runs, counts below 1, exponents out of range, a checkpoint that cannot be written or
            is of another run.

    >>> from torchngvi.ifvb import ClosedForm, Exact, MeanFieldGaussian
    >>> q = MeanFieldGaussian(torch.ones(2).double())
    >>> opt = PreconditionedVI(q, Exact(), 0.5, estimator=ClosedForm())
    >>> print(run(opt, lambda lam: -lam.square().sum(-1), window=1, patience=20))  # doctest: +ELLIPSIS
    converged, the smoothed value has not improved for 20 steps. Its best, ..., is put back. Negative ELBO ...
    """
    for name, number in (("max_steps", max_steps), ("patience", patience)):
        read_count(name, number, "counts steps")
    if isinstance(optimizer, IFVB | AIFVB) and isinstance(schedule, LambdaLR):
        for power in schedule.lr_lambdas:
            if isinstance(power, PowerSchedule):
                check_exponents(power, optimizer.metric)
    engine = SmoothedSteps(optimizer, target, schedule, monitor, window)
    engine.remedy = "Raise max_steps."
    criteria = joined(Unimproved(patience) | Evaluations(max_steps), stop)
    callbacks = checked_callbacks(callbacks)
    return Loop(engine, criteria, callbacks=callbacks, progress=progress, checkpoint=checkpoint, every=100).run()


class SmoothedSteps(Engine):
    """The engine of `run`: steps on a flat posterior, with the moving average of a value that is to go down."""

    unit = "step"
    certain = 3  # steps in a row whose norms are within a tolerance, after which the run has converged

    def __init__(
        self,
        optimizer: NaturalGradientVI,
        target: Any,
        schedule: LRScheduler | None = None,
        monitor: Callable[[], float] | None = None,
        window: int = 100,
        tolerance: float = 0.0,
    ) -> None:
        read_instance("optimizer", optimizer, NaturalGradientVI, "is one of a flat posterior, such as IFVB(q)")
        if schedule is not None:
            what = "moves the learning rate of the optimizer, as torch.optim.lr_scheduler does"
            read_instance("schedule", schedule, LRScheduler, what)
        if monitor is not None:
            read_callable("monitor", monitor, "is a function that returns a number", arguments="")
        what = "of run is a flat one, such as Beta(vector)"
        self.flat = flat = read_instance("posterior", optimizer._only_posterior("run"), FlatPosterior, what)
        super().__init__(flat)
        if flat.batch_shape:
            raise InputError(f"run follows one lambda; this posterior holds {tuple(flat.batch_shape)}. Call step.")
        self.name, self.optimizer, self.schedule, self.monitor = type(optimizer).__name__, optimizer, schedule, monitor
        prepared = target if optimizer.estimator is None else optimizer.estimator.prepared(target)
        self.target = prepared if isinstance(prepared, Target) else classify(prepared)
        self.batches = getattr(self.target, "batches", ())
        self.remedy = ""
        self.window = read_count("window", window, "counts steps")
        self.steps, self.draws = 0, 0  # the second of the log joint
        self.tolerance, self.small = tolerance, 0  # steps in a row whose norm is within it
        self.values: deque[float] = deque(maxlen=self.window)
        self.losses: deque[float] = deque(maxlen=self.window)
        self.best, self.best_loss, self.best_at = math.inf, math.nan, 0
        self.kept = self._estimate()

    def advance(self) -> Standing:
        """Take a step, and watch the value after it; a new best is kept with its λ."""
        self.mark()
        optimizer, norm = self.optimizer, math.nan  # of a closure nobody knows it
        before = optimizer.gradients + optimizer.values
        with FullPrecision(self.flat.vector.device.type):
            if isinstance(self.target, Target):
                norm = float(optimizer.evaluate(self.target).norm2.sqrt())  # which the step uses
        loss = optimizer.step(self.target)
        assert loss is not None
        assert optimizer.last is not None
        if self.schedule is not None:
            self.schedule.step()
        value = float(loss)
        self.losses.append(value)
        self.values.append(value if self.monitor is None else self._monitored(self.monitor))
        self.steps += 1
        smoothed = sum(self.values) / self.window if len(self.values) == self.window else math.inf
        if smoothed < self.best:
            self.best, self.best_loss, self.best_at = smoothed, sum(self.losses) / self.window, self.steps
            self.kept = self._estimate()
        self.draws += optimizer.gradients + optimizer.values - before
        self.small = self.small + 1 if 0 < self.tolerance >= norm else 0
        rho = float(optimizer.last.rho)
        return Standing(
            Record(self.steps, value, norm, rho, optimizer.rejections, self.draws, 0.0),
            torch.tensor(self.small >= self.certain, device="cpu"),
            loss,
            (self.steps, self.draws),
            self.tolerance,
            best=self.best,
            idle=self.steps - max(self.best_at, self.window),
            remedy=self.remedy,
            where=f"a best smoothed value of {self.best:.6g}",
        )

    def _estimate(self) -> Tensor:
        """The average where there is one, else the iterate; a copy."""
        optimizer = self.optimizer
        return (optimizer.average if isinstance(optimizer, AIFVB) else self.flat.vector).detach().clone()

    def _monitored(self, monitor: Callable[[], float]) -> float:
        """The monitored value, which may be NaN, with the estimate in the posterior; λ is put back."""
        iterate, averaged = self.flat.vector.detach().clone(), isinstance(self.optimizer, AIFVB)
        try:
            if averaged:
                self._put(self._estimate())
            value: Any = monitor()
        finally:
            if averaged:
                self._put(iterate)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"monitor must return a number; got {shown(value)}.") from error

    @torch.no_grad()
    def _put(self, vector: Tensor) -> None:
        self.flat.vector.copy_(vector)

    # -------------------------------------------------------------------------------- the end

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """Put the best λ back, and give the loss there; stochastic steps never say "converged"."""
        assert stop is not None
        if self.small >= self.certain:
            self.best = math.inf  # the iterate itself is the result
            self.kept = self.flat.vector.clone()
            return self._ended(True, stop.reason, last)
        reason, estimator = stop.reason, self.optimizer.estimator
        exact = estimator is not None and estimator.comparable
        if stop.converged and not exact:
            reason = f"because {reason.removesuffix('.')}, which of stochastic steps does not say that q is the best."
        return self._ended(stop.converged and exact, reason, last)

    def interrupted(self, reason: str, last: Standing) -> Ending:
        """Put the best λ back, and give the loss there; the run has not converged."""
        return self._ended(False, reason, last)

    def _ended(self, converged: bool, reason: str, last: Standing) -> Ending:
        loss = last.record.loss
        if math.isfinite(self.best):
            loss, reason = self.best_loss, f"{reason} Its best, {self.best:.6g} at step {self.best_at}, is put back."
        # from a value that was never finite back to the start; of fewer steps than the window nobody knows the best
        self._put(self._estimate() if self.steps < self.window else self.kept)
        return Ending(converged, reason, loss, last.record.norm, torch.tensor(converged, device="cpu"))

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """The settings of the run: the problem, the optimizer with its parts, and what is watched."""
        return {
            **(describe_problem(self.q, self.target) if isinstance(self.target, Target) else {}),
            **describe_optimizer(self.optimizer),
            "schedule": describe(self.schedule),
            "monitor": "none" if self.monitor is None else "a function",
            "window": str(self.window),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state before a step: posterior, optimizer, schedule, the values watched, and the best λ."""
        return {
            "posterior": self.q.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "counts": (self.steps, self.draws, self.best_at, self.small),
            "best": (self.best, self.best_loss),
            "values": list(self.values),
            "losses": list(self.losses),
            "kept": self.kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything where the saved step began, which is made again."""
        self.q.load_state_dict(state["posterior"])
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        if self.schedule is not None:
            self.schedule.load_state_dict(copied(state["schedule"]))
        self.steps, self.draws, self.best_at, self.small = state["counts"]
        self.best, self.best_loss = state["best"]
        self.values = deque(state["values"], self.window)
        self.losses = deque(state["losses"], self.window)
        self.kept = state["kept"].clone()


# The steps of `torchngvi.fit` for a flat posterior


def flat_steps_of(request: Request) -> tuple[Engine, Criterion]:
    """Make the engine of a `Request` for a flat posterior, and what ends its run; an optimizer makes its own steps."""
    q, target, tolerance = request.q, request.target, request.tolerance
    if request.optimizer is not None:
        return request.engine("steps")
    assert isinstance(q, FlatPosterior)
    if isinstance(q, ExponentialFamily):
        engine: SmoothedSteps = FamilySteps(q, target, tolerance)
    elif tolerance is not None:
        raise InputError(
            "tolerance bounds the natural-gradient norm, and that of stochastic gradients does not vanish: "
            f"{type(q).__name__} is fitted until its smoothed bound stops rising. Leave tolerance out, or say when to "
            "end by stop=."
        )
    else:
        optimizer = IFVB(q)
        engine = SmoothedSteps(optimizer, target, LambdaLR(optimizer, PowerSchedule(0.75, 100.0)))
    return engine, request.until_unimproved(engine.tolerance)


@final
class FamilySteps(SmoothedSteps):
    """Natural gradients of an exponential family with γ_k = (1 + k/until)^-¾, from the posterior of a conjugate ℓ."""

    refused = 0  # steps in a row that led out of the domain
    most_refused = 20  # after which none is expected to stay

    def __init__(
        self, q: ExponentialFamily, target: Any, tolerance: float | None, trust: float = 0.245, until: int = 20
    ) -> None:
        if tolerance is None:
            tolerance = 1e-6 if q.dtype == torch.float64 else 1e-2
        step_size, estimator = KLRadius(trust), StatisticRegression()
        steps = NaturalGradientVI(q, NaturalGradient(), until**0.75, step_size=step_size, estimator=estimator)
        super().__init__(steps, target, LambdaLR(steps, PowerSchedule(0.75, until - 1)), tolerance=tolerance)

    @torch.no_grad()
    def begin(self) -> None:
        """Go to the posterior where the log joint is conjugate, if that is inside the domain."""
        q, estimator = self.flat, self.optimizer.estimator
        assert isinstance(q, ExponentialFamily)
        assert isinstance(estimator, StatisticRegression)
        if not isinstance(self.target, Target):
            return
        self.target.admit(q)
        vector, found, draws = estimator.conjugate(q, self.target)
        self.draws += draws
        if bool(found & vector.isfinite().all(-1) & q.in_domain(vector)):
            self._put(vector)

    def advance(self) -> Standing:
        """Take a step, and say where none can help: values that are not finite, or a log joint without an optimum."""
        before = self.optimizer.rejections
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RejectedStepWarning)  # whose advice is for an optimizer of one's own
            standing = super().advance()
        self.refused = self.refused + 1 if self.optimizer.rejections > before else 0
        lost = ""
        if self.steps == 1 and not math.isfinite(standing.record.loss):
            lost = (
                f"because the negative ELBO is {standing.record.loss} at this q: the log joint is not finite at some "
                "of its draws. It has to be on the whole support of q; or start at other parameters."
            )
        elif self.refused >= self.most_refused:
            lost = (
                f"because {self.refused} steps in a row led out of the domain ({self.flat.domain}): the log joint does "
                "not confine q. Give the unknown a proper prior. If the function returns -log p, an energy, return its "
                "negative."
            )
        return standing._replace(lost=lost) if lost else standing

    def state_dict(self) -> dict[str, Any]:
        """As of all, with the steps in a row that left the domain."""
        return {**super().state_dict(), "refused": self.refused}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything where the saved step began."""
        super().load_state_dict(state)
        self.refused = state["refused"]


@torch.no_grad()
def lower_bound(
    q: FlatPosterior,
    log_joint: Callable[[Tensor], Tensor],
    draws: int = 1000,
    generator: torch.Generator | None = None,
    at: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate the lower bound LB(λ) = E_q[log p(θ, y) - log q(θ)] by Monte Carlo.

    Args:
        q: the posterior.
        log_joint: a function of θ (S, *batch, D) that returns (S, *batch).
        draws: the number S of draws.
        generator: the source of the draws; without one, torch's default generator.
        at: λ (*batch, D) at which to estimate, in the place of that of q.

    Returns:
        The estimate and its standard error, both (*batch,), in nats.

    >>> from torchngvi.ifvb import Beta
    >>> value, error = lower_bound(Beta(torch.ones(2)), lambda theta: 0 * theta[..., 0], 10)
    >>> value.item(), error.item()  # q is the uniform density
    (0.0, 0.0)
    """
    q = read_instance("q", q, FlatPosterior, "is a flat posterior, such as Beta(vector)", other=log_joint)
    draws = read_size("draws", draws, "counts draws")
    if at is not None:
        at = read_tensor("at", at, like=q.vector, shape=(*[None] * (q.vector.ndim - 1), q.size))
    theta = q.sample(draws, generator, at)
    h = integrand(q, LogJoint(log_joint), theta, at)
    return h.mean(0), h.std(0) / math.sqrt(draws)
