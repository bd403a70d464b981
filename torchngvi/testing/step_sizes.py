"""The check of a step size: what it proposes along made-up paths, and how it judges made-up trials."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates, Path, StepSize, Tangent, Trial, TrialStepSize
from torchngvi.testing.claims import Claim, NoReads, batch_text, kind, normal

BATCHES: list[tuple[int, ...]] = [(), (3,), (2, 3)]
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
    for batch in BATCHES:
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
                _state(here, control, like)
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


def _state(claim: Claim, control: StepSize, like: Tensor) -> None:
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
