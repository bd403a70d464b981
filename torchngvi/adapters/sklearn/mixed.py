"""Mixed models as estimators of scikit-learn: rows that come in groups, as visits of patients or pupils of schools."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from torchngvi.adapters.sklearn.arguments import (
    RandomState,
    check_sd,
    checked_count,
    generator_of,
    labels_of,
    numbers_of,
    seed_of,
    validated,
    weights_of,
)
from torchngvi.adapters.sklearn.base import Array, as_covariates, warn_of_columns, with_intercept
from torchngvi.adapters.table_checks import check_names
from torchngvi.adapters.words import family_of
from torchngvi.arguments import read_list, shown
from torchngvi.errors import InputError
from torchngvi.mixed_models import MixedModel, MixedResult
from torchngvi.mixed_models.predictions import Prediction
from torchngvi.models import MixedPrior

FAMILIES = {
    "gaussian": "gaussian",
    "poisson": "poisson_log",
    "negative_binomial": "negative_binomial",
    "student_t": "student_t",
}


class _Mixed(BaseEstimator):
    """What both estimators share: rows, their groups, and the effects that vary over these."""

    result_: MixedResult
    groups_: Array

    def __init__(
        self,
        groups: str | int | None = None,
        *,
        slopes: Sequence[str | int] = (),
        fit_intercept: bool = True,
        prior_sd: float | None = None,
        draws: int = 4096,
        random_state: RandomState = 0,
    ) -> None:
        self.groups = groups
        self.slopes = slopes
        self.fit_intercept = fit_intercept
        self.prior_sd = prior_sd
        self.draws = draws
        self.random_state = random_state

    # -------------------------------------------------------------------------------- rows and groups

    def _split(self, X: Any, groups: Any) -> tuple[Any, Array]:
        """The covariates, and the label of the group of each row."""
        X, labels = self._parted(X, groups)
        if any(label is None or label != label for label in labels.tolist()):  # NaN is not itself
            raise InputError("the group of a row is missing. Leave the row out, or give it a group of its own.")
        if len({isinstance(label, str) for label in labels.tolist()}) > 1:
            raise InputError("labels of groups must all be texts or all be numbers; got both.")
        if hasattr(X, "columns") and not len(X.columns):
            raise InputError("X has no column beside that of the groups; a mixed regression has one covariate or more.")
        return X, labels

    def _parted(self, X: Any, groups: Any) -> tuple[Any, Array]:
        if groups is not None:
            labels = labels_of(groups)
            shape = getattr(X, "shape", None)  # a sparse matrix has no length
            if shape == () or not (shape or hasattr(X, "__len__")) or isinstance(X, type):
                raise InputError(f"X is a matrix, one row an observation; got {shown(X)}.")
            rows = shape[0] if shape else len(X)
            if labels.shape != (rows,):
                raise InputError(f"groups must be one label for each of the {rows} rows; got shape {labels.shape}.")
            return X, labels
        if self.groups is None:
            raise InputError(
                "a mixed model needs the group of each row: name the column, groups='patient', or pass "
                "fit(X, y, groups=...) and predict(X, groups=...)."
            )
        if isinstance(self.groups, bool) or not isinstance(self.groups, str | Integral):
            raise InputError(f"groups is the name or the number of one column; got {self.groups!r}.")
        if hasattr(X, "columns"):
            check_names(X.columns, "X")
            if self.groups not in X:
                raise InputError(f"groups names the column {self.groups!r}; X has {', '.join(map(str, X.columns))}.")
            return X.drop(columns=self.groups), X[self.groups].to_numpy()
        rows = labels_of(X)
        if not isinstance(self.groups, Integral) or rows.ndim != 2 or not -rows.shape[1] <= self.groups < rows.shape[1]:
            raise InputError(
                f"groups={self.groups!r} is no column of an array of shape {rows.shape}: give its number, or a frame."
            )
        return np.delete(rows, self.groups, 1), rows[:, self.groups]

    def _varying(self, X: Array) -> Array:
        """The design of the effects that vary: a column of ones, and the covariates whose slopes vary."""
        what = "is a list of columns, such as ['week'], or an empty one"
        slopes = read_list("slopes", self.slopes, what)
        if not all(isinstance(name, str | Integral) and not isinstance(name, bool) for name in slopes):
            raise InputError(f"slopes {what}; got {shown(self.slopes)}.")
        names = list(getattr(self, "feature_names_in_", range(X.shape[1])))
        lacking = [name for name in slopes if name not in names]
        if lacking:
            raise InputError(f"slopes names {lacking[0]!r}; the columns are {', '.join(map(str, names))}.")
        return np.column_stack([np.ones(len(X)), *(X[:, names.index(name)] for name in slopes)])

    # -------------------------------------------------------------------------------- fitting

    def _fit(self, X: Array, y: Array, labels: Array, family: str, weights: Array | None) -> Self:
        check_sd("prior_sd", self.prior_sd)
        self.seed_ = seed_of(self.random_state)
        warn_of_columns(X, self, copies=False)
        self.groups_, index = np.unique(labels, return_inverse=True)
        model = MixedModel(
            torch.as_tensor(with_intercept(X, self.fit_intercept)),
            torch.as_tensor(y),
            (torch.as_tensor(self._varying(X)), torch.as_tensor(index)),
            family,
            prior=MixedPrior(fixed_scale=self.prior_sd),
            weights=weights,
        )
        names = [str(name) for name in getattr(self, "feature_names_in_", range(X.shape[1]))]
        model.column_names = (*names, *(["intercept"] if self.fit_intercept else []))
        self.result_ = model.fit(draws=self.draws, seed=self.seed_, progress=False).named(
            model.column_names,
            ["intercept", *map(str, self.slopes)],
            [str(label) for label in self.groups_],
            factor=str(self.groups) if isinstance(self.groups, str) else "group",
        )
        table = self.result_.summary()
        mean, sd = (part.double().numpy().copy() for part in (table.fixed.mean, table.fixed.sd))
        columns = X.shape[1]
        self.coef_, self.coef_sd_ = mean[:columns], sd[:columns]
        self.intercept_ = float(mean[-1]) if self.fit_intercept else 0.0
        self.intercept_sd_ = float(sd[-1]) if self.fit_intercept else 0.0
        self.group_sd_ = table.sd.mean.double().numpy().copy()
        self.effects_ = np.column_stack([effect.mean.double().numpy() for effect in self.result_.effects()])
        self.elbo_, self.converged_ = self.result_.elbo, self.result_.converged
        self.n_iter_ = max(self.result_.fit.evaluations, 1)
        return self

    # -------------------------------------------------------------------------------- predicting

    def _predicted(self, X: Any, groups: Any, kind: str) -> Prediction:
        """Predict new rows; each label that the fit had not is a group of its own, drawn from the distribution."""
        check_is_fitted(self)
        rows, labels = self._split(X, groups)
        rows = validated(self, as_covariates(rows), dtype=np.float64, reset=False)
        kinds = [{isinstance(label, str) for label in some.tolist()} for some in (self.groups_, labels)]
        if len(labels) and not kinds[0] & kinds[1]:  # as numbers that have become text in a file
            raise InputError(
                f"the groups of the fit are as {self.groups_.tolist()[0]!r}, those of these rows as "
                f"{labels.tolist()[0]!r}, so that all would be new. Convert the column, by astype(int) or astype(str)."
            )
        number: dict[Any, int] = {label: i for i, label in enumerate(self.groups_.tolist())}
        index = [number.setdefault(label, len(self.groups_) - 1 - len(number)) for label in labels.tolist()]
        return self.result_.predict(
            with_intercept(rows, self.fit_intercept),
            self._varying(rows),
            torch.tensor(index),
            kind=kind,
            seed=self.seed_,
        )

    def sample_posterior(self, n_samples: int = 1000, random_state: RandomState = None) -> Array:
        """Draw the coefficients that all groups share from the posterior.

        Args:
            n_samples: the number of draws.
            random_state: a seed, or a ``RandomState`` of NumPy; without one the draws differ from call to call.

        Returns:
            (n_samples, n_features), with the intercept as a last column where there is one. ``result_.draws()`` has
            the effects of the groups and their standard deviations beside.
        """
        check_is_fitted(self)
        theta = self.result_.sample(checked_count(n_samples), generator_of(random_state))
        drawn: Array = theta[:, : self.result_.model.rows.p].double().numpy()
        return drawn


class BayesianMixedRegressor(RegressorMixin, _Mixed):
    """Mixed-effects regression of numbers or counts: rows in groups, whose levels and perhaps slopes vary.

    One wants it for repeated measurements, where a regression that takes the rows for independent gives intervals that
    are too narrow. The effects of groups are drawn towards each other as much as the data say, and integrated out, so
    that the intervals of the coefficients and of the spread between groups are theirs. It is `torchngvi.MixedModel`
    with scikit-learn's conventions; ``result_`` is what that returns.

    Args:
        groups: the column of the groups, by name of a frame's column or by number of an array's; it is no covariate.
            Without it ``fit(X, y, groups=...)`` and ``predict(X, groups=...)`` take one label a row.
        family: "gaussian", whose noise is learned, "poisson", "negative_binomial" or "student_t".
        slopes: the columns whose coefficients vary over groups too, by name, or by number once the groups are out.
        fit_intercept: whether there is an intercept that all groups share.
        prior_sd: the prior standard deviation of each coefficient; by default 2.5 standard deviations of y over one of
            the column, and for the intercept about the mean of y.
        draws: the number of weighted draws of what all groups share; predictions are averages over 1,000 of them.
        random_state: the seed of all draws, a ``RandomState`` of NumPy, or None for a fresh seed at each fit.

    Attributes:
        coef_, intercept_, coef_sd_, intercept_sd_: means and standard deviations of the posterior.
        group_sd_: posterior means of the standard deviations between groups, of the intercept and of each slope.
        groups_, effects_: the labels of the groups, (n,), and the posterior means of their effects, (n, 1 + slopes).
        result_: the `torchngvi.mixed_models.MixedResult`, with a table, k-hat, draws and a picture.
        elbo_, converged_, n_iter_: as those of `BayesianLogisticRegression`.
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
        family: str = "gaussian",
        slopes: Sequence[str | int] = (),
        fit_intercept: bool = True,
        prior_sd: float | None = None,
        draws: int = 4096,
        random_state: RandomState = 0,
    ) -> None:
        super().__init__(
            groups,
            slopes=slopes,
            fit_intercept=fit_intercept,
            prior_sd=prior_sd,
            draws=draws,
            random_state=random_state,
        )
        self.family = family

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Fit the posterior.

        Args:
            X: the rows, (n_samples, n_features), with the column of the groups where it has a name or a number.
            y: numbers, or counts, (n_samples,).
            groups: the label of the group of each row, (n_samples,), in place of a column.
            sample_weight: a factor of the log likelihood of each row, (n_samples,).

        Returns:
            The estimator.

        Raises:
            InputError: another family, groups that are not there or miss labels, slopes that are no columns; and as
                `torchngvi.MixedModel`.
        """
        family = family_of(self.family, FAMILIES)
        X, labels = self._split(X, groups)
        X, y = validated(self, as_covariates(X, fitting=True), y, dtype=np.float64, y_numeric=True)
        weights = weights_of(sample_weight, X)
        return self._fit(X, numbers_of(y), labels, family, weights)

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


class BayesianMixedClassifier(ClassifierMixin, _Mixed):
    """Mixed-effects logistic regression of two classes: rows in groups, whose levels and perhaps slopes vary.

    It is to `BayesianLogisticRegression` what `BayesianMixedRegressor` is to linear regression; the arguments and
    attributes are those of the regressor, but for the family.

    Args:
        groups: the column of the groups, by name of a frame's column or by number of an array's; it is no covariate.
            Without it ``fit(X, y, groups=...)`` and ``predict(X, groups=...)`` take one label a row.
        slopes: the columns whose coefficients vary over groups too, by name, or by number once the groups are out.
        fit_intercept: whether there is an intercept that all groups share.
        prior_sd: the prior standard deviation of each coefficient, 10 by default.
        draws: the number of weighted draws of what all groups share; predictions are averages over 1,000 of them.
        random_state: the seed of all draws, a ``RandomState`` of NumPy, or None for a fresh seed at each fit.

    Attributes:
        classes_: the two classes, the second the success.

    >>> draw = np.random.default_rng(0)
    >>> X, group = draw.normal(size=(200, 1)), np.repeat(np.arange(20), 10)
    >>> y = draw.random(200) < 1 / (1 + np.exp(-X[:, 0] - draw.normal(size=20)[group]))
    >>> model = BayesianMixedClassifier().fit(X, y, groups=group)
    >>> model.predict_proba([[0.0], [0.0]], groups=[0, 1]).shape
    (2, 2)
    """

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Fit the posterior.

        Args:
            X: the rows, (n_samples, n_features), with the column of the groups where it has a name or a number.
            y: two classes, (n_samples,).
            groups: the label of the group of each row, (n_samples,), in place of a column.
            sample_weight: a factor of the log likelihood of each row, (n_samples,).

        Returns:
            The estimator.

        Raises:
            InputError: more classes than two, or one; groups that are not there or miss labels; slopes that are no
                columns; and as `torchngvi.MixedModel`.
        """
        X, labels = self._split(X, groups)
        X, y = validated(self, as_covariates(X, fitting=True), y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) != 2:
            raise InputError(f"a mixed classifier has two classes; y has {len(self.classes_)}.")
        weights = weights_of(sample_weight, X)
        return self._fit(X, codes.astype(np.float64), labels, "bernoulli_logit", weights)

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
        told = self._predicted(X, groups, "mean")
        chosen = self.classes_[(told.mean > 0.5).numpy().astype(int)]
        return (chosen, told.sd.double().numpy()) if return_std else chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags
