"""Several processes: a step does not sum over them, and says so."""

import copy
import re
import warnings

import pytest
import torch
from helpers import make_model, make_posterior

from torchngvi import VN
from torchngvi.errors import UnsummedRanksWarning


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


def by_target(opt, q):
    opt.step(make_model())


def by_closure(opt, q):
    opt.step(lambda: make_model().negative_elbo(q))


def by_gradients(opt, q):
    make_model().negative_elbo(q).backward()
    opt.step()


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("way", "lr"), [(by_target, None), (by_target, 0.1), (by_closure, None), (by_closure, 0.1), (by_gradients, 0.1)]
)
def test_the_first_step_of_one_of_several_processes_warns(way, lr):
    q = make_posterior("cholesky")
    opt = VN(q, lr)
    text = (
        "VN: this is one of 2 processes, and a step does not sum over them what the data of each say of q, nor does "
        "DistributedDataParallel. That is right where every process has all the data, or where the gradients of "
        "q.mean_probe and q.root_probe were summed by torch.distributed.all_reduce before step(); otherwise every "
        "process fits its own q to its own data. For rows that are spread over the processes give the step "
        "torchngvi.Sharded(model, num_data)."
    )
    with pytest.warns(UnsummedRanksWarning, match=f"^{re.escape(text)}$") as seen:
        way(opt, q)
    assert [warning.filename for warning in seen] == [__file__]
    way(opt, q)  # once, also for a copy
    other = copy.deepcopy(opt)
    way(other, other.posteriors[0])


def test_a_process_alone_is_not_warned(monkeypatch):
    by_target(VN(make_posterior("cholesky")), None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    by_target(VN(make_posterior("cholesky")), None)


@pytest.mark.usefixtures("two_ranks")
def test_a_target_that_sums_over_the_processes_is_no_reason_to_warn():
    model, q = make_model(), make_posterior("cholesky")
    model.processes = "the default group"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VN(q).step(model)
