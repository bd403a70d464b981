"""The checks of likelihoods and of estimators, on regressions whose expectations are known in closed form."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from torchngvi.errors import PairError
from torchngvi.expectations.flat import LowerBound
from torchngvi.interfaces import Estimator, Expectation, Framed, LinearTarget, Posterior, SeparableTarget, Target
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
from torchngvi.posteriors import CholeskyGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.structures import arrow
from torchngvi.testing.claims import (
    BATCHES,
    DIFFERENCE,
    DIM,
    DTYPE,
    IDENTITY,
    POSTERIORS,
    SINGLE,
    Claim,
    Normal,
    PosteriorFactory,
    batch_text,
    derivative,
    kind,
    made,
    mask,
    member,
    moments,
    normal,
    over,
    single,
    start,
    tensors_in,
)
from torchngvi.testing.posteriors import FLAT, LAWS, several


def check_likelihood(factory: Callable[[], Likelihood], y: Tensor) -> None:
    """Check that a likelihood keeps the contract of `Likelihood`.

    `expected` must give the expectation of `energy` under N(e, v), which is compared with a trapezoid rule, and the
    derivatives ∂F/∂e and 2 ∂F/∂v of that value, which are compared with finite differences.  `energy` must be
    differentiable, and float32 must stay float32.  Where `convex` is said, the curvature must not be negative, and be
    differentiable itself, as Newton's method needs it; where `self_concordant` is, |f'''| ≤ f''.  The probabilities of
    `two_classes`, coded -1 and +1, must sum to 1, and a `continuous` density integrate to 1 over the numbers that
    `checked` takes: all, the positive ones, or those between 0 and 1.

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
        if likelihood.two_classes or likelihood.discrete:
            signs = torch.where(y == y.max(), 1.0, -1.0).to(DTYPE)
            claim.same("checked must return two classes, the smaller as -1, the larger as +1", coded, signs)
        for mean in (-1.5, 0.3, 1.2):
            for variance in (0.05, 0.5, 1.5, 100.0):
                here = claim.at(f"{claim.where}, e = {mean}, v = {variance}")
                _expectation(here, likelihood, torch.full_like(coded, mean), torch.full_like(coded, variance), coded)
        _density(claim, likelihood, coded)
        eta = torch.linspace(-1.0, 1.0, len(y), dtype=DTYPE).requires_grad_()
        (slope,) = torch.autograd.grad(likelihood.energy(eta, coded).sum(), eta)
        found = derivative(lambda h: likelihood.energy(eta.detach() + h, coded))
        claim.close("energy must be differentiable in η", slope, found, DIFFERENCE)


def _density(claim: Claim, likelihood: Likelihood, y: Tensor) -> None:
    """Of the sum of p(y | η) over y, and of the third derivative in η."""
    eta = torch.linspace(-6.0, 6.0, 25, dtype=DTYPE)[:, None]
    if likelihood.two_classes or likelihood.discrete:
        total = torch.exp(-likelihood.energy(eta, eta.new_tensor([-1.0, 1.0]))).sum(-1)
        claim.close(
            "the probabilities exp(-energy) of two classes must sum to 1", total, torch.ones_like(total), IDENTITY
        )
    if likelihood.continuous:

        def takes(value: float) -> bool:
            try:
                return bool(likelihood.checked(y.new_tensor([value])).isfinite())
            except ValueError:
                return False

        # a trapezoid rule in the logarithm of |y - η|, or of y, or in the logit of y
        near, x = eta[8:17], torch.linspace(-40.0, 40.0, 80_001, dtype=DTYPE)
        size, slope = (x.exp(), x.exp()) if takes(2.0) else (x.sigmoid(), x.sigmoid() * (-x).sigmoid())
        sides = (near + size, near - size) if takes(-1.0) else (size,)
        heights = torch.stack([torch.exp(-likelihood.energy(near, side)) for side in sides]).sum(0)
        total = 0.001 * (heights * slope).sum(-1)
        claim.close("the density exp(-energy) must integrate to 1 over y", total, torch.ones_like(total), DIFFERENCE)
    if likelihood.self_concordant:
        eta = eta.expand(-1, len(y))
        bend = likelihood.derivatives(eta, y).curvature
        third = derivative(lambda h: likelihood.derivatives(eta + h, y).curvature)
        told = third.abs() <= bend + DIFFERENCE * (1 + bend.abs())
        claim.holds(told.all(), "`self_concordant` is said, so |f'''| must be at most f''")


def _expectation(claim: Claim, likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor) -> None:
    moments = likelihood.expected(mean, variance, y)
    z = torch.linspace(-20.0, 20.0, 80_001, dtype=DTYPE)[:, None]  # where exp η has its weight too, at v = 100
    weights = torch.exp(-0.5 * z * z) * (0.0005 / math.sqrt(2 * math.pi))
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


# ------------------------------------------------------------------------------------ estimators


# The check of an estimator for flat posteriors: L and ∇L in λ against laws of ``torch.distributions``
#
# The log joint is a law p of the same kind as q, so that L = KL(q‖p) + (1 - γ) entropy(q), and autograd gives ∇L.

REPEATS = 1500  # estimates of a z-test, side by side


class Known(NamedTuple):
    """A target whose L is known at every λ."""

    law: Callable[[Tensor], Distribution]  # of q, by λ
    goal: Tensor  # (D,), the λ of the law p whose density is the joint

    def loss(self, lam: Tensor) -> Tensor:
        """Compute L(λ), (*batch,)."""
        q, p = self.law(lam), self.law(self.goal.to(lam.dtype))
        return kl_divergence(q, p) + (1 - TEMPERATURE) * q.entropy()

    def exact(self, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Compute L and ∇L at one λ."""
        lam = lam.detach().clone().requires_grad_()
        value = self.loss(lam)
        (gradient,) = torch.autograd.grad(value.sum(), lam)
        return value.detach(), gradient

    def target(self, needs: type[Target], passes: list[int]) -> Target | None:
        """Make the target of the kind that is needed, or None where there is no such example."""
        if issubclass(LowerBound, needs) and needs is not Target:
            return LowerBound(lambda lam: -self.loss(lam))

        def log_joint(theta: Tensor) -> Tensor:
            passes.append(len(theta))
            return self.law(self.goal.to(theta.dtype)).log_prob(theta)

        return LogJoint(log_joint, TEMPERATURE) if needs is Target else None


def check_on_flat(claim: Claim, factory: Callable[[], Estimator]) -> int:
    """Check an estimator on the flat posteriors that it takes."""
    tried = 0
    for name, law in LAWS.items():
        q, here = FLAT[name](), claim.at(f"the flat posterior {name}")
        case = Known(law, q.retracted(q.vector, torch.full_like(q.vector, 0.2)))
        try:
            factory().check(q)
            if case.target(factory().needs, []) is None:
                continue
            torch.manual_seed(1)
            _check_flat(here, factory, q, case)
        except PairError:
            continue
        tried += 1
    return tried


def _check_flat(claim: Claim, factory: Callable[[], Estimator], q: FlatPosterior, case: Known) -> None:
    estimator, passes = factory(), list[int]()
    target = case.target(estimator.needs, passes)
    assert target is not None
    for batch in BATCHES:
        here, there = claim.at(f"{batch_text(batch)}, {claim.where}"), several(q, batch, 5)
        passes.clear()
        e = estimator(there, target)
        _packet(here, estimator, there, e, target)
        if not isinstance(target, LowerBound):
            counted = e.cost.gradients + e.cost.values
            sentence = f"its cost must count what it evaluates, {sum(passes)} times; it says {tuple(e.cost)}"
            here.holds(counted == sum(passes), sentence)
        if estimator.comparable:
            _compare(here, e, there, case, unbiased=False)
            again = estimator(there, target)
            sentence = "`comparable` is said, so two evaluations at the same q must agree"
            here.same(sentence, again.value, e.value)
    if not estimator.comparable:
        many = q.at(q.vector.expand(REPEATS, q.size))
        first = estimator(many, target)
        _compare(claim, first, q, case, unbiased=True)
        if first.learned:  # what the draws of one call tell is used for those of the next
            told = claim.at(f"{claim.where}, told what it has learned")
            _compare(told, estimator.recalling(first.learned)(many, target), q, case, unbiased=True)
        _others(claim, estimator, q, case)
    floats = q.at(q.vector)
    floats.float()
    _packet(claim.at(f"{claim.where}, float32"), estimator, floats, estimator(floats, target), target)


def _compare(claim: Claim, e: Expectation, q: FlatPosterior, case: Known, unbiased: bool) -> None:
    value, gradient = case.exact(q.vector)
    assert isinstance(e.derivative, Framed)
    for name, actual, expected in (("value", e.value, value), ("derivative", e.derivative.a, gradient)):
        what = "L" if name == "value" else "∇L"
        if unbiased:
            claim.unbiased(f"its {name} must be unbiased for {what}", actual, expected)
        else:
            claim.close(f"its {name} must be {what}", actual, expected, IDENTITY)


def _others(claim: Claim, estimator: Estimator, q: FlatPosterior, case: Known) -> None:
    """A log joint that fails for one member leaves the others alone."""

    def log_joint(theta: Tensor) -> Tensor:
        value = case.law(case.goal).log_prob(theta)
        return torch.where(torch.arange(3) == 1, torch.nan, value)

    e = estimator(q.at(q.vector.expand(3, q.size)), LogJoint(log_joint, TEMPERATURE))
    assert isinstance(e.derivative, Framed)
    fine = e.value.isfinite() & e.derivative.a.isfinite().all(-1)
    claim.holds(fine.tolist() == [True, False, True], "a log joint that fails for a member must spoil that one alone")


LOOPS = 40  # estimates of a z-test, one by one
OVER_GROUPS = {"PrecisionCholeskyGaussian over groups": over(PrecisionCholeskyGaussian, lambda dim: GROUPS)}


def check_estimator(factory: Callable[[], Estimator]) -> None:
    """Check that an estimator keeps the contract of `Estimator` and `Expectation` on every posterior.

    It is tried on regressions whose expectations are known in closed form.  One that draws must be unbiased for a
    quadratic log joint and, if it says `unbiased`, for any, by z-tests of value, a and W.  One that says `comparable`
    must give the same at each call and be exact for a quadratic, and its derivative must be that of its value, by
    finite differences: exactly, or within five of the standard errors that ``noise2`` tells, which must not be below
    the errors that it makes.  Of both kinds the shapes,
    dtypes, batches, the temperature and the cost are checked.  One for flat posteriors is tried on those whose law is
    known.  Targets, posteriors and batches that it refuses by a `PairError` are left out.

    Args:
        factory: makes the estimator, for example its class.  Few draws are enough, and make the check faster.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.expectations import Quadrature
    >>> check_estimator(Quadrature)
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), Estimator), "an estimator must be a torchngvi.interfaces.Estimator")
    grouped = issubclass(factory().needs, FactorTarget)
    with torch.random.fork_rng(devices=[]):
        tried = check_on_flat(claim, factory)
        for name, posterior in (OVER_GROUPS if grouped else POSTERIORS).items():
            at = start(posterior, (), 5)
            for label, data in DATA.items():
                torch.manual_seed(1)
                here = claim.at(f"{label}, {name}")
                try:
                    factory().check(made(posterior, at))
                    _check_on(here, factory, posterior, at, data(at, grouped))
                except PairError:
                    continue
                tried += 1
    claim.holds(tried > 0, "it refused every target; `needs` must say which ones it evaluates")


def _check_on(
    claim: Claim, factory: Callable[[], Estimator], posterior: PosteriorFactory, at: Normal, data: Data
) -> None:
    estimator, q, passes = factory(), made(posterior, at), list[int]()
    target = target_of(claim, estimator.needs, data, passes)
    e = estimator(q, target)
    _packet(claim, estimator, q, e, target)
    cost = e.cost
    counted = cost.gradients + cost.values
    if not isinstance(target, LinearTarget):
        counted += DIM * cost.hessians  # D products with a vector each
    if not isinstance(target, PerDatum):  # which is asked for its terms besides
        sentence = f"its cost must count what it evaluates, {sum(passes)} times; it says {tuple(cost)}"
        claim.holds(counted == sum(passes), sentence)
    if estimator.comparable:
        _comparable(claim, estimator, posterior, at, target, e)
        if data.quadratic:
            for name, actual, expected in zip(("value", "a", "W"), _parts(q, e), data.exact(q), strict=True):
                claim.close(f"its {name} must be exact for a quadratic log joint", actual, expected, IDENTITY)
        if e.noise2 is not None and data.moments is not None:
            _noise(claim, estimator, q, e, data, target)
    elif data.quadratic or (data.moments is not None and estimator.unbiased):
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
    claim.holds(q.framed or isinstance(e.derivative, Framed), "its derivative must be Framed, ∇L with no matrix")
    a, W = e.derivative.framed(q.frame()) if q.framed else e.derivative  # type: ignore[misc]
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
    q, estimator = made(posterior, single(at)), factory()
    target = target_of(claim, estimator.needs, data, list[int](), torch.float32)
    e = estimator(q, target)
    _packet(claim.at(f"{claim.where}, float32"), estimator, q, e, target)
    if estimator.comparable:
        double = factory()(made(posterior, at), target_of(claim, estimator.needs, data, list[int]()))
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

    told, found = a @ x + (W * R).sum(), derivative(value)
    sentence = "`comparable` is said, so a and W must be the derivative of its value, by finite differences"
    if e.noise2 is None:
        claim.close(sentence, told, found, DIFFERENCE)
    else:  # a step (x, R) changes V by C(R + Rᵀ)Cᵀ, so that its squared length is |x|² + ½‖R + Rᵀ‖²
        length = (x.square().sum() + 0.5 * (R + R.mT).square().sum()).sqrt()
        rounding = DIFFERENCE * found.abs().clamp_min(1.0)  # where no noise is told, as for a quadratic
        errors = float(((told - found).abs() - rounding).clamp_min(0.0) / (length * e.noise2.sqrt()))
        claim.holds(errors <= 5, f"{sentence}; it is off by {errors:.1f} of the standard errors of noise2")
    batch = (2, DIM)
    several = Normal(at.mean + 0.2 * normal(*batch, DIM, seed=43), at.covariance.expand(*batch, DIM, DIM).contiguous())
    q = made(posterior, several)
    whole = _parts(q, estimator(q, target))
    for index in ((0, 0), (1, DIM - 1)):
        one = made(posterior, member(several, index))
        for part, expected in zip(whole, _parts(one, estimator(one, target)), strict=True):
            here = claim.at(f"{claim.where}, {batch_text(batch)}")
            here.close("batch members must not depend on one another", part[index], expected, IDENTITY)


def _noise(claim: Claim, estimator: Estimator, q: Posterior, e: Expectation, data: Data, target: Target) -> None:
    """The squared standard error that it tells, at the optimum of a dense q, against the errors that it makes there."""
    assert e.noise2 is not None
    right = e.noise2.shape == q.batch_shape and e.noise2.dtype == e.value.dtype and bool((e.noise2 >= 0).all())
    claim.holds(right, "its noise2 must be one number a member, not negative, in the dtype of q")
    if data.quadratic or q.structure.widest < DIM:
        return
    there = made(CholeskyGaussian, data.optimum())
    (_, true_a, true_W), told, made2 = data.exact(there), 0.0, 0.0
    for number in range(1, LOOPS + 1):
        e = estimator.fresh(number)(there, target)
        _, a, W = _parts(there, e)
        assert e.noise2 is not None
        told += float(e.noise2)
        made2 += float((a - true_a).square().sum() + 0.5 * (W - true_W).square().sum())
    sentence = "its noise2 must not be below the squared error of a and W at the optimum"
    claim.holds(made2 <= 2 * told, f"{sentence}; that is {made2 / told:.1f} times what it tells")


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
