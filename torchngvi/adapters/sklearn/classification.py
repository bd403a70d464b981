"""Bayesian logistic regression as a classifier of scikit-learn."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor

from torchngvi.adapters.sklearn.base import Array, BayesianLinear
from torchngvi.errors import InputError
from torchngvi.models.likelihoods import BernoulliLogit


class BayesianLogisticRegression(ClassifierMixin, BayesianLinear):
    """Logistic regression of two classes with a Gaussian posterior over the coefficients.

    The prior is N(0, 1/prior_precision) of each coefficient and N(0, 10²) of the intercept; columns of different units
    go through ``StandardScaler`` first. Probabilities are averaged over the posterior, not taken at its mean.

    Args:
        prior_precision: of each coefficient, or "auto" for the one that the data speak for, see
            `torchngvi.prior_by_evidence`.
        fit_intercept: whether there is an intercept.
        intercept_sd: the standard deviation of its prior; 10 by default.
        posterior: "cholesky", all correlations; or "diagonal" for very many columns.
        max_iter: the budget of evaluations of gradient and curvature.
        tol: on the natural-gradient norm.

    Attributes:
        classes_: the two classes, the second the success.
        coef_, intercept_: means of the posterior, (1, n_features) and (1,).
        coef_sd_, intercept_sd_: its standard deviations, (n_features,) and a number.
        posterior_: the posterior itself.
        prior_precision_, evidence_: the precision that was used, and how it was found.
        elbo_, converged_, n_iter_: the evidence lower bound, whether it is at its maximum, and the evaluations.

    >>> X = np.random.default_rng(0).normal(size=(100, 2))
    >>> y = np.where(X[:, 0] > 0, "up", "down")
    >>> model = BayesianLogisticRegression().fit(X, y)
    >>> model.predict([[2.0, 0.0]]).tolist(), model.predict_proba([[2.0, 0.0]]).shape
    (['up'], (1, 2))
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior.

        Args:
            X: the rows, (n_samples, n_features).
            y: two classes, (n_samples,).
            sample_weight: a factor of the log likelihood of each row, (n_samples,).

        Returns:
            The estimator.

        Raises:
            InputError: more classes than two, or one.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        if kind != "binary":
            raise InputError(
                f"Only binary classification is supported. The type of the target is {kind}. Take one class against "
                "the others, or sklearn.multiclass.OneVsRestClassifier around this estimator."
            )
        if len(self.classes_) < 2:
            raise InputError(f"y has one class, {self.classes_[0]}; the classifier needs two.")
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        self._fit(X, codes.astype(np.float64), weights, BernoulliLogit())
        self.coef_, self.intercept_ = self.coef_[None], np.array([self.intercept_])
        return self

    def predict_proba(self, X: Any) -> Array:
        """The probabilities of both classes, averaged over the posterior.

        Args:
            X: the rows, (n_samples, n_features).

        Returns:
            (n_samples, 2), in the order of ``classes_``.
        """
        success = self._expected(X)
        return np.column_stack([1 - success, success])

    def decision_function(self, X: Any) -> Array:
        """The posterior mean of the linear predictor, positive where the second class is likelier.

        Args:
            X: the rows, (n_samples, n_features).

        Returns:
            (n_samples,).
        """
        found: Array = self._moments(X)[0].numpy()
        return found

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The likelier class.

        Args:
            X: the rows, (n_samples, n_features).
            return_std: whether the standard deviation of the success's probability under the posterior is given too.

        Returns:
            The classes, (n_samples,), and the standard deviations if asked for.
        """
        mean, variance, _ = self._moments(X)
        chosen = self.classes_[(mean > 0).numpy().astype(int)]
        return (chosen, _sd_of_sigmoid(mean, variance)) if return_std else chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def _sd_of_sigmoid(mean: Tensor, variance: Tensor) -> Array:
    """The standard deviation of 1/(1 + e^-η), η ~ N(e, v), by the trapezoid rule."""
    z = torch.linspace(-8, 8, 129, dtype=mean.dtype)
    weights = torch.softmax(-0.5 * z.square(), 0)
    p = torch.sigmoid(mean[:, None] + variance.sqrt()[:, None] * z)
    center = (p * weights).sum(-1, keepdim=True)
    found: Array = ((p - center).square() * weights).sum(-1).sqrt().numpy()
    return found
