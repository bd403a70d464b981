"""The check of a rule: its path against finite differences of L on quadratic problems."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces import Path, Posterior, Rule
from torchngvi.structures import FullAlgebra
from torchngvi.testing.claims import (
    BATCHES,
    DIFFERENCE,
    DTYPE,
    IDENTITY,
    POSTERIORS,
    Claim,
    Normal,
    PosteriorFactory,
    Quadratic,
    after,
    batch_text,
    check_members,
    derivative,
    kind,
    made,
    matvec,
    quadratic,
    relative_error,
    start,
    tensors_in,
)

RHO = 0.03  # a step that every descent stays in the cone with


def check_rule(
    factory: Callable[[], Rule],
) -> None:
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
