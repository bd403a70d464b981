"""Models with several grouping factors: values, gradients, draws of globals and of effects."""

import math

import pytest
import torch

from torchngvi.errors import InputError
from torchngvi.numerics.special import normal_rule
from torchngvi.tables.families import family_of
from torchngvi.tables.globals import (
    MOST_ENTRIES,
    Arranged,
    ByLaplace,
    Correction,
    FitSettings,
    Frame,
    Mirrored,
    Mixture,
    integrate,
)
from torchngvi.tables.integrated import Integrated
from torchngvi.tables.parts import Coordinates, Design, Factor, covariance_root
from torchngvi.tables.priors import settle

SETTINGS = FitSettings()


def noise(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def factor(name, Z, groups):
    levels = tuple(map(str, range(int(groups.max()) + 1)))
    return Factor(name, tuple(f"z{k}" for k in range(Z.shape[1])), levels, Z, groups)


def model(X, y, factors, family, weights=None):
    """What `integrate` takes."""
    factors = tuple(factor(name, *of) for name, of in factors.items())
    one = torch.ones(len(y), dtype=torch.float64)
    weights = one if weights is None else weights
    design = Design(X, tuple(f"x{k}" for k in range(X.shape[1])), factors, 0.1 * X[:, -1], (y,), weights)
    family = family_of(family)
    design = design._replace(y=family.checked(design.y))
    family = family.settled(design.y, design.weights, design.offset)
    coordinates = Coordinates(design, len(family.parameters), thresholds=not family.intercept)
    return design, family, coordinates, settle(design, family, coordinates, None)


def outcome(eta, family, generator):
    if family == "gaussian":
        return eta + 0.5 * noise(generator, len(eta))
    if family == "student_t":
        return eta + 0.5 * noise(generator, len(eta)) ** 3
    if family == "poisson":
        return torch.poisson(eta.exp(), generator=generator)
    p = torch.rand(len(eta), generator=generator, dtype=torch.float64)
    return (p < eta.sigmoid()).double()


def crossed(family, *, rows=60, subjects=12, items=5, slope=False, sd=0.8, seed=0):
    """Subjects by items, perhaps with a slope of each subject."""
    g = torch.Generator().manual_seed(seed)
    subject, item = torch.arange(rows) % subjects, torch.randint(0, items, (rows,), generator=g)
    item[:items] = torch.arange(items)
    X = torch.stack([torch.ones(rows, dtype=torch.float64), noise(g, rows)], 1)
    b, c = sd * noise(g, subjects), sd * noise(g, items)
    y = outcome(0.3 + 0.5 * X[:, 1] + b[subject] + c[item], family, g)
    return X, y, {"subject": (X if slope else X[:, :1], subject), "item": (X[:, :1], item)}


def nested(family, seed=1):
    """Pupils in classes in schools, and teachers across these."""
    g = torch.Generator().manual_seed(seed)
    rows = 72
    pupil = torch.arange(rows) // 3
    classes, school = pupil // 4, pupil // 8
    teacher = torch.randint(0, 4, (rows,), generator=g)
    teacher[:4] = torch.arange(4)
    X = torch.stack([torch.ones(rows, dtype=torch.float64), noise(g, rows)], 1)
    eta = 0.2 * X[:, 1] + noise(g, 24)[pupil] + 0.5 * noise(g, 6)[classes] + 0.5 * noise(g, 3)[school]
    y = outcome(eta + 0.4 * noise(g, 4)[teacher], family, g)
    one = X[:, :1]
    return X, y, {"school": (one, school), "pupil": (X, pupil), "teacher": (one, teacher), "class": (one, classes)}


def independent(family):
    """An intercept and a slope of each subject that do not vary together: two factors of the same groups."""
    X, y, factors = crossed(family)
    subject = factors["subject"][1]
    return X, y, {"subject": factors["subject"], "subject x": (X[:, 1:], subject), "item": factors["item"]}


def salamander(seed=0):
    """Twenty by twenty, crossed, 120 binary rows."""
    g = torch.Generator().manual_seed(seed)
    female = torch.arange(20).repeat_interleave(6)
    male = torch.cat([torch.randperm(20, generator=g)[:6] for _ in range(20)])
    x, z = (female % 2).double(), (male % 2).double()
    X = torch.stack([torch.ones_like(x), x, z, x * z], 1)
    b, c = torch.randn(20, generator=g).double(), torch.randn(20, generator=g).double()
    eta = X @ torch.tensor([1.0, -3.0, -0.7, 3.6]).double() + b[female] + c[male]
    y = (torch.rand(120, generator=g).double() < eta.sigmoid()).double()
    return X, y, {"female": (X[:, :1], female), "male": (X[:, :1], male)}


def near_start(joint, count, seed=0, size=0.4):
    theta, modes = joint.start()
    g = torch.Generator().manual_seed(seed)
    return theta + size * noise(g, count, len(theta)), modes.expand(-1, count, -1)


def root_of_all(args, theta):
    """Rows of all effects with their standard deviations, (N, D): η = Xa + offset + A u."""
    design, _, coordinates, _ = args
    columns = []
    for of, Z, xi, r in zip(design.factors, coordinates.Z, coordinates.split(theta)[1], coordinates.sizes, strict=True):
        hot = torch.nn.functional.one_hot(of.groups, len(of.levels)).double()
        columns.append((hot[:, :, None] * (Z @ covariance_root(xi, r))[:, None, :]).flatten(1))
    return torch.cat(columns, 1)


@pytest.mark.parametrize("data", [crossed("gaussian", slope=True), nested("gaussian"), independent("gaussian")])
def test_matrices_in_the_pattern_are_those_of_dense_rows(data):
    X, y, factors = data
    design, _, coordinates, _ = model(X, y, factors, "gaussian")
    of = Arranged(design.factors)
    g = torch.Generator().manual_seed(0)
    weights, u = noise(g, 2, len(y)).exp(), noise(g, 2, of.dim)
    designs = [Z.expand(2, -1, -1) for Z in coordinates.Z]
    A = torch.zeros(len(y), of.dim, dtype=torch.float64)
    for part, groups, at, r in zip(coordinates.Z, of.groups, of.places, of.r, strict=True):
        for k in range(r):
            A[torch.arange(len(y)), at.start + groups * r + k] = part[:, k]
    H = A.mT @ (weights[:, :, None] * A) + torch.eye(of.dim)
    stored = of.gram(designs, weights)
    root, ok = of.structure.cholesky(of.structure.with_diagonal(stored, of.structure.diagonal(stored) + 1))
    assert bool(ok.all())
    torch.testing.assert_close(2 * of.structure.log_det(root), torch.logdet(H))
    V = of.structure.gram(of.structure.inverse(root), torch.ones_like(u))
    torch.testing.assert_close(of.variances(designs, V), ((A @ torch.linalg.inv(H)) * A).sum(-1))
    torch.testing.assert_close(of.predictor(designs, u), u @ A.mT)
    torch.testing.assert_close(of.gathered(designs, weights), weights @ A)


def test_too_many_crossed_effects_are_refused():
    N = 5000
    one, groups = torch.ones(N, 1, dtype=torch.float64), torch.arange(N)
    turned = torch.cat([groups.roll(1), groups.roll(2)])
    factors = [factor("a", one.repeat(2, 1), groups.repeat(2)), factor("b", one.repeat(2, 1), turned)]
    with pytest.raises(InputError, match=str(MOST_ENTRIES)):
        Arranged(factors)


@pytest.mark.parametrize("data", [crossed("gaussian", slope=True), nested("gaussian"), independent("gaussian")])
def test_with_gaussian_noise_the_value_is_that_of_the_marginal(data):
    args = model(*data, "gaussian")
    joint = ByLaplace(*args)
    theta, modes = near_start(joint, 3)
    found = joint.with_gradient(theta, modes)
    design, _, coordinates, priors = args
    for k, one in enumerate(theta):
        a, _, phi = coordinates.split(one)
        A = root_of_all(args, one)
        covariance = A @ A.mT + (2 * phi).exp() * torch.eye(len(A), dtype=torch.float64)
        law = torch.distributions.MultivariateNormal(coordinates.X @ a + design.offset, covariance)
        exact = law.log_prob(design.y[0]) + priors.log_prob(one[None])[0]
        torch.testing.assert_close(found.value[k], exact, rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(joint.values(theta, modes, 1).value, found.value)


@pytest.mark.parametrize(
    ("data", "family"),
    [
        (crossed("bernoulli", slope=True), "bernoulli"),
        (crossed("gaussian"), "gaussian"),
        (crossed("poisson"), "negative_binomial"),
        (nested("bernoulli"), "bernoulli"),
        (crossed("student_t"), "student_t"),
    ],
)
def test_gradients_are_those_of_differences(data, family):
    joint = ByLaplace(*model(*data, family))
    theta, modes = near_start(joint, 1, size=0.2)
    gradient = joint.with_gradient(theta, modes).gradient[0]
    shift = 1e-4 * torch.eye(theta.shape[1], dtype=torch.float64)
    ends = joint.with_gradient(torch.cat([theta + shift, theta - shift]), modes.expand(-1, 2 * len(shift), -1)).value
    expected = (ends[: len(shift)] - ends[len(shift) :]) / 2e-4
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_with_one_factor_it_is_quadrature():
    X, y, factors = crossed("bernoulli", slope=True)
    args = model(X, y, {"subject": factors["subject"]}, "bernoulli")
    several, one = ByLaplace(*args), Integrated(*args)
    theta, modes = near_start(several, 4)
    for nodes in (1, 5):
        expected = one.values(theta, one.start()[1].expand(-1, 4, -1), nodes).value
        torch.testing.assert_close(several.values(theta, modes, nodes).value, expected, rtol=1e-9, atol=1e-6)


def test_without_spread_it_is_the_model_without_effects():
    X, y, factors = crossed("bernoulli")
    joint = ByLaplace(*model(X, y, factors, "bernoulli"))
    theta, modes = joint.start()
    theta[2:] = -9.0
    found = joint.with_gradient(theta[None], modes)
    eta = joint.X @ theta[:2] + joint.offset
    exact = (y * eta - torch.nn.functional.softplus(eta)).sum() + joint.priors.log_prob(theta[None])[0]
    assert abs(float(found.value[0] - exact)) < 1e-6
    assert bool(found.gradient.isfinite().all())


def test_a_row_of_weight_two_is_two_rows():
    X, y, factors = crossed("bernoulli")
    weights = torch.ones(len(y), dtype=torch.float64)
    weights[::3], weights[1::3] = 2.0, 0.0
    rows = torch.arange(len(y)).repeat_interleave(weights.long())
    args = model(X, y, factors, "bernoulli", weights)
    design, family, coordinates, priors = args
    more = design._replace(
        X=X[rows],
        y=(y[rows],),
        offset=design.offset[rows],
        weights=torch.ones(len(rows), dtype=torch.float64),
        factors=tuple(of._replace(Z=of.Z[rows], groups=of.groups[rows]) for of in design.factors),
    )
    one, two = ByLaplace(*args), ByLaplace(more, family, Coordinates(more, 0), priors)
    theta, modes = near_start(one, 2)
    z = noise(torch.Generator().manual_seed(0), 4, 1, one.arranged.dim)
    for joint in (one, two):
        joint.expected = joint.with_gradient(theta, modes), joint.values(theta, modes, 3, z=z)
    torch.testing.assert_close(one.expected[0].gradient, two.expected[0].gradient)
    torch.testing.assert_close(one.expected[1].value, two.expected[1].value)


def by_brute_force(args, theta, nodes=30):
    """log p(y, θ) of subjects by two items, and E[u], E[u²] of the subjects and the items, by product rules."""
    design, _, coordinates, priors = args
    (subject, item), y = (of.groups for of in design.factors), design.y[0]
    tau = theta[2:].exp()
    eta = coordinates.X @ theta[:2] + design.offset
    z, log_w = normal_rule(nodes, 1, theta)
    v, log_v = normal_rule(nodes, 2, theta)  # (V, 2)
    at = (eta[:, None] + tau[1] * v.mT[item])[..., None] + tau[0] * z[:, 0]  # (N, V, K)
    log_p = y[:, None, None] * at - torch.nn.functional.softplus(at)
    inner = torch.zeros(len(design.factors[0].levels), *at.shape[1:]).double().index_add(0, subject, log_p) + log_w
    of_groups = inner.logsumexp(-1)
    total = of_groups.sum(0) + log_v
    share = total.softmax(0)
    w = inner.softmax(-1)
    means = torch.cat([(w @ z[:, 0]) @ share, v.mT @ share])
    squares = torch.cat([(w @ z[:, 0].square()) @ share, v.square().mT @ share])
    return total.logsumexp(0) + priors.log_prob(theta[None])[0], means, squares


def test_the_correction_is_right():
    args = model(*crossed("bernoulli", rows=36, subjects=9, items=2), "bernoulli")
    theta = torch.tensor([0.3, 0.5, 0.7, 0.4], dtype=torch.float64)
    exact, _, _ = by_brute_force(args, theta)
    laplace, usual = ByLaplace(*args), Correction()
    z = noise(torch.Generator().manual_seed(0), 2000, 1, laplace.arranged.dim)
    modes = laplace.start()[1]
    assert abs(float(laplace.with_gradient(theta[None], modes).value - exact)) > 0.2
    for few, tolerance in ((15, 0.01), (usual.few, 0.03)):
        joint = ByLaplace(*args, correction=Correction(few=few))
        assert abs(float(joint.values(theta[None], modes, 15, z=torch.cat([z, -z])).value - exact)) < tolerance


@pytest.mark.accuracy
def test_effects_given_the_globals_are_those_of_brute_force():
    args = model(*crossed("bernoulli", rows=36, subjects=9, items=2), "bernoulli")
    posterior = integrate(*args, SETTINGS, 0, False)
    theta = torch.tensor([0.3, 0.5, 0.7, 0.4], dtype=torch.float64)
    _, mean, square = by_brute_force(args, theta)
    drawn = posterior.effects(theta.expand(4000, -1), torch.Generator().manual_seed(1))
    u = torch.cat([of[..., 0] / scale for of, scale in zip(drawn, theta[2:].exp(), strict=True)], 1)
    sd = (square - mean.square()).sqrt()
    torch.testing.assert_close(u.mean(0), mean, rtol=0.0, atol=4 / math.sqrt(4000))
    torch.testing.assert_close(u.std(0), sd, rtol=0.05, atol=0.0)


@pytest.mark.accuracy
def test_effects_with_gaussian_noise_have_their_moments():
    args = model(*nested("gaussian"), "gaussian")
    design, _, coordinates, _ = args
    posterior = integrate(*args, SETTINGS, 0, False)
    theta = posterior.mode
    a, xis, phi = coordinates.split(theta)
    A = root_of_all(args, theta)
    V = torch.linalg.inv(torch.eye(A.shape[1], dtype=torch.float64) + A.mT @ A * (-2 * phi).exp())
    mean = V @ A.mT @ (design.y[0] - design.offset - coordinates.X @ a) * (-2 * phi).exp()
    S = 4000
    drawn = posterior.effects(theta.expand(S, -1), torch.Generator().manual_seed(1))
    roots = [covariance_root(xi, r) for xi, r in zip(xis, coordinates.sizes, strict=True)]
    u = torch.cat([(of @ torch.linalg.inv(C).mT).flatten(1) for of, C in zip(drawn, roots, strict=True)], 1)
    torch.testing.assert_close(u.mean(0), mean, rtol=0.0, atol=4.5 / math.sqrt(S))
    torch.testing.assert_close(u.mT.cov(), V, rtol=0.0, atol=6 / math.sqrt(S))


def test_the_density_of_a_group_is_refused():
    posterior = integrate(*model(*crossed("gaussian"), "gaussian"), SETTINGS, 0, False)
    with pytest.raises(InputError, match="one grouping factor"):
        posterior.of_groups(posterior.mode[None])


def test_the_density_of_mirrored_draws_is_theirs():
    theta = torch.tensor([0.3, -0.5, 0.4], dtype=torch.float64)
    root = torch.tensor([[0.5, 0.0, 0.0], [0.2, 0.6, 0.0], [0.1, -0.3, 0.4]], dtype=torch.float64)
    frame = Frame(theta, root, torch.zeros(1, 1, 1, dtype=torch.float64), None)
    proposal = Mirrored(Mixture(theta, root, torch.ones_like(root[:2]), frame, 1.2, 5.0), torch.tensor([1, 2]))
    drawn = proposal.sample(40_000, torch.Generator().manual_seed(0))
    law = torch.distributions.MultivariateNormal(drawn.mean(0), drawn.mT.cov())
    ratio = (law.log_prob(drawn) - proposal.log_density(drawn)).exp()
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / math.sqrt(len(ratio))


@pytest.mark.accuracy
def test_crossed_binary_data_agree_with_a_long_chain():
    """64 Hamiltonian chains of 2,100 kept states over all coordinates, R-hat 1.004, errors below .008 sds."""
    mean = torch.tensor([0.3071, -2.1849, -0.5952, 1.8242], dtype=torch.float64)
    sd = torch.tensor([0.3863, 0.5032, 0.3983, 0.4586], dtype=torch.float64)
    tau, spread = torch.tensor([0.923, 0.581]), torch.tensor([0.480, 0.396])
    posterior = integrate(*model_without_offset(salamander()), SETTINGS, 0, False)
    draws = posterior.weighted
    assert posterior.converged
    assert draws.k_hat < 0.5
    assert draws.effective >= 200
    error = 3.5 / math.sqrt(draws.effective)
    x = torch.cat([draws.theta[:, :4], draws.theta[:, 4:].exp()], 1)
    truth, wide = torch.cat([mean, tau]), torch.cat([sd, spread])
    found = draws.weights @ x
    assert bool(((found - truth).abs() < error * wide).all())
    ratio = (draws.weights @ (x - found).square()).sqrt() / wide
    assert bool((ratio.log().abs() < error).all())


def model_without_offset(data):
    design, family, coordinates, priors = model(*data, "bernoulli")
    return design._replace(offset=torch.zeros_like(design.offset)), family, coordinates, priors


@pytest.mark.accuracy
@pytest.mark.parametrize("family", ["poisson", "bernoulli", "gaussian"])
def test_spreads_that_are_not_there(family):
    for seed in range(2):
        args = model(*crossed(family, rows=120, subjects=20, items=8, sd=0.0, seed=seed), family)
        posterior = integrate(*args, SETTINGS, 0, False)
        assert posterior.weighted.k_hat < 0.7
        draws = args[2].to_user(posterior.weighted.resampled(1000, torch.Generator().manual_seed(0)))
        assert all(float(sd.quantile(0.025)) < 0.3 for sd in draws.sd)


@pytest.mark.accuracy
def test_draws_are_those_of_the_seed():
    args = model(*crossed("bernoulli"), "bernoulli")
    one, two, other = (integrate(*args, SETTINGS, seed, False) for seed in (3, 3, 4))
    assert torch.equal(one.weighted.theta, two.weighted.theta)
    assert not torch.equal(one.weighted.theta, other.weighted.theta)
    first, second = (one.effects(one.weighted.theta[:5], torch.Generator().manual_seed(k)) for k in (1, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.accuracy
def test_draws_that_do_not_agree_are_said():
    args = model(*crossed("bernoulli"), "bernoulli")
    posterior = integrate(*args, SETTINGS, 0, False, Correction(agreed=0.0))
    assert not posterior.agreed
    assert "do not quite agree" in posterior.method
