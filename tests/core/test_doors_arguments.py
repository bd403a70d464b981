"""Hostile arguments at every door: a sentence, and never the traceback of something inside."""

import runpy
from pathlib import Path

import pytest
import torch
from helpers import make_model, make_posterior

import torchngvi
from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, rules
from torchngvi.errors import InputError

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "hostile_arguments.py"
CASES, SEED = 3000, 0


@pytest.mark.parametrize("cases", [150, pytest.param(CASES, marks=pytest.mark.accuracy)])
def test_a_sample_of_hostile_arguments(cases):
    """Of all doors, arguments and hostile values: works, or refuses with an error of the library."""
    if not BENCHMARK.exists():
        pytest.skip("a wheel has no benchmarks")
    hostile = runpy.run_path(str(BENCHMARK))
    hostile["build"]()
    with hostile["bounded"]():
        ended = [(case, hostile["run"](*case)) for case in hostile["sampled"](cases, SEED)]
    raw = [f"{case} at {outcome.line}: {outcome.error}" for case, outcome in ended if outcome.word == "raw"]
    assert len(ended) == cases
    assert not raw, "\n".join(raw)


def test_the_generator_tells_a_raw_error():
    """A door whose argument nobody checks is counted; one that refuses is not."""
    if not BENCHMARK.exists():
        pytest.skip("a wheel has no benchmarks")
    hostile = runpy.run_path(str(BENCHMARK))
    table, door = hostile["DOORS"], hostile["Door"]
    table["unchecked"] = lambda: door(lambda dim: range(dim), {"dim": 2})
    table["checked"] = lambda: door(CholeskyGaussian, {"dim": 2})
    with hostile["bounded"]():
        words = [hostile["run"](name, "dim", "'x'").word for name in ("unchecked", "checked")]
    assert words == ["raw", "refused"]


X, Y = torch.eye(3, dtype=torch.float64), torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("method", [VN, SRVN])
@pytest.mark.parametrize("momentum", [None, rules.Adam, rules.ExponentialAverage])
def test_a_rate_of_zero_stays(method, momentum):
    """As torch's optimizers take it; a schedule may begin there, and the steps after it are those of its rate."""
    q, model = make_posterior("cholesky"), make_model()
    if momentum is not None:
        method = torchngvi.methods.RootGD
    parts = {} if momentum is None else {"momentum": momentum()}
    optimizer = method(q, lr=0.0, **parts)
    before = [part.clone() for part in q.coordinates]
    for _ in range(2):
        optimizer.step(model)
    assert all(torch.equal(a, b) for a, b in zip(before, q.coordinates, strict=True))
    assert optimizer.rejections == 0
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step(model)
    assert all(bool(part.isfinite().all()) for part in q.coordinates)
    assert not torch.equal(before[0], q.coordinates[0])


def test_a_default_device_without_numbers():
    torch.set_default_device("meta")
    try:
        with pytest.raises(InputError, match='torch.set_default_device\\("meta"\\) is in force; pass device="cpu"'):
            CholeskyGaussian(2)
        assert CholeskyGaussian(2, device="cpu").mean.tolist() == [0.0, 0.0]
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)])
def test_numbers_are_read_from_tensors(value):
    assert GeneralizedLinear(X, Y, "gaussian", temperature=value).temperature == 0.5
    with pytest.raises(InputError, match="temperature is .* and must be a number; got tensor"):
        GeneralizedLinear(X, Y, "gaussian", temperature=torch.tensor(0.5, requires_grad=True))
