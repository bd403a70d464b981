"""Stochastic natural-gradient VI, whose steps are convex combinations, for Gaussians and exponential families."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchngvi.expectations import StatisticRegression
from torchngvi.interfaces import Estimator, Posterior, Rule
from torchngvi.methods.gaussian import VN, Method
from torchngvi.posteriors.flat import ExponentialFamily
from torchngvi.rules import NaturalGradient
from torchngvi.stepsizes import Convex


class NGVI(Method):
    """Stochastic natural-gradient VI: η' = (1 - γ)η + γ(∇_ω E_q[log p(y|z)] + η_prior), 0 ≤ γ ≤ 1.

    It is `VN` whose steps are convex combinations (Wu and Gardner 2024, section 3), which stay in the cone with any
    curvature estimate that is positive semi-definite (mini-batches of a linear regression, `BonnetPrice`, `Hessian`).
    ``LambdaLR(opt, theorem_schedule)`` gives γ_t = 2/(2 + t), `ExpectationAverage` the output of Theorem 1.

    The posterior may also be one of `torchngvi.posteriors.flat` that is an `ExponentialFamily`, such as `Gamma` or
    `Dirichlet`, over any log joint: the target of a step is then found by `StatisticRegression`, without noise where
    the log joint is conjugate.

    Args:
        posterior, loss_scale: see `NaturalGradientVI`.
        estimator: see `NaturalGradientVI`; by default `StatisticRegression()` for exponential families.
        lr: γ, at most 1, which erases q: for conjugate models, or the start of a schedule on one.  For other models
            0.1, or 0.5 with a schedule.

    Raises:
        InputError: an lr that is not positive; in a step, one above 1.
        PairError: in a step, a target that the estimator cannot evaluate.

    >>> import torch
    >>> from torchngvi import GeneralizedLinear, NaturalGaussian
    >>> from torchngvi.stepsizes import theorem_schedule
    >>> X, y = torch.arange(8.0).reshape(8, 1) - 3, torch.arange(8.0)
    >>> model, q = GeneralizedLinear(X, y, "gaussian"), NaturalGaussian(1)
    >>> opt = NGVI(q, lr=1.0)
    >>> schedule = torch.optim.lr_scheduler.LambdaLR(opt, theorem_schedule)
    >>> for _ in range(20):
    ...     loss = opt.step(model.minibatch(torch.randint(8, (4,))))
    ...     schedule.step()
    """

    def __init__(
        self,
        posterior: Posterior | Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        estimator: Estimator | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        if estimator is None and isinstance(posterior, ExponentialFamily):
            estimator = StatisticRegression()
        super().__init__(posterior, lr, step_size=Convex(), estimator=estimator, loss_scale=loss_scale)

    @staticmethod
    def rule_for(posterior: Posterior | Iterable[Any]) -> Rule:
        """The rule is that of `VN` on the same posterior, and the natural gradient in η of an exponential family."""
        return NaturalGradient() if isinstance(posterior, ExponentialFamily) else VN.rule_for(posterior)
