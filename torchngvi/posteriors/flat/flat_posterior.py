"""Posteriors over one flat vector λ: any family with a density, draws and scores.

The coordinates are λ and no matrix.  There is no mean and no root, so no frame: the gradient that passes through the
axes is ∇L in λ itself, the entropy in it, and the natural gradient is I_F⁻¹∇L with I_F = E[φφᵀ], φ = ∇_λ log q_λ(θ)
(Godichon-Baggioni, Nguyen and Tran 2023, Eq 3.1), which depends on q alone, never on data.  Where I_F is known in
closed form `NaturalGradient` follows it; elsewhere `RootGradient` follows the gradient as a metric has bent it.

Everything here takes λ from the buffer ``vector``, with the probe added where gradients are recorded, or from ``at``
where another point is asked for: the average of the iterates, or a trial.
"""

from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import (
    Coordinates,
    Expectation,
    Frame,
    Framed,
    Local,
    Move,
    Posterior,
    RootTangent,
    Tangent,
)
from torchngvi.numerics.inference_mode import tracked
from torchngvi.numerics.linalg import cholesky
from torchngvi.structures.no_matrix import NoMatrix
from torchngvi.structures.pattern import Structured


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


class FlatPosterior(Posterior):
    """q_λ with its density, draws and scores.

    λ may have batch dimensions: many runs side by side, each with draws of its own.  It is a buffer behind a probe, as
    the coordinates of every posterior: ``parameters()`` holds nothing, and a loss that is computed from ``rsample`` or
    ``log_prob`` leaves its gradient in λ in ``mean_probe.grad``.

    Args:
        vector: the start, a floating-point tensor with finite entries inside the domain.
        dim: d, of θ.

    Raises:
        InputError: a start that cannot be used.
    """

    takes = frozenset({Tangent, RootTangent})
    framed = False
    upper = False
    reparametrised = False  # whether rsample exists
    flat = True  # no manifold: λ may be averaged
    vector: Tensor
    no_matrix: Tensor

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
        self._place(vector)
        if not bool(self.in_domain().all()):
            raise InputError(
                f"{type(self).__name__} starts outside its domain: {self.domain}. Got {self.vector.tolist()}."
            )

    def _place(self, vector: Tensor) -> None:
        """New buffers for λ, its probe, and the matrix that it has not."""
        vector = vector.detach().clone(memory_format=torch.contiguous_format)
        self.batch_shape = vector.shape[:-1]
        self.structure = NoMatrix(vector.shape[-1])
        self.register_buffer("vector", vector)
        self.register_buffer("no_matrix", vector.new_zeros(*self.batch_shape, 0), persistent=False)
        self.register_buffer("mean_probe", torch.zeros_like(vector, requires_grad=True), persistent=False)
        self.register_buffer("root_probe", torch.zeros_like(self.no_matrix, requires_grad=True), persistent=False)

    domain = "every entry is finite"  # in words, for messages

    @property
    def size(self) -> int:
        """D, the length of λ."""
        return self.vector.shape[-1]

    def point(self, at: Tensor | None) -> Tensor:
        """λ, differentiable in the probe, or the point asked for."""
        if at is not None:
            return at
        return self.vector + self.mean_probe if torch.is_grad_enabled() else self.vector

    def at(self, vector: Tensor) -> Self:
        """A copy of the family that stands at another λ."""
        new = deepcopy(self)
        new._place(vector)
        return new

    # -------------------------------------------------------------------------------- what a family must say

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

    def projected(
        self,
        at: Tensor,  # (*batch, D)
        vector: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """The part of a direction along the manifold λ lies on: all of it, here."""
        return vector

    def retracted(
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

    # -------------------------------------------------------------------------------- as every posterior

    @property
    def coordinates(self) -> Coordinates:
        """λ, and no matrix."""
        return Coordinates(self.vector, self.no_matrix)

    def frame(self) -> Frame:
        """Refused: there is no mean and no root.

        Raises:
            PairError: always.
        """
        raise PairError(
            f"{type(self).__name__} is a vector of parameters, with no mean and no root to be read. Use an estimator "
            "of torchngvi.ifvb such as Pathwise(10) or ControlVariate(100), and draws by sample or rsample."
        )

    probed = frame

    def unframe(self, a: Tensor, W: Structured) -> tuple[Tensor, Structured]:
        """The gradient itself."""
        return a, W

    def local(self, e: Expectation) -> Local:
        """∇L in λ, along the manifold where there is one."""
        if not isinstance(e.derivative, Framed):
            self.frame()
            raise AssertionError("frame refuses")
        a, W = e.derivative
        return Local(self.projected(self.vector, a), W)

    def loss(self, e: Expectation) -> Tensor:
        """The value itself: what is differentiated in λ holds the entropy already."""
        return e.value

    def norm2(self, local: Local) -> Tensor:
        """∇LᵀI_F⁻¹∇L, where I_F is known, (*batch,)."""
        return (local.a * self.exact_fisher_solve(local.a)).sum(-1)

    def tangent(self, e: Expectation) -> Coordinates:
        """I_F⁻¹∇L, where I_F is known."""
        gradient = self.local(e)
        return Coordinates(self.projected(self.vector, self.exact_fisher_solve(gradient.a)), gradient.P)

    def euclidean(self, e: Expectation) -> Coordinates:
        """∇L, or what a metric has made of it."""
        return Coordinates(*self.local(e))

    def carried(self, vector: Tensor) -> Tensor:
        """The part along the manifold."""
        return self.projected(self.vector, vector)

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """λ after a tangent, and where it is finite and inside the domain."""
        assert isinstance(move, Tangent)  # `takes` refuses others before
        change, new = move.change.vector, self.retracted(self.vector, move.change.vector)
        ok = new.isfinite().all(-1) & change.isfinite().all(-1) & self.in_domain(new)
        return Coordinates(new, self.no_matrix), ok

    def entropy(self) -> Tensor:
        """Refused: it is not known in closed form.

        Raises:
            PairError: always.
        """
        raise PairError(
            f"the entropy of {type(self).__name__} is not known in closed form. Write the loss with log q at draws: "
            "theta = q.rsample(10); loss = (q.log_prob(theta) - log_joint(theta)).mean()."
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
