"""A run between two steps, in a file."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior
from torchngvi.optim import NaturalGradientVI
from torchngvi.records import Record


def snapshot(
    q: Posterior, optimizer: NaturalGradientVI, trace: list[Record], step: float, seconds: float, done: tuple[int, int]
) -> dict[str, Any]:
    """Where a run stands between two steps; valid until the next one."""
    return {
        "posterior": q.state_dict(),
        "optimizer": optimizer.state_dict(),
        "trace": [tuple(record) for record in trace],
        "step": step,
        "method": type(optimizer).__name__,
        "loss": optimizer.state[q.mean_probe].get("loss") if optimizer.step_size.needs_trial and trace else None,
        "seconds": seconds,
        # the value a trial left behind is computed anew on resuming
        "done": (done[0] - 1, done[1] - optimizer.last_cost) if optimizer.step_size.needs_trial and trace else done,
    }


def save(path: str | Path, snapshot: dict[str, Any]) -> None:
    """Write to a new file, then give it the name: a kill in between leaves the old one whole."""
    path = Path(path)
    new = path.with_name(path.name + ".new")
    torch.save(snapshot, new)
    os.replace(new, path)


def check_writable(path: str | Path) -> None:
    """Before the first step, not after the last.

    Raises:
        InputError: a file in a folder that does not exist, or a folder.
    """
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise InputError(f"the checkpoint {path} {what}. Name a file in a folder that exists.")


def loaded(path: str | Path | None, q: Posterior, method: str) -> dict[str, Any] | None:
    """What a checkpoint of this method holds, with q set to its posterior; None where there is no file.

    Raises:
        InputError: a file that is no checkpoint, or one of another posterior or method.
    """
    if path is None or not Path(path).exists():
        return None
    try:
        state = torch.load(path, weights_only=True, map_location=q.mean_probe.device)
        shapes = {name: value.shape for name, value in state["posterior"].items()}
    except (RuntimeError, KeyError, AttributeError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} is no checkpoint of fit ({error}). Remove it, or name another file.") from error
    mine = {name: value.shape for name, value in q.state_dict().items()}
    if shapes != mine:
        raise InputError(
            f"{path} holds another posterior, {_shown(shapes)} where this one has {_shown(mine)}. "
            "Remove it, or name another file."
        )
    if state["method"] != method:
        raise InputError(f"{path} is a run of {state['method']}, this is {method}. Remove it, or name another file.")
    q.load_state_dict(state["posterior"])
    return state


def resumed(
    path: str | Path | None, q: Posterior, optimizer: NaturalGradientVI
) -> tuple[list[Record], float, float, tuple[int, int], Tensor | None]:
    """Load a checkpoint if there is one: trace, last step, seconds, what was spent, and the loss at q if known."""
    state = loaded(path, q, type(optimizer).__name__)
    if state is None:
        return [], 0.0, 0.0, (0, 0), None
    optimizer.load_state_dict(state["optimizer"])
    records = [Record(*values) for values in state["trace"]]
    return records, state["step"], state["seconds"], state["done"], state["loss"]


def check_same_problem(path: str | Path | None, expected: Tensor, loss: Tensor) -> None:
    """The loss at the saved q must be the saved one."""
    if bool(((loss - expected.to(loss)).abs() > 1e-6 * loss.abs().clamp_min(1.0)).any()):
        raise InputError(
            f"{path} belongs to another problem: at its q the negative ELBO was {float(expected.sum()):.6g}, "
            f"here it is {float(loss.sum()):.6g}. Remove it, or name another file."
        )


def _shown(shapes: dict[str, torch.Size]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
