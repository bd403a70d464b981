"""Each main path on a GPU, beside the same on the host: ``pytest -m gpu`` runs them where there is one.

The same code runs on the CPU, with less to compare, so that what stands here is known to work.
"""

import math
import warnings

import pytest
import torch
from helpers import CUDA, distance, make_model, make_posterior, same_bits, waits_are_errors

import torchngvi as ngvi
from benchmarks import bench
from torchngvi import VN, Stein
from torchngvi.errors import RejectedStepError
from torchngvi.expectations import Antithetic
from torchngvi.optim import CapturedStep, Watch

everywhere = pytest.mark.parametrize("device", ["cpu", CUDA])
F64 = torch.float64


def log_joint(theta):
    return -(torch.cosh(theta - 0.5) + 0.3 * theta.square()).sum(-1) - 0.1 * theta[..., 0] * theta[..., 1]


def data(rows=40, dim=3, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, dim, generator=generator, dtype=F64, device="cpu")
    noise = torch.randn(rows, generator=generator, dtype=F64, device="cpu")
    return X.to(device), (X.sum(-1) + noise > 0).double().to(device)


def steps_that_do_not_wait(step, device):
    """Two steps, the second under the debug mode of CUDA that raises at a wait."""
    step()
    if device != "cuda":
        return step()
    with waits_are_errors():
        return step()


@everywhere
@pytest.mark.parametrize("name", ["cholesky", "precision", "natural", "diagonal"])
def test_a_regression(device, name):
    q, model = make_posterior(name).to(device), make_model().to(device)
    result = ngvi.fit(q, model, progress=False)
    assert result.converged
    assert q.mean.device.type == device
    near = make_posterior(name)
    ngvi.fit(near, make_model(), progress=False)
    assert distance([part.cpu() for part in q.coordinates], near) < 1e-6


@everywhere
def test_a_fit_waits_once_an_evaluation(device):
    step, evaluation = bench.waits(torch.device(device))
    assert step == 0
    assert evaluation == 1


@everywhere
def test_classes(device):
    X, _ = data(30, 2, device)
    model = ngvi.models.SoftmaxRegression(X, torch.arange(30, device=device) % 3)
    assert ngvi.fit(ngvi.CholeskyGaussian(4, dtype=F64, device=device), model, progress=False).converged


@everywhere
def test_a_black_box(device):
    q = ngvi.CholeskyGaussian(2, dtype=F64, device=device)
    assert ngvi.fit(q, log_joint, progress=False, tolerance=0.3).converged
    assert 0.1 < float(q.mean[0]) < 0.5


@everywhere
def test_draws_do_not_wait(device):
    q = make_posterior("cholesky").to(device)
    generator = torch.Generator(device).manual_seed(0)
    opt = VN(q, lr=0.1, estimator=Stein(Antithetic(8, generator)))
    steps_that_do_not_wait(lambda: opt.step(log_joint), device)
    assert bool(q.mean.isfinite().all())


@everywhere
def test_loss_backward(device):
    q, model = make_posterior("cholesky").to(device), make_model().to(device)
    other = make_posterior("cholesky").to(device)
    opt, by_model = VN(q, lr=0.5), VN(other, lr=0.5)

    def step():
        opt.zero_grad()
        model.negative_elbo(q).backward()
        opt.step()
        by_model.step(model)

    steps_that_do_not_wait(step, device)
    assert distance([part.cpu() for part in q.coordinates], [part.cpu() for part in other.coordinates]) < 1e-12


@everywhere
def test_rows_from_batches(device):
    X, y = data()
    batches = [(X[:15], y[:15]), (X[15:], y[15:])]
    model = ngvi.Streamed.linear(batches, 40, classes=(0, 1), device=device)
    q = ngvi.CholeskyGaussian(3, dtype=F64, device=device)
    assert ngvi.fit(q, model, progress=False).converged


@everywhere
def test_a_mixed_model(device):
    X, y = data(60, 2, device)
    model = ngvi.models.MixedLogJoint(X, y, (torch.ones_like(X[:, :1]), torch.arange(60, device=device) % 6))
    q = ngvi.NaturalGaussian(model.dim, structure=model.structure, dtype=F64, device=device)
    opt = VN(q)
    first = opt.step(model)
    assert float(steps_that_do_not_wait(lambda: opt.step(model), device)) < float(first)


@everywhere
def test_a_sparse_gaussian_process(device):
    gp = pytest.importorskip("gpytorch")
    from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp_in_batches

    class Model(gp.models.ApproximateGP):
        def __init__(self):
            q = NaturalGradientVariationalDistribution(5)
            super().__init__(
                gp.variational.VariationalStrategy(self, torch.linspace(-2, 2, 5, device="cpu")[:, None], q)
            )
            self.mean_module, self.covar_module = gp.means.ConstantMean(), gp.kernels.RBFKernel()

        def forward(self, x):
            return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    X, _ = data(60, 1, device)
    model, likelihood = Model().double().to(device), gp.likelihoods.GaussianLikelihood().double().to(device)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
    result = train_svgp_in_batches(model, likelihood, [(X, torch.sin(X[:, 0]))], 60, adam, epochs=4, progress=False)
    assert math.isfinite(result.loss)


@everywhere
def test_a_guide_of_pyro(device):
    pyro = pytest.importorskip("pyro")
    import pyro.distributions as dist

    from torchngvi.adapters.pyro import AutoGaussian, fit_guide

    X, y = data(device=device)

    def model(X, y):
        w = pyro.sample("w", dist.Normal(X.new_zeros(3), 2.0).to_event(1))
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Normal((X * w).sum(-1), 0.5), obs=y)

    pyro.clear_param_store()
    guide = AutoGaussian(model)
    assert fit_guide(model, guide, X, y, options={"progress": False}).converged
    assert guide.posterior.mean.device.type == device


@everywhere
@pytest.mark.parametrize("attached", [False, True])
def test_a_network(device, attached):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(device)
    X, y = (part.float() for part in data(device=device))
    q = ngvi.network(net, num_data=40, likelihood="bernoulli")
    opt = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.0) if attached else ngvi.VON(q, lr=0.1, steps=8)
    if attached:
        ngvi.attach(opt, q, steps=8)
    losses = []

    def step():
        opt.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(X)[:, 0], y)
        loss.backward()
        opt.step()
        losses.append(loss.detach())

    for _ in range(8):
        step()
    assert all(bool(loss.isfinite()) for loss in losses)


@everywhere
def test_the_bench(device, capsys):
    bench.run(device, [4], 50)
    table = capsys.readouterr().out
    assert f"on {device} (" in table
    assert "The host waits 0 times a step, and 1 times an evaluation of a fit by VN" in table
    assert f"  {device}" in table.splitlines()[-4]  # where E_q[H] is


@everywhere
@pytest.mark.filterwarnings("ignore::torchngvi.errors.RejectedStepWarning")
def test_rejections_in_a_row_end_a_run(device):
    """The error comes once the count has arrived, and no step waits for it."""
    q = make_posterior("cholesky").to(device)
    opt, taken = VN(q, lr=0.1), 0
    opt.watch = Watch(rejections=3)

    def refused():
        q.mean_probe.grad, q.root_probe.grad = torch.full_like(q.mean_probe, math.nan), torch.zeros_like(q.root_probe)
        opt.step()

    def until_it_ends():
        nonlocal taken
        while taken < 50:
            taken += 1
            refused()
            if device == "cuda":
                torch.cuda.synchronize()

    steps_that_do_not_wait(refused, device)
    with pytest.raises(RejectedStepError):
        until_it_ends()
    assert taken <= 7


@everywhere
@pytest.mark.parametrize("name", ["cholesky", "precision", "natural", "diagonal"])
def test_a_captured_step(device, name):
    q, other, model = make_posterior(name).to(device), make_posterior(name).to(device), make_model().to(device)
    step, opt = CapturedStep(VN(q), model), VN(other)
    for _ in range(8):
        step()
        opt.step(model)
    assert same_bits([part.cpu() for part in q.coordinates], [part.cpu() for part in other.coordinates])
    assert step.optimizer.evaluations == opt.evaluations
    assert (step._graph is not None) == (device == "cuda")
    steps_that_do_not_wait(step, device)


@everywhere
def test_a_captured_step_draws_anew(device):
    ends = []
    for captured in (True, False):
        q = make_posterior("cholesky").to(device)
        generator = torch.Generator(device).manual_seed(0)
        opt = VN(q, lr=0.05, estimator=Stein(Antithetic(8, generator)))
        step = CapturedStep(opt, log_joint) if captured else None
        for _ in range(8):
            opt.step(log_joint) if step is None else step()
        ends.append([part.cpu() for part in q.coordinates])
    assert same_bits(*ends)


@everywhere
def test_a_captured_run_ends_on_the_device(device):
    q, model = make_posterior("cholesky").to(device), make_model().to(device)
    step = CapturedStep(VN(q), model, tolerance=1e-6)
    assert step.run(40, every=8)
    there = [part.cpu() for part in q.coordinates]
    for _ in range(3):
        step()
    assert same_bits([part.cpu() for part in q.coordinates], there)


def test_the_bench_refuses_what_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ngvi.errors.InputError, match="^device cuda is not available"):
        bench.run("cuda")
    with pytest.raises(ngvi.errors.InputError, match=r"^dim must be at least 1; got 0\.$"):
        bench.run(dims=[0])


def test_waits_of_cuda_are_told_from_other_warnings(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def do():
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)

    assert bench._synchronised(do) == 2
    assert modes == ["warn", "default"]
