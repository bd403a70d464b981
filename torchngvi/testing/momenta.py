"""Checks of momenta and of step sizes."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.expectations import Fixed, Stein
from torchngvi.interfaces import (
    Coordinates,
    Momentum,
    Path,
    Posterior,
    RootTangent,
    StepSize,
    Tangent,
    Trial,
    TrialStepSize,
)
from torchngvi.models import LogJoint
from torchngvi.optim import NaturalGradientVI
from torchngvi.rules import NaturalGradient
from torchngvi.testing.claims import IDENTITY, SINGLE, Claim, NoReads, batch_text, kind, normal, root_in, symmetric_in
from torchngvi.testing.problems import POSTERIORS, made, start

# The check of a momentum: averages of made-up changes, in the coordinates of every posterior

BATCHES: list[tuple[int, ...]] = [(), (2, 3)]
STEPS = 4
State = dict[str, Tensor]


class Changes(NamedTuple):
    """What the rule would do in one step, as a momentum is told it.

    Attributes:
        change: -λ̇, that of a step of ρ = 1, in q's own coordinates.
        norm2: the squared natural norm of λ̇, (*batch,).

    >>> Changes(Coordinates(torch.ones(1), torch.ones(1, 1)), torch.ones(())).times(2.0).change.vector.item()
    2.0
    """

    change: Coordinates
    norm2: Tensor  # (*batch,)

    def times(self, factor: float) -> "Changes":
        """Return the changes times a number, beside the same norm."""
        return Changes(Coordinates(factor * self.change.vector, factor * self.change.matrix), self.norm2)

    def member(self, index: tuple[int, ...]) -> "Changes":
        """Return the changes of one member of the batch."""
        return Changes(Coordinates(self.change.vector[index], self.change.matrix[index]), self.norm2[index])

    def float(self) -> "Changes":
        """Return the changes in single precision."""
        return Changes(Coordinates(self.change.vector.float(), self.change.matrix.float()), self.norm2.float())


def check_momentum(
    factory: Callable[[], Momentum],
) -> None:
    """Check that a momentum keeps the contract of `Momentum`, in the coordinates of every posterior.

    Its state must begin with the batch, and be returned, not written to.  Members must not depend on one another.  The
    average must be odd in the changes, go along changes that repeat, and be zero where they are, and a run must resume
    from the state of its optimizer.

    Args:
        factory: makes the momentum, for example its class.

    Raises:
        AssertionError: a promise is broken; the text says which, by how much, and for which input.

    >>> from torchngvi.rules import Adam
    >>> check_momentum(Adam)
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), Momentum), "a momentum must be a torchngvi.interfaces.Momentum")
    for name, posterior in POSTERIORS.items():
        for batch in BATCHES:
            at = start(posterior, batch, 5)
            q, here = made(posterior, at), claim.at(f"{batch_text(batch)}, {name}")
            with here.works("init or a call"):
                given = _changes(q)
                _state(here, factory(), q, given)
                outs, _ = _run(here, factory(), q, given)
                _direction(here, factory, q, given, outs)
                for index in {(0,) * len(batch), tuple(size - 1 for size in batch)} if batch else ():
                    one = made(posterior, at.member(index))
                    alone, _ = _run(here, factory(), one, [step.member(index) for step in given])
                    for part, whole in zip(alone[-1], outs[-1], strict=True):
                        here.close("batch members must not depend on one another", whole[index], part, IDENTITY)
                single, _ = _run(here, factory(), made(posterior, at.float()), [step.float() for step in given])
                for part, whole in zip(single[-1], outs[-1], strict=True):
                    here.close("its average in float32 must be that of float64", part, whole.float(), SINGLE)
                _resume(here, factory, q)


def _changes(q: Posterior) -> list[Changes]:
    """Of a few steps, in q's kind of matrix."""
    batch, structure = tuple(q.batch_shape), q.structure
    dense = root_in if RootTangent in q.takes else symmetric_in
    return [
        Changes(
            Coordinates(normal(*batch, q.dim, seed=60 + k), structure.from_dense(dense(structure, batch, 70 + k))),
            normal(*batch, seed=80 + k).exp(),
        )
        for k in range(STEPS)
    ]


def _step(momentum: Momentum, q: Posterior, given: Changes, state: State) -> tuple[Coordinates, State]:
    return momentum(q, given.change, lambda: given.norm2, state)


def _run(claim: Claim, momentum: Momentum, q: Posterior, given: list[Changes]) -> tuple[list[Coordinates], State]:
    """The averages of all steps, and the state after them."""
    state, outs = momentum.init(q), []
    for step in given:
        out, memory = _step(momentum, q, step, state)
        for name, part, like in zip(("vector", "matrix"), out, step.change, strict=True):
            right = part.shape == like.shape and part.dtype == like.dtype and bool(part.isfinite().all())
            claim.holds(right, f"the {name} of its average must be finite, like that of the change")
        outs.append(out)
        state = state | memory
    return outs, state


def _state(claim: Claim, momentum: Momentum, q: Posterior, given: list[Changes]) -> None:
    state, like = momentum.init(q), q.mean_probe
    for name, value in state.items():
        right = value.shape[: len(q.batch_shape)] == q.batch_shape and value.dtype == like.dtype
        claim.holds(right, f"its state {name!r} must begin with the batch {tuple(q.batch_shape)}, in the dtype of q")
    _step(momentum, q, given[0], state)  # indices of the structure are made once, from positions on the host
    before = {name: value.clone() for name, value in state.items()}
    with NoReads():
        _, memory = _step(momentum, q, given[0], state)
    claim.holds(set(memory) <= set(state), f"it must hand back state that init has made, {sorted(state)}")
    for name, value in before.items():
        claim.same(f"it must hand back new state, not write to {name!r}: the step may not be taken", state[name], value)
        shape = memory.get(name, value).shape
        claim.holds(shape == value.shape, f"its state {name!r} must keep its shape {tuple(value.shape)}")


def _direction(
    claim: Claim, factory: Callable[[], Momentum], q: Posterior, given: list[Changes], outs: list[Coordinates]
) -> None:
    opposite, _ = _run(claim, factory(), q, [step.times(-1.0) for step in given])
    for part, whole in zip(opposite[-1], outs[-1], strict=True):
        claim.close("the average of opposite changes must be the opposite", part, -whole, IDENTITY)
    still, _ = _run(claim, factory(), q, [Changes(step.times(0.0).change, 0 * step.norm2) for step in given])
    for part in still[-1]:
        claim.close("the average of changes that are zero must be zero", part, torch.zeros_like(part))
    same, _ = _run(claim, factory(), q, STEPS * given[:1])
    batch = len(q.batch_shape)
    along = sum((x * y).flatten(batch).sum(-1) for x, y in zip(same[-1], given[0].change, strict=True))
    claim.holds((along > 0).all(), "the average of one change, again and again, must go along it")  # type: ignore[union-attr]


def _resume(claim: Claim, factory: Callable[[], Momentum], q: Posterior) -> None:
    """In the optimizer, from its state dict."""
    if Tangent not in q.takes:
        return
    target = LogJoint(lambda theta: -0.5 * theta.square().sum(-1) - 0.1 * (theta**4).sum(-1))

    def optimizer(q: Posterior) -> NaturalGradientVI:
        rule, draws = NaturalGradient(), Stein(Fixed(2 * q.dim))
        return NaturalGradientVI(q, rule, lr=1e-3, estimator=draws, momentum=factory())

    first = copy.deepcopy(q)
    opt = optimizer(first)
    opt.step(target)
    second = copy.deepcopy(first)
    resumed = optimizer(second)
    resumed.load_state_dict(opt.state_dict())
    for each in (opt, resumed):
        each.step(target)
    for one, two in zip(first.coordinates, second.coordinates, strict=True):
        claim.same("a run must resume from the state dict of its optimizer, bit for bit", one, two)
    claim.holds(opt.rejections == 0, "a small step along its average must be taken")


# The check of a step size: what it proposes along made-up paths, and how it judges made-up trials

STEP_BATCHES: list[tuple[int, ...]] = [(), (3,), (2, 3)]
LR = 0.5  # in [0, 1], for steps that are convex combinations


def check_step_size(
    factory: Callable[[], StepSize],
) -> None:
    """Check that a step size keeps the contract of `StepSize`, and one that judges trials that of `TrialStepSize`.

    What it proposes must have one positive entry a member, not above lr, which depends on that member alone.  Only one
    that says `needs_natural` or `needs_trial` may read the norm of the direction, and none may read a value back from
    the device.  One that judges trials must keep a trial that falls as promised, reject a rise and a NaN, and propose
    less after a rejection; its new state is returned, and the old not written to.

    Args:
        factory: makes the step size, for example its class.

    Raises:
        AssertionError: a promise is broken; the text says which, and for which input.

    >>> from torchngvi.stepsizes import SufficientDecrease
    >>> check_step_size(SufficientDecrease)
    """
    control = factory()
    claim = Claim(kind(control))
    claim.holds(isinstance(control, StepSize), "a step size must be a torchngvi.interfaces.StepSize")
    for batch in STEP_BATCHES:
        for dtype in (torch.float64, torch.float32):
            here = claim.at(f"{batch_text(batch)} in {str(dtype).removeprefix('torch.')}")
            like = torch.zeros(batch, dtype=dtype)
            judges = hasattr(control, "judge")
            here.holds(
                judges == isinstance(control, TrialStepSize),
                "one that has `judge`, and no other, must be a torchngvi.interfaces.TrialStepSize",
            )
            here.holds(control.needs_trial == judges, "`needs_trial` must be left to its kind, which says it")
            with here.works("init or propose"):
                _step_state(here, control, like)
                _proposal(here, control, like)
            with here.works("judge"):
                _judgement(here, control, like)


def _path(norm2: Tensor, read: list[int] | None = None) -> Path:
    """A straight line of that length, in coordinates of one number."""

    def counted() -> Tensor:
        if read is not None:
            read.append(1)
        return norm2

    def at(rho: Tensor) -> Tangent:
        length = (rho * norm2.sqrt())[..., None]
        return Tangent(Coordinates(length, length[..., :0]))

    return Path(at, counted, lambda: norm2, lambda: norm2)


def _propose(claim: Claim, control: StepSize, norm2: Tensor, lr: float | Tensor, state: dict[str, Tensor]) -> Tensor:
    like = torch.zeros_like(norm2)
    with NoReads():
        rho = control.propose(_path(norm2), lr, like, state)
    shape, dtype = tuple(rho.shape), rho.dtype
    claim.holds(
        shape == like.shape and dtype == like.dtype, f"propose must give ρ like its members; got {shape}, {dtype}"
    )
    return rho


def _tensors(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Of nested dicts."""
    for name, value in state.items():
        yield from _tensors(value) if isinstance(value, dict) else [(name, value)]


def _step_state(claim: Claim, control: StepSize, like: Tensor) -> None:
    for name, value in _tensors(control.init(like)):
        right = value.shape == like.shape and value.dtype == like.dtype
        claim.holds(right, f"init must give its state {name!r} one entry a member, in their dtype")


def _proposal(claim: Claim, control: StepSize, like: Tensor) -> None:
    norm2, state = normal(*like.shape, seed=1, dtype=like.dtype).exp(), control.init(like)
    rho = _propose(claim, control, norm2, LR, state)
    claim.holds(((rho > 0) & (rho <= LR)).all(), f"propose must give 0 < ρ ≤ lr; got {rho.tolist()} of lr = {LR}")
    lrs = LR * torch.linspace(0.1, 1.0, max(1, like.numel()), dtype=like.dtype).reshape(like.shape)
    one_each = _propose(claim, control, norm2, lrs, state)
    claim.holds((one_each <= lrs).all(), "propose must keep to an lr for each member")
    still = _propose(claim, control, torch.zeros_like(norm2), LR, state)
    claim.holds(((still > 0) & (still <= LR)).all(), "propose must give 0 < ρ ≤ lr also where ∇L is zero")
    read: list[int] = []
    control.propose(_path(norm2, read), LR, like, state)
    reads = control.needs_trial or control.needs_natural
    claim.holds(reads or not read, "it reads the natural norm of the direction, so `needs_natural` must be True")
    if control.needs_natural:
        shorter = _propose(claim, control, 1e6 * norm2, LR, state)
        claim.holds((shorter < rho).all(), "`needs_natural` is said, so a much longer direction must get a smaller ρ")
    if like.numel() > 1:
        norm2.reshape(-1)[0] *= 1e6
        other = _propose(claim, control, norm2, LR, state)
        claim.same(
            "what it proposes for a member must not depend on the others", other.flatten()[1:], rho.flatten()[1:]
        )


def _trial(like: Tensor, after: float, rho: float = 0.25, slack: float = 0.0) -> Trial:
    """From L = 3 with a slope of 2, so that 2ρ is promised."""
    one = torch.ones_like(like)
    return Trial(3 * one, after * one, 2 * one, rho * 2**0.5 * one, rho * one, slack * one)


def _judged(
    claim: Claim, control: TrialStepSize, trial: Trial, state: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    before = {name: value.clone() for name, value in state.items()}
    with NoReads():
        accept, new = control.judge(trial, state)
    right = accept.dtype == torch.bool and accept.shape == trial.before.shape
    claim.holds(right, "judge must give one truth a member")
    claim.holds(set(new) == set(before), f"judge must give back its state {sorted(before)}; got {sorted(new)}")
    for name, value in before.items():
        claim.same(f"judge must give back a new state, not write to {name!r}", state[name], value)
    return accept, new


def _judgement(claim: Claim, control: StepSize, like: Tensor) -> None:
    """Of one that finds its steps by trial."""
    if not isinstance(control, TrialStepSize):
        return
    state = control.init(like)
    accept, kept = _judged(claim, control, _trial(like, 2.5), state)
    claim.holds(accept.all(), "judge must keep a step that falls by all that its slope promised")
    for after, name in ((4.0, "a rise"), (torch.nan, "a NaN"), (torch.inf, "an infinite loss")):
        accept, worse = _judged(claim, control, _trial(like, after), state)
        claim.holds(not accept.any(), f"judge must reject {name}")
        rho = _propose(claim, control, 2 * torch.ones_like(like), LR, worse)
        claim.holds((rho < 0.25).all(), f"it must propose less than the ρ that was rejected for {name}")
        claim.holds((rho > 0).all(), f"it must propose a positive ρ after {name}")
    accept, _ = _judged(claim, control, _trial(like, 3.1, slack=1.0), state)
    claim.holds(accept.all(), "judge must keep a rise within the slack")
    if like.numel() > 1:
        trial = _trial(like, 2.5)
        trial.after.reshape(-1)[0] = 4.0
        accept, mixed = _judged(claim, control, trial, state)
        claim.holds(accept.flatten()[1:].all() & ~accept.flatten()[0], "judge must judge every member by itself")
        for name, value in mixed.items():
            sentence = f"the state {name!r} of a member must not depend on the others"
            claim.same(sentence, value.flatten()[1:], kept[name].flatten()[1:])
