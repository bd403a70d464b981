"""Which parts cannot work together, and what to use in their place: all refusals of the optimizer in one table.

A row is a condition and the sentence that is said where it holds; names in braces are those of the parts.  The rows
are read from the top, in the group that belongs to what is known: the parts alone, with a posterior, with a target, or
the way in which a step is asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces import Acceleration, Estimator, Metric, Momentum, Posterior, Rule, StepSize, Tangent, Target


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
