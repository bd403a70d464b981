"""Checks of momenta and of step sizes."""

from collections.abc import Callable
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
from torchngvi.testing.claims import (
    BATCHES,
    IDENTITY,
    POSTERIORS,
    Claim,
    NoReads,
    batch_text,
    check_members,
    entries,
    kind,
    made,
    mapped,
    normal,
    root_in,
    start,
    symmetric_in,
)

# The check of a momentum: averages of made-up changes, in the coordinates of every posterior

State = dict[str, Tensor]


class Changes(NamedTuple):
    """What the rule would do in one step, as a momentum reads it: -λ̇ of a step of ρ = 1, and |λ̇|² (*batch,)."""

    change: Coordinates
    norm2: Tensor


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
                given, momentum = _changes(q), factory()
                _state(here, momentum, q, given[0], momentum.init(q))

                def run(q: Posterior, given: list[Changes], claim: Claim = here) -> Coordinates:
                    return _average(claim, factory(), q, given)

                last = run(q, given)
                _direction(here, run, q, given, last)
                check_members(here, posterior, at, given, run, last, "average")
                if Tangent in q.takes:
                    opt = here.resumes(q, lambda q: _optimizer(q, factory()), _TARGET)
                    here.holds(opt.rejections == 0, "a small step along its average must be taken")


def _changes(q: Posterior) -> list[Changes]:
    """Of a few steps, in q's kind of matrix."""
    batch, structure = tuple(q.batch_shape), q.structure
    dense = root_in if RootTangent in q.takes else symmetric_in
    return [
        Changes(
            Coordinates(normal(*batch, q.dim, seed=60 + k), structure.from_dense(dense(structure, batch, 70 + k))),
            normal(*batch, seed=80 + k).exp(),
        )
        for k in range(4)
    ]


def _average(claim: Claim, momentum: Momentum, q: Posterior, given: list[Changes]) -> Coordinates:
    """The average after all steps."""
    state = momentum.init(q)
    for change, norm2 in given:
        out, memory = momentum(q, change, lambda norm2=norm2: norm2, state)  # type: ignore[misc]
        for name, part, like in zip(("vector", "matrix"), out, change, strict=True):
            right = part.shape == like.shape and part.dtype == like.dtype and bool(part.isfinite().all())
            claim.holds(right, f"the {name} of its average must be finite, like that of the change")
        state = state | memory
    return out


def _state(claim: Claim, momentum: Momentum, q: Posterior, given: Changes, state: State) -> None:
    for name, value in state.items():
        right = value.shape[: len(q.batch_shape)] == q.batch_shape and value.dtype == q.mean_probe.dtype
        claim.holds(right, f"its state {name!r} must begin with the batch {tuple(q.batch_shape)}, in the dtype of q")

    def call() -> tuple[Coordinates, State]:
        return momentum(q, given.change, lambda: given.norm2, state)

    call()  # indices of the structure are made once, from positions on the host
    claim.keeps_state(state, call, reads=False)


def _direction(claim: Claim, run: Any, q: Posterior, given: list[Changes], last: Coordinates) -> None:
    opposite = run(q, [step._replace(change=mapped(torch.neg, step.change)) for step in given])
    for part, whole in zip(opposite, last, strict=True):
        claim.close("the average of opposite changes must be the opposite", part, -whole, IDENTITY)
    for part in run(q, mapped(torch.zeros_like, given)):
        claim.close("the average of changes that are zero must be zero", part, torch.zeros_like(part))
    same, batch = run(q, 4 * given[:1]), len(q.batch_shape)
    along = torch.stack([(x * y).flatten(batch).sum(-1) for x, y in zip(same, given[0].change, strict=True)]).sum(0)
    claim.holds((along > 0).all(), "the average of one change, again and again, must go along it")


_TARGET = LogJoint(lambda theta: -0.5 * theta.square().sum(-1) - 0.1 * (theta**4).sum(-1))


def _optimizer(q: Posterior, momentum: Momentum) -> NaturalGradientVI:
    draws = Stein(Fixed(2 * q.dim))
    return NaturalGradientVI(q, NaturalGradient(), lr=1e-3, estimator=draws, momentum=momentum)


# The check of a step size: what it proposes along made-up paths, and how it judges made-up trials

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
    for batch in ((), (3,), (2, 3)):
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


def _step_state(claim: Claim, control: StepSize, like: Tensor) -> None:
    for name, value in entries(control.init(like)):
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
    accept, new = claim.keeps_state(state, lambda: control.judge(trial, state), reads=False)
    right = accept.dtype == torch.bool and accept.shape == trial.before.shape
    claim.holds(right, "judge must give one truth a member")
    claim.holds(set(new) == set(state), f"judge must give back its state {sorted(state)}; got {sorted(new)}")
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
