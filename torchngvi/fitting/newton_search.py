"""Newton's method for a mode, of all members at once, and q at a mode with its curvature."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchngvi.interfaces import Congruence, Target, where_members
from torchngvi.numerics.linalg import finite
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured

_HALVINGS = 40  # of one step
_ENOUGH = 1e-4  # share of the promised decrease a step must reach


class Curvature(Protocol):
    """The Hessian H of ℓ at a point, of every member, as Newton's method uses it.

    Attributes:
        ok: the members whose H is positive definite, (*batch,).

    >>> from torchngvi.fitting.laplace import Repaired
    >>> curvature: Curvature = Repaired.of(torch.eye(2))
    >>> curvature.solve(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    @property
    def ok(self) -> Tensor:
        """The members whose H is positive definite, (*batch,)."""

    def solve(self, g: Tensor) -> Tensor:
        """Solve with H, (*batch, D)."""

    def kept(self, structure: Pattern) -> Structured:
        """The entries of H that a pattern stores."""


C = TypeVar("C", bound=Curvature)


class Searched(NamedTuple, Generic[C]):
    """Where Newton's method has ended, and what is known of ℓ there.

    Attributes:
        theta: the point, (*batch, D).
        energy: ℓ where H was taken last, (*batch,): at the point, unless a budget has ended the search.
        square: gᵀH⁻¹g there, (*batch,).
        curvature: H there.
        passes: how often ℓ was taken to second order.
    """

    theta: Tensor  # (*batch, D)
    energy: Tensor  # (*batch,)
    square: Tensor  # (*batch,)
    curvature: C
    passes: int


def search(
    target: Target,
    theta: Tensor,  # (*batch, D)
    at: Callable[[Tensor], tuple[Tensor, Tensor, C]],
    square: float,
    most: int,
    over: Callable[[int], bool] = lambda passes: False,
) -> Searched[C]:
    """Newton's method for the mode with halved steps, of all members at once.

    >>> from torchngvi import LogJoint
    >>> from torchngvi.fitting.laplace import Repaired
    >>> target = LogJoint(lambda theta: -(theta - 3).square().sum(-1))
    >>> at = lambda theta: ((theta - 3).square().sum(-1), 2 * (theta - 3), Repaired.of(2 * torch.eye(1)))
    >>> found = search(target, torch.zeros(1), at, 1e-6, 10)
    >>> found.theta.tolist(), found.passes
    ([3.0], 2)
    """
    passes = 0
    while True:
        energy, g, curvature = at(theta)
        passes += 1
        direction = -curvature.solve(g)
        decrement2 = -torch.linalg.vecdot(g, direction)
        active = curvature.ok & finite(energy) & ~(decrement2 <= square)
        if passes == most or not bool(active.any()):
            break
        theta, moved = _backtracked(target, theta, energy, direction, decrement2, active)
        if not bool(moved.any()) or over(passes + 1):
            break
    return Searched(theta, energy, decrement2, curvature, passes)


def _backtracked(
    target: Target,
    theta: Tensor,  # (*batch, D)
    energy: Tensor,  # (*batch,)
    direction: Tensor,  # (*batch, D)
    square: Tensor,  # (*batch,)
    active: Tensor,  # (*batch,)
) -> tuple[Tensor, Tensor]:
    """Take the longest of the steps 1, ½, ¼, .. along which ℓ falls enough, a member at a time.

    ``square`` is gᵀH⁻¹g, which the whole step promises twice; the active members are to move.  Returns where the step
    has led, (*batch, D), and which members have moved, (*batch,).
    """
    moved, length = torch.zeros_like(active), torch.ones_like(energy)
    rounding = 4 * torch.finfo(energy.dtype).eps * energy.abs().clamp_min(1.0)
    result = theta
    for _ in range(_HALVINGS):
        waiting = active & ~moved
        if not bool(waiting.any()):
            break
        trial = theta + length[..., None] * direction
        fallen = energy + target.log_joint(trial[None])[0]
        enough = waiting & (fallen >= _ENOUGH * length * square - rounding)
        result, moved = where_members(enough, trial, result), moved | enough
        length = 0.5 * length
    return result, moved


def put_at(q: Gaussian, mode: Tensor, curvature: Curvature, temperature: float, members: Tensor) -> None:
    """Set q to N(mode, γ (ΠH)⁻¹): from N(mode, I) by the congruence N = ΠH/γ.

    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.fitting.laplace import Repaired
    >>> q = CholeskyGaussian(1)
    >>> put_at(q, torch.ones(1), Repaired.of(torch.full((1, 1), 4.0)), 1.0, torch.tensor(True))
    >>> q.mean.tolist(), q.variance.tolist()
    ([1.0], [0.25])
    """
    here = q.snapshot()
    q.initialize_(torch.where(members[..., None], mode, 0.0))
    new, inside = q.moved(Congruence(curvature.kept(q.structure) / temperature, torch.zeros_like(mode)))
    q.assign(new, inside)
    q.assign(here, ~members)
