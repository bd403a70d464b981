"""The benchmark of estimators on posteriordb: its prediction in closed form, its ranks, one posterior of its own."""

import json
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks.posteriordb import estimators  # noqa: E402


@pytest.mark.parametrize(("v", "gap"), [(0.5, 8.0), (3.0, 4.0), (0.0, 2.0)])
def test_a_constant_variance_has_the_closed_form(v, gap):
    """(1 - γ)^2t gap_0 + ½ v γ/(2 - γ) (1 - (1 - γ)^2t), the first t of the best γ."""

    def first(gamma):
        for t in range(1, estimators.LIMIT + 1):
            left = (1 - gamma) ** (2 * t)
            if left * gap + 0.5 * v * gamma / (2 - gamma) * (1 - left) <= estimators.GAP:
                return t
        return estimators.LIMIT + 1

    assert estimators.predicted(v, v, gap) == min(map(first, estimators.STEPS))


def test_more_noise_at_the_start_takes_longer_and_too_much_never_ends():
    assert estimators.predicted(0.1, 0.1, 5.0) < estimators.predicted(0.1, 50.0, 5.0)
    assert estimators.predicted(100.0, 100.0, 5.0) == -1


def test_the_correlation_of_ranks():
    x, y = [3.0, 1.0, 2.0, 2.0, 5.0], [2.0, 2.0, 2.5, 1.0, 7.0]
    assert estimators.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)


@pytest.mark.accuracy
def test_a_gaussian_posterior_and_the_table(monkeypatch, tmp_path):
    """There CFE has v = ½D(D + 3)/S, STL none at the optimum, and the control variate needs one step."""
    monkeypatch.setattr(estimators, "REPEATS", 300)
    precision = torch.tensor([1.0, 4.0], dtype=torch.float64)
    posterior = SimpleNamespace(
        name="Gaussian", dim=2, log_joint=lambda theta: -0.5 * (precision * theta.square()).sum(-1)
    )
    rows = json.loads(json.dumps(estimators.studied(posterior)))
    found = {row["estimator"]: row for row in rows}
    assert found["CFE"]["optimum"] == pytest.approx(5 / 16, rel=0.15)
    assert found["STL"]["optimum"] < 1e-3
    assert found["control v."]["measured"] == found["control v."]["predicted"] == 1
    assert "| Gaussian | 2 |" in estimators.table(rows)
    estimators.drawn(rows, tmp_path / "figure")
    assert (tmp_path / "figure.svg").exists()
