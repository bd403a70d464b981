"""Predictive densities of new rows, and of parts of the data that a fit has not seen.

Of generalised linear models under q they are by quadrature in the one linear predictor,

p(y* | x*) = ∫ p(y* | η) N(η; e, v) dη        e = x*ᵀm        v = x*ᵀV x*
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.arguments import read_instance, read_tensor
from torchngvi.errors import InputError
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import GaussianNoise, Likelihood, NegativeBinomial, PoissonLog, StudentT
from torchngvi.posteriors.gaussian import Gaussian

_REMEDY = "Drop or impute those rows."


@torch.no_grad()
def predictor_moments(
    model: GeneralizedLinear, q: Gaussian, X: Tensor, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean e = Xm + o and variance v = ‖Cᵀx‖² of the linear predictor of new rows under q.

    Args:
        model: the model that q was fitted to.
        q: the posterior.
        X: the new rows, (N, D) or (*batch, N, D).
        offset: o, (N,) or (*batch, N); 0 by default.

    Returns:
        The means and the variances, both (*batch, N).

    Raises:
        InputError: rows of another width than the model, an offset of another length, values not finite.

    >>> from torchngvi import CholeskyGaussian
    >>> model = GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> mean, variance = predictor_moments(model, CholeskyGaussian(2, mean=1.0, scale=2.0), torch.ones(1, 2))
    >>> mean.item(), variance.item()
    (2.0, 8.0)
    """
    _check(model, q)
    frame = q.frame()
    X = read_tensor("X", X, like=frame.mean, remedy=_REMEDY)
    if X.ndim < 2 or X.shape[-1] != model.dim:
        raise InputError(f"X must have the {model.dim} columns of the fitted design; got shape {tuple(X.shape)}.")
    offset = torch.zeros_like(X[..., 0]) if offset is None else read_tensor("offset", offset, like=X, remedy=_REMEDY)
    if offset.shape[-1:] != X.shape[-2:-1]:
        raise InputError(f"offset must have one entry a row of X, {X.shape[-2]}; got shape {tuple(offset.shape)}.")
    mean = (X @ frame.mean[..., None])[..., 0] + offset
    return mean, frame.rows(X).square().sum(-1).expand(mean.shape)


def _check(model: object, q: object) -> None:
    """Check that the first two arguments are a regression and a Gaussian."""
    read_instance("model", model, GeneralizedLinear, "is the GeneralizedLinear that q was fitted to", other=q)
    read_instance("q", q, Gaussian, "is a Gaussian posterior", other=model)


def _targets(model: GeneralizedLinear, y: Tensor, mean: Tensor) -> Tensor:
    """The targets of rows with these predictors, as the likelihood codes them."""
    y = coded(model.likelihood, read_tensor("y", y, like=mean, remedy=_REMEDY))
    if y.ndim == 0 or y.shape[-1] != mean.shape[-1]:
        raise InputError(f"y must have one entry a row of X, {mean.shape[-1]}; got shape {tuple(y.shape)}.")
    return y


def log_predictive_density(
    model: GeneralizedLinear, q: Gaussian, X: Tensor, y: Tensor, offset: Tensor | None = None
) -> Tensor:
    """Compute log p(y_n | x_n) = log E_q[p(y_n | η_n)] of new rows, the score of a held-out test.

    It is a one-dimensional quadrature, exact to 1e-8 or better for standard deviations of η up to 100, for likelihoods
    that are log-concave in η and bend on a scale of about 1 or where they decide.

    Args:
        model, q, X, offset: those of `predictor_moments`.
        y: the targets of the rows, (N,) or (*batch, N); classes as 0/1 or -1/+1.

    Returns:
        One logarithm of a density or probability a row, (*batch, N), in float64.

    Raises:
        InputError: shapes that do not fit, targets the likelihood cannot produce.

    >>> from torchngvi import CholeskyGaussian
    >>> model = GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> log_predictive_density(model, CholeskyGaussian(2), torch.eye(2), torch.ones(2)).exp()
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    mean, variance = predictor_moments(model, q, X, offset)
    y = _targets(model, y, mean)
    flat = [x.double().expand(mean.shape).reshape(-1) for x in (mean, variance.sqrt(), y)]
    return log_expected_likelihood(model.likelihood, *flat).reshape(mean.shape)


def predictive_mean(model: GeneralizedLinear, q: Gaussian, X: Tensor, offset: Tensor | None = None) -> Tensor:
    """Compute the predictive means E[y_n | x_n] under q: for classes the probability of success.

    Args:
        model, q, X, offset: those of `predictor_moments`.

    Returns:
        One mean a row, (*batch, N), in float64.

    Raises:
        InputError: shapes that do not fit, a likelihood whose mean is not known here.

    >>> from torchngvi import CholeskyGaussian
    >>> model = GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> predictive_mean(model, CholeskyGaussian(2), torch.ones(1, 2))  # a predictor with mean 0
    tensor([0.5000], dtype=torch.float64)
    """
    mean, variance = (x.double() for x in predictor_moments(model, q, X, offset))
    likelihood = model.likelihood
    if likelihood.discrete:
        e, sd = mean.reshape(-1), variance.sqrt().reshape(-1)
        return log_expected_likelihood(likelihood, e, sd, torch.ones_like(e)).exp().reshape(mean.shape)
    if isinstance(likelihood, PoissonLog | NegativeBinomial):
        return torch.exp(mean + 0.5 * variance)
    if isinstance(likelihood, GaussianNoise) or (isinstance(likelihood, StudentT) and likelihood.dof > 1):
        return mean
    raise InputError(
        f"the mean of y is known for the families of this library; got {type(likelihood).__name__}. "
        "Use predictor_moments, and average its mean function under N(e, v)."
    )


def accuracy(
    model: GeneralizedLinear,
    q: Gaussian,
    X: Tensor,
    y: Tensor,
    offset: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute the share of new rows whose class is predicted, the one of which the predictive mean is above ½.

    Args:
        model, q, X, offset: those of `predictor_moments`.
        y: the classes of the rows, (N,) or (*batch, N), as 0/1 or -1/+1.
        weights: how much each row counts, (N,) or (*batch, N); all the same by default.

    Returns:
        The share, one a member, (*batch,).

    Raises:
        InputError: a likelihood without classes, shapes that do not fit.

    >>> from torchngvi import CholeskyGaussian
    >>> model = GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> accuracy(model, CholeskyGaussian(2, mean=1.0), torch.eye(2), torch.tensor([0.0, 1.0])).item()
    0.5
    """
    _check(model, q)
    if not model.likelihood.discrete:
        raise InputError(
            f"accuracy needs a likelihood of classes; got {type(model.likelihood).__name__}. "
            "Use log_predictive_density."
        )
    mean, _ = predictor_moments(model, q, X, offset)
    y = _targets(model, y, mean)
    symmetric = model.likelihood.link in ("logit", "probit")  # the predictive mean is above ½ where e > 0
    hits = (y * (mean if symmetric else predictive_mean(model, q, X, offset) - 0.5) > 0).to(mean.dtype)
    if weights is None:
        return hits.mean(-1)
    weights = read_tensor("weights", weights, like=mean)
    if weights.ndim == 0 or weights.shape[-1] != mean.shape[-1]:
        raise InputError(f"weights must have one entry a row, {mean.shape[-1]}; got shape {tuple(weights.shape)}.")
    return (hits * weights).sum(-1) / weights.sum(-1)


def coded(likelihood: Likelihood, y: Tensor) -> Tensor:
    """Bring the targets of new rows into the likelihood's coding; they may be of one class only.

    Args:
        likelihood: the likelihood of the model.
        y: the targets, (N,) or (*batch, N); classes as 0/1 or -1/+1.

    Returns:
        The targets in the coding of the likelihood, of the same shape: classes as -1 and +1.

    Raises:
        InputError: classes that are neither 0/1 nor -1/+1, targets the likelihood cannot produce.

    >>> from torchngvi.models import BernoulliLogit
    >>> coded(BernoulliLogit(), torch.tensor([0.0, 1.0, 1.0])).tolist()
    [-1.0, 1.0, 1.0]
    """
    read_instance("likelihood", likelihood, Likelihood, "is one of torchngvi.models, such as BernoulliLogit()")
    y = read_tensor("y", y, remedy=_REMEDY)
    if not likelihood.discrete:
        return likelihood.checked(y)
    if bool(((y == 0) | (y == 1)).all()):
        return 2 * y - 1
    if bool((y.abs() == 1).all()):
        return y
    values = ", ".join(f"{float(v):g}" for v in torch.unique(y)[:4])
    raise InputError(f"classes of new rows must be coded 0/1 or -1/+1, the success last; got {values}.")


@dataclass(frozen=True)
class LeftOut:
    """Log predictive densities, each of a part of the data under the posterior of all other parts: abstract.

    Attributes:
        density: log p(y_i | the others), (N,), in nats.
        in_sample: log p(y_i | all), (N,).
        resolved: of which parts the posterior without them was found by a fit, (N,).
        evaluations: of those fits.
    """

    density: Tensor  # (N,)
    in_sample: Tensor  # (N,)
    resolved: Tensor  # (N,)
    evaluations: int

    parts = "rows"

    @property
    def total(self) -> float:
        """The sum of the log densities, elpd, in nats."""
        return float(self.density.sum())

    @property
    def standard_error(self) -> float:
        """The standard error of the sum over parts like these, √(N var); NaN of one part."""
        if len(self.density) < 2:
            return math.nan
        return math.sqrt(len(self.density) * float(self.density.var()))

    @property
    def complexity(self) -> float:
        """The effective number of parameters, p_loo: by how much the parts are better known in sample."""
        return float((self.in_sample - self.density).sum())

    def __str__(self) -> str:
        again, what = int(self.resolved.sum()), self.parts
        text = f"elpd {self.total:.2f} ± {self.standard_error:.2f} nats over {len(self.density)} {what}"
        return f"{text}, p_loo {self.complexity:.2f}; {again} of them by a fit without the {what.removesuffix('s')}."

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


# The quadrature


@torch.no_grad()
def log_expected_likelihood(likelihood: Likelihood, mean: Tensor, sd: Tensor, y: Tensor) -> Tensor:
    """Compute log ∫ p(y | e + s z) φ(z) dz by the trapezoid rule about the mode of the integrand.

    h(z) = log p(y | e + sz) - z²/2 is strictly concave: its mode is bracketed, then the two points
    where it has fallen by 45 nats.  Between them the trapezoid rule converges exponentially.

    Args:
        likelihood: of one linear predictor.
        mean: e of the predictors, (N,).
        sd: s, their standard deviations, not negative, (N,); any width is served, where a fixed rule would not be.
        y: the targets in the coding of the likelihood, (N,).

    Returns:
        The log densities in nats, (N,).

    >>> from torchngvi.models import BernoulliProbit
    >>> e, s = torch.tensor([1.5, 1.5]).double(), torch.tensor([0.0, 30.0]).double()
    >>> log_expected_likelihood(BernoulliProbit(), e, s, torch.ones(2).double()).exp()  # Φ(e/√(1 + s²))
    tensor([0.9332, 0.5199], dtype=torch.float64)
    """
    read_instance("likelihood", likelihood, Likelihood, "is one of torchngvi.models, such as BernoulliLogit()")
    mean = read_tensor("mean", mean, shape=(None,), finite=False)
    sd = read_tensor("sd", sd, like=mean, shape=mean.shape, finite=False)
    y = read_tensor("y", y, like=mean, shape=mean.shape, finite=False)

    def h(z: Tensor, *, rows: slice = slice(None)) -> Tensor:
        shape = (-1,) + (1,) * (z.ndim - 1)
        e, s, t = (x[rows].reshape(shape) for x in (mean, sd, y))
        return -likelihood.energy(e + s * z, t) - 0.5 * z.square()

    mode = _mode(h, mean)
    low, high = (_edge(h, mode, side) for side in (-1.0, 1.0))
    width = high - low
    # at most 0.2 apart on the scale of the predictor
    nodes = (width * sd / 0.2).ceil().nan_to_num(256.0).clamp(256, 100_000)
    result = torch.empty_like(mean)
    start = 0
    while start < len(mean):
        # as many rows as fit, each over its own range with the node count of the widest
        rows = slice(start, start + max(1, int(2_000_000 / float(nodes[start:].max()))))
        count = int(nodes[rows].max())
        unit = torch.linspace(0.0, 1.0, count, dtype=mean.dtype, device=mean.device)
        z = low[rows, None] + width[rows, None] * unit
        step = width[rows] / (count - 1)
        result[rows] = torch.logsumexp(h(z, rows=rows), -1) + torch.log(step / math.sqrt(2 * math.pi))
        start = rows.stop
    return result


def _mode(h: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Where h' = 0, by bisection in asinh z: h' + z falls, so the mode lies between 0 and h'(0)."""

    def slope(z: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.requires_grad_()
            return torch.autograd.grad(h(z).sum(), z)[0]

    near = torch.zeros_like(like)
    start = slope(near.clone())
    far = torch.asinh(start.clamp(-1e12, 1e12))
    for _ in range(60):
        middle = 0.5 * (near + far)
        beyond = slope(torch.sinh(middle)) * start.sign() < 0
        near, far = torch.where(beyond, near, middle), torch.where(beyond, middle, far)
    return torch.sinh(near)


def _edge(h: Callable[[Tensor], Tensor], mode: Tensor, side: float, drop: float = 45.0) -> Tensor:
    """A point on one side of the mode where h has fallen by 45 nats, and hardly more; h falls by z²/2 at least."""
    top = h(mode)
    low, high = torch.full_like(mode, math.log(1e-12)), torch.full_like(mode, 0.5 * math.log(2 * drop))
    for _ in range(24):
        middle = 0.5 * (low + high)
        enough = top - h(mode + side * middle.exp()) >= drop
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return mode + side * high.exp()
