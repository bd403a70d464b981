"""The check of a likelihood, and regressions whose expectations are known in closed form."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import LinearTarget, Posterior, SeparableTarget, Target
from torchngvi.models import (
    BernoulliLogit,
    GaussianNoise,
    GeneralizedLinear,
    Likelihood,
    LogJoint,
    PerDatum,
    PoissonLog,
)
from torchngvi.models.factors import FactorTarget
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.structures import arrow
from torchngvi.testing.claims import (
    DIFFERENCE,
    DIM,
    DTYPE,
    SINGLE,
    Claim,
    Normal,
    derivative,
    kind,
    mask,
    moments,
    normal,
)

# The check of a likelihood: its expectations against sums over a fine grid


def check_likelihood(
    factory: Callable[[], Likelihood],
    y: Tensor,
) -> None:
    """Check that a likelihood keeps the contract of `Likelihood`.

    `expected` must give the expectation of `energy` under N(e, v), which is compared with a trapezoid rule, and the
    derivatives ∂F/∂e and 2 ∂F/∂v of that value, which are compared with finite differences.  `energy` must be
    differentiable, and float32 must stay float32.  Where `convex` is said, the curvature must not be negative, and be
    differentiable itself, as Newton's method needs it.

    Args:
        factory: makes the likelihood, for example its class.
        y: targets that it can produce, (N,), as a user would write them.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.models import PoissonLog
    >>> check_likelihood(PoissonLog, torch.tensor([0.0, 1.0, 4.0]))
    """
    likelihood = factory()
    claim = Claim(kind(likelihood), f"the targets {y.tolist()}")
    claim.holds(isinstance(likelihood, Likelihood), "a likelihood must be a torchngvi.models.Likelihood")
    with claim.works("checked, energy or expected"):
        claim.holds(isinstance(likelihood.discrete, bool), "`discrete` must say whether the outcomes are classes")
        coded = likelihood.checked(y.to(DTYPE))
        claim.holds(coded.shape == y.shape, "checked(y) must keep the shape of y")
        for mean in (-1.5, 0.3, 1.2):
            for variance in (0.05, 0.5, 1.5):
                here = claim.at(f"{claim.where}, e = {mean}, v = {variance}")
                _expectation(here, likelihood, torch.full_like(coded, mean), torch.full_like(coded, variance), coded)
        eta = torch.linspace(-1.0, 1.0, len(y), dtype=DTYPE).requires_grad_()
        (slope,) = torch.autograd.grad(likelihood.energy(eta, coded).sum(), eta)
        found = derivative(lambda h: likelihood.energy(eta.detach() + h, coded))
        claim.close("energy must be differentiable in η", slope, found, DIFFERENCE)


def _expectation(claim: Claim, likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor) -> None:
    moments = likelihood.expected(mean, variance, y)
    z = torch.linspace(-10.0, 10.0, 4001, dtype=DTYPE)[:, None]
    weights = torch.exp(-0.5 * z * z) * (0.005 / math.sqrt(2 * math.pi))
    value = (weights * likelihood.energy(mean + variance.sqrt() * z, y)).sum(0)
    claim.close("the value of expected must be E[energy] under N(e, v)", moments.value, value, 1e-8)
    slope = derivative(lambda h: likelihood.expected(mean + h, variance, y).value)
    claim.close("the slope of expected must be ∂F/∂e of its value", moments.slope, slope, DIFFERENCE)
    curvature = 2 * derivative(lambda h: likelihood.expected(mean, variance + h, y).value)
    claim.close("the curvature of expected must be 2 ∂F/∂v of its value", moments.curvature, curvature, DIFFERENCE)
    if likelihood.convex:
        claim.holds((moments.curvature >= 0).all(), "`convex` is said, so β = E[f''] must not be negative")
        e, v = mean.clone().requires_grad_(), variance.clone().requires_grad_()
        beta = likelihood.expected(e, v, y).curvature
        if beta.requires_grad:  # that of a quadratic is a constant
            slopes = torch.autograd.grad(beta.sum(), (e, v), materialize_grads=True)
            for name, found, difference in (
                ("e", slopes[0], derivative(lambda h: likelihood.expected(mean + h, variance, y).curvature)),
                ("v", slopes[1], derivative(lambda h: likelihood.expected(mean, variance + h, y).curvature)),
            ):
                claim.close(f"`convex` is said, so β must be differentiable in {name}", found, difference, DIFFERENCE)
    single = likelihood.expected(mean.float(), variance.float(), y.float())
    for name, one, two in zip(moments._fields, single, moments, strict=True):
        claim.close(f"the {name} of expected in float32 must be that of float64", one, two.float(), SINGLE)


# Regressions whose expectations are known in closed form, as a target of every kind that an estimator may need

ROWS = 5
PRIOR = torch.tensor([0.7, 1.0, 2.0], dtype=DTYPE)  # its precision
TEMPERATURE = 0.5
GROUPS = arrow(groups=2, local=1, globals=1)  # of DIM coordinates, for what is a sum over groups
OF_GROUP = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0, 0.0]], dtype=DTYPE)  # whose rows they are


class Data(NamedTuple):
    """A generalised linear model as numbers, from which a target of every kind is made."""

    X: Tensor  # (N, D)
    y: Tensor  # (N,)
    likelihood: Callable[[], Likelihood]
    moments: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None  # e, v, y -> E[f], E[f'], E[f'']

    @property
    def quadratic(self) -> bool:
        """Whether the log joint is quadratic in θ."""
        return self.moments is _gaussian

    def exact(self, q: Posterior) -> tuple[Tensor, Tensor, Tensor]:
        """Compute E_q[ℓ], a and W in closed form, for one posterior."""
        assert self.moments is not None
        (mean, V), C = moments(q), q.frame().dense()
        f, slope, curvature = self.moments(self.X @ mean, (self.X @ V * self.X).sum(-1), self.y)
        square = (PRIOR * (mean.square() + V.diagonal())).sum() - PRIOR.log().sum() + DIM * math.log(2 * math.pi)
        H = self.X.mT @ torch.diag(curvature) @ self.X + TEMPERATURE * torch.diag(PRIOR)
        g = self.X.mT @ slope + TEMPERATURE * PRIOR * mean
        return f.sum() + 0.5 * TEMPERATURE * square, C.mT @ g, (C.mT @ H @ C) * mask(q.structure)

    def optimum(self) -> Normal:
        """Find the moments of the q with a full covariance at which L is lowest, by damped steps of Newton."""
        mean, V = torch.zeros(DIM, dtype=DTYPE), torch.eye(DIM, dtype=DTYPE)
        for _ in range(50):
            q = CholeskyGaussian(DIM, mean=mean, scale=torch.linalg.cholesky(V))
            _, a, W = self.exact(q)
            C, eye = q.frame().dense(), torch.eye(DIM, dtype=DTYPE)
            V = C @ torch.linalg.inv(eye + 0.5 * (W / TEMPERATURE - eye)) @ C.mT
            mean = mean - 0.5 * V @ torch.linalg.solve(C.mT, a) / TEMPERATURE
        return Normal(mean, V)


def _poisson(e: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rate = torch.exp(e + 0.5 * v)
    return rate - y * e + torch.lgamma(y + 1), rate - y, rate


def _gaussian(e: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = 0.5 * ((y - e).square() + v) + 0.5 * math.log(2 * math.pi)
    return square, e - y, torch.ones_like(e)


def _rows(at: Normal, seed: int, variance: float, grouped: bool) -> Tensor:
    """X with Var[x_nᵀθ] the same for each row under q: the estimates of `counts` then have light tails."""
    X = normal(ROWS, DIM, seed=seed)
    if grouped:  # each row is of one group
        X = X * torch.cat([OF_GROUP.mT, torch.ones(ROWS, 1, dtype=DTYPE)], -1)
    return X * (variance / (X @ at.covariance * X).sum(-1)).sqrt()[:, None]


def _regression(at: Normal, grouped: bool) -> Data:
    """Whose residuals are under q as large as their noise: the empirical Fisher matrix is the Hessian there."""
    X = _rows(at, 31, 0.5, grouped)
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=DTYPE)
    return Data(X, X @ at.mean + math.sqrt(0.5) * signs, GaussianNoise, _gaussian)


def _counts(at: Normal, grouped: bool) -> Data:
    return Data(_rows(at, 33, 0.2, grouped), torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0], dtype=DTYPE), PoissonLog, _poisson)


def _classes(at: Normal, grouped: bool) -> Data:
    return Data(_rows(at, 35, 1.0, grouped), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=DTYPE), BernoulliLogit, None)


DATA: dict[str, Callable[[Normal, bool], Data]] = {
    "a regression": _regression,
    "a Poisson regression": _counts,
    "a logistic regression": _classes,
}


def target_of(claim: Claim, needs: type[Target], data: Data, passes: list[int], dtype: torch.dtype = DTYPE) -> Target:
    """Make of the data a target of the kind that an estimator needs, which notes each of its passes over them."""
    X, y, prior = data.X.to(dtype), data.y.to(dtype), PRIOR.to(dtype)
    model = GeneralizedLinear(X, y, data.likelihood(), prior_precision=prior, temperature=TEMPERATURE)
    likelihood, labels = model.likelihood, model.y
    if isinstance(model, needs) and needs is not Target:
        return _counting_passes(model, passes)

    def log_prior(theta: Tensor) -> Tensor:
        square = prior * theta.square() - prior.log() + math.log(2 * math.pi)
        return -0.5 * TEMPERATURE * square.sum(-1)

    def terms(theta: Tensor) -> Tensor:
        return -likelihood.energy(theta @ X.mT, labels)

    def log_joint(theta: Tensor) -> Tensor:
        passes.append(len(theta))
        return terms(theta).sum(-1) + log_prior(theta)

    if needs is Target:
        return LogJoint(log_joint, TEMPERATURE)
    if issubclass(FactorTarget, needs):
        return _by_groups(data, likelihood, passes, dtype)
    if not issubclass(PerDatum, needs):
        claim.fail(
            f"it needs a {needs.__name__}, of which the check has no example; `needs` is one of the targets of "
            f"torchngvi.interfaces: Target, TractableTarget, {LinearTarget.__name__} or {SeparableTarget.__name__}"
        )
    return PerDatum(terms, log_prior, TEMPERATURE)


def _by_groups(data: Data, likelihood: Likelihood, passes: list[int], dtype: torch.dtype) -> FactorTarget:
    """The same log joint as a sum over the groups, whose prior is that of the local coordinate, and one of the rest."""
    X, y, prior, rows = (x.to(dtype) for x in (data.X, data.y, PRIOR, OF_GROUP))
    designs = torch.stack([X[:, [group, 2]] for group in range(2)])

    def log_prior(theta: Tensor, precision: Tensor) -> Tensor:
        return -0.5 * TEMPERATURE * (precision * theta.square() - precision.log() + math.log(2 * math.pi))

    def of_groups(theta: Tensor) -> Tensor:  # (*sample, *batch, 2, 2)
        passes.append(len(theta))
        eta = (designs @ theta[..., None])[..., 0]
        return -(likelihood.energy(eta, y) * rows).sum(-1) + log_prior(theta[..., 0], prior[:2])

    return FactorTarget(GROUPS, [(0, of_groups), (-1, lambda theta: log_prior(theta[..., 0], prior[2]))], TEMPERATURE)


def _counting_passes(model: GeneralizedLinear, passes: list[int]) -> GeneralizedLinear:
    likelihood = model.likelihood
    energy, expected = likelihood.energy, likelihood.expected

    def counted_energy(eta: Tensor, y: Tensor) -> Tensor:
        passes.append(eta.numel() // y.numel())
        return energy(eta, y)

    def counted_expected(*arguments: object) -> object:
        before = len(passes)
        moments = expected(*arguments)  # type: ignore[arg-type]
        passes[before:] = [1]  # whatever it is made of
        return moments

    likelihood.energy, likelihood.expected = counted_energy, counted_expected  # type: ignore[method-assign,assignment]
    return model
