"""The content of a saved run, posterior.pt: each value is checked as it is taken, and none may be left over."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.app.config import Settings, settings_from
from torchngvi.app.families import PARAMETERS, made
from torchngvi.errors import InputError
from torchngvi.models.likelihoods import Likelihood


@dataclass
class Content:
    """What `torch.load` has read, tensors and plain values that anybody may have written."""

    path: Path
    saved: dict[str, Any]
    taken: set[str] = field(default_factory=set)

    @classmethod
    @contextmanager
    def of(cls, path: Path, saved: dict[str, Any]) -> Iterator["Content"]:
        """A block that reads all of a content; what goes wrong in it is a fault of the file."""
        values = cls(path, saved)
        try:
            yield values
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            if str(path) in str(error) and isinstance(error, InputError):
                raise
            raise InputError(f"{str(path)!r} holds what no run has written: {_sentence(error)} Fit again.") from error
        rest = set(saved) - values.taken
        values.require(not rest, "its content", f"without {', '.join(sorted(map(repr, rest)))}")

    def require(self, right: bool, name: str, wanted: str) -> None:
        """Refuse the file unless something is right."""
        if not right:
            raise InputError(
                f"{str(self.path)!r} holds what no run has written: {name} must be {wanted}. Take a copy of the "
                "folder, or fit again."
            )

    def take(self, name: str, kind: type) -> Any:
        """A value of a type, no subclass of it."""
        self.require(name in self.saved, name, "there")
        self.taken.add(name)
        self.require(type(self.saved[name]) is kind, name, f"of type {kind.__name__}")
        return self.saved[name]

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        found = self.take(name, list)
        self.require(all(type(text) is str for text in found), name, "texts")
        return tuple(found)

    def tensor(
        self,
        name: str,
        shape: Sequence[int | None],
        dtype: torch.dtype = torch.float64,
        *,
        finite: bool = True,
        of: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """A tensor in memory."""
        if of is None:
            self.require(name in self.saved, name, "there")
            self.taken.add(name)
        value = (self.saved if of is None else of)[name]
        plain = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
        self.require(plain and value.dtype == dtype, name, f"a tensor of type {str(dtype).removeprefix('torch.')}")
        same = len(value.shape) == len(shape) and all(
            size == wanted or (wanted is None and size > 0) for size, wanted in zip(value.shape, shape, strict=True)
        )
        self.require(same, name, f"of shape ({', '.join('any' if size is None else str(size) for size in shape)})")
        self.require(not finite or bool(value.isfinite().all()), name, "finite")
        return value.detach()

    def tensors(self, name: str, shapes: Mapping[str, Sequence[int | None]]) -> dict[str, Tensor]:
        """Tensors of double precision by name."""
        found = self.take(name, dict)
        self.require(list(found) == list(shapes), name, f"of {', '.join(shapes)}")
        return {key: self.tensor(key, shape, of=found) for key, shape in shapes.items()}

    def likelihood(self, family: str) -> Likelihood:
        """The likelihood of a family, by its parameters."""
        if "likelihood" not in self.saved and "noise" in self.saved:  # before there were other parameters
            self.saved["likelihood"] = {"noise": self.saved.pop("noise")} if family == "gaussian" else {}
        found, names = self.take("likelihood", dict), PARAMETERS.get(family, ())
        right = set(found) == set(names) and all(type(x) in (int, float) and 0 < x < math.inf for x in found.values())
        self.require(right, "likelihood", f"positive numbers by name, {', '.join(names) or 'none'}")
        return made(family, found)

    def load(self, name: str, module: nn.Module) -> None:
        """Load a state dict into a module, after a check that it has the same names, shapes and types."""
        found, own = self.take(name, dict), module.state_dict()
        self.require(set(found) == set(own), name, f"of {', '.join(own)}")
        module.load_state_dict({key: self.tensor(key, part.shape, part.dtype, of=found) for key, part in own.items()})


def settings_of(values: Content) -> Settings:
    """The settings of a run."""
    found, usual = values.take("settings", dict), vars(Settings(data="any"))
    emptied = [key for key, value in found.items() if value is None and usual.get(key) is not None]
    values.require(not emptied, "settings", f"with a value of {', '.join(map(str, emptied))}")
    return settings_from({key: value for key, value in found.items() if value is not None})


def _sentence(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if said.endswith(".") else f"{said}."
