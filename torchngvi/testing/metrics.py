"""The check of a metric: what it makes of gradients in the vector of flat posteriors, and what it remembers of them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.expectations.flat import ClosedForm
from torchngvi.interfaces import Acceleration, Bent, LinearTarget, Local, Metric, Posterior
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.rules import RootGradient
from torchngvi.testing.claims import (
    BATCHES,
    DIM,
    DTYPE,
    EXACT,
    IDENTITY,
    POSTERIORS,
    SINGLE,
    Claim,
    NoReads,
    batch_text,
    check_members,
    entries,
    kind,
    made,
    mapped,
    normal,
    start,
    unlike,
)
from torchngvi.testing.flat_posteriors import FLAT, LAWS, fisher, several

State = dict[str, Any]
Factory = Callable[[], Metric]


def check_metric(
    factory: Factory,
) -> None:
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


# The check of an acceleration: bent gradients of a small regression, in the metric of q


def check_acceleration(
    factory: Callable[[LinearTarget], Acceleration],
) -> None:
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
