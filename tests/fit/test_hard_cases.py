"""Each hard case ends in a verdict, with a finite q, in both dtypes; the answers that are known are right."""

import math

import pytest
import torch

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks.hard_cases import CASES, run  # noqa: E402

QUICK = [name for name, (_, dim) in CASES.items() if dim < 100]
CONVERGE = {"cauchy", "ridge", "raises", "d = 1"}
NEVER = {"half space", "flat", "never finite"}


@pytest.mark.accuracy
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", QUICK)
def test_a_verdict(name, dtype):
    result, q = run(name, dtype)
    assert result.reason.endswith(".")
    assert bool(torch.isfinite(q.mean).all())
    assert bool(torch.isfinite(q.scale_tril).all())
    if name in CONVERGE:
        assert result.converged, result.reason
    if name in NEVER:
        assert not result.converged
    if result.converged:
        assert result.norm <= 0.1
        assert math.isfinite(result.loss)


def test_the_ridge_is_exact():
    _, q = run("ridge", torch.float64)
    torch.testing.assert_close(q.mean, torch.full((2,), 1.5, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(q.stddev, torch.full((2,), 0.5, dtype=torch.float64), rtol=1e-6, atol=0)


def test_one_coordinate():
    """min over (m, s) of e^(m + s²/2) - 2m - log s: e^(m + s²/2) = 2 and s² = ½."""
    _, q = run("d = 1", torch.float64)
    assert float(q.mean) == pytest.approx(math.log(2) - 0.25, abs=0.05)
    assert float(q.stddev) == pytest.approx(0.5**0.5, abs=0.05)


def test_two_modes_end_in_one():
    _, q = run("two modes", torch.float64)
    assert float(q.mean.abs().min()) == pytest.approx(3.0, abs=0.2) or float(q.stddev.min()) > 2
