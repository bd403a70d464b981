"""Laplace's approximation: the mode by Newton's method, the curvature there.

Newton's step is VN with expectations replaced by values at m and ρ = 1/γ (Khan and Rue 2023, section
4.1): θ' = θ - H⁻¹∇ℓ(θ), H = ∇²ℓ(θ).  At the mode γ V⁻¹ = H, in q's pattern: for a diagonal q γ/V_ii = H_ii.

Where H has negative or vanishing eigenvalues λ they are replaced by max(|λ|, floor), for the step and
for V, and the result says how many there were at the end.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_number
from torchngvi.derivatives import energy_and_gradient, mean_hessian
from torchngvi.errors import InputError
from torchngvi.fitting.newton_search import put_at, search
from torchngvi.interfaces import Framed, Target, TractableTarget
from torchngvi.models import GeneralizedLinear, TractableFactors
from torchngvi.models.arguments import as_target, read_gaussian
from torchngvi.numerics import sparse
from torchngvi.numerics.linalg import eigh
from torchngvi.numerics.versions import tracked
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured

__all__ = ["LaplaceResult", "laplace"]

_COLUMNS = 64  # of the Hessian at once: so many copies of θ are evaluated in one call


class LaplaceResult(NamedTuple):
    """The mode that Newton's method has found, whether it converged, and what is known of the Hessian there.

    Attributes:
        mode: where the log joint is largest, (*batch, D).
        converged: whether the decrement came below the tolerance, (*batch,).
        decrement: √(gᵀH⁻¹g), (*batch,): ℓ is about half its square above the minimum.
        iterations: the number of Newton steps.
        repaired: how many eigenvalues of H were below the floor at the mode, (*batch,); 0 where H is as it is.
        smallest: the smallest eigenvalue of H at the mode, before the repair, (*batch,).

    >>> from torchngvi import CholeskyGaussian
    >>> result = laplace(CholeskyGaussian(1), lambda theta: -2 * theta.square().sum(-1))
    >>> bool(result.converged), int(result.repaired), round(result.smallest.item(), 4)
    (True, 0, 4.0)
    """

    mode: Tensor  # (*batch, D)
    converged: Tensor  # (*batch,)
    decrement: Tensor  # √(gᵀH⁻¹g), (*batch,): ℓ is about half its square above the minimum
    iterations: int
    repaired: Tensor  # eigenvalues of H below the floor at the mode, (*batch,); 0 where H is as it is
    smallest: Tensor  # the smallest eigenvalue of H at the mode, before the repair, (*batch,)


class Repaired(NamedTuple):
    """The Hessian H in its eigenbasis, repaired.

    Attributes:
        values: the eigenvalues, (*batch, D), positive.
        vectors: the eigenvectors, (*batch, D, D).
        repaired: how many eigenvalues were below the floor, (*batch,).
        smallest: the smallest eigenvalue before the repair, (*batch,).

    >>> Repaired.of(torch.diag(torch.tensor([2.0, -1.0]))).solve(torch.ones(2)).tolist()
    [0.5, 1.0]
    """

    values: Tensor  # (*batch, D), positive
    vectors: Tensor  # (*batch, D, D)
    repaired: Tensor  # (*batch,)
    smallest: Tensor  # (*batch,)

    @classmethod
    def of(
        cls,
        H: Tensor,  # (*batch, D, D), symmetric
    ) -> "Repaired":
        """Take eigenvalues by absolute value, none below rounding."""
        values, vectors, _ = eigh(H)
        floor = 10 * H.shape[-1] * torch.finfo(H.dtype).eps * values.abs().amax(-1, keepdim=True)
        floor = floor.clamp_min(torch.finfo(H.dtype).tiny ** 0.5)
        repaired = (values < floor).sum(-1)
        return cls(torch.maximum(values.abs(), floor), vectors, repaired, values[..., 0])

    @property
    def ok(self) -> Tensor:
        """All members."""
        return torch.ones_like(self.smallest, dtype=torch.bool)

    def solve(self, g: Tensor) -> Tensor:
        """Solve with H."""
        return (self.vectors @ ((self.vectors.mT @ g[..., None]) / self.values[..., None]))[..., 0]

    def kept(self, structure: Pattern) -> Structured:
        """The entries of H that a pattern stores."""
        return structure.from_dense((self.vectors * self.values[..., None, :]) @ self.vectors.mT)


@tracked
@torch.no_grad()
def laplace(
    q: Gaussian,
    target: Target | Callable[[Tensor], Tensor],
    *,
    tolerance: float | None = None,
    max_iterations: int = 100,
) -> LaplaceResult:
    """Laplace's approximation: set q to N(mode, γ H⁻¹) by Newton's method from q's mean, H the Hessian of ℓ.

    Use it as the start of a fit where q begins far from the mode, or as a cheap approximation of its own.  It ignores
    everything but the curvature at one point: `torchngvi.fit` from there is better wherever the posterior is skewed.

    Args:
        q: the posterior, updated in place.
        target: a model, or a function of theta returning the log joint, twice differentiable.
        tolerance: on the Newton decrement √(gᵀH⁻¹g); by default 1e-8 in float64, 1e-3 in float32.
        max_iterations: the largest number of Newton steps; each takes D Hessian-vector products, in batched calls.

    Returns:
        The mode, whether it was reached, and what was repaired.

    Raises:
        InputError: a temperature of 0, a tolerance or a number of iterations out of range, a log joint
            that is not finite at q's mean.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> result = laplace(q, lambda theta: -(theta.exp() - 3 * theta).sum(-1))  # the mode is log 3
    >>> bool(result.converged), round(q.mean.exp().item(), 9), round(q.variance.item(), 9)
    (True, 3.0, 0.333333333)
    """
    q, target = read_gaussian("laplace", q, target), as_target(target)
    tolerance = usual_tolerance(q) if tolerance is None else tolerance
    tolerance = read_number("tolerance", tolerance, "bounds the Newton decrement", above=0)
    max_iterations = read_count("max_iterations", max_iterations, "counts Newton steps")
    if not target.temperature > 0:
        raise InputError(
            f"the covariance is γ H⁻¹, which needs a positive temperature γ; got {target.temperature}. "
            "At γ = 0 q is a point: minimise the log joint itself."
        )
    found = laplace_within(q, target, tolerance, max_iterations)
    if (bad := int(found.repaired.max())) > 0:
        warnings.warn(
            f"where Newton's method ended the log joint has no maximum in {bad} of {q.dim} directions, and the "
            "standard deviations there are not those of a posterior: its curvature is not negative. Give every "
            "parameter a proper prior; if the function returns -log p, an energy, return its negative.",
            stacklevel=3,
        )
    return found


def usual_tolerance(q: Gaussian) -> float:
    """The tolerance on the Newton decrement where none is given.

    >>> from torchngvi import CholeskyGaussian
    >>> usual_tolerance(CholeskyGaussian(1))
    0.001
    """
    return 1e-8 if torch.finfo(q.mean_probe.dtype).eps < 1e-12 else 1e-3


@tracked
@torch.no_grad()
def laplace_within(
    q: Gaussian,
    target: Target,
    tolerance: float,
    max_iterations: int,
    over: Callable[[int], bool] = lambda passes: False,
) -> LaplaceResult:
    """`laplace` of arguments that have been checked, within a budget of passes.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> laplace_within(CholeskyGaussian(1), LogJoint(lambda theta: -theta.square().sum(-1)), 1e-3, 9).iterations
    0
    """
    start = q.frame().mean.clone()

    def at(theta: Tensor) -> tuple[Tensor, Tensor, Repaired]:
        energy, g, H = _derivatives(target, theta)
        if theta is start and not bool(torch.isfinite(energy).all()):
            raise InputError(
                "the log joint must be finite at q's mean, where Newton's method starts; "
                f"got {-float(energy[~energy.isfinite()][0])}. Start from another mean (initialize_)."
            )
        return energy, g, Repaired.of(H)

    theta, _, square, curvature, passes = search(target, start, at, tolerance**2, max_iterations + 1, over)
    put_at(q, theta, curvature, target.temperature, torch.ones_like(square, dtype=torch.bool))
    decrement = square.sqrt()
    return LaplaceResult(theta, decrement <= tolerance, decrement, passes - 1, curvature.repaired, curvature.smallest)


def _is_sparse_batch(target: Target, theta: Tensor) -> bool:
    """Whether sparse rows, whose products are of one posterior, serve a batch."""
    return theta.ndim > 1 and isinstance(target, GeneralizedLinear) and sparse.is_sparse(target.X)


def _derivatives(target: Target, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ (*batch,), ∇ℓ (*batch, D) and ∇²ℓ (*batch, D, D): members do not depend on one another."""
    if isinstance(target, TractableTarget) and target.convex and not _is_sparse_batch(target, theta):
        energy, derivative = target.second_order(theta)
        if isinstance(derivative, Framed):  # the entries that the forest of the factors stores, whatever q's are
            assert isinstance(target, TractableFactors)
            return energy, derivative.a, target.structure.full(derivative.W)
        return energy, *derivative.raw()
    energy, g = energy_and_gradient(target, theta[None])
    return energy[0], g[0], mean_hessian(target, theta[None], _COLUMNS)
