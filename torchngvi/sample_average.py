"""Fit a log joint by sample averages that grow: the default where E_q[ℓ] has no closed form.

With the draws z_1..z_S held fixed and whitened, the sample average of ℓ(m + C z_s) is a deterministic
objective, exact for quadratic ℓ, and is minimised as any other (Giordano, Ingram and Broderick 2024;
Burroni, Domke and Sheldon 2023).  Its minimum misses that of L by about half of

    noise² = |standard error of ∇L|²_F⁻¹ = O(1/S)

in nats, which the draws themselves tell.  So: find a rough mode, minimise over few draws, and take as
many more as the noise asks for, until norm² + noise² ≤ tolerance².  Fresh draws and other starts then
say whether to believe it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchngvi import checkpoints, fingerprints
from torchngvi.arguments import FullPrecision
from torchngvi.errors import InputError, TorchngviError
from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sample_average import SampleAverage
from torchngvi.guarded import Guarded
from torchngvi.interfaces import Coordinates, Target
from torchngvi.methods import VN
from torchngvi.mode import Mode, find_mode, find_modes
from torchngvi.models.data_log_joint import DataLogJoint
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.records import FitResult, Record, show
from torchngvi.streaming import stream_batches

_METHOD = "VN by sample averages"
_KEPT = (
    "first_mean",
    "first_log_sd",
    "seed",
    "draws",
    "evaluations",
    "rejections",
    "looked",
    "switched",
    "near",
    "daring",
    "evidence",
)  # in a checkpoint
_FEWEST, _MOST = 32, 16_384  # draws of one sample average
_FEWEST_DIAGONAL = 128  # of a mean field in as many dimensions and more, or its start is left for the noise of few
_STREAMED = 1024  # the fewest where each is a pass over data in batches
_NEAR = 0.3  # norm² + noise² below which steps need no trial
_RISE = 0.1  # share of noise² that the average may rise in such a step
_NEARER = 0.5  # share of norm² it may leave at most
_LEFT = 0.1  # share of norm² such a step leaves
_GROWTH = 6  # largest factor from one sample average to the next
_NEAR_GROWTH = 7  # the same where steps need no trial
_SOLVED = 0.5  # share of noise² at which more accuracy on the same draws is of no use
_STAGE = 30  # evaluations after which a sample average is given up for a larger one
_FRESH = 1024  # draws of the check
_DEAR = 512  # draws before which other starts are looked at
_STARTS = (2, 8)  # other starts of the check, fewest and most
_COLUMNS = 64  # of all their Hessians together, between these
_TRIES = 20  # points looked at for a finite density
_CONFINED = 15.0  # log of the factor by which a standard deviation may grow
_BOUNDED = 1e12  # nats to which the ELBO may rise
_WIDEST = 200  # dimensions up to which the Hessian of a start is worth its gradients
_SHRINK = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3)  # of the scale, where the first draws fall off the support
_REJECTED = 3  # in a row: nothing more is to be had on these draws


class _Fresh(NamedTuple):
    """q on fresh draws."""

    elbo: Tensor  # (*batch,)
    error: Tensor  # (*batch,)
    share: float  # effective sample size over the number of draws, the smallest
    lost: str  # why there is no such number, or nothing

    def __str__(self) -> str:
        return f"on {_FRESH} fresh draws the ELBO is {float(self.elbo.sum()):.6g} ± {float(self.error.norm()):.1g}"


class _Stage(NamedTuple):
    """Where the minimisation over one set of draws ended."""

    norm2: Tensor  # (*batch,)
    noise2: Tensor  # (*batch,)
    loss: Tensor  # (*batch,)
    reason: str = ""  # to end the run, or nothing

    @property
    def total(self) -> float:
        """√(norm² + noise²): about half its square, in nats, is lost."""
        return float((self.norm2 + self.noise2).max()) ** 0.5


def fit_by_draws(
    q: Gaussian,
    target: Target,
    tolerance: float,
    max_evaluations: int,
    callbacks: tuple[Callable[[Record], Any], ...],
    progress: bool,
    checkpoint: str | Path | None,
) -> FitResult:
    """`torchngvi.fit` on a log joint, without an optimizer; draws come from a seed taken from torch's generator."""
    file = None
    if checkpoint is not None:
        settings = {"method": _METHOD, **fingerprints.of_problem(q, target)}
        file = checkpoints.Checkpoint(checkpoint, settings, q.mean_probe.device)
    seed = int(torch.randint(2**31, ()))
    run = _Run(q, Guarded(target), tolerance, max_evaluations, callbacks, progress, file, seed)
    with torch.no_grad(), FullPrecision(q.mean_probe.device.type):
        return run.run()


@dataclass
class _Run:
    """q, what was spent, and what is left to try."""

    q: Gaussian
    target: Guarded
    tolerance: float
    max_evaluations: int
    callbacks: tuple[Callable[[Record], Any], ...]
    progress: bool
    file: checkpoints.Checkpoint | None
    seed: int
    trace: list[Record] = field(default_factory=list)
    draws: int = 0
    evaluations: int = 0
    rejections: int = 0
    looked: bool = False  # at other starts
    switched: bool = False  # another start was better
    near: bool = False
    daring: bool = True
    evidence: float = -math.inf  # Laplace's, of the start
    halt: str = ""  # why to end the run, found on the way
    unseen: str = ""  # why no other start was looked at
    optimizer: VN | None = None
    standing: checkpoints.State | None = None  # before the first evaluation on the present draws, which completes it
    expected: Tensor | None = None  # the loss there, from a checkpoint

    def run(self) -> FitResult:
        """Start, minimise, grow, check."""
        self.began = time.perf_counter()
        self.first_mean, self.first_log_sd = self.q.frame().mean.clone(), self.q.stddev.log()
        start = self.here = self.q.snapshot()
        stage: _Stage | None = None
        with tqdm(total=self.max_evaluations, disable=not self.progress, desc="VN", unit="eval") as self.bar:
            try:
                resumed = self._resumed()
                self._check_repeats()
                if not self.draws:  # not even started
                    if self.file is not None and not resumed:
                        self.file.save(self._standing(self.file))
                    self._start()
                    self.draws = self._first_draws()
                    self.first_log_sd = self.q.stddev.log()  # where it started
                    self.here = self.q.snapshot()
                while True:
                    self.standing = None if self.file is None else self._standing(self.file)
                    stage = self._minimised()
                    if stage.reason:
                        return self._result(False, stage.reason, stage)
                    total = stage.total
                    self.near = self.daring and total**2 < _NEAR
                    if total <= self.tolerance:
                        trusted, reason = self._checked(stage, total)
                        if trusted:
                            return self._result(True, reason, stage)
                        if reason:
                            return self._result(False, reason, stage)
                        continue
                    more = self._more_draws(stage)
                    if (more > _DEAR or self.draws == _MOST) and self._better_start():
                        continue
                    if self.halt:
                        return self._result(False, self.halt, stage)
                    if self.draws == _MOST:
                        return self._result(False, self._why_not(stage, total), stage)
                    self.draws = more
            except KeyboardInterrupt:
                self._restore(self.here)
                if stage is None and not self.trace:
                    raise
                return self._result(False, "because it was interrupted.", stage)
            except InputError:  # refused: nothing has happened
                self._restore(start)
                raise

    # -------------------------------------------------------------------------------- start

    def _start(self) -> None:
        """q at a rough mode, with the curvature there; with data in batches, where one pass leads."""
        data = self.target.target
        if isinstance(data, DataLogJoint):
            stream_batches(self.q, data, self.seed)
            return
        if not self._can_start():
            return
        mode = self._mode(self.first_mean)
        if mode is None:  # no finite density there: from the first point that has one
            points = self.first_mean + self._shifts(_TRIES)
            finite = torch.isfinite(self.target.log_joint(points)).nonzero()
            if len(finite):
                mode = self._mode(points[finite[0, 0]])
        if mode is not None:
            self.evidence = mode.log_evidence
            self._place(mode, or_stay=True)

    def _mode(self, start: Tensor) -> Mode | None:
        return find_mode(self.target, start, self._budget())

    def _budget(self) -> int:
        return 200 + 20 * self.q.dim

    @torch.no_grad()
    def _check_repeats(self) -> None:
        """Draws inside the function would be taken for the shape of the posterior."""
        if self._streamed():
            return
        theta = self.first_mean[None]
        first, second = self.target.log_joint(theta), self.target.log_joint(theta)
        rounding = 1e3 * torch.finfo(first.dtype).eps * first.abs().clamp_min(1.0)
        if bool(((first - second).abs() > rounding).any()):
            raise InputError(
                f"the log joint gives {float(first.sum()):.6g} and then {float(second.sum()):.6g} at the same theta: "
                "it draws. Draw once and keep the draws, give mini-batches to DataLogJoint, or pass an optimizer with "
                "a learning rate, VN(q, lr=0.1)."
            )

    def _shifts(self, count: int) -> Tensor:
        """Uniform on (-2, 2), (count, D)."""
        generator = torch.Generator().manual_seed(self.seed)
        uniform = torch.rand(count, self.q.dim, generator=generator, dtype=torch.float64)
        return (4 * uniform - 2).to(self.first_mean)

    def _starts(self) -> int:
        """How many other starts: more where they are cheap."""
        return min(max(_COLUMNS // self.q.dim, _STARTS[0]), _STARTS[1])

    def _can_start(self) -> bool:
        """Whether modes are looked for: not where a gradient is a pass over data, or a Hessian too dear."""
        return not self.q.batch_shape and self.q.dim <= _WIDEST and not self._streamed()

    def _streamed(self) -> bool:
        """Whether each evaluation is a pass over data in batches."""
        return isinstance(self.target.target, DataLogJoint)

    def _place(self, mode: Mode, or_stay: bool = False) -> None:
        """q at the mode, narrower where its draws leave the support; or as it is, where that is better."""
        q, here = self.q, self.q.snapshot()
        best = self._sampled_loss(_FEWEST) if or_stay else math.inf
        scale, loss = q.kept_precision(mode.root), math.inf  # of a mean field 1/√diag H
        for factor in _SHRINK:
            try:
                q.initialize_(mode.theta, factor * scale)
            except InputError:  # no numbers of this dtype: q has kept its place
                break
            loss = self._sampled_loss(_FEWEST)
            if loss < math.inf:
                break
        if not loss < best and or_stay and best < math.inf:
            self._restore(here)

    def _restore(self, coordinates: Coordinates) -> None:
        self.q.assign(coordinates, torch.ones(self.q.batch_shape, dtype=torch.bool, device=self.q.device))

    def _sampled_loss(self, draws: int) -> float:
        """L at q from whitened draws, the same for every q; infinite where it is not finite."""
        q = self.q
        theta = q.push_noise(Fixed(draws, seed=self.seed + 2)(q.mean_probe.detach())).detach()
        loss = float(-self.target.log_joint(theta).mean() - self.target.temperature * q.entropy())
        return loss if math.isfinite(loss) else math.inf

    def _first_draws(self) -> int:
        whitened = 2 * self.q.dim + 2  # exact on a quadratic
        # blocks are whitened by fewer draws than all coordinates together
        fewest = max(2 * self.q.structure.widest + 2, min(whitened, _FEWEST_DIAGONAL))
        # a pass over data costs its reading, whatever the number of draws
        return max(_STREAMED if self._streamed() else _FEWEST, fewest)

    # -------------------------------------------------------------------------------- minimise

    def _minimised(self) -> _Stage:
        """Minimise the sample average over the present number of draws, by trial steps.

        Near the optimum two steps are taken as they come, and the second is not evaluated; the first that
        turns out to be wrong is undone, and all later ones are tried.
        """
        optimizer, previous, before = self._optimizer(), None, self.q.snapshot()
        step, stalled, first = 0.0, 0, self.evaluations
        while True:
            stage = self._evaluated(optimizer, step)
            if previous is not None and self._went_wrong(stage, previous):
                self._restore(before)
                self.near, self.daring, self.optimizer, previous = False, False, None, None
                optimizer = self._optimizer()
                continue
            done = stage.norm2 <= torch.clamp_min(_SOLVED * stage.noise2, 0.05 * self.tolerance**2)
            if stage.reason or bool(done.all()) or stalled >= _REJECTED or self.evaluations - first >= _STAGE:
                return stage
            if self.near:
                before, second, previous = self.q.snapshot(), previous is not None, stage
                self._count(optimizer, optimizer.step_untried)
                left = stage._replace(norm2=_LEFT * stage.norm2)
                if second and left.total > self.tolerance and self.draws < _MOST:
                    return left
            else:
                self._count(optimizer, optimizer.step)
            assert optimizer.last is not None
            step = float(optimizer.last.rho.min())
            rejected = ~optimizer.last.accepted
            self.rejections += int(rejected.sum())
            stalled = stalled + 1 if bool((rejected | done).all()) else 0

    def _went_wrong(self, stage: _Stage, previous: _Stage) -> bool:
        """An untried step has to keep the average from rising, and to bring the norm down where it is not noise."""
        fell = stage.loss <= previous.loss + _RISE * previous.noise2
        nearer = stage.norm2 <= torch.maximum(_NEARER * previous.norm2, previous.noise2)
        return not bool((fell & nearer).all())

    def _estimator(self) -> SampleAverage:
        return SampleAverage(Fixed(self.draws, seed=self.seed + self.draws))

    def _optimizer(self) -> VN:
        """The one that is running, on the present draws; a new one for a new start."""
        estimator = self._estimator()
        if self.optimizer is None:
            self.optimizer = VN(self.q, estimator=estimator)
            return self.optimizer
        self.optimizer.resample(estimator)
        return self.optimizer

    def _evaluated(self, optimizer: VN, step: float) -> _Stage:
        """Where q stands on these draws."""
        gamma = self.target.temperature or 1.0
        status = self._count(optimizer, optimizer.evaluate)
        assert status.noise2 is not None
        if self.expected is not None and self.file is not None:
            self.file.check_loss(self.expected, status.loss, lambda: status.loss)
        if self.standing is not None and self.file is not None:
            self.file.save({**self.standing, "loss": status.loss.clone()})
        self.expected = self.standing = None
        self.here = self.q.snapshot()
        stage = _Stage(status.norm2 / gamma**2, status.noise2 / gamma**2 * self._overfit(), status.loss)
        self._record(stage, step)
        return stage._replace(reason=self._why_stop(stage, status.loss.isfinite() & status.norm2.isfinite()))

    def _count(self, optimizer: VN, do: Callable[[Target], Any]) -> Any:
        """Do it on the target, and count what it takes."""
        before = optimizer.evaluations
        result = do(self.target)
        self.evaluations += optimizer.evaluations - before
        return result

    def _overfit(self) -> float:
        """S numbers a coordinate have to pay for 1 + (D + 1)/2 parameters a coordinate."""
        parameters = 1 + self.q.structure.parameters / self.q.dim
        return self.draws / max(self.draws - parameters, 0.25 * self.draws)

    def _more_draws(self, stage: _Stage) -> int:
        """As many as bring noise² to half of tolerance², within limits."""
        wanted = float(stage.noise2.max()) / (0.5 * self.tolerance**2)
        factor = min(max(wanted, 2), _NEAR_GROWTH if self.near else _GROWTH) if math.isfinite(wanted) else 2
        return min(2 * math.ceil(0.5 * factor * self.draws), _MOST)

    # -------------------------------------------------------------------------------- check

    def _checked(self, stage: _Stage, total: float) -> tuple[bool, str]:
        """On fresh draws and from other starts: trusted, with the reason; or a reason to give up; or go on."""
        fresh = self._fresh()
        if fresh.lost:
            return False, fresh.lost
        optimism = (-fresh.elbo - stage.loss).amax() - 5 * fresh.error.amax()
        if float(optimism) > 0.5 + self.tolerance and self.draws < _MOST:
            self.draws = min(4 * self.draws, _MOST)
            return False, ""
        if self._better_start() or self.halt:
            return False, self.halt
        self.loss = -fresh.elbo
        others = self.unseen
        if not others and self._can_start():
            others = f", and {self._starts()} other starts found nothing better"
            others = ", from the best of several starts" if self.switched else others
        return True, (
            f"natural-gradient norm {total:.2g} with {self.draws} draws, about {0.5 * total**2:.1g} nats from the best "
            f"q; {fresh}, importance sampling would keep {fresh.share:.0%} of them{others}.{self.target.failures()}"
        )

    def _fresh(self) -> "_Fresh":
        """The log weights of draws that were not fitted to."""
        q, failed = self.q, self.target.failures()
        z = Fixed(_FRESH, seed=self.seed + 1)(q.mean_probe.detach())
        theta = q.push_noise(z).detach()
        reason = ""
        try:
            with torch.enable_grad():  # as in the fit, for functions that differentiate
                value = self.target.log_joint(theta).detach()
        except InputError as error:  # of a batch of another size: the fit is not lost for it
            value = theta.new_full(theta.shape[:-1], torch.nan)
            reason = f"because the check on {_FRESH} fresh draws could not be made: {error}"
        terms = value - self.target.temperature * q.log_prob(theta)
        bad = int((~torch.isfinite(terms)).sum())
        if bad and not reason and self.target.failures() != failed:
            reason = f"because the log joint fails at {bad} of {terms.numel()} draws from q.{self.target.failures()}"
        elif bad and not reason:
            reason = (
                f"because the log joint is not finite at {bad} of {terms.numel()} draws from q: no Gaussian fits "
                "inside its support. Transform the constrained coordinates."
            )
        weights = torch.softmax(terms / (self.target.temperature or 1.0), 0)
        share = float((1 / weights.square().sum(0)).min()) / _FRESH
        return _Fresh(terms.mean(0), terms.std(0) / math.sqrt(_FRESH), share, reason)

    def _better_start(self) -> bool:
        """Search from points around the first start, once; True where q now is at a better one."""
        if not self._can_start() or self.looked:
            return False
        self.looked = True
        try:
            return self._found_better()
        except (TorchngviError, RuntimeError, ArithmeticError) as error:  # whatever fails elsewhere, q is where it was
            self.halt = ""
            self.unseen = f", and other starts could not be looked at ({str(error).rstrip('.')})"
            return False

    def _found_better(self) -> bool:
        starts = self.first_mean + self._shifts(self._starts())
        modes = [mode for mode in find_modes(self.target, starts, self._budget()) if mode is not None]
        found = max(modes, key=lambda mode: mode.log_evidence, default=None)
        if found is None or found.log_evidence < 1 + self.evidence:
            return False
        old, kept, loss = self.q.snapshot(), (self.optimizer, self.near, self.draws), self._sampled_loss(_FRESH)
        better = False
        try:
            self._place(found)
            self.optimizer, self.near, self.draws = None, False, self._first_draws()
            self.halt = self._minimised().reason
            better = self._sampled_loss(_FRESH) < loss
        finally:
            if not better:
                self._restore(old)
                self.here = old
                self.optimizer, self.near, self.draws = kept
        if not self.stopped and self.evaluations < self.max_evaluations:
            self.halt = ""  # it ended there, not here
        self.switched = self.switched or better
        return better and not self.halt

    # -------------------------------------------------------------------------------- checkpoints

    def _standing(self, file: checkpoints.Checkpoint) -> checkpoints.State:
        """Before the first evaluation on the present draws; the loss is known after it."""
        return file.captured(
            posterior=self.q.state_dict(),
            optimizer=None if self.optimizer is None else self.optimizer.state_dict(),
            trace=[tuple(record) for record in self.trace],
            seconds=time.perf_counter() - self.began,
            gradients=self.target.gradients,
            loss=None,
            **{name: getattr(self, name) for name in _KEPT},
        )

    def _resumed(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        state = None if self.file is None else self.file.load()
        if self.file is None or state is None:
            return False
        with self.file.restoring(state):
            self.q.load_state_dict(state["posterior"])
            for name in _KEPT:
                setattr(self, name, state[name])
            if state["optimizer"] is not None:
                self.optimizer = VN(self.q, estimator=self._estimator())
                self.optimizer.load_state_dict(state["optimizer"])
            self.expected, self.target.gradients = state["loss"], state["gradients"]
            self.began -= state["seconds"]
            self.here = self.q.snapshot()
            self.trace[:] = [Record(*values) for values in state["trace"]]
        return True

    # -------------------------------------------------------------------------------- report

    def _record(self, stage: _Stage, step: float) -> None:
        record = Record(
            self.evaluations,
            float(stage.loss.sum()),
            stage.total,
            step,
            self.rejections,
            self.target.gradients,
            time.perf_counter() - self.began,
        )
        self.trace.append(record)
        show(self.bar, record)
        answers = [callback(record) for callback in self.callbacks]
        self.stopped = any(answers)

    def _why_stop(self, stage: _Stage, alive: Tensor) -> str:
        record = self.trace[-1]
        if not bool(alive.all()):
            return (
                f"because the negative ELBO is {record.loss} at this q: the log joint is not finite at some of its "
                "draws. Start from another mean or a smaller scale (initialize_), or transform constrained coordinates."
                f"{self.target.failures()}"
            )
        wider = float((self.q.stddev.log() - self.first_log_sd).max())
        if wider > _CONFINED or record.loss < -_BOUNDED:
            return (
                f"because the negative ELBO falls without bound, to {record.loss:.3g}, and q spreads e^{wider:.0f} "
                "times as wide as it started: the log joint does not confine q. Give every parameter a proper prior."
            )
        if self.stopped:
            return f"because a callback stopped it at natural-gradient norm {record.norm:.2g}."
        if record.evaluations >= self.max_evaluations and record.norm > self.tolerance:
            return (
                f"because the budget of {self.max_evaluations} evaluations is used up (natural-gradient norm "
                f"{record.norm:.2g} against a tolerance of {self.tolerance:.2g}). Raise max_evaluations."
            )
        return ""

    def _why_not(self, stage: _Stage, total: float) -> str:
        fresh = self._fresh()
        solved = bool((stage.norm2 <= stage.noise2).all()) and total < 1
        lost = f", about {0.5 * total**2:.1g} nats from the best q" if solved else ": q is not at an optimum"
        return (
            f"because {self.draws} draws leave a natural-gradient norm of {total:.2g} against a tolerance of "
            f"{self.tolerance:.2g}{lost}; {fresh.lost or fresh}. Raise the tolerance, or transform the model to be "
            f"nearer to a Gaussian.{self.target.failures()}"
        )

    def _result(self, converged: bool, reason: str, stage: _Stage | None) -> FitResult:
        last = self.trace[-1]
        norm, loss = (last.norm, last.loss) if stage is None else (stage.total, float(stage.loss.sum()))
        loss = float(self.loss.sum()) if converged else loss
        members = torch.full(self.q.batch_shape, converged)
        if stage is not None and not converged:
            members = (stage.norm2 + stage.noise2).sqrt() <= self.tolerance
        if converged:
            self.bar.total = self.bar.n
        self.bar.refresh()
        return FitResult(converged, reason, loss, norm, last.evaluations, members, self.trace)
