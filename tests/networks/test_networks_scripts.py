"""Posteriors over networks in training scripts of all kinds: closures, precision, copies, schedules, failures."""

import copy
import io
import itertools
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_networks import adamw, attached, data, flat, means, mlp, sds, sgd, train, train_scaled
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchngvi
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.networks import (
    IVON,
    VOGN,
    VON,
    Categorical,
    Gaussian,
    GradientNoise,
    Reparametrized,
    SampledLabels,
    attach,
    calibrate,
    network,
)
from torchngvi.networks.families import _table, all_finite, normals
from torchngvi.numerics.arrays import remembered

CURVATURES = [SampledLabels, lambda: GradientNoise(20), Reparametrized]

untrained = pytest.mark.filterwarnings("ignore:The posterior has seen no data:UserWarning")


@pytest.mark.parametrize("make", [adamw, sgd, "von", "keyword"])
def test_a_closure_is_called_at_the_draw(make):
    """A step with a closure, as Lightning takes it, is the plain step to the bit; its loss is handed back."""

    def run(**step):
        if make == "von":
            optimizer = VON(mlp(), 100, steps=12)
            model, q = optimizer.q.model, optimizer.q
        else:
            model, q, optimizer, _ = attached(steps=12, make=adamw if make == "keyword" else make)
        return torch.stack(train(model, optimizer, 12, **step)), means(q), sds(q)

    def closed(optimizers, closure):
        return optimizers[0].step(closure=closure) if make == "keyword" else optimizers[0].step(closure)

    for one, other in zip(run(step=closed), run(), strict=True):
        assert torch.equal(one, other)


class Module(nn.Module):
    """The part of Lightning's protocol that a posterior meets: what is called is a part of the module."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.q = network(self.net, 100)  # a submodule: its state is in that of the module

    def configure_optimizers(self):
        optimizer = adamw(self.net)
        attach(optimizer, self.q, steps=12)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])


def automatic_optimization(module, optimizer, scheduler, steps):
    """The loop of Lightning's trainer for one optimizer: the closure does all but the step."""
    for k in steps:
        module.train()

        def closure(k=k):
            loss = module.training_step(data(20, seed=10 + k))
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
        if k % 5 == 4:
            module.eval()
            with torch.inference_mode():
                module.training_step(data(20, seed=k))
                module.q.predict(data(3)[0], samples=2)


def test_lightnings_loop_is_the_plain_loop_and_resumes(monkeypatch):
    # so that it may be made within inference_mode
    monkeypatch.setattr("torchngvi.networks.families._table", remembered(_table.__wrapped__))
    module = Module()
    automatic_optimization(module, *module.configure_optimizers(), range(12))
    plain, q, optimizer, _ = attached(steps=12)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    train(plain, optimizer, 12, scheduler)
    assert torch.equal(means(module.q), means(q))
    half = Module()
    optimizer, scheduler = half.configure_optimizers()
    automatic_optimization(half, optimizer, scheduler, range(7))
    saved = copy.deepcopy([part.state_dict() for part in (half, optimizer, scheduler)])
    assert {"net.0.weight", "q.families.0.mean/0/weight"} < saved[0].keys()
    other = Module()
    parts = (other, *other.configure_optimizers())
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    automatic_optimization(*parts, range(7, 12))
    assert torch.equal(means(other.q), means(q))
    assert torch.equal(sds(other.q), sds(q))


def test_outputs_that_are_never_seen():
    """The forward hook of a network does not fire for its parts, nor for forward itself."""
    for call in (lambda m, x: m[2](m[1](m[0](x))), lambda m, x: m.forward(x), lambda m, x: m.eval()(x)):
        model, _, optimizer, _ = attached()
        x, y = data(20)
        F.cross_entropy(call(model, x), y).backward()
        with pytest.raises(InputError, match="has not seen the outputs of the network in training"):
            optimizer.step()


class Wrapped(nn.Module):
    """A network whose outputs come in a wrapper."""

    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = mlp(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


def test_predictions_find_the_outputs_as_the_training_does():
    """The tensor itself or its entry `logits`; for all else the sentence says what to add."""
    x, y = data(20)
    plain = network(mlp(), 100)
    plain.laplace([(x, y)])
    plain.temper_(0.0)  # where the names of the parameters, of which the noise is a function, do not matter
    for wrap, read in [
        (lambda o: {"logits": o, "loss": None}, None),
        (lambda o: SimpleNamespace(logits=o), None),
        (lambda o: (o, 1), lambda returned: returned[0]),
    ]:
        q = network(Wrapped(wrap), 100)
        q.laplace([(x, y)], read=read)
        assert torch.equal(q.families[0].curvature[0], plain.families[0].curvature[0])
        q.temper_(0.0)
        assert torch.equal(q.predict(x, samples=1, read=read), plain.predict(x, samples=1))
        model = Wrapped(wrap)
        q = network(model, 100)
        attach(adamw(model), q, steps=10, curvature=SampledLabels(output=read))
        model(x)
        assert q.observed == 1
    calls = q.predict, lambda x: q.log_prob(x, y), lambda x: calibrate(q, [(x, y)]), lambda x: q.laplace([(x, y)])
    for call in calls:
        with pytest.raises(InputError, match=r"as one tensor; got a tuple\. Say where they are: read=lambda returned"):
            call(x)


@untrained
@pytest.mark.parametrize("label", [-100, 3])
def test_labels_that_are_no_class_are_told(label):
    """Those that cross_entropy leaves out, with what to do, and those of a class too many."""
    x, y = data(6)
    q = network(mlp(), 6)
    kept = y.clone()
    y[2] = label
    with pytest.raises(InputError, match=rf"labels are classes from 0 to 2; got {label}\. Leave out those"):
        q.log_prob(x, y)
    mask = torch.arange(6) != 2
    left = q.log_prob(x, y[mask], read=lambda logits: logits[mask])
    assert torch.equal(left, q.log_prob(x, kept)[mask])


@pytest.mark.filterwarnings("ignore:The temperature chosen")  # labels that nothing explains
def test_images_of_labels_have_their_classes_second():
    """As in cross_entropy: training, predictions and calibration agree with classes that are last."""
    x, y = torch.rand(4, 1, 3, 5), torch.arange(60).view(4, 3, 5) % 3

    def run(model, likelihood):
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        q = network(model, 60, likelihood=likelihood)
        optimizer = adamw(model)
        attach(optimizer, q, steps=5)
        train(model, optimizer, 5, loss=lambda f, y: -q.likelihood.log_prob(f, y).mean(), batch=(x, y))
        model.eval()
        return means(q), q.log_prob(x, y), q.predict(x), torch.tensor(calibrate(q, [(x, y)]).nll)

    class Last(nn.Conv2d):
        def forward(self, x):
            return super().forward(x).movedim(1, -1)

    last = run(Last(1, 3, 1, bias=False), Categorical())
    for dim in (1, -3):
        for a, b in zip(run(nn.Conv2d(1, 3, 1, bias=False), Categorical(dim)), last, strict=True):
            torch.testing.assert_close(a, b)
    assert last[1].shape == y.shape


def test_classes_in_another_place_than_the_last_are_told():
    """Nothing can tell in training, where the labels of the user are not seen."""
    x, y = torch.randn(5, 4, 7), torch.zeros(5, 7, dtype=torch.int64)
    q = network(nn.Conv1d(4, 3, 1), 35)
    q.laplace([(x, y)])
    with pytest.raises(InputError, match=r"labels \(5, 7\) for outputs \(2, 5, 3\).*Categorical\(class_dim=1\)"):
        q.log_prob(x, y, samples=2)


def test_more_labels_in_a_batch_than_in_the_data_are_told_once():
    """As where the number of batches is given for that of labels."""
    model, (x, _) = mlp(), data(20)
    q = network(model, 19)
    attach(adamw(model), q, steps=10, curvature=SampledLabels(every=1))
    with pytest.warns(UserWarning, match=r"A batch has 20 labels, more than num_data=19.*not of batches: every token"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    q.release()
    attach(adamw(model), network(model, 20), steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def test_von_under_a_scaler_and_a_schedule_that_cycles_momentum():
    """One-cycle sets the learning rate and the momentum; a schedule that holds both changes nothing."""

    def run(schedule, mixed):
        model = mlp()
        optimizer = VON(model, 100, steps=12)
        scheduler = schedule(optimizer)
        momenta = []

        def between():
            scheduler.step()
            momenta.append(optimizer.param_groups[0]["momentum"])

        train_scaled(model, optimizer, 12, 2.0**10 if mixed else 1.0, between=between)
        return means(optimizer.q), momenta

    def cycled(low, high):
        return lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 1.0, 1.0, 5, base_momentum=low, max_momentum=high)

    held, _ = run(cycled(0.9, 0.9), False)
    moved, momenta = run(cycled(0.5, 0.95), False)
    assert min(momenta) == 0.5
    assert not torch.equal(held, moved)
    assert torch.equal(held, run(lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1.0), True)[0])


def test_a_checkpoint_of_an_earlier_release_has_its_momentum():
    """The group called it beta."""
    optimizer = VON(mlp(), 100, beta=0.8, steps=10)
    state = optimizer.state_dict()
    [group] = state["param_groups"]
    group["beta"] = group.pop("momentum")
    other = VON(mlp(), 100, steps=10)
    other.load_state_dict(state)
    assert other.param_groups[0]["momentum"] == 0.8


def test_a_part_of_the_network_is_bayesian():
    """`bayesian` is a dense block there; the rest is moved by an optimizer of its own and is no part of q."""

    def run(make):
        torch.manual_seed(0)
        model = mlp()
        optimizer, rest = make(model), torch.optim.SGD(model[0].parameters(), lr=0.1)
        train(model, [rest, optimizer], 12)
        return model.state_dict(), optimizer.q

    short, q = run(lambda model: VON(model, 100, steps=12, bayesian="2.*"))
    long, other = run(lambda model: VON(network(model, 100, {"2.*": "dense"}), steps=12))
    assert q.names == ["2.weight", "2.bias"]
    assert all(torch.equal(short[name], long[name]) for name in long)
    assert torch.equal(q.variance["2.weight"], other.variance["2.weight"])
    assert not torch.equal(short["0.weight"], mlp().state_dict()["0.weight"])


def test_ivon_is_the_published_package(monkeypatch):
    """Thirty steps of ivon-opt, where it is installed, with our noise for its own; it rounds h₀ to single precision."""
    package = pytest.importorskip("ivon")
    n, lr, h0, b1, b2, delta, clip = 40, 0.1, 0.25, 0.9, 0.99, 1e-3, 0.5
    model, other = mlp(torch.float64), mlp(torch.float64)
    optimizer = IVON(model, n, lr, h0, (b1, b2), delta, clip)
    settings = {"hess_init": h0, "beta1": b1, "beta2": b2, "weight_decay": delta, "clip_radius": clip}
    published = package.IVON(other.parameters(), lr, n, **settings)
    for t in range(30):
        noise = torch.cat([normals(p, name, 0, t).flatten() for name, p in mlp(torch.float64).named_parameters()])
        x, y = data(20, torch.float64, seed=t)
        train(model, optimizer, 1, batch=(x, y))
        monkeypatch.setattr(torch, "randn", lambda *size, noise=noise, **keywords: noise)
        with published.sampled_params(train=True):
            published.zero_grad()
            F.cross_entropy(other(x), y).backward()
        monkeypatch.undo()
        published.step()
    torch.testing.assert_close(
        means(optimizer.q), flat([p.detach() for p in other.parameters()]), rtol=1e-10, atol=1e-12
    )


def test_autocast_scaler_and_clipping():
    """All of mixed precision together: it trains about as well as the same run in single precision."""

    def run(mixed):
        model, q, optimizer, _ = attached(steps=60)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=mixed)
        for _ in range(60):
            x, y = data(40, seed=1)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert q.draw == 60
        return -q.log_prob(x, y).mean()

    mixed, single = run(True), run(False)
    assert mixed < 0.8
    assert abs(mixed - single) < 0.05


def test_draws_differ_within_one_autocast():
    """Autocast keeps casts of the weights until it ends; they are forgotten when the weights change."""
    model, q, _, _ = attached()
    x, _ = data(5)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        found = torch.stack([q.predict(x, samples=number) for number in (1, 4)])
        evaluated = model.eval()(x)
    torch.testing.assert_close(found[1], q.predict(x, samples=4), rtol=0, atol=0.02)
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(evaluated.float(), model(x), rtol=0, atol=0.02)
    assert found.dtype == torch.float32


KILLED = """
import os, signal, sys
import torch
from test_networks import attached, train
model, q, optimizer, _ = attached(steps=16)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
for step in range(16):
    train(model, optimizer, 1, scheduler=schedule, first=step)
    if step == 6:
        state = [part.state_dict() for part in (model, q, optimizer, schedule)]
        torch.save(state, sys.argv[1])
    if step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.accuracy
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is tested on Linux and macOS")
def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path):
    """From the checkpoint of its seventh step; the steps after it are taken again."""

    def start():
        model, q, optimizer, _ = attached(steps=16)
        return model, q, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)

    root, file = pathlib.Path(__file__).parents[2], tmp_path / "state.pt"
    paths = os.pathsep.join([str(root), str(root / "tests"), str(root / "tests" / "networks")])
    threads = {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", KILLED, file], env=os.environ | threads, timeout=120)
    assert done.returncode == -signal.SIGKILL
    model, q, optimizer, schedule = whole = start()
    train(model, optimizer, 16, scheduler=schedule)
    again = start()
    for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(again[0], again[2], 9, scheduler=again[3], first=7)
    assert torch.equal(means(again[1]), means(whole[1]))
    assert torch.equal(sds(again[1]), sds(whole[1]))
    assert again[1].draw == 16


def test_the_order_of_loading_does_not_matter():
    """The network's own state has the means in half precision, and that of q in full."""
    model, q, optimizer, _ = attached(model=mlp(torch.bfloat16))
    train(model, optimizer, 5)
    states = copy.deepcopy((model.state_dict(), q.state_dict()))
    for order in itertools.permutations(range(2)):
        other, oq, _, _ = attached(model=mlp(torch.bfloat16))
        for k in order:
            (other, oq)[k].load_state_dict(states[k])
        assert torch.equal(means(oq), means(q))


def test_a_copy_of_the_network_is_any_network_at_the_mean():
    model, q, optimizer, _ = attached()
    train(model, optimizer, 3)
    alone = copy.deepcopy(model)
    assert torch.equal(flat([p.detach() for p in alone.parameters()]), means(q))
    before = flat([p.detach() for p in alone.parameters()]).clone()
    alone.train()(data(3)[0])
    assert torch.equal(flat([p.detach() for p in alone.parameters()]), before)
    train(alone, adamw(alone), 2)
    assert not torch.equal(flat(list(alone.state_dict().values())), before)
    assert torch.equal(means(q), before)
    network(alone, 100)  # it may have a posterior of its own


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_the_posterior_has_a_network_of_its_own(copied):
    model, q, optimizer, _ = attached()
    train(model, optimizer, 3)
    other, oq = copied((model, q))
    assert oq.model is other
    x, _ = data(5)
    torch.testing.assert_close(oq.predict(x), q.predict(x))
    assert torch.equal(other(x), model.eval()(x))  # attached to nothing, so that it holds the mean in training too
    model.train()
    train(model, optimizer, 2)
    assert not torch.equal(means(oq), means(q))
    optimizer = adamw(other)
    attach(optimizer, oq, steps=10)
    before = means(oq).clone()
    train(other, optimizer, 2)
    assert not torch.equal(means(oq), before)


def test_an_average_of_the_means():
    """AveragedModel within at_mean() averages means, and is a plain network."""
    model, q, optimizer, _ = attached()
    averaged, expected = AveragedModel(model), torch.zeros_like(means(q))
    for k in range(4):
        train(model, optimizer, 1, first=k)
        with q.at_mean():
            averaged.update_parameters(model)
        expected += means(q) / 4
    found = flat([p.detach() for p in averaged.module.parameters()])
    torch.testing.assert_close(found, expected)
    averaged.train()(data(3)[0])
    averaged.eval()(data(3)[0])
    state = [value for key, value in averaged.state_dict().items() if key.startswith("module.")]
    assert torch.equal(flat(state), found)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_frozen_later(curvature):
    """Mean and covariance of what is frozen stay; the rest goes on."""
    model, q, optimizer, _ = attached(curvature=curvature())
    train(model, optimizer, 3)
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    before = {
        name: (q.mean[name].clone(), q.variance[name].clone(), q.families[0].curvature[0].clone()) for name in q.names
    }
    train(model, optimizer, 12, first=3)
    for name in ("0.weight", "0.bias"):
        assert torch.equal(q.mean[name], before[name][0])
    torch.testing.assert_close(
        q.families[0].curvature[0], before["0.weight"][2], rtol=1e-4, atol=1e-4 * q.prior["0.weight"]
    )
    assert not torch.equal(q.mean["2.weight"], before["2.weight"][0])
    model[0].requires_grad_(True)
    train(model, optimizer, 12, first=15)
    assert not torch.equal(q.mean["0.weight"], before["0.weight"][0])
    assert not torch.allclose(q.families[0].curvature[0], before["0.weight"][2], rtol=1e-5, atol=0)


def test_frozen_later_in_a_kronecker_family():
    model, q, optimizer, _ = attached("kronecker")
    train(model, optimizer, 3)
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    frozen, other = q.variance["0.weight"].clone(), q.variance["2.weight"].clone()
    train(model, optimizer, 12, first=3)
    assert torch.equal(q.variance["0.weight"], frozen)
    assert not torch.equal(q.variance["2.weight"], other)


@untrained
def test_weights_that_were_changed_before_the_optimizer_is_attached():
    """A network may be trained or set by hand after q was made; predictions and the attachment take it as it is."""
    model = mlp()
    q = network(model, 100)
    train(model, adamw(model), 3)
    trained = flat([p.detach() for p in model.parameters()]).clone()
    q.predict(data(3)[0])
    assert torch.equal(means(q), trained)
    with torch.no_grad():
        model[2].bias += 1
    attach(adamw(model), q, steps=10)
    assert torch.equal(q.mean["2.bias"], trained[-3:] + 1)


def test_buffers_follow_the_parameters_to_their_device():
    model = mlp()
    q = network(model, 100, {"*.weight": "kronecker", "*.bias": "diagonal"})
    for family in q.each():
        family.parameters_of_network = [nn.Parameter(p.to("meta")) for p in family.parameters_of_network]
        family.follow_()
        assert {buffer.device.type for buffer in family.buffers()} == {"meta"}


def test_the_radius_follows_the_groups_that_q_has():
    """f = lr/its largest value, of the groups with parameters of q alone; it is in the optimizer's own state."""
    model = mlp()
    q = network(model, 100, {"2.*": "diagonal"})
    groups = [{"params": model[0].parameters(), "lr": 0.9, "weight_decay": 0.1}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.0)
    handle = attach(optimizer, q, steps=10)
    optimizer.param_groups[1]["lr"] = 0.1
    assert handle._share() == 0.2
    optimizer.param_groups[1]["lr"] = 1.0  # more than it began with
    assert handle._share() == 1.0
    state = optimizer.state_dict()
    handle.remove()
    optimizer = torch.optim.AdamW([{**g, "params": list(g["params"])} for g in optimizer.param_groups])
    optimizer.load_state_dict(state)
    optimizer.param_groups[1]["lr"] = 0.1
    assert attach(optimizer, q, steps=10)._share() == 0.1


def test_schedules_that_say_how_far_they_will_go():
    model, _, optimizer, handle = attached(lr=0.3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=20)
    assert handle._share() == pytest.approx(1 / 25)
    train(model, optimizer, 5, scheduler=scheduler)
    assert handle._share() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=20),
        lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, base_lr=0.001, max_lr=0.01, step_size_up=5),
    ],
)
def test_the_largest_rate_is_that_of_the_schedule(schedule):
    """A schedule replaces the rate that the optimizer was made with, on whichever side of `attach` it is made."""

    def run(late):
        torch.manual_seed(0)
        model = mlp()
        optimizer = adamw(model, 1.0)
        scheduler = None if late else schedule(optimizer)
        handle, shares = attach(optimizer, network(model, 100), steps=20), []
        scheduler = scheduler or schedule(optimizer)
        for k in range(12):
            train(model, optimizer, 1, scheduler=scheduler, first=k)
            shares.append(handle._share())
        return shares, model.state_dict()

    (early, weights), (late, others) = run(False), run(True)
    assert late == early
    assert max(late) == 1.0
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@untrained
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_muon_beside_adamw():
    torch.manual_seed(0)
    model = mlp()
    q = network(model, 100)
    matrices = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.3, weight_decay=0.0)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.3, weight_decay=0.0)
    attach([matrices, rest], q, steps=40)
    x, y = data(40)
    start = -q.log_prob(x, y).mean()
    train(model, [matrices, rest], 40, batch=(x, y))
    assert q.draw == 40
    assert -q.log_prob(x, y).mean() < 0.6 * start


def two(model, lr):
    """Optimizers of the two layers."""
    return [sgd(model[0]), sgd(model[2])]


@pytest.mark.parametrize("look", ["predict", "state", "mean", "copy", "remove"])
def test_looking_at_a_step_that_one_optimizer_has_left_out(look):
    """It is ended first, as the next forward pass would have ended it."""

    def run(look):
        model, q, (a, b), handle = attached(steps=10, make=two)
        x, _ = data(20)
        train(model, [a, b], 3)
        train(model, a, 1, first=3)
        if look == "predict":
            q.predict(x, samples=2)
        elif look == "state":
            assert torch.equal(model.state_dict()["0.weight"], q.mean["0.weight"])
        elif look == "mean":
            with q.at_mean():
                assert torch.equal(model[0].weight, q.mean["0.weight"])
        elif look == "copy":
            assert torch.equal(copy.deepcopy(model)[0].weight, q.mean["0.weight"])
        elif look == "remove":
            handle.remove()
        else:
            model(x)
        assert q.draw == 4
        return means(q)

    assert torch.equal(run(look), run("forward"))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_an_observation_that_is_not_finite_is_left_out(structure):
    """Steps 0 and 10 observe the curvature: a NaN batch there leaves the covariance as it was."""
    model, q, optimizer, handle = attached(structure)
    train(model, optimizer, 10)
    mean, sd = means(q).clone(), sds(q).clone()
    x, y = data(20)
    x[0, 0] = torch.nan
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(RejectedStepWarning, match="gradients or the optimizer's move are not finite"):
        optimizer.step()
    assert torch.equal(means(q), mean)
    torch.testing.assert_close(sds(q), sd, rtol=0.1, atol=0)
    train(model, optimizer, 10)
    assert q.observed == 3
    assert handle.skipped == 1
    assert sds(q).isfinite().all()


def test_large_gradients_of_half_precision_are_finite():
    large = [torch.full((100,), 6e4, dtype=torch.float16)]  # their norm is not a number of half precision
    assert all_finite(large)
    assert not all_finite([*large, torch.tensor([torch.nan])])
    assert all_finite([])


def test_squares_that_are_not_finite_are_left_out():
    model = mlp()
    optimizer = VOGN(model, 100, 0.1)
    x, y = data(20)
    x[0, 0] = torch.nan
    optimizer.backward(F.cross_entropy(model(x), y, reduction="none"))
    sd = sds(optimizer.q).clone()
    with pytest.warns(RejectedStepWarning, match="not finite"):
        optimizer.step()
    assert torch.equal(sds(optimizer.q), sd)


def test_a_device_that_is_not_waited_for():
    """Where reading a flag would wait, the rate is a tensor: 0 leaves everything, another is the number."""
    for structure in ("diagonal", "kronecker"):
        found = []
        for rate in (0.1, torch.tensor(0.1), torch.tensor(0.0), None):
            q = network(mlp(torch.float64), 100, structure)
            family = next(q.each())
            torch.manual_seed(3)
            statistics = family.statistics([torch.randn_like(m) for m in family.mean], 5.0)
            if rate is not None:
                family.absorb_(statistics, rate)
            family.refresh_()
            found.append(flat(list(family.buffers())))
        torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(found[2], found[3], rtol=1e-12, atol=1e-14)
        assert not torch.allclose(found[0], found[3], rtol=1e-2)


def test_tokens_are_the_labels_of_a_sequence():
    """Curvature from (batch, positions, classes) is that of the same outputs in rows: B counts the positions."""
    found = []
    for shape in [(4, 5, 4), (20, 4)]:
        model = mlp(torch.float64)
        q = network(model, 100)
        SampledLabels().after_forward(q, model(data(20, torch.float64)[0].view(shape)))
        q.refresh_()
        found.append(sds(q))
    torch.testing.assert_close(found[0], found[1])


def test_numbers_with_a_noise_that_is_learned():
    """The curvature reads the scale beside the network."""
    torch.manual_seed(0)
    model, log_scale = nn.Linear(3, 1), nn.Parameter(torch.zeros(()))
    q, x = network(model, 200, likelihood=Gaussian(log_scale.exp)), torch.randn(200, 3)
    seen = []
    for scale in (0.5, 2.0):  # the same draws of labels: the curvature is as 1/scale²
        log_scale.data.fill_(scale).log_()
        q.draw, q.observed = 0, 0
        SampledLabels().after_forward(q, model(x))
        q.refresh_()
        seen.append(q.families[0].curvature[0].clone())
    torch.testing.assert_close(seen[0], 16 * seen[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: VON(m, 100, steps=20),
        lambda m: VON(m, 100, steps=20, curvature=GradientNoise(20)),
        lambda m: IVON(m, 100, 0.1),
    ],
)
def test_a_named_optimizer_resumes_from_its_own_state(make):
    def start():
        model = mlp()
        return model, make(model)

    model, optimizer = start()
    train(model, optimizer, 9)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other, resumed = start()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimizer, 5, first=9)
    train(other, resumed, 5, first=9)
    assert torch.equal(means(resumed.q), means(optimizer.q))
    assert torch.equal(sds(resumed.q), sds(optimizer.q))


def test_loading_forgets_what_waited_for_a_step():
    model, q, optimizer, _ = attached()
    train(model, optimizer, 2)
    state = copy.deepcopy(q.state_dict())
    train(model, optimizer, 8, first=2)
    model(data(20)[0])  # observes, and no step follows
    q.load_state_dict(state)
    sd = sds(q).clone()
    q.refresh_()
    assert torch.equal(sds(q), sd)


def test_loading_in_the_middle_of_a_step():
    """One of two optimizers has stepped; the state that is loaded is the one that the next step begins from."""

    def begun():
        return attached(steps=10, make=two)[:3]

    model, q, both = begun()
    state = copy.deepcopy(q.state_dict())
    train(model, both[0], 1)
    q.load_state_dict(state)
    for opt in both:
        opt.state.clear()
    other, expected, fresh = begun()
    for network_, pair in ((model, both), (other, fresh)):
        train(network_, pair, 1)
    assert torch.equal(means(q), means(expected))


@pytest.mark.accuracy
def test_the_snippets_of_the_docs():
    """They run as they stand, and their networks have learned; every test that the appendix names is there."""
    root = pathlib.Path(__file__).parents[2]
    text = (root / "docs/networks.md").read_text(encoding="utf-8")
    classes, numbers = re.findall(r"```python\n(.*?)```", text, re.S)
    seen, other = {}, {}
    exec(compile(classes, "docs/networks.md", "exec"), seen)
    assert seen["nll"] < 0.5
    exec(compile(numbers, "docs/networks.md", "exec"), other)
    assert ((other["y"][250:] - other["mean"]).square().mean() < 0.15**2).item()
    assert other["inside"] >= 0.86
    tests = "".join(
        (root / f"tests/networks/test_networks{part}.py").read_text(encoding="utf-8")
        for part in ("", "_scripts", "_quality")
    )
    appendix = (root / "docs/appendix/network_measurements.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)", appendix)
    assert len(named) > 10
    assert all(f"def {name}" in tests for name in named)


def test_the_diff_of_the_docs():
    """What is left of a training script without its removed lines is the script with a posterior, and it runs."""
    root = pathlib.Path(__file__).parents[2]
    text = (root / "docs/networks.md").read_text(encoding="utf-8")
    [diff] = re.findall(r"```diff\n(.*?)```", text, re.S)
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) == 3
    x, y = torch.rand(120, 64), torch.arange(120) % 10
    train_set = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(train_set, batch_size=40)
    for left_out in "+-":
        script = "\n".join(line[1:] for line in lines if not line.startswith(left_out))
        seen = {"torch": torch, "nn": nn, "torchngvi": torchngvi, "device": "cpu", "epochs": 2}
        seen |= {"train_set": train_set, "loader": loader}
        exec(compile(script, "docs/networks.md", "exec"), seen)
        assert seen["loss"].isfinite()
    assert seen["q"].draw == 6


@pytest.mark.accuracy
def test_public_questions(tmp_path):
    """Labels without a column are refused by ours, and a copy of what was fitted predicts the same."""
    reason = "needs the benchmarks of a clone: run python -m pytest in its root"
    questions = pytest.importorskip("benchmarks.networks_public", reason=reason)
    lines = questions.main(["--only", "13", "16", "--log", str(tmp_path / "log.jsonl")])
    ours = [[cell.strip(" |").split(", ")[:-1] for cell in line.split(" | ")[-3:]] for line in lines[2:]]
    assert ours == [[["refused"]] * 3, [["0", "right"]] * 3]
