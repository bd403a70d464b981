"""Mixed models as estimators of scikit-learn: rows that come in groups, as visits of patients or pupils of schools."""

import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin, is_regressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from torchngvi.adapters.sklearn.base import (
    Array,
    RandomState,
    Sampled,
    check_numbers,
    check_sd,
    covariates,
    numbers_of,
    seed_of,
    validated,
    weights_of,
    with_intercept,
)
from torchngvi.adapters.sklearn.estimators import coded
from torchngvi.arguments import read_flag, read_list, shown
from torchngvi.errors import InputError
from torchngvi.models import checks
from torchngvi.tables.cells import check_names
from torchngvi.tables.effects import Prediction
from torchngvi.tables.families import FAMILIES, Family, family_of
from torchngvi.tables.model import TableModel
from torchngvi.tables.parts import Design, Factor
from torchngvi.tables.priors import Normal
from torchngvi.tables.result import TableResult


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
        return model.fit(draws=self.draws, seed=self.seed_, progress=False)

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
