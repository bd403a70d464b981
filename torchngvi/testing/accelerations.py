"""The check of an acceleration: bent gradients of a small regression, in the metric of q."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces import Acceleration, LinearTarget, Local, Posterior
from torchngvi.models import GeneralizedLinear
from torchngvi.testing.claims import DTYPE, IDENTITY, SINGLE, Claim, batch_text, kind, normal
from torchngvi.testing.problems import DIM, POSTERIORS, made, start

BATCHES: list[tuple[int, ...]] = [(), (2, 3)]
STEPS, WENT = 4, 0.3  # gradients in a row, and the ρ of the steps between them
State = dict[str, Tensor]


def check_acceleration(
    factory: Callable[[LinearTarget], Acceleration],
) -> None:
    """Check that an acceleration keeps the contract of `Acceleration`, on every posterior that it takes.

    At gradients of a regression, as a run would meet them: `slope` is the inner product ⟨∇L, B∇L⟩ in the metric of q,
    a·a' + ½⟨P, P'⟩, and positive; zero stays zero; the state is its own, is handed back and not written to;
    `forget` leaves what `init` makes, for the members that it is said of; members do not depend on one another.
    Posteriors that it refuses by a `PairError` are left out.

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
                given, went = _gradients(q), WENT * torch.ones(batch, dtype=DTYPE)
                if batch:
                    went[0, 0] = 0.0  # whose steps were rejected
                _state(here, factory(_model()), q)
                bents, state = _run(here, factory(_model()), q, given, went)
                _forget(here, factory(_model()), q, given, state, went)
                for index in {(0,) * len(batch), tuple(size - 1 for size in batch)} if batch else ():
                    one = made(posterior, at.member(index))
                    alone, _ = _run(
                        here, factory(_model()), one, [Local(a[index], P[index]) for a, P in given], went[index]
                    )
                    for part, whole in zip(alone[-1], bents[-1], strict=True):
                        here.close("batch members must not depend on one another", whole[index], part, IDENTITY)
                single = made(posterior, at.float())
                model = _model(torch.float32)
                floats = [Local(a.float(), P.float()) for a, P in given]
                bents32, _ = _run(here, factory(model), single, floats, went)
                for part, whole in zip(bents32[-1], bents[-1], strict=True):
                    here.close("its gradient in float32 must be that of float64", part, whole.float(), SINGLE)
    claim.holds(tried > 0, "it refused every posterior")


def _model(dtype: torch.dtype = DTYPE) -> LinearTarget:
    X, y = normal(6, DIM, seed=61, dtype=dtype), torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 0.0], dtype=dtype)
    return GeneralizedLinear(0.3 * X, y, "poisson_log", prior_precision=1.0)


def _gradients(q: Posterior) -> list[Local]:
    """Of a model near q's optimum, each a step on from the one before."""
    batch, structure = tuple(q.batch_shape), q.structure
    a, X = 0.3 * normal(*batch, q.dim, seed=62), 0.3 * normal(*batch, q.dim, q.dim, seed=63)
    P = structure.from_dense(0.5 * (X + X.mT))
    decay = [0.8**k + 0.02 * k for k in range(STEPS)]
    return [Local(f * a, f**2 * P) for f in decay]


def _run(
    claim: Claim, part: Acceleration, q: Posterior, given: list[Local], went: Tensor
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], State]:
    """a, P and slope of the bent gradients, and the state after the last step."""
    state, before = part.init(q), torch.zeros_like(went)
    outs: list[tuple[Tensor, Tensor, Tensor]] = []
    for gradient in given:
        bent, memory = part(q, gradient, before.to(gradient.a), state)
        for name, x, like in zip("aP", bent.local, gradient, strict=True):
            right = x.shape == like.shape and x.dtype == like.dtype and bool(x.isfinite().all())
            claim.holds(right, f"the {name} of the bent gradient must be finite, like that of the gradient")
        P, other = (q.structure.full(x.P) for x in (gradient, bent.local))
        inner = (gradient.a * bent.local.a).sum(-1) + 0.5 * (P * other).sum((-2, -1))
        tolerance = IDENTITY if inner.dtype == DTYPE else SINGLE
        sentence = "slope must be ⟨∇L, B∇L⟩ in the metric of q, a·a' + ½⟨P, P'⟩"
        claim.close(sentence, bent.slope, inner, tolerance)
        claim.holds((bent.slope > 0).all(), "slope must be positive: the bent gradient goes down")
        outs.append((*bent.local, bent.slope))
        state, before = state | memory, went
    return outs, state


def _state(claim: Claim, part: Acceleration, q: Posterior) -> None:
    state, still = part.init(q), torch.zeros_like(q.mean_probe.detach()[..., 0])
    gradient = _gradients(q)[0]
    before = {name: value.clone() for name, value in state.items()}
    _, memory = part(q, gradient, still, state)
    claim.holds(set(memory) <= set(state), f"it must hand back state that init has made, {sorted(state)}")
    for name, value in before.items():
        claim.same(f"it must hand back new state, not write to {name!r}: the step may not be taken", state[name], value)
        shape = memory.get(name, value).shape
        claim.holds(shape == value.shape, f"its state {name!r} must keep its shape {tuple(value.shape)}")
    bent, _ = part(q, Local(0 * gradient.a, 0 * gradient.P), still, part.init(q))
    for x in bent.local:
        claim.close("where ∇L is zero, so must the bent gradient be", x, torch.zeros_like(x))


def _forget(claim: Claim, part: Acceleration, q: Posterior, given: list[Local], state: State, went: Tensor) -> None:
    """All members, or all but the first."""
    still = torch.zeros_like(went)
    fresh, _ = part(q, given[0], still, part.init(q))
    known, _ = part(q, given[0], went, dict(state))
    keep = torch.zeros(q.batch_shape, dtype=torch.bool)
    for masks in (keep, ~keep):
        emptied = {name: value.clone() for name, value in state.items()}
        part.forget(masks, emptied)
        bent, _ = part(q, given[0], torch.where(masks, went, still), emptied)
        expected = known if bool(masks.any()) else fresh
        what = "leave what is known of the members of the mask" if bool(masks.any()) else "leave what init makes"
        for x, y in zip((*bent.local, bent.slope), (*expected.local, expected.slope), strict=True):
            claim.close(f"forget must {what}", x, y, IDENTITY)
