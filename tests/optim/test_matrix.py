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
from sparse_models import SparseModel
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


def apart(q):
    """How far the moments are from those of the optimum."""
    covariance = q.covariance - torch.linalg.inv(PRECISION)
    return float(torch.maximum((q.mean - MEAN).abs().max(), covariance.abs().max()))


def script_with_a_target(name):
    q = posterior(name)
    target = LogJoint(lambda theta: -energy(theta))
    return METHODS[name](q, lr=LR[name], **options(name)), lambda: (target,), lambda: apart(q), 0.02


def script_with_a_loss(name):
    """Its gradient is all that is taken from it; log q is held fixed, so that the noise ends at the optimum."""
    q, held = posterior(name), posterior(name)

    def backward():
        held.load_state_dict(q.state_dict())
        theta = q.rsample(20) if name in FLAT else q.rsample((20,))
        with torch.no_grad():
            lam = held.coordinates.vector
        fixed = held.log_prob(theta, lam) if name in FLAT else held.log_prob(theta)
        (energy(theta) + fixed).mean().backward()
        return ()

    return METHODS[name](q, lr=LR[name], **options(name)), backward, lambda: apart(q), 0.02


def svgp(name):
    """The bound of all data in nats, from that of one full step of VN, which is exact here."""

    def lost():
        return -30 * mll(mll.model(x), y)

    def backward():
        (lost() / 30).backward()
        return ()

    mll, x, y = objective(CholeskyGaussian)
    exact = natural_optimizer(mll, lr=1.0)
    for _ in range(2):
        exact.step(*backward())
    best = lost().item()
    mll, x, y = objective(family(name))
    limit = {"step_size": KLRadius(0.1)} if name == "SRVN" else {}  # whose first steps would leave the cone
    optimizer = natural_optimizer(mll, lr=LR[name], method=METHODS[name], **options(name), **limit)
    return optimizer, backward, lambda: abs(lost().item() - best), 0.05


def guide_with_a_log_joint(name):
    q, guide, y = guide_of(name)
    target = guide.density(model, (y,))
    return METHODS[name](q, lr=LR[name], **options(name)), lambda: (target,), lambda: apart(q), 0.02


def guide_with_an_elbo(name):
    q, guide, y = guide_of(name)

    def backward():
        Trace_ELBO(num_particles=10, vectorize_particles=True).differentiable_loss(model, guide, y).backward()
        return ()

    return METHODS[name](q, lr=LR[name], **options(name)), backward, lambda: apart(q), 0.02


HOSTS = [script_with_a_target, script_with_a_loss, svgp, guide_with_a_log_joint, guide_with_an_elbo]


@pytest.mark.sparse(7)
@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=pytest.mark.accuracy)])
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_every_host(name, host, steps):
    """Towards the optimum in a few steps; at it in more."""
    torch.manual_seed(0)
    optimizer, backward, distance, bound = host(name)
    start, schedule = distance(), decayed(name, optimizer)
    for _ in range(steps):
        optimizer.step(*backward())
        schedule.step()
    assert optimizer.rejections == 0
    assert distance() < (bound if steps == 300 else 0.4 * start)
    assert all(q.mean_probe.grad is None for q in optimizer.posteriors)


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


def objective(kind):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 30, dtype=FLOAT)[:, None]
    y = torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    q, Z = NaturalGradientVariationalDistribution(4, posterior=kind), torch.linspace(-1, 1, 4)[:, None]
    model = SparseModel(q, Z, gpytorch.kernels.RBFKernel(), learn_inducing_locations=False).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.05
    return gpytorch.mlls.VariationalELBO(likelihood, model, 30), x, y


@pytest.mark.parametrize("kind", [FlatCholesky, VechGaussian, MeanFieldGaussian])
def test_svgp_starts_at_the_prior(kind):
    """Whitened: N(0, I) but for the noise of the mean, whatever the coordinates."""
    mll, x, _ = objective(kind)
    mll.model(x)
    q = mll.model.variational_strategy._variational_distribution.posterior
    assert torch.allclose(q.covariance, torch.eye(4, dtype=FLOAT))
    assert float(q.mean.abs().max()) < 0.01


def model(y):
    theta = pyro.sample("theta", dist.MultivariateNormal(torch.zeros(2, dtype=FLOAT), torch.eye(2, dtype=FLOAT)))
    pyro.sample("y", dist.MultivariateNormal(theta, precision_matrix=PRECISION - torch.eye(2, dtype=FLOAT)), obs=y)


def guide_of(name):
    """A guide whose posterior has PRECISION and MEAN."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = torch.linalg.solve(PRECISION - torch.eye(2, dtype=FLOAT), PRECISION @ MEAN)
    kind = FlatCholesky.standard if name in FLAT else CholeskyGaussian
    guide = AutoGaussian(model, kind, init_scale=1.0).setup(y)
    assert [name for name, _ in guide.named_parameters()] == ["step.length"]
    return guide.posterior, guide, y


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
