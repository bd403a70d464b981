"""How the gradient of the lower bound in λ is had: LB(λ) = E_q[h], h = log p(θ, y) - γ log q_λ(θ).

    score function   ∇LB ≈ mean of φ h                        (Godichon-Baggioni, Nguyen and Tran 2023, Eq 2.4)
    control variate  ∇LB ≈ mean of φ (h - c),  c_i = Cov(φ_i h, φ_i)/Var(φ_i) of an *earlier* batch
    pathwise         ∇LB ≈ mean of ∇_λ [log p(T(ε, λ), y) - γ log q(T(ε, λ))], λ inside log q held fixed
    closed form      ∇LB of a bound that is known as a function of λ

All but the last are unbiased estimates.  Without c the variance of the first is (log p(y))² I_F at the optimum.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchngvi.arguments import as_target
from torchngvi.errors import InputError, PairError
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.interfaces import Target

State = dict[str, Any]


class Estimate(NamedTuple):
    """LB and its gradient at λ, with what they cost."""

    lower_bound: Tensor  # (*batch,)
    gradient: Tensor  # (*batch, D), uphill
    draws: int  # of the log joint


class GradientEstimator(ABC):
    """LB and ∇LB at the λ of a family."""

    def init(self, family: FlatPosterior) -> State:
        """The state before the first call.

        Raises:
            PairError: a family it cannot differentiate.
        """
        return {}

    def prepared(self, source: Any) -> Any:
        """What a user handed to ``step``, as this estimator takes it."""
        return as_target(source)

    @abstractmethod
    def __call__(self, family: FlatPosterior, target: Any, state: State, generator: torch.Generator) -> Estimate:
        """Estimate with new draws."""


def _check_draws(draws: int, least: int) -> int:
    if not (isinstance(draws, int) and draws >= least):
        raise InputError(f"draws is the number B of draws of the log joint, at least {least}; got {draws}.")
    return draws


def integrand(
    family: FlatPosterior,
    target: Target,
    theta: Tensor,  # (n, *batch, d)
    at: Tensor | None = None,
) -> Tensor:  # (n, *batch)
    """h = log p(θ, y) - γ log q(θ)."""
    return target.log_joint(theta) - target.temperature * family.log_prob(theta, at)


def _scored(
    family: FlatPosterior, target: Target, draws: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:  # (B, *batch, D), (B, *batch)
    """φ and h at B draws."""
    theta = family.sample(draws, generator)
    return family.score(theta), integrand(family, target, theta)


@final
class ScoreFunction(GradientEstimator):
    """mean of φ h, nothing subtracted: as in the paper, and rarely what one wants.

    Args:
        draws: B.

    Raises:
        InputError: B < 1.
    """

    def __init__(self, draws: int = 100) -> None:
        self.draws = _check_draws(draws, 1)

    def __call__(self, family: FlatPosterior, target: Target, state: State, generator: torch.Generator) -> Estimate:
        """With B draws; no gradient of the log joint is taken."""
        score, h = _scored(family, target, self.draws, generator)
        return Estimate(h.mean(0), (score * h[..., None]).mean(0), self.draws)


@final
class ControlVariate(GradientEstimator):
    """mean of φ_i (h - c_i) with a constant a coordinate from the previous batch, which keeps it unbiased.

    The first call draws one batch more, for its constants.

    Args:
        draws: B, at least 2.

    Raises:
        InputError: B < 2.
    """

    def __init__(self, draws: int = 100) -> None:
        self.draws = _check_draws(draws, 2)

    def init(self, family: FlatPosterior) -> State:
        """No constants yet."""
        return {"c": None}

    def __call__(self, family: FlatPosterior, target: Target, state: State, generator: torch.Generator) -> Estimate:
        """With B draws; no gradient of the log joint is taken."""
        draws = self.draws
        if state["c"] is None:
            state["c"] = _constants(*_scored(family, target, draws, generator))
            draws *= 2
        score, h = _scored(family, target, self.draws, generator)
        gradient = (score * (h[..., None] - state["c"])).mean(0)
        state["c"] = _constants(score, h)
        return Estimate(h.mean(0), gradient, draws)


def _constants(score: Tensor, h: Tensor) -> Tensor:
    """Cov(φ_i h, φ_i)/Var(φ_i), 0 where it is not finite."""
    away = score - score.mean(0)
    product = score * h[..., None]
    c = ((product - product.mean(0)) * away).sum(0) / away.square().sum(0)
    return torch.where(c.isfinite(), c, 0.0)


@final
class Pathwise(GradientEstimator):
    """Through the draws θ = T(ε, λ), the score's part left out: exactly 0 where q is the posterior.

    Args:
        draws: B.

    Raises:
        InputError: B < 1.
        PairError: at construction of an optimizer, a family without such a map.
    """

    def __init__(self, draws: int = 10) -> None:
        self.draws = _check_draws(draws, 1)

    def init(self, family: FlatPosterior) -> State:
        """Nothing."""
        if not family.reparametrised:
            raise PairError(
                f"Pathwise differentiates through draws, and {type(family).__name__} has no map from noise to draws. "
                "Use ControlVariate(draws)."
            )
        return {}

    def __call__(self, family: FlatPosterior, target: Target, state: State, generator: torch.Generator) -> Estimate:
        """With B draws and as many gradients of the log joint."""
        fixed = family.vector.detach()
        with torch.enable_grad():
            lam = fixed.clone().requires_grad_()
            value = integrand(family, target, family.rsample(self.draws, generator, lam), fixed).mean(0)
            (gradient,) = torch.autograd.grad(value.sum(), lam)
        return Estimate(value.detach(), gradient, self.draws)


@final
class ClosedForm(GradientEstimator):
    """For a bound that is known: ``step`` then takes the function λ -> LB(λ), (*batch, D) -> (*batch,)."""

    def prepared(self, source: Any) -> Callable[[Tensor], Tensor]:
        """The function itself.

        Raises:
            InputError: something that cannot be called.
        """
        if not callable(source):
            raise InputError(f"ClosedForm takes the lower bound as a function of lambda; got {type(source).__name__}.")
        return source

    def __call__(
        self, family: FlatPosterior, target: Callable[[Tensor], Tensor], state: State, generator: torch.Generator
    ) -> Estimate:
        """By autograd."""
        with torch.enable_grad():
            lam = family.vector.detach().clone().requires_grad_()
            value = target(lam)
            (gradient,) = torch.autograd.grad(value.sum(), lam)
        return Estimate(value.detach(), gradient, 0)
