"""A run that is killed goes on from its checkpoint as if nothing had happened."""

import errno
import io
import os
import random
from pathlib import Path

import pytest
import torch
from helpers import make_model, make_posterior, same_bits

from torchngvi import SRVN, VN, CholeskyGaussian, Constant, DataLogJoint, GeneralizedLinear, KLRadius, Stein, fit
from torchngvi.errors import CheckpointWarning, InputError
from torchngvi.expectations import Antithetic
from torchngvi.fitting import checkpoints
from torchngvi.fitting.checkpoints import describe_optimizer, describe_problem, fingerprint
from torchngvi.registry import POSTERIORS
from torchngvi.rules import SiteNewton


def file_of(path, q, target, optimizer):
    """The checkpoint of a fit with this optimizer."""
    settings = {**describe_problem(q, target), **describe_optimizer(optimizer)}
    return checkpoints.Checkpoint(path, settings, q.mean_probe.device)


class KilledError(Exception):
    pass


def kill_at(count):
    def callback(record):
        if record.evaluations == count:
            raise KilledError

    return callback


METHODS = {
    "default": lambda q: VN(q),
    "srvn": lambda q: SRVN(q),
    "radius": lambda q: VN(q, step_size=KLRadius(0.5)),
    "stein": lambda q: VN(q, lr=0.1, estimator=Stein(Antithetic(8, torch.Generator().manual_seed(5)))),
}


@pytest.mark.sparse(5)
@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("every", [1, 3])
def test_resume_is_exact(tmp_path, name, method, every):
    if (method, name) == ("srvn", "natural"):
        pytest.skip("SRVN updates a root")
    model, file = make_model(), tmp_path / "run.pt"

    def run(q, **options):
        return fit(q, model, METHODS[method](q), tolerance=1e-9, max_evaluations=14, progress=False, **options)

    whole = make_posterior(name)
    expected = run(whole)
    with pytest.raises(KilledError):
        run(make_posterior(name), checkpoint=file, checkpoint_every=every, callbacks=[kill_at(8)])
    q = make_posterior(name, seed=1)  # another start: the checkpoint decides
    result = run(q, checkpoint=file, checkpoint_every=every)

    assert same_bits(q, whole)
    assert [record[:-1] for record in result.trace] == [record[:-1] for record in expected.trace]
    assert result.reason == expected.reason
    seconds = [record.seconds for record in result.trace]
    assert seconds == sorted(seconds)


def test_a_finished_run_is_not_run_again(tmp_path):
    model, file = make_model(), tmp_path / "run.pt"
    first = fit(make_posterior("cholesky"), model, progress=False, checkpoint=file)
    q = make_posterior("cholesky", seed=1)
    again = fit(q, model, progress=False, checkpoint=file)
    assert again.converged
    assert again.loss == first.loss
    assert [record[:-1] for record in again.trace] == [record[:-1] for record in first.trace]


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model, file = make_model(), tmp_path / "run.pt"
    fit(make_posterior("cholesky"), model, progress=False, checkpoint=file, max_evaluations=4)
    before = file.read_bytes()

    def killed(old, new):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("torchngvi.fitting.checkpoints._checked", Path)
        patch.setattr(os, "replace", killed)
        with pytest.raises(KilledError):
            fit(make_posterior("cholesky"), model, progress=False, checkpoint=file, checkpoint_every=1)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_place_that_cannot_be_written(tmp_path):
    """Before the first evaluation, not after the last."""
    model, q = make_model(), make_posterior("cholesky")
    file = tmp_path / "runs" / "run.pt"
    with pytest.raises(InputError) as error:
        fit(q, model, progress=False, checkpoint=file)
    assert str(error.value) == (
        f"the checkpoint {file} is in a folder that does not exist. Name a file in a folder that exists."
    )
    with pytest.raises(InputError, match=r"is a folder\. Name a file in a folder that exists\.$"):
        fit(q, model, progress=False, checkpoint=tmp_path)
    assert torch.equal(q.mean, make_posterior("cholesky").mean)


def one_step(q, target, optimizer, file, **options):
    return fit(q, target, optimizer, progress=False, checkpoint=file, **options)


def written(file, make, target=None, **options):
    q = make_posterior("cholesky")
    one_step(q, make_model() if target is None else target, make(q), file, max_evaluations=3, **options)


def refused(file, make, text, target=None):
    """In that sentence, with the file and q as they were."""
    q, before = make_posterior("cholesky", seed=1), file.read_bytes()
    with pytest.raises(InputError, match=text):
        one_step(q, make_model() if target is None else target, make(q), file)
    assert file.read_bytes() == before
    assert same_bits(q, make_posterior("cholesky", seed=1))


def by_rate(q):
    return VN(q, lr=0.1)


OTHERS = {
    "lr": (lambda q: VN(q, lr=0.5), r"its lr is \[0\.1\], here it is \[0\.5\]\. Remove it, or name another file\.$"),
    "trials": (
        lambda q: VN(q),
        r"its step_size is KLRadius\(radius=0\.2\), here it is SufficientDecrease\(decrease=0\.1, grow=4",
    ),
    "radius": (
        lambda q: VN(q, lr=0.1, step_size=KLRadius(2.0)),
        r"is KLRadius\(radius=0\.2\), here it is KLRadius\(radius=2\.0\)",
    ),
    "printed": (lambda q: VN(q, lr=0.1, step_size=Constant()), r"is KLRadius\(radius=0\.2\), here it is Constant\("),
    "method": (lambda q: SRVN(q, lr=0.1), "its rule is VariationalNewton|its method is VN, here it is SRVN"),
    "momentum": (lambda q: VN(q, lr=0.1, loss_scale=2.0), r"its loss_scale is \[1\.0\], here it is \[2\.0\]"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_settings_are_refused(tmp_path, other):
    file = tmp_path / "run.pt"
    written(file, by_rate)
    make, text = OTHERS[other]
    refused(file, make, text)


def test_other_draws_are_refused(tmp_path):
    file, f = tmp_path / "run.pt", make_model().log_joint
    written(file, lambda q: VN(q, lr=0.1, estimator=Stein(8)), f)
    refused(
        file, lambda q: VN(q, lr=0.1, estimator=Stein(16)), r"num_samples=8\), unbiased=True\), here it is Stein\(", f
    )


def test_other_data_are_refused_where_a_rate_is_given(tmp_path):
    """By their fingerprint; of a function, by its value; of a function that draws by itself nothing can be said."""
    model, file = make_model(), tmp_path / "run.pt"
    flipped = GeneralizedLinear(model.X, 1 - model.y)
    written(file, by_rate)
    refused(file, by_rate, "its fingerprint of the data is", flipped)
    file.unlink()
    written(file, by_rate, model.log_joint)
    text = (
        r"belongs to another problem: at its q the negative ELBO was \S+, here it is \S+\. Remove it, or name another f"
    )
    refused(file, by_rate, text, flipped.log_joint)
    noise = random.Random(0)
    noisy = lambda theta: model.log_joint(theta) + noise.random()  # noqa: E731
    file.unlink()
    written(file, by_rate, noisy)
    q = make_posterior("cholesky")
    assert len(one_step(q, noisy, by_rate(q), file, max_evaluations=6).trace) == 6


def test_other_data_are_refused_by_growing_averages(tmp_path):
    """Of which the log joint at the start, where all classes are equally likely, says nothing."""
    model, file = make_model(), tmp_path / "run.pt"
    flipped = GeneralizedLinear(model.X, 1 - model.y)
    q = CholeskyGaussian(3, dtype=torch.float64)
    fit(q, model.log_joint, progress=False, checkpoint=file, max_evaluations=3)
    q, start = CholeskyGaussian(3, dtype=torch.float64), CholeskyGaussian(3, dtype=torch.float64)
    with pytest.raises(InputError, match="belongs to another problem: at its q the negative ELBO was"):
        fit(q, flipped.log_joint, progress=False, checkpoint=file)
    assert same_bits(q, start)


@pytest.mark.parametrize("where", ["loader", "sampler"])
def test_generators_of_a_loader_go_on(tmp_path, where):
    """Sums in the order of the batches, which is that of a generator that is nobody's default: to the last bit."""
    x = 1e3 * torch.randn(40, 2, generator=torch.Generator().manual_seed(0))

    def run(file, most):
        own, q = torch.Generator().manual_seed(3), CholeskyGaussian(2)
        sampler = torch.utils.data.RandomSampler(x, generator=own) if where == "sampler" else None
        loader = torch.utils.data.DataLoader(
            x,
            batch_size=8,
            sampler=sampler,
            shuffle=True if sampler is None else None,
            generator=own if sampler is None else None,
        )
        target = DataLogJoint(
            lambda theta, rows: -(rows * theta[:, None]).tanh().sum((-1, -2)),
            lambda theta: -0.5 * theta.square().sum(-1),
            loader,
            40,
        )
        torch.manual_seed(5)
        fit(q, target, VN(q, lr=0.1), max_evaluations=most, progress=False, checkpoint=file, checkpoint_every=1)
        return q, own.get_state()

    whole, state = run(tmp_path / "whole.pt", 6)
    run(tmp_path / "run.pt", 3)
    resumed, again = run(tmp_path / "run.pt", 6)
    assert torch.equal(state, again)
    assert same_bits(whole, resumed)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_fingerprints_of_sparse_data():
    X = torch.eye(3).to_sparse_csr()
    assert fingerprint([X]) == fingerprint([torch.eye(3).to_sparse_csr()])
    assert len({fingerprint([x]) for x in (X, 2 * X, torch.eye(3), torch.eye(3).double(), torch.eye(3)[:2])}) == 5


def test_another_dtype_is_refused(tmp_path):
    file, q = tmp_path / "run.pt", make_posterior("cholesky", dtype=torch.float32)
    one_step(q, make_model(dtype=torch.float32), VN(q), file, max_evaluations=3)
    refused(file, VN, r"its posterior mean is \(3,\) float32, here it is \(3,\) float64")


def test_a_longer_or_stricter_run_goes_on(tmp_path):
    """The budget and the tolerance say when to end, not where to go."""
    file, q = tmp_path / "run.pt", make_posterior("cholesky")
    written(file, VN, tolerance=0.1)
    assert one_step(q, make_model(), VN(q), file, tolerance=1e-6).converged


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # at the first record nothing was stepped
def test_a_schedule_goes_on(tmp_path):
    """The rate in the file is the one it was built with; the one it has reached comes back."""
    file = tmp_path / "run.pt"
    for budget in (4, 8):
        q = make_posterior("cholesky")
        optimizer = by_rate(q)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        one_step(q, make_model(), optimizer, file, max_evaluations=budget, callbacks=[lambda _, s=schedule: s.step()])
        one_step(q, make_model(), optimizer, file, max_evaluations=budget)  # the same optimizer once more
    assert optimizer.param_groups[0]["lr"] < 0.1 * 0.5**4


def test_rates_of_numpy(tmp_path):
    """What `torch.load` would refuse is written as a number of Python."""
    numpy, file = pytest.importorskip("numpy"), tmp_path / "run.pt"
    written(file, lambda q: VN(q, lr=numpy.float64(0.1)))
    q = make_posterior("cholesky")
    assert len(one_step(q, make_model(), by_rate(q), file, max_evaluations=5).trace) == 5


def test_the_memory_of_newton_steps_resumes(tmp_path):
    """Booleans come back as booleans."""
    model, ends = make_model(), []
    for budgets in ((20,), (3, 20)):
        for budget in budgets:
            q = make_posterior("cholesky")
            file = tmp_path / f"{len(budgets)}.pt"
            one_step(q, model, VN(q, metric=SiteNewton(model)), file, max_evaluations=budget)
        ends.append(q)
    assert same_bits(*ends)


def tensors(state):
    """Of nested dicts."""
    return [t for value in state.values() for t in (tensors(value) if isinstance(value, dict) else [value])]


def test_what_was_captured_stays(tmp_path):
    q = make_posterior("cholesky")
    optimizer = VN(q)
    file = file_of(tmp_path / "run.pt", q, make_model(), optimizer)
    optimizer.step(make_model())
    state = file.captured(posterior=q.state_dict(), optimizer=optimizer.state_dict())
    before = [
        *(t.clone() for t in state["posterior"].values()),
        *(t.clone() for t in tensors(state["optimizer"]["state"][0])),
    ]
    optimizer.step(make_model())
    after = [*state["posterior"].values(), *tensors(state["optimizer"]["state"][0])]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not same_bits(q, state["posterior"].values())


@pytest.mark.accuracy
def test_every_damage_is_told(tmp_path):
    """Cut at any place, and with any byte changed."""
    file = tmp_path / "run.pt"
    written(file, VN)
    whole = file.read_bytes()
    q, model = make_posterior("cholesky"), make_model()
    damaged = [whole[:size] for size in range(0, len(whole), 101)]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 103)]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(
            InputError,
            match=r"is damaged: it is not as it was|is no checkpoint of this version|is a checkpoint of format",
        ):
            one_step(q, model, VN(q), file)
    assert same_bits(q, make_posterior("cholesky"))


def in_a_whole_file(path, content):
    """With a digest that is right."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    content = buffer.getvalue()
    path.write_bytes(b"torchngvi checkpoint, format 4\n" + checkpoints._digest(content) + content)


def without(whole, *names):
    *above, last = names
    part = whole
    for name in above:
        part = part[name]
    del part[last]
    return whole


def with_state(whole, **changed):
    whole["state"].update(changed)
    return whole


UNUSABLE = {
    "a bare tensor": (lambda whole: torch.ones(3), "a Tensor in the place of named parts"),
    "a list": (lambda whole: [1], "a list in the place of named parts"),
    "no settings": (lambda whole: without(whole, "settings"), "settings is missing"),
    "no state": (lambda whole: without(whole, "state"), "state is missing"),
    "settings of numbers": (lambda whole: {**whole, "settings": {"lr": 1.0}}, "settings has another form"),
    "a state that is a tensor": (lambda whole: {**whole, "state": torch.ones(3)}, "state has another form"),
    "a short record": (lambda whole: with_state(whole, trace=[(1, 2.0)]), "trace has another form"),
    "records that are tensors": (lambda whole: with_state(whole, trace=torch.ones(7)), "trace has another form"),
    "a record of texts": (lambda whole: with_state(whole, trace=[("a",) * 7]), "trace has another form"),
    "one number spent": (lambda whole: with_state(whole, spent=(3,)), "spent has another form"),
    "a loss that is no tensor": (lambda whole: with_state(whole, loss=1.0), "loss has another form"),
    "no state of a generator": (lambda whole: with_state(whole, generators={}), "generators has another form"),
    "seconds that are a text": (lambda whole: with_state(whole, seconds="1"), "seconds has another form"),
    "callbacks of a number": (lambda whole: with_state(whole, callbacks=1), "callbacks has another form"),
    **{
        f"no {key}": (lambda whole, key=key: without(whole, "state", key), f"{key} is missing")
        for key in ("begun", "loss", "spent", "seconds", "trace", "stop", "callbacks", "generators")
    },
    **{
        f"no {key}": (lambda whole, key=key: without(whole, "state", key), f"KeyError: '{key}'")
        for key in ("step", "stalled", "remedy", "first_loss", "posterior", "optimizer")
    },
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_whole_file_without_what_the_run_needs(tmp_path, case):
    make, why = UNUSABLE[case]
    path = tmp_path / "run.pt"
    written(path, VN)
    content = path.read_bytes().partition(b"\n")[2][checkpoints._DIGEST :]
    in_a_whole_file(path, make(torch.load(io.BytesIO(content), weights_only=True)))
    refused(path, VN, rf"run\.pt does not hold what this run needs \({why}\)\. Remove it, or name another file\.$")


@pytest.mark.parametrize("key", ["descent", "seed", "looked", "gradients", "spent", "trace"])
def test_growing_averages_without_what_the_run_needs(tmp_path, key):
    path, q, target = tmp_path / "run.pt", make_posterior("cholesky"), make_model().log_joint
    fit(q, target, progress=False, checkpoint=path, max_evaluations=3)
    content = path.read_bytes().partition(b"\n")[2][checkpoints._DIGEST :]
    in_a_whole_file(path, without(torch.load(io.BytesIO(content), weights_only=True), "state", key))
    with pytest.raises(
        InputError, match=rf"does not hold what this run needs \((KeyError: '{key}'|{key} is missing)\)"
    ):
        fit(make_posterior("cholesky"), target, progress=False, checkpoint=path)


def test_a_loss_of_another_shape(tmp_path):
    path = tmp_path / "run.pt"
    written(path, VN)
    content = path.read_bytes().partition(b"\n")[2][checkpoints._DIGEST :]
    whole = with_state(torch.load(io.BytesIO(content), weights_only=True), loss=torch.ones(3, 2))
    in_a_whole_file(path, whole)
    refused(
        path, VN, r"run\.pt belongs to another problem: at its q the negative ELBO was 6, here it is .*\. Remove it"
    )


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    file = tmp_path / "run.pt"
    written(file, VN)

    def denied(self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    q = make_posterior("cholesky")
    with pytest.raises(InputError, match=r"run.pt cannot be read \(Permission denied\)\. Name another file\.$"):
        one_step(q, make_model(), VN(q), file)


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    """All refused before the first evaluation, also a folder that may only be read."""
    q = make_posterior("cholesky")

    def never(*_):
        raise AssertionError

    monkeypatch.setattr(VN, "evaluate", never)
    for path, text in {
        tmp_path / "a\0b": r"checkpoint is the path of a file, or None; got .*a\\x00b.*\. A path holds no null char",
        tmp_path
        / ("x" * 300): r"cannot be written \(File name too long\)\. Name a file in a folder that can be written",
        Path(os.devnull): r"the checkpoint /dev/null is no regular file\. Name a file in a folder of ordinary files\.$",
        Path("/proc/run.pt"): r"run.pt cannot be written \(.*\)\. Name a file in a folder that can be written into\.$",
        3: r"^checkpoint is the path of a file, or None; got 3\.$",
    }.items():
        with pytest.raises(InputError, match=text):
            one_step(q, make_model(), VN(q), path)
        with pytest.raises(InputError, match=text):
            fit(q, make_model().log_joint, progress=False, checkpoint=path)

    def denied(self, *_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(
        InputError, match=r"cannot be written \(Permission denied\)\. Name a file in a folder that can be"
    ):
        one_step(q, make_model(), VN(q), tmp_path / "run.pt")


def test_no_link_is_followed_and_no_name_is_shared(tmp_path, monkeypatch):
    """The file is on the disk before it takes the name, and its folder after."""
    file, victim, done, names = tmp_path / "run.pt", tmp_path / "victim", [], []
    victim.write_text("precious")
    (tmp_path / "run.pt.new").symlink_to(victim)
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("replace"), names.append(old), replace(old, new)))
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    written(file, VN)
    written(tmp_path / "other.pt", VN)
    assert victim.read_text() == "precious"
    assert done == ["fsync", "replace", "fsync"] * (len(done) // 3)
    assert len(set(names)) == len(names) >= 4
    assert {path.parent for path in names} == {tmp_path}
    file.unlink()
    file.symlink_to(victim)
    checkpoints.write_whole(file, b"new")
    assert victim.read_text() == "precious"
    assert not file.is_symlink()


def test_a_link_under_the_temporary_name(tmp_path, monkeypatch):
    victim, file = tmp_path / "victim", tmp_path / "run.pt"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / "run.pt.known.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        checkpoints.write_whole(file, b"new")
    assert victim.read_text() == "precious"
    assert not file.exists()


@pytest.mark.parametrize("how", ["trials", "growing averages"])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, how):
    """At the last write, as at any other: a warning, the result, and the earlier file."""
    file, model = tmp_path / "run.pt", make_model()
    q = make_posterior("cholesky")
    target, optimizer = (model, VN(q)) if how == "trials" else (model.log_joint, None)
    replaced, replace = [], os.replace

    def full(old, new):
        replaced.append(1)
        if len(replaced) > 2:  # the first is a trial
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        text = (
            r"^the checkpoint \S+run.pt could not be written \(No space left on device\); the earlier one stays, and "
            r"the run goes on\.$"
        )
        with pytest.warns(CheckpointWarning, match=text):
            result = fit(q, target, optimizer, progress=False, checkpoint=file)
    assert result.converged
    assert len(replaced) > 2
    assert list(tmp_path.iterdir()) == [file]
    other = make_posterior("cholesky")
    again = fit(other, target, VN(other) if how == "trials" else None, progress=False, checkpoint=file)
    assert again.converged
    assert same_bits(q, other)
