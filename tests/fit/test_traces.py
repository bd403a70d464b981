"""Eight runs of `fit`, record by record, as they were when their values were written down.

    PYTHONPATH=tests python tests/fit/test_traces.py        writes them again

Counts are compared exactly, losses to rounding, and norms to the digits that rounding at the optimum leaves them.
"""

import json
from pathlib import Path

import pytest
import torch
from helpers import make_model, make_posterior

from torchngvi import SRVN, VN, CholeskyGaussian, DataLogJoint, DiagonalGaussian, Stein, fit

FILE = Path(__file__).with_suffix(".json")


def data_log_joint():
    model = make_model()
    rows = list(zip(model.X.split(5), (2 * model.y - 1).split(5), strict=True))

    def log_likelihood(theta, batch):
        X, y = batch
        return torch.nn.functional.logsigmoid(y * (theta @ X.mT)).sum(-1)

    return DataLogJoint(log_likelihood, lambda theta: -0.25 * theta.square().sum(-1), rows, 20)


def two_modes(theta):
    """A narrow mode at 0 and a wider one, with more evidence, at 1.2."""
    near = -200 * theta.square().sum(-1) - 1
    return torch.logaddexp(near, 1.5 - 50 * (theta - 1.2).square().sum(-1))


def by_draws(target, kind=CholeskyGaussian, **options):
    return fit(kind(3, dtype=torch.float64), target, progress=False, **options)


def with_optimizer(make, target, batch=(), **options):
    q = make_posterior("cholesky", batch)
    return fit(q, target, make(q), progress=False, **options)


RUNS = {
    "model by VN": lambda: with_optimizer(VN, make_model(), tolerance=1e-6),
    "model by SRVN": lambda: with_optimizer(SRVN, make_model(), tolerance=1e-3, max_evaluations=25),
    "draws of Stein": lambda: with_optimizer(
        lambda q: VN(q, lr=0.1, estimator=Stein(32)), make_model().log_joint, tolerance=0.4, max_evaluations=80
    ),
    "pool of draws": lambda: by_draws(make_model().log_joint, tolerance=0.03),
    "growing averages": lambda: by_draws(make_model().log_joint, DiagonalGaussian, tolerance=0.03),
    "another start": lambda: by_draws(two_modes, tolerance=0.01),
    "data in batches": lambda: by_draws(data_log_joint(), tolerance=0.01),
    "batch of posteriors": lambda: with_optimizer(VN, make_model((3,)), (3,), tolerance=1e-6),
}


def run(name):
    torch.manual_seed(5)
    result = RUNS[name]()
    return {
        "trace": [list(record[:-1]) for record in result.trace],
        "loss": result.loss,
        "norm": result.norm,
        "converged": result.converged,
        "members": result.members_converged.tolist(),
    }


@pytest.mark.parametrize("name", RUNS)
def test_the_trace_is_the_same(name):
    expected, got = json.loads(FILE.read_text())[name], run(name)
    assert len(got["trace"]) == len(expected["trace"]) > 2
    for new, old in zip(got["trace"], expected["trace"], strict=True):
        evaluations, loss, norm, step, rejections, gradients = old
        assert (new[0], new[4], new[5]) == (evaluations, rejections, gradients)
        assert new[1] == pytest.approx(loss, rel=1e-10)
        assert new[2] == pytest.approx(norm, rel=1e-6, abs=1e-9)
        assert new[3] == pytest.approx(step, rel=1e-6)
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-10)
    assert got["norm"] == pytest.approx(expected["norm"], rel=1e-6, abs=1e-9)
    assert (got["converged"], got["members"]) == (expected["converged"], expected["members"])


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: run(name) for name in RUNS}, indent=None).replace('}, "', '},\n "') + "\n")
