"""The check of a momentum: averages of made-up changes, in the coordinates of every posterior."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.expectations import Fixed, Stein
from torchngvi.interfaces import Coordinates, Momentum, Posterior, RootTangent, Tangent
from torchngvi.models import LogJoint
from torchngvi.optim import NaturalGradientVI
from torchngvi.rules import NaturalGradient
from torchngvi.testing.claims import IDENTITY, SINGLE, Claim, NoReads, batch_text, kind, normal
from torchngvi.testing.matrices import root_in, symmetric_in
from torchngvi.testing.problems import POSTERIORS, made, start

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
