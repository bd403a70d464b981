"""Estimators of scikit-learn: what they share, linear, Poisson and logistic regression, and mixed models."""

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral, Number
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_regressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted, validate_data
from torch import Tensor

from torchngvi.arguments import is_number, read_choice, read_flag, read_list, read_number, read_size, shown
from torchngvi.diagnostics.predictive import log_predictive_density, predictive_mean, predictor_moments
from torchngvi.errors import InputError
from torchngvi.evidence import Evidence, prior_by_evidence
from torchngvi.fitting.fit import fit
from torchngvi.messages import listed
from torchngvi.models import GeneralizedLinear, SoftmaxRegression, checks
from torchngvi.models.likelihoods import BernoulliLogit, GaussianNoise, Likelihood, PoissonLog
from torchngvi.models.standardize import (
    WIDTHS,
    NormalPrior,
    Standardization,
    location_and_unit,
    mean_and_sd,
    named_prior,
)
from torchngvi.numerics.arrays import check_plain
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian
from torchngvi.tables.cells import check_names, numeric
from torchngvi.tables.columns import dependences, describe_dependences
from torchngvi.tables.design import check_once
from torchngvi.tables.effects import Prediction
from torchngvi.tables.families import FAMILIES, Family, family_of
from torchngvi.tables.globals import FitSettings
from torchngvi.tables.model import TableModel
from torchngvi.tables.parts import Design, Factor
from torchngvi.tables.priors import Normal
from torchngvi.tables.result import TableResult

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "posterior_" in state and "standardization_" not in state:  # of 0.2.0, whose coefficients are per unit
            state = {**dict.fromkeys(("standardization_", "class_weight")), **state}
        super().__setstate__(state)

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


# ------------------------------------------------------------------------------------ regressors


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
        fit_intercept, intercept_sd, posterior, max_iter, tol: as those of `BayesianLogisticRegression`.

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
        intercept_sd: the standard deviation of the intercept's prior N(0, intercept_sd²); by default the prior at the
            means of the columns is N(mean of y, (2.5 s_y)²), beside a number N(0, s²) with 10 times the root mean
            square of y.
        fit_intercept, posterior, max_iter, tol: as those of `BayesianLogisticRegression`.

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


# ------------------------------------------------------------------------------------ classifiers
# Of K > 2 classes the likelihood is softmax, and no class is a baseline: the K coefficients of each column have
# independent priors N(0, 1/τ), as those of scikit-learn's ``LogisticRegression`` with C = 1/τ.  The differences to the
# first class, which the likelihood has, then have the precision τ (I - 11ᵀ/K), and what is predicted does not depend on
# which class comes first.


class BayesianLogisticRegression(ClassifierMixin, BayesianLinear):
    """Logistic regression of two or more classes with a Gaussian posterior over the coefficients.

    Columns are centred and scaled inside, so that their units and origins do not matter: the prior is N(0, (2.5/s)²) of
    the coefficient of a column with the standard deviation s, and N(logit of the share of successes, 2.5²) of the
    intercept at the means of the columns (see `torchngvi.models.standardize`). Of more than two classes it is the
    softmax likelihood, each class has coefficients of its own, and that prior is the one of the difference between any
    two classes, so that none of them is a baseline. Probabilities are averaged over the posterior, not taken at its
    mean.

    Args:
        prior_precision: "default", "flat", or of two classes "auto" for the one that the data speak for, see
            `torchngvi.prior_by_evidence`. A number is that of each coefficient per unit of its column, as 1/C of
            scikit-learn's ``LogisticRegression`` is; then nothing is scaled.
        fit_intercept: whether there is an intercept. Without it nothing is centred, unless X has a column of ones.
        intercept_sd: the standard deviation of its prior N(0, intercept_sd²); beside a number 10 by default.
        posterior: "cholesky", all correlations; or "diagonal" for very many columns.
        max_iter: the budget of evaluations of gradient and curvature.
        tol: on the natural-gradient norm.
        class_weight: factors of the log likelihood of the rows of each class, a dict or "balanced", as scikit-learn's.

    Attributes:
        classes_: the K classes; of two the second is the success.
        coef_, intercept_: means of the posterior, of two classes (1, n_features) and (1,), of more (K, n_features) and
            (K,), which sum to zero over the classes.
        coef_sd_, intercept_sd_: its standard deviations, of two classes (n_features,) and a number, of more as the
            means.
        posterior_: the posterior itself, over the coefficients of the columns of the fit; of more than two classes over
            the differences to the first.
        standardization_: how the columns of the fit are made of those of X; None where a number is the precision.
        prior_: the prior in a line.
        prior_precision_, evidence_: the precision that was used in the units of the fit, and how it was found.
        elbo_, converged_, n_iter_: the evidence lower bound, whether it is at its maximum, and the evaluations.

    >>> X = np.random.default_rng(0).normal(size=(100, 2))
    >>> y = np.where(X[:, 0] > 0, "up", "down")
    >>> model = BayesianLogisticRegression().fit(X, y)
    >>> model.predict([[2.0, 0.0]]).tolist(), model.predict_proba([[2.0, 0.0]]).shape
    (['up'], (1, 2))
    >>> three = np.where(X[:, 1] > 1, "far", y)
    >>> BayesianLogisticRegression().fit(X, three).predict([[0.0, 3.0]]).tolist()
    ['far']
    """

    def __init__(
        self,
        *,
        prior_precision: float | str = "default",
        fit_intercept: bool = True,
        intercept_sd: float | None = None,
        posterior: str = "cholesky",
        max_iter: int = 1000,
        tol: float = 1e-8,
        class_weight: Any = None,
    ) -> None:
        super().__init__(prior_precision, fit_intercept, intercept_sd, posterior, max_iter, tol)
        self.class_weight = class_weight

    def _fit_targets(self, X: Array, y: Array, sample_weight: Any) -> Self:
        """Fit two classes or more."""
        codes, weights = coded(self, X, y, sample_weight)
        if len(self.classes_) < 2:
            raise InputError(f"y has one class, {self.classes_[0]}; the classifier needs two.")
        if len(self.classes_) > 2:
            return self._fit_several(X, codes, weights)
        self._fit(X, codes.astype(np.float64), weights, BernoulliLogit())
        self.coef_, self.intercept_ = self.coef_[None], np.array([self.intercept_])
        return self

    def _fit_several(self, X: Array, codes: Array, weights: Array | None) -> Self:
        """Fit the softmax likelihood of more than two classes."""
        if self.prior_precision == AUTO:
            raise InputError(
                "Only binary classification is supported. The type of the target is multiclass. It is so with "
                "prior_precision='auto': choose a number, for instance by sklearn.model_selection.GridSearchCV."
            )
        word, design, place = self._prepared(X, weights)
        units, classes = self.standardization_, len(self.classes_)
        means = torch.zeros(classes - 1, design.shape[1], dtype=torch.float64)
        if word is None or units is None:
            prior = self._prior(word, design.shape[1], torch.as_tensor(codes), weights, None)
        else:  # of the difference of any two classes what it is of two
            prior = named_prior(word, 0.0, 1.0, units)
            prior.precision.mul_(2)
            if place is not None and self.intercept_sd is not None:
                prior.precision[place] = self.intercept_sd**-2
            else:
                means = log_odds(codes, weights)[:, None] * units.level(1.0)
        model = softmax_model(design, codes, prior.precision, weights, means.flatten())
        self._search(self._start(design, NormalPrior(means.flatten(), prior.precision), weights), model)
        mean, root = self._of_classes(self.posterior_.mean), self.posterior_.frame().dense()
        spread = self._of_classes(root.mT).movedim(0, -1)  # (K, D, (K - 1) D)
        if units is not None:
            mean, spread = units.to_user(mean), units.to_user(spread, -2)
        self._keep((mean, spread.square().sum(-1).sqrt()), X.shape[1])
        self._tell(prior, place)
        self.prior_ = f"of each class: {self.prior_}"
        return self

    def _of_classes(self, draws: Tensor) -> Tensor:
        """Coefficients of all K > 2 classes, (..., K, D), which sum to zero, of differences (..., (K - 1) D)."""
        classes = len(self.classes_)
        if classes == 2:
            return draws
        centring = torch.eye(classes, dtype=torch.float64) - 1 / classes
        return centring[:, 1:] @ draws.unflatten(-1, (classes - 1, -1))

    def _softmax(self, rows: Tensor) -> SoftmaxRegression:
        """A model with the classes of the fit, whose rows are not looked at."""
        codes = np.arange(len(self.classes_))
        return softmax_model(torch.zeros(len(codes), rows.shape[1]).double(), codes, torch.ones(rows.shape[1]), None)

    def predict_proba(self, X: Any) -> Array:
        """The probabilities of the classes, averaged over the posterior.

        Args:
            X: the rows, (n_samples, n_features).

        Returns:
            (n_samples, K), in the order of ``classes_``.
        """
        rows = self._rows(X)
        if len(self.classes_) > 2:
            found: Array = self._softmax(rows).probabilities(self.posterior_, rows).numpy()
            return found
        success = predictive_mean(self._model(), self.posterior_, rows).numpy()
        return np.column_stack([1 - success, success])

    def decision_function(self, X: Any) -> Array:
        """A number that is the larger the likelier a class is.

        Args:
            X: the rows, (n_samples, n_features).

        Returns:
            Of two classes the log odds of the second, averaged over the posterior as those of `predict_proba`,
            (n_samples,); of more the logarithms of `predict_proba`, (n_samples, K).
        """
        rows = self._rows(X)
        if len(self.classes_) > 2:
            scores: Array = self._softmax(rows).probabilities(self.posterior_, rows).clamp_min(0).log().numpy()
            return scores
        no = torch.zeros(len(rows), dtype=rows.dtype)
        success, failure = (log_predictive_density(self._model(), self.posterior_, rows, y) for y in (no + 1, no))
        found: Array = (success - failure).numpy()
        return found

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The likeliest class.

        Args:
            X: the rows, (n_samples, n_features).
            return_std: whether the standard deviation of the probability of that class under the posterior is given
                too.

        Returns:
            The classes, (n_samples,), and the standard deviations if asked for.
        """
        rows = self._rows(X)
        if len(self.classes_) > 2:
            model = self._softmax(rows)
            place = model.probabilities(self.posterior_, rows).argmax(1)
            sd = model.probabilities_sd(self.posterior_, rows) if return_std else None
            chosen = self.classes_[place.numpy()]
            return chosen if sd is None else (chosen, sd.gather(1, place[:, None])[:, 0].numpy())
        mean, variance = self._moments(rows)
        chosen = self.classes_[(mean > 0).numpy().astype(int)]
        return (chosen, _sd_of_sigmoid(mean, variance)) if return_std else chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = self.prior_precision != AUTO
        return tags


def coded(estimator: Any, X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array | None]:
    """The numbers of the classes of the rows, which become ``classes_``, and the weights of rows and classes."""
    check_classification_targets(y)
    estimator.classes_, codes = np.unique(y, return_inverse=True)
    weights, words = weights_of(sample_weight, X), estimator.class_weight
    for place, total in enumerate(np.bincount(codes, weights)):
        if not total > 0:
            name = estimator.classes_[place]
            raise InputError(f"all rows of the class {name} have the weight 0, as if there were none of it.")
    if words is None:
        return codes, weights
    of_classes = compute_class_weight(words, classes=estimator.classes_, y=y)
    if isinstance(words, str):  # balanced, with the weights that rows have
        counts = np.bincount(codes, weights)
        of_classes = counts.sum() / (len(counts) * counts)
    return codes, of_classes[codes] if weights is None else weights * of_classes[codes]


def softmax_model(
    design: Tensor, codes: Array, precision: Tensor, weights: Array | None, mean: Any = 0.0, nodes: int = 512
) -> SoftmaxRegression:
    """The model of K classes 0, ..., K - 1."""
    # nodes: of the rule for more than three classes
    classes = int(codes.max()) + 1
    between = torch.eye(classes - 1, dtype=torch.float64) - 1 / classes
    return SoftmaxRegression(
        design,
        torch.as_tensor(codes.astype(np.float64)),
        prior_precision=torch.kron(between, torch.diag(precision.double())),
        prior_mean=mean,
        weights=weights,
        num_nodes=max(nodes, 2 * classes),
    )


def log_odds(codes: Array, weights: Array | None) -> Tensor:
    """The logarithms of the shares of classes 1, ..., K - 1 over that of class 0, (K - 1,)."""
    count = np.bincount(codes, weights).astype(np.float64)
    share = np.maximum(count / count.sum(), 0.5 / (len(codes) + 1))
    return torch.as_tensor(np.log(share[1:] / share[0]))


def _sd_of_sigmoid(mean: Tensor, variance: Tensor) -> Array:
    """The standard deviation of 1/(1 + e^-η), η ~ N(e, v), by the trapezoid rule."""
    z = torch.linspace(-8, 8, 129, dtype=mean.dtype)
    weights = torch.softmax(-0.5 * z.square(), 0)
    p = torch.sigmoid(mean[:, None] + variance.sqrt()[:, None] * z)
    found: Array = ((p - (p @ weights)[:, None]).square() @ weights).sqrt().numpy()
    return found


# ------------------------------------------------------------------------------------ mixed models


class _Mixed(Sampled):
    """What both estimators share: rows, their groups, and the effects that vary over these."""

    result_: TableResult
    groups_: Array
    _columns: list[Any]  # names or numbers of the covariates

    def __init__(
        self,
        groups: str | int | None = None,
        slopes: Sequence[str | int] = (),
        fit_intercept: bool = True,
        prior_sd: float | None = None,
        priors: Mapping[str, Any] | str | None = None,
        draws: int = 4096,
        random_state: RandomState = 0,
    ) -> None:
        self.groups = groups
        self.slopes = slopes
        self.fit_intercept = fit_intercept
        self.prior_sd = prior_sd
        self.priors = priors
        self.draws = draws
        self.random_state = random_state

    # -------------------------------------------------------------------------------- rows and groups

    def _split(self, X: Any, groups: Any, *, fitting: bool = False) -> tuple[Any, Array]:
        """The covariates, and the label of the group of each row, after scikit-learn's checks of X."""
        column = self.groups if groups is None else None
        if groups is None and column is None:
            raise InputError(
                "a mixed model needs the group of each row: name the column, groups='patient', or pass "
                "fit(X, y, groups=...) and predict(X, groups=...)."
            )
        if groups is None and (isinstance(column, bool) or not isinstance(column, str | Integral)):
            raise InputError(f"groups is the name or the number of one column; got {column!r}.")
        named = hasattr(X, "columns")
        if named:
            check_names(X.columns, "X")
        else:
            check_numbers("X", X, masked=True)
            least = 2 if fitting and groups is None else 1
            X = check_array(X, dtype=None, ensure_all_finite=False, ensure_min_features=least, estimator=self)
        validate_data(self, X, skip_check_array=True, reset=fitting)
        if groups is not None:
            check_numbers("groups", groups, masked=True)
            labels = np.asarray(groups)
        else:
            place = list(X.columns).index(column) if named and column in X.columns else column
            if not isinstance(place, Integral) or not -X.shape[1] <= place < X.shape[1]:
                known = f"X has {', '.join(map(str, X.columns))}" if named else f"X has {X.shape[1]} columns, no names"
                raise InputError(f"groups names the column {column!r}; {known}.")
            labels = X.iloc[:, place].to_numpy() if named else X[:, place]
            X = X.iloc[:, np.delete(np.arange(X.shape[1]), place)] if named else np.delete(X, place, 1)
        if labels.shape != (len(X),):
            raise InputError(f"groups must be one label for each of the {len(X)} rows; got shape {labels.shape}.")
        if any(label is None or label != label for label in labels.tolist()):  # NaN is not itself
            raise InputError("the group of a row is missing. Leave the row out, or give it a group of its own.")
        if len({isinstance(label, str) for label in labels.tolist()}) > 1:
            raise InputError("labels of groups must all be texts or all be numbers; got both.")
        if not X.shape[1]:
            raise InputError("X has no column beside that of the groups; a mixed regression has one covariate or more.")
        return X, labels

    def _varying(self, X: Array) -> Array:
        """The design of the effects that vary: a column of ones, and the covariates whose slopes vary."""
        what = "is a list of columns, such as ['week'], or an empty one"
        slopes = read_list("slopes", self.slopes, what)
        fine = all(isinstance(name, str | Integral) and not isinstance(name, bool) for name in slopes)
        if not fine or len(set(slopes)) < len(slopes):
            raise InputError(f"slopes {what}; got {shown(self.slopes)}.")
        if lacking := [name for name in slopes if name not in self._columns]:
            raise InputError(f"slopes names {lacking[0]!r}; the columns are {', '.join(map(str, self._columns))}.")
        return np.column_stack([np.ones(len(X)), *(X[:, self._columns.index(name)] for name in slopes)])

    # -------------------------------------------------------------------------------- fitting

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Fit the posterior.

        Args:
            X: the rows, (n_samples, n_features), with the column of the groups where it has a name or a number.
            y: numbers or counts as the family has them, of a classifier two classes, (n_samples,).
            groups: the label of the group of each row, (n_samples,), in place of a column.
            sample_weight: a factor of the log likelihood of each row, (n_samples,).

        Returns:
            The estimator.

        Raises:
            InputError: another family, more classes than two or one, groups that are not there or miss labels, slopes
                that are no columns; and as `torchngvi.MixedModel`.
        """
        numeric = is_regressor(self)
        rows, labels = self._split(X, groups, fitting=True)
        names = list(getattr(rows, "columns", ()))
        self._columns = names if names and all(isinstance(name, str) for name in names) else [*range(rows.shape[1])]
        rows, y = validated(self, covariates(rows, fitting=True), y, dtype=np.float64, y_numeric=numeric)
        validate_data(self, X, skip_check_array=True)  # the columns are those of X, that of the groups among them
        family, y, weights = self._outcome(rows, numbers_of(y) if numeric else y, sample_weight)
        check_sd("prior_sd", self.prior_sd)
        read_flag("fit_intercept", self.fit_intercept)
        if self.prior_sd is not None and self.priors is not None:
            raise InputError("prior_sd is short for priors={'b': Normal(0, sd), 'Intercept': Normal(0, sd)}: give one.")
        self.seed_ = seed_of(self.random_state)
        if (
            weights is not None and weights.any() and not weights.all()
        ):  # rows of weight 0 are not there, and their groups are new
            rows, y, labels, weights = (part[weights > 0] for part in (rows, y, labels, weights))
        self.groups_, index = np.unique(labels, return_inverse=True)
        self.result_ = self._fitted(rows, torch.as_tensor(y), weights, torch.as_tensor(index), family)
        found = self.result_.summary()
        mean, sd = (part.double().numpy().copy() for part in (found.fixed.mean, found.fixed.sd))
        columns = len(self._columns)
        self.coef_, self.coef_sd_ = mean[:columns], sd[:columns]
        self.intercept_, self.intercept_sd_ = (float(part[columns:].sum()) for part in (mean, sd))
        self.group_sd_ = found.sd.mean.double().numpy().copy()
        self.effects_ = np.column_stack([effect.mean.double().numpy() for effect in self.result_.effects().only])
        self.log_evidence_, self.converged_ = self.result_.log_evidence, self.result_.converged
        self.n_iter_ = max(self.result_.fitted.gradients, 1)
        if not self.converged_:
            warnings.warn(f"The fit has not converged: {self.result_.reason}", ConvergenceWarning, stacklevel=2)
        return self

    def _outcome(self, X: Array, y: Array, sample_weight: Any) -> tuple[Family, Array, Array | None]:
        """The family, the outcome in its coding, and the weights of the rows."""
        raise NotImplementedError

    def _fitted(
        self, X: Array, y: torch.Tensor, weights: Array | None, index: torch.Tensor, family: Family
    ) -> TableResult:
        """Fit the model; a column that is the same in all rows, as in a fold, is one that its prior alone knows."""
        name = str(self.groups) if isinstance(self.groups, str) else "group"
        Z, effects = torch.as_tensor(self._varying(X)), ("Intercept", *map(str, self.slopes))
        there = ("Intercept",) if self.fit_intercept else ()
        check_once(("Intercept", *map(str, self._columns)), "X")
        rows = torch.as_tensor(with_intercept(X, self.fit_intercept))
        design = Design(
            rows,
            (*map(str, self._columns), *there),
            (Factor(name, effects, tuple(map(str, self.groups_)), Z, index),),
            torch.zeros(len(X), dtype=torch.float64),
            (y,),
            checks.row_weights(weights, y, rows),
        )
        own = None if self.prior_sd is None else dict.fromkeys(("b", *there), Normal(0.0, self.prior_sd))
        model = TableModel(design, family, priors=self.priors if own is None else own)
        settings = FitSettings(exact=None)  # it is a warning here, as of any fit that has not converged
        return model.fit(draws=self.draws, seed=self.seed_, progress=False, settings=settings)

    # -------------------------------------------------------------------------------- predicting

    def _predicted(self, X: Any, groups: Any, kind: str) -> Prediction:
        """Predict new rows; each label that the fit had not is a group of its own, drawn from the distribution."""
        check_is_fitted(self)
        rows, labels = self._split(X, groups)
        rows = check_array(covariates(rows), dtype=np.float64, estimator=self, input_name="X")
        kinds = [{isinstance(label, str) for label in some.tolist()} for some in (self.groups_, labels)]
        if len(labels) and not kinds[0] & kinds[1]:  # as numbers that have become text in a file
            raise InputError(
                f"the groups of the fit are as {self.groups_.tolist()[0]!r}, those of these rows as "
                f"{labels.tolist()[0]!r}, so that all would be new. Convert the column, by astype(int) or astype(str)."
            )
        number: dict[Any, int] = {label: i for i, label in enumerate(self.groups_.tolist())}
        index = [number.setdefault(label, len(self.groups_) - 1 - len(number)) for label in labels.tolist()]
        design, varying = with_intercept(rows, self.fit_intercept), self._varying(rows)
        return self.result_.predict(design, varying, torch.tensor(index), kind=kind, seed=self.seed_)

    def _drawn(self, count: int, generator: torch.Generator) -> torch.Tensor:
        theta = self.result_.fitted.weighted.resampled(count, generator)
        return self.result_.fitted.coordinates.to_user(theta).coefficients


class BayesianMixedRegressor(RegressorMixin, _Mixed):
    """Mixed-effects regression of numbers or counts: rows in groups, whose levels and perhaps slopes vary.

    Use it for repeated measurements, where a regression that takes the rows for independent gives intervals that are
    too narrow. The effects of groups are drawn towards each other as much as the data say, and integrated out, so that
    the intervals of the coefficients and of the spread between groups are theirs. It is `torchngvi.MixedModel` with
    scikit-learn's conventions; ``result_`` is what that returns.

    Args:
        groups: the column of the groups, by name of a frame's column or by number of an array's; it is no covariate.
            Without it ``fit(X, y, groups=...)`` and ``predict(X, groups=...)`` take one label a row.
        family: "gaussian", "student_t", "poisson", "negative_binomial", a zero-inflated or hurdle family of counts,
            "beta", "gamma", or a `torchngvi.tables.Family` of an outcome alone; its parameters are learned.
        slopes: the columns whose coefficients vary over groups too, by name, or by number once the groups are out.
        fit_intercept: whether there is an intercept that all groups share.
        prior_sd: the prior standard deviation of each coefficient and of the intercept at the means of the columns,
            about 0; by default 2.5 standard deviations of y over one of the column, and for the intercept about the
            mean of y on the scale of the link.
        priors: by name, as `torchngvi.regression` takes them, such as {"week": Normal(0, 1), "1|patient": HalfT(3, 1)}.
        draws: the number of weighted draws of what all groups share; predictions are averages over 1,000 of them.
        random_state: the seed of all draws, a ``RandomState`` of NumPy, or None for a fresh seed at each fit.

    Attributes:
        coef_, intercept_, coef_sd_, intercept_sd_: means and standard deviations of the posterior, in the order of the
            columns without that of the groups.
        group_sd_: posterior means of the standard deviations between groups, of the intercept and of each slope.
        groups_, effects_: the labels of the groups, (n,), and the posterior means of their effects, (n, 1 + slopes).
        result_: the `torchngvi.tables.TableResult`, with a table, k-hat, draws and pictures.
        log_evidence_: log p(y) in nats.
        converged_, n_iter_: whether the mode of what all groups share was found, and the gradients that it took.
        seed_: the seed of all draws, of the fit and of predictions.

    >>> import pandas
    >>> draw = np.random.default_rng(0)
    >>> visits = pandas.DataFrame({"week": np.tile(np.arange(4.0), 30), "patient": np.repeat(np.arange(30), 4)})
    >>> y = 2 + visits.week + draw.normal(size=30)[visits.patient] + 0.5 * draw.normal(size=120)
    >>> model = BayesianMixedRegressor(groups="patient").fit(visits, y)
    >>> bool(0.9 < model.coef_[0] < 1.1), bool(0.7 < model.group_sd_[0] < 1.4), model.effects_.shape
    (True, True, (30, 1))
    >>> new = pandas.DataFrame({"week": [4.0, 4.0], "patient": [3, 99]})  # a patient of the data, and a new one
    >>> mean, sd = model.predict(new, return_std=True)
    >>> bool(sd[0] < sd[1])
    True
    """

    def __init__(
        self,
        groups: str | int | None = None,
        *,
        family: str | Family = "gaussian",
        slopes: Sequence[str | int] = (),
        fit_intercept: bool = True,
        prior_sd: float | None = None,
        priors: Mapping[str, Any] | str | None = None,
        draws: int = 4096,
        random_state: RandomState = 0,
    ) -> None:
        super().__init__(groups, slopes, fit_intercept, prior_sd, priors, draws, random_state)
        self.family = family

    def _outcome(self, X: Array, y: Array, sample_weight: Any) -> tuple[Family, Array, Array | None]:
        family = family_of(self.family)
        if not _alone(family):
            known = ", ".join(name for name, kind in FAMILIES.items() if _alone(kind))
            raise InputError(
                f"a regressor has a family of one outcome that is a number, of {known}; got {self.family!r}. Of two "
                "classes take BayesianMixedClassifier, of others torchngvi.mixed."
            )
        return family, y, weights_of(sample_weight, X)

    def predict(self, X: Any, groups: Any = None, return_std: bool = False) -> Any:
        """The predictive mean, given the effects of the row's group; of a group that is new, over all that it may have.

        Args:
            X: the rows, (n_samples, n_features), with the column of the groups where it has a name or a number.
            groups: the label of the group of each row, (n_samples,), in place of a column.
            return_std: whether the standard deviation of a new observation is given too.

        Returns:
            The means, (n_samples,), and the standard deviations if asked for.
        """
        mean: Array = self._predicted(X, groups, "mean").mean.double().numpy()
        return (mean, self._predicted(X, groups, "response").sd.double().numpy()) if return_std else mean


def _alone(family: Family | type[Family]) -> bool:
    """Whether outcomes of a family are numbers that stand alone, and no classes."""
    classes = family.discrete and family.link in ("logit", "probit")
    return not family.extra and family.intercept and not classes


class BayesianMixedClassifier(ClassifierMixin, _Mixed):
    """Mixed-effects logistic regression of two classes: rows in groups, whose levels and perhaps slopes vary.

    It is to `BayesianLogisticRegression` what `BayesianMixedRegressor` is to linear regression, and has the attributes
    of that.

    Args:
        groups, slopes, fit_intercept, prior_sd, priors, draws, random_state: as those of `BayesianMixedRegressor`.
        class_weight: factors of the log likelihood of the rows of each class, a dict or "balanced", as scikit-learn's.

    Attributes:
        classes_: the two classes, the second the success.

    >>> draw = np.random.default_rng(0)
    >>> X, group = draw.normal(size=(200, 1)), np.repeat(np.arange(20), 10)
    >>> y = draw.random(200) < 1 / (1 + np.exp(-X[:, 0] - draw.normal(size=20)[group]))
    >>> model = BayesianMixedClassifier().fit(X, y, groups=group)
    >>> model.predict_proba([[0.0], [0.0]], groups=[0, 1]).shape
    (2, 2)
    """

    def __init__(
        self,
        groups: str | int | None = None,
        *,
        slopes: Sequence[str | int] = (),
        fit_intercept: bool = True,
        prior_sd: float | None = None,
        priors: Mapping[str, Any] | str | None = None,
        draws: int = 4096,
        random_state: RandomState = 0,
        class_weight: Any = None,
    ) -> None:
        super().__init__(groups, slopes, fit_intercept, prior_sd, priors, draws, random_state)
        self.class_weight = class_weight

    def _outcome(self, X: Array, y: Array, sample_weight: Any) -> tuple[Family, Array, Array | None]:
        codes, weights = coded(self, X, y, sample_weight)
        if (count := len(self.classes_)) != 2:
            known = "Only binary classification is supported. The type of the target is multiclass: " * (count > 2)
            raise InputError(f"{known}a mixed classifier has two classes; y has {count} class{'es' * (count > 2)}.")
        return family_of("bernoulli"), codes.astype(np.float64), weights

    def predict_proba(self, X: Any, groups: Any = None) -> Array:
        """The probabilities of both classes, averaged over the posterior.

        Args:
            X: the rows, (n_samples, n_features), with the column of the groups where it has a name or a number.
            groups: the label of the group of each row, (n_samples,), in place of a column.

        Returns:
            (n_samples, 2), in the order of ``classes_``.
        """
        success = self._predicted(X, groups, "mean").mean.double().numpy()
        return np.column_stack([1 - success, success])

    def predict(self, X: Any, groups: Any = None, return_std: bool = False) -> Any:
        """The likelier class.

        Args:
            X: the rows, (n_samples, n_features), with the column of the groups where it has a name or a number.
            groups: the label of the group of each row, (n_samples,), in place of a column.
            return_std: whether the standard deviation of the probability under the posterior is given too.

        Returns:
            The classes, (n_samples,), and the standard deviations if asked for.
        """
        found = self._predicted(X, groups, "mean")
        chosen = self.classes_[(found.mean > 0.5).numpy().astype(int)]
        return (chosen, found.sd.double().numpy()) if return_std else chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags
