"""How many operations of torch a step takes: each is a launch on a device, and half its time where rows are few."""

import pytest
from helpers import needs_compile

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks import launches  # noqa: E402

CEILINGS = {
    "moments of logistic rows": 33,
    "evaluation": 57,
    "step of VN, by trial": 196,
    "step of VN, lr = 0.5": 106,
    "step of SRVN, lr = 0.5": 119,
    "step of NGVI, lr = 0.5": 113,
    "step of IFVB, lr = 0.1": 157,
    "eight masked steps of VN, by trial": 8 * 239,
    "step of VN, by trial, of a batch": 199,
    "step of VN, by trial, over a forest": 384,
    "of it, q and its step": 30,
}


@pytest.mark.parametrize("name", CEILINGS)
def test_a_step_takes_no_more_launches(name):
    counts = launches.TABLE[name]().counts
    assert sum(counts.values()) <= CEILINGS[name], counts.most_common()
    assert not counts["_local_scalar_dense"]


@pytest.mark.accuracy
@pytest.mark.filterwarnings("ignore")
@needs_compile
def test_a_compiled_step_is_few_calls():
    for (name, call), most in zip(launches.graphs(), (6, 28), strict=False):  # an evaluation, a step by trial
        assert sum(launches.compiled(call)[::2]) <= most, name
