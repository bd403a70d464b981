"""Settings in which GPyTorch's natural gradients raise or diverge: ours end at the optimum, or say what they refused.

The rows are those of benchmarks/svgp_failures.py, at a smaller size.
"""

import runpy
import warnings
from pathlib import Path

import pytest
import torch

gpytorch = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

from torchngvi.errors import RejectedStepWarning  # noqa: E402

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "svgp_failures.py"))
ROWS, THEIRS = BENCHMARK["ROWS"], BENCHMARK["METHODS"]["NGD"]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# gap to the float64 optimum per datum, relative to the objective where that is larger than 1
CLOSE = {"float32": 2e-3, "float64": 1e-5}
REFUSED = 1e-2  # where steps were refused, and that was said
SIZE = (150, 40)  # rows and steps


def outcome_of(method, name, dtype):
    """How it ended, and whether a refusal was reported."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = BENCHMARK[method](ROWS[name], DTYPES[dtype], *SIZE)
    reported = any(issubclass(warning.category, RejectedStepWarning) for warning in said)
    return outcome, reported


def relative(outcome):
    return outcome.gap / max(1.0, abs(outcome.objective))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
class TestRows:
    @pytest.mark.accuracy
    def test_drop_in(self, name, dtype):
        outcome, reported = outcome_of("drop_in", name, dtype)
        assert outcome.error == ""
        assert reported == (outcome.rejections > 0)
        assert relative(outcome) < (REFUSED if outcome.rejections else CLOSE[dtype])

    @pytest.mark.sparse(3)
    def test_train_svgp(self, name, dtype):
        if ROWS[name].objective != "VariationalELBO":
            pytest.skip("train_svgp has the evidence lower bound only")
        outcome, reported = outcome_of("direct", name, dtype)
        assert reported == (outcome.rejections > 0)
        assert relative(outcome) < CLOSE[dtype]


def test_the_rows_are_hard():
    """GPyTorch's own raises in one of them, so that they show something."""
    name = "Gaussian, noise 1e-6, lr 0.1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert THEIRS(ROWS[name], torch.float32, *SIZE).error.startswith("NotPSDError")
