"""Rows in batches: `fit_guide` in passes, and rows that are missing."""

import pytest
import torch
from helpers import raises

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import config_enumerate  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, fit_guide, log_joint  # noqa: E402
from torchngvi.adapters.pyro.fitting import pass_over_batches, pass_over_plate, subsampled_plate  # noqa: E402
from torchngvi.adapters.pyro.layout import Call  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")

N, EXACT = 23, {"progress": False, "tolerance": 1e-9}  # not a multiple of any batch
X = torch.linspace(-1, 1, N, dtype=torch.float64)[:, None] ** torch.arange(3)
Y = torch.sin(3 * X[:, 1])


def latents():
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    return pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1)), sigma


def full(X, y, num_data=None, known=False):
    """The same rows at once, or a batch of them scaled up by the plate."""
    w, sigma = (pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1)), 0.3) if known else latents()
    with pyro.plate("rows", num_data or len(y), subsample_size=len(y)):
        pyro.sample("y", dist.Normal((X * w).sum(-1), sigma), obs=y)


def subsampled(X, y, size=7, known=False, product=False):
    w, sigma = (pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1)), 0.3) if known else latents()
    with pyro.plate("rows", len(y), subsample_size=size) as index:
        mean = X[index] @ w if product else (X[index] * w).sum(-1)
        pyro.sample("y", dist.Normal(mean, sigma), obs=y[index])


class TestTheSum:
    """A pass is the log joint of all rows at once, and so is its gradient."""

    @pytest.mark.parametrize("product", [False, True])  # by broadcasting, and by vmap
    @pytest.mark.parametrize("size", [7, 12, 22])
    def test_over_a_plate(self, size, product):
        guide = AutoGaussian(subsampled).setup(X, Y)
        plate = subsampled_plate(log_joint(subsampled, X, Y, size))
        assert plate == ("rows", N, size)
        self.same(pass_over_plate(Call(subsampled, (X, Y, size), {"product": product}), guide, plate))

    @pytest.mark.sparse(2)
    @pytest.mark.parametrize("batches", ["tuples", "dicts", "loader"])
    @pytest.mark.parametrize("num_data", [None, N])  # a plate that does not scale, and one that does
    def test_over_batches(self, batches, num_data):
        rows = list(zip(X.split(5), Y.split(5), strict=True))
        if batches == "dicts":
            rows = [{"X": x, "y": y} for x, y in rows]
        elif batches == "loader":
            rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=6, shuffle=True)
        self.same(pass_over_batches(Call(full, (), {"num_data": num_data}), AutoGaussian(full), rows))

    def test_beside_other_rows(self):
        """What is observed outside the plate counts once."""

        def beside(size):
            w, sigma = latents()
            pyro.sample("total", dist.Normal(w.sum(-1), sigma), obs=torch.tensor(0.4))
            with pyro.plate("rows", N, subsample_size=size) as index, poutine.scale(scale=0.5):
                pyro.sample("y", dist.Normal((X[index] * w).sum(-1), sigma), obs=Y[index])

        guide = AutoGaussian(beside).setup(N)
        self.same(pass_over_plate(Call(beside, (4,), {}), guide, ("rows", N, 4)), log_joint(beside, N))

    def same(self, target, whole=None):
        theta = torch.randn(5, 4).requires_grad_()
        ours, wanted = target.log_joint(theta), (whole or log_joint(full, X, Y)).log_joint(theta)
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-11)
        slopes = [torch.autograd.grad(value.sum(), theta)[0] for value in (ours, wanted)]
        torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-10)


class TestFits:
    @pytest.mark.parametrize("how", ["plate", "batches"])
    def test_the_posterior_is_that_of_all_rows(self, how):
        guide, wanted = AutoGaussian(full), AutoGaussian(full)
        whole = fit_guide(full, wanted, X, Y, known=True, options=EXACT)
        if how == "plate":
            guide = AutoGaussian(subsampled)
            result = fit_guide(subsampled, guide, X, Y, known=True, options=EXACT)
        else:
            rows = list(zip(X.split(8), Y.split(8), strict=True))
            result = fit_guide(full, guide, batches=rows, known=True, options=EXACT)
        assert result.converged
        torch.testing.assert_close(guide.posterior.mean, wanted.posterior.mean, rtol=0, atol=1e-8)
        torch.testing.assert_close(guide.posterior.covariance, wanted.posterior.covariance, rtol=0, atol=1e-8)
        assert abs(result.loss - whole.loss) < 1e-8
        assert result.names == ("w[0]", "w[1]", "w[2]")


class TestRefusals:
    def test_two_plates(self):
        def model():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            for name in ("one", "two"):
                with pyro.plate(name, N, subsample_size=5) as index:
                    pyro.sample(f"y_{name}", dist.Normal(mu, 1.0), obs=Y[index])

        with raises("the plates one, two all subsample, and a pass goes over one."):
            fit_guide(model, AutoGaussian(model))

    def test_enumerated_sites(self):
        @config_enumerate
        def model(y, size=None):
            mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with pyro.plate("rows", len(y), subsample_size=size) as index:
                k = pyro.sample("k", dist.Bernoulli(0.5)).long()
                pyro.sample("y", dist.Normal(mu[..., k], 1.0), obs=y[index])

        with raises("fit_guide does not sum out discrete sites in a model whose rows come in batches."):
            fit_guide(model, AutoGaussian(model), Y, 5)
        with raises("fit_guide does not sum out discrete sites in a model whose rows come in batches."):
            fit_guide(model, AutoGaussian(model), batches=Y.split(5))

    def test_batches_that_are_used_up(self):
        with raises("batches must be iterable for one pass after another, a DataLoader or a list; got generator."):
            fit_guide(full, AutoGaussian(full), batches=(y for y in Y.split(5)))

    def test_a_scale_of_ones_own(self):
        def model(y):
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            with poutine.scale(scale=N / len(y)):
                pyro.sample("y", dist.Normal(mu, 1.0).expand([len(y)]).to_event(1), obs=y)

        with raises("the observed sites must be a sum over the rows of a batch; a batch gives"):
            fit_guide(model, AutoGaussian(model), batches=Y.split(5))


class TestMissingRows:
    """`obs_mask=`: the fit is that of the rows that are there."""

    SEEN = torch.tensor([True, False, True, True])
    Y = torch.tensor([1.0, 99.0, -0.5, 2.0], dtype=torch.float64)

    def masked(self):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", 4):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=self.Y, obs_mask=self.SEEN)

    def test_the_posterior_and_the_evidence(self):
        guide = AutoGaussian(self.masked, structure="dense")
        result = fit_guide(self.masked, guide, options=EXACT)
        assert result.converged
        precision = 1 / 4 + 3
        mu = float(self.Y[self.SEEN].sum()) / precision
        assert abs(float(guide.median()["mu"]) - mu) < 1e-8
        covariance = torch.eye(5)
        covariance[0, 0] = covariance[0, 2] = covariance[2, 0] = 1 / precision
        covariance[2, 2] += 1 / precision  # the one row that is missing follows mu
        torch.testing.assert_close(guide.posterior.covariance, covariance, rtol=0, atol=1e-7)
        spread = torch.eye(3) + 4 * torch.ones(3, 3)
        evidence = dist.MultivariateNormal(torch.zeros(3), spread).log_prob(self.Y[self.SEEN])
        assert abs(result.loss + float(evidence)) < 1e-8

    def test_on_another_scale_and_with_events(self):
        """Idle values are N(0, 1) in unconstrained space, whatever their support; the others keep their Jacobian."""

        def model():
            with pyro.plate("rows", 4):
                pyro.sample("x", dist.LogNormal(0.5, 2.0), obs=self.Y.abs(), obs_mask=self.SEEN)
                pyro.sample("p", dist.Dirichlet(torch.ones(3)), obs=torch.full((4, 3), 1 / 3), obs_mask=self.SEEN)

        density, theta = log_joint(model), torch.randn(6, 12)
        assert density.dim == 4 + 8
        unit, transform = dist.Normal(0.0, 1.0), torch.distributions.biject_to(dist.Dirichlet(torch.ones(3)).support)
        rest = theta[:, 4:].reshape(6, 4, 2)
        points = transform(rest[:, 1])
        wanted = unit.log_prob(theta[:, [0, 2, 3]]).sum(-1) + unit.log_prob(rest[:, [0, 2, 3]]).sum((-1, -2))
        wanted = (
            wanted + dist.Normal(0.5, 2.0).log_prob(theta[:, 1]) + transform.log_abs_det_jacobian(rest[:, 1], points)
        )
        wanted = wanted + 4 * dist.Dirichlet(torch.ones(3)).log_prob(torch.full((3,), 1 / 3))  # the missing one too
        wanted = wanted + dist.LogNormal(0.5, 2.0).log_prob(self.Y.abs()[self.SEEN]).sum()
        torch.testing.assert_close(density(theta), wanted, rtol=1e-12, atol=1e-10)
