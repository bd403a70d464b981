"""Bayesian Poisson and linear regression as regressors of scikit-learn."""

from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from sklearn.base import RegressorMixin
from torch import Tensor

from torchngvi.adapters.sklearn.arguments import Array, weights_of
from torchngvi.adapters.sklearn.base import BayesianLinear
from torchngvi.arguments import is_number
from torchngvi.errors import InputError
from torchngvi.models.likelihoods import GaussianNoise, Likelihood, PoissonLog
from torchngvi.models.standardize import mean_and_sd
from torchngvi.numerics.gaussian_integrals import Moments


@final
class QuasiCounts(Likelihood):
    """The Poisson likelihood for numbers that need not be whole, such as rates with their exposures as weights.

    >>> float(QuasiCounts().checked(torch.tensor([0.5])))
    0.5
    """

    discrete = False
    link = "log"
    _poisson: ClassVar[PoissonLog] = PoissonLog()

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """The energy exp η - yη + log Γ(y + 1)."""
        return self._poisson.energy(eta, y)

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """The moments, as those of counts."""
        # that of counts is expanded about log y for y at least 1
        whole = self._poisson.expected(mean, variance, y.clamp_min(1.0))
        rate = torch.exp(mean + 0.5 * variance)
        small = Moments(rate - y * mean + torch.lgamma(y + 1), rate - y, rate)
        return Moments(*(torch.where(y >= 1, a, b) for a, b in zip(whole, small, strict=True)))

    def checked(self, y: Tensor) -> Tensor:
        """The targets as they are."""
        return y


class BayesianRegressor(RegressorMixin, BayesianLinear):
    """What the regressors share: a predictive mean with the standard deviation of a new observation."""

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean.

        With e and v the mean and the variance of the linear predictor, it is e of a linear regression, and
        μ = exp(e + v/2) of a Poisson regression.

        Args:
            X: the rows, (n_samples, n_features).
            return_std: whether the standard deviation of a new observation is given too: √(v + noise²) of a linear
                regression, and √(μ + μ² (e^v - 1)) of a count.

        Returns:
            The means, (n_samples,), and the standard deviations if asked for.
        """
        mean, spread = (part.numpy() for part in self._predicted(*self._moments(self._rows(X))))
        return (mean, spread) if return_std else mean

    def _predicted(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of new observations."""
        raise NotImplementedError


class BayesianPoissonRegression(BayesianRegressor):
    """Poisson regression of counts, with the logarithmic link and a Gaussian posterior over the coefficients.

    Columns are centred and scaled inside, as by `BayesianLogisticRegression`, and the prior of the intercept at the
    means of the columns is N(log of the mean count, 2.5²).

    Args:
        prior_precision: "default", "flat", or "auto" for the one that the data speak for. A number is that of each
            coefficient per unit of its column; then nothing is scaled.
        fit_intercept: whether there is an intercept. Without it nothing is centred, unless X has a column of ones.
        intercept_sd: the standard deviation of its prior N(0, intercept_sd²); beside a number 10 by default.
        posterior: "cholesky", all correlations; or "diagonal" for very many columns.
        max_iter: the budget of evaluations of gradient and curvature.
        tol: on the natural-gradient norm.

    Attributes:
        coef_, intercept_, coef_sd_, intercept_sd_: means and standard deviations of the posterior.
        posterior_, prior_precision_, evidence_, elbo_, converged_, n_iter_: as those of `BayesianLogisticRegression`.

    >>> X = np.random.default_rng(0).normal(size=(200, 1))
    >>> y = np.random.default_rng(1).poisson(np.exp(1 + X[:, 0]))
    >>> mean, sd = BayesianPoissonRegression().fit(X, y).predict([[0.0]], return_std=True)
    >>> bool(2.2 < mean[0] < 3.2), bool(1.5 < sd[0] < 1.8)
    (True, True)
    """

    def _fit_targets(self, X: Array, y: Array, sample_weight: Any) -> Self:
        """Fit counts."""
        if (y < 0).any():
            raise InputError(f"y must be counts, not negative; got {float(y.min()):g} among them.")
        return self._fit(X, y, weights_of(sample_weight, X), QuasiCounts())

    def _predicted(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of new counts."""
        expected = torch.exp(mean + 0.5 * variance)
        return expected, torch.sqrt(expected + expected.square() * torch.expm1(variance))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        tags.regressor_tags.poor_score = True
        return tags


class BayesianLinearRegression(BayesianRegressor):
    """Linear regression with Gaussian noise and the exact posterior over the coefficients.

    Columns are centred and scaled inside, as by `BayesianLogisticRegression`.

    Args:
        prior_precision: "auto" for the one that the data speak for, shared by the coefficients per standard deviation
            of a column; "default" for N(0, (2.5 s_y/s)²) of the coefficient of a column, s and s_y the standard
            deviations of the column and of y; or "flat". A number is that of each coefficient per unit of its column;
            then nothing is scaled.
        noise: the standard deviation of y about its mean, or "auto" for the one that the data speak for.
        fit_intercept: whether there is an intercept. Without it nothing is centred, unless X has a column of ones.
        intercept_sd: the standard deviation of its prior N(0, intercept_sd²); by default the prior at the means of the
            columns is N(mean of y, (2.5 s_y)²), beside a number N(0, s²) with 10 times the root mean square of y.
        posterior, max_iter, tol: as those of `BayesianPoissonRegression`.

    Attributes:
        noise_: the standard deviation that was used.
        coef_, intercept_, coef_sd_, intercept_sd_: means and standard deviations of the posterior.
        posterior_, prior_precision_, evidence_, elbo_, converged_, n_iter_: as those of `BayesianLogisticRegression`.

    >>> X = np.random.default_rng(0).normal(size=(200, 1))
    >>> y = 3 + 2 * X[:, 0] + 0.5 * np.random.default_rng(1).normal(size=200)
    >>> mean, sd = BayesianLinearRegression().fit(X, y).predict([[1.0]], return_std=True)
    >>> bool(4.9 < mean[0] < 5.1), bool(0.45 < sd[0] < 0.55)
    (True, True)
    """

    def __init__(
        self,
        *,
        prior_precision: float | str = "auto",
        noise: float | str = "auto",
        fit_intercept: bool = True,
        intercept_sd: float | None = None,
        posterior: str = "cholesky",
        max_iter: int = 1000,
        tol: float = 1e-8,
    ) -> None:
        super().__init__(prior_precision, fit_intercept, intercept_sd, posterior, max_iter, tol)
        self.noise = noise

    def _fit_targets(self, X: Array, y: Array, sample_weight: Any) -> Self:
        """Fit numbers."""
        weights = weights_of(sample_weight, X)
        auto = isinstance(self.noise, str) and self.noise == "auto"
        if not auto and not is_number(self.noise, above=0):
            raise InputError(f"noise must be a positive standard deviation, or 'auto'; got {self.noise!r}.")
        sd = mean_and_sd(torch.as_tensor(y), None if weights is None else torch.as_tensor(weights))[1]
        # where all are equal something positive, from which the search can begin
        noise = (float(sd) or 1e-6 * float(np.abs(y).max()) or 1.0) if auto else float(self.noise)
        self._fit(X, y, weights, GaussianNoise(noise), noise=auto)
        assert isinstance(self.likelihood_, GaussianNoise)
        self.noise_ = self.likelihood_.noise
        return self

    def _predicted(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of new numbers."""
        return mean, torch.sqrt(variance + self.noise_**2)
