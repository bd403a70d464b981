"""Structures found by what terms read: rows that read members by index, and fits of them by draws of the whole θ."""

import re

import pytest
import torch
from helpers import DTYPE

from torchngvi import PrecisionCholeskyGaussian
from torchngvi.errors import InputError
from torchngvi.expectations import Fixed, Hessian, PerFactor, SampleAverage
from torchngvi.models import FactorTarget, LogJoint
from torchngvi.structures import arrow, nested

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer.reparam import LocScaleReparam  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, ModelLogJoint, fit_guide  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")

QUIET = {"progress": False, "examine": False}


def intercepts(X, group, y):
    """Counts with an intercept of each group, which each row reads by index, and ``X @ beta``."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(X.shape[1]), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", int(group.max()) + 1):
        b = pyro.sample("b", dist.Normal(0.0, tau))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Poisson((X @ beta + b[group]).exp()), obs=y)


def by_plate(X, group, y):
    """The same for rows that go through the groups again and again, in the plate of their group."""
    n = int(group.max()) + 1
    beta = pyro.sample("beta", dist.Normal(torch.zeros(X.shape[1]), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", n, dim=-1):
        b = pyro.sample("b", dist.Normal(0.0, tau))
        with pyro.plate("rows", len(X) // n, dim=-2):
            x = X.reshape(-1, n, X.shape[1])
            pyro.sample("y", dist.Poisson(((x * beta).sum(-1) + b).exp()), obs=y.reshape(-1, n))


def counts(n, rows=5):
    """Rows that go through n groups again and again."""
    group, X = torch.arange(n).repeat(rows), torch.stack([torch.ones(rows * n), torch.randn(rows * n)], 1)
    return X, group, torch.poisson((X @ torch.tensor([0.5, 0.3]) + 0.7 * torch.randn(n)[group]).exp())


def pupils(X, room, school, y):
    """Two levels, both by index: rooms in schools, pupils in rooms."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(X.shape[1]), 2.0).to_event(1))
    with pyro.plate("schools", int(school.max()) + 1):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rooms", len(school)):
        b = pyro.sample("b", dist.Normal(a[school], 0.5))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Normal(X @ beta + b[room], 0.7), obs=y)


PUPILS = (
    torch.randn(30, 2, dtype=DTYPE, generator=torch.Generator().manual_seed(0)),
    torch.arange(30) % 6,
    torch.tensor([1, 0, 1, 0, 1, 0]),
    torch.randn(30, dtype=DTYPE, generator=torch.Generator().manual_seed(1)),
)


def grades(room, school, y):
    """A row reads its room and its school: that a room is in one school only is in the data alone."""
    with pyro.plate("schools", 2):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rooms", 6):
        b = pyro.sample("b", dist.Normal(0.0, 0.5))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(a[school] + b[room], 0.7), obs=y)


def answers(subject, item, y):
    """Subjects and items cross."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("subjects", 7):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("items", 4):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mu + a[subject] + b[item], 0.7), obs=y)


def walk(group, y):
    with pyro.plate("groups", 6):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(b.cumsum(-1)[group], 0.7), obs=y)


def fitted(model, *args, structure="auto", name="AutoGaussian"):
    torch.manual_seed(0)
    guide = AutoGaussian(model, structure=structure, name=name)
    result = fit_guide(model, guide, *args, options=QUIET)
    assert result.converged
    return guide, result


def unnamed(y):
    """A dimension of a shared latent where the plate has its own."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(6), 1.0))
    with pyro.plate("groups", 6):
        b = pyro.sample("b", dist.Normal(beta.sum(-1, keepdim=True), 1.0))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)


def product(y):
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("groups", 6):
        b = pyro.sample("b", dist.Normal(torch.ones(6, 2) @ beta, 1.0))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)


def side_by_side(y):
    """Two plates at one dimension."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", 6):
        pyro.sample("b", dist.Normal(mu, 1.5))
    with pyro.plate("others", 2):
        pyro.sample("c", dist.Normal(mu, 1.5))


def counting(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(mu * mu.numel(), 1.5))
        pyro.sample("y", dist.Normal(b, 0.7), obs=y)


def converting(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(mu, 1.5))
        assert type(b) is torch.Tensor, "a tensor"
        pyro.sample("y", dist.Normal(b, 0.7), obs=y)


def test_rows_that_read_members_by_index_have_them_apart():
    guide = AutoGaussian(intercepts, structure="auto").setup(*counts(5))
    assert guide.structure.forest == arrow(groups=5, local=1, globals=3)
    assert (
        str(guide.structure) == "b: 1 coordinate for each member of groups (5)\nbeta, tau: 3 coordinates shared by all"
    )
    assert guide.structure.order.tolist() == [3, 4, 5, 6, 7, 0, 1, 2]


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_the_number_of_a_member_is_spelt(n):
    group = torch.randint(n, (40,)).sort(descending=True).values
    group[:n] = torch.arange(n)  # all of them are there

    def model():
        with pyro.plate("rooms", n + 1):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("schools", n):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 40):
            pyro.sample("y", dist.Normal(a[group] * b[group + 1], 0.7), obs=torch.ones(40))

    guide = AutoGaussian(model, structure="auto").setup()
    assert guide.structure.forest.parents == (-1, *range(n + 1, 2 * n + 1), *([-1] * n))  # b[0] is read by no row


def test_levels_by_index_are_nested():
    guide = AutoGaussian(pupils, structure="auto").setup(*PUPILS)
    assert guide.structure.forest == nested(PUPILS[2].tolist(), local=[1, 1], globals=2)
    room, school, y = PUPILS[1], PUPILS[2], PUPILS[3]
    guide = AutoGaussian(grades, structure="auto", name="grades").setup(room, school[room], y)
    assert guide.structure.forest.parents == (7, 6, 7, 6, 7, 6, -1, -1)


def test_of_plates_that_rows_join_the_smaller_is_shared():
    guide = AutoGaussian(answers, structure="auto").setup(torch.arange(28) % 7, torch.arange(28) // 7, torch.randn(28))
    assert guide.structure.forest == arrow(groups=7, local=1, globals=5)
    assert "(terms join the plates 'items' and 'subjects'; the smaller is shared by all)" in str(guide.structure)


def test_rows_that_read_several_members_join_them():
    guide = AutoGaussian(walk, structure="auto").setup(torch.arange(12) % 6, torch.randn(12))
    assert guide.structure.forest is None


@pytest.mark.parametrize(
    ("model", "shared"), [(unnamed, 6), (product, 2), (counting, 1), (converting, 1)], ids=lambda case: str(case)[:20]
)
def test_what_has_no_value_for_each_member_is_read_too(model, shared):
    """Shared latents that do not broadcast over members, or that are counted or converted."""
    guide = AutoGaussian(model, structure="auto").setup(torch.randn(6))
    assert guide.structure.forest == arrow(groups=6, local=1, globals=shared)


@pytest.mark.parametrize("centered", [0.0, 0.5, None])
def test_a_reparametrised_latent_has_its_members_apart(centered):
    """`LocScaleReparam` makes b a function of b_decentered, which Pyro's record does not follow."""
    X, group, y = counts(6)
    model = poutine.reparam(by_plate, {"b": LocScaleReparam(centered)})
    guide = AutoGaussian(model, structure="auto").setup(X, group, y)
    assert guide.structure.forest == arrow(groups=6, local=1, globals=3)
    assert str(guide.structure).startswith("b_decentered: 1 coordinate for each member of groups (6)")


@pytest.mark.filterwarnings("ignore:the model is given data and observes nothing")
def test_plates_side_by_side_may_have_one_dimension():
    guide = AutoGaussian(side_by_side, structure="auto").setup(torch.randn(6))
    assert guide.structure.forest == arrow(groups=8, local=1, globals=1)


TREE = nested([0, 1, 0, 1, 0, 1], local=[2, 1], globals=2)  # D = 16


def test_draws_are_white_in_each_clique():
    z = Fixed(2 * TREE.widest, seed=3, pattern=TREE)(torch.zeros(TREE.dim))
    assert torch.equal(z[: len(z) // 2], -z[len(z) // 2 :])
    for clique in TREE.gather(z):
        moments = clique.movedim(0, -1) @ clique.movedim(0, -2) / len(z)
        assert torch.allclose(moments, torch.eye(clique.shape[-1]).expand_as(moments), atol=1e-12)
    few = Fixed(4, seed=3, pattern=TREE)(torch.zeros(TREE.dim))  # too few for that
    assert torch.allclose(few.square().mean(0), torch.ones(TREE.dim))


def test_a_quadratic_of_the_pattern_is_seen_without_error():
    root = TREE.with_diagonal(0.3 * torch.randn(TREE.shape), 1 + torch.rand(TREE.dim))
    H = TREE.to_dense(TREE.tril(root))
    H, m = H @ H.mT, torch.randn(TREE.dim)
    target = LogJoint(lambda theta: -0.5 * (((theta - m) @ H) * (theta - m)).sum(-1))
    q = PrecisionCholeskyGaussian(TREE.dim, structure=TREE, scale=0.7)
    seen = SampleAverage(Fixed(2 * TREE.widest, pattern=TREE))(q, target)
    exact = Hessian(draws=2)(q, target).derivative.framed(q.frame())
    assert torch.allclose(seen.derivative.a, exact.a, atol=1e-10)
    assert torch.allclose(seen.derivative.W, exact.W, atol=1e-10)
    assert seen.noise2 < 1e-18


def poisson(n):
    """Counts of n groups, with intercepts b standard normal, and mu, log tau: in factors, and whole."""
    y = torch.arange(n) % 4

    def group(theta):
        rate = theta[..., 1] + theta[..., 2].exp() * theta[..., 0]
        return 3 * (y * rate - rate.exp()) - 0.5 * theta[..., 0].square()

    forest = arrow(groups=n, local=1, globals=2)
    factors = FactorTarget(forest, [(0, group), (-1, lambda theta: -0.5 * theta.square().sum(-1))])
    return factors, LogJoint(factors.log_joint), PrecisionCholeskyGaussian(n + 2, structure=forest, scale=0.3)


def packets(target, q, draws, seeds):
    made = [SampleAverage(Fixed(draws, seed, pattern=q.structure))(q, target) for seed in range(seeds)]
    a, W = (torch.stack([getattr(e.derivative, name) for e in made]) for name in ("a", "W"))
    return a, W, torch.stack([e.noise2 for e in made])


def test_packets_of_the_whole_are_those_of_the_factors_in_the_mean():
    factors, whole, q = poisson(12)
    a, W, _ = packets(whole, q, 4096, 20)
    truth = PerFactor(SampleAverage(Fixed(40_000, apart=True)))(q, factors).derivative
    for ours, theirs in ((a, truth.a), (W, truth.W)):
        error = ours.std(0) / len(ours) ** 0.5  # of the factors as large, and whitening has a bias of the order of 1/S
        assert bool(((ours.mean(0) - theirs).abs() < 7 * error + theirs.abs().max() / 4096).all())


@pytest.mark.accuracy
def test_the_noise_of_the_whole_is_the_variance_over_seeds_or_more():
    _, whole, q = poisson(12)
    a, W, noise2 = packets(whole, q, 64, 200)
    spread = (a - a.mean(0)).square().sum(-1) + q.structure.flat(W - W.mean(0)).square().sum(-1)
    assert 0.1 < spread.mean() / noise2.mean() < 1.1


def test_the_noise_of_the_whole_does_not_outgrow_that_of_the_factors():
    """As draws that are white in each coordinate alone would have it."""
    shares = []
    for n in (12, 96):
        factors, whole, q = poisson(n)
        of_factors = PerFactor(SampleAverage(Fixed(64, apart=True)))(q, factors).noise2
        plain = SampleAverage(Fixed(64))(q, whole).noise2
        shares.append([float(x / of_factors) for x in (packets(whole, q, 64, 10)[2].mean(), plain)])
    (few, _), (many, plain) = shares
    assert many < 1.5 * few
    assert many < 0.5 * plain


def test_two_levels_by_index_have_the_posterior_of_the_dense_guide():
    (guide, one), (dense, two) = fitted(pupils, *PUPILS), fitted(pupils, *PUPILS, structure="dense", name="dense")
    assert isinstance(one.target, ModelLogJoint)
    assert abs(one.loss - two.loss) < 1e-8
    assert torch.allclose(guide.get_posterior().mean, dense.get_posterior().mean, atol=1e-7)
    covariance = guide.get_posterior().covariance_matrix
    assert torch.allclose(covariance, dense.get_posterior().covariance_matrix, atol=1e-7)


@pytest.mark.accuracy
@pytest.mark.parametrize("n", [200, pytest.param(800, marks=pytest.mark.slow)])
def test_counts_by_index_reach_the_bound_of_counts_by_plate(n):
    data = counts(n)
    (guide, one), (plates, two) = fitted(intercepts, *data), fitted(by_plate, *data, name="plates")
    assert guide.structure.forest == plates.structure.forest == arrow(groups=n, local=1, globals=3)
    assert isinstance(one.target, ModelLogJoint)
    z, bounds = torch.randn(4096, n + 3, generator=torch.Generator().manual_seed(1)), []
    for each in (guide, plates):
        theta = each.posterior.push_noise(z).detach()
        bounds.append((two.target.density(theta) - each.posterior.log_prob(theta)).detach())
    assert abs((bounds[0] - bounds[1]).mean()) < 0.03 * (n / 200)
    assert one.gradients < 4 * two.gradients


def test_data_that_join_other_members_are_refused():
    room, school, y = PUPILS[1], PUPILS[2], PUPILS[3]
    guide = AutoGaussian(grades, structure="auto").setup(room, school[room], y)
    with pytest.raises(InputError, match=re.escape("its terms read other members together. Set another guide up")):
        fit_guide(grades, guide, room, 1 - school[room], y, options=QUIET)
