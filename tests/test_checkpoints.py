"""A run that is killed goes on from its checkpoint as if nothing had happened."""

import os
from pathlib import Path

import pytest
import torch
from small_problems import POSTERIORS, make_model, make_posterior, same_bits

from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, KLRadius, LogJoint, Stein, fit
from torchngvi.errors import InputError
from torchngvi.expectations import Antithetic


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
        patch.setattr("torchngvi.checkpoints._checked", Path)
        patch.setattr(os, "replace", killed)
        with pytest.raises(KilledError):
            fit(make_posterior("cholesky"), model, progress=False, checkpoint=file, checkpoint_every=1)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_checkpoints_of_something_else(tmp_path):
    model, file = make_model(), tmp_path / "run.pt"
    other = CholeskyGaussian(5, dtype=torch.float64)
    target = LogJoint(lambda theta: -theta.square().sum(-1))
    fit(other, target, VN(other, lr=0.1), max_evaluations=3, progress=False, checkpoint=file)
    q = make_posterior("cholesky")
    text = (
        f"{file} is the checkpoint of another run: its posterior mean is (5,) float64, here it is (3,) float64. "
        "Remove it, or name another file."
    )
    with pytest.raises(InputError) as error:
        fit(q, target, VN(q, lr=0.1), progress=False, checkpoint=file)
    assert str(error.value) == text
    with pytest.raises(InputError, match="its target is LogJoint, here it is GeneralizedLinear. Remove it, or name an"):
        fit(q, model, progress=False, checkpoint=file)


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


def test_checkpoints_of_another_problem_or_method(tmp_path):
    model, file = make_model(), tmp_path / "run.pt"
    fit(make_posterior("cholesky"), model, progress=False, checkpoint=file)
    other = GeneralizedLinear(model.X, -model.y, prior_precision=2.0)
    with pytest.raises(
        InputError,
        match=r"run\.pt is the checkpoint of another run: its fingerprint of the data is [0-9a-f]{16}, here it is "
        r"[0-9a-f]{16}\. Remove it, or name another file\.$",
    ):
        fit(make_posterior("cholesky"), other, progress=False, checkpoint=file)
    q = make_posterior("cholesky")
    with pytest.raises(InputError) as error:
        fit(q, model, SRVN(q), progress=False, checkpoint=file)
    assert str(error.value) == (
        f"{file} is the checkpoint of another run: its method is VN, here it is SRVN. Remove it, or name another file."
    )


def test_the_interval_must_be_positive():
    with pytest.raises(InputError, match="^checkpoint_every counts steps and must be at least 1; got 0.$"):
        fit(make_posterior("cholesky"), make_model(), progress=False, checkpoint_every=0)
