"""Runs that are cut off, at any line and at any moment, go on as if nothing had happened."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import make_model, make_posterior, same_bits

from torchngvi import SRVN, VN, CholeskyGaussian, NaturalGradientVI, Stein
from torchngvi.errors import InputError
from torchngvi.stepsizes import Constant

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from helpers import quiet

from benchmarks.interruptions import KINDS, lines  # noqa: E402

ROOT = Path(__file__).parents[2]
EVERY = 331  # line events from one interrupt to the next; the benchmark does all


def cut_in_step(monkeypatch, optimizer, number):
    """A KeyboardInterrupt right after the optimizer has moved q for the n-th time."""
    step, count = type(optimizer).step, []

    def cut(self, target, **options):
        loss = step(self, target, **options)
        count.append(1)
        if len(count) == number:
            raise KeyboardInterrupt
        return loss

    monkeypatch.setattr(type(optimizer), "step", cut)


@pytest.mark.parametrize("method", [VN, lambda q: SRVN(q, lr=0.1)])
@pytest.mark.parametrize("every", [1, 2, 100])
def test_an_interrupt_after_a_step_leaves_what_was_written(tmp_path, monkeypatch, method, every):
    """What is written on an interrupt is what stood before the step, and not the tensors that the step has moved."""
    model, whole, file = make_model(), make_posterior("cholesky"), tmp_path / "run.pt"
    options = {"tolerance": 1e-6, "max_evaluations": 12}
    expected = quiet(whole, model, method(whole), **options)
    q = make_posterior("cholesky")
    with monkeypatch.context() as patch:
        optimizer = method(q)
        cut_in_step(patch, optimizer, 4)
        first = quiet(q, model, optimizer, checkpoint=file, checkpoint_every=every, **options)
    assert first.reason == "because it was interrupted."
    assert [record[:-1] for record in first.trace] == [record[:-1] for record in expected.trace[:4]]
    with torch.no_grad():  # q is that of the result
        assert first.loss == float(model.negative_elbo(q))
    q = make_posterior("cholesky", seed=1)
    result = quiet(q, model, method(q), checkpoint=file, **options)
    assert same_bits(q, whole)
    assert [record[:-1] for record in result.trace] == [record[:-1] for record in expected.trace]
    assert str(result) == str(expected)


def test_an_interrupt_between_two_buffers_leaves_q_whole(monkeypatch):
    """The mean has moved and the scale has not: q goes back to where it was evaluated."""
    model, q = make_model(), make_posterior("cholesky")
    assign, count = type(q).assign, []

    def half(self, new, where):
        count.append(1)
        if len(count) == 3:
            self.coordinates.vector.copy_(new.vector)
            raise KeyboardInterrupt
        assign(self, new, where)

    monkeypatch.setattr(type(q), "assign", half)
    result = quiet(q, model, VN(q, lr=0.5), max_evaluations=10)
    assert result.reason == "because it was interrupted."
    with torch.no_grad():
        assert result.loss == float(model.negative_elbo(q))


def test_an_interrupt_before_the_first_record_is_a_result(monkeypatch):
    """It says that q was not evaluated; q is as it was."""
    q = make_posterior("cholesky")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(NaturalGradientVI, "evaluate", interrupt)
    result = quiet(q, make_model())
    assert not result.converged
    assert result.reason == "because it was interrupted before q was evaluated."
    assert (result.evaluations, result.trace) == (0, [])
    assert same_bits(q, make_posterior("cholesky"))


class KilledError(BaseException):
    pass


def killing(function, call):
    """The function, and a kill at its n-th call."""
    count = []

    def f(theta):
        count.append(1)
        if len(count) == call:
            raise KilledError
        return function(theta)

    return f


def by_draws(file, call=None, seed=5):
    torch.manual_seed(seed)
    model, q = make_model(), CholeskyGaussian(3, dtype=torch.float64)
    f = model.log_joint if call is None else killing(model.log_joint, call)
    result = quiet(q, f, tolerance=0.05, checkpoint=file)
    return q, [record[:-1] for record in result.trace], str(result)


def same_run(left, right):
    return same_bits(left[0], right[0]) and left[1:] == right[1:]


@pytest.mark.accuracy
def test_a_fit_by_growing_averages_killed_at_every_call(tmp_path):
    """From the search for a start on, by a seed that is in the file, and by one that the second run was given."""
    wanted = by_draws(None)
    for call in range(3, 60, 4):  # the first two ask whether the function draws
        file = tmp_path / f"{call}.pt"
        try:
            by_draws(file, call)
        except KilledError:
            assert file.exists()
        assert same_run(by_draws(file, seed=99), wanted)


@pytest.mark.accuracy
def test_a_fit_by_growing_averages_killed_twice(tmp_path):
    """The second time before it has written anything: the memory of the optimizer is still in the file."""
    wanted, cut = by_draws(None), 0
    for call in range(15, 60, 6):
        file = tmp_path / f"{call}.pt"
        for each in (call, 3):
            try:
                by_draws(file, each)
            except KilledError:
                cut += 1
        assert same_run(by_draws(file, seed=99), wanted)
    assert cut > 4


def test_a_finished_fit_by_growing_averages_ends_as_it_did(tmp_path):
    file = tmp_path / "run.pt"
    first = by_draws(file)
    assert same_run(by_draws(file, seed=99), first)


def test_draws_of_the_default_generator_go_on(tmp_path):
    ends = []
    for cut in (False, True):
        torch.manual_seed(1)
        file, q, model = tmp_path / f"{cut}.pt", make_posterior("cholesky"), make_model()
        options = {"max_evaluations": 12, "checkpoint": file, "checkpoint_every": 2}
        try:
            f = killing(model.log_joint, 8) if cut else model.log_joint
            quiet(q, f, VN(q, lr=0.1, estimator=Stein(8)), **options)
        except KilledError:
            torch.manual_seed(2)
            q = make_posterior("cholesky", seed=1)
            quiet(q, model.log_joint, VN(q, lr=0.1, estimator=Stein(8)), **options)
        ends.append(q)
    assert same_bits(*ends)


@pytest.mark.accuracy
def test_verdicts_over_fresh_evaluations_go_on(tmp_path):
    """What was repeated at the last record is repeated again: the same counts, draws and reason."""
    model = make_model()

    def run(file, stop=None):
        torch.manual_seed(0 if file is None or not file.exists() else 99)
        q = make_posterior("cholesky")
        stops = [lambda record: record.evaluations >= stop] if stop else []
        options = {"tolerance": 0.2, "max_evaluations": 200, "checkpoint": file, "callbacks": stops}
        result = quiet(q, model.log_joint, VN(q, lr=0.1, estimator=Stein(8)), **options)
        return q, [record[:-1] for record in result.trace], str(result)

    wanted = run(None)
    repeated = [b[0] for a, b in itertools.pairwise(wanted[1]) if b[0] > a[0] + 1]
    assert repeated
    for stop in (*repeated, 3):
        file = tmp_path / f"{stop}.pt"
        run(file, stop)
        assert same_run(run(file), wanted)


@pytest.mark.filterwarnings("ignore::torchngvi.errors.RejectedStepWarning")
def test_rejected_steps_in_a_row_go_on_being_counted(tmp_path):
    """A run that is given up after thirty rejected steps is given up after as many, wherever it was cut."""
    model, results = make_model(), []
    for stop in (None, 20, None):
        q = CholeskyGaussian(3, scale=0.1, dtype=torch.float64)
        stops, file = [lambda record, stop=stop: record.evaluations == stop], tmp_path / "run.pt" if results else None
        results.append(quiet(q, model, VN(q, step_size=Constant(5.0)), checkpoint=file, callbacks=stops))
    assert results[0].reason.startswith("because 30 steps in a row were rejected")
    assert results[1].reason.startswith("because a callback stopped it")
    assert results[2].reason == results[0].reason
    assert results[2].trace[-1].rejections == 30


@pytest.mark.accuracy
@pytest.mark.parametrize("kind", KINDS)
def test_a_keyboard_interrupt_at_any_line(tmp_path, kind):
    if kind == "svgp":
        pytest.importorskip("gpytorch")
    first = 1 + list(KINDS).index(kind)
    tried, count, wrong = lines(kind, EVERY, tmp_path, first)
    assert tried >= 8
    assert count > 2000
    assert not wrong


@pytest.mark.accuracy
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forks")
def test_twenty_runs_with_signals():
    """At random moments, of all kinds."""
    pytest.importorskip("gpytorch")
    command = [sys.executable, "benchmarks/interruptions.py", "--small", "--runs", "20"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every run ended as if nothing had happened" in done.stdout


def test_a_refused_checkpoint_leaves_everything_as_it_was(tmp_path):
    file, q = tmp_path / "run.pt", make_posterior("cholesky")
    quiet(q, make_model().log_joint, VN(q, lr=0.1, estimator=Stein(8)), checkpoint=file, max_evaluations=3)
    before, q = file.read_bytes(), make_posterior("cholesky", seed=1)
    optimizer = VN(q, lr=0.1, estimator=Stein(8))
    torch.manual_seed(7)
    generator = torch.get_rng_state()
    with pytest.raises(InputError, match="belongs to another problem: at its q the negative ELBO was"):
        quiet(q, make_model(seed=1).log_joint, optimizer, checkpoint=file)
    assert same_bits(q, make_posterior("cholesky", seed=1))
    assert file.read_bytes() == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert optimizer.rejections == 0
