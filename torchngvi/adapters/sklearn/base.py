"""What the estimators share: one linear predictor, its prior, and its Gaussian posterior."""

import math
import warnings
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from torchngvi.adapters.sklearn.arguments import RandomState, check_sd, checked_count, generator_of, is_positive
from torchngvi.adapters.table_checks import numeric
from torchngvi.diagnostics.dependence import dependences, told_dependences
from torchngvi.diagnostics.predictive import predictive_mean, predictor_moments
from torchngvi.errors import InputError
from torchngvi.evidence import Evidence, prior_by_evidence
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import GaussianNoise, Likelihood
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian

Array = np.ndarray[Any, Any]
_SHOWN = 10  # columns in a warning
POSTERIORS = {"cholesky": CholeskyGaussian, "diagonal": DiagonalGaussian}


class BayesianLinear(BaseEstimator):
    """What the three estimators share: one linear predictor, its prior, and its Gaussian posterior."""

    _wide: ClassVar[float] = 10.0  # standard deviations of the intercept's prior, in the units of the family

    posterior_: CholeskyGaussian | DiagonalGaussian
    evidence_: Evidence | None
    coef_: Array
    intercept_: Any  # a number, of a classifier (1,) or (K,)
    intercept_sd_: Any

    def __init__(
        self,
        *,
        prior_precision: float | str = 1.0,
        fit_intercept: bool = True,
        intercept_sd: float | None = None,
        posterior: str = "cholesky",
        max_iter: int = 1000,
        tol: float = 1e-8,
    ) -> None:
        self.prior_precision = prior_precision
        self.fit_intercept = fit_intercept
        self.intercept_sd = intercept_sd
        self.posterior = posterior
        self.max_iter = max_iter
        self.tol = tol

    # -------------------------------------------------------------------------------- fitting

    def _fit(self, X: Array, y: Array, weights: Array | None, likelihood: Likelihood, *, noise: bool = False) -> Self:
        """Fit the posterior, of the prior that is given or with one by evidence."""
        auto = self._checked()
        warn_of_columns(X, self)
        design = self._with_intercept(X)
        unit = (
            max(math.sqrt(np.average(np.square(y), weights=weights)), 1e-100)
            if isinstance(likelihood, GaussianNoise)
            else 1.0
        )
        precision = np.full(design.shape[1], unit**-2 if auto else float(self.prior_precision))
        if self.fit_intercept:
            precision[-1] = (self.intercept_sd or self._wide * unit) ** -2
        model = GeneralizedLinear(
            torch.as_tensor(design), torch.as_tensor(y), likelihood, prior_precision=precision, weights=weights
        )
        start = first_scale(design, precision, weights)
        q = POSTERIORS[self.posterior](design.shape[1], scale=start, dtype=torch.float64)
        self.evidence_ = None
        if auto or noise:
            columns = [range(X.shape[1])] if auto else []
            self.evidence_ = prior_by_evidence(
                q, model, columns, noise=noise, max_evaluations=self.max_iter, fit_tolerance=self.tol
            )
            model, result = self.evidence_.model, self.evidence_.result
        else:
            result = fit(q, model, progress=False, examine=False, max_evaluations=self.max_iter, tolerance=self.tol)
        self._keep(model, result, q, X.shape[1])
        return self

    def _checked(self) -> bool:
        """Check the settings that all have; whether the prior is to be found by evidence."""
        if self.posterior not in POSTERIORS:
            raise InputError(f"posterior must be one of {', '.join(POSTERIORS)}; got {self.posterior!r}.")
        auto = isinstance(self.prior_precision, str) and self.prior_precision == "auto"
        if not auto and not is_positive(self.prior_precision):
            raise InputError(f"prior_precision must be positive, or 'auto'; got {self.prior_precision!r}.")
        check_sd("intercept_sd", self.intercept_sd)
        return auto

    def _keep(
        self, model: GeneralizedLinear, result: FitResult, q: CholeskyGaussian | DiagonalGaussian, columns: int
    ) -> None:
        """The attributes of the fit, by scikit-learn's names where it has them."""
        mean, sd = q.mean.numpy().copy(), q.stddev.numpy().copy()
        self.posterior_ = q
        self.likelihood_ = model.likelihood
        self.coef_, self.coef_sd_ = mean[:columns], sd[:columns]
        self.intercept_ = float(mean[-1]) if self.fit_intercept else 0.0
        self.intercept_sd_ = float(sd[-1]) if self.fit_intercept else 0.0
        self.prior_precision_ = float(model.prior.precision[0])
        self.elbo_ = -result.loss
        self.converged_ = result.converged
        self.n_iter_ = max(result.evaluations, 1)

    def _with_intercept(self, X: Array) -> Array:
        """The design with a column of ones at its end."""
        return with_intercept(X, self.fit_intercept)

    # -------------------------------------------------------------------------------- predicting

    def _moments(self, X: Any) -> tuple[Tensor, Tensor, Array]:
        """Mean and variance of the linear predictor of each row, and the rows."""
        check_is_fitted(self)
        X = validate_data(self, as_covariates(X), dtype=np.float64, reset=False)
        return *predictor_moments(self._model(), self.posterior_, torch.as_tensor(self._with_intercept(X))), X

    def _model(self) -> GeneralizedLinear:
        """A model with the likelihood of the fit; its two rows are not looked at."""
        return GeneralizedLinear(
            torch.zeros((2, self.posterior_.dim), dtype=torch.float64), [0.0, 1.0], self.likelihood_
        )

    def _expected(self, X: Any) -> Array:
        """The predictive mean of each row."""
        _, _, rows = self._moments(X)
        found: Array = predictive_mean(
            self._model(), self.posterior_, torch.as_tensor(self._with_intercept(rows))
        ).numpy()
        return found

    def sample_posterior(self, n_samples: int = 1000, random_state: RandomState = None) -> Array:
        """Draw coefficients from the posterior.

        Args:
            n_samples: the number of draws.
            random_state: a seed, or a ``RandomState`` of NumPy; without one the draws differ from call to call.

        Returns:
            (n_samples, n_features), with the intercept as a last column where there is one.
        """
        check_is_fitted(self)
        draws: Array = self.posterior_.sample((checked_count(n_samples),), generator=generator_of(random_state)).numpy()
        return draws


def as_covariates(X: Any, *, fitting: bool = False) -> Any:
    """The rows of a frame with numbers where cells stand for numbers, and a warning of what one may not expect.

    Args:
        X: the rows, (n_samples, n_features); arrays stay as they are.
        fitting: whether warnings are given, as at the fit.

    Returns:
        The rows.

    Raises:
        InputError: columns that are no numbers.
    """
    X, notes = numeric(X)
    for note in notes if fitting else ():
        warnings.warn(f"{note[0].upper()}{note[1:]}.", stacklevel=3)
    return X


def with_intercept(X: Array, there: bool) -> Array:
    """The design, with a column of ones at its end where there is an intercept.

    >>> with_intercept(np.zeros((2, 1)), True)
    array([[0., 1.],
           [0., 1.]])
    """
    return np.column_stack([X, np.ones(len(X))]) if there else np.ascontiguousarray(X)


def first_scale(design: Array, precision: Array, weights: Array | None) -> float:
    """A scale to start from: that of the prior, or a narrower one that keeps the predictors of order one.

    >>> first_scale(np.ones((2, 1)), np.ones(1), None)
    1.0
    """
    size = math.sqrt(np.average(np.square(design).sum(1), weights=weights))
    return min(float(precision[0]) ** -0.5, 1 / size) if size > 0 else 1.0


def warn_of_columns(X: Array, estimator: Any, *, copies: bool = True) -> None:
    """Warn of columns of which nothing is learned: the same in all rows beside an intercept, or copies of others.

    Args:
        X: the rows, (n_samples, n_features).
        estimator: with the names of the columns, where they have some.
        copies: whether copies are looked for.
    """
    names = [str(name) for name in getattr(estimator, "feature_names_in_", range(X.shape[1]))]
    if copies:
        _warn_of_copies(X, names, estimator.fit_intercept)
    same = (X[:1] == X).all(0)
    if not estimator.fit_intercept or len(X) < 2 or not same.any():
        return
    found = [f"{names[k]} = {X[0, k]:g}" for k in np.flatnonzero(same)]
    more = f", .. ({len(found)} in all)" if len(found) > _SHOWN else ""
    warnings.warn(
        f"The same in all {len(X)} rows, so that the prior alone says what the coefficient is: column "
        f"{', '.join(found[:_SHOWN])}{more}. Leave it out, as sklearn.feature_selection.VarianceThreshold does.",
        stacklevel=4,
    )


def _warn_of_copies(X: Array, names: list[str], intercept: bool) -> None:
    """Warn of columns that are one other column in other units; sums of several, as of all levels, are common."""
    varies = (X[:1] != X).any(0)
    design = torch.from_numpy(np.column_stack([np.ones(len(X)) if intercept else np.zeros(len(X)), X * varies]))
    found = [one for one in dependences(design) if len([place for place in one.of if place]) == 1]
    for sentence in told_dependences(["intercept", *names], found, 0):
        warnings.warn(f"C{sentence[1:]}", stacklevel=5)
