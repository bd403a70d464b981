"""The peers of `benchmarks.tables_public`: scikit-learn, and maximum likelihood with Wald errors.

Likelihoods are maximised by SciPy's BFGS on gradients by PyTorch, from a start that knows nothing of the data; effects
of groups are integrated out by Gauss-Hermite quadrature, or in closed form where all is Gaussian.
"""

import math
import re
import warnings

import numpy as np
import pandas
import scipy.optimize
import torch
from sklearn.linear_model import HuberRegressor, LinearRegression, LogisticRegression, PoissonRegressor
from torch import distributions as D  # noqa: N812
from torch.nn.functional import logsigmoid


def poisson(y, eta):
    return y * eta - eta.exp() - (y + 1).lgamma()


def bernoulli(y, eta):
    return y * eta + logsigmoid(-eta)


def negative_binomial(y, eta, log_size):
    return D.NegativeBinomial(log_size.exp(), logits=eta - log_size, validate_args=False).log_prob(y)


def zero_inflated(y, eta, log_odds, log_size):
    inside = negative_binomial(y, eta, log_size) + logsigmoid(-log_odds)
    return torch.where(y == 0, torch.logaddexp(inside, logsigmoid(log_odds)), inside)


def ordinal(y, eta, *thresholds):
    far, k = eta.new_full((1,), 1e3), y.long()
    c = torch.cat([-far, torch.stack(thresholds), far])
    return (torch.sigmoid(c[k + 1] - eta) - torch.sigmoid(c[k] - eta)).clamp_min(1e-12).log()


def beta(y, eta, log_precision):
    mean, precision = eta.sigmoid(), log_precision.exp()
    return D.Beta(mean * precision, (1 - mean) * precision, validate_args=False).log_prob(y)


def weibull(time, event, eta, log_shape):
    shape = log_shape.exp()
    z = shape * (time.log() - eta + (1 + 1 / shape).lgamma())
    return event * (log_shape - time.log() + z) - z.exp()


SKLEARN = {
    "gaussian": LinearRegression(),
    "bernoulli": LogisticRegression(C=np.inf),
    "poisson": PoissonRegressor(alpha=0),
    "student_t": HuberRegressor(alpha=0),
}
LIKELIHOODS = {  # and their parameters, those that are positive on the log scale
    "poisson": (poisson, ()),
    "bernoulli": (bernoulli, ()),
    "binomial": (lambda s, n, eta: s * eta + n * logsigmoid(-eta), ()),
    "negative_binomial": (negative_binomial, ("size",)),
    "zero_inflated_negative_binomial": (zero_inflated, ("odds of zeros", "size")),
    "ordinal": (ordinal, ("threshold[1]", "threshold[2]", "threshold[3]")),
    "beta": (beta, ("precision",)),
    "weibull": (weibull, ("shape",)),
}


def tensors(*arrays):
    return tuple(torch.as_tensor(np.asarray(array, dtype=float)) for array in arrays)


def maximum(loss, names, start):
    """The minimum of minus a log likelihood, with errors from its curvature; sizes and shapes off their logarithms."""

    def both(theta):
        theta = torch.tensor(theta, requires_grad=True)
        value = loss(theta)
        return value.item(), torch.autograd.grad(value, theta)[0].numpy()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        end = torch.tensor(scipy.optimize.minimize(both, np.array(start, dtype=float), jac=True).x)
    sds = torch.linalg.inv(torch.func.hessian(loss)(end)).diagonal().sqrt()
    found = {}
    for name, estimate, sd in zip(names, end.tolist(), sds.tolist(), strict=True):
        size = math.exp(min(estimate, 700.0))
        positive = name in ("size", "shape", "precision", "odds of zeros")
        spread = "|" in name and "," not in name
        found[name] = (size, sd * size) if positive else (abs(estimate) if spread else estimate, sd)
    return found


def usual_peer(case):
    """Scikit-learn, or the maximum of the likelihood."""
    table, (left, _, right) = case.table, case.formula.partition("~")
    y = tensors(*(table[name] for name in re.findall(r"\w+", left) if name in table))
    X, names = table[list(case.columns)], ["Intercept", *case.columns]
    factors, offset = re.findall(r"\(1 \| (\w+)\)", right), re.search(r"offset\((.*)\)", right)
    if case.family in SKLEARN and not factors and offset is None:
        weights = {} if case.weights is None else {"sample_weight": table[case.weights]}
        model = SKLEARN[case.family].fit(X, y[0].numpy(), **weights)
        values = [*np.ravel(model.intercept_), *np.ravel(model.coef_)]
        return {name: (float(value), None) for name, value in zip(names, values, strict=True)}
    (X,) = tensors(X.assign(Intercept=1.0)[names if case.family != "ordinal" else names[1:]])
    if case.family == "gaussian":
        return linear(y[0], X, names, {f"Intercept|{name}": members(table[name]) for name in factors})
    log_p, parameters = LIKELIHOODS[case.family]
    (shift,) = tensors(np.zeros(len(X)) if offset is None else table.eval(offset[1]))
    p, q, sds = X.shape[1], len(parameters), [f"Intercept|{name}" for name in factors]
    z, w = tensors(*np.polynomial.hermite_e.hermegauss(30))
    group = torch.tensor(pandas.factorize(table[factors[0]])[0]) if factors else None

    def loss(theta):
        eta, phi = shift + X @ theta[:p], theta[p : p + q]
        if group is None:
            return -log_p(*y, eta, *phi).sum()
        rows = log_p(*(each[:, None] for each in y), eta[:, None] + theta[-1] * z, *phi)
        sums = torch.zeros(int(group.max()) + 1, len(z), dtype=z.dtype).index_add(0, group, rows)
        return -(sums + (w / w.sum()).log()).logsumexp(-1).sum()

    start = [0.1] * p + (list(np.linspace(-1, 1, q)) if case.family == "ordinal" else [0.1] * q) + [0.5] * len(sds)
    found = maximum(loss, [*names[-p:], *parameters, *sds], start)
    if "odds of zeros" in found:
        odds, sd = found["odds of zeros"]
        found["surplus zeros"] = (odds / (1 + odds), sd / (1 + odds) ** 2)
    return found


def members(labels):
    """The indicators of the levels of a column."""
    return torch.tensor(pandas.get_dummies(pandas.Series(labels), dtype=float).to_numpy())


def linear(y, X, names, parts):
    """A Gaussian mixed model: parts are the names of standard deviations over groups, each with its Z."""

    def loss(theta):
        b, sds, residual = theta[: X.shape[1]], theta[X.shape[1] : -1], theta[-1]
        C = residual**2 * torch.eye(len(y), dtype=y.dtype)
        C = C + sum(sd**2 * Z @ Z.mT for sd, Z in zip(sds, parts.values(), strict=True))
        return -D.MultivariateNormal(X @ b, C, validate_args=False).log_prob(y)

    return maximum(loss, [*names, *parts, "residual sd"], [0.1] * X.shape[1] + [0.5] * (len(parts) + 1))
