"""The mode, the draws and the weights of the globals of models with at most one factor."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import randn
from simulated import epilepsy, model, simulated, toenail

from torchngvi.errors import InputError
from torchngvi.tables.globals import FitSettings, Frame, Grid, Mixture, integrate, search
from torchngvi.tables.integrated import Closed, Integrated
from torchngvi.tables.priors import StudentT

SETTINGS = FitSettings()
NAMES = ("poisson", "bernoulli", "negative_binomial", "gaussian", "student_t")


def fitted(args, settings=SETTINGS, seed=0):
    return integrate(*args, settings, seed, False)


def moments(posterior):
    """Weighted means and sds of the globals."""
    draws = posterior.weighted
    mean = draws.weights @ draws.theta
    return mean, (draws.weights @ (draws.theta - mean).square()).sqrt()


def line(N, seed=0):
    return torch.stack([torch.ones(N, dtype=torch.float64), randn(N, seed=seed)], 1)


def on_grid(log_joint, lows, highs, count=121):
    """Mean, sd and log of the integral of a density of two coordinates, by brute force."""
    axes = [torch.linspace(low, high, count, dtype=torch.float64) for low, high in zip(lows, highs, strict=True)]
    theta = torch.cartesian_prod(*axes)
    log_p = torch.cat([log_joint(part) for part in theta.split(4096)])
    cell = math.prod(float(axis[1] - axis[0]) for axis in axes)
    p = log_p.softmax(0)
    mean = p @ theta
    return mean, (p @ (theta - mean).square()).sqrt(), float(log_p.logsumexp(0)) + math.log(cell)


def agrees(posterior, mean, sd, evidence):
    """Within the Monte Carlo errors of the effective draws."""
    found, spread = moments(posterior)
    error = 4 / math.sqrt(posterior.weighted.effective)
    assert posterior.weighted.k_hat < 0.7
    assert bool(((found - mean).abs() < error * sd).all())
    assert bool(((spread / sd).log().abs() < error).all())
    assert abs(posterior.log_evidence - evidence) < error


def test_a_logistic_regression_is_that_of_brute_force():
    X = line(40, seed=1)
    args = model(X, randn(40, seed=2) < X[:, 1], family="bernoulli")
    joint = Integrated(*args)
    exact = on_grid(lambda t: joint.values(t, joint.start()[1].expand(-1, len(t), -1), 1).value, (-4, -1), (4, 9))
    agrees(fitted(args, SETTINGS.asked(draws=2000)), *exact)


@pytest.mark.sparse(3)
@pytest.mark.parametrize("family", ["poisson", "bernoulli"])
@pytest.mark.parametrize("sd", [0.0, 1.0])
def test_a_mixed_model_is_that_of_brute_force(family, sd):
    design = simulated(family, 12, 6, sd=sd, slope=0.0, seed=3)[0]
    args = model(design.X[:, :1], design.y[0], design.factors[0].groups, family=family)
    joint = Integrated(*args)

    def log_joint(theta):
        return joint.values(theta, joint.start()[1].expand(-1, len(theta), -1), 15).value

    exact = on_grid(log_joint, (-2.5, -9), (3, 2.5), 81)
    posterior = fitted(args, SETTINGS.asked(draws=2000))
    assert sd or "grid" in posterior.method
    agrees(posterior, *exact)


def test_with_gaussian_noise_the_coefficients_are_conjugate():
    X = line(25, seed=4)
    args = model(X, X @ torch.tensor([1.0, 2.0], dtype=torch.float64) + randn(25, seed=5))
    design, _, c, priors = args
    joint = Integrated(*args)
    P = -joint.of_prior(torch.cat([priors.location, joint.start()[0][2:]]))[:2, :2]
    noise = torch.linspace(-2.5, 2.5, 2001, dtype=torch.float64)
    Q = (-2 * noise).exp()[:, None, None] * (c.X.mT @ c.X) + P
    h = (-2 * noise).exp()[:, None] * (c.X.mT @ (design.y[0] - c.X @ priors.location))
    covariance = torch.linalg.inv(Q)
    mean = priors.location + (covariance @ h[..., None])[..., 0]
    marginal = (
        torch.eye(25, dtype=torch.float64) * (2 * noise).exp()[:, None, None] + c.X @ torch.linalg.inv(P) @ c.X.mT
    )
    apart = design.y[0] - c.X @ priors.location
    log_p = torch.distributions.MultivariateNormal(0 * apart, marginal).log_prob(apart)
    prior = priors.log_prob(torch.cat([priors.location.expand(2001, -1), noise[:, None]], 1))
    log_p = log_p + prior - 0.5 * torch.logdet(P) + math.log(2 * math.pi)
    p = log_p.softmax(0)
    center = p @ mean
    sd = (p @ (covariance.diagonal(dim1=-2, dim2=-1) + (mean - center).square())).sqrt()
    center, sd = torch.cat([center, (p @ noise)[None]]), torch.cat([sd, (p @ (noise - p @ noise) ** 2).sqrt()[None]])
    agrees(fitted(args, SETTINGS.asked(draws=2000)), center, sd, float(log_p.logsumexp(0)) + math.log(5 / 2000))


@pytest.mark.parametrize("r", [0, 1, 2])
def test_the_closed_form_is_the_integral_over_coefficients(r):
    design = simulated("gaussian", 5, 6, seed=6, r=max(r, 1))[0]
    weights = 0.5 + torch.arange(30, dtype=torch.float64) % 3
    groups = design.factors[0].groups if r else None
    args = model(
        design.X, design.y[0], groups, design.X[:, :r] if r else None, weights=weights, offset=randn(30, seed=1)
    )
    joint = Integrated(*args)
    closed = Closed(joint)
    start, modes = joint.start()[0][2:], joint.start()[1]
    rho = start + 0.3 * randn(3, len(start), seed=7)
    values = closed.log_joint(rho, modes)
    eye = torch.eye(2, dtype=torch.float64)
    a = torch.cat(
        [0 * eye[:1], eye, -eye]
    )  # log p(y, a, rho) is a quadratic of a, of which these differences are exact
    for k, one in enumerate(rho):
        at = joint.with_gradient(torch.cat([a, one.expand(5, -1)], 1), modes.expand(-1, 5, -1))
        H = 0.5 * (at.gradient[3:, :2] - at.gradient[1:3, :2])
        step = torch.linalg.solve(H, at.gradient[0, :2])
        log_det = torch.logdet(H)
        exact = at.value[0] + 0.5 * at.gradient[0, :2] @ step + math.log(2 * math.pi) - 0.5 * log_det
        assert torch.allclose(values[k], exact, rtol=1e-9, atol=1e-8)
        draws = closed.completed(one.expand(20_000, -1), torch.Generator().manual_seed(k))[:, :2]
        covariance = torch.linalg.inv(H)
        assert bool(((draws.mean(0) - step).abs() < 4 * covariance.diagonal().sqrt() / math.sqrt(20_000)).all())
        assert torch.allclose(draws.mT.cov(), covariance, atol=0.05 * float(covariance.max()))
    gradient = closed.with_gradient(rho, modes).gradient
    for shift, column in zip(1e-5 * torch.eye(len(start), dtype=torch.float64), gradient.mT, strict=True):
        slope = (closed.log_joint(rho + shift, modes) - closed.log_joint(rho - shift, modes)) / 2e-5
        assert torch.allclose(column, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_both_ways_of_gaussian_noise_agree(seed):
    args = simulated("gaussian", 20, 6, seed=seed)
    wide = dict.fromkeys(("Intercept", "x1"), StudentT(1e7, 0.0, 5.0))  # normal all but in name, so not in closed form
    other = model(args[0].X, args[0].y[0], args[0].factors[0].groups, priors=wide)
    normal = dict.fromkeys(("Intercept", "x1"), "normal(0, 5)")
    closed, other = fitted(model(*_parts(args), priors=normal)), fitted(other)
    assert "coefficients" in closed.method
    assert "coefficients" not in other.method
    (mean, sd), (center, spread) = moments(closed), moments(other)
    assert bool(((mean - center).abs() < 0.3 * sd).all())
    assert bool(((sd / spread).log().abs() < 0.2).all())
    assert abs(closed.log_evidence - other.log_evidence) < 0.2


def _parts(args):
    return args[0].X, args[0].y[0], args[0].factors[0].groups


@pytest.mark.accuracy
def test_proposals_are_normalised_and_what_they_say():
    args = simulated("poisson", 12, 6, sd=0.2, seed=3)
    joint = Integrated(*args)
    found = search(joint, SETTINGS)
    frame = Frame.around(joint, found, SETTINGS.apart)
    sides = torch.tensor([[1.0, 2.0, 0.7], [1.5, 1.0, 1.0]], dtype=torch.float64)
    narrow = Mixture(frame.theta, frame.root, sides, frame, 1.2, 5.0)
    grid = Grid(joint, frame, SETTINGS)
    wide = Mixture(frame.theta, frame.root, 0 * sides + 4, frame, 1.5, 3.0)
    draws = wide.sample(200_000, torch.Generator().manual_seed(0))
    for one in (narrow, grid):
        ratio = (one.log_density(draws) - wide.log_density(draws)).exp()
        assert abs(float(ratio.mean()) - 1) < 5 * float(ratio.std()) / math.sqrt(len(ratio))
        assert float(ratio.std()) < 10
    # the grid's density of log tau is near the true one
    draws = draws[:4000]
    weights = (joint.log_joint(draws, narrow.modes(draws)) - wide.log_density(draws)).softmax(0)
    t = grid.sample(20_000, torch.Generator().manual_seed(1))[:, 2]
    assert abs(float(weights @ draws[:, 2] - t.mean())) < 5 * float(t.std()) * float(weights.square().sum().sqrt())


def test_a_search_for_the_nearest_gaussian_ends_at_expectations_of_zero():
    X = line(30, seed=8)
    joint = Integrated(*model(X, randn(30, seed=9) < X[:, 1], family="bernoulli"))
    found = search(joint, SETTINGS)
    theta, root = joint.nearest(found.theta, found.root)
    draws = theta + randn(200_000, 2, seed=10) @ root.mT
    at = joint.with_gradient(draws, joint.start()[1].expand(-1, len(draws), -1))
    error = at.gradient.std(0) / math.sqrt(len(draws))
    assert bool((at.gradient.mean(0).abs() < 4 * error + 0.05).all())
    covariance = root @ root.mT
    # Stein: E[gradient (theta - m)'] = -H covariance, which is -I
    stein = at.gradient.mT @ (draws - theta) / len(draws)
    assert torch.allclose(stein, -torch.eye(2, dtype=torch.float64), atol=0.05)
    assert bool(covariance.isfinite().all())


def test_a_hundred_coefficients_have_weights_that_are_of_use():
    X = torch.cat([torch.ones(1500, 1, dtype=torch.float64), randn(1500, 100, seed=11)], 1)
    y = torch.rand(1500, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(X @ (0.1 * randn(101, seed=12)))
    found = fitted(model(X, y, family="bernoulli"))
    assert found.converged
    assert found.weighted.k_hat < 0.7


def _awkward():
    one, x, groups = torch.ones(30, dtype=torch.float64), randn(30, seed=13), torch.arange(30) // 5
    X, counts = torch.stack([one, x], 1), torch.poisson((0.5 * x).exp(), generator=torch.Generator().manual_seed(0))
    binary = (x > 0).double()
    for family in NAMES:
        y = binary if family == "bernoulli" else counts
        yield f"{family}, one group", (X, y, 0 * groups, None, family)
        yield f"{family}, rows are groups", (X, y, torch.arange(30), None, family)
        if family != "bernoulli":
            yield f"{family}, nothing but zeros", (X, 0 * x, None, None, family)
            yield f"{family}, nothing but zeros in groups", (X, 0 * x, groups, None, family)
    yield "separated", (X, binary, None, None, "bernoulli")
    yield "separated groups", (X, groups % 2, groups, None, "bernoulli")
    yield "counts of e^18", (X, (18 + 0.5 * x).exp().round(), groups, None, "poisson")
    yield "copies of a column", (torch.cat([X, X[:, 1:] * 2 + 1], 1), x + randn(30), groups, None, "gaussian")
    wide = torch.cat([one[:, None], randn(30, 60, seed=14)], 1)
    yield "more columns than rows, noise", (wide, x, None, None, "gaussian")
    yield "more columns than rows, classes", (wide, binary, None, None, "bernoulli")


AWKWARD = dict(_awkward())


@pytest.mark.accuracy
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_data_end_with_a_verdict(name):
    if name in {f"{family}, nothing but zeros{more}" for family in NAMES[3:] for more in ("", " in groups")}:
        with pytest.raises(InputError, match="the outcome is 0 in all 30 rows"):
            model(*AWKWARD[name])
        return
    posterior = fitted(model(*AWKWARD[name]))
    assert posterior.converged, posterior.reason
    assert posterior.reason.endswith(".")
    assert bool(posterior.weighted.weights.isfinite().all())
    assert abs(float(posterior.weighted.weights.sum()) - 1) < 1e-9
    if posterior.converged:
        theta = posterior.weighted.resampled(20, torch.Generator().manual_seed(0))
        assert all(bool(b.isfinite().all()) for b in posterior.effects(theta, torch.Generator().manual_seed(0)))
        assert bool(posterior.of_groups(theta).isfinite().all())


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_units_of_the_outcome_change_the_evidence_by_their_jacobian_alone(scale):
    X, groups = line(30, seed=15), torch.arange(30) // 5
    y = X[:, 1] + randn(6, seed=16)[groups] + randn(30, seed=17)
    one, two = fitted(model(X, y, groups)), fitted(model(X, scale * y, groups))
    assert two.converged
    assert abs(one.log_evidence - two.log_evidence - 30 * math.log(scale)) < 1e-2
    assert torch.allclose(moments(one)[1][:2] * scale, moments(two)[1][:2], rtol=0.02)


def test_a_weight_of_two_is_two_rows_and_of_zero_is_none():
    design = simulated("poisson", 10, 4, seed=18)[0]
    weights = torch.arange(40, dtype=torch.float64) % 3
    rows = torch.arange(40).repeat_interleave(weights.long())
    X, y, groups = design.X, design.y[0], design.factors[0].groups
    one = fitted(model(X, y, groups, family="poisson", weights=weights))
    two = fitted(model(X[rows], y[rows], groups[rows], family="poisson"))
    assert torch.allclose(one.mode, two.mode, atol=1e-4)
    assert abs(one.log_evidence - two.log_evidence) < 0.02


def test_the_seed_says_all_and_groups_add_up():
    args = simulated("bernoulli", 15, 5, seed=19)
    one, two, other = fitted(args), fitted(args), fitted(args, seed=1)
    assert torch.equal(one.weighted.theta, two.weighted.theta)
    assert not torch.equal(one.weighted.theta, other.weighted.theta)
    theta = one.weighted.theta[:7]
    total = one.of_groups(theta).sum(-1) + args[3].log_prob(theta)
    again = one.joint.values(theta, one.near.modes(theta), one.nodes).value
    assert one.of_groups(theta).shape == (7, 15)
    assert torch.allclose(total, again)
    (b,) = one.effects(theta, torch.Generator().manual_seed(0))
    assert b.shape == (7, 15, 1)
    assert torch.equal(b, one.effects(theta, torch.Generator().manual_seed(0))[0])


def test_draws_are_doubled_until_enough_are_effective():
    args = simulated("poisson", 20, 4, seed=20)
    found = fitted(args, replace(SETTINGS, effective=700, at_once=0))
    assert len(found.weighted.theta) in (800, 1600)
    assert found.weighted.effective >= 700
    assert len(fitted(args, replace(SETTINGS, effective=5000, most_draws=1000)).weighted.theta) == 1000


def test_settings_refuse_what_cannot_be():
    with pytest.raises(InputError, match="draws"):
        SETTINGS.asked(draws=10)
    with pytest.raises(InputError, match="nodes"):
        SETTINGS.asked(nodes=0)
    assert SETTINGS.asked(draws=5000).most_draws == 5000
    assert fitted(simulated("poisson", 10, 4), SETTINGS.asked(nodes=9)).nodes == 9


@pytest.mark.accuracy
@pytest.mark.parametrize("name", ["epilepsy", "toenail"])
def test_estimates_of_published_data_are_those_of_maximum_likelihood(name):
    if name == "epilepsy":  # glmer, and prior sds of 2.5 sds of columns: at most .2 of a standard error apart
        args, exact = epilepsy(), [0.884, -0.933, 0.338, 0.484, -0.161]
        error = [0.131, 0.401, 0.203, 0.347, 0.055]
    else:
        args, exact, error = toenail(), [-0.160, -0.391, -0.137], [0.583, 0.044, 0.068]
    found = fitted(args)
    draws = found.coordinates.to_user(found.weighted.theta)
    mean = found.weighted.weights @ draws.coefficients
    sd = (found.weighted.weights @ (draws.coefficients - mean).square()).sqrt()
    exact, error = (torch.tensor(x, dtype=torch.float64) for x in (exact, error))
    assert found.weighted.k_hat < 0.5
    assert found.weighted.effective >= 200
    assert bool(((mean[1:] - exact).abs() < 0.35 * error).all())  # .2 and the Monte Carlo error
    assert torch.allclose(sd[1:], error, rtol=0.15)


@pytest.mark.accuracy
@pytest.mark.parametrize(("family", "sd"), [("poisson", 0.0), ("bernoulli", 0.0), ("poisson", 0.1), ("poisson", 1.0)])
def test_tables_with_little_spread(family, sd):
    """No k-hat above .7, lower ends below .1 where there is none, and slopes are covered."""
    lower, covered, held, worst = [], 0, 0, 0.0
    for seed in range(100):
        found = fitted(simulated(family, 20, 8, sd=sd, seed=1000 + seed))
        worst = max(worst, found.weighted.k_hat)
        draws = found.coordinates.to_user(found.weighted.resampled(400, torch.Generator().manual_seed(0)))
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = draws.sd[0][:, 0].quantile(ends).tolist()
        left, right = draws.coefficients[:, 1].quantile(ends).tolist()
        lower.append(low)
        held += low <= sd <= high
        covered += left < 0.5 < right
    assert worst < 0.7
    assert covered >= 88
    if not sd:
        assert sum(low < 0.1 for low in lower) >= 95
    else:
        assert held >= 90
