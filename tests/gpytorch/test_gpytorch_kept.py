"""The factor of K_ZZ that is kept from one batch to the next: it is never that of another K_ZZ."""

import copy
import gc
import pickle

import pytest
import torch

gp = pytest.importorskip("gpytorch")

from sparse_models import SparseModel  # noqa: E402

from torchngvi import NaturalGaussian  # noqa: E402
from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, SparseGP, energies  # noqa: E402
from torchngvi.adapters.gpytorch import model as gp_model  # noqa: E402

M, N = 6, 30


class Buffered(gp.kernels.RBFKernel):
    """A kernel with a buffer, a plain attribute, and a matrix of its own that it may write to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.power = 1.0

    def forward(self, x1, x2, **options):
        return self.scale * super().forward(x1, x2, **options) ** self.power


class Model(SparseModel):
    def __init__(self):
        Z = torch.linspace(-1.9, 1.9, M)[:, None]
        q = NaturalGradientVariationalDistribution(M, posterior=NaturalGaussian)
        super().__init__(q, Z, gp.kernels.ScaleKernel(Buffered()))


def made():
    model = Model().double().train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def evaluated(model, likelihood=None):
    """The value, and a derivative, at the q of the model."""
    x = torch.linspace(-2, 2, N).to(model.variational_strategy.inducing_points)[:, None]
    likelihood = likelihood or gp.likelihoods.BernoulliLikelihood()
    target = SparseGP(model, likelihood, [(x, (x[:, 0] > 0).to(x))], 3 * N)
    with torch.no_grad():
        value, sites = target.expected_energy(target.posterior.frame())
    return value, sites.raw().H


@pytest.fixture
def factored(monkeypatch):
    """The matrices of which a factor was made."""
    made, original = [], gp_model._factor
    monkeypatch.setattr(gp_model, "_factor", lambda covariance: made.append(covariance) or original(covariance))
    return made


def by_a_step(model):
    raw = model.covar_module.base_kernel.raw_lengthscale.requires_grad_()
    raw.grad = torch.ones_like(raw)
    torch.optim.SGD([raw], 0.1).step()
    raw.requires_grad_(False)


def by_numpy(model):
    model.variational_strategy.inducing_points.numpy()[0] -= 0.1


def by_a_setter(model):
    model.covar_module.base_kernel.lengthscale = 0.5


def by_a_state_dict(model):
    other = made()
    other.covar_module.outputscale = 3.0
    model.load_state_dict(other.state_dict())


def by_another_kernel(model):
    model.covar_module = gp.kernels.ScaleKernel(gp.kernels.MaternKernel()).double()


def by_new_points(model):
    points = model.variational_strategy.inducing_points
    points.data = points.data + 0.05


CHANGES = {
    "a step": by_a_step,
    "data": lambda model: model.covar_module.raw_outputscale.data.add_(0.3),
    "numpy": by_numpy,
    "a setter": by_a_setter,
    "a state dict": by_a_state_dict,
    "a buffer": lambda model: model.covar_module.base_kernel.scale.fill_(2.0),
    "a new buffer": lambda model: setattr(model.covar_module.base_kernel, "scale", torch.tensor(2.0).double()),
    "an attribute": lambda model: setattr(model.covar_module.base_kernel, "power", 2.0),
    "another kernel": by_another_kernel,
    "new points": by_new_points,
    "jitter": lambda model: setattr(model.variational_strategy, "jitter_val", 1e-2),
    "dtype": lambda model: model.float(),
    "one entry": lambda model: model.variational_strategy.inducing_points[3].add_(1e-9),
}


@pytest.mark.sparse(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("modes", [False, True])
def test_a_change_is_seen(change, modes, factored):
    """What a model gives that was evaluated before is what a copy of it gives that never was."""
    model = made()
    evaluated(model)
    CHANGES[change](model)
    if modes:
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 1).to(model.variational_strategy.inducing_points))
        model.train()
    found = evaluated(model)
    assert len(factored) == 2
    for got, want in zip(found, evaluated(copy.deepcopy(model)), strict=True):
        assert torch.equal(got, want)


def test_the_dtype_of_the_factor_is_seen(factored):
    """It is a setting of GPyTorch's."""
    model = made().float()
    evaluated(model)
    with gp.settings._linalg_dtype_cholesky(torch.float32):
        evaluated(model)
    assert len(factored) == 2


def test_it_is_kept(factored):
    """One factor serves every batch, mode and q, and each gives what a factor of its own would."""
    model = made()
    first = evaluated(model)
    model.eval()
    model.train()
    for got, want in zip(evaluated(model), first, strict=True):
        assert torch.equal(got, want)
    model.mean_module.constant.data.add_(1.0)  # no entry of K_ZZ depends on it
    evaluated(model, gp.likelihoods.GaussianLikelihood().double())
    assert len(factored) == 1


def test_a_factor_that_was_written_to_is_not_used(factored):
    """Torch's count of writes tells."""
    model = made()
    first = evaluated(model)
    gp_model._kept[model.variational_strategy][1].mul_(2.0)
    for got, want in zip(evaluated(model), first, strict=True):
        assert torch.equal(got, want)
    assert len(factored) == 2


def test_a_matrix_that_the_kernel_writes_to(factored):
    """A tensor that a kernel returns and changes later is another matrix then."""
    model, K = made(), torch.eye(M).double() + 0.1
    factor = gp_model._factor_of(model.variational_strategy, K)
    K.mul_(4.0)
    torch.testing.assert_close(gp_model._factor_of(model.variational_strategy, K), 2 * factor, rtol=1e-14, atol=0.0)


def test_it_is_that_of_the_predictions():
    """GPyTorch reads whitened values by the factor of torch: where K_ZZ is nearly singular no other one will do."""
    points = torch.linspace(-1, 1, 300).double()
    K = torch.exp(-0.5 * (points[:, None] - points).square()) + 1e-6 * torch.eye(300).double()
    assert torch.equal(gp_model._factor(K), torch.linalg.cholesky(K))


@pytest.mark.accuracy
def test_models_have_their_own(factored):
    """Of a copy, and of a model from a file; and none is held for a model that is gone."""
    model = made()
    evaluated(model)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in others:
        other.covar_module.outputscale = 3.0
        evaluated(other)
    evaluated(model)
    assert len(factored) == 3
    gc.collect()
    count = len(gp_model._kept)
    del others, other
    gc.collect()
    assert len(gp_model._kept) == count - 2


def test_hyper_parameters_that_learn_keep_none(factored):
    """A factor with a graph serves one evaluation."""
    model = made()
    model.covar_module.raw_outputscale.requires_grad_()
    x = torch.linspace(-2, 2, N).double()[:, None]
    likelihood = gp.likelihoods.GaussianLikelihood().double()
    for _ in range(2):
        target = SparseGP(model, likelihood, [(x, torch.sin(3 * x[:, 0]))], learn=True)
        with torch.no_grad():
            target.expected_energy(target.posterior.frame())
        target.backward()
    assert len(factored) == 2
    assert model.variational_strategy not in gp_model._kept


def test_tensors_of_inference_mode_serve_later():
    """A factor, and nodes, that were made in inference mode may enter a graph afterwards."""
    strategy, x = made().variational_strategy, torch.zeros(1, 1).double()
    with torch.inference_mode():
        gp_model.kernels(strategy, x)
        energies.nodes(3, x.dtype, x.device, points=66)
    assert not energies.nodes(3, x.dtype, x.device, points=66)[0].is_inference()
    factor = gp_model.kernels(strategy, x).factor
    right = torch.ones(M, 1).double().requires_grad_()
    torch.linalg.solve_triangular(factor, right, upper=False).sum().backward()
    assert bool(right.grad.isfinite().all())


def test_a_substitution_in_float32():
    """At the default jitter the rows differ from those of float64 by no more than the rounding of the kernel brings."""
    torch.manual_seed(0)
    x = torch.rand(200, 2)
    Z = torch.rand(60, 2)
    K = torch.exp(-0.5 * torch.cdist(Z.double(), Z.double()).square() / 0.25)
    K = 4 * K + 1e-4 * torch.eye(60).double()
    cross = 4 * torch.exp(-0.5 * torch.cdist(Z.double(), x.double()).square() / 0.25)
    factor, ones = torch.linalg.cholesky(K), torch.full((200,), 4.0 + 1e-4).double()
    prior = gp_model.Kernels(factor, cross.float(), 0 * ones.float(), ones.float())
    exact = prior._replace(cross=cross, mean=0 * ones, variance=ones).projection(torch.float64)
    rounded = prior.projection(torch.float64)  # the entries alone in float32
    found = prior.projection(torch.float32)
    error, unavoidable = (float((part.variance.double() - exact.variance).abs().max()) for part in (found, rounded))
    assert bool((found.variance > 0).all())
    assert error < 10 * unavoidable
    weights = torch.randn(60).double()  # a mean of the latent function
    errors = [float(((part.rows.double() - exact.rows) @ weights).abs().max()) for part in (found, rounded)]
    assert errors[0] < 10 * errors[1]
