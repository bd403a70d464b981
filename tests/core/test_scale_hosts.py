"""Models of GPyTorch and Pyro over two processes: equal to one, and every fault one sentence on both."""

import re

import pytest
import scale_hosts as cases
import torch

SECONDS = 2.0  # within which a fault is told


def both(ranks, name, *arguments):
    first, second = ranks.values(f"scale_hosts.{name}", *arguments)
    assert torch.equal(first["q"], second["q"])
    assert str(first.get("reason")) == str(second.get("reason"))
    return first, getattr(cases, name)(None, *arguments)


def assert_close(left, right, bound):
    assert float((left - right).abs().max()) <= bound * max(1.0, float(right.abs().max()))


@pytest.mark.accuracy
@pytest.mark.parametrize(("kind", "bound"), [("gaussian", 1e-12), ("bernoulli", 1e-11)])
def test_training_of_a_sparse_gp(ranks, kind, bound):
    """q and hyper-parameters after three epochs, the last round of which one rank has no batch for; three sums a step.

    K_ZZ magnifies rounding, the more so the wider the kernel becomes.
    """
    pytest.importorskip("gpytorch")
    two, one = both(ranks, "svgp", kind)
    assert_close(two["q"], one["q"], bound)
    assert_close(two["losses"], one["losses"], 1e-12)
    assert two["evaluations"] == one["evaluations"] == 15
    rounds = 5 + 1  # of an epoch, and that in which nobody has a batch
    assert two["sums"] <= 3 * (2 * 5 + rounds) + 15  # and where the length of a sum is new, and at the start


@pytest.mark.accuracy
def test_training_goes_on_from_the_file_of_the_leader(ranks, tmp_path):
    pytest.importorskip("gpytorch")
    whole = ranks.values("scale_hosts.svgp", "gaussian", 3)
    ranks.values("scale_hosts.svgp", "gaussian", 2, str(tmp_path))
    resumed = ranks.values("scale_hosts.svgp", "gaussian", 3, str(tmp_path))
    for left, right in zip(whole, resumed, strict=True):
        assert torch.equal(left["q"], right["q"])
        assert torch.equal(left["losses"], right["losses"])


@pytest.mark.sparse(2)
@pytest.mark.parametrize("steps", [None, 12])
def test_a_guide_of_pyro_with_its_draws_apart(ranks, steps):
    pytest.importorskip("pyro")
    two, one = both(ranks, "pyro_guide", steps)
    assert_close(two["q"], one["q"], 1e-12)
    assert two["evaluations"] == one["evaluations"]
    assert two["reason"] == one["reason"]


FAULTS = {
    "fault_svgp_rows": "an epoch has 400 rows where num_data is 401: the expected log likelihood would have the wrong",
    "fault_svgp_settings": "all ranks must have the same epochs; got 1 on rank 0, 2 on rank 1.",
    "fault_svgp_kind": "all ranks must have the same likelihood; got GaussianLikelihood on rank 0, BernoulliLikelihood",
    "fault_svgp_refine": "rank 0: refine_svgp passes over all rows in one process, and here they are spread over 2.",
    "fault_svgp_nan": "the negative ELBO of a batch is nan: 10 of 80 targets of this batch are NaN.",
    "fault_svgp_batch": "rank 1: the inducing points have 1 features; got inputs of shape (60, 2).",
    "fault_svgp_moved": "q, or a draw from it, is not the same on all ranks: rank 1 differs from rank 0.",
    "fault_pyro_data": "rank 1: ValueError: no such day",
    "fault_pyro_moved": "q, or a draw from it, is not the same on all ranks: rank 1 differs from rank 0.",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_on_every_rank(ranks, name):
    pytest.importorskip("pyro" if "pyro" in name else "gpytorch")
    found, seconds = ranks.errors(f"scale_hosts.{name}")
    assert found[0] == found[1]
    assert re.match(re.escape(FAULTS[name]), found[0][1]), found[0][1]
    assert found[0][0] == ("RankError" if name == "fault_pyro_data" else "InputError")
    assert seconds < SECONDS


def test_every_fault_is_asserted():
    assert {name for name in dir(cases) if name.startswith("fault_")} == set(FAULTS)
