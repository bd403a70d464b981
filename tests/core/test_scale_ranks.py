"""Two processes: equal to one, the same bits on both, one sum an evaluation; and every fault one sentence on both."""

import re

import pytest
import scale_cases as cases
import torch

START = 4  # meetings of a fit beside its evaluations: generators, settings, the end; and where its size is a new one
SECONDS = 2.0  # within which a fault is told


def both(ranks, name, *arguments):
    """The case on two ranks, whose q have the same bits, and in one process."""
    first, second = ranks.values(name, *arguments)
    assert torch.equal(first["q"], second["q"])
    for key in ("loss", "evaluations", "reason", "converged"):
        assert str(first.get(key)) == str(second.get(key))
    return first, getattr(cases, name)(None, *arguments)


def assert_close(left, right, bound):
    assert float((left - right).abs().max()) <= bound * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("name", cases.POSTERIORS)
def test_a_fit_to_rows_of_two_ranks_is_that_of_one(ranks, name):
    two, one = both(ranks, "rows", name)
    assert_close(two["q"], one["q"], 1e-12)
    assert two["reason"] == one["reason"]
    assert two["evaluations"] == one["evaluations"]
    assert 0 <= two["evaluations"] + START - two["sums"] <= 1


@pytest.mark.parametrize("cut", [667, cases.ROWS])
def test_the_second_order_adds_up(ranks, cut):
    """Also where a rank has no rows."""
    first, second = ranks.values("second_order", cut)
    assert torch.equal(first, second)
    assert_close(first, cases.second_order(None, cut), 1e-13)


@pytest.mark.sparse(3)
@pytest.mark.parametrize("cut", [667, cases.ROWS])
@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_spread_rows_begin_at_the_mode(ranks, family, cut):
    two, one = both(ranks, "from_the_mode", family, cut)
    assert_close(two["q"], one["q"], 1e-7)
    assert two["evaluations"] <= 8


@pytest.mark.parametrize("kind", ["rows", "streamed"])
@pytest.mark.parametrize("name", cases.POSTERIORS)
def test_packets_add_up(ranks, name, kind):
    first, second = ranks.values("packet", name, kind)
    assert torch.equal(first, second)
    assert_close(first, cases.packet(None, name, "rows"), 1e-13)


@pytest.mark.parametrize("name", ["cholesky", "diagonal"])
def test_batches_of_files_on_two_ranks(ranks, name):
    two, one = both(ranks, "rows_of_batches", name)
    assert_close(two["q"], one["q"], 1e-12)
    assert two["sums"] <= two["evaluations"] + START + 4  # those of Sharded itself


@pytest.mark.parametrize(
    "case",
    [("rows", "cholesky", cases.ROWS), ("sorted_rows",), ("batch_of_posteriors",)],
    ids=["a rank without rows", "a class on each rank", "several posteriors on the same rows"],
)
def test_rows_that_are_spread_otherwise(ranks, case):
    two, one = both(ranks, *case)
    assert_close(two["q"], one["q"], 1e-12)


def test_members_of_a_batch_apart(ranks):
    two, one = both(ranks, "members")
    assert torch.equal(two["q"], one["q"])


def test_a_log_joint_in_batches(ranks):
    two, one = both(ranks, "data_log_joint")
    assert_close(two["q"], one["q"], 1e-12)
    assert two["evaluations"] == one["evaluations"]
    assert 0 <= two["sums"] - two["evaluations"] <= 1  # once more for a new size


@pytest.mark.accuracy
@pytest.mark.parametrize("name", ["whole_log_joint", "draws", "data_in_batches_by_draws"])
def test_a_whole_fit_of_a_log_joint(ranks, name):
    """By rows and by draws; the start has finite differences, which rounding moves."""
    two, one = both(ranks, name)
    assert_close(two["q"], one["q"], 1e-9)
    assert two["reason"] == one["reason"]


def test_an_examination_on_two_ranks_is_that_on_one(ranks):
    """The check after a fit asks for the same calls, and has the same word."""
    two, one = both(ranks, "examined")
    assert two["word"] == one["word"]
    assert two["effort"] == one["effort"]


def test_draws_of_an_estimator_apart(ranks):
    two, one = both(ranks, "stein")
    assert_close(two["q"], one["q"], 1e-13)
    assert 0 <= two["sums"] - two["evaluations"] <= 1


@pytest.mark.parametrize("kind", ["rows", "streamed"])
def test_a_closure_over_the_sharded_loss(ranks, kind):
    two, one = both(ranks, "closure", kind)
    assert_close(two["q"], one["q"], 1e-12)


@pytest.mark.parametrize("name", ["hessian", "dropped_in"])
def test_derivatives_of_sums(ranks, name):
    """Twice differentiated; and gradients of ``loss.backward()``, summed by a hook."""
    two, one = both(ranks, name)
    assert_close(two["q"], one["q"], 1e-12)


def test_callbacks_are_those_of_the_leader(ranks):
    first, second = ranks.values("callback", 0)
    one = cases.callback(None, 0)
    assert first["callbacks"] == one["callbacks"] == [1, 2, 3]
    assert second["callbacks"] == []
    assert first["reason"] == second["reason"] == one["reason"]
    assert torch.equal(first["q"], second["q"])
    assert_close(first["q"], one["q"], 1e-12)
    assert ranks.values("callback", 1)[0]["converged"]


@pytest.mark.parametrize("most", [1000, 2])
def test_an_error_of_a_callback_is_raised_on_all(ranks, most):
    """Also at the last record of a run."""
    (first, second), seconds = ranks.errors("failing_callback", most)
    assert first == ("OSError", "no space left")
    assert second == ("RankError", "rank 0: OSError: no space left")
    assert seconds < SECONDS


@pytest.mark.parametrize("name", ["interrupted", "interrupted_in_a_callback"])
def test_an_interrupt_on_one_rank_ends_all(ranks, name):
    first, second = ranks.values(name)
    assert first["reason"] == second["reason"] == "because it was interrupted."
    assert first["evaluations"] == second["evaluations"] == 3
    assert torch.equal(first["q"], second["q"])


def test_the_clock_is_the_leaders(ranks):
    first, second = ranks.values("out_of_time")
    assert first["reason"] == second["reason"]
    assert first["reason"].startswith("because the budget of 1e-09 seconds is used up")


def test_nan_on_one_rank_is_nan_on_all(ranks):
    two, one = both(ranks, "nan_on_one_rank")
    assert two["reason"] == one["reason"]
    assert "the negative ELBO is nan at this q" in two["reason"]


def test_a_log_joint_that_fails_on_one_rank_is_survived(ranks):
    first, second = ranks.values("raises_now_and_then")
    assert torch.equal(first["q"], second["q"])
    assert first["reason"] == second["reason"]


def test_only_the_leader_has_a_file_and_all_go_on_from_it(ranks, tmp_path):
    """Bit for bit as if it had not been cut; one process goes on from what two have written."""
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder in folders:
        folder.mkdir()
    whole = ranks.values("with_checkpoint", str(folders[0]), 1000)
    assert not ranks.values("with_checkpoint", str(folders[1]), 4)[0]["converged"]
    assert [path.name for path in folders[1].iterdir()] == ["run.pt"]
    resumed = ranks.values("with_checkpoint", str(folders[1]), 1000)
    for left, right in zip(whole, resumed, strict=True):
        assert torch.equal(left["q"], right["q"])
        assert left["evaluations"] == right["evaluations"]
        assert left["trace"] == right["trace"]
    alone = cases.with_checkpoint(0, str(folders[0]), 1000, cut=cases.ROWS)
    assert alone["trace"][:-1] == whole[0]["trace"][:-1]  # the last evaluation is made again
    assert_close(alone["q"], whole[0]["q"], 1e-12)


def test_a_checkpoint_that_cannot_be_written_is_refused_on_all(ranks):
    found, seconds = ranks.errors("bad_checkpoint", "/nowhere/run.pt")
    assert found[0] == found[1]
    assert found[0][1].startswith("rank 0: the checkpoint /nowhere/run.pt is in a folder that does not exist.")
    assert seconds < SECONDS


SAME = "q, or a draw from it, is not the same on all ranks: rank 1 differs from rank 0. Start every rank from the same"
FAULTS = {
    "fault_prior": "all ranks must have the same prior; got precision 1 on rank 0, precision 2 on rank 1.",
    "fault_dtype": "all ranks must have the same dtype; got torch.float64 on rank 0, torch.float32 on rank 1.",
    "fault_family": "all ranks must have the same likelihood; got BernoulliLogit on rank 0, BernoulliProbit on rank 1.",
    "fault_columns": "all ranks must have the same number of coefficients; got 6 on rank 0, 5 on rank 1.",
    "fault_classes": "all ranks must have the same classes; got (0.0, 1.0) on rank 0, (1.0, 2.0) on rank 1. Name them",
    "fault_rows": "the parts have 2001 rows together (700, 1301), where num_data is 2002: give every row to one rank.",
    "fault_no_rows": "no rank has any rows. Pass a model on those that have some.",
    "fault_one_class": "rank 1: a Bernoulli family needs two classes in y; every one of the 600 targets is 0.",
    "fault_threads": "all ranks must have the same number of threads (torch.set_num_threads); got 1 on rank 0, 2 on",
    "fault_settings": "all ranks must have the same stop; got NormBelow(tolerance=1e-05) | Stalled(steps=30)",
    "fault_q": SAME,
    "fault_q_between": SAME,
    "fault_batch": SAME,
    "fault_seeds": SAME,
    "fault_draws": SAME,
    "fault_shape": "rank 1: the model has 6 coefficients and q has 7; build q with dim=6.",
    "fault_raises": "rank 1: ZeroDivisionError: no such row",
    "fault_places": "the ranks are at different places of the program: rank 1 differs from rank 0.",
    "fault_sizes": "the ranks sum different numbers of entries, 3 on rank 0: rank 1 differs from rank 0.",
    "fault_kind": "rank 1: Sharded takes a model whose data add up, with its prior apart; got LogJoint.",
    "fault_twice": "rank 0: ShardedTractable is evaluated by several processes already. Wrap it once.",
    "fault_alone": "DataLogJoint needs a part on every rank: a rank without rows is told the prior only where it is",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_on_every_rank(ranks, name):
    found, seconds = ranks.errors(name)
    assert found[0] == found[1]
    assert re.match(re.escape(FAULTS[name]), found[0][1]), found[0][1]
    assert found[0][0] == ("RankError" if name == "fault_raises" else "InputError")
    assert seconds < SECONDS


def test_a_file_that_is_missing_on_one_rank(ranks):
    found, seconds = ranks.errors("fault_file", "day_2.npy")
    assert found == [("RankError", "rank 1: FileNotFoundError: there is no day_2.npy")] * 2
    assert seconds < SECONDS


def test_every_fault_is_asserted():
    assert {name for name in dir(cases) if name.startswith("fault_")} == {*FAULTS, "fault_file"}


def test_ranks_are_brought_together(ranks):
    first, second = ranks.values("synchronized")
    assert torch.equal(first["q"], second["q"])
    assert first["converged"]
    draws = ranks.values("same_draws")
    assert draws[0] == draws[1]
