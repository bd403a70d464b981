"""The checks of rules, metrics, momenta and step sizes: finite differences of L on quadratic problems, closed forms."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.expectations import Fixed, Stein
from torchngvi.expectations.flat import ClosedForm
from torchngvi.interfaces import (
    Acceleration,
    Bent,
    Coordinates,
    LinearTarget,
    Local,
    Metric,
    Momentum,
    Path,
    Posterior,
    RootTangent,
    Rule,
    StepSize,
    Tangent,
    Trial,
    TrialStepSize,
)
from torchngvi.models import GeneralizedLinear, LogJoint
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.rules import NaturalGradient, RootGradient
from torchngvi.structures import FullAlgebra
from torchngvi.testing.claims import (
    BATCHES,
    DIFFERENCE,
    DIM,
    DTYPE,
    EXACT,
    IDENTITY,
    POSTERIORS,
    SINGLE,
    Claim,
    NoReads,
    Normal,
    PosteriorFactory,
    Quadratic,
    after,
    batch_text,
    check_members,
    derivative,
    entries,
    kind,
    made,
    mapped,
    matvec,
    normal,
    quadratic,
    relative_error,
    root_in,
    start,
    symmetric_in,
    tensors_in,
    unlike,
)
from torchngvi.testing.posteriors import FLAT, LAWS, fisher, several

RHO = 0.03  # a step that every descent stays in the cone with


def check_rule(factory: Callable[[], Rule]) -> None:
    """Check that a rule keeps the contract of `Rule` and `Path`, on every posterior that takes its moves.

    It is tried on quadratic problems of several temperatures and batches.  The path must begin at q, `slope()` must be
    -dL/dρ there, by finite differences, `norm2()` the squared natural norm of ∇L, and `length2()` the squared length of
    dq/dρ in the Fisher metric.  `natural` must be told truly, and the moves be of the kind `emits`.  Nothing of q or of
    the packet may be written to, members must not depend on one another, and float32 must stay float32.  Posteriors
    whose structure lacks the products of a `FullAlgebra` are left out if the rule asks for it, and so are those that it
    refuses by a `PairError`.

    Args:
        factory: makes the rule, for example its class.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.rules import VariationalNewton
    >>> check_rule(VariationalNewton)
    """
    rule = factory()
    claim = Claim(kind(rule))
    claim.holds(isinstance(rule, Rule), "a rule must be a torchngvi.interfaces.Rule")
    tried = 0
    for name, posterior in POSTERIORS.items():
        q = posterior(3)
        if rule.emits not in q.takes or (rule.full_algebra and not isinstance(q.structure, FullAlgebra)):
            continue
        for batch, temperature in zip(BATCHES, (1.0, 0.5), strict=True):
            here = claim.at(f"{batch_text(batch)}, {name}, temperature {temperature:g}")
            tried += _check_on(here, rule, posterior, quadratic(batch, temperature, 11), batch)
    claim.holds(tried > 0, f"no posterior takes its moves, {rule.emits.__name__}; `takes` must name them")


def _check_on(claim: Claim, rule: Rule, factory: PosteriorFactory, problem: Quadratic, batch: tuple[int, ...]) -> bool:
    """All that is asked of one posterior; whether the rule takes it."""
    at = start(factory, batch, 5)
    q = made(factory, at)
    packet = problem.packet(q)
    before = [x.clone() for x in (*q.coordinates, *tensors_in(packet))]
    with claim.works("a call (does it need `full_algebra`?)"):
        try:
            path = rule(q, packet)
        except PairError:
            return False
        rho = RHO * (1 + torch.arange(q.mean_probe[..., 0].numel(), dtype=DTYPE)).reshape(batch) / 6
        there, ok = after(q, path.at(rho))
    claim.holds(ok.shape == batch and bool(ok.all()), f"a step of {RHO:g} must stay in the cone")
    _moves(claim, rule, path, rho)
    for old, now in zip(before, (*q.coordinates, *tensors_in(packet)), strict=True):
        claim.same("it must not write to q or to the packet", now, old)
    claim.holds(q.mean_probe.grad is None and q.root_probe.grad is None, "it must leave no gradient in the probes")
    _start_of_the_path(claim, rule, q, path, problem)

    def run(q: Posterior, given: tuple[Quadratic, Tensor]) -> Normal:
        return after(q, rule(q, given[0].packet(q)).at(given[1]))[0]

    check_members(claim, factory, at, [problem, rho], run, there, "step")
    return True


def _moves(claim: Claim, rule: Rule, path: Path, rho: Tensor) -> None:
    move = path.at(rho)
    claim.holds(
        type(move) is rule.emits,
        f"its moves must be of the kind that `emits` says, {rule.emits.__name__}; got {type(move).__name__}",
    )
    again = [x.clone() for x in tensors_in(move)]
    path.at(2 * rho)
    for old, now in zip(again, tensors_in(path.at(rho)), strict=True):
        claim.same("at(ρ) must give the same move again", now, old)
    claim.holds(not any(x.requires_grad for x in again), "its moves must have no graph")


def _start_of_the_path(claim: Claim, rule: Rule, q: Posterior, path: Path, problem: Quadratic) -> None:
    """Where it begins, how L falls, and along which direction."""
    like = q.mean_probe.detach()[..., 0]
    here, _ = after(q, path.at(torch.zeros_like(like)))
    mean, covariance = q.frame().mean, q.frame().dense() @ q.frame().dense().mT
    claim.close("at(0) must be q itself, its mean", here.mean, mean, IDENTITY)
    claim.close("at(0) must be q itself, its covariance", here.covariance, covariance, IDENTITY)
    a, P = problem.local(q)
    expected = a.square().sum(-1) + 0.5 * P.square().sum((-2, -1))
    claim.close("norm2() must be the squared natural norm |a|² + ½‖P‖² of ∇L", path.norm2(), expected, IDENTITY)
    fall = -derivative(lambda rho: problem.loss(after(q, path.at(torch.full_like(like, rho)))[0]))
    claim.close("slope() must be -dL/dρ at ρ = 0, by finite differences", path.slope(), fall, DIFFERENCE)
    claim.holds((fall > 0).all(), "the path must go down where ∇L is not zero")
    velocity = [
        derivative(lambda rho, part=part: after(q, path.at(torch.full_like(like, rho)))[0][part])  # type: ignore[misc]
        for part in (0, 1)
    ]
    inverse = torch.linalg.inv(q.frame().dense())
    u, Q = matvec(inverse, velocity[0]), inverse @ velocity[1] @ inverse.mT
    off = max(relative_error(u, -a), relative_error(Q, -P))
    fisher = u.square().sum(-1) + 0.5 * Q.square().sum((-2, -1))
    claim.close(
        "length2() must be the squared Fisher length of dq/dρ: say `speed2`", path.length2(), fisher, DIFFERENCE
    )
    if rule.natural:
        claim.holds(
            off <= DIFFERENCE,
            f"`natural` is said, so the path must start along the natural gradient -(a, P) in the frame; it is off by "
            f"{off:.1e}",
        )
    else:
        claim.holds(off > DIFFERENCE, "the path starts along the natural gradient, so `natural` must be True")


# ------------------------------------------------------------------------------------ the check of a metric


State = dict[str, Any]
Factory = Callable[[], Metric]


def check_metric(factory: Factory) -> None:
    """Check that a metric keeps the contract of `Metric`, on every flat posterior that it takes.

    It is given made-up gradients, as a run would hand them over.  The direction B∇L and its slope ⟨∇L, B∇L⟩ must have
    the shape and dtype of λ and of its batch, and lie on the manifold of q.  A metric that says `natural` must be a
    symmetric positive definite linear map that makes the Fisher matrix rounder; one that says `exact` must invert the
    Fisher matrix that autograd finds, and ``inverse(state)``, where there is one, must be the matrix of the map.  New
    state is returned and the old is not written to, so that a step that is tried again gives the same; a run resumes
    from the state dict of its optimizer bit for bit.  Members do not depend on one another, a draw or a gradient that
    is not finite leaves no trace, no value is read back from the device, and a gradient of another shape is refused
    by an `InputError`.  Posteriors that it refuses by a `PairError` or an `InputError` are left out.

    Args:
        factory: makes the metric, for example its class.

    Raises:
        AssertionError: a promise is broken; the text says which, by how much, and for which input.

    >>> from torchngvi.metrics import Exact
    >>> check_metric(Exact)
    """
    part = factory()
    claim = Claim(kind(part))
    claim.holds(isinstance(part, Metric), "a metric must be a torchngvi.interfaces.Metric")
    claim.holds(not isinstance(part, Acceleration), "an Acceleration has a check of its own, check_acceleration")
    claim.holds(part.natural or not part.exact, "the inverse Fisher matrix is natural: `exact` needs `natural`")
    tried = 0
    with torch.random.fork_rng(devices=[]):
        for name, make in FLAT.items():
            for batch in BATCHES:
                q, here = several(make(), batch, 5), claim.at(f"{batch_text(batch)}, {name}")
                with here.works("init or a call"):
                    try:
                        factory().init(q)
                    except (PairError, InputError):
                        continue
                    tried += 1
                    _steps(here, factory(), q)
                    _map(here, factory(), q, name)
                    _members(here, factory, q)
                    _single(here, factory, q)
                    _shapes(here, factory(), q)
                    if not batch:
                        _resume(here, factory, q)
    claim.holds(tried > 0, "it refused every posterior")


def _gradients(q: FlatPosterior) -> list[Tensor]:
    """Of a few steps, along the manifold."""
    at = q.vector
    return [q.projected(at, normal(*at.shape, seed=60 + k).to(at.dtype)) for k in range(3)]


def _call(part: Metric, q: FlatPosterior, gradient: Tensor, state: State, seed: int) -> tuple[Bent, State]:
    """One call, as an optimizer makes it, whose draws depend on the seed alone."""
    torch.manual_seed(seed)
    generator = getattr(part, "generator", None)
    if generator is not None:
        generator.manual_seed(seed)
    with torch.no_grad():
        return part(q, Local(gradient, q.no_matrix), torch.zeros_like(gradient[..., 0]), state)


def _run(part: Metric, q: FlatPosterior, gradients: list[Tensor]) -> tuple[list[Bent], State]:
    """The directions of all steps, and the state after them."""
    state, bents = part.init(q), []
    for step, gradient in enumerate(gradients):
        bent, new = _call(part, q, gradient, state, step)
        bents.append(bent)
        state = state | new
    return bents, state


def _steps(claim: Claim, part: Metric, q: FlatPosterior) -> None:
    """Shapes, slopes and states of a few steps, each of them tried twice."""
    state, vector = part.init(q), q.vector.clone()
    for name, value in entries(state):
        kinds = Tensor | int | float | bool | str | None
        claim.holds(isinstance(value, kinds), f"its state {name!r} must be a tensor or a number, which is saved")
    for step, gradient in enumerate(_gradients(q)):
        given = gradient.clone()
        args = gradient, state, step
        bent, new = claim.keeps_state(state, lambda args=args: _call(part, q, *args), grows=True)  # type: ignore[misc]
        claim.same("it must not write to the gradient", gradient, given)
        claim.same("it must not move q", q.vector, vector)
        with NoReads():
            again, retried = _call(part, q, gradient, state, step)
        claim.same("a step that is tried again must find the same direction", again.local.a, bent.local.a)
        claim.holds(unlike(new, retried) is None, "a step that is tried again must leave the same state")
        _bent(claim, q, gradient, bent)
        if part.natural or step == 0:
            claim.holds((bent.slope > 0).all(), "slope must be positive: the direction goes along the gradient")
        state = state | new
    still, _ = _call(part, q, torch.zeros_like(q.vector), part.init(q), 0)
    claim.close("where ∇L is zero, so must the direction be", still.local.a, torch.zeros_like(q.vector))


def _bent(claim: Claim, q: FlatPosterior, gradient: Tensor, bent: Bent) -> None:
    for name, x, like in (("direction", bent.local.a, gradient), ("slope", bent.slope, gradient[..., 0])):
        right = x.shape == like.shape and x.dtype == like.dtype
        got = f"{tuple(x.shape)}, {x.dtype}"
        claim.holds(right, f"its {name} must have the shape {tuple(like.shape)} and the dtype of λ; got {got}")
        claim.holds(x.isfinite().all(), f"its {name} must be finite")
        claim.holds(not x.requires_grad, f"its {name} must have no graph")
    claim.holds(bent.local.P.shape == q.no_matrix.shape, "there is no matrix, so it must hand on the empty P")
    tolerance = IDENTITY if gradient.dtype == DTYPE else SINGLE
    claim.close("slope must be ⟨∇L, B∇L⟩", bent.slope, (gradient * bent.local.a).sum(-1), tolerance)
    along = q.projected(q.vector, bent.local.a)
    claim.close("its direction must lie on the manifold of q", along, bent.local.a, tolerance)


def _map(claim: Claim, part: Metric, q: FlatPosterior, name: str) -> None:
    """The linear map of a metric that says `natural`, from one state."""
    if not part.natural:
        return
    x, y, _ = _gradients(q)
    _, state = _run(part, q, _gradients(q))

    def times(gradient: Tensor) -> Tensor:
        return _call(part, q, gradient, state, 9)[0].local.a

    Bx, By, both = times(x), times(y), times(2 * x - 3 * y)
    claim.close("`natural` is said, so it must be linear in the gradient", both, 2 * Bx - 3 * By, IDENTITY)
    sentence = "`natural` is said, so it must be symmetric, ⟨y, Bx⟩ = ⟨x, By⟩"
    claim.close(sentence, (y * Bx).sum(-1), (x * By).sum(-1), IDENTITY)
    inverse = getattr(part, "inverse", None)
    if inverse is not None and not part.exact:
        _, new = _call(part, q, x, state, 9)
        written = q.projected(q.vector, (inverse(state | new) @ x[..., None])[..., 0])
        claim.close("inverse(state) must be the matrix of the map", Bx, written, IDENTITY)
    if name not in LAWS:
        return
    flat = q.vector.reshape(-1, q.size)
    F = torch.stack([fisher(LAWS[name], each) for each in flat]).reshape(*q.batch_shape, q.size, q.size)
    off = (times((F @ x[..., None])[..., 0]) - x).abs().max() / x.abs().max()
    if part.exact:
        sentence = "`exact` is said, so it must invert the Fisher matrix, here by autograd"
        claim.holds(off <= IDENTITY, f"{sentence}; it is off by {float(off):.1e}")
    elif not q.batch_shape:
        claim.holds(off > EXACT, "it inverts the Fisher matrix, so `exact` must be True")
        root = torch.linalg.cholesky(F)
        B = torch.stack([times(row) for row in torch.eye(q.size, dtype=DTYPE)], -1)
        with_it, without = (float(torch.linalg.cond(matrix)) for matrix in (root.mT @ B @ root, F))
        sentence = "`natural` is said, so it must make the Fisher matrix rounder"
        claim.holds(with_it < without / 2, f"{sentence}; its condition goes from {without:.0f} to {with_it:.0f}")


class _Told:
    """A copy of a flat posterior whose scores are made up: the same whatever λ, and spoiled where one says so."""

    def __init__(self, q: FlatPosterior, factor: Tensor | float = 1.0, spoiled: bool = False) -> None:
        self.asked = 0
        self.q = copy.deepcopy(q)
        self.factor, self.spoiled = factor, spoiled
        self.q.score = self._score  # type: ignore[method-assign]

    def _score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        self.asked += 1
        q = self.q
        made_up = normal(len(theta), *q.vector.shape, seed=70 + self.asked).to(q.vector.dtype)
        scores = self.factor * q.projected(q.vector, made_up)
        if self.spoiled:
            scores.reshape(len(theta), -1)[-1, 0] = torch.nan  # an entry of the last draw, of the first member
        return scores


def _members(claim: Claim, factory: Factory, q: FlatPosterior) -> None:
    """What is noted of the first member changes nothing for the others; what is not finite leaves no trace."""
    gradients = _gradients(q)
    told = _Told(q)
    bents, _ = _run(factory(), told.q, gradients)
    spoiled = _Told(q, spoiled=True)
    finite, _ = _run(factory(), spoiled.q, gradients)
    for bent in finite:
        claim.holds(bent.local.a.isfinite().all(), "a score that is not finite must be left out")
    factor = torch.ones_like(q.vector)
    factor.reshape(-1, q.size)[0] = 3.0
    other, _ = _run(factory(), _Told(q, factor).q, [factor * gradient for gradient in gradients])
    broken = [gradient.clone() for gradient in gradients]
    broken[1].reshape(-1, q.size)[0, 0] = torch.nan
    without, _ = _run(factory(), _Told(q).q, broken)
    first = without[1].local.a.reshape(-1, q.size)[0]
    claim.holds(not first.isfinite().all() or not first.any(), "a gradient that is not finite must give no direction")
    claim.holds(without[2].local.a.isfinite().all(), "a gradient that is not finite must leave no trace in the state")
    for run in (finite, other, without):
        for one, two in zip(run, bents, strict=True):
            others = (x.local.a.reshape(-1, q.size)[1:] for x in (one, two))
            claim.same("batch members must not depend on one another", *others)
    if told.asked or not q.batch_shape:
        return
    alone = q.at(q.vector.reshape(-1, q.size)[-1])
    single, _ = _run(factory(), alone, [gradient.reshape(-1, q.size)[-1] for gradient in gradients])
    whole = bents[-1].local.a.reshape(-1, q.size)[-1]
    claim.close("batch members must not depend on one another", single[-1].local.a, whole, IDENTITY)


def _single(claim: Claim, factory: Factory, q: FlatPosterior) -> None:
    told, single = _Told(q), _Told(copy.deepcopy(q).float())
    gradients = _gradients(q)
    doubles, _ = _run(factory(), told.q, gradients)
    floats, state = _run(factory(), single.q, [gradient.float() for gradient in gradients])
    for bent, gradient in zip(floats, gradients, strict=True):
        _bent(claim.at(f"{claim.where}, float32"), single.q, gradient.float(), bent)
    for name, value in entries(state):
        wrong = isinstance(value, Tensor) and value.dtype == torch.float64
        claim.holds(not wrong, f"its state {name!r} must have the dtype of λ, float32")
    if not told.asked:
        sentence = "its direction in float32 must be that of float64"
        claim.close(sentence, floats[-1].local.a, doubles[-1].local.a.float(), SINGLE)


def _shapes(claim: Claim, part: Metric, q: FlatPosterior) -> None:
    wrong = torch.ones(*q.batch_shape, q.size + 1, dtype=q.vector.dtype)
    try:
        _call(part, q, wrong, part.init(q), 0)
    except InputError as error:
        claim.holds(str(error).endswith("."), "what it says of a gradient of another shape must be a sentence")
        return
    except Exception as error:  # any other is a traceback from within
        claim.fail(f"a gradient of another shape must be refused by an InputError; it raised {type(error).__name__}")
    claim.fail("a gradient of another shape must be refused by an InputError")


def _resume(claim: Claim, factory: Factory, q: FlatPosterior) -> None:
    goal = q.vector.detach() + 0.3  # where a lower bound is highest

    def optimizer(q: FlatPosterior) -> NaturalGradientVI:
        return NaturalGradientVI(q, RootGradient(), lr=1e-3, estimator=ClosedForm(), metric=factory())

    claim.resumes(q, optimizer, lambda lam: -0.5 * (lam - goal).square().sum(-1))


def check_acceleration(factory: Callable[[LinearTarget], Acceleration]) -> None:
    """Check that an acceleration keeps the contract of `Acceleration`, on every posterior that it takes.

    It is given the gradients of a small regression, as a run would meet them, and has to keep these promises.  `slope`
    is the inner product ⟨∇L, B∇L⟩ = a·a' + ½⟨P, P'⟩ in the metric of q, and is positive.  A zero gradient stays zero.
    New state is returned and the old is not written to.  `forget` leaves what `init` makes, for the members that it
    is said of.  Members do not depend on one another.  Posteriors that it refuses by a `PairError` are left out.

    Args:
        factory: makes the acceleration of a model, or of any: ``lambda model: QuasiNewton()``.

    Raises:
        AssertionError: a promise is broken; the text says which, by how much, and for which input.

    >>> from torchngvi.rules import QuasiNewton
    >>> check_acceleration(lambda model: QuasiNewton())
    """
    claim = Claim(kind(factory(_model())))
    claim.holds(isinstance(factory(_model()), Acceleration), "it must be a torchngvi.interfaces.Acceleration")
    tried = 0
    for name, posterior in POSTERIORS.items():
        for batch in BATCHES:
            at = start(posterior, batch, 5)
            q, here = made(posterior, at), claim.at(f"{batch_text(batch)}, {name}")
            with here.works("init, forget or a call"):
                try:
                    factory(_model()).init(q)
                except PairError:
                    continue
                tried += 1
                went = torch.full(batch, 0.3, dtype=DTYPE)  # the ρ of the steps between the gradients
                if batch:
                    went[0, 0] = 0.0  # whose steps were rejected
                given: list[Any] = [*_gradients_in_frame(q), went]
                _state_of_acceleration(here, factory(_model()), q, given[0])
                bent, state = _accelerated(here, factory(_model()), q, given)
                _forget(here, factory(_model()), q, given[0], state, went)

                def run(q: Posterior, given: list[Any], claim: Claim = here) -> tuple[Tensor, ...]:
                    return _accelerated(claim, factory(_model(q.mean_probe.dtype)), q, given)[0]

                check_members(here, posterior, at, given, run, bent, "gradient")
    claim.holds(tried > 0, "it refused every posterior")


def _model(dtype: torch.dtype = DTYPE) -> LinearTarget:
    X, y = normal(6, DIM, seed=61, dtype=dtype), torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 0.0], dtype=dtype)
    return GeneralizedLinear(0.3 * X, y, "poisson_log", prior_precision=1.0)


def _gradients_in_frame(q: Posterior) -> list[Local]:
    """Of a model near q's optimum, each a step on from the one before."""
    batch, structure = tuple(q.batch_shape), q.structure
    a, X = 0.3 * normal(*batch, q.dim, seed=62), 0.3 * normal(*batch, q.dim, q.dim, seed=63)
    P = structure.from_dense(0.5 * (X + X.mT))
    return [Local(f * a, f**2 * P) for f in (0.8**k + 0.02 * k for k in range(4))]


def _accelerated(
    claim: Claim, part: Acceleration, q: Posterior, given: list[Any]
) -> tuple[tuple[Tensor, Tensor, Tensor], State]:
    """a, P and slope of the last of the bent gradients, and the state after it."""
    *gradients, went = given
    state, before = part.init(q), torch.zeros_like(went)
    for gradient in gradients:
        bent, memory = part(q, gradient, before.to(gradient.a), state)
        for name, x, like in zip("aP", bent.local, gradient, strict=True):
            right = x.shape == like.shape and x.dtype == like.dtype and bool(x.isfinite().all())
            claim.holds(right, f"the {name} of the bent gradient must be finite, like that of the gradient")
        P, other = (q.structure.full(x.P) for x in (gradient, bent.local))
        inner = (gradient.a * bent.local.a).sum(-1) + 0.5 * (P * other).sum((-2, -1))
        sentence = "slope must be ⟨∇L, B∇L⟩ in the metric of q, a·a' + ½⟨P, P'⟩"
        claim.close(sentence, bent.slope, inner, IDENTITY if inner.dtype == DTYPE else SINGLE)
        claim.holds((bent.slope > 0).all(), "slope must be positive: the bent gradient goes down")
        state, before = state | memory, went
    return (*bent.local, bent.slope), state


def _state_of_acceleration(claim: Claim, part: Acceleration, q: Posterior, gradient: Local) -> None:
    state, still = part.init(q), torch.zeros_like(gradient.a[..., 0])
    claim.keeps_state(state, lambda: part(q, gradient, still, state))
    bent, _ = part(q, mapped(torch.zeros_like, gradient), still, part.init(q))
    for x in bent.local:
        claim.close("where ∇L is zero, so must the bent gradient be", x, torch.zeros_like(x))


def _forget(claim: Claim, part: Acceleration, q: Posterior, gradient: Local, state: State, went: Tensor) -> None:
    """All members, or all but the first."""
    still = torch.zeros_like(went)
    fresh, _ = part(q, gradient, still, part.init(q))
    known, _ = part(q, gradient, went, dict(state))
    keep = torch.zeros(q.batch_shape, dtype=torch.bool)
    for masks in (keep, ~keep):
        emptied = {name: value.clone() for name, value in state.items()}
        part.forget(masks, emptied)
        bent, _ = part(q, gradient, torch.where(masks, went, still), emptied)
        expected = known if bool(masks.any()) else fresh
        what = "leave what is known of the members of the mask" if bool(masks.any()) else "leave what init makes"
        for x, y in zip((*bent.local, bent.slope), (*expected.local, expected.slope), strict=True):
            claim.close(f"forget must {what}", x, y, IDENTITY)


# ------------------------------------------------------------------------------------ momenta and step sizes


Buffers = dict[str, Tensor]


class Changes(NamedTuple):
    """What the rule would do in one step, as a momentum reads it: -λ̇ of a step of ρ = 1, and |λ̇|² (*batch,)."""

    change: Coordinates
    norm2: Tensor


def check_momentum(factory: Callable[[], Momentum]) -> None:
    """Check that a momentum keeps the contract of `Momentum`, in the coordinates of every posterior.

    Its state must begin with the batch, and be returned, not written to.  Members must not depend on one another.  The
    average must be odd in the changes, go along changes that repeat, and be zero where they are, and a run must resume
    from the state of its optimizer.

    Args:
        factory: makes the momentum, for example its class.

    Raises:
        AssertionError: a promise is broken; the text says which, by how much, and for which input.

    >>> from torchngvi.rules import Adam
    >>> check_momentum(Adam)
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), Momentum), "a momentum must be a torchngvi.interfaces.Momentum")
    for name, posterior in POSTERIORS.items():
        for batch in BATCHES:
            at = start(posterior, batch, 5)
            q, here = made(posterior, at), claim.at(f"{batch_text(batch)}, {name}")
            with here.works("init or a call"):
                given, momentum = _changes(q), factory()
                _state(here, momentum, q, given[0], momentum.init(q))

                def run(q: Posterior, given: list[Changes], claim: Claim = here) -> Coordinates:
                    return _average(claim, factory(), q, given)

                last = run(q, given)
                _direction(here, run, q, given, last)
                check_members(here, posterior, at, given, run, last, "average")
                if Tangent in q.takes:
                    opt = here.resumes(q, lambda q: _optimizer(q, factory()), _TARGET)
                    here.holds(opt.rejections == 0, "a small step along its average must be taken")


def _changes(q: Posterior) -> list[Changes]:
    """Of a few steps, in q's kind of matrix."""
    batch, structure = tuple(q.batch_shape), q.structure
    dense = root_in if RootTangent in q.takes else symmetric_in
    return [
        Changes(
            Coordinates(normal(*batch, q.dim, seed=60 + k), structure.from_dense(dense(structure, batch, 70 + k))),
            normal(*batch, seed=80 + k).exp(),
        )
        for k in range(4)
    ]


def _average(claim: Claim, momentum: Momentum, q: Posterior, given: list[Changes]) -> Coordinates:
    """The average after all steps."""
    state = momentum.init(q)
    for change, norm2 in given:
        out, memory = momentum(q, change, lambda norm2=norm2: norm2, state)  # type: ignore[misc]
        for name, part, like in zip(("vector", "matrix"), out, change, strict=True):
            right = part.shape == like.shape and part.dtype == like.dtype and bool(part.isfinite().all())
            claim.holds(right, f"the {name} of its average must be finite, like that of the change")
        state = state | memory
    return out


def _state(claim: Claim, momentum: Momentum, q: Posterior, given: Changes, state: Buffers) -> None:
    for name, value in state.items():
        right = value.shape[: len(q.batch_shape)] == q.batch_shape and value.dtype == q.mean_probe.dtype
        claim.holds(right, f"its state {name!r} must begin with the batch {tuple(q.batch_shape)}, in the dtype of q")

    def call() -> tuple[Coordinates, Buffers]:
        return momentum(q, given.change, lambda: given.norm2, state)

    call()  # indices of the structure are made once, from positions on the host
    claim.keeps_state(state, call, reads=False)


def _direction(claim: Claim, run: Any, q: Posterior, given: list[Changes], last: Coordinates) -> None:
    opposite = run(q, [step._replace(change=mapped(torch.neg, step.change)) for step in given])
    for part, whole in zip(opposite, last, strict=True):
        claim.close("the average of opposite changes must be the opposite", part, -whole, IDENTITY)
    for part in run(q, mapped(torch.zeros_like, given)):
        claim.close("the average of changes that are zero must be zero", part, torch.zeros_like(part))
    same, batch = run(q, 4 * given[:1]), len(q.batch_shape)
    along = torch.stack([(x * y).flatten(batch).sum(-1) for x, y in zip(same, given[0].change, strict=True)]).sum(0)
    claim.holds((along > 0).all(), "the average of one change, again and again, must go along it")


_TARGET = LogJoint(lambda theta: -0.5 * theta.square().sum(-1) - 0.1 * (theta**4).sum(-1))


def _optimizer(q: Posterior, momentum: Momentum) -> NaturalGradientVI:
    draws = Stein(Fixed(2 * q.dim))
    return NaturalGradientVI(q, NaturalGradient(), lr=1e-3, estimator=draws, momentum=momentum)


LR = 0.5  # in [0, 1], for steps that are convex combinations


def check_step_size(factory: Callable[[], StepSize]) -> None:
    """Check that a step size keeps the contract of `StepSize`, and one that judges trials that of `TrialStepSize`.

    What it proposes must have one positive entry a member, not above lr, which depends on that member alone.  Only one
    that says `needs_natural` or `needs_trial` may read the norm of the direction, and none may read a value back from
    the device.  One that judges trials must keep a trial that falls as promised, reject a rise and a NaN, and propose
    less after a rejection; its new state is returned, and the old not written to.

    Args:
        factory: makes the step size, for example its class.

    Raises:
        AssertionError: a promise is broken; the text says which, and for which input.

    >>> from torchngvi.stepsizes import SufficientDecrease
    >>> check_step_size(SufficientDecrease)
    """
    control = factory()
    claim = Claim(kind(control))
    claim.holds(isinstance(control, StepSize), "a step size must be a torchngvi.interfaces.StepSize")
    for batch in ((), (3,), (2, 3)):
        for dtype in (torch.float64, torch.float32):
            here = claim.at(f"{batch_text(batch)} in {str(dtype).removeprefix('torch.')}")
            like = torch.zeros(batch, dtype=dtype)
            judges = hasattr(control, "judge")
            here.holds(
                judges == isinstance(control, TrialStepSize),
                "one that has `judge`, and no other, must be a torchngvi.interfaces.TrialStepSize",
            )
            here.holds(control.needs_trial == judges, "`needs_trial` must be left to its kind, which says it")
            with here.works("init or propose"):
                _step_state(here, control, like)
                _proposal(here, control, like)
            with here.works("judge"):
                _judgement(here, control, like)


def _path(norm2: Tensor, read: list[int] | None = None) -> Path:
    """A straight line of that length, in coordinates of one number."""

    def counted() -> Tensor:
        if read is not None:
            read.append(1)
        return norm2

    def at(rho: Tensor) -> Tangent:
        length = (rho * norm2.sqrt())[..., None]
        return Tangent(Coordinates(length, length[..., :0]))

    return Path(at, counted, lambda: norm2, lambda: norm2)


def _propose(claim: Claim, control: StepSize, norm2: Tensor, lr: float | Tensor, state: dict[str, Tensor]) -> Tensor:
    like = torch.zeros_like(norm2)
    with NoReads():
        rho = control.propose(_path(norm2), lr, like, state)
    shape, dtype = tuple(rho.shape), rho.dtype
    claim.holds(
        shape == like.shape and dtype == like.dtype, f"propose must give ρ like its members; got {shape}, {dtype}"
    )
    return rho


def _step_state(claim: Claim, control: StepSize, like: Tensor) -> None:
    for name, value in entries(control.init(like)):
        right = value.shape == like.shape and value.dtype == like.dtype
        claim.holds(right, f"init must give its state {name!r} one entry a member, in their dtype")


def _proposal(claim: Claim, control: StepSize, like: Tensor) -> None:
    norm2, state = normal(*like.shape, seed=1, dtype=like.dtype).exp(), control.init(like)
    rho = _propose(claim, control, norm2, LR, state)
    claim.holds(((rho > 0) & (rho <= LR)).all(), f"propose must give 0 < ρ ≤ lr; got {rho.tolist()} of lr = {LR}")
    lrs = LR * torch.linspace(0.1, 1.0, max(1, like.numel()), dtype=like.dtype).reshape(like.shape)
    one_each = _propose(claim, control, norm2, lrs, state)
    claim.holds((one_each <= lrs).all(), "propose must keep to an lr for each member")
    still = _propose(claim, control, torch.zeros_like(norm2), LR, state)
    claim.holds(((still > 0) & (still <= LR)).all(), "propose must give 0 < ρ ≤ lr also where ∇L is zero")
    read: list[int] = []
    control.propose(_path(norm2, read), LR, like, state)
    reads = control.needs_trial or control.needs_natural
    claim.holds(reads or not read, "it reads the natural norm of the direction, so `needs_natural` must be True")
    if control.needs_natural:
        shorter = _propose(claim, control, 1e6 * norm2, LR, state)
        claim.holds((shorter < rho).all(), "`needs_natural` is said, so a much longer direction must get a smaller ρ")
    if like.numel() > 1:
        norm2.reshape(-1)[0] *= 1e6
        other = _propose(claim, control, norm2, LR, state)
        claim.same(
            "what it proposes for a member must not depend on the others", other.flatten()[1:], rho.flatten()[1:]
        )


def _trial(like: Tensor, after: float, rho: float = 0.25, slack: float = 0.0) -> Trial:
    """From L = 3 with a slope of 2, so that 2ρ is promised."""
    one = torch.ones_like(like)
    return Trial(3 * one, after * one, 2 * one, rho * 2**0.5 * one, rho * one, slack * one)


def _judged(
    claim: Claim, control: TrialStepSize, trial: Trial, state: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    accept, new = claim.keeps_state(state, lambda: control.judge(trial, state), reads=False)
    right = accept.dtype == torch.bool and accept.shape == trial.before.shape
    claim.holds(right, "judge must give one truth a member")
    claim.holds(set(new) == set(state), f"judge must give back its state {sorted(state)}; got {sorted(new)}")
    return accept, new


def _judgement(claim: Claim, control: StepSize, like: Tensor) -> None:
    """Of one that finds its steps by trial."""
    if not isinstance(control, TrialStepSize):
        return
    state = control.init(like)
    accept, kept = _judged(claim, control, _trial(like, 2.5), state)
    claim.holds(accept.all(), "judge must keep a step that falls by all that its slope promised")
    for loss, name in ((4.0, "a rise"), (torch.nan, "a NaN"), (torch.inf, "an infinite loss")):
        accept, worse = _judged(claim, control, _trial(like, loss), state)
        claim.holds(not accept.any(), f"judge must reject {name}")
        rho = _propose(claim, control, 2 * torch.ones_like(like), LR, worse)
        claim.holds((rho < 0.25).all(), f"it must propose less than the ρ that was rejected for {name}")
        claim.holds((rho > 0).all(), f"it must propose a positive ρ after {name}")
    accept, _ = _judged(claim, control, _trial(like, 3.1, slack=1.0), state)
    claim.holds(accept.all(), "judge must keep a rise within the slack")
    if like.numel() > 1:
        trial = _trial(like, 2.5)
        trial.after.reshape(-1)[0] = 4.0
        accept, mixed = _judged(claim, control, trial, state)
        claim.holds(accept.flatten()[1:].all() & ~accept.flatten()[0], "judge must judge every member by itself")
        for name, value in mixed.items():
            sentence = f"the state {name!r} of a member must not depend on the others"
            claim.same(sentence, value.flatten()[1:], kept[name].flatten()[1:])
