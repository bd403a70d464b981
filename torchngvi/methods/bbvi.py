"""Black-box VI by projected and by proximal stochastic gradients: constructor calls of `NaturalGradientVI`."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.expectations import Independent, PathDerivative, Reparametrized
from torchngvi.interfaces import Estimator, Posterior, StepSize
from torchngvi.optim import NaturalGradientVI
from torchngvi.rules import ProjectedRootGradient, ProximalRootGradient


class BBVI(NaturalGradientVI):
    """Black-box VI by projected stochastic gradients in (m, C): the diagonal of C stays at or above 1/√L.

    m' = m - ρ g,  C' = C - ρ tril[∂L/∂C],  C'_ii = max(C'_ii, 1/√L) (Kim, Ma and Gardner 2024).  The default
    estimator is one draw that sticks the landing, `PathDerivative`; the closed-form entropy is
    ``estimator=Reparametrized(Independent(1))``.  Where the posterior is Gaussian, ρ = μ/(8L²(D + 3)) converges
    linearly in spite of the noise; `torchngvi.theory.kim2024` has the steps for other cases.  The method is
    Euclidean: the worse the conditioning, the more steps it needs.  For natural gradients of the same objective use
    `VN` or `SRVN`.

    Args:
        posterior, step_size, estimator, loss_scale: see `NaturalGradientVI`; a `CholeskyGaussian` or a
            `DiagonalGaussian`.
        lr: ρ, or 1 with a scheduler that sets it.
        smoothness: L, the largest curvature of the negative log joint.

    Raises:
        InputError: a smoothness that is not positive.
        PairError: a posterior that holds no root of the covariance.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(1, mean=1.0, dtype=torch.float64)
    >>> opt = BBVI(q, lr=1 / 32, smoothness=1.0)
    >>> for _ in range(1000):
    ...     loss = opt.step(lambda theta: -0.5 * theta.square().sum(-1))
    >>> bool(q.mean.abs() < 1e-6), bool((q.stddev - 1).abs() < 1e-6)
    (True, True)
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor,
        smoothness: float,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        what = "is L, the largest curvature of the negative log joint,"
        smoothness = read_number("smoothness", smoothness, what, above=0)
        rule = ProjectedRootGradient(smoothness**-0.5)
        super().__init__(
            posterior,
            rule,
            lr,
            step_size=step_size,
            estimator=PathDerivative() if estimator is None else estimator,
            loss_scale=loss_scale,
        )


class ProximalBBVI(NaturalGradientVI):
    """Black-box VI by proximal stochastic gradients in (m, C): the entropy enters by its proximal map.

    C'_ii = ½(c + √(c² + 4ργ)), c = C_ii - ρ (HC)_ii (Domke 2020).  It needs neither a smoothness constant nor a
    projection; the default estimator is one draw without the entropy, `Reparametrized`.

    Args:
        posterior, lr, step_size, estimator, loss_scale: see `NaturalGradientVI`; a `CholeskyGaussian` or a
            `DiagonalGaussian`.

    Raises:
        PairError: a posterior that holds no root of the covariance.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = ProximalBBVI(CholeskyGaussian(3), lr=1e-2)
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        estimator = Reparametrized(Independent(1)) if estimator is None else estimator
        super().__init__(
            posterior, ProximalRootGradient(), lr, step_size=step_size, estimator=estimator, loss_scale=loss_scale
        )
