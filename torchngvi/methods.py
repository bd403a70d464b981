"""Published methods by name: each is a choice of parts."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces import Estimator, Posterior, StepSize
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import NaturalGaussian
from torchngvi.rules import BuresWasserstein, NaturalGradient, QuasiNewton, VariationalNewton


class VN(NaturalGradientVI):
    """Variational Newton: S' = (1 - γρ) S + ρH, m' = m - ρ S'⁻¹ g.

    Khan and Rue (2023), Kumar et al. (2025), Eq 7; for conjugate models one step of ρ = 1 is exact.
    Without ``lr`` steps are found by trial and no learning rate is needed.

    Args:
        posterior, lr, step_size, estimator, acceleration, loss_scale: see `NaturalGradientVI`.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.models import GeneralizedLinear
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> model = GeneralizedLinear(torch.ones(3, 1, dtype=torch.float64), [1.0, 2.0, 3.0], "gaussian")
    >>> _ = VN(q, lr=1.0).step(model)
    >>> round(q.mean.item(), 12), round(q.precision.item(), 12)  # 6/4, 3 + 1
    (1.5, 4.0)
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        acceleration: QuasiNewton | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        # on (Sm, S) the natural gradient is VN, and needs no factor of V
        natural = isinstance(posterior, NaturalGaussian)
        rule = NaturalGradient() if natural else VariationalNewton()
        super().__init__(
            posterior,
            rule,
            lr,
            step_size=step_size,
            estimator=estimator,
            acceleration=acceleration,
            loss_scale=loss_scale,
        )


class SRVN(NaturalGradientVI):
    """Square-root variational Newton: C' = C - ρ C tril½[CᵀHC - γI], m' = m - ρ C Cᵀg.

    Kumar et al. (2025), Algorithm 1 and Eq 17; the same update as Tan (2025), Theorem 2.  Without
    ``lr`` steps are found by trial; a constant lr must satisfy lr (W_ii - γ) < 2 (from the printed
    update: the diagonal changes sign otherwise), so that start and lr have to fit each other.

    Args:
        posterior, lr, step_size, estimator, acceleration, loss_scale: see `NaturalGradientVI`.

    Raises:
        PairError: a posterior that holds no root of the covariance.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(1)
    >>> (0.5 * 3.0 * q.rsample((2,)).square().mean() - q.entropy()).backward()
    >>> SRVN(q, lr=0.1).step()
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        step_size: StepSize | None = None,
        estimator: Estimator | None = None,
        acceleration: QuasiNewton | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(
            posterior,
            NaturalGradient(),
            lr,
            step_size=step_size,
            estimator=estimator,
            acceleration=acceleration,
            loss_scale=loss_scale,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a posterior that holds a root of the covariance."""
        if isinstance(param_group.get("posterior"), NaturalGaussian):
            raise PairError(
                "SRVN updates a root of the covariance, and NaturalGaussian holds (S m, S), where the same natural "
                "gradient is VN. Use VN(q), or SRVN with a CholeskyGaussian."
            )
        super().add_param_group(param_group)


class BWGD(NaturalGradientVI):
    """Bures-Wasserstein gradient descent: m' = m - α g, V' = M V M, M = I - α(H - γS).

    Lambert et al. (2022), Algorithm 1.  Its step depends on the scale of the problem: stable below
    about 1/λ_max(H), with a rate that follows the conditioning.

    Args:
        posterior, lr, step_size, estimator, loss_scale: see `NaturalGradientVI`; lr is required.

    >>> from torchngvi import CholeskyGaussian
    >>> opt = BWGD(CholeskyGaussian(3), lr=1e-2)
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
        super().__init__(
            posterior, BuresWasserstein(), lr, step_size=step_size, estimator=estimator, loss_scale=loss_scale
        )
