"""What survives: resuming is equal to the last bit, copies are their own, conversion keeps the optimizer alive."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from helpers import METHOD_PAIRS as PAIRS
from helpers import METHODS, coordinates, distance, make_model, make_posterior, same_bits
from torch.optim import lr_scheduler

from torchngvi import SRVN, VN, CholeskyGaussian, KLRadius, NaturalGaussian, Stein, fit
from torchngvi.expectations import Antithetic
from torchngvi.ifvb import ClosedForm, MeanFieldGaussian, PreconditionedVI
from torchngvi.interfaces import Bent, Local, Metric
from torchngvi.momentum import ExponentialAverage, NormalizedMomentum
from torchngvi.registry import POSTERIORS
from torchngvi.stepsizes import Constant, SufficientDecrease
from torchngvi.structures import block_diagonal


def log_joint(theta):
    return -(torch.cosh(theta - 0.5) + 0.3 * theta.square()).sum(-1) - 0.2 * theta.prod(-1)


class Run:
    """A posterior, its optimizer, maybe a scheduler, and one way to step."""

    def __init__(self, kind, method, name, batch, seed):
        self.kind = kind
        self.q = make_posterior(name, batch, seed=seed)
        self.model = make_model(batch)
        make, self.scheduler = METHODS[method], None
        if kind in ("trial on a model", "trial on a closure"):
            self.opt = make(self.q)
        elif kind == "short trials":
            self.opt = make(self.q, step_size=SufficientDecrease(radius=1e-3, grow=1.5))
        elif kind == "kl radius":
            self.opt = make(self.q, step_size=KLRadius(0.01))
        elif kind == "scheduler":
            self.opt = make(self.q, lr=0.5, step_size=Constant())
            self.scheduler = lr_scheduler.ExponentialLR(self.opt, 0.7)
        else:
            generator = torch.Generator().manual_seed(seed)
            self.opt = make(self.q, lr=0.1, estimator=Stein(Antithetic(8, generator)), step_size=Constant())

    def advance(self, steps):
        for _ in range(steps):
            if self.kind == "trial on a closure":
                self.opt.step(lambda: self.model.negative_elbo(self.q))
            elif self.kind == "draws":
                self.opt.step(log_joint)
            else:
                self.opt.step(self.model)
            if self.scheduler is not None:
                self.scheduler.step()

    def saved(self):
        parts = {"q": self.q.state_dict(), "opt": self.opt.state_dict()}
        if self.scheduler is not None:
            parts["scheduler"] = self.scheduler.state_dict()
        stream = io.BytesIO()
        torch.save(parts, stream)
        stream.seek(0)
        return stream

    def load(self, stream):
        parts = torch.load(stream, weights_only=True)
        self.q.load_state_dict(parts["q"])
        self.opt.load_state_dict(parts["opt"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(parts["scheduler"])


def state_of(opt):
    return [opt.state[q.mean_probe] for q in opt.posteriors]


def same_state(left, right):
    return all(same_tensors(a, b) for a, b in zip(state_of(left), state_of(right), strict=True))


def same_tensors(left, right):
    """Of nested dicts."""
    if not isinstance(left, dict):
        return torch.equal(left, right)
    return left.keys() == right.keys() and all(same_tensors(left[name], right[name]) for name in left)


KINDS = ["trial on a model", "trial on a closure", "short trials", "kl radius", "scheduler", "draws"]


@pytest.mark.sparse(3)
@pytest.mark.parametrize(
    ("batch", "kind"), [*(((3,), kind) for kind in KINDS), ((), "trial on a model"), ((), "draws")], ids=str
)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_a_resumed_run_is_equal_to_the_last_bit(method, name, batch, kind):
    run = Run(kind, method, name, batch, seed=0)
    run.advance(4)
    run.opt.state[run.q.mean_probe]["rejections"] += 3
    saved = run.saved()
    middle = coordinates(run.q)
    other = Run(kind, method, name, batch, seed=7)
    other.advance(2)  # a state of its own, which loading replaces
    other.load(saved)
    assert same_bits(other.q, middle)
    assert other.opt.rejections == run.opt.rejections
    for _ in range(3):
        run.advance(1)
        other.advance(1)
        assert same_bits(other.q, run.q)
        assert torch.equal(other.opt.last.rho, run.opt.last.rho)
    assert not same_bits(run.q, middle)
    assert same_state(other.opt, run.opt)


def test_the_generator_of_the_draws_resumes_in_single_precision():
    # torch casts what an optimizer saves to the dtype of its tensors; a generator's bytes must come back
    ends = []
    for resumed in (False, True):
        q = make_posterior("cholesky", dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        opt = VN(q, lr=0.1, estimator=Stein(Antithetic(8, generator)), step_size=Constant())
        opt.step(log_joint)
        if resumed:
            state, weights = opt.state_dict(), q.state_dict()
            q = make_posterior("cholesky", seed=3, dtype=torch.float32)
            opt = VN(q, lr=0.1, estimator=Stein(Antithetic(8, torch.Generator().manual_seed(99))), step_size=Constant())
            q.load_state_dict(weights)
            opt.load_state_dict(state)
        opt.step(log_joint)
        ends.append(q)
    assert same_bits(*ends)


def test_groups_resume_their_options():
    q1, q2 = make_posterior("cholesky"), make_posterior("natural")
    opt = VN([{"posterior": q1, "lr": 0.2}, {"posterior": q2, "loss_scale": 3.0}], lr=0.5, step_size=Constant())
    other = VN([make_posterior("cholesky"), make_posterior("natural")], lr=0.9, step_size=Constant())
    other.load_state_dict(opt.state_dict())
    assert [(g["lr"], g["loss_scale"]) for g in other.param_groups] == [(0.2, 1.0), (0.5, 3.0)]
    for group, q in zip(other.param_groups, other.posteriors, strict=True):
        assert group["params"][0] is q.mean_probe
        assert group["params"][1] is q.root_probe


@pytest.mark.parametrize("first", [{"lr": 0.1}, {"step_size": KLRadius(0.1)}])
def test_a_run_may_resume_with_another_step_size(first):
    model, q = make_model(), make_posterior("cholesky")
    opt = VN(q, **first)
    opt.step(model)
    trial = VN(q)
    trial.load_state_dict(opt.state_dict())
    trial.step(model)
    assert torch.equal(trial.last.accepted, torch.tensor(True))
    opt.load_state_dict(trial.state_dict())
    opt.step(model)


def test_loading_evaluates_anew():
    model, q = make_model(), make_posterior("cholesky")
    opt = VN(q)
    opt.step(model)
    count = opt.evaluations
    opt.load_state_dict(opt.state_dict())
    opt.step(model)
    assert opt.evaluations == count + 2


class OfTheSameNames(NormalizedMomentum):
    """It calls its state as the optimizer and the other parts call theirs."""

    carried = ("went",)

    def init(self, q):
        state = super().init(q)
        return {"went": state["mean_vector"], "loss": state["mean_matrix"], "rejections": state["averaged"]}

    def __call__(self, q, change, norm2, state):
        assert set(state) == {"went", "loss", "rejections"}
        own = {"mean_vector": state["went"], "mean_matrix": state["loss"], "averaged": state["rejections"]}
        out, memory = super().__call__(q, change, norm2, own)
        return out, dict(zip(("went", "loss", "rejections"), memory.values(), strict=True))


def test_a_part_may_name_its_state_as_it_likes():
    model, ends = make_model(), []
    for momentum in (NormalizedMomentum(), OfTheSameNames()):
        q = make_posterior("cholesky")
        opt = SRVN(q, lr=0.05, momentum=momentum)
        for _ in range(5):
            opt.step(model)
        assert opt.rejections == 0
        ends.append(q)
    assert same_bits(*ends)


def test_each_part_has_a_dict_of_its_own():
    model, q = make_model(), make_posterior("cholesky")
    opt = VN(q)
    opt.step(model)
    state = opt.state_dict()["state"][0]
    assert set(state) == {"rejections", "loss", "went", "step_size", "estimator", "metric"}
    assert set(state["step_size"]) == {"reach", "cap"}
    pairs = {f"{kind}{n}" for kind in "sy" for n in range(opt.metric.memory)}
    assert set(state["metric"]) == {*pairs, "kept", "gradient", "direction"}


class Smoothing(Metric):
    """The mean of this gradient and the one before."""

    natural = True

    def init(self, q):
        return {"before": torch.zeros_like(q.vector), "known": torch.zeros_like(q.vector[..., 0], dtype=torch.bool)}

    def __call__(self, q, gradient, went, state):
        known = state["known"][..., None]
        assert known.dtype == torch.bool
        a = torch.where(known, 0.5 * (gradient.a + state["before"]), gradient.a)
        new = {"before": gradient.a, "known": torch.ones_like(state["known"])}
        return Bent(Local(a, gradient.P), (a * gradient.a).sum(-1)), new


def quadratic(lam):
    return -(lam - 1).square().sum(-1)


@pytest.mark.parametrize("momentum", [None, ExponentialAverage(0.5)])
def test_a_metric_remembers_beside_a_momentum(momentum):
    """And a truth value comes back as one, which torch loads as a number."""
    q = MeanFieldGaussian(torch.zeros(4, dtype=torch.float64))
    options = {"estimator": ClosedForm(), "momentum": momentum, "step_size": Constant()}
    opt = PreconditionedVI(q, Smoothing(), 0.1, **options)
    opt.step(quadratic)
    assert bool(opt.state[q.mean_probe]["metric"]["known"])
    other = copy.deepcopy(q)
    resumed = PreconditionedVI(other, Smoothing(), 0.1, **options)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each in (opt, resumed):
        each.step(quadratic)
    assert torch.equal(q.vector, other.vector)
    q.float()
    opt.step(quadratic)
    assert opt.state[q.mean_probe]["metric"]["before"].dtype == torch.float32


def check_copy(run, q, opt):
    """opt is over q, apart from the original, and goes on as it does."""
    assert opt.posteriors == [q]
    assert q is not run.q
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(q.mean_probe), id(q.root_probe)]
    assert q.mean_probe in opt.state
    assert q.mean_probe.requires_grad
    assert q.mean_probe.is_leaf
    assert type(opt) is type(run.opt)
    assert same_bits(q, run.q)
    assert same_state(opt, run.opt)
    assert opt.evaluations == run.opt.evaluations
    middle = coordinates(q)
    twin = copy.copy(run)
    twin.q, twin.opt, twin.scheduler = q, opt, None
    twin.advance(2)
    assert same_bits(run.q, middle)  # the original stayed
    assert not same_bits(q, middle)
    run.scheduler = None
    run.advance(2)
    assert same_bits(q, run.q)
    assert same_state(opt, run.opt)


COPIES = {
    "deepcopy of both": lambda q, opt: copy.deepcopy((q, opt)),
    "deepcopy of the optimizer": lambda q, opt: (lambda o: (o.posteriors[0], o))(copy.deepcopy(opt)),
    "pickle of both": lambda q, opt: pickle.loads(pickle.dumps((q, opt))),
    "pickle of the optimizer": lambda q, opt: (lambda o: (o.posteriors[0], o))(pickle.loads(pickle.dumps(opt))),
}


EACH_COPY = zip(itertools.product(COPIES, KINDS), itertools.cycle(POSTERIORS), strict=False)
EACH_POSTERIOR = zip(itertools.product(["pickle of both"], KINDS[:4]), POSTERIORS, strict=True)


@pytest.mark.parametrize(("way", "kind", "name"), [(*pair, name) for pair, name in (*EACH_COPY, *EACH_POSTERIOR)])
def test_a_copy_goes_on_by_itself(name, way, kind):
    run = Run(kind, "VN", name, (3,), seed=0)
    run.advance(3)
    check_copy(run, *COPIES[way](run.q, run.opt))


def test_a_pickle_of_0_2_goes_on():
    """Its state does not watch the run, and the path of its blocks is that of a function."""
    opt = VN(CholeskyGaussian(3, structure=block_diagonal([2, 1]), dtype=torch.float64), lr=0.1)
    opt.step(make_model())
    new = copy.deepcopy(opt)
    del opt.state[opt.posteriors[0].mean_probe]["watch"]
    old = pickle.loads(pickle.dumps(opt, protocol=0).replace(b"structures.blocks\n", b"structures.block_diagonal\n"))
    assert old.step(make_model()) == new.step(make_model())
    assert same_bits(old.posteriors[0], new.posteriors[0])
    assert old.posteriors[0].structure == block_diagonal([2, 1])


def test_a_copied_scheduler_moves_the_copied_optimizer():
    run = Run("scheduler", "VN", "cholesky", (), seed=0)
    run.advance(1)
    q, opt, scheduler = copy.deepcopy((run.q, run.opt, run.scheduler))
    assert scheduler.optimizer is opt
    opt.step(run.model)
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.5 * 0.7**2)
    assert run.opt.param_groups[0]["lr"] == pytest.approx(0.5 * 0.7)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
@pytest.mark.parametrize("name", POSTERIORS)
def test_a_copied_posterior(name, way):
    q, model = make_posterior(name), make_model()
    q.frame()  # NaturalGaussian remembers it
    model.negative_elbo(q).backward()
    other = way(q)
    assert same_bits(other, q)
    assert {id(t) for t in other.buffers()}.isdisjoint({id(t) for t in q.buffers()})
    start = coordinates(q)
    VN(other, lr=0.5, step_size=Constant()).step(model)
    assert same_bits(q, start)
    assert torch.equal(q.mean, make_posterior(name).mean)
    VN(q, lr=0.5, step_size=Constant()).step(model)
    assert same_bits(q, other)
    assert torch.equal(q.mean, other.mean)


def as_child(q, convert):
    parent = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"q": q}))
    convert(parent)
    assert next(parent.parameters()).dtype == torch.float64


CONVERSIONS = {
    "double": lambda q: q.double(),
    "to": lambda q: q.to(torch.float64),
    "to, by keyword": lambda q: q.to(dtype=torch.float64),
    "double, float, double": lambda q: q.double().float().double(),
    "to one of that dtype": lambda q: q.to(torch.zeros((), dtype=torch.float64)),
    "as a child, double": lambda q: as_child(q, lambda m: m.double()),
    "as a child, to": lambda q: as_child(q, lambda m: m.to(torch.float64)),
}


@pytest.mark.sparse(3)
@pytest.mark.parametrize(("batch", "convert"), [*(((), way) for way in CONVERSIONS), ((3,), "double")], ids=str)
@pytest.mark.parametrize("name", POSTERIORS)
def test_conversion_keeps_the_optimizer_alive(name, batch, convert):
    q, single, model = make_posterior(name, batch, dtype=torch.float32), make_model(batch), make_model(batch)
    single = single.to(torch.float32)
    opt = VN(q)
    for _ in range(2):
        opt.step(single)
    old = coordinates(q)
    mean = q.mean.double()
    CONVERSIONS[convert](q)
    assert opt.param_groups[0]["params"][0] is q.mean_probe
    assert opt.param_groups[0]["params"][1] is q.root_probe
    for buffer, before in zip(q.coordinates, old, strict=True):
        assert buffer.dtype == torch.float64
        assert not buffer.requires_grad
        assert torch.equal(buffer, before.double())
    for probe in (q.mean_probe, q.root_probe):
        assert probe.dtype == torch.float64
        assert probe.is_leaf
        assert probe.requires_grad
        assert not probe.any()
    assert q.dtype == torch.float64
    assert torch.allclose(q.mean, mean, rtol=1e-5)
    result = fit(q, model, opt, progress=False)
    assert result.converged
    assert all(tensor.dtype == torch.float64 for tensor in q.coordinates)
    other = make_posterior(name, batch)
    assert result.loss == pytest.approx(fit(other, model, progress=False).loss, abs=1e-9)


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("name", POSTERIORS)
def test_conversion_between_backward_and_step(name, convert):
    q, q0 = (make_posterior(name, dtype=torch.float32) for _ in range(2))
    model = make_model(dtype=torch.float32)
    opt = VN(q, lr=0.4, step_size=Constant())
    model.negative_elbo(q).backward()
    CONVERSIONS[convert](q)
    assert q.mean_probe.grad.dtype == q.root_probe.grad.dtype == torch.float64
    opt.step()
    VN(q0, lr=0.4, step_size=Constant()).step(model)
    assert distance(q, [t.double() for t in q0.coordinates]) < 1e-5
    opt.zero_grad()
    assert q.mean_probe.grad is None


@pytest.mark.parametrize("name", POSTERIORS)
def test_share_memory(name):
    q, model = make_posterior(name), make_model()
    opt = VN(q)
    start = coordinates(q)
    q.share_memory()
    assert all(buffer.is_shared() for buffer in q.buffers())
    assert same_bits(q, start)
    opt.step(model)
    assert opt.param_groups[0]["params"][0] is q.mean_probe
    assert all(buffer.is_shared() for buffer in q.buffers())
    assert distance(q, start) > 0.01


NAMES = {
    "cholesky": ["mean", "scale_tril"],
    "diagonal": ["mean", "scale"],
    "natural": ["precision_mean", "precision"],
    "precision": ["mean", "precision_tril"],
}


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_state_dict_shows_the_coordinates_only(name):
    q = make_posterior(name)
    assert list(q.state_dict()) == NAMES[name]
    parent = torch.nn.ModuleDict({"guide": q})
    assert list(parent.state_dict()) == [f"guide.{key}" for key in NAMES[name]]
    other = torch.nn.ModuleDict({"guide": make_posterior(name, seed=4)})
    assert str(other.load_state_dict(parent.state_dict())) == "<All keys matched successfully>"
    assert same_bits(other["guide"], q)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", POSTERIORS)
def test_loading_a_posterior_under_its_optimizer(name, assign):
    q, other, model = make_posterior(name), make_posterior(name, seed=4), make_model()
    opt = VN(q, lr=0.4, step_size=Constant())
    q.frame()  # NaturalGaussian remembers it
    q.load_state_dict(other.state_dict(), assign=assign)
    assert same_bits(q, other)
    assert torch.equal(q.mean, other.mean)
    assert torch.equal(q.covariance, other.covariance)
    expected = make_posterior(name, seed=4)
    opt.step(model)
    VN(expected, lr=0.4, step_size=Constant()).step(model)
    assert same_bits(q, expected)
    model.negative_elbo(q).backward()
    opt.step()
    VN(expected, lr=0.4, step_size=Constant()).step(model)
    assert distance(q, expected) < 1e-12
    assert same_bits(other, make_posterior(name, seed=4)) == (not assign)  # assign takes over the tensors


def test_what_natural_coordinates_remember_follows_them():
    q = NaturalGaussian(2, mean=1.0, dtype=torch.float64)
    assert q.mean.tolist() == [1.0, 1.0]
    q.precision_mean.mul_(3.0)
    assert q.mean.tolist() == [3.0, 3.0]
    q.precision.mul_(4.0)
    assert q.mean.tolist() == [0.75, 0.75]
    assert q.scale_tril.diagonal().tolist() == [0.5, 0.5]
    q.precision = 16.0 * torch.eye(2, dtype=torch.float64)  # a new tensor in place of the buffer
    assert q.scale_tril.diagonal().tolist() == [0.25, 0.25]
