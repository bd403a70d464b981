"""Predictions of a mixed model for new rows, of groups that the data have and of others, from joint draws."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_choice
from torchngvi.errors import InputError
from torchngvi.mixed_models.table import ends_of
from torchngvi.models import (
    BernoulliLogit,
    BernoulliProbit,
    GaussianNoise,
    Likelihood,
    NegativeBinomial,
    PoissonLog,
    StudentT,
    checks,
)
from torchngvi.models.mixed_prior import root_of
from torchngvi.models.mixed_rows import GroupedRows, integers

KINDS = ("mean", "linear", "response")


def check_kind(kind: str) -> None:
    """Check the word for what is predicted."""
    read_choice("kind", kind, KINDS, f"must be one of {', '.join(KINDS)}")


_HUGE = 1e15  # a mean of counts whose integers float64 holds


class Prediction(NamedTuple):
    """Predictions for M rows, as `MixedResult.predict` makes them.

    Attributes:
        mean: posterior predictive means, (M,).
        sd: standard deviations, (M,).
        low: lower ends of equal-tailed intervals, (M,).
        high: upper ends, (M,).
        draws: what these are of, (S, M).

    >>> Prediction.of(torch.tensor([[0.0], [1.0], [2.0]]), 0.5).low.item()
    0.5
    >>> Prediction.of(torch.tensor([[0.0], [1.0], [2.0]]), 0.5)
    Prediction(mean=tensor([1.]), sd=tensor([1.]), low=tensor([0.5000]), high=tensor([1.5000]), draws=(3, 1))
    """

    mean: Tensor  # (M,)
    sd: Tensor  # (M,)
    low: Tensor  # (M,)
    high: Tensor  # (M,)
    draws: Tensor  # (S, M)

    def __repr__(self) -> str:
        """The summaries; of the draws their shape."""
        told = ", ".join(f"{name}={getattr(self, name)}" for name in ("mean", "sd", "low", "high"))
        return f"Prediction({told}, draws={tuple(self.draws.shape)})"

    @classmethod
    def of(
        cls,
        draws: Tensor,  # (S, M)
        interval: float,
    ) -> "Prediction":
        """Summarise equally likely draws, with equal-tailed intervals of a probability."""
        low, high = (torch.quantile(draws, share, dim=0) for share in ends_of(interval))
        return cls(draws.mean(0), draws.std(0), low, high, draws)


class NewRows(NamedTuple):
    """The designs of new rows, checked."""

    X: Tensor  # (M, p)
    Z: Tensor  # (M, r)
    groups: Tensor  # (M,); negative numbers are groups that the data do not have
    offset: Tensor  # (M,)

    @classmethod
    def of(cls, rows: GroupedRows, X: Any, Z: Any, groups: Any, offset: Any) -> "NewRows":
        """Check new rows against those of the fit."""
        X, Z = checks.numbers("X", X, rows.X), checks.numbers("Z", Z, rows.X)
        if not X.ndim or not len(X):
            raise InputError("a prediction is of at least one row; the table, or X, has none.")
        if X.shape[1:] != (rows.p,) or Z.shape != (len(X), rows.r):
            raise InputError(
                f"new rows need X of shape (M, {rows.p}) and Z of shape (M, {rows.r}); got {tuple(X.shape)} and "
                f"{tuple(Z.shape)}."
            )
        index = torch.full((len(X),), -1, device=X.device) if groups is None else integers(groups, len(X), X)
        if bool((index >= rows.n).any()):
            raise InputError(
                f"groups of new rows must be those of the data, 0 to {rows.n - 1}, or negative for groups that the "
                f"data do not have; got {int(index.max())}."
            )
        offset = torch.zeros_like(X[:, 0]) if offset is None else checks.numbers("offset", offset, rows.X)
        if offset.shape != (len(X),):
            raise InputError(
                f"offset must have one entry for each of the {len(X)} new rows; got shape {tuple(offset.shape)}."
            )
        return cls(X, Z, index, offset)


def predictors(
    rows: NewRows,
    beta: Tensor,  # (S, p)
    omega: Tensor,  # (S, q)
    b: Tensor,  # of the groups of the data, (S, n, r)
    generator: torch.Generator,
) -> Tensor:
    """Draw the linear predictors of new rows, (S, M); the effects of a new group are drawn from N(0, Ω⁻¹)."""
    return beta @ rows.X.mT + varying(rows, omega, b, generator) + rows.offset


def varying(
    rows: NewRows,
    omega: Tensor,  # (S, q)
    b: Tensor,  # of the groups of the data, (S, n, r)
    generator: torch.Generator,
) -> Tensor:
    """What the effects of the groups add to the predictors, (S, M); those of a new group are drawn from N(0, Ω⁻¹)."""
    names, place = torch.unique(rows.groups.clamp_max(0), return_inverse=True)
    noise = torch.randn(len(b), len(names), b.shape[-1], generator=generator, dtype=torch.float64).to(b)
    W = root_of(omega, b.shape[-1])
    fresh = torch.linalg.solve_triangular(W.mT, noise.mT, upper=True).mT  # W⁻ᵀ z
    effects = torch.where(
        (rows.groups >= 0)[:, None],
        b.index_select(1, rows.groups.clamp_min(0)),
        fresh.index_select(1, place),
    )
    return (effects * rows.Z).sum(-1)


def of_kind(
    likelihood: Likelihood,
    eta: Tensor,  # (S, M)
    kind: str,
    interval: float,
    generator: torch.Generator,
    parameter: Tensor | None,  # (S,)
) -> Prediction:
    """Predict the mean of y, the linear predictor or y itself from draws of linear predictors."""
    if kind == "mean":
        eta = inverse_link(likelihood, eta)
    elif kind == "response":
        eta = responses(likelihood, eta, generator, parameter)
    return Prediction.of(eta, interval)


def inverse_link(likelihood: Likelihood, eta: Tensor) -> Tensor:
    """The mean of y given the linear predictor; of two classes the probability of the second."""
    match likelihood:
        case BernoulliLogit():
            return eta.sigmoid()
        case BernoulliProbit():
            return torch.special.ndtr(eta)
        case PoissonLog() | NegativeBinomial():
            return eta.exp()
        case GaussianNoise() | StudentT():
            return eta
    raise InputError(
        f"the mean and draws of y are known for the families of this library; got {type(likelihood).__name__}. "
        "Use kind='linear'."
    )


def responses(
    likelihood: Likelihood,
    eta: Tensor,  # (S, M)
    generator: torch.Generator,
    parameter: Tensor | None = None,  # (S,)
) -> Tensor:
    """Draw y given the linear predictor, two classes as 0 and 1; a learned parameter has a value for each draw."""
    mean = inverse_link(likelihood, eta).double().cpu()
    noise = torch.rand if likelihood.discrete else torch.randn
    z = noise(mean.shape, generator=generator, dtype=torch.float64)
    drawn = None if parameter is None else parameter[:, None].double().cpu()
    match likelihood:
        case BernoulliLogit() | BernoulliProbit():
            y = (z < mean).double()
        case PoissonLog():
            y = _poisson(mean, generator)
        case NegativeBinomial():
            r = likelihood.dispersion if drawn is None else drawn
            gamma = torch._standard_gamma(r * torch.ones_like(mean), generator=generator)
            y = _poisson(mean * gamma / r, generator)
        case StudentT():
            gamma = torch._standard_gamma(torch.full_like(mean, 0.5 * likelihood.dof), generator=generator)
            y = mean + (likelihood.scale if drawn is None else drawn) * z * (0.5 * likelihood.dof / gamma).sqrt()
        case GaussianNoise():
            y = mean + (likelihood.noise if drawn is None else drawn) * z
    return y.to(eta)


def _poisson(mean: Tensor, generator: torch.Generator) -> Tensor:
    """Draw counts; of means that integers do not hold the mean, from which a count is hardly told apart."""
    drawn = torch.poisson(mean.clamp_max(_HUGE), generator)
    return torch.where(mean > _HUGE, mean, drawn)
