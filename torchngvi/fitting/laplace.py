"""Gaussians at modes: Laplace's approximation, the start of an exact fit, and a mixture of one at each mode.

Newton's step is VN with expectations replaced by values at m and ρ = 1/γ (Khan and Rue 2023, section
4.1): θ' = θ - H⁻¹∇ℓ(θ), H = ∇²ℓ(θ).  At the mode γ V⁻¹ = H, in q's pattern: for a diagonal q γ/V_ii = H_ii.

Where H has negative or vanishing eigenvalues λ they are replaced by max(|λ|, floor), for the step and
for V, and the result says how many there were at the end.

The start of an exact fit is the mode of a convex ℓ by iteratively reweighted least squares: every pass over the data
makes one Hessian Xᵀ diag(f'') X + γΛ and takes no expectation (McCullagh and Nelder 1989, section 2.5).
"""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_number, read_seed, read_tensor
from torchngvi.derivatives import energy_and_gradient, mean_hessian
from torchngvi.errors import InputError
from torchngvi.fitting.fit import tolerance_of
from torchngvi.interfaces import Congruence, Frame, Framed, Posterior, Target, TractableTarget, where_members
from torchngvi.mode import find_modes, search_points
from torchngvi.models import GeneralizedLinear, TractableFactors
from torchngvi.models.log_joint import FullPrecision, as_target, read_gaussian, read_posterior
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import anyone, tracked
from torchngvi.numerics.linalg import cholesky, eigh, finite
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.mixture import Mixture
from torchngvi.structures import Forest, Pattern
from torchngvi.structures.forest import placed
from torchngvi.structures.pattern import Structured

__all__ = ["LaplaceResult", "laplace"]


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

    mode: Tensor
    converged: Tensor
    decrement: Tensor
    iterations: int
    repaired: Tensor
    smallest: Tensor


class Curvature(NamedTuple):
    """The Hessian H of ℓ at a point, of every member, as Newton's method uses it."""

    ok: Tensor  # the members whose H is positive definite, (*batch,)
    solve: Callable[[Tensor], Tensor]  # of H x = g
    kept: Callable[[Pattern], Structured]  # the entries of H that a pattern stores


class Searched(NamedTuple):
    """Where Newton's method has ended, and what is known of ℓ there."""

    theta: Tensor  # (*batch, D)
    energy: Tensor  # ℓ where H was taken last, (*batch,): at theta, unless a budget has ended the search
    square: Tensor  # gᵀH⁻¹g there, (*batch,)
    curvature: Curvature  # H there
    passes: int  # how often ℓ was taken to second order


def search(
    target: Target,
    theta: Tensor,  # (*batch, D)
    at: Callable[[Tensor], tuple[Tensor, Tensor, Curvature]],
    square: float,
    most: int,
    over: Callable[[int], bool] = lambda passes: False,
) -> Searched:
    """Newton's method for the mode with halved steps, of all members at once, until gᵀH⁻¹g is at most ``square``."""
    passes = 0
    while True:
        energy, g, curvature = at(theta)
        passes += 1
        direction = -curvature.solve(g)
        decrement2 = -torch.linalg.vecdot(g, direction)
        active = curvature.ok & finite(energy) & ~(decrement2 <= square)
        if passes == most or not anyone(active):
            break
        theta, moved = _backtracked(target, theta, energy, direction, decrement2, active)
        if not anyone(moved) or over(passes + 1):
            break
    return Searched(theta, energy, decrement2, curvature, passes)


def _backtracked(
    target: Target, theta: Tensor, energy: Tensor, direction: Tensor, square: Tensor, active: Tensor, halvings: int = 40
) -> tuple[Tensor, Tensor]:
    """Take the longest of the steps 1, ½, ¼, .. along which ℓ falls enough, 1e-4 of gᵀH⁻¹g; and say who has moved."""
    waiting, result = active, theta
    rounding = 4 * torch.finfo(energy.dtype).eps * energy.abs().clamp_min(1.0)
    for halving in range(halvings):
        length = 0.5**halving
        trial = torch.add(theta, direction, alpha=length)
        fallen = energy + target.log_joint(trial[None])[0]
        enough = waiting & (fallen >= 1e-4 * length * square - rounding)
        result, waiting = where_members(enough, trial, result), waiting & ~enough
        if not anyone(waiting):
            break
    return result, active & ~waiting


def put_at(q: Gaussian, mode: Tensor, curvature: Curvature, temperature: float, members: Tensor) -> None:
    """Set these members of q to N(mode, γ (ΠH)⁻¹): from N(mode, I) by the congruence N = ΠH/γ."""
    here = q.snapshot()
    start = torch.where(members[..., None], mode, 0.0)
    q.restore(q._of_stddev(start, torch.ones_like(start)))
    new, inside = q.moved(Congruence(curvature.kept(q.structure) / temperature, torch.zeros_like(mode)))
    q.assign(new, inside)
    q.assign(here, ~members)


# Laplace's approximation


def repaired(H: Tensor) -> tuple[Curvature, Tensor, Tensor]:
    """H (*batch, D, D) with eigenvalues by absolute value, none below a floor; how many were, and the smallest."""
    values, vectors, _ = eigh(H)
    smallest = values[..., 0]
    floor = 10 * H.shape[-1] * torch.finfo(H.dtype).eps * values.abs().amax(-1, keepdim=True)
    floor = floor.clamp_min(torch.finfo(H.dtype).tiny ** 0.5)
    below = (values < floor).sum(-1)
    values = torch.maximum(values.abs(), floor)
    curvature = Curvature(
        torch.ones_like(smallest, dtype=torch.bool),
        lambda g: (vectors @ ((vectors.mT @ g[..., None]) / values[..., None]))[..., 0],
        lambda structure: structure.from_dense((vectors * values[..., None, :]) @ vectors.mT),
    )
    return curvature, below, smallest


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
    if tolerance is not None:
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


@tracked
@torch.no_grad()
def laplace_within(
    q: Gaussian,
    target: Target,
    tolerance: float | None,
    max_iterations: int,
    over: Callable[[int], bool] = lambda passes: False,
) -> LaplaceResult:
    """`laplace` of arguments that have been checked, within a budget of passes."""
    start, tolerance = q.frame().mean.clone(), tolerance_of(q, 1e-8, 1e-3) if tolerance is None else tolerance
    spectrum: list[Tensor] = []

    def at(theta: Tensor) -> tuple[Tensor, Tensor, Curvature]:
        energy, g, H = _derivatives(target, theta)
        if theta is start and not bool(torch.isfinite(energy).all()):
            raise InputError(
                "the log joint must be finite at q's mean, where Newton's method starts; "
                f"got {-float(energy[~energy.isfinite()][0])}. Start from another mean (initialize_)."
            )
        curvature, *spectrum[:] = repaired(H)
        return energy, g, curvature

    found = search(target, start, at, tolerance**2, max_iterations + 1, over)
    decrement = found.square.sqrt()
    put_at(q, found.theta, found.curvature, target.temperature, torch.ones_like(decrement, dtype=torch.bool))
    return LaplaceResult(found.theta, decrement <= tolerance, decrement, found.passes - 1, *spectrum)


def _derivatives(target: Target, theta: Tensor, columns: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ (*batch,), ∇ℓ (*batch, D) and ∇²ℓ (*batch, D, D), of so many columns at once: so many copies of θ in a call."""
    # sparse rows, whose products are of one posterior, serve no batch
    alone = theta.ndim > 1 and isinstance(target, GeneralizedLinear) and sparse.is_sparse(target.X)
    if isinstance(target, TractableTarget) and target.convex and not alone:
        energy, derivative = target.second_order(theta)
        if isinstance(derivative, Framed):  # the entries that the forest of the factors stores, whatever q's are
            assert isinstance(target, TractableFactors)
            return energy, derivative.a, target.structure.full(derivative.W)
        return energy, *derivative.raw()
    energy, g = energy_and_gradient(target, theta[None])
    return energy[0], g[0], mean_hessian(target, theta[None], columns)


# The start of an exact fit


def _stays_in_pattern(q: Gaussian, target: TractableTarget) -> bool:
    """Whether H has no entries but those that the forest of q stores."""
    if isinstance(target, TractableFactors):
        return True
    if not isinstance(target, GeneralizedLinear) or not sparse.is_sparse(target.X) or target.dim != q.dim:
        return False
    return isinstance(q.structure, Forest) and not q.batch_shape and placed(q.structure, target.X) is not None


def may_be_written_out(q: Posterior, widest: int = 500) -> bool:
    """Whether H is of moderate size, so that a fit may begin at the mode."""
    return q.dim <= widest


def has_start(q: Gaussian, target: TractableTarget) -> bool:
    """Say whether `start_at_mode` is for this model and q: a convex ℓ whose H is of moderate size or in q's pattern."""
    return target.convex and target.temperature > 0 and (may_be_written_out(q) or _stays_in_pattern(q, target))


@torch.no_grad()
def start_at_mode(
    q: Gaussian,
    target: TractableTarget,
    over: Callable[[int], bool] = lambda passes: False,
    near: float = 0.1,
    most: int = 50,
) -> int:
    """Set members to about N(mode, γ (ΠH)⁻¹), to a twentieth of a nat where ℓ is finite, and return how many passes."""
    structure, in_pattern = q.structure, _stays_in_pattern(q, target)

    def at(theta: Tensor) -> tuple[Tensor, Tensor, Curvature]:
        energy, derivative = target.second_order(theta)
        if in_pattern:  # whose factor fills nothing in
            g, W = derivative.framed(Frame(theta, structure.eye(theta), structure, q.upper))
            inner, ok = structure.cholesky(W)
            solve = lambda g: structure.tsolve(inner, structure.solve(inner, g))  # noqa: E731
            return energy, g, Curvature(ok, solve, lambda structure: W)
        assert not isinstance(derivative, Framed)
        g, H = derivative.raw()
        root, ok = cholesky(H)
        solve = lambda g: torch.cholesky_solve(g[..., None], root)[..., 0]  # noqa: E731
        return energy, g, Curvature(ok, solve, lambda structure: structure.from_dense(H))

    mean = q.frame().mean
    places = torch.stack([mean, torch.zeros_like(mean)])
    at_mean, at_origin = target.log_joint(places)
    # from the origin where ℓ is lower there: where it grows as e^η a pass leads back by 1 in η
    first = where_members(at_origin > at_mean.nan_to_num(nan=-math.inf), places[1], mean)
    found = search(target, first, at, near * target.temperature, most, over)
    known = finite(found.energy) & found.curvature.ok & finite(found.theta).all(-1)
    put_at(q, found.theta, found.curvature, target.temperature, known)
    return found.passes


def mixture_at_modes(
    q: Gaussian,
    target: Target | Callable[[Tensor], Tensor],
    *,
    starts: Tensor | None = None,  # (M, D)
    seed: int = 0,
) -> Mixture:
    """Make a mixture with one component at each mode of the log joint that a search finds, for `torchngvi.fit`.

    Components are Laplace's Gaussians in the coordinates and the structure of q, and weights the softmax of Laplace's
    log evidences; where modes are far apart this is nearly the optimum.  Modes whose Gaussians overlap by more than
    0.95 are taken once, and those with less than e⁻⁵ of the largest evidence not at all.

    Args:
        q: a Gaussian, as before a fit or after one, around which modes are looked for; it is not changed.
        target: a model, or a function of theta returning the log joint.
        starts: points from which the search begins besides the mean of q, (M, D); by default 4 to 16, half of them
            uniform on (-2, 2), half within six standard deviations of q.  A mode that none of them leads to is not
            found.
        seed: of these points.

    Returns:
        The mixture, the component with the largest weight first.

    Raises:
        InputError: a batch of posteriors, starts of another shape, no mode found.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, fit
    >>> def log_joint(x):  # with the weights 0.25 and 0.75
    ...     return torch.logaddexp(-0.5 * (x + 4) ** 2, 1.0986123 - 0.5 * (x - 4) ** 2).sum(-1)
    >>> mixture = mixture_at_modes(CholeskyGaussian(1, dtype=torch.float64), log_joint)
    >>> result = fit(mixture, log_joint, progress=False)
    >>> result.converged, mixture
    (True, Mixture(2 x CholeskyGaussian, D = 1, weights 0.75, 0.25))
    """
    read_posterior("mixture_at_modes", q, target)
    if not isinstance(q, Gaussian) or q.batch_shape:
        got = f"a batch of shape {tuple(q.batch_shape)}" if isinstance(q, Gaussian) else type(q).__name__
        raise InputError(f"mixture_at_modes looks around one Gaussian, such as CholeskyGaussian(3); got {got}.")
    target, mean = as_target(target), q.frame().mean
    what, shape = f"are points (M, D) with D = {len(mean)}", (None, len(mean))
    points = (
        search_points(mean, q.stddev, read_seed("seed", seed))
        if starts is None
        else (read_tensor("starts", starts, what, like=mean, shape=shape))
    )
    with FullPrecision(q.device.type):
        found = find_modes(target, torch.cat([mean[None], points]), 200 + 20 * q.dim)
    modes = [mode for mode in found if mode is not None and mode.found]
    if not modes:
        raise InputError(
            f"none of {len(found)} searches came to a mode, where the Hessian is negative definite. Give starts=, or "
            "the means of the components: Mixture(CholeskyGaussian(D, (K,), mean=...))."
        )
    least = max(mode.log_evidence for mode in modes) - 5.0
    mixture = Mixture.of_modes([mode for mode in modes if mode.log_evidence > least])
    if type(mixture.components) is type(q) and mixture.components.structure == q.structure:
        return mixture
    return Mixture(type(q).from_posterior(mixture.components, structure=q.structure), mixture.weights)
