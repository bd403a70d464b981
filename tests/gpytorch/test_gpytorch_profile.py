"""The ELBO at the optimal q as a function of the hyper-parameters: closed forms, weights, gradients, refusals."""

import copy

import pytest
import torch
from sparse_models import SparseModel, check_gradient, tightening

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, SparseGP, refine_svgp, train_svgp
from torchngvi.adapters.gpytorch.energies import tightened
from torchngvi.adapters.gpytorch.sparse_gp import ProfiledELBO
from torchngvi.errors import InputError

gp = pytest.importorskip("gpytorch")
N, M, IDENTITY, JITTER = 40, 7, 1e-10, 1e-4
pytestmark = pytest.mark.usefixtures("exact_probit")


class Model(SparseModel):
    def __init__(self, shape=()):
        q = NaturalGradientVariationalDistribution(M, shape)
        Z = torch.stack([torch.linspace(-2, 2, M), torch.linspace(-1, 1, M).square()], -1)
        kernel = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(ard_num_dims=2))
        super().__init__(q, Z, kernel, jitter_val=JITTER)


LIKELIHOODS = {
    "gaussian": gp.likelihoods.GaussianLikelihood,
    "bernoulli": gp.likelihoods.BernoulliLikelihood,
    "student": gp.likelihoods.StudentTLikelihood,
}


def problem(name="gaussian", rows=N):
    torch.manual_seed(0)
    x = 4 * torch.rand(rows, 2).double() - 2
    y = torch.sin(3 * x[:, 0]) + x[:, 1] + 0.2 * torch.randn(rows).double()
    if name == "bernoulli":
        y = (y > 0).double()
    if name == "student":
        y[::9] += 3.0
    likelihood = LIKELIHOODS[name]().double()
    if name != "bernoulli":
        likelihood.noise = 0.1
    model = Model().double()
    model.mean_module.constant = 0.3
    model.covar_module.base_kernel.lengthscale = torch.tensor([0.8, 1.5])
    return model, likelihood, (x, y)


def dense(model, noise, x, y):
    """log N(y; μ, Q + noise) less ½ Σ log(1 + d/noise), from K⁻¹ itself: noise (rows,)."""
    Z = model.variational_strategy.inducing_points
    both = model.forward(torch.cat([Z, x]))
    K, mean = both.covariance_matrix, both.mean[M:]
    Kzz = K[:M, :M] + JITTER * torch.eye(M).double()
    Q = K[M:, :M] @ torch.linalg.solve(Kzz, K[:M, M:])
    marginal = torch.distributions.MultivariateNormal(mean, Q + torch.diag(noise))
    return marginal.log_prob(y) - 0.5 * ((K.diagonal()[M:] + JITTER - Q.diagonal()) / noise).log1p().sum()


def parameters_of(model, likelihood):
    return [*model.parameters(), *likelihood.parameters()]


def test_a_noise_for_each_row():
    model, _, (x, y) = problem()
    noise = 0.05 + 0.2 * torch.rand(N).double()
    for likelihood in (
        gp.likelihoods.FixedNoiseGaussianLikelihood(noise),
        gp.likelihoods.FixedNoiseGaussianLikelihood(noise, learn_additional_noise=True).double(),
    ):
        bound = ProfiledELBO(model, likelihood, (x, y))()
        total = noise + (0.0 if likelihood.second_noise_covar is None else likelihood.second_noise)
        wanted = dense(model, total, x, y) / N
        assert abs(float((bound - wanted).detach())) < IDENTITY * abs(float(wanted.detach()))
        learnt = parameters_of(model, likelihood)
        for a, b in zip(torch.autograd.grad(bound, learnt), torch.autograd.grad(wanted, learnt), strict=True):
            assert float((a - b).abs().max()) < 1e-9


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_weighted_rows_are_repeated_rows(name):
    model, likelihood, (x, y) = problem(name)
    weighted = ProfiledELBO(model, likelihood, (x, y), num_data=3 * N)()
    repeated = ProfiledELBO(model, likelihood, (x.repeat(3, 1), y.repeat(3)))()
    tolerance = IDENTITY if name == "gaussian" else 1e-8
    assert abs(float((weighted - repeated).detach())) < tolerance


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_value_at_the_optimal_q(name):
    """Is what `refine_svgp` reaches, and above it what q(f | v) adds; what is assigned is its q."""
    model, likelihood, (x, y) = problem(name)
    bound = ProfiledELBO(model, likelihood, (x, y))
    value = float(bound().detach())
    other = copy.deepcopy(model)
    refined = refine_svgp(other, likelihood, [(x, y)], tolerance=1e-6, progress=False)
    assert refined.converged
    assert abs(value - float(tightening(other, likelihood, x).detach()) / N + refined.loss / N) < 1e-8
    bound.assign()
    model.eval()
    other.eval()
    with torch.no_grad():
        a, b = model(x), other(x)
    assert float((a.mean - b.mean).abs().max()) < (1e-8 if name == "gaussian" else 1e-3)
    assert float((a.variance - b.variance).abs().max()) < (1e-8 if name == "gaussian" else 1e-3)


def test_the_collapsed_bound():
    """Of Titsias (2025), against a multivariate normal density, with the gradient in every parameter; weighted too."""
    model, likelihood, (x, y) = problem()
    learnt = parameters_of(model, likelihood)
    for weight in (1, 3):
        bound = ProfiledELBO(model, likelihood, (x, y), num_data=weight * N)()
        noise = likelihood.noise.expand(weight * N)
        repeated = dense(model, noise, x.repeat(weight, 1), y.repeat(weight)) / (weight * N)
        assert abs(float((bound - repeated).detach())) < IDENTITY * abs(float(repeated.detach()))
        for a, b in zip(torch.autograd.grad(bound, learnt), torch.autograd.grad(repeated, learnt), strict=True):
            assert float((a - b).abs().max()) < 1e-9
            assert float(b.abs().max()) > 1e-4


def test_between_the_older_bound_and_the_evidence():
    """At random hyper-parameters; where nothing is left given v the two bounds are one."""
    model, likelihood, (x, y) = problem()
    for seed in range(5):
        torch.manual_seed(seed)
        for p in parameters_of(model, likelihood):
            p.data += 0.5 * torch.randn_like(p)
        bound = N * float(ProfiledELBO(model, likelihood, (x, y))().detach())
        prior = model.forward(x)
        noise = torch.diag((likelihood.noise.detach() + JITTER).expand(N))
        evidence = torch.distributions.MultivariateNormal(prior.mean, prior.covariance_matrix + noise).log_prob(y)
        older = bound - float(tightening(model, likelihood, x).detach())
        assert older < bound < float(evidence.detach())
    gain, slope = tightened(torch.rand(9), torch.tensor([0.0, -1e-7, 0.0]).repeat(3), 2.0)
    assert not gain.any()
    assert not slope.any()


def test_a_batch_learns_on_the_same_bound():
    """At the optimal q a batch of all rows has the value and the gradient of the collapsed bound."""
    model, likelihood, (x, y) = problem()
    bound = ProfiledELBO(model, likelihood, (x, y))
    value = bound()
    bound.assign()
    target = SparseGP(model, likelihood, [(x, y)], learn=True)
    q = target.posterior
    loss, _ = target.expected_energy(q.frame())
    assert abs(float((loss - q.entropy()).detach()) / N + float(value.detach())) < 1e-10
    target.backward()
    learnt = parameters_of(model, likelihood)
    for parameter, wanted in zip(learnt, torch.autograd.grad(-value, learnt), strict=True):
        assert float((parameter.grad - wanted).abs().max()) < 1e-8


@pytest.mark.parametrize("name", ["bernoulli", "student"])
def test_the_gradient_by_differences(name):
    """Of the function itself, at a point where its sites come from another one."""
    model, likelihood, batch = problem(name)
    bound = ProfiledELBO(model, likelihood, batch)
    bound()
    raw = model.covar_module.base_kernel.raw_lengthscale
    raw.data += 0.2
    check_gradient(bound, [raw, model.variational_strategy.inducing_points, *likelihood.parameters()], 1e-3)


def test_float32():
    """Beside a float64 model: the linear algebra is in float64, and so is the value."""
    model, likelihood, (x, y) = problem()
    wanted = ProfiledELBO(model, likelihood, (x, y))()
    bound = ProfiledELBO(model.float(), likelihood.float(), (x.float(), y.float()))()
    assert bound.dtype == torch.float64
    assert abs(float((bound - wanted).detach())) < 1e-4
    bound.backward()
    assert all(p.grad.dtype == torch.float32 for p in parameters_of(model, likelihood))


def test_student_t_from_anywhere():
    """Sites that do not fit the present kernel at all: the search begins again from the prior."""
    model, likelihood, batch = problem("student")
    bound = ProfiledELBO(model, likelihood, batch)
    wanted = float(bound().detach())
    t, c = bound.sites
    bound.sites = t, -100 * c.abs()
    assert abs(float(bound().detach()) - wanted) < 1e-6


def test_a_trial_far_off_is_forgotten():
    """The search begins at the sites of the lowest value so far, not at those of a higher one."""
    model, likelihood, batch = problem("student")
    bound = ProfiledELBO(model, likelihood, batch)
    value = float(bound().detach())
    sites, noise = bound.sites, likelihood.noise.detach().clone()
    likelihood.noise = 1e-6
    assert float(bound().detach()) < value
    assert bound.sites is sites
    likelihood.noise = 1.2 * noise
    assert float(bound().detach()) > value
    assert bound.sites is not sites


def test_refusals():
    model, likelihood, (x, y) = problem()
    y[3] = torch.nan
    with pytest.raises(InputError, match="1 of 40 targets are NaN. Leave these rows out: a row without a target tells"):
        ProfiledELBO(model, likelihood, (x, y))
    y[3] = torch.inf
    with pytest.raises(InputError, match="the ELBO is not finite at these hyper-parameters: check the targets"):
        ProfiledELBO(model, likelihood, (x, y))()


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
class TestKernelsThatGPyTorchFactors:
    """A sum with a linear kernel: GPyTorch factors the other terms while it evaluates the sum."""

    def problem(self, dtype=torch.float64):
        model, likelihood, (x, y) = problem()
        model.covar_module += gp.kernels.ScaleKernel(gp.kernels.LinearKernel(active_dims=[1]))
        return model.to(dtype), likelihood.to(dtype), (x.to(dtype), y.to(dtype))

    def test_hyper_parameters_that_leave_the_domain(self):
        """A sentence, where a bound is evaluated and where training begins."""
        model, likelihood, rows = self.problem()
        bound, rbf = ProfiledELBO(model, likelihood, rows), model.covar_module.kernels[0]
        assert bool(bound().isfinite())
        rbf.base_kernel.raw_lengthscale.data.fill_(-800.0)  # softplus is 0 there
        text = "GPyTorch cannot factor the kernel matrix, as it does to evaluate a sum with a linear kernel: it is not"
        with pytest.raises(InputError, match=text):
            bound()
        with pytest.raises(InputError, match=text):
            train_svgp(model, likelihood, rows, progress=False)

    def test_a_matrix_that_float32_cannot_factor(self):
        model, likelihood, rows = self.problem(torch.float32)
        rbf = model.covar_module.kernels[0]
        rbf.base_kernel.lengthscale, rbf.outputscale = 30.0, 1e8
        with pytest.raises(InputError, match="for NaN, infinities and length scales of zero, or use float64"):
            ProfiledELBO(model, likelihood, rows)()
