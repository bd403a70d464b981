"""The check of an estimator: values and derivatives against closed forms, by z-tests where it draws."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces import Estimator, Expectation, LinearTarget, Posterior, SeparableTarget, Target
from torchngvi.models import (
    BernoulliLogit,
    GaussianNoise,
    GeneralizedLinear,
    Likelihood,
    LogJoint,
    PerDatum,
    PoissonLog,
)
from torchngvi.testing.claims import (
    DIFFERENCE,
    DTYPE,
    IDENTITY,
    SINGLE,
    Claim,
    batch_text,
    derivative,
    kind,
    normal,
    tensors_in,
)
from torchngvi.testing.matrices import mask
from torchngvi.testing.problems import DIM, POSTERIORS, Normal, PosteriorFactory, made, moments, start

ROWS, REPEATS, LOOPS = 5, 1500, 40  # rows of data; estimates of a z-test from one batch, or one by one
PRIOR = torch.tensor([0.7, 1.0, 2.0], dtype=DTYPE)  # its precision
TEMPERATURE = 0.5


class Data(NamedTuple):
    """A generalised linear model, from which a target of every kind is made."""

    X: Tensor  # (N, D)
    y: Tensor  # (N,)
    likelihood: Callable[[], Likelihood]
    moments: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None  # e, v, y -> E[f], E[f'], E[f'']

    def exact(self, q: Posterior) -> tuple[Tensor, Tensor, Tensor]:
        """E_q[ℓ], a and W in closed form, one posterior."""
        assert self.moments is not None
        (mean, V), C = moments(q), q.frame().dense()
        f, slope, curvature = self.moments(self.X @ mean, (self.X @ V * self.X).sum(-1), self.y)
        square = (PRIOR * (mean.square() + V.diagonal())).sum() - PRIOR.log().sum() + DIM * math.log(2 * math.pi)
        H = self.X.mT @ torch.diag(curvature) @ self.X + TEMPERATURE * torch.diag(PRIOR)
        g = self.X.mT @ slope + TEMPERATURE * PRIOR * mean
        return f.sum() + 0.5 * TEMPERATURE * square, C.mT @ g, (C.mT @ H @ C) * mask(q.structure)


def _poisson(e: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rate = torch.exp(e + 0.5 * v)
    return rate - y * e + torch.lgamma(y + 1), rate - y, rate


def _gaussian(e: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = 0.5 * ((y - e).square() + v) + 0.5 * math.log(2 * math.pi)
    return square, e - y, torch.ones_like(e)


def _rows(at: Normal, seed: int, variance: float) -> Tensor:
    """X with Var[x_nᵀθ] the same for each row under q: the estimates of `counts` then have light tails."""
    X = normal(ROWS, DIM, seed=seed)
    return X * (variance / (X @ at.covariance * X).sum(-1)).sqrt()[:, None]


def _regression(at: Normal) -> Data:
    """Whose residuals are under q as large as their noise: the empirical Fisher matrix is the Hessian there."""
    X = _rows(at, 31, 0.5)
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=DTYPE)
    return Data(X, X @ at.mean + math.sqrt(0.5) * signs, GaussianNoise, _gaussian)


def _counts(at: Normal) -> Data:
    return Data(_rows(at, 33, 0.2), torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0], dtype=DTYPE), PoissonLog, _poisson)


def _classes(at: Normal) -> Data:
    return Data(_rows(at, 35, 1.0), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=DTYPE), BernoulliLogit, None)


DATA = {"a regression": _regression, "counts": _counts, "classes": _classes}


class Counted:
    """How often a function of the target was evaluated, in passes over the data or in draws."""

    def __init__(self) -> None:
        self.passes = 0


def _target(claim: Claim, needs: type[Target], data: Data, count: Counted, dtype: torch.dtype = DTYPE) -> Target:
    """The data as a target of the kind that an estimator needs."""
    X, y, prior = data.X.to(dtype), data.y.to(dtype), PRIOR.to(dtype)
    model = GeneralizedLinear(X, y, data.likelihood(), prior_precision=prior, temperature=TEMPERATURE)
    likelihood, labels = model.likelihood, model.y
    if isinstance(model, needs) and needs is not Target:
        return _counting_passes(model, count)

    def log_prior(theta: Tensor) -> Tensor:
        square = prior * theta.square() - prior.log() + math.log(2 * math.pi)
        return -0.5 * TEMPERATURE * square.sum(-1)

    def terms(theta: Tensor) -> Tensor:
        return -likelihood.energy(theta @ X.mT, labels)

    def log_joint(theta: Tensor) -> Tensor:
        count.passes += len(theta)
        return terms(theta).sum(-1) + log_prior(theta)

    if needs is Target:
        return LogJoint(log_joint, TEMPERATURE)
    if not issubclass(PerDatum, needs):
        claim.fail(
            f"it needs a {needs.__name__}, of which the check has no example; `needs` is one of the targets of "
            f"torchngvi.interfaces: Target, TractableTarget, {LinearTarget.__name__} or {SeparableTarget.__name__}"
        )
    return PerDatum(terms, log_prior, TEMPERATURE)


def _counting_passes(model: GeneralizedLinear, count: Counted) -> GeneralizedLinear:
    likelihood = model.likelihood
    energy, expected = likelihood.energy, likelihood.expected

    def counted_energy(eta: Tensor, y: Tensor) -> Tensor:
        count.passes += eta.numel() // y.numel()
        return energy(eta, y)

    def counted_expected(*arguments: object) -> object:
        before = count.passes
        moments = expected(*arguments)  # type: ignore[arg-type]
        count.passes = before + 1  # whatever it is made of
        return moments

    likelihood.energy, likelihood.expected = counted_energy, counted_expected  # type: ignore[method-assign,assignment]
    return model


def check_estimator(
    factory: Callable[[], Estimator],
) -> None:
    """Check that an estimator keeps the contract of `Estimator` and `Expectation` on every posterior.

    On regressions with closed forms: one that draws must be unbiased, by z-tests of value, a and W, on a quadratic
    log joint and, if it says `unbiased`, on any; one that says `comparable` must give the same at each call, exact for
    a quadratic, and its derivative must be that of its value, by finite differences.  Shapes, dtypes, batches, the
    temperature, and the cost that it tells are checked for both.  Targets that it refuses by a `PairError` are
    left out, as are batches.

    Args:
        factory: makes the estimator, for example its class.  Few draws are enough, and make the check faster.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.expectations import Quadrature
    >>> check_estimator(Quadrature)
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), Estimator), "an estimator must be a torchngvi.interfaces.Estimator")
    tried = 0
    with torch.random.fork_rng(devices=[]):
        for name, posterior in POSTERIORS.items():
            at = start(posterior, (), 5)
            for label, data in DATA.items():
                torch.manual_seed(1)
                here = claim.at(f"{label}, {name}")
                try:
                    _check_on(here, factory, posterior, at, data(at))
                except PairError:
                    continue
                tried += 1
    claim.holds(tried > 0, "it refused every target; `needs` must say which ones it evaluates")


def _check_on(
    claim: Claim, factory: Callable[[], Estimator], posterior: PosteriorFactory, at: Normal, data: Data
) -> None:
    estimator, q, count = factory(), made(posterior, at), Counted()
    target = _target(claim, estimator.needs, data, count)
    e = estimator(q, target)
    _packet(claim, estimator, q, e, target)
    cost = e.cost
    passes = cost.gradients + cost.values
    if not isinstance(target, LinearTarget):
        passes += DIM * cost.hessians  # D products with a vector each
    if not isinstance(target, PerDatum):  # which is asked for its terms besides
        sentence = f"its cost must count what it evaluates, {count.passes} times; it says {tuple(cost)}"
        claim.holds(passes == count.passes, sentence)
    if estimator.comparable:
        _comparable(claim, estimator, posterior, at, target, e)
        if data.moments is _gaussian:
            for name, actual, expected in zip(("value", "a", "W"), _parts(q, e), data.exact(q), strict=True):
                claim.close(f"its {name} must be exact for a quadratic log joint", actual, expected, IDENTITY)
    elif data.moments is _gaussian or (data.moments is not None and estimator.unbiased):
        estimates = _estimates(estimator, posterior, at, target)
        for name, actual, expected in zip(("value", "a", "W"), estimates, data.exact(q), strict=True):
            claim.unbiased(f"its {name} must be unbiased", actual, expected)
    _single(claim, factory, posterior, at, data)


def _parts(q: Posterior, e: Expectation) -> tuple[Tensor, Tensor, Tensor]:
    """Value, a, and W written out."""
    a, W = e.derivative.framed(q.frame())
    return e.value, a, q.structure.full(W)


def _packet(claim: Claim, estimator: Estimator, q: Posterior, e: Expectation, target: Target) -> None:
    claim.holds(isinstance(e, Expectation), f"it must return an Expectation; got {type(e).__name__}")
    claim.holds(e.temperature == target.temperature, "it must hand on the temperature of the target")
    claim.holds(e.comparable == (estimator.comparable and target.comparable), "it must be comparable as it says")
    a, W = e.derivative.framed(q.frame())
    shapes = {"value": (e.value, q.batch_shape), "a": (a, q.mean_probe.shape), "W": (W, q.root_probe.shape)}
    for name, (tensor, shape) in shapes.items():
        claim.holds(tensor.shape == shape, f"its {name} must have the shape {tuple(shape)}; got {tuple(tensor.shape)}")
        claim.holds(tensor.dtype == q.mean_probe.dtype, f"its {name} must have the dtype of q; got {tensor.dtype}")
    left = any(x.requires_grad for x in (e.value, *tensors_in(e.derivative)))
    claim.holds(not left, "its packet must have no graph")
    claim.holds(q.mean_probe.grad is None and q.root_probe.grad is None, "it must leave no gradient in the probes")


def _single(
    claim: Claim, factory: Callable[[], Estimator], posterior: PosteriorFactory, at: Normal, data: Data
) -> None:
    q, estimator = made(posterior, at.float()), factory()
    target = _target(claim, estimator.needs, data, Counted(), torch.float32)
    e = estimator(q, target)
    _packet(claim.at(f"{claim.where}, float32"), estimator, q, e, target)
    if estimator.comparable:
        double = factory()(made(posterior, at), _target(claim, estimator.needs, data, Counted()))
        claim.close("its value in float32 must be that of float64", e.value, double.value.float(), SINGLE)


def _comparable(
    claim: Claim, estimator: Estimator, posterior: PosteriorFactory, at: Normal, target: Target, e: Expectation
) -> None:
    """The same at each call; the derivative is that of the value along both probes; a batch is its members."""
    q = made(posterior, at)
    again = estimator(q, target)
    error = float((again.value - e.value).abs().max())
    claim.holds(
        error <= 1e-12 * float(e.value.abs().clamp_min(1.0)),
        f"`comparable` is said, so two evaluations at the same q must agree; they differ by {error:.1e}",
    )
    _, a, W = _parts(q, e)
    frame = q.frame()
    C, pattern = frame.dense(), mask(q.structure)
    x, R = normal(DIM, seed=41), 0.7 * normal(DIM, DIM, seed=42).tril() * pattern

    def value(h: float) -> Tensor:
        turn = torch.eye(DIM, dtype=DTYPE) + h * R
        root = C @ (turn.mT if frame.upper else turn)
        there = made(posterior, Normal(frame.mean + h * C @ x, root @ root.mT))
        return estimator(there, target).value

    claim.close(
        "`comparable` is said, so a and W must be the derivative of its value, by finite differences",
        a @ x + (W * R).sum(),
        derivative(value),
        DIFFERENCE,
    )
    batch = (2, DIM)
    several = Normal(at.mean + 0.2 * normal(*batch, DIM, seed=43), at.covariance.expand(*batch, DIM, DIM).contiguous())
    q = made(posterior, several)
    whole = _parts(q, estimator(q, target))
    for index in ((0, 0), (1, DIM - 1)):
        one = made(posterior, several.member(index))
        for part, expected in zip(whole, _parts(one, estimator(one, target)), strict=True):
            here = claim.at(f"{claim.where}, {batch_text(batch)}")
            here.close("batch members must not depend on one another", part[index], expected, IDENTITY)


def _estimates(
    estimator: Estimator, posterior: PosteriorFactory, at: Normal, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    """Independent estimates (R, ...) of value, a and W: from a batch of equal posteriors, or one by one."""
    several = Normal(at.mean.expand(REPEATS, DIM), at.covariance.expand(REPEATS, DIM, DIM))
    q = made(posterior, several)
    try:
        return _parts(q, estimator(q, target))
    except PairError:
        one = made(posterior, at)
        parts = [_parts(one, estimator(one, target)) for _ in range(LOOPS)]
        value, a, W = (torch.stack(part) for part in zip(*parts, strict=True))
        return value, a, W
