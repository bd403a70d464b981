"""The usual fit of a large batch, some of its members at a time, so that what a step works on stays in the cache.

Every member of a batch is a posterior of its own, so that a step of all of them is a step of some, then of others.
The run sees none of this: a record, a checkpoint and a callback are of all members after each has taken a step.  Chunks
whose members have all converged are left alone.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.fit import Request, tolerance_of
from torchngvi.fitting.laplace import start_at_mode
from torchngvi.fitting.steps import Steps, steps_of, usual_optimizer
from torchngvi.fitting.stopping import Criterion
from torchngvi.interfaces import Coordinates, Posterior, Target
from torchngvi.models import GeneralizedLinear
from torchngvi.numerics.versions import Versions
from torchngvi.optim import NaturalGradientVI, Status
from torchngvi.optim.records import Report
from torchngvi.posteriors.gaussian import Gaussian


def chunks_of(request: Request) -> tuple[Steps, Criterion]:
    """Make the engine of a `Request` for a regression, in chunks where its batch is large, and what ends its run."""
    q, target = request.q, request.target
    size = None if request.optimizer is not None else members_at_once(q, target)
    if size is None:
        return steps_of(request)
    assert isinstance(q, Gaussian)
    assert isinstance(target, GeneralizedLinear)
    optimizer, criteria = usual_optimizer(q, target), request.until_small(request.tolerance_or(tolerance_of))
    return ChunkedSteps(q, target, optimizer, criteria, size), criteria


def members_at_once(q: Posterior, target: Target) -> int | None:
    """The number of members, along the first dimension, of which a step is taken at once, if not of all."""
    if not (isinstance(q, Gaussian) and isinstance(target, GeneralizedLinear) and target.convex):
        return None
    if not (q.batch_shape and q.mean_probe.is_cpu and target.comparable):
        return None
    members, others = q.batch_shape[0], q.batch_shape[1:].numel()
    most = max(1, ChunkedSteps.numbers // (target.X.shape[-2] * target.dim * others))
    chunks = math.ceil(members / most)
    return math.ceil(members / chunks) if chunks > 1 else None


class _Chunk(NamedTuple):
    """Some members: a posterior, a target and an optimizer of their own."""

    here: slice
    q: Gaussian
    target: GeneralizedLinear
    optimizer: NaturalGradientVI

    @classmethod
    def of(cls, q: Gaussian, target: GeneralizedLinear, kind: Any, here: slice) -> "_Chunk":
        """The members of a slice."""
        part = copy.copy(q)  # what it has computed is left out
        part._buffers = {
            name: None if buffer is None else buffer.detach()[here].clone().requires_grad_(buffer.requires_grad)
            for name, buffer in q._buffers.items()
        }
        part.batch_shape = part.mean_probe.shape[:-1]
        return cls(here, part, target.of_members(here, q.batch_shape), kind(part))


class ChunkedSteps(Steps):
    """Steps of the usual optimizer on a batch of regressions, a chunk of its members after another."""

    numbers = 1_000_000  # of XC in one chunk, which the cache holds

    def __init__(
        self, q: Gaussian, target: GeneralizedLinear, optimizer: NaturalGradientVI, stop: Criterion, size: int
    ) -> None:
        target.admit(q)
        super().__init__(q, target, optimizer, stop, starts=True)
        self.size = size
        self._chunks = [
            _Chunk.of(q, target, type(optimizer), slice(first, first + size))
            for first in range(0, q.batch_shape[0], size)
        ]
        self._seen_at: Versions | None = None  # what the chunks know of q
        self._statuses: list[Status] = []
        self._resting = [False] * len(self._chunks)  # chunks of which nobody took the last step

    def _evaluate(self, at_once: bool = False) -> Status:
        if not at_once:
            self._read()
            self._resting = [False] * len(self._chunks)
        last = self._statuses

        def status(number: int, chunk: _Chunk) -> Status:
            return last[number] if self._resting[number] else chunk.optimizer.evaluate(chunk.target, at_once=at_once)

        self._statuses = self._each(status)
        loss, norm2 = [status.loss for status in self._statuses], [status.norm2 for status in self._statuses]
        return Status(torch.cat(loss), torch.cat(norm2), None)

    def _step(self, resting: Tensor | None) -> None:
        moved = self._read()
        rests = [None if resting is None else resting[chunk.here] for chunk in self._chunks]
        self._resting = [rest is not None and bool(rest.all()) and not moved for rest in rests]

        def step(number: int, chunk: _Chunk) -> None:
            if not self._resting[number]:
                chunk.optimizer.step(chunk.target, resting=rests[number])

        self._each(step)
        self._write()

    def _last(self) -> tuple[Tensor, ...]:
        if all(chunk.optimizer.last is None for chunk in self._chunks):
            return ()
        reports = [chunk.optimizer.last or _nobody(chunk.q) for chunk in self._chunks]
        return tuple(map(torch.cat, zip(*reports, strict=True)))

    def _rejected(self) -> Tensor:
        return torch.cat([chunk.optimizer._state(0)["rejections"] for chunk in self._chunks])

    def _to_the_mode(self, over: Callable[[int], bool]) -> int:
        self._read()
        passes = [start_at_mode(chunk.q, chunk.target, over) for chunk in self._chunks]
        self._write()
        return max(passes)

    def _each(self, do: Callable[[int, _Chunk], Any]) -> list[Any]:
        """What each chunk gives; of the evaluations and gradients the largest number is counted."""
        optimizers = [chunk.optimizer for chunk in self._chunks]
        before = [(optimizer.evaluations, optimizer.gradients) for optimizer in optimizers]
        results = [do(number, chunk) for number, chunk in enumerate(self._chunks)]
        spent = [(o.evaluations - e, o.gradients - g) for o, (e, g) in zip(optimizers, before, strict=True)]
        evaluations, gradients = map(max, zip(*spent, strict=True))
        self.optimizer.evaluations += evaluations
        self.optimizer.gradients += gradients
        return results

    def _read(self) -> bool:
        """Bring the chunks to where q is, if somebody has moved it since they wrote it; whether that was so."""
        if self._seen_at is not None and self._seen_at.hold(self.q.coordinates):
            return False
        for chunk in self._chunks:
            chunk.q.restore(Coordinates(*(buffer[chunk.here] for buffer in self.q.coordinates)))
        self._seen_at = Versions(self.q.coordinates)
        return True

    @torch.no_grad()
    def _write(self) -> None:
        """Bring q to where the chunks are."""
        parts = zip(*(chunk.q.coordinates for chunk in self._chunks), strict=True)
        self.q.restore(Coordinates(*map(torch.cat, parts)))
        self._seen_at = Versions(self.q.coordinates)

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """Those of `Steps`, and the size of a chunk."""
        return {**super().settings(), "members at once": str(self.size)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of q and of the optimizer of each chunk."""
        return {**super().state_dict(), "chunks": [chunk.optimizer.state_dict() for chunk in self._chunks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Steps`, for each chunk."""
        super().load_state_dict(state)
        for chunk, saved in zip(self._chunks, state["chunks"], strict=True):
            chunk.optimizer.load_state_dict(copied(saved))
        self._seen_at = None


def _nobody(q: Gaussian) -> Report:
    """The report of a chunk of which nobody has taken a step since the run was gone on with."""
    like = q.mean_probe.detach()[..., 0]
    return Report(torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool))
