"""The quadrature of latents that stand alone: against closed forms, dense sums, and differences."""

import math

import pytest
import torch

from torchngvi.latents.laplace import MarginalLaplace
from torchngvi.latents.summary import Rule

RULE = Rule.of()
Y = torch.tensor([0.0, 1.0, 2.0, 7.0, 0.0, 3.0], dtype=torch.float64)


def counts(theta, u):
    """Rates gamma(a) under an exponential link, whose counts are negative binomial: log p(y, θ) is known."""
    a = theta[..., :1].exp()
    return (a * (u + a.log()) - a * u.exp() - a.lgamma() + Y * u - u.exp() - (Y + 1).lgamma()).sum(-1)


def negative_binomial(theta):
    a = theta[..., :1].exp()
    terms = (Y + a).lgamma() - a.lgamma() - (Y + 1).lgamma() + a * (a / (1 + a)).log() - Y * (1 + a).log()
    return terms.sum(-1)


@pytest.fixture
def target():
    return MarginalLaplace(counts, 6, torch.zeros(1, dtype=torch.float64)).by_quadrature(RULE)


THETA = torch.tensor([[-0.7], [0.0], [0.8]], dtype=torch.float64)


def test_a_poisson_gamma_model_is_exact_where_laplace_is_not(target):
    laplace = MarginalLaplace(counts, 6, torch.zeros(1, dtype=torch.float64))
    truth = negative_binomial(THETA)
    assert (target.log_joint(THETA) - truth).abs().max() < 0.02
    assert (laplace.log_joint(THETA) - truth).abs().max() > 0.2


def test_a_gaussian_is_exact():
    def joint(theta, u):
        return (-0.5 * (u - theta).square() - 0.5 * (Y - u).square() * theta.exp() + 0.5 * theta).sum(-1)

    at = torch.zeros(1, dtype=torch.float64)
    one, other = MarginalLaplace(joint, 6, at).by_quadrature(RULE), MarginalLaplace(joint, 6, at)
    assert torch.allclose(one.log_joint(THETA), other.log_joint(THETA), atol=1e-4)


def test_the_gradient_is_that_of_differences_and_of_the_closed_form(target):
    theta = THETA.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(target.log_joint(theta).sum(), theta)
    exact = THETA.clone().requires_grad_()
    (truth,) = torch.autograd.grad(negative_binomial(exact).sum(), exact)
    assert (gradient - truth).abs().max() < 0.02
    h = 1e-4
    differences = (target.log_joint(THETA + h) - target.log_joint(THETA - h)) / (2 * h)
    assert (gradient[:, 0] - differences).abs().max() < 0.02


def test_moments_and_draws_are_those_of_gammas(target):
    ((members),) = target.members(THETA)
    a = THETA.exp()
    shape = Y + a
    mean = torch.digamma(shape) - (1 + a).log()
    variance = torch.polygamma(1, shape)
    got_mean, got_variance = members.moments()
    assert (got_mean - mean).abs().max() < 0.01
    assert (got_variance / variance - 1).abs().max() < 0.02
    draws = members.sample(20_000, torch.Generator().manual_seed(0))
    assert draws.shape == (20_000, 3, 6)
    error = (variance / 20_000).sqrt()
    assert ((draws.mean(0) - mean).abs() < 5 * error + 0.01).all()
    share = (draws.exp() < (shape / (1 + a))).double().mean(0)
    truth = torch.special.gammainc(shape, shape)
    assert (share - truth).abs().max() < 0.02


def test_a_draw_is_nan_where_there_is_no_mode():
    def joint(theta, u):
        return -0.5 * (theta * u.square()).sum(-1)

    target = MarginalLaplace(joint, 2, torch.ones(1, dtype=torch.float64)).by_quadrature(RULE)
    draws = target.draw(torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    assert draws[0].isfinite().all()
    assert draws[1].isnan().all()


def bounded(theta, u):
    return (1 - u.square()).log().sum(-1) - 0.5 * theta.square().sum(-1)


def coupled(theta, u):
    return -0.5 * (u[..., 1:] - u[..., :-1]).square().sum(-1) - 0.5 * (u - theta).square().sum(-1)


@pytest.mark.parametrize("joint", [bounded, coupled])
def test_latents_of_a_bounded_support_or_with_pairs_take_laplace(joint):
    assert MarginalLaplace(joint, 3, torch.zeros(1, dtype=torch.float64)).by_quadrature(RULE) is None


def test_a_rate_that_overflows_is_a_wall():
    def joint(theta, u):
        return (-0.5 * (u / 100).square() - (10 * u).exp() - 0.5 * theta.square()).sum(-1)

    value = MarginalLaplace(joint, 1, torch.zeros(1, dtype=torch.float64)).by_quadrature(RULE).log_joint(THETA[1:2])
    assert abs(float(value) - math.log(math.sqrt(math.pi / 2) * 100 - 0.0577)) < 0.05


def test_half_of_the_nodes_say_what_the_rule_is_worth(target):
    ((members),) = target.members(THETA)
    off = (target.log_joint(THETA) - negative_binomial(THETA)).abs()
    assert (members.error().abs() > off).all()
    assert members.error().abs().max() < 0.3
