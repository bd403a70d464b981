"""The optimizer: estimate, ask the rule for its path, ask the control how far, move, judge.

Three ways to step, one loop:

    opt.step(target)                       a model or a log joint; derivatives by an estimator
    opt.step(closure)                      a closure returning the loss, as LBFGS takes one
    loss.backward(); opt.step()            gradients already in the probes

In the second and third the loss is whole, entropy included: the probes receive a and P, which the
step uses up, so that no later one can add to them; without a step they add up, as in torch.  Nothing
here reads a value back from the device; a step that leaves the positive definite cone or meets a
non-finite value is not taken, member by member.

Read `NaturalGradientVI.step` and what it calls, down to `_advance`, which is a step.  `evaluating` has what it stands
on (what is refused, posteriors as param groups, L and its gradient, warnings), `captured` a step at fixed addresses.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import (
    Coordinates,
    Cost,
    Estimator,
    Expectation,
    Framed,
    Local,
    Metric,
    Momentum,
    Move,
    Path,
    Posterior,
    Rule,
    StepSize,
    Tangent,
    Target,
    Trial,
    TrialStepSize,
    known_everywhere,
    may_be_asked,
    where_members,
)
from torchngvi.metrics.quasi_newton import QuasiNewton
from torchngvi.models.log_joint import FullPrecision, as_target, classify
from torchngvi.numerics.arrays import anyone, constant, tracked
from torchngvi.numerics.linalg import finite
from torchngvi.optim import evaluating
from torchngvi.optim.evaluating import EvaluatingOptimizer, Evaluation, Heading, Report, State
from torchngvi.stepsizes import Constant, KLRadius, SufficientDecrease


def averaged(
    momentum: Momentum, q: Posterior, path: Path, share: Tensor, state: dict[str, Tensor]
) -> tuple[Path, dict[str, Tensor]]:
    """The path along the average of the changes that the rule has asked for, and the state of the momentum after it."""
    move = path.at(share)
    assert isinstance(move, Tangent)
    kind, (vector, matrix) = type(move), move.change
    state = state | {name: q.carried(state[name]) for name in momentum.carried}
    change, memory = momentum(q, move.change, path.norm2, state)
    finite = vector.isfinite().all(-1) & q.structure.is_finite(matrix)
    memory = {name: where_members(finite, value, state[name]) for name, value in memory.items()}

    def at(rho: Tensor) -> Move:
        return kind(Coordinates(rho[..., None] * change.vector, q.structure.scaled(rho, change.matrix)))

    return Path(at, path.norm2, path.slope, speed2=path.length2), memory


# A step: propose a point of the path, move there, and where it is judged keep it or go back, member by member

_SLACK = 0.1  # of noise²: the objective may rise on the way to where a noisy derivative vanishes


class Proposal(NamedTuple):
    """A point of the path that q may move to."""

    path: Path
    rho: Tensor  # (*batch,)
    move: Move
    new: Coordinates
    inside: Tensor  # the members for which it stays in the domain of q, (*batch,)


class Tried(NamedTuple):
    """The result of a trial, in which q was moved, evaluated, and put back where the step was refused."""

    accepted: Tensor  # (*batch,)
    evaluation: Evaluation  # at q as it is afterwards: of the trial where it was kept, of the start elsewhere
    control: dict[str, Any]  # what of the step size's state is new


def proposed(q: Posterior, path: Path, rho: Tensor) -> Proposal:
    """The point of a path at the step size ρ."""
    move = path.at(rho)
    new, inside = q.moved(move)
    return Proposal(path, rho, move, new, inside)


def measured(q: Posterior, path: Path, like: Tensor) -> Path:
    """The path, with the length of the change that it makes to q's own coordinates at ρ = 1."""

    def change2() -> Tensor:
        move, structure = path.at(torch.ones_like(like)), q.structure
        assert isinstance(move, Tangent)
        vector, matrix = move.change
        return structure.dot(vector, vector) + structure.entries_norm2(structure.tril(matrix))

    return replace(path, change2=change2)


def tried(
    q: Posterior,
    proposal: Proposal,
    start: Evaluation,
    evaluate: Callable[[], Evaluation],
    judge: Callable[[Trial], tuple[Tensor, dict[str, Any]]],
) -> Tried:
    """Move q to a proposal, evaluate it there, and put back the members whose step is not kept."""
    path, rho = proposal.path, proposal.rho
    old = q.snapshot()
    slope, length = path.slope(), rho * path.norm2().sqrt()
    q.assign(proposal.new, proposal.inside)
    try:
        there = evaluate()
    except BaseException:  # an interrupt, an error in the user's function: nothing is lost
        q.restore(old)
        raise
    slack = 0.0 if start.e.noise2 is None else _SLACK * start.e.noise2
    kept, control = judge(Trial(start.loss, there.loss, slope, length, rho, slack))
    accepted = proposal.inside & kept
    if known_everywhere(accepted):
        return Tried(accepted, there, control)
    q.assign(old, ~accepted)
    return Tried(accepted, _merged(accepted, there, start), control)


def usable(trial: Trial) -> Tensor:  # (*batch,)
    """The members whose trial began where L, its slope and the step were finite; other trials teach nothing."""
    return finite(torch.addcmul(trial.before, trial.rho, trial.slope))


def together(trial: Trial) -> Trial:
    """One trial for all batch members, for a target that couples them: they are kept or put back together."""
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


class NaturalGradientVI(EvaluatingOptimizer):
    """Variational inference by natural gradients: a rule and a step size applied to one posterior or to several.

    It minimises L(q) = E_q[ℓ] - γ entropy(q), ℓ minus the log joint, as any `torch.optim.Optimizer`.  Use it for a
    combination of parts of your own; the published combinations have names in `torchngvi.methods`, such as `VN`.

    Args:
        posterior: a `Posterior`, an iterable of them, or of dicts with the key "posterior" and
            options of their own, as torch's param groups.
        rule: the curve that a step follows, from `torchngvi.rules`.
        lr: the learning rate; without it, steps are found by trial (`SufficientDecrease`), up to 1/γ, the
            full Newton step.
        step_size: a control from `torchngvi.stepsizes`; lr is then its upper limit, 1 if not given.  By default, where
            lr is given, `KLRadius()`: steps of that rate, none of which moves q by more than 0.2 nats.  ``Constant()``
            is the rate without that bound, the update as papers print it; it is the default with a momentum, whose
            averages are of one length, and for metrics without natural norm.
        estimator: how E_q[ℓ] is obtained; by default `Quadrature` where the target allows it,
            otherwise `Stein()`.
        metric: the part that bends the gradient before the rule follows it.  `QuasiNewton` memory, or `SiteNewton`, is
            for slow tails; the first is the default where steps are found by trial (neither lr nor step_size given)
            along a natural gradient.  For a flat posterior it is one that stands in the place of the inverse Fisher
            matrix, such as `Recursive`, with the rule `RootGradient`.
        momentum: `NormalizedMomentum`, `Adam` or `ExponentialAverage`, which averages the changes over the steps; it
            needs a learning rate.
        loss_scale: the factor on the gradients of a closure's loss, N for a loss divided by N.

    Attributes:
        watch: when a run with a learning rate says that it diverges or ends with an error, a `Watch`; set another one
            to have it otherwise.

    Raises:
        InputError: an lr or a loss_scale that is not positive, an lr beside the rate of a `Constant`, no posterior.
        PairError: parts that cannot work together.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> from torchngvi.rules import VariationalNewton
    >>> from torchngvi.stepsizes import Constant
    >>> q, model = CholeskyGaussian(1), GeneralizedLinear(torch.eye(1), [2.0], "gaussian")
    >>> _ = NaturalGradientVI(q, VariationalNewton(), lr=1.0, step_size=Constant()).step(model)
    >>> round(q.mean.item(), 4), round(q.variance.item(), 4)  # the posterior is N(1, ½)
    (1.0, 0.5)
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        rule: Rule,
        lr: float | Tensor | None = None,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        metric: Metric | None = None,
        momentum: Momentum | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        evaluating.check_kinds(rule=rule, step_size=step_size, estimator=estimator, metric=metric, momentum=momentum)
        groups = [g if isinstance(g, dict) else {"posterior": g} for g in evaluating.posteriors_of(posterior)]
        if isinstance(step_size, Constant) and step_size.rate is not None:
            if lr is not None:
                raise InputError(
                    f"the learning rate is given twice, lr={lr} and step_size={step_size}. Leave one of them out."
                )
            lr = step_size.rate
        framed = all(getattr(group.get("posterior"), "framed", True) for group in groups)
        by_trial = lr is None and step_size is None and momentum is None and rule.natural
        if metric is None and by_trial and framed:
            metric = QuasiNewton()
        self.rule, self.metric, self.momentum = rule, metric, momentum
        self.estimator = estimator
        self.step_size = step_size or (SufficientDecrease() if lr is None else self._bounded(framed))
        self.posteriors = []
        self._pending = {}
        self._found = lr is None
        evaluating.refuse(evaluating.AMONG_PARTS, self._parts())
        if not groups:
            raise InputError(
                "the list of posteriors is empty; pass q itself, not q.parameters(): its coordinates are buffers."
            )
        super().__init__(groups, {"lr": 1.0 if lr is None else lr, "loss_scale": loss_scale})

    def _bounded(self, framed: bool) -> StepSize:
        """The default where a rate is given: a bound in nats, wherever the length of a step has such a measure."""
        averaged = self.momentum is not None and not self.momentum.of_steps
        natural = self.rule.natural if self.metric is None else self.metric.natural
        return KLRadius() if not averaged and (natural or (framed and self.metric is None)) else Constant()

    # -------------------------------------------------------------------------------- step

    @overload  # type: ignore[override]
    def step(self, closure: None = None, *, resting: Tensor | None = None) -> None:
        """Along the gradients that ``loss.backward()`` has left."""

    @overload
    def step(self, closure: Target | Callable[..., Tensor], *, resting: Tensor | None = None) -> Tensor:
        """On a target, a log joint or a loss: the loss before the step."""

    @tracked
    @torch.no_grad()
    def step(self, closure: Any = None, *, resting: Tensor | None = None) -> Tensor | None:
        """Take one step.

        Args:
            closure: a `Target`; or a function of theta, the log joint, which goes up; or a function
                without arguments, which returns the loss, which goes down; or nothing, where
                ``loss.backward()`` has filled the probes: their ``grad`` is None after the step, and
                ``zero_grad()`` drops gradients that no step is to follow.
            resting: the members (*batch,) that the step leaves as they are, with the momentum and the step size of
                each, such as those that have converged; it is not counted as a rejection.  None for no such member.

        Returns:
            The loss before the step, 0-d (summed over batch members); None without an argument.

        Raises:
            PairError: a step size that needs a trial where none can be made, a target the estimator
                cannot evaluate, one target for several posteriors.
            InputError: gradients missing, a callable that could be either kind of function, or a mask that is not one
                boolean a member.
        """
        if resting is not None:
            resting = self._mask(resting)
        with FullPrecision(self.posteriors[0].mean_probe.device.type) as outside:
            if closure is None:
                self._step_from_gradients(resting)
                return None
            if self.estimator is not None:
                closure = self.estimator.prepared(closure)
            source = closure if isinstance(closure, Target) else classify(closure)
            if isinstance(source, Target):
                for q in self.posteriors:  # of a backward pass before: every step uses them up
                    q.drop_gradients()
                return self._step_on_target(source, resting)
            return self._step_on_closure(outside.restored(source), resting)

    def _mask(self, resting: Tensor) -> Tensor:
        """The mask of the members that rest, where it is one."""
        q = self._only_posterior("a mask of members")
        shape: Any
        shape, dtype = (getattr(resting, name, None) for name in ("shape", "dtype"))
        if shape != q.batch_shape or dtype != torch.bool:
            got = f"{dtype} of shape {tuple(shape)}" if isinstance(resting, Tensor) else type(resting).__name__
            raise InputError(
                f"resting is a boolean tensor with one entry a member, of shape {tuple(q.batch_shape)}; got {got}."
            )
        return resting.to(q.mean_probe.device)

    def _step_on_target(self, target: Target, resting: Tensor | None) -> Tensor:
        q = self._only_posterior("a target")
        self._asked_ranks |= target.processes is not None  # it sums by itself
        with q.settled():
            evaluation, heading = self._evaluated(target)
            again = functools.partial(self._evaluate_target, target, q)
            trial = self._advance(0, evaluation, heading, again, target.coupled, resting)
            if trial is not None:
                self._keep(target, trial, heading if self._stayed() else self._heading(0, trial.e))
        return evaluation.loss.sum()

    def _stayed(self) -> bool:
        """Whether the last step was taken by nobody, and the way from there is known: with a metric it is another."""
        accepted = None if self.last is None else self.last.accepted
        return self.metric is None and accepted is not None and may_be_asked(accepted) and not anyone(accepted)

    def _step_on_closure(self, closure: Callable[[], Tensor], resting: Tensor | None) -> Tensor:
        scales = [group["loss_scale"] for group in self.param_groups]

        def evaluate() -> list[Evaluation]:
            found = evaluated(closure, self.posteriors, scales)
            self._count(Cost(1, 0))
            return found

        if self.step_size.needs_trial:
            self._only_posterior(f"a closure with {type(self.step_size).__name__}")
        start = evaluate()
        if self.step_size.needs_trial:
            loss, members = start[0].loss, tuple(self.posteriors[0].batch_shape)
            if not self._repeats and loss.device.type == "cpu":  # once: a trial means nothing if the loss has changed
                evaluating.refuse(evaluating.ASKED_TWICE, self._parts(losses=(loss, evaluate()[0].loss)))
                self._repeats = True
            if loss.shape != members:
                raise InputError(
                    f"to judge each of the {members} posteriors the closure must return one loss each; got shape "
                    f"{tuple(loss.shape)}. Return the losses unsummed, or pass lr=."
                )
            self._forget_unless(loss)
        for index, evaluation in enumerate(start):
            heading = self._heading(index, evaluation.e)
            self._advance(index, evaluation, heading, lambda: evaluate()[0], resting=resting)
        return start[0].loss.sum() / scales[0]

    def _step_from_gradients(self, resting: Tensor | None) -> None:
        evaluating.refuse(evaluating.ONE_GRADIENT, self._parts())
        if any(map(_empty, self.posteriors)):
            raise InputError(
                "the posterior has no gradient, and each step uses up those it read: compute a loss from q.rsample(), "
                "q.log_prob(), q.entropy() or model.negative_elbo(q), call loss.backward(), then step()."
            )
        for index, q in enumerate(self.posteriors):
            with q.settled():
                zero = constant(0.0, q.mean_probe.dtype, q.mean_probe.device).expand(q.batch_shape)
                e = packet(q, zero, self.param_groups[index]["loss_scale"], self.rule.natural)
                heading = self._heading(index, e)
                self._advance(index, Evaluation(e.value, e), heading, None, resting=resting, lossless=True)

    @torch.no_grad()
    def step_untried(self, target: Target) -> None:
        """Take the step that would be tried next, without a trial: near the optimum, where an evaluation is dear.

        Args:
            target: the target to step on.
        """
        target = as_target(target)
        with FullPrecision(self.posteriors[0].mean_probe.device.type):
            evaluation, heading = self._evaluated(target)
            self._advance(0, evaluation, heading, None)
            state = self._state(0)
            state["loss"] = torch.full_like(state["loss"], torch.nan)  # not known yet: what is remembered stays

    def _advance(
        self,
        index: int,
        start: Evaluation,
        heading: Heading,
        evaluate: Callable[[], Evaluation] | None,  # at q as it then is; None where nothing is tried
        coupled: bool = False,
        resting: Tensor | None = None,  # the members that stay where they are, (*batch,)
        lossless: bool = False,  # the loss is not known, as after loss.backward()
    ) -> Evaluation | None:
        """From one posterior along its heading: average, propose, move, judge, remember; what holds after a trial."""
        q, lr, state = self.posteriors[index], self.param_groups[index]["lr"], self._state(index)
        if not self._asked_ranks:
            self._asked_ranks = True
            evaluating.warn_if_unsummed(type(self).__name__)

        path = heading.path
        whole = self.momentum is not None and self.momentum.of_steps  # it averages steps that are limited already
        if self.momentum is not None:
            # of lr = 0, as a schedule may begin, nothing is taken
            share = (
                (self._rho(q, path, lr, state) / lr).nan_to_num(0.0) if whole else torch.ones_like(state["rejections"])
            )
            path, average = averaged(self.momentum, q, path, share, state["momentum"])
        rho = torch.ones_like(state["rejections"]) * lr if whole else self._rho(q, path, lr, state)
        proposal = proposed(q, path, rho)
        if resting is not None:
            proposal = proposal._replace(inside=proposal.inside & ~resting)
        if self.momentum is not None and resting is not None:
            average = {name: where_members(resting, state["momentum"][name], new) for name, new in average.items()}

        result, accepted = None, proposal.inside
        if evaluate is None or not self.step_size.needs_trial:
            q.assign(proposal.new, accepted)
        else:
            own = state["step_size"]
            accepted, result, control = tried(
                q, proposal, start, evaluate, lambda trial: self._judge(trial, own, coupled, resting)
            )
            own.update(control)
            state["loss"] = result.loss
        everyone, refused = known_everywhere(accepted), None
        if not everyone:
            stays = ~accepted
            refused = stays if resting is None else stays & ~resting
            asked = not self.step_size.needs_trial and may_be_asked(refused)  # once, and where asking costs nothing
            if asked and not self._warned and anyone(refused):
                self._warned = True
                evaluating.warn_of_rejection(type(self).__name__, q, rho)
            state["rejections"] += refused
        if self.momentum is not None:
            state["momentum"].update(average)
        if self.metric is not None:
            state["metric"].update(heading.memory)
            state["went"] = rho if everyone else rho.masked_fill(stays, 0.0)
        self.last = Report(rho, accepted)
        if not self.step_size.needs_trial and not torch.compiler.is_compiling():
            slope = heading.norm2 if q.framed else heading.path.slope  # which is watched without a loss
            value = slope() if lossless else start.loss
            self._look(index, evaluating.Seen(value, rho, refused, resting, lossless), start.e)
        return result

    def _rho(self, q: Posterior, path: Path, lr: float | Tensor, state: State) -> Tensor:
        """The step size ρ along a path, (*batch,), as the control proposes it."""
        like = state["rejections"]
        if self.step_size.needs_tangent:
            path = measured(q, path, like)
        if self.step_size.needs_trial:
            path = replace(path, leaves=q.structure.leaves)
        return self.step_size.propose(path, lr, like, state["step_size"]).to(like.dtype)

    def _judge(self, trial: Trial, own: State, coupled: bool, resting: Tensor | None) -> tuple[Tensor, State]:
        """The verdict of the step size, which learns nothing of members that rest or were not finite from the start."""
        assert isinstance(self.step_size, TrialStepSize)
        kept, new = self.step_size.judge(together(trial) if coupled else trial, own)
        known = usable(trial) if resting is None else usable(trial) & ~resting
        return kept, {name: where_members(known, value, own[name]) for name, value in new.items()}


# -------------------------------------------------------------------------------- packets from ``loss.backward()``


def evaluated(
    closure: Callable[[], Tensor], posteriors: Sequence[Posterior], scales: Sequence[float]
) -> list[Evaluation]:
    """Evaluate a closure, and read the gradient of each posterior from its probes."""
    for q in posteriors:
        q.drop_gradients()
    with torch.enable_grad():
        loss = closure()
        if not isinstance(loss, Tensor):
            raise InputError(f"the closure must return the loss, a tensor; got {type(loss).__name__}.")
        if loss.ndim and loss.shape not in {q.batch_shape for q in posteriors}:
            raise InputError(
                f"the closure must return one loss, or one of each posterior of a batch; got shape "
                f"{tuple(loss.shape)}. Average over the draws: loss.mean(0)."
            )
        if all(map(_empty, posteriors)):
            if not loss.requires_grad:
                raise InputError("the closure's loss does not depend on the posterior: it has no gradient.")
            loss.sum().backward()
    packets = [packet(q, loss.detach(), scale) for q, scale in zip(posteriors, scales, strict=True)]
    return [Evaluation(e.value, e) for e in packets]


def packet(q: Posterior, loss: Tensor, scale: float, local: bool = False) -> Expectation:
    """The derivative of a whole loss, entropy included, from the gradients in the probes of q, which are used up."""
    probes = q.mean_probe, q.root_probe
    a, R = torch._foreach_mul([torch.zeros_like(p) if p.grad is None else p.grad for p in probes], scale)
    q.drop_gradients()
    P = q.structure.one_sided(R)
    derivative: Any = Local(a, P)  # rules of natural gradients ask q for no more
    if not local:
        loss, derivative = loss * scale, Framed(a, P + q.structure.eye(a))
    return Expectation(loss, derivative, 1.0, True, Cost(1, 0))


def _empty(q: Posterior) -> bool:
    return q.mean_probe.grad is None and q.root_probe.grad is None
