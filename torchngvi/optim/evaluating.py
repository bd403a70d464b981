"""What the optimizer hands from one part of a step to the next: L with its gradient, reports, warnings."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import is_number, read_number, read_tensor, shown
from torchngvi.distributed import Processes, ranks
from torchngvi.errors import (
    DivergenceWarning,
    InputError,
    PairError,
    RejectedStepError,
    RejectedStepWarning,
    UnsummedRanksWarning,
)
from torchngvi.expectations import Quadrature, Stein
from torchngvi.interfaces import (
    Acceleration,
    Bent,
    Cost,
    Estimator,
    Expectation,
    Local,
    Metric,
    Momentum,
    Path,
    Posterior,
    Raw,
    Rule,
    StepSize,
    Tangent,
    Target,
    TractableTarget,
    may_be_asked,
)
from torchngvi.messages import listed
from torchngvi.models.log_joint import as_target
from torchngvi.numerics.arrays import Fetched, Versions, tracked


class Evaluation(NamedTuple):
    """The loss L and its derivative, evaluated at one q.

    Attributes:
        loss: L(q) = E_q[ℓ] - γ entropy(q), (*batch,), in nats.
        e: the value and the derivative of E_q[ℓ].

    >>> import torch
    >>> from torchngvi.interfaces import Cost, Framed
    >>> e = Expectation(torch.tensor(2.0), Framed(torch.zeros(1), torch.ones(1, 1)), 1.0, True, Cost(1, 0))
    >>> Evaluation(torch.tensor(0.5), e).e.value.item()
    2.0
    """

    loss: Tensor
    e: Expectation


class Heading(NamedTuple):
    """The path that the next step may follow from an evaluation.

    Attributes:
        path: the curve of moves that the rule gives.
        norm2: the squared natural norm of ∇L, (*batch,), computed only if it is asked for.
        memory: what the metric will remember of this gradient once the step is taken.

    >>> import torch
    >>> path = Path(lambda rho: rho, lambda: torch.tensor(4.0), lambda: torch.tensor(4.0))
    >>> Heading(path, path.norm2, {}).norm2().item()
    4.0
    """

    path: Path
    norm2: Callable[[], Tensor]
    memory: dict[str, Any]


class Status(NamedTuple):
    """The loss of q and the norm of its gradient, as `NaturalGradientVI.evaluate` gives them.

    Attributes:
        loss: L(q) = E_q[ℓ] - γ entropy(q), (*batch,), in nats.
        norm2: the squared natural norm |a|² + ½‖P‖²_F of its gradient, (*batch,); 0 at the optimum.
        noise2: the expected value of norm2 at the optimum, where it is known from the draws: a squared standard error.

    >>> import torch
    >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.ones(1, 1), [0.0], "gaussian", prior_precision=1.0)
    >>> status = VN(CholeskyGaussian(1, scale=0.5**0.5)).evaluate(model)  # q is the posterior
    >>> round(status.loss.item(), 4), status.norm2.item() < 1e-12  # ½ log 4π
    (1.2655, True)
    """

    loss: Tensor
    norm2: Tensor
    noise2: Tensor | None


class Report(NamedTuple):
    """The size of the last step and whether it was taken, kept in the attribute ``last`` of an optimizer.

    Attributes:
        rho: the step size ρ, (*batch,); in units of 1/γ where it was found by trial.
        accepted: which members have moved, (*batch,).

    >>> import torch
    >>> from torchngvi import VN, CholeskyGaussian
    >>> _ = torch.manual_seed(0)
    >>> opt = VN(CholeskyGaussian(1), lr=0.5)
    >>> _ = opt.step(lambda theta: -theta.square().sum(-1))
    >>> opt.last.rho.item(), opt.last.accepted.item()
    (0.5, True)
    """

    rho: Tensor
    accepted: Tensor


# ------------------------------------------------------------------------------------ which parts work together
# Which parts cannot work together, and what to use in their place: all refusals of the optimizer in one table.
#
# A row is a condition and the sentence that is said where it holds; names in braces are those of the parts.  The rows
# are read from the top, in the group that belongs to what is known: the parts alone, with a posterior, with a target,
# or the way in which a step is asked for.


class Parts(NamedTuple):
    """The parts that are to work together; an entry is None if there is no such part, or if it is not known yet."""

    rule: Rule
    step_size: StepSize
    estimator: Estimator | None = None
    metric: Metric | None = None
    momentum: Momentum | None = None
    q: Posterior | None = None
    target: Target | None = None
    losses: tuple[Tensor, Tensor] | None = None  # of a closure that was asked twice at one q
    number: int = 1  # of posteriors

    @property
    def natural(self) -> bool:
        """Whether a step starts along the natural gradient, or what estimates it."""
        return self.rule.natural or (self.metric is not None and self.metric.natural)

    @property
    def straight(self) -> bool:
        """Whether a step is a straight line in q's own coordinates."""
        return issubclass(self.rule.emits, Tangent)

    @property
    def accelerates(self) -> bool:
        """Whether the metric is one for natural gradients in a frame, and is judged by trial."""
        return isinstance(self.metric, Acceleration)

    @property
    def draws(self) -> bool:
        """Whether a closure has given another loss at the same q, up to rounding."""
        if self.losses is None:
            return False
        loss, again = self.losses
        rounding = 1e3 * torch.finfo(loss.dtype).eps * loss.abs().clamp_min(1.0)
        return bool(((again - loss).abs() > rounding).any())

    def words(self) -> dict[str, Any]:
        """The words that a sentence of the tables may use in braces."""
        names = {name: type(part).__name__ for name, part in self._asdict().items()}
        words = {"emits": self.rule.emits.__name__, "number": self.number}
        if self.q is not None:
            takes = ", ".join(sorted(move.__name__ for move in self.q.takes))
            words |= {"takes": takes, "structure": str(self.q.structure)}
        if self.estimator is not None:
            words["needs"] = self.estimator.needs.__name__
        if self.losses is not None:
            words |= {name: float(x.sum()) for name, x in zip(("before", "after"), self.losses, strict=True)}
        return names | words


Refusal = tuple[Callable[[Any], bool], str]

_NOISY: Refusal = (
    lambda p: p.step_size.needs_trial and p.estimator is not None and not p.estimator.comparable,
    "{step_size} compares the objective before and after a step, and {estimator} gives noisy values. Pass a learning "
    "rate, for example lr=0.1, or step_size=KLRadius(0.1).",
)

AMONG_PARTS: list[Refusal] = [
    _NOISY,
    (
        lambda p: p.metric is not None and not p.accelerates and p.rule.natural,
        "{metric} bends a plain gradient, and {rule} would take what it returns for one that is natural already. Use "
        "RootGradient() with it, or leave it out.",
    ),
    (
        lambda p: p.accelerates and not (p.rule.natural and p.step_size.needs_trial),
        "{metric} bends natural gradients that are free of noise, and judges what it did by trial; got {rule} with "
        "{step_size}. Use VN or SRVN with SufficientDecrease(), or leave the metric out.",
    ),
    (
        lambda p: p.momentum is not None and not p.straight,
        "{momentum} averages changes of q's own coordinates; {rule} moves q by {emits}. Use NaturalGradient() or "
        "RootGradient().",
    ),
    (
        lambda p: p.momentum is not None and p.momentum.needs_natural and not p.natural,
        "{momentum} normalises natural gradients; those of {rule} are not. Use Adam().",
    ),
    (
        lambda p: (
            p.momentum is not None
            and (p.step_size.needs_trial or (p.step_size.needs_natural and not p.momentum.of_steps))
        ),
        "{momentum} goes where the steps before have gone; {step_size} needs the direction of the gradient. Pass a "
        "learning rate, for example lr=0.001.",
    ),
    (
        lambda p: p.step_size.needs_natural and p.metric is not None and not p.natural,
        "{step_size} measures steps in the natural norm, which {metric} says nothing of. Use Constant() or Clip(5.0).",
    ),
    (
        lambda p: p.step_size.needs_tangent and not p.straight,
        "{step_size} measures steps along a straight line in q's own coordinates; {rule} moves q by {emits}. Use "
        "NaturalGradient() or RootGradient(), or KLRadius(0.1).",
    ),
]

WITH_POSTERIOR: list[Refusal] = [
    (
        lambda p: not p.q.takes,
        "{rule} moves one Gaussian, or a batch of them, and {q} is none. Use torchngvi.fit(q, log_joint), or build the "
        "optimizer over q.components, with MixtureIntegrand(q, log_joint) of torchngvi.models as its target.",
    ),
    (
        lambda p: p.rule.emits not in p.q.takes,
        "{rule} moves q by {emits}, which {q} cannot do (it takes {takes}). Use a CholeskyGaussian or a "
        "DiagonalGaussian.",
    ),
    (
        lambda p: p.rule.full_algebra and not p.q.structure.closed,
        "{rule} needs products of matrices that leave the pattern of {structure}. Use VariationalNewton(), "
        "NaturalGradient() or LocalExponential(), or a structure of blocks.",
    ),
    (
        lambda p: p.metric is not None and not p.accelerates and p.q.framed,
        "{metric} reads a flat vector and its scores, which {q} does not have. Use QuasiNewton(), or leave it out.",
    ),
    (
        lambda p: p.step_size.needs_natural and not p.natural and not p.q.framed,
        "{step_size} measures steps in the natural norm, which is not known of the curve of {rule} for {q}. Use "
        "Clip(5.0), or a metric such as Exact().",
    ),
    (
        lambda p: p.accelerates and not p.q.framed,
        "{metric} reads the frame of q, which {q} does not have. Use Exact(), or leave it out.",
    ),
]

WITH_TARGET: list[Refusal] = [
    (
        lambda p: not isinstance(p.target, p.estimator.needs),
        "{estimator} evaluates a {needs}; got {target}. Leave estimator=None, or use Stein().",
    ),
    _NOISY,
    (
        lambda p: p.step_size.needs_trial and not p.target.comparable,
        "{step_size} compares the objective before and after a step, and a mini-batch gives another objective than the "
        "next. Pass a learning rate, for example lr=0.1.",
    ),
]

ONE_GRADIENT: list[Refusal] = [
    (
        lambda p: p.step_size.needs_trial,
        "step() after loss.backward() has one gradient and cannot try a step, which {step_size} needs. Pass a learning "
        "rate, for example lr=0.1, or call step with a closure or a model.",
    )
]

ASKED_TWICE: list[Refusal] = [
    (
        lambda p: p.draws,
        "{step_size} compares the objective before and after a step, and the closure gives another loss at the same q "
        "({before:.6g}, then {after:.6g}): it draws. Pass a learning rate, for example lr=0.1, or draw once and keep "
        "the draws.",
    )
]

ONE_POSTERIOR: list[Refusal] = [
    (
        lambda p: p.number != 1,
        "{what} belongs to one posterior; this optimizer has {number}. Use one optimizer each, or loss.backward() and "
        "step().",
    )
]

FOLDERS = {
    "rule": (Rule, "rules"),
    "step_size": (StepSize, "stepsizes"),
    "estimator": (Estimator, "expectations"),
    "metric": (Metric, "metrics"),
    "momentum": (Momentum, "momentum"),
}


def refuse(table: Sequence[Refusal], parts: Parts, **more: str) -> None:
    """Raise the sentence of the first row of a table whose condition holds."""
    for holds, sentence in table:
        if holds(parts):
            raise PairError(sentence.format(**parts.words(), **more))


def check_kinds(**parts: Any) -> None:
    """Check that each part is an instance of the class of its axis, or was not given."""
    for name, part in parts.items():
        kind, folder = FOLDERS[name]
        if isinstance(part, kind) or (part is None and name != "rule"):
            continue
        what = type(part)
        got = (
            f"the class {part.__name__}, not called"
            if isinstance(part, type)
            else f"{what.__name__} of {what.__module__}"
        )
        raise PairError(f"{name} is a part from torchngvi.{folder}; got {got}.")


def posteriors_of(given: Any) -> list[Any]:
    """What an optimizer is built over, as a list: one posterior, or an iterable of them or of param groups."""
    if isinstance(given, Posterior | Tensor | str | bytes | dict | type) or not isinstance(given, Iterable):
        return [given]
    return list(given)


# ------------------------------------------------------------------------------------ the state of a posterior


State = dict[str, Any]


def complete(state: State, fresh: State) -> None:
    """Complete a state that was loaded, in place: add entries that it lacks, and restore their dtypes."""
    for name, value in fresh.items():
        state[name] = _in_dtypes_of(value, state[name]) if name in state else value


def converted(state: State, like: Tensor) -> State:
    """The state in the dtype and on the device of q."""
    new = dict(state)
    for name, value in state.items():
        if isinstance(value, dict):
            new[name] = converted(value, like)
        elif isinstance(value, Tensor) and value.is_floating_point():
            new[name] = value.to(like)
    return new


def _in_dtypes_of(fresh: Any, loaded: Any) -> Any:
    if isinstance(fresh, dict):
        return fresh | loaded | {name: _in_dtypes_of(fresh[name], loaded[name]) for name in fresh if name in loaded}
    return loaded.to(fresh.dtype) if isinstance(fresh, Tensor) else loaded


# ------------------------------------------------------------------------------------ how a run is watched


def _domain(q: Posterior) -> str:
    return q.domain if q.framed else f"the domain where {q.domain}"


def warn_of_rejection(method: str, q: Posterior, rho: Tensor) -> None:
    """Warn that a step was not taken, and say what to do about it."""
    remedy = "or VN or SRVN without one, which find their steps by trial"
    if not q.framed:
        remedy = "a limit such as step_size=Clip(5.0), or a metric with a larger eps or warmup"
    warn(
        f"{method}: a step of size {float(rho.max()):.3g} left {_domain(q)} or was not "
        "finite; q was left as it is, and steps like it will be skipped without another warning. "
        f"Use a smaller lr, {remedy}.",
        RejectedStepWarning,
    )


def warn_if_unsummed(method: str) -> None:
    """Warn, in a run of several processes, that a step sums nothing over them."""
    if ranks() > 1 and not Processes.met:  # where they meet, a closure or a hook sums
        warn(
            f"{method}: this is one of {ranks()} processes, and a step does not sum over them what "
            "the data of each say of q, nor does DistributedDataParallel. That is right where every process has "
            "all the data, or where the gradients of q.mean_probe and q.root_probe were summed by "
            "torch.distributed.all_reduce before step(); otherwise every process fits its own q to its own data. For "
            "rows that are spread over the processes give the step torchngvi.Sharded(model, num_data).",
            UnsummedRanksWarning,
        )


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the first frame of the call stack that belongs neither to this library nor to torch."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torchngvi", "torch"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, category, stacklevel=depth)


@dataclass(frozen=True)
class Watch:
    """When a run with a learning rate says that it diverges, and when it ends with an error: ``opt.watch = ...``.

    A step whose length is given and not found by trial cannot take itself back, so that what it leads to is watched.
    Where q is on the CPU the answer comes at the step; on an accelerator it is copied behind the steps, and read
    once it is there, so that no step waits for it.

    Attributes:
        rejections: the number of rejected steps in a row that a run may have; one more raises a `RejectedStepError`.
            It is that after which `torchngvi.fit` ends: runs that recover had 12 in a row at most.
        climb: how far above its start a loss is far above it, in multiples of |loss| + D at the start, with D the
            number of latent variables (a draw of the loss differs from another by about √D).
        steep: the same of the squared natural norm of the gradient, where the optimizer does not see the loss, as after
            ``loss.backward()``, in multiples of that of the first step; and how many times beyond what is far above the
            start a value is said to be so at once.
        steps: the number of steps that have to be so, one for each that was, since single draws of a loss have long
            tails; one of them is forgotten after ``memory`` steps that are not so.
        memory: the number of such steps.  A loss may come back between two that are far above, as the
            variance of a q does whose mean goes from side to side.

    Raises:
        InputError: a value that is not positive.

    >>> from torchngvi import VN, CholeskyGaussian
    >>> opt = VN(CholeskyGaussian(2), lr=0.1)
    >>> opt.watch = Watch(rejections=100)
    >>> opt.watch.climb
    10.0
    """

    rejections: float = 30
    climb: float = 10.0
    steep: float = 1e6
    steps: int = 5
    memory: int = 10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"{name} of Watch must be positive; got {value!r}.")


UNWATCHED = Watch(rejections=torch.inf, climb=torch.inf, steep=torch.inf)  # of runs that are judged otherwise


class Seen(NamedTuple):
    """What is known of one step when it has been taken, or not."""

    value: Tensor  # the loss, or where it is not known the slope at ρ = 0, (*batch,)
    rho: Tensor  # (*batch,)
    refused: Tensor | None  # (*batch,), or None where every member was moved
    resting: Tensor | None  # the members that were to stay where they are, (*batch,)
    lossless: bool  # the loss is not known, as after loss.backward()


class Behind:
    """Steps on CUDA, whose numbers are sent together behind them and counted once they have arrived, without a wait."""

    def __init__(self) -> None:
        self._left: list[Seen] = []
        self._sent: list[Seen] = []
        self._coming: Fetched | None = None
        self._known: State | None = None  # by the host

    def counted(
        self, watch: Watch, q: Posterior, last: Seen, state: State, together: int = 3
    ) -> list[tuple[Seen, list[float]]]:
        """Take in a step, send so many at least at once, and return the counts of those that have arrived since."""
        self._left.append(last)
        arrived = None if self._coming is None else self._coming.read()
        found = [] if arrived is None else self._count(watch, q, arrived, state)
        if self._coming is None and len(self._left) >= together:
            rows = [row for x in self._left for row in (x.value, x.refused, x.resting) if row is not None]
            self._coming = Fetched(torch.stack([state["far"], *state["counts"], *rows]))
            self._sent, self._left = self._left, []
        return found

    def _count(self, watch: Watch, q: Posterior, arrived: list[Any], state: State) -> list[tuple[Seen, list[float]]]:
        far, rejected, above, *rest = torch.tensor(arrived, dtype=torch.float64, device="cpu")
        known = self._known or {"far": far, "counts": torch.stack([rejected, above])}
        before, found, rows = dict(known), [], iter(rest)
        for step in self._sent:
            value = next(rows)
            refused, resting = (None if mask is None else next(rows) > 0 for mask in (step.refused, step.resting))
            counts = counted(watch, q, Seen(value, step.rho, refused, resting, step.lossless), known)
            if counts is not None:
                found.append((step, counts.tolist()))
        self._known, self._coming = known, None
        state.update({name: new.to(state[name]) for name, new in known.items() if new is not before[name]})
        return found


def counted(watch: Watch, q: Posterior, step: Seen, state: State, e: Expectation | None = None) -> Tensor | None:
    """Count the steps in a row that were rejected, and those whose loss is far above the start, on the host."""
    value, dim = step.value, q.structure.total_dim if q.framed else q.dim
    if bool(state["far"].isnan().any()):
        far = watch.steep * (value + dim) if step.lossless else value + watch.climb * (value.abs() + dim)
        state["far"] = torch.where(state["far"].isnan() & far.isfinite(), far, state["far"])
    high = value > state["far"]  # NaN is no step, and counted as such; an infinite draw says nothing of how far
    if q.framed and e is not None and not step.lossless and bool((value < -state["far"]).any()):  # as far below 0
        high = high | ((value < -state["far"]) & (q.norm2(q.local(e)) > watch.steep * dim))
    if step.refused is None and not bool(high.any()) and not bool(state["counts"].any()):
        return None
    rejected, above = state["counts"]
    rejected = torch.zeros_like(rejected) if step.refused is None else (rejected + 1) * step.refused
    enough = value.isfinite() & (value > watch.steep * state["far"])  # so far that one is enough
    more = 1 + (watch.steps - 1) * enough
    above = torch.where(high, above + more, (above - 1 / watch.memory).clamp_min(0.0))
    state["counts"] = torch.stack([rejected, above])
    if step.resting is not None:
        rejected = torch.where(step.resting, torch.inf, rejected)
    return torch.stack([rejected.amin(), above.amax()])


def speak(watch: Watch, method: str, q: Posterior, seen: Seen, known: list[float], said: bool) -> bool:
    """Warn of a run that diverges, once, and end one whose q stands still; else nothing of the step is read."""
    rejected, above = known
    if not said and above >= watch.steps and not seen.lossless and bool((seen.value < 0).all()):
        warn(
            f"{method}: the loss has fallen to {float(seen.value.max()):.3g}, and its gradient grows: the run diverges,"
            " since the log joint does not confine q. If the function returns -log p, an energy, return its negative; "
            "give every parameter a proper prior.",
            DivergenceWarning,
        )
        said = True
    if not said and above >= watch.steps:
        what = "the squared natural norm of the gradient was" if seen.lossless else "the loss was"
        warn(
            f"{method}: {what} far above its start in {int(above)} of the last steps: the run diverges, at steps of "
            f"size {float(seen.rho.max()):.3g}, unless the loss itself has grown, as with data that come later. Begin "
            "again from the start with a smaller lr, or with step_size=KLRadius() in place of Constant(); VN and SRVN "
            "without an lr find their steps by trial.",
            DivergenceWarning,
        )
        said = True
    if watch.rejections < rejected < float("inf"):
        remedy = "step_size=KLRadius(0.1), or IBLR, none of whose steps leaves the cone"
        if not q.framed:
            remedy = "a limit such as step_size=Clip(5.0)"
        raise RejectedStepError(
            f"{method}: {int(rejected)} steps in a row left {_domain(q)} or were not finite, the last of size "
            f"{float(seen.rho.max()):.3g}: q has stood still, while whatever else the loop trains has moved on. Check "
            f"that the loss is finite; use a smaller lr, {remedy}. With opt.watch = "
            "torchngvi.optim.Watch(rejections=...) more of them are allowed."
        )
    return said


# ------------------------------------------------------------------------------------ L and its gradient at q


class Cached(NamedTuple):
    """The last evaluation with the path from there, and everything that both were computed from."""

    target: Target
    settings: tuple[object, ...]  # of the target, with its temperature
    versions: Versions  # of the tensors of the target and the coordinates of q
    evaluation: Evaluation
    heading: Heading

    def holds(self, target: Target, q: Posterior, wait: bool, contents: bool = True) -> bool:
        """Whether the kept evaluation is still that of this target at this q."""
        same = self.target == target and self.settings == settings(target)
        return same and self.versions.hold((*target.tensors(), *q.coordinates), wait, contents)


def settings(target: Target) -> tuple[object, ...]:
    """The values beside its tensors on which a target depends: its temperature and its settings."""
    return target.temperature, *target.settings()


class PosteriorOptimizer(torch.optim.Optimizer):
    """A torch optimizer with a posterior a param group, whose state is a dict with one entry for each part."""

    rule: Rule
    step_size: StepSize
    estimator: Estimator | None
    metric: Metric | None
    momentum: Momentum | None
    posteriors: list[Posterior]
    last: Report | None = None
    _cache: Any = None  # what is known of q as it is now
    _warned = False  # of a step that was not taken
    _diverges = False  # and that was said
    watch: Watch = Watch()
    _pending: dict[int, Behind]  # steps on an accelerator that are not counted yet
    _asked_ranks = False
    _repeats = False  # the closure was seen to give the same loss twice

    _kept = (  # by a copy or a pickle, beside what torch keeps
        *("rule", "step_size", "estimator", "metric", "momentum", "posteriors"),
        *("evaluations", "gradients", "values", "_found", "_warned", "_asked_ranks", "_repeats", "_diverges", "watch"),
    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a posterior, as a group such as ``{"posterior": q, "lr": 0.1}``.

        Args:
            param_group: the posterior with options of its own, ``lr`` and ``loss_scale``; those left out are the
                defaults.

        Raises:
            InputError: something that is no posterior, or an option that is not positive.
            PairError: a posterior that the parts of this optimizer cannot move.
        """
        group = dict(param_group)
        q = group.pop("posterior", None)
        if "posterior" not in param_group:
            raise InputError(
                f'a param group of {type(self).__name__} is such as {{"posterior": q, "lr": 0.1}}; got the keys '
                f"{listed(sorted(map(str, param_group)))}. Give other parameters to a torch optimizer."
            )
        if not isinstance(q, Posterior):
            raise InputError(
                f"{type(self).__name__} updates posteriors such as CholeskyGaussian(dim); got {type(q).__name__}. "
                "Give other parameters to a torch optimizer."
            )
        refuse(WITH_POSTERIOR, self._parts(q=q))
        if self.estimator is not None:
            self.estimator.check(q)
        group["lr"] = _checked_rate(group.get("lr", self.defaults["lr"]), q)
        scale = group.get("loss_scale", self.defaults["loss_scale"])
        group["loss_scale"] = read_number("loss_scale", scale, "is the factor on the gradients", above=0)
        group["params"] = [q.mean_probe, q.root_probe]
        # unwrapped, since torch's wrapper imports its compiler, which takes a second
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, group)
        self.posteriors.append(q)

    def _parts(self, **more: Any) -> Parts:
        """What is to work together, for the table of what cannot."""
        own = {"estimator": self.estimator, "metric": self.metric, "momentum": self.momentum}
        return Parts(self.rule, self.step_size, **(own | more))

    def _only_posterior(self, what: str) -> Posterior:
        if len(self.posteriors) != 1:
            refuse(ONE_POSTERIOR, self._parts(number=len(self.posteriors)), what=what)
        return self.posteriors[0]

    @property
    def rejections(self) -> int:
        """The number of steps that were not taken so far, over all posteriors and batch members."""
        return sum(int(s["rejections"].sum()) for s in self.state.values() if "rejections" in s)

    def _look(self, index: int, step: Seen, e: Expectation) -> None:
        """Count what goes wrong in a row, and say so where it is much; a graph, and other devices, say nothing."""
        q, state = self.posteriors[index], self._state(index)["watch"]
        if may_be_asked(q.mean_probe):
            counts = counted(self.watch, q, step, state, e)
            found = [] if counts is None else [(step, counts.tolist())]
        elif not q.mean_probe.is_cuda or torch.cuda.is_current_stream_capturing():
            return
        else:
            found = self._pending.setdefault(index, Behind()).counted(self.watch, q, step, state)
        for then, known in found:
            self._diverges = speak(self.watch, type(self).__name__, q, then, known, self._diverges)

    # -------------------------------------------------------------------------------- state

    def _state(self, index: int) -> State:
        """Everything of this posterior that changes from step to step, on first use made: a dict for each part."""
        probe = self.posteriors[index].mean_probe
        state = self.state[probe]
        like = state.get("rejections")
        if like is None:
            complete(state, self._fresh(self.posteriors[index]))
        elif like.dtype != probe.dtype or like.device != probe.device:
            state.update(converted(state, probe))  # q was converted or moved, as torch lets no Parameter be
        return state

    def _fresh(self, q: Posterior) -> State:
        """The state of a posterior before its first step."""
        like = q.mean_probe.detach()[..., 0]
        fresh: State = {
            "rejections": torch.zeros_like(like),
            "loss": torch.full_like(like, torch.inf),  # that the last trial left
            "went": torch.zeros_like(like),  # ρ of the last step, 0 where it was not taken or q is another
            "step_size": self.step_size.init(like),
            "estimator": {},
        }
        if not self.step_size.needs_trial:  # what is far above the start, and how often in a row it was so
            counts = torch.stack([torch.zeros_like(like)] * 2)
            fresh["watch"] = {"far": torch.full_like(like, torch.nan), "counts": counts}
        if self.metric is not None:
            fresh["metric"] = self.metric.init(q)
        if self.momentum is not None:
            fresh["momentum"] = self.momentum.init(q)
        return fresh

    def _generators(self) -> dict[str, torch.Generator]:
        """The sources of the draws, by the part that draws."""
        parts = {"estimator": self.estimator, "metric": self.metric}
        found = {name: getattr(part, "generator", None) for name, part in parts.items()}
        return {name: generator for name, generator in found.items() if generator is not None}

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer as `torch.optim.Optimizer` gives it, with that of the generators of its parts.

        Returns:
            The state dict; an optimizer that loads it goes on bit for bit, from the same posterior.
        """
        if generators := self._generators():
            states = {name: generator.get_state() for name, generator in generators.items()}
            self.state[self.posteriors[0].mean_probe]["generators"] = states
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` gave; the next step evaluates the target again.

        Args:
            state_dict: the state of an optimizer with the same parts and posteriors of the same shapes.

        Raises:
            InputError: a state of version 0.1, in which the parts have no dicts of their own, or one of another batch.
        """
        if any("rejections" in saved and "step_size" not in saved for saved in state_dict["state"].values()):
            raise InputError(
                "this state dict is of torchngvi 0.1, where the state of all parts was one dict; here each part has "
                "one of its own. Load the posterior alone, and go on with the optimizer as it is."
            )
        for q, group in zip(self.posteriors, state_dict["param_groups"], strict=False):
            rejections = state_dict["state"].get(group["params"][0], {}).get("rejections", q.mean_probe[..., 0])
            if rejections.shape != q.batch_shape:
                batches = f"{tuple(rejections.shape)}, and q is of {tuple(q.batch_shape)}. Load one that is of q"
                raise InputError(f"this state dict is of a posterior of the batch shape {batches}.")
        super().load_state_dict(state_dict)  # by __setstate__
        saved = self.state[self.posteriors[0].mean_probe].get("generators", {})
        for name, generator in self._generators().items():
            if name in saved:
                generator.set_state(saved[name].to(device="cpu", dtype=torch.uint8))

    def __repr__(self) -> str:
        """The param groups as torch prints them, followed by the names of the parts."""
        parts = (self.rule, self.step_size, self.estimator, self.metric, self.momentum)
        names = ", ".join(
            repr(part) if part is self.step_size and type(part).__repr__ is not object.__repr__ else type(part).__name__
            for part in parts
            if part is not None
        )
        return f"{super().__repr__()[:-1].rstrip()}\n    parts: {names}\n)"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._cache, self.last, self._pending = None, None, {}
        super().__setstate__(state)
        for q in self.posteriors:
            if q.mean_probe in self.state:
                complete(self.state[q.mean_probe], self._fresh(q))


def _checked_rate(lr: Any, q: Posterior) -> float | Tensor:
    """A learning rate: a number, or a tensor with one entry a member, which stays the same object for schedules."""
    what = "is a number, or a tensor with one entry a member"
    if not isinstance(lr, Tensor):
        if not is_number(lr, at_least=0, infinite=True):
            real = is_number(lr, infinite=True)
            raise InputError(f"lr {what}{', 0 or larger' if real else ''}; got {shown(lr)}.")
        return lr
    values = read_tensor("lr", lr, finite=False)
    if values.shape not in ((), q.batch_shape):
        raise InputError(f"lr {what}, {tuple(q.batch_shape)}; got shape {tuple(values.shape)}.")
    if not bool((values >= 0).all()):
        raise InputError(f"lr must not be negative; got {float(values.min()):g}.")
    return lr


class EvaluatingOptimizer(PosteriorOptimizer):
    """A `PosteriorOptimizer` that evaluates a target at q: the loss, its gradient, and the path of the next step."""

    evaluations: int = 0
    gradients: int = 0  # of the log joint, one a draw; for a model, passes over its data
    values: int = 0  # of the log joint without a gradient
    _found: bool  # steps are in units of 1/γ, the step of Newton
    _cache: Cached | None = None

    @tracked
    @torch.no_grad()
    def evaluate(self, target: Target | Callable[[Tensor], Tensor], *, at_once: bool = False) -> Status:
        """Evaluate L and its natural-gradient norm at q, without a step.

        The next step on the same target uses the result.

        Args:
            target: a `Target`, or a function of theta that returns the log joint.
            at_once: whether this follows a step on the same target at once, so that nothing can have been written to q
                or to the data behind torch's back, and their entries need not be compared.

        Returns:
            The loss (*batch,), the squared natural norm of its gradient (*batch,), and the part of it that the noise of
            the draws explains, where that is known.

        Raises:
            PairError: a target that the estimator cannot evaluate, an optimizer of several posteriors.

        >>> import torch
        >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
        >>> model = GeneralizedLinear(torch.eye(1), [2.0], "gaussian")  # the posterior is N(1, ½)
        >>> opt = VN(CholeskyGaussian(1, mean=1.0, scale=0.5**0.5))
        >>> bool(opt.evaluate(model).norm2 < 1e-10)
        True
        """
        target = as_target(target)
        if not target.tensors():
            self._cache = None  # nobody knows whether the target has changed
        evaluation, heading = self._evaluated(target, stays=True, contents=not at_once)
        return Status(evaluation.loss, heading.norm2(), evaluation.e.noise2)

    @property
    @torch.no_grad()
    def expectation(self) -> Raw | None:
        """The mean gradient g = E_q[∇ℓ] and the mean Hessian H = E_q[∇²ℓ] at q, as they were evaluated last.

        They come at no further evaluation: for a Newton step or a preconditioner of one's own, for Laplace-like
        standard errors, or to look at.  H is stored in the pattern of q, (*batch, D, D) for a full covariance and its
        diagonal (*batch, D) for a mean field; with draws both are estimates.

        Returns:
            The packet (g, H), on the device of q; None where q has moved on since, as after a step with ``lr`` or after
            ``loss.backward()``: `evaluate` makes it known.

        >>> import torch
        >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
        >>> model = GeneralizedLinear(torch.eye(1), [2.0], "gaussian", prior_precision=1.0)
        >>> opt = VN(CholeskyGaussian(1))
        >>> _ = opt.evaluate(model)
        >>> opt.expectation  # of ½(θ - 2)² + ½θ² under N(0, 1)
        Raw(g=tensor([-2.]), H=tensor([[2.]]))
        """
        q, kept = self._only_posterior("expectation"), self._cache
        if kept is None or not q.framed or not kept.holds(kept.target, q, False):
            return None
        return Raw(*q.unframe(*kept.evaluation.e.derivative.framed(q.frame())))

    @torch.no_grad()
    def averaged(self, target: Target, repeats: int) -> Status:
        """L and the norm of the mean gradient over fresh evaluations at q, with its squared standard error.

        It is for a verdict where there are draws: the norm of one evaluation is small by chance too, and the norm on
        fixed draws says nothing of other draws.

        Args:
            target: the target to evaluate.
            repeats: the number of evaluations, each on draws of its own, at least 2.

        Returns:
            The mean loss (*batch,), the squared natural norm of the mean gradient (*batch,), and its squared standard
            error (*batch,).
        """
        q = self._only_posterior("a target")
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
        if self.metric is None or isinstance(self.metric, Acceleration):
            return q.norm2(local)
        return self._bent(0, local)[0].slope

    def _evaluated(self, target: Target, stays: bool = False, contents: bool = True) -> tuple[Evaluation, Heading]:
        """The packet and heading at q, from the cache while q and the target are what they were."""
        q, kept = self._only_posterior("a target"), self._cache
        if kept is not None and kept.holds(target, q, stays, contents):
            return kept.evaluation, kept.heading
        target.admit(q)
        evaluation = self._evaluate_target(target, q)
        self._forget_unless(evaluation.loss)
        heading = self._heading(0, evaluation.e)
        if stays:
            self._keep(target, evaluation, heading)
        return evaluation, heading

    def _keep(self, target: Target, evaluation: Evaluation, heading: Heading) -> None:
        """Into the cache: an evaluation at q as it is now, with the way from there."""
        before = None if self._cache is None else self._cache.versions
        versions = Versions((*target.tensors(), *self.posteriors[0].coordinates), before)
        self._cache = Cached(target, settings(target), versions, evaluation, heading)

    def _evaluate_target(self, target: Target, q: Posterior, fresh: int | None = None) -> Evaluation:
        estimator = self._estimator_for(target)
        estimator = estimator if fresh is None else estimator.fresh(fresh)
        estimator.check(q)
        learned = self._state(0)["estimator"]
        e = estimator.recalling(learned)(q, target)
        learned.update(e.learned or {})
        self._count(e.cost)
        return Evaluation(q.loss(e), e)

    def _count(self, cost: Cost) -> None:
        if torch.compiler.is_compiling():  # a graph would be made again for each number
            return
        self.evaluations += 1
        self.gradients += cost.gradients
        self.values += cost.values

    def evaluates_exactly(self, target: Target) -> bool:
        """Whether an evaluation gives L itself, so that losses may be compared.

        Args:
            target: the target that would be evaluated.

        Returns:
            True if neither the estimator nor the target is noisy, and there is no average over fixed draws.
        """
        return self._estimator_for(target).comparable and target.comparable and not self.averages(target)

    def averages(self, target: Target) -> bool:
        """Whether every evaluation is the average over the same fixed draws (a sample-average approximation of L).

        Args:
            target: the target that would be evaluated.

        Returns:
            True if the estimator keeps its draws.
        """
        return self._estimator_for(target).fixed

    def _estimator_for(self, target: Target) -> Estimator:
        estimator = self.estimator or (Quadrature() if isinstance(target, TractableTarget) else Stein())
        refuse(WITH_TARGET, self._parts(estimator=estimator, target=target))
        return estimator

    def resample(self, estimator: Estimator) -> None:
        """Go on with another estimator of the same expectation; what is known of the curvature is kept.

        Args:
            estimator: the estimator from now on, for example the same one on more draws.

        Raises:
            PairError: an estimator that cannot work with the other parts.

        >>> from torchngvi import VN, CholeskyGaussian, Stein
        >>> from torchngvi.expectations import Fixed
        >>> opt = VN(CholeskyGaussian(1), estimator=Stein(Fixed(4)))
        >>> opt.resample(Stein(Fixed(8)))
        """
        refuse(AMONG_PARTS, self._parts(estimator=estimator))
        self.estimator, self._cache = estimator, None
        for index in range(len(self.posteriors)):
            state = self._state(index)
            state["loss"] = torch.full_like(state["loss"], torch.nan)  # not to be compared with
            state["went"] = torch.zeros_like(state["went"])  # nor the gradients

    def _forget_unless(self, loss: Tensor) -> None:
        """Empty the memory of members whose loss is not what the last step left: q or the target was changed."""
        if self.metric is not None:
            state = self._state(0)
            rounding = 64 * torch.finfo(loss.dtype).eps * loss.abs().clamp_min(1.0)
            resampled = state["loss"].isnan()
            same = ((loss - state["loss"]).abs() <= rounding) | resampled
            state["loss"] = torch.where(resampled, loss, state["loss"])
            state["went"] = torch.where(same, state["went"], 0.0)
            self.metric.forget(same, state["metric"])

    def _heading(self, index: int, e: Expectation) -> Heading:
        """The rule's path along the gradient, or along what the metric makes of it."""
        q = self.posteriors[index]
        unit = 1 / e.temperature if self._found and e.temperature > 0 else 1.0
        if self.metric is None:
            path = self.rule(q, e)
            return Heading(path.in_units_of(unit), path.norm2, {})
        gradient = q.local(e)
        # the metric sees L/γ, whose curvature in the frame is about 1 whatever γ
        scaled = gradient if unit == 1.0 else Local(unit * gradient.a, unit * gradient.P)
        bent, memory = self._bent(index, scaled)
        local: Any = bent.local if unit == 1.0 else Local(bent.local.a / unit, bent.local.P / unit)
        path = self.rule(q, e._replace(derivative=local))  # which q hands on as it is
        path, slope = path.in_units_of(unit), lambda: bent.slope if unit == 1.0 else bent.slope / unit
        if isinstance(self.metric, Acceleration):
            return Heading(Path(path.at, path.norm2, slope), lambda: q.norm2(gradient), memory)
        return Heading(Path(path.at, slope, slope), slope, memory)

    def _bent(self, index: int, gradient: Local) -> tuple[Bent, State]:
        """What the metric makes of a gradient, and will remember of it."""
        assert self.metric is not None
        state = self._state(index)
        return self.metric(self.posteriors[index], gradient, state["went"], state["metric"])
