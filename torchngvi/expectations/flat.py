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
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, read_size
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Cost, Estimator, Expectation, Framed, Posterior, Target
from torchngvi.numerics.linalg import shortest_fit
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


class GradientEstimator(Estimator):
    """The abstract base of the estimators of L and ∇L at the vector λ of a flat posterior.

    Args:
        draws: the number B of draws of the log joint.
        generator: the generator of the draws, whose state is saved with the optimizer; torch's own by default.

    Raises:
        InputError: if there are fewer draws than are needed.

    >>> from torchngvi.ifvb import ControlVariate
    >>> estimator = ControlVariate(10)
    >>> isinstance(estimator, GradientEstimator), estimator.draws
    (True, 10)
    """

    comparable = False
    needs = Target
    least = 1  # draws

    def __init__(self, draws: int, generator: torch.Generator | None = None) -> None:
        self.draws = read_size("draws", draws, "is the number B of draws of the log joint", at_least=self.least)
        self.generator = read_generator("generator", generator)

    def check(self, q: Posterior) -> None:
        """Check that q is a flat posterior.

        Raises:
            PairError: if it is another.
        """
        if not isinstance(q, FlatPosterior):
            raise PairError(
                f"{type(self).__name__} differentiates in the vector of a flat posterior; got {type(q).__name__}. "
                "Use Stein(), or FlatCholesky."
            )

    @abstractmethod
    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate L and ∇L at q with new draws."""


def integrand(q: FlatPosterior, target: Target, theta: Tensor, at: Tensor | None = None) -> Tensor:
    """The integrand of the lower bound, h = log p(θ, y) - γ log q_λ(θ), (n, *batch), at points (n, *batch, d)."""
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
    """The plain score function estimate, the mean of φ h with nothing subtracted.

    Use it to compare with the paper only: its variance is large, and `ControlVariate` costs the same.  It is not
    `torchngvi.expectations.ScoreFunction`, which is another estimate: in the frame of a Gaussian the scores are z
    and zzᵀ - I, so that a leave-one-out baseline comes for free and the estimate is the natural gradient already.

    Args:
        draws: the number B of draws, at least 1.
        generator: the generator of the draws, whose state is saved with the optimizer; torch's own by default.

    Raises:
        InputError: if B < 1.

    >>> from torchngvi import LogJoint
    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> q, target = MeanFieldGaussian(torch.zeros(2)), LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    >>> ScoreFunction(100)(q, target).derivative.a.shape
    torch.Size([2])
    """

    def __init__(self, draws: int = 100, generator: torch.Generator | None = None) -> None:
        super().__init__(draws, generator)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate L and ∇L at q from B values of the log joint."""
        assert isinstance(q, FlatPosterior)
        score, h = self._draw(q, target)
        return _packet(q, target, h.mean(0), (score * h[..., None]).mean(0), Cost(0, 0, self.draws))


@final
class ControlVariate(_Scored):
    """The score function estimate with a control variate, the mean of φ_i (h - c_i).

    The constant c_i of each coordinate comes from the previous batch of draws, which keeps the estimate unbiased.  A
    call returns the constants of its draws as ``Expectation.learned``; an optimizer hands them to the next call by
    :meth:`recalling`, and saves them.  A call without them draws one batch more, for its constants.  Use it
    for a log joint without gradients, or a posterior without a map from noise to draws; else `Pathwise` has less
    variance.

    Args:
        draws: the number B of draws, at least 2.
        generator: the generator of the draws, whose state is saved with the optimizer; torch's own by default.

    Raises:
        InputError: if B < 2.

    >>> from torchngvi import LogJoint
    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> q, target = MeanFieldGaussian(torch.zeros(2)), LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    >>> e = ControlVariate(100)(q, target)  # q is the posterior: h is constant, and so is c
    >>> bool((e.derivative.a.abs() < 1e-4).all())
    True
    """

    least = 2

    def __init__(self, draws: int = 100, generator: torch.Generator | None = None) -> None:
        super().__init__(draws, generator)
        self._known: Tensor | None = None  # c, (*batch, D)

    def recalling(self, learned: Mapping[str, Tensor]) -> "ControlVariate":
        """Return the same estimator with the constants of an earlier batch."""
        new = copy.copy(self)
        new._known = learned.get("constants")
        return new

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate L and ∇L at q from B values, and B more where no earlier batch has given the constants."""
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
    """The gradient through the draws θ = T(ε, λ), without the score's part: exactly 0 where q is the posterior.

    Use it where the log joint has a gradient and the posterior a map from noise to draws:
    as a rule its variance is far below that of the score function.

    Args:
        draws: the number B of draws, at least 1.
        generator: the generator of the draws, whose state is saved with the optimizer; torch's own by default.

    Raises:
        InputError: if B < 1.
        PairError: at construction of an optimizer, if the posterior has no such map.

    >>> from torchngvi import LogJoint
    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> q, target = MeanFieldGaussian(torch.zeros(2)), LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    >>> Pathwise(1)(q, target).derivative.a.abs().max().item()  # q is the posterior
    0.0
    """

    def __init__(self, draws: int = 10, generator: torch.Generator | None = None) -> None:
        super().__init__(draws, generator)

    def check(self, q: Posterior) -> None:
        """Check that q is a flat posterior whose draws can be differentiated.

        Raises:
            PairError: if it is another.
        """
        super().check(q)
        if not (isinstance(q, FlatPosterior) and q.reparametrised):
            raise PairError(
                f"Pathwise differentiates through draws, and {type(q).__name__} has no map from noise to draws. "
                "Use ControlVariate(draws)."
            )

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate L and ∇L at q from B gradients of the log joint."""
        assert isinstance(q, FlatPosterior)
        fixed = q.vector.detach()
        with torch.enable_grad():
            lam = fixed.clone().requires_grad_()
            value = integrand(q, target, q.rsample(self.draws, self.generator, lam), fixed).mean(0)
            (gradient,) = torch.autograd.grad(value.sum(), lam)
        return _packet(q, target, value.detach(), gradient, Cost(self.draws, 0))


@final
class LowerBound(Target):
    """A lower bound that is known as a function of λ, as a target: what `ClosedForm` differentiates.

    Args:
        function: the bound, which goes up, as a function of λ, (*batch, D) -> (*batch,).

    Raises:
        InputError: if the function cannot be called.

    >>> LowerBound(lambda lam: -lam.square().sum(-1)).function(torch.ones(2)).item()
    -2.0
    """

    temperature = 1.0

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        if not callable(function):
            raise InputError(
                f"ClosedForm takes the lower bound as a function of lambda; got {type(function).__name__}."
            )
        self.function = function

    def log_joint(self, theta: Tensor) -> Tensor:
        """Refuse to evaluate: a bound in λ says nothing of one θ.

        Raises:
            PairError: always.
        """
        raise PairError("a LowerBound is a function of lambda, not of theta. Use ClosedForm() with it.")

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the function depends on are unknown."""
        return ()


@final
class ClosedForm(GradientEstimator):
    """The exact gradient of a lower bound that is known as a function of λ.

    The ``step`` of an optimizer then takes the function λ -> LB(λ), (*batch, D) -> (*batch,).  Use it where the
    bound has a closed form, as in conjugate models, and to study a metric without the noise of gradients.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> q = MeanFieldGaussian(torch.ones(2))
    >>> ClosedForm()(q, LowerBound(lambda lam: -lam.square().sum(-1))).derivative.a.tolist()  # of minus the bound
    [2.0, 2.0]
    """

    comparable = True
    needs: type[Target] = LowerBound

    def __init__(self) -> None:
        self.draws, self.generator = 0, None

    def prepared(self, source: Any) -> Target:
        """Return the function as a target.

        Raises:
            InputError: if the function cannot be called.
        """
        return source if isinstance(source, Target) else LowerBound(source)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate the bound at q and differentiate it by autograd."""
        assert isinstance(q, FlatPosterior)
        assert isinstance(target, LowerBound)
        with torch.enable_grad():
            lam = q.vector.detach().clone().requires_grad_()
            value = target.function(lam)
            (gradient,) = torch.autograd.grad(value.sum(), lam)
        return _packet(q, target, value.detach(), gradient, Cost(0, 0), exact=True)


_LEAST = 32  # draws, and draws for each statistic, where none were asked for
_ROUNDING = 100.0  # units of rounding that the fit of a conjugate log joint may leave of its terms


@final
class StatisticRegression(GradientEstimator):
    """The natural gradient of an exponential family, from values of the log joint alone.

        ∇_ω E_q h = Cov(T)⁻¹ Cov(T, h) = argmin_c min_{c_0} E_q (h - c_0 - ⟨c, T⟩)²

    with h = log p(θ, y) - γ log q(θ) and T the sufficient statistics, fitted over draws (Salimans and Knowles 2013).
    For a conjugate log joint h is linear in T: the fit is exact with dim T + 1 draws, and a step η' = η + c is the
    posterior.  Elsewhere it has a bias of the order 1/draws, below its standard error.  Use it for every posterior that
    is an `ExponentialFamily`.  A family of finitely many values is not drawn from but enumerated, and then the fit is
    exact for every log joint.

    Args:
        draws: the number of draws, at least two more than there are statistics; by default four for each statistic and
            one, at least 32.
        generator: the generator of the draws, whose state is saved with the optimizer; torch's own by default.

    Raises:
        InputError: fewer than three draws.
        PairError: at construction of an optimizer, for another posterior, or too few draws for its statistics.

    >>> from torchngvi import LogJoint
    >>> from torchngvi.posteriors.flat import Gamma
    >>> q = Gamma(torch.tensor([1.0, 1.0], dtype=torch.float64))
    >>> target = LogJoint(lambda rate: (5 * rate.log() - 2 * rate)[..., 0])  # five events in two units of time
    >>> e = StatisticRegression()(q, target)
    >>> (q.vector - q.exact_fisher_solve(e.derivative.a)).round(decimals=9).tolist()  # Gamma(6, 2)
    [6.0, 2.0]
    """

    unbiased = False

    def __init__(self, draws: int | None = None, generator: torch.Generator | None = None) -> None:
        if draws is not None:
            draws = read_size("draws", draws, "counts values of the log joint", at_least=3)
        self._asked = draws
        self.draws, self.generator = _LEAST if draws is None else draws, read_generator("generator", generator)

    def check(self, q: Posterior) -> None:
        """Check that q is an exponential family with fewer statistics than there are draws.

        Raises:
            PairError: another posterior, too few draws.
        """
        if not isinstance(q, ExponentialFamily):
            raise PairError(
                f"StatisticRegression fits the log joint on the sufficient statistics of an exponential family; got "
                f"{type(q).__name__}. Use ControlVariate(draws), or Stein() for a Gaussian."
            )
        if self._asked is not None and self._asked < q.size + 2:
            raise PairError(
                f"StatisticRegression fits {q.size} statistics and a constant to {self._asked} draws. Give it "
                f"{q.size + 2} at least, or none to let it choose."
            )

    @torch.no_grad()
    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate the log joint at draws of q, and fit."""
        assert isinstance(q, ExponentialFamily)
        fit = self._fitted(q, target)
        value = fit.level - (fit.coefficients * (fit.centre - q.expectation())).sum(-1)
        gradient = q.fisher_product(fit.coefficients)
        return Expectation(-value, Framed(-gradient, q.no_matrix), target.temperature, False, Cost(0, 0, fit.draws))

    @torch.no_grad()
    def conjugate(self, q: ExponentialFamily, target: Target) -> tuple[Tensor, Tensor, int]:
        """Compute the natural parameters of the posterior, and whether the log joint is conjugate.

        Args:
            q: the posterior, from which draws are taken.
            target: the log joint.

        Returns:
            η plus the coefficients of the fit, whether the fit leaves nothing but rounding at the draws, and their
            number.

        >>> from torchngvi import LogJoint
        >>> from torchngvi.posteriors.flat import Gamma
        >>> q = Gamma(torch.tensor([1.0, 1.0], dtype=torch.float64))
        >>> bool(StatisticRegression().conjugate(q, LogJoint(lambda rate: -rate[..., 0]))[1])
        True
        >>> bool(StatisticRegression().conjugate(q, LogJoint(lambda rate: -rate[..., 0].square()))[1])
        False
        """
        fit = self._fitted(q, target)
        return q.vector + fit.coefficients, fit.left <= _ROUNDING * torch.finfo(q.dtype).eps * fit.size, fit.draws

    def _fitted(self, q: ExponentialFamily, target: Target, times: int = 4) -> "_Fit":
        # times: draws, and draws for each statistic, where none were asked for
        draws = self.draws if self._asked is not None else max(_LEAST, times * (q.size + 1))
        theta, weights = q.points(draws, self.generator)
        h, T, root = integrand(q, target, theta), q.statistics(theta), weights.sqrt()
        centre, level = (weights[..., None] * T).sum(0), (weights * h).sum(0)
        design, right = (root[..., None] * (T - centre)).movedim(0, -2), (root * (h - level)).movedim(0, -1)
        coefficients = shortest_fit(design, right[..., None])[..., 0]
        left = (right - (design @ coefficients[..., None])[..., 0]).norm(dim=-1)
        size = right.norm(dim=-1) + ((coefficients.abs() + q.vector.abs()) * design.norm(dim=-2)).sum(-1)
        return _Fit(coefficients, level, centre, left, size, len(theta))


class _Fit(NamedTuple):
    coefficients: Tensor  # c, (*batch, D)
    level: Tensor  # mean of h, (*batch,)
    centre: Tensor  # mean of T, (*batch, D)
    left: Tensor  # root mean square of what the fit leaves, (*batch,)
    size: Tensor  # of its terms, (*batch,)
    draws: int
