"""Models in other coordinates: the same posterior whatever the weights, and the weights that theory has."""

import re

import pytest
import torch
from helpers import DTYPE

from torchngvi.errors import InputError

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro.infer.reparam import LocScaleReparam  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, Centred, centred, fit_guide, log_joint  # noqa: E402
from torchngvi.adapters.pyro.fitting import _by_curvature, location_scale  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")
QUIET = {"progress": False, "examine": False}
Y, SIGMA = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=DTYPE), torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=DTYPE)


def linear(tau=2.0):
    """A Gaussian hierarchical model: everything is known in closed form."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    with pyro.plate("groups", 4):
        b = pyro.sample("b", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(b, SIGMA), obs=Y)


def funnel():
    tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", 4):
        b = pyro.sample("b", dist.StudentT(4.0, mu, tau))
        pyro.sample("y", dist.Normal(b, SIGMA), obs=Y)


def moments(model):
    """Mean and covariance of (mu, b) by the best Gaussian in the coordinates of the model, by a linear map."""
    guide = AutoGaussian(model)
    result = fit_guide(model, guide, options=QUIET)
    density, q = guide.density(model), guide.posterior

    def sites(theta):
        nodes = density.trace(density.unpack(theta)).nodes
        return torch.cat([nodes["mu"]["value"][None], nodes["b"]["value"]])

    J = torch.autograd.functional.jacobian(sites, q.mean)
    return sites(q.mean).detach(), J @ q.covariance @ J.mT, result.loss


@pytest.mark.parametrize("weight", [0.0, 0.3, [0.9, 0.7, 0.2, 0.0]])
def test_the_posterior_of_the_sites_is_the_same_whatever_the_weights(weight):
    """Of a Gaussian model in closed form: precision 1/2.25 and 1/4 of the prior, 1/σ² of the data."""
    mean, covariance, loss = moments(Centred(linear, {"b": torch.as_tensor(weight).expand(4)}))
    design = torch.cat([torch.ones(4, 1), -torch.eye(4)], 1)  # mu - b
    precision = torch.zeros(5, 5)
    precision[0, 0] = 1 / 2.25
    precision = precision + design.mT @ design / 4 + torch.diag(torch.cat([torch.zeros(1), SIGMA**-2]))
    exact = precision.inverse()
    expected = exact @ torch.cat([torch.zeros(1), Y / SIGMA**2])
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(covariance, exact, rtol=1e-5, atol=1e-5)
    evidence = dist.MultivariateNormal(torch.zeros(4), torch.diag(SIGMA**2 + 4) + 2.25).log_prob(Y)
    assert -loss == pytest.approx(float(evidence), abs=1e-5)


def test_the_density_is_the_same_up_to_the_jacobian_of_the_map():
    """At any θ, also where locations, scales and the family are not Gaussian: log p(x) = log p(b) + log|db/dx|."""
    weight = torch.tensor([0.0, 0.3, 0.8, 1.0])
    ours, theirs = log_joint(Centred(funnel, {"b": weight})), log_joint(funnel)
    theta = torch.randn(ours.dim)
    nodes = ours.trace(ours.unpack(theta)).nodes
    there = theirs.pack({name: nodes[name]["value"] for name in ("tau", "mu", "b")})
    jacobian = ((1 - weight) * nodes["tau"]["value"].log()).sum()
    torch.testing.assert_close(ours(theta), theirs(there) + jacobian, rtol=1e-12, atol=1e-12)


def test_the_weights_are_the_share_of_the_data_in_the_precision():
    """1/σ² / (1/τ² + 1/σ²), Papaspiliopoulos, Roberts and Sköld 2007."""
    weights = _by_curvature(log_joint(linear), ["b"], torch.zeros(5))
    torch.testing.assert_close(weights["b"], SIGMA**-2 / (SIGMA**-2 + 0.25), rtol=1e-4, atol=1e-4)


@pytest.mark.accuracy
def test_a_funnel_is_not_centred_and_gains():
    def model():
        tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
        with pyro.plate("groups", 4):
            b = pyro.sample("b", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Normal(b, 5.0), obs=Y)

    better = centred(model)
    assert float(better.weights["b"].max()) < 0.3
    guide = AutoGaussian(better)
    gain = better.elbos["not centred"] - better.elbos["as written"]
    assert gain > 0.5
    assert -fit_guide(better, guide, options=QUIET).loss == pytest.approx(max(better.elbos.values()), abs=0.1)
    assert str(better).startswith("b: weight 0.0")


@pytest.mark.accuracy
def test_a_model_that_the_data_tell_stays_as_it_is_written():
    def model():
        tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
        with pyro.plate("groups", 4):
            b = pyro.sample("b", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Normal(b, 0.1), obs=Y)

    better = centred(model, options={"max_gradients": 3000})
    assert all(float(weight.min()) > 0.98 for weight in better.weights.values())
    assert better.elbos["not centred"] < max(better.elbos.values()) - 0.1


def test_sites_that_are_written_anew_are_none():
    assert location_scale(log_joint(linear)) == ["b"]
    assert location_scale(log_joint(pyro.poutine.reparam(linear, {"b": LocScaleReparam(0.5)}))) == []


def test_a_model_without_such_sites_is_refused():
    def model():
        pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("scale", dist.HalfNormal(1.0))

    with pytest.raises(InputError, match=re.escape("there is nothing to centre.")):
        centred(model)


@pytest.mark.accuracy
def test_the_verdict_names_it_where_a_gaussian_does_not_fit():
    def model():
        tau = pyro.sample("tau", dist.LogNormal(0.0, 1.5))
        with pyro.plate("groups", 6):
            pyro.sample("b", dist.Normal(0.0, tau))

    def fitting():
        tau = pyro.sample("tau", dist.LogNormal(0.0, 0.1))
        pyro.sample("y", dist.Normal(pyro.sample("b", dist.Normal(0.0, tau)), 0.01), obs=torch.zeros(()))

    clause = "or other coordinates of b, which torchngvi.adapters.pyro.centred(model, ...) finds"
    assert clause in str(fit_guide(model, AutoGaussian(model), options={"progress": False}))
    told = fit_guide(fitting, AutoGaussian(fitting), options={"progress": False})
    assert told.verdict.word == "fits"
    assert "centred" not in str(told)
