"""The runs and the studies of Kim, Ma and Gardner (2024), made small."""

import pandas as pd
import pytest
import torch
from helpers import IDENTITY, close, randn
from test_bbvi import eye, fixed, random_target
from torch.optim.lr_scheduler import LambdaLR

from examples.papers.kim2024.complexity import draw_complexity, run_complexity
from examples.papers.kim2024.floor import correlated, draw_floor, predicted_floor, run_floor
from examples.papers.kim2024.quadratic_variance import draw_qv, run_qv
from examples.papers.kim2024.rate import decay, draw_rate, run_rate
from examples.papers.kim2024.runs import CLOSED, LANDING, Runs, noisy, optimum, reference_target, start
from torchngvi import CholeskyGaussian, LogJoint, NaturalGradientVI
from torchngvi.expectations import PathDerivative, Reparametrized
from torchngvi.methods import ProximalBBVI
from torchngvi.rules import ProjectedSquareRoot
from torchngvi.stepsizes import Constant
from torchngvi.theory.kim2024 import (
    Gaussian,
    GaussianTarget,
    MeanField,
    Triangular,
    Unrestricted,
    closed_entropy_variance,
    landing_variance,
)

F64 = torch.float64


class TestConvergence:
    """3.3: the reference run, with larger steps than that of the theorem to keep it short."""

    @pytest.mark.accuracy
    def test_the_rate_is_linear(self):
        target, gamma = reference_target(), 32 * 9.765625e-4
        batch = Runs(target, start(target, 30), noisy(LANDING), gamma, 4.0)
        assert float(batch.distances2()[0]) == pytest.approx(5.8659, abs=5e-5)
        trace = []
        for step in range(0, 601, 50):
            trace.append({"iteration": step, "distance2": float(batch.distances2().mean())})
            batch.advance(50)
        assert trace[-1]["distance2"] < 1e-16
        assert decay(pd.DataFrame(trace)) >= gamma
        assert batch.opt.rejections == 0

    def test_mean_field_too(self):
        target = GaussianTarget(randn(4, seed=0), torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)))
        step = landing_variance(4.0, 4, 0.0, mean_field=True).fixed_step(1.0, 1e-6)
        assert step == pytest.approx(1 / (8 * 16 * 13))
        batch = Runs(target, start(target, 20, mean_field=True), noisy(LANDING), 32 * step, 4.0)
        batch.advance(500)
        assert float(batch.distances2().max()) < 1e-5

    @pytest.mark.accuracy
    def test_the_symmetric_root_too(self):
        # z = m + Cu with C the triangle of the same V: nothing is left at the optimum, and the floor binds on the way
        target, runs = reference_target(), 20
        q = CholeskyGaussian(5, (runs,), scale=4.0, dtype=F64)
        opt = NaturalGradientVI(
            q, ProjectedSquareRoot(0.5), 32 * 9.765625e-4, estimator=PathDerivative(fixed(0)), step_size=Constant()
        )
        trace, lowest = [], 1.0
        for step in range(0, 601, 50):
            shift, V = q.mean - target.mean, q.covariance
            wrong = (V @ target.precision - eye(5)).square().sum((-2, -1))
            trace.append({"iteration": step, "distance2": float((shift.square().sum(-1) + wrong).mean())})
            for _ in range(50):
                opt.step(LogJoint(target.log_joint))
                lowest = min(lowest, float(torch.linalg.eigvalsh(q.covariance)[:, 0].min()))
        assert lowest == pytest.approx(0.25, rel=1e-9)
        assert trace[-1]["distance2"] < 1e-14
        assert decay(pd.DataFrame(trace)) >= 32 * 9.765625e-4
        assert opt.rejections == 0

    @pytest.mark.accuracy
    def test_the_closed_entropy_has_a_floor(self):
        # ∝ γ and ∝ 1/M: 0.18 at 16 γ₁, 0.45 at 32 γ₁
        target, first, found = reference_target(), 9.765625e-4, {}
        for factor, draws in ((16, 1), (32, 1), (16, 4)):
            batch = Runs(target, start(target, 400), noisy(CLOSED, draws), factor * first, 4.0)
            batch.advance(round(4000 / factor))
            found[factor, draws] = float(batch.distances2().mean())
        assert found[16, 1] == pytest.approx(0.18, rel=0.15)
        assert found[32, 1] == pytest.approx(0.45, rel=0.15)
        assert 3 < found[16, 1] / found[16, 4] < 5.5

    def test_a_decreasing_step(self):
        target = correlated(0.3)
        target = GaussianTarget(target.mean, target.precision)
        C, L = optimum(target), 1 / 0.7
        variance = closed_entropy_variance(L, 2, float(C.square().sum())).at(0.5)
        batch = Runs(target, start(target, 100), noisy(CLOSED), 1.0, L)
        scheduler = LambdaLR(batch.opt, lambda t: variance.two_stage_step(1 / 1.3, t))
        delta2, mu = float(batch.distances2()[0]), 1 / 1.3
        for T in range(1, 301):
            batch.advance(1)
            scheduler.step()
            if T % 50 == 0:
                assert float(batch.distances2().mean()) <= variance.two_stage_bound(mu, T, delta2)

    @pytest.mark.accuracy
    def test_the_proximal_method_finds_the_same_optimum(self):
        target = random_target(2, 7)
        q = CholeskyGaussian(2, (200,), dtype=F64)
        opt = ProximalBBVI(q, lr=1.0, estimator=Reparametrized(fixed(0)), step_size=Constant())
        scheduler = LambdaLR(opt, lambda t: 0.1 / (1 + t / 20))
        for _ in range(400):
            opt.step(LogJoint(target.log_joint))
            scheduler.step()
        star = optimum(target)
        distance2 = (q.mean - target.mean).square().sum(-1) + (q.scale_tril - star).square().sum((-2, -1))
        assert float(distance2.mean()) < 0.03
        assert opt.rejections == 0


class TestMisspecification:
    """3.4: a Gaussian target and mean field."""

    def test_the_optimum(self):
        # P17: C* = diag(Λ)^-½, in print diag(Σ)^½
        target = random_target(4, 7)
        m, C = target.mean_field_optimum()
        gradient = target.gradient(MeanField(), m, C)
        assert float(gradient.square()) < 1e-24
        printed = torch.diag(torch.linalg.inv(target.precision).diagonal().sqrt())
        assert float(target.gradient(MeanField(), m, printed).square()) > 1e-3
        off = target.precision - torch.diag(target.precision.diagonal())
        expected = (off.square() / target.precision.diagonal()).sum()
        close(target.fisher_hyvarinen(m, C), expected, IDENTITY)
        D = target.precision.diagonal()
        partial = target.precision / (D[:, None] * D).sqrt() - eye(4)
        assert float(D.min() * partial.square().sum()) <= float(expected) <= float(D.max() * partial.square().sum())

    @pytest.mark.parametrize("rho", [0.3, 0.9, 0.99])
    def test_two_variables(self, rho):
        target = correlated(rho)
        found = float(target.fisher_hyvarinen(*target.mean_field_optimum()))
        assert found == pytest.approx(2 * rho**2 / (1 - rho**2))
        assert found != pytest.approx(2 * (rho**2 + rho**4) / (1 - rho**2) ** 2, rel=0.05)  # as printed
        if rho == 0.9:
            assert found == pytest.approx(8.526, abs=5e-4)

    def test_sticking_the_landing_is_better_at_the_optimum(self):
        target = random_target(4, 7)
        m, C = target.mean_field_optimum()
        landing, closed = (f(MeanField(), m, C) for f in (target.landing_moment, target.closed_entropy_moment))
        fisher = target.fisher_hyvarinen(m, C)
        close(landing, 2 * fisher, IDENTITY)
        close(closed, 2 * fisher + 3 * target.precision.diagonal().sum(), IDENTITY)
        # Remark 12: V₃ ≤ (d + k) D_F for Gaussian targets
        residuals = target.residuals(m, C)
        third = 7 * residuals.G.square().sum() + 5 * residuals.h.square().sum()
        assert float(third) <= float(7 * fisher) * (1 + 1e-12)

    def test_a_smaller_second_moment_is_no_lower_floor(self):
        # E|g|² at λ* is smaller for sticking the landing at every ρ; the floor ½ tr(H⁻¹ Cov g) is not
        for rho, better in ((0.6, True), (0.816, True), (0.817, False), (0.9, False)):  # equal at √⅔
            target = correlated(rho)
            m, C = target.mean_field_optimum()
            assert target.landing_moment(MeanField(), m, C) < target.closed_entropy_moment(MeanField(), m, C)
            landing, closed = (predicted_floor(target, name) for name in (LANDING, CLOSED))
            assert (landing < closed) is better

    @pytest.mark.parametrize(
        ("dof", "scale", "closed", "landing"),
        [(0.3, 2.522, 0.5691, 0.6469), (1.0, 1.634, 0.7657, 0.6718), (4.0, 1.2034, 1.3990, 0.3801)],
    )
    def test_heavy_tails(self, dof, scale, closed, landing):
        # one-dimensional Student t: not log-concave, and at ν = 0.3 sticking the landing loses
        u = torch.linspace(-12, 12, 200_001, dtype=F64)
        weights = torch.exp(-0.5 * u**2) / torch.exp(-0.5 * u**2).sum()
        low, high = 0.5, 5.0
        for _ in range(80):
            c = 0.5 * (low + high)
            z = c * u
            slope = float((weights * c * u * (dof + 1) * z / (dof + z**2)).sum())
            low, high = (low, c) if slope > 1 else (c, high)
        assert c == pytest.approx(scale, abs=6e-4)
        a, C = ((dof + 1) * c * u / (dof + (c * u) ** 2))[:, None], c * eye(1)
        found = {
            "closed": Triangular().closed_entropy(C, a, u[:, None]),
            "landing": Triangular().landing(C, a, u[:, None], Gaussian()),
        }
        values = {name: float((weights * gradient.square()).sum()) for name, gradient in found.items()}
        assert values == pytest.approx({"closed": closed, "landing": landing}, abs=5e-5)
        # the difference, for any target at a stationary point: C⁻² + 2 E f'' u²
        bend = (dof + 1) * (dof - (c * u) ** 2) / (dof + (c * u) ** 2) ** 2
        expected = c**-2 + 2 * float((weights * bend * u**2).sum())
        assert values["closed"] - values["landing"] == pytest.approx(expected, abs=1e-8)

    def test_the_difference_in_full_rank(self):
        # 2 E[tr ∇²f |u|²] - (d - 2)‖C⁻¹‖² where every entry of C is free
        target, d = random_target(4, 7), 4
        C = optimum(target)
        landing, closed = (f(Unrestricted(), target.mean, C) for f in (target.landing_moment, target.closed_entropy_moment))  # fmt: skip  # noqa: E501
        expected = 2 * d * target.precision.trace() - (d - 2) * torch.linalg.inv(C).square().sum()
        close(closed - landing, expected, IDENTITY)

    @pytest.mark.accuracy
    @pytest.mark.parametrize("method", [LANDING, CLOSED])
    def test_the_floor_is_proportional_to_the_step(self, method):
        target = correlated(0.7)
        found = []
        for gamma in (0.008, 0.016):
            batch = Runs(target, start(target, 2000, mean_field=True, at_optimum=True), noisy(method), gamma, 1 / 0.3)
            batch.advance(round(1.5 / gamma))
            found.append(batch.distances2().mean() / gamma)
        assert float(found[0]) == pytest.approx(predicted_floor(target, method), rel=0.08)
        assert float(found[1]) == pytest.approx(float(found[0]), rel=0.12)


class TestStudies:
    """The runs behind the figures, made small."""

    @pytest.mark.accuracy
    def test_rate(self, tmp_path, capsys):
        log = run_rate(runs=2, factors=(32, 64), draws=(4,), points=8)
        draw_rate(log, tmp_path / "rate")
        out = capsys.readouterr().out
        assert "Δ² = 5.8659, step of the theorem 9.7656e-04, T = 16669" in out
        assert "floor of CFE at 64 γ₁, 4 draws" in out
        last = log[log["iteration"] > 200].groupby("method")["distance2"].max()
        assert last["STL"] < 1e-3 < 0.1 < last["CFE"]

    @pytest.mark.accuracy
    def test_qv(self, tmp_path, capsys):
        log = run_qv(points=20)
        draw_qv(log, tmp_path / "qv")
        near = log[log["distance2"] < 1e-2]
        assert bool((near["moment"] <= near["bound"]).all())
        assert bool((log[log["method"] == "STL"]["fisher"] <= log[log["method"] == "STL"]["moment"]).all())
        assert "triangular, holds the target, STL: E|g|²/bound at most" in capsys.readouterr().out

    @pytest.mark.accuracy
    def test_floor(self, tmp_path, capsys):
        log = run_floor(correlations=(0.3, 0.6), runs=50, share=0.1)
        draw_floor(log, tmp_path / "floor")
        assert bool(((log["floor"] / log["gamma"] / log["predicted"]).between(0.6, 1.6)).all())
        assert "slope of log(floor/γ) of STL on log D_F" in capsys.readouterr().out

    @pytest.mark.accuracy
    def test_complexity(self, tmp_path, capsys):
        small = {"dims": (1, 2), "kappas": (1, 2), "inverse_eps": (10, 100), "inverse_eps_closed": (4, 8)}
        log = run_complexity(**small, eps=0.1, runs=4)
        draw_complexity(log, tmp_path / "complexity")
        assert bool((log["end"] <= log["eps"]).all())  # before the count that is proved, where a run ends anyway
        assert bool((log["steps"] <= log["proved"]).all())
        assert bool((log["first"] <= log["steps"]).all())  # groups of the runs, about the mean of all
        assert bool((log["steps"] <= log["last"]).all())
        assert "CFE against 1/ε: log-log slope" in capsys.readouterr().out
        assert (tmp_path / "complexity.png").stat().st_size > 10_000
        draw_complexity(log[log["method"] == CLOSED], tmp_path / "accuracy")  # the panel that was run, alone
        assert (tmp_path / "accuracy.png").stat().st_size > 5_000
        said = capsys.readouterr().out
        assert said.startswith("CFE against 1/ε")
        assert said.count("from one 1/ε to the next: measured, proved") == 1
