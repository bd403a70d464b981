"""Natural-gradient flows, the limit of small steps, by SciPy's adaptive Runge-Kutta of order 8.

    (m, V)      dm/dt = -V g    dV/dt = γV - VHV                   (Kumar et al. 2025, Eq 9)
    (m, C)      dm/dt = -V g    dC/dt = C tril½[γI - CᵀHC]         (Eq 15)
    (m, S)      dm/dt = -V g    dS/dt = H - γS

One flow in three coordinates: the same path of (m, V).  SciPy integrates all members together, under
one error tolerance.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Coordinates, Estimator, Expectation, Target
from torchngvi.messages import needing
from torchngvi.numerics.linalg import cholesky, tril_half
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

with needing("torchngvi.adapters.flows", "flows"):
    import numpy as np
    from scipy.integrate import solve_ivp

__all__ = ["Flow", "natural_gradient_flow"]


class Flow(NamedTuple):
    """The posterior along a natural-gradient flow: its moments and its loss at the T times that were asked for."""

    times: Tensor  # (T,)
    mean: Tensor  # (T, *batch, D)
    covariance: Tensor  # (T, *batch, D, D)
    loss: Tensor  # L = E_q[ℓ] - γ entropy, (T, *batch)
    evaluations: int


def _root_of_covariance(V: Tensor) -> Tensor:
    return cholesky(0.5 * (V + V.mT))[0]


def _root_of_precision(S: Tensor) -> Tensor:
    return _root_of_covariance(torch.cholesky_inverse(_root_of_covariance(S)))


class _System(NamedTuple):
    """A second coordinate beside the mean: from C, to C, and its velocity given C and P."""

    of_root: Callable[[Tensor], Tensor]
    to_root: Callable[[Tensor], Tensor]
    velocity: Callable[[Tensor, Tensor], Tensor]


def _precision_velocity(C: Tensor, P: Tensor) -> Tensor:
    """C⁻ᵀ P C⁻¹ = H - γS."""
    half = torch.linalg.solve_triangular(C.mT, P, upper=True)
    return torch.linalg.solve_triangular(C, half, upper=False, left=False)


_SYSTEMS = {
    "covariance": _System(lambda C: C @ C.mT, _root_of_covariance, lambda C, P: -C @ P @ C.mT),
    "root": _System(lambda C: C, lambda C: C, lambda C, P: -C @ tril_half(P)),
    "precision": _System(torch.cholesky_inverse, _root_of_precision, _precision_velocity),
}


@torch.no_grad()
def natural_gradient_flow(
    q: Gaussian,
    target: Target,
    times: Sequence[float],
    coordinates: str = "root",
    *,
    estimator: Estimator | None = None,
    rtol: float = 1e-10,
    atol: float = 1e-12,
) -> Flow:
    """Follow the natural-gradient flow from q, which is left as it is.

    The flow is the limit of small steps of `VN` and `SRVN`; use it to see what a method does apart from its step size.
    To fit a posterior, `torchngvi.fit` costs far less.

    Args:
        q: the start, with a full covariance.
        target: a model whose expectations are deterministic.
        times: the times of the flow at which to report, increasing, not negative; near the optimum the distance to it
            falls as exp(-γt), whatever the conditioning.
        coordinates: the coordinates in which to integrate, "covariance", "root" or "precision".
        estimator: how expectations are obtained, `Quadrature()` by default.
        rtol, atol: the tolerances of SciPy's `solve_ivp`, for a coordinate and a step.

    Returns:
        The moments and the loss of q at these times, and the number of evaluations.

    Raises:
        InputError: unknown coordinates, times that do not increase, a tolerance that is not positive, a flow that
            is not finite or that SciPy cannot continue.
        PairError: an estimator whose values are noisy, a posterior with a diagonal covariance.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.eye(1).double(), [2.0], "gaussian")  # posterior N(1, ½)
    >>> flow = natural_gradient_flow(CholeskyGaussian(1, dtype=torch.float64), model, [1.0, 30.0])
    >>> flow.mean[-1].round(decimals=6).tolist(), (1 / flow.covariance[0]).round(decimals=6).tolist()  # 2 - 1/e
    ([1.0], [[1.632121]])
    """
    if coordinates not in _SYSTEMS:
        raise InputError(f"coordinates must be one of {', '.join(_SYSTEMS)}; got {coordinates!r}.")
    when = _checked_times(times, rtol=rtol, atol=atol)
    estimator = Quadrature() if estimator is None else estimator
    if not estimator.comparable:
        raise PairError(
            f"a flow needs deterministic expectations, and {type(estimator).__name__} gives noisy ones. "
            "Use Quadrature() with a model, or take small steps: VN(q, lr=1e-3)."
        )
    if q.structure.widest < q.dim:
        raise PairError(f"flows are those of full covariances; got {type(q).__name__}. Use a CholeskyGaussian.")
    system = _SYSTEMS[coordinates]
    root = q.scale_tril.clone()
    moving = CholeskyGaussian(q.dim, q.batch_shape, mean=q.mean.clone(), scale=root)

    def evaluated(mean: Tensor, matrix: Tensor) -> Expectation:
        moving.restore(Coordinates(mean, system.to_root(matrix)))
        return estimator(moving, target)

    def split(flat: np.ndarray) -> tuple[Tensor, Tensor]:
        both = torch.as_tensor(flat, dtype=q.dtype, device=q.device)
        mean, matrix = both.split([root[..., 0].numel(), root.numel()])
        return mean.reshape(root.shape[:-1]), matrix.reshape(root.shape)

    def velocity(time: float, flat: np.ndarray) -> np.ndarray:
        e = evaluated(*split(flat))
        a, P = moving.local(e)
        rates = -moving.frame().push(a), system.velocity(moving.scale_tril, P)
        flat_rates = torch.cat([rate.flatten() for rate in rates]).double().cpu().numpy()
        if not np.isfinite(flat_rates).all():  # SciPy would shorten its step for ever
            raise InputError(f"the flow is not finite at t = {time:.3g}: start from another mean or a smaller scale.")
        return flat_rates

    start = torch.cat([moving.mean.flatten(), system.of_root(root).flatten()]).double().cpu().numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # `velocity` says what they mean
        solution = solve_ivp(velocity, (0.0, float(when[-1])), start, "DOP853", when, rtol=rtol, atol=atol)
    if not solution.success:
        raise InputError(
            f"SciPy could not follow the flow: {solution.message} Start nearer to the optimum, or relax rtol and atol."
        )
    means, covariances, losses = [], [], []
    for flat in solution.y.T:
        e = evaluated(*split(flat))
        means.append(moving.mean.clone())
        covariances.append(moving.covariance)
        losses.append(e.value - e.temperature * moving.entropy())
    return Flow(
        torch.as_tensor(when), torch.stack(means), torch.stack(covariances), torch.stack(losses), int(solution.nfev)
    )


def _checked_times(times: Sequence[float], **errors: float) -> np.ndarray:
    """Increasing times, and errors of SciPy's steps that it can keep."""
    when = np.asarray(times, dtype=float)
    if when.ndim != 1 or when.size == 0 or not (when[0] >= 0 and np.all(np.diff(when) > 0)):
        raise InputError(f"times must be increasing and not negative; got {list(times)}.")
    for name, value in errors.items():
        if not (value > 0 and np.isfinite(value)):
            raise InputError(f"{name} is an error of SciPy's steps, positive and finite; got {value}.")
    return when
