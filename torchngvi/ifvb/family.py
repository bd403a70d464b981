"""A variational family over one flat vector λ: what IFVB needs to know of q_λ.

Everything here takes λ from the module's Parameter ``vector``, or from ``at`` where another point is asked
for: the average of the iterates, or a trial.  Scores are φ = ∇_λ log q_λ(θ), and the Fisher matrix is
I_F = E[φφᵀ] (Godichon-Baggioni, Nguyen and Tran 2023, Eq 3.1): it depends on q alone, never on data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchngvi.errors import InputError, PairError
from torchngvi.linalg import cholesky
from torchngvi.modes import tracked


def check_start(family: str, **parts: Any) -> None:
    """The parts of a start are vectors or matrices.

    Raises:
        InputError: anything but floating-point tensors with a dimension.
    """
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.ndim == 0 or not part.is_floating_point():
            got = f"{part.dtype} of shape {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)
            raise InputError(
                f"{family} starts at floating-point tensors ({', '.join(parts)}), such as torch.zeros(4); got {name} = "
                f"{got}."
            )


class Family(nn.Module, ABC):
    """q_λ with its density, draws and scores.

    λ may have batch dimensions: many runs side by side, each with draws of its own.

    Args:
        vector: the start, a floating-point tensor with finite entries inside the domain.
        dim: d, of θ.

    Raises:
        InputError: a start that cannot be used.
    """

    reparametrised = False  # whether rsample exists
    flat = True  # no manifold: λ may be averaged

    @tracked
    def __init__(
        self,
        vector: Tensor,  # (*batch, D)
        dim: int,
    ) -> None:
        super().__init__()
        self.dim = dim
        check_start(type(self).__name__, vector=vector)
        if not bool(vector.isfinite().all()):
            raise InputError(
                f"{type(self).__name__} starts at a vector of finite floating-point numbers; got {vector}."
            )
        self.vector = nn.Parameter(vector.detach().clone())
        if not bool(self.in_domain().all()):
            raise InputError(
                f"{type(self).__name__} starts outside its domain: {self.domain}. Got {self.vector.tolist()}."
            )

    domain = "any real vector"  # in words, for messages

    @property
    def size(self) -> int:
        """D, the length of λ."""
        return self.vector.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Of λ."""
        return self.vector.shape[:-1]

    def point(self, at: Tensor | None) -> Tensor:
        """λ, or the point asked for."""
        return self.vector if at is None else at

    def at(self, vector: Tensor) -> Self:
        """A copy of the family that stands at another λ."""
        new = deepcopy(self)
        new.vector = nn.Parameter(vector.detach().clone())
        return new

    @abstractmethod
    def sample(
        self, n: int, generator: torch.Generator | None = None, at: Tensor | None = None
    ) -> Tensor:  # (n, *batch, d)
        """Draws of θ, without a gradient."""

    @abstractmethod
    def log_prob(
        self,
        theta: Tensor,  # (n, *batch, d)
        at: Tensor | None = None,
    ) -> Tensor:  # (n, *batch)
        """log q_λ(θ), differentiable in λ and θ."""

    @abstractmethod
    def score(
        self,
        theta: Tensor,  # (n, *batch, d)
        at: Tensor | None = None,
    ) -> Tensor:  # (n, *batch, D)
        """φ = ∇_λ log q_λ(θ); on a manifold its tangent part."""

    def rsample(self, n: int, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draws θ = T(ε, λ), differentiable in λ.

        Raises:
            PairError: a family without such a map.
        """
        raise PairError(
            f"{type(self).__name__} has no map from noise to draws. Use the estimator ControlVariate(draws)."
        )

    def in_domain(self, at: Tensor | None = None) -> Tensor:  # (*batch,)
        """Where λ is a distribution."""
        return self.point(at).isfinite().all(-1)

    def tangent(
        self,
        at: Tensor,  # (*batch, D)
        vector: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """The part of a direction along the manifold λ lies on: all of it, here."""
        return vector

    def moved(
        self,
        at: Tensor,  # (*batch, D)
        change: Tensor,  # (*batch, D)
    ) -> Tensor:
        """λ after a step: λ + change, brought back to the manifold or clamped where the class says so."""
        return at + change

    def exact_fisher_solve(
        self,
        gradient: Tensor,  # (*batch, D)
        at: Tensor | None = None,
    ) -> Tensor:
        """I_F⁻¹ times a gradient, in closed form; NaN for members where I_F is singular.

        Raises:
            PairError: a family whose Fisher matrix is not known, or is singular everywhere.
        """
        raise PairError(
            f"the Fisher matrix of {type(self).__name__} is not known in closed form. Use IFVB, or BatchFisher."
        )


def scores_by_autograd(
    log_prob: Callable[[Tensor, Tensor], Tensor],  # θ (1, d), λ (D,) -> (1,)
    theta: Tensor,  # (n, d)
    vector: Tensor,  # (D,)
) -> Tensor:  # (n, D)
    """One gradient a draw, by `torch.func.vmap`."""

    def one(vector: Tensor, theta: Tensor) -> Tensor:
        return log_prob(theta[None], vector)[0]

    return torch.func.vmap(torch.func.grad(one), (None, 0))(vector.detach(), theta)


def normal(n: int, like: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:  # (n, *batch, dim)
    """Standard normal noise for a batch of λ."""
    shape = (n, *like.shape[:-1], dim)
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


def gammas(
    n: int,
    shape: Tensor,  # (*batch,), positive
    generator: torch.Generator | None,
) -> Tensor:  # (n, *batch)
    """Draws of Gamma(shape, 1)."""
    draw: Any = torch._standard_gamma  # torch.distributions takes no generator
    return draw(shape.detach().expand(n, *shape.shape).contiguous(), generator=generator)


def solve_symmetric(
    matrix: Tensor,  # (*batch, D, D)
    right: Tensor,  # (*batch, D)
) -> Tensor:
    """A⁻¹ x by Cholesky; NaN for members that are not positive definite."""
    factor, ok = cholesky(matrix)
    solved = torch.cholesky_solve(right[..., None], factor)[..., 0]
    return torch.where(ok[..., None], solved, torch.nan)


def symmetric(matrix: Tensor) -> Tensor:
    """(A + Aᵀ)/2."""
    return 0.5 * (matrix + matrix.mT)


def lower_entries(
    matrix: Tensor,  # (*batch, d, d)
) -> Tensor:  # (*batch, d (d + 1)/2)
    """The entries on and below the diagonal, row after row."""
    rows, columns = torch.tril_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[..., rows, columns]


def lower_triangle(
    entries: Tensor,  # (*batch, d (d + 1)/2)
    dim: int,
) -> Tensor:  # (*batch, d, d)
    """The lower triangular matrix with these entries."""
    rows, columns = torch.tril_indices(dim, dim, device=entries.device)
    where = torch.full((dim, dim), entries.shape[-1], device=entries.device)  # one past the end: a zero
    where[rows, columns] = torch.arange(entries.shape[-1], device=entries.device)
    return torch.nn.functional.pad(entries, (0, 1))[..., where]
