"""Bayesian logistic regression as a classifier of scikit-learn."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from torchngvi.adapters.sklearn.arguments import (
    RandomState,
    check_classes_weigh,
    checked_count,
    generator_of,
    validated,
    weights_of,
)
from torchngvi.adapters.sklearn.base import AUTO, Array, BayesianLinear, as_covariates, warn_of_columns
from torchngvi.adapters.sklearn.several import centred, draws_of, log_odds, softmax_model
from torchngvi.diagnostics.predictive import log_predictive_density
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.models import SoftmaxRegression
from torchngvi.models.likelihoods import BernoulliLogit
from torchngvi.models.standardize import NormalPrior, named_prior


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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior.

        Args:
            X: the rows, (n_samples, n_features).
            y: two or more classes, (n_samples,).
            sample_weight: a factor of the log likelihood of each row, (n_samples,).

        Returns:
            The estimator.

        Raises:
            InputError: one class, or a prior by evidence with more than two.
        """
        X, y = validated(self, as_covariates(X, fitting=True), y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"y has one class, {self.classes_[0]}; the classifier needs two.")
        weights = weights_of(sample_weight, X)
        check_classes_weigh(self.classes_, codes, weights)
        if len(self.classes_) > 2:
            return self._fit_several(X, codes, weights)
        self._fit(X, codes.astype(np.float64), weights, BernoulliLogit())
        self.coef_, self.intercept_ = self.coef_[None], np.array([self.intercept_])
        return self

    def _fit_several(self, X: Array, codes: Array, weights: Array | None) -> Self:
        """Fit the softmax likelihood of more than two classes."""
        word = self._checked()
        if word == AUTO:
            raise InputError(
                "Only binary classification is supported. The type of the target is multiclass. It is so with "
                "prior_precision='auto': choose a number, for instance by sklearn.model_selection.GridSearchCV."
            )
        warn_of_columns(X, self)
        design = self._with_intercept(X)
        classes, units = len(self.classes_), None if word is None else self._units(design, weights)
        self.standardization_ = units
        design = self._scaled(design)
        place, means = self._place(design.shape[1]), torch.zeros(classes - 1, design.shape[1], dtype=torch.float64)
        if word is None or units is None:
            prior = self._numbered(design.shape[1], 1.0)
        else:  # of the difference of any two classes what it is of two
            prior = named_prior(word, 0.0, 1.0, units)
            prior.precision.mul_(2)
            if place is not None and self.intercept_sd is not None:
                prior.precision[place] = self.intercept_sd**-2
            else:
                means = torch.as_tensor(log_odds(codes, weights))[:, None] * units.level(1.0)
        model = softmax_model(design, codes, prior.precision.numpy(), weights, means.flatten())
        q = self._start(design, NormalPrior(means.flatten(), prior.precision), weights, classes)
        result = fit(q, model, progress=False, examine=False, max_evaluations=self.max_iter, tolerance=self.tol)
        mean, sd = centred(q, classes, units)
        columns = X.shape[1]
        self.posterior_, self.evidence_ = q, None
        self.coef_, self.coef_sd_ = mean[:, :columns], sd[:, :columns]
        absent = np.zeros(classes)
        self.intercept_ = mean[:, -1] if self.fit_intercept else absent
        self.intercept_sd_ = sd[:, -1] if self.fit_intercept else absent
        self.prior_ = f"of each class: {prior.describe(units, place)}"
        self.prior_precision_ = float(prior.precision[int(place == 0 and design.shape[1] > 1)])
        self.elbo_, self.converged_, self.n_iter_ = -result.loss, result.converged, max(result.evaluations, 1)
        return self

    def _softmax(self, X: Any) -> tuple[SoftmaxRegression, Tensor]:
        """A model with the classes of the fit, whose rows are not looked at, and the design of new rows."""
        design = self._design(validated(self, as_covariates(X), dtype=np.float64, reset=False))
        codes = np.arange(len(self.classes_))
        empty = np.zeros((len(codes), design.shape[1]))
        return softmax_model(empty, codes, np.ones(design.shape[1]), None), design

    def predict_proba(self, X: Any) -> Array:
        """The probabilities of the classes, averaged over the posterior.

        Args:
            X: the rows, (n_samples, n_features).

        Returns:
            (n_samples, K), in the order of ``classes_``.
        """
        check_is_fitted(self)
        if len(self.classes_) > 2:
            model, design = self._softmax(X)
            found: Array = model.probabilities(self.posterior_, design).numpy()
            return found
        success = self._expected(X)
        return np.column_stack([1 - success, success])

    def decision_function(self, X: Any) -> Array:
        """A number that is the larger the likelier a class is.

        Args:
            X: the rows, (n_samples, n_features).

        Returns:
            Of two classes the log odds of the second, averaged over the posterior as those of `predict_proba`,
            (n_samples,); of more the logarithms of `predict_proba`, (n_samples, K).
        """
        check_is_fitted(self)
        if len(self.classes_) > 2:
            with np.errstate(divide="ignore"):
                scores: Array = np.log(self.predict_proba(X).clip(0))
            return scores
        design = self._design(validated(self, X, dtype=np.float64, reset=False))
        no = torch.zeros(len(design), dtype=design.dtype)
        success, failure = (log_predictive_density(self._model(), self.posterior_, design, y) for y in (no + 1, no))
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
        check_is_fitted(self)
        if len(self.classes_) > 2:
            model, design = self._softmax(X)
            place = model.probabilities(self.posterior_, design).argmax(1)
            chosen = self.classes_[place.numpy()]
            if not return_std:
                return chosen
            return chosen, model.probabilities_sd(self.posterior_, design).gather(1, place[:, None])[:, 0].numpy()
        mean, variance, _ = self._moments(X)
        chosen = self.classes_[(mean > 0).numpy().astype(int)]
        return (chosen, _sd_of_sigmoid(mean, variance)) if return_std else chosen

    def sample_posterior(self, n_samples: int = 1000, random_state: RandomState = None) -> Array:
        """Draw coefficients from the posterior.

        Args:
            n_samples: the number of draws.
            random_state: a seed, or a ``RandomState`` of NumPy; without one the draws differ from call to call.

        Returns:
            With the intercept as a last column where there is one, of two classes (n_samples, n_features), of more
            (n_samples, K, n_features), which sum to zero over the classes.
        """
        check_is_fitted(self)
        if len(self.classes_) == 2:
            return super().sample_posterior(n_samples, random_state)
        drawn = draws_of(self.posterior_, len(self.classes_), checked_count(n_samples), generator_of(random_state))
        return self._in_user_units(torch.as_tensor(drawn))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = self.prior_precision != AUTO
        return tags


def _sd_of_sigmoid(mean: Tensor, variance: Tensor) -> Array:
    """The standard deviation of 1/(1 + e^-η), η ~ N(e, v), by the trapezoid rule."""
    z = torch.linspace(-8, 8, 129, dtype=mean.dtype)
    weights = torch.softmax(-0.5 * z.square(), 0)
    p = torch.sigmoid(mean[:, None] + variance.sqrt()[:, None] * z)
    center = (p * weights).sum(-1, keepdim=True)
    found: Array = ((p - center).square() * weights).sum(-1).sqrt().numpy()
    return found
