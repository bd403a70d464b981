"""How the gradient in λ is had: L(λ) = -E_q[h], h = log p(θ, y) - γ log q_λ(θ), for posteriors over a flat vector.

    score function   -∇L ≈ mean of φ h                        (Godichon-Baggioni, Nguyen and Tran 2023, Eq 2.4)
    control variate  -∇L ≈ mean of φ (h - c),  c_i = Cov(φ_i h, φ_i)/Var(φ_i) of an *earlier* batch
    pathwise         -∇L ≈ mean of ∇_λ [log p(T(ε, λ), y) - γ log q(T(ε, λ))], λ inside log q held fixed
    closed form      ∇L of a bound that is known as a function of λ

All but the last are unbiased estimates.  Without c the variance of the first is (log p(y))² I_F at the optimum.  The
packet holds ∇L whole, the entropy in it, in the place of the gradient in a frame.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Cost, Estimator, Expectation, Framed, Posterior, Target
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


class GradientEstimator(Estimator):
    """L and ∇L at the λ of a flat posterior.

    Args:
        draws: B, of the log joint.
        generator: of the draws; its state is saved with the optimizer.

    Raises:
        InputError: fewer draws than are needed.
    """

    comparable = False
    needs = Target
    least = 1  # draws

    def __init__(self, draws: int, generator: torch.Generator | None = None) -> None:
        if not (isinstance(draws, int) and draws >= self.least):
            raise InputError(f"draws is the number B of draws of the log joint, at least {self.least}; got {draws}.")
        self.draws, self.generator = draws, generator

    def check(self, q: Posterior) -> None:
        """A flat posterior.

        Raises:
            PairError: another.
        """
        if not isinstance(q, FlatPosterior):
            raise PairError(
                f"{type(self).__name__} differentiates in the vector of a flat posterior; got {type(q).__name__}. "
                "Use Stein(), or FlatCholesky."
            )

    @abstractmethod
    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate with new draws."""


def integrand(
    q: FlatPosterior,
    target: Target,
    theta: Tensor,  # (n, *batch, d)
    at: Tensor | None = None,
) -> Tensor:  # (n, *batch)
    """h = log p(θ, y) - γ log q(θ)."""
    return target.log_joint(theta) - target.temperature * q.log_prob(theta, at)


def _packet(
    q: FlatPosterior, target: Target, bound: Tensor, gradient: Tensor, cost: Cost, exact: bool = False
) -> Expectation:
    """From the bound and its gradient, which go up."""
    return Expectation(-bound, Framed(-gradient, q.no_matrix), target.temperature, exact, cost)


class _Scored(GradientEstimator):
    """From values of the log joint and scores of q; no gradient of the log joint is taken."""

    @torch.no_grad()
    def _draw(self, q: FlatPosterior, target: Target) -> tuple[Tensor, Tensor]:  # (B, *batch, D), (B, *batch)
        """φ and h at B draws."""
        theta = q.sample(self.draws, self.generator)
        return q.score(theta), integrand(q, target, theta)


@final
class ScoreFunction(_Scored):
    """mean of φ h, nothing subtracted: as in the paper, and rarely what one wants.

    Not `torchngvi.expectations.ScoreFunction`, which is another estimate: in the frame of a Gaussian the scores are z
    and zzᵀ - I, so that a leave-one-out baseline comes for free and the estimate is the natural gradient already.

    Args:
        draws: B.
        generator: of the draws; its state is saved with the optimizer.

    Raises:
        InputError: B < 1.
    """

    def __init__(self, draws: int = 100, generator: torch.Generator | None = None) -> None:
        super().__init__(draws, generator)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """With B draws."""
        assert isinstance(q, FlatPosterior)
        score, h = self._draw(q, target)
        return _packet(q, target, h.mean(0), (score * h[..., None]).mean(0), Cost(0, 0, self.draws))


@final
class ControlVariate(_Scored):
    """mean of φ_i (h - c_i) with a constant a coordinate from the previous batch, which keeps it unbiased.

    A call returns the constants of its draws as ``Expectation.learned``; an optimizer hands them to the next call by
    :meth:`recalling`, and saves them.  A call that was told none draws one batch more, for its constants.

    Args:
        draws: B, at least 2.
        generator: of the draws; its state is saved with the optimizer.

    Raises:
        InputError: B < 2.
    """

    least = 2

    def __init__(self, draws: int = 100, generator: torch.Generator | None = None) -> None:
        super().__init__(draws, generator)
        self._known: Tensor | None = None  # c, (*batch, D)

    def recalling(self, learned: Mapping[str, Tensor]) -> "ControlVariate":
        """The estimator with the constants of an earlier batch."""
        new = copy.copy(self)
        new._known = learned.get("constants")
        return new

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """With B draws, and B more where no earlier batch has given the constants."""
        assert isinstance(q, FlatPosterior)
        draws, constants = self.draws, self._known
        if constants is None:
            constants = _constants(*self._draw(q, target))
            draws *= 2
        score, h = self._draw(q, target)
        gradient = (score * (h[..., None] - constants)).mean(0)
        packet = _packet(q, target, h.mean(0), gradient, Cost(0, 0, draws))
        return packet._replace(learned={"constants": _constants(score, h)})


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
        generator: of the draws; its state is saved with the optimizer.

    Raises:
        InputError: B < 1.
        PairError: at construction of an optimizer, a family without such a map.
    """

    def __init__(self, draws: int = 10, generator: torch.Generator | None = None) -> None:
        super().__init__(draws, generator)

    def check(self, q: Posterior) -> None:
        """A flat posterior with draws that can be differentiated.

        Raises:
            PairError: another.
        """
        super().check(q)
        if not (isinstance(q, FlatPosterior) and q.reparametrised):
            raise PairError(
                f"Pathwise differentiates through draws, and {type(q).__name__} has no map from noise to draws. "
                "Use ControlVariate(draws)."
            )

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """With B draws and as many gradients of the log joint."""
        assert isinstance(q, FlatPosterior)
        fixed = q.vector.detach()
        with torch.enable_grad():
            lam = fixed.clone().requires_grad_()
            value = integrand(q, target, q.rsample(self.draws, self.generator, lam), fixed).mean(0)
            (gradient,) = torch.autograd.grad(value.sum(), lam)
        return _packet(q, target, value.detach(), gradient, Cost(self.draws, 0))


@final
class LowerBound(Target):
    """A bound that is known as a function of λ: what `ClosedForm` differentiates.

    Args:
        function: λ (*batch, D) -> (*batch,), the bound, which goes up.

    Raises:
        InputError: something that cannot be called.
    """

    temperature = 1.0

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        if not callable(function):
            raise InputError(
                f"ClosedForm takes the lower bound as a function of lambda; got {type(function).__name__}."
            )
        self.function = function

    def log_joint(self, theta: Tensor) -> Tensor:
        """Refused: a bound in λ says nothing of one θ.

        Raises:
            PairError: always.
        """
        raise PairError("a LowerBound is a function of lambda, not of theta. Use ClosedForm() with it.")

    def tensors(self) -> tuple[Tensor, ...]:
        """Unknown, as those of a log joint."""
        return ()


@final
class ClosedForm(GradientEstimator):
    """For a bound that is known: ``step`` then takes the function λ -> LB(λ), (*batch, D) -> (*batch,)."""

    comparable = True
    needs: type[Target] = LowerBound

    def __init__(self) -> None:
        self.draws, self.generator = 0, None

    def prepared(self, source: Any) -> Target:
        """The function as a target.

        Raises:
            InputError: something that cannot be called.
        """
        return source if isinstance(source, Target) else LowerBound(source)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """By autograd."""
        assert isinstance(q, FlatPosterior)
        assert isinstance(target, LowerBound)
        with torch.enable_grad():
            lam = q.vector.detach().clone().requires_grad_()
            value = target.function(lam)
            (gradient,) = torch.autograd.grad(value.sum(), lam)
        return _packet(q, target, value.detach(), gradient, Cost(0, 0), exact=True)
