"""The check of an exponential family: its log-partition function, parameters, divergences and steps."""

from collections.abc import Callable

import torch

from torchngvi.errors import PairError
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily
from torchngvi.testing.claims import IDENTITY, Claim, batch_text, kind, normal
from torchngvi.testing.flat_posteriors import BATCHES, DRAWS, check_flat_posterior
from torchngvi.testing.flat_problems import several

_TRIGAMMA = 1e-7  # torch's, which autograd takes, is off by 5e-10
_LENGTHS = (1.0, 30.0, 1000.0)  # of steps that must stay in the domain


def check_exponential_family(
    factory: Callable[[], ExponentialFamily],
) -> None:
    """Check that a family keeps the contract of `ExponentialFamily`, and that of a flat posterior.

    The expectation parameters must be the gradient of the log-partition function and the mean of the statistics of
    draws; products with the Fisher matrix the derivative of the expectation parameters, and its solves the inverse of
    that; the natural parameters must come back from the expectation parameters.  Entropy and divergence must be those
    of draws.  Steps of any length must stay in the domain, and short ones follow a straight line.

    Args:
        factory: makes the family at an η inside its domain, in float64 and without batch dimensions.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.posteriors.flat import Gamma
    >>> check_exponential_family(lambda: Gamma(torch.tensor([2.0, 3.0], dtype=torch.float64)))
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), ExponentialFamily), "it must be an ExponentialFamily")
    check_flat_posterior(factory)
    with torch.random.fork_rng(devices=[]):
        for batch in BATCHES:
            q, here = several(factory(), batch, 5), claim.at(batch_text(batch))
            assert isinstance(q, ExponentialFamily)
            with here.works("a method of the family"):
                _parameters(here, q)
                _steps(here, q)
                if not batch:
                    with torch.no_grad():
                        _draws(here, q)


def _parameters(claim: Claim, q: ExponentialFamily) -> None:
    """What autograd finds of A and ω, and the way back."""
    eta = q.vector.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(q.log_partition(eta).sum(), eta)
    omega = q.expectation().detach()
    claim.close("expectation must be the gradient of log_partition", omega, gradient, IDENTITY)
    change = q.vector * normal(*q.vector.shape, seed=21)
    _, derivative = torch.autograd.functional.jvp(lambda at: q.expectation(at), q.vector.detach(), change)
    product = q.fisher_product(change).detach()
    claim.close("fisher_product must be the derivative of expectation", product, derivative, _TRIGAMMA)
    back = q.exact_fisher_solve(product).detach()
    claim.close("exact_fisher_solve must undo fisher_product", back, change, _TRIGAMMA)
    claim.close("natural must undo expectation", q.natural(omega), q.vector, _TRIGAMMA)
    claim.close("with_expectation must make that member", q.with_expectation(omega).vector, q.vector, _TRIGAMMA)
    theta = q.sample(4, torch.Generator().manual_seed(3))
    size = (4, *q.vector.shape)
    got = tuple(q.statistics(theta).shape)
    claim.holds(got == size, f"statistics must have the shape {size}; got {got}")
    zero = q.kl(q.at(q.vector)).detach()
    claim.close("the divergence from itself must be 0", zero, torch.zeros_like(zero), IDENTITY)


def _steps(claim: Claim, q: ExponentialFamily) -> None:
    direction = q.vector * normal(*q.vector.shape, seed=22)
    short = q.retracted(q.vector, 1e-6 * direction) - q.vector
    claim.close("a short step must follow a straight line", 1e6 * short, direction, 1e-5)
    for seed in range(20):
        direction = q.vector.abs() * normal(*q.vector.shape, seed=seed)
        for length in _LENGTHS:
            inside = q.in_domain(q.retracted(q.vector, length * direction))
            claim.holds(bool(inside.all()), f"a step of {length:g} times η must stay in the domain")


def _draws(claim: Claim, q: ExponentialFamily) -> None:
    theta = q.sample(DRAWS, torch.Generator().manual_seed(3))
    other = q.at(q.retracted(q.vector, 0.1 * q.vector * normal(*q.vector.shape, seed=23)))
    claim.unbiased("expectation must be the mean of the statistics", q.statistics(theta), q.expectation())
    difference = q.log_prob(theta) - other.log_prob(theta)
    claim.unbiased("kl must be the mean of the log ratio", difference, q.kl(other))
    points, weights = q.points(DRAWS, torch.Generator().manual_seed(4))
    claim.close("the weights of points must sum to 1", weights.sum(0), torch.ones_like(weights[0]), IDENTITY)
    claim.holds(points.shape[1:] == theta.shape[1:], "points must have the shape of draws")
    try:
        entropy = q.entropy()
    except PairError:
        return
    claim.unbiased("entropy must be the mean of -log q", -q.log_prob(theta), entropy)
    b = q.base_coefficients()
    claim.close("log_base must be ⟨b, T⟩", q.log_base(theta), (q.statistics(theta) * b).sum(-1), IDENTITY)
