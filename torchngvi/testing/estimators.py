"""The checks of estimators, for Gaussian and for flat posteriors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from torchngvi.errors import PairError
from torchngvi.expectations.flat import LowerBound
from torchngvi.interfaces import Estimator, Expectation, Framed, LinearTarget, Posterior, Target
from torchngvi.models import LogJoint, PerDatum
from torchngvi.models.factors import FactorTarget
from torchngvi.posteriors import CholeskyGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors.flat import FlatPosterior
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
    normal,
    over,
    single,
    start,
    tensors_in,
)
from torchngvi.testing.flat_posteriors import FLAT, LAWS, several
from torchngvi.testing.regressions import DATA, GROUPS, Data, target_of

# The check of an estimator for flat posteriors: L and ∇L in λ against laws of ``torch.distributions``
#
# The log joint is a law p of the same kind as q, so that L = KL(q‖p) + (1 - γ) entropy(q), and autograd gives ∇L.

REPEATS = 1500  # estimates of a z-test, side by side
TEMPERATURE = 0.5


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


# The check of an estimator: its values and derivatives against closed forms, by z-tests where it draws

LOOPS = 40  # estimates of a z-test, one by one
OVER_GROUPS = {"PrecisionCholeskyGaussian over groups": over(PrecisionCholeskyGaussian, lambda dim: GROUPS)}


def check_estimator(
    factory: Callable[[], Estimator],
) -> None:
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
