"""The start of an exact fit: the mode of a convex ℓ by iteratively reweighted least squares, and the curvature there.

It is Newton's method with halved steps, whose every pass over the data makes one Hessian Xᵀ diag(f'') X + γΛ and takes
no expectation (McCullagh and Nelder 1989, section 2.5).  It ends where ℓ/γ is about a twentieth of a nat above its
minimum: Laplace's approximation itself is mostly off the optimum by more.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.fitting.newton_search import put_at, search
from torchngvi.interfaces import Frame, Framed, TractableTarget, where_members
from torchngvi.models import GeneralizedLinear, TractableFactors
from torchngvi.numerics import sparse
from torchngvi.numerics.linalg import cholesky, finite
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Forest, Pattern
from torchngvi.structures.forest import placed
from torchngvi.structures.pattern import Structured

_DECREMENT2 = 0.1  # gᵀH⁻¹g, in units of γ, at which the mode is near enough
_PASSES = 50
WIDE = 500  # dimensions up to which H is written out: as far q begins at the mode, here and where ℓ is not convex


class _Dense(NamedTuple):
    """H as a matrix, with its Cholesky factor."""

    H: Tensor  # (*batch, D, D)
    factor: Tensor
    ok: Tensor  # (*batch,)

    def solve(self, g: Tensor) -> Tensor:
        """Solve with H."""
        return torch.cholesky_solve(g[..., None], self.factor)[..., 0]

    def kept(self, structure: Pattern) -> Structured:
        """The entries of H that a pattern stores."""
        return structure.from_dense(self.H)


class _InPattern(NamedTuple):
    """H that has the pattern of a forest, with its Cholesky factor, which fills nothing in."""

    H: Structured
    root: Structured
    ok: Tensor  # (*batch,)
    structure: Pattern

    def solve(self, g: Tensor) -> Tensor:
        """Solve with H."""
        return self.structure.tsolve(self.root, self.structure.solve(self.root, g))

    def kept(self, structure: Pattern) -> Structured:
        """H itself."""
        return self.H


def _stays_in_pattern(q: Gaussian, target: TractableTarget) -> bool:
    """Whether H has no entries but those that the forest of q stores."""
    if isinstance(target, TractableFactors):
        return True
    if not isinstance(target, GeneralizedLinear) or not sparse.is_sparse(target.X) or target.dim != q.dim:
        return False
    return isinstance(q.structure, Forest) and not q.batch_shape and placed(q.structure, target.X) is not None


def has_start(q: Gaussian, target: TractableTarget) -> bool:
    """Say whether `start_at_mode` is for this model and q: a convex ℓ whose H is of moderate size or in q's pattern.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.ones(4, 1), [0.0, 1.0, 2.0, 1.0], "poisson_log")
    >>> has_start(CholeskyGaussian(1), model)
    True
    """
    return target.convex and target.temperature > 0 and (q.dim <= WIDE or _stays_in_pattern(q, target))


def _lower(target: TractableTarget, mean: Tensor) -> Tensor:
    """The mean, or for members whose ℓ is lower there the origin: where ℓ grows as e^η a pass leads back by 1 in η."""
    at_mean, at_origin = (target.log_joint(theta[None])[0] for theta in (mean, torch.zeros_like(mean)))
    return where_members(at_origin > at_mean.nan_to_num(nan=-math.inf), torch.zeros_like(mean), mean)


@torch.no_grad()
def start_at_mode(q: Gaussian, target: TractableTarget, over: Callable[[int], bool] = lambda passes: False) -> int:
    """Set q to about N(mode, γ (ΠH)⁻¹), for the members whose ℓ is finite there.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> X = torch.ones(4, 1, dtype=torch.float64)
    >>> model, q = GeneralizedLinear(X, [0.0, 1.0, 2.0, 1.0], "gaussian"), CholeskyGaussian(1, dtype=torch.float64)
    >>> start_at_mode(q, model), round(q.mean.item(), 6), round(q.variance.item(), 6)  # 4/5 and 1/5
    (2, 0.8, 0.2)
    """
    structure, in_pattern = q.structure, _stays_in_pattern(q, target)

    def at(theta: Tensor) -> tuple[Tensor, Tensor, _Dense | _InPattern]:
        energy, derivative = target.second_order(theta)
        if not in_pattern:
            assert not isinstance(derivative, Framed)
            g, H = derivative.raw()
            return energy, g, _Dense(H, *cholesky(H))
        g, W = derivative.framed(Frame(theta, structure.eye(theta), structure, q.upper))
        return energy, g, _InPattern(W, *structure.cholesky(W), structure)

    square = _DECREMENT2 * target.temperature
    found = search(target, _lower(target, q.frame().mean), at, square, _PASSES, over)
    known = finite(found.energy) & found.curvature.ok & finite(found.theta).all(-1)
    put_at(q, found.theta, found.curvature, target.temperature, known)
    return found.passes
