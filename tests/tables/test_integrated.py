"""The log joint of the globals with the effects of at most one factor integrated out."""

import math

import pytest
import torch
from helpers import randn, seeded
from simulated import epilepsy, model, simulated, toenail

from torchngvi.tables.globals import FitSettings, Frame, enough_nodes, search
from torchngvi.tables.integrated import Integrated, Integration
from torchngvi.tables.parts import covariance_root

SETTINGS = FitSettings()
NEAR = 0.4  # sds of test points about a start


def near(joint, count=4, seed=0):
    """Values of the globals about where a search begins, and modes of 0."""
    theta, modes = joint.start()
    return theta + NEAR * randn(count, len(theta), seed=seed), modes.expand(-1, count, -1)


@pytest.mark.parametrize("r", [1, 2, 3])
def test_with_gaussian_noise_one_node_is_the_exact_marginal_likelihood(r):
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
    X = torch.cat([torch.ones(10, 1).double(), randn(10, 2, seed=2)], 1)
    weights = torch.tensor([1.0, 1, 2, 1, 0, 1, 1, 1, 1, 3], dtype=torch.float64)
    args = model(X, randn(10, seed=3), groups, X[:, :r], n=5, weights=weights, offset=0.3 * randn(10, seed=4))
    design, _, c, priors = args
    joint = Integrated(*args)
    theta, modes = near(joint)
    values = joint.values(theta, modes, 1).value
    a, xis, phi = c.split(theta)
    for s in range(len(theta)):
        here = weights > 0
        A = c.Z[0] @ covariance_root(xis[0][s], r)
        covariance = (groups[:, None] == groups) * (A @ A.mT)
        # a weight w is w rows alike up to the constant of the density: the precision is w/sd^2
        noise = (2 * phi[s, 0]).exp()
        covariance = (covariance + torch.diag(noise / weights.clamp_min(1e-9)))[here][:, here]
        apart = (design.y[0] - design.offset - c.X @ a[s])[here]
        normal = torch.distributions.MultivariateNormal(0 * apart, covariance).log_prob(apart)
        w = weights[here]
        constant = (0.5 * (1 - w) * (2 * math.pi * noise).log() - 0.5 * w.log()).sum()
        assert torch.allclose(values[s], normal + constant + priors.log_prob(theta)[s], rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("family", ["poisson", "bernoulli", "negative_binomial"])
def test_the_integral_is_that_of_a_fine_grid(family):
    joint = Integrated(*simulated(family, 6, 4, seed=5))
    theta, modes = near(joint)
    found = joint.values(theta, modes, 41).of_groups[joint.place]
    design, kind, c, _ = joint.design, joint.family, joint.coordinates, joint.priors
    a, (xi,), phi = c.split(theta)
    u = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    eta = (c.X @ a.mT)[..., None] + c.Z[0][:, :, None] * xi.exp()[None] * u  # (N, S, U)
    rows = kind.log_prob(eta, (design.y[0][:, None, None],), phi[:, None, :])
    groups = torch.zeros(6, *rows.shape[1:], dtype=torch.float64).index_add(0, design.factors[0].groups, rows)
    exact = torch.logsumexp(groups - 0.5 * u.square(), -1) + math.log(24 / 4000) - 0.5 * math.log(2 * math.pi)
    assert torch.allclose(found, exact, atol=1e-7)


@pytest.mark.sparse(3)
@pytest.mark.parametrize("family", ["gaussian", "poisson", "bernoulli", "negative_binomial"])
@pytest.mark.parametrize("r", [0, 1, 2])
def test_gradients_are_those_of_values(family, r):
    args = simulated(family, 5, 4, seed=6, r=max(r, 1))
    if not r:
        args = model(args[0].X, args[0].y[0], family=family)
    joint = Integrated(*args, Integration(search_nodes=(31, 15, 9)))
    theta, modes = near(joint, 2)
    gradient = joint.with_gradient(theta, modes).gradient
    step = 1e-5
    for k in range(theta.shape[1]):
        shift = step * torch.eye(theta.shape[1], dtype=torch.float64)[k]
        up, down = (joint.values(theta + sign * shift, modes, joint.nodes).value for sign in (1, -1))
        assert torch.allclose((up - down) / (2 * step), gradient[:, k], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gaussian", "poisson", "bernoulli"])
def test_without_spread_it_is_the_model_without_effects(family):
    args = simulated(family, 5, 4, seed=7)
    joint, plain = Integrated(*args), Integrated(*model(args[0].X, args[0].y[0], family=family))
    theta, modes = near(joint)
    place = joint.coordinates.p
    theta[:, place] = -8.0
    found = joint.with_gradient(theta, modes)
    keep = torch.arange(theta.shape[1]) != place
    without = plain.values(theta[:, keep], plain.start()[1].expand(-1, len(theta), -1), 1)
    sums = torch.zeros(5, len(theta), dtype=torch.float64).index_add(0, args[0].factors[0].groups, without.of_groups)
    assert torch.allclose(found.of_groups, sums, atol=1e-4)  # tau^2 times second derivatives
    theta[:, place] = -20.0
    assert torch.allclose(joint.with_gradient(theta, modes).of_groups, sums, atol=1e-6)
    assert bool(found.gradient.isfinite().all())


def test_orders_of_rows_and_sizes_of_groups_do_not_matter():
    g = seeded(8)
    sizes = torch.tensor([1, 40, 2, 0, 3, 17, 1])
    groups = torch.arange(7).repeat_interleave(sizes)
    x = torch.randn(len(groups), generator=g, dtype=torch.float64)
    X, y = torch.stack([torch.ones_like(x), x], 1), torch.poisson(x.exp(), generator=g)
    order = torch.randperm(len(x), generator=g)
    joint = Integrated(*model(X[order], y[order], groups[order], family="poisson"))
    alike = Integrated(*model(X, y, groups, family="poisson"), Integration(filled=1e9))
    assert len(joint.blocks) > 1 == len(alike.blocks)
    theta, modes = near(joint)
    one, two = joint.values(theta, modes, 9), alike.values(theta, modes, 9)
    assert torch.allclose(one.of_groups[joint.place], two.of_groups, atol=1e-10)
    assert bool((two.of_groups[3] == 0).all() | (two.of_groups[3].abs() < 1e-12).all())  # nothing is known of it
    small = Integrated(*model(X, y, groups, family="poisson"), Integration(at_once=50))
    gradients = [j.with_gradient(theta, modes).gradient for j in (alike, small)]
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-9)


def test_slopes_of_modes_are_those_of_implicit_differentiation():
    joint = Integrated(*simulated("poisson", 8, 5, seed=9))
    found = search(joint, SETTINGS)
    frame = Frame.around(joint, found, 0.01)
    design, c, theta = joint.design, joint.coordinates, found.theta
    groups, u = design.factors[0].groups, frame.effects[joint.place, 0, 0]

    def slope(theta, u):  # of the integrand in u, by group
        a, (xi,), _ = c.split(theta)
        A = c.Z[0][:, 0] * xi.exp()
        inner = A * ((c.X @ a + A * u[groups]).exp() - design.y[0])
        return torch.zeros_like(u).index_add(0, groups, inner) + u

    by_theta, by_u = torch.autograd.functional.jacobian(slope, (theta, u))
    exact = -by_theta / by_u.diagonal()[:, None]
    assert torch.allclose(frame.slopes[joint.place, :, 0], exact, atol=1e-4)


CASES = {
    "epilepsy": epilepsy,
    "epilepsy slope": lambda: epilepsy(2),
    "toenail": toenail,
    "poisson 500 x 3": lambda: simulated("poisson", 500, 3),
    "bernoulli 60 x 6": lambda: simulated("bernoulli", 60, 6),
    "negative binomial 60 x 5": lambda: simulated("negative_binomial", 60, 5),
    "poisson 20 x 40": lambda: simulated("poisson", 20, 40),
}


@pytest.mark.sparse(3)
@pytest.mark.parametrize("name", CASES)
def test_the_order_that_is_chosen_is_enough_and_a_draw_costs_one_jet(name):
    joint = Integrated(*CASES[name]())
    found = search(joint, SETTINGS)
    assert found.converged
    assert joint.gradients <= 75 if name == "toenail" else joint.gradients <= 40
    frame = Frame.around(joint, found, SETTINGS.apart)
    nodes = enough_nodes(joint, frame, SETTINGS, seeded())
    theta = frame.theta + 1.2 * randn(16, len(frame.theta), seed=1) @ frame.root.mT
    joint.jets = joint.energies = 0
    quick = joint.values(theta, frame.modes(theta), nodes, one_step=True).value
    assert joint.jets <= 1.5 * len(theta)  # some go astray and take more
    assert joint.energies == len(theta) * nodes**joint.r
    exact = joint.values(theta, frame.modes(theta), 61 if joint.r == 1 else 25).value
    apart = quick - exact
    assert float((apart - apart.mean()).abs().max()) < SETTINGS.settled


@pytest.mark.sparse(3)
@pytest.mark.parametrize("family", ["poisson", "bernoulli"])
@pytest.mark.parametrize("begin", [1.5, -3.0])
def test_a_search_from_afar_ends_at_the_same_mode(family, begin):
    args = simulated(family, 40, 30, seed=10)
    usual = search(Integrated(*args), SETTINGS)
    joint = Integrated(*args)
    theta, modes = joint.start()
    theta[joint.coordinates.p] = begin
    found = search(joint, SETTINGS, (theta, modes))
    assert found.converged
    assert joint.gradients < 60
    assert torch.allclose(found.theta, usual.theta, atol=1e-3)


def test_draws_of_effects_are_those_of_their_density():
    X = torch.ones(6, 1, dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    joint = Integrated(*model(X, torch.tensor([1.0, 1, 1, 0, 0, 1]), groups, family="bernoulli"))
    theta = torch.tensor([[0.3, 1.0]], dtype=torch.float64).expand(20_000, -1)
    u = joint.draw(
        theta, joint.start()[1].expand(-1, len(theta), -1), SETTINGS.candidates, SETTINGS.candidates_wider, seeded()
    )
    b = joint.effects(u, theta)[..., 0]  # (S, n)
    grid = torch.linspace(-25, 25, 5001, dtype=torch.float64)
    y = joint.design.y[0].reshape(2, 3)
    tau = math.e
    log_p = -torch.nn.functional.softplus((1 - 2 * y)[..., None] * (0.3 + grid)).sum(1) - 0.5 * (grid / tau).square()
    p = log_p.softmax(-1)
    for k in range(2):
        for power in (1, 2, 3):
            exact, sd = p[k] @ grid**power, (p[k] @ grid ** (2 * power) - (p[k] @ grid**power) ** 2).sqrt()
            assert abs(float(b[:, k].pow(power).mean() - exact)) < 4 * float(sd) / math.sqrt(len(b))
        for level in (0.025, 0.975):
            cut = grid[(p[k].cumsum(0) < level).sum()]
            assert abs(float((b[:, k] < cut).double().mean()) - level) < 4 * math.sqrt(0.025 * 0.975 / len(b))


def test_draws_of_two_effects_with_gaussian_noise_have_exact_moments():
    args = simulated("gaussian", 3, 5, r=2, seed=11)
    joint = Integrated(*args)
    theta = joint.start()[0].expand(20_000, -1)
    b = joint.effects(joint.draw(theta, joint.start()[1].expand(-1, len(theta), -1), 1, 1.0, seeded()), theta)
    c, (design, *_) = joint.coordinates, args
    a, (xi,), phi = c.split(theta[0])
    C = covariance_root(xi, 2)
    here = design.factors[0].groups == 1
    Z, noise = c.Z[0][here], float((2 * phi[0]).exp())
    covariance = torch.linalg.inv(torch.linalg.inv(C @ C.mT) + Z.mT @ Z / noise)
    mean = covariance @ Z.mT @ (design.y[0] - c.X @ a)[here] / noise
    error = covariance.diagonal().sqrt() / math.sqrt(len(b))
    assert bool(((b[:, 1].mean(0) - mean).abs() < 4 * error).all())
    assert torch.allclose(b[:, 1].mT.cov(), covariance, atol=0.05 * float(covariance.max()))
