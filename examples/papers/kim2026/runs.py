"""The two axes of the comparison, and the first step at which the mean gap of some constant step is small enough."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from examples.compare_methods.stepping import unguarded
from examples.papers.kim2026.transport import ProximalBuresWasserstein
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import ClosedEntropyStein, Hessian, Independent
from torchngvi.interfaces import Estimator, Rule, Target
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.rules import ProximalRootGradient, VariationalNewton
from torchngvi.stepsizes import Constant
from torchngvi.theory.kim2024 import GaussianTarget

GEOMETRIES: dict[str, Callable[[], Rule]] = {
    "parameter space": ProximalRootGradient,
    "Bures-Wasserstein": ProximalBuresWasserstein,
    "natural": VariationalNewton,
}
ESTIMATORS: dict[str, Callable[[Independent], Estimator]] = {
    "Price": lambda draws: Hessian(draws, chunk=4096),
    "reparametrised": ClosedEntropyStein,
}
_STEPS, _RATIO = 12, 2**-0.75  # of the grid: how many, and each to the one before


def divergence(q: CholeskyGaussian, target: GaussianTarget) -> Tensor:
    """The divergence KL(q ‖ p) from a Gaussian target, (*batch,), in nats."""
    away, C = q.mean - target.mean, q.scale_tril
    quadratic = (away * (away @ target.precision)).sum(-1) + (C * (target.precision @ C)).sum((-2, -1))
    log_dets = torch.linalg.slogdet(target.precision).logabsdet + 2 * C.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    return 0.5 * (quadratic - q.dim - log_dets)


def steps_to(
    target: Target,
    gap: Callable[[CholeskyGaussian], Tensor],
    dim: int,
    names: tuple[str, str],  # geometry, estimator
    longest: float,
    goals: Sequence[float],
    *,
    runs: int,
    limit: int,
) -> list[tuple[int, float]]:
    """The least steps to each goal over a grid of constant steps, all runs of all steps as one batch from N(0, I)."""
    q = CholeskyGaussian(dim, (_STEPS, runs), dtype=torch.float64)
    lr = longest * _RATIO ** torch.arange(_STEPS, dtype=torch.float64)
    estimator = ESTIMATORS[names[1]](Independent(1, torch.Generator().manual_seed(0)))
    rates = lr[:, None].expand(_STEPS, runs)
    rule = GEOMETRIES[names[0]]()
    opt = unguarded(NaturalGradientVI(q, rule, lr=rates, step_size=Constant(), estimator=estimator))
    found: list[tuple[int, float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)
        for count in range(1, limit + 1):
            opt.step(target)
            mean = gap(q).mean(-1).nan_to_num(torch.inf, torch.inf)
            while len(found) < len(goals) and mean.min() <= goals[len(found)]:
                found.append((count, float(lr[mean.argmin()])))
            if len(found) == len(goals):
                return found
    return found + [(-1, float("nan"))] * (len(goals) - len(found))
