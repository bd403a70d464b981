"""What the optimizer hands from one part of a step to the next, and what it tells of itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torchngvi.interfaces import Expectation, Path


class Evaluation(NamedTuple):
    """L and the packet at one q."""

    loss: Tensor  # L(q) = E_q[ℓ] - γ entropy, (*batch,)
    e: Expectation


class Heading(NamedTuple):
    """Where the next step may go."""

    path: Path
    norm2: Callable[[], Tensor]  # squared natural norm of ∇L, (*batch,)
    memory: dict[str, Any]  # what the metric will remember of this gradient once the step is taken


class Status(NamedTuple):
    """Where q stands."""

    loss: Tensor  # (*batch,)
    norm2: Tensor  # squared natural-gradient norm, (*batch,)
    noise2: Tensor | None  # its expected value at the optimum, known from the draws: a squared standard error


class Report(NamedTuple):
    """What the last step did."""

    rho: Tensor  # step size, (*batch,); in units of 1/γ where it was found by trial
    accepted: Tensor  # (*batch,)
