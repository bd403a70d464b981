"""What the estimators share: one linear predictor, its prior, and its Gaussian posterior."""

import math
import warnings
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from torchngvi.adapters.sklearn.arguments import (
    RandomState,
    check_sd,
    checked_count,
    generator_of,
    is_positive,
    validated,
)
from torchngvi.adapters.table_checks import numeric
from torchngvi.arguments import read_choice, read_flag
from torchngvi.diagnostics.dependence import dependences, told_dependences
from torchngvi.diagnostics.predictive import predictive_mean, predictor_moments
from torchngvi.errors import InputError
from torchngvi.evidence import Evidence, prior_by_evidence
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import GaussianNoise, Likelihood
from torchngvi.models.standardize import WIDTHS, NormalPrior, Standardization, location_and_unit, named_prior
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian

Array = np.ndarray[Any, Any]
_SHOWN = 10  # columns in a warning
AUTO = "auto"
WORDS = (*WIDTHS, AUTO)  # for a prior precision
POSTERIORS = {"cholesky": CholeskyGaussian, "diagonal": DiagonalGaussian}


class BayesianLinear(BaseEstimator):
    """What the three estimators share: one linear predictor, its prior, and its Gaussian posterior."""

    _wide: ClassVar[float] = 10.0  # sds of the intercept's prior where a number is given, in the units of the family

    posterior_: CholeskyGaussian | DiagonalGaussian
    standardization_: Standardization | None
    prior_: str
    evidence_: Evidence | None
    coef_: Array
    intercept_: Any  # a number, of a classifier (1,) or (K,)
    intercept_sd_: Any

    def __init__(
        self,
        *,
        prior_precision: float | str = "default",
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
        word = self._checked()
        warn_of_columns(X, self)
        design = self._with_intercept(X)
        self.standardization_ = None if word is None else self._units(design, weights)
        prior = self._prior(word, design, y, weights, likelihood)
        design = self._scaled(design)
        # about the origin of y, so that residuals of the fit are not differences of large numbers
        place = self._place(design.shape[1])
        origin = prior.mean.clone() if likelihood.link == "identity" else torch.zeros_like(prior.mean)
        about = NormalPrior(prior.mean - origin, prior.precision)
        model = GeneralizedLinear(
            torch.as_tensor(design),
            torch.as_tensor(y) - torch.as_tensor(design) @ origin,
            likelihood,
            prior_precision=about.precision,
            prior_mean=about.mean,
            weights=weights,
        )
        q = self._start(design, about, weights)
        self.evidence_ = None
        if word == AUTO or noise:
            columns = [[k for k in range(design.shape[1]) if k != place]] if word == AUTO else []
            self.evidence_ = prior_by_evidence(
                q, model, columns, noise=noise, max_evaluations=self.max_iter, fit_tolerance=self.tol
            )
            model, result = self.evidence_.model, self.evidence_.result
            if limits := self.evidence_.limits:
                warnings.warn(f"{limits} (prior_precision='auto')", stacklevel=3)
        else:
            result = fit(q, model, progress=False, examine=False, max_evaluations=self.max_iter, tolerance=self.tol)
        with torch.no_grad():
            q.mean.add_(origin)
        self._keep(model, NormalPrior(prior.mean, model.prior.precision), result, q, X.shape[1])
        return self

    def _checked(self) -> str | None:
        """Check the settings that all have, and return the word of the prior; None where it is a number."""
        read_choice("posterior", self.posterior, POSTERIORS, f"must be one of {', '.join(POSTERIORS)}")
        word = self.prior_precision if isinstance(self.prior_precision, str) else None
        if word not in WORDS if word is not None else not is_positive(self.prior_precision):
            raise InputError(
                f"prior_precision must be positive, or one of {', '.join(map(repr, WORDS))}; got "
                f"{self.prior_precision!r}."
            )
        check_sd("intercept_sd", self.intercept_sd)
        return word

    def _units(self, design: Array, weights: Array | None) -> Standardization:
        """The columns' centres and scales; our column of ones is the intercept, or a column of ones that is given."""
        place = design.shape[1] - 1 if self.fit_intercept else None
        return Standardization.of(torch.as_tensor(design), weights, intercept=place)

    def _prior(
        self, word: str | None, design: Array, y: Array, weights: Array | None, likelihood: Likelihood
    ) -> NormalPrior:
        """The prior of a number, per unit of the columns, or of a word in the units of the data."""
        if word is not None and self.standardization_ is not None:
            w = np.ones(len(y)) if weights is None else weights
            targets, rows, offset = (torch.as_tensor(part) for part in (y, w, np.zeros(len(y))))
            through_0 = self.standardization_.constant is None
            location, unit = location_and_unit(targets, likelihood.link, offset, rows, through_0=through_0)
            name = "default" if word == AUTO else word
            return named_prior(name, location, unit, self.standardization_, self.intercept_sd)
        unit = 1.0
        if isinstance(likelihood, GaussianNoise):
            unit = max(math.sqrt(np.average(np.square(y), weights=weights)), 1e-100)
        return self._numbered(design.shape[1], unit)

    def _numbered(self, dim: int, unit: float) -> NormalPrior:
        """The prior whose precision is a number, with a wide one of the intercept."""
        precision = torch.full((dim,), float(self.prior_precision), dtype=torch.float64)
        if self.fit_intercept:
            precision[-1] = (self.intercept_sd or self._wide * unit) ** -2
        return NormalPrior(torch.zeros_like(precision), precision)

    def _start(
        self, design: Array, prior: NormalPrior, weights: Array | None, classes: int = 2
    ) -> CholeskyGaussian | DiagonalGaussian:
        """The posterior that the fit begins with, at the mean of the prior."""
        scale = first_scale(design, prior.precision.numpy(), weights)
        dim = (classes - 1) * design.shape[1]
        return POSTERIORS[self.posterior](dim, mean=prior.mean, scale=scale, dtype=torch.float64)

    def _place(self, dim: int) -> int | None:
        """The place of the intercept among the columns of the fit."""
        if self.standardization_ is not None:
            return self.standardization_.intercept
        return dim - 1 if self.fit_intercept else None

    def _keep(
        self,
        model: GeneralizedLinear,
        prior: NormalPrior,
        result: FitResult,
        q: CholeskyGaussian | DiagonalGaussian,
        columns: int,
    ) -> None:
        """The attributes of the fit, by scikit-learn's names where it has them."""
        units, place = self.standardization_, self._place(model.dim)
        found = (q.mean, q.stddev) if units is None else units.marginals(q)
        mean, sd = (part.numpy().copy() for part in found)
        self.posterior_ = q
        self.likelihood_ = model.likelihood
        self.coef_, self.coef_sd_ = mean[:columns], sd[:columns]
        self.intercept_ = float(mean[-1]) if self.fit_intercept else 0.0
        self.intercept_sd_ = float(sd[-1]) if self.fit_intercept else 0.0
        self.prior_ = prior.describe(units, place)
        self.prior_precision_ = float(prior.precision[int(place == 0 and model.dim > 1)])
        self.elbo_ = -result.loss
        self.converged_ = result.converged
        self.n_iter_ = max(result.evaluations, 1)

    def _with_intercept(self, X: Array) -> Array:
        """The design with a column of ones at its end."""
        return with_intercept(X, self.fit_intercept)

    def _scaled(self, design: Array) -> Array:
        """The design in the units of the fit."""
        if self.standardization_ is None:
            return design
        found: Array = self.standardization_.standardize(torch.as_tensor(design)).numpy()
        return found

    def _design(self, X: Array) -> Tensor:
        """The design of new rows in the units of the fit."""
        return torch.as_tensor(self._scaled(self._with_intercept(X)))

    # -------------------------------------------------------------------------------- predicting

    def _moments(self, X: Any) -> tuple[Tensor, Tensor, Array]:
        """Mean and variance of the linear predictor of each row, and the rows."""
        check_is_fitted(self)
        X = validated(self, as_covariates(X), dtype=np.float64, reset=False)
        return *predictor_moments(self._model(), self.posterior_, self._design(X)), X

    def _model(self) -> GeneralizedLinear:
        """A model with the likelihood of the fit; its two rows are not looked at."""
        return GeneralizedLinear(
            torch.zeros((2, self.posterior_.dim), dtype=torch.float64), [0.0, 1.0], self.likelihood_
        )

    def _expected(self, X: Any) -> Array:
        """The predictive mean of each row."""
        _, _, rows = self._moments(X)
        found: Array = predictive_mean(self._model(), self.posterior_, self._design(rows)).numpy()
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
        draws = self.posterior_.sample((checked_count(n_samples),), generator=generator_of(random_state))
        return self._in_user_units(draws)

    def _in_user_units(self, draws: Tensor) -> Array:
        """Draws of the coefficients of the fit, (..., D), as those of the columns as they are."""
        found: Array = (draws if self.standardization_ is None else self.standardization_.to_user(draws)).numpy()
        return found


def as_covariates(X: Any, *, fitting: bool = False) -> Any:
    """The rows of a frame with numbers where cells stand for numbers, and a warning of what one may not expect."""
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
    """Warn of columns of which nothing is learned: the same in all rows beside an intercept, or copies of others."""
    read_flag("fit_intercept", estimator.fit_intercept)
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
