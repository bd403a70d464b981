"""No step waits for the device: checked on the meta device everywhere, and on a GPU where there is one.

A tensor on the meta device has no values, so that reading one back, in ``item()`` or in a branch,
raises; a host tensor sent to it is what would be a copy, and a wait, on a GPU.
"""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from helpers import METHOD_PAIRS as PAIRS
from helpers import SMALL_BATCHES as BATCHES
from helpers import coordinates, distance, gpu, make_model, make_posterior, same_bits, waits_are_errors
from torch.overrides import TorchFunctionMode

import torchngvi
from torchngvi.expectations import Antithetic, Autograd, Fixed, Quasi
from torchngvi.models import MixtureIntegrand
from torchngvi.posteriors import Mixture
from torchngvi.registry import POSTERIORS
from torchngvi.rules import LocalExponential

FAMILIES = ["bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian"]
STEP_SIZES = {"trial": {}, "constant": {"lr": 0.3}, "kl radius": {"step_size": torchngvi.KLRadius(0.1)}}
METHODS = {"VN": torchngvi.VN, "SRVN": torchngvi.SRVN}


def log_joint(theta):
    return -(torch.cosh(theta - 0.5) + 0.3 * theta.square()).sum(-1)


def step_each_way(opt, q, model, can_differentiate_once):
    """Every way to step that this step size allows."""
    opt.step(model)
    opt.step(lambda: model.negative_elbo(q))
    if can_differentiate_once:
        opt.zero_grad()
        model.negative_elbo(q).sum().backward()
        opt.step()
        opt.zero_grad()
        (-log_joint(q.rsample((4,))).mean(0) - q.entropy()).sum().backward()
        opt.step()


class HostCopies(TorchFunctionMode):
    """Notes tensors made from Python numbers on a device, and moved to it."""

    def __init__(self):
        super().__init__()
        self.found, self.calls = [], 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls += 1
        name = getattr(function, "__name__", "")
        if name in ("tensor", "as_tensor", "to", "cuda") and isinstance(result, torch.Tensor) and result.is_meta:
            source = args[0]
            if not isinstance(source, torch.Tensor) or not source.is_meta:
                self.found.append(name)
        return result


def on_meta(name, batch, family="bernoulli_logit"):
    q, model = make_posterior(name, batch), make_model(batch)
    if family != "bernoulli_logit":
        model = torchngvi.GeneralizedLinear(model.X, (model.y > 0).double(), family)
    return q.to("meta"), model.to("meta")


def test_the_meta_device_notices_a_wait():
    values = torch.zeros(2, device="meta")
    for read in (lambda: values.sum().item(), lambda: bool(values.all()), lambda: float(values[0])):
        with pytest.raises(RuntimeError):
            read()
    with HostCopies() as copies:
        torch.tensor([1.0], device="meta")
        torch.zeros(1).to("meta")
    assert copies.found == ["tensor", "to"]


@pytest.mark.accuracy
@pytest.mark.parametrize("step_size", STEP_SIZES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_a_step_reads_nothing_back(method, name, batch, step_size):
    q, model = on_meta(name, batch)
    opt = METHODS[method](q, **STEP_SIZES[step_size])
    for _ in range(2):
        step_each_way(opt, q, model, step_size != "trial")
    assert all(buffer.is_meta for buffer in q.coordinates)


@pytest.mark.accuracy
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", POSTERIORS)
def test_a_step_sends_nothing_from_the_host(name, family):
    for estimator in (torchngvi.Quadrature(), Autograd()):
        q, model = on_meta(name, (), family)
        opt = torchngvi.VN(q, lr=0.1, estimator=estimator)
        step_each_way(opt, q, model, True)  # what is sent once is not sent again
        with HostCopies() as copies:
            step_each_way(opt, q, model, True)
        assert copies.calls > 100
        assert copies.found == []


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", POSTERIORS)
def test_draws_read_and_send_nothing(name, batch):
    q, _ = on_meta(name, batch)
    opt = torchngvi.VN(q, lr=0.1, estimator=torchngvi.Stein(4))
    with HostCopies() as copies:
        for _ in range(2):
            opt.step(log_joint)
    assert copies.found == []


def test_a_mixture_reads_and_sends_nothing():
    q = Mixture(torchngvi.CholeskyGaussian(3, (2,))).to("meta")
    opt = torchngvi.NaturalGradientVI(
        q.components, LocalExponential(), 1.0, step_size=torchngvi.KLRadius(0.2), estimator=torchngvi.Stein(4)
    )
    target = MixtureIntegrand(q, torchngvi.LogJoint(log_joint))
    with HostCopies() as copies:
        for _ in range(2):
            opt.step(target)
            q.reweigh_(torch.zeros(2, device="meta"))
        q.log_prob(q.sample(5))
    assert copies.found == []


@pytest.mark.parametrize("name", ["cholesky", "diagonal"])
def test_bures_wasserstein_reads_and_sends_nothing(name):
    q, model = on_meta(name, (3,), "gaussian")
    with HostCopies() as copies:
        step_each_way(torchngvi.BWGD(q, lr=1e-3), q, model, True)
    assert copies.found == []


MAKERS = {
    *("zeros", "ones", "empty", "full", "eye", "arange", "linspace", "logspace", "tensor", "tril_indices"),
    *("rand", "randn", "randint", "randperm"),
}
# what is made as the user's default says: modules as those of torch, and what hosts make by themselves
BY_DEFAULT = {
    "posteriors/flat/flows.py",
    "posteriors/flat/flat_gaussian.py",
    "metrics/recursive.py",  # into a tensor that is there
}
HOSTS = ("adapters", "app", "testing", "theory", "distributed", "mixed_models", "cli.py")


def made_by_default(code):
    """The lines that make a tensor without saying on which device."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            named = {keyword.arg for keyword in node.keywords}
            if ast.unparse(node.func.value) == "torch" and "device" not in named and None not in named:
                yield node.lineno


@pytest.mark.accuracy
def test_every_tensor_is_made_on_a_device_that_is_named():
    root = Path(torchngvi.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    own = {name for name in files if name.split("/")[0] not in HOSTS and not name.startswith("models/m")} - BY_DEFAULT
    found = {name: lines for name in own if (lines := list(made_by_default(files[name].read_text(encoding="utf-8"))))}
    assert not found
    assert set(files) > BY_DEFAULT
    assert list(made_by_default("import torch\ntorch.ones(2)\ntorch.ones(2, device=x.device)")) == [2]


def test_a_default_device_changes_nothing():
    """Of ``torch.set_default_device`` the library takes no notice: a fit on the CPU is the same."""
    ends = []
    for default in (None, "meta"):
        q, model = make_posterior("natural"), make_model()
        opt, drawn = torchngvi.VN(q), make_posterior("cholesky")
        by_draws = torchngvi.VN(drawn, estimator=torchngvi.Stein(Fixed(8)))
        torch.manual_seed(0)
        with torch.device(default) if default else contextlib.nullcontext():
            opt.step(model)
            by_draws.step(log_joint)
            Quasi(4)(q.mean)
            ends.append([*coordinates(q), *coordinates(drawn), opt.expectation.H])
    assert same_bits(*ends)


@gpu
@pytest.mark.parametrize("step_size", STEP_SIZES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_a_step_on_a_gpu_equals_that_on_the_host(method, name, batch, step_size):
    ends = []
    for device in ("cpu", "cuda"):
        q, model = make_posterior(name, batch).to(device), make_model(batch).to(device)
        opt = METHODS[method](q, **STEP_SIZES[step_size])
        for _ in range(3):
            opt.step(model)
        for _ in range(2):
            opt.step(Closure(q, model))
        if step_size != "trial":
            opt.zero_grad()
            model.negative_elbo(q).sum().backward()
            opt.step()
        assert {buffer.device.type for buffer in q.buffers()} == {device}
        ends.append([tensor.cpu() for tensor in coordinates(q)])
    assert distance(ends[1], ends[0]) < 1e-10
    assert distance(ends[0], make_posterior(name, batch)) > 0.05


class Closure:
    def __init__(self, q, model):
        self.q, self.model = q, model

    def __call__(self):
        return self.model.negative_elbo(self.q)


@gpu
@pytest.mark.parametrize("step_size", STEP_SIZES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_a_step_on_a_gpu_does_not_wait(method, name, batch, step_size):
    q, model = make_posterior(name, batch).cuda(), make_model(batch).to("cuda")
    opt = METHODS[method](q, **STEP_SIZES[step_size])
    step_each_way(opt, q, model, step_size != "trial")  # libraries initialise themselves
    with waits_are_errors():
        for _ in range(2):
            step_each_way(opt, q, model, step_size != "trial")
    assert opt.rejections == 0


@gpu
@pytest.mark.parametrize("name", POSTERIORS)
def test_draws_on_a_gpu_do_not_wait_and_resume(name):
    generators = [torch.Generator("cuda").manual_seed(seed) for seed in (0, 1)]
    q = make_posterior(name).cuda()
    opt = torchngvi.VN(q, lr=0.1, estimator=torchngvi.Stein(Antithetic(8, generators[0])))
    opt.step(log_joint)
    with waits_are_errors():
        opt.step(log_joint)
    other = make_posterior(name, seed=3).cuda()
    resumed = torchngvi.VN(other, lr=0.1, estimator=torchngvi.Stein(Antithetic(8, generators[1])))
    other.load_state_dict(q.state_dict())
    resumed.load_state_dict(opt.state_dict())
    opt.step(log_joint)
    resumed.step(log_joint)
    assert same_bits(other, q)


@gpu
@pytest.mark.parametrize("name", POSTERIORS)
def test_a_posterior_moved_under_its_optimizer(name):
    q, q0, model = make_posterior(name), make_posterior(name), make_model()
    opt, opt0 = torchngvi.VN(q), torchngvi.VN(q0)
    q.cuda()
    assert opt.param_groups[0]["params"][0] is q.mean_probe
    assert opt.param_groups[0]["params"][1] is q.root_probe
    assert q.mean_probe.is_cuda
    on_gpu = model.to("cuda")
    for _ in range(3):
        opt.step(on_gpu)
        opt0.step(model)
    assert distance([t.cpu() for t in coordinates(q)], q0) < 1e-10


@gpu
@pytest.mark.parametrize("batch", BATCHES)
def test_a_run_saved_on_a_gpu_resumes_on_the_host(batch):
    q, q0 = make_posterior("cholesky", batch).cuda(), make_posterior("cholesky", batch, seed=2)
    model = make_model(batch)
    on_gpu = model.to("cuda")
    opt, opt0 = torchngvi.VN(q), torchngvi.VN(q0)
    for _ in range(2):
        opt.step(on_gpu)
    q0.load_state_dict(q.state_dict())
    opt0.load_state_dict(opt.state_dict())
    opt.step(on_gpu)
    opt0.step(model)
    assert distance([t.cpu() for t in coordinates(q)], q0) < 1e-10
