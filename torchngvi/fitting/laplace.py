"""Laplace's approximation: the mode by Newton's method, the curvature there.

Newton's step is VN with expectations replaced by values at m and ρ = 1/γ (Khan and Rue 2023, section
4.1): θ' = θ - H⁻¹∇ℓ(θ), H = ∇²ℓ(θ).  At the mode γ V⁻¹ = H, in q's pattern: for a diagonal q γ/V_ii = H_ii.

Where H has negative or vanishing eigenvalues λ they are replaced by max(|λ|, floor), for the step and
for V, and the result says how many there were at the end.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient, mean_hessian
from torchngvi.errors import InputError
from torchngvi.interfaces import Congruence, Target, TractableTarget, where_members
from torchngvi.models.arguments import as_target, bound, count
from torchngvi.numerics.inference_mode import tracked
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors.gaussian import Gaussian

_HALVINGS = 40  # of one step
_COLUMNS = 64  # of the Hessian at once: so many copies of θ are evaluated in one call
_ENOUGH = 1e-4  # share of the promised decrease a step must reach


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


class _Curvature(NamedTuple):
    """The Hessian H in its eigenbasis, repaired."""

    values: Tensor  # (*batch, D), positive
    vectors: Tensor  # (*batch, D, D)
    repaired: Tensor  # (*batch,)
    smallest: Tensor  # (*batch,)

    def solve(self, g: Tensor) -> Tensor:
        """Solve with H."""
        return (self.vectors @ ((self.vectors.mT @ g[..., None]) / self.values[..., None]))[..., 0]


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
    target = as_target(target)
    if tolerance is None:
        tolerance = 1e-8 if torch.finfo(q.mean_probe.dtype).eps < 1e-12 else 1e-3
    tolerance = bound("tolerance", tolerance, "bounds the Newton decrement")
    max_iterations = count("max_iterations", max_iterations, "counts Newton steps")
    if not target.temperature > 0:
        raise InputError(
            f"the covariance is γ H⁻¹, which needs a positive temperature γ; got {target.temperature}. "
            "At γ = 0 q is a point: minimise the log joint itself."
        )
    theta = q.frame().mean.clone()
    for iterations in range(max_iterations + 1):
        energy, g, H = _derivatives(target, theta)
        if not iterations and not bool(torch.isfinite(energy).all()):
            raise InputError(
                "the log joint must be finite at q's mean, where Newton's method starts; "
                f"got {-float(energy[~energy.isfinite()][0])}. Start from another mean (initialize_)."
            )
        curvature = _eigen(H)
        direction = -curvature.solve(g)
        square = -(g * direction).sum(-1)  # gᵀH⁻¹g
        converged = square.sqrt() <= tolerance
        if bool(converged.all()) or iterations == max_iterations:
            break
        theta, moved = backtracked(target, theta, energy, direction, square, ~converged)
        if not bool(moved.any()):
            break
    _set(q, theta, curvature, target.temperature)
    return LaplaceResult(theta, converged, square.sqrt(), iterations, curvature.repaired, curvature.smallest)


def _derivatives(target: Target, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ (*batch,), ∇ℓ (*batch, D) and ∇²ℓ (*batch, D, D): members do not depend on one another."""
    if isinstance(target, TractableTarget) and target.convex:
        energy, derivative = target.second_order(theta)
        return energy, derivative.g, derivative.H
    energy, g = energy_and_gradient(target, theta[None])
    return energy[0], g[0], mean_hessian(target, theta[None], _COLUMNS)


def _eigen(H: Tensor) -> _Curvature:
    """Eigenvalues by absolute value, none below rounding."""
    values, vectors, _ = eigh(H)
    floor = 10 * H.shape[-1] * torch.finfo(H.dtype).eps * values.abs().amax(-1, keepdim=True)
    floor = floor.clamp_min(torch.finfo(H.dtype).tiny ** 0.5)
    repaired = (values < floor).sum(-1)
    return _Curvature(torch.maximum(values.abs(), floor), vectors, repaired, values[..., 0])


def backtracked(
    target: Target,
    theta: Tensor,  # (*batch, D)
    energy: Tensor,  # (*batch,)
    direction: Tensor,  # (*batch, D)
    square: Tensor,  # (*batch,)
    active: Tensor,  # (*batch,)
) -> tuple[Tensor, Tensor]:
    """Take the longest of the steps 1, ½, ¼, .. along which ℓ falls enough, a member at a time.

    Args:
        target: the target, whose log joint is asked.
        theta: where the step begins, (*batch, D).
        energy: ℓ there, (*batch,).
        direction: the step of Newton, (*batch, D).
        square: gᵀH⁻¹g, which the whole step promises twice, (*batch,).
        active: the members that are to move, (*batch,).

    Returns:
        Where the step has led, (*batch, D), and which members have moved, (*batch,).
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


def _set(q: Gaussian, mode: Tensor, curvature: _Curvature, temperature: float) -> None:
    """q = N(mode, γ (ΠH)⁻¹): from N(mode, I) by the congruence N = ΠH/γ."""
    H = (curvature.vectors * curvature.values[..., None, :]) @ curvature.vectors.mT
    q.initialize_(mode)
    N = q.structure.from_dense(H / temperature)
    new, ok = q.moved(Congruence(N, torch.zeros_like(mode)))
    q.assign(new, ok)
