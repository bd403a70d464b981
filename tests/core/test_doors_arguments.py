"""Hostile arguments at every door: a sentence, and never the traceback of something inside."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from helpers import make_model, make_posterior

import torchngvi
from torchngvi import (
    SRVN,
    VN,
    CholeskyGaussian,
    DataLogJoint,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    Stein,
    certificate,
    examine,
    fit,
    forget,
    laplace,
    prior_by_evidence,
    rules,
)
from torchngvi.errors import InputError, TorchngviError
from torchngvi.expectations import Quasi

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "hostile_arguments.py"
CASES, SEED = 3000, 0


@pytest.mark.parametrize("cases", [300, pytest.param(CASES, marks=pytest.mark.accuracy)])
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


# ------------------------------------------------------------------------------------ rows by themselves

X, Y = torch.eye(3, dtype=torch.float64), torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)


def regression():
    return GeneralizedLinear(X, Y, "gaussian")


def gaussian():
    return CholeskyGaussian(3, dtype=torch.float64)


def log_joint(theta):
    return -0.5 * theta.square().sum(-1)


REFUSED = {
    "device": (lambda: CholeskyGaussian(2, device="gpu"), "got 'gpu' .* Did you mean \"cuda\"?"),
    "meta": (lambda: CholeskyGaussian(2, device="meta"), 'device must hold numbers, and "meta" holds none'),
    "mean": (lambda: CholeskyGaussian(2, mean="x"), "mean must be numbers; got str"),
    "dtype": (lambda: DiagonalGaussian(2, dtype=torch.int32), "dtype must be a floating-point dtype"),
    "temperature": (
        lambda: GeneralizedLinear(X, Y, "gaussian", temperature=None),
        "temperature is .* must be a number; got None.",
    ),
    "temperature of a log joint": (lambda: LogJoint(log_joint, None), "temperature is .* must be a number; got None."),
    "laplace swapped": (
        lambda: laplace(regression(), gaussian()),
        "The arguments are swapped.",
    ),
    "fit swapped": (lambda: fit(regression(), gaussian()), "got GeneralizedLinear first. The arguments are swapped."),
    "certificate swapped": (
        lambda: certificate(regression(), gaussian()),
        "certificate .* are swapped.",
    ),
    "examine swapped": (lambda: examine(regression(), gaussian()), "examine takes .* The arguments are swapped."),
    "evidence swapped": (lambda: prior_by_evidence(regression(), gaussian()), "The arguments are swapped."),
    "a class": (lambda: certificate(CholeskyGaussian, regression()), "certificate takes a posterior; got the class"),
    "forget": (
        lambda: forget(gaussian(), [0]),
        "forget takes .* got CholeskyGaussian first.",
    ),
    "add": (lambda: torchngvi.add(gaussian(), X, Y), "add takes the result of a fit first"),
    "around": (lambda: examine(gaussian(), log_joint, around=float("nan")), "around must be finite"),
    "samples": (lambda: Stein(2**63), "draws must be a number of antithetic draws"),
    "draws": (lambda: gaussian().sample(2**63), "a sample is of a number of draws or of a shape"),
    "seed": (lambda: Quasi(8, seed=2**64), "seed is a seed, a whole number such as 0 of less than 63 bits"),
    "generator": (lambda: gaussian().sample(3, generator=0), "generator is a torch.Generator, such as"),
    "rate": (lambda: VN(gaussian(), torch.ones(2)), r"lr is .* one entry a member, \(\); got shape \(2,\)."),
    "complex rate": (lambda: VN(gaussian(), torch.ones(2, dtype=torch.complex64)), "lr must be real"),
    "functions": (lambda: DataLogJoint(lambda theta: theta, log_joint, [X], 3), "log_likelihood is called with "),
    "progress": (lambda: fit(gaussian(), regression(), progress="no"), "progress is True or False; got 'no'."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(TorchngviError, match=message):
        call()


@pytest.mark.parametrize("tolerance", [float("inf"), float("nan"), -1, 0, "x", None])
def test_tolerance_of_a_prior_by_evidence(tolerance):
    with pytest.raises(InputError, match="^tolerance bounds the change of log τ at the end and must be "):
        prior_by_evidence(gaussian(), regression(), tolerance=tolerance)


def test_a_param_group_of_torch():
    text = (
        'a param group of VN is such as {"posterior": q, "lr": 0.1}; got the keys params. Give other parameters to a '
        "torch optimizer."
    )
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        VN(gaussian(), 0.1).add_param_group({"params": [torch.zeros(2)]})


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
