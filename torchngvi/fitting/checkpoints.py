"""A run between two steps, in a file: one writer and one loader for every loop, and the settings of a run in words.

The file is a line with the format, a digest of what follows, and what follows by `torch.save`: the settings of
the run with the fingerprint of its data, the state of the run, and that of the generators.  It is written
whole under a name of its own and then renamed, so that at every moment there is the old one or the new one.
"""

import contextlib
import copy
import ctypes
import glob
import hashlib
import io
import numbers
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchngvi.averaging import Averaging
from torchngvi.distributed import Processes
from torchngvi.errors import CheckpointWarning, InputError
from torchngvi.expectations.draws import Draws
from torchngvi.fitting.stopping import Criterion
from torchngvi.interfaces import Estimator, Metric, Momentum, Posterior, Rule, StepSize, Target
from torchngvi.numerics import sparse
from torchngvi.optim import NaturalGradientVI

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MAGIC, _FORMAT = b"torchngvi checkpoint, format ", b"4"
_DIGEST = 32  # bytes

State = dict[str, Any]
Holds = Mapping[str, Callable[[Any], bool]]  # what a state must have, and what is right there
_PARTS = (Rule, StepSize, Estimator, Metric, Momentum, Draws, Averaging, Criterion)


class Checkpoint:
    """The file that holds a run between two steps, for a run with these settings."""

    def __init__(
        self,
        path: str | Path,
        settings: dict[str, str],
        device: torch.device,
        batches: object = (),
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes or Processes.alone()
        with self.processes.together():
            self.path = _checked(path) if self.processes.leads else Path(path)
        self.apart: tuple[str, ...] = ()  # what each process has its own of, a list of all of them in the file
        self.settings, self.device = settings, device
        self.generators = Generators(device, batches)
        if self.generators.own:
            self.settings = {**settings, "number of generators in the batches": str(len(self.generators.own))}

    def captured(self, **state: Any) -> State:
        """A copy of the state, with the generators as they are; later changes do not reach it."""
        return copied({**state, "generators": self.generators.states()})

    def save(self, state: State) -> None:
        """Write a state to the file; where that fails there is a warning, and the earlier file stays."""
        state = {**state, **{name: self.processes.gather(state[name]) for name in self.apart}}
        if not self.processes.leads:
            return
        buffer = io.BytesIO()
        try:
            torch.save({"settings": self.settings, "state": state}, buffer)
            content = buffer.getvalue()
            write_whole(self.path, _MAGIC + _FORMAT + b"\n" + _digest(content) + content)
        except (OSError, MemoryError) as error:
            earlier = "the earlier one stays" if self.path.exists() else "there is no earlier one"
            warnings.warn(
                f"the checkpoint {self.path} could not be written ({_reason(error)}); {earlier}, and the run goes on.",
                CheckpointWarning,
                stacklevel=3,
            )

    def load(self, holds: Holds) -> State | None:
        """Read the state from the file."""
        state = None
        with self.processes.together():
            if self.processes.leads and self.path.exists():
                saved = _content(self.path, self.device)
                self._check_parts(saved, {"settings": _is_words, "state": lambda value: isinstance(value, dict)})
                for name in (*self.settings, *saved["settings"]):
                    old, new = (words.get(name, "not there") for words in (saved["settings"], self.settings))
                    if old != new:
                        raise InputError(
                            f"{self.path} is the checkpoint of another run: its {name} is {old}, here it is {new}. "
                            "Remove it, or name another file."
                        )
                self._check_parts(saved["state"], {**holds, "generators": _is_generators})
                state = saved["state"]
        state = self.processes.one(state)
        return state and {**state, **{name: state[name][self.processes.rank] for name in self.apart}}

    @contextlib.contextmanager
    def restoring(self, state: State) -> Iterator[None]:
        """A block in which the parts of the run are given their state; the generators get theirs at its end."""
        try:
            yield
            self.generators.set(state["generators"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise self._unusable(" ".join(f"{type(error).__name__}: {error}".split())) from error

    def _unusable(self, why: str) -> InputError:
        return InputError(f"{self.path} does not hold what this run needs ({why}). Remove it, or name another file.")

    def _check_parts(self, whole: Any, holds: Holds) -> None:
        """All of these are there, and right."""
        if not isinstance(whole, dict):
            raise self._unusable(f"a {type(whole).__name__} in the place of named parts")
        for name, right in holds.items():
            if name not in whole:
                raise self._unusable(f"{name} is missing")
            if not right(whole[name]):
                raise self._unusable(f"{name} has another form")

    def check_loss(self, saved: Tensor, loss: Tensor, again: Callable[[], Tensor]) -> None:
        """Check that the loss at the saved q and draws is the saved one, up to rounding."""
        if not _same(saved, loss) and _same(again(), loss):
            raise InputError(
                f"{self.path} belongs to another problem: at its q the negative ELBO was {float(saved.sum()):.10g}, "
                f"here it is {float(loss.sum()):.10g}. Remove it, or name another file."
            )


# ------------------------------------------------------------------------------------ the file


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: first under a name that nobody foresees, then in its place."""
    new = path.with_name(f"{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    file, lock = None, -1
    try:
        with new.open("xb") as file:  # neither a file nor a link may be there
            lock = locked(new, wait=False)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:  # an interrupt too leaves no rest, also at the end of the block above
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    finally:
        if lock >= 0:
            os.close(lock)
    sync(path.parent)


def remove_left(path: Path) -> None:
    """Remove what killed processes have left of `write_whole`, which nobody holds locked."""
    with contextlib.suppress(OSError):  # no such folder, or none that can be read
        for old in path.parent.glob(f"{glob.escape(path.name[:50])}.{'[0-9a-f]' * 16}.tmp"):
            if (lock := locked(old, wait=False)) >= 0:
                os.close(lock)
                old.unlink(missing_ok=True)


def locked(path: Path, *, wait: bool) -> int:
    """Lock a file or a folder until the descriptor is closed or the process ends, also by a kill."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY)
        if fcntl is None:
            raise OSError
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    folder = path.is_dir()
    with contextlib.suppress(*([OSError] if folder else [])):
        descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _checked(path: str | Path) -> Path:
    """Before the first step, not after the last."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"checkpoint names a file, by a str or a Path; got {type(path).__name__}.")
    path, what, which = Path(path), "", "that exists"
    try:
        if path.is_dir():
            what = "is a folder"
        elif not path.parent.is_dir():
            what = "is in a folder that does not exist"
        elif path.exists() and not path.is_file():
            what, which = "is no regular file", "of ordinary files"
        else:
            remove_left(path)
            trial = path.with_name(f"{path.name[:50]}.{secrets.token_hex(8)}")
            try:
                write_whole(trial, b"")
            finally:
                trial.unlink(missing_ok=True)
            return path
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        what, which = f"cannot be written ({_reason(error)})", "that can be written into"
    raise InputError(f"the checkpoint {path} {what}. Name a file in a folder {which}.")


def _content(path: Path, device: torch.device) -> dict[str, Any]:
    """What was given to `torch.save`."""
    instead = "Remove it, or name another file."
    try:
        head, _, rest = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise InputError(f"the checkpoint {path} cannot be read ({_reason(error)}). Name another file.") from error
    if not head.startswith(_MAGIC):
        raise InputError(f"{path} is no checkpoint of this version of torchngvi. {instead}")
    if (form := head.removeprefix(_MAGIC)) != _FORMAT:
        its = form[:10].decode(errors="replace")
        raise InputError(f"{path} is a checkpoint of format {its}, and this version has {_FORMAT.decode()}. {instead}")
    if rest[:_DIGEST] != _digest(rest[_DIGEST:]):
        raise InputError(f"{path} is damaged: it is not as it was written, or a part is missing. {instead}")
    try:
        return torch.load(io.BytesIO(rest[_DIGEST:]), weights_only=True, map_location=device)
    except Exception as error:  # what torch raises at bytes of another release of torch is not specified
        why = " ".join(str(error).split())[:200]
        raise InputError(f"{path} cannot be understood by this version of torch ({why}). {instead}") from error


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ------------------------------------------------------------------------------------ the state


def _is_words(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


def _is_generators(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("cpu"), Tensor)


def are_numbers(value: Any, count: int) -> bool:
    """Whether a value is a list or tuple of so many numbers."""
    right = isinstance(value, list | tuple) and len(value) == count
    return right and all(isinstance(number, int | float) for number in value)


def copied(value: Any) -> Any:
    """A copy of a state: tensors cloned, on the device where they are; containers new; numbers those of Python."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        new = copy.copy(value)  # with the versions of the modules in an attribute
        new.update({name: copied(part) for name, part in value.items()})
        return new
    if isinstance(value, list | tuple):
        parts = [copied(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if value is None or isinstance(value, bool | str | bytes | torch.dtype):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise InputError(
        f"a checkpoint holds tensors, numbers and texts; got {type(value).__name__} in the state of the run. "
        "Leave checkpoint out, or keep it out of the state of the optimizer or the model."
    )


def _same(left: Tensor, right: Tensor, rounding: float = 1e-8) -> bool:
    """Up to what another order of summation may leave; numbers that are not finite are all the same."""
    if left.shape != right.shape:
        return False
    left, rounding = left.to(right), max(rounding, 1e3 * torch.finfo(right.dtype).eps)
    close = (left - right).abs() <= rounding * right.abs().clamp_min(1.0)
    return bool((close | ~(left.isfinite() | right.isfinite())).all())


class Generators:
    """The generators from which a run may draw: torch's own, and those that its batches hold."""

    def __init__(self, device: torch.device, batches: object = ()) -> None:
        self.device, parts, found = device, [batches], dict[int, torch.Generator]()
        for part in parts:  # which grows: a loader, its data and its samplers, each generator once
            held = vars(part) if hasattr(part, "__dict__") else {}
            found.update({id(value): value for value in held.values() if isinstance(value, torch.Generator)})
            inner = [held[name] for name in ("dataset", "sampler", "batch_sampler") if name in held]
            parts += [part for part in inner if not any(part is other for other in parts)]
        self.own = list(found.values())

    def states(self) -> dict[str, Any]:
        """The states as they are now, in new tensors."""
        states: dict[str, Any] = {"cpu": torch.get_rng_state(), "batches": [own.get_state() for own in self.own]}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def set(self, states: dict[str, Any]) -> None:
        """Put the generators into these states."""
        torch.set_rng_state(states["cpu"].cpu())
        if "cuda" in states and self.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"].cpu(), self.device)
        for own, state in zip(self.own, states["batches"], strict=True):
            own.set_state(state.cpu())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block after which the generators are as they were before it."""
        states = self.states()
        try:
            yield
        finally:
            self.set(states)


# ------------------------------------------------------------------------------------ the settings in words


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A digest of the dtypes, shapes and entries of tensors, which is the same on every device."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        parts: tuple[Tensor, ...] = (tensor,)
        if sparse.is_sparse(tensor):
            parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        for part in parts:
            whole = part.detach().cpu().contiguous()
            size = whole.numel() * whole.element_size()
            if size:
                digest.update((ctypes.c_char * size).from_address(whole.data_ptr()))
    return digest.hexdigest()


def describe_data(tensors: tuple[Tensor, ...]) -> dict[str, str]:
    """The fingerprint of the data, as a setting."""
    return {"fingerprint of the data": fingerprint(tensors)} if tensors else {}


def describe_tensors(kind: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """The shape and dtype of each tensor, as settings: ``{'posterior mean': '(3,) float32'}``."""
    return {
        f"{kind} {name}": f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
    }


def describe_problem(q: Posterior, target: Target) -> dict[str, str]:
    """The settings of a problem: the class of its target, the tensors of its posterior, and its data."""
    return {
        "target": type(target).__name__,
        **describe_tensors("posterior", q.state_dict()),
        **describe_data(target.known_data()),
    }


def describe_optimizer(optimizer: NaturalGradientVI) -> dict[str, str]:
    """The settings of an optimizer: its class, its parts with their settings, and its learning rates."""
    names = ("step_size", "estimator", "metric", "momentum", "averaging")
    parts = {name: describe(getattr(optimizer, name)) for name in names if hasattr(optimizer, name)}
    rates = {name: describe([_first(group, name) for group in optimizer.param_groups]) for name in ("lr", "loss_scale")}
    return {"method": type(optimizer).__name__, "rule": describe(optimizer.rule), **parts, **rates}


def describe_torch_optimizer(kind: str, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The settings of an optimizer of torch: its class, and what it was built with."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    given = {name: describe(value) for name, value in optimizer.defaults.items() if name != "lr" and value}
    return {
        kind: type(optimizer).__name__,
        f"{kind} lr": describe([_first(group, "lr") for group in optimizer.param_groups if "lr" in group]),
        **{f"{kind} {name}": text for name, text in given.items()},
        f"shapes in {kind}": describe([tuple(parameter.shape) for parameter in held]),
    }


def _first(group: dict[str, Any], name: str) -> object:
    """The setting of a parameter group before any scheduler changed it."""
    return group.get(f"initial_{name}", group[name])


def describe(part: object, short: int = 8) -> str:
    """A value, or a part with its settings, in words; of a tensor that is not short its fingerprint.

    >>> from torchngvi import KLRadius
    >>> describe(KLRadius(0.5)), describe([0.1, None])
    ('KLRadius(radius=0.5)', '[0.1, None]')
    """
    if isinstance(part, Tensor):
        return describe(part.tolist()) if part.numel() <= short else fingerprint([part])
    if part is None or isinstance(part, bool | str):
        return repr(part)
    if isinstance(part, numbers.Integral):
        return repr(int(part))
    if isinstance(part, numbers.Real):
        return repr(float(part))
    if isinstance(part, list | tuple):
        return f"[{', '.join(describe(item) for item in part)}]"
    if not isinstance(part, _PARTS):
        return type(part).__name__  # of a generator that there is one: its state is saved
    settings = {name: value for name, value in sorted(vars(part).items()) if name[0] != "_" and value is not None}
    return f"{type(part).__name__}({', '.join(f'{name}={describe(value)}' for name, value in settings.items())})"
