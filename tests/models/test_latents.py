"""Latents integrated out by Laplace's approximation: against dense matrices, quadrature and differences."""

import math
import pathlib
import re

import pytest
import scipy.sparse
import scipy.stats
import torch
from test_models_refusals import changing
from torch.utils._python_dispatch import TorchDispatchMode

from torchngvi import CholeskyGaussian, fit, marginal
from torchngvi.errors import InputError
from torchngvi.latents import LaplaceError, modes
from torchngvi.latents import summary as error
from torchngvi.latents.laplace import colours, in_a_narrow_order, neighbours, pairs_of
from torchngvi.latents.modes import Curvature, Factor, Layout, probed_pairs
from torchngvi.models import FactorTarget
from torchngvi.numerics.special import normal_rule
from torchngvi.structures import arrow

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks.disease_map import square  # noqa: E402

F64 = torch.float64
LATTICE = square(5).edges  # of 25 latents
NONE = torch.zeros(0, 2, dtype=torch.long)
CPU = torch.device("cpu")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def smooth(u, theta, edges=LATTICE):
    """A proper prior on a graph, of precision exp θ₁ and its own weight exp θ₂, without its constant."""
    apart = (u[..., edges[:, 0]] - u[..., edges[:, 1]]).square().sum(-1)
    return -0.5 * (theta[..., 1].exp() * apart + theta[..., 2].exp() * u.square().sum(-1))


COUNTS = torch.poisson((0.7 * normal(25) + 0.5).exp(), generator=torch.Generator().manual_seed(1))


def poisson(theta, u):
    eta = u + theta[..., :1]
    return (COUNTS * eta - eta.exp()).sum(-1) + smooth(u, theta) - 0.5 * theta.square().sum(-1)


def bernoulli(theta, u):
    eta = u + theta[..., :1]
    y = (COUNTS > 1).double()
    return (y * eta - torch.nn.functional.softplus(eta)).sum(-1) + smooth(u, theta) - 0.5 * theta.square().sum(-1)


def coupled(theta, u):
    """A likelihood of two neighbours at once, with a parameter of its own: third derivatives off the diagonal."""
    eta = theta[..., :1] + u[..., LATTICE[:, 0]] * u[..., LATTICE[:, 1]].sin()
    size = theta[..., 2:].exp()
    return -((eta - 0.3).cosh() * size).sum(-1) * 0.1 + 2 * smooth(u, theta) - 0.5 * theta.square().sum(-1)


def precision(pairs, entries, dim):
    """A dense matrix (S, D, D) of the diagonal and the pairs."""
    A = torch.zeros(len(entries), dim, dim, dtype=F64)
    A[:, range(dim), range(dim)] = entries[:, :dim]
    A[:, pairs[:, 0], pairs[:, 1]] = A[:, pairs[:, 1], pairs[:, 0]] = entries[:, dim:]
    return A


GRAPHS = {
    "one": (1, NONE),
    "alone": (5, NONE),
    "lattice": (144, square(12).edges),
    "chain": (150, torch.stack([torch.arange(149), torch.arange(1, 150)], -1)),
    "groups": (30, torch.arange(30).reshape(10, 3)),
    "unequal groups": (14, [torch.tensor([[0, 1, 2, 3, 4]]), torch.tensor([[6, 7], [9, 10]])]),
    "lattice and islands": (160, torch.cat([square(12).edges, torch.tensor([[150, 151]])])),
    "several parts": (120, torch.cat([square(7).edges, 49 + square(7).edges])),
    "random": (60, torch.randint(0, 60, (80, 2), generator=torch.Generator().manual_seed(3))),
    "dense": (12, torch.arange(12)[None]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_factors_of_chains_of_blocks(name):
    """Log determinant, solutions, draws and the selected inverse are those of the dense matrix."""
    dim, pattern = GRAPHS[name]
    pairs = pairs_of(pattern, dim)
    layout = Layout(in_a_narrow_order(neighbours(pairs, dim)), pairs, CPU)
    entries = normal(2, dim + len(pairs))
    entries[:, :dim] = 3.0 * torch.bincount(pairs.flatten(), minlength=dim) + 1.5
    A = precision(pairs, entries, dim)
    inverse = A.inverse()
    factor = Factor(layout, entries)
    assert factor.ok.all()
    torch.testing.assert_close(factor.log_det(), A.logdet(), rtol=1e-12, atol=1e-12)
    x = normal(2, dim, 3)
    torch.testing.assert_close(factor.solve(x), inverse @ x, rtol=0, atol=1e-12)
    torch.testing.assert_close(factor.solve(x[..., 0]), (inverse @ x)[..., 0], rtol=0, atol=1e-12)
    spread = factor.spread(torch.eye(dim, dtype=F64).expand(2, dim, dim))
    torch.testing.assert_close(spread @ spread.mT, inverse, rtol=0, atol=1e-12)
    chosen = torch.cat([inverse.diagonal(dim1=1, dim2=2), inverse[:, pairs[:, 0], pairs[:, 1]]], -1)
    torch.testing.assert_close(factor.selected_inverse(), chosen, rtol=0, atol=1e-13)


def test_a_factor_that_does_not_exist():
    """One of two matrices is not positive definite, in its last block; the other has its factor all the same."""
    pairs = pairs_of(square(12).edges, 144)
    layout = Layout(in_a_narrow_order(neighbours(pairs, 144)), pairs, CPU)
    entries = torch.zeros(2, 144 + len(pairs), dtype=F64)
    entries[:, :144] = 1.0
    last = int(layout.slots.argmax())
    entries[1, last] = -1.0
    factor = Factor(layout, entries)
    assert factor.ok.tolist() == [True, False]
    assert factor.log_det()[0] == 0.0


def test_orders_are_narrow():
    """A lattice numbered at random has neighbours at most its width apart, with a place or two for the corners."""
    torch.manual_seed(0)
    renamed = torch.randperm(144)
    pairs = pairs_of(renamed[square(12).edges], 144)
    (order,) = in_a_narrow_order(neighbours(pairs, 144))
    place = torch.empty(144, dtype=torch.long)
    place[torch.tensor(order)] = torch.arange(144)
    assert int((place[pairs[:, 0]] - place[pairs[:, 1]]).abs().max()) <= 14


def test_parts_stand_abreast():
    """Groups are a batch of blocks, a lattice a chain, and islands do not lengthen it by a chain of their own."""
    sizes = {}
    assert Layout([[k] for k in range(40)], NONE, CPU).chains == 40
    for name in ("groups", "lattice", "lattice and islands", "several parts"):
        dim, pattern = GRAPHS[name]
        pairs = pairs_of(pattern, dim)
        layout = Layout(in_a_narrow_order(neighbours(pairs, dim)), pairs, CPU)
        sizes[name] = layout.chains, layout.length, layout.block
    assert sizes == {
        "groups": (10, 1, 3),
        "lattice": (1, 5, 32),
        "lattice and islands": (1, 5, 32),
        "several parts": (2, 2, 32),
    }


CROSSED = torch.cartesian_prod(torch.arange(4), torch.arange(4, 13))
HUBS = torch.cartesian_prod(torch.arange(40), torch.arange(40, 42))


@pytest.mark.parametrize("name", [*GRAPHS, "crossed", "hubs"])
def test_colours_recover_a_hessian(name):
    """In one of its two rows each entry stands alone, so that the products are the entries of a random Hessian.

    Crossed factors take as many colours as the smaller has levels and one more, hubs one each and one more.
    """
    dim, pattern = {**GRAPHS, "crossed": (13, CROSSED), "hubs": (42, HUBS)}[name]
    pairs = pairs_of(pattern, dim)
    around = neighbours(pairs, dim)
    coloured = colours(around)
    assert 1 + max(coloured) <= {"crossed": 5, "hubs": 3, "lattice": 6, "chain": 3, "dense": 12}.get(name, dim)
    for latent, near in enumerate(around):
        assert coloured[latent] not in [coloured[one] for one in near]
    entries = normal(1, dim + len(pairs))
    A = precision(pairs, entries, dim)[0]
    curvature = Curvature(lambda theta, u: -0.5 * ((u @ A) * u).sum(-1), dim, pairs, torch.tensor(coloured))
    found = curvature.jet(torch.zeros(1, 1, dtype=F64), normal(1, dim)).entries
    torch.testing.assert_close(found, entries, rtol=0, atol=1e-14)


def test_where_a_search_begins_changes_rounding_alone():
    """The start follows the mode to first order: dû/dθ = -H⁻¹ ∇_θ∇_u ℓ, here against differences."""
    target = marginal(poisson, 25, torch.zeros(3, dtype=F64), pattern=LATTICE)
    theta, step = 0.3 * normal(6, 3), 1e-5
    before = target.log_joint(theta)
    target.begin_at(theta[0])
    torch.testing.assert_close(target.log_joint(theta), before, rtol=0, atol=1e-10)
    assert torch.equal(target.at, theta[0])
    for k, unit in enumerate(step * torch.eye(3, dtype=F64)):
        (_, up), (_, down) = next(target.modes((theta[0] + unit)[None])), next(target.modes((theta[0] - unit)[None]))
        torch.testing.assert_close(target.drift[k], (up.u - down.u)[0] / (2 * step), rtol=0, atol=1e-7)


PATTERNS = {
    "pairs": LATTICE,
    "a list of pairs": LATTICE.tolist(),
    "both ways, and the diagonal": torch.cat([LATTICE, LATTICE.flip(-1), torch.arange(25)[:, None].expand(-1, 2)]),
    "torch, coordinates": torch.sparse_coo_tensor(
        LATTICE.mT, torch.ones(len(LATTICE)), (25, 25), check_invariants=True
    ),
    "SciPy": scipy.sparse.csr_matrix((LATTICE[:, 0] * 0 + 1, LATTICE.mT.numpy()), shape=(25, 25)),
    "two tables": [LATTICE[:10], LATTICE[10:]],
}


@pytest.mark.parametrize("name", PATTERNS)
def test_forms_of_a_pattern(name):
    assert torch.equal(pairs_of(PATTERNS[name], 25), pairs_of(LATTICE, 25))


def test_patterns_of_cliques_and_structures():
    assert pairs_of([torch.tensor([[0, 2, 1]]), torch.tensor([[3, 4]])], 5).tolist() == [[1, 0], [2, 0], [2, 1], [4, 3]]
    assert pairs_of(arrow(groups=2, local=2, globals=3), 4).tolist() == [[1, 0], [3, 2]]  # the locals alone
    assert pairs_of([], 3).shape == (0, 2)


def test_factors_over_a_forest():
    """The locals of a FactorTarget are integrated out, exactly where it is quadratic in them."""
    groups = arrow(groups=4, local=2, globals=1)
    y = normal(4, 2)

    def group(theta):  # b_n (2), g
        b, g = theta[..., :2], theta[..., 2:]
        return -0.5 * (y - b - g).square().sum(-1) - 0.5 * b.sum(-1).square() - 0.5 * b.square().sum(-1)

    factors = FactorTarget(groups, [(0, group), (-1, lambda theta: -0.5 * theta[..., 0].square())])

    def joint(theta, u):
        return factors.log_joint(torch.cat([u, theta], -1))

    target = marginal(joint, 8, torch.zeros(1, dtype=F64), pattern=groups)
    assert target.curvature.pairs.tolist() == [[1, 0], [3, 2], [5, 4], [7, 6]]
    theta = torch.tensor([0.7], dtype=F64)
    prior = torch.eye(2, dtype=F64) + 1  # the precision of b
    density = torch.distributions.MultivariateNormal(theta.expand(2), prior.inverse() + torch.eye(2, dtype=F64))
    constants = 4 * (2 * math.log(2 * math.pi) - 0.5 * prior.logdet())
    truth = density.log_prob(y).sum() + constants - 0.5 * theta.square().sum()
    # the factors leave out the constants of y given b, and of b
    assert float(target.log_joint(theta)) == pytest.approx(float(truth), abs=1e-11)


@pytest.mark.parametrize("joint", [poisson, bernoulli, coupled])
def test_patterns_are_found(joint):
    """Those of the log joint by products with unit vectors are the neighbours of the lattice."""
    assert torch.equal(probed_pairs(joint, normal(3), normal(25)), pairs_of(LATTICE, 25))


def gaussian(theta, u):
    """y = u + noise of precision exp θ₀: log p(y, u, θ) with all constants."""
    y, noise = COUNTS, theta[..., 0]
    L = torch.zeros(25, 25, dtype=F64).index_put(
        (LATTICE[:, 0], LATTICE[:, 1]), torch.tensor(-1.0, dtype=F64), accumulate=True
    )
    L = L + L.mT
    weights = theta[..., 1:, None, None].exp()
    Q = weights[..., 0, :, :] * (L - torch.diag(L.sum(0))) + weights[..., 1, :, :] * torch.eye(25, dtype=F64)
    data = 0.5 * 25 * (noise - math.log(2 * math.pi)) - 0.5 * noise.exp() * (y - u).square().sum(-1)
    prior = 0.5 * torch.logdet(Q) - 12.5 * math.log(2 * math.pi) + smooth(u, theta)
    return data + prior - 0.5 * theta.square().sum(-1)


def exact(theta):
    """log p(y, θ) of the same by the density of y, and the moments of u given y."""
    L = torch.zeros(25, 25, dtype=F64)
    L[LATTICE[:, 0], LATTICE[:, 1]] = L[LATTICE[:, 1], LATTICE[:, 0]] = -1.0
    Q = theta[1].exp() * (L - torch.diag(L.sum(0))) + theta[2].exp() * torch.eye(25, dtype=F64)
    V, eye = Q.inverse(), torch.eye(25, dtype=F64)
    density = torch.distributions.MultivariateNormal(torch.zeros(25, dtype=F64), V + eye / theta[0].exp())
    given = (Q + theta[0].exp() * eye).inverse()
    return density.log_prob(COUNTS) - 0.5 * theta.square().sum(), theta[0].exp() * (given @ COUNTS), given


def test_gaussian_noise_is_exact():
    """Value, gradient, means and standard deviations, and no error."""
    target = marginal(gaussian, 25, torch.zeros(3, dtype=F64), pattern=LATTICE)
    theta = (0.7 * normal(4, 3)).requires_grad_()
    value = target.log_joint(theta)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    dense = torch.stack([exact(one)[0] for one in theta])
    torch.testing.assert_close(value, dense, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient, torch.autograd.grad(dense.sum(), theta)[0], rtol=0, atol=1e-10)
    _, mean, V = exact(theta[0].detach())
    found = target.latents(theta[0])
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.stddev, V.diagonal().sqrt(), rtol=0, atol=1e-10)
    error = target.laplace_error(theta[0])
    assert float(error.error.abs()) < 1e-10
    assert float(error.standard_error) < 1e-10


@pytest.mark.parametrize("joint", [poisson, bernoulli, coupled])
def test_gradients_are_those_of_differences(joint):
    target = marginal(joint, 25, torch.zeros(3, dtype=F64), pattern=LATTICE)
    theta = (0.5 * normal(6, 3)).requires_grad_()
    (gradient,) = torch.autograd.grad(target.log_joint(theta).sum(), theta)
    h = 1e-3
    for k, e in enumerate(h * torch.eye(3, dtype=F64)):
        one, two = (target.log_joint(theta + j * e) - target.log_joint(theta - j * e) for j in (1, 2))
        difference = ((8 * one - two) / (12 * h)).detach()
        torch.testing.assert_close(gradient[:, k], difference, rtol=1e-7, atol=1e-7)


def test_groups_by_quadrature():
    """Successes of four with an effect each: the integrals are one-dimensional, the printed error is that there is."""
    y = torch.tensor([0.0, 1.0, 2.0, 4.0, 3.0, 0.0, 3.0, 1.0], dtype=F64)

    def joint(theta, u):
        eta = u + theta[..., :1]
        prior = -0.5 * (u * (-theta[..., 1:]).exp()).square() - theta[..., 1:] - 0.5 * math.log(2 * math.pi)
        return (y * eta - 4 * torch.nn.functional.softplus(eta) + prior).sum(-1)

    target = marginal(joint, 8, torch.zeros(2, dtype=F64))
    assert target.colours == 1
    z, log_w = normal_rule(80, 1, y)
    for theta in torch.tensor([[0.3, 0.3], [0.0, 0.6]], dtype=F64):
        eta = theta[0] + theta[1].exp() * z  # (K, 1)
        terms = log_w[:, None] + y * eta - 4 * torch.nn.functional.softplus(eta)
        truth = torch.logsumexp(terms, 0).sum()
        found = target.laplace_error(theta, pairs=20000, generator=torch.Generator().manual_seed(0))
        off = truth - target.log_joint(theta)
        assert not bool(found.expanded)
        assert float((off - found.error).abs()) < 4 * float(found.standard_error) < 0.3 * float(off.abs())
        # the means are nearer to the truth than the modes
        mean = (terms.softmax(0) * (theta[1].exp() * z)).sum(0)
        ((_, modes),) = target.modes(theta[None])
        errors = [float((point - mean).abs().max()) for point in (target.latents(theta).mean, modes.u[0])]
        assert errors[0] < 0.35 * errors[1]


def test_the_terms_of_the_expansion():
    """Those of third and fourth derivatives, for latents that all depend on one another, by dense tensors."""

    def joint(theta, u):
        eta = u + 0.5 * u.roll(1, -1)
        return -(theta * eta.exp() - 2 * eta).sum(-1) - 0.5 * u.square().sum(-1)

    theta = torch.tensor([[1.5]], dtype=F64)
    target = marginal(joint, 4, theta[0])
    ((_, modes),) = target.modes(theta)
    z = normal(12000, 4)
    terms = error._terms(error.GaussianMembers.at(target.curvature, theta, modes), z)[:, 0]

    def f(u):
        return joint(theta[0], u)

    derivatives = [f]
    for _ in range(4):
        derivatives.append(torch.func.jacfwd(derivatives[-1]))
    H, f3, f4 = (d(modes.u[0]) for d in derivatives[2:])
    V = (-H).inverse()
    a = torch.einsum("ijk,jk->i", f3, V)
    truth = torch.einsum("ijkl,ij,kl->", f4, V, V) / 8 + a @ V @ a / 8
    truth = truth + torch.einsum("ijk,lmn,il,jm,kn->", f3, f3, V, V, V) / 12
    noise = float(terms.std()) / math.sqrt(len(z))
    assert abs(float(terms.mean() - truth)) < 4 * noise < 0.15 * abs(float(truth))


def test_errors_by_expansion():
    """Over many latents weights are of no use, and the next terms are most of the error."""
    y = (normal(600) > 0).double()

    def joint(theta, u):
        data = y * u - torch.nn.functional.softplus(u)
        return (data - 0.5 * (u / theta).square() - theta.log() - 0.5 * math.log(2 * math.pi)).sum(-1)

    theta = torch.tensor([1.5], dtype=F64)
    target = marginal(joint, 600, theta, pattern=NONE)
    z, log_w = normal_rule(60, 1, y)
    terms = log_w[:, None] + y * 1.5 * z - torch.nn.functional.softplus(1.5 * z)
    off = float(torch.logsumexp(terms, 0).sum() - target.log_joint(theta))
    found = target.laplace_error(theta, generator=torch.Generator().manual_seed(0))
    assert bool(found.expanded)
    assert "(by expansion)" in str(found)
    assert 4 * float(found.standard_error) < 0.2 * abs(off)
    assert abs(off - float(found.error)) < 0.4 * abs(off)


def test_what_moves_the_posterior():
    """The error's covariance with θ, in standard deviations; and the sentence that says it."""
    theta = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]], dtype=F64)
    found = LaplaceError(theta, torch.tensor([0.0, 0.4, 0.0, 0.4]), torch.full((4,), 0.01), torch.zeros(4) > 0)
    assert found.shift.tolist() == pytest.approx([0.2])
    assert str(found) == (
        "Laplace's log p(y, theta) is off by 0 to 0.4 nats, standard error 0.01, at 4 values of theta. That moves the "
        "mean of theta[0] by +0.2 sd, the others less."
    )


def test_values_do_not_depend_on_their_company():
    """Batches on the left, the same bits at every call, and those of one θ alone up to rounding."""
    target = marginal(poisson, 25, torch.zeros(3, dtype=F64), pattern=LATTICE)
    theta = 0.5 * normal(2, 3, 3)
    together = target.log_joint(theta)
    assert together.shape == (2, 3)
    assert torch.equal(target.log_joint(theta), together)
    alone = torch.stack([target.log_joint(one) for one in theta.flatten(0, 1)]).unflatten(0, (2, 3))
    torch.testing.assert_close(alone, together, rtol=1e-13, atol=1e-12)


@pytest.mark.accuracy
def test_a_fit_is_that_of_the_exact_marginal():
    """Of Gaussian noise, where the marginal has a closed form, the same seed gives the same q."""
    target = marginal(gaussian, 25, torch.zeros(3, dtype=F64), pattern=LATTICE)
    means = []
    for log_joint in (target, lambda theta: torch.stack([exact(one)[0] for one in theta])):
        torch.manual_seed(0)
        q = CholeskyGaussian(3, dtype=F64)
        fit(q, log_joint, progress=False, examine=False, tolerance=0.5)
        means.append(q.mean)
    torch.testing.assert_close(*means, rtol=0, atol=1e-6)


def test_marginals_are_mixtures():
    """Quantiles and joint draws agree with the mixture, of which the moments are known."""
    target = marginal(gaussian, 25, torch.zeros(3, dtype=F64), pattern=LATTICE)
    q = CholeskyGaussian(3, scale=0.8, dtype=F64)
    generator = torch.Generator().manual_seed(0)
    found = target.latents(q, draws=8, generator=generator)
    assert found.theta.shape == (8, 3)
    draws = found.sample(4000, generator)
    assert draws.shape == (4000, 25)
    assert float(((draws.mean(0) - found.mean) / found.stddev).abs().max()) < 4 / math.sqrt(4000)
    cdf = torch.special.ndtr((found.quantile(0.9) - found.means) / found.stddevs).mean(0)
    torch.testing.assert_close(cdf, torch.full((25,), 0.9, dtype=F64))
    covariance = torch.stack([exact(one)[2] for one in found.theta]).mean(0) + found.means.T.cov(correction=0)
    normed = covariance / found.stddev[:, None] / found.stddev
    assert float((draws.T.corrcoef() - normed).abs().max()) < 5 / math.sqrt(4000)


def test_dense_hessians_are_few(monkeypatch):
    """Steps with the factor of before lead to the same modes, where each Hessian takes as many products as latents."""
    mix = 0.3 * normal(25, 25, seed=3)

    def joint(theta, u):
        eta = theta[..., :1] + theta[..., 1:].exp() * u @ mix.mT
        return (COUNTS * eta - eta.exp()).sum(-1) - 0.5 * u.square().sum(-1) - 0.5 * theta.square().sum(-1)

    theta, found = 0.3 * normal(6, 2, seed=4), []
    for costly in (modes._COSTLY, 100):
        monkeypatch.setattr(modes, "_COSTLY", costly)
        target = marginal(joint, 25, at=torch.zeros(2, dtype=F64))
        before = target.curvature.products
        found.append((target.log_joint(theta), target.curvature.products - before))
    assert target.colours == 25
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-10, atol=0)
    assert found[0][1] <= 6 * 2 * 25
    assert found[1][1] > 6 * 3 * 25


def test_an_indefinite_start():
    """Student t errors far from the data are not concave; the damped steps end at the mode."""
    y = torch.tensor([8.0, -7.0, 9.0], dtype=F64)

    def joint(theta, u):
        t = -2.5 * ((y - u).square() / (4 * (2 * theta[..., :1]).exp())).log1p()
        return t.sum(-1) - 0.5 * 0.02 * u.square().sum(-1) - 0.5 * theta.square().sum(-1)

    target = marginal(joint, 3, torch.zeros(1, dtype=F64))
    curvature = Curvature(joint, 3, NONE, torch.zeros(3, dtype=torch.long))
    assert bool((curvature.jet(target.at[None], torch.zeros(1, 3, dtype=F64)).entries < 0).all())
    assert float(curvature.jet(target.at[None], target.start[None]).gradient.abs().max()) < 1e-10
    assert float((target.start - y).abs().max()) < 0.5


def test_no_mode_is_a_value_that_is_nan():
    """Where the prior of the latents is improper the value is NaN, and that of the others is there."""

    def joint(theta, u):
        return -0.5 * (1 - theta[..., 0]) * u.square().sum(-1) + u.sum(-1)

    target = marginal(joint, 4, torch.zeros(1, dtype=F64))
    theta = torch.tensor([[0.5], [2.0]], dtype=F64, requires_grad=True)
    value = target.log_joint(theta)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    assert value.isnan().tolist() == [False, True]
    assert gradient.isnan()[:, 0].tolist() == [False, True]
    with pytest.raises(InputError, match=r"^the latents have no mode at theta = \[2.0\]\.$"):
        target.latents(theta.detach())


def test_values_that_cancel():
    """Terms of 10⁹ that cancel leave values with errors of 10⁻⁶, on which the last steps must not depend."""
    sign, y = torch.tensor([1.0, -1.0], dtype=F64).repeat(50), torch.linspace(0, 5, 100, dtype=F64)

    def plain(theta, u):
        return (y * u - u.exp() - 0.5 * (u - theta).square()).sum(-1)

    def joint(theta, u):
        return plain(theta, u) + (sign * (1e9 + u)).sum(-1) - (sign * u).sum(-1)

    target = marginal(joint, 100, torch.zeros(1, dtype=F64), pattern=NONE)
    theta = torch.linspace(-1, 1, 50, dtype=F64)[:, None]
    modes = target._modes(theta)
    assert bool(modes.found.all())
    assert modes.steps < 10
    exact = marginal(plain, 100, torch.zeros(1, dtype=F64), pattern=NONE)._modes(theta).u
    torch.testing.assert_close(modes.u, exact, rtol=0, atol=1e-9)


def test_a_fit_passes_by_what_has_no_mode():
    """Where few draws of θ leave the latents without a mode the fit goes on."""

    def joint(theta, u):
        return -0.5 * (4 - theta[..., 0]) * u.square().sum(-1) - 0.5 * theta[..., 0].square()

    torch.manual_seed(0)
    target = marginal(joint, 1, torch.zeros(1, dtype=F64))
    q = CholeskyGaussian(1, dtype=F64)
    result = fit(q, target, progress=False, examine=False)
    assert result.converged
    assert bool(target.log_joint(torch.tensor([5.0], dtype=F64)).isnan())
    assert bool(q.mean.isfinite().all())


def test_single_precision():
    target = marginal(poisson, 25, torch.zeros(3), pattern=LATTICE)
    double = marginal(poisson, 25, torch.zeros(3, dtype=F64), pattern=LATTICE)
    theta = 0.5 * normal(4, 3)
    value = target.log_joint(theta.float())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), double.log_joint(theta), rtol=1e-5, atol=0)


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor):
                self.entries = max(self.entries, one.numel())
        return result


@pytest.mark.accuracy
def test_no_matrix_of_all_latents():
    """Of 3,600 latents no tensor of a value with its gradient has a tenth of D² entries, nor of a draw."""
    data = square(60)
    with Largest() as made:
        target = marginal(data.log_joint, data.dim, torch.zeros(3, dtype=F64), pattern=data.edges)
        theta = torch.zeros(1, 3, dtype=F64, requires_grad=True)
        target.log_joint(theta).sum().backward()
        target.latents(theta.detach()).sample(1)
    assert target.colours <= 8
    assert 0 < made.entries < data.dim**2 / 10
    assert theta.grad.isfinite().all()


@pytest.mark.accuracy
def test_the_page_of_latents(capsys):
    """The snippet of latent variables in docs/groups.md runs as it stands, and prints what stands there."""
    text = (pathlib.Path(__file__).parents[2] / "docs/groups.md").read_text(encoding="utf-8")
    text = text.partition("\n## Many latent variables\n")[2]
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    torch.manual_seed(0)
    seen = {}
    exec(compile(snippet, "docs/groups.md", "exec"), seen)
    assert seen["result"].converged
    assert f"`target.colours` is {seen['target'].colours}," in text
    assert capsys.readouterr().out.startswith("Laplace's log p(y, theta) is off by")


def test_a_coupling_that_vanishes_at_the_typical_theta_is_found():
    other = marginal(changing, 6, torch.tensor([0.7], dtype=torch.float64))
    target = marginal(changing, 6, torch.zeros(1, dtype=torch.float64))
    for value in (0.0, 0.5, 1.0):
        theta = torch.tensor([value], dtype=torch.float64)
        torch.testing.assert_close(target.log_joint(theta), other.log_joint(theta), rtol=1e-10, atol=1e-12)


def test_a_part_in_float32_is_named():
    """Where rounding in float32 is all that the pattern misses, the sentence is of float32 and not of a pair."""

    def walk(theta, u, dtype):
        step = (u[..., 1:].to(dtype) - u[..., :-1].to(dtype)).square().sum(-1)
        return -0.5 * step - 0.5 * (u - theta[..., :1]).square().sum(-1)

    edges, at = torch.stack([torch.arange(9), torch.arange(1, 10)], -1), torch.zeros(1, dtype=torch.float64)
    with pytest.raises(InputError, match=r"differ by .* of it, as they do where a part of it is computed in float32\."):
        marginal(lambda theta, u: walk(theta, u, torch.float32), 10, at, pattern=edges)
    marginal(lambda theta, u: walk(theta, u, torch.float64), 10, at, pattern=edges)
    marginal(lambda theta, u: walk(theta, u, torch.float64), 10, at.float(), pattern=edges)
    with pytest.raises(InputError, match="misses the pair of latents 8 and 9"):
        marginal(lambda theta, u: walk(theta, u, torch.float64), 10, at, pattern=edges[:-1])
