"""Mixed models whose groups are spread over two processes: equal to one, one sum an evaluation, all faults told."""

import re

import pytest
import scale_mixed as cases
import torch

from torchngvi import Sharded, fit
from torchngvi.errors import InputError
from torchngvi.methods import VN
from torchngvi.models import MixedLogJoint, MixedPrior

START = 6  # meetings of a fit beside its evaluations: generators, checks, groups, settings, a new size, the end
SECONDS = 2.0  # within which a fault is told


def both(ranks, name, *arguments):
    """The case on two ranks, whose globals have the same bits, and in one process."""
    first, second = ranks.values(f"scale_mixed.{name}", *arguments)
    assert torch.equal(first["q"], second["q"])
    for key in ("loss", "evaluations", "reason", "converged", "text"):
        assert str(first.get(key)) == str(second.get(key))
    return first, second, getattr(cases, name)(None, *arguments)


def assert_close(left, right, bound):
    assert float((left - right).abs().max()) <= bound * max(1.0, float(right.abs().max()))


@pytest.mark.accuracy
@pytest.mark.parametrize(("family", "local"), cases.CASES)
def test_the_start_and_the_usual_prior_are_those_of_one(ranks, family, local):
    first, second, one = both(ranks, "begun", family, local)
    assert_close(first["q"], one["q"], 1e-13)
    assert_close(first["prior"], one["prior"], 1e-13)
    assert_close(torch.cat([first["groups"], second["groups"]]), one["groups"], 1e-13)


@pytest.mark.accuracy
@pytest.mark.parametrize(("family", "local"), cases.CASES)
def test_a_gaussian_over_all_coordinates_is_that_of_one(ranks, family, local):
    """One sum an evaluation, whose length does not tell how many groups there are."""
    first, second, one = both(ranks, "over_all", family, local)
    assert first["converged"]
    # centres and scales of columns are sums over ranks, whose rounding the steps of the fit carry on
    assert_close(first["q"], one["q"], 1e-11)
    assert_close(torch.cat([first["groups"], second["groups"]]), one["groups"], 1e-11)
    assert first["evaluations"] == one["evaluations"]
    assert first["evaluations"] + START - 1 <= first["sums"] <= first["evaluations"] + START
    size = 2 + local * (local + 1) // 2
    assert first["numbers"] == 2 + size + size**2


@pytest.mark.parametrize("family", ["poisson_log", "bernoulli_logit", "gaussian"])
@pytest.mark.parametrize("prior", [None, MixedPrior(10.0, "kass-natarajan")])
def test_priors_from_sums_over_processes_are_those_of_rows(family, prior):
    """Here one process: the location and unit of y, the scales of columns, and what rows tell of effects."""
    plain, spread = (make(None, family, 2, prior=prior) for make in (cases.part, cases.spread))
    assert_close(spread.rows.Z, plain.rows.Z, 1e-13)
    for left, right in zip(spread.tensors(), plain.tensors(), strict=True):
        assert_close(left.double(), right.double(), 1e-7)
    theta = torch.linspace(-1, 1, plain.dim, dtype=torch.float64)
    assert_close(spread.log_joint(theta), plain.log_joint(theta), 1e-7)


def test_it_is_the_best_gaussian_of_a_plain_model():
    """The fit over the whole arrow in one process, by other steps."""
    model, spread = cases.part(None, "poisson_log", 1), cases.spread(None, "poisson_log", 1)
    spread.covariance_prior = model.covariance_prior
    q, other = model.posterior(), spread.posterior()
    assert fit(q, model, progress=False, tolerance=1e-8).converged
    assert fit(other, spread, progress=False, tolerance=1e-8).converged
    assert_close(other.mean, q.mean, 1e-8)
    assert_close(other.stddev, q.stddev, 1e-8)


@pytest.mark.accuracy
def test_a_run_goes_on_from_the_file_of_the_leader(ranks, tmp_path):
    """Bit for bit, the effects of all groups in the file; no other number of processes."""
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder in folders:
        folder.mkdir()
    whole = ranks.values("scale_mixed.with_checkpoint", str(folders[0]), 1000)
    assert not ranks.values("scale_mixed.with_checkpoint", str(folders[1]), 4)[0]["converged"]
    resumed = ranks.values("scale_mixed.with_checkpoint", str(folders[1]), 1000)
    for left, right in zip(whole, resumed, strict=True):
        assert torch.equal(left["q"], right["q"])
        assert torch.equal(left["groups"], right["groups"])
        assert left["trace"] == right["trace"]
    with pytest.raises(InputError, match=r"groups of each process"):
        cases.with_checkpoint(None, str(folders[0]), 1000)


FAULTS = {
    "fault_mixed_prior": "all ranks must have the same prior of the random effects; got 3, [[1.0]] on rank 0, 4,",
    "fault_mixed_scale": "all ranks must have the same prior; got precision 0.04 on rank 0, precision 0.0277778 on",
    "fault_mixed_noise": "all ranks must have the same settings of the likelihood; got {'noise': 1.0} on rank 0, {'noi",
    "fault_mixed_effects": "all ranks must have the same number of random effects; got 1 on rank 0, 2 on rank 1.",
    "fault_mixed_family": "all ranks must have the same classes; got () on rank 0, (0.0, 1.0) on rank 1.",
    "fault_mixed_rows": "the parts have 133 rows together (48, 85), where num_data is 136: give every row to one rank.",
    "fault_mixed_none": "MixedLogJoint needs a part on every rank: a rank without rows is told the prior only where",
    "fault_mixed_and_not": "all ranks must have the same model; got MixedLogJoint on rank 0, GeneralizedLinear on",
    "fault_mixed_groups": "rank 1: groups must be numbered 0, ..., n - 1, each with a row; got no row of group 0.",
    "fault_mixed_twice": "rank 0: MixedLogJoint is evaluated by several processes already. Wrap it once.",
    "fault_mixed_q": "q, or a draw from it, is not the same on all ranks: rank 1 differs from rank 0. Start every rank",
    "fault_mixed_raises": "rank 1: TypeError: 'NoneType' object is not callable",
    "fault_mixed_dim": "rank 1: batch_groups needs a q over the arrow of the model, Forest(19 of 1 below 3,",
    "fault_mixed_step": "rank 0: a step or a bound over all coordinates needs all groups in one process, and here they",
    "fault_mixed_places": "the ranks are at different places of the program: rank 1 differs from rank 0.",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_on_every_rank(ranks, name):
    found, seconds = ranks.errors(f"scale_mixed.{name}")
    assert found[0] == found[1]
    assert re.match(re.escape(FAULTS[name]), found[0][1]), found[0][1]
    assert found[0][0] == ("RankError" if name == "fault_mixed_raises" else "InputError")
    assert seconds < SECONDS


def test_every_fault_is_asserted():
    assert {name for name in dir(cases) if name.startswith("fault_")} == set(FAULTS)


def test_one_process_refuses_what_several_refuse():
    """The same script in one process says the same."""
    model = cases.spread(None, "poisson_log", 1)
    q = model.posterior()
    with pytest.raises(InputError, match="over all coordinates needs all groups in one process, and here .* over 1"):
        VN(q).step(model)
    X = torch.ones(4, 1, dtype=torch.float64)
    many = MixedLogJoint(X, torch.ones(2, 4), (X, [0, 0, 1, 1]), "poisson_log")
    with pytest.raises(InputError, match=r"Sharded takes one set of targets y \(N,\); got y of shape \(2, 4\)"):
        Sharded(many, 4)
