"""The adapter for Pyro: log joints against Pyro's own, guides against exact posteriors, refusals."""

import copy
import io
import math
import pickle
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DTYPE, EXACT, IDENTITY, POSTERIORS, close, raises

import torchngvi as ngvi
from torchngvi.derivatives import energy_and_gradient, mean_hessian
from torchngvi.errors import InputError, PairError, RejectedStepWarning
from torchngvi.expectations import Hessian

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.distributions import constraints  # noqa: E402
from pyro.infer import (  # noqa: E402
    CSIS,
    SVI,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
    Predictive,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
    config_enumerate,
)
from pyro.infer.autoguide import (  # noqa: E402
    AutoDelta,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoNormal,
    init_to_value,  # noqa: E402
)
from pyro.infer.importance import psis_diagnostic  # noqa: E402
from pyro.infer.mcmc.util import initialize_model  # noqa: E402
from pyro.infer.reparam import NeuTraReparam  # noqa: E402
from pyro.nn import PyroModule, PyroParam, PyroSample  # noqa: E402

from torchngvi.adapters.pyro import (  # noqa: E402
    AutoGaussian,
    LatentGaussian,
    NaturalSVI,
    fit_guide,
    log_joint,
)
from torchngvi.adapters.pyro import density as ways  # noqa: E402

QUIET = {"progress": False}
pytestmark = [
    pytest.mark.filterwarnings("ignore:the model is run for one draw after another"),
    pytest.mark.usefixtures("pyro_in_float64"),
]


families = pytest.mark.parametrize("family", POSTERIORS.values(), ids=POSTERIORS)


SIGMA = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=DTYPE)
EFFECT = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=DTYPE)
X = torch.linspace(-1, 1, 12, dtype=DTYPE)[:, None] ** torch.arange(3)
Y = torch.sin(3 * X[:, 1])


def schools(sigma, y):
    mu = pyro.sample("mu", dist.Normal(0, 5))
    tau = pyro.sample("tau", dist.HalfCauchy(5))
    with pyro.plate("J", len(sigma)):
        eta = pyro.sample("eta", dist.Normal(0, 1))
        pyro.sample("y", dist.Normal(mu + tau * eta, sigma), obs=y)


def conjugate(X, y):
    """Broadcasts over draws."""
    w = pyro.sample("w", dist.Normal(0, 2).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("rows", len(X)):
        return pyro.sample("y", dist.Normal((X * w).sum(-1), 0.5), obs=y)


def conjugate_by_product(X, y):
    """Does not: `X @ w` is for one w."""
    w = pyro.sample("w", dist.Normal(0, 2).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def conjugate_by_items(X, y):
    """Neither at once nor under vmap."""
    w = pyro.sample("w", dist.Normal(0, 2).expand([X.shape[-1]]).to_event(1))
    total = sum(each.item() for each in w) * 0
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Normal(X @ w + total, 0.5), obs=y)


def scaled_and_masked():
    x = pyro.sample("x", dist.Normal(0.5, 2).mask(torch.tensor(False)))
    with pyro.plate("outer", 3), poutine.scale(scale=2.5):
        a = pyro.sample("a", dist.Gamma(2.0, 1.0 + x**2))
        with pyro.plate("inner", 2), poutine.mask(mask=torch.tensor([True, False, True])):
            b = pyro.sample("b", dist.Normal(a, 1))
            pyro.sample("y", dist.Normal(b, 1.0), obs=torch.ones(2, 3))
    pyro.factor("extra", -x.cosh())


def two_plates():
    """Plates on either side, a vector and a matrix inside."""
    left, right = pyro.plate("left", 2, dim=-2), pyro.plate("right", 3, dim=-1)
    with left:
        u = pyro.sample("u", dist.Normal(0, 1).expand([4]).to_event(1))
    with right:
        v = pyro.sample("v", dist.HalfNormal(1.0))
    with left, right:
        pyro.sample("y", dist.Normal(u.sum(-1), v), obs=torch.ones(2, 3))


def supports():
    pyro.sample("simplex", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    L = pyro.sample("lkj", dist.LKJCholesky(3, 2.0))
    scale = pyro.sample("positive", dist.LogNormal(0.0, 0.5).expand([3]).to_event(1))
    pyro.sample("interval", dist.Uniform(-2.0, 3.0))
    pyro.sample("unit", dist.Beta(2.0, 3.0))
    base = dist.Normal(torch.zeros(4), 1.0).to_event(1)
    pyro.sample("ordered", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
    pyro.sample("above", dist.Pareto(1.5, 3.0))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), scale_tril=scale[:, None] * L), obs=torch.ones(3))


@config_enumerate
def mixture(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        centre = pyro.sample("centre", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(centre[..., z], 0.7), obs=y)


@config_enumerate
def broadcasting_mixture(y):
    """The same, written so that draws of the centres broadcast too."""
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    left = pyro.sample("left", dist.Normal(-1.0, 1.0))
    right = pyro.sample("right", dist.Normal(1.0, 1.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(p))
        pyro.sample("y", dist.Normal(torch.where(z > 0, right, left), 0.7), obs=y)


def ordinal(X, y):
    """Writes the probabilities of the categories into a tensor; the product is for one w."""
    w = pyro.sample("w", dist.Normal(0, 2).expand([X.shape[-1]]).to_event(1))
    base = dist.Normal(torch.arange(3.0) - 1, 1.0).to_event(1)
    cuts = pyro.sample("cuts", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.OrderedLogistic(X @ w, cuts), obs=y)


def autoregressive(y):
    """Fills a series in a loop over time, in new tensors and in a copy of the data."""
    a = pyro.sample("a", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(0, 1))
    mean, start = torch.zeros_like(y), y.clone()
    start[0] = a[0]
    for t in range(2, len(y)):
        mean[t] = a[0] * y[t - 1] + a[1] * y[t - 2]
    mean[:2] += start[:2] * a[1]
    pyro.sample("y", dist.Normal(mean, scale).to_event(1), obs=y)


@config_enumerate
def hidden_markov(y):
    P = pyro.sample("P", dist.Dirichlet(torch.ones(2, 2) + torch.eye(2)).to_event(1))
    centre = pyro.sample("centre", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    x = 0
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x{t}", dist.Categorical(P[x]))
        pyro.sample(f"y{t}", dist.Normal(centre[x], 0.7), obs=y[t])


MIXED = torch.tensor([-1.5, -0.7, 0.2, 1.1, 1.4], dtype=DTYPE)
MODELS = {
    "schools": (schools, (SIGMA, EFFECT), "plate"),
    "conjugate": (conjugate, (X, Y), "plate"),
    "by_product": (conjugate_by_product, (X, Y), "vmap"),
    "by_items": (conjugate_by_items, (X, Y), "loop"),
    "scaled_and_masked": (scaled_and_masked, (), "plate"),
    "two_plates": (two_plates, (), "plate"),
    "supports": (supports, (), "vmap"),
    "mixture": (mixture, (MIXED,), "vmap"),
    "broadcasting_mixture": (broadcasting_mixture, (MIXED,), "plate"),
    "ordinal": (ordinal, (X, torch.arange(12) % 4), "vmap"),
    "autoregressive": (autoregressive, (Y,), "vmap"),
    "hidden_markov": (hidden_markov, (MIXED,), "vmap"),
}
every_model = pytest.mark.parametrize(("model", "args", "way"), MODELS.values(), ids=MODELS)


@every_model
def test_log_joint_is_the_potential_of_pyros_hmc(model, args, way):
    density = log_joint(model, *args)
    assert density.batched_by == way
    theta = density.initial + 0.5 * torch.randn(4, density.dim)
    _, potential, transforms, _ = initialize_model(model, args)
    expected, gradients = [], []
    for each in theta:
        leaf = each.clone().requires_grad_()
        values = density.unpack(leaf)
        value = -potential({name: transform(values[name]) for name, transform in transforms.items()})
        expected.append(value.detach())
        gradients.append(torch.autograd.grad(value, leaf)[0])
    theta.requires_grad_()
    value = density(theta)
    close(value.detach(), torch.stack(expected), IDENTITY)
    close(torch.autograd.grad(value.sum(), theta)[0], torch.stack(gradients), IDENTITY)


@every_model
def test_every_way_to_batch_that_runs_agrees_with_the_loop(model, args, way):
    density = log_joint(model, *args)
    theta = density.initial + 0.5 * torch.randn(2, 3, density.dim)
    alone = torch.stack([torch.stack([density.one(each) for each in row]) for row in theta])
    close(density.log_joint(theta), alone, IDENTITY)
    close(density.target.log_joint(theta[0, 0]), alone[0, 0], IDENTITY)


@pytest.mark.parametrize("name", ["schools", "conjugate", "scaled_and_masked", "two_plates", "supports"])
def test_log_joint_is_that_of_trace_elbo(name):
    """At each draw of the guide: the loss of one particle is log q - log p."""
    model, args, _ = MODELS[name]
    guide, density = AutoGaussian(model).setup(*args), log_joint(model, *args)
    for _ in range(3):
        trace = poutine.trace(guide).get_trace(*args)
        values = {site["name"]: site["value"] for site in guide.prototype_trace.nodes.values()}
        values = {key: trace.nodes[key]["value"] for key in values}
        frozen = poutine.condition(guide, {"_AutoGaussian_latent": density.pack(values)})
        loss = Trace_ELBO().loss(model, frozen, *args)
        theta = density.pack(values)
        expected = guide.get_posterior().log_prob(theta) - density(theta)
        close(torch.tensor(loss), expected.detach(), IDENTITY)


def test_pack_and_unpack_are_inverse_on_every_support():
    density = log_joint(supports)
    theta = torch.randn(2, 5, density.dim)
    values = density.unpack(theta)
    close(density.pack(values), theta, IDENTITY)
    assert values["simplex"].shape == (2, 5, 3)
    assert values["lkj"].shape == (2, 5, 3, 3)
    close(values["simplex"].sum(-1), torch.ones(2, 5), EXACT)
    assert bool((values["ordered"].diff(dim=-1) > 0).all())
    assert bool(((values["interval"] > -2) & (values["interval"] < 3)).all())
    assert bool((values["above"] > 1.5).all())


def test_jacobians_are_those_of_autograd():
    """Of one site after another, its constrained value in free coordinates."""
    density = log_joint(supports)
    theta = 0.5 * torch.randn(density.dim)
    tril = torch.tril_indices(3, 3, -1)
    free = {"simplex": lambda x: x[:-1], "lkj": lambda x: x[tril[0], tril[1]]}
    total = torch.zeros(())
    for site in density.layout.sites:
        part = free.get(site.name, torch.atleast_1d)

        def one(u, site=site, part=part):
            return part(site.transform(u.reshape(site.free)))

        jacobian = torch.autograd.functional.jacobian(one, theta[site.where])
        total = total + torch.linalg.slogdet(jacobian).logabsdet
    close(density.layout.constrained(theta)[1], total, IDENTITY)


@pytest.mark.parametrize("name", ["schools", "by_product", "by_items", "supports", "broadcasting_mixture"])
def test_second_derivatives(name):
    """In each way to batch, through the transforms, against differences of the gradient."""
    model, args, _ = MODELS[name]
    density = log_joint(model, *args)
    theta, h = density.initial + 0.3 * torch.randn(density.dim), 1e-4
    H = mean_hessian(density, theta[None], chunk=64)
    steps = h * torch.eye(density.dim)
    gradient = energy_and_gradient(density, torch.cat([theta + steps, theta - steps]))[1]
    plus, minus = gradient.chunk(2)
    close(H, (plus - minus) / (2 * h), 1e-5)


def test_parameters_get_the_same_gradient_in_each_way():
    density = log_joint(with_noise, LARGE)
    theta, gradients = torch.randn(4, density.dim), []
    (leaf,) = pyro.get_param_store()._params.values()
    in_place = partial(ways.by_vmap, within=ways._ForEachDraw)
    for way in (ways.by_broadcasting, ways.by_vmap, ways.by_loop, in_place):
        gradients.append(torch.autograd.grad(way(density, theta).sum(), leaf)[0])
    close(gradients[0], gradients[2], IDENTITY)
    close(gradients[1], gradients[2], IDENTITY)
    close(gradients[3], gradients[2], IDENTITY)


def test_subsamples_are_kept_until_asked():
    x = torch.arange(20.0) ** 2

    def model():
        mu = pyro.sample("mu", dist.Normal(0, 1))
        with pyro.plate("data", 20, subsample_size=5) as rows:
            pyro.sample("y", dist.Normal(mu, 1), obs=x[rows])

    density = log_joint(model)
    assert not density.comparable
    theta = torch.zeros(1)
    first = density(theta)
    assert all(bool(density(theta) == first) for _ in range(5))
    again = {float(density.on()(theta)) for _ in range(5)}
    assert len(again) > 1
    # scaled by 20/5
    rows = density._indices["data"]
    expected = 4 * dist.Normal(0, 1).log_prob(x[rows]).sum() + dist.Normal(0, 1).log_prob(theta[0])
    close(density(theta), expected, EXACT)
    with pytest.raises(PairError, match="a mini-batch gives another objective"):
        ngvi.VN(ngvi.CholeskyGaussian(1), estimator=ngvi.Stein(ngvi.Fixed(4))).step(density)


def test_sequential_plates_and_deterministic_sites():
    def model():
        total = 0.0
        for i in pyro.plate("seq", 3):
            total = total + pyro.sample(f"x{i}", dist.Normal(i, 1.0))
        pyro.deterministic("total", total)
        pyro.sample("y", dist.Normal(total, 1.0), obs=torch.tensor(2.0))

    density = log_joint(model)
    assert (density.dim, density.batched_by) == (3, "plate")
    theta = torch.randn(3)
    expected = dist.Normal(torch.arange(3.0), 1.0).log_prob(theta).sum() + dist.Normal(theta.sum(), 1).log_prob(
        torch.tensor(2.0)
    )
    close(density(theta), expected, EXACT)


def test_masks_scales_and_data_alone_in_one_run():
    """A site that does not depend on θ counts for each draw, also where draws are as many as rows."""

    def model():
        x = pyro.sample("x", dist.Normal(0, 1))
        with pyro.plate("rows", 3), poutine.scale(scale=2.0), poutine.mask(mask=torch.tensor([True, True, False])):
            pyro.sample("alone", dist.Normal(0, 1), obs=torch.arange(3.0))
            pyro.sample("y", dist.Normal(x, 1), obs=torch.arange(3.0))

    density, theta = log_joint(model), torch.randn(3, 1)
    assert density.batched_by == "plate"
    unit = dist.Normal(0, 1)
    expected = unit.log_prob(theta[:, 0]) + 2 * unit.log_prob(torch.arange(2.0)).sum()
    close(density(theta), expected + 2 * dist.Normal(theta, 1).log_prob(torch.arange(2.0)).sum(-1), EXACT)


def test_a_model_that_takes_one_draw_is_said_to_be_slow():
    with pytest.warns(
        UserWarning, match=r"one draw after another, which is slow: it does not broadcast over draws \(Ru"
    ):
        log_joint(conjugate_by_items, X, Y)

    def wrong_value():  # of several draws
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.factor("f", -(x - 1).square() + (x.ndim > 0) * x.detach())

    def wrong_gradient():
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.factor("f", -((x.detach() if x.ndim else x) - 1).square())

    for model in (wrong_value, wrong_gradient):
        assert log_joint(model).batched_by == "vmap"


def test_rounding_is_no_reason_for_a_loop():
    """In single precision gradients through an ill-conditioned Cholesky factor differ in the fourth digit."""
    x = torch.linspace(0, 1, 25, dtype=torch.float32)

    def model():
        scale = pyro.sample("scale", dist.InverseGamma(torch.tensor(5.0).float(), torch.tensor(1.0).float()))
        K = torch.exp(-0.5 * (x[:, None] - x) ** 2 / scale**2) + 1e-4 * torch.eye(25, dtype=torch.float32)
        pyro.sample("f", dist.MultivariateNormal(torch.zeros(25, dtype=torch.float32), K))

    torch.set_default_dtype(torch.float32)
    assert log_joint(model).batched_by == "vmap"


def exact_moments():
    """Of `conjugate`."""
    precision = 4 * X.mT @ X + torch.eye(3) / 4
    covariance = torch.linalg.inv(precision)
    return covariance @ (4 * X.mT @ Y), covariance


def with_precision_of(covariance, structure):
    """The covariance of a q of the structure that is nearest in KL: its precision has the entries of this one's."""
    return torch.linalg.inv(structure.full(structure.from_dense(torch.linalg.inv(covariance))))


@pytest.mark.sparse(2)
@families
@pytest.mark.parametrize("model", [conjugate, conjugate_by_product])
def test_conjugate_posterior_in_one_step(model, family):
    """Whitened fixed draws are exact for quadratics, and a full step of VN lands on the optimum."""
    guide = AutoGaussian(model, family).setup(X, Y)
    mean, covariance = exact_moments()
    opt = ngvi.VN(guide.posterior, lr=1.0, step_size=ngvi.Constant(), estimator=ngvi.Stein(ngvi.Fixed(8)))
    density = log_joint(model, X, Y)
    structure = guide.posterior.structure
    for _ in range(1 if structure.widest == structure.dim else 400):
        opt.step(density)
    covariance = with_precision_of(covariance, structure)
    close(guide.posterior.mean, mean, IDENTITY)
    close(guide.posterior.covariance, covariance, IDENTITY)


@pytest.mark.parametrize("model", [conjugate, conjugate_by_product])
def test_conjugate_posterior_by_exact_curvature_and_by_random_draws(model):
    mean, covariance = exact_moments()
    guide, density = AutoGaussian(model).setup(X, Y), log_joint(model, X, Y)
    full = {"lr": 1.0, "step_size": ngvi.Constant()}
    ngvi.VN(guide.posterior, **full, estimator=Hessian(2)).step(density)  # a pair of draws has the gradient at the mean
    close(guide.posterior.mean, mean, IDENTITY)
    close(guide.posterior.covariance, covariance, IDENTITY)

    # Stein's precision is I + R zᵀ with R = (H - I) z whitened at the start: its error is known
    guide, draws = AutoGaussian(model, init_scale=0.3).setup(X, Y), 4096
    ngvi.VN(guide.posterior, **full, estimator=ngvi.Stein(ngvi.expectations.Independent(draws))).step(density)
    z = torch.linalg.cholesky(covariance).mT @ torch.linalg.inv(guide.posterior.covariance) @ torch.linalg.cholesky(
        covariance
    ) - torch.eye(3)
    assert z.abs().max() < 5 * 4 / draws**0.5
    assert z.abs().max() > 1e-6


def test_fit_guide_on_a_conjugate_model():
    guide = AutoGaussian(conjugate)
    result = fit_guide(conjugate, guide, X, Y, options=QUIET)
    assert result.converged
    mean, covariance = exact_moments()
    close(guide.posterior.mean, mean, 1e-8)
    close(guide.posterior.covariance, covariance, 1e-8)
    marginal = dist.MultivariateNormal(torch.zeros(12), 4 * X @ X.mT + 0.25 * torch.eye(12)).log_prob(Y)
    close(torch.tensor(-result.loss), marginal, 1e-8)


def schools_in_plain_torch(theta):
    """θ = (μ, log τ, η)."""
    mu, log_tau, eta = theta[..., 0], theta[..., 1], theta[..., 2:]
    tau = log_tau.exp()
    prior = dist.Normal(0, 5).log_prob(mu) + dist.HalfCauchy(5).log_prob(tau) + log_tau
    likelihood = dist.Normal(mu[..., None] + tau[..., None] * eta, SIGMA).log_prob(EFFECT)
    return prior + dist.Normal(0, 1).log_prob(eta).sum(-1) + likelihood.sum(-1)


@pytest.mark.accuracy
@families
def test_same_posterior_as_the_plain_route(family):
    """The same seed, the same log joint: the same posterior."""
    guide = AutoGaussian(schools, family).setup(SIGMA, EFFECT)
    plain = copy.deepcopy(guide.posterior)
    torch.manual_seed(1)
    of_model = fit_guide(schools, guide, SIGMA, EFFECT, options=QUIET)
    torch.manual_seed(1)
    of_function = ngvi.fit(plain, schools_in_plain_torch, progress=False)
    assert of_model.converged
    assert of_function.evaluations == of_model.evaluations
    close(guide.posterior.mean, plain.mean, IDENTITY)
    close(guide.posterior.covariance, plain.covariance, IDENTITY)


def fitted(family=ngvi.CholeskyGaussian):
    guide = AutoGaussian(schools, family, structure="dense")
    fit_guide(schools, guide, SIGMA, EFFECT, options={"tolerance": 0.3, **QUIET})
    return guide


def test_methods_of_the_guide():
    guide = fitted()
    q = guide.posterior
    draws = guide.get_posterior().expand([2]).sample((3,))
    assert draws.shape == (3, 2, 10)
    close(guide.get_posterior().log_prob(draws), q.log_prob(draws).detach(), EXACT)
    pushed = guide.get_transform()(torch.eye(10))
    close(pushed, q.mean + q.scale_tril.mT, EXACT)
    assert guide.get_base_dist().event_shape == (10,)
    assert guide.sample_latent(SIGMA, EFFECT).shape == (10,)
    assert {name: value.shape for name, value in guide(SIGMA, EFFECT).items()} == {"mu": (), "tau": (), "eta": (8,)}
    median, quantiles = guide.median(), guide.quantiles([0.1, 0.5, 0.9])
    close(median["tau"], q.mean[1].exp(), EXACT)
    for name, value in quantiles.items():
        close(value[1], median[name], EXACT)
        assert bool((value[0] < value[2]).all())
    close(guide.get_posterior().mean, q.mean, EXACT)
    close(guide.get_posterior().variance, q.variance, EXACT)


def test_starts():
    values = {"mu": torch.tensor(3.0), "tau": torch.tensor(2.0), "eta": torch.ones(8)}
    guide = AutoGaussian(schools, init_loc_fn=init_to_value(values=values), init_scale=0.5).setup(SIGMA, EFFECT)
    close(guide.posterior.stddev, torch.full((10,), 0.5), EXACT)
    for name, value in guide.median().items():
        close(value, values[name], EXACT)


@pytest.mark.accuracy
@pytest.mark.parametrize("parallel", [False, True])
def test_predictive(parallel):
    guide = fitted()
    draws = Predictive(schools, guide=guide, num_samples=500, parallel=parallel, return_sites=("mu", "eta", "y"))(
        SIGMA, None
    )
    assert draws["y"].shape == (500, 8)
    assert draws["eta"].squeeze().shape == (500, 8)
    assert abs(float(draws["mu"].mean() - guide.median()["mu"])) < 5 * float(guide.posterior.stddev[0]) / 500**0.5


@pytest.mark.sparse(3)
@families
def test_drop_in(family):
    """Trace_ELBO as a module: backward fills the probes, our optimizer steps."""
    guide = AutoGaussian(conjugate, family).setup(X, Y)
    elbo = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)(conjugate, guide)
    assert [name for name, _ in elbo.named_parameters()] == ["guide.step.length"]
    opt = ngvi.VN(guide.posterior, lr=0.5, step_size=ngvi.KLRadius(0.5))
    for _ in range(60):
        opt.zero_grad()
        elbo(X, Y).backward()
        opt.step()
    mean, covariance = exact_moments()
    if guide.posterior.structure.widest == guide.posterior.dim:  # sticking the landing: no noise is left
        close(guide.posterior.mean, mean, 1e-6)
        close(guide.posterior.covariance, covariance, 1e-6)


@pytest.mark.accuracy
def test_beside_pyros_svi():
    """Its step leaves the gradient of q in the probes, and takes care of the parameters of the model."""
    guide = AutoGaussian(with_noise, ngvi.DiagonalGaussian).setup(LARGE)
    loss = Trace_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=1)
    svi, natural = SVI(with_noise, guide, pyro.optim.ClippedAdam({"lr": 0.2, "lrd": 0.98}), loss), half(guide.posterior)
    for _ in range(200):
        natural.zero_grad()
        svi.step(LARGE)
        natural.step()
    assert abs(pyro.param("scale").item() - BEST) < 2e-2


CONSTANT = "it needs the derivative of log q in the coordinates of q, which this guide holds constant"
JACOBIAN = "it leaves out the log Jacobians of the supports of the latent sites"
NO_PROBES = "torch.jit takes no probes, through which the gradient reaches q"
REFUSED = {
    ReweightedWakeSleep: ({"num_particles": 4}, CONSTANT),
    TraceTailAdaptive_ELBO: ({"num_particles": 4, "vectorize_particles": True}, CONSTANT),
    RenyiELBO: ({"num_particles": 4}, CONSTANT),
    TraceMeanField_ELBO: ({}, JACOBIAN),
    JitTraceMeanField_ELBO: ({}, JACOBIAN),
    JitTrace_ELBO: ({}, NO_PROBES),
    JitTraceGraph_ELBO: ({}, NO_PROBES),
    JitTraceEnum_ELBO: ({}, NO_PROBES),
}


@pytest.mark.parametrize(
    ("loss", "settings", "why"), [(k, *v) for k, v in REFUSED.items()], ids=lambda x: getattr(x, "__name__", "")
)
def test_losses_that_cannot_fit_the_guide_are_refused_by_name(loss, settings, why):
    """Each would end elsewhere than Trace_ELBO, or in an error of torch."""
    guide = AutoGaussian(with_noise).setup(LARGE)
    elbo = loss(max_plate_nesting=1, **settings)
    svi = SVI(with_noise, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
    for use in (lambda: svi.step(LARGE), lambda: elbo.loss_and_grads(with_noise, guide, LARGE)):
        with raises(f"{loss.__name__} cannot fit an AutoGaussian: {why}. Use Trace_ELBO or TraceEnum_ELBO, "):
            use()
    parts = AutoGuideList(with_noise)
    parts.append(AutoGaussian(with_noise))
    with raises(f"{loss.__name__} cannot fit an AutoGaussian: {why}."):
        elbo.loss_and_grads(with_noise, parts, LARGE)


def test_compiled_inference_is_refused():
    def model(observations=None):
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.sample("y", dist.Normal(x, 1), obs=(observations or {"y": torch.zeros(())})["y"])

    csis = CSIS(model, AutoGaussian(model).setup(), pyro.optim.Adam({"lr": 0.1}))
    with raises(f"CSIS cannot fit an AutoGaussian: {CONSTANT}."):
        csis.step()


def test_bounds_by_weighted_draws_may_be_evaluated():
    """At the exact posterior every draw has the same weight."""
    guide = AutoGaussian(conjugate).laplace_approximation(X, Y)
    marginal = dist.MultivariateNormal(torch.zeros(12), 4 * X @ X.mT + 0.25 * torch.eye(12)).log_prob(Y)
    svi = SVI(conjugate, guide, pyro.optim.Adam({}), RenyiELBO(num_particles=4, max_plate_nesting=1))
    close(torch.tensor(-svi.evaluate_loss(X, Y)), marginal, 1e-8)


@pytest.mark.parametrize("vectorized", [False, True])
def test_losses_that_can_fit_the_guide_have_one_gradient(vectorized):
    """That of the packet, with the same draws."""
    gradients = []
    for loss in (Trace_ELBO, TraceGraph_ELBO, TraceEnum_ELBO):
        torch.manual_seed(1)
        guide = AutoGaussian(with_noise).setup(LARGE)
        elbo = loss(8, 1, vectorize_particles=vectorized, strict_enumeration_warning=False)
        SVI(with_noise, guide, pyro.optim.SGD({"lr": 0.0}), elbo).step(LARGE)
        gradients.append((guide.posterior.mean_probe.grad, guide.posterior.root_probe.grad))
    for others in gradients[1:]:
        for mine, other in zip(gradients[0], others, strict=True):
            assert bool(mine.any())
            close(other, mine, IDENTITY)


def test_svi_alone_takes_one_step_at_a_time():
    """Particles one after another are one step; losses and predictions are none."""
    guide = AutoGaussian(schools).setup(SIGMA, EFFECT)
    svi = SVI(schools, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO(num_particles=3))
    versions = [guide.posterior.mean._version]
    for _ in range(3):
        svi.step(SIGMA, EFFECT)
        versions.append(guide.posterior.mean._version)
        svi.evaluate_loss(SIGMA, EFFECT)
        guide(SIGMA, EFFECT)
        Predictive(schools, guide=guide, num_samples=2)(SIGMA, None)
        assert guide.posterior.mean._version == versions[-1]
    assert [later - before for before, later in zip(versions, versions[1:], strict=False)] == [1, 1, 1]
    copy.deepcopy(guide)
    pickle.dumps(guide)
    guide.requires_grad_(False)  # kept where it is
    svi.step(SIGMA, EFFECT)
    assert guide.posterior.mean._version == versions[-1]


def test_importance_sampling():
    guide = fitted()
    assert psis_diagnostic(schools, guide, SIGMA, EFFECT, num_particles=1000, max_simultaneous_particles=1000) < 0.9


def test_gradient_of_trace_elbo_is_the_packet_of_stein():
    """With the same draws, in the probes: a and W - I."""
    guide = AutoGaussian(schools).setup(SIGMA, EFFECT)
    q, density = guide.posterior, log_joint(schools, SIGMA, EFFECT)
    torch.manual_seed(3)
    Trace_ELBO(num_particles=6, vectorize_particles=True, max_plate_nesting=1)(schools, guide)(SIGMA, EFFECT).backward()
    torch.manual_seed(3)
    z = torch.randn(6, 1, 10)[:, 0]
    theta = (q.mean + z @ q.scale_tril.mT).requires_grad_()
    (gradient,) = torch.autograd.grad(-density(theta).sum(), theta)
    r = gradient @ q.scale_tril - z
    close(q.mean_probe.grad, r.mean(0), IDENTITY)
    outer = torch.einsum("si,sj->ij", r, z) / 6
    close(q.root_probe.grad, 0.5 * (outer + outer.mT), IDENTITY)


def test_list_of_guides_and_block():
    guide = AutoGuideList(schools)
    ours = AutoGaussian(poutine.block(schools, hide=["tau"]))
    guide.append(ours)
    guide.append(AutoDelta(poutine.block(schools, expose=["tau"])))
    elbo = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)(schools, guide)
    loss = elbo(SIGMA, EFFECT)
    opt = ngvi.IBLR(ours.posterior, lr=0.3, step_size=ngvi.KLRadius(0.5))
    adam = torch.optim.Adam(elbo.parameters(), lr=0.05)
    first = loss.item()
    for _ in range(50):
        opt.zero_grad()
        adam.zero_grad()
        loss = elbo(SIGMA, EFFECT)
        loss.backward()
        opt.step()
        adam.step()
    assert loss.item() < first
    assert set(guide(SIGMA, EFFECT)) == {"mu", "eta", "tau"}
    assert ours.posterior.dim == 9


def test_neural_transport():
    guide = fitted()
    model = NeuTraReparam(guide).reparam(schools)
    _, potential, _, _ = initialize_model(model, (SIGMA, EFFECT))
    z = torch.randn(10)
    name = next(name for name in guide.prototype_trace.nodes if name in ("mu", "tau", "eta"))
    theta = guide.get_transform()(z)
    expected = log_joint(schools, SIGMA, EFFECT)(theta) + guide.posterior.log_det_root()
    close(-potential({f"{name}_shared_latent": z}), expected, IDENTITY)


@families
def test_laplace_is_exact_for_a_conjugate_model(family):
    guide = AutoGaussian(conjugate, family)
    assert guide.laplace_approximation(X, Y) is guide
    mean, covariance = exact_moments()
    close(guide.posterior.mean, mean, IDENTITY)
    close(guide.posterior.covariance, with_precision_of(covariance, guide.posterior.structure), IDENTITY)


def test_laplace_is_that_of_pyro():
    """At the mode, where Pyro's guide is put by hand."""

    def model(y):
        rate = pyro.sample("rate", dist.Gamma(2.0, torch.tensor([1.0, 2.0])).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    y = torch.tensor([[1.0, 4.0], [2.0, 3.0], [0.0, 5.0]])
    ours = AutoGaussian(model).laplace_approximation(y)
    close(ours.median()["rate"], (y.sum(0) + 2) / torch.tensor([4.0, 5.0]), IDENTITY)
    theirs = AutoLaplaceApproximation(model)
    theirs(y)
    theirs.loc = torch.nn.Parameter(ours.posterior.mean.clone())
    q = theirs.laplace_approximation(y).get_posterior()
    close(ours.posterior.covariance, q.covariance_matrix, IDENTITY)


@pytest.mark.filterwarnings("ignore:where Newton.s method ended")
def test_laplace_repairs_and_says_so():
    def flat():  # the Hessian vanishes at the mode of b
        a = pyro.sample("a", dist.Normal(0, 2))
        b = pyro.sample("b", dist.Normal(0, 1).mask(False))
        pyro.factor("f", -((b - 1) ** 4) - 0 * a)

    guide = AutoGaussian(flat, init_loc_fn=init_to_value(values={"a": torch.ones(()), "b": torch.ones(())}))
    with pytest.warns(
        UserWarning, match="1 of the 2 eigenvalues of the Hessian at the mode are not positive, the smal"
    ):
        guide.laplace_approximation()
    close(guide.posterior.stddev[0], torch.tensor(2.0), IDENTITY)
    assert bool(guide.posterior.stddev.isfinite().all())

    def unbounded():
        x = pyro.sample("x", dist.Normal(0, 1).mask(False))
        pyro.factor("f", x.exp())

    with (
        pytest.warns(UserWarning, match="Newton's method ended at a decrement of"),
        pytest.warns(UserWarning, match="1 of the 1 eigenvalues"),
    ):
        AutoGaussian(unbounded).laplace_approximation()


def test_laplace_wants_all_data():
    def model():
        mu = pyro.sample("mu", dist.Normal(0, 1))
        with pyro.plate("data", 20, subsample_size=5):
            pyro.sample("y", dist.Normal(mu, 1), obs=torch.zeros(5))

    with raises("Newton's method minimises one objective, and a model that subsamples its data has another in each"):
        AutoGaussian(model).laplace_approximation()


def test_what_draws_has_no_minimum():
    """A latent that poutine.block hides is drawn in each run."""
    part = AutoGaussian(poutine.block(schools, hide=["tau"]))
    with raises("Newton's method minimises one objective, and the model gives"):
        part.laplace_approximation(SIGMA, EFFECT)

    def noisy():
        pyro.factor("f", -((pyro.sample("x", dist.Normal(0, 1)) - torch.randn(())) ** 2))

    with raises("fit_guide minimises one objective, and the model gives"):
        fit_guide(noisy, AutoGaussian(noisy))


@pytest.mark.parametrize("parallel", [False, True])
def test_every_support_is_fitted_and_predicted(parallel):
    guide = AutoGaussian(supports).laplace_approximation()
    draws = Predictive(
        supports, guide=guide, num_samples=20, parallel=parallel, return_sites=("simplex", "lkj", "ordered")
    )
    draws = {name: value.squeeze() for name, value in draws().items()}
    assert (draws["simplex"].shape, draws["lkj"].shape, draws["ordered"].shape) == ((20, 3), (20, 3, 3), (20, 4))
    close(draws["simplex"].sum(-1), torch.ones(20), EXACT)
    close(draws["lkj"].square().sum(-1), torch.ones(20, 3), EXACT)
    assert bool((draws["ordered"].diff(dim=-1) > 0).all())


def test_copies_leave_the_original_alone(tmp_path):
    guide = fitted()
    twin = copy.deepcopy(guide)
    assert twin.posterior is not guide.posterior
    assert twin.model is guide.model is not None
    assert pickle.loads(pickle.dumps(guide))._bare is None
    ngvi.VN(twin.posterior, lr=0.1).step(log_joint(schools, SIGMA, EFFECT))
    assert not torch.equal(twin.posterior.mean, guide.posterior.mean)
    start = copy.deepcopy(AutoGaussian(conjugate)).laplace_approximation(X, Y)
    close(start.posterior.mean, exact_moments()[0], IDENTITY)

    loaded = pickle.loads(pickle.dumps(guide))
    assert guide.model is not None
    torch.manual_seed(5)
    mine = guide(SIGMA, EFFECT)
    torch.manual_seed(5)
    for name, value in loaded(SIGMA, EFFECT).items():
        assert torch.equal(value, mine[name])

    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    fresh = AutoGaussian(schools).setup(SIGMA, EFFECT)
    fresh.load_state_dict(torch.load(file))
    assert torch.equal(fresh.posterior.scale_tril, guide.posterior.scale_tril)
    assert set(guide.state_dict()) == {"q.mean", "q.scale_tril"}


def test_copies_of_a_model_with_parameters():
    guide = AutoGaussian(with_noise).setup(Y)
    fit_guide(with_noise, guide, Y, options=QUIET)
    assert torch.equal(copy.deepcopy(guide).posterior.mean, guide.posterior.mean)
    assert torch.equal(pickle.loads(pickle.dumps(guide)).posterior.mean, guide.posterior.mean)


@pytest.mark.accuracy
def test_other_dtype_and_device():
    guide = fitted().float()
    assert guide(SIGMA, EFFECT)["mu"].dtype == torch.float32
    with pytest.raises(InputError, match="the latents of the model are in torch.float64 and q in torch.float32"):
        fit_guide(schools, guide, SIGMA, EFFECT)


def half(q):
    return ngvi.IBLR(q, lr=0.5, step_size=ngvi.KLRadius(0.5))


def with_noise(y):
    """Empirical Bayes: y_i = x_i + noise, x_i ~ N(0, 1); the best scale² + 1 is mean y²."""
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("rows", len(y)):
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.sample("y", dist.Normal(x, scale), obs=y)


class WithNoise(PyroModule):
    def __init__(self):
        super().__init__()
        self.scale = PyroParam(torch.tensor(1.0), constraint=constraints.positive)

    def forward(self, y):
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(0, 1))
            pyro.sample("y", dist.Normal(x, self.scale), obs=y)


LARGE = torch.tensor([3.0, -2.0, 2.5, -1.0, 2.2, -2.9], dtype=DTYPE)
BEST = float((LARGE.square().mean() - 1).sqrt())


@pytest.mark.accuracy
def test_empirical_bayes_by_a_pyro_optimizer():
    guide = AutoGaussian(with_noise, ngvi.DiagonalGaussian)
    svi = NaturalSVI(with_noise, guide, pyro.optim.ClippedAdam({"lr": 0.2, "lrd": 0.98}), natural=half)
    svi.run(300, LARGE, progress=False)
    assert abs(pyro.param("scale").item() - BEST) < 1e-2
    marginal = -dist.Normal(0, (1 + BEST**2) ** 0.5).log_prob(LARGE).sum()
    close(torch.tensor(svi.evaluate_loss(LARGE)), marginal, 1e-3)


@pytest.mark.accuracy
@pytest.mark.parametrize("local", [False, True])
def test_empirical_bayes_by_a_torch_optimizer(local):
    with pyro.settings.context(module_local_params=local):
        model = WithNoise()
        adam = torch.optim.Adam(model.parameters(), lr=0.2)
        decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.98)
        svi = NaturalSVI(model, AutoGaussian(model), adam, natural=half)
        for _ in range(300):
            svi.step(LARGE)
            decay.step()
        assert abs(model.scale.item() - BEST) < 1e-2
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_parameters_stay_without_an_optimizer():
    svi = NaturalSVI(with_noise, AutoGaussian(with_noise))
    svi.step(LARGE)
    assert pyro.param("scale").item() == 1.0
    assert pyro.get_param_store()._params["scale"].grad.abs().max() == 0


def test_bayesian_module():
    model = PyroModule[torch.nn.Linear](3, 1, bias=False)
    model.weight = PyroSample(dist.Normal(0.0, 2.0).expand([1, 3]).to_event(2))

    def regression(X, y):
        mean = model(X)[..., 0]
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    guide = AutoGaussian(regression)
    assert fit_guide(regression, guide, X, Y, options=QUIET).converged
    close(guide.posterior.mean, exact_moments()[0], 1e-6)


@pytest.mark.accuracy
def test_minibatches():
    def model(X, y):
        w = pyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
        with pyro.plate("rows", 12, subsample_size=4) as rows:
            pyro.sample("y", dist.Normal(X[rows] @ w, 0.5), obs=y[rows])

    guide = AutoGaussian(model)
    svi = NaturalSVI(model, guide, natural=lambda q: ngvi.IBLR(q, lr=0.02, step_size=ngvi.KLRadius(0.1)))
    for _ in range(600):
        loss = svi.step(X, Y)
    assert isinstance(loss, float)
    mean, covariance = exact_moments()
    assert float((guide.posterior.mean - mean).abs().max() / covariance.diagonal().max().sqrt()) < 0.7
    close(guide.posterior.stddev, covariance.diagonal().sqrt(), 0.15)


@pytest.mark.accuracy
def test_ill_conditioned_logistic_regression():
    """Fifty coefficients on scales of 0.01 to 10: within 0.1 nats in at most 60 steps."""
    dim, rows = 50, 1000
    X = torch.randn(rows, dim) * torch.logspace(-2, 1, dim) @ torch.linalg.qr(torch.randn(dim, dim))[0]
    y = (torch.rand(rows) < torch.sigmoid(X @ torch.randn(dim) / 3)).double()

    def model(X, y):
        w = pyro.sample("w", dist.Normal(0, 1).expand([dim]).to_event(1))
        with pyro.plate("rows", rows):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    exact = ngvi.GeneralizedLinear(X, y, family="bernoulli_logit", prior_precision=1.0)
    best = ngvi.fit(ngvi.CholeskyGaussian(dim), exact, progress=False).loss
    guide = AutoGaussian(model)
    step_by_step = NaturalSVI(
        model, guide, natural=lambda q: ngvi.IBLR(q, lr=0.3, step_size=ngvi.KLRadius(2.0)), num_particles=128
    )
    for _ in range(60):
        step_by_step.step(X, y)
    assert exact.negative_elbo(guide.posterior).item() - best < 0.1
    guide = AutoGaussian(model)
    result = fit_guide(model, guide, X, y, options=QUIET)
    assert result.evaluations <= 60
    assert exact.negative_elbo(guide.posterior).item() - best < 0.1


def test_a_run_with_parameters_goes_on_from_its_state(tmp_path):
    """The guide by its state_dict, parameters by the store, the optimizers by theirs."""

    def start():
        guide, adam = AutoGaussian(with_noise).setup(LARGE), pyro.optim.Adam({"lr": 0.1})
        return guide, adam, NaturalSVI(with_noise, guide, adam)

    guide, adam, svi = start()
    for _ in range(4):
        svi.step(LARGE)
    pyro.get_param_store().save(tmp_path / "store")
    adam.save(tmp_path / "adam")
    torch.save((guide.state_dict(), svi.natural.state_dict(), torch.get_rng_state()), tmp_path / "rest")
    expected = [svi.step(LARGE) for _ in range(4)]

    pyro.clear_param_store()
    other, adam, resumed = start()
    pyro.get_param_store().load(tmp_path / "store")
    adam.load(tmp_path / "adam")
    q, natural, generator = torch.load(tmp_path / "rest", weights_only=False)
    other.load_state_dict(q)
    resumed.natural.load_state_dict(natural)
    resumed.evaluate_loss(LARGE)
    torch.set_rng_state(generator)
    assert [resumed.step(LARGE) for _ in range(4)] == expected


@pytest.mark.accuracy
def test_module_local_params():
    """The guide in the drop-in route, beside a model with parameters of its own."""
    with pyro.settings.context(module_local_params=True):
        model = WithNoise()
        guide = AutoGaussian(model, ngvi.DiagonalGaussian).setup(LARGE)
        elbo = Trace_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=1)(model, guide)
        assert [name for name, _ in elbo.named_parameters()] == ["model.scale_unconstrained", "guide.step.length"]
        adam, natural = torch.optim.Adam(elbo.parameters(), lr=0.1), half(guide.posterior)
        for _ in range(150):
            adam.zero_grad()
            natural.zero_grad()
            elbo(LARGE).backward()
            adam.step()
            natural.step()
        assert abs(model.scale.item() - BEST) < 5e-2
        assert len(pyro.get_param_store()) == 0
        fresh = Trace_ELBO()(WithNoise(), AutoGaussian(model, ngvi.DiagonalGaussian).setup(LARGE))
        fresh.load_state_dict(elbo.state_dict())
        assert torch.equal(fresh.guide.posterior.mean, guide.posterior.mean)


def test_a_loss_that_is_not_finite_moves_nothing():
    state = {"broken": False}

    def model():
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.factor("f", x * (torch.nan if state["broken"] else 1.0))

    guide = AutoGaussian(model)
    svi = NaturalSVI(model, guide)
    svi.step()
    before, state["broken"] = guide.posterior.mean.clone(), True
    with pytest.warns(RejectedStepWarning, match="the loss of NaturalSVI is nan: the log joint is not finite at some"):
        loss = svi.step()
    assert loss != svi.step()  # NaN, without another warning
    assert torch.equal(guide.posterior.mean, before)
    result = svi.run(8, progress=False)
    assert not result.converged
    assert result.reason == "because the loss was not finite in some of the last steps."
    assert result.trace[-1].rejections == 8


def test_numbers_of_numpy_are_numbers_of_steps():
    svi = NaturalSVI(conjugate, AutoGaussian(conjugate))
    assert len(svi.run(np.int64(8), X, Y, progress=False).trace) == len(svi.run(8, X, Y, progress=False).trace)


def test_run_says_when_it_is_too_short(monkeypatch):
    guide = AutoGaussian(conjugate, init_loc_fn=init_to_value(values={"w": 20 * torch.ones(3)}))
    svi = NaturalSVI(conjugate, guide, natural=lambda q: ngvi.VN(q, lr=0.005))
    result = svi.run(40, X, Y, progress=False)
    assert not result.converged
    assert re.match(r"because the loss still changed by -.* in the last quarter\. Take more steps\.", result.reason)
    for steps in (3, 10.0):
        with raises(f"num_steps must be an integer of at least 8, to compare the last with those before; got {steps}"):
            svi.run(steps, X, Y)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    calls = iter([svi.step, svi.step, interrupt])
    monkeypatch.setattr(svi, "step", lambda *args: next(calls)(*args))
    assert svi.run(8, X, Y, progress=False).reason == "because it was interrupted."
    calls = iter([interrupt])
    assert svi.run(8, X, Y, progress=False).reason == "because it was interrupted before q was evaluated."


@pytest.mark.accuracy
def test_enumerated_latents():
    """The guide leaves them out, the log joint sums them out, TraceEnum_ELBO agrees."""
    guide = AutoGaussian(broadcasting_mixture).setup(MIXED)
    assert guide.posterior.dim == 3
    density = log_joint(broadcasting_mixture, MIXED)
    theta = guide.get_posterior().sample()
    values = density.unpack(theta)
    p, left, right = values["p"], values["left"], values["right"]
    parts = torch.stack(
        [(1 - p).log() + dist.Normal(left, 0.7).log_prob(MIXED), p.log() + dist.Normal(right, 0.7).log_prob(MIXED)]
    )
    prior = dist.Normal(-1, 1).log_prob(left) + dist.Normal(1, 1).log_prob(right) + (p * (1 - p)).log()
    close(density(theta), parts.logsumexp(0).sum() + prior, IDENTITY)
    frozen = poutine.condition(guide, {"_AutoGaussian_latent": theta})
    loss = TraceEnum_ELBO(max_plate_nesting=1).loss(broadcasting_mixture, frozen, MIXED)
    close(torch.tensor(loss), (guide.get_posterior().log_prob(theta) - density(theta)).detach(), IDENTITY)
    assert fit_guide(broadcasting_mixture, guide, MIXED, options=QUIET).converged


def masked_and_subsampled(at, scale=1.0):
    """Some observations are missing, half of the rows are subsampled; one x, or one a row."""

    @config_enumerate
    def model():
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.sample("alone", dist.Normal(x, 1), obs=torch.tensor(0.3))
        mask = torch.tensor([True, False, True])
        with pyro.plate("rows", 6, subsample=torch.arange(3)), poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
            with poutine.scale(scale=scale):
                pyro.sample("y", dist.Normal(at(x, z), 0.7), obs=torch.arange(3.0))

    return model


@pytest.mark.parametrize(
    ("at", "way"), [(lambda x, z: x + z, "plate"), (lambda x, z: torch.stack([x, x + 1, -x])[z], "vmap")]
)
def test_masks_and_scales_of_enumerated_sites(at, way):
    """As in TraceEnum_ELBO: the mask inside the sum over z, but not on z, the scale of the subsample outside."""
    model = masked_and_subsampled(at)
    density, theta = log_joint(model), torch.randn(4, 1)
    assert density.batched_by == way
    x, prior = theta, torch.tensor([0.2, 0.3, 0.5]).log()
    parts = [dist.Normal(at(x[:, 0], torch.tensor(k)), 0.7).log_prob(torch.tensor([[0.0], [2.0]])) for k in range(3)]
    rows = torch.stack([prior[k] + parts[k] for k in range(3)]).logsumexp(0).sum(0)
    expected = 2 * rows + dist.Normal(0, 1).log_prob(x[:, 0]) + dist.Normal(x[:, 0], 1).log_prob(torch.tensor(0.3))
    close(density(theta), expected, IDENTITY)
    close(torch.stack([density.one(each) for each in theta]), expected, IDENTITY)
    for each, value in zip(theta, expected, strict=True):
        point = poutine.condition(AutoGaussian(model).setup(), {"_AutoGaussian_latent": each})
        trace = poutine.trace(point).get_trace()
        loss = TraceEnum_ELBO(max_plate_nesting=1).loss(model, point)
        close(torch.tensor(loss), (trace.nodes["_AutoGaussian_latent"]["fn"].log_prob(each) - value).detach(), IDENTITY)


def test_scales_of_enumerated_sites_must_agree():
    for scale in (3.0, torch.tensor([1.0, 2.0, 3.0])):
        with raises("all sites that depend on an enumerated one must have the same scale, one number"):
            log_joint(masked_and_subsampled(lambda x, z: x + z, scale))


HITS = torch.tensor([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7], dtype=DTYPE)


def baseball(at_bats, hits):
    """Partially pooled, with logits (Efron and Morris 1975)."""
    loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0]), torch.tensor([1.0])).to_event(1))
    scale = pyro.sample("scale", dist.HalfCauchy(scale=1.0))
    with pyro.plate("players", len(hits)):
        alpha = pyro.sample("alpha", dist.Normal(loc[..., 0], scale))
        return pyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def lkj(y):
    d = y.shape[1]
    theta = pyro.sample("theta", dist.HalfCauchy(torch.ones(d)).to_event(1))
    L_omega = pyro.sample("L_omega", dist.LKJCholesky(d, torch.ones(())))
    L_Omega = torch.mm(torch.diag(theta.sqrt()), L_omega)
    with pyro.plate("observations", len(y)):
        return pyro.sample("obs", dist.MultivariateNormal(torch.zeros(d), scale_tril=L_Omega), obs=y)


def funnel():
    y = pyro.sample("y", dist.Normal(0.0, 3.0))
    with pyro.plate("d", 3):
        pyro.sample("x", dist.Normal(0.0, torch.exp(y / 2)))


def line(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 10.0))
    b = pyro.sample("bA", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(a + b * x, sigma), obs=y)


@config_enumerate
def gaussian_mixture(data):
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)


PAGES = {
    "baseball": (baseball, (torch.full((18,), 45.0, dtype=DTYPE), HITS)),
    "lkj": (lkj, (torch.stack([Y, Y.roll(1) + X[:, 1], X[:, 2]], 1),)),
    "funnel": (funnel, ()),
    "line": (line, (X[:, 1], Y)),
    "gaussian_mixture": (gaussian_mixture, (torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0], dtype=DTYPE),)),
}


@pytest.mark.accuracy
@pytest.mark.parametrize(("model", "args"), PAGES.values(), ids=PAGES)
def test_models_of_pyros_pages_run_unchanged(model, args):
    guide = AutoGaussian(model)
    result = fit_guide(model, guide, *args, options=QUIET)
    assert result.converged, result.reason
    loss = NaturalSVI(model, guide, num_particles=256).step(*args)
    assert abs(loss - result.loss) < 1


def test_discrete_latents_are_refused():
    def model(mark=None):
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.sample("z", dist.Bernoulli(logits=x), infer={} if mark is None else {"enumerate": mark})

    for use in (log_joint, lambda model: AutoGaussian(model).setup()):
        with raises("the latent site 'z' is discrete, and a Gaussian cannot stand for it. Sum it out, with"):
            use(model)
        with raises("the latent site 'z' is marked for sequential enumeration; only parallel enumeration"):
            use(lambda: model("sequential"))


@pytest.mark.parametrize("support", ["real", "positive", "simplex"])
def test_improper_priors_start_at_zero(support):
    """Nothing can be drawn from them; the posterior is that of the density 1."""
    event = (3,) if support == "simplex" else ()

    def model(counts):
        x = pyro.sample("x", dist.ImproperUniform(getattr(constraints, support), (), event))
        if support == "real":
            pyro.factor("f", dist.Normal(2.0, 0.5).log_prob(x))
        else:
            pyro.factor("f", ((counts + 1) * x.log() - 4 * x).sum())

    counts = torch.tensor([1.0, 3.0, 5.0])[: 3 if event else 1]
    density, guide = log_joint(model, counts), AutoGaussian(model).setup(counts)
    close(density.initial, torch.zeros(density.dim), EXACT)
    close(guide.posterior.mean, torch.zeros(density.dim), EXACT)
    assert fit_guide(model, guide, counts, options=QUIET).converged
    if support == "real":
        close(guide.posterior.mean, torch.tensor([2.0]), 1e-8)
        close(guide.posterior.stddev, torch.tensor([0.5]), 1e-8)


def test_latents_in_a_loop_over_a_plate_are_refused_by_the_guide():
    def model():
        for i in pyro.plate("rows", 3):
            pyro.sample(f"x{i}", dist.Normal(0, 1))

    with raises(
        "the latent site 'x0' is in the loop over the plate 'rows', which Pyro's automatic guides do not take."
    ):
        AutoGaussian(model).setup()
    assert log_joint(model).dim == 3


def test_a_guide_that_is_set_up_in_inference_mode_can_be_fitted():
    guide = AutoGaussian(conjugate)
    with torch.inference_mode():
        guide(X, Y)
    assert fit_guide(conjugate, guide, X, Y, options=QUIET).converged
    close(guide.posterior.mean, exact_moments()[0], 1e-8)


def test_changing_structure_is_refused():
    def model():
        x = pyro.sample("x", dist.Normal(0, 1))
        if x > 0.05:
            pyro.sample("sometimes", dist.Normal(0, 1))

    with raises("the model must have the same latent sites in each run; sometimes came or went."):
        guide = AutoGaussian(model, init_loc_fn=init_to_value(values={"x": torch.zeros(())})).setup()
        fit_guide(model, guide)

    def shrinking(both=True):
        pyro.sample("x", dist.Normal(0, 1))
        if both:
            pyro.sample("y", dist.Normal(0, 1))

    with raises("the model must have the same latent sites in each run; y came or went."):
        log_joint(shrinking).on(both=False)(torch.zeros(2))


def test_changing_supports_are_refused():
    def model():
        top = pyro.sample("top", dist.LogNormal(0, 1))
        pyro.sample("x", dist.Uniform(0, top))

    with raises("the support of the latent site 'x' depends on other latents"):
        log_joint(model)


def test_unknown_supports_are_refused():
    class Anything(constraints.Constraint):
        def check(self, value):
            return torch.ones_like(value, dtype=torch.bool)

    class Odd(dist.Normal):
        support = Anything()

    with raises("the latent site 'x' has the support"):
        log_joint(lambda: pyro.sample("x", Odd(0.0, 1.0)))


def test_a_model_without_latents_is_refused():
    def observed():
        pyro.sample("y", dist.Normal(0, 1), obs=torch.tensor(0.0))

    def enumerated():
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})

    nothing = "the model has no continuous latent site, so that there is nothing to fit: its sample sites are "
    cases = {lambda: None: "none.", observed: "y (observed).", enumerated: "z (enumerated)."}
    for model, sites in cases.items():
        for use in (
            log_joint,
            lambda model: fit_guide(model, AutoGaussian(model)),
            lambda model: AutoGaussian(model)(),
        ):
            with raises(nothing + sites):
                use(model)


def test_nan_at_the_start_is_refused():
    def model():
        x = pyro.sample("x", dist.LogNormal(0, 1))
        pyro.factor("f", (x - 10).log())

    with raises("the log density of the model is NaN at its initial point, at the site 'f'."):
        log_joint(model)
    with raises("the log density of the model is NaN at its initial point, at the site 'f'."):
        fit_guide(model, AutoGaussian(model))


def local(y):
    with pyro.plate("rows", len(y)):
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.sample("y", dist.Normal(x, 1), obs=y)


def shared(y):
    x = pyro.sample("x", dist.Normal(y.new_zeros(()), 1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, 1), obs=y)


@config_enumerate
def shared_and_enumerated(y):
    x = pyro.sample("x", dist.Normal(0, 1))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(x + z, 1), obs=y)


@config_enumerate
def local_and_enumerated(y):
    with pyro.plate("rows", len(y)):
        x = pyro.sample("x", dist.Normal(0, 1))
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(x + z, 1), obs=y)


@pytest.mark.parametrize(("mine", "other"), [(local, shared), (local_and_enumerated, shared_and_enumerated)])
def test_changing_shapes_are_refused(mine, other):
    """Data of another size, or another model."""
    y, longer = torch.arange(3.0), torch.arange(5.0)
    guide = AutoGaussian(mine)
    svi = NaturalSVI(mine, guide)
    svi.step(y)
    grown = "the latent site 'x' has shape (3,) in the guide and comes with (5,) in this run of the model"
    uses = [lambda: svi.step(longer), lambda: svi.evaluate_loss(longer), lambda: fit_guide(mine, guide, longer)]
    for use in [
        *uses,
        lambda: guide.laplace_approximation(longer),
        lambda: log_joint(mine, y).on(longer)(torch.zeros(3)),
    ]:
        with raises(grown):
            use()
    with raises("the latent site 'x' has shape (3,) in the guide and comes with () in this run of the model"):
        fit_guide(other, guide, y)
    with raises("the latent site 'x' has shape () in the guide and comes with (3,) in this run of the model"):
        fit_guide(mine, AutoGaussian(other).setup(y), y)
    assert math.isfinite(svi.step(y))


def test_other_dtypes_of_the_data_give_the_same():
    """What the latents are in was settled by the set-up; data are promoted."""
    y = torch.tensor([1.0, -2.0, 3.0])
    guide = AutoGaussian(shared)
    first = fit_guide(shared, guide, y, options=QUIET)
    again = fit_guide(shared, guide, y.float(), options=QUIET)
    assert guide.posterior.mean.dtype == torch.float64
    assert abs(first.loss - again.loss) < 1e-6
    half = AutoGaussian(shared)
    assert fit_guide(shared, half, y.float(), options=QUIET).converged
    assert half.posterior.mean.dtype == torch.float32
    assert fit_guide(shared, half, y, options=QUIET).converged
    close(half.posterior.mean.double(), guide.posterior.mean, 1e-3)


@pytest.mark.accuracy
def test_data_in_double_with_latents_in_single_precision():
    """What users of NumPy have: the log joint is that of θ's dtype, in each way to batch, and every route fits."""
    torch.set_default_dtype(torch.float32)
    x = torch.linspace(-2, 2, 60, dtype=torch.float64)
    y = 1 + 2 * x + 0.5 * torch.sin(9 * x)

    def at_once(x, y):
        a, b = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in "ab")
        scale = pyro.sample("scale", dist.HalfNormal(5.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(a + b * x, scale), obs=y)

    def under_vmap(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(5.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w[0] + w[1] * x, scale), obs=y)

    def in_a_loop(x, y):
        a, b = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in "ab")
        scale = pyro.sample("scale", dist.HalfNormal(5.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(a + 0 * a.item() + b * x, scale), obs=y)

    for model, way in {at_once: "plate", under_vmap: "vmap", in_a_loop: "loop"}.items():
        density = log_joint(model, x, y)
        assert density.batched_by == way
        assert density(torch.zeros(4, 3)).dtype == torch.float32
        guide = AutoGaussian(model)
        for seed in range(2):
            torch.manual_seed(seed)
            guide.setup(x, y).posterior.initialize_(0.0, 0.1)
            assert fit_guide(model, guide, x, y, options=QUIET).converged
        assert guide.posterior.dtype == torch.float32
        single = AutoGaussian(model)
        fit_guide(model, single, x.float(), y.float(), options=QUIET)
        assert guide.posterior.kl(single.posterior).item() < 0.01
        svi = NaturalSVI(model, guide)
        assert abs(svi.step(x, y) - svi.evaluate_loss(x.float(), y.float())) < 3
        guide.laplace_approximation(x, y)
        close(guide.posterior.mean[:2], single.posterior.mean[:2], 0.02)


def test_a_start_for_some_sites_leaves_enumerated_ones_alone():
    start = init_to_value(values={"x": torch.tensor(0.7)})
    guide = AutoGaussian(shared_and_enumerated, init_loc_fn=start).setup(torch.arange(3.0))
    close(guide.median()["x"], torch.tensor(0.7), EXACT)
    with raises("the latent site 'z' is discrete, and a Gaussian cannot stand for it."):
        AutoGaussian(lambda: pyro.sample("z", dist.Bernoulli(0.5)), init_loc_fn=init_to_value(values={})).setup()


@pytest.mark.accuracy
def test_a_guide_from_a_pickle_has_no_model():
    guide = pickle.loads(pickle.dumps(AutoGaussian(schools)))
    gone = "the guide comes from a pickle, which holds no model: set it up before it is pickled, or build a new one"
    for use in (guide.setup, guide, guide.laplace_approximation):
        with raises(gone):
            use(SIGMA, EFFECT)
    ready = pickle.loads(pickle.dumps(fitted()))
    assert ready(SIGMA, EFFECT)["eta"].shape == (8,)
    assert fit_guide(schools, ready, SIGMA, EFFECT, options=QUIET).converged


def test_a_guide_before_its_set_up_is_refused():
    guide = AutoGaussian(schools)
    state = AutoGaussian(schools).setup(SIGMA, EFFECT).state_dict()
    uses = [lambda: guide.posterior, guide.median, guide.get_posterior, guide.get_transform, guide.get_base_dist]
    uses += [lambda: guide.quantiles([0.5]), guide.sample_latent, lambda: NaturalSVI(schools, guide).natural]
    uses += [lambda: guide.load_state_dict(state)]
    for use in uses:
        with raises("the guide has no posterior before it has seen the model: call guide.setup(*args, **kwargs)"):
            use()


def test_wrong_pairs_are_refused():
    with raises("the guide must be an AutoGaussian of torchngvi; got AutoNormal."):
        NaturalSVI(schools, AutoNormal(schools))
    with raises("optim updates the parameters of the model and must be a PyroOptim or a torch optimizer; got dict."):
        NaturalSVI(schools, AutoGaussian(schools), {"lr": 0.1})
    with raises("num_samples must be even"):
        NaturalSVI(schools, AutoGaussian(schools), num_particles=3)
    positive = "positive and finite"
    for scale, kind in ((0, positive), (math.nan, positive), ("wide", "a number")):
        with raises(f"init_scale is a standard deviation in unconstrained space and must be {kind}; got {scale!r}."):
            AutoGaussian(schools, init_scale=scale)
    with raises("model is a function or a module that samples; got a tensor of shape (12,), torch.float64."):
        AutoGaussian(Y)
    with raises(
        "posterior makes q once its size is known: pass a class such as CholeskyGaussian; got CholeskyGaussian(10"
    ):
        AutoGaussian(schools, ngvi.CholeskyGaussian(10))
    with raises("the guide must cover every continuous latent site of the model; it lacks tau."):
        fit_guide(schools, AutoGaussian(poutine.block(schools, hide=["tau"])), SIGMA, EFFECT)
    density = log_joint(schools, SIGMA, EFFECT)
    with raises("theta must end in D = 10; got shape (3, 9)."):
        density(torch.zeros(3, 9))
    with raises("the model has 10 unconstrained latents and q is over (9,); build one q with dim=10."):
        ngvi.VN(ngvi.CholeskyGaussian(9), lr=0.1).step(density)
    with raises("a value is needed for each latent site of the model; got none for tau, eta."):
        density.pack({"mu": torch.zeros(())})
    with pytest.raises(PairError, match="needs"):
        NaturalSVI(schools, AutoGaussian(schools), natural=ngvi.VN).step(SIGMA, EFFECT)


def test_latent_gaussian_keeps_its_coordinates_constant():
    q = ngvi.CholeskyGaussian(2)
    LatentGaussian(q).log_prob(torch.ones(2, requires_grad=True)).backward()
    assert q.mean_probe.grad is None


@pytest.mark.accuracy
def test_documentation():
    """The snippets of docs/pyro.md run as they stand."""
    text = (Path(__file__).parents[2] / "docs/pyro.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) >= 2
    scope: dict = {}
    torch.set_default_dtype(torch.float32)
    for snippet in snippets:
        exec(compile(snippet, "docs/pyro.md", "exec"), scope)
    assert scope["result"].converged


@pytest.mark.accuracy
def test_a_hierarchical_model_is_fitted_where_its_mode_is_of_no_use():
    """Eight schools, centred: the mode is where the schools are all alike."""
    effects, errors = (
        torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]),
        torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]),
    )

    def schools():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, errors), obs=effects)

    torch.manual_seed(0)
    guide = AutoGaussian(schools)
    result = fit_guide(schools, guide, options={"progress": False, "max_gradients": 8000})
    assert -result.loss == pytest.approx(-32.6, abs=0.3)
    assert result.converged, result.reason
    assert result.gradients + 0.4 * result.values < 8000
    assert 1.5 < float(guide.median()["tau"]) < 5.5


@pytest.mark.accuracy
def test_a_verdict_in_the_names_of_sites():
    def funnel():
        v = pyro.sample("v", dist.LogNormal(0.0, 1.5))
        pyro.sample("share", dist.Beta(5.0, 5.0))
        pyro.sample("above", dist.Uniform(torch.ones(1), torch.tensor([2.0])).to_event(1))
        with pyro.plate("rows", 2):
            pyro.sample("x", dist.Normal(torch.zeros(1), v).to_event(1))

    torch.manual_seed(0)
    result = fit_guide(funnel, AutoGaussian(funnel), options={"progress": False})
    names = ("log v", "unconstrained share", "unconstrained above[0]", "x[0, 0]", "x[1, 0]")
    assert result.verdict.marginals.names == names
    worst = r"(log v|x\[[01], 0\])"  # by a few per cent
    assert re.search(f" a Gaussian DOES NOT FIT: {worst}: sd ", str(result)), str(result)
    assert "\n  log v " in result.summary()
