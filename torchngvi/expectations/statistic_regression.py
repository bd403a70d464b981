"""The natural gradient of an exponential family as a least-squares fit of the log joint on its statistics.

With h = log p(θ, y) - γ log q(θ) and T the sufficient statistics of q, whose expectation parameters are ω,

    ∇_ω E_q h = Cov(T)⁻¹ Cov(T, h) = argmin_c min_{c_0} E_q (h - c_0 - ⟨c, T⟩)²

so that the fit over draws is an estimate of the natural gradient in η (Salimans and Knowles 2013).  For a conjugate log
joint h is linear in T: the fit is exact with dim T + 1 draws, and a step η' = η + c is the posterior.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, read_size
from torchngvi.errors import PairError
from torchngvi.expectations.flat import GradientEstimator, integrand
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target
from torchngvi.numerics.least_squares import shortest_fit
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily

_LEAST, _TIMES = 32, 4  # draws, and draws for each statistic, where none were asked for
_ROUNDING = 100.0  # units of rounding that the fit of a conjugate log joint may leave of its terms


@final
class StatisticRegression(GradientEstimator):
    """The natural gradient of an exponential family, from values of the log joint alone.

    One wants it for every posterior that is an `ExponentialFamily`: it has no noise where the log joint is conjugate,
    and little where it nearly is.  Elsewhere it has a bias of the order 1/draws, below its standard error.  A family of
    finitely many values is not drawn from but enumerated, and then the fit is exact for every log joint.

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
    def conjugate(
        self,
        q: ExponentialFamily,
        target: Target,
    ) -> tuple[Tensor, Tensor, int]:  # (*batch, D), (*batch,)
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

    def _fitted(self, q: ExponentialFamily, target: Target) -> "_Fit":
        draws = self.draws if self._asked is not None else max(_LEAST, _TIMES * (q.size + 1))
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
