"""Bayesian linear, Poisson and logistic regression as estimators of scikit-learn."""

from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from torchngvi.adapters.sklearn.base import AUTO, Array, BayesianLinear, check_classes_weigh, weights_of
from torchngvi.arguments import is_number
from torchngvi.diagnostics.predictive import log_predictive_density, predictive_mean
from torchngvi.errors import InputError
from torchngvi.models import SoftmaxRegression
from torchngvi.models.likelihoods import BernoulliLogit, GaussianNoise, Likelihood, PoissonLog
from torchngvi.models.standardize import NormalPrior, mean_and_sd, named_prior
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


# ------------------------------------------------------------------------------------ classifiers
# Bayesian logistic regression as a classifier of scikit-learn, of two or more classes.
#
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
    if weights is not None:
        check_classes_weigh(estimator.classes_, codes, weights)
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
