"""The check of an estimator for flat posteriors: L and ∇L in λ against laws of ``torch.distributions``.

The log joint is a law p of the same kind as q, so that L = KL(q‖p) + (1 - γ) entropy(q), and autograd gives ∇L.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from torchngvi.errors import PairError
from torchngvi.expectations.flat import LowerBound
from torchngvi.interfaces import Estimator, Expectation, Framed, Target
from torchngvi.models import LogJoint
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.testing.claims import IDENTITY, Claim, batch_text
from torchngvi.testing.flat_problems import FLAT, LAWS, several

REPEATS = 1500  # estimates of a z-test, side by side
TEMPERATURE = 0.5
_GOAL = 0.2  # of λ, from the posterior to the target


class Known(NamedTuple):
    """A target whose L is known at every λ.

    Attributes:
        law: the law of q as a function of λ.
        goal: the vector of the law p whose density is the joint.

    >>> case = Known(LAWS["MeanFieldGaussian"], torch.zeros(4))
    >>> value, gradient = case.exact(torch.zeros(4))  # q is p: ½ of its entropy, which grows with log σ
    >>> round(value.item(), 4), gradient.tolist()
    (1.4189, [0.0, 0.0, 0.5, 0.5])
    """

    law: Callable[[Tensor], Distribution]
    goal: Tensor  # (D,)

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
    """Check an estimator on the flat posteriors that it takes.

    >>> from torchngvi.expectations.flat import ClosedForm
    >>> check_on_flat(Claim("ClosedForm"), ClosedForm) > 0
    True
    """
    tried = 0
    for name, law in LAWS.items():
        q, here = FLAT[name](), claim.at(f"the flat posterior {name}")
        case = Known(law, q.retracted(q.vector, torch.full_like(q.vector, _GOAL)))
        try:
            factory().check(q)
            if case.target(factory().needs, []) is None:
                continue
            torch.manual_seed(1)
            _check_on(here, factory, q, case)
        except PairError:
            continue
        tried += 1
    return tried


def _check_on(claim: Claim, factory: Callable[[], Estimator], q: FlatPosterior, case: Known) -> None:
    estimator, passes = factory(), list[int]()
    target = case.target(estimator.needs, passes)
    assert target is not None
    for batch in ((), (2, 3)):
        here, there = claim.at(f"{batch_text(batch)}, {claim.where}"), several(q, batch, 5)
        passes.clear()
        e = estimator(there, target)
        _packet(here, estimator, there, e, target)
        if not isinstance(target, LowerBound):
            counted = e.cost.gradients + e.cost.values
            sentence = f"its cost must count what it evaluates, {sum(passes)} times; it says {tuple(e.cost)}"
            here.holds(counted == sum(passes), sentence)
        if estimator.comparable:
            _exact(here, there, e, case)
            again = estimator(there, target)
            sentence = "`comparable` is said, so two evaluations at the same q must agree"
            here.same(sentence, again.value, e.value)
    if not estimator.comparable:
        many = q.at(q.vector.expand(REPEATS, q.size))
        first = estimator(many, target)
        _unbiased(claim, first, q, case)
        if first.learned:  # what the draws of one call tell is used for those of the next
            told = claim.at(f"{claim.where}, told what it has learned")
            _unbiased(told, estimator.recalling(first.learned)(many, target), q, case)
        _others(claim, estimator, q, case)
    single = q.at(q.vector)
    single.float()
    _packet(claim.at(f"{claim.where}, float32"), estimator, single, estimator(single, target), target)


def _packet(claim: Claim, estimator: Estimator, q: FlatPosterior, e: Expectation, target: Target) -> None:
    claim.holds(isinstance(e, Expectation), f"it must return an Expectation; got {type(e).__name__}")
    claim.holds(e.temperature == target.temperature, "it must hand on the temperature of the target")
    claim.holds(e.comparable == (estimator.comparable and target.comparable), "it must be comparable as it says")
    claim.holds(isinstance(e.derivative, Framed), "its derivative must be a Framed packet, ∇L with no matrix")
    assert isinstance(e.derivative, Framed)
    shapes = {"value": (e.value, q.batch_shape), "∇L": (e.derivative.a, q.vector.shape)}
    shapes["matrix"] = (e.derivative.W, q.no_matrix.shape)
    for name, (tensor, shape) in shapes.items():
        claim.holds(tensor.shape == shape, f"its {name} must have the shape {tuple(shape)}; got {tuple(tensor.shape)}")
        claim.holds(tensor.dtype == q.vector.dtype, f"its {name} must have the dtype of q; got {tensor.dtype}")
        claim.holds(not tensor.requires_grad, "its packet must have no graph")
    claim.holds(q.mean_probe.grad is None, "it must leave no gradient in the probe")


def _exact(claim: Claim, q: FlatPosterior, e: Expectation, case: Known) -> None:
    value, gradient = case.exact(q.vector)
    assert isinstance(e.derivative, Framed)
    claim.close("its value must be L", e.value, value, IDENTITY)
    claim.close("its derivative must be ∇L", e.derivative.a, gradient, IDENTITY)


def _unbiased(claim: Claim, e: Expectation, q: FlatPosterior, case: Known) -> None:
    value, gradient = case.exact(q.vector)
    assert isinstance(e.derivative, Framed)
    claim.unbiased("its value must be unbiased for L", e.value, value)
    claim.unbiased("its derivative must be unbiased for ∇L", e.derivative.a, gradient)


def _others(claim: Claim, estimator: Estimator, q: FlatPosterior, case: Known) -> None:
    """A log joint that fails for one member leaves the others alone."""

    def log_joint(theta: Tensor) -> Tensor:
        value = case.law(case.goal).log_prob(theta)
        return torch.where(torch.arange(3) == 1, torch.nan, value)

    e = estimator(q.at(q.vector.expand(3, q.size)), LogJoint(log_joint, TEMPERATURE))
    assert isinstance(e.derivative, Framed)
    fine = e.value.isfinite() & e.derivative.a.isfinite().all(-1)
    claim.holds(fine.tolist() == [True, False, True], "a log joint that fails for a member must spoil that one alone")
