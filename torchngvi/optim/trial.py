"""A step: propose a point of the path, move there, and where it is judged keep it or go back, member by member."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates, Move, Path, Posterior, Tangent, Trial, known_everywhere, where_members
from torchngvi.numerics.linalg import finite
from torchngvi.optim.records import Evaluation

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
    return finite(trial.rho) & finite(trial.slope) & finite(trial.before)


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
