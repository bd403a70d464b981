"""What a posterior has computed from its coordinates, which is kept until they change, and handed over by a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates, Posterior, known_everywhere, where_members
from torchngvi.numerics.inference_mode import tracked
from torchngvi.numerics.versions import Versions


class Tested(Coordinates):
    """Coordinates after a move, with what the test of the cone has computed from them on the way.

    >>> new = Tested.of(torch.zeros(1), torch.ones(1, 1), root=torch.ones(1, 1))
    >>> new.known["root"].item()
    1.0
    """

    known: dict[str, Tensor]  # (*batch, ...), by the names under which they are remembered

    @classmethod
    def of(cls, vector: Tensor, matrix: Tensor, **known: Tensor) -> "Tested":
        """Make coordinates that carry what is known of them, under the names by which it is remembered."""
        new = cls(vector, matrix)
        new.known = known
        return new


class Memory:
    """What was computed from the coordinates of a posterior, and the versions of those coordinates."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.of: Versions | None = None
        self.settled = False  # nothing but `assign` changes the coordinates now

    def forget(self) -> None:
        """Drop everything, because the coordinates were changed."""
        self.values, self.of = {}, None


class RememberingPosterior(Posterior):
    """A posterior that computes factors, roots and means from its coordinates only once: abstract.

    A class has a method ``_compute_<name>`` for each such thing, and asks for it by ``_computed(name)``.  Whether the
    coordinates have changed since is told by their versions, or by comparing them; a step that has computed the same
    from the new ones hands it over as `Tested`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory = Memory()

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """Write coordinates in place for the members of the mask, and keep what the test of the cone has computed."""
        known = new.known if isinstance(new, Tested) else {}
        if not known_everywhere(where):
            old = self._computed(*known)
            known = {name: where_members(where, value, old[name]) for name, value in known.items()}
        # graphs through what was computed from the old coordinates are stale: let torch know
        torch.autograd.graph.increment_version(tuple(self._memory.values.values()))
        super().assign(new, where)
        if known:
            self._memory.values, self._memory.of = known, Versions(self.coordinates)

    @tracked
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As every posterior; what was computed from the coordinates is forgotten."""
        self._memory.forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": Memory()}

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Open a block in which only :meth:`assign` changes the coordinates; the memory is compared once."""
        memory, outer = self._memory, self._memory.settled
        if not outer and memory.of is not None and not memory.of.hold(self.coordinates):
            memory.forget()
        memory.settled = True
        try:
            yield
        finally:
            memory.settled = outer

    def _computed(self, *names: str) -> dict[str, Tensor]:
        """What ``_compute_<name>`` makes of the coordinates, and all that is known of them: kept until they change."""
        coordinates = self.coordinates
        memory = self._memory
        traced = memory.settled and torch.compiler.is_compiling()  # where writes are not counted, nor any but assign's
        if names and (memory.of is None or not (traced or memory.of.hold(coordinates, contents=not memory.settled))):
            memory.values, memory.of = {}, Versions(coordinates)
        values = memory.values  # one thing may be computed from another, and of tensors of inference_mode none is kept
        for name in names:
            if name not in values:
                with torch.inference_mode(False), torch.no_grad():
                    values[name] = getattr(self, f"_compute_{name}")()
        return values
