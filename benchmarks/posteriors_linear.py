"""Regressions as black boxes: log joints by gradients alone, beside the model whose expectations are exact.

    python -m benchmarks.engine --only logistic-250 poisson-500 student-1000 binomial-2000

D coefficients, 2 D rows, X = N(0, 1)/√D; w = s N(0, 1) and the prior N(0, s²) with s = 2 for classes and robust
measurements, 0.8 for counts, so that the linear predictor has the standard deviation s whatever D is.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.posteriors_hierarchical import bernoulli, generator, normal, poisson
from torchngvi import GeneralizedLinear
from torchngvi.models.likelihoods import NegativeBinomial, StudentT

DIMS = (250, 500, 1000, 2000)
DISPERSION, DOF, NOISE = 3.0, 4.0, 0.5


class Regression(NamedTuple):
    """A log joint of D coefficients, and the same as a model of the library."""

    name: str
    dim: int
    log_joint: Callable[[Tensor], Tensor]  # theta (*batch, D) -> (*batch,)
    exact: GeneralizedLinear


def _black_box(
    likelihood: Callable[[Tensor, Tensor], Tensor],  # y (N,), eta (*batch, N) -> the same
    X: Tensor,  # (N, D)
    y: Tensor,  # (N,)
    prior_sd: float,
) -> Callable[[Tensor], Tensor]:
    """The log joint, priors normalised."""
    design, log_sd = X.mT.contiguous(), math.log(prior_sd)

    def log_joint(theta: Tensor) -> Tensor:
        return normal(theta, 0.0, log_sd).sum(-1) + likelihood(y.to(theta), theta @ design.to(theta)).sum(-1)

    return log_joint


def _student_t(y: Tensor, eta: Tensor) -> Tensor:
    """log t(y; η, noise), four degrees of freedom."""
    constant = math.lgamma(0.5 * (DOF + 1)) - math.lgamma(0.5 * DOF) - 0.5 * math.log(DOF * math.pi) - math.log(NOISE)
    return constant - 0.5 * (DOF + 1) * torch.log1p(((y - eta) / NOISE).square() / DOF)


def _negative_binomial(y: Tensor, eta: Tensor) -> Tensor:
    """log NB(y; mean exp η, dispersion 3)."""
    ways = torch.lgamma(y + DISPERSION) - math.lgamma(DISPERSION) - torch.lgamma(y + 1)
    logit = eta - math.log(DISPERSION)
    return ways + y * logit - (y + DISPERSION) * softplus(logit)


def regression(family: str, columns: int) -> Regression:
    """Data of that family in that many columns, and its two log joints."""
    draw, random = generator(7), torch.Generator().manual_seed(7)
    prior_sd = 0.8 if family in ("poisson", "binomial") else 2.0
    X = draw(2 * columns, columns) / math.sqrt(columns)
    eta = X @ (prior_sd * draw(columns))
    if family == "logistic":
        y = torch.bernoulli(eta.sigmoid(), generator=random)
        black, exact = bernoulli, "bernoulli_logit"
    elif family == "poisson":
        y = torch.poisson(eta.exp(), generator=random)
        black, exact = poisson, "poisson_log"
    elif family == "student":
        chi2 = 2 * torch._standard_gamma(torch.full_like(eta, 0.5 * DOF), generator=random)
        y = eta + NOISE * draw(len(eta)) / (chi2 / DOF).sqrt()
        black, exact = _student_t, StudentT(NOISE, DOF)
    else:
        rate = torch._standard_gamma(torch.full_like(eta, DISPERSION), generator=random) / DISPERSION * eta.exp()
        y = torch.poisson(rate, generator=random)
        black, exact = _negative_binomial, NegativeBinomial(DISPERSION)
    model = GeneralizedLinear(X, y, exact, prior_precision=prior_sd**-2)
    return Regression(f"{family} regression, D = {columns}", columns, _black_box(black, X, y, prior_sd), model)


REGRESSIONS: dict[str, Callable[[], Regression]] = {
    f"{family}-{columns}": functools.partial(regression, family, columns)
    for family in ("logistic", "poisson", "student", "binomial")
    for columns in DIMS
}
