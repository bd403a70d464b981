"""The compiled loops of a step: those of torch to rounding, and the same bits from the same numbers."""

import copy
import io
import os
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchngvi
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.networks import SampledLabels, kernels
from torchngvi.numerics import compiling

needed = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")


def net(width=37, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, width), nn.ReLU(), nn.Linear(width, 3))


def attached(fused, model=None, structure="diagonal", steps=60, **keywords):
    model = net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    q = torchngvi.network(model, 100, structure, **keywords)
    return model, optimizer, q, torchngvi.attach(optimizer, q, steps=steps, fused=fused)


def train(model, optimizer, steps, first=0):
    for k in range(first, first + steps):
        g = torch.Generator().manual_seed(k)
        x = torch.randn(20, 7, generator=g)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


@needed
@pytest.mark.parametrize("shape", [(3,), (16,), (5, 7), (64, 65), (700, 800)])  # tails, blocks, and pieces of noise
def test_each_loop_is_that_of_torch(shape):
    torch.manual_seed(0)
    p, m, g = (torch.randn(shape) for _ in range(3))
    found = []
    for fused in (False, True):
        model = nn.Linear(1, 1, bias=False)
        model.weight = nn.Parameter(p.clone())
        family = torchngvi.network(model, 100).families[0]
        family.fused = fused
        family.mean[0].copy_(m)
        family.stddev[0].copy_(0.1 + torch.rand(shape, generator=torch.Generator().manual_seed(1)))
        gradients = {"weight": g.clone()}
        with torch.no_grad():
            departure = family.departure()
            family.advance_(0.3, 5, 7, 0.2)
            moved, drawn = family.mean[0].clone(), model.weight.detach().clone()
            family.add_prior_(gradients, True)
            assert torch.equal(model.weight, moved)
            family.advance_(0.0, 5, 8, 0.2)
            assert torch.equal(family.mean[0], moved)
        found.append((departure.double(), moved, drawn, gradients["weight"], model.weight.detach()))
    for theirs, ours in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
    exact = ((p.double() - m.double()) / family_sd(shape)).square().sum()
    torch.testing.assert_close(found[1][0], exact, rtol=1e-6, atol=0)


def family_sd(shape):
    return (0.1 + torch.rand(shape, generator=torch.Generator().manual_seed(1))).double()


@needed
def test_a_training_is_that_of_torch_to_rounding():
    ends = []
    for fused in (False, True):
        model, optimizer, q, _ = attached(fused)
        train(model, optimizer, 12)
        ends.append((flat(q.mean.values()), flat(q.variance.values())))
    torch.testing.assert_close(*[mean for mean, _ in ends], rtol=0, atol=2e-5)
    torch.testing.assert_close(*[variance for _, variance in ends], rtol=1e-3, atol=0)
    assert not torch.equal(ends[0][0], flat(p.detach() for p in net().parameters()))


@needed
def test_a_resumed_run_is_the_uninterrupted_one():
    model, optimizer, q, handle = attached(True)
    train(model, optimizer, 20)
    file = io.BytesIO()
    parts = {"model": model, "q": q, "optimizer": optimizer, "handle": handle}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    train(model, optimizer, 20, first=20)
    other = dict(zip(("model", "optimizer", "q", "handle"), attached(True, net(seed=9)), strict=True))
    file.seek(0)
    for name, state in torch.load(file, weights_only=True).items():
        other[name].load_state_dict(state)
    train(other["model"], other["optimizer"], 20, first=20)
    assert torch.equal(flat(q.mean.values()), flat(other["q"].mean.values()))
    assert torch.equal(flat(q.variance.values()), flat(other["q"].variance.values()))


@needed
def test_evaluation_leaves_no_trace():
    """A draw that is made again has the same bits."""
    ends = []
    for look in (False, True):
        model, optimizer, q, _ = attached(True)
        for k in range(6):
            x = torch.randn(20, 7, generator=torch.Generator().manual_seed(k))
            if look and k > 2:
                held = flat(p.detach() for p in model.parameters()).clone()
                q.predict(x, samples=2)
                model.eval()(x)
                model.train()(x)
                assert torch.equal(flat(p.detach() for p in model.parameters()), held)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
        ends.append(flat(q.mean.values()))
    assert torch.equal(*ends)


@needed
def test_a_batch_that_is_not_finite_is_left_out():
    model, optimizer, q, handle = attached(True)
    train(model, optimizer, 3)
    before, moments = flat(q.mean.values()), copy.deepcopy(optimizer.state_dict()["state"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for bad in (float("nan"), float("inf"), -float("inf")):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(20, 7)), torch.zeros(20, dtype=torch.long)).backward()
            model[2].bias.grad[1] = bad
            optimizer.step()
    assert [warning.category for warning in told] == [RejectedStepWarning]  # one for steps in a row
    assert torch.equal(flat(q.mean.values()), before)
    assert handle.skipped == 3
    assert all(s["exp_avg"].isfinite().all() for s in optimizer.state_dict()["state"].values())
    assert moments.keys() == optimizer.state_dict()["state"].keys()


@needed
@pytest.mark.parametrize("kind", ["half", "kronecker", "strided", "unused"])
def test_what_the_loops_are_not_for_goes_as_ever(kind):
    ends = []
    for fused in (False, True):
        model = net()
        if kind == "half":
            model = model.bfloat16()
        if kind == "strided":
            model[0].weight = nn.Parameter(model[0].weight.detach().T.contiguous().T)
        if kind == "unused":
            model.register_module("other", nn.Linear(2, 2))
            model.forward = lambda x, model=model: model[2](model[1](model[0](x)))
        structure = "kronecker" if kind == "kronecker" else "diagonal"
        model, optimizer, q, _ = attached(fused, model, structure)
        for k in range(4):
            x = torch.randn(20, 7, generator=torch.Generator().manual_seed(k)).to(model[0].weight.dtype)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
        ends.append(flat(q.mean.values()))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)
    if kind in ("half", "strided"):
        assert torch.equal(*ends)


def test_without_a_compiler(monkeypatch, tmp_path):
    kernels._library.cache_clear()
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n")
    failing.chmod(0o755)
    cases = [
        ("no-compiler", "which CC names, was not found"),
        (str(failing), "failed with the status 3: no such thing"),
        (str(tmp_path), "which CC names, was not found"),
        ("true", "true made no library"),
        ("'", "cannot be read: No closing"),
    ]
    for compiler, text in cases:
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(InputError, match=f"fused=True compiles a few loops, and .*{text}.*. Leave fused=True out"):
            attached(True)
    attached(False)
    kernels._library.cache_clear()


@needed
def test_a_compiler_with_flags_or_blanks_in_its_path(monkeypatch, tmp_path):
    blank = tmp_path / "my compiler"
    blank.symlink_to(shutil.which("cc"))
    for compiler in ("cc -pthread -ffast-math", str(blank), ""):
        kernels._library.cache_clear()
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert not kernels.finite([torch.tensor([1.0, float("nan")])])  # as it would be with -ffast-math
    assert torch.tensor([1e-40]) * 1 > 0  # nor are small numbers flushed to zero from then on
    kernels._library.cache_clear()


@needed
@pytest.mark.parametrize("kept", [True, False])
def test_the_library_is_kept_where_the_cache_can_be_trusted(kept, monkeypatch, tmp_path):
    """And is made for this process alone where it cannot."""
    kernels._library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiling.cache()
    if not kept:
        folder.chmod(0o777)
    kernels.prepare()
    assert len(list(folder.glob("step-*.so"))) == int(kept)
    kernels._library.cache_clear()


@needed
@pytest.mark.parametrize("shape", [(36, 7), (7, 37), (0,)])  # as where another library has put the weights away
def test_parameters_of_another_shape_are_not_written_beyond_their_end(shape):
    model, optimizer, _, handle = attached(True)
    train(model, optimizer, 1)
    optimizer.state.clear()
    model[0].weight.data = torch.zeros(shape)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="size"):  # torch's, as without the loops
        optimizer.step()
    handle.handles.clear()


def test_what_has_its_numbers_elsewhere_does_not_fit():
    class Own(torch.Tensor):
        pass

    plain = torch.ones(2)
    assert kernels.fits([plain], [plain], [None])
    assert not kernels.fits([plain], [torch.ones(3)])
    for other in (plain.as_subclass(Own), torch._neg_view(plain), torch.ones(2, device="meta"), torch.ones(4)[::2]):
        assert not kernels.fits([plain], [other])
        assert not kernels.fits([other])


@needed
def test_a_copy_needs_no_compiler(monkeypatch):
    model, optimizer, q, _ = attached(True)
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save((model, q), file)
    file.seek(0)
    monkeypatch.setenv("CC", "no-compiler")
    kernels._library.cache_clear()
    x = torch.ones(2, 7)
    found = [other.predict(x) for other in (torch.load(file, weights_only=False)[1], copy.deepcopy(q))]
    monkeypatch.undo()
    for one in found:
        torch.testing.assert_close(one, q.predict(x), rtol=0, atol=1e-6)


@needed
def test_another_attachment_may_do_without():
    model, optimizer, q, handle = attached(True)
    assert all(family.fused for family in q.each())
    handle.remove()
    torchngvi.attach(optimizer, q, steps=5, curvature=SampledLabels())
    assert not any(family.fused for family in q.each())
