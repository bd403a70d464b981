"""The path of a momentum: along the average of the changes that the rule has asked for."""

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates, LogTangent, Momentum, Move, Path, Posterior, Tangent, where_members
from torchngvi.optim.trial import Proposal

State = dict[str, Tensor]


def averaged(momentum: Momentum, q: Posterior, path: Path, share: Tensor, state: State) -> tuple[Path, State]:
    """The path along the average of the changes that the rule has asked for, and the state of the momentum after it.

    A change that is not finite does not enter the average.

    Args:
        momentum: the part that averages the changes.
        q: the posterior that is stepped.
        path: the path of the rule, which has to be a straight line in q's own coordinates.
        share: the ρ at which the change that enters the average is read from the path, (*batch,).
        state: the state of the momentum before this step.

    Returns:
        The straight path along the average, which keeps the norm and slope of the rule's path, and the new state.
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
    """The state of the momentum in the coordinates that q has after a step.

    A posterior keeps the diagonal of its root positive by changing the sign of columns; the columns of the averaged
    changes have to change sign with them.

    Args:
        momentum: the part whose attribute ``signed`` names the entries of the state that are turned.
        q: the posterior before the step.
        step: the step that is about to be taken.
        memory: the state of the momentum after this step.

    Returns:
        The state, with the columns of the named entries turned.
    """
    if isinstance(step.move, LogTangent):  # its diagonal stays positive
        return memory
    assert isinstance(step.move, Tangent)
    diagonal = q.structure.diagonal(q.coordinates.matrix + step.move.change.matrix)
    columns = (diagonal < 0) & step.inside[..., None]
    sign = torch.where(columns, -torch.ones_like(diagonal), torch.ones_like(diagonal))
    return memory | {name: q.structure.scale_columns(memory[name], sign) for name in momentum.signed}
