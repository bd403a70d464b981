"""The studies of Tan (2025) on logistic regressions, made small."""

import itertools
import os
import pathlib

import pytest
import torch
from helpers import DTYPE

from torchngvi import CholeskyGaussian, fit
from torchngvi.interfaces import RootTangent, Tangent
from torchngvi.rules import RootGradient

needs_data = pytest.mark.skipif(
    not (pathlib.Path(os.environ.get("TORCHNGVI_DATA", "")) / "uci" / "icu.tsv.gz").is_file()
    or "TORCHNGVI_DATA" not in os.environ,
    reason="needs the UCI files in $TORCHNGVI_DATA",
)


class TestTheorem3:
    """The bound on E‖g_τ‖² for normalised natural gradients with momentum, corrected; and two counterexamples."""

    @pytest.mark.parametrize(("steps", "beta"), [(50, 0.9), (200, 0.5)])
    def test_the_normaliser_of_tau(self, steps, beta):
        from examples.papers.tan2025.theorem import tau_weights

        weights = tau_weights(steps, beta)
        assert weights.sum() == pytest.approx(steps - beta * (1 - beta**steps) / (1 - beta), rel=1e-12)
        assert weights[-1] == pytest.approx(1 - beta)


class TestExperiments:
    """The studies: coding of the data, the log, what is drawn from it."""

    @pytest.mark.accuracy
    def test_figure_2(self, tmp_path):
        from examples.papers.tan2025 import theorem as tan

        log = tan.run_weights()
        assert len(log) == 10_000
        assert int((log["weight"] <= 0.99).sum()) == 43
        assert bool((log["weight"].iloc[:-43] > 0.99).all())
        tan.draw_weights(log, tmp_path / "fig2")
        assert (tmp_path / "fig2.png").stat().st_size > 5000

    @needs_data
    @pytest.mark.parametrize(
        ("name", "shape", "ones"), [("German", (1000, 49), 300), ("Heart", (270, 19), 120), ("ICU", (200, 20), 40)]
    )
    def test_the_designs(self, name, shape, ones):
        from examples.papers.tan2025 import logistic as tan

        X, y = tan.LOADERS[name]()
        assert X.shape == shape
        assert y.sum() == ones
        assert bool((X[:, 0] == 1).all())
        numeric = {"German": 7, "Heart": 6, "ICU": 3}[name]
        assert abs(X[:, 1 : numeric + 1].mean(0)).max() < 1e-12
        assert X[:, 1 : numeric + 1].std(0, ddof=1) == pytest.approx(1.0)
        assert set(X[:, numeric + 1 :].ravel()) == {0.0, 1.0}
        assert float(torch.linalg.matrix_rank(torch.from_numpy(X))) == shape[1]

    @needs_data
    def test_white_and_awake_are_coded_one(self):
        from examples.papers.tan2025 import logistic as tan

        X, _ = tan.icu()
        assert X[:, 5].sum() == 175  # of 200 white
        assert X[:, -1].sum() == 185  # no coma or stupor

    @needs_data
    def test_the_families_on_the_three_data_sets(self):
        """Full C and full T agree, the diagonal bound is lower, and all are near the printed ones."""
        from examples.papers.tan2025 import logistic as tan
        from examples.papers.tan2025 import runs

        for index, name in enumerate(tan.DATA):
            model, bounds = tan.regression(name), {}
            for family, kind in tan.FAMILIES.items():
                q = kind(model.dim, scale=0.1, dtype=DTYPE)
                bounds[family] = -fit(q, model, progress=False).loss
                printed = tan.PRINTED[family, "Natural Snngm"][index][1]
                assert abs(bounds[family] - printed) <= runs.tolerance(name, family, "Natural Snngm")
            assert bounds["full Σ"] == pytest.approx(bounds["full Ω"], abs=1e-6)
            assert bounds["diagonal Σ"] < bounds["full Σ"] - 3

    @pytest.mark.accuracy
    @needs_data
    def test_a_row_of_table_5(self):
        """ICU, full Σ, Snngm: 6000 iterations and -115.2 are printed."""
        from examples.papers.tan2025 import logistic as tan
        from examples.papers.tan2025 import runs
        from torchngvi.diagnostics import elbo

        model = tan.regression("ICU")
        q = CholeskyGaussian(20, scale=0.1, dtype=DTYPE)
        ended = runs.stochastic(q, model, "Natural Snngm", 0, 100_000)
        assert 4000 <= ended.steps <= 8000
        assert ended.gradients == ended.steps
        estimate = elbo(q, model, 1000, torch.Generator().manual_seed(0))
        assert abs(float(estimate.estimate) + 115.3) <= 0.4
        assert ended.means[-1] == pytest.approx(-115.3, abs=0.5)

    @pytest.mark.accuracy
    @needs_data
    def test_seeds_of_one_row(self, tmp_path):
        """The table has the mean T of the seeds and its range, and no row of the fits that were not asked for."""
        from examples.papers.tan2025 import logistic as tan

        log = tan.run_logistic(("ICU",), 3, 100, families=["diagonal Σ"], optimisers=["Natural Adam"])
        assert set(log["seed"]) == {0, 1, 2}
        log = log.assign(steps=log["seed"].map({0: 12_000, 1: 24_000, 2: 18_000}))
        tan.draw_table(log, tmp_path / "seeds")
        lines = (tmp_path / "seeds.md").read_text(encoding="utf-8").splitlines()
        assert len(lines) == 3
        assert lines[2].startswith("| ICU | diagonal Σ | Natural Adam | 18 (12-24) | 21 |")

    @pytest.mark.accuracy
    @needs_data
    def test_the_log_and_what_is_drawn(self, tmp_path, capsys):
        from examples.papers.tan2025 import logistic as tan
        from examples.papers.tan2025 import runs

        log = tan.run_logistic(data=("ICU",), max_steps=200)
        fits = set(zip(log["family"], log["optimiser"], strict=True))
        assert fits == set(itertools.product(tan.FAMILIES, (*runs.OPTIMISERS, runs.DEFAULT)))
        assert set(log[log["optimiser"] != runs.DEFAULT]["steps"]) == {200}
        table = tan.TABLE_5.comparison(log)
        assert len(table) == 9
        assert not bool(table["T within"].any())
        tan.draw_table(log, tmp_path / "table5")
        text = (tmp_path / "table5.md").read_text(encoding="utf-8")
        assert text in capsys.readouterr().out
        assert "| ICU | full Σ | Natural Snngm | 0.2 | 6 |" in text
        tan.draw_bounds(log, tmp_path / "fig3")
        assert (tmp_path / "fig3.png").stat().st_size > 5000

    def test_the_moves_are_tangents(self):
        assert issubclass(RootTangent, Tangent)
        assert RootGradient.emits is RootTangent
