"""The sources of randomness of a run: torch's default generators, and those that its batches hold."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Generators:
    """The generators from which a run may draw: torch's own, and those that its batches hold.

    >>> generators = Generators(torch.device("cpu"))
    >>> with generators.kept():
    ...     first = torch.rand(2)
    >>> torch.equal(first, torch.rand(2))
    True
    """

    def __init__(self, device: torch.device, batches: object = ()) -> None:
        self.device, self.own = device, _of_batches(batches)

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


def _of_batches(batches: object) -> list[torch.Generator]:
    """Those that a loader, its data and its samplers hold, each once."""
    parts, found = [batches], {}
    for part in parts:  # which grows
        held = vars(part) if hasattr(part, "__dict__") else {}
        found.update({id(value): value for value in held.values() if isinstance(value, torch.Generator)})
        inner = [held[name] for name in ("dataset", "sampler", "batch_sampler") if name in held]
        parts += [part for part in inner if not any(part is other for other in parts)]
    return list(found.values())
