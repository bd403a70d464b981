"""What the estimators share, and their arguments after a check: rows, targets, weights, prior sds, and seeds."""

import math
import warnings
from collections.abc import Sequence
from numbers import Integral, Number
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, is_regressor
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from torchngvi.arguments import is_number, read_choice, read_flag, read_number, read_size, shown
from torchngvi.diagnostics.columns import dependences, describe_dependences
from torchngvi.diagnostics.predictive import predictor_moments
from torchngvi.errors import InputError
from torchngvi.evidence import Evidence, prior_by_evidence
from torchngvi.fitting.fit import fit
from torchngvi.messages import listed
from torchngvi.models import GeneralizedLinear, SoftmaxRegression
from torchngvi.models.likelihoods import GaussianNoise, Likelihood
from torchngvi.models.standardize import WIDTHS, NormalPrior, Standardization, location_and_unit, named_prior
from torchngvi.numerics.arrays import check_plain
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian
from torchngvi.tables.cells import numeric

Array = np.ndarray[Any, Any]
RandomState = int | np.random.RandomState | None  # by scikit-learn's convention, see `seed_of`


def validated(estimator: Any, X: Any, *y: Any, **options: Any) -> Any:
    """What scikit-learn's ``validate_data`` makes of rows and targets, after a check that nothing of them is masked."""
    for name, value in (("X", X), *(("y", one) for one in y)):
        check_numbers(name, value, masked=True)
    for one in y:
        _warn_of_order(X, one)
    try:
        found = validate_data(estimator, X, *y, **options)
    except OverflowError as error:
        raise InputError(f"X and y must be numbers that float64 holds ({error}).") from error
    for one in y:
        check_numbers("y", one)
    return found


def covariates(X: Any, *, fitting: bool = False) -> Any:
    """The rows of a frame with numbers where cells stand for numbers, and a warning of what one may not expect."""
    X, notes = numeric(X)
    for note in notes if fitting else ():
        warnings.warn(f"{note[0].upper()}{note[1:]}.", stacklevel=3)
    return X


def _warn_of_order(X: Any, y: Any) -> None:
    """Warn of a y whose index is that of X in another order, since rows are taken as they stand."""
    rows, labels = (getattr(value, "index", None) for value in (X, y))
    if rows is None or labels is None or callable(rows) or callable(labels) or len(rows) != len(labels):
        return
    if rows.equals(labels) or not rows.is_unique or not rows.sort_values().equals(labels.sort_values()):
        return
    warnings.warn(
        "The index of y is that of X in another order, and rows are taken as they stand, as in all of scikit-learn. "
        "Put y in the order of X: y.loc[X.index].",
        stacklevel=4,
    )


def numbers_of(y: Any) -> Any:
    """The targets of a regression as float64."""
    try:
        return y.astype(np.float64)
    except ValueError as error:
        raise InputError(
            f"y must be numbers ({error}). For classes take BayesianLogisticRegression or BayesianMixedClassifier."
        ) from error


def weights_of(sample_weight: Any, X: Any) -> Any:
    """The weights of rows, after scikit-learn's check and that of `validated`; None where there are none."""
    if sample_weight is None:
        return None
    if isinstance(sample_weight, Number):
        sample_weight = read_number("sample_weight", sample_weight, "is the weight of each row", at_least=0)
    check_numbers("sample_weight", sample_weight)
    weights = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
    return weights if weights.dtype.kind == "f" else weights.astype(np.float64)


def check_classes_weigh(classes: Any, codes: Any, weights: Any) -> None:
    """Check that each class has a row whose weight is not 0."""
    for place, total in enumerate(np.bincount(codes, weights, len(classes))):
        if not total > 0:
            raise InputError(f"all rows of the class {classes[place]} have the weight 0, as if there were none of it.")


def check_numbers(name: str, value: Any, *, masked: bool = False) -> None:
    """Refuse an array that does not say all by its numbers; of labels and rows, one with masked entries."""
    if getattr(value, "requires_grad", False) or getattr(value, "is_meta", False):
        raise InputError(f"{name} must be an array of numbers; got {shown(value)}. Pass tensor.detach().numpy().")
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if (masked and not hasattr(value, "filled")) or kind in "OSU":  # scikit-learn looks at the rest itself
        return
    try:
        check_plain(value)
    except InputError as error:
        raise InputError(f"{name} must be numbers; got {type(value).__name__} ({error}).") from error


def check_sd(name: str, value: Any) -> None:
    """Check the standard deviation of a prior."""
    if value is not None and not is_number(value, above=0):
        raise InputError(f"{name} is a standard deviation, positive, or None; got {value!r}.")
    if value is not None and not 0 < float(value) * float(value) < math.inf:
        raise InputError(f"{name} is a standard deviation; got {value!r}, whose square is 0 or infinite.")


def seed_of(random_state: RandomState) -> int:
    """A seed, by scikit-learn's convention for ``random_state``."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, bool) or not isinstance(random_state, Integral):
        raise InputError(
            f"random_state is a seed, a whole number, a numpy.random.RandomState, or None; got {random_state!r}."
        )
    return int(random_state)


# ------------------------------------------------------------------------------------ what the regressions share


AUTO = "auto"
_WORDS = (*WIDTHS, AUTO)  # for a prior precision
_POSTERIORS = {"cholesky": CholeskyGaussian, "diagonal": DiagonalGaussian}
_WIDE = 10.0  # sds of the intercept's prior where a number is given, in units of y: wide, as scikit-learn has none


class Sampled(BaseEstimator):
    """What all estimators share: draws of the coefficients."""

    def sample_posterior(self, n_samples: int = 1000, random_state: RandomState = None) -> Array:
        """Draw coefficients from the posterior, those that all groups share where there are groups.

        Args:
            n_samples: the number of draws.
            random_state: a seed, or a ``RandomState`` of NumPy; without one the draws differ from call to call.

        Returns:
            (n_samples, n_features), with the intercept as a last column where there is one; of more than two classes
            (n_samples, K, n_features), which sum to zero over the classes.
        """
        check_is_fitted(self)
        count = read_size("n_samples", n_samples, "is a number of draws", at_least=0)
        drawn: Array = self._drawn(count, torch.Generator().manual_seed(seed_of(random_state))).double().numpy()
        return drawn

    def _drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of the coefficients in the units of the columns."""
        raise NotImplementedError


class BayesianLinear(Sampled):
    """What the regressions share; see those for arguments and attributes."""

    posterior_: CholeskyGaussian | DiagonalGaussian
    standardization_: Standardization | None
    likelihood_: Likelihood
    prior_: str
    evidence_: Evidence | None
    coef_: Array
    intercept_: Any  # a number, of a classifier (1,) or (K,)
    coef_sd_: Array
    intercept_sd_: Any

    def __init__(
        self,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior.

        Args:
            X: the rows, (n_samples, n_features).
            y: of a classifier two classes or more, of a linear regression numbers, of a Poisson regression counts, or
                other numbers that are not negative, (n_samples,).
            sample_weight: a factor of the log likelihood of each row, (n_samples,).

        Returns:
            The estimator.

        Raises:
            InputError: targets of another kind, settings out of range, a class without rows of positive weight.
        """
        numeric = is_regressor(self)
        X, y = validated(self, covariates(X, fitting=True), y, dtype=np.float64, y_numeric=numeric)
        return self._fit_targets(X, numbers_of(y) if numeric else y, sample_weight)

    def _fit_targets(self, X: Array, y: Array, sample_weight: Any) -> Self:
        """Fit the likelihood of the estimator to targets that are of its kind."""
        raise NotImplementedError

    def _fit(self, X: Array, y: Array, weights: Array | None, likelihood: Likelihood, *, noise: bool = False) -> Self:
        """Fit the posterior, of the prior that is given or with one by evidence."""
        word, design, place = self._prepared(X, weights)
        targets = torch.as_tensor(y)
        prior = self._prior(word, design.shape[1], targets, weights, likelihood)
        # about the origin of y, so that residuals of the fit are not differences of large numbers
        origin = prior.mean.clone() if likelihood.link == "identity" else torch.zeros_like(prior.mean)
        about = NormalPrior(prior.mean - origin, prior.precision)
        model = GeneralizedLinear(
            design,
            targets - design @ origin,
            likelihood,
            prior_precision=about.precision,
            prior_mean=about.mean,
            weights=weights,
        )
        q = self._start(design, about, weights)
        if word != AUTO and not noise:
            self._search(q, model)
        else:
            columns = [[k for k in range(design.shape[1]) if k != place]] if word == AUTO else []
            self.evidence_ = prior_by_evidence(
                q, model, columns, noise=noise, max_evaluations=self.max_iter, fit_tolerance=self.tol
            )
            model, result = self.evidence_.model, self.evidence_.result
            self.elbo_, self.converged_, self.n_iter_ = -result.loss, result.converged, max(result.evaluations, 1)
            if limits := self.evidence_.limits:
                warnings.warn(f"{limits} (prior_precision='auto')", stacklevel=4)
        with torch.no_grad():
            q.mean.add_(origin)
        units = self.standardization_
        self.likelihood_ = model.likelihood
        self._keep((q.mean, q.stddev) if units is None else units.marginals(q), X.shape[1])
        self._tell(NormalPrior(prior.mean, model.prior.precision), place)
        return self

    def _prepared(self, X: Array, weights: Array | None) -> tuple[str | None, Tensor, int | None]:
        """Check the settings; find the word of the prior, the design in the units of the fit, and its intercept."""
        read_choice("posterior", self.posterior, _POSTERIORS, f"must be one of {', '.join(_POSTERIORS)}")
        word = self.prior_precision if isinstance(self.prior_precision, str) else None
        if word not in _WORDS if word is not None else not is_number(self.prior_precision, above=0):
            raise InputError(
                f"prior_precision must be positive, or one of {', '.join(map(repr, _WORDS))}; got "
                f"{self.prior_precision!r}."
            )
        check_sd("intercept_sd", self.intercept_sd)
        warn_of_columns(X, self, [str(name) for name in getattr(self, "feature_names_in_", range(X.shape[1]))])
        self.evidence_ = None
        design = torch.as_tensor(with_intercept(X, self.fit_intercept))
        place = X.shape[1] if self.fit_intercept else None
        if word is None:
            self.standardization_ = None
            return word, design, place
        units = self.standardization_ = Standardization.of(design, weights, intercept=place)
        return word, units.standardize(design), units.intercept

    def _prior(
        self, word: str | None, dim: int, y: Tensor, weights: Array | None, likelihood: Likelihood | None
    ) -> NormalPrior:
        """The prior of a number, per unit of the columns, or of a word in the units of the data."""
        units, w = self.standardization_, torch.ones_like(y) if weights is None else torch.as_tensor(weights)
        if units is not None and likelihood is not None:
            through_0 = units.constant is None
            location, unit = location_and_unit(y, likelihood.link, torch.zeros_like(y), w, through_0=through_0)
            return named_prior("default" if word == AUTO else str(word), location, unit, units, self.intercept_sd)
        gaussian = isinstance(likelihood, GaussianNoise)
        unit = max(math.sqrt(np.average(y.square().numpy(), weights=weights)), 1e-100) if gaussian else 1.0
        precision = torch.full((dim,), float(self.prior_precision), dtype=torch.float64)
        if self.fit_intercept:
            precision[-1] = (self.intercept_sd or _WIDE * unit) ** -2
        return NormalPrior(torch.zeros_like(precision), precision)

    def _start(self, design: Tensor, prior: NormalPrior, weights: Array | None) -> CholeskyGaussian | DiagonalGaussian:
        """The posterior that a fit begins with: at the prior mean, as wide as keeps the predictors of order one."""
        size = math.sqrt(np.average(design.square().sum(1).numpy(), weights=weights))
        scale = min(float(prior.precision[0]) ** -0.5, 1 / size) if size > 0 else 1.0
        self.posterior_ = _POSTERIORS[self.posterior](
            len(prior.mean), mean=prior.mean, scale=scale, dtype=torch.float64
        )
        return self.posterior_

    def _search(self, q: CholeskyGaussian | DiagonalGaussian, model: GeneralizedLinear | SoftmaxRegression) -> None:
        """Find the best q, in place."""
        result = fit(q, model, progress=False, examine=False, max_evaluations=self.max_iter, tolerance=self.tol)
        self.elbo_, self.converged_, self.n_iter_ = -result.loss, result.converged, max(result.evaluations, 1)

    def _keep(self, found: tuple[Any, Any], columns: int) -> None:
        """The coefficients of the columns, (..., D) means and sds of the fit, and apart from them the intercept."""
        mean, sd = (part.numpy().copy() for part in found)
        self.coef_, self.coef_sd_ = mean[..., :columns], sd[..., :columns]
        last = [part[..., -1] * bool(self.fit_intercept) for part in (mean, sd)]
        self.intercept_, self.intercept_sd_ = last if mean.ndim > 1 else map(float, last)

    def _tell(self, prior: NormalPrior, place: int | None) -> None:
        """Keep what the prior was."""
        self.prior_ = prior.describe(self.standardization_, place)
        self.prior_precision_ = float(prior.precision[int(place == 0 and len(prior.precision) > 1)])

    # -------------------------------------------------------------------------------- predicting

    def _rows(self, X: Any) -> Tensor:
        """The design of new rows in the units of the fit."""
        check_is_fitted(self)
        rows = validated(self, covariates(X), dtype=np.float64, reset=False)
        design = torch.as_tensor(with_intercept(rows, self.fit_intercept))
        return design if self.standardization_ is None else self.standardization_.standardize(design)

    def _moments(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the linear predictor of each row."""
        return predictor_moments(self._model(), self.posterior_, rows)

    def _model(self) -> GeneralizedLinear:
        """A model with the likelihood of the fit; its two rows are not looked at."""
        empty = torch.zeros((2, self.posterior_.dim), dtype=torch.float64)
        return GeneralizedLinear(empty, [0.0, 1.0], self.likelihood_)

    def _drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of the coefficients in the units of the columns."""
        draws = self._of_classes(self.posterior_.sample((count,), generator=generator))
        return draws if self.standardization_ is None else self.standardization_.to_user(draws)

    def _of_classes(self, draws: Tensor) -> Tensor:
        """Coefficients of all classes; there is one set of them."""
        return draws


def with_intercept(X: Array, there: bool) -> Array:
    """The design, with a column of ones at its end where there is an intercept."""
    return np.column_stack([X, np.ones(len(X))]) if there else np.ascontiguousarray(X)


def warn_of_columns(X: Array, estimator: Any, names: Sequence[str]) -> None:
    """Warn of columns of which nothing is learned: the same in all rows beside an intercept, or copies of others."""
    there = read_flag("fit_intercept", estimator.fit_intercept)
    same = (X[:1] == X).all(0)
    design = torch.from_numpy(np.column_stack([np.full(len(X), float(there)), X * ~same]))
    # sums of several, as of all levels, are common
    found = [one for one in dependences(design) if len([place for place in one.of if place]) == 1]
    for sentence in describe_dependences(["intercept", *names], found, 0):
        warnings.warn(f"C{sentence[1:]}", stacklevel=6)
    if there and len(X) > 1 and same.any():
        alike = listed([f"{names[k]} = {X[0, k]:g}" for k in np.flatnonzero(same).tolist()])
        warnings.warn(
            f"The same in all {len(X)} rows, so that the prior alone says what the coefficient is: column {alike}. "
            "Leave it out, as sklearn.feature_selection.VarianceThreshold does.",
            stacklevel=6,
        )
