"""Every kind of method in every kind of host: at the optimum, or refused in a sentence.

A script hands a target to ``step``, or a loss to ``backward``; GPyTorch's objective and Pyro's ELBO know nothing of the
method.  The posteriors sought are Gaussian, so that each cell has one end.
"""

import gpytorch
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch.optim.lr_scheduler import LambdaLR

from torchngvi import AIFVB, IFVB, NGVI, SRVN, VN, CholeskyGaussian, LogJoint
from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, SparseGP, natural_optimizer
from torchngvi.adapters.pyro import AutoGaussian, LatentGaussian, NaturalSVI, fit_guide
from torchngvi.errors import InputError, PairError
from torchngvi.ifvb import FlatCholesky, MeanFieldGaussian, Recursive, VechGaussian
from torchngvi.stepsizes import KLRadius, PowerSchedule

FLOAT = torch.float64
METHODS = {"VN": VN, "SRVN": SRVN, "NGVI": NGVI, "IFVB": IFVB, "AIFVB": AIFVB}
FLAT = {"IFVB", "AIFVB"}
LR = {"VN": 0.5, "SRVN": 0.5, "NGVI": 0.5, "IFVB": 8.0, "AIFVB": 8.0}  # the last two under a schedule
MEAN = torch.tensor([1.0, -0.5], dtype=FLOAT)
PRECISION = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=FLOAT)


def family(name):
    return FlatCholesky if name in FLAT else CholeskyGaussian


def posterior(name):
    return FlatCholesky.standard(2, dtype=FLOAT) if name in FLAT else CholeskyGaussian(2, dtype=FLOAT)


def options(name):
    """A metric with draws of its own, which the schedule keeps from the noise of its first scores."""
    return {"metric": Recursive(20, generator=torch.Generator().manual_seed(3))} if name in FLAT else {}


def decayed(name, optimizer):
    """The step of IFVB decays as in the paper; the others stay where they are."""
    return LambdaLR(optimizer, PowerSchedule(0.75, 30.0) if name in FLAT else lambda t: 1.0)


def energy(theta):
    away = theta - MEAN
    return 0.5 * (away @ PRECISION * away).sum(-1)


def check(q, tolerance=0.02):
    assert torch.allclose(q.mean, MEAN, atol=tolerance)
    assert torch.allclose(q.covariance, torch.linalg.inv(PRECISION), atol=tolerance)


# ------------------------------------------------------------------------------------ a script


@pytest.mark.accuracy
@pytest.mark.parametrize("name", METHODS)
def test_a_target(name):
    torch.manual_seed(0)
    q = posterior(name)
    optimizer = METHODS[name](q, lr=LR[name], **options(name))
    schedule = decayed(name, optimizer)
    for _ in range(200):
        optimizer.step(LogJoint(lambda theta: -energy(theta)))
        schedule.step()
    assert optimizer.rejections == 0
    check(q)


@pytest.mark.accuracy
@pytest.mark.parametrize("name", METHODS)
def test_a_loss(name):
    """Its gradient is all that is taken from it; log q is held fixed, so that the noise ends at the optimum."""
    torch.manual_seed(0)
    q, held = posterior(name), posterior(name)
    optimizer = METHODS[name](q, lr=LR[name], **options(name))
    schedule = decayed(name, optimizer)
    for _ in range(300):
        held.load_state_dict(q.state_dict())
        theta = q.rsample(20) if name in FLAT else q.rsample((20,))
        with torch.no_grad():
            lam = held.coordinates.vector
        fixed = held.log_prob(theta, lam) if name in FLAT else held.log_prob(theta)
        (energy(theta) + fixed).mean().backward()
        optimizer.step()
        schedule.step()
    assert q.mean_probe.grad is None
    check(q)


def test_the_gradient_of_a_loss_is_that_in_lambda():
    """∇L by autograd through λ itself, and nothing is left for another optimizer to move."""
    q = FlatCholesky.standard(2, dtype=FLOAT)
    z = torch.Generator().manual_seed(1)
    (energy(q.rsample(7, z)) + q.log_prob(torch.ones(7, 2, dtype=FLOAT))).mean().backward()
    lam = q.vector.clone().requires_grad_()
    z = torch.Generator().manual_seed(1)
    (energy(q.rsample(7, z, lam)) + q.log_prob(torch.ones(7, 2, dtype=FLOAT), lam)).mean().backward()
    assert torch.allclose(q.mean_probe.grad, lam.grad, rtol=1e-14)
    assert list(q.parameters()) == []
    assert set(q.state_dict()) == {"vector"}


# ------------------------------------------------------------------------------------ GPyTorch


class SVGP(gpytorch.models.ApproximateGP):
    def __init__(self, kind):
        Z = torch.linspace(-1, 1, 4)[:, None]
        q = NaturalGradientVariationalDistribution(4, posterior=kind)
        super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q, learn_inducing_locations=False))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.RBFKernel()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def objective(kind):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 30, dtype=FLOAT)[:, None]
    y = torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    model, likelihood = SVGP(kind).double(), gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.05
    return gpytorch.mlls.VariationalELBO(likelihood, model, 30), x, y


def svgp_steps(mll, x, y, optimizer, steps, schedule=None):
    """Minus the bound of all data after so many steps, in nats."""
    for step in range(steps + 1):
        loss = -mll(mll.model(x), y)
        if step < steps:
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return 30 * float(loss.detach())


@pytest.mark.accuracy
@pytest.mark.parametrize("name", METHODS)
def test_svgp(name):
    """The bound of one full step of VN, which is exact here."""
    mll, x, y = objective(CholeskyGaussian)
    best = svgp_steps(mll, x, y, natural_optimizer(mll, lr=1.0), 2)
    mll, x, y = objective(family(name))
    start = svgp_steps(mll, x, y, None, 0)
    limit = {"step_size": KLRadius(0.1)} if name == "SRVN" else {}  # whose first steps would leave the cone
    optimizer = natural_optimizer(mll, lr=LR[name], method=METHODS[name], **options(name), **limit)
    end = svgp_steps(mll, x, y, optimizer, 300, decayed(name, optimizer))
    assert start - best > 10
    assert best - 1e-6 < end < best + 0.05
    assert optimizer.rejections == 0


@pytest.mark.parametrize("kind", [FlatCholesky, VechGaussian, MeanFieldGaussian])
def test_svgp_starts_at_the_prior(kind):
    """Whitened: N(0, I) but for the noise of the mean, whatever the coordinates."""
    mll, x, _ = objective(kind)
    mll.model(x)
    q = mll.model.variational_strategy._variational_distribution.posterior
    assert torch.allclose(q.covariance, torch.eye(4, dtype=FLOAT))
    assert float(q.mean.abs().max()) < 0.01


# ------------------------------------------------------------------------------------ Pyro


def model(y):
    theta = pyro.sample("theta", dist.MultivariateNormal(torch.zeros(2, dtype=FLOAT), torch.eye(2, dtype=FLOAT)))
    pyro.sample("y", dist.MultivariateNormal(theta, precision_matrix=PRECISION - torch.eye(2, dtype=FLOAT)), obs=y)


@pytest.mark.accuracy
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("density", [True, False])
def test_guide(name, density):
    """By the ELBO of Pyro and by the log joint of its model; the posterior has PRECISION and MEAN."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = torch.linalg.solve(PRECISION - torch.eye(2, dtype=FLOAT), PRECISION @ MEAN)
    kind = FlatCholesky.standard if name in FLAT else CholeskyGaussian
    guide = AutoGaussian(model, kind, init_scale=1.0).setup(y)
    optimizer = METHODS[name](guide.posterior, lr=LR[name], **options(name))
    schedule, target = decayed(name, optimizer), guide.density(model, (y,))
    for _ in range(200):
        if density:
            optimizer.step(target)
        else:
            Trace_ELBO(num_particles=10, vectorize_particles=True).differentiable_loss(model, guide, y).backward()
            optimizer.step()
        schedule.step()
    check(guide.posterior)
    assert [name for name, _ in guide.named_parameters()] == ["step.length"]


# ------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", sorted(FLAT))
def test_flat_methods_on_gaussians(name):
    with pytest.raises(InputError, match=f"{name} updates a flat posterior.*got CholeskyGaussian. For a"):
        METHODS[name](CholeskyGaussian(2))
    mll, x, y = objective(CholeskyGaussian)
    with pytest.raises(InputError, match=f"{name} updates a flat posterior.*got CholeskyGaussian. For a"):
        natural_optimizer(mll, method=METHODS[name])


def test_the_natural_gradient_of_a_flat_vector():
    """`NaturalGradient` on a family that knows its Fisher matrix needs no metric: as that of `CholeskyGaussian`."""
    flat, other = FlatCholesky.standard(2, dtype=FLOAT), CholeskyGaussian(2, dtype=FLOAT)
    ends = []
    for q in (flat, other):
        optimizer = SRVN(q, lr=0.1)
        z = torch.Generator().manual_seed(0)
        theta = q.rsample(200, z) if q is flat else q.rsample((200,), z)
        log_det = q.moments()[1].diagonal().log().sum() if q is flat else q.entropy()
        (energy(theta).mean() - log_det).backward()
        optimizer.step()
        ends.append(q.mean.clone())
    assert torch.allclose(*ends, rtol=1e-12)


@pytest.mark.accuracy
def test_hosts_that_read_a_root():
    mll, x, y = objective(FlatCholesky)
    with pytest.raises(PairError, match="SparseGP reads the mean and the root of q, and FlatCholesky is a vector of"):
        SparseGP(mll.model, mll.likelihood, [(x, y)])
    pyro.clear_param_store()
    guide = AutoGaussian(model, FlatCholesky.standard).setup(MEAN)
    with pytest.raises(InputError, match="NaturalSVI reads the mean and the root of q, and FlatCholesky is a vector"):
        NaturalSVI(model, guide).step(MEAN)
    with pytest.raises(InputError, match="laplace_approximation reads the mean and the root of q, and FlatCholesky"):
        guide.laplace_approximation(MEAN)
    assert not fit_guide(model, guide, MEAN).converged  # by IFVB, whose steps are stochastic
    assert float((guide.posterior.mean - torch.tensor([0.5, 0.0], dtype=FLOAT)).norm()) < 0.5
    assert guide.get_transform()(torch.zeros(2, dtype=FLOAT)).tolist() == guide.posterior.mean.tolist()
    assert LatentGaussian(guide.posterior).variance.shape == (2,)
    assert LatentGaussian(guide.posterior, (3,)).rsample((5,)).shape == (5, 3, 2)
