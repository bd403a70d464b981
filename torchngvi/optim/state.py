"""The state of a posterior under its optimizer: completed for the parts, and converted with q."""

from typing import Any

from torch import Tensor

State = dict[str, Any]


def complete(state: State, fresh: State) -> None:
    """Complete a state that was loaded, in place: add entries that it lacks, and restore their dtypes."""
    for name, value in fresh.items():
        state[name] = _in_dtypes_of(value, state[name]) if name in state else value


def converted(state: State, like: Tensor) -> State:
    """The state in the dtype and on the device of q."""
    new = dict(state)
    for name, value in state.items():
        if isinstance(value, dict):
            new[name] = converted(value, like)
        elif isinstance(value, Tensor) and value.is_floating_point():
            new[name] = value.to(like)
    return new


def _in_dtypes_of(fresh: Any, loaded: Any) -> Any:
    if isinstance(fresh, dict):
        return fresh | loaded | {name: _in_dtypes_of(fresh[name], loaded[name]) for name in fresh if name in loaded}
    return loaded.to(fresh.dtype) if isinstance(fresh, Tensor) else loaded
