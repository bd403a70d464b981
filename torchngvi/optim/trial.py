"""A step: propose a point of the path, move there, and where it is judged keep it or go back, member by member."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates, Move, Path, Posterior, Trial, where_members
from torchngvi.optim.records import Evaluation

_SLACK = 0.1  # of noise²: the objective may rise on the way to where a noisy derivative vanishes


class Proposal(NamedTuple):
    """A point of the path, before q goes there."""

    path: Path
    rho: Tensor  # (*batch,)
    move: Move
    new: Coordinates
    inside: Tensor  # the members for which it stays in the domain of q, (*batch,)


class Outcome(NamedTuple):
    """What a trial came to."""

    accepted: Tensor  # (*batch,)
    evaluation: Evaluation  # at q as it is afterwards: of the trial where it was kept, of the start elsewhere
    control: dict[str, Any]  # what of the step size's state is new


def proposed(q: Posterior, path: Path, rho: Tensor) -> Proposal:
    """The point at ρ."""
    move = path.at(rho)
    new, inside = q.moved(move)
    return Proposal(path, rho, move, new, inside)


def tried(
    q: Posterior,
    proposal: Proposal,
    start: Evaluation,
    evaluate: Callable[[], Evaluation],
    judge: Callable[[Trial], tuple[Tensor, dict[str, Any]]],
) -> Outcome:
    """Move q, evaluate it there, and restore the members whose step is not kept.

    Args:
        q: the posterior at the start; an error or an interrupt in ``evaluate`` leaves it there.
        proposal: where to.
        start: the evaluation there.
        evaluate: at q as it then is.
        judge: which members are kept, (*batch,), and the state of the step size after such a trial.

    Returns:
        Which members were kept, the evaluation that holds now, and the new state where the trial says something.
    """
    path, rho = proposal.path, proposal.rho
    old = q.snapshot()
    slope, length = path.slope(), rho * path.norm2().sqrt()
    q.assign(proposal.new, proposal.inside)
    try:
        there = evaluate()
    except BaseException:  # an interrupt, an error in the user's function: nothing is lost
        q.assign(old, torch.ones_like(proposal.inside))
        raise
    slack = 0.0 if start.e.noise2 is None else _SLACK * start.e.noise2
    kept, control = judge(Trial(start.loss, there.loss, slope, length, rho, slack))
    accepted = proposal.inside & kept
    q.assign(old, ~accepted)
    return Outcome(accepted, _merged(accepted, there, start), control)


def usable(trial: Trial) -> Tensor:  # (*batch,)
    """Whether a trial began where L, its slope and the step were finite: other trials teach nothing."""
    return trial.rho.isfinite() & trial.slope.isfinite() & trial.before.isfinite()


def together(trial: Trial) -> Trial:
    """One trial of all batch members, each with its own ρ."""
    before, after, promised = (x.sum().expand_as(x) for x in (trial.before, trial.after, trial.rho * trial.slope))
    length = trial.length.square().sum().sqrt().expand_as(trial.length)
    slack = trial.slack.sum().expand_as(trial.slack) if isinstance(trial.slack, Tensor) else trial.slack
    return Trial(before, after, promised / trial.rho, length, trial.rho, slack)


def _merged(where: Tensor, new: Evaluation, old: Evaluation) -> Evaluation:
    """New for the members of the mask, old for the others."""
    e = new.e._replace(
        value=where_members(where, new.e.value, old.e.value),
        derivative=new.e.derivative.merged(where, old.e.derivative),  # type: ignore[arg-type]
    )
    return Evaluation(where_members(where, new.loss, old.loss), e)
