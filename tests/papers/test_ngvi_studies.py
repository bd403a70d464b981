"""The studies of Wu and Gardner (2024), made small."""

import pandas as pd
import pytest
import torch
from test_ngvi import exact_posterior, logistic

from examples.papers.wu2024 import families, figure_1, figure_2
from torchngvi import GeneralizedLinear, NaturalGaussian
from torchngvi.diagnostics import log_predictive_density
from torchngvi.theory.wu2024 import limiting_variance, rate_bound

F64 = torch.float64


class TestStudies:
    """The runs behind the figures, made small."""

    def test_runs_that_diverge_end_and_are_marked(self):
        model = logistic()
        log = figure_2._logistic(model, "SGD (r)", 10.0, 2, 4, 50, 10)
        assert bool(log["diverged"].all())
        assert log["iteration"].max() < 50
        log = figure_2._logistic(model, "NGD (p)", 0.3, 2, 4, 20, 10)
        assert not log["diverged"].any()
        assert log["objective"].iloc[-1] < log["objective"].iloc[0]
        q = NaturalGaussian(2, (1,), dtype=F64)
        scores = figure_2._scored(q, model, 0)
        assert scores["objective"][0] == pytest.approx(float(model.negative_elbo(q).detach()))
        nlpd = -log_predictive_density(model, q, model.X, model.y).mean()
        assert scores["nlpd"][0] == pytest.approx(float(nlpd), rel=1e-6)

    @pytest.mark.accuracy
    def test_regression_on_bike(self, libsvm_folder, tmp_path, capsys):
        if not (libsvm_folder.parent / "gp_uci" / "bike_data.csv.gz").is_file():
            pytest.skip("needs gp_uci/bike_data.csv.gz in the folder of TORCHNGVI_DATA")
        limits = {}
        for name, (X, y) in figure_1.bike().items():
            model = GeneralizedLinear(X, y, "gaussian")
            star, q = exact_posterior(model), NaturalGaussian(model.dim, dtype=F64)
            eigenvalues = torch.linalg.eigvalsh(star.precision)
            row = figure_1._fit_of(
                NaturalGaussian.from_moments(star.mean[None], star.covariance[None]), model, star, "", 0
            )
            limits[name] = (float(eigenvalues[-1]), float(q.kl(star).detach()), float(row["nlpd"][0]))
            limits[name] += (limiting_variance(model, star, 1000),)
        assert limits["17 features"] == pytest.approx((59179.3, 161693.3, 1.21531, 159.2), rel=1e-5, abs=0.05)
        assert limits["13 features"] == pytest.approx((43229.2, 122117.3, 1.49290, 259.0), rel=1e-5, abs=0.05)
        log = figure_1.run_regression(seeds=2, iterations=12)
        means = log[log["iteration"] == 10].groupby(["version", "method"])["kl"].mean()
        for version in limits:  # NGD is far ahead early
            assert means[version, "NGD"] < 0.02 * means[version, "SGD"]
        figure_1.draw_regression(log, tmp_path / "fig1")
        assert (tmp_path / "fig1.png").stat().st_size > 10_000
        assert "17 features, NGD: KL at 1:" in capsys.readouterr().out
        alone = figure_1.run_regression(seeds=2, iterations=12, versions=["13 features"], methods=["SGD"])
        same = log[(log["version"] == "13 features") & (log["method"] == "SGD")].reset_index(drop=True)
        pd.testing.assert_frame_equal(alone, same)
        figure_1.draw_regression(alone, tmp_path / "slope")
        assert "slope" in capsys.readouterr().out

    @pytest.mark.accuracy
    def test_logistic_on_mushrooms(self, libsvm_folder, tmp_path):
        settings = {"data": ["mushrooms"], "seeds": [1], "iterations": [10], "full_iterations": [10], "points": 4}
        log = figure_2.run_logistic(**settings, ngd=[[0.5]], sgd=[[1e-4]])
        last = log[log["iteration"] == 10].set_index("method")["objective"]
        assert log["objective"].iloc[0] == pytest.approx(15959.6, abs=0.2)
        assert last["NGD (p)"] < 260 < 900 < last["SGD (p)"]
        assert log["optimum"].iloc[0] == pytest.approx(166.58084, abs=1e-3)
        assert bool((log["objective"] > log["optimum"]).all())
        figure_2.draw_logistic(log, tmp_path / "fig2")
        assert (tmp_path / "fig2.png").stat().st_size > 10_000

    def test_standardised_pixels(self, monkeypatch):
        X = torch.tensor([[0.0, 0.2, 1.0], [0.0, 0.4, 0.0]], dtype=torch.float32)
        monkeypatch.setattr(figure_2, "digits", lambda: (X, torch.tensor([0.0, 1.0])))
        standardised, y = figure_2.standardized_digits()
        torch.testing.assert_close(standardised, torch.tensor([[0.0, -1.0, 1.0], [0.0, 1.0, -1.0]]))
        assert y.tolist() == [0.0, 1.0]

    def test_runs_that_end_above_their_start_are_marked(self):
        log = pd.DataFrame(
            {
                "data": "x",
                "method": "m",
                "lr": [1.0] * 4 + [2.0] * 2,
                "iteration": [0, 0, 9, 9, 0, 9],
                "objective": [5.0, 5.0, 4.0, 7.0, 5.0, 3.0],
                "diverged": [False] * 6,
            }
        )
        assert figure_2._judged(log)["diverged"].tolist() == [True] * 4 + [False] * 2

    def test_the_slope(self):
        log = pd.DataFrame({"iteration": [1, 10, 100, 1000], "kl": [5.0, 1.0, 0.1, 0.01]})
        assert figure_1.slope(log, 10, 1000) == pytest.approx(-1)


@pytest.mark.accuracy
def test_the_figure_of_the_theorem(tmp_path, capsys):
    """Made small: the corrected bound holds, the printed one fails at the first step on the Dirichlet law."""
    log = families.run_families(runs=100, iterations=8)
    assert set(log["iteration"]) == set(range(1, 9))
    bound = torch.tensor([rate_bound(V, T - 1) for V, T in zip(log["V"], log["iteration"], strict=True)])
    kl = torch.tensor(log["kl"].to_numpy())
    assert bool((kl < bound).all())
    first = (log["family"] == "Dirichlet, four classes") & (log["iteration"] == 1)
    assert bool((kl > bound / 4)[torch.tensor(first.to_numpy())].all())
    families.draw_families(log, tmp_path / "figure")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert (tmp_path / "figure.svg").is_file()
    assert "over printed" in capsys.readouterr().out
