"""The structure that AutoGaussian takes from a Pyro model: forests, their log joints by member, and dense refusals."""

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers import DTYPE, raises

from torchngvi import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.expectations import Fixed, PerFactor, Stein
from torchngvi.optim import NaturalGradientVI
from torchngvi.rules import LocalExponential
from torchngvi.structures import Forest, arrow, nested

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import Predictive, Trace_ELBO, config_enumerate  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, AutoMarginal, NaturalSVI, fit_guide, log_joint  # noqa: E402
from torchngvi.adapters.pyro.local_guide import PlateLayout  # noqa: E402
from torchngvi.adapters.pyro.structure import FactoredLogJoint  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("pyro_in_float64"),
    pytest.mark.filterwarnings("ignore:the model is run for one draw after another"),
]

QUIET = {"progress": False, "examine": False}


def groups(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(mu, 1.5))
        pyro.sample("y", dist.Normal(b, 0.7), obs=y)


def classes(y):
    """A plate of three in a plate of two, with a simplex, a vector and rows inside."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("schools", 2, dim=-1):
        a = pyro.sample("a", dist.Normal(mu, 1.5))
        with pyro.plate("classes", 3, dim=-2):
            b = pyro.sample("b", dist.Normal(a + beta[..., 0], 1.5))
            c = pyro.sample("c", dist.Dirichlet(torch.ones(3)))
            with pyro.plate("pupils", 4, dim=-3):
                pyro.sample("y", dist.Normal(b + c[..., 0] * beta[..., 1], 0.7), obs=y)


def crossed(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    rows, columns = pyro.plate("rows", 6, dim=-2), pyro.plate("columns", 3, dim=-1)
    with rows:
        a = pyro.sample("a", dist.Normal(mu, 1.0))
    with columns:
        b = pyro.sample("b", dist.Normal(mu, 1.0))
    with rows, columns:
        pyro.sample("y", dist.Normal(a + b, 1.0), obs=y)


def counts(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", y.shape[-1]):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson((mu + tau * b).exp()), obs=y)


def wings(y):
    """Two plates side by side, of members of one size."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    for wing, size, dim in (("east", 4, -1), ("west", 2, -2)):
        with pyro.plate(wing, size, dim=dim):
            b = pyro.sample(f"b_{wing}", dist.Normal(mu, tau))
            pyro.sample(f"y_{wing}", dist.Normal(b, 0.7), obs=y[:size].reshape((-1,) + (1,) * (-1 - dim)))


def schools(sigma, effect):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("effect", dist.Normal(mu + tau * eta, sigma), obs=effect)


SCHOOLS = (
    torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=DTYPE),
    torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=DTYPE),
)


def both(model, *args, tolerance=None):
    """The guide with the structure of the model, and the dense one, fitted."""
    made = []
    for structure in ("auto", "dense"):
        torch.manual_seed(0)
        guide = AutoGaussian(model, structure=structure, name=structure)
        made.append((guide, fit_guide(model, guide, *args, options={**QUIET, "tolerance": tolerance})))
        assert made[-1][1].converged
    return made


def moments(guide):
    """Mean and covariance."""
    q = guide.get_posterior()
    return q.mean, q.covariance_matrix


def bound(guide, density):
    """The ELBO on draws that are the same ones for two guides of one model; the density has the order of the sites."""
    mean, covariance = moments(guide)
    noise = torch.randn(4096, len(mean), generator=torch.Generator().manual_seed(1))
    root = torch.linalg.cholesky(covariance)
    return (
        density(mean + noise @ root.mT).mean()
        + root.diagonal().log().sum()
        + 0.5 * len(mean) * (1 + math.log(2 * math.pi))
    )


@pytest.mark.parametrize(("model", "shape"), [("groups", (5,)), ("crossed", (6, 3)), ("walks", (5, 4))])
@pytest.mark.parametrize("structure", ["dense", "auto"])
def test_theta_has_the_order_of_the_sites(structure, model, shape):
    """A draw of q is a point of `log_joint` of the model, which is that of the model at the latents of the guide."""
    model, y = globals()[model], torch.randn(shape)
    guide = AutoGaussian(model, structure=structure).setup(y)
    assert (guide.structure.order is None) == (structure == "dense")
    theta = guide.posterior.sample()
    values = {site["name"]: value for site, value in guide._unpack_latent(theta)}  # their supports are the real line
    trace = pyro.poutine.trace(pyro.condition(model, values)).get_trace(y)
    assert torch.allclose(log_joint(model, y)(theta), trace.log_prob_sum(), rtol=1e-12)


@pytest.mark.parametrize(("model", "shape"), [("groups", (5,)), ("crossed", (6, 3)), ("walks", (5, 4))])
@pytest.mark.parametrize("kind", ["dense", "auto", "marginal", "plate"])
def test_the_layout_of_a_guide_reads_its_theta(kind, model, shape):
    """Values by name, and back: those of the median at the mean, with or without another order of θ."""
    model, y = globals()[model], torch.randn(shape)
    if kind == "plate":
        layout = PlateLayout(poutine.trace(model).get_trace(y), "rows" if model is crossed else "groups")
        theta = torch.arange(float(layout.dim))
        b, g = theta.tensor_split([layout.size * layout.r])
        expected = {site.name: layout.free(site, b.reshape(layout.size, -1), g) for site in layout.sites}
    elif kind == "marginal":
        guide = AutoMarginal(model).setup(y)
        layout = guide.structure
        theta = torch.arange(float(layout.dim))
        in_turn = torch.empty_like(theta).scatter(0, layout.order, theta)
        expected = {site["name"]: value for site, value in guide._unpack_latent(in_turn)}
    else:
        guide = AutoGaussian(model, structure=kind).setup(y)
        guide.posterior.mean.copy_(torch.arange(float(guide.posterior.dim)))
        layout, theta, expected = guide.structure, guide.posterior.mean, guide.median()
    values = layout.constrained(theta)[0]
    assert all(torch.equal(values[name], expected[name].to(theta)) for name in expected)
    assert torch.equal(layout.unconstrained(values), theta)


def test_the_members_of_a_plate_are_nodes_below_what_they_share():
    guide = AutoGaussian(groups, structure="auto").setup(torch.randn(5))
    assert isinstance(guide.posterior, PrecisionCholeskyGaussian)
    assert guide.structure.forest == arrow(groups=5, local=1, globals=1)
    assert guide.posterior.structure == Forest((5,) * 5 + (-1,), (1,) * 6, (1, 2, 3, 4, 5, 0))
    assert str(guide.structure) == "b: 1 coordinate for each member of groups (5)\nmu: 1 coordinate shared by all"


def walks(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", 5, dim=-2):
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with pyro.plate("times", 4, dim=-1):
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(a + e.cumsum(-1), 0.5), obs=y)


def test_a_plate_in_a_plate_is_a_deeper_level_unless_a_site_joins_its_members():
    guide = AutoGaussian(walks, structure="auto").setup(torch.randn(5, 4))
    assert guide.structure.forest == arrow(groups=5, local=5, globals=1)
    guide = AutoGaussian(classes, structure="auto").setup(torch.randn(4, 3, 2))
    assert guide.structure.forest == nested([0, 1, 0, 1, 0, 1], local=[3, 1], globals=3)
    assert [level.sites for level in guide.structure.levels] == [("b", "c"), ("a",), ("mu", "beta")]
    assert guide.structure.reasons == ()


def test_of_crossed_plates_the_smaller_is_shared():
    guide = AutoGaussian(crossed, structure="auto").setup(torch.randn(6, 3))
    assert guide.structure.forest == arrow(groups=6, local=1, globals=4)
    assert "the site 'y' joins the plates 'columns' and 'rows'; the smaller is shared by all" in str(guide.structure)


def test_members_without_common_latents_are_independent():
    def model():
        with pyro.plate("groups", 4):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, 2.0), obs=torch.tensor(1.0))
        pyro.sample("z", dist.Normal(0.0, 1.0), obs=torch.tensor(3.0))

    (guide, result), (_, dense) = both(model)
    assert guide.structure.levels[0].up is None
    assert guide.posterior.precision.count_nonzero() == 4
    assert abs(result.loss - dense.loss) < 1e-8  # with the term that depends on nothing


def cumulated(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(mu, 1.5))
        pyro.sample("y", dist.Normal(b.cumsum(-1), 0.7), obs=y)


def backwards(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(mu, 1.5))
        pyro.sample("y", dist.Normal(b + 0.1 * b.roll(-3, -1), 0.7), obs=y)


def multiplied(y):
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(0.0, 1.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(b @ torch.ones(len(y), len(y)), 0.7), obs=y)


@config_enumerate
def mixture(y):
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("groups", 6):
        b = pyro.sample("b", dist.Normal(p, 1.0))
        z = pyro.sample("z", dist.Bernoulli(p))
        pyro.sample("y", dist.Normal(b + z, 1.0), obs=y)


def drawing(y):
    groups(y + torch.randn(()))


def subsampled(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", 2):
        b = pyro.sample("b", dist.Normal(mu, 1.5))
        with pyro.plate("rows", 6, subsample_size=3) as rows:
            pyro.sample("y", dist.Normal(b, 0.7), obs=y[rows, None].expand(-1, 2))


class Summed(dist.Normal):
    def log_prob(self, value):
        return super().log_prob(value).sum()


def summed(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", len(y)):
        b = pyro.sample("b", dist.Normal(mu, 1.5))
        pyro.sample("y", Summed(b, 0.7), obs=y)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (cumulated, "the site 'y' joins members of the plate 'groups'"),
        (backwards, "the site 'y' joins members of the plate 'groups'"),
        (multiplied, "the site 'y', outside of the plate 'groups', reads 'b' and joins its members"),
        (mixture, "the model sums out discrete latents, whose terms are not told by member"),
        (drawing, "the model has other values at the same latents in each run: it draws"),
        (subsampled, "the model subsamples its data, of which other rows may join other members"),
        (summed, "a site has no density for each member of its plates"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_is_no_forest_is_dense_and_says_why(model, reason):
    guide = AutoGaussian(model, structure="auto").setup(torch.randn(6))
    assert type(guide.posterior) is CholeskyGaussian
    assert guide.structure.forest is None
    assert str(guide.structure).startswith("one dense block of")
    assert reason in str(guide.structure)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (groups, (torch.randn(5),)),
        (classes, (torch.randn(4, 3, 2),)),
        (crossed, (torch.randn(6, 3),)),
        (wings, (torch.randn(5),)),
        (schools, SCHOOLS),
    ],
    ids=["groups", "classes", "crossed", "wings", "schools"],
)
def test_the_terms_of_members_add_up_to_the_log_joint_with_its_derivatives(model, args):
    args = tuple(arg.double() for arg in args)
    guide = AutoGaussian(model, structure="auto").setup(*args)
    density = guide.density(model, args)
    target = FactoredLogJoint(density, guide.structure)
    theta = torch.randn(3, 2, density.dim).requires_grad_()
    ours, theirs = target(theta), AutoGaussian(model).setup(*args).density(model, args)(theta)
    assert ours.shape == (3, 2)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    for one, other in zip(
        *(torch.autograd.grad(v.sum(), theta, retain_graph=True) for v in (ours, theirs)), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)
    values = target.unpack(theta.detach())
    assert torch.allclose(target.pack(values), theta.detach())


def test_a_term_sees_the_draws_of_its_own_member():
    y = torch.randn(4, 3, 2)
    guide = AutoGaussian(classes, structure="auto").setup(y)
    target = FactoredLogJoint(guide.density(classes, (y,)), guide.structure)
    for kind, factor in enumerate(target.factors):
        n, each = guide.structure.levels[kind].nodes, target.structure.kinds[kind]
        k = each.size + each.above
        cliques = torch.randn(5, n, k)
        together = factor.target.log_joint(cliques)
        for node in range(n):
            alone = factor.target.log_joint(cliques[:, node : node + 1].expand(-1, n, -1))
            assert torch.allclose(together[:, node], alone[:, node], rtol=1e-12)


@pytest.mark.sparse(2)
@pytest.mark.parametrize(("model", "shape"), [(groups, (6,)), (crossed, (6, 3)), (walks, (5, 4))])
def test_a_gaussian_posterior_is_that_of_the_dense_guide(model, shape):
    (arrowed, one), (dense, two) = both(model, torch.randn(shape), tolerance=1e-6)
    assert type(one.target) is FactoredLogJoint
    assert abs(one.loss - two.loss) < 1e-8
    for ours, theirs in zip(moments(arrowed), moments(dense), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-8)
    theta = torch.randn(4, arrowed.posterior.dim)
    ours = arrowed.get_posterior().log_prob(theta)
    theirs = dense.get_posterior().log_prob(theta)
    assert torch.allclose(ours, theirs, rtol=1e-8)


@pytest.mark.accuracy
def test_eight_schools_reach_the_bound_of_the_dense_guide():
    (guide, _), (dense, result) = both(schools, *SCHOOLS)
    assert guide.structure.forest == arrow(groups=8, local=1, globals=2)
    assert abs(bound(guide, result.target) - bound(dense, result.target)) < 0.01
    for site, value in dense.median().items():
        assert torch.allclose(guide.median()[site], value, atol=0.15)


@pytest.mark.accuracy
@pytest.mark.parametrize("n", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_counts_in_groups_reach_the_bound_of_the_dense_guide(n):
    y = torch.poisson((0.5 + 0.7 * torch.randn(n)).exp().expand(5, n))
    (guide, one), (dense, two) = both(counts, y, tolerance=0.1)
    assert abs(bound(guide, two.target) - bound(dense, two.target)) < 0.01
    assert one.gradients < two.gradients


class Elements(TorchDispatchMode):
    """Counts the elements of all tensors that are made."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.count += sum(x.numel() for x in (made if isinstance(made, tuple | list) else [made]) if torch.is_tensor(x))
        return made


@pytest.mark.accuracy
def test_the_cost_of_an_evaluation_is_linear_in_the_groups():
    seen = []
    for n in (50, 100, 200):
        y = torch.ones(5, n)
        guide = AutoGaussian(counts, structure="auto", name=f"{n}").setup(y)
        target = FactoredLogJoint(guide.density(counts, (y,)), guide.structure)
        opt = NaturalGradientVI(
            guide.posterior, LocalExponential(), lr=0.1, estimator=PerFactor(Stein(Fixed(16, apart=True)))
        )
        opt.step(target)
        with Elements() as elements:
            opt.step(target)
        seen.append(elements.count)
    first, second = seen[1] - seen[0], seen[2] - seen[1]
    assert first > 0
    assert abs(second - 2 * first) < 0.01 * second


@pytest.mark.accuracy
def test_the_guide_goes_where_the_dense_one_goes():
    y = torch.randn(4, 3, 2)
    guide = AutoGaussian(classes, structure="auto").setup(y)
    svi = NaturalSVI(classes, guide)
    losses = [svi.step(y) for _ in range(60)]
    assert sum(losses[-10:]) < sum(losses[:10])
    Trace_ELBO(num_particles=4, vectorize_particles=True)(classes, guide)(y).backward()
    assert guide.posterior.root_probe.grad.isfinite().all()
    shapes = {name: tuple(x.shape) for name, x in guide(y).items()}
    assert shapes == {"mu": (), "beta": (2,), "a": (2,), "b": (3, 2), "c": (3, 2, 3)}
    low, high = guide.quantiles([0.1, 0.9])["b"]
    assert low.shape == (3, 2)
    assert (low < high).all()
    theta = guide.get_transform()(torch.zeros(guide.latent_dim))
    assert torch.allclose(theta, guide.posterior.mean)
    other = AutoGaussian(classes, structure="auto", name="other").setup(y)
    other.load_state_dict(guide.state_dict())
    assert torch.equal(other.median()["b"], guide.median()["b"])


def test_draws_of_the_guide_predict():
    y = torch.randn(6, 3)
    guide = AutoGaussian(crossed, structure="auto").setup(y)
    draws = Predictive(crossed, guide=guide, num_samples=2000, parallel=True, return_sites=["mu", "a", "b"])(y)
    mean, covariance = moments(guide)
    drawn = torch.cat([draws["mu"].reshape(-1, 1), draws["a"].reshape(-1, 6), draws["b"].reshape(-1, 3)], 1)
    assert torch.allclose(drawn.mean(0), mean, atol=5 * (covariance.diagonal().max() / 2000) ** 0.5)


def test_newton_starts_a_guide_with_a_structure():
    y = torch.randn(6)
    guide = AutoGaussian(groups, structure="auto").laplace_approximation(y)
    dense = AutoGaussian(groups, name="dense").laplace_approximation(y)
    for ours, theirs in zip(moments(guide), moments(dense), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-8)


def test_coordinates_are_named_in_the_order_of_q():
    guide = AutoGaussian(groups, structure="auto")
    result = fit_guide(groups, guide, torch.randn(3), options={"progress": False})
    assert result.names == ("mu", "b[0]", "b[1]", "b[2]")


def test_natural_coordinates_take_the_structure_too():
    guide = AutoGaussian(groups, NaturalGaussian, structure="auto").setup(torch.randn(5))
    assert isinstance(guide.posterior, NaturalGaussian)
    assert guide.posterior.structure == guide.structure.pattern


def test_fit_guide_takes_the_structure_of_the_plates_where_it_was_left_open():
    """A guide that was set up before stays as it is, and a posterior without structures is dense."""
    y = torch.randn(5)
    open_, ready, diagonal = AutoGaussian(groups), AutoGaussian(groups).setup(y), AutoGaussian(groups, DiagonalGaussian)
    assert str(ready.structure) == "one dense block of 6 coordinates"
    for guide in (open_, ready, diagonal):
        fit_guide(groups, guide, y, options=QUIET)
    kinds = [type(guide.posterior) for guide in (open_, ready, diagonal)]
    assert kinds == [PrecisionCholeskyGaussian, CholeskyGaussian, DiagonalGaussian]


def test_a_state_dict_of_the_other_structure_is_refused():
    dense, auto = (AutoGaussian(groups, structure=word).setup(torch.randn(5)) for word in ("dense", "auto"))
    for loads, loaded, word in ((dense, auto, "auto"), (auto, dense, "dense")):
        with raises(f'the state_dict is of a guide whose structure is "{word}", and this one has another.'):
            loads.load_state_dict(loaded.state_dict())


def test_another_order_is_refused():
    """In a state_dict or a parameter store, as those of 0.2.0, which had the members first and no order."""
    store, other = pyro.get_param_store(), AutoGaussian(groups, structure="auto").setup(torch.randn(5))
    saved, state = copy.deepcopy(store.get_state()), other.state_dict()
    guide = AutoGaussian(groups, structure="auto").setup(torch.randn(5))
    store.set_state(copy.deepcopy(saved))
    assert torch.equal(guide.median()["b"], other.median()["b"])
    guide.load_state_dict(state)
    assert torch.equal(guide.posterior.mean, other.posterior.mean)
    order = state.pop("order")
    for wrong in (state, {**state, "order": order.flip(0)}):
        with raises("the state_dict is of a guide whose latents stand in another order"):
            guide.load_state_dict(wrong)
    assert torch.equal(saved["params"].pop("AutoGaussian.q.order"), order)
    for wrong in ({}, {"AutoGaussian.q.order": order.flip(0)}):
        pyro.clear_param_store()
        store.set_state({**saved, "params": saved["params"] | wrong})
        with raises("the parameter store is of a guide whose latents stand in another order"):
            guide.setup(torch.randn(5))


def test_other_words_and_posteriors_are_refused():
    with raises('structure is "dense", or "auto", that of the plates of the model; got \'arrow\'.'):
        AutoGaussian(groups, structure="arrow")
    with raises('structure="auto" gives the precision of a Gaussian the pattern of the model. Leave posterior out'):
        AutoGaussian(groups, DiagonalGaussian, structure="auto")
    with raises("the guide has no posterior before it has seen the model"):
        _ = AutoGaussian(groups, structure="auto").structure


def test_a_model_that_lost_its_structure_is_refused():
    y = torch.randn(6)
    guide = AutoGaussian(groups, structure="auto").setup(y)
    with raises("have not: the site 'y' joins members of the plate 'groups'. Set another guide up with them."):
        fit_guide(cumulated, guide, y, options=QUIET)


def test_masks_and_scales_are_those_of_the_log_joint():
    def model(y):
        with poutine.scale(scale=0.5):
            groups(torch.where(y > 0, y, 0.0))
        with pyro.plate("rows", 2, dim=-2), pyro.plate("again", 6, dim=-1), poutine.mask(mask=y > 0):
            pyro.sample("z", dist.Normal(1.0, 1.0), obs=y.expand(2, 6))

    guide = AutoGaussian(model, structure="auto").setup(torch.randn(6))
    assert guide.structure.forest == arrow(groups=6, local=1, globals=1)


def test_a_loss_may_set_the_guide_up():
    y = torch.randn(6)
    guide = AutoGaussian(groups, structure="auto")
    loss = Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1).loss(groups, guide, y)
    assert loss == loss
    assert guide.structure.forest == arrow(groups=6, local=1, globals=1)


def test_rows_in_batches_have_no_structure():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("groups", 6):
            b = pyro.sample("b", dist.Normal(mu, 1.5))
            with pyro.plate("rows", len(y), dim=-2):
                pyro.sample("y", dist.Normal(b, 0.7), obs=y)

    with raises('rows in batches are fitted with one dense block; leave structure="auto" out.'):
        fit_guide(model, AutoGaussian(model, structure="auto"), batches=[(torch.randn(4, 6),)], options=QUIET)


def test_draws_of_a_structure_are_not_spread(monkeypatch):
    several = SimpleNamespace(world=2, together=nullcontext)
    monkeypatch.setattr("torchngvi.adapters.pyro.fitting.processes_of", lambda group: several)
    with raises('the draws of a guide with structure="auto" are not spread over processes; leave group= out.'):
        fit_guide(groups, AutoGaussian(groups, structure="auto"), torch.randn(6), options=QUIET)
