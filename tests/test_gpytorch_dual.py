"""The ELBO with the sites of q held: equal where q is optimal, the collapsed bound, tighter around."""

import copy

import pytest
import torch

from torchngvi import CholeskyGaussian, DiagonalGaussian
from torchngvi.adapters.gpytorch import DualELBO, NaturalGradientVariationalDistribution, refine_svgp
from torchngvi.errors import InputError

gp = pytest.importorskip("gpytorch")
N, M = 60, 8


@pytest.fixture(autouse=True)
def exact_probit(monkeypatch):
    """GPyTorch's log Φ jumps by 0.0019 at -1; ours does not, and cannot be compared with that."""
    monkeypatch.setattr(gp.likelihoods.bernoulli_likelihood, "log_normal_cdf", torch.special.log_ndtr)


class Model(gp.models.ApproximateGP):
    def __init__(self, family=CholeskyGaussian):
        q = NaturalGradientVariationalDistribution(M, posterior=family)
        Z = torch.linspace(-2, 2, M)[:, None]
        super().__init__(gp.variational.VariationalStrategy(self, Z, q, jitter_val=1e-6))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def problem(name, family=CholeskyGaussian):
    torch.manual_seed(0)
    x = 4 * torch.rand(N, 1).double() - 2
    y = torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(N).double()
    likelihood = gp.likelihoods.GaussianLikelihood() if name == "gaussian" else gp.likelihoods.BernoulliLikelihood()
    y = y if name == "gaussian" else (y > 0).double()
    if name == "gaussian":
        likelihood.noise = 0.05
    model = Model(family).double()
    model.mean_module.constant = 0.3
    batches = list(zip(x.split(25), y.split(25), strict=True))
    refine_svgp(model, likelihood.double(), batches, progress=False)
    return model, likelihood, batches


def held(model, likelihood, batches):
    """GPyTorch's ELBO per datum, at q as it is."""
    model.train()
    mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return mll(model(x), y).sum()


def best(model, likelihood, batches):
    """The ELBO per datum at the optimal q for these hyper-parameters."""
    other = copy.deepcopy(model)
    return -refine_svgp(other, likelihood, batches, tolerance=1e-6, progress=False).loss / N


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_equal_where_it_is_taken(name):
    model, likelihood, batches = problem(name)
    assert abs(float((DualELBO(model, likelihood, batches)() - held(model, likelihood, batches)).detach())) < 1e-9


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("lengthscale", [0.4, 1.2])
def test_tighter_than_with_held_moments(name, lengthscale):
    """Below the best bound, above that of the old moments; for a Gaussian likelihood the best bound itself."""
    model, likelihood, batches = problem(name)
    dual = DualELBO(model, likelihood, batches)
    model.covar_module.base_kernel.lengthscale = lengthscale
    model.covar_module.outputscale = 1.5
    model.mean_module.constant = -0.4
    followed, top = float(dual().detach()), best(model, likelihood, batches)
    assert followed <= top + 1e-9
    assert followed > float(held(model, likelihood, batches).detach()) + 1e-3
    if name == "gaussian":
        assert abs(followed - top) < 1e-8
    dual.assign()
    assert abs(float(held(model, likelihood, batches).detach()) - followed) < 1e-9


def test_mean_field_takes_the_marginals():
    """What the sites make is no member of the family: its mean and standard deviations are kept."""
    model, likelihood, batches = problem("gaussian", DiagonalGaussian)
    dual = DualELBO(model.eval(), likelihood, batches)
    assert model.training
    q = dual.target.posterior
    model.covar_module.outputscale = 2.0
    full = copy.deepcopy(model)
    full.variational_strategy._variational_distribution = NaturalGradientVariationalDistribution(M).double()
    refine_svgp(full, likelihood, batches, progress=False)
    wanted = full.variational_strategy._variational_distribution.posterior
    dual.assign()
    assert float((q.mean - wanted.mean).abs().max()) < 1e-8
    assert float((q.stddev - wanted.stddev).abs().max()) < 1e-8


def test_gradient():
    """Central differences in the hyper-parameters, away from where q was refined."""
    model, likelihood, batches = problem("gaussian")
    dual = DualELBO(model, likelihood, batches)
    likelihood.noise = 0.1
    raw = model.covar_module.base_kernel.raw_lengthscale
    dual().backward()
    with torch.no_grad():
        values = []
        for step in (1e-4, -2e-4):
            raw += step
            values.append(float(dual()))
    assert abs(float(raw.grad) - (values[0] - values[1]) / 2e-4) < 1e-7


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_rounds_end_at_a_stationary_point(name):
    """E and M in turns, no learning rate: the gradient at the optimal q vanishes, and no round goes down."""
    model, likelihood, batches = problem(name)
    parameters = [*model.parameters(), *likelihood.parameters()]
    bounds = []
    for _ in range(11):
        bounds.append(-refine_svgp(model, likelihood, batches, tolerance=1e-6, progress=False).loss / N)
        dual = DualELBO(model, likelihood, batches)
        lbfgs = torch.optim.LBFGS(parameters, max_iter=20, line_search_fn="strong_wolfe")
        lbfgs.step(dual.closure(lbfgs))
        dual.assign()
    assert all(b >= a - 1e-6 for a, b in zip(bounds, bounds[1:], strict=False))
    refine_svgp(model, likelihood, batches, tolerance=1e-6, progress=False)
    model.zero_grad()
    likelihood.zero_grad()
    held(model, likelihood, batches).backward()
    assert max(float(p.grad.abs().max()) for p in parameters) < 1e-3


def test_refusals():
    model, likelihood, batches = problem("gaussian")
    with pytest.raises(InputError, match="DualELBO got no data"):
        DualELBO(model, likelihood, [])
    dual = DualELBO(model, likelihood, batches)
    dual.sites = [(t, -c) for t, c in dual.sites]
    with pytest.raises(InputError, match="make no Gaussian: take a shorter M-step"):
        dual()
