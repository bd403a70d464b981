"""The check of a likelihood: its expectations against sums over a fine grid."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.models import Likelihood
from torchngvi.testing.claims import DIFFERENCE, DTYPE, SINGLE, Claim, derivative, kind

MEANS, VARIANCES = (-1.5, 0.3, 1.2), (0.05, 0.5, 1.5)
ACCURACY = 1e-8  # of an expectation


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
        for mean in MEANS:
            for variance in VARIANCES:
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
    claim.close("the value of expected must be E[energy] under N(e, v)", moments.value, value, ACCURACY)
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
