"""`AutoMarginal`: the members of plates integrated out, against closed forms; and what a guide of Pyro has to do."""

import copy
import functools
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO

from torchngvi.adapters.pyro import AutoGaussian, AutoMarginal, NaturalSVI, fit_guide
from torchngvi.adapters.pyro.marginal import _cost_of_columns, _judged
from torchngvi.diagnostics.verdict import Verdict
from torchngvi.errors import InputError
from torchngvi.latents import LaplaceError

Y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
S = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)
QUIET = {"progress": False}


@pytest.fixture(autouse=True)
def _clean():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def schools(y, tau=None):
    mu = pyro.sample("mu", dist.Normal(number(0.0), 5.0))
    tau = pyro.sample("tau", dist.LogNormal(number(1.0), 1.0)) if tau is None else tau
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, S), obs=y)


def nested(y):
    mu = pyro.sample("mu", dist.Normal(number(0.0), 2.0))
    outer = pyro.sample("outer", dist.LogNormal(number(0.0), 1.0))
    with pyro.plate("a", 2, dim=-2):
        m = pyro.sample("m", dist.Normal(mu, outer))
        with pyro.plate("b", 3, dim=-1):
            x = pyro.sample("x", dist.Normal(m, 0.5))
            pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def test_the_target_is_the_marginal_itself_where_that_is_known():
    """Given mu and tau the effects and the data are Gaussian: y_j ~ N(mu, s_j² + tau²)."""
    guide = AutoMarginal(schools).setup(Y)
    assert guide.integrates
    assert guide.posterior.dim == 2
    target = guide.integrate(guide.density(schools, (Y,)))
    theta = torch.randn(20, 2, dtype=torch.float64)

    def exact(mu, log_tau):
        total = dist.Normal(mu[:, None], (S.square() + (2 * log_tau).exp()[:, None]).sqrt()).log_prob(Y).sum(-1)
        return total + dist.Normal(0.0, 5.0).log_prob(mu) + dist.Normal(1.0, 1.0).log_prob(log_tau)

    assert torch.allclose(target.log_joint(theta), exact(*theta.T), atol=1e-9)


ROW, COLUMN = torch.arange(6).repeat_interleave(4), torch.arange(4).repeat(6)


def crossed(y, sds=None):
    """Two factors that cross: members of a plate, and a vector."""
    mu = pyro.sample("mu", dist.Normal(number(0.0), 2.0))
    sa, sb = (
        [pyro.sample(name, dist.LogNormal(number(0.0), 0.5)) for name in ("sa", "sb")] if sds is None else number(sds)
    )
    with pyro.plate("rows", 6):
        a = pyro.sample("a", dist.Normal(number(0.0), sa))
    b = pyro.sample("b", dist.Normal(torch.zeros(4).double(), sb[..., None]).to_event(1))
    with pyro.plate("cells", 24):
        pyro.sample("y", dist.Normal(mu + a[..., ROW] + b[..., COLUMN], 0.5), obs=y)


CELLS = torch.randn(24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.accuracy
def test_crossed_factors_are_integrated_out_exactly():
    """Given the standard deviations the data are Gaussian: at each theta, and the evidence where they are known."""

    def evidence(sa, sb, wide=0.0):
        same = [(one[:, None] == one).double() for one in (ROW, COLUMN)]
        covariance = sa**2 * same[0] + sb**2 * same[1] + 0.25 * torch.eye(24).double() + wide**2
        return dist.MultivariateNormal(torch.zeros(24).double(), covariance)

    guide = AutoMarginal(crossed).setup(CELLS)
    target = guide.integrate(guide.density(crossed, (CELLS,)))
    assert (target.dim, target.latents_dim) == (3, 10)
    for mu, log_sa, log_sb in torch.randn(5, 3, dtype=torch.float64):
        theta, sds = torch.stack([mu, log_sa, log_sb]), torch.stack([log_sa, log_sb]).exp()
        priors = dist.Normal(0.0, 2.0).log_prob(mu) + dist.Normal(0.0, 0.5).log_prob(theta[1:]).sum()
        assert torch.allclose(target.log_joint(theta), evidence(*sds).log_prob(CELLS - mu) + priors, atol=1e-9)
    known = functools.partial(crossed, sds=(0.7, 0.4))
    result = fit_guide(known, AutoMarginal(known), CELLS, options=QUIET)
    assert -result.loss == pytest.approx(float(evidence(0.7, 0.4, 2.0).log_prob(CELLS)), abs=1e-3)


@pytest.mark.accuracy
def test_what_a_guide_with_a_field_gives():
    """Sites in their shapes from draws, medians and quantiles, all of one order."""
    guide = AutoMarginal(crossed)
    result = fit_guide(crossed, guide, CELLS, options=QUIET)
    assert result.converged
    assert result.names == ("mu", "log sa", "log sb")
    assert "a, b: 10 coordinates integrated out together" in str(guide.structure)
    median, drawn = guide.median(), Predictive(crossed, guide=guide, num_samples=2000, parallel=True)(CELLS)
    low, high = (each for each in zip(*(guide.quantiles([0.05, 0.95])[name] for name in ("a", "b")), strict=True))
    for name, below, above in zip(("a", "b"), low, high, strict=True):
        values = drawn[name].reshape(2000, -1)
        assert torch.allclose(values.median(0).values, median[name], atol=0.15)
        inside = ((values > below) & (values < above)).double().mean(0)
        assert torch.allclose(inside, torch.full_like(inside, 0.9), atol=0.04)
    assert drawn["sa"].shape[0] == 2000
    again = pickle.loads(pickle.dumps(guide))
    assert torch.equal(again.posterior.mean, guide.posterior.mean)


def pairs(y):
    """Games of two teams, with a log standard deviation of the user's own, a slope, and a skill of heavy tails."""
    slope = pyro.sample("slope", dist.Normal(number(0.0), 1.0))
    log_tau = pyro.sample("log_tau", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    far = pyro.sample("far", dist.StudentT(3.0, torch.zeros(2).double(), 1.0).to_event(1))
    first = pyro.sample("first", dist.Normal(far.sum(-1), log_tau[..., 0].exp()))
    with pyro.plate("teams", 4):
        skill = pyro.sample("skill", dist.Normal(number(0.0), log_tau[..., 1:].exp()))
    apart = skill[..., [0, 1, 2, 3, 0]] - skill[..., [1, 2, 3, 0, 2]]
    with pyro.plate("games", 5):
        pyro.sample("y", dist.Bernoulli(logits=slope + first + apart), obs=y)


def test_which_latents_are_a_field():
    """Gaussian ones of several numbers or with latents in their priors; no scale of others, no other family."""
    guide = AutoMarginal(pairs).setup(torch.ones(5).double())
    assert [level.sites for level in guide.structure.levels] == [("first", "skill"), ("slope", "log_tau", "far")]


@pytest.mark.parametrize(("hierarchical", "integrated"), [(True, ("item", "person")), (False, ("person",))])
def test_members_go_alone_where_what_they_leave_has_no_latents_in_its_prior(hierarchical, integrated):
    def items(y):
        scale = pyro.sample("scale", dist.HalfNormal(number(1.0)))
        with pyro.plate("items", 3, dim=-1):
            item = pyro.sample("item", dist.Normal(number(0.0), scale if hierarchical else 1.0))
        with pyro.plate("people", 9, dim=-2):
            person = pyro.sample("person", dist.Normal(torch.zeros(9, 1).double(), scale))
            with pyro.plate("answers", 3, dim=-1):
                pyro.sample("y", dist.Bernoulli(logits=person - item), obs=y)

    guide = AutoMarginal(items).setup(torch.ones(9, 3).double())
    assert guide.structure.levels[0].sites == integrated


def test_a_field_without_a_mode_is_not_integrated_out():
    def model():
        scale = pyro.sample("scale", dist.HalfNormal(number(1.0)))
        x = pyro.sample("x", dist.Normal(torch.zeros(3).double(), 1.0).to_event(1))
        pyro.factor("far", scale * x.square().sum(-1) + x.square().sum(-1))

    guide = AutoMarginal(model)
    with pytest.warns(UserWarning, match="AutoMarginal integrates nothing out: .*no mode"):
        guide.setup()
    assert guide.posterior.dim == 4


@pytest.mark.parametrize(("off", "word"), [(0.1, "fits"), (0.25, "about right"), (0.5, "does not fit")])
def test_the_verdict_says_where_the_approximation_moves_a_mean(off, word):
    theta = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(8)[:, None]
    error = LaplaceError(theta, off * theta[:, 0], torch.zeros(16), torch.zeros(16) > 0, ("log tau",))
    verdict = _judged(replace(Verdict.none(""), word="fits"), error)
    assert verdict.word == word
    expected = (f"log tau: mean off by about {off:.2g} sd by Laplace's approximation",)
    assert verdict.reasons == (() if word == "fits" else expected)


def test_a_gaussian_posterior_is_found():
    """With tau known all is Gaussian: the mean and the standard deviation of mu and of each effect."""
    guide = AutoMarginal(schools)
    result = fit_guide(schools, guide, Y, tau=number(6.0), options=QUIET)
    assert (result.converged, result.verdict.word) == (True, "fits")
    weights = 1 / (S.square() + 36)
    precision = weights.sum() + 1 / 25
    mean = (weights * Y).sum() / precision
    assert guide.posterior.mean.item() == pytest.approx(mean.item(), abs=0.05 * precision.item() ** -0.5)
    assert guide.posterior.stddev.item() == pytest.approx(precision.item() ** -0.5, rel=0.02)
    kept = 36 * weights  # of y_j - mu
    means, sds = mean + kept * (Y - mean), (S.square() * kept + (1 - kept).square() / precision).sqrt()
    members = guide.members
    assert float(((members.mean - means) / sds).abs().max()) < 0.2  # 256 draws of mu
    assert torch.allclose(members.stddev, sds, rtol=0.1)
    drawn = Predictive(schools, guide=guide, num_samples=2000, parallel=True)(Y, tau=number(6.0))["theta"]
    assert torch.allclose(drawn.reshape(2000, 8).std(0), sds, rtol=0.15)


@functools.cache
def fitted(model=schools):
    """A guide, of which each test takes a copy, and the result of its fit."""
    pyro.set_rng_seed(0)
    guide = AutoMarginal(model)
    return guide, fit_guide(model, guide, Y, options=QUIET)


@pytest.mark.accuracy
def test_the_scale_of_groups_is_wider_than_in_one_gaussian():
    (marginal, result), dense = fitted(), AutoGaussian(schools, structure="dense", name="dense")
    fit_guide(schools, dense, Y, options=QUIET)
    assert result.converged
    assert result.verdict.word != "does not fit"
    assert result.names == ("mu", "log tau") or list(result.names) == ["mu", "log tau"]
    assert float(marginal.posterior.stddev[1]) > 1.3 * float(dense.posterior.stddev[1])


@pytest.mark.accuracy
def test_what_a_guide_gives():
    """Nested plates: sites in their shapes from a call, `Predictive`, `median` and `quantiles`, all of one order."""
    y = torch.poisson(torch.full((2, 3), 2.0, dtype=torch.float64))
    guide = AutoMarginal(nested, draws=64)
    assert fit_guide(nested, guide, y, options=QUIET).converged
    shapes = {"mu": (), "outer": (), "m": (2, 1), "x": (2, 3)}
    assert {name: tuple(value.shape) for name, value in guide(y).items()} == shapes
    median, quantiles = guide.median(), guide.quantiles([0.05, 0.95])
    for name, shape in shapes.items():
        assert median[name].shape == shape
        assert bool((quantiles[name][0] < median[name]).all() & (median[name] < quantiles[name][1]).all())
    for parallel in (False, True):
        found = Predictive(nested, guide=guide, num_samples=80, parallel=parallel)(y)
        assert found["x"].shape == (80, 2, 3)
        assert torch.allclose(found["x"].mean(0), median["x"], atol=0.3)
        assert torch.allclose(found["x"].std(0).flatten(), guide.members.stddev[:6], rtol=0.5)
    assert torch.equal(median["x"].flatten(), guide.members.quantile(0.5)[:6])


@pytest.mark.parametrize("dims", [(-1, -2), (None, None)])
def test_predictive_where_the_plate_of_the_data_is_beyond_those_of_the_latents(dims):
    """The plate of the draws of `Predictive` then has the dimension of a plate of the model."""

    def rows(y):
        mu = pyro.sample("mu", dist.Normal(number(0.0), 2.0))
        with pyro.plate("groups", 4, dim=dims[0]):
            b = pyro.sample("b", dist.Normal(mu, 1.0))
            with pyro.plate("rows", 3, dim=dims[1]):
                pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    y = torch.randn(3, 4, dtype=torch.float64)
    guide = AutoMarginal(rows)
    fit_guide(rows, guide, y, options=QUIET)
    drawn = Predictive(rows, guide=guide, num_samples=4000, parallel=True)(y)["b"].reshape(4000, 4)
    precision = torch.eye(5, dtype=torch.float64) * 4
    precision[0, 0], precision[0, 1:], precision[1:, 0] = 0.25 + 4, -1, -1
    exact = torch.linalg.solve(precision, torch.cat([torch.zeros(1).double(), y.sum(0)]))[1:]
    assert torch.allclose(drawn.mean(0), exact, atol=0.05)


@pytest.mark.accuracy
def test_quantiles_are_those_of_the_draws():
    """Of the mixture, which is skewed where the scale of the groups is not known."""
    guide = AutoMarginal(schools, draws=8192)
    fit_guide(schools, guide, Y, options=QUIET)
    drawn = Predictive(schools, guide=guide, num_samples=32_000, parallel=True)(Y)["theta"].reshape(32_000, 8)
    found = guide.quantiles([0.05, 0.5, 0.95])["theta"]
    exact = torch.quantile(drawn, torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64), dim=0)
    assert torch.allclose(found, exact, atol=0.15 * float(drawn.std()))


@pytest.mark.accuracy
def test_draws_follow_the_seed_and_q():
    guide = copy.deepcopy(fitted()[0])
    draws = []
    for _ in range(2):
        pyro.set_rng_seed(3)
        draws.append(guide(Y)["theta"])
    assert torch.equal(*draws)
    state = copy.deepcopy(guide.state_dict())
    before = guide.median()["theta"]
    guide.posterior.initialize_(guide.posterior.mean + torch.tensor([50.0, 0.0]), guide.posterior.scale_tril)
    assert bool((guide.median()["theta"] > before + 10).all())
    guide.load_state_dict(state)
    with pytest.raises(InputError, match="call fit_guide"):
        guide(Y)


@pytest.mark.accuracy
def test_float32_of_the_model():
    """As most models of Pyro are: matrix products take one dtype."""
    X, number = torch.randn(40, 3), torch.arange(40) % 8

    def model(y):
        beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("groups", 8):
            b = pyro.sample("b", dist.Normal(0.0, tau))
        with pyro.plate("rows", 40):
            pyro.sample("y", dist.Normal(X @ beta + b[..., number], 0.5), obs=y)

    y = X @ torch.tensor([1.0, -1.0, 0.0]) + torch.randn(8)[number]
    guide = AutoMarginal(model)
    result = fit_guide(model, guide, y, options=QUIET)
    assert result.converged, result.reason
    assert "Laplace's log p(y, theta) is off by" in result.reason
    assert guide.posterior.dim == 4
    assert guide(y)["b"].dtype == torch.float32
    assert torch.allclose(guide.median()["beta"], torch.tensor([1.0, -1.0, 0.0]), atol=0.3)


def test_copies():
    guide, _ = fitted()
    twin, of_a_copy = copy.deepcopy(guide), copy.deepcopy(guide).median()  # before medians of the guide are known
    assert twin(Y)["theta"].shape == (8,)
    for median in (guide.median(), twin.median()):
        assert all(torch.equal(median[name], value) for name, value in of_a_copy.items())
    again = pickle.loads(pickle.dumps(guide))
    assert torch.equal(again.posterior.mean, guide.posterior.mean)
    with pytest.raises(InputError, match="draws the members of plates given the data of its fit: call fit_guide"):
        again(Y)


@pytest.mark.parametrize(("model", "data"), [(schools, Y), (crossed, CELLS)])
def test_a_guide_is_found_in_the_parameter_store(model, data):
    """A q over the shared latents, with members apart or a field."""
    first = AutoMarginal(model).setup(data)
    first.posterior.load_state_dict({**first.posterior.state_dict(), "mean": first.posterior.mean + 0.5})
    state = copy.deepcopy(pyro.get_param_store().get_state())
    pyro.clear_param_store()
    pyro.get_param_store().set_state(state)
    second = AutoMarginal(model).setup(data)
    assert second.integrates
    assert torch.equal(second.posterior.mean, first.posterior.mean)


def test_a_model_without_members_is_fitted_as_ever():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(number(0.0), 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    guide = AutoMarginal(model)
    with pytest.warns(UserWarning, match="integrates nothing out: no latents are local to the members of a plate"):
        assert fit_guide(model, guide, Y, options=QUIET).converged
    assert not guide.integrates
    assert guide.median()["mu"].item() == pytest.approx(Y.sum().item() / 9, abs=0.05)
    assert guide.laplace_approximation(Y) is guide


def test_what_is_refused():
    with pytest.raises(InputError, match="call fit_guide"):
        AutoMarginal(schools)(Y)
    guide = copy.deepcopy(fitted()[0])
    svi = SVI(schools, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    with pytest.raises(InputError, match="Trace_ELBO cannot fit this guide: AutoMarginal is fitted by fit_guide alone"):
        svi.step(Y)
    with pytest.raises(ValueError, match="draws and has no density"):
        pyro.poutine.trace(guide).get_trace(Y).log_prob_sum()
    with pytest.raises(InputError, match="leave batches= and group= out"):
        fit_guide(schools, guide, options=QUIET, batches=[(Y,)])
    with pytest.raises(InputError, match="is that of an AutoGaussian"):
        guide.laplace_approximation(Y)
    for refused in (guide.get_posterior, guide.get_transform, guide.get_base_dist):
        with pytest.raises(InputError, match="has no Gaussian over all latents"):
            refused()
    with pytest.raises(InputError, match="AutoMarginal is fitted by fit_guide alone; take an AutoGaussian"):
        NaturalSVI(schools, AutoMarginal(schools)).step(Y)
    with pytest.raises(InputError, match="draws counts draws"):
        AutoMarginal(schools, draws=0)


def test_the_budget_of_time_is_that_of_all_that_a_fit_looks_at():
    result = fit_guide(wide_schools, AutoMarginal(wide_schools), Y, options=QUIET | {"max_seconds": 1e-3})
    assert "the time was used up before Laplace's approximation was looked at" in result.reason


def test_members_without_a_prior_of_their_own():
    def masked(y):
        tau = pyro.sample("tau", dist.LogNormal(number(0.0), 1.0))
        with pyro.plate("groups", 8), pyro.poutine.mask(mask=torch.arange(8) < 6):
            b = pyro.sample("b", dist.Normal(number(0.0), tau))
            pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    with pytest.raises(InputError, match="members of plates have no mode or no finite density. Give every latent"):
        fit_guide(masked, AutoMarginal(masked), Y, options=QUIET)


def test_members_without_a_mode():
    """Of an unbounded density given the shared latents: a sentence, and no draw."""
    guide = copy.deepcopy(fitted()[0])
    guide._target.draw = lambda theta: torch.full((len(theta), 8), torch.nan)
    with pytest.raises(InputError, match="have a mode at 0 of 20 draws of q, which is too few to integrate them out"):
        guide(Y)


def test_a_model_that_subsamples_says_that_nothing_is_integrated_out():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(number(0.0), 1.0))
        tau = pyro.sample("tau", dist.LogNormal(number(0.0), 1.0))
        with pyro.plate("groups", 8):
            b = pyro.sample("b", dist.Normal(mu, tau))
        with pyro.plate("rows", 8, subsample_size=4) as rows:
            pyro.sample("y", dist.Normal(b[rows], 1.0), obs=y[rows])

    with pytest.warns(UserWarning, match="AutoMarginal integrates nothing out: the model subsamples"):
        AutoMarginal(model).setup(Y)


def wide_schools(y):
    """Eight schools under a wide prior of their scale: log tau is skewed."""
    mu = pyro.sample("mu", dist.Normal(number(0.0), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(number(5.0)))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, S), obs=y)


@pytest.mark.accuracy
def test_the_verdict_of_a_refined_guide_is_on_the_fan():
    guide, result = fitted(wide_schools)
    assert guide.refined is not None
    assert (result.verdict.family, result.verdict.word) == ("a fan of Gaussians", "fits")
    assert "q is the best Gaussian, and a fan of Gaussians fits." in str(result)
    assert "a fan along log tau raised the ELBO" in result.reason
    assert list(result.names) == ["mu", "log tau"]


@pytest.mark.accuracy
def test_the_draws_of_a_refined_guide_are_those_of_the_posterior():
    """The truth is a sum over a grid of log tau, given which mu is Gaussian."""
    log_tau = torch.linspace(-14, 6, 4001, dtype=torch.float64)
    tau = log_tau.exp()
    total = S.square() + tau[:, None].square()
    precision = (1 / total).sum(1) + 1 / 25
    mean = (Y / total).sum(1) / precision
    quadratic = (Y.square() / total).sum(1) - precision * mean.square()
    log_p = -0.5 * (quadratic + total.log().sum(1) + precision.log()) + dist.HalfCauchy(5.0).log_prob(tau) + log_tau
    share = log_p.softmax(0)
    centre = (share * log_tau).sum()
    sd = (share * (log_tau - centre).square()).sum().sqrt()
    guide, _ = fitted(wide_schools)
    assert guide.posterior.stddev[1] < 0.85 * sd
    draws = guide.draw(4000)[:, 1]
    assert abs(float(draws.mean() - centre)) < 0.08 * sd
    assert float(draws.std() / sd) == pytest.approx(1.0, abs=0.06)
    assert float(guide.median()["tau"].log()) == pytest.approx(float(draws.median()), abs=0.1)


def test_a_refined_guide_is_saved_and_copied():
    guide, _ = fitted(wide_schools)
    other = AutoMarginal(wide_schools).setup(Y)
    other.load_state_dict(guide.state_dict())
    theta = torch.randn(5, 2, dtype=torch.float64)
    for copied in (other, copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        assert torch.equal(copied.refined.log_prob(theta), guide.refined.log_prob(theta))
    other.load_state_dict({name: x for name, x in guide.state_dict().items() if not name.startswith("refined")})
    assert other.refined is None


@pytest.mark.accuracy
@pytest.mark.parametrize(("refine", "options"), [(False, {}), (True, {"max_gradients": 600})])
def test_without_a_refinement_the_verdict_is_on_the_gaussian(refine, options):
    guide = AutoMarginal(wide_schools, refine=refine)
    result = fit_guide(wide_schools, guide, Y, options=QUIET | options)
    assert guide.refined is None
    assert result.verdict.family == "the Gaussian family"


def test_the_cost_of_dense_fields_is_said():
    few, many = (SimpleNamespace(colours=n, latents_dim=n, curvature=SimpleNamespace(products=8000)) for n in (32, 40))
    assert _cost_of_columns(few, 20) == _cost_of_columns(many, 0) == ""
    assert "each of the 20 gradients of what they share took about 400 products" in _cost_of_columns(many, 20)
