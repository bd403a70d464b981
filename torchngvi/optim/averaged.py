"""The path of a momentum: along the average of the changes that the rule has asked for."""

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates, LogTangent, Momentum, Move, Path, Posterior, Tangent, where_members
from torchngvi.optim.trial import Proposal

State = dict[str, Tensor]


def averaged(momentum: Momentum, q: Posterior, path: Path, share: Tensor, state: State) -> tuple[Path, State]:
    """The path along the average, and the state with this change in it; one that is not finite is not remembered.

    Args:
        momentum: what averages.
        q: the posterior.
        path: of the rule, along a straight line.
        share: ρ of the change that enters the average, (*batch,).
        state: that of the momentum.
    """
    move = path.at(share)
    assert isinstance(move, Tangent)
    kind, (vector, matrix) = type(move), move.change
    state = state | {name: q.carried(state[name]) for name in momentum.carried}
    change, memory = momentum(q, move.change, path.norm2, state)
    finite = vector.isfinite().all(-1) & q.structure.is_finite(matrix)
    memory = {name: where_members(finite, value, state[name]) for name, value in memory.items()}

    def at(rho: Tensor) -> Move:
        return kind(Coordinates(rho[..., None] * change.vector, q.structure.scaled(rho, change.matrix)))

    return Path(at, path.norm2, path.slope), memory


def turned(momentum: Momentum, q: Posterior, step: Proposal, memory: State) -> State:
    """The state, its averaged changes with their columns turned where q turns those of its root to a positive diagonal.

    Args:
        momentum: which says what of the state is turned.
        q: the posterior before the step.
        step: the step that is about to be taken.
        memory: of the momentum after this step.
    """
    if isinstance(step.move, LogTangent):  # its diagonal stays positive
        return memory
    assert isinstance(step.move, Tangent)
    diagonal = q.structure.diagonal(q.coordinates.matrix + step.move.change.matrix)
    columns = (diagonal < 0) & step.inside[..., None]
    sign = torch.where(columns, -torch.ones_like(diagonal), torch.ones_like(diagonal))
    return memory | {name: q.structure.scale_columns(memory[name], sign) for name in momentum.signed}
