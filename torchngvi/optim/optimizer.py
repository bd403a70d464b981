"""The optimizer: estimate, ask the rule for its path, ask the control how far, move, judge.

Three ways to step, one loop:

    opt.step(target)                       a model or a log joint; derivatives by an estimator
    opt.step(closure)                      a closure returning the loss, as LBFGS takes one
    loss.backward(); opt.step()            gradients already in the probes

In the second and third the loss is whole, entropy included: the probes receive a and P, which the
step uses up, so that no later one can add to them; without a step they add up, as in torch.  Nothing
here reads a value back from the device; a step that leaves the positive definite cone or meets a
non-finite value is not taken, member by member.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.distributed import ranks
from torchngvi.errors import InputError, PairError, RejectedStepWarning, UnsummedRanksWarning
from torchngvi.expectations import Quadrature, Stein
from torchngvi.interfaces import (
    Acceleration,
    Coordinates,
    Cost,
    Estimator,
    Expectation,
    Framed,
    Local,
    LogTangent,
    Metric,
    Momentum,
    Move,
    Path,
    Posterior,
    Rule,
    StepSize,
    Tangent,
    Target,
    TractableTarget,
    Trial,
    where_members,
)
from torchngvi.metrics.quasi_newton import QuasiNewton
from torchngvi.models.arguments import FullPrecision, as_target, classify, real
from torchngvi.numerics.inference_mode import tracked
from torchngvi.numerics.versions import Versions
from torchngvi.stepsizes import Constant, SufficientDecrease
from torchngvi.structures import FullAlgebra

_SLACK = 0.1  # of noise²: the objective may rise on the way to where a noisy derivative vanishes


class Evaluation(NamedTuple):
    """L and the packet at one q."""

    loss: Tensor  # L(q) = E_q[ℓ] - γ entropy, (*batch,)
    e: Expectation


class Heading(NamedTuple):
    """Where the next step may go."""

    path: Path
    norm2: Callable[[], Tensor]  # squared natural norm of ∇L, (*batch,)
    memory: dict[str, Any]  # of the acceleration or momentum, for the state once the step is taken


class Cached(NamedTuple):
    """An evaluation, and what it was computed from."""

    target: Target
    settings: tuple[object, ...]  # of the target, with its temperature
    versions: Versions  # of the tensors of the target and the coordinates of q
    evaluation: Evaluation
    heading: Heading


class Status(NamedTuple):
    """Where q stands."""

    loss: Tensor  # (*batch,)
    norm2: Tensor  # squared natural-gradient norm, (*batch,)
    noise2: Tensor | None  # its expected value at the optimum, known from the draws: a squared standard error


class Report(NamedTuple):
    """What the last step did."""

    rho: Tensor  # step size, (*batch,); in units of 1/γ where it was found by trial
    accepted: Tensor  # (*batch,)


class NaturalGradientVI(torch.optim.Optimizer):
    """A rule and a step size applied to one posterior or several.

    Args:
        posterior: a `Posterior`, an iterable of them, or of dicts with the key "posterior" and
            options of their own, as torch's param groups.
        rule: which curve, from `torchngvi.rules`.
        lr: the step size; without it, steps are found by trial (`SufficientDecrease`), up to 1/γ, the
            full Newton step.
        step_size: a control from `torchngvi.stepsizes`; lr is then its upper limit, 1 if not given.
        estimator: how E_q[ℓ] is obtained; by default `Quadrature` where the target allows it,
            otherwise `Stein()`.
        acceleration: `QuasiNewton` memory, or `SiteNewton`, for the slow tail; the first is on by default
            where steps are found by trial (neither lr nor step_size given) along a natural gradient.  For a flat
            posterior a metric of `torchngvi.ifvb`, such as `Recursive`, with the rule `RootGradient`.
        momentum: `NormalizedMomentum`, `Adam` or `ExponentialAverage`, which averages the changes over the steps; with
            a learning rate.
        loss_scale: multiplies the gradients of a closure's loss, N for a loss divided by N.

    Raises:
        InputError: lr or loss_scale not positive, no posterior.
        PairError: parts that cannot work together.
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        rule: Rule,
        lr: float | Tensor | None = None,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        acceleration: Metric | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        _check_parts(
            rule=(rule, Rule),
            step_size=(step_size, StepSize),
            estimator=(estimator, Estimator),
            acceleration=(acceleration, Metric),
            momentum=(momentum, Momentum),
        )
        self.rule = rule
        if isinstance(posterior, Posterior) or not isinstance(posterior, Iterable):
            posterior = [posterior]
        groups = [g if isinstance(g, dict) else {"posterior": g} for g in posterior]
        framed = all(getattr(group.get("posterior"), "framed", True) for group in groups)
        by_trial = lr is None and step_size is None and momentum is None and rule.natural
        if acceleration is None and by_trial and framed:
            acceleration = QuasiNewton()
        self.acceleration, self.momentum = acceleration, momentum
        self.step_size = step_size or (SufficientDecrease() if lr is None else Constant())
        self.estimator = estimator
        self.posteriors: list[Posterior] = []
        self.evaluations = 0
        self.gradients = 0  # of the log joint, one a draw; for a model, passes over its data
        self.values = 0  # of the log joint without a gradient
        self.last_cost = 0  # gradients of the last evaluation
        self.last: Report | None = None
        self._cache: Cached | None = None
        self._found = lr is None  # steps in units of 1/γ, the step of Newton
        self._warned = False
        self._asked_ranks = False
        self._repeats = False  # the closure was seen to give the same loss twice
        if estimator is not None:
            self._check_comparable(estimator)
        self._check_metric()
        if momentum is not None:
            self._check_momentum(momentum)
        self._check_step_size()
        if not groups:
            raise InputError(
                "the list of posteriors is empty; pass q itself, not q.parameters(): its coordinates are buffers."
            )
        defaults = {"lr": 1.0 if lr is None else lr, "loss_scale": loss_scale}
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a posterior: ``{"posterior": q, "lr": 0.1}``."""
        group = dict(param_group)
        q = group.pop("posterior", None)
        if not isinstance(q, Posterior):
            raise InputError(
                f"{type(self).__name__} updates posteriors such as CholeskyGaussian(dim); got {type(q).__name__}. "
                "Give other parameters to a torch optimizer."
            )
        if self.rule.emits not in q.takes:
            raise PairError(
                f"{type(self.rule).__name__} moves q by {self.rule.emits.__name__}, which {type(q).__name__} "
                f"cannot do (it takes {', '.join(sorted(m.__name__ for m in q.takes))}). "
                "Use a CholeskyGaussian or a DiagonalGaussian."
            )
        if self.rule.full_algebra and not isinstance(q.structure, FullAlgebra):
            raise PairError(
                f"{type(self.rule).__name__} needs products of matrices that leave the pattern of {q.structure}. "
                "Use VariationalNewton(), NaturalGradient() or LocalExponential(), or a structure of blocks."
            )
        self._check_part_for(q)
        for name in ("lr", "loss_scale"):
            value = group.get(name, self.defaults[name])
            if not isinstance(value, Tensor):
                real(name, value, "is a number, or a tensor with one entry a member")
            lowest = float(torch.as_tensor(value).min())
            if not lowest > 0:
                raise InputError(f"{name} must be positive; got {lowest:g}.")
        group["params"] = [q.mean_probe, q.root_probe]
        super().add_param_group(group)
        self.posteriors.append(q)

    @property
    def _natural(self) -> bool:
        """Whether a step starts along the natural gradient, or what estimates it."""
        return self.rule.natural or (self.acceleration is not None and self.acceleration.natural)

    def _check_metric(self) -> None:
        if self.acceleration is None:
            return
        name, rule = type(self.acceleration).__name__, type(self.rule).__name__
        if not isinstance(self.acceleration, Acceleration):
            if self.rule.natural:
                raise PairError(
                    f"{name} bends a plain gradient, and {rule} would take what it returns for one that is natural "
                    "already. Use RootGradient() with it, or leave it out."
                )
        elif not self.rule.natural or not self.step_size.needs_trial:
            raise PairError(
                f"{name} bends natural gradients that are free of noise, and judges what "
                f"it did by trial; got {rule} with {type(self.step_size).__name__}. "
                "Use VN or SRVN with SufficientDecrease(), or leave the acceleration out."
            )

    def _check_step_size(self) -> None:
        name, rule = type(self.step_size).__name__, type(self.rule).__name__
        if self.step_size.needs_natural and not self._natural:
            raise PairError(
                f"{name} measures steps in the natural norm, which says nothing of the curve "
                f"of {rule}. Use a constant lr, or SufficientDecrease()."
            )
        if self.step_size.needs_tangent and not issubclass(self.rule.emits, Tangent):
            raise PairError(
                f"{name} measures steps along a straight line in q's own coordinates; {rule} moves q by "
                f"{self.rule.emits.__name__}. Use NaturalGradient() or RootGradient(), or KLRadius(0.1)."
            )

    def _check_part_for(self, q: Posterior) -> None:
        """Parts that read a mean and a root, for a q that has none, and parts that read a vector."""
        if self.estimator is not None:
            self.estimator.check(q)
        if self.acceleration is not None and isinstance(self.acceleration, Acceleration) != q.framed:
            name = type(self.acceleration).__name__
            reads, use = (
                ("a flat vector and its scores", "QuasiNewton()") if q.framed else ("the frame of q", "Exact()")
            )
            raise PairError(
                f"{name} reads {reads}, which {type(q).__name__} does not have. Use {use}, or leave it out."
            )

    def _check_momentum(self, momentum: Momentum) -> None:
        name, rule = type(momentum).__name__, type(self.rule).__name__
        if not issubclass(self.rule.emits, Tangent):
            raise PairError(
                f"{name} averages changes of q's own coordinates; {rule} moves q by {self.rule.emits.__name__}. "
                "Use NaturalGradient() or RootGradient()."
            )
        if momentum.needs_natural and not self._natural:
            raise PairError(f"{name} normalises natural gradients; those of {rule} are not. Use Adam().")
        if self.step_size.needs_trial or (self.step_size.needs_natural and not momentum.of_steps):
            raise PairError(
                f"{name} goes where the steps before have gone; {type(self.step_size).__name__} needs the direction "
                "of the gradient. Pass a learning rate, for example lr=0.001."
            )

    # -------------------------------------------------------------------------------- evaluate

    @tracked
    @torch.no_grad()
    def evaluate(self, target: Target | Callable[[Tensor], Tensor]) -> Status:
        """L and the natural-gradient norm at q; the next step on the same target reuses the work."""
        target = as_target(target)
        if not target.tensors():
            self._cache = None  # nobody knows whether the target has changed
        evaluation, heading = self._evaluated(target, wait=True)
        return Status(evaluation.loss, heading.norm2(), evaluation.e.noise2)

    @torch.no_grad()
    def averaged(self, target: Target, repeats: int) -> Status:
        """L and the norm of the mean gradient of two fresh evaluations at q or more, with its squared standard error.

        For a verdict where there are draws: the norm of one evaluation is small by chance too, and that on fixed draws
        says nothing of others.
        """
        q = self._only_posterior("a target")
        self._state(0)
        first = self._evaluate_target(target, q, fresh=1)
        loss, (a, P) = first.loss, q.local(first.e)
        scatter = torch.zeros_like(loss)
        for count in range(2, repeats + 1):  # as Welford (1962), without cancellation
            loss_here, e = self._evaluate_target(target, q, fresh=count)
            local = q.local(e)
            change = Local(local.a - a, local.P - P)
            loss, a, P = loss + (loss_here - loss) / count, a + change.a / count, P + change.P / count
            scatter = scatter + (1 - 1 / count) * self._norm2(q, change)
        return Status(loss, self._norm2(q, Local(a, P)), scatter / (repeats * (repeats - 1)))

    def _norm2(self, q: Posterior, local: Local) -> Tensor:
        """The squared natural norm of a gradient: q's own, or that of the metric that stands in its place."""
        if self.acceleration is None or isinstance(self.acceleration, Acceleration):
            return q.norm2(local)
        return self.acceleration(q, local, self._state(0))[0].slope

    def _evaluated(self, target: Target, wait: bool = False) -> tuple[Evaluation, Heading]:
        """The packet and heading at q, from the cache while q and the target are what they were."""
        q, kept = self._only_posterior("a target"), self._cache
        if (
            kept is None
            or (kept.target, kept.settings) != (target, _settings(target))
            or not kept.versions.hold((*target.tensors(), *q.coordinates), wait)
        ):
            target.admit(q)
            evaluation = self._evaluate_target(target, q)
            self._forget_unless(evaluation.loss)
            kept = self._keep(target, evaluation)
        return kept.evaluation, kept.heading

    def _keep(self, target: Target, evaluation: Evaluation) -> Cached:
        """Into the cache: an evaluation at q as it is now, with the way from there."""
        before = None if self._cache is None else self._cache.versions
        versions = Versions((*target.tensors(), *self.posteriors[0].coordinates), before)
        heading = self._heading(0, evaluation.e)
        self._cache = Cached(target, _settings(target), versions, evaluation, heading)
        return self._cache

    def _heading(self, index: int, e: Expectation) -> Heading:
        """The rule's path along the gradient, or along the gradient bent by the memory."""
        q = self.posteriors[index]
        unit = 1 / e.temperature if self._found and e.temperature > 0 else 1.0
        if self.acceleration is None:
            path = self.rule(q, e)
            return Heading(path.in_units_of(unit), path.norm2, {})
        gradient = q.local(e)
        # the memory sees L/γ, whose curvature in the frame is about 1 whatever γ
        bent, memory = self.acceleration(q, Local(unit * gradient.a, unit * gradient.P), self._state(index))
        a, P = bent.local.a / unit, bent.local.P / unit
        path = self.rule(q, e._replace(derivative=Framed(a, P + e.temperature * q.structure.eye(a))))
        path = replace(path.in_units_of(unit), slope=lambda: bent.slope / unit)
        if isinstance(self.acceleration, Acceleration):
            return Heading(path, lambda: q.norm2(gradient), memory)
        return Heading(replace(path, norm2=path.slope), path.slope, memory)

    def _averaged(self, q: Posterior, path: Path, lr: float | Tensor, state: dict[str, Any]) -> Heading:
        """The path along the average of the changes; a change that is not finite is not remembered."""
        assert self.momentum is not None
        share = torch.ones_like(state["rejections"])
        if self.momentum.of_steps:
            share = self.step_size.propose(path, lr, state["rejections"], state) / lr
        move = path.at(share)
        assert isinstance(move, Tangent)
        kind, (vector, matrix) = type(move), move.change
        state = state | {name: q.carried(state[name]) for name in self.momentum.carried}
        change, memory = self.momentum(q, move.change, path.norm2, state)
        finite = vector.isfinite().all(-1) & q.structure.is_finite(matrix)
        memory = {name: where_members(finite, value, state[name]) for name, value in memory.items()}

        def at(rho: Tensor) -> Move:
            return kind(Coordinates(rho[..., None] * change.vector, q.structure.scaled(rho, change.matrix)))

        return Heading(Path(at, path.norm2, path.slope), path.norm2, memory)

    def _state(self, index: int) -> dict[str, Any]:
        """Everything of this posterior that changes from step to step, on first use made."""
        q = self.posteriors[index]
        state = self.state[q.mean_probe]
        if "rejections" not in state:
            self._complete(q, state)
        elif state["rejections"].dtype != q.mean_probe.dtype or state["rejections"].device != q.mean_probe.device:
            state.update(_converted(state, q.mean_probe))  # q was converted or moved, as torch lets no Parameter be
        return state

    def _complete(self, q: Posterior, state: dict[str, Any]) -> None:
        """Add what the parts need and the state lacks."""
        like = q.mean_probe.detach()[..., 0]
        fresh: dict[str, Any] = {"rejections": torch.zeros_like(like), "loss": torch.full_like(like, torch.inf)}
        fresh.update(self.step_size.init(like))
        for part in (self.acceleration, self.momentum):
            if part is not None:
                fresh.update(part.init(q))
        for name, value in fresh.items():  # torch loads a state in the dtype of the probes, booleans too
            state[name] = _in_dtypes_of(value, state[name]) if name in state else value

    def _forget_unless(self, loss: Tensor) -> None:
        """Empty the memory of members whose loss is not what the last step left: q or the target was changed."""
        state = self._state(0)
        if self.acceleration is not None:
            rounding = 64 * torch.finfo(loss.dtype).eps * loss.abs().clamp_min(1.0)
            resampled = state["loss"].isnan()
            same = ((loss - state["loss"]).abs() <= rounding) | resampled
            state["loss"] = torch.where(resampled, loss, state["loss"])
            self.acceleration.forget(same, state)

    def resample(self, estimator: Estimator) -> None:
        """Go on with another estimator of the same expectation; what is known of the curvature is kept.

        >>> from torchngvi import VN, CholeskyGaussian, Stein
        >>> from torchngvi.expectations import Fixed
        >>> opt = VN(CholeskyGaussian(1), estimator=Stein(Fixed(4)))
        >>> opt.resample(Stein(Fixed(8)))
        """
        self._check_comparable(estimator)
        self.estimator, self._cache = estimator, None
        for index in range(len(self.posteriors)):
            state = self._state(index)
            state["loss"] = torch.full_like(state["loss"], torch.nan)  # not to be compared with
            if "went" in state:  # nor the gradients
                state["went"] = torch.zeros_like(state["went"])

    def _evaluate_target(self, target: Target, q: Posterior, fresh: int | None = None) -> Evaluation:
        estimator = self._estimator_for(target)
        estimator = estimator if fresh is None else estimator.fresh(fresh)
        estimator.check(q)
        e = estimator(q, target, self.state[q.mean_probe])
        self._count(e.cost)
        return Evaluation(q.loss(e), e)

    def _count(self, cost: Cost) -> None:
        self.evaluations += 1
        self.gradients += cost.gradients
        self.values += cost.values
        self.last_cost = cost.gradients

    def evaluates_exactly(self, target: Target) -> bool:
        """Whether an evaluation gives L itself: no noise, and no average over fixed draws."""
        return self._estimator_for(target).comparable and target.comparable and not self.averages(target)

    def averages(self, target: Target) -> bool:
        """Whether every evaluation is the average over the same fixed draws."""
        return self._estimator_for(target).fixed

    def _estimator_for(self, target: Target) -> Estimator:
        estimator = self.estimator or (Quadrature() if isinstance(target, TractableTarget) else Stein())
        if not isinstance(target, estimator.needs):
            raise PairError(
                f"{type(estimator).__name__} evaluates a {estimator.needs.__name__}; "
                f"got {type(target).__name__}. Leave estimator=None, or use Stein()."
            )
        self._check_comparable(estimator)
        if self.step_size.needs_trial and not target.comparable:
            raise PairError(
                f"{type(self.step_size).__name__} compares the objective before and after a step, and a mini-batch "
                "gives another objective than the next. Pass a learning rate, for example lr=0.1."
            )
        return estimator

    def _check_comparable(self, estimator: Estimator) -> None:
        if self.step_size.needs_trial and not estimator.comparable:
            raise PairError(
                f"{type(self.step_size).__name__} compares the objective before and after a step, and "
                f"{type(estimator).__name__} gives noisy values. Pass a learning rate, for example lr=0.1, "
                "or step_size=KLRadius(0.1)."
            )

    def _only_posterior(self, what: str) -> Posterior:
        if len(self.posteriors) != 1:
            raise PairError(
                f"{what} belongs to one posterior; this optimizer has {len(self.posteriors)}. "
                "Use one optimizer each, or loss.backward() and step()."
            )
        return self.posteriors[0]

    # -------------------------------------------------------------------------------- step

    @tracked
    @torch.no_grad()
    def step(self, closure: Any = None) -> Tensor | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: a `Target`; or a function of theta, the log joint, which goes up; or a function
                without arguments, which returns the loss, which goes down; or nothing, where
                ``loss.backward()`` has filled the probes: their ``grad`` is None after the step, and
                ``zero_grad()`` drops gradients that no step is to follow.

        Returns:
            The loss before the step, 0-d (summed over batch members); None without an argument.

        Raises:
            PairError: a step size that needs a trial where none can be made, a target the estimator
                cannot evaluate, one target for several posteriors.
            InputError: gradients missing, or a callable that could be either kind of function.
        """
        with FullPrecision(self.posteriors[0].mean_probe.device.type) as outside:
            if closure is None:
                self._step_from_gradients()
                return None
            if self.estimator is not None:
                closure = self.estimator.prepared(closure)
            source = closure if isinstance(closure, Target) else classify(closure)
            if isinstance(source, Target):
                self.zero_grad()  # of a backward pass before: every step uses them up
                return self._step_on_target(source)
            return self._step_on_closure(outside.restored(source))

    def _step_on_target(self, target: Target) -> Tensor:
        q = self._only_posterior("a target")
        with q.settled():
            evaluation, heading = self._evaluated(target)
            trial = self._advance(0, evaluation, heading, lambda: self._evaluate_target(target, q), target.coupled)
            if trial is not None:
                self._keep(target, trial)
        return evaluation.loss.sum()

    @torch.no_grad()
    def step_untried(self, target: Target) -> None:
        """The step that would be tried next, taken as it is: near the optimum, where an evaluation is dear."""
        with FullPrecision(self.posteriors[0].mean_probe.device.type):
            evaluation, heading = self._evaluated(target)
            self._advance(0, evaluation, heading, None)
            state = self._state(0)
            state["loss"] = torch.full_like(state["loss"], torch.nan)  # not known yet: what is remembered stays

    def _step_from_gradients(self) -> None:
        if self.step_size.needs_trial:
            raise PairError(
                f"step() after loss.backward() has one gradient and cannot try a step, which "
                f"{type(self.step_size).__name__} needs. Pass a learning rate, for example lr=0.1, "
                "or call step with a closure or a model."
            )
        if any(q.mean_probe.grad is None and q.root_probe.grad is None for q in self.posteriors):
            raise InputError(
                "the posterior has no gradient, and each step uses up those it read: compute a loss from q.rsample(), "
                "q.log_prob(), q.entropy() or model.negative_elbo(q), call loss.backward(), then step()."
            )
        for index, q in enumerate(self.posteriors):
            with q.settled():
                e = self._packet_from_probes(index, torch.zeros_like(q.mean_probe[..., 0]))
                self._advance(index, Evaluation(e.value, e), self._heading(index, e), None)

    def _step_on_closure(self, closure: Callable[[], Tensor]) -> Tensor:
        def evaluate() -> list[Evaluation]:
            for q in self.posteriors:
                q.mean_probe.grad = q.root_probe.grad = None
            with torch.enable_grad():
                loss = closure()
                if not isinstance(loss, Tensor):
                    raise InputError(f"the closure must return the loss, a tensor; got {type(loss).__name__}.")
                if all(q.mean_probe.grad is None and q.root_probe.grad is None for q in self.posteriors):
                    if not loss.requires_grad:
                        raise InputError("the closure's loss does not depend on the posterior: it has no gradient.")
                    loss.sum().backward()
            self._count(Cost(1, 0))
            packets = [self._packet_from_probes(i, loss.detach()) for i in range(len(self.posteriors))]
            return [Evaluation(e.value, e) for e in packets]

        if self.step_size.needs_trial:
            q = self._only_posterior(f"a closure with {type(self.step_size).__name__}")
            start = evaluate()
            self._check_deterministic(start[0].loss, evaluate)
            if start[0].loss.shape != q.batch_shape:
                raise InputError(
                    f"to judge each of the {tuple(q.batch_shape)} posteriors the closure must return one loss each; "
                    f"got shape {tuple(start[0].loss.shape)}. Return the losses unsummed, or pass lr=."
                )
            self._forget_unless(start[0].loss)
            self._advance(0, start[0], self._heading(0, start[0].e), lambda: evaluate()[0])
            return start[0].loss.sum() / self.param_groups[0]["loss_scale"]
        start = evaluate()
        for index, evaluation in enumerate(start):
            self._advance(index, evaluation, self._heading(index, evaluation.e), None)
        return start[0].loss.sum() / self.param_groups[0]["loss_scale"]

    def _check_deterministic(self, loss: Tensor, evaluate: Callable[[], list[Evaluation]]) -> None:
        """Once, ask the closure again at the same q: a trial means nothing if the loss has changed.

        Where reading the answer would make the host wait for a device, it is left to the user.
        """
        if self._repeats or loss.device.type != "cpu":
            return
        again = evaluate()[0].loss
        rounding = 1e3 * torch.finfo(loss.dtype).eps * loss.abs().clamp_min(1.0)
        if bool(((again - loss).abs() > rounding).any()):
            raise PairError(
                f"{type(self.step_size).__name__} compares the objective before and after a step, and the closure "
                f"gives another loss at the same q ({float(loss.sum()):.6g}, then {float(again.sum()):.6g}): it draws. "
                "Pass a learning rate, for example lr=0.1, or draw once and keep the draws."
            )
        self._repeats = True

    def _packet_from_probes(self, index: int, loss: Tensor) -> Expectation:
        """a and W = P + I from the gradients of a whole loss, which are used up."""
        q, scale = self.posteriors[index], self.param_groups[index]["loss_scale"]
        a, R = (torch.zeros_like(p) if p.grad is None else p.grad * scale for p in (q.mean_probe, q.root_probe))
        q.mean_probe.grad = q.root_probe.grad = None
        W = q.structure.one_sided(R) + q.structure.eye(a)
        return Expectation(loss * scale, Framed(a, W), 1.0, True, Cost(1, 0))

    def _advance(
        self,
        index: int,
        start: Evaluation,
        heading: Heading,
        evaluate: Callable[[], Evaluation] | None,
        coupled: bool = False,
    ) -> Evaluation | None:
        """Move along the path; with a trial, keep it or restore, and return the packet that holds."""
        self._warn_if_unsummed()
        q, lr = self.posteriors[index], self.param_groups[index]["lr"]
        state = self._state(index)
        if self.momentum is not None:
            heading = self._averaged(q, heading.path, lr, state)
        path = heading.path
        if self.momentum is not None and self.momentum.of_steps:
            rho = torch.ones_like(state["rejections"]) * lr
        else:
            rho = self.step_size.propose(path, lr, state["rejections"], state).to(q.mean_probe.dtype)
        move = path.at(rho)
        new, accept = q.moved(move)
        memory = heading.memory
        if self.momentum is not None:
            memory = memory | _turned(q, move, accept, {name: memory[name] for name in self.momentum.signed})
        result = None
        if not self.step_size.needs_trial or evaluate is None:
            q.assign(new, accept)
            if not self.step_size.needs_trial:
                self._warn_if_rejected(q, accept, rho)
        else:
            old = q.snapshot()
            slope, length = path.slope(), rho * path.norm2().sqrt()
            q.assign(new, accept)
            try:
                trial = evaluate()
            except BaseException:  # an interrupt, an error in the user's function: nothing is lost
                q.assign(old, torch.ones_like(accept))
                raise
            slack = 0.0 if start.e.noise2 is None else _SLACK * start.e.noise2
            tried = Trial(start.loss, trial.loss, slope, length, rho, slack)
            kept, control = self.step_size.judge(_together(tried) if coupled else tried, state)
            accept = accept & kept
            q.assign(old, ~accept)
            usable = rho.isfinite() & slope.isfinite() & start.loss.isfinite()
            state.update({name: torch.where(usable, value, state[name]) for name, value in control.items()})
            result = _merged(accept, trial, start)
            state["loss"] = result.loss
        state["rejections"] += ~accept
        state.update(memory)
        if self.acceleration is not None:
            state["went"] = torch.where(accept, rho, 0.0)
        self.last = Report(rho, accept)
        return result

    def _warn_if_rejected(self, q: Posterior, accept: Tensor, rho: Tensor) -> None:
        """Once, and where asking costs nothing."""
        if accept.device.type != "cpu" or self._warned or bool(accept.all()):
            return
        self._warned = True
        domain, remedy = q.domain, "or VN or SRVN without one, which find their steps by trial"
        if not q.framed:
            domain = f"the domain where {domain}"
            remedy = "a limit such as step_size=Clip(5.0), or a metric with a larger eps or warmup"
        self._warn(
            f"{type(self).__name__}: a step of size {float(rho.max()):.3g} left {domain} or was not "
            "finite; q was left as it is, and steps like it will be skipped without another warning. "
            f"Use a smaller lr, {remedy}.",
            RejectedStepWarning,
        )

    def _warn_if_unsummed(self) -> None:
        """At the first step: q is in buffers, whose gradients DistributedDataParallel does not reduce."""
        if self._asked_ranks:
            return
        self._asked_ranks = True
        if ranks() > 1:
            self._warn(
                f"{type(self).__name__}: this is one of {ranks()} processes, and a step does not sum over them what "
                "the data of each say of q, nor does DistributedDataParallel. That is right where every process has "
                "all the data, or where the gradients of q.mean_probe and q.root_probe were summed by "
                "torch.distributed.all_reduce before step(); otherwise every process fits its own q to its own data.",
                UnsummedRanksWarning,
            )

    @staticmethod
    def _warn(text: str, category: type[Warning]) -> None:
        """At the line of the user that stepped."""
        depth, frame = 2, sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torchngvi", "torch"):
            depth, frame = depth + 1, frame.f_back
        warnings.warn(text, category, stacklevel=depth)

    @property
    def rejections(self) -> int:
        """Steps not taken so far, over all posteriors and batch members."""
        return sum(int(s["rejections"].sum()) for s in self.state.values() if "rejections" in s)

    # -------------------------------------------------------------------------------- state

    def __repr__(self) -> str:
        """As torch's, with the parts."""
        parts = (self.rule, self.step_size, self.estimator, self.acceleration, self.momentum)
        names = ", ".join(type(part).__name__ for part in parts if part is not None)
        return f"{super().__repr__()[:-1].rstrip()}\n    parts: {names}\n)"

    def _generators(self) -> dict[str, torch.Generator]:
        """The sources of the draws, by the name under which their state is saved."""
        parts = {"generator": self.estimator, "metric_generator": self.acceleration}
        found = {name: getattr(part, "generator", None) for name, part in parts.items()}
        return {name: generator for name, generator in found.items() if generator is not None}

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the state of the generators of the parts."""
        for name, generator in self._generators().items():
            self.state[self.posteriors[0].mean_probe][name] = generator.get_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the next step evaluates anew."""
        super().load_state_dict(state_dict)
        self._cache = None
        for q in self.posteriors:
            if q.mean_probe in self.state:
                self._complete(q, self.state[q.mean_probe])
        for name, generator in self._generators().items():
            saved = self.state[self.posteriors[0].mean_probe].get(name)
            if saved is not None:
                generator.set_state(saved.to(device="cpu", dtype=torch.uint8))

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_found",
            "rule",
            "step_size",
            "estimator",
            "acceleration",
            "momentum",
            "posteriors",
            "evaluations",
            "gradients",
            "values",
            "last_cost",
            "_warned",
            "_asked_ranks",
            "_repeats",
        )
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._cache = self.last = None
        super().__setstate__(state)


def _check_parts(**parts: tuple[Any, type]) -> None:
    """Each is an instance of its axis, or not given.

    Raises:
        PairError: a class, or something of another package.
    """
    folders = {
        "rule": "rules",
        "step_size": "stepsizes",
        "estimator": "expectations",
        "acceleration": "metrics",
        "momentum": "momentum",
    }
    for name, (part, kind) in parts.items():
        if isinstance(part, kind) or (part is None and name != "rule"):
            continue
        what = type(part)
        got = (
            f"the class {part.__name__}, not called"
            if isinstance(part, type)
            else f"{what.__name__} of {what.__module__}"
        )
        raise PairError(f"{name} is a part from torchngvi.{folders[name]}; got {got}.")


def _in_dtypes_of(fresh: Any, loaded: Any) -> Any:
    """A loaded entry of a state, in the dtypes of a fresh one."""
    if isinstance(fresh, dict):
        return loaded | {name: _in_dtypes_of(fresh[name], loaded[name]) for name in fresh if name in loaded}
    return loaded.to(fresh.dtype) if isinstance(fresh, Tensor) else loaded


def _converted(state: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """Every floating-point tensor of a state in the dtype and on the device of q."""
    new = dict(state)
    for name, value in state.items():
        if isinstance(value, dict):
            new[name] = _converted(value, like)
        elif isinstance(value, Tensor) and value.is_floating_point():
            new[name] = value.to(like)
    return new


def _settings(target: Target) -> tuple[object, ...]:
    return target.temperature, *target.settings()


def _turned(q: Posterior, move: Move, accept: Tensor, signed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Averaged changes with their columns turned where `moved` turns those of the root to a positive diagonal."""
    if isinstance(move, LogTangent):  # its diagonal stays positive
        return signed
    assert isinstance(move, Tangent)
    diagonal = q.structure.diagonal(q.coordinates.matrix + move.change.matrix)
    turned = (diagonal < 0) & accept[..., None]
    sign = torch.where(turned, -torch.ones_like(diagonal), torch.ones_like(diagonal))
    return {name: q.structure.scale_columns(average, sign) for name, average in signed.items()}


def _together(trial: Trial) -> Trial:
    """One trial of all batch members, each with its own ρ."""
    before, after, promised = (x.sum().expand_as(x) for x in (trial.before, trial.after, trial.rho * trial.slope))
    length = trial.length.square().sum().sqrt().expand_as(trial.length)
    slack = trial.slack.sum().expand_as(trial.slack) if isinstance(trial.slack, Tensor) else trial.slack
    return Trial(before, after, promised / trial.rho, length, trial.rho, slack)


def _merged(where: Tensor, new: Evaluation, old: Evaluation) -> Evaluation:
    """New for the members of the mask, old for the others."""
    noise2 = new.e.noise2
    if noise2 is not None and old.e.noise2 is not None:
        noise2 = torch.where(where, noise2, old.e.noise2)
    e = new.e._replace(
        noise2=noise2,
        value=where_members(where, new.e.value, old.e.value),
        derivative=new.e.derivative.merged(where, old.e.derivative),  # type: ignore[arg-type]
    )
    return Evaluation(where_members(where, new.loss, old.loss), e)
