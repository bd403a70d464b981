"""Posteriors that a Gaussian does not fit: curves, layers, fans, mixtures, weighted draws, and the door to them."""

import math
import pathlib
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, NaturalGaussian, fit, refine
from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics import Residuals
from torchngvi.diagnostics.verdict import OtherMode
from torchngvi.errors import InputError
from torchngvi.refinement import FanLayer, LayeredGaussian, Mixture, RefinementWarning, WarpLayer, WeightedDraws
from torchngvi.refinement.fan import Joint, LineDensity, Nodes, Spline, _gains, _warp_gain, fitted, orthogonal, trace
from torchngvi.refinement.refinement import best_shares, examined_again

LOG_TAU = 0.5 * math.log(2 * math.pi)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def funnel(sd, dim):
    """Neal's: v ~ N(0, sd²), the others N(0, e^v); with its evidence and standard deviations."""

    def log_joint(theta):
        v, x = theta[..., 0], theta[..., 1:]
        return -0.5 * (v / sd).square() - 0.5 * (x.square() * torch.exp(-v)[..., None] + v[..., None]).sum(-1)

    return log_joint, math.log(sd) + dim * LOG_TAU, vector(sd, *[math.exp(sd**2 / 4)] * (dim - 1))


def best_of_funnel(sd, dim):
    """The Gaussian with the largest ELBO, in closed form."""
    s2 = 1 / (1 / sd**2 + 0.5 * (dim - 1))
    return vector(*[0.0] * dim), vector(math.sqrt(s2), *[math.exp(-s2 / 4)] * (dim - 1))


def banana(theta):
    return -theta[..., 0].square() / 8 - 5 * (theta[..., 1] - theta[..., 0].square()).square()


def log_gamma(a):
    """Independent logarithms of Gamma(a) variables: means ψ(a), variances ψ'(a)."""
    return lambda theta: (a * theta - theta.exp()).sum(-1)


def best_of_log_gamma(a, dim):
    return torch.full((dim,), math.log(a) - 0.5 / a, dtype=torch.float64), torch.full((dim,), a**-0.5).double()


def multivariate_t(dof, dim):
    return lambda theta: -0.5 * (dof + dim) * torch.log1p(theta.square().sum(-1) / dof)


def two_normals(theta):
    """At ±(3, .., 3), sd 1, equal; normalised."""
    parts = [-0.5 * (theta - c).square().sum(-1) for c in (3.0, -3.0)]
    return torch.logaddexp(*parts) - math.log(2) - theta.shape[-1] * LOG_TAU


def layered(mean, sd, *layers):
    return LayeredGaussian(mean, torch.diag(sd), layers)


def gaussian(mean, sd):
    return CholeskyGaussian(len(mean), mean=mean, scale=sd)


def some_fan(dim, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    s, direction = vector(-4.0, -2.5, -1.0, 0.0, 1.5, 3.0), normal(dim)
    root = 0.2 * normal(6, dim - 1, dim - 1).tril(-1) + torch.diag_embed((0.1 * normal(6, dim - 1)).exp())
    nodes = Nodes(s, -0.4 * s**2 + 0.1 * s, 0.3 * normal(6, dim - 1), root)
    return FanLayer(direction / direction.norm(), nodes)


def some_warp(dim):
    warp = WarpLayer(dim, torch.zeros(1, dtype=torch.float64))
    warp.settings.copy_(0.3 * torch.randn(4, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return warp


@pytest.mark.parametrize(("count", "degree"), [(1, 0), (2, 1), (3, 2), (4, 3), (7, 3)])
def test_splines_meet_polynomials(count, degree):
    nodes = vector(-3.0, -1.0, -0.5, 0.7, 1.0, 2.5, 4.0)[:count]
    powers = torch.arange(degree + 1)
    at = torch.linspace(float(nodes[0]), float(nodes[-1]), 50, dtype=torch.float64)
    truth = (at[:, None] ** powers).sum(1)
    assert (Spline(nodes).basis(at) @ (nodes[:, None] ** powers).sum(1) - truth).abs().max() < 1e-12


def test_a_spline_goes_on_in_a_line_and_then_stays():
    nodes = vector(0.0, 1.0, 2.0, 3.0)
    at = vector(3.0, 3.5, 4.0, 5.0)
    assert torch.allclose(Spline(nodes).basis(at) @ nodes**2, vector(9.0, 12.0, 15.0, 15.0), atol=1e-12, rtol=0)


def test_the_density_on_a_line_is_normal_where_its_logarithm_is_a_parabola():
    nodes = vector(-4.2, -2.6, -1.0, 0.0, 1.0, 2.6, 4.2)
    line = LineDensity(nodes, 1.5 - 0.5 * nodes**2)
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert abs(float(line.log_mass) - 1.5 - LOG_TAU) < 1e-4
    assert (line.log_prob(x) + 0.5 * x**2 + LOG_TAU).abs().max() < 1e-4
    assert (line.from_normal(x) - x).abs().max() < 1e-4
    assert line.log_prob(vector(-1e3, 1e3)).isfinite().all()


def test_ranks_and_quantiles_are_inverse_to_each_other_with_the_right_slope():
    nodes = vector(-3.0, -1.0, 0.0, 0.5, 2.0)
    line = LineDensity(nodes, vector(-6.0, -0.5, 0.0, -1.0, -1.3))
    x = torch.linspace(-9, 9, 400, dtype=torch.float64).requires_grad_()
    s = line.from_normal(x)
    assert (line.normal_score(s.detach()) - x.detach()).abs().max() < 1e-9
    (slope,) = torch.autograd.grad(s.sum(), x)
    log_slope = -0.5 * x**2 - LOG_TAU - line.log_prob(s)
    assert (slope.log() - log_slope).abs().max() < 1e-6
    points, weights = line.quadrature()
    grid = torch.linspace(float(points[0]), float(points[-1]), 200_001, dtype=torch.float64)
    integral = torch.trapezoid(line.log_prob(grid).exp() * grid, grid)
    assert abs(float(weights @ points - integral)) < 1e-4


def test_an_end_that_does_not_fall_gets_a_tail():
    line = LineDensity(vector(0.0, 1.0, 2.0), vector(-3.0, 0.0, 2.0))
    grid = torch.linspace(-40, 60, 400_001, dtype=torch.float64)
    assert abs(float(torch.trapezoid(line.log_prob(grid).exp(), grid)) - 1) < 1e-4


@pytest.mark.parametrize("layer", [some_fan(4), some_warp(4), some_fan(1)], ids=["fan", "warp", "line"])
def test_a_layer_is_inverted_and_knows_its_determinant(layer):
    dim = 1 if isinstance(layer, FanLayer) and len(layer.basis) == 1 else 4
    x = 2 * torch.randn(50, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z, stretch = layer.push(x)
    back, shrink = layer.pull(z)
    assert (back - x).abs().max() < 1e-9
    assert (stretch + shrink).abs().max() < 1e-9
    jacobian = torch.autograd.functional.jacobian(lambda row: layer.push(row[None])[0][0], x[0])
    assert abs(float(torch.linalg.slogdet(jacobian)[1] - stretch[0])) < 1e-9


def test_the_moments_of_a_fan_are_those_of_its_draws():
    density = layered(vector(1.0, 2.0, 3.0), vector(1.0, 2.0, 0.5), some_fan(3))
    draws = density.sample(200_000, torch.Generator().manual_seed(0))
    assert ((draws.mean(0) - density.mean) / density.stddev).abs().max() < 0.01
    apart = (draws.mT.cov() - density.covariance) / torch.outer(density.stddev, density.stddev)
    assert apart.abs().max() < 0.015
    middle = density.quantile([0.5])[0]
    assert ((draws < middle).double().mean(0) - 0.5).abs().max() < 0.02


@pytest.mark.parametrize("layers", [(some_fan(2),), (some_warp(2), some_fan(2, 3))], ids=["one", "two"])
def test_a_density_integrates_to_one(layers):
    density = layered(vector(1.0, -1.0), vector(0.5, 2.0), *layers)
    wide = CholeskyGaussian(2, mean=density.mean, scale=2.5 * density.stddev)
    theta = wide.sample((100_000,), torch.Generator().manual_seed(0))
    ratios = (density.log_prob(theta) - wide.log_prob(theta)).detach().exp()
    assert abs(float(ratios.mean()) - 1) < 4 * float(ratios.std()) / math.sqrt(len(ratios))
    assert float(ratios.std()) < 5


def test_an_orthogonal_basis_begins_with_its_direction():
    for u in (vector(1.0, 0.0, 0.0), vector(-1.0, 0.0, 0.0), vector(0.6, 0.0, -0.8)):
        basis = orthogonal(u)
        assert torch.equal(basis[:, 0], u)
        assert (basis.mT @ basis - torch.eye(3)).abs().max() < 1e-14


def test_conditional_gaussians_are_exact_side_by_side():
    centres, scales = vector(0.0, 3.0)[:, None], vector(1.0, 0.2)[:, None]
    target = LogJoint(lambda y: -0.5 * ((y - centres) / scales).square().sum(-1))
    fits = fitted(target, torch.zeros(2, 3).double(), torch.eye(3).double().expand(2, 3, 3), seed=0)
    assert bool(fits.ok.all())
    assert torch.allclose(fits.mean, centres.expand(2, 3), atol=1e-6)
    assert torch.allclose(fits.root, torch.diag_embed(scales.expand(2, 3)), atol=1e-6)
    assert torch.allclose(fits.elbo, 3 * (LOG_TAU + scales[:, 0].log()), atol=1e-8)


def test_noise_asks_for_more_draws():
    target = LogJoint(log_gamma(0.5))
    mean, sd = best_of_log_gamma(0.5, 4)
    assert fitted(target, mean[None], torch.diag(sd)[None], seed=0).draws > 50


def test_a_fan_of_the_funnel_has_its_marginal_at_every_node_and_its_evidence():
    log_joint, evidence, sd = funnel(3.0, 10)
    joint, start = Joint(LogJoint(log_joint)), layered(*best_of_funnel(3.0, 10))
    direction = torch.eye(10, dtype=torch.float64)[0]
    nodes = trace(start.log_density(joint), direction, seed=0)
    v = nodes.s * start.root[0, 0]
    truth = -v.square() / 18 + 9 * LOG_TAU + start.root[0, 0].log()
    assert len(nodes.s) > 10
    assert (nodes.elbo - truth).abs().max() < 1e-10
    assert joint.gradients < 3000
    fan = start.with_layer(FanLayer(direction, nodes))
    assert abs(float(fan.layers[0].log_mass) - evidence) < 1e-4
    theta = fan.sample(1024, torch.Generator().manual_seed(0))
    assert float((joint(theta) - fan.log_prob(theta)).std()) < 1e-4
    assert (fan.stddev[0].log() - sd[0].log()).abs() < 1e-3
    assert (theta[:, 0].quantile(vector(0.05, 0.95)) - vector(-4.934, 4.934)).abs().max() < 0.05


def test_a_fan_of_a_gaussian_is_exact_wherever_it_begins():
    mean, precision = vector(1.0, -2.0, 0.5), torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 4.0]]).double()
    joint = Joint(LogJoint(lambda x: -0.5 * ((x - mean) @ precision * (x - mean)).sum(-1)))
    start, direction = layered(mean + 0.3, vector(0.5, 1.5, 0.6)), vector(0.6, 0.0, 0.8)
    fan = start.with_layer(FanLayer(direction, trace(start.log_density(joint), direction, seed=0)))
    evidence = 3 * LOG_TAU - 0.5 * float(torch.logdet(precision))
    theta = fan.sample(512, torch.Generator().manual_seed(0))
    assert (joint(theta) - fan.log_prob(theta) - evidence).abs().max() < 1e-3
    assert torch.allclose(fan.covariance, torch.linalg.inv(precision), atol=2e-3)
    assert torch.allclose(fan.mean, mean, atol=1e-3)


def test_a_side_ends_where_the_log_joint_does():
    """A cliff at 2 standard deviations: nodes beyond it have no density and are dropped."""

    def cliff(x):
        return torch.where(x[..., 0] < 2, -0.5 * x.square().sum(-1), -torch.inf)

    nodes = trace(cliff, vector(1.0, 0.0), seed=0)
    assert nodes.elbo.isfinite().all()
    assert 1.5 < float(nodes.s[-1]) < 2
    assert trace(lambda x: torch.nan * x.sum(-1), vector(1.0, 0.0), seed=0) is None


def test_what_a_layer_would_gain_is_its_share_of_the_third_and_fourth_derivatives():
    """ℓ - ½|z|² = β z₀ (He₂(z₁) + He₂(z₂))/2 + α He₃(z₃)/6 + κ He₄(z₄)/24 + δ He₃(z₄) z₅/6: all entries by hand."""
    beta, alpha, kappa, delta = 0.3, 0.4, 0.5, 0.2
    half = torch.randn(100_000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = torch.cat([half, -half])

    def rest(x):
        he2, he3, he4 = x**2 - 1, x**3 - 3 * x, x**4 - 6 * x**2 + 3
        third = 0.5 * beta * x[:, 0] * (he2[:, 1] + he2[:, 2]) + alpha * he3[:, 3] / 6
        return third + kappa * he4[:, 4] / 24 + delta * he3[:, 4] * x[:, 5] / 6

    residual = -energy_and_gradient(LogJoint(rest), z)[1]
    M = torch.diag(vector(beta**2, beta**2, beta**2, 0.5 * alpha**2, 0.0, 0.0))
    by_hand = vector(beta**2 / 2, beta**2 / 4, beta**2 / 4, alpha**2 / 12, kappa**2 / 48 + delta**2 / 12, 0.0)
    assert (_gains(torch.eye(6, dtype=torch.float64), M, Residuals(z, residual)) - by_hand).abs().max() < 2e-3
    assert abs(_warp_gain(Residuals(z, residual)) - alpha**2 / 12 - kappa**2 / 48) < 2e-3


def refined(log_joint, start, **settings):
    return refine(gaussian(*start), log_joint, "fan", **settings)


def test_a_banana_is_mended():
    result = refined(banana, (vector(0.0, 0.2), vector(0.44, 0.3)))
    evidence = math.log(2) + 2 * LOG_TAU - 0.5 * math.log(10)
    assert abs(result.after.elbo - evidence) < 1e-3 < result.after.elbo - result.before.elbo
    assert torch.allclose(result.posterior.stddev, vector(2.0, math.sqrt(32.1)), rtol=5e-3)
    assert result.after.effective > 1000
    assert result.gradients < 10_000


def test_five_bad_directions_are_mended_by_a_warp():
    truth = torch.special.polygamma(1, vector(0.5)).sqrt()
    result = refined(log_gamma(0.5), best_of_log_gamma(0.5, 5))
    assert "a warp of each coordinate" in result.reason
    assert result.before.elbo < 2.2
    assert result.after.elbo > 2.75  # of 2.862
    assert (result.posterior.stddev / truth).log().abs().max() < 0.1


@pytest.mark.accuracy
def test_a_product_of_two_funnels_takes_two_fans():
    one, evidence, sd = funnel(1.5, 4)
    mean, scale = (part.repeat(2) for part in best_of_funnel(1.5, 4))
    result = refined(lambda theta: one(theta[..., :4]) + one(theta[..., 4:]), (mean, scale))
    assert sum(isinstance(layer, FanLayer) for layer in result.posterior.layers) >= 2
    assert result.before.elbo < 2 * evidence - 1
    assert result.after.elbo > 2 * evidence - 0.05
    assert (result.posterior.stddev / sd.repeat(2)).log().abs().max() < 0.15


def test_a_gaussian_is_left_as_it_is():
    result = refined(lambda theta: -0.5 * theta.square().sum(-1), (vector(0.0, 0.0), vector(1.0, 1.0)))
    assert (result.kind, result.reason) == (
        "gaussian",
        "no candidate is better than the Gaussian: no fan and no warp raises the ELBO.",
    )
    assert torch.equal(result.posterior.stddev, vector(1.0, 1.0))


def test_along_a_line_a_fan_has_the_density():
    result = refined(log_gamma(1.0), best_of_log_gamma(1.0, 1))
    assert abs(result.after.elbo) < 5e-3
    assert torch.allclose(result.posterior.stddev, vector(math.pi / math.sqrt(6)), rtol=5e-3)
    grid = torch.linspace(-30, 15, 100_001, dtype=torch.float64)
    assert abs(float(torch.trapezoid(result.posterior.log_prob(grid[:, None]).exp(), grid)) - 1) < 1e-5


def test_the_first_fan_may_be_along_a_parameter_of_interest():
    result = refined(funnel(1.0, 2)[0], best_of_funnel(1.0, 2), coordinate=1)
    assert result.reason.startswith("a fan along theta[1]")
    assert result.after.elbo > result.before.elbo


def test_the_same_seed_gives_the_same_bits_and_q_is_not_changed():
    log_joint, _, _ = funnel(1.0, 3)
    q = gaussian(*best_of_funnel(1.0, 3))
    before = [part.clone() for part in q.coordinates]
    first, second = (refine(q, log_joint, "fan", seed=3).posterior.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(new, old) for new, old in zip(q.coordinates, before, strict=True))


@pytest.mark.parametrize("family", [NaturalGaussian, DiagonalGaussian])
def test_any_gaussian_family_is_a_start_in_either_precision(family):
    log_joint, evidence, _ = funnel(1.5, 3)
    mean, scale = best_of_funnel(1.5, 3)
    for dtype in (torch.float32, torch.float64):
        result = refine(family(3, mean=mean.to(dtype), scale=scale.to(dtype)), log_joint, "fan")
        assert abs(result.after.elbo - evidence) < 0.01
        assert result.posterior.sample(3).dtype == dtype


def test_a_temperature_is_that_of_the_density():
    log_joint, evidence, _ = funnel(1.5, 3)
    tempered = LogJoint(lambda theta: 3 * log_joint(theta), temperature=3.0)
    assert abs(refined(tempered, best_of_funnel(1.5, 3)).after.elbo - evidence) < 0.01


def test_what_fails_at_some_theta_is_outside_of_the_support():
    log_joint, evidence, _ = funnel(1.5, 3)

    def fails(theta):
        if bool((theta[..., 0] > 6).any()):
            raise RuntimeError("too far")
        return log_joint(theta)

    result = refine(gaussian(*best_of_funnel(1.5, 3)), fails, "fan")
    assert abs(result.after.elbo - evidence) < 0.02


def test_two_normals_are_found_and_shared():
    q = gaussian(vector(3.0, 3.0), vector(1.0, 1.0))
    result = refine(q, two_normals, "mixture")
    assert abs(result.before.elbo + math.log(2)) < 1e-3
    assert abs(result.after.elbo) < 0.02
    assert torch.allclose(result.posterior.stddev, vector(*[math.sqrt(10)] * 2), rtol=0.03)
    assert torch.allclose(result.posterior.shares, vector(0.5, 0.5), atol=0.01)
    assert result.gradients < 500


def test_shares_are_those_of_the_masses_also_where_members_overlap():
    mean, root = vector(-1.0, 1.0)[:, None], torch.full((2, 1, 1), 0.8, dtype=torch.float64)
    truth = Mixture(vector(0.3, 0.7), mean, root)
    shares = best_shares(mean, root, Joint(LogJoint(truth.log_prob)), seed=0)
    assert torch.allclose(shares, truth.shares, atol=1e-3)


def test_the_modes_of_the_verdict_are_not_lost():
    """A mode that no start of the search finds, and that the examination has seen."""

    def far(theta):
        return torch.logaddexp(-0.5 * theta.square().sum(-1), -0.5 * (theta - 40.0).square().sum(-1))

    q = gaussian(vector(0.0, 0.0), vector(1.0, 1.0))
    starts = torch.zeros(2, 2, dtype=torch.float64)
    assert refine(q, far, "mixture", starts=starts).kind == "gaussian"
    mode = OtherMode(vector(39.0, 41.0), 0.0, 57.0, 0.5)
    verdict = SimpleNamespace(modes=(mode,))
    seen = SimpleNamespace(posterior=q, verdict=verdict, names=())
    refined = refine(seen, far, "mixture", starts=starts)
    assert refined.kind == "mixture"
    torch.testing.assert_close(refined.posterior.shares, vector(0.5, 0.5), atol=0.02, rtol=0)


def test_a_mixture_has_the_moments_of_its_draws_and_integrates_to_one():
    root = torch.tensor([[[1.0, 0.0], [0.5, 0.3]], [[0.4, 0.0], [0.0, 2.0]]]).double()
    q = Mixture(vector(0.25, 0.75), torch.tensor([[0.0, 3.0], [1.0, -1.0]]).double(), root)
    draws = q.sample(100_000, torch.Generator().manual_seed(0))
    assert (draws.mean(0) - q.mean).abs().max() < 0.02
    assert (draws.mT.cov() - q.covariance).abs().max() < 0.1
    wide = CholeskyGaussian(2, mean=q.mean, scale=2 * q.stddev)
    theta = wide.sample((100_000,), torch.Generator().manual_seed(1))
    ratios = (q.log_prob(theta) - wide.log_prob(theta)).detach().exp()
    assert abs(float(ratios.mean()) - 1) < 4 * float(ratios.std()) / math.sqrt(len(ratios))


def test_where_there_is_one_mode_q_is_returned():
    result = refine(gaussian(vector(0.0, 0.0), vector(1.0, 1.0)), lambda x: -0.5 * x.square().sum(-1), "mixture")
    assert (result.kind, result.reason) == (
        "gaussian",
        "no candidate is better than the Gaussian: no other mode was found.",
    )


def test_weighted_draws_have_the_moments_of_a_t():
    result = refine(gaussian(vector(*[0.0] * 4), vector(*[1.0] * 4)), multivariate_t(7.0, 4), "importance")
    error = result.after.effective**-0.5
    assert result.after.k_hat < 0.5
    assert result.posterior.mean.abs().max() < 4 * error * math.sqrt(7 / 5)
    assert (result.posterior.stddev / math.sqrt(7 / 5)).log().abs().max() < 4 * error
    evidence = 2 * math.log(7 * math.pi) + math.lgamma(3.5) - math.lgamma(5.5)
    assert abs(result.after.log_evidence - evidence) < 4 * error


def test_linear_response_widens_the_proposal():
    """Log-gamma with a = 1: q has the standard deviation 1, the posterior 1.28."""
    result = refine(gaussian(*best_of_log_gamma(1.0, 5)), log_gamma(1.0), "importance")
    assert (result.posterior.stddev / (math.pi / math.sqrt(6))).log().abs().max() < 0.1


def test_resampling_keeps_the_weights():
    q = WeightedDraws(vector(0.0, 1.0, 2.0)[:, None], vector(0.5, 0.2, 0.3).log())
    draws = q.sample(1000, torch.Generator().manual_seed(0))
    assert [round(int((draws == value).sum()), -1) for value in range(3)] == [500, 200, 300]
    assert q.quantile([0.4, 0.9]).flatten().tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("log_joint", "start", "kind"),
    [
        (funnel(2.0, 4)[0], best_of_funnel(2.0, 4), "fan"),
        (two_normals, (vector(3.0, 3.0), vector(1.0, 1.0)), "mixture"),
        (multivariate_t(5.0, 10), (torch.zeros(10).double(), 1.02 * torch.ones(10).double()), "importance"),
        (lambda x: -0.5 * x.square().sum(-1), (vector(0.0, 0.0), vector(1.0, 1.0)), "gaussian"),
    ],
    ids=["fan", "mixture", "importance", "gaussian"],
)
def test_the_best_kind_is_returned(log_joint, start, kind):
    result = refine(gaussian(*start), log_joint)
    assert result.kind == kind
    assert str(result).startswith(f"{kind}: {result.reason}\n  before: ELBO ")
    assert result.after.effective >= result.before.effective - 1
    assert f"{result.gradients} gradients and {result.values} values of the log joint" in str(result)


@pytest.mark.accuracy
def test_a_result_of_a_fit_is_a_start():
    log_joint, evidence, _ = funnel(1.5, 3)
    torch.manual_seed(0)
    result = fit(CholeskyGaussian(3, dtype=torch.float64), log_joint, progress=False)
    fan = refine(result, log_joint, "fan")
    assert abs(fan.after.elbo - evidence) < 0.01
    named = refine(result.named(["v", "x", "y"]), kind="fan")  # to the log joint that the result knows
    assert named.reason.startswith("a fan along v raised the ELBO")
    assert torch.equal(named.posterior.mean, fan.posterior.mean)
    assert refine(result, kind="fan", coordinate=1).reason.startswith("a fan along theta[1]")
    with pytest.raises(InputError, match="knows until it is pickled"):
        refine(pickle.loads(pickle.dumps(result)))


def test_reasons_of_the_second_examination_have_names():
    joint = Joint(LogJoint(funnel(1.5, 3)[0]))
    density = LayeredGaussian(vector(0.0, 0.0, 0.0), torch.eye(3, dtype=torch.float64))
    found = [examined_again(density, joint, 0, names=names) for names in ((), ("v", "x", "y"))]
    assert [one.reasons[0].split(":")[0] for one in found] in (["theta[0]", "v"], ["theta[1]", "x"], ["theta[2]", "y"])


@pytest.mark.filterwarnings("ignore:refine, ")
@pytest.mark.parametrize("kind", ["fan", "mixture", "importance"])
def test_a_refinement_is_pickled_and_drawn_from(kind):
    if kind == "mixture":
        q, log_joint = gaussian(vector(3.0, 3.0, 3.0), vector(1.0, 1.0, 1.0)), two_normals
    else:
        q, log_joint = gaussian(*best_of_funnel(1.5, 3)), funnel(1.5, 3)[0]
    refined = refine(q, log_joint, kind)
    again = pickle.loads(pickle.dumps(refined))
    assert str(again) == str(refined)
    assert (again.kind, again.second.word) == (kind, refined.second.word)
    draws = [one.sample(7, torch.Generator().manual_seed(3)) for one in (refined, again)]
    assert draws[0].shape == (7, 3)
    assert torch.equal(*draws)
    assert torch.equal(draws[0], refined.posterior.sample(7, torch.Generator().manual_seed(3)))
    if kind != "importance":
        assert torch.equal(again.posterior.log_prob(draws[0]), refined.posterior.log_prob(draws[0]))
    with pytest.raises(InputError, match=r"^n is a number of draws and must .*; got \(7,\)\.$"):
        refined.sample((7,))


def test_pickles_of_0_2_say_how_near_a_density_is():
    """The classes of 0.2 had these numbers, in this order: of a candidate, and of the draws of q in a verdict."""
    near = pickle.loads(b"ctorchngvi.refinement.fan\nQuality\n(F-1.5\nF0.1\nF-1.25\nF900.0\nF0.25\nt\x81.")
    assert (near.elbo, near.error, near.log_evidence, near.effective, near.k_hat) == (-1.5, 0.1, -1.25, 900.0, 0.25)
    assert near.worth == "worth 900 of 1024 draws, k-hat 0.25"
    own = pickle.loads(b"ctorchngvi.diagnostics.importance\nFromQ\n(F0.25\nF900.0\nF0.125\nF-1.5\nt\x81.")
    assert (own.k_hat, own.effective, own.nats, own.elbo) == (0.25, 900.0, 0.125, -1.5)
    assert pickle.loads(pickle.dumps(own))[3:6] == own[3:6]


@pytest.mark.filterwarnings("ignore:refine, importance")
def test_what_is_returned_can_be_saved(tmp_path):
    q = gaussian(*best_of_funnel(1.5, 3))
    for kind, log_joint in (("fan", funnel(1.5, 3)[0]), ("mixture", two_normals), ("importance", funnel(1.5, 3)[0])):
        start = gaussian(vector(3.0, 3.0, 3.0), vector(1.0, 1.0, 1.0)) if kind == "mixture" else q
        old = refine(start, log_joint, kind).posterior
        torch.save(old.state_dict(), tmp_path / kind)
        new = type(old).from_state_dict(torch.load(tmp_path / kind))
        assert torch.equal(
            new.sample(5, torch.Generator().manual_seed(0)), old.sample(5, torch.Generator().manual_seed(0))
        )
        theta = torch.zeros(2, 3, 3, dtype=torch.float64)
        if kind != "importance":
            assert torch.equal(new.log_prob(theta), old.log_prob(theta))
            assert new.log_prob(theta).shape == (2, 3)


@pytest.mark.accuracy
def test_the_snippet_of_the_docs():
    """It runs as it stands."""
    text = (pathlib.Path(__file__).parents[2] / "docs/refine.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    exec(compile(snippet, "docs/refine.md", "exec"), {})


def mixture_of(shares, centres):
    return Mixture(vector(*shares), vector(*centres)[:, None], torch.ones(len(shares), 1, 1, dtype=torch.float64))


def test_what_is_the_posterior_is_not_doubted():
    log_joint = funnel(1.5, 4)[0]
    refined = refine(gaussian(*best_of_funnel(1.5, 4)), log_joint, "fan")
    assert refined.second.word == "fits"
    assert not refined.second.doubtful
    assert "  A second examination finds nothing against it." in str(refined)
    assert repr(refined).startswith(f"Refinement({refined.kind!r}: ")
    assert f"; before ELBO {refined.before.elbo:.3f}, worth " in repr(refined)
    assert len(repr(refined)) < 160


def test_a_mixture_is_examined_by_something_wider():
    """Exact, with a share that is wrong, and without its second member."""
    target = Joint(LogJoint(lambda theta: two_normals(theta)))
    words = [
        examined_again(mixture_of(shares, (-3.0, 3.0)), target, 0).word
        for shares in ((0.5, 0.5), (0.7, 0.3), (0.9, 0.1))
    ]
    assert words == ["fits", "does not fit", "does not fit"]
    q = Mixture(vector(1.0), vector(3.0)[:, None], torch.ones(1, 1, 1, dtype=torch.float64))
    assert examined_again(q, target, 0).doubtful


def test_what_is_drawn_has_that_density():
    """The mean of p/proposal is one for a density p that is known."""
    for density in (
        layered(vector(0.5, -1.0), vector(1.0, 2.0), some_warp(2)),
        Mixture(vector(0.3, 0.7), vector(0.0, 0.0, 2.0, 1.0).reshape(2, 2), torch.eye(2).expand(2, 2, 2).double()),
    ):
        known = CholeskyGaussian(2, mean=vector(0.4, -0.4), scale=vector(1.2, 1.5))
        sampled = examined_again(density, Joint(LogJoint(known.log_prob)), 0).sampled
        ratio = sampled.weights.corrected.exp()
        assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / math.sqrt(len(ratio))
        torch.testing.assert_close(sampled.corrected.mean, known.mean, rtol=0, atol=0.15)
        torch.testing.assert_close(sampled.corrected.sd, known.stddev, rtol=0.1, atol=0)


def test_a_warning_where_it_is_not_the_posterior():
    """Two narrow ridges across: no layer bends to them, and importance weights say that sds are a third too small."""

    def cross(theta):
        return -0.5 * theta.square().prod(-1) - 0.125 * theta.square().sum(-1)

    text = r"^refine, gaussian: It still is NOT the posterior: theta\[.\]: sd at least .* too small.*Markov chains\.$"
    q = gaussian(vector(0.0, 0.0), vector(0.8, 0.8))
    with pytest.warns(RefinementWarning, match=text):
        refined = refine(q, cross, "mixture")
    assert refined.kind == "gaussian"
    assert "  It still is NOT the posterior: " in str(refined)


def test_a_warning_where_nobody_can_tell():
    """Of two normals one is known, and the search begins at it alone."""
    q = gaussian(vector(3.0, 3.0), vector(1.0, 1.0))
    with pytest.warns(RefinementWarning, match="^refine, gaussian: Whether it is the posterior cannot be told: "):
        refined = refine(q, two_normals, "mixture", starts=vector(3.0, 3.0)[None])
    assert refined.second.word == "not examined"


def test_a_mean_field_is_refined_after_its_correlations():
    with pytest.warns(RefinementWarning, match="NOT the posterior: .* Fit a CholeskyGaussian, .* and refine that"):
        refine(
            DiagonalGaussian(2, dtype=torch.float64), lambda x: -2 * x.square().sum(-1) - 3.8 * x.prod(-1), "mixture"
        )


def test_weighted_draws_are_compared_with_fresh_ones():
    refined = refine(gaussian(*best_of_log_gamma(1.0, 3)), log_gamma(1.0), "importance")
    assert refined.second.sampled.draws >= 4096
    assert refined.second.word == "fits"
