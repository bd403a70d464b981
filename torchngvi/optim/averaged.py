"""The path of a momentum: along the average of the changes that the rule has asked for."""

from torch import Tensor

from torchngvi.interfaces import Coordinates, Momentum, Move, Path, Posterior, Tangent, where_members

State = dict[str, Tensor]


def averaged(momentum: Momentum, q: Posterior, path: Path, share: Tensor, state: State) -> tuple[Path, State]:
    """The path along the average of the changes that the rule has asked for, and the state of the momentum after it."""
    move = path.at(share)
    assert isinstance(move, Tangent)
    kind, (vector, matrix) = type(move), move.change
    state = state | {name: q.carried(state[name]) for name in momentum.carried}
    change, memory = momentum(q, move.change, path.norm2, state)
    finite = vector.isfinite().all(-1) & q.structure.is_finite(matrix)
    memory = {name: where_members(finite, value, state[name]) for name, value in memory.items()}

    def at(rho: Tensor) -> Move:
        return kind(Coordinates(rho[..., None] * change.vector, q.structure.scaled(rho, change.matrix)))

    return Path(at, path.norm2, path.slope, speed2=path.length2), memory
